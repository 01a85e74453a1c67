"""The result of a collective: allreduce, allgather, broadcast and barrier as functions of all trainers' parts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.engine.wire import frames
from dps.errors import DPSError, InputError, LimitError

__all__ = ["MAX_COLLECTED_BYTES", "answer", "reduce"]

# Size of one trainer's part, and of the result, because collectives are for small arrays.
MAX_COLLECTED_BYTES = 1 << 24
# Pattern of the dtypes that are taken, because numpy accepts many others.
NUMERIC_DTYPE: Any = re.compile("[<>|][biufc][0-9]{1,2}")
REDUCTIONS: dict[str, Callable[..., npt.ArrayLike]] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def answer(description: str, parts: dict[int, bytes]) -> bytes | DPSError:
    try:
        return reduce(description, parts)
    except DPSError as error:
        return error


def reduce(description: str, parts: dict[int, bytes]) -> bytes:
    """The result of a collective. Parts are reduced in the order of trainers, so equal parts give equal bits."""
    try:
        call = frames.decode_json(description.encode())
        if call["op"] == "allgather":  # its parts may have any sizes, because `frames.pack_item` keeps the length
            if (size := sum(map(len, parts.values()))) > MAX_COLLECTED_BYTES:
                raise LimitError(f"a collective takes up to {MAX_COLLECTED_BYTES} bytes, not {size}: use a table")
            return b"".join(parts[n] for n in sorted(parts))
        op = call["op"]
        shape = tuple(call["shape"])
        dtype = np.dtype(NUMERIC_DTYPE.fullmatch(call["dtype"])[0])
        arrays = [np.frombuffer(parts[n], dtype, math.prod(shape)).reshape(shape) for n in sorted(parts)]
        if op == "barrier":
            return b""
        if op == "broadcast":
            root = int(call["root"])
            if root not in parts:
                raise InputError(f"broadcast from trainer {root}, which is not in the run (any more)")
            return parts[root].ljust(frames.padded(len(parts[root])), b"\0")
        result = np.ascontiguousarray(REDUCTIONS[op](np.stack(arrays), axis=0), dtype).tobytes()
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        raise (
            error
            if isinstance(error, DPSError)
            else InputError(f"this collective cannot be computed: {description}: {error}")
        ) from None
    return result.ljust(frames.padded(len(result)), b"\0")
