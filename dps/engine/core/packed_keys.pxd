"""Keys as they travel in fewer than 8 bytes: see packed_keys.h."""

from libc.stdint cimport int64_t, uint8_t

cdef extern from "packed_keys.h" nogil:
    int64_t dps_packed_bytes(const int64_t *keys, int64_t count)
    uint8_t *dps_pack_keys(const int64_t *keys, int64_t count, uint8_t *out)
    int64_t dps_bytes_packed(const uint8_t *packed, int64_t length, int64_t count)
    void dps_unpack_keys(const uint8_t *packed, int64_t count, int64_t *keys)


cdef inline int64_t whole_words(int64_t nbytes) noexcept nogil:
    """Bytes, rounded up to whole words."""
    return (nbytes + 7) & ~7


cdef inline bint are_packed(const uint8_t *packed, int64_t nbytes, int64_t count) noexcept nogil:
    """Whether these bytes are just so many packed keys."""
    cdef int64_t used = dps_bytes_packed(packed, nbytes, count)
    return used >= 0 and whole_words(used) == nbytes


cdef void pack_keys(const int64_t *keys, int64_t count, char *out) noexcept nogil
