"""Keys as they travel in fewer than 8 bytes, in whole words: see packed_keys.h. Lists of keys travel so.

Whole words are filled up with zeros.
"""

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memset

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, uint8s, writeable_int64s, writeable_uint8s

cnp.import_array()


cdef void pack_keys(const int64_t *keys, int64_t count, char *out) noexcept nogil:
    cdef uint8_t *end = dps_pack_keys(keys, count, <uint8_t *> out)
    memset(end, 0, whole_words(end - <uint8_t *> out) - (end - <uint8_t *> out))


def packed_bytes(cnp.ndarray keys not None) -> int:
    """The bytes that keys take when they are packed."""
    return whole_words(dps_packed_bytes(int64s(keys), cnp.PyArray_SIZE(keys)))


def pack(cnp.ndarray keys not None, cnp.ndarray out not None) -> None:
    """Write keys to `out`, which has just the bytes for them."""
    cdef const int64_t *given = int64s(keys)
    cdef char *made = <char *> writeable_uint8s(out)
    cdef int64_t count = cnp.PyArray_SIZE(keys)
    if cnp.PyArray_SIZE(out) != whole_words(dps_packed_bytes(given, count)):
        raise ValueError(f"{count} keys take other than {cnp.PyArray_SIZE(out)} bytes")
    with nogil:
        pack_keys(given, count, made)


def unpack(cnp.ndarray packed not None, cnp.ndarray out not None) -> None:
    """Write the keys that :func:`pack` wrote to `packed` to `out`, int64.

    Raises ValueError where `packed` has not just so many keys.
    """
    cdef const uint8_t *given = uint8s(packed)
    cdef int64_t *made = writeable_int64s(out)
    cdef int64_t count = cnp.PyArray_SIZE(out), nbytes = cnp.PyArray_SIZE(packed)
    if not are_packed(given, nbytes, count):
        raise ValueError(f"{nbytes} bytes are not {count} packed keys")
    with nogil:
        dps_unpack_keys(given, count, made)
