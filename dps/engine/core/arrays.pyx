"""What is said of an array that the core cannot use."""

cimport numpy as cnp

cnp.import_array()


cdef int refuse(object array, int type_number) except -1:
    wanted = cnp.PyArray_DescrFromType(type_number)
    flags = f"writeable: {array.flags.writeable}, aligned: {array.flags.aligned}"
    form = f"{array.dtype} of shape {array.shape}, strides {array.strides}, {flags}"
    raise TypeError(f"a contiguous array of {wanted} wanted, and this is {form}")
