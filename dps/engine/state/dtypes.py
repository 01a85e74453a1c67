"""The dtypes of tables.

Whole numbers are added and summed as numpy adds them: what does not fit wraps around. So a sum of pushes does not
depend on where they are added up, because it is exact modulo a power of two.
"""

from __future__ import annotations

import numpy as np

__all__ = ["DTYPES", "FLOATS", "NARROW", "WHOLE", "range_of"]

FLOATS = ("float32", "float64")
NARROW = ("int32", "int16", "uint8")  # their values are checked when they are pushed: see `client/inputs.py`
WHOLE = ("int64", *NARROW)
DTYPES = (*FLOATS, *WHOLE)


def range_of(dtype: str) -> tuple[int, int]:
    """The least and the largest number of a dtype of whole numbers.

    >>> range_of("int16"), range_of("uint8")
    ((-32768, 32767), (0, 255))
    """
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)
