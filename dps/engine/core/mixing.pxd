from libc.stdint cimport int64_t, uint64_t


cdef extern from "mixing.h" nogil:
    uint64_t dps_mix(uint64_t key)
    void dps_hash_keys(const int64_t *keys, int64_t count, uint64_t *hashes)
