from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from "frame.h" nogil:
    ctypedef struct dps_header:
        uint16_t magic
        uint8_t kind, flags
        uint32_t request, table, epoch, trainer, number
        int64_t clock
        uint16_t shard, shards
        int32_t rows
        int64_t start
        uint32_t count
        uint16_t parties, attempt
        uint64_t body
