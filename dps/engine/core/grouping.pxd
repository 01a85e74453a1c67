from libc.stdint cimport int32_t, int64_t

from dps.engine.core.shard_map cimport ShardMap


cdef int64_t survey_keys(const int64_t *keys, int64_t count, ShardMap shard_map, int64_t *starts) noexcept nogil
cdef bint scatter_keys(
    const int64_t *keys,
    const int64_t *cells,
    int64_t first,
    int64_t end,
    ShardMap shard_map,
    const int64_t *starts,
    int32_t *order,
    int64_t *grouped,
) noexcept nogil
cdef int64_t number_part(
    const int64_t *keys, int64_t first, int64_t end, int32_t *target, int64_t distinct
) noexcept nogil
cdef bint add_rows(
    int kind,
    const void *updates,
    const int32_t *order,
    const int32_t *target,
    int64_t count,
    int64_t dim,
    int64_t distinct,
    void *out,
) noexcept nogil
