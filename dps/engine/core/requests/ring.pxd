cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from "<unistd.h>" nogil:
    int dps_close "close"(int fd)


cdef extern from "ring.h" nogil:
    enum:
        DPS_SLOTS
        DPS_SLOT_BYTES
        DPS_FIRST_SLOT
        DPS_RING_BYTES
    ctypedef struct dps_ring:
        uint32_t returned
        uint64_t mark
    char *dps_map_ring(int fd)
    void dps_unmap_ring(char *memory)
    bint dps_has_room(dps_ring *ring, uint32_t made)
    int64_t dps_await_room(dps_ring *ring, uint32_t made, int64_t patience)
    void dps_give_back(dps_ring *ring, uint32_t taken)
    void dps_fence()


@cython.final
cdef class Ring:
    cdef char *_memory
    cdef int _fd  # the file of the memory, which the other end opens by its number; -1: closed
    cdef readonly uint32_t pieces  # how many pieces this end has made or taken
    cdef void _close(self) noexcept nogil
    cdef char *_next(self) noexcept nogil
    cdef const char *piece(self) noexcept nogil
    cpdef void taken(self) noexcept nogil
