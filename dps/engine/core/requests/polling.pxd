from libc.stdint cimport int32_t, int64_t


cdef extern from "polling.h" nogil:
    ctypedef struct dps_polling:
        int64_t most, now, spent, away
        int32_t rest

    int64_t dps_now()
    void dps_adapt(dps_polling *polling, int64_t waited)
    int dps_watch(int fd, dps_polling *polling)


cdef class Polling:
    cdef dps_polling state
    cdef int64_t _asleep