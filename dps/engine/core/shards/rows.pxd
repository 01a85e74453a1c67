from libc.stdint cimport int32_t, int64_t, uint16_t

cimport numpy as cnp

from dps.engine.core.numbers cimport BFLOAT16, FLOAT16, place_of


cdef int check_rows(cnp.ndarray rows, cnp.ndarray other) except -1


cdef extern from "rows.h" nogil:
    ctypedef struct dps_source:
        const char *rows
        int64_t count
        int64_t stride
        int64_t bytes

    bint dps_gather(const dps_source *source, const int64_t *index, int64_t count, char *out)
    void dps_gather_range(const dps_source *source, int64_t start, int64_t count, char *out)
    void dps_take(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes)
    void dps_scatter(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes)
    bint dps_all_finite_float(const float *values, int64_t count)
    bint dps_all_finite_double(const double *values, int64_t count)
    bint dps_all_finite_float16(const uint16_t *values, int64_t count)
    bint dps_all_finite_bfloat16(const uint16_t *values, int64_t count)
    void dps_small_pages(char *memory, int64_t bytes)
    void dps_leave_pages(char *memory, int64_t bytes)


cdef inline bint are_finite(int kind, const void *values, int64_t count) noexcept nogil:
    """Whether no number is NaN or infinite; `kind` is numpy's number of their dtype."""
    if kind == cnp.NPY_FLOAT32:
        return dps_all_finite_float(<const float *> values, count)
    if kind == cnp.NPY_FLOAT64:
        return dps_all_finite_double(<const double *> values, count)
    if place_of(kind) == FLOAT16:
        return dps_all_finite_float16(<const uint16_t *> values, count)
    if place_of(kind) == BFLOAT16:
        return dps_all_finite_bfloat16(<const uint16_t *> values, count)
    return True
