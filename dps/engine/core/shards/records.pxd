from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from dps.engine.core.shards.states cimport ShardState


cdef extern from "records.h" nogil:
    const uint32_t DPS_MOMENTS

    ctypedef struct dps_use:
        char *rows
        int64_t stride, at
        uint32_t version, moment
        const uint32_t *chances
        const uint8_t *halves

    uint64_t dps_record(const char *rows, int64_t stride, int64_t at, int64_t row)
    uint32_t dps_moment_of(uint64_t record)
    uint8_t dps_count_at(uint64_t record, uint32_t moment, const uint8_t *halves)
    void dps_use_rows(const dps_use *use, const int64_t *keys, const int64_t *index, int64_t count)


cdef int note_pulled(ShardState shard, const int64_t *index, int64_t count) except -1
cdef int use_rows(ShardState shard, char *rows, const int64_t *keys, const int64_t *index, int64_t count) except -1
