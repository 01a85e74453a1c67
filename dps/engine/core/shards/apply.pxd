from libc.stdint cimport int64_t

from dps.engine.core.shards.states cimport ShardState


cdef enum:  # the rules of an op on rows, as in dps/engine/state/ops.py
    OP_PUSH = 0
    OP_ADD = 1
    OP_ASSIGN = 2
    OP_ROWS = 3
    OP_DELETE = 4


cdef struct RowsOp:  # an op on rows, as it lies in a frame, or in the arrays of an `Op`
    int rule
    int64_t clock, parties, rows
    int64_t lag  # clocks by which a push is behind the latest one; 0 where the optimizer does not ask
    const int64_t *keys  # NULL: the rows from `start` on
    int64_t start, count
    const void *values  # [count, dim]; no columns where rows go
    const void *after  # [count, dim + slots]: the rows as they are to be; NULL where the rule says how they come about


cdef bint is_summed(bint aggregated, const RowsOp *op) noexcept
cdef int sum_rows(ShardState shard, const RowsOp *op, int64_t *index) except -1
cdef int step_rows(ShardState shard, const RowsOp *op, int64_t *index, object whole) except -1
cdef int step_known_rows(
    ShardState shard, const RowsOp *op, int64_t *index, char *known, int64_t row_bytes
) except -1
