"""Functions that come with dps: aggregates, changes element by element, initial values, and queries.

They are written with :func:`dps.function`, as a user's own are, and need no registration. All take the rows that a call
names with ``keys=``, or all rows of the table.

================== ====================================================================================================
aggregates         `amax`, `amin`, `asum`, `max`, `min`, `sum`, `mean`, `dot`, `nnz`, `nrm2`, `equal`, `size`
element by element `map_values` with `abs`, `sqrt`, ...; `add_scalar`, `scale`, `divide`, `power`, `clip`,
                   `soft_threshold`; `combine` with values by key
column by column   `combine_columns` with `add`, `subtract`, ...; `axpy`, `copy`
initial values     `fill`, `zeros`, `uniform`, `normal`
queries            `where`, `top_k`, `sample`, `dots`, `key_range`
================== ====================================================================================================
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable

import numpy as np

from dps.engine.functions.combining import BINARY, combine, known
from dps.errors import InputError
from dps.functions import Function, Rows, function
from dps.functions.wide import BLOCK, blocks, changing, wide

__all__ = [
    "BINARY",
    "UNARY",
    "add_scalar",
    "amax",
    "amin",
    "asum",
    "axpy",
    "clip",
    "combine",
    "combine_columns",
    "copy",
    "divide",
    "dot",
    "dots",
    "equal",
    "fill",
    "key_range",
    "map_values",
    "max",
    "mean",
    "min",
    "nnz",
    "normal",
    "nrm2",
    "power",
    "sample",
    "scale",
    "size",
    "soft_threshold",
    "sum",
    "top_k",
    "uniform",
    "where",
    "zeros",
]

ALL = slice(None)
REALS = ("float32", "float64", "float16", "bfloat16")
UNARY = {
    name: getattr(np, name)
    for name in ("abs", "sqrt", "exp", "expm1", "log", "log10", "log1p", "ceil", "floor", "rint", "sign", "negative")
}


def _extreme(parts: list[float | None], choose: Callable[[list[float]], np.generic], what: str) -> float:
    found = [part for part in parts if part is not None]
    if not found:
        raise InputError(f"{what} of no rows: the table, or the keys named, have none")
    return choose(found).item()


# -- aggregates


@function
def amax(rows: Rows) -> np.number | None:
    """The largest absolute value."""
    return np.abs(wide(rows.values)).max() if len(rows) else None


amax.merge(lambda parts: _extreme(parts, np.max, "amax"))


@function
def amin(rows: Rows) -> np.number | None:
    """The smallest absolute value."""
    return np.abs(wide(rows.values)).min() if len(rows) else None


amin.merge(lambda parts: _extreme(parts, np.min, "amin"))


@function
def max(rows: Rows) -> np.number | None:  # noqa: A001
    """The largest value."""
    return wide(rows.values).max() if len(rows) else None


max.merge(lambda parts: _extreme(parts, np.max, "max"))


@function
def min(rows: Rows) -> np.number | None:  # noqa: A001
    """The smallest value."""
    return wide(rows.values).min() if len(rows) else None


min.merge(lambda parts: _extreme(parts, np.min, "min"))


def _exact(parts: list[float]) -> float:
    return builtins.sum(parts) if all(isinstance(part, int) for part in parts) else math.fsum(parts)


def _total(values: np.ndarray) -> float:
    whole = values.dtype.kind in "iu"
    return builtins.sum(block.sum(dtype=np.int64 if whole else np.float64).item() for block in blocks(values))


@function
def sum(rows: Rows) -> float:  # noqa: A001
    """The sum of all values, in float64 (of whole numbers: exact)."""
    return _total(rows.values)


sum.merge(_exact)


@function
def asum(rows: Rows) -> float:
    """The sum of the absolute values, in float64: the 1-norm."""
    return builtins.sum(_total(np.abs(wide(block))) for block in blocks(rows.values))


asum.merge(_exact)


@function
def mean(rows: Rows) -> tuple[float, int]:
    """The mean of all values."""
    return _total(rows.values), rows.values.size


@mean.merge
def _(parts: list[tuple[float, int]]) -> float:
    count = builtins.sum(part[1] for part in parts)
    if not count:
        raise InputError("mean of no rows: the table, or the keys named, have none")
    return float(_exact([part[0] for part in parts]) / count)


def _squares(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(
        float(np.vdot(x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)))
        for x, y in zip(blocks(a), blocks(b), strict=True)
    )


@function
def nrm2(rows: Rows) -> float:
    """The 2-norm of all values, in float64."""
    return _squares(rows.values, rows.values)


nrm2.merge(lambda parts: math.sqrt(math.fsum(parts)))


@function
def dot(rows: Rows, a: int = 0, b: int = 1) -> float:
    """The inner product of two columns, in float64."""
    return _squares(rows.values[:, a, None], rows.values[:, b, None])


dot.merge(math.fsum)


@function
def nnz(rows: Rows) -> int:
    """How many values are not zero."""
    return int(np.count_nonzero(rows.values))


nnz.merge(_exact)


@function
def size(rows: Rows) -> int:
    """How many rows there are."""
    return int(np.count_nonzero(rows.present))


size.merge(_exact)


@function
def equal(rows: Rows, a: int = 0, b: int = 1) -> bool:
    """Whether two columns are equal."""
    return bool(np.array_equal(rows.values[:, a], rows.values[:, b]))


equal.merge(all)


# -- element by element


@function(changes=True)
def map_values(rows: Rows, name: str) -> None:
    """Replace each value by a function of it, one of `UNARY`: ``"abs"``, ``"sqrt"``, ``"exp"``, ``"log1p"``, ..."""
    made = known(UNARY, name)
    for block in changing(rows):
        made(block, out=block, casting="same_kind")


@function(changes=True)
def add_scalar(rows: Rows, value: float) -> None:
    """Add a number to each value."""
    for values in changing(rows):
        values += value


@function(changes=True)
def scale(rows: Rows, value: float) -> None:
    """Multiply each value by a number."""
    for values in changing(rows):
        values *= value


@function(changes=True)
def divide(rows: Rows, value: float) -> None:
    """Divide each value by a number."""
    for values in changing(rows):
        values /= value


@function(changes=True)
def power(rows: Rows, value: float) -> None:
    """Raise each value to a power."""
    for values in changing(rows):
        values **= value


@function(changes=True)
def clip(rows: Rows, low: float | None = None, high: float | None = None) -> None:
    """Bring each value into the range."""
    for values in changing(rows):
        np.clip(values, low, high, out=values)


@function(changes=True)
def soft_threshold(rows: Rows, value: float) -> None:
    """Move each value towards zero by `value`, at most to zero."""
    for block in changing(rows):
        block[...] = np.sign(block) * np.maximum(np.abs(block) - value, 0)


# -- column by column


@function(changes=True)
def combine_columns(rows: Rows, name: str, a: int, b: int, to: int) -> None:
    """Set a column to a function of two columns, one of `BINARY`: ``"add"``, ``"maximum"``, ..."""
    for values in changing(rows):
        values[:, to] = known(BINARY, name)(values[:, a], values[:, b])


@function(changes=True)
def axpy(rows: Rows, value: float, x: int, y: int) -> None:
    """Add `value` times column `x` to column `y`."""
    for values in changing(rows):
        values[:, y] += values.dtype.type(value) * values[:, x]


@function(changes=True)
def copy(rows: Rows, a: int, to: int) -> None:
    """Copy a column to another one."""
    rows.values[:, to] = rows.values[:, a]


# -- initial values


@function(changes=True)
def fill(rows: Rows, value: float) -> None:
    """Set each value to a number."""
    rows.replace(0, len(rows))[...] = value


@function(changes=True)
def zeros(rows: Rows) -> None:
    """Set each value to zero."""
    rows.replace(0, len(rows))[...] = 0


@function(changes=True, dtypes=REALS)
def uniform(rows: Rows, low: float = 0.0, high: float = 1.0) -> None:
    """Draw each value between two numbers."""
    rows.replace(0, len(rows))[...] = rows.rng.uniform(low, high, (len(rows), rows.spec.dim))


@function(changes=True, dtypes=REALS)
def normal(rows: Rows, mean: float = 0.0, std: float = 1.0) -> None:
    """Draw each value from a normal distribution."""
    rows.replace(0, len(rows))[...] = rows.rng.normal(mean, std, (len(rows), rows.spec.dim))


# -- queries


def _columns(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The keys of all parts, and what stands beside them; empty where a call names no rows."""
    if not parts:
        return [np.empty(0, np.int64), np.empty(0)]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def _scores(rows: Rows, by: str, query: np.ndarray | None, which: slice = ALL) -> np.ndarray:
    """A number for each of these rows: its value, its norm, or its inner product with the query."""
    values = wide(rows.values[which])
    if by == "value":
        if rows.spec.dim != 1:
            raise InputError(f"rows of dim {rows.spec.dim} have no single value: order them by 'norm' or by 'dot'")
        return values[:, 0]
    if by == "norm":
        return np.sqrt(np.einsum("ij,ij->i", values, values))
    if by == "dot":
        shape = None if query is None else np.shape(query)
        if query is None or shape != (rows.spec.dim,):
            raise InputError(f"the query has shape {shape}; a row has {rows.spec.dim} values")
        return values @ np.asarray(query, values.dtype)
    raise InputError(f"rows are ordered by 'value', 'norm' or 'dot', not by {by!r}")


