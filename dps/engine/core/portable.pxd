from libc.stdint cimport uint64_t


cdef extern from "portable.h" nogil:
    double dps_sine(double x)
    double dps_logarithm(double x)
    double dps_power(double base, uint64_t exponent)
