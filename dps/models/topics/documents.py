"""Documents as rows of word counts: their parts, the function that checks a part, and a trainer's batches of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse
from dask.base import is_dask_collection

import dps
from dps.errors import DPSError, InputError, InputTypeError
from dps.models.inputs.encoding import matrix_of
from dps.models.inputs.source import SparkParts, block_of, classic, stacked, unwrapped, vectors_of, whole_rows
from dps.models.types import Block, Features, Part, Source
from dps.spark import is_spark

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Corpus", "corpus_of", "counts_of", "documents_of"]

NAME = "LatentDirichletAllocation"


def counts_of(X: Features, words: int | None = None, whole: bool = False, rows: int = 0) -> scipy.sparse.csr_matrix:
    """Check word counts in memory, and convert them to CSR of float32 without zeros.

    Parameters
    ----------
    X : array_like, sparse matrix, or DataFrame of numbers [documents, words]
    words : int, optional
        How many words a model knows.
    whole : bool
        Refuse counts that are no whole numbers.
    rows : int
        The least number of documents.

    Raises
    ------
    InputError, InputTypeError
        What is given is no matrix of counts.
    """
    block = _matrix(X)
    if block.shape[0] < rows:
        raise InputError(f"Found array with {block.shape[0]} sample(s) (shape={block.shape}) while {rows} is required.")
    if words is not None and block.shape[1] != words:
        raise InputError(f"X has {block.shape[1]} features, but {NAME} is expecting {words} features as input")
    counts = block.data if scipy.sparse.issparse(block) else block
    if wrong := np.count_nonzero(~np.isfinite(counts)):
        raise InputError(f"Input X contains NaN or infinity: {wrong} of its counts; fill or drop them")
    if wrong := np.count_nonzero(counts < 0):
        raise InputError(f"Negative values in data passed to {NAME}: {wrong} counts are below 0")
    if whole and (wrong := np.count_nonzero(counts != np.rint(counts))):
        raise InputError(
            f'{wrong} counts are no whole numbers: learning_method="gibbs" counts words; weights such as tf-idf go '
            f'with "online" and "batch"'
        )
    csr = scipy.sparse.csr_matrix(block, dtype=np.float32)
    if not (csr.has_canonical_format and csr.data.all()):
        csr = csr.copy()  # because it may share its arrays with X
        csr.sum_duplicates()
        csr.eliminate_zeros()
    return csr


def _matrix(X: Features) -> Block:
    """A sparse or dense matrix of numbers, as it was given."""
    block = matrix_of(X, "counts", "documents, words")
    if block.dtype.kind in "biuf":
        return block
    try:
        return block.astype(np.float64)
    except (TypeError, ValueError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind(
            f"X has values that are no numbers ({error}). Text becomes counts by scikit-learn's CountVectorizer"
        ) from error


class Documents(NamedTuple):
    data: Source  # for `ps.run`; trainers check each partition by `counts_of`
    words: int  # columns
    columns: Iterable[object] | None  # their names


def documents_of(X: Features, words: int | None, whole: bool) -> Documents:
    """The documents, wherever they lie. Those in memory are checked, as by :func:`counts_of`.

    Raises InputError or InputTypeError if there are no documents, or no counts of words.
    """
    columns = getattr(X, "columns", None)
    if is_spark(X):
        found = _of_spark(X)
    elif is_dask_collection(X):
        if not hasattr(X, "shape") or len(X.shape) != 2:
            raise InputTypeError(f"X is a dask array or DataFrame [documents, words], not a {type(X).__name__}")
        X = whole_rows(X)
        found = Documents(X, int(X.shape[1]), columns)
    else:
        counts = counts_of(X, words, whole, rows=1)
        found = Documents(counts, counts.shape[1], columns)
    if words is not None and found.words != words:
        raise InputError(f"X has {found.words} features, but {NAME} is expecting {words} features as input")
    return found


def _of_spark(X: Features) -> Documents:
    """The documents of a DataFrame or an RDD, whose first one says how many words there are.

    The counts of a DataFrame are its only column of vectors, or its column "features"; without vectors, all of its
    columns. The items of an RDD are blocks [documents, words].
    """
    if not hasattr(classic(X), "mapInArrow"):
        first = X.take(1)
        if not first:
            raise InputError("Found array with 0 sample(s): X has no documents, and there is nothing to learn from")
        return Documents(_read(X, _item), int(_item(first[0]).shape[1]), None)
    kinds = {field.name: type(field.dataType).__name__ for field in X.schema.fields}
    name = vectors_of(kinds, "with counts")
    if name is None:
        wrong = [name for name, kind in kinds.items() if kind in ("StringType", "ArrayType", "MapType", "StructType")]
        if wrong or not kinds:
            raise InputTypeError(
                f"X has no column of vectors, and its column {wrong[0]!r} is no numbers; pyspark.ml's CountVectorizer "
                f"makes vectors of counts of lists of words"
                if wrong
                else "X has no columns"
            )
        return Documents(_read(X, _numbers), len(kinds), list(kinds))
    row = X.select(f"`{name}`").first()
    if row is None:
        raise InputError("Found array with 0 sample(s): X has no documents, and there is nothing to learn from")
    if row[0] is None:
        raise InputError(f"column {name!r} has no vector (null) in the first row: fill or drop such rows")
    return Documents(_read(X.select(*unwrapped(name)), _vectors), int(row[0].size), None)


def _read(data: Source, block: Callable[[Part], Block]) -> Part:
    """Data for `ps.run`, whose partitions are blocks of all records together."""
    return SparkParts(data, functools.partial(_joined, block=block)).checked(_unchecked)


def _unchecked(number: int, block: Block) -> Block:
    return block  # `corpus_of` checks it, as it does blocks of Dask


def _vectors(batch: pa.RecordBatch) -> Block:
    kind, size, indices, values = batch.columns
    return block_of(kind, size, indices, values)


def _numbers(batch: pa.RecordBatch) -> Block:
    return np.column_stack([column.to_numpy(zero_copy_only=False).astype(np.float64) for column in batch.columns])


def _item(item: Part) -> Block:
    if len(getattr(item, "shape", ())) != 2:
        raise InputTypeError(f"items of an RDD are blocks of counts, [documents, words], not {item!r:.80}")
    return item


def _joined(records: Iterable[Part], block: Callable[[Part], Block]) -> Block | None:
    """The block that all records of a partition are together; None without documents."""
    try:
        blocks = [each for each in map(block, records) if each.shape[0]]
    except DPSError:
        raise
    except (TypeError, ValueError) as error:
        raise InputTypeError(f"X has values that are no numbers ({error})") from error
    return stacked(blocks, "documents") if blocks else None


class Corpus(NamedTuple):
    """A trainer's documents, and what all trainers know of all documents."""

    batches: list[tuple[scipy.sparse.csr_matrix, np.ndarray]]  # counts; numbers of the documents. Of all, as many
    documents: np.ndarray  # of all trainers together, at each step of a pass
    tokens: float  # the sum of all counts of all trainers
    first_token: dict[int, int]  # by the number of the first document of a batch: how many tokens come before

    @property
    def steps(self) -> int:
        return len(self.batches)


