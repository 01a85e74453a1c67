"""Documents as rows of word counts: checked, cut into batches, and numbered alike however they are partitioned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse

import dps
from dps.errors import DPSError, InputError, InputTypeError
from dps.models.types import Block, Features

__all__ = ["Corpus", "corpus_of", "counts_of"]

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

    Examples
    --------
    >>> counts_of([[1, 0, 2], [0, 0, 0]]).toarray().tolist()
    [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]
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
    if hasattr(X, "to_scipy_sparse"):
        X = X.to_scipy_sparse()
    block = X.tocsr() if scipy.sparse.issparse(X) else np.asarray(X)
    if block.dtype.kind == "c":
        raise InputError("Complex data not supported: X is a matrix of counts")
    if block.ndim != 2:
        raise InputError(f"X is a matrix, [documents, words]; Reshape your data, which has shape {block.shape}")
    if block.shape[1] == 0:
        raise InputError(f"X has 0 feature(s) (shape={block.shape}) while a minimum of 1 is required.")
    if block.dtype.kind in "biuf":
        return block
    try:
        return block.astype(np.float64)
    except (TypeError, ValueError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind(
            f"X has values that are no numbers ({error}). Text becomes counts by scikit-learn's CountVectorizer"
        ) from error


class Corpus(NamedTuple):
    """A trainer's documents, and what all trainers know of all documents."""

    batches: list[tuple[scipy.sparse.csr_matrix, np.ndarray]]  # counts; numbers of the documents. Of all, as many
    documents: np.ndarray  # of all trainers together, at each step of a pass
    tokens: float  # the sum of all counts of all trainers
    first_token: dict[int, int]  # by the number of the first document of a batch: how many tokens come before

    @property
    def steps(self) -> int:
        """Batches of a trainer in one pass."""
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
