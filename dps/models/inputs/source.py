"""What a user has, wherever it lies, as parts: what one partition holds, before any trainer has it.

Each kind of data has one function that checks a part and makes of it what trainers take: `features.piece_of`,
`factors/ratings.checked`, `topics/documents.counts_of`, `words/numbers.numbered`, and `edge_list` of `dps.graph`. It
runs where the part lies. This file finds the parts, whatever is in them, and lets Spark call such a function.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse
from dask.delayed import Delayed
from dask.distributed import Future, Lock

import dps
from dps.errors import DPSError, InputError, InputTypeError
from dps.models.types import Block, Check, Features, Part, Source
from dps.spark import is_spark

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["SparkParts", "block_of", "blocks_of", "classic", "is_path", "lazy_parts", "release", "stacked"]
__all__ += ["turns", "unwrapped", "vectors_of", "whole_rows", "without_errors"]

VECTOR = ("type", "size", "indices", "values")  # the parts of Spark's vectors, as it stores them


def is_path(X: Features) -> bool:
    """Whether this is a path, or a list of paths."""
    if isinstance(X, (list, tuple)):
        return len(X) > 0 and all(isinstance(each, (str, os.PathLike)) for each in X)
    return isinstance(X, (str, os.PathLike))


# -- in Dask


def lazy_parts(data: Source) -> list[Delayed | Future] | None:
    """A list of futures or delayed values, or one of them, as a list; None for anything else."""
    parts = list(data) if isinstance(data, (list, tuple)) else [data]
    return parts if parts and all(isinstance(part, (Delayed, Future)) for part in parts) else None


def whole_rows(collection: Features) -> Features:
    """A Dask collection whose blocks have all columns."""
    return collection.rechunk({1: -1}) if any(n != 1 for n in getattr(collection, "numblocks", ())[1:]) else collection


def blocks_of(collection: Features) -> list[Delayed]:
    """The blocks of a Dask collection, each of whole rows; for a persisted array, its futures.

    Dask leaves the graph of a persisted array's block empty, and Dask 2024.12 and 2025.1 then give a task the block's
    key instead of the block.
    """
    collection = whole_rows(collection)
    parts = np.ravel(np.array(collection.to_delayed(), object)).tolist()
    graph = {} if all(len(part.dask) for part in parts) else collection.__dask_graph__()
    return [graph.get(part.key, part) if not len(part.dask) else part for part in parts]


def release(futures: Iterable[Future]) -> None:
    """Release data on the workers at once, because the traceback of an error may keep the futures alive."""
    for future in futures:
        future.release()


@contextlib.contextmanager
def turns(ps: dps.ParameterServer, data: Source) -> Iterator[None]:
    """Allow one fit at a time in a Dask cluster, because each fit needs all threads; Spark's trainers need none.

    The lock's lease ends some seconds after its holder's process (``distributed.scheduler.locks.lease-timeout``), so
    no fit waits for one that has died.
    """
    if is_spark(data):
        yield
        return
    with Lock("dps-models-fit", scheduler_rpc=ps.dask_client.scheduler, loop=ps.dask_client.loop):
        yield


# -- in Spark


def classic(data: Source) -> Part:
    """Data of Spark, if its session is a classic one."""
    if ".connect." in type(data).__module__:
        raise InputTypeError("Spark Connect does not tell of partitions: models take data of a classic session")
    return data


def vectors_of(kinds: dict[str, str], purpose: str) -> str | None:
    """The only column of vectors, or "features", among the names and kinds of columns; None without vectors."""
    vectors = [name for name, kind in kinds.items() if kind == "VectorUDT"]
    if len(vectors) > 1 and "features" not in vectors:
        raise InputError(f"{len(vectors)} columns of vectors, {', '.join(vectors)}: select the one {purpose}")
    return "features" if "features" in vectors else vectors[0] if vectors else None


def unwrapped(name: str) -> list[Features]:
    """The parts of a column of vectors, as columns that Arrow knows."""
    from pyspark.sql import functions

    plain = functions.unwrap_udt(functions.col(f"`{name}`"))
    return [plain[part].alias(part) for part in VECTOR]


class SparkParts(NamedTuple):
    """A DataFrame or RDD, and how the records of a partition become a part."""

    data: Source
    part: Callable[[Iterable], Part]  # the part that the Arrow batches or items of a partition are; None without rows

    def checked(self, check: Check) -> Part:
        """Data for `ps.run`, whose partitions are ``check(number, part)``, None, or an error in the data."""
        return dps.spark.read_with(self.data, self.reader(check))

    def reader(self, check: Check) -> Callable[[int, Iterable], Part]:
        """What makes a checked part of the number and the records of a partition."""
        return functools.partial(_read, part=self.part, check=check)


def _read(number: int, records: Iterable, part: Callable[[Iterable], Part], check: Check) -> Part:
    """A checked part. An error in the data is returned, because Spark would read anew what raises one."""
    try:
        found = part(records)
        return None if found is None else check(number, found)
    except DPSError as error:
        return error


def without_errors(partitions: Iterable[Part]) -> list[Part]:
    """The partitions of a trainer that have rows. An error in the data of another one is raised."""
    for partition in partitions:
        if isinstance(partition, DPSError):
            raise partition
    return [partition for partition in partitions if partition is not None]


def stacked(blocks: list[Block], what: str = "rows") -> Block:
    """Blocks of a partition as one."""
    if len(blocks) == 1:
        return blocks[0]
    if hasattr(blocks[0], "columns"):
        return pd.concat(blocks, ignore_index=True)
    if len({block.shape[1:] for block in blocks}) > 1:
        widths = ", ".join(str(n) for n in sorted({block.shape[1] for block in blocks}))
        raise InputError(f"{what} of different widths: {widths}")
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
