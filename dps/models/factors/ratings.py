"""Ratings, (user, item, value), of what a factor model is given; as partitions for `ps.run`, by where they lie.

Trainers read each partition as :class:`Ratings`. Where a method needs all ratings of a user on one trainer, or all of
an item, the ratings are dealt out by owner: a partition then has columns (owner, other, value, side), with side 0 for
rows whose owner is the user and side 1 for rows whose owner is the item.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import dask
import numpy as np
import numpy.typing as npt
import scipy.sparse
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Future

import dps
from dps.errors import InputError, InputTypeError
from dps.features import as_pandas
from dps.models.inputs import pieces
from dps.models.inputs.source import SparkParts, blocks_of, lazy_parts, release, without_errors
from dps.models.types import Part, Source
from dps.spark import is_spark

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column
    from scipy.sparse import coo_matrix

__all__ = [
    "BY_ITEM", "BY_USER", "RatingSource", "Ratings", "checked_ids", "joined", "none_at_all", "of_side", "source_of",
]  # fmt: skip

BY_USER, BY_ITEM = 0, 1  # sides
RatingsLike: TypeAlias = Source  # what `fit` takes
Columns: TypeAlias = tuple[str, str, str]  # names of the columns: user, item, value
NAMES = ("user", "item", "value", "side")  # of columns of Spark
MIXER = np.uint64(0x9E3779B97F4A7C15)  # a multiplier of Fibonacci hashing: ids in steps are dealt out evenly


class Ratings(NamedTuple):
    """Ratings of one partition, column by column."""

    users: np.ndarray  # int64
    items: np.ndarray  # int64
    values: np.ndarray  # float32, finite


class RatingSource(Protocol):
    """The ratings that `fit` was given, wherever they are."""

    home: Ratings | None  # the ratings, if they are in this process

    def as_they_lie(self, ps: dps.ParameterServer) -> contextlib.AbstractContextManager[Source]:
        """Data for `ps.run`, whose partitions `joined` reads."""

    def by_owner(self, ps: dps.ParameterServer, sides: Sequence[int]) -> contextlib.AbstractContextManager[Source]:
        """Data for `ps.run`, whose partitions `of_side` reads: all ratings of an owner in one of them."""


def source_of(data: RatingsLike, columns: Columns) -> RatingSource:
    """Where the ratings are. Those in this process are checked.

    `columns` are the names of the columns of a DataFrame: user, item, value.
    Raises InputError or InputTypeError if there are no ratings in this process, or wrong ones. Trainers check those
    that are elsewhere.
    """
    if is_spark(data):
        if not hasattr(data, "mapInArrow"):
            raise InputTypeError("ratings of Spark are a DataFrame with columns of users, items and values, not an RDD")
        return SparkRatings(data, columns)
    parts = [data] if isinstance(data, (Delayed, Future)) else data
    if is_dask_collection(parts) or (
        isinstance(parts, (list, tuple)) and any(is_dask_collection(part) or isinstance(part, Future) for part in parts)
    ):
        return DaskRatings(parts_of(parts, columns), columns)
    return HomeRatings(checked(data, columns))


def none_at_all() -> InputError:
    return InputError("there are 0 ratings: there is nothing to learn from")


class HomeRatings:
    def __init__(self, ratings: Ratings):
        if not len(ratings.values):
            raise none_at_all()
        self.home: Ratings | None = ratings

    @contextlib.contextmanager
    def as_they_lie(self, ps: dps.ParameterServer) -> Iterator[Source]:
        """The ratings in their order, which `ps.run` cuts."""
        assert self.home is not None
        yield tuple(self.home)

    @contextlib.contextmanager
    def by_owner(self, ps: dps.ParameterServer, sides: Sequence[int]) -> Iterator[list[Future]]:
        """A part for each trainer, on the workers."""
        assert self.home is not None
        home, count = self.home, sum(ps.trainer_threads().values())
        parts: list[Part] = list(dealt(home, sides, count))

        def part(number: int) -> Part:
            made, parts[number] = parts[number], None  # kept until it is sent, and dealt anew should it be lost
            return dealt(home, sides, count)[number] if made is None else made

        futures = ps.scatter(part, count)
        try:
            yield futures
        finally:
            release(futures)


class LazyRatings:
    """Ratings elsewhere: parts of Dask or of Spark."""

    home: Ratings | None = None

    def __init__(self, parts: SparkParts | list[Part], columns: Columns):
        self._parts, self._check = parts, functools.partial(_checked_part, columns=columns)

    @contextlib.contextmanager
    def as_they_lie(self, ps: dps.ParameterServer) -> Iterator[Source]:
        with contextlib.closing(pieces.checked(ps, self._parts, self._check)) as ratings:
            yield ratings.data


class DaskRatings(LazyRatings):
    """Ratings of Dask: a DataFrame, an array [n, 3], three arrays, or a list of futures or delayed values."""

    @contextlib.contextmanager
    def by_owner(self, ps: dps.ParameterServer, sides: Sequence[int]) -> Iterator[list[Future]]:
        """A part for each trainer: each partition is cut by owner, and the pieces of an owner are joined."""
        count = sum(ps.trainer_threads().values())
        with self.as_they_lie(ps) as ratings:
            cut = [dask.delayed(dealt, nout=count, pure=False)(part, sides, count) for part in ratings]
            owned = [dask.delayed(stacked, pure=False)([each[number] for each in cut]) for number in range(count)]
            futures = ps.dask_client.compute(owned)
        try:
            yield futures
        finally:
            release(futures)


class SparkRatings(LazyRatings):
    """Ratings of Spark: a DataFrame."""

    def __init__(self, frame: Source, columns: Columns):
        _refuse_missing(columns, frame.columns, "the ratings")
        from pyspark.sql import functions

        self._frame, self._columns = frame, [functions.col(f"`{name}`") for name in columns]
        super().__init__(SparkParts(frame.select(*_named(*self._columns)), _columns_of), columns)

    @contextlib.contextmanager
    def by_owner(self, ps: dps.ParameterServer, sides: Sequence[int]) -> Iterator[Source]:
        """Spark's own exchange brings the rows of an owner together."""
        from pyspark.sql import functions

        user, item, value = self._columns
        owners = {BY_USER: (user, item), BY_ITEM: (item, user)}
        frames = [self._frame.select(*_named(*owners[side], value, functions.lit(side))) for side in sides]
        frame = frames[0] if len(frames) == 1 else frames[0].union(frames[1])
        count = max(1, self._frame.sparkSession.sparkContext.defaultParallelism)
        yield SparkParts(frame.repartition(count, NAMES[0]), _columns_of).checked(_checked_with_side)


