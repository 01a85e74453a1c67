from libc.stdint cimport int64_t, uint32_t

cimport numpy as cnp

from dps.engine.core.shard_map cimport ShardMap


cdef class Form:
    cdef uint32_t table
    cdef int kind, count
    cdef int64_t dim, rows, shards, row_bytes
    cdef bint finite
    cdef readonly ShardMap shard_map
    cdef int64_t *edges  # first shard and end, run after run
    cdef int *codecs  # each run has two: that of rows that are pulled, and that of rows that are pushed
    cdef bint *lists  # whether lists of keys are named by numbers, run after run


cdef bint fits(Form form, cnp.ndarray keys, int64_t count, cnp.ndarray rows, bint exactly, int flags)
cdef bint is_finite(Form form, cnp.ndarray rows)
cdef cnp.ndarray new_rows(Form form, cnp.ndarray keys, int64_t count)
