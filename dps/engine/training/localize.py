"""`localize`: the unique feature ids of a batch, and the batch re-indexed to them.

Results are remembered for as long as the batch object lives. Later epochs over the same batches then cost only a
fingerprint of the ids (a fiftieth of the work), which notices a batch that was changed in place.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from dask import is_dask_collection

from dps.engine.core.unique import by_sorting, by_table, fingerprint
from dps.errors import InputError, InputTypeError

if TYPE_CHECKING:
    import pandas as pd
    from scipy.sparse import csr_matrix

__all__ = ["forget", "localize"]

# numpy, scipy, sparse or pandas: packages that may not be installed, and of which two have no types.
Batch: TypeAlias = Any
Localized: TypeAlias = tuple[np.ndarray, Batch]  # keys, and the batch re-indexed to them


class _Memory(NamedTuple):
    source: weakref.ref  # the batch; when it is collected the entry goes
    shape: tuple[int, ...]
    values: np.ndarray | None  # the array of values that the result shares with the batch
    fingerprints: tuple[int, ...]  # of the arrays from which the result was computed
    result: Localized


_remembered: dict[int, _Memory] = {}  # by id(batch); threads need no lock, because all uses are single dict operations


def forget(X: object = None) -> None:
    """Drop what `localize` remembers of the batch X, or of all batches (None).

    Examples
    --------
    >>> forget()
    """
    if X is None:
        _remembered.clear()
    else:
        _remembered.pop(id(X), None)


def _remember(X: object, memory: _Memory) -> None:
    name = id(X)

    def forget_collected(reference: weakref.ref) -> None:
        current = _remembered.get(name)
        if current is not None and current.source is reference:  # not of a later batch with the same id
            _remembered.pop(name, None)

    _remembered[name] = memory._replace(source=weakref.ref(X, forget_collected))


def _check_ids(dtype: object, what: str) -> None:
    kind = getattr(dtype, "kind", "O")
    if kind in "iu":
        return
    remedy = (
        "text and categories: dps.hash_strings or dps.hash_columns first"
        if kind in "OSUT"
        else "dense numbers: make it sparse first, scipy.sparse.csr_matrix(X), or use a dense table"
    )
    raise InputTypeError(f"localize needs integer ids, and this {what} is of dtype {dtype}; {remedy}")


def unique_ids(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique ids in order of hash (int64), and each id's place among them (int32), of integers of any dtype and shape.

    uint64 beyond 2**63 wraps, because all 2**64 keys are allowed.

    Examples
    --------
    >>> import numpy as np
    >>> keys, codes = unique_ids(np.array([7, 7, -1]))
    >>> keys[codes]
    array([ 7,  7, -1])
    """
    if ids.size > np.iinfo(np.int32).max:
        raise InputError(f"a batch of {ids.size:,} ids; at most 2**31 - 1 are possible: use smaller batches")
    narrow = ids.dtype == np.int32 or ids.dtype.itemsize <= 2
    flat = np.require(ids.reshape(-1), np.int32 if narrow else np.int64, ["C", "A"])
    codes = np.empty(ids.size, np.int32)
    keys = by_table(flat, codes)
    return (by_sorting(flat, codes) if keys is None else keys), codes.reshape(ids.shape)


def _localize_csr(csr: csr_matrix) -> Localized:
    if csr.indptr[0] or int(csr.indptr[-1]) != len(csr.indices):  # spare room at the end, or a view of a larger matrix
        start, stop = int(csr.indptr[0]), int(csr.indptr[-1])
        parts = csr.data[start:stop], csr.indices[start:stop], csr.indptr - start
    else:
        parts = csr.data, csr.indices, csr.indptr
    data, indices, indptr = parts
    keys, codes = unique_ids(indices)
    local = type(csr)(
        (csr.shape[0], len(keys)), dtype=data.dtype
    )  # not from the arrays: that constructor would check them all
    local.data, local.indices, local.indptr = data, codes, indptr.astype(np.int32, copy=False)
    return keys, local


def _as_csr(X: Batch) -> csr_matrix:
    if not hasattr(X, "to_scipy_sparse"):
        return X.tocsr()
    from scipy.sparse import csr_array

    try:
        return csr_array(X.to_scipy_sparse())  # sparse before 0.17 makes a matrix
    except ValueError as error:  # a `sparse` array has a fill value other than 0
        raise InputError(f"localize cannot take this {type(X).__name__}: {error}") from error


def _pandas_ids(X: pd.Series) -> np.ndarray:
    if X.hasnans:
        raise InputError(f"{int(X.isna().sum())} of {len(X)} ids are missing: fill or drop them before localize")
    _check_ids(X.dtype, type(X).__name__)
    if isinstance(X.dtype, np.dtype):
        return X.to_numpy()
    return X.to_numpy(np.int64 if X.dtype.kind == "i" else np.uint64)


