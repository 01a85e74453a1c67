cimport cython
cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "slots.h" nogil:
    ctypedef struct Slot "dps_slot":
        int64_t key
        int32_t row

    const int DPS_NEAR
    int32_t dps_near_row(const Slot *home, int64_t key)
    uint64_t dps_rank(int64_t key, uint64_t salt)
    int64_t dps_home(int64_t key, uint64_t salt, int64_t capacity)
    void dps_homes(const int64_t *keys, int64_t count, uint64_t salt, int64_t capacity, int64_t *homes)
    int32_t dps_shared_row(const Slot *slot)
    void dps_prefetch_slots(const Slot *slot)
    void dps_provide(Slot *slot)


cdef struct Table:
    Slot *slots
    int64_t capacity  # 0: there is no such table


@cython.final
cdef class KeyIndex:
    cdef readonly uint64_t salt
    cdef readonly int64_t count, end
    cdef public bint reuses
    cdef readonly cnp.ndarray slots, old  # int32[capacity, 3]; they own the memory of the two tables
    cdef readonly int64_t start, moved
    cdef Table _new, _old
    cdef int64_t _rows_in_old, _move_per_key, _move_at_least
    cdef double _grow_at, _growth  # load; factor
    cdef int32_t *_free
    cdef int64_t _free_count, _free_room

    cdef int64_t find_rows(self, const int64_t *keys, int64_t count, int64_t *rows) noexcept nogil
    cdef int insert_rows(self, const int64_t *keys, int64_t count, int64_t *rows) except -1 nogil
    cdef int make_room(self, int64_t new) except -1 nogil
    cdef bint grows(self, int64_t new) noexcept nogil
    cdef int64_t _larger(self, int64_t new) noexcept nogil
    cdef int64_t reusable(self) noexcept nogil
    cdef int32_t _new_row(self) noexcept nogil
    cdef int32_t _forget(self, int64_t key) noexcept nogil
    cdef int _make_free(self, int64_t more) except -1
    cdef void _locate(self, const int64_t *keys, int64_t count, int64_t *homes) noexcept nogil
    cdef Slot *_slot_of(self, int64_t key, int64_t home) noexcept nogil
    cdef int _begin(self, int64_t new) except -1
    cdef void _advance(self, int64_t quota) noexcept nogil
    cdef void _move(self, int64_t quota) noexcept nogil
