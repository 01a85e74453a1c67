from libc.stdint cimport int64_t, uint8_t, uint64_t

from dps.engine.core.numbers cimport FLOAT16, place_of


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
    void dps_fill_missing_int32_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_int16_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_uint8_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_float16(const dps_row_start *start, const dps_filling *to)
    void dps_fill_missing_bfloat16(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_float(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_double(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_int64_t(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_int32_t(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_int16_t(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_uint8_t(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_float16(const dps_row_start *start, const dps_filling *to)
    bint dps_fill_new_bfloat16(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_float(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_double(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_int64_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_int32_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_int16_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_uint8_t(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_float16(const dps_row_start *start, const dps_filling *to)
    void dps_fill_range_bfloat16(const dps_row_start *start, const dps_filling *to)


cdef class RowStart:
    cdef dps_row_start start
    cdef dps_initializer *_columns
    cdef readonly int64_t dim, slots
    cdef readonly bint has_zeros, is_zero


cdef inline bint fill_new_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Fill rows just created; False if one does not exist. `kind` is numpy's number of their dtype."""
    cdef int place = place_of(kind)
    if place == 0:
        return dps_fill_new_float(start, to)
    if place == 1:
        return dps_fill_new_double(start, to)
    if place == 2:
        return dps_fill_new_int64_t(start, to)
    if place == 3:
        return dps_fill_new_int32_t(start, to)
    if place == 4:
        return dps_fill_new_int16_t(start, to)
    if place == 5:
        return dps_fill_new_uint8_t(start, to)
    return dps_fill_new_float16(start, to) if place == FLOAT16 else dps_fill_new_bfloat16(start, to)


cdef inline void fill_range_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Fill rows whose keys are numbers, `to.first` and those that follow."""
    cdef int place = place_of(kind)
    if place == 0:
        dps_fill_range_float(start, to)
    elif place == 1:
        dps_fill_range_double(start, to)
    elif place == 2:
        dps_fill_range_int64_t(start, to)
    elif place == 3:
        dps_fill_range_int32_t(start, to)
    elif place == 4:
        dps_fill_range_int16_t(start, to)
    elif place == 5:
        dps_fill_range_uint8_t(start, to)
    elif place == FLOAT16:
        dps_fill_range_float16(start, to)
    else:
        dps_fill_range_bfloat16(start, to)


cdef inline void fill_absent_rows(const dps_row_start *start, const dps_filling *to, int kind) noexcept nogil:
    """Give rows that do not exist their initial values."""
    cdef int place = place_of(kind)
    if place == 0:
        dps_fill_missing_float(start, to)
    elif place == 1:
        dps_fill_missing_double(start, to)
    elif place == 2:
        dps_fill_missing_int64_t(start, to)
    elif place == 3:
        dps_fill_missing_int32_t(start, to)
    elif place == 4:
        dps_fill_missing_int16_t(start, to)
    elif place == 5:
        dps_fill_missing_uint8_t(start, to)
    elif place == FLOAT16:
        dps_fill_missing_float16(start, to)
    else:
        dps_fill_missing_bfloat16(start, to)
