cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t


cdef extern from "pending_pages.h" nogil:
    const int DPS_GROUPS
    const int DPS_BUCKETS
    ctypedef struct Group "dps_group":
        uint32_t keys, pages
    ctypedef struct Pendings "dps_pendings":
        Group groups[1]  # DPS_GROUPS of them
        int64_t keys, bytes

    Pendings *dps_new_pendings()
    void dps_free_pendings(Pendings *all)
    int64_t dps_block_bytes(int64_t bytes)


cdef extern from "pending.h" nogil:
    ctypedef struct Sweep "dps_sweep":
        int64_t active, group, tag

    int dps_count_pending(Pendings *all, const int64_t *keys, int64_t count, int threshold, uint8_t *born)
    int dps_forget_pending(Pendings *all, const int64_t *keys, int64_t count)
    void dps_estimate_pending(Pendings *all, const int64_t *keys, int64_t count, uint8_t *counts)
    int dps_age(Pendings *all, Sweep *sweep, int64_t limit, int64_t steps)
    void dps_dump_pending(Pendings *all, int64_t *pages, uint16_t *ends, uint32_t *tags, uint8_t *counts)
    Pendings *dps_loaded_pending(
        const int64_t *pages, const uint16_t *ends, int64_t total, const uint32_t *tags, const uint8_t *counts,
        int64_t keys, int *wrong
    )


cdef extern from "pending_sketch.h" nogil:
    const int DPS_LINE_BYTES
    const int DPS_PARTS
    ctypedef struct Sketch "dps_sketch":
        uint8_t *lines
        int64_t count, filled, hand

    int64_t dps_filled_of(const uint8_t *lines, int64_t count)
    void dps_halve(Sketch *sketch, int64_t limit, int64_t steps)
    void dps_count_sketch(Sketch *sketch, const int64_t *keys, int64_t count, int threshold, uint8_t *born)
    void dps_estimate_sketch(const Sketch *sketch, const int64_t *keys, int64_t count, uint8_t *counts)


@cython.final
cdef class PendingKeys:
    cdef readonly int64_t limit
    cdef Pendings *_all
    cdef Sweep _sweep

    cdef int count_keys(self, const int64_t *keys, int64_t count, int threshold, uint8_t *born) except -1 nogil
    cdef int forget_keys(self, const int64_t *keys, int64_t count) except -1 nogil


@cython.final
cdef class PendingSketch:
    cdef readonly int64_t keys
    cdef void *_memory
    cdef Sketch _sketch

    cdef void count_keys(self, const int64_t *keys, int64_t count, int threshold, uint8_t *born) noexcept nogil
