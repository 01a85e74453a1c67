"""Words as bytes, as keys and as rows of a table: the loops of :mod:`dps.engine.client.word_table`.

Texts lie one behind the other in `octets`; text i ends where text i + 1 begins, at ends[i + 1]. A row of a word is
int64[width]: its *head*, (id + 1) << 8 | length, and behind that its bytes, padded with zeros. A head of 0 means that
the word has no id yet, because the row of an unborn key reads as zeros.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.unicode cimport PyUnicode_Check
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport int64s, memory, uint8s, writeable_int64s, writeable_uint8s

cnp.import_array()


cdef extern from "text.h" nogil:
    uint64_t dps_hash_text(const uint8_t *text, int64_t length, const uint8_t *end, uint64_t seed)


cdef extern from *:
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL


cdef enum:
    UNBORN = 0  # an answer of `match`: the key has no row
    FOUND = 1  # the row is that of the word
    OTHER = 2  # the key belongs to another word

cdef enum:
    HEAD_BYTES = 8
    LENGTH_BITS = 8


cdef const char *_bytes_of(object text, Py_ssize_t *size) except NULL:
    if PyUnicode_Check(text):
        return PyUnicode_AsUTF8AndSize(text, size)
    if PyBytes_Check(text):
        size[0] = PyBytes_GET_SIZE(text)
        return PyBytes_AS_STRING(text)
    raise TypeError(type(text).__name__)


def join(list texts not None) -> tuple:
    """(octets, ends) of texts, str as UTF-8 or bytes; a TypeError names the type of anything else."""
    cdef Py_ssize_t count = PyList_GET_SIZE(texts), size = 0, i
    cdef cnp.ndarray ends = np.empty(count + 1, np.int64)
    cdef int64_t *end = writeable_int64s(ends)
    cdef const char *text
    cdef uint8_t *place
    end[0] = 0
    for i in range(count):
        _bytes_of(<object> PyList_GET_ITEM(texts, i), &size)
        end[i + 1] = end[i] + size
    cdef cnp.ndarray octets = np.empty(end[count], np.uint8)
    place = writeable_uint8s(octets)
    for i in range(count):
        text = _bytes_of(<object> PyList_GET_ITEM(texts, i), &size)
        memcpy(place + end[i], text, size)
    return octets, ends


cdef int64_t _check(cnp.ndarray octets, cnp.ndarray ends, cnp.ndarray which) except -1:
    """Check that all texts of `which` lie in the octets, and count them."""
    cdef const int64_t *end = int64s(ends)
    cdef const int64_t *chosen = int64s(which)
    cdef int64_t texts = cnp.PyArray_SIZE(ends) - 1, room = cnp.PyArray_SIZE(octets), i, n
    cdef int64_t count = cnp.PyArray_SIZE(which)
    uint8s(octets)
    for i in range(count):
        n = chosen[i]
        if not 0 <= n < texts:
            raise ValueError(f"text {n} of {texts}")
        if not 0 <= end[n] <= end[n + 1] <= room:
            raise ValueError(f"text {n} from {end[n]} to {end[n + 1]}, and there are {room} bytes")
    return count


cdef int64_t _width(cnp.ndarray rows, int64_t count) except -1:
    if rows.ndim != 2 or rows.shape[0] != count or rows.shape[1] < 2:
        raise ValueError(f"rows of shape {(<object> rows).shape} for {count} texts")
    return rows.shape[1]


def keys_of(
    cnp.ndarray octets not None, cnp.ndarray ends not None, cnp.ndarray which not None, int bits, uint64_t probe,
    cnp.ndarray out not None,
) -> None:
    """out[i] = the key of text which[i] at a probe: 2^bits lanes by its hash, then a zero bit, then other hash bits.

    The lane is the same at all probes.
    """
    cdef int64_t count = _check(octets, ends, which), i, length
    cdef const int64_t *end = int64s(ends)
    cdef const int64_t *chosen = int64s(which)
    cdef const uint8_t *text = uint8s(octets)
    cdef const uint8_t *last = text + cnp.PyArray_SIZE(octets)
    cdef int64_t *keys = writeable_int64s(out)
    cdef uint64_t first, h, low
    if not 0 <= bits <= 32 or cnp.PyArray_SIZE(out) != count:
        raise ValueError(f"{bits} bits, and room for {cnp.PyArray_SIZE(out)} keys of {count} texts")
    low = (~<uint64_t> 0) >> (bits + 1)
    with nogil:
        for i in range(count):
            length = end[chosen[i] + 1] - end[chosen[i]]
            first = dps_hash_text(text + end[chosen[i]], length, last, 0)
            h = first if probe == 0 else dps_hash_text(text + end[chosen[i]], length, last, probe)
            first = first >> (64 - bits) << (64 - bits) if bits else 0
            keys[i] = <int64_t> ((first | (h & low)) ^ (<uint64_t> 1 << 63))


def pack(
    cnp.ndarray octets not None, cnp.ndarray ends not None, cnp.ndarray which not None, cnp.ndarray out not None
) -> int:
    """out[i] = the row of text which[i], without an id; the number of the first text that is too long, or -1."""
    cdef int64_t count = _check(octets, ends, which), i, length, width = _width(out, count)
    cdef int64_t room = (width - 1) * HEAD_BYTES, too_long = -1
    cdef const int64_t *end = int64s(ends)
    cdef const int64_t *chosen = int64s(which)
    cdef const uint8_t *text = uint8s(octets)
    cdef int64_t *row = writeable_int64s(out)
    if room >= 1 << LENGTH_BITS:
        raise ValueError(f"rows of {room} bytes of a word, whose length has {LENGTH_BITS} bits")
    with nogil:
        for i in range(count):
            length = end[chosen[i] + 1] - end[chosen[i]]
            if length > room:
                too_long = chosen[i]
                break
            row[0] = length
            memset(row + 1, 0, room)
            memcpy(row + 1, text + end[chosen[i]], length)
            row += width
    return too_long


def match(
    cnp.ndarray rows not None, cnp.ndarray octets not None, cnp.ndarray ends not None, cnp.ndarray which not None,
    cnp.ndarray ids not None, cnp.ndarray found not None,
) -> None:
    """Compare text which[i] with the word of rows[i], byte by byte: found[i] says how, and an id goes to ids[which[i]].

    `found` is uint8: UNBORN (0), FOUND (1), or OTHER (2), where the row is that of another word.
    """
    cdef int64_t count = _check(octets, ends, which), i, length, width = _width(rows, count)
    cdef int64_t room = (width - 1) * HEAD_BYTES
    cdef const int64_t *row = int64s(rows)
    cdef const int64_t *end = int64s(ends)
    cdef const int64_t *chosen = int64s(which)
    cdef const uint8_t *text = uint8s(octets)
    cdef int64_t *id_of = writeable_int64s(ids)
    cdef uint8_t *how = writeable_uint8s(found)
    if cnp.PyArray_SIZE(found) != count or cnp.PyArray_SIZE(ids) != cnp.PyArray_SIZE(ends) - 1:
        raise ValueError(f"room for {cnp.PyArray_SIZE(ids)} ids of {cnp.PyArray_SIZE(ends) - 1} texts")
    with nogil:
        for i in range(count):
            length = end[chosen[i] + 1] - end[chosen[i]]
            if row[0] == 0:
                how[i] = UNBORN
            elif (
                length == (row[0] & ((1 << LENGTH_BITS) - 1))
                and length <= room
                and memcmp(row + 1, text + end[chosen[i]], length) == 0
            ):
                how[i] = FOUND
                id_of[chosen[i]] = (row[0] >> LENGTH_BITS) - 1
            else:
                how[i] = OTHER
            row += width


def split(cnp.ndarray rows not None, bint decoded) -> list:
    """The words of rows, as bytes or decoded from UTF-8; None for a head of 0."""
    cdef int64_t count = rows.shape[0], i, length, width = _width(rows, count)
    cdef int64_t room = (width - 1) * HEAD_BYTES
    cdef const int64_t *row = int64s(rows)
    cdef list words = []
    for i in range(count):
        length = row[0] & ((1 << LENGTH_BITS) - 1)
        if row[0] == 0:
            words.append(None)
        elif length > room:
            raise ValueError(f"a word of {length} bytes in a row that has {room}")
        else:
            word = (<const char *> (row + 1))[:length]
            words.append(word.decode() if decoded else word)
        row += width
    return words
