"""Spark data as pieces for `ps.run`: encoded in Spark's own tasks, kept there, and surveyed while that is done.

Whole partitions go through Arrow to Python once. What comes out is a data frame of bytes, persisted in Spark: pickled
pieces, cut into chunks that fit Arrow's batches, and beside the first chunk of each what `survey_of` says of it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse

import dps
from dps.errors import DPSError, InputError, InputTypeError
from dps.models.encoding import Layout
from dps.models.partitions import Survey, piece_of, survey_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkPieces", "block_of", "is_spark", "session_of", "unwrapped"]

SCHEMA = "note binary, piece binary"
CHUNK = 1 << 24  # bytes in a row
PARTS = ("type", "size", "indices", "values")  # of Spark's vectors, as it stores them


def is_spark(thing: Any) -> bool:
    """Whether this is an RDD, a DataFrame or a session of Spark. Asks without importing it.

    Examples
    --------
    >>> is_spark([1, 2])
    False
    """
    ours = any(base.__module__.startswith("pyspark.") for base in type(thing).__mro__)
    return ours and any(hasattr(thing, name) for name in ("mapInArrow", "mapPartitionsWithIndex", "createDataFrame"))


def session_of(data: Any) -> Any:
    """The session that a DataFrame or RDD belongs to."""
    from pyspark.sql import SparkSession

    return data.sparkSession if hasattr(data, "mapInArrow") else SparkSession.builder.getOrCreate()


class SparkPieces:
    """All that `fit` takes from Spark: a DataFrame with a column of labels, or an RDD of (X, y).

    The DataFrame's one column of vectors is X, or that called "features"; without any, all columns but the labels are.
    """

    def __init__(self, X: Any, y: Any, layout: Layout | None, bits: int, seed: int | None):
        if ".connect." in type(X).__module__:
            raise InputTypeError("Spark Connect does not tell of partitions: estimators take data of a classic session")
        how = (layout, bits, seed)
        if hasattr(X, "mapInArrow"):
            chosen, pair = _chosen(X, "label" if y is None else y)
            frame = chosen.mapInArrow(functools.partial(_encoded_frame, pair=pair, how=how), SCHEMA)
        elif y is not None:
            raise InputTypeError(
                "with an RDD y is None: its items are pairs (X, y), each a block of rows and its labels"
            )
        else:
            frame = X.mapPartitionsWithIndex(functools.partial(_encoded, how=how)).toDF(SCHEMA)
        self._frame = frame.persist()
        try:  # reads all there is
            found = self._frame.where("note is not null").select("note").collect()
            self._notes = [pickle.loads(row["note"]) for row in found]
            for note in self._notes:
                if isinstance(note, DPSError):
                    raise note
            if not self._notes:
                raise InputError("X has 0 rows: there is nothing to learn from")
        except BaseException:
            self.close()
            raise

    def surveys(self) -> list[Survey]:
        """Of each piece."""
        return self._notes

    def run(self, ps: dps.ParameterServer, function: Callable, *args: Any, **options: Any) -> list[Any]:
        """``function(trainer, pieces, *args)`` on the trainers of a run."""
        return ps.run(_on_pieces, self._frame.select("piece"), args=(function, *args), **options)

    def close(self) -> None:
        """Let go of them."""
        self._frame.unpersist()


def unwrapped(name: str) -> list[Any]:
    """The parts of a column of vectors, as columns that Arrow knows."""
    from pyspark.sql import functions

    plain = functions.unwrap_udt(functions.col(f"`{name}`"))
    return [plain[part].alias(part) for part in PARTS]


def _chosen(frame: Any, label: str) -> tuple[Any, Callable]:
    """The columns to learn from, "label" first; and what makes (X, y) of a batch of them."""
    from pyspark.sql import functions

    kinds = {field.name: type(field.dataType).__name__ for field in frame.schema.fields}
    if label not in kinds:
        raise InputError(f"no column {label!r} of labels among {', '.join(kinds)}; fit(frame, 'its name') tells which")
    vectors = [name for name, kind in kinds.items() if kind == "VectorUDT" and name != label]
    target = functions.col(f"`{label}`").alias("label")
    if not vectors:
        return frame.select(target, *(functions.col(f"`{name}`") for name in kinds if name != label)), _columns
    if len(vectors) > 1 and "features" not in vectors:
        raise InputError(f"{len(vectors)} columns of vectors, {', '.join(vectors)}: select the one to learn from")
    return frame.select(target, *unwrapped("features" if "features" in vectors else vectors[0])), _vectors


# -- in Spark's tasks


def _encoded_frame(batches: Iterable[pa.RecordBatch], pair: Callable, how: tuple) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`."""
    import pyarrow as pa
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    for row in _encoded(task.partitionId(), map(pair, batches), how):
        yield pa.RecordBatch.from_arrays([pa.array([value], pa.binary()) for value in row], ["note", "piece"])


