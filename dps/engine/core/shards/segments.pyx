"""Rows of a shard in a file: entries packed, read and marked. :mod:`dps.engine.state.disk_rows` says what they are.

The loops stand in `segments.h`. An entry has `entry_bytes`: the key, the row, zeros up to a multiple of 8 bytes, and a
check sum. Place p of the file is the byte p * entry_bytes.
"""

import os

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int32_t, int64_t, uint8_t

from dps.engine.core.arrays cimport int64s, memory, writeable_int32s, writeable_int64s, writeable_uint8s
from dps.engine.core.bounds cimport dps_all_inside, rows_listed
from dps.engine.core.shards.rows cimport check_rows

cnp.import_array()


cdef extern from "segments.h" nogil:
    ctypedef struct dps_reading:
        int file
        int64_t bytes, row, count, wrong
        const int64_t *places
        const int64_t *order
        int64_t *keys
        bint known
        char *rows

    void dps_pack_entries(
        const int64_t *keys, const char *rows, int64_t row, int64_t count, char *out, int64_t bytes
    )
    int dps_read_entries(dps_reading *of)
    void dps_leave_space(int file, int64_t start, int64_t bytes)
    int64_t dps_mark_entries(
        uint8_t *bits, const int64_t *places, int64_t count, bint on, int32_t *in_use, int64_t segment
    )


cdef enum:
    BESIDE_ROW = 16  # bytes of an entry: the key, and the check sum


def entry_bytes(int64_t row_bytes) -> int:
    """The bytes of an entry of a row.

    >>> entry_bytes(12), entry_bytes(16)
    (32, 32)
    """
    return BESIDE_ROW + (row_bytes + 7 & ~7)


cdef int64_t _bytes_of(cnp.ndarray rows) except -1:
    """The bytes of a row."""
    check_rows(rows, rows)
    return rows.shape[1] * cnp.PyArray_ITEMSIZE(rows)


def pack(cnp.ndarray keys not None, cnp.ndarray rows not None) -> np.ndarray:
    """The entries of rows [n, width] with their keys, uint8[n * entry_bytes]."""
    cdef int64_t count = cnp.PyArray_SIZE(keys), row = _bytes_of(rows)
    cdef cnp.npy_intp size = count * entry_bytes(row)
    cdef const int64_t *key = int64s(keys)
    cdef const char *given = <const char *> memory(rows, cnp.PyArray_TYPE(rows), False)
    cdef cnp.ndarray out = cnp.PyArray_EMPTY(1, &size, cnp.NPY_UINT8, 0)
    cdef char *target = cnp.PyArray_BYTES(out)
    if rows.shape[0] != count:
        raise ValueError(f"{count} keys, and {rows.shape[0]} rows")
    with nogil:
        dps_pack_entries(key, given, row, count, target, size // count if count else 0)
    return out


def read(
    int file,
    cnp.ndarray places not None,
    cnp.ndarray order not None,
    cnp.ndarray keys not None,
    bint known,
    cnp.ndarray rows not None,
) -> int:
    """Read the entries at places[i], which ascend: rows[order[i]] and keys[order[i]].

    Parameters
    ----------
    known : bool
        `keys` has the keys that the entries have to have; else they are written there.

    Returns
    -------
    int
        -1; or the place of the first entry that is not what was written there. Then rows and keys hold anything.

    Raises
    ------
    OSError
        The system could not read the file.
    """
    cdef dps_reading reading
    cdef int64_t count = cnp.PyArray_SIZE(places)
    cdef int error
    reading.file, reading.row, reading.known, reading.count = file, _bytes_of(rows), known, count
    reading.bytes = entry_bytes(reading.row)
    reading.places = int64s(places)
    reading.order = int64s(order)
    if cnp.PyArray_SIZE(order) != count or cnp.PyArray_SIZE(keys) < rows.shape[0]:
        raise ValueError(f"{count} places, {cnp.PyArray_SIZE(order)} in order, {cnp.PyArray_SIZE(keys)} keys")
    if count:
        rows_listed(order, 0, count, rows.shape[0])
    if count and (places[0] < 0 or (np.diff(places) <= 0).any()):
        raise ValueError("the places do not ascend")
    reading.keys = writeable_int64s(keys)
    reading.rows = <char *> memory(rows, cnp.PyArray_TYPE(rows), True)
    with nogil:
        error = dps_read_entries(&reading)
    if error:
        raise OSError(error, os.strerror(error))
    return reading.wrong


def mark(
    cnp.ndarray bits not None, cnp.ndarray places not None, bint on, cnp.ndarray in_use not None, int64_t segment
) -> int:
    """Let entries come into use, or go out of it: their bits, and how many of each segment are in use.

    Returns how many of them were not so before.
    """
    cdef uint8_t *bit = writeable_uint8s(bits)
    cdef int32_t *used = writeable_int32s(in_use)
    cdef const int64_t *place = int64s(places)
    cdef int64_t count = cnp.PyArray_SIZE(places), end = min(
        8 * cnp.PyArray_SIZE(bits), segment * cnp.PyArray_SIZE(in_use)
    )
    if segment < 1 or not dps_all_inside(place, count, end):
        raise ValueError(f"places, of which one is not below {end}")
    return dps_mark_entries(bit, place, count, on, used, segment)


def leave_space(int file, int64_t start, int64_t nbytes) -> None:
    """Give the space of a part of the file back to the system, which reads as zeros from then on."""
    with nogil:
        dps_leave_space(file, start, nbytes)
