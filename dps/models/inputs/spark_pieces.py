"""Spark data as pieces for `ps.run`: encoded on the executors that train on them, in one Spark job.

Whole partitions go through Arrow to Python once, and become a trainer's pieces as they arrive. The trainers gather the
surveys of all pieces (`survey_of`) and send them to the driver, which makes the tables. For that, the driver is a
trainer of a second, small run, in which it meets the first trainer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import pandas as pd
import scipy.sparse

import dps
from dps.errors import ClockTimeoutError, DPSError, InputError, InputTypeError, StoppedError, TrainerLostError, told
from dps.models.inputs.encoding import Layout
from dps.models.inputs.files import files_of, is_path
from dps.models.inputs.notes import from_plain, to_plain
from dps.models.inputs.partitions import DaskPieces, Piece, Pieces, Survey, Surveys, piece_of, summary, survey_of
from dps.models.types import Block, Features, Labels

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame, SparkSession
    from typing_extensions import TypeIs

__all__ = ["SparkPieces", "block_of", "is_spark", "pieces_of", "session_of", "unwrapped"]

T = TypeVar("T")

POLL_SECONDS = 0.05  # between two checks whether the first trainer has joined its run
PARTS = ("type", "size", "indices", "values")  # of Spark's vectors, as it stores them


def pieces_of(
    ps: dps.ParameterServer,
    data: tuple[Features, Labels, Labels],
    layout: Layout | None,
    bits: int,
    seed: int | None,
    by_field: bool = False,
    n_fields: int | None = None,
) -> Pieces:
    """The data of `fit`, (X, y, sample_weight), from Dask, from memory, from Spark or from files.

    With `by_field`, the features of frames are numbered by their columns, as `encode_frame` does; `n_fields` is the
    number of fields of libffm's files.
    """
    if is_path(data[0]):
        if data[2] is not None:
            raise InputTypeError("of files, sample_weight is None; partitions (X, y, sample_weight) have weights")
        data = files_of(*data[:2], bits, n_fields), None, None
    kind = SparkPieces if is_spark(data[0]) else DaskPieces
    return kind(ps, *data, layout, bits, seed, by_field)


def is_spark(thing: object) -> TypeIs[RDD | DataFrame | SparkSession]:
    """Whether `thing` is an RDD, a DataFrame or a session of Spark; does not import pyspark.

    Examples
    --------
    >>> is_spark([1, 2])
    False
    """
    ours = any(base.__module__.startswith("pyspark.") for base in type(thing).__mro__)
    return ours and any(hasattr(thing, name) for name in ("mapInArrow", "mapPartitionsWithIndex", "createDataFrame"))


def session_of(data: Features) -> SparkSession:
    """The session that a DataFrame or RDD belongs to."""
    from pyspark.sql import SparkSession

    return data.sparkSession if hasattr(data, "mapInArrow") else SparkSession.builder.getOrCreate()


class SparkPieces:
    """The data of `fit` from Spark: a DataFrame with a column of labels, or an RDD of (X, y) or (X, y, weights).

    X is the DataFrame's only column of vectors, or its column "features"; without vectors, all columns except those of
    labels and weights.
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
        if ".connect." in type(X).__module__:
            raise InputTypeError("Spark Connect does not tell of partitions: estimators take data of a classic session")
        how = (layout, bits, seed, by_field)
        self._ps = ps
        self._source: Features = X
        if hasattr(X, "mapInArrow"):
            self._source, pair = _chosen(X, "label" if y is None else y, weights)
            self._read: Callable = functools.partial(_read, pair=pair, how=how)
        elif y is not None or weights is not None:
            raise InputTypeError(
                "with an RDD, y and sample_weight are None: its items are pairs (X, y), each a block of rows and its "
                "labels, or (X, y, sample_weight)"
            )
        else:
            self._read = functools.partial(_piece, how=how)
        self._data = dps.spark.read_with(self._source, self._read)

    def surveys(self) -> list[Survey]:
        """The survey of each piece, for which Spark reads the data."""
        return self.mapped(survey_of)

    def mapped(self, function: Callable[[Piece], T]) -> list[T]:
        """What `function` makes of each piece; it runs on the executors."""
        made = self._ps.run(_mapped, self._data, args=(function,), staleness=math.inf, progress=False)
        notes = [note for each in made for note in each]
        if not notes:
            raise InputError("X has 0 rows: there is nothing to learn from")
        return notes

    @contextlib.contextmanager
    def converted(self, function: Callable, *arguments: object) -> Iterator[Features]:
        """Spark's data whose partitions a trainer reads as ``function(piece, *arguments)``."""
        yield dps.spark.read_with(
            self._source, functools.partial(_converted, read=self._read, function=function, arguments=arguments)
        )

    def train(
        self,
        plan: Callable[[Surveys], object],
        function: Callable,
        *,
        staleness: float,
        progress: bool | None,
    ) -> list[tuple]:
        """Call ``function(trainer, pieces, plan(surveys))`` on the trainers of a run; the driver calls `plan`."""
        planned: Future | None = None
        with ThreadPoolExecutor(1, "dps-plan") as threads:
            try:
                with self._ps.open_run(trainers=2) as meeting:  # of the driver and the first trainer
                    planned = threads.submit(_planned, self._ps, meeting, plan)
                    return self._ps.run(
                        _surveyed, self._data, args=(meeting, function), staleness=staleness, progress=progress
                    )
            except DPSError:
                wrong = None if planned is None else planned.exception()  # its thread ended with the run
                if wrong is not None and not isinstance(wrong, (StoppedError, TrainerLostError)):
                    raise wrong from None  # because this error has stopped the trainers
                raise

    def run(self, plan: object, function: Callable, *, staleness: float, progress: bool | None) -> list[tuple]:
        """Call ``function(trainer, pieces, plan)`` on the trainers of a run, with a plan that needs no surveys."""
        return self._ps.run(_with_rows, self._data, args=(plan, function), staleness=staleness, progress=progress)

    def close(self) -> None:
        """Nothing to release, because Spark holds no futures of this object."""