class _Batch(NamedTuple):
    """A batch as `localize` takes it: how to compute the result, and from which arrays."""

    compute: Callable[[], Localized]
    sources: tuple[np.ndarray, ...]  # the arrays that decide the result; empty: do not remember the result
    values: np.ndarray | None = None  # the array that the result will share


def _read(X: Batch) -> _Batch:
    if is_dask_collection(X):
        raise InputTypeError(
            f"localize works on one batch in memory, not on a {type(X).__name__}: call it inside the training function"
            " (`for X, y in trainer.iterate(batches)`), or on X.compute()"
        )
    if isinstance(X, np.ndarray):
        _check_ids(X.dtype, type(X).__name__)
        return _Batch(lambda: unique_ids(X), (X,))
    scipy_sparse, sparse, pandas = (sys.modules.get(name) for name in ("scipy.sparse", "sparse", "pandas"))
    if scipy_sparse is not None and scipy_sparse.issparse(X):
        if X.format == "csr":
            return _Batch(lambda: _localize_csr(X), (X.indices, X.indptr), X.data)
        names: tuple[str, ...] = {"csc": ("data", "indices", "indptr"), "coo": ("data", "row", "col")}.get(X.format, ())
    elif sparse is not None and isinstance(X, (sparse.COO, sparse.GCXS)):
        names = ("data", "coords") if isinstance(X, sparse.COO) else ("data", "indices", "indptr")
    elif pandas is not None and isinstance(X, (pandas.Series, pandas.Index)):
        array = _pandas_ids(X)
        return _Batch(lambda: unique_ids(array), (array,))
    else:
        raise InputTypeError(
            f"localize takes a sparse matrix (scipy, sparse) or integer ids (numpy, pandas), not {type(X).__name__}:"
            " make it scipy.sparse.csr_matrix(X) or numpy.asarray(ids)"
        )
    if X.ndim != 2:
        raise InputError(f"localize takes a two-dimensional batch, and this {type(X).__name__} has shape {X.shape}")
    return _Batch(lambda: _localize_csr(_as_csr(X)), tuple(getattr(X, name) for name in names))


def localize(X: Batch, remember: bool = True) -> Localized:
    """The unique feature ids of a batch in hash order, and the batch re-indexed to them.

    Parameters
    ----------
    X
        A sparse batch, rows x features: any scipy.sparse matrix or array, :class:`sparse.COO` or :class:`sparse.GCXS`.
        Or ids: an integer numpy array of any shape, a pandas Series or Index.
    remember
        Keep the result for as long as X itself lives, and return it again for the same X, which makes later epochs
        over the same batches nearly free. The ids are compared by fingerprint, so a batch that was changed in place is
        computed anew. Do not change the *result* in place. The values of a CSR batch are shared with the result.

    Returns
    -------
    keys : int64 array
        Every id of the batch once, sorted by hash: the order of the shards, so pulls and pushes are cut into views, and
        nothing is sorted or copied for them. Explicit zeros count as present.
    local
        ``csr_matrix`` (``csr_array`` if X was an array) of shape ``(rows, len(keys))`` with int32 indices and, if X
        was CSR, the very same `data`; column j stands for feature ``keys[j]``. For ids: int32 codes of the same
        shape, ``keys[local] == X``.

    Raises
    ------
    InputTypeError
        Dask collections (localize works on one batch), dense floats, text.

    Examples
    --------
    >>> import numpy as np, scipy.sparse
    >>> X = scipy.sparse.csr_matrix(([1.0, 2.0, 3.0], [900, 7, 900], [0, 2, 3]), shape=(2, 1000))
    >>> keys, local = localize(X)
    >>> sorted(keys.tolist())
    [7, 900]
    >>> local.shape, local.indices.dtype, bool((keys[local.indices] == X.indices).all())
    ((2, 2), dtype('int32'), True)
    >>> keys, codes = localize(np.array([[5, 5], [-2, 5]]))
    >>> keys[codes]
    array([[ 5,  5],
           [-2,  5]])
    """
    batch = _read(X)
    if not remember or not batch.sources:
        return batch.compute()
    fingerprints = tuple(map(fingerprint, batch.sources))
    memory = _remembered.get(id(X))
    if (
        memory is not None
        and memory.shape == X.shape
        and memory.values is batch.values
        and memory.fingerprints == fingerprints
        and memory.source() is X
    ):
        return memory.result
    result = batch.compute()
    _remember(X, _Memory(weakref.ref(X), X.shape, batch.values, fingerprints, result))
    return result
