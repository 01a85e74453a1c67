"""The memory of numpy arrays, checked: a wrong dtype or layout is a TypeError and never a wrong read or write."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t

cimport numpy as cnp


cdef int refuse(object array, int type_number) except -1


cdef inline void *memory(cnp.ndarray array, int type_number, bint written) except? NULL:
    cdef int flags = cnp.NPY_ARRAY_CARRAY if written else cnp.NPY_ARRAY_CARRAY_RO
    cdef int given = cnp.PyArray_TYPE(array)
    # long and long long, say, are two types of numpy for the same numbers
    cdef bint same = given == type_number or cnp.PyArray_EquivTypenums(given, type_number)
    if not same or not cnp.PyArray_CHKFLAGS(array, flags) or not cnp.PyArray_ISNOTSWAPPED(array):
        refuse(array, type_number)
    return cnp.PyArray_DATA(array)


cdef inline const int32_t *int32s(cnp.ndarray array) except? NULL:
    return <const int32_t *> memory(array, cnp.NPY_INT32, False)


cdef inline int32_t *writeable_int32s(cnp.ndarray array) except? NULL:
    return <int32_t *> memory(array, cnp.NPY_INT32, True)


cdef inline const int64_t *int64s(cnp.ndarray array) except? NULL:
    return <const int64_t *> memory(array, cnp.NPY_INT64, False)


cdef inline int64_t *writeable_int64s(cnp.ndarray array) except? NULL:
    return <int64_t *> memory(array, cnp.NPY_INT64, True)


cdef inline const uint64_t *uint64s(cnp.ndarray array) except? NULL:
    return <const uint64_t *> memory(array, cnp.NPY_UINT64, False)


cdef inline uint64_t *writeable_uint64s(cnp.ndarray array) except? NULL:
    return <uint64_t *> memory(array, cnp.NPY_UINT64, True)


cdef inline const uint8_t *uint8s(cnp.ndarray array) except? NULL:
    return <const uint8_t *> memory(array, cnp.NPY_UINT8, False)


cdef inline uint8_t *writeable_uint8s(cnp.ndarray array) except? NULL:
    return <uint8_t *> memory(array, cnp.NPY_UINT8, True)
