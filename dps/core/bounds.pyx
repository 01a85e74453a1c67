"""What is said of numbers of rows that do not exist."""

import numpy as np

from libc.stdint cimport int64_t

cimport numpy as cnp

cnp.import_array()


cdef int refuse_rows(object index, int64_t start, int64_t count, int64_t end) except -1:
    if index is None:
        raise ValueError(f"rows {start} to {start + count - 1}, and there are {end} rows")
    if len(index) != count:
        raise ValueError(f"an index of {len(index)} rows for {count} updates")
    place = int(np.flatnonzero((index < 0) | (index >= end))[0])
    raise ValueError(f"row {index[place]} (number {place} of the index), and there are {end} rows")
