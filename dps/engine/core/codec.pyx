"""Rows of float32 as they travel between hosts, in fewer bytes than they have in memory: see codec.h."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint64_t
from libc.string cimport memcpy

cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, memory, uint8s, writeable_uint8s

from dps.engine.core.shards.rows cimport dps_scatter

cnp.import_array()

cdef extern from "codec.h" nogil:
    void dps_encode_float16(const float *rows, int64_t count, uint16_t *out)
    void dps_encode_bfloat16(const float *rows, int64_t count, uint16_t *out)
    void dps_encode_bytes(
        const float *rows,
        int64_t count,
        int64_t dim,
        const int64_t *keys,
        int64_t first,
        uint64_t seed,
        uint8_t *out,
    )
    void dps_decode_bytes(const uint8_t *coded, int64_t count, int64_t dim, float *out)

cdef extern from "halves.h" nogil:
    void dps_wide_float16(const uint16_t *halves, int64_t count, float *out)
    void dps_wide_bfloat16(const uint16_t *halves, int64_t count, float *out)

cdef enum:
    WIDE = 1 << 11  # numbers that are decoded at a time, before each row goes to its place

CODECS = {None: AS_IS, "float16": AS_FLOAT16, "bfloat16": AS_BFLOAT16, "int8": AS_INT8}


cdef void encode_rows(
    int codec,
    const char *rows,
    int64_t count,
    int64_t dim,
    const int64_t *keys,
    int64_t first,
    uint64_t seed,
    char *out,
) noexcept nogil:
    if codec == AS_FLOAT16:
        dps_encode_float16(<const float *> rows, count * dim, <uint16_t *> out)
    elif codec == AS_BFLOAT16:
        dps_encode_bfloat16(<const float *> rows, count * dim, <uint16_t *> out)
    else:
        dps_encode_bytes(<const float *> rows, count, dim, keys, first, seed, <uint8_t *> out)


cdef void decode_rows(int codec, const char *coded, int64_t count, int64_t dim, char *out) noexcept nogil:
    if codec == AS_FLOAT16:
        dps_wide_float16(<const uint16_t *> coded, count * dim, <float *> out)
    elif codec == AS_BFLOAT16:
        dps_wide_bfloat16(<const uint16_t *> coded, count * dim, <float *> out)
    else:
        dps_decode_bytes(<const uint8_t *> coded, count, dim, <float *> out)


cdef void place_rows(
    int codec,
    const char *coded,
    int64_t count,
    int64_t dim,
    int64_t row_bytes,
    const int32_t *order,
    int64_t a,
    char *room,
) noexcept nogil:
    """Put rows that have travelled in places a, a + 1, ... of `room`; or, with an `order`, in places order[a], ..."""
    cdef float wide[WIDE]
    cdef int64_t arrived = coded_bytes(codec, dim, row_bytes), done = 0, n
    if order == NULL and codec == AS_IS:
        memcpy(room + a * row_bytes, coded, count * row_bytes)
    elif order == NULL:
        decode_rows(codec, coded, count, dim, room + a * row_bytes)
    elif codec == AS_IS:
        dps_scatter(coded, order + a, count, room, row_bytes)
    elif dim > WIDE:
        for n in range(count):
            decode_rows(codec, coded + n * arrived, 1, dim, room + order[a + n] * row_bytes)
    else:
        while done < count:
            n = min(count - done, WIDE // dim)
            decode_rows(codec, coded + done * arrived, n, dim, <char *> wide)
            dps_scatter(<const char *> wide, order + a + done, n, room, row_bytes)
            done += n


def bytes_of_row(int codec, int64_t dim, int64_t row_bytes) -> int:
    """The bytes of a row of `dim` numbers as it travels; `row_bytes` are those that it has in memory."""
    return coded_bytes(codec, dim, row_bytes)


cdef int _check(cnp.ndarray rows, cnp.ndarray coded, int codec) except -1:
    if not AS_IS < codec <= AS_INT8:
        raise ValueError(f"there is no codec {codec}")
    if rows.ndim != 2 or cnp.PyArray_SIZE(coded) != rows.shape[0] * coded_bytes(codec, rows.shape[1], 0):
        shape = (<object> rows).shape
        raise ValueError(f"{cnp.PyArray_SIZE(coded)} bytes are not rows of shape {shape} by codec {codec}")
    return 0


def encode(
    int codec, cnp.ndarray rows not None, cnp.ndarray out not None, cnp.ndarray keys=None, uint64_t seed=0
) -> None:
    """Write rows of float32 [n, dim] to `out`, bytes, as they travel.

    With a `seed`, int8 rounds up or down at random, as follows from the seed and the row's key (or, without keys, its
    number); with 0 it rounds to the nearest.
    """
    cdef const char *given = <const char *> memory(rows, cnp.NPY_FLOAT32, False)
    cdef char *made = <char *> writeable_uint8s(out)
    cdef const int64_t *named = NULL
    cdef int64_t count, dim
    _check(rows, out, codec)
    count, dim = rows.shape[0], rows.shape[1]
    if keys is not None:
        named = int64s(keys)
        if cnp.PyArray_SIZE(keys) != count:
            raise ValueError(f"{cnp.PyArray_SIZE(keys)} keys of {count} rows")
    with nogil:
        encode_rows(codec, given, count, dim, named, 0, seed, made)


def decode(int codec, cnp.ndarray coded not None, cnp.ndarray out not None) -> None:
    """Write the rows that :func:`encode` wrote to `coded` to `out`, float32 [n, dim]."""
    cdef const char *given = <const char *> uint8s(coded)
    cdef char *made = <char *> memory(out, cnp.NPY_FLOAT32, True)
    cdef int64_t count, dim
    _check(out, coded, codec)
    count, dim = out.shape[0], out.shape[1]
    with nogil:
        decode_rows(codec, given, count, dim, made)
