"""Fingerprints of rows: 8 bytes that tell whether a row has the bits of another one, for rows of any dtype.

Theory of operation
-------------------
A row is a number of words of 32 bits, the last one filled up with zeros. Half of its fingerprint is the upper 32 bits
of m[0] + m[1] w[0] + m[2] w[1] + ... modulo 2^64, where the m are random numbers of 64 bits; the other half is the same
with other random numbers. This family of functions is strongly universal (Lemire and Kaser, "Strongly universal string
hashing is fast", The Computer Journal 57, 2014): two rows that differ have the same fingerprint with a probability of
2^-64, whatever the rows are, because these are chosen without knowledge of the m. The m follow from a `salt`, which the
controller draws at random for each table.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport memory
from dps.engine.core.mixing cimport dps_mix

cnp.import_array()

cdef enum:
    WORD = 4  # bytes

cdef uint64_t STEP = 0x9E3779B97F4A7C15  # of the numbers that are mixed, as in splitmix64


def fingerprints(cnp.ndarray rows not None, uint64_t salt) -> np.ndarray:
    """The fingerprint of each row of an array of two dimensions, as int64."""
    cdef cnp.npy_intp count
    cdef int64_t nbytes, words, n
    cdef uint64_t *multipliers
    cdef const uint8_t *row
    cdef uint64_t *prints
    cdef cnp.ndarray made
    if rows.ndim != 2:
        raise ValueError(f"rows have two dimensions, not {rows.ndim}")
    row = <const uint8_t *> memory(rows, cnp.PyArray_TYPE(rows), False)
    count, nbytes = rows.shape[0], rows.shape[1] * cnp.PyArray_ITEMSIZE(rows)
    words = (nbytes + WORD - 1) // WORD
    made = cnp.PyArray_EMPTY(1, &count, cnp.NPY_INT64, 0)
    prints = <uint64_t *> cnp.PyArray_DATA(made)
    multipliers = <uint64_t *> malloc(2 * (words + 1) * sizeof(uint64_t))
    if multipliers == NULL:
        raise MemoryError
    with nogil:
        for n in range(2 * (words + 1)):
            multipliers[n] = dps_mix(salt + <uint64_t> (n + 1) * STEP)
        for n in range(count):
            prints[n] = _fingerprint(row + n * nbytes, nbytes, multipliers)
        free(multipliers)
    return made


cdef uint64_t _fingerprint(const uint8_t *row, int64_t nbytes, const uint64_t *multipliers) noexcept nogil:
    """The fingerprint of one row. There are two multipliers for each word, and two that are added."""
    cdef uint64_t high = multipliers[0], low = multipliers[1]
    cdef int64_t words = nbytes // WORD, rest = nbytes - words * WORD, n
    cdef uint32_t word = 0
    for n in range(words):
        memcpy(&word, row + n * WORD, WORD)
        high += multipliers[2 * n + 2] * word
        low += multipliers[2 * n + 3] * word
    if rest:
        word = 0
        memcpy(&word, row + words * WORD, rest)
        high += multipliers[2 * words + 2] * word
        low += multipliers[2 * words + 3] * word
    return (high >> 32 << 32) | (low >> 32)
