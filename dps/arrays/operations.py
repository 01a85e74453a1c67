"""What can be computed element by element: numpy's ufuncs by name, and a few operations beside them. Pure.

A program that travels to a server names its operations, so nothing but what stands here can run there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from dps.errors import InputTypeError

__all__ = ["OPERATIONS", "UFUNCS", "checked", "loop_of", "name_of_ufunc"]

NAMES = """
absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_count bitwise_or bitwise_xor cbrt
ceil conjugate copysign cos cosh deg2rad divide equal exp exp2 expm1 fabs float_power floor floor_divide fmax fmin fmod
gcd greater greater_equal heaviside hypot invert isfinite isinf isnan lcm ldexp left_shift less less_equal log log10
log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum minimum multiply negative
nextafter not_equal positive power rad2deg reciprocal remainder right_shift rint sign signbit sin sinh spacing sqrt
square subtract tan tanh trunc degrees radians
"""
UFUNCS: dict[str, np.ufunc] = {name: getattr(np, name) for name in NAMES.split()}
# Kinds of dtypes: bool, whole numbers with and without a sign, floats.
KINDS = "biuf"
# Bytes of the widest element, because the rows of a table have no wider ones.
WIDEST = 8

# Function of numpy: (*operands, out=array).
Computed = Callable[..., object]


def where(condition: np.ndarray, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """As np.where, into memory that there is."""
    np.copyto(out, second)
    np.copyto(out, first, where=condition)


def cast(operand: np.ndarray, out: np.ndarray) -> None:
    """The same numbers in the dtype of `out`, as `astype` makes them."""
    np.copyto(out, operand, casting="unsafe")


def negated(operand: np.ndarray, out: np.ndarray) -> None:
    """The numbers with the other sign.

    Not by np.negative, because numpy 2.4 gives wrong numbers where both arrays are columns with the same strides.
    """
    np.multiply(operand, np.asarray(-1).astype(out.dtype), out=out)


def weighted(weights: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    np.matmul(weights, rows, out=out)


def over_rows(name: str) -> Computed:
    """The reduction of a matrix over its rows, for each column."""

    def reduce(operand: np.ndarray, out: np.ndarray) -> None:
        UFUNCS[name].reduce(operand, axis=0, out=out, dtype=out.dtype)

    return reduce


def stacked(*parts: np.ndarray, out: np.ndarray) -> None:
    """A matrix of rows, each a vector or those of another matrix."""
    first = 0
    for each in parts:
        count = len(each) if each.ndim == 2 else 1
        out[first : first + count] = each
        first += count


def place_over_rows(name: str) -> Computed:
    """For each column of a matrix the number of the row with the smallest or largest element."""

    def place(operand: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, getattr(np, name)(operand, axis=0))

    return place


def row(operand: np.ndarray, number: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, operand[int(number)])


def rows_at(operand: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out, operand[numbers])


FOLDED = ("add", "multiply", "maximum", "minimum", "logical_and", "logical_or")
OPERATIONS: dict[str, Computed] = {**UFUNCS, "where": where, "cast": cast, "weighted": weighted, "row": row}
OPERATIONS |= {"stacked": stacked, "rows_at": rows_at}
OPERATIONS["negative"] = negated
OPERATIONS |= {f"{name}_rows": over_rows(name) for name in FOLDED}
OPERATIONS |= {f"{name}_rows": place_over_rows(name) for name in ("argmin", "argmax")}

# Names of the ufuncs: np.abs is np.absolute, for instance.
NAME_OF = {ufunc: name for name, ufunc in UFUNCS.items()}


def name_of_ufunc(ufunc: np.ufunc) -> str | None:
    """Under which name programs have a ufunc; None: they do not have it."""
    return NAME_OF.get(ufunc)


def checked(dtype: np.dtype, what: str) -> np.dtype:
    if dtype.kind not in KINDS or dtype.itemsize > WIDEST or not dtype.isnative:
        raise InputTypeError(
            f"{what} gives {dtype}, and vectors on the servers have bool, whole numbers or floats of at most 64 bits: "
            f"convert with to_numpy() first"
        )
    return dtype


@lru_cache(maxsize=4096)
def loop_of(name: str, operands: tuple[np.dtype | type, ...]) -> tuple[np.dtype, ...]:
    """The dtypes of the loop that numpy takes for these operands, the result's last.

    A number of Python is given by its type, because it takes the dtype of its partner (NEP 50).
    """
    try:
        loop = UFUNCS[name].resolve_dtypes((*operands, None))
    except TypeError as error:
        raise InputTypeError(str(error)) from None
    for dtype in loop:
        checked(dtype, f"np.{name}")
    return loop