def _leaders(rows: Rows, k: int, by: str, query: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The places and scores of the k rows with the largest scores, block by block; scores of NaN are left out.

    A block is left as soon as its largest score is known, unless that is among the k largest so far.
    """
    places, scores = np.empty(0, np.int64), np.empty(0)
    step = builtins.max(k, BLOCK // 2)
    for first in range(0, len(rows), step):
        found = _scores(rows, by, query, slice(first, first + step))
        if len(scores) == k and not np.fmax.reduce(found) > scores[-1]:
            continue
        new = np.flatnonzero(found > scores[-1]) if len(scores) == k else np.flatnonzero(found == found)
        both = np.concatenate([scores.astype(found.dtype), found[new]])
        chosen = _largest(both, k)
        places, scores = np.concatenate([places, new + first])[chosen], both[chosen]
    return places, scores


def _largest(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the k largest numbers, the largest first; of equal ones, the first."""
    if k <= 0:
        return np.empty(0, np.int64)
    if k < len(scores):
        least = np.partition(scores, len(scores) - k)[len(scores) - k]
        above = np.flatnonzero(scores > least)
        found = np.concatenate([above, np.flatnonzero(scores == least)[: k - len(above)]])
    else:
        found = np.arange(len(scores))
    return found[np.argsort(-scores[found], kind="stable")]


@function
def top_k(
    rows: Rows, k: int, by: str = "value", query: np.ndarray | None = None, values: bool = False
) -> list[np.ndarray]:
    """The rows with the largest values, norms, or inner products with a query.

    Parameters
    ----------
    k : int
        How many.
    by : {"value", "norm", "dot"}
    query : ndarray [dim]
        For ``by="dot"``.
    values : bool
        Return the rows' values, too.

    Returns
    -------
    keys, scores : ndarray
        The largest score first; with `values`, also their values [k, dim].
    """
    if k < 1:
        raise InputError(f"k is how many rows, 1 or more, not {k}")
    found, scores = _leaders(rows, k, by, query)
    return [rows.keys[found], scores, *([rows.values[found]] if values else [])]


@top_k.merge
def _(parts: list[list[np.ndarray]], k: int) -> tuple[np.ndarray, ...]:
    columns = _columns(parts)
    chosen = np.lexsort((columns[0], -columns[1]))[:k]
    return tuple(column[chosen] for column in columns)


@function
def dots(rows: Rows, query: np.ndarray) -> list[np.ndarray]:
    """The inner product of each row with a query [dim], or with several [n, dim]: the rows do not travel."""
    values = wide(rows.values)
    query = np.asarray(query, values.dtype)
    if query.shape[-1:] != (rows.spec.dim,) or query.ndim > 2:
        raise InputError(f"the queries have shape {query.shape}; a row has {rows.spec.dim} values")
    return [rows.keys, values @ query.T]


@dots.merge
def _(parts: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
    return tuple(_columns(parts))


COMPARISONS = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
    "==": np.equal,
    "!=": np.not_equal,
}


@function
def where(
    rows: Rows, comparison: str, value: float, column: int | None = None, by: str | None = None
) -> list[np.ndarray]:
    """The rows whose value compares as asked: ``comparison=">", value=0.5``. Returns their keys and values.

    `column` says which value of a row is compared; without it any of them may be; with ``by="norm"`` it is the norm.
    """
    compare = known(COMPARISONS, comparison)
    if by is not None:
        chosen = compare(_scores(rows, by, None), value)
    elif column is not None:
        chosen = compare(wide(rows.values[:, column]), value)
    else:
        chosen = compare(wide(rows.values), value).any(axis=1)
    return [rows.keys[chosen], rows.values[chosen]]


@where.merge
def _(parts: list[list[np.ndarray]]) -> tuple[np.ndarray, ...]:
    return tuple(_columns(parts))


@function
def key_range(rows: Rows, low: int, high: int) -> list[np.ndarray]:
    """The rows with keys from `low` to `high` - 1, in the order of their keys. Returns keys and values."""
    chosen = np.flatnonzero((rows.keys >= low) & (rows.keys < high))
    return [rows.keys[chosen], rows.values[chosen]]


@key_range.merge
def _(parts: list[list[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    keys, values = _columns(parts)
    order = np.argsort(keys, kind="stable")
    return keys[order], values[order]


@function
def sample(rows: Rows, n: int, by: str | None = None) -> list[np.ndarray]:
    """Draw rows without replacement: each with the same chance, or with a chance by its value (``by="value"``).

    Returns the keys, in random order; fewer than `n` if there are not so many rows of positive weight. The draw is by
    exponential keys (Efraimidis and Spirakis, 2006), so that the chances are the same however the rows lie on the
    shards.
    """
    weights = np.ones(len(rows)) if by is None else _scores(rows, by, None).astype(np.float64)
    if (weights < 0).any():
        raise InputError("a row has a negative weight; weights are 0 or more")
    with np.errstate(divide="ignore"):
        times = rows.rng.exponential(size=len(rows)) / weights
    found = _largest(-times, n)
    found = found[np.isfinite(times[found])]
    return [rows.keys[found], times[found]]


@sample.merge
def _(parts: list[list[np.ndarray]], n: int) -> np.ndarray:
    keys, times = _columns(parts)
    return keys[np.argsort(times, kind="stable")[: builtins.max(0, n)]]


def library() -> dict[str, Function]:
    """All functions of this module, by name."""
    return {name: each for name, each in globals().items() if isinstance(each, Function)}
