"""float16 and bfloat16 made of wider numbers, and made wider: see halves.h."""

from libc.stdint cimport int64_t, uint16_t

cimport numpy as cnp

from dps.engine.core.arrays cimport memory, refuse

cnp.import_array()

cdef extern from "halves.h" nogil:
    void dps_wide_float16(const uint16_t *halves, int64_t count, float *out)
    void dps_wide_bfloat16(const uint16_t *halves, int64_t count, float *out)
    void dps_narrowed_float16(const float *values, int64_t count, uint16_t *out)
    void dps_narrowed_bfloat16(const float *values, int64_t count, uint16_t *out)
    void dps_rounded_float16(const double *values, int64_t count, uint16_t *out)
    void dps_rounded_bfloat16(const double *values, int64_t count, uint16_t *out)


def know_bfloat16(int kind) -> None:
    """Tell the core numpy's number of bfloat16, which is another one in each process."""
    global bfloat16_kind
    bfloat16_kind = kind


def widen(cnp.ndarray halves not None, cnp.ndarray out not None) -> None:
    """out[i] = halves[i], exactly: float16 or bfloat16 as float32, of any shape."""
    cdef int kind = _half(halves)
    cdef const void *given = memory(halves, kind, False)
    cdef float *made = <float *> memory(out, cnp.NPY_FLOAT32, True)
    cdef int64_t count = _count(halves, out)
    with nogil:
        widen_numbers(kind, given, count, made)


def narrow(cnp.ndarray values not None, cnp.ndarray out not None) -> None:
    """out[i] = values[i], rounded once, to the nearest: float32 or float64 as float16 or bfloat16, of any shape."""
    cdef int kind = _half(out), wide = cnp.PyArray_TYPE(values)
    cdef const void *given = memory(values, cnp.NPY_FLOAT64 if wide == cnp.NPY_FLOAT64 else cnp.NPY_FLOAT32, False)
    cdef uint16_t *made = <uint16_t *> memory(out, kind, True)
    cdef int64_t count = _count(values, out)
    with nogil:
        if wide != cnp.NPY_FLOAT64:
            narrow_numbers(kind, <const float *> given, count, made)
        elif kind == cnp.NPY_FLOAT16:
            dps_rounded_float16(<const double *> given, count, made)
        else:
            dps_rounded_bfloat16(<const double *> given, count, made)


cdef int _half(cnp.ndarray array) except -1:
    cdef int kind = cnp.PyArray_TYPE(array)
    if not is_half(kind):
        refuse(array, cnp.NPY_FLOAT16)
    return kind


cdef int64_t _count(cnp.ndarray source, cnp.ndarray out) except -1:
    if cnp.PyArray_SIZE(source) != cnp.PyArray_SIZE(out):
        raise ValueError(f"{cnp.PyArray_SIZE(source)} numbers, and room for {cnp.PyArray_SIZE(out)}")
    return cnp.PyArray_SIZE(source)


cdef void widen_numbers(int kind, const void *halves, int64_t count, float *out) noexcept nogil:
    if kind == cnp.NPY_FLOAT16:
        dps_wide_float16(<const uint16_t *> halves, count, out)
    else:
        dps_wide_bfloat16(<const uint16_t *> halves, count, out)


cdef void narrow_numbers(int kind, const float *values, int64_t count, void *out) noexcept nogil:
    if kind == cnp.NPY_FLOAT16:
        dps_narrowed_float16(values, count, <uint16_t *> out)
    else:
        dps_narrowed_bfloat16(values, count, <uint16_t *> out)
