"""Rows of libsvm's and libffm's text: labels, features and values, in one pass without the interpreter.

A line is a label and then tokens ``feature:value``, or ``field:feature:value`` of libffm. Lines that are empty or begin
with ``#`` are no rows; ``#`` ends a line, and tokens ``qid:...`` say nothing of a row's features.
"""

from libc.stdint cimport int32_t, int64_t, uint64_t

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport memory, writeable_int32s, writeable_int64s

from dps.errors import InputError

cnp.import_array()

cdef enum:
    MOST_DIGITS = 18  # a whole number of so many digits fits int64
    EXACT_POWER = 22  # powers of ten up to this one are exact doubles

cdef enum Trouble:
    NONE
    NO_LABEL
    NO_PAIR  # a token without its colons
    NO_FEATURE
    NO_FIELD
    NO_VALUE

cdef double[EXACT_POWER + 1] TENS

for power in range(EXACT_POWER + 1):
    TENS[power] = float(f"1e{power}")


cdef struct Text:
    const char *bytes
    int64_t at  # where reading is
    int64_t end
    int64_t start  # of the token that was read last
    int64_t stop


cdef bint _is_space(char c) noexcept nogil:
    return c == b" " or c == b"\t" or c == b"\r"


cdef bint _token(Text *text) noexcept nogil:
    """Move to the next token of the line; False at its end."""
    while text.at < text.end and _is_space(text.bytes[text.at]):
        text.at += 1
    text.start = text.at
    while text.at < text.end and not _is_space(text.bytes[text.at]) and text.bytes[text.at] != b"\n":
        if text.bytes[text.at] == b"#":
            break
        text.at += 1
    text.stop = text.at
    return text.stop > text.start


cdef void _skip_line(Text *text) noexcept nogil:
    while text.at < text.end and text.bytes[text.at] != b"\n":
        text.at += 1
    text.at += 1


cdef int64_t _colon(const Text *text, int64_t start) noexcept nogil:
    """The place of the next colon in the token, or -1."""
    cdef int64_t i
    for i in range(start, text.stop):
        if text.bytes[i] == b":":
            return i
    return -1


cdef int64_t _whole(const char *text, int64_t start, int64_t stop) noexcept nogil:
    """A whole number of 0 or more, or -1 if this is none."""
    cdef int64_t number = 0, i
    if not 0 < stop - start <= MOST_DIGITS:
        return -1
    for i in range(start, stop):
        if not b"0" <= text[i] <= b"9":
            return -1
        number = 10 * number + (text[i] - c"0")
    return number


cdef bint _plain(const char *text, int64_t start, int64_t stop, double *out) noexcept nogil:
    """Read a decimal of few digits, whose double is one exact multiplication or division; False for all others."""
    cdef uint64_t digits = 0
    cdef int64_t i = start, point = -1
    cdef bint negative = False
    if i < stop and (text[i] == b"-" or text[i] == b"+"):
        negative = text[i] == b"-"
        i += 1
    if not 0 < stop - i <= 16:  # digits and a point: below 2 ** 53
        return False
    while i < stop:
        if text[i] == b"." and point < 0:
            point = i
        elif b"0" <= text[i] <= b"9":
            digits = 10 * digits + <uint64_t> (text[i] - c"0")
        else:
            return False
        i += 1
    if digits > (<uint64_t> 1 << 53) or stop - start <= (1 if point >= 0 else 0) + negative:
        return False
    out[0] = <double> digits if point < 0 else <double> digits / TENS[stop - point - 1]
    if negative:
        out[0] = -out[0]
    return True


cdef bint _number(const char *text, int64_t start, int64_t stop, double *out) noexcept nogil:
    """Read a finite number; False if this is none."""
    if _plain(text, start, stop, out):
        return True
    with gil:
        try:
            out[0] = float(text[start:stop])
        except ValueError:
            return False
    return out[0] - out[0] == 0  # neither NaN nor infinite


