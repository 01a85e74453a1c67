"""Rows of float32 as they travel: see codec.h."""

from libc.stdint cimport int32_t, int64_t, uint64_t

from dps.engine.core.mixing cimport dps_mix


cdef enum:  # how rows travel
    AS_IS = 0
    AS_FLOAT16 = 1
    AS_BFLOAT16 = 2
    AS_INT8 = 3


cdef inline int64_t coded_bytes(int codec, int64_t dim, int64_t row_bytes) noexcept nogil:
    """The bytes of a row as it travels; `row_bytes` are those of the row itself."""
    return row_bytes if codec == AS_IS else dim + 4 if codec == AS_INT8 else 2 * dim


cdef inline uint64_t seed_of(uint64_t origin, int64_t clock, uint64_t number) noexcept nogil:
    """From what the rounding of an op's rows is drawn; the same if it is sent again."""
    return dps_mix(origin << 32 ^ number ^ dps_mix(<uint64_t> clock)) | 1


cdef void encode_rows(
    int codec,
    const char *rows,
    int64_t count,
    int64_t dim,
    const int64_t *keys,
    int64_t first,
    uint64_t seed,
    char *out,
) noexcept nogil
cdef void decode_rows(int codec, const char *coded, int64_t count, int64_t dim, char *out) noexcept nogil
cdef void place_rows(
    int codec,
    const char *coded,
    int64_t count,
    int64_t dim,
    int64_t row_bytes,
    const int32_t *order,
    int64_t a,
    char *room,
) noexcept nogil
