"""What a collective answers: allreduce, allgather, broadcast and barrier as functions of what everybody has brought."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from dps.errors import DPSError, InputError, LimitError
from dps.wire import frames

__all__ = ["COLLECT_LIMIT", "answer", "reduce"]

COLLECT_LIMIT = 1 << 24  # bytes of one trainer's part of a collective, and of an answer: they are for small things
NUMBERS: Any = re.compile("[<>|][biufc][0-9]{1,2}")  # dtypes; numpy takes much more
REDUCTIONS: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def answer(about: str, parts: dict[int, bytes]) -> bytes | DPSError:
    """What all who meet are told."""
    try:
        return reduce(about, parts)
    except DPSError as error:
        return error


def reduce(about: str, parts: dict[int, bytes]) -> bytes:
    """What a collective answers: in trainer order, so that the same parts give the same bits."""
    try:
        wish = frames.decode_json(about.encode())
        if wish["op"] == "allgather":  # of any sizes: `frames.pack_item`
            if (size := sum(map(len, parts.values()))) > COLLECT_LIMIT:
                raise LimitError(f"a collective takes up to {COLLECT_LIMIT} bytes, not {size}: use a table")
            return b"".join(parts[n] for n in sorted(parts))
        op, shape, dtype = wish["op"], tuple(wish["shape"]), np.dtype(NUMBERS.fullmatch(wish["dtype"])[0])
        arrays = [np.frombuffer(parts[n], dtype, math.prod(shape)).reshape(shape) for n in sorted(parts)]
        if op == "barrier":
            return b""
        if op == "broadcast":
            root = int(wish["root"])
            if root not in parts:
                raise InputError(f"broadcast from trainer {root}, which is not in the run (any more)")
            return parts[root].ljust(frames.padded(len(parts[root])), b"\0")
        result = np.ascontiguousarray(REDUCTIONS[op](np.stack(arrays), axis=0), dtype).tobytes()
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        raise (
            error if isinstance(error, DPSError) else InputError(f"a collective that cannot be done: {about}: {error}")
        ) from None
    return result.ljust(frames.padded(len(result)), b"\0")
