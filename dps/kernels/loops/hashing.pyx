"""Hashes of text, and keys of columns: the loops of :mod:`dps.features.hashing`."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory, uint64s, uint8s, writeable_int64s, writeable_uint64s

cnp.import_array()


cdef extern from "text.h" nogil:
    uint64_t dps_hash_text(const uint8_t *text, int64_t length, const uint8_t *end, uint64_t seed)
    bint dps_narrow(const uint32_t *points, int64_t count, uint8_t *text)
    void dps_combine(
        uint64_t column, const uint64_t *hashes, int64_t count, uint64_t mask, int64_t *out, int64_t stride
    )


def hash_bytes(cnp.ndarray octets not None, cnp.ndarray ends not None, uint64_t seed, cnp.ndarray out not None) -> None:
    """out[i] = hash of octets[ends[i]:ends[i + 1]]: uint8 octets, int64 ends, uint64 out."""
    cdef const uint8_t *text = uint8s(octets)
    cdef const int64_t *end = int64s(ends)
    cdef uint64_t *hashes = writeable_uint64s(out)
    cdef int64_t count = cnp.PyArray_SIZE(out), room = cnp.PyArray_SIZE(octets), i, wrong = -1
    if cnp.PyArray_SIZE(ends) != count + 1:
        raise ValueError(f"{cnp.PyArray_SIZE(ends)} ends for {count} texts")
    with nogil:
        for i in range(count):
            if not 0 <= end[i] <= end[i + 1] <= room:
                wrong = i
                break
            hashes[i] = dps_hash_text(text + end[i], end[i + 1] - end[i], text + room, seed)
    if wrong >= 0:
        raise ValueError(f"text {wrong} from {end[wrong]} to {end[wrong + 1]}, and there are {room} bytes")


def hash_fixed(cnp.ndarray octets not None, uint64_t seed, cnp.ndarray out not None) -> None:
    """The same hash for the rows of uint8[n, width], each padded with zeros (numpy's S dtype)."""
    cdef const uint8_t *text = uint8s(octets)
    cdef uint64_t *hashes = writeable_uint64s(out)
    cdef int64_t count = cnp.PyArray_SIZE(out), width = _width(octets, count), length, i
    cdef const uint8_t *end = text + count * width
    with nogil:
        for i in range(count):
            length = width
            while length > 0 and text[length - 1] == 0:
                length -= 1
            hashes[i] = dps_hash_text(text, length, end, seed)
            text += width


def hash_points(cnp.ndarray points not None, uint64_t seed, cnp.ndarray out not None) -> bool:
    """The same hash for the rows of uint32[n, width], code points padded with zeros (numpy's U dtype).

    Returns False, with `out` unfinished, if a point is not ASCII.
    """
    cdef const uint32_t *point = <const uint32_t *> memory(points, cnp.NPY_UINT32, False)
    cdef uint64_t *hashes = writeable_uint64s(out)
    cdef int64_t count = cnp.PyArray_SIZE(out), width = _width(points, count), length, i
    cdef uint8_t *text = <uint8_t *> malloc(width + 8)
    cdef bint ascii_only = True
    if text == NULL:
        raise MemoryError
    with nogil:
        for i in range(count):
            length = width
            while length > 0 and point[length - 1] == 0:
                length -= 1
            if not dps_narrow(point, length, text):
                ascii_only = False
                break
            hashes[i] = dps_hash_text(text, length, text + width + 8, seed)
            point += width
        free(text)
    return ascii_only


cdef int64_t _width(cnp.ndarray rows, int64_t count) except -1:
    if rows.ndim != 2 or rows.shape[0] != count:
        raise ValueError(f"texts of shape {(<object> rows).shape}, and room for {count} hashes")
    return rows.shape[1]


def combine(
    uint64_t name, cnp.ndarray hashes not None, uint64_t mask, cnp.ndarray out not None, int64_t column
) -> None:
    """out[i, column] = the key of the value with the hash hashes[i], in a column whose name has the hash `name`.

    `hashes` is uint64[n], `out` int64[n, columns]; `mask` has the bits of a key that are kept.
    """
    cdef const uint64_t *values = uint64s(hashes)
    cdef int64_t *keys = writeable_int64s(out)
    cdef int64_t count = cnp.PyArray_SIZE(hashes)
    if out.ndim != 2 or out.shape[0] != count or not 0 <= column < out.shape[1]:
        raise ValueError(f"column {column} of keys of shape {(<object> out).shape} for {count} hashes")
    cdef int64_t stride = out.shape[1]
    with nogil:
        dps_combine(name, values, count, mask, keys + column, stride)
