"""Stable 64-bit keys for text and categories: the same in every process, on every machine, in every version of dps.

Stored models depend on these keys, so the hash must never change (`tests/features/test_hashing.py` pins some keys). The
hash reads the UTF-8 bytes of a string eight at a time::

    h = mix(seed + length);  for each little-endian word:  h = mix(h ^ word)        (the last word padded with zeros)

with `mix`, the 64-bit finaliser that also chooses the shard of a key. The hash is not made to resist an attacker.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np
from dask import is_dask_collection

from dps.engine.core.grouping import mix
from dps.engine.training.dataframes import as_pandas
from dps.errors import InputError, InputTypeError, told
from dps.kernels.loops.hashing import combine, hash_bytes, hash_fixed, hash_points

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from scipy.sparse import csr_matrix

__all__ = ["hash_columns", "hash_strings"]

MISSING = 0x6D697373696E67  # the hash of a missing value is mix(seed ^ MISSING); a text has it by chance 1 in 2**64
WORD_MASK = 2**64 - 1


class Words(Protocol):
    """A vocabulary: see :class:`dps.WordTable`."""

    def ids(self, words: Iterable[object]) -> np.ndarray: ...


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise InputError(f"seed is a whole number, not {told(seed)}")
    return int(seed) & WORD_MASK


def _missing(seed: int) -> np.uint64:
    return np.uint64(mix(seed ^ MISSING))


def _hash_joined(octets: bytes, lengths: Sequence[int], seed: int) -> np.ndarray:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(np.fromiter(lengths, np.int64, len(lengths)), out=ends[1:])
    out = np.empty(len(lengths), np.uint64)
    hash_bytes(np.frombuffer(octets, np.uint8), ends, seed, out)
    return out


def _hash_texts(texts: list[str], seed: int) -> np.ndarray:
    distinct = dict.fromkeys(texts)
    if 2 * len(distinct) < len(texts):
        numbers = {text: i for i, text in enumerate(distinct)}
        codes = np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))
        return _hash_texts(list(distinct), seed)[codes]
    joined = "".join(texts)
    if joined.isascii():
        return _hash_joined(joined.encode(), list(map(len, texts)), seed)
    parts = [text.encode("utf-8", "surrogatepass") for text in texts]
    return _hash_joined(b"".join(parts), list(map(len, parts)), seed)


def _is_missing(value: object) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):  # pandas.NA and pandas.NaT
        return True
    return isinstance(value, (float, np.floating)) and bool(value != value)


def _hash_objects(values: list, seed: int) -> np.ndarray:
    """The hashes of text, bytes (taken as UTF-8), numbers (as their text) and missing values, mixed."""
    if set(map(type, values)) <= {str}:
        return _hash_texts(values, seed)
    parts, missing = [], []
    for i, value in enumerate(values):
        if isinstance(value, str):
            parts.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, (bytes, bytearray)):
            parts.append(bytes(value))
        elif _is_missing(value):
            missing.append(i)
            parts.append(b"")
        elif isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
            parts.append(str(value).encode())
        else:
            raise InputTypeError(f"cannot hash value {i}, a {type(value).__name__}: make it text first, str(value)")
    out = _hash_joined(b"".join(parts), list(map(len, parts)), seed)
    out[missing] = _missing(seed)
    return out


def _hash_numpy(array: np.ndarray, seed: int) -> np.ndarray:
    kind, flat = array.dtype.kind, array.reshape(-1)
    out = np.empty(flat.shape, np.uint64)
    if kind == "U":
        width = flat.dtype.itemsize // 4
        flat = np.require(flat, f"=U{width}", ["C", "A"])
        if hash_points(flat.view(np.uint32).reshape(len(flat), width), seed, out):
            return out.reshape(array.shape)
        flat, kind = np.strings.encode(flat, "utf-8", "surrogatepass"), "S"
    if kind == "S":
        octets = np.ascontiguousarray(flat).view(np.uint8).reshape(len(flat), flat.dtype.itemsize)
        hash_fixed(octets, seed, out)
    elif kind in "OT":
        out = _hash_objects(flat.tolist(), seed)
    else:
        raise _not_text(array.dtype)
    return out.reshape(array.shape)


def _not_text(dtype: object) -> InputTypeError:
    return InputTypeError(
        f"the values must be text, not {dtype}: integer ids need no hash (dps.localize takes them), other numbers are"
        " features of their own, or text after values.astype(str)"
    )


def _hash_arrow(array: pa.Array, seed: int) -> np.ndarray:
    """The hashes of a pyarrow Array of text, without a copy of its buffers."""
    text = array.cast("large_binary")
    _, ends, octets = text.buffers()
    out = np.empty(len(text), np.uint64)
    places = np.frombuffer(ends, np.int64)[text.offset :][: len(text) + 1] if len(text) else np.zeros(1, np.int64)
    places = np.require(places, requirements=["A"])  # a buffer that Dask has sent may begin at any byte
    hash_bytes(np.frombuffer(octets or b"", np.uint8), places, seed, out)
    if text.null_count:
        out[text.is_null().to_numpy(zero_copy_only=False)] = _missing(seed)
    return out


def _hash_pandas(values: pd.Series | pd.Index, seed: int, numbers_too: bool = False) -> np.ndarray:
    """The hashes of a Series or Index; categories are hashed once, and may be numbers."""
    dtype = values.dtype
    if hasattr(dtype, "categories"):
        categorical = values.array
        hashes = _hash_pandas(categorical.categories, seed, numbers_too=True)
        return np.append(hashes, _missing(seed))[categorical.codes]  # code -1, a missing value, picks the last hash
    if dtype.kind == "b" or (numbers_too and dtype.kind in "iuf"):
        codes, uniques = values.factorize()
        return np.append(_hash_objects(uniques.tolist(), seed), _missing(seed))[codes]
    if dtype.kind in "iufcmM":
        raise _not_text(dtype)
    if hasattr(values.array, "_pa_array") and dtype.kind in "OUS":
        arrow = values.array.__arrow_array__()
        chunks = getattr(arrow, "chunks", [arrow])
        return np.concatenate([np.empty(0, np.uint64), *(_hash_arrow(chunk, seed) for chunk in chunks)])
    return _hash_numpy(values.to_numpy(object) if dtype.kind == "O" else values.to_numpy(), seed)


def _is_pandas(values: object) -> TypeGuard[pd.Series | pd.Index]:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(values, (pandas.Series, pandas.Index))


def _hash_any(values: object, seed: int) -> np.ndarray:
    if is_dask_collection(values):
        raise InputTypeError(
            f"cannot hash a {type(values).__name__} at once: hash its partitions (map_partitions) or compute() it"
        )
    if _is_pandas(values):
        return _hash_pandas(values, seed)
    if isinstance(values, np.ndarray):
        return _hash_numpy(values, seed)
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise InputTypeError(f"give a list or array of text, not a single {type(values).__name__}: hash [value]")
    return _hash_objects(list(values), seed)


def hash_strings(values: Iterable[object], seed: int = 0) -> np.ndarray:
    """A stable 64-bit key for each string: the same in every process, on every machine, in every version.

    Parameters
    ----------
    values
        A numpy array of str, bytes or objects, of any shape; a pandas Series or Index (object, ``str``, arrow,
        categorical: the categories are hashed once); a list or any other iterable. Bytes count as UTF-8 text, so
        ``b"a"`` and ``"a"`` are one; numbers among objects or categories count as their text; missing values
        (None, NaN, NA) all get the same key, which no text has.
    seed
        Another seed gives other, unrelated keys.

    Returns
    -------
    int64 array of the same shape
        Any of the 2**64 values, for use as keys of a keyed table. Two given strings share a key with probability
        2**-64: expect a first collision at about four thousand million strings.

    Raises
    ------
    InputTypeError
        Numbers (integer ids are keys already), Dask collections, a single string.

    Examples
    --------
    >>> hash_strings(["dask", "spark", "dask"])
    array([-3345755086307462500,  5210102437141541580, -3345755086307462500])
    >>> hash_strings(np.array(["dask"])) == hash_strings([b"dask"])
    array([ True])
    """
    return _hash_any(values, _seed(seed)).view(np.int64)


def hash_columns(
    frame: pd.DataFrame | Mapping[str, Iterable[object]],
    bits: int | None = None,
    seed: int = 0,
    multi: Sequence[Hashable] = (),
    vocabulary: Words | None = None,
) -> np.ndarray | csr_matrix:
    """Feature hashing of categorical columns: one key for each (column name, value).

    Parameters
    ----------
    frame
        A DataFrame of pandas, polars or Arrow, or a dict of column name to values; columns as for
        :func:`hash_strings`, or booleans. Numeric columns are refused: leave them out, or make them ``category`` if
        they are codes.
    bits
        Keep only so many bits, for keys below ``2**bits`` (rows of a dense table, say); 1 to 63. ``None``: all 64,
        where collisions do not matter in practice.
    seed
        As for :func:`hash_strings`.
    multi : sequence of column names
        Columns with several values in a cell: a list, tuple, set or array of texts or whole numbers. Each value is a
        feature of that column, with the key that it has where it stands alone.
    vocabulary : WordTable, optional
        In place of hashes, the ids of the words ``column=value``, and of ``column`` for a missing value, in a
        vocabulary (:meth:`dps.ParameterServer.vocabulary`). No two values share an id, and ids lead back to their
        words. An unknown word of a frozen vocabulary is -1, or no feature of a sparse matrix. `bits` is the bound of
        ids, then.

    Returns
    -------
    int64 array ``[rows, columns]``, or scipy.sparse.csr_matrix
        A missing value has a key of its own in each column. With `multi`, rows have different numbers of features:
        then a matrix of float32 ones, of shape ``(rows, 2**bits)``, whose columns are the keys. A row has its features
        in the order of the columns and values; an empty list has none.

    Raises
    ------
    InputTypeError
        Numeric columns, or a cell with several values in a column that is not named in `multi`.
    InputError
        `multi` names no column, or is given without `bits` (1 to 62: a sparse matrix counts its columns in int64). A
        vocabulary with a `seed`, with a column whose name has a "=", or with an id of ``2**bits`` or more.

    Examples
    --------
    >>> keys = hash_columns({"from": ["JFK", "LGA"], "to": ["LGA", None]}, bits=20)
    >>> keys.shape, bool((keys >= 0).all()), bool((keys < 2**20).all())
    ((2, 2), True, True)
    >>> bool(keys[1, 0] == keys[0, 1])  # the same value in another column
    False
    >>> X = hash_columns({"city": ["Oslo", "Rome"], "tags": [["sea", "old"], []]}, bits=20, multi=["tags"])
    >>> X.shape, X.nnz  # X[0] has three features, X[1] has one
    ((2, 1048576), 4)
    """
    if bits is not None and (isinstance(bits, bool) or not isinstance(bits, (int, np.integer)) or not 1 <= bits <= 63):
        raise InputError(f"bits is a whole number from 1 to 63, or None; not {told(bits)}")
    frame = as_pandas(frame)
    if is_dask_collection(frame) or not hasattr(frame, "items") or _is_pandas(frame):
        raise InputTypeError(
            f"hash_columns takes a DataFrame or a dict of columns, not {type(frame).__name__}"
            " (a Dask DataFrame: frame.map_partitions(dps.hash_columns); one column: series.to_frame())"
        )
    start, mask = _seed(seed), WORD_MASK if bits is None else 2**bits - 1
    columns = list(frame.items())
    several = _several(multi, [name for name, _ in columns], bits)
    keys = _Hashes(start, mask) if vocabulary is None else _Ids(vocabulary, seed, bits)
    if several:
        return _sparse(columns, several, keys, int(bits or 0))
    found = [keys.of_column(name, values) for name, values in columns]
    rows = len(frame) if hasattr(frame, "columns") else len(found[0]) if found else 0
    out = np.empty((rows, len(columns)), np.int64)
    for c, ((name, _), each) in enumerate(zip(columns, found, strict=True)):
        if each.shape != (rows,):
            raise InputError(f"column {name!r} has shape {each.shape}; the first one has {rows} rows")
        keys.put(name, each, out, c)
    return out


def _several(multi: Sequence[Hashable], names: list[Hashable], bits: int | None) -> set[Hashable]:
    several: set[Hashable] = {multi} if isinstance(multi, str) else set(multi)
    if unknown := several.difference(names):
        raise InputError(
            f"multi names {', '.join(sorted(map(repr, unknown)))}, and the columns are {', '.join(map(repr, names))}"
        )
    if several and not (bits is not None and bits <= 62):
        raise InputError(
            f"bits={bits}: with multi= the keys are the columns of a sparse matrix, so say bits=, from 1 to 62"
        )
    return several


def _sparse(
    columns: list[tuple[Hashable, Iterable[object]]],
    several: set[Hashable],
    keys_of: _Hashes | _Ids,
    bits: int,
) -> csr_matrix:
    """The features of all columns as a CSR matrix of ones, without unknown words."""
    from scipy.sparse import csr_matrix

    counts: list[np.ndarray] = []  # for each column: how many features each row has
    keys: list[np.ndarray] = []  # for each column: the keys of these features
    for name, values in columns:
        if name in several:
            lengths, flat = _flattened(values)
            found = keys_of.of_column(name, flat)
        else:
            found = keys_of.of_column(name, values)
            lengths = np.ones(len(found), np.int64)
        if counts and lengths.shape != counts[0].shape:
            raise InputError(f"column {name!r} has shape {lengths.shape}; the first one has {len(counts[0])} rows")
        out = np.empty((len(found), 1), np.int64)
        keys_of.put(name, found, out, 0)
        known = out[:, 0] >= 0  # as hashes of at most 62 bits always are
        if not known.all():
            lengths = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[known], minlength=len(lengths))
        counts.append(lengths)
        keys.append(out[known, 0])
    rows = len(counts[0])
    ends = np.zeros(rows + 1, np.int64)
    np.cumsum(np.sum(counts, axis=0), out=ends[1:])
    order = np.argsort(np.concatenate([np.repeat(np.arange(rows), each) for each in counts]), kind="stable")
    indices = np.concatenate(keys)[order]
    return csr_matrix((np.ones(len(indices), np.float32), indices, ends), shape=(rows, 2**bits))


def _flattened(values: Iterable[object]) -> tuple[np.ndarray, list[object]]:
    """(how many values each cell has, all values); a missing cell, or a single value, counts as one."""
    lengths: list[int] = []
    flat: list[object] = []
    for cell in values:
        if isinstance(cell, np.ndarray):
            cell = cell.tolist()
        if isinstance(cell, (list, tuple, set, frozenset)):
            lengths.append(len(cell))
            flat += sorted(cell, key=str) if isinstance(cell, (set, frozenset)) else cell
        else:
            lengths.append(1)
            flat.append(cell)
    return np.array(lengths, np.int64), flat


class _Hashes:
    """Keys of columns by hashes."""

    def __init__(self, seed: int, mask: int):
        self._seed, self._mask = seed, mask

    def of_column(self, name: Hashable, values: Iterable[object]) -> np.ndarray:
        return _hash_column(name, values, self._seed)

    def put(self, name: Hashable, hashes: np.ndarray, out: np.ndarray, column: int) -> None:
        combine(_hash_texts([str(name)], self._seed)[0], hashes, self._mask, out, column)


class _Ids:
    """Keys of columns by a vocabulary."""

    def __init__(self, vocabulary: Words, seed: int, bits: int | None):
        if seed != 0:
            raise InputError(f"a vocabulary has no seed, and seed is {seed}: leave one of them out")
        self._vocabulary, self._bound = vocabulary, bits and 2**bits

    def of_column(self, name: Hashable, values: Iterable[object]) -> np.ndarray:
        if "=" in str(name):
            raise InputError(
                f"column {name!r}: words of a vocabulary are column=value, so rename the column, without ="
            )
        listed = _values_of(values)
        _hash_column(name, listed, 0)  # which refuses what is no text
        words = [str(name) if _is_missing(value) else f"{name}={_text_of(value)}" for value in listed]
        numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
        ids = self._vocabulary.ids(list(numbers))
        if self._bound and len(ids) and ids.max() >= self._bound:
            raise InputError(
                f"column {name!r}: an id of the vocabulary is {ids.max()}, and bits={self._bound.bit_length() - 1} "
                f"takes ids below {self._bound}: raise bits (hash_bits of a model)"
            )
        return ids[np.fromiter(map(numbers.__getitem__, words), np.int64, len(words))]

    def put(self, name: Hashable, ids: np.ndarray, out: np.ndarray, column: int) -> None:
        out[:, column] = ids


def _text_of(value: object) -> str:
    return bytes(value).decode() if isinstance(value, (bytes, bytearray)) else str(value)


def _values_of(values: Any) -> list[object]:
    """The values of a column, categories as objects."""
    if _is_pandas(values):
        if not hasattr(values.dtype, "categories") and values.dtype.kind in "iufcmM":
            raise _not_text(values.dtype)
        return values.astype(object).tolist()
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "USOTb":
            raise _not_text(values.dtype)
        return values.tolist()
    if isinstance(values, (str, bytes)) or is_dask_collection(values):
        _hash_any(values, 0)  # which says what to do
    return list(values)


def _hash_column(name: Hashable, values: Iterable[object], seed: int) -> np.ndarray:
    if isinstance(values, np.ndarray) and values.dtype.kind == "b":
        values = values.astype(object)
    try:
        return _hash_any(values, seed)
    except InputTypeError as error:
        remedy = "a column of codes: frame[name].astype('category')"
        if any(f"a {kind}:" in str(error) for kind in ("list", "tuple", "set", "frozenset", "ndarray")):
            remedy = f"several values in a cell: hash_columns(..., bits=20, multi=[{name!r}])"
        raise InputTypeError(f"column {name!r}: {error} ({remedy})") from None
