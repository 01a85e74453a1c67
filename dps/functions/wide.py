"""Values of rows for arithmetic that their own dtype is too narrow for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dps.functions import Rows

__all__ = ["BLOCK", "blocks", "changing", "wide"]

BLOCK = 1 << 15  # numbers that are taken at a time, so that what is made of them stays in the processor's cache


def wide(values: np.ndarray) -> np.ndarray:
    """Whole numbers as int64, because products and sums of narrow ones would wrap around; halves as float32.

    Other values are returned as they are.

    >>> wide(np.array([200], np.uint8)) ** 2
    array([40000])
    """
    if values.dtype.kind in "iu":
        return values.astype(np.int64, copy=False)
    return values.astype(np.float32) if values.dtype.itemsize == 2 else values


def blocks(values: np.ndarray) -> list[np.ndarray]:
    """The values, some rows at a time."""
    step = max(1, BLOCK // max(1, values.shape[1]))
    return [values[a : a + step] for a in range(0, len(values), step)]


def changing(rows: Rows) -> Iterator[np.ndarray]:
    """The values of rows, some rows at a time, to be changed in place; halves as float32, which are rounded at last."""
    for block in blocks(rows.values):
        if block.dtype.kind in "iu" or block.dtype.itemsize > 2:
            yield block
        else:
            widened = wide(block)
            yield widened
            block[...] = widened
