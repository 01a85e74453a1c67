"""Encoding: data frames with words and numbers to sparse rows of features."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import scipy.sparse

import dps
from dps.errors import InputError, InputTypeError
from dps.features import as_pandas
from dps.models.inputs.notes import sendable
from dps.models.types import Block, Features

__all__ = ["Layout", "NamedWords", "encode_frame", "matrix_of"]


class NamedWords(Protocol):
    """A vocabulary: :class:`dps.WordTable`, or the part of one that a model has learnt."""

    @property
    def name(self) -> str: ...

    def ids(self, words: Iterable[object]) -> np.ndarray: ...


def encode_frame(
    frame: Features, bits: int = 20, by_field: bool = False, vocabulary: NamedWords | None = None
) -> scipy.sparse.csr_matrix:
    """A DataFrame as sparse rows of 2**bits hashed features.

    A text or categorical column gives each row one feature, hash(column, value), of value 1. A numeric column is one
    feature, hash(column), with the number as its value; a missing number is a feature of its own.

    Parameters
    ----------
    frame : DataFrame
        Of pandas, polars or Arrow, with any mix of columns.
    bits : int
        Features are numbered 0 to 2**bits - 1; with many more values than that, some share a number.
    by_field : bool
        Number pairs of a feature and its field, ``feature * columns + column``, as field-aware factorization machines
        take them.
    vocabulary : WordTable, optional
        Number features by a vocabulary (:meth:`dps.ParameterServer.vocabulary`) in place of hashes, so that no two
        share a number, and each leads back to its column and value. Features that a frozen vocabulary does not have are
        left out.

    Returns
    -------
    scipy.sparse.csr_matrix
        float32, shape (rows, 2**bits), or (rows, 2**bits * columns) by field.

    Examples
    --------
    >>> import pandas as pd
    >>> X = encode_frame(pd.DataFrame({"city": ["Oslo", "Rome"], "age": [0, 30]}), bits=8)
    >>> X.shape, X.nnz, X.sum(axis=1).ravel()
    ((2, 256), 3, matrix([[ 1., 31.]], dtype=float32))
    """
    if not 1 <= bits <= 31:
        raise InputError(f"bits is 1 to 31, not {bits}: features of a sparse matrix are numbered by int32")
    frame = as_pandas(frame)
    if not frame.columns.is_unique:
        raise InputError(f"columns of one name: {sorted(set(frame.columns[frame.columns.duplicated()].map(str)))}")
    numeric = [c for c in frame.columns if frame[c].dtype.kind in "iufb"]
    words = [c for c in frame.columns if c not in numeric]
    fields = len(frame.columns) if by_field else 1
    rows, width = len(frame), fields << bits
    kind = np.int32 if width <= np.iinfo(np.int32).max else np.int64
    places, values = [], []
    if words:
        places.append(dps.hash_columns(frame[words], bits=bits, vocabulary=vocabulary).astype(kind))
        values.append(np.ones((rows, len(words)), np.float32))
    if numeric:
        numbers = np.array(frame[numeric].to_numpy(np.float32, na_value=np.nan), order="C")
        missing = np.isnan(numbers)
        names = _numbered([f"{c}" for c in numeric], bits, vocabulary).astype(kind)
        absent = _numbered([f"{c} is missing" for c in numeric], bits, vocabulary).astype(kind)
        places.append(np.where(missing, absent, names))
        numbers[missing] = 1
        values.append(numbers)
    if not places:
        raise InputError("the frame has no columns")
    place, value = (parts[0] if len(parts) == 1 else np.hstack(parts) for parts in (places, values))
    if vocabulary is not None:
        known = np.greater_equal(place, 0)
        place, value = np.where(known, place, 0), np.where(known, value, np.float32(0))
    if by_field:
        place = place * fields + np.array([frame.columns.get_loc(column) for column in (*words, *numeric)], kind)
    there = value != 0
    indptr = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(kind)
    parts = (value.ravel(), place.ravel()) if there.all() else (value[there], place[there])
    return scipy.sparse.csr_matrix((*parts, indptr), shape=(rows, width))


def _numbered(words: list[str], bits: int, vocabulary: NamedWords | None) -> np.ndarray:
    """The features of columns of numbers."""
    if vocabulary is None:
        return dps.hash_strings(words) & ((1 << bits) - 1)
    ids = vocabulary.ids(words)
    if ids.max(initial=0) >= 1 << bits:
        raise InputError(
            f"an id of the vocabulary is {ids.max()}, and bits={bits} takes ids below {1 << bits}: raise bits "
            f"(hash_bits of a model)"
        )
    return ids


@sendable
@dataclasses.dataclass(frozen=True)
class Layout:
    """The shape of a model's X: its number of features, and the columns if it is a frame.

    With 0 bits, the columns of a frame are the features, as they are; with more, they are hashed to 2**bits features,
    or to as many for each of `fields` columns. With a vocabulary, ids of its words below 2**bits replace the hashes.
    """

    features: int
    bits: int
    columns: tuple[str, ...] | None = None
    fields: int = 0  # if columns are pairs of feature and field: of a frame, one for each of its columns
    vocabulary: str | None = None  # the name of the vocabulary that numbers the features of a frame

    @property
    def distinct(self) -> int:
        """The number of features, each once, in whatever fields."""
        return self.features // (self.fields or 1)

    @classmethod
    def of(cls, X: Features, bits: int, by_field: bool = False, vocabulary: str | None = None) -> Layout:
        if hasattr(X, "columns"):
            width, names = int(X.shape[1]), tuple(map(str, X.columns))
            if by_field:
                return cls((1 << bits) * width, bits, names, width, vocabulary)
            return cls(1 << bits if bits else width, bits, names, vocabulary=vocabulary)
        if vocabulary is not None:
            raise InputError(
                f"vocabulary {vocabulary!r} numbers the words of DataFrames, and X is a {type(X).__name__} whose "
                f"{X.shape[1]} columns are numbered already: pass a DataFrame, or leave vocabulary out"
            )
        return cls(int(X.shape[1]), bits)

    def block(self, X: Features, words: NamedWords | None = None) -> Block:
        """Check a block in memory and convert it for the kernels: CSR, or a dense array; float32."""
        X = as_pandas(X)
        if self.columns is not None and hasattr(X, "columns"):
            different = sorted(set(self.columns) ^ set(map(str, X.columns)))
            if different:
                raise InputError(f"X has other columns than the model was fitted with; they differ in {different[:10]}")
            if not self.bits or self.fields:
                names = {str(column): column for column in X.columns}
                X = X[[names[column] for column in self.columns]]
        if hasattr(X, "columns"):
            self._check_words(words)
        block = _matrix(X, self.bits, self.fields > 0, words)
        if block.shape[1] != self.features:
            raise InputError(
                f"X has {block.shape[1]} features, but LogisticRegression is expecting {self.features} features as "
                f"input"
            )
        return block

    def _check_words(self, words: NamedWords | None) -> None:
        """Refuse words of another vocabulary than that of the model, because its ids are of other words."""
        name = None if words is None else words.name
        if name == self.vocabulary:
            return
        if self.vocabulary is None:
            raise InputError(
                f"the model was fitted with hashes of its words, and vocabulary is {name!r} now: leave vocabulary out, "
                f"or fit anew"
            )
        now = "is not at hand" if name is None else f"is not vocabulary {name!r}"
        raise InputError(
            f"the model was fitted with ids of vocabulary {self.vocabulary!r}, which {now}: set "
            f"client=ps, the dps.ParameterServer that has it, or vocabulary=ps.vocabulary({self.vocabulary!r})"
        )


def _matrix(X: Features, bits: int, by_field: bool = False, words: NamedWords | None = None) -> Block:
    """Convert X to CSR or a dense array of float32, and refuse values that are not finite."""
    if hasattr(X, "columns"):
        block = encode_frame(X, bits, by_field, words) if bits else _columns_of(X)
    else:
        block = X
    block = matrix_of(block, "real numbers", "rows, features")
    if isinstance(block, np.ndarray):
        block = _numbers(block)
    elif block.dtype != np.float32:
        block = block.astype(np.float32)
    finite = np.isfinite(block if isinstance(block, np.ndarray) else block.data)
    if wrong := np.count_nonzero(~finite):
        named = hasattr(X, "columns") and not bits
        where = f" (columns {_listed(X.columns[~finite.all(axis=0)])})" if named else ""
        raise InputError(
            f"X has {wrong} values that are NaN, infinity or too large for float32{where}; fill or drop them"
        )
    return block


def matrix_of(X: Features, numbers: str, axes: str) -> Block:
    """X as a CSR matrix or an array, if it is a matrix with columns. Messages say of what numbers, and its axes."""
    if hasattr(X, "nnz"):  # scipy's formats, sparse.COO and GCXS
        block = (X.to_scipy_sparse() if hasattr(X, "to_scipy_sparse") else X).tocsr()
    else:
        block = np.asarray(X)
    if block.dtype.kind == "c":
        raise InputError(f"Complex data not supported: X is a matrix of {numbers}")
    if block.ndim != 2:
        raise InputError(f"X is a matrix, [{axes}]; Reshape your data, which has shape {block.shape}")
    if block.shape[1] == 0:
        raise InputError(f"X has 0 feature(s) (shape={block.shape}) while a minimum of 1 is required.")
    return block


def _columns_of(frame: Features) -> np.ndarray:
    """The columns of a frame of numbers as a matrix; missing numbers are NaN."""
    try:
        return frame.to_numpy(np.float32, na_value=np.nan)
    except (TypeError, ValueError):
        wrong = [column for column in frame.columns if frame[column].dtype.kind not in "iufb"]
        raise InputTypeError(
            f"X is a DataFrame with columns that are no numbers ({_listed(wrong)}): leave them out, or make "
            f"numbers of them, for example by dps.models.encode_frame"
        ) from None  # because that of pandas quotes a value


def _listed(columns: Iterable[object]) -> str:
    return ", ".join(repr(str(column)) for column in list(columns)[:10])


def _numbers(block: np.ndarray) -> np.ndarray:
    try:
        return np.ascontiguousarray(block, np.float32)
    except (TypeError, ValueError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        why = f" ({error})" if kind is InputTypeError else ""  # a ValueError quotes a value
        raise kind(
            f"X is an array with values that are no numbers{why}. Text goes in as a column of a DataFrame, where "
            f"each word is hashed to a feature of its own: pandas.DataFrame(X)"
        ) from None
