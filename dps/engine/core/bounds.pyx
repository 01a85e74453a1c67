"""What is said of numbers of rows that do not exist."""

import numpy as np

from libc.stdint cimport int64_t

cimport numpy as cnp

cnp.import_array()


cdef int refuse_rows(object index, int64_t start, int64_t count, int64_t end, int64_t least) except -1:
    if index is None:
        raise ValueError(f"rows {start} to {start + count - 1}, and there are {end} rows")
    if len(index) != count:
        raise ValueError(f"an index of {len(index)} rows, and {count} rows are meant")
    place = int(np.flatnonzero((index < least) | (index >= end))[0])
    raise ValueError(f"row {index[place]} (number {place} of the index), and there are {end} rows")
