from libc.stdint cimport int64_t


cdef class CallMeter:
    cdef public double mark, held  # seconds by the meter's clock
    cdef public int64_t pulls, pushes, keys_pulled, keys_pushed
    cdef double _pull, _push, _wait, _serialise
    cdef double *_part(self, verb) except NULL
    cdef void count_exchange(self, bint pull, int64_t keys, double began, double now, double waited) noexcept