def parse(bytes data not None, bint with_fields, int64_t first, int64_t features, int64_t n_fields) -> tuple:
    """(labels float64, indptr int64, features int64, fields int32, values float32) of the rows of a text.

    Features are numbered from `first` on, and end before `first + features`; fields begin at 0.
    """
    cdef int64_t most = data.count(b":") // (2 if with_fields else 1), lines = data.count(b"\n") + 1
    y, ends = np.empty(lines, np.float64), np.zeros(lines + 1, np.int64)
    indices, fields = np.empty(most, np.int64), np.empty(most if with_fields else 0, np.int32)
    values = np.empty(most, np.float32)
    cdef double *label = <double *> memory(y, cnp.NPY_FLOAT64, True)
    cdef int64_t *end = writeable_int64s(ends)
    cdef int64_t *index = writeable_int64s(indices)
    cdef int32_t *field = writeable_int32s(fields)
    cdef float *value = <float *> memory(values, cnp.NPY_FLOAT32, True)
    cdef Text text
    cdef int64_t rows = 0, count = 0, line = 0
    cdef Trouble trouble = NONE
    text.bytes, text.at, text.end, text.start, text.stop = data, 0, len(data), 0, 0
    with nogil:
        while text.at < text.end and trouble == NONE:
            line += 1
            if _token(&text):
                if not _number(text.bytes, text.start, text.stop, label + rows):
                    trouble = NO_LABEL
                    break
                while _token(&text):
                    trouble = _entry(&text, with_fields, first, features, n_fields, index, field, value, &count)
                    if trouble != NONE:
                        break
                rows += 1
                end[rows] = count
            _skip_line(&text)
    if trouble != NONE:
        _complain(trouble, line, data[text.start : text.stop], with_fields, first, features, n_fields)
    return y[:rows], ends[: rows + 1], indices[:count], fields[:count], values[:count]


cdef Trouble _entry(
    const Text *text, bint with_fields, int64_t first, int64_t features, int64_t n_fields, int64_t *index,
    int32_t *field, float *value, int64_t *count,
) noexcept nogil:
    """Append the token ``feature:value`` or ``field:feature:value``; nothing of ``qid:...``."""
    cdef int64_t start = text.start, colon = _colon(text, text.start), number, place = 0
    cdef double read
    if colon < 0:
        return NO_PAIR
    if colon - start == 3 and text.bytes[start] == b"q" and text.bytes[start + 1] == b"i":
        return NONE
    if with_fields:
        place = _whole(text.bytes, start, colon)
        if not 0 <= place < n_fields:
            return NO_FIELD
        start, colon = colon + 1, _colon(text, colon + 1)
        if colon < 0:
            return NO_PAIR
    number = _whole(text.bytes, start, colon)
    if not 0 <= number - first < features or number < 0:
        return NO_FEATURE
    if not _number(text.bytes, colon + 1, text.stop, &read):
        return NO_VALUE
    index[count[0]], value[count[0]] = number - first, <float> read
    if value[count[0]] - value[count[0]] != 0:
        return NO_VALUE
    if with_fields:  # not before: there is room for as many entries as there are pairs of colons
        field[count[0]] = <int32_t> place
    count[0] += 1
    return NONE


cdef int _complain(
    Trouble trouble, int64_t line, bytes token, bint with_fields, int64_t first, int64_t features, int64_t n_fields
) except -1:
    shown = repr(token[:60].decode("utf-8", "replace"))
    form = "field:feature:value" if with_fields else "feature:value"
    text = {
        NO_LABEL: f"{shown} is no label: a line begins with a finite number",
        NO_PAIR: f"{shown} is no {form}",
        NO_FEATURE: f"{shown} has no feature from {first} to {first + features - 1}",
        NO_FIELD: f"{shown} has no field from 0 to {n_fields - 1}",
        NO_VALUE: f"{shown} has no finite value",
    }
    raise InputError(text[trouble], line)
