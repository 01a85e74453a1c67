"""Values of rows for arithmetic that narrow whole numbers could not hold."""

from __future__ import annotations

import numpy as np

__all__ = ["wide"]


def wide(values: np.ndarray) -> np.ndarray:
    """Whole numbers as int64, because products and sums of narrow ones would wrap around; other values as they are.

    >>> wide(np.array([200], np.uint8)) ** 2
    array([40000])
    """
    return values.astype(np.int64, copy=False) if values.dtype.kind in "iu" else values
