"""Arguments and results of server functions as bytes: msgpack, with arrays as they lie in memory. Pure.

Plain values travel (None, bool, int, float, str, bytes, lists, tuples, dicts) and arrays and numbers of numpy. Nothing
else does, because nothing that arrives in a frame is ever unpickled.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from dps.errors import InputError, InputTypeError, ProtocolError

__all__ = ["decode_values", "encode_values"]

ARRAY = 1  # the code of an array among msgpack's extensions
KINDS = "biufcSUmM"  # of dtypes that are bytes and nothing else


def encode_values(value: object, what: str) -> bytes:
    """The value as bytes; `what` names it in errors.

    Raises
    ------
    InputTypeError
        Something in it is neither a plain value nor an array of numpy.
    InputError
        A whole number in it has more than 64 bits.

    Examples
    --------
    >>> decode_values(encode_values({"factor": 0.5, "keys": np.arange(2)}, "the arguments"))
    {'factor': 0.5, 'keys': array([0, 1])}
    """

    def encode_array(part: object) -> object:
        if isinstance(part, np.generic) and part.dtype.kind in "biuf":
            return part.item()
        if isinstance(part, np.generic):
            part = np.asarray(part)
        if isinstance(part, np.ndarray) and part.dtype.kind in KINDS:
            head = msgspec.msgpack.encode((part.dtype.str, part.shape))
            return msgspec.msgpack.Ext(ARRAY, len(head).to_bytes(2, "little") + head + part.tobytes())
        raise InputTypeError(
            f"{what}: a {type(part).__module__}.{type(part).__qualname__} does not travel; plain values and numpy "
            f"arrays do: convert it, with np.asarray for instance"
        )

    try:
        return msgspec.msgpack.encode(value, enc_hook=encode_array)
    except (OverflowError, RecursionError) as error:
        raise InputError(f"{what}: {error}; a whole number has at most 64 bits, and nothing contains itself") from None


def decode_values(data: bytes | memoryview) -> Any:
    """What :func:`encode_values` encoded; arrays are new and may be changed, tuples have become lists."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_array)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"values that cannot be read: {error}") from None


def _decode_array(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY:
        raise ProtocolError(f"values with an extension of code {code}; only {ARRAY}, an array, is known")
    end = 2 + int.from_bytes(data[:2], "little")
    name, shape = msgspec.msgpack.decode(data[2:end], type=tuple[str, tuple[int, ...]])
    dtype, count = np.dtype(name), math.prod(shape)
    if dtype.hasobject or min(shape, default=0) < 0 or count * dtype.itemsize != len(data) - end:
        raise ProtocolError(f"an array of {name} {shape} in {len(data) - end} bytes")
    return np.frombuffer(data, dtype, count, end).reshape(shape).copy()
