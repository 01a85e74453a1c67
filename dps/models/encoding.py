"""From tables with words in them, and from libsvm files, to sparse rows of features."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any

import dask
import numpy as np
import scipy.sparse

import dps
from dps.errors import InputError

__all__ = ["as_csr", "encode_frame", "read_libsvm"]


def encode_frame(frame: Any, bits: int = 20) -> scipy.sparse.csr_matrix:
    """A pandas DataFrame as sparse rows of 2**bits hashed features.

    A text or categorical column gives each row one feature, hash(column, value), of value 1. A numeric column is one
    feature, hash(column), with the number as its value; a missing number is a feature of its own.

    Parameters
    ----------
    frame : pandas.DataFrame
        Any mix of columns.
    bits : int
        Features are numbered 0 to 2**bits - 1; with many more values than that, some share a number.

    Returns
    -------
    scipy.sparse.csr_matrix
        float32, shape (rows, 2**bits).

    Examples
    --------
    >>> import pandas as pd
    >>> X = encode_frame(pd.DataFrame({"city": ["Oslo", "Rome"], "age": [0, 30]}), bits=8)
    >>> X.shape, X.nnz, X.sum(axis=1).ravel()
    ((2, 256), 3, matrix([[ 1., 31.]], dtype=float32))
    """
    if not 1 <= bits <= 31:
        raise InputError(f"bits is 1 to 31, not {bits}: features of a sparse matrix are numbered by int32")
    numeric = [c for c in frame.columns if frame[c].dtype.kind in "iufb"]
    words = [c for c in frame.columns if c not in numeric]
    rows, places, values = len(frame), [], []
    if words:
        places.append(dps.hash_columns(frame[words], bits=bits))
        values.append(np.ones((rows, len(words)), np.float32))
    if numeric:
        numbers = frame[numeric].to_numpy(np.float32, na_value=np.nan)
        missing = np.isnan(numbers)
        mask = (1 << bits) - 1
        names = dps.hash_strings([f"{c}" for c in numeric]) & mask
        absent = dps.hash_strings([f"{c} is missing" for c in numeric]) & mask
        places.append(np.where(missing, absent, names))
        values.append(np.where(missing, np.float32(1), numbers))
    if not places:
        raise InputError("the frame has no columns")
    place, value = np.hstack(places), np.hstack(values)
    there = value != 0
    indptr = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int32)
    indices = place[there].astype(np.int32)
    return scipy.sparse.csr_matrix((value[there], indices, indptr), shape=(rows, 1 << bits))


def as_csr(X: Any, bits: int) -> Any:
    """A partition's X as the training loop wants it: CSR, or a dense float array."""
    if hasattr(X, "columns"):
        return encode_frame(X, bits)
    if hasattr(X, "tocsr"):  # scipy's formats, sparse.COO and GCXS
        return X.tocsr()
    X = np.asarray(X)
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise InputError(f"X is a matrix of numbers, sparse or dense, or a DataFrame; not {X.dtype}{X.shape}")
    return np.ascontiguousarray(X, np.float32)


def read_libsvm(paths: str | Sequence[str], n_features: int, zero_based: bool | str = "auto") -> list[Any]:
    """libsvm (svmlight) files, one partition each, read where they are trained on.

    Parameters
    ----------
    paths : str or sequence of str
        Files, or a pattern such as ``"clicks/part-*.svm"``; the workers must see them.
    n_features : int
        Width of all the files together.
    zero_based : bool or "auto"
        Whether features are numbered from 0.

    Returns
    -------
    list of dask.delayed.Delayed
        Each an ``(X, y)``: what ``fit`` of an estimator, and ``ps.run``, take as data.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.svm").write_text("1 0:1.5 3:2\\n0 1:1\\n")
    >>> (part,) = read_libsvm(str(folder / "*.svm"), n_features=4)
    >>> X, y = part.compute(scheduler="sync")
    >>> X.shape, y
    ((2, 4), array([1., 0.]))
    """
    files = sorted(glob.glob(paths)) if isinstance(paths, str) else [os.fspath(path) for path in paths]
    if not files:
        raise InputError(f"no file matches {paths!r}")
    return [dask.delayed(_read)(file, n_features, zero_based) for file in files]


def _read(file: str, n_features: int, zero_based: bool | str) -> tuple[Any, np.ndarray]:
    from sklearn.datasets import load_svmlight_file

    X, y = load_svmlight_file(file, n_features=n_features, dtype=np.float32, zero_based=zero_based)
    return X, y.astype(np.float64)
