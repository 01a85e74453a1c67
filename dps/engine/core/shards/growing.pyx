"""Arrays that grow without a copy, and whose zeros cost nothing before they are used.

A shard's rows grow by `numpy.ndarray.resize`, which calls `realloc`. The C library re-maps the pages of a block that it
has mapped, and copies one that lies in its heap: 20 ms for 30 MB, while requests wait. Which blocks lie in the heap
depends on what the process has allocated and freed before; the zeros of a new index are cleared in it by hand, too,
instead of page by page at their first use. So these arrays have a memory of their own, by numpy's
handlers of memory (NEP 49): see `growing.h`.
"""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_New

import numpy as np

cnp.import_array()


cdef extern from "growing.h":
    ctypedef struct PyDataMem_Handler:
        pass

    PyDataMem_Handler dps_growing
    void dps_grow_in_small_pages(void *memory)
    object PyDataMem_SetHandler(object handler)


cdef object HANDLER = PyCapsule_New(&dps_growing, "mem_handler", NULL)


cdef cnp.ndarray fresh_zeros(cnp.npy_intp count, cnp.npy_intp width, int kind):
    """Zeros [count, width], which the system provides page by page, and which grow without a copy."""
    cdef cnp.npy_intp shape[2]
    shape[0], shape[1] = count, width
    before = PyDataMem_SetHandler(HANDLER)
    try:
        return cnp.PyArray_ZEROS(2, shape, kind, 0)
    finally:
        PyDataMem_SetHandler(before)


def growing_rows(cnp.npy_intp count, cnp.npy_intp width, dtype) -> np.ndarray:
    """Zeros [count, width], in memory that grows without a copy.

    Examples
    --------
    >>> rows = growing_rows(2, 3, "float32")
    >>> rows.resize((4, 3), refcheck=False)
    >>> rows.sum(), rows.shape
    (np.float32(0.0), (4, 3))
    """
    if count < 0 or width < 0:
        raise ValueError(f"{count} rows of {width} columns")
    return fresh_zeros(count, width, np.dtype(dtype).num)


def filling_rows(cnp.npy_intp count, cnp.npy_intp width, dtype) -> np.ndarray:
    """As :func:`growing_rows`, for rows that are all filled at once: in pages of the usual size.

    The system clears a huge page at once, while requests wait. On a virtual machine it is often one that the host has
    to find first, and filling rows then takes two to four times as long.
    """
    cdef cnp.ndarray rows = growing_rows(count, width, dtype)
    dps_grow_in_small_pages(cnp.PyArray_DATA(rows))
    return rows
