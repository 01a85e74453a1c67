"""Steps of ufuncs on chunks of vectors: numpy's own loops, called for chunks that stay in the fastest cache.

A call of a ufunc costs numpy half a microsecond, so chunks for calls in Python have to be as large as the second cache.
Here the loops themselves are called, without the interpreter, on chunks of some thousand elements: what is between
input and output stays in the first cache. They are the loops that numpy would take, so elements have the same bits.
"""

from libc.stdint cimport int64_t

cimport numpy as cnp
from numpy cimport npy_intp

import numpy as np

cnp.import_array()

cdef extern from "ufuncs.h" nogil:
    int dps_operands(object ufunc)
    int dps_loops(object ufunc)
    int dps_type_of(object ufunc, int loop, int operand)
    void *dps_loop(object ufunc, int loop)
    void *dps_data_of(object ufunc, int loop)

ctypedef void (*Loop)(char **, npy_intp *, npy_intp *, void *) noexcept nogil

cdef enum:
    MOST_STEPS = 128
    MOST_SLOTS = 64


cdef struct Slot:
    char *memory
    npy_intp stride  # bytes; 0 for a constant
    int dtype  # its number in numpy
    bint writeable
    bint moves  # registers and constants are the same memory for each chunk


cdef struct ChunkStep:
    Loop loop
    void *data
    int count
    int slots[4]
    double total  # of a reduction
    int kind  # 0: a step, else the reduction's code


def loop_number(ufunc, types) -> int:
    """The place of a ufunc's loop for these characters of dtypes, operands and result; -1: it has none."""
    cdef int number, place, operands
    if not isinstance(ufunc, np.ufunc):
        raise TypeError(f"a ufunc, not {ufunc!r}")
    operands = dps_operands(ufunc)
    wanted = [np.dtype(chr(letter)).num for letter in types]
    if len(wanted) != operands:
        return -1
    for number in range(dps_loops(ufunc)):
        if [dps_type_of(ufunc, number, place) for place in range(operands)] == wanted:
            return number
    return -1


def run_steps(arrays, registers, steps, sums, int64_t length, int64_t width) -> list:
    """Carry out steps on vectors, chunk by chunk.

    Parameters
    ----------
    arrays : list of ndarray
        Inputs, constants (of no axis) and outputs, contiguous.
    registers : list of ndarray
        Memory of `width` elements each; they take the slots behind the arrays.
    steps : list of (ufunc, loop, slots)
        The number of the ufunc's loop; the slots of operands and result.
    sums : list of (slot, is_double)
        Vectors of float32 or float64 to be added up.
    length, width : int
        Elements of the vectors, and of a chunk.

    Returns
    -------
    list of float
        The sums.
    """
    cdef Slot slots[MOST_SLOTS]
    cdef ChunkStep made[MOST_STEPS]
    cdef int count = 0, number, place, added = len(sums), known = len(arrays) + len(registers)
    cdef cnp.ndarray array
    if width < 1:
        raise ValueError("a chunk without elements")
    if known > MOST_SLOTS or len(steps) + added > MOST_STEPS:
        raise ValueError("too many steps")
    for place, array in enumerate(arrays + registers):
        slots[place].memory = <char *> cnp.PyArray_DATA(array)
        slots[place].stride = array.itemsize if array.ndim else 0
        slots[place].dtype, slots[place].writeable = cnp.PyArray_TYPE(array), array.flags.writeable and array.ndim > 0
        slots[place].moves = place < len(arrays) and array.ndim > 0
        if array.ndim and not (array.flags.c_contiguous and len(array) >= (length if slots[place].moves else width)):
            raise ValueError("a vector that is too short, or not contiguous")
    for ufunc, loop, named in steps:
        if not isinstance(ufunc, np.ufunc):
            raise TypeError(f"a ufunc, not {ufunc!r}")
        if not 0 <= loop < dps_loops(ufunc) or len(named) != dps_operands(ufunc) or dps_operands(ufunc) > 4:
            raise ValueError("a loop that the ufunc has not")
        made[count].loop = <Loop> dps_loop(ufunc, loop)
        made[count].data = dps_data_of(ufunc, loop)
        made[count].count = dps_operands(ufunc)
        made[count].kind = 0
        for place, slot in enumerate(named):
            if not 0 <= slot < known:
                raise ValueError("a slot that there is not")
            if slots[<int> slot].dtype != dps_type_of(ufunc, loop, place):
                raise TypeError("a slot of another dtype than the loop's")
            made[count].slots[place] = slot
        if not slots[<int> slot].writeable:
            raise ValueError("a slot that cannot be written")
        count += 1
    cdef object add = np.add
    cdef int floats = loop_number(add, b"fff"), doubles = loop_number(add, b"ddd")
    for slot, is_double in sums:
        if not 0 <= slot < known:
            raise ValueError("a slot that there is not")
        if slots[<int> slot].dtype != <int> (cnp.NPY_DOUBLE if is_double else cnp.NPY_FLOAT):
            raise TypeError("a sum of another dtype")
        made[count].loop = <Loop> dps_loop(add, doubles if is_double else floats)
        made[count].data = NULL
        made[count].slots[0] = slot
        made[count].kind = 2 if is_double else 1
        made[count].total = 0.0
        count += 1
    cdef npy_intp start = 0, size
    with nogil:
        while start < length:
            size = width if length - start > width else length - start
            chunk(slots, made, count, start, size)
            start += size
    return [made[number].total for number in range(count - added, count)]


cdef void chunk(Slot *slots, ChunkStep *steps, int count, npy_intp start, npy_intp size) noexcept nogil:
    cdef char *pointers[4]
    cdef npy_intp strides[4]
    cdef int number, place
    cdef Slot *slot
    cdef float single
    cdef double double_
    for number in range(count):
        if steps[number].kind == 0:
            for place in range(steps[number].count):
                slot = slots + steps[number].slots[place]
                pointers[place] = slot.memory + (start * slot.stride if slot.moves else 0)
                strides[place] = slot.stride
            steps[number].loop(pointers, &size, strides, steps[number].data)
            continue
        slot = slots + steps[number].slots[0]
        single, double_ = 0, 0
        pointers[0] = <char *> &single if steps[number].kind == 1 else <char *> &double_
        pointers[1] = slot.memory + (start * slot.stride if slot.moves else 0)
        pointers[2] = pointers[0]
        strides[0], strides[1], strides[2] = 0, slot.stride, 0
        steps[number].loop(pointers, &size, strides, NULL)
        steps[number].total += single if steps[number].kind == 1 else double_
