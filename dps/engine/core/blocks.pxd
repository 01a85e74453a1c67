cimport numpy as cnp


cdef cnp.ndarray new_array(int axes, cnp.npy_intp *shape, int kind)
