"""A user's function of the elements of vectors, carried out on the servers, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.arrays.evaluation import Elements
from dps.arrays.layout import PoolLayout
from dps.arrays.operations import checked
from dps.errors import InputError, InputTypeError
from dps.functions import Function, Rows

__all__ = ["check_zeros", "mapping", "result_dtype"]

# Number of elements that the function is given at a time.
CHUNK = 1 << 16
# Function of a user: (values, *others, [index=], **arguments) -> as many values.
Mapped = Callable[..., npt.ArrayLike]


class VectorMap:
    """The part that sets a vector to a user's function of others."""

    def __init__(self, function: Mapped):
        self.function = function
        self.__module__ = getattr(function, "__module__", None) or ""  # because it is not a function of dps itself
        self.__qualname__ = f"map {getattr(function, '__qualname__', type(function).__name__)}"

    def __call__(
        self,
        rows: Rows,
        layout: list[int] | None,
        inputs: list[list[Any]],
        output: list[Any],
        index: bool,
        arguments: dict[str, object],
    ) -> None:
        """Compute a block of a pool (`layout` is that of dense vectors) from others: [first, dtype] each."""
        first, dtype = output[0], np.dtype(output[1])
        if layout is None:
            elements = Elements(len(rows), 0, len(rows), rows.keys)
            operands = [np.ascontiguousarray(rows.before[:, column], kind) for column, kind in inputs]
            out = np.empty(elements.length, dtype)
            self._fill(out, operands, elements, index, arguments)
            rows.values[:, first] = out
            return
        place = PoolLayout(*layout)
        begin, end = place.extent(rows.shard)
        elements = Elements(end - begin, begin, place.size)
        if elements.length:
            values = rows.before[:, 0]
            operands = [place.view(values, number, 0, np.dtype(kind), end - begin) for number, kind in inputs]
            (out,) = place.fresh(rows.replace, [(first, 0, dtype)], end - begin)
            self._fill(out, operands, elements, index, arguments)

    def _fill(
        self,
        out: np.ndarray,
        operands: Sequence[np.ndarray],
        elements: Elements,
        index: bool,
        arguments: dict[str, object],
    ) -> None:
        for each in operands:
            each.flags.writeable = False
        for start in range(0, elements.length, CHUNK):
            stop = min(start + CHUNK, elements.length)
            numbers = {"index": elements.numbers(elements.begin + start, stop - start)} if index else {}
            found = np.asarray(self.function(*[each[start:stop] for each in operands], **numbers, **arguments))
            if found.shape != (stop - start,):
                raise InputError(
                    f"it returns a value for each of {stop - start} elements, not an array of shape {found.shape}"
                )
            np.copyto(out[start:stop], found, casting="same_kind")


def mapping(function: Mapped) -> Function:
    """A function for servers that sets a vector to `function` of others."""
    return Function(VectorMap(function), changes=True)


def result_dtype(function: Mapped, dtypes: Sequence[np.dtype], index: bool, arguments: dict[str, object]) -> np.dtype:
    """The dtype that a function gives for operands of these dtypes, by a trial with one element."""
    numbers = {"index": np.zeros(1, np.int64)} if index else {}
    found = _trial(function, [np.ones(1, dtype) for dtype in dtypes], numbers | arguments)
    return checked(found.dtype, "the function")


def check_zeros(part: Any, dtypes: Sequence[np.dtype], arguments: dict[str, object]) -> None:
    """Raise InputError if a function makes other numbers of the zeros of sparse vectors."""
    (number,) = _trial(part.function, [np.zeros(1, dtype) for dtype in dtypes], arguments)
    if number != 0 or number != number:
        raise InputError(
            f"{part.__qualname__}: the function makes {number} of each zero of a sparse vector, also at all keys that "
            f"it does not have: let it return 0 there, as np.where(values != 0, ..., 0) does"
        )


def _trial(function: Mapped, operands: Sequence[np.ndarray], arguments: dict[str, object]) -> np.ndarray:
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(function(*operands, **arguments))
    except Exception as error:
        raise InputTypeError(
            f"a trial of the function with vectors of one element has failed ({type(error).__name__}: {error}): name "
            f"the result's dtype, v.map(function, dtype=...), if the function needs others"
        ) from error
    if found.shape != (1,):
        raise InputError(f"the function returns a value for each element; for one it gave an array of {found.shape}")
    return found