def corpus_of(trainer: dps.Trainer, partitions: list[Features], words: int, size: int, whole: bool = False) -> Corpus:
    """Cut a trainer's partitions into batches of `size` documents.

    Documents are numbered in the order of the partitions of the data, whichever trainers have these. Each trainer gets
    as many batches as the one with the most has, the last ones empty: so all of them meet at the same clocks.
    """
    blocks = []
    for number, part in zip(trainer.partition_numbers, partitions, strict=True):
        try:
            if isinstance(part, DPSError):  # of a partition of Spark
                raise part
            blocks.append(counts_of(np.zeros((0, words)) if part is None else part, words, whole))
        except (InputError, InputTypeError) as error:
            raise type(error)(f"partition {number}: {error}") from error
    sizes = _sizes(trainer, blocks)
    if not sizes[:, 0].sum():
        raise InputError("Found array with 0 sample(s): X has no documents, and there is nothing to learn from")
    if not sizes[:, 1].sum():
        raise InputError("all documents of X are without words: each of its counts is 0, so there is nothing to learn")
    before = np.concatenate([np.zeros((1, 2)), np.cumsum(sizes, axis=0)]).astype(np.int64)
    batches, first_token = [], {}
    for number, block in zip(trainer.partition_numbers, blocks, strict=True):
        tokens = np.concatenate([[0], np.cumsum(block.data, dtype=np.float64)])[block.indptr]
        for start in range(0, block.shape[0], size):
            cut = block[start : start + size]
            ids = before[number, 0] + np.arange(start, start + cut.shape[0])
            first_token[int(ids[0])] = int(before[number, 1] + tokens[start])
            batches.append((cut, ids))
    steps = int(trainer.allreduce(len(batches), "max"))
    empty = scipy.sparse.csr_matrix((0, words), dtype=np.float32), np.zeros(0, np.int64)
    batches += [empty] * (steps - len(batches))
    documents = trainer.allreduce(np.array([len(ids) for _, ids in batches]))
    return Corpus(batches, documents, float(sizes[:, 1].sum()), first_token)


def _sizes(trainer: dps.Trainer, blocks: list[scipy.sparse.csr_matrix]) -> npt.NDArray[np.float64]:
    """Of each partition of the data, also of other trainers: how many documents and tokens it has."""
    parts = int(trainer.allreduce(max(trainer.partition_numbers, default=-1) + 1, "max"))
    sizes = np.zeros((parts, 2))
    for number, block in zip(trainer.partition_numbers, blocks, strict=True):
        sizes[number] = block.shape[0], block.data.sum(dtype=np.float64)
    return trainer.allreduce(sizes)
