from libc.stdint cimport int64_t


cdef extern from "steps.h" nogil:
    ctypedef struct dps_push:
        void *rows
        int64_t width
        int64_t state
        const int64_t *index
        int64_t start
        const void *updates
        int64_t stride
        int64_t count
        int64_t dim
        const double *numbers
        int64_t parameters

    void dps_fetch_rows(const void *rows, const int64_t *index, int64_t count, int64_t nbytes)
    void dps_add_int64_t(const dps_push *push)
    void dps_add_float(const dps_push *push)
    void dps_add_double(const dps_push *push)
    void dps_add_float16(const dps_push *push)
    void dps_add_bfloat16(const dps_push *push)
    void dps_add_uint32_t(const dps_push *push)
    void dps_add_uint16_t(const dps_push *push)
    void dps_add_uint8_t(const dps_push *push)
    void dps_assign_int64_t(const dps_push *push)
    void dps_assign_uint32_t(const dps_push *push)
    void dps_assign_uint16_t(const dps_push *push)
    void dps_assign_uint8_t(const dps_push *push)
    void dps_assign_float(const dps_push *push)
    void dps_assign_double(const dps_push *push)
    void dps_sgd_float(const dps_push *push)
    void dps_sgd_double(const dps_push *push)
    void dps_momentum_float(const dps_push *push)
    void dps_momentum_double(const dps_push *push)
    void dps_adagrad_float(const dps_push *push)
    void dps_adagrad_double(const dps_push *push)
    void dps_rmsprop_float(const dps_push *push)
    void dps_rmsprop_double(const dps_push *push)
    void dps_adam_float(const dps_push *push)
    void dps_adam_double(const dps_push *push)
    void dps_ftrl_float(const dps_push *push)
    void dps_ftrl_double(const dps_push *push)

ctypedef void (*step_t)(const dps_push *push) noexcept nogil
