"""Reductions: a partial result for each chunk and each shard, and how partial results are joined. Pure.

Sums of floats are pairwise within a chunk of some ten thousand elements, as numpy's are, and in float64 across chunks
and shards; so they are at least as exact as numpy's. Whole numbers wrap round as numpy's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["REDUCTIONS", "Reduction", "wrapped"]

# Partial result of a shard: plain values and arrays, because it travels.
Partial = Any


class Reduction(NamedTuple):
    """How a partial result is made of arrays, and how several become one.

    `of` takes the chunk's arrays, the number of its first element, and the reduction's parameter. `join` takes the
    partial results in the order of the elements, and the parameter.
    """

    of: Callable[[Sequence[np.ndarray], int, Any], Partial]
    join: Callable[[list[Partial], Any], Partial]


def plain(value: object) -> Partial:
    """A number of Python, or an array in the dtype in which partial results are added."""
    array = np.asarray(value)
    if array.ndim == 0:
        return array.item()
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def wrapped(number: int, dtype: np.dtype) -> np.generic:
    """A whole number as a fixed number of bits holds it."""
    return np.array([number % 2**64], np.uint64).astype(dtype)[0]


def _along(by_row: object) -> int | None:
    return -1 if by_row else None


def folded(ufunc: np.ufunc) -> Reduction:
    """A ufunc over all elements, or over each row (with a true parameter)."""

    def of(arrays: Sequence[np.ndarray], start: int, by_row: object) -> Partial:
        return plain(ufunc.reduce(arrays[0], axis=_along(by_row)))

    def join(partials: list[Partial], by_row: object) -> Partial:
        joined = partials[0]
        for each in partials[1:]:
            joined = ufunc(joined, each)
        return joined if by_row else plain(joined)

    return Reduction(of, join)


def _add(partials: list[Partial], parameter: object) -> Partial:
    if isinstance(partials[0], float):
        return _sum(partials)
    total = partials[0]
    for each in partials[1:]:
        total = total + each
    # Whole numbers travel as 64 bits.
    return (total + 2**63) % 2**64 - 2**63 if isinstance(total, int) else total


def _sum(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond the largest number
        return float(np.add.reduce(numbers))


def _multiply(partials: list[Partial], parameter: object) -> Partial:
    product = partials[0]
    for each in partials[1:]:
        product = product * each
    return (product + 2**63) % 2**64 - 2**63 if isinstance(product, int) else product


def _dot(arrays: Sequence[np.ndarray], start: int, parameter: object) -> Partial:
    first, second = arrays
    if parameter:  # row by row
        return plain(np.vecdot(first, second))
    if first.ndim == 2:
        return plain(sum(np.dot(a, b) for a, b in zip(first, second, strict=True)))
    return plain(np.dot(first, second))


def _matmul(arrays: Sequence[np.ndarray], start: int, parameter: object) -> Partial:
    first, second = arrays
    return plain(np.matmul(first, second.T))


def _moments(arrays: Sequence[np.ndarray], start: int, by_row: object) -> Partial:
    """[count, mean, sum of squared differences from the mean]."""
    values = arrays[0]
    axis = _along(by_row)
    count = values.shape[-1] if by_row else values.size
    mean = np.mean(values, axis=axis, dtype=np.float64 if values.dtype.kind != "f" else None, keepdims=True)
    centred = values - mean
    squares = np.add.reduce(np.square(centred, out=centred), axis=axis)
    return [count, plain(np.asarray(mean)[..., 0] if by_row else mean.item()), plain(squares)]


def _join_moments(partials: list[Partial], by_row: object) -> Partial:
    """By the rule of Chan, Golub and LeVeque, which subtracts no large numbers from each other."""
    count, mean, squares = partials[0]
    for more, other, others in partials[1:]:
        total = count + more
        difference = other - mean
        mean = mean + difference * (more / total)
        squares = squares + others + difference * difference * (count * more / total)
        count = total
    return [count, mean, squares]


def _place(choose: Callable[[np.ndarray], Any]) -> Reduction:
    """argmin or argmax: [value, number of the element]; of equal ones the first, and NaN before all others."""

    def of(arrays: Sequence[np.ndarray], start: int, by_row: object) -> Partial:
        values = arrays[0]
        if by_row:
            places = choose(values)
            return [np.take_along_axis(values, places[:, None], -1)[:, 0], places + start]
        place = int(choose(values))
        return [values[place].item(), place + start]

    def join(partials: list[Partial], by_row: object) -> Partial:
        values = np.array([each[0] for each in partials])
        places = np.array([each[1] for each in partials])
        if by_row:
            best = choose(values.T)
            rows = np.arange(values.shape[1])
            return [values[best, rows], places[best, rows]]
        first = int(choose(values))
        return partials[first]

    return Reduction(of, join)


def _most(count: int, numbers: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    """The largest values, the largest first; of equal ones those with the smallest numbers. NaN comes last."""
    order = np.lexsort((numbers, _ranks(values)))[:count]
    return [numbers[order], values[order]]


def _ranks(values: np.ndarray) -> np.ndarray:
    """Numbers that order the values downwards; NaN stays NaN, which numpy sorts last."""
    return -values if values.dtype.kind == "f" else ~values


def _top(arrays: Sequence[np.ndarray], start: int, count: int) -> Partial:
    values = arrays[0]
    return _largest(np.arange(start, start + len(values)), values, count)


def _largest(numbers: np.ndarray, values: np.ndarray, count: int) -> Partial:
    if count < len(values):
        # Without elements that are surely too small; equal ones at the border stay, because the first of them count.
        ranks = _ranks(values)
        bound = np.partition(ranks, count - 1)[count - 1]
        kept = np.flatnonzero(~(ranks > bound)) if bound == bound else np.arange(len(values))
    else:
        kept = np.arange(len(values))
    return _most(count, numbers[kept], values[kept])


def _join_top(partials: list[Partial], count: int) -> Partial:
    numbers, values = (np.concatenate([each[part] for each in partials]) for part in (0, 1))
    return _most(count, numbers, values)


def _values(arrays: Sequence[np.ndarray], start: int, parameter: object) -> Partial:
    return arrays[0].copy()


def _concatenate(partials: list[Partial], parameter: object) -> Partial:
    return partials[0] if len(partials) == 1 else np.concatenate(partials, axis=-1)


def _count(arrays: Sequence[np.ndarray], start: int, by_row: object) -> Partial:
    return plain(np.count_nonzero(arrays[0], axis=_along(by_row)))


def _positions(arrays: Sequence[np.ndarray], start: int, parameter: object) -> Partial:
    """Where elements are not zero: their numbers, or for a matrix [rows, columns]."""
    *rows, columns = np.nonzero(arrays[0])
    return [*rows, columns + start] if rows else columns + start


def _join_positions(partials: list[Partial], parameter: object) -> Partial:
    if not isinstance(partials[0], list):
        return _concatenate(partials, parameter)
    return [np.concatenate(each) for each in zip(*partials, strict=True)]


def _items(arrays: Sequence[np.ndarray], start: int, parameter: object) -> Partial:
    """The keys and values of elements that are not zero; with a third array, of those that this mask has."""
    keys, values = arrays[:2]
    which = np.flatnonzero(arrays[-1])
    return [keys[which], values[which]]


def _join_items(partials: list[Partial], parameter: object) -> Partial:
    return [np.concatenate([each[part] for each in partials]) for part in (0, 1)]


def _top_items(arrays: Sequence[np.ndarray], start: int, count: int) -> Partial:
    keys, values = _items(arrays, start, None)
    return _largest(keys, values, count)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction(folded(np.add).of, _add),
    "prod": Reduction(folded(np.multiply).of, _multiply),
    "min": folded(np.minimum),
    "max": folded(np.maximum),
    "all": folded(np.logical_and),
    "any": folded(np.logical_or),
    "argmin": _place(lambda values: np.argmin(values, axis=-1)),
    "argmax": _place(lambda values: np.argmax(values, axis=-1)),
    "dot": Reduction(_dot, _add),
    "matmul": Reduction(_matmul, _add),
    "moments": Reduction(_moments, _join_moments),
    "count": Reduction(_count, _add),
    "top": Reduction(_top, _join_top),
    "values": Reduction(_values, _concatenate),
    "selected": Reduction(lambda arrays, start, parameter: arrays[0][arrays[1]], _concatenate),
    "positions": Reduction(_positions, _join_positions),
    "items": Reduction(_items, _join_items),
    "rows": Reduction(lambda arrays, start, parameter: [each.copy() for each in arrays], _join_items),
    "top items": Reduction(_top_items, _join_top),
}
