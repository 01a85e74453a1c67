"""The dtypes of tables.

Whole numbers are added and summed as numpy adds them: what does not fit wraps around. So a sum of pushes does not
depend on where they are added up, because it is exact modulo a power of two.

Halves are numbers of 16 bits with a fraction. They are widened to float32 for arithmetic, and what is computed is
rounded once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.engine.core.numbers import know_bfloat16, narrow, widen
from dps.errors import needing

__all__ = ["DTYPES", "FLOATS", "HALVES", "MOST_FLOAT16", "NARROW", "REALS", "WHOLE", "dtype_of", "dtype_of_sums"]
__all__ += ["is_half", "narrowed", "range_of", "widened"]

FLOATS = ("float32", "float64")
HALVES = ("float16", "bfloat16")
REALS = (*FLOATS, *HALVES)
MOST_FLOAT16 = 65504  # the largest number of float16; the others reach 3e38 or more
NARROW = ("int32", "int16", "uint8")  # their values are checked when they are pushed: see `client/inputs.py`
WHOLE = ("int64", *NARROW)
DTYPES = (*FLOATS, *WHOLE, *HALVES)


def range_of(dtype: str) -> tuple[int, int]:
    """The least and the largest number of a dtype of whole numbers.

    >>> range_of("int16"), range_of("uint8")
    ((-32768, 32767), (0, 255))
    """
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def dtype_of(dtype: npt.DTypeLike) -> np.dtype:
    """numpy's dtype of that name. numpy knows bfloat16 only once `ml_dtypes` has been imported, which this does.

    >>> dtype_of("float16")
    dtype('float16')

    Raises
    ------
    MissingPackageError
        bfloat16 is asked for, and `ml_dtypes` is not installed.
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        with needing("bfloat16"):
            import ml_dtypes  # noqa: F401  # numpy knows the name from then on
    found = np.dtype(dtype)
    if found.name == "bfloat16":
        know_bfloat16(found.num)
    return found


def is_half(dtype: npt.DTypeLike) -> bool:
    """Whether numbers of this dtype are widened for arithmetic."""
    return np.dtype(dtype).name in HALVES


def dtype_of_sums(dtype: str) -> str:
    """The dtype of sums of pushes: float32 for halves, so that a sum is rounded once, when its clock is closed."""
    return "float32" if is_half(dtype) else dtype


def widened(values: np.ndarray) -> np.ndarray:
    """Halves as float32, which is exact; other values as they are.

    >>> widened(np.array([0.5, 2], np.float16))
    array([0.5, 2. ], dtype=float32)
    """
    if not is_half(values.dtype):
        return values
    wide = np.empty(values.shape, np.float32)
    widen(np.ascontiguousarray(values), wide)
    return wide


def narrowed(values: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """float32 or float64 rounded to halves once, to the nearest, ties to even. What lies beyond becomes infinite.

    For a dtype that is no half, the values are returned as they are.
    numpy rounds float64 to float32 first on the way to bfloat16, so a number near a tie would be rounded twice.

    >>> narrowed(np.array([0.1, 70000.0]), "float16")
    array([0.1, inf], dtype=float16)
    """
    if not is_half(dtype):
        return values
    made = np.empty(values.shape, dtype)
    if values.dtype not in (np.float32, np.float64):
        values = values.astype(np.float64)
    narrow(np.ascontiguousarray(values), made)
    return made
