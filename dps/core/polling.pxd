from libc.stdint cimport int64_t


cdef extern from "polling.h" nogil:
    ctypedef struct dps_polling:
        int64_t most, now, spent

    void dps_adapt(dps_polling *polling, int64_t waited)


cdef class Polling:
    cdef dps_polling state
