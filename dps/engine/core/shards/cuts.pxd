from libc.stdint cimport int32_t, int64_t, uint8_t

from dps.engine.core.shards.states cimport CutState, ShardState

cdef bint may_follow(ShardState shard, int64_t clock, bint is_step) noexcept
cdef bint has_room(ShardState shard, int64_t count) noexcept
cdef bint save_rows(
    ShardState shard, const int64_t *index, int64_t start, int64_t count, int64_t clock, bint is_step
) except -1
cdef int fill_vacancies(ShardState shard, const int64_t *index, int64_t count) except -1
cdef int note_op(
    ShardState shard, int64_t clock, int64_t origin, int64_t attempt, int64_t number, bint is_step
) except -1


cdef extern from "cuts.h" nogil:
    ctypedef struct dps_saving:
        const char *rows
        int64_t first
        int64_t end
        int64_t existing
        const uint8_t *vacant
        int32_t *place
        char *saved
        int64_t used

    ctypedef struct dps_following:
        int32_t *place
        int64_t rows
        int64_t used
        int64_t *which
        int64_t *where
        int64_t copies

    ctypedef struct dps_taking:
        const char *rows
        const char *saved
        int64_t copies
        const int32_t *place
        const uint8_t *vacant
        const uint8_t *flags
        uint8_t bits
        char *out
        int64_t *which
        int64_t room
        int64_t taken

    bint dps_flag(
        uint8_t *flags, int64_t rows, const int64_t *index, int64_t start, int64_t count, uint8_t bits
    )
    int64_t dps_save(const dps_saving *to, const int64_t *index, int64_t start, int64_t count, int64_t bytes)
    bint dps_follow(dps_following *to, const int64_t *index, int64_t start, int64_t count)
    int64_t dps_clear(uint8_t *flags, const int64_t *index, int64_t count)
    int64_t dps_count_wanted(
        const int32_t *place, const uint8_t *vacant, const uint8_t *flags, uint8_t bits, int64_t end
    )
    int64_t dps_take_wanted(dps_taking *source, int64_t first, int64_t end, int64_t bytes)