def _named(*columns: Column) -> list[Part]:
    """Columns of Spark under the names of NAMES, because a name of the user may have a dot."""
    return [column.alias(name) for column, name in zip(columns, NAMES, strict=False)]


# -- on the trainers


def joined(partitions: Sequence[Ratings | tuple]) -> Ratings:
    parts = [checked(part) for part in without_errors(partitions)]
    if not parts:
        return Ratings(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    return Ratings(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def of_side(partitions: Sequence[tuple], side: int) -> Ratings:
    """The ratings whose owners, users or items, a trainer has. Of side `BY_ITEM`, items stand for users."""
    parts = [(Ratings(*part[:3]), part[3] == side) for part in without_errors(partitions)]
    return joined([Ratings(*(column[rows] for column in ratings)) for ratings, rows in parts])


# -- wherever the ratings are


def checked(data: RatingsLike, columns: Columns = ("user", "item", "rating"), where: str = "the ratings") -> Ratings:
    """Ratings in memory as columns; wrong ones raise errors."""
    data = as_pandas(data)
    if isinstance(data, Ratings):
        return data
    if scipy.sparse.issparse(data):
        matrix = data.tocoo()
        users, items, values = (*matrix.coords, matrix.data) if hasattr(matrix, "coords") else _coordinates(matrix)
    elif hasattr(data, "columns"):
        _refuse_missing(columns, data.columns, where)
        users, items, values = (data[name].to_numpy() for name in columns)
    elif isinstance(data, np.ndarray):
        if data.ndim != 2 or data.shape[1] != 3:
            raise InputError(f"{where}: an array of shape {data.shape}; rows of (user, item, value) have 3 columns")
        users, items, values = data.T
    elif isinstance(data, (tuple, list)) and len(data) == 3:
        users, items, values = map(np.asarray, data)
    else:
        raise InputTypeError(
            f"{where}: a sparse matrix, an array [n, 3], a tuple (users, items, values) or a DataFrame, not a "
            f"{type(data).__name__}"
        )
    shapes = {np.shape(column) for column in (users, items, values)}
    if len(shapes) > 1 or len(next(iter(shapes))) != 1:
        raise InputError(f"{where}: users, items and values are columns of one length, not of shapes {sorted(shapes)}")
    return Ratings(checked_ids(users, f"{where}: users"), checked_ids(items, f"{where}: items"), _values(values, where))


def _coordinates(matrix: coo_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return matrix.row, matrix.col, matrix.data


def checked_ids(ids: npt.ArrayLike, what: str) -> np.ndarray:
    """Ids as int64; floats are taken if they are whole, because an array [n, 3] has one dtype."""
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iuf":
        raise InputTypeError(
            f"{what} are whole numbers (int64), and these are of dtype {ids.dtype}; dps.hash_strings makes some of text"
        )
    if ids.dtype.kind == "f" and not (np.isfinite(ids) & (ids == np.floor(ids)) & (np.abs(ids) <= 2.0**53)).all():
        raise InputError(f"{what} are whole numbers; some of these are not, or are missing (NaN)")
    if ids.dtype.kind == "u" and len(ids) and ids.max() > np.iinfo(np.int64).max:
        raise InputError(f"{what} are int64, and the largest of these is {ids.max()}")
    return np.ascontiguousarray(ids, np.int64)


def _values(values: np.ndarray, where: str) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        raise InputTypeError(f"{where}: values are numbers, and these are of dtype {values.dtype}")
    made = np.ascontiguousarray(values, np.float32)
    wrong = np.count_nonzero(~np.isfinite(made))
    if wrong:
        raise InputError(f"{where}: {wrong} of {len(made)} values are NaN or infinite; drop these rows before")
    return made


def parts_of(data: RatingsLike, columns: Columns) -> list[Part]:
    """The partitions of a Dask collection, of a tuple of three, or a list of futures or delayed values."""
    if isinstance(data, (list, tuple)):
        if isinstance(data, list) and lazy_parts(data):
            return data
        if len(data) != 3 or not all(hasattr(part, "to_delayed") for part in data):
            raise InputTypeError("ratings of Dask are a DataFrame, an array [n, 3], or (users, items, values)")
        each = [blocks_of(part) for part in data]
        if len({len(blocks) for blocks in each}) > 1:
            raise InputError(
                f"users, items and values have {', '.join(str(len(b)) for b in each)} partitions: rechunk them alike"
            )
        return [list(blocks) for blocks in zip(*each, strict=True)]
    if hasattr(data, "columns"):
        _refuse_missing(columns, data.columns, "the ratings")
        return blocks_of(data)
    if getattr(data, "ndim", 0) != 2:
        raise InputTypeError(
            f"ratings of Dask are a DataFrame, an array [n, 3], or (users, items, values); not a {type(data).__name__}"
        )
    return blocks_of(data)


def dealt(ratings: Ratings, sides: Sequence[int], count: int) -> tuple[tuple, ...]:
    """The ratings by owner: `count` parts of columns (owner, other, value, side)."""
    made: list[list[tuple]] = [[] for _ in range(count)]
    for side in sides:
        owners, others = (ratings.users, ratings.items) if side == BY_USER else (ratings.items, ratings.users)
        part = (owners.view(np.uint64) * MIXER >> np.uint64(33)) % np.uint64(count)
        for number in range(count):
            rows = slice(None) if count == 1 else np.flatnonzero(part == number)
            mine = owners[rows], others[rows], ratings.values[rows]
            made[number].append((*mine, np.full(len(mine[0]), side, np.int8)))
    return tuple(stacked(each) for each in made)


def stacked(pieces: Sequence[tuple]) -> tuple:
    return tuple(np.concatenate(column) for column in zip(*pieces, strict=True))


def _columns_of(batches: Iterable[pa.RecordBatch]) -> tuple | None:
    """The columns of a partition of Spark, from Arrow; None without rows."""
    each = [[column.to_numpy(zero_copy_only=False) for column in batch.columns] for batch in batches if len(batch)]
    return tuple(np.concatenate(column) for column in zip(*each, strict=True)) if each else None


def _checked_part(number: int, part: Part, columns: Columns) -> Ratings:
    return checked(part, columns, f"partition {number}")


def _checked_with_side(number: int, part: tuple) -> tuple:
    return *checked(part[:3], where=f"partition {number}"), part[3]


def _refuse_missing(columns: Columns, there: Iterable[Part], where: str) -> None:
    missing = [name for name in columns if name not in there]
    if missing:
        known = ", ".join(map(str, list(there)[:20]))
        raise InputError(
            f"{where}: no column {missing[0]!r}; there are {known}; columns=(user, item, value) names others"
        )
