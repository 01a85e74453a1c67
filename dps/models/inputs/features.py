"""Features and labels: their parts, wherever they lie; the function that checks a part; the survey of what is checked.

A part is (X, y), (X, y, weights), or, for estimators without labels, X alone.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import dask
import numpy as np
import pandas as pd
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Client as DaskClient
from dask.distributed import Future
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.multiclass import check_classification_targets

import dps
from dps.errors import InputError, InputTypeError, told
from dps.features import as_pandas
from dps.models.inputs.encoding import Layout
from dps.models.inputs.notes import sendable
from dps.models.inputs.source import (
    SparkParts,
    block_of,
    blocks_of,
    classic,
    lazy_parts,
    release,
    stacked,
    unwrapped,
    vectors_of,
)
from dps.models.types import Block, Features, Labels, Part

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Piece", "Survey", "named", "parts_of", "piece_of", "spark_parts", "summary", "survey_of", "without_labels"]

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
    """X and its companions (labels, weights); a companion that is a str is the name of a column of X."""
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


def parts_of(
    ps: dps.ParameterServer, data: tuple[Features, Labels, Labels], labelled: bool, seed: int | None
) -> tuple[Sequence[Part], int | None]:
    """The parts of data of Dask or in memory, each for `piece_of`, and the seed by which this is to shuffle them.

    Parts are futures, delayed values, or tuples of them. Those in memory are shuffled here.
    """
    X, y, weights = data
    parts = lazy_parts(X) if y is None else None
    if parts is not None or (labelled and y is None):
        if weights is not None and labelled:
            raise InputTypeError(
                "sample_weight goes with X and y; a list has it in its parts, each (X, y, sample_weight)"
            )
        if weights is not None:
            raise InputTypeError(
                "sample_weight goes with X; a list of partitions has the weights in its parts, each (X, None, "
                "sample_weight)"
            )
        if parts is not None:
            return parts if labelled else [dask.delayed(without_labels)(part) for part in parts], seed
        raise InputError(
            "y is missing: pass X and y (requires y to be passed, but the target y is None), or a list of futures or "
            "delayed values, each an (X, y)"
        )
    X, y, weights = named(X, y, weights)
    if is_dask_collection(X):
        return _aligned(ps.dask_client, X, y, weights), seed
    client = ps.dask_client
    y, weights = (client.compute(each).result() if is_dask_collection(each) else each for each in (y, weights))
    return _scattered(ps, X, y, weights, seed), None


def _aligned(client: DaskClient, X: Features, y: Labels, weights: Labels) -> list[tuple]:
    """A Dask array or DataFrame, with labels and weights of Dask or in memory, cut into the partitions of X."""
    if isinstance(X, Delayed) or not hasattr(X, "shape"):
        raise InputTypeError(f"X is a dask array or DataFrame, not a {type(X).__name__}")
    rows = blocks_of(X)
    known = hasattr(X, "chunks") and not np.isnan(X.shape[0])
    lengths = list(X.chunks[0]) if known else None
    columns: list[Sequence[Part]] = []
    for what, column in (("y", y), ("sample_weight", weights)):
        if column is None:
            columns.append([None] * len(rows))
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
        release(notes)


def _rows(block: Block) -> int:
    return int(block.shape[0])


def _scattered(ps: dps.ParameterServer, X: Features, y: Labels, weights: Labels, seed: int | None) -> list[Future]:
    """Send data in memory to the workers in equal parts. A part has every n-th row, so sorted labels do no harm."""
    X = X.to_scipy_sparse() if hasattr(X, "to_scipy_sparse") else X
    X = X.tocsr() if hasattr(X, "tocsr") else X if hasattr(X, "iloc") else np.asarray(X)
    rows = X.shape[0] if X.ndim else 0
    columns = {"y": y, "sample_weight": weights}
    columns = {what: np.asarray(column) for what, column in columns.items() if column is not None}
    if y is not None and columns["y"].shape[1:] == (1,) and not hasattr(y, "columns"):
        text = "A column-vector y was passed when a 1d array was expected: y.ravel() is one"
        warnings.warn(text, DataConversionWarning, stacklevel=2)
    for what, column in columns.items():
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
    y, weights = columns.get("y"), columns.get("sample_weight")

    def part(number: int) -> tuple:
        chosen: slice | np.ndarray = slice(number, None, parts)
        if seed is not None:  # here, because rows are copied to be sent anyway
            chosen = number + parts * order_of(seed, number, len(range(number, rows, parts)))
        return tuple(None if each is None else each[chosen] for each in (cut, y, weights))

    return ps.scatter(part, parts)


def spark_parts(data: tuple[Features, Labels, Labels], labelled: bool) -> SparkParts:
    """The parts of data of Spark: a DataFrame with a column of labels, or an RDD of (X, y) or (X, y, weights).

    X is the DataFrame's only column of vectors, or its column "features"; without vectors, all columns except those of
    labels and weights.
    """
    X, y, weights = data
    if hasattr(classic(X), "mapInArrow"):
        return _chosen(X, "label" if labelled and y is None else y, weights)
    if y is not None or weights is not None:
        raise InputTypeError(
            "with an RDD, y and sample_weight are None: its items are pairs (X, y), each a block of rows and its "
            "labels, or (X, y, sample_weight)"
            if labelled
            else "with an RDD, sample_weight is None: its items are (X, None, sample_weight)"
        )
    return SparkParts(X, functools.partial(_joined, block=functools.partial(_checked, labelled=labelled)))


def _chosen(frame: Features, label: Labels, weights: Labels) -> SparkParts:
    """The columns to train on: "label" and "weight", as far as there are such, and then those of X."""
    from pyspark.sql import functions

    kinds = {field.name: type(field.dataType).__name__ for field in frame.schema.fields}
    companions = {what: name for what, name in (("label", label), ("weight", weights)) if name is not None}
    for what, name in companions.items():
        if not isinstance(name, str) or name not in kinds:
            raise InputError(
                f"no column {name!r} of {what}s among {', '.join(kinds)}; fit(frame, 'its name') tells which"
            )
    first = [functions.col(f"`{name}`").alias(what) for what, name in companions.items()]
    rest = {name: kind for name, kind in kinds.items() if name not in companions.values()}
    name = vectors_of(rest, "to learn from")
    columns = [functions.col(f"`{each}`") for each in rest] if name is None else unwrapped(name)
    block = functools.partial(_of_arrow, companions=tuple(companions), vectors=name)
    return SparkParts(frame.select(*first, *columns), functools.partial(_joined, block=block))


def _of_arrow(batch: pa.RecordBatch, companions: tuple[str, ...], vectors: str | None) -> tuple:
    """(X, labels or None, weights or None) of a batch, whose first columns are the companions of X."""
    columns = [batch.column(n).to_numpy(zero_copy_only=False) for n in range(len(companions))]
    found = dict(zip(companions, columns, strict=True))
    rest = batch.select(batch.schema.names[len(companions) :])
    labels, weights = found.get("label"), found.get("weight")
    if vectors is None:
        return rest.to_pandas(), labels, weights
    kind, size, indices, values = rest.columns
    return block_of(kind, size, indices, values, vectors), labels, weights


def _checked(part: Part, labelled: bool) -> tuple:
    """An item of an RDD as (X, y, weights or None)."""
    part = part if labelled else without_labels(part)
    if not isinstance(part, tuple) or len(part) not in (2, 3) or len(getattr(part[0], "shape", ())) != 2:
        raise InputTypeError(
            f"items of an RDD are pairs (X, y), each a block of rows and its labels, or (X, y, sample_weight); not "
            f"{told(part)}"
        )
    X, *columns = part
    y, weights = (None if column is None else np.asarray(column) for column in (*columns, None)[:2])
    shape = () if y is None else y.shape
    if labelled and X.shape[:1] != shape[:1]:
        raise InputError(f"a block X of shape {X.shape} and labels y of shape {shape}")
    return X, y, weights


def _joined(records: Iterable, block: Callable[[Part], tuple]) -> tuple | None:
    """The (X, y, weights) that all records of a partition are together; None without rows."""
    parts = [part for part in map(block, records) if part[0].shape[0]]
    if not parts:
        return None
    X, y, weights = zip(*parts, strict=True)
    if len({each is None for each in weights}) > 1:
        raise InputTypeError("some items of the RDD are (X, y), others (X, y, sample_weight): give all of them weights")
    return stacked(list(X)), *(None if each[0] is None else np.concatenate(each) for each in (y, weights))


# -- on the workers


def piece_of(
    number: int,
    part: Part,
    layout: Layout | None,
    bits: int,
    seed: int | None,
    by_field: bool = False,
    labelled: bool = True,
    words: dps.WordTable | None = None,
) -> Piece:
    """Encode, check and shuffle a part (X, y) or (X, y, weights). If it is not `labelled`, y is None and becomes 0.

    `words` number the features of frames, in place of hashes.
    """
    if not isinstance(part, (tuple, list)) or not 2 <= len(part) <= 3:
        raise InputTypeError(
            f"partition {number} is an (X, y) or an (X, y, sample_weight), not a {type(part).__name__}"
        )
    X, y, weights = map(as_pandas, (*part, None)[:3])
    if layout is None:
        matrix = X if hasattr(X, "shape") and len(X.shape) == 2 else np.atleast_2d(X)
        layout = Layout.of(matrix, bits, by_field, None if words is None else words.name)
    with contextlib.nullcontext() if words is None else words.apart() as own:
        block = layout.block(X, own)
    y = np.asarray(y) if labelled else np.zeros(block.shape[0], np.int8)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or len(y) != block.shape[0]:
        raise InputError(f"partition {number}: X has {block.shape[0]} rows, and y is of shape {y.shape}")
    y = _plain(y)
    weights = None if weights is None else _checked_weights(number, weights, len(y))
    if seed is not None:
        order = order_of(seed, number, len(y))
        block, y = block[order], y[order]
        weights = weights if weights is None else weights[order]
    return Piece(block, y, layout, weights, number)


def order_of(seed: int, number: int, rows: int) -> np.ndarray:
    """The order in which trainers take the rows of a part."""
    return np.random.default_rng((seed, number)).permutation(rows)


def without_labels(part: Part) -> tuple:
    """A part X, (X, y) or (X, y, sample_weight) as (X, None, sample_weight or None)."""
    X, *rest = part if isinstance(part, (tuple, list)) else (part,)
    if len(getattr(X, "shape", ())) != 2:
        raise InputError(f"a partition is a matrix [rows, features], alone or first in a tuple; not {told(X)}")
    return (X, None, *rest[1:2], None)[:3]


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