def unwrapped(name: str) -> list[Features]:
    """The parts of a column of vectors, as columns that Arrow knows."""
    from pyspark.sql import functions

    plain = functions.unwrap_udt(functions.col(f"`{name}`"))
    return [plain[part].alias(part) for part in PARTS]


def _chosen(frame: Features, label: Labels, weights: Labels) -> tuple[Features, Callable]:
    """The columns to train on, "label" first, then "weight" if there is one; and what makes a tuple of a batch."""
    from pyspark.sql import functions

    kinds = {field.name: type(field.dataType).__name__ for field in frame.schema.fields}
    companions = {"label": label} | ({} if weights is None else {"weight": weights})
    for what, name in companions.items():
        if not isinstance(name, str) or name not in kinds:
            raise InputError(
                f"no column {name!r} of {what}s among {', '.join(kinds)}; fit(frame, 'its name') tells which"
            )
    first = [functions.col(f"`{name}`").alias(what) for what, name in companions.items()]
    rest = [name for name in kinds if name not in companions.values()]
    vectors = [name for name in rest if kinds[name] == "VectorUDT"]
    if not vectors:
        chosen = frame.select(*first, *(functions.col(f"`{name}`") for name in rest))
        return chosen, functools.partial(_tuple, len(first), _columns)
    if len(vectors) > 1 and "features" not in vectors:
        raise InputError(f"{len(vectors)} columns of vectors, {', '.join(vectors)}: select the one to learn from")
    name = "features" if "features" in vectors else vectors[0]
    chosen = frame.select(*first, *unwrapped(name))
    return chosen, functools.partial(_tuple, len(first), functools.partial(_vectors, name))


# -- in Spark's tasks


