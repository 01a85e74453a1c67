from libc.stdint cimport int64_t, uint64_t


cdef extern from "initializers.h" nogil:
    ctypedef struct dps_initializer:
        int kind
        double a
        double b
        uint64_t seed
        double slot_start

    ctypedef struct dps_filling:
        void *rows
        int64_t capacity
        int64_t width
        int64_t dim
        const int64_t *keys
        const int64_t *index
        int64_t count
        int64_t first

    void dps_fill_missing_float(const dps_initializer *init, const dps_filling *to)
    void dps_fill_missing_double(const dps_initializer *init, const dps_filling *to)
    void dps_fill_missing_int64_t(const dps_initializer *init, const dps_filling *to)
    bint dps_fill_new_float(const dps_initializer *init, const dps_filling *to)
    bint dps_fill_new_double(const dps_initializer *init, const dps_filling *to)
    bint dps_fill_new_int64_t(const dps_initializer *init, const dps_filling *to)
    void dps_fill_range_float(const dps_initializer *init, const dps_filling *to)
    void dps_fill_range_double(const dps_initializer *init, const dps_filling *to)
    void dps_fill_range_int64_t(const dps_initializer *init, const dps_filling *to)
