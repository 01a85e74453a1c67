"""What the compiled step of a server reads and changes of tables, replicas and shards.

The classes of Python that know everything else of them (`ServerTable`, `Replica`, `Shard`) are derived from these. So
there is one state, whichever way a request goes.
"""

from libc.stdint cimport int64_t

cimport numpy as cnp

from dps.engine.core.numbers cimport bytes_of
from dps.engine.core.shard_map cimport ShardMap

cnp.import_array()

# Sums by row are stepped faster than sums by key, which have to be found: so many values in the time of one key.
VALUES_PER_ROW = 32
cdef int64_t values_per_row = VALUES_PER_ROW
cdef enum:
    moments = 0xFFFFFF  # as in records.h
    NO_CLOCK = -1


cdef class Lead:
    """The latest clock of a push to a shard, and the origin of that push; ops of one trainer come from one origin.

    Only a shard whose optimizer asks how far a push lags behind has one, and no shard of a table that aggregates,
    because that makes one step for all pushes of a clock. The clocks of the next run begin at 0, so the lead ends with
    its origin.

    Examples
    --------
    >>> lead = Lead()
    >>> lead.note(7, 3)
    >>> lead.note(4, 5)
    >>> lead.lag(4), lead.lag(7), lead.lag(-1)
    (3, 0, 0)
    >>> lead.retire(3, 1)
    >>> lead.lag(4)
    0
    """

    def __init__(self):
        self.clock, self.origin = NO_CLOCK, 0

    cpdef void note(self, int64_t clock, int64_t origin) noexcept:
        """A push of that clock and origin has come."""
        if clock > self.clock:
            self.clock, self.origin = clock, origin

    cpdef int64_t lag(self, int64_t clock) noexcept:
        """How many clocks a push of that clock is behind; a push without a clock is not."""
        return self.clock - clock if NO_CLOCK < clock < self.clock else 0

    def retire(self, int64_t first, int64_t count):
        """The origins first, first + 1, ... make no more pushes."""
        if first <= self.origin < first + count:
            self.clock, self.origin = NO_CLOCK, 0

    def copy(self):
        """A lead of its own, which is the same now."""
        cdef Lead made = Lead()
        made.clock, made.origin = self.clock, self.origin
        return made


cdef class CutState:
    """What ops read and change of the cut of their shard: see :mod:`dps.engine.core.shards.cuts`.

    Attributes
    ----------
    is_complete : bool
        No op that arrives now is in the cut.
    before : int
        Until then, ops of earlier clocks are.
    latest : int
        The latest clock of an op in the cut.
    has_changes : bool
        An op outside the cut has changed the shard, so that the cut's rows may differ from the shard's.
    ledger : Ledger
        The last op in the cut of each origin.
    lead : Lead or None
        The latest push in the cut, where the shard has one, too.
    place : ndarray of int32
        Of each row: 0, the cut's row is the shard's; n > 0, it is saved as number n - 1; -1, it is absent.
    saved : ndarray
        [capacity, dim + slots].
    copies : int
        How many rows are saved.
    existing : int
        Rows that the shard had before its next op.
    given, stop : int
        The first row that the cut has not given yet, and the first one that it does not give.
    """