def _read(number: int, batches: Iterable[pa.RecordBatch], pair: Callable, how: tuple) -> Piece | DPSError | None:
    """The piece of one partition of a DataFrame."""
    return _piece(number, map(pair, batches), how)


def _converted(
    number: int, blocks: Iterable, read: Callable, function: Callable, arguments: tuple
) -> tuple[Block | None, ...]:
    """What a function makes of the piece of a partition; of an empty one, a part without rows."""
    piece = read(number, blocks)
    if isinstance(piece, DPSError):
        raise piece
    if piece is None:
        return np.zeros((0, 1)), np.zeros(0), None
    return function(piece, *arguments)


def _tuple(companions: int, block: Callable, batch: pa.RecordBatch) -> tuple[Block, ...]:
    """(X, labels) or (X, labels, weights) of a batch, whose first `companions` columns are labels and weights."""
    first = [batch.column(n).to_numpy(zero_copy_only=False) for n in range(companions)]
    return block(batch.select(batch.schema.names[companions:])), *first


def _vectors(name: str, batch: pa.RecordBatch) -> Block:
    kind, size, indices, values = batch.columns
    return block_of(kind, size, indices, values, name)


def _columns(batch: pa.RecordBatch) -> Block:
    return batch.to_pandas()


def _piece(number: int, blocks: Iterable[tuple], how: tuple) -> Piece | DPSError | None:
    """The piece of a partition, or None for an empty one.

    An error in the data is returned, and the trainer raises it, because Spark would treat an error here as a failure
    to read and try again.
    """
    try:
        parts = [part for part in map(_checked, blocks) if len(part[1])]
        if not parts:
            return None
        if len({len(part) for part in parts}) > 1:
            raise InputTypeError(
                "some items of the RDD are (X, y), others (X, y, sample_weight): give all of them weights"
            )
        X, *columns = zip(*parts, strict=True)
        return piece_of(number, (_stacked(list(X)), *map(np.concatenate, columns)), *how)
    except DPSError as error:
        return error


def _checked(part: object) -> tuple[Block, ...]:
    if not isinstance(part, tuple) or len(part) not in (2, 3) or len(getattr(part[0], "shape", ())) != 2:
        raise InputTypeError(
            f"items of an RDD are pairs (X, y), each a block of rows and its labels, or (X, y, sample_weight); not "
            f"{told(part)}"
        )
    X, y, *weights = part[0], *map(np.asarray, part[1:])
    if X.shape[:1] != y.shape[:1]:
        raise InputError(f"a block X of shape {X.shape} and labels y of shape {y.shape}")
    return X, y, *weights


