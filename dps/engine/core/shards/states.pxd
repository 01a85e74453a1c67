cimport numpy as cnp
from libc.stdint cimport int64_t

from dps.engine.core.shard_map cimport ShardMap
from dps.engine.core.shards.counters cimport TableCounters
from dps.engine.core.shards.index cimport KeyIndex
from dps.engine.core.shards.initializers cimport RowStart
from dps.engine.core.shards.ledger cimport Ledger
from dps.engine.core.shards.optimizers cimport Kernel


cdef class Lead:
    cdef public int64_t clock, origin
    cpdef void note(self, int64_t clock, int64_t origin) noexcept
    cpdef int64_t lag(self, int64_t clock) noexcept


cdef class CutState:
    cdef public int64_t before, latest, copies, existing, given, stop
    cdef public bint is_complete, has_changes
    cdef public Ledger ledger
    cdef public Lead lead
    cdef public cnp.ndarray place, saved


cdef class ShardState:
    cdef public cnp.ndarray rows  # [capacity, dim + slots]
    cdef public cnp.ndarray changed, vacant, pulled, dirty
    cdef public KeyIndex index
    cdef public Ledger ledger
    cdef public RowStart row_start
    cdef public object kernel  # a Kernel, or code of the user
    cdef public int64_t number, low, dim, clock, version, vacancies
    cdef public object sums
    cdef public CutState cut
    cdef public Lead lead
    cdef public dict numbers
    cdef public int64_t record_at, most_rows, spilled, uses
    cdef public int64_t moment_at_base, base_version, ops_of_moment
    cdef public bint admits, thrifty
    cdef int64_t moment(self) noexcept


cdef class SumsState:
    cdef public int64_t clock, parties, rows, plain_rows
    cdef public ShardState shard
    cdef public cnp.ndarray sums, touched
    cdef bint is_large(self)


cdef class ReplicaState:
    cdef public object shard, successor, tail, feed, hold
    cdef public ShardState so_far
    cdef public bint primary, joining, stepping_down, deposed, learning
    cdef public int64_t number, fence
    cdef bint takes_requests(self)


cdef class TableState:
    cdef readonly dict replicas
    cdef readonly TableCounters meter
    cdef readonly bint plain, replicated, waits, finite, aggregated
    cdef readonly int64_t dim, shards, rows, row_bytes
    cdef readonly int pulled, pushed
    cdef readonly ShardMap shard_map
    cdef int kind
    cdef Kernel kernel
    cdef RowStart row_start
