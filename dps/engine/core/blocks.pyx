"""Memory of large arrays, kept for later ones, because the system takes long to make fresh pages.

A large array of this module lies in a block, which it owns together with its views. When the last of them goes, the
block becomes idle, and a later array of about the same size takes it. So an array that is in use keeps its block: no
later array is put there. Idle blocks are bounded in bytes; the oldest are freed first.

All of this happens under the interpreter's lock.
"""

from libc.stdint cimport int64_t

cimport cython
cimport numpy as cnp

from dps.engine.core.numbers cimport bytes_of, place_of

import numpy as np

cnp.import_array()

cdef enum:
    LARGE = 1 << 17  # bytes; smaller arrays are numpy's own, because the C library keeps their memory

cdef int64_t LARGEST = 1 << 48  # bytes; no machine has so many
cdef int64_t most = 1 << 27  # bytes of idle blocks
cdef int64_t held = 0
cdef list idle = []  # memory as arrays of uint8, the block that was given back last at the end


@cython.final
cdef class Block:
    """The owner of an array's memory, and its `base`."""

    cdef cnp.ndarray memory

    def __cinit__(self, cnp.ndarray memory not None):
        self.memory = memory

    def __del__(self):
        give_back(self.memory)


cdef cnp.ndarray take(int64_t nbytes):
    """Memory of at least so many bytes, and at most a quarter more: an idle block, or fresh."""
    global held
    cdef Py_ssize_t n
    cdef int64_t size
    cdef cnp.npy_intp fresh = nbytes
    for n in range(len(idle) - 1, -1, -1):
        size = cnp.PyArray_SIZE(<cnp.ndarray> idle[n])
        if nbytes <= size <= nbytes + nbytes // 4:
            held -= size
            return idle.pop(n)
    return cnp.PyArray_EMPTY(1, &fresh, cnp.NPY_UINT8, 0)


cdef int give_back(cnp.ndarray memory) except -1:
    global held
    if idle is not None:  # as it is when the interpreter ends
        idle.append(memory)
        held += cnp.PyArray_SIZE(memory)
        shrink()
    return 0


cdef int shrink() except -1:
    """Free the oldest idle blocks until the rest is within the bound."""
    global held
    while held > most:
        held -= cnp.PyArray_SIZE(<cnp.ndarray> idle[0])
        del idle[0]
    return 0


cdef cnp.ndarray new_array(int axes, cnp.npy_intp *shape, int kind):
    """An array whose content is undefined."""
    cdef int64_t nbytes = bytes_of(kind)
    cdef cnp.ndarray array
    cdef Block block
    cdef int n
    for n in range(axes):
        if shape[n] > LARGEST // nbytes:
            return cnp.PyArray_EMPTY(axes, shape, kind, 0)  # which refuses it, unless another axis is empty
        nbytes *= shape[n]
        if nbytes == 0:
            break
    if nbytes < LARGE:
        return cnp.PyArray_EMPTY(axes, shape, kind, 0)
    block = Block(take(nbytes))
    array = cnp.PyArray_SimpleNewFromData(axes, shape, kind, cnp.PyArray_DATA(block.memory))
    cnp.set_array_base(array, block)
    return array


def empty(tuple shape not None, dtype) -> np.ndarray:
    """As numpy.empty, for the dtypes of tables; a large array takes memory that an earlier one has left.

    Examples
    --------
    >>> first = empty((1 << 16,), "float32")
    >>> where = first.ctypes.data
    >>> del first
    >>> empty((1 << 16,), "float32").ctypes.data == where
    True
    """
    cdef cnp.npy_intp sizes[32]
    cdef int kind = np.dtype(dtype).num, n
    if place_of(kind) < 0 or len(shape) > 32 or any([k < 0 for k in shape]):
        raise ValueError(f"an array of a dtype of tables is wanted, not of {dtype} and shape {shape}")
    for n in range(len(shape)):
        sizes[n] = shape[n]
    return new_array(len(shape), sizes, kind)


def limit_kept(int64_t nbytes) -> None:
    """Keep idle blocks of at most so many bytes in this process."""
    global most
    most = nbytes
    shrink()


def kept() -> int:
    """Bytes of idle blocks."""
    return held
