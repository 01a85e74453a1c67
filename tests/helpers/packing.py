"""Packed keys in numpy: how many bytes they take, and what they are."""

from __future__ import annotations

import itertools

import numpy as np

__all__ = ["size_of", "unpacked"]

BLOCK = 256


def width_of(numbers: np.ndarray) -> int:
    """The bytes that the largest of some numbers needs."""
    return -(-int(numbers.astype(np.uint64).max(initial=0)).bit_length() // 8)


def size_of(keys: np.ndarray) -> int:
    """The bytes that keys take when they are packed."""
    nbytes = 0
    for block in np.split(keys, range(BLOCK, len(keys), BLOCK)) if len(keys) else ():
        between = width_of(np.diff(block.astype(np.uint64)))  # which wraps, as keys do
        within = width_of(np.uint64([int(block.max()) - int(block.min())]))
        width, count = (between, len(block) - 1) if between < within else (within, len(block))
        nbytes += 1 + (8 + width * count if width < 8 else 8 * len(block))
    return -(-nbytes // 8) * 8


def unpacked(packed: bytes, count: int) -> np.ndarray:
    """The keys, read by one number after the other."""
    keys, at = [], 0
    while len(keys) < count:
        n, form = min(BLOCK, count - len(keys)), packed[at]
        at, width, differences = at + 1, form & 15, bool(form & 16)
        if width == 8:
            keys += np.frombuffer(packed, np.int64, n, at).tolist()
            at += 8 * n
            continue
        base = int.from_bytes(packed[at : at + 8], "little")
        at, numbers = at + 8, [0] * (n - differences)
        shift = 0
        for part in (4, 2, 1):
            if width & part:
                for i in range(len(numbers)):
                    numbers[i] |= int.from_bytes(packed[at : at + part], "little") << shift
                    at += part
                shift += 8 * part
        found = itertools.accumulate([base, *numbers]) if differences else [base + number for number in numbers]
        keys += [(number + (1 << 63)) % (1 << 64) - (1 << 63) for number in found]
    return np.array(keys, np.int64)