cdef class ShardState:
    """One shard's rows, and what has been applied to them.

    Attributes
    ----------
    number, low : int
        The shard's number; the number of its first row, which is 0 where rows have keys.
    rows : numpy.ndarray
        [capacity, dim + slots].
    index : KeyIndex or None
        From a key to its row; None where rows are numbered.
    ledger : Ledger
    clock, version : int
        The latest clock stamped on an op; how many changes there have been.
    sums : object
        Of the open clock, or None.
    cut : CutState or None
        The cut that is being read.
    lead : Lead or None
        The latest push, where the optimizer asks how far a push lags behind it.
    changed : numpy.ndarray or None
        A byte of flags for each row, if changes are tracked.
    vacant : numpy.ndarray or None
        A byte for each row, once a row was deleted: 1, no key of the table has it. Either it is free in the index, or
        the index still has the key of the deleted row, whose columns have their initial values.
    vacancies : int
        How many rows are vacant.
    pulled : numpy.ndarray or None
        A byte for each row, where pulls are uses: 1, it was pulled since the hand of `state/forgetting.py` came by.
    dirty : numpy.ndarray or None
        A byte for each row, while rows are copied and ops go on: 1, the row has changed since it was copied. See
        `state/precopy.py`.
    dim : int
        Columns of values in a row.
    row_start : RowStart
        What a new row holds.
    kernel : Kernel or callable
        What a push runs: ``kernel(rows, index, start, updates, numbers)``.
    numbers : dict
        From a clock, or a clock and a lag, to the optimizer's numbers of such a push, as far as they are known.
    record_at : int
        The column at which the record of a row begins; 0: rows have none. See `records.pyx`.
    most_rows : int
        How many rows the shard may have in memory; 0: as many as there are keys.
    spilled : int
        How many other rows it has in a file: see `state/spill.py`.
    uses : int
        How many rows ops have used. The primary begins to count anew with each AGE.
    moment_at_base, base_version, ops_of_moment : int
        The moment at the version `base_version`, and how many ops a moment lasts from there on.
    admits : bool
        A push makes a row that is not there only where it is admitted: see `state/admission.py`.
    thrifty : bool
        Ops take no memory beyond that of their new rows, because the server has little left: they count these first.
    """

    cdef int64_t moment(self) noexcept:
        """The moment of the op that gave the shard its version."""
        if self.ops_of_moment <= 0:
            return self.moment_at_base & moments
        return (self.moment_at_base + (self.version - self.base_version) // self.ops_of_moment) & moments


cdef class SumsState:
    """The pushes of one clock, summed row by row.

    Attributes
    ----------
    clock, parties : int
        The clock; trainers of the run.
    rows : int
        Rows of data for which the pushes stand; -1: the pushes do not say.
    shard : ShardState or None
        Sums by key.
    sums, touched : numpy.ndarray or None
        Sums by row, and which rows have one.
    plain_rows : int
        With more rows of sums, the compiled step does not close the clock, because that would take too long.
    """

    cdef bint is_large(self):
        """Whether the clock may be one that the compiled step does not close."""
        if self.shard is not None:
            return self.shard.index.count > self.plain_rows
        return self.sums.shape[0] * self.sums.shape[1] > values_per_row * self.plain_rows


cdef class ReplicaState:
    """The place of a replica in its shard's chain.

    Attributes
    ----------
    number : int
        Of the shard.
    shard : object
        Its rows: a ShardState, unless a dump is still bringing them.
    so_far : ShardState or None
        While a dump is bringing them: those that are here.
    successor : int or None
        Number of the next server in the chain.
    tail : Forward or None
        The last op that was passed on to it.
    feed : object
        Of a successor that joins: what brings it the rows.
    hold : object
        Of a function that reads or changes the rows, for as long as requests have to wait for it; None: none does.
    primary, joining, stepping_down, deposed : bool
        It is the first of the chain; a dump is still bringing its rows; it takes no more requests, so that another
        replica may become the primary; another replica has become the primary.
    learning : bool
        Its successor is a joiner that has not been sent the end of the dump, so no answer waits for that server.
    fence : int
        It refuses ops of earlier epochs, because their sender was replaced.
    """

    @property
    def serves(self) -> bool:
        """Whether it takes requests: it is the primary, is not about to hand over, and was not replaced."""
        return self.takes_requests()

    cdef bint takes_requests(self):
        return self.primary and not (self.stepping_down or self.deposed)


cdef class TableState:
    """A table of a server.

    Parameters
    ----------
    dtype : int
        numpy's number of the dtype.
    dim : int
        Values of a row.
    shard_map : ShardMap
        Of its rows, or keys; primaries of a table with ``partition=`` check that keys are their own.
    finite, aggregated, replicated, waits : bool
        It refuses NaN and infinity; it sums the pushes of a clock; it has several copies; a push is acknowledged when
        all copies have it.
    kernel : object
        What a push runs. The compiled step takes a :class:`dps.engine.core.shards.optimizers.Kernel` only.
    row_start : RowStart
        What a key without a row reads as.
    meter : TableCounters
    pulled, pushed : int, optional
        How the rows of narrow pulls and pushes travel: see `codec.pyx`. 0: as they are.

    Attributes
    ----------
    replicas : dict
        From the number of a shard to this server's replica of it.
    plain : bool
        The compiled step knows how to change its rows; it reads those of any table.
    row_bytes : int
        Bytes of the values of a row.
    """

    def __init__(
        self,
        int dtype,
        int64_t dim,
        ShardMap shard_map not None,
        bint finite,
        bint aggregated,
        bint replicated,
        bint waits,
        kernel,
        RowStart row_start not None,
        TableCounters meter not None,
        int pulled=0,
        int pushed=0,
    ):
        self.replicas, self.meter = {}, meter
        self.pulled, self.pushed = pulled, pushed
        self.kind, self.dim = dtype, dim
        self.shard_map, self.rows, self.shards = shard_map, shard_map.rows, shard_map.shards
        self.finite, self.aggregated, self.replicated, self.waits = finite, aggregated, replicated, waits
        self.row_bytes = dim * bytes_of(dtype)
        self.row_start = row_start
        self.plain = isinstance(kernel, Kernel) and (<Kernel> kernel).works_on(dtype)
        self.kernel = kernel if self.plain else None