def _vectors(batch: pa.RecordBatch) -> tuple[Any, np.ndarray]:
    return block_of(*batch.columns[1:]), batch.column(0).to_numpy(zero_copy_only=False)


def _columns(batch: pa.RecordBatch) -> tuple[Any, np.ndarray]:
    return batch.select(batch.schema.names[1:]).to_pandas(), batch.column(0).to_numpy(zero_copy_only=False)


def _encoded(number: int, blocks: Iterable[Any], how: tuple) -> Iterator[tuple[bytes | None, bytes]]:
    """A partition's rows of SCHEMA. What is wrong with the data is a note, too: Spark would make text of it."""
    try:
        pairs = [pair for pair in map(_checked, blocks) if len(pair[1])]
        if not pairs:
            return
        whole = _stacked([X for X, _ in pairs]), np.concatenate([y for _, y in pairs])
        piece = piece_of(number, whole, *how)
        note = survey_of(piece)
    except DPSError as error:
        yield pickle.dumps(error), b""
        return
    data = pickle.dumps(piece, protocol=5)
    for start in range(0, len(data), CHUNK):
        yield None if start else pickle.dumps(note), data[start : start + CHUNK]


def _checked(pair: Any) -> tuple[Any, np.ndarray]:
    if not isinstance(pair, tuple) or len(pair) != 2 or len(getattr(pair[0], "shape", ())) != 2:
        raise InputTypeError(f"items of an RDD are pairs (X, y), each a block of rows and its labels; not {pair!r:.80}")
    X, y = pair[0], np.asarray(pair[1])
    if X.shape[:1] != y.shape[:1]:
        raise InputError(f"a block X of shape {X.shape} and labels y of shape {y.shape}")
    return X, y


def _stacked(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    if hasattr(blocks[0], "columns"):
        return pd.concat(blocks, ignore_index=True)
    if len({block.shape[1:] for block in blocks}) > 1:
        raise InputError(f"rows of different widths: {', '.join(str(n) for n in sorted({b.shape[1] for b in blocks}))}")
    if all(isinstance(block, np.ndarray) for block in blocks):
        return np.concatenate(blocks)
    return scipy.sparse.vstack([scipy.sparse.csr_matrix(block) for block in blocks], format="csr")


def block_of(kind: pa.Array, size: pa.Array, indices: pa.Array, values: pa.Array) -> Any:
    """Spark's vectors, by their parts: dense, or CSR where any is sparse; float32.

    Examples
    --------
    >>> import pyarrow as pa
    >>> kind, size = pa.array([0, 1]), pa.array([3, None])
    >>> block_of(kind, size, pa.array([[2], None]), pa.array([[5.0], [1.0, 0.0, 2.0]])).toarray()
    array([[0., 0., 5.],
           [1., 0., 2.]], dtype=float32)
    """
    if kind.null_count:
        raise InputError(f"{kind.null_count} rows have no features (null): fill or drop them")
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


def _on_pieces(trainer: dps.Trainer, partitions: list[pd.DataFrame], function: Callable, *args: Any) -> Any:
    """`function` on the pieces whose chunks these partitions hold."""
    return function(trainer, [pickle.loads(b"".join(frame["piece"])) for frame in partitions if len(frame)], *args)
