"""A ring of pieces in memory that a client and a server of one machine share, for the bodies of large answers.

The server, which is the *maker*, makes each piece in a slot and says so over the socket. The client, the *taker*,
copies the piece to its places, and gives the slot back by a counter in the memory. Each end has a Ring of the same
memory, and counts pieces for itself: the socket tells the taker that the next one is there, the counter tells the maker
how many have been given back. The maker compares the counter, and does nothing else with it, because a broken client
may have written anything; so what such a client can spoil is its own answer.

A slot is not used again before it was given back. Where that does not happen in time, the maker sends the rest of the
answer through the socket: see `wire/plain_answers.py`.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

cimport cython
cimport numpy as cnp
from cpython.ref cimport Py_INCREF

cnp.import_array()

RING_BYTES = DPS_RING_BYTES
SLOT_BYTES = DPS_SLOT_BYTES
SLOTS = DPS_SLOTS


@cython.final
cdef class Ring:
    """One end of a ring; see the module.

    Parameters
    ----------
    fd : int
        A file of RING_BYTES that cannot be cut short. The mapping does not need it any longer.
    own : bool
        The ring closes the file: with the first piece, because the other end has the memory then, or when it goes.

    Attributes
    ----------
    pieces : int
        How many this end has made or taken.
    """

    def __cinit__(self, int fd, bint own=False):
        self._fd = -1
        self._memory = dps_map_ring(fd)
        if self._memory == NULL:
            raise OSError(f"{RING_BYTES} bytes of shared memory cannot be mapped")
        self._fd = fd if own else -1
        self.pieces = 0

    def __dealloc__(self):
        if self._memory != NULL:  # else there is no file either
            self._close()
            dps_unmap_ring(self._memory)

    cdef void _close(self) noexcept nogil:
        if self._fd >= 0:
            dps_close(self._fd)
            self._fd = -1

    @property
    def mark(self) -> int:
        """A number in the memory, by which an end that has opened it knows that it is the right one."""
        return <int64_t> (<dps_ring *> self._memory).mark

    def sign(self, int64_t mark) -> None:
        """Write the mark."""
        (<dps_ring *> self._memory).mark = <uint64_t> mark

    cdef char *_next(self) noexcept nogil:
        """The slot of the piece that is made or taken next."""
        return self._memory + DPS_FIRST_SLOT + <int64_t> (self.pieces % DPS_SLOTS) * DPS_SLOT_BYTES

    def slot(self):
        """The slot of the piece that is made or taken next, uint8[SLOT_BYTES]."""
        cdef cnp.npy_intp size = DPS_SLOT_BYTES
        cdef cnp.ndarray slot = cnp.PyArray_SimpleNewFromData(1, &size, cnp.NPY_UINT8, self._next())
        Py_INCREF(self)
        cnp.PyArray_SetBaseObject(slot, self)
        return slot

    # -- the maker

    def wait(self, int64_t patience) -> int:
        """Wait until a slot is free: how many nanoseconds of the `patience` are left; -1: none has become free."""
        cdef dps_ring *ring = <dps_ring *> self._memory
        if dps_has_room(ring, self.pieces):
            return max(patience, 0)
        with nogil:
            patience = dps_await_room(ring, self.pieces, patience)
        return patience

    def made(self) -> None:
        """A piece is in the slot; to be called before the taker is told."""
        dps_fence()
        self.pieces += 1

    # -- the taker

    cdef const char *piece(self) noexcept nogil:
        """The piece of which the maker has told."""
        dps_fence()
        return self._next()

    cpdef void taken(self) noexcept nogil:
        """The piece has been copied, so its slot goes back."""
        self.pieces += 1
        dps_give_back(<dps_ring *> self._memory, self.pieces)
        self._close()
