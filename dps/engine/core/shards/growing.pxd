cimport numpy as cnp


cdef cnp.ndarray fresh_zeros(cnp.npy_intp count, cnp.npy_intp width, int kind)
