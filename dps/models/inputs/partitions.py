"""The data of an estimator's `fit` as partitions for `ps.run`, and the survey of them that precedes training."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import dask
import numpy as np
import pandas as pd
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Client as DaskClient
from dask.distributed import Future, Lock
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets

import dps
from dps.errors import InputError, InputTypeError
from dps.features import as_pandas
from dps.models.inputs.encoding import Layout
from dps.models.inputs.notes import sendable
from dps.models.types import Block, Features, Labels

__all__ = ["DaskPieces", "Piece", "Pieces", "Survey", "Surveys", "named", "piece_of", "summary", "survey_of"]
__all__ += ["blocks_of", "taking_turns"]


T = TypeVar("T")

# Data in memory is divided into one part for each trainer, or into PARTS if each of these has LARGE_PART_ROWS.
PARTS, LARGE_PART_ROWS = 4, 10_000


class Piece(NamedTuple):
    """A partition, encoded and checked for the trainers."""

    block: Block  # CSR or dense, float32
    labels: np.ndarray
    layout: Layout
    weights: np.ndarray | None = None  # of the rows, float32; None: all 1
    number: int = 0  # of the partition in the data


@sendable
class Survey(NamedTuple):
    """The labels, width and size of data, which the tables and the plan need before training."""

    labels: np.ndarray  # distinct, sorted
    counts: np.ndarray  # the sum of the weights of each label's rows
    layout: Layout
    dense: bool
    rows: int


Surveys = Callable[[], list[Survey]]  # the surveys of all pieces


class Pieces(Protocol):
    """The data of `fit`, of Dask or of Spark, as pieces where they lie."""

    def surveys(self) -> list[Survey]:
        """The survey of each piece."""

    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        """What `function` makes of each piece; it runs where the pieces are."""

    def converted(self, function: Callable, *arguments: object) -> AbstractContextManager[Any]:
        """Data for `ps.run`, whose partitions are ``function(piece, *arguments)``."""

    def train(
        self, plan: Callable[[Surveys], object], function: Callable, *, staleness: float, progress: bool | None
    ) -> list[tuple]:
        """Call ``function(trainer, pieces, plan(surveys))`` on the trainers of a run; `plan` may call `surveys`."""

    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        """Call ``function(trainer, pieces, plan)`` on the trainers of a run, with a plan that needs no surveys."""

    def close(self) -> None:
        """Release what is held for the pieces."""


class DaskPieces:
    """The data of `fit` from Dask or from memory: futures of `Piece`, made on the workers that hold the data.

    Blocks are encoded, checked and shuffled. If there is a `layout`, they must have it.
    """

    def __init__(
        self,
        ps: dps.ParameterServer,
        X: Features,
        y: Labels,
        weights: Labels,
        layout: Layout | None,
        bits: int,
        seed: int | None,
        by_field: bool = False,
    ):
        client = ps.dask_client
        pairs = _pairs(ps, X, y, weights)
        how = (layout, bits, seed, by_field)
        if len(futures := [pair for pair in pairs if isinstance(pair, Future)]) == len(pairs):
            pieces = ps.map_scattered(functools.partial(_piece_numbered, how=how), futures, range(len(pairs)))
        else:
            pieces = client.compute([dask.delayed(piece_of, pure=False)(n, pair, *how) for n, pair in enumerate(pairs)])
        self._ps, self._client, self._pieces = ps, client, pieces

    def surveys(self) -> list[Survey]:
        """The survey of each piece."""
        return self.mapped(survey_of)

    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        """What `function` makes of each piece; it runs on the workers."""
        notes = self._client.map(function, self._pieces, pure=False)
        try:
            return self._client.gather(notes)
        finally:
            _release(notes)

    def train(
        self,
        plan: Callable[[Surveys], object],
        function: Callable,
        *,
        staleness: float,
        progress: bool | None,
    ) -> list[tuple]:
        """Call ``function(trainer, pieces, plan(surveys))`` on the trainers of a run; `plan` may call `surveys`."""
        with taking_turns(self._client):
            args = (plan(self.surveys),)
            return self._ps.run(function, self._pieces, args=args, staleness=staleness, progress=progress)

    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        """Call ``function(trainer, pieces, plan)`` on the trainers of a run, with a plan that needs no surveys."""
        with taking_turns(self._client):
            return self._ps.run(function, self._pieces, args=(plan,), staleness=staleness, progress=progress)

    @contextlib.contextmanager
    def converted(self, function: Callable, *arguments: object) -> Iterator[list[Future]]:
        """Futures of ``function(piece, *arguments)``, while no other fit trains in this cluster."""
        with taking_turns(self._client):
            columns = ([each] * len(self._pieces) for each in arguments)
            futures = self._ps.map_scattered(function, self._pieces, *columns)
            try:
                yield futures
            finally:
                _release(futures)

    def close(self) -> None:
        """Release the futures of the pieces."""
        _release(self._pieces)


@contextlib.contextmanager
def taking_turns(client: DaskClient) -> Iterator[None]:
    """Allow one fit at a time in a cluster, because each fit needs all threads.

    The lock's lease ends some seconds after its holder's process (``distributed.scheduler.locks.lease-timeout``), so
    no fit waits for one that has died.
    """
    with Lock("dps-models-fit", scheduler_rpc=client.scheduler, loop=client.loop):
        yield


def summary(surveys: list[Survey]) -> Survey:
    """Labels, width and kind of all pieces together."""
    wide = {each.layout for each in surveys}
    if len(wide) > 1:
        raise InputError(f"partitions differ: {' and '.join(map(str, sorted(wide, key=str)[:2]))}")
    with_rows = [each for each in surveys if each.rows] or surveys[:1]
    labels, counts = _counted(*(np.concatenate([each[n] for each in with_rows]) for n in (0, 1)))
    if len(labels):
        check_classification_targets(labels)
        if not counts.any():
            raise InputError("sample_weight is zero in every row: there is nothing to learn from")
    rows, dense = sum(each.rows for each in with_rows), all(each.dense for each in with_rows)
    return Survey(labels, counts, with_rows[0].layout, dense, rows)


def named(X: Features, *columns: Labels) -> tuple[Features, ...]:
    """X and its companions (labels, weights); a companion that is a str is the name of a column of X.

    Examples
    --------
    >>> import pandas as pd
    >>> X, y, weights = named(pd.DataFrame({"age": [31, 40], "bought": [1, 0]}), "bought", None)
    >>> list(X.columns), y.tolist(), weights
    (['age'], [1, 0], None)
    """
    X, columns = as_pandas(X), tuple(map(as_pandas, columns))
    names = [column for column in columns if isinstance(column, str)]
    if not names:
        return X, *columns
    if not hasattr(X, "columns"):
        raise InputTypeError(f"{names[0]!r} would name a column of X, and X is no DataFrame but a {type(X).__name__}")
    missing = [name for name in names if name not in X.columns]
    if missing:
        there = ", ".join(map(str, X.columns[:20]))
        raise InputError(f"X has no column {missing[0]!r}; its columns are {there}")
    return X.drop(columns=names), *(X[column] if isinstance(column, str) else column for column in columns)


def _pairs(ps: dps.ParameterServer, X: Features, y: Labels, weights: Labels) -> Sequence[tuple | Future]:
    """A list of (X, y) or (X, y, weights): futures, delayed values or tuples of them."""
    if y is None:
        parts = [X] if isinstance(X, (Delayed, Future)) else X
        if weights is not None:
            raise InputTypeError(
                "sample_weight goes with X and y; a list has it in its parts, each (X, y, sample_weight)"
            )
        if isinstance(parts, (list, tuple)) and parts and all(isinstance(part, (Delayed, Future)) for part in parts):
            return parts
        raise InputError(
            "y is missing: pass X and y (requires y to be passed, but the target y is None), or a list of futures or "
            "delayed values, each an (X, y)"
        )
    X, y, weights = named(X, y, weights)
    if is_dask_collection(X):
        return _aligned(ps.dask_client, X, y, weights)
    client = ps.dask_client
    return _scattered(ps, X, *(client.compute(c).result() if is_dask_collection(c) else c for c in (y, weights)))


def _aligned(client: DaskClient, X: Features, y: Labels, weights: Labels) -> list[tuple]:
    """A Dask array or DataFrame, with labels and weights of Dask or in memory, cut into the partitions of X."""
    if isinstance(X, Delayed) or not hasattr(X, "shape"):
        raise InputTypeError(f"X is a dask array or DataFrame, not a {type(X).__name__}")
    if getattr(X, "numblocks", (1, 1))[1:] not in ((1,), ()):
        X = X.rechunk({1: -1})
    rows = blocks_of(X)
    known = hasattr(X, "chunks") and not np.isnan(X.shape[0])
    lengths = list(X.chunks[0]) if known else None
    columns = []
    for what, column in (("y", y), ("sample_weight", weights)):
        if column is None:
            continue
        if is_dask_collection(column):
            columns.append(_partitioned(X, column, what, known))
            continue
        if lengths is None:  # compute each partition once, because a second computation may give other rows
            rows = client.compute(rows)
            lengths = _lengths(client, rows)
        column = np.asarray(column)
        if len(column) != sum(lengths):
            raise InputError(f"X has {sum(lengths)} rows and {what} {len(column)}")
        cuts = np.split(column, np.cumsum(lengths)[:-1])
        columns.append(client.scatter(cuts, hash=False))
    return list(zip(rows, *columns, strict=True))


def blocks_of(collection: Features) -> list[Delayed]:
    """The blocks of a Dask array or DataFrame with one column of blocks; for a persisted array, its futures.

    Dask leaves the graph of a persisted array's block empty, and Dask 2024.12 and 2025.1 then give a task the block's
    key instead of the block.
    """
    parts = np.ravel(collection.to_delayed()).tolist()
    graph = {} if all(len(part.dask) for part in parts) else collection.__dask_graph__()
    return [graph.get(part.key, part) if not len(part.dask) else part for part in parts]


def _partitioned(X: Features, column: Labels, what: str, known: bool) -> list[Delayed]:
    """Labels or weights of Dask, in the partitions of X."""
    if known and hasattr(column, "chunks") and not np.isnan(column.shape[0]):
        if X.shape[0] != column.shape[0]:
            raise InputError(f"X has {X.shape[0]} rows and {what} {column.shape[0]}")
        if X.chunks[0] != column.chunks[0]:
            column = column.rechunk({0: X.chunks[0]})
    parts = blocks_of(column)
    count = int(getattr(X, "npartitions", 0)) if not hasattr(X, "numblocks") else X.numblocks[0]
    if len(parts) != count:
        raise InputError(f"X has {count} partitions and {what} {len(parts)}: repartition them alike")
    return parts


def _lengths(client: DaskClient, blocks: list[Future]) -> list[int]:
    notes = client.map(_rows, blocks, pure=False)
    try:
        return client.gather(notes)
    finally:
        _release(notes)


def _rows(block: Block) -> int:
    return int(block.shape[0])


def _scattered(ps: dps.ParameterServer, X: Features, y: Labels, weights: Labels) -> list[Future]:
    """Send data in memory to the workers in equal parts. A part has every n-th row, so sorted labels do no harm."""
    X = X.to_scipy_sparse() if hasattr(X, "to_scipy_sparse") else X
    X = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "iloc") else np.asarray(X)
    rows = X.shape[0] if X.ndim else 0
    columns = [np.asarray(column) for column in (y, weights) if column is not None]
    if columns[0].ndim == 2 and columns[0].shape[1] == 1 and not hasattr(y, "columns"):
        text = "A column-vector y was passed when a 1d array was expected: y.ravel() is one"
        warnings.warn(text, DataConversionWarning, stacklevel=2)
    for what, column in zip(("y", "sample_weight"), columns, strict=False):
        if column.ndim == 0 or rows != len(column):
            raise InputError(
                f"Found input variables with inconsistent numbers of samples: X has {rows} rows and {what} is of shape "
                f"{column.shape}"
            )
    if rows == 0:
        raise InputError("X has 0 rows: there is nothing to learn from")
    threads = ps.trainer_threads()
    parts = min(sum(threads.values()) * (PARTS if rows >= PARTS * LARGE_PART_ROWS else 1), rows)
    cut = X.iloc if hasattr(X, "iloc") else X

    def pair(number: int) -> tuple:
        return tuple(each[number::parts] for each in (cut, *columns))

    return ps.scatter(pair, parts)


def _release(futures: list[Future]) -> None:
    """Release data on the workers at once, because the traceback of an error may keep the futures alive."""
    for future in futures:
        future.release()


# -- on the workers


def _piece_numbered(pair: tuple, number: int, how: tuple) -> Piece:
    return piece_of(number, pair, *how)


def piece_of(
    number: int, pair: tuple, layout: Layout | None, bits: int, seed: int | None, by_field: bool = False
) -> Piece:
    """Encode, check and shuffle a tuple (X, y) or (X, y, weights)."""
    if not isinstance(pair, (tuple, list)) or not 2 <= len(pair) <= 3:
        raise InputTypeError(
            f"partition {number} is an (X, y) or an (X, y, sample_weight), not a {type(pair).__name__}"
        )
    X, y, weights = map(as_pandas, (*pair, None)[:3])
    layout = layout or Layout.of(X if hasattr(X, "shape") and len(X.shape) == 2 else np.atleast_2d(X), bits, by_field)
    block, y = layout.block(X), np.asarray(y)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or len(y) != block.shape[0]:
        raise InputError(f"partition {number}: X has {block.shape[0]} rows, and y is of shape {y.shape}")
    y = _plain(y)
    weights = None if weights is None else _checked_weights(number, weights, len(y))
    if seed is not None:
        order = np.random.default_rng((seed, number)).permutation(len(y))
        block, y = block[order], y[order]
        weights = weights if weights is None else weights[order]
    return Piece(block, y, layout, weights, number)


def _plain(y: np.ndarray) -> np.ndarray:
    """Refuse missing labels; turn a column of objects, or of a nullable dtype, into numbers if it holds numbers."""
    missing = int(np.count_nonzero(pd.isna(y)))
    if missing:
        raise InputError(f"Input y contains NaN: {missing} of {len(y)} labels are missing; drop these rows before")
    if y.dtype.kind == "O":
        plain = np.array(y.tolist())
        y = plain if plain.dtype.kind in "biuf" and plain.shape == y.shape else y
    return y


def _checked_weights(number: int, weights: Labels, rows: int) -> np.ndarray:
    try:
        checked = np.asarray(weights, np.float32)
    except (TypeError, ValueError):  # it quotes a value
        raise InputTypeError("sample_weight is a number for each row, and has values that are none") from None
    if checked.shape != (rows,):
        raise InputError(f"partition {number}: sample_weight is of shape {checked.shape}, and there are {rows} rows")
    wrong = np.count_nonzero(~((checked >= 0) & np.isfinite(checked)))
    if wrong:
        raise InputError(f"sample_weight has {wrong} values that are negative, NaN or infinite; weights are 0 or more")
    return checked


def survey_of(piece: Piece) -> Survey:
    """The survey of one piece."""
    X, y, layout, weights, _ = piece
    labels, counts = _counted(y, np.ones(len(y)) if weights is None else weights)
    return Survey(labels, counts, layout, isinstance(X, np.ndarray), len(y))


def _counted(y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct labels, and the sum of the weights of each label."""
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise InputError("Input y contains NaN or infinity")
    try:
        labels, codes = np.unique(y, return_inverse=True)
    except TypeError as error:
        raise InputError(f"y has labels that cannot be sorted; of several types? ({error})") from error
    return labels, np.bincount(codes.reshape(-1), weights, len(labels))
