from libc.stdint cimport int64_t, uint8_t, uint64_t

cimport numpy as cnp


cdef extern from "initializers.h" nogil:
    ctypedef struct dps_initializer:
        int kind
        double a
        double b
        uint64_t seed
        int64_t first
        int64_t dim
        int64_t state
        int64_t slots
        double slot_start

    ctypedef struct dps_row_start:
        const dps_initializer *columns
        int64_t count

    ctypedef struct dps_filling:
        void *rows
        int64_t capacity
        int64_t width
        int64_t dim
        const int64_t *keys
        const int64_t *index
        int64_t count
        int64_t first
        const uint8_t *vacant

    void dps_fill_missing_float(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_double(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_int64_t(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_float(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_double(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_int64_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_float(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_double(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_int64_t(const dps_row_start *start, const dps_filling *to)


cdef class RowStart:
    cdef dps_row_start start
    cdef dps_initializer *_columns
    cdef readonly int64_t dim, slots
    cdef readonly bint has_zeros, is_zero


cdef inline bint fill_new_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Fill rows just created; False if one does not exist. `kind` is numpy's number of their dtype."""
    if kind == cnp.NPY_FLOAT32:
        return dps_fill_new_float(start, to)
    if kind == cnp.NPY_FLOAT64:
        return dps_fill_new_double(start, to)
    return dps_fill_new_int64_t(start, to)


cdef inline void fill_range_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Fill rows whose keys are numbers, `to.first` and those that follow."""
    if kind == cnp.NPY_FLOAT32:
        dps_fill_range_float(start, to)
    elif kind == cnp.NPY_FLOAT64:
        dps_fill_range_double(start, to)
    else:
        dps_fill_range_int64_t(start, to)


cdef inline void fill_absent_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Give rows that do not exist their initial values."""
    if kind == cnp.NPY_FLOAT32:
        dps_fill_missing_float(start, to)
    elif kind == cnp.NPY_FLOAT64:
        dps_fill_missing_double(start, to)
    else:
        dps_fill_missing_int64_t(start, to)