def _stacked(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    if hasattr(blocks[0], "columns"):
        return pd.concat(blocks, ignore_index=True)
    if len({block.shape[1:] for block in blocks}) > 1:
        raise InputError(f"rows of different widths: {', '.join(str(n) for n in sorted({b.shape[1] for b in blocks}))}")
    if all(isinstance(block, np.ndarray) for block in blocks):
        return np.concatenate(blocks)
    return scipy.sparse.vstack([scipy.sparse.csr_matrix(block) for block in blocks], format="csr")


def block_of(kind: pa.Array, size: pa.Array, indices: pa.Array, values: pa.Array, name: str | None = None) -> Block:
    """A block of the parts of Spark's vectors: dense, or CSR if any vector is sparse; float32.

    `name` is that of the column, for errors.

    Examples
    --------
    >>> import pyarrow as pa
    >>> kind, size = pa.array([0, 1]), pa.array([3, None])
    >>> block_of(kind, size, pa.array([[2], None]), pa.array([[5.0], [1.0, 0.0, 2.0]])).toarray()
    array([[0., 0., 5.],
           [1., 0., 2.]], dtype=float32)
    """
    if kind.null_count:
        where = "" if name is None else f" in column {name!r}"
        raise InputError(f"{kind.null_count} rows have no features (null{where}): fill or drop them")
    dense = kind.to_numpy(zero_copy_only=False) == 1
    counts = values.value_lengths().to_numpy(zero_copy_only=False)
    widths = np.where(dense, counts, size.fill_null(0).to_numpy(zero_copy_only=False))
    if len(np.unique(widths)) > 1:
        raise InputError(f"rows of different widths: {', '.join(map(str, np.unique(widths)[:10]))}")
    width = int(widths[0]) if len(widths) else 0
    numbers = values.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    if dense.all():
        return numbers.reshape(len(kind), width)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(len(numbers)) - np.repeat(indptr[:-1], counts)
    places[np.repeat(~dense, counts)] = indices.flatten().to_numpy(zero_copy_only=False)
    block = scipy.sparse.csr_matrix((numbers, places.astype(np.int32), indptr), shape=(len(kind), width))
    block.eliminate_zeros()
    return block


# -- the trainers' side, and the driver's part of it


def _mapped(trainer: dps.Trainer, partitions: list[Piece | DPSError | None], function: Callable) -> list:
    """What a function makes of each piece of a trainer."""
    return [function(piece) for piece in _there(partitions)]


def _there(partitions: list[Piece | DPSError | None]) -> list[Piece]:
    """The pieces of the partitions that have rows. An error in the data of another one is raised."""
    for piece in partitions:
        if isinstance(piece, DPSError):
            raise piece
    return [piece for piece in partitions if isinstance(piece, Piece)]


def _with_rows(
    trainer: dps.Trainer, partitions: list[Piece | DPSError | None], plan: object, function: Callable
) -> tuple:
    """Wait until all trainers have read their pieces, and train if any of them has rows."""
    pieces = _there(partitions)
    if not sum(_gathered(trainer, [len(piece.labels) for piece in pieces])):
        raise InputError("X has 0 rows: there is nothing to learn from")
    return function(trainer, pieces, plan)


def _surveyed(
    trainer: dps.Trainer, partitions: list[Piece | DPSError | None], meeting: dps.OpenRun, function: Callable
) -> tuple:
    """Survey the pieces with the other trainers, get the driver's plan, and train."""
    pieces = _there(partitions)
    surveys = _gathered(trainer, [summary([survey_of(piece) for piece in pieces])] if pieces else [])
    plans: list[object] = []
    if trainer.number == 0:
        with meeting.trainer("trainer", trainer.attempt) as me:
            _gathered(me, surveys)
            plans = _gathered(me, [])
    (plan,) = _gathered(trainer, plans)
    return function(trainer, pieces, plan)


def _planned(ps: dps.ParameterServer, meeting: dps.OpenRun, plan: Callable[[Surveys], object]) -> None:
    """The driver's part: receive the surveys from the first trainer, send it the plan."""
    try:
        while not _begun(ps, meeting):  # because with aggregating tables no run begins while another one goes on
            time.sleep(POLL_SECONDS)
        with meeting.trainer("driver") as me:
            surveys: list[Survey] = _gathered(me, [])
            if not surveys:
                raise InputError("X has 0 rows: there is nothing to learn from")
            _gathered(me, [plan(lambda: surveys)])
    except BaseException:
        with contextlib.suppress(DPSError):  # the first error counts
            meeting.close()  # because the first trainer would wait for ever in it
        raise


def _begun(ps: dps.ParameterServer, meeting: dps.OpenRun) -> bool:
    """Whether the first trainer has joined the run, or never will."""
    progress = meeting.progress()
    return bool(progress.connected) or progress.stopped is not None


def _gathered(trainer: dps.Trainer, brought: list[T]) -> list[T]:
    """The items that all trainers of a run bring, on each of them.

    Spark may read and queue for longer than the controller lets a trainer wait for the others, so a trainer whose time
    is over asks again. A run that fails ends this.
    """
    while True:
        try:
            notes = trainer.allgather([to_plain(each) for each in brought])
        except ClockTimeoutError:
            continue
        return [cast(T, from_plain(each)) for note in notes for each in note]
