"""Arguments and results of server functions as bytes: msgpack, with arrays as they lie in memory. Pure.

Plain values travel (None, bool, int, float, str, bytes, lists, tuples, dicts) and arrays and numbers of numpy, and what
the other end remembers (`remembered.py`). Nothing else does, because nothing that arrives in a frame is ever unpickled.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Container
from typing import Any

import msgspec
import numpy as np

from dps.engine.wire.frames import code_of
from dps.engine.wire.remembered import MEMORY, Remembered
from dps.errors import DPSError, InputError, InputTypeError, ProtocolError

__all__ = ["decode_values", "encode_values"]

# Codes among msgpack's extensions.
ARRAY = 1
REMEMBERED = 2
# Kinds of dtypes that are bytes and nothing else.
KINDS = "biufcSUmM"
# Pattern of such dtypes, as numpy writes them.
DTYPE = re.compile(rf"[<>|][{KINDS}]\d{{1,9}}(\[\w+\])?|bfloat16")
# Types of the keys of dicts.
KEYS = (str, bytes, bool, int, float, type(None))
# Types of values that contain no other values.
PLAIN = (*KEYS, bytearray, memoryview, np.generic, np.ndarray, Remembered)
COMMON = frozenset(KEYS)  # types that need no further look


def encode_values(value: object, what: str, known: Container[bytes] = ()) -> bytes:
    """The value as bytes; `what` names it in errors.

    Of what is remembered, the keys in `known` travel without their content.

    Raises InputTypeError if something in it is neither a plain value nor an array of numpy.
    Raises InputError if a whole number in it has more than 64 bits.

    Examples
    --------
    >>> decode_values(encode_values({"factor": 0.5, "keys": np.arange(2)}, "the arguments"))
    {'factor': 0.5, 'keys': array([0, 1])}
    """

    try:
        _check(value, what)
        return msgspec.msgpack.encode(value, enc_hook=functools.partial(_encode_other, known))
    except (OverflowError, RecursionError) as error:
        raise InputError(f"{what}: {error}; a whole number has at most 64 bits, and nothing contains itself") from None


def _check(value: object, what: str) -> None:
    """Refuse what msgpack would not encode, or would turn into something else, as it does sets and dates."""
    if isinstance(value, dict):
        for key, part in value.items():
            if type(key) not in COMMON and not isinstance(key, KEYS):
                raise _refusal(key, f"{what}: as a key of a dict")
            if type(part) not in COMMON:
                _check(part, what)
    elif isinstance(value, (list, tuple)):
        for part in value:
            if type(part) not in COMMON:
                _check(part, what)
    elif not isinstance(value, PLAIN):
        raise _refusal(value, what)
    elif isinstance(value, (np.generic, np.ndarray)) and not DTYPE.fullmatch(code_of(value.dtype)):
        raise InputTypeError(f"{what}: an array of dtype {value.dtype} does not travel; plain numbers and texts do")


def _refusal(value: object, what: str) -> InputTypeError:
    return InputTypeError(
        f"{what}: a {type(value).__module__}.{type(value).__qualname__} does not travel; plain values and numpy arrays "
        f"do: convert it, with np.asarray for instance"
    )


def _encode_other(known: Container[bytes], part: object) -> object:
    """A number of numpy as one of Python, if there is one; an array, and what is remembered, as an extension."""
    if isinstance(part, Remembered):
        return msgspec.msgpack.Ext(REMEMBERED, part.key if part.key in known else part.key + part.content)
    if isinstance(part, np.generic) and part.dtype.kind in "biufSU" and not isinstance(part, np.longdouble):
        return part.item()
    array = np.asarray(part)
    head = msgspec.msgpack.encode((code_of(array.dtype), array.shape))
    return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(2, "little") + head + array.tobytes())


def decode_values(data: bytes | memoryview) -> Any:
    """What :func:`encode_values` encoded; arrays are new and may be changed, tuples have become lists."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_other)
    except DPSError:
        raise
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"values that cannot be read: {error}") from None


def _decode_other(code: int, data: memoryview) -> np.ndarray | Remembered:
    if code == REMEMBERED:
        return MEMORY.take(bytes(data))
    if code != ARRAY:
        raise ProtocolError(f"values with an extension of code {code}; {ARRAY} (an array) and {REMEMBERED} are known")
    end = 2 + int.from_bytes(data[:2], "little")
    name, shape = msgspec.msgpack.decode(data[2:end], type=tuple[str, tuple[int, ...]])
    if not DTYPE.fullmatch(name):
        raise ProtocolError(f"an array of dtype {name[:80]!r}")
    dtype, count = np.dtype(name), math.prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize != len(data) - end:
        raise ProtocolError(f"an array of {name} {shape} in {len(data) - end} bytes")
    return np.frombuffer(data, dtype, count, end).reshape(shape).copy()
