"""A table's content, from a checkpoint or from servers, as numpy, pandas, scipy.sparse, Parquet or dask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import dask
import numpy as np

from dps.checkpoint import Store
from dps.errors import CheckpointError, InputError, UnknownTableError, needing
from dps.restore import SavedShard
from dps.state.ops import TableSpec
from dps.state.partition import bound

__all__ = ["Part", "export", "export_checkpoint", "saved_parts"]

# Gives a part of a table, mostly a shard: (keys or number of the first row, values [m, dim or more]), each row once. It
# may use its arrays again. Where dask is to load parts on workers it pickles.
Part: TypeAlias = "Callable[[], Iterable[tuple[np.ndarray | int, np.ndarray]]]"


def saved_parts(store: Store, checkpoint: str, table: str) -> list[Part]:
    """The shards of a table in a checkpoint, for :func:`export`.

    Parameters
    ----------
    store : Store
    checkpoint : str
        Name of a whole one.
    table : str

    Returns
    -------
    list of callables

    Examples
    --------
    >>> from dps.checkpoint import write_shard
    >>> spec = dps.TableSpec("w", rows=3, shards=1)
    >>> store = Store("memory://doc-parts")
    >>> writer = store.begin([spec])
    >>> rows = [(0, np.array([[3], [4], [5]], "f4"))]
    >>> _ = writer.commit([write_shard(store.url, writer.name, spec, 0, 3, rows)])
    >>> export(saved_parts(store, writer.name, "w"), spec, "numpy")
    array([[3.], [4.], [5.]], dtype=float32)
    """
    chain = store.chain(checkpoint)
    chain[-1].file(table, 0)
    return [SavedShard(store, chain, table, shard).distinct for shard in range(chain[-1].tables[table].shards)]


def export_checkpoint(
    url: str,
    table: str,
    form: str = "numpy",
    path: str | None = None,
    *,
    checkpoint: str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Any:
    """A table's values in a checkpoint, in another form. No parameter server is needed, and no cluster.

    Parameters
    ----------
    url : str
        Where checkpoints were written.
    table : str
    form : {"numpy", "pandas", "scipy", "parquet", "dask"}
        As in :meth:`dps.ParameterServer.export`.
    path : str
        Where Parquet goes.
    checkpoint : str, optional
        Its name; by default the newest whole one.
    storage_options : dict, optional
        For fsspec, of `url`.

    Returns
    -------
    ndarray, DataFrame, coo_array, dask array or None
        As in :meth:`dps.ParameterServer.export`.

    Raises
    ------
    CheckpointError
        There is none, or it is damaged.

    Examples
    --------
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         _ = ps.table("w", rows=2)
    ...         ps.client().push("w", [1], 5)
    ...         _ = ps.checkpoint("memory://doc-export")
    >>> export_checkpoint("memory://doc-export", "w")
    array([[0.],
           [5.]], dtype=float32)
    """
    store = Store(url, storage_options=storage_options)
    found = store.latest() if checkpoint is None else store.whole(checkpoint)
    if found is None:
        raise CheckpointError(f"there is no whole checkpoint under {url}")
    if table not in found.tables:
        known = ", ".join(map(repr, sorted(found.tables)))
        raise UnknownTableError(f"checkpoint {found.name!r} has no table {table!r}; it has {known}")
    return export(saved_parts(store, found.name, table), found.tables[table], form, path)


def export(parts: Sequence[Part], spec: TableSpec, form: str, path: str | None = None) -> Any:
    """A table's values in another form.

    Parameters
    ----------
    parts : sequence of callables
        From :func:`saved_parts`, for instance.
    spec : TableSpec
        The table.
    form : {"numpy", "pandas", "scipy", "parquet", "dask"}
        See Returns.
    path : str
        Where Parquet goes: a URL that fsspec understands.

    Returns
    -------
    numpy
        An array [rows, dim]; of a keyed table keys and values, two arrays.
    pandas
        A DataFrame of `dim` columns with the row numbers or keys as index.
    scipy
        A ``coo_array`` of what is not zero, [rows, dim]; of a keyed table, [largest key + 1, dim].
    parquet
        None: the file has the columns ``key`` and ``value`` (a list of fixed length where `dim` is above 1), and is
        written a piece at a time.
    dask
        As numpy, of dask arrays that load a part at a time.

    Examples
    --------
    >>> part = lambda: [(np.array([7, 2]), np.array([[1, 2], [0, 4]], "f4"))]
    >>> spec = dps.TableSpec("w", dim=2)
    >>> export([part], spec, "numpy")
    (array([7, 2]), array([[1., 2.], [0., 4.]], dtype=float32))
    >>> export([part], spec, "scipy").shape
    (8, 2)
    """
    forms = {"numpy": _numpy, "pandas": _pandas, "scipy": _scipy, "parquet": _parquet, "dask": _dask}
    if form not in forms:
        raise InputError(f"a table is exported to {', '.join(forms)}, not to {form!r}")
    if (path is None) == (form == "parquet"):
        raise InputError(f"export to {form}: {'say to which path' if path is None else 'it goes to no path'}")
    with needing("checkpoint" if form == "parquet" else "models"):
        return forms[form](parts, spec) if path is None else _parquet(parts, spec, path)


def _pieces(parts: Iterable[Part], spec: TableSpec) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(keys, values) of all parts, valid until the next piece."""
    for part in parts:
        for first, rows in part():
            keys = first if isinstance(first, np.ndarray) else np.arange(first, first + len(rows))
            yield keys, rows[:, : spec.dim]


def _pairs(parts: Iterable[Part], spec: TableSpec) -> tuple[np.ndarray, np.ndarray]:
    """All keys and values."""
    copies = [(keys.copy(), values.copy()) for keys, values in _pieces(parts, spec)]
    none = (np.empty(0, np.int64), np.empty((0, spec.dim), spec.dtype))
    keys, values = zip(none, *copies, strict=True)
    return np.concatenate(keys), np.concatenate(values)


def _filled(parts: Iterable[Part], spec: TableSpec, low: int, high: int) -> np.ndarray:
    """The values of rows `low` to `high` - 1."""
    out, there = np.empty((high - low, spec.dim), spec.dtype), 0
    for keys, values in _pieces(parts, spec):
        out[keys - low] = values
        there += len(keys)
    if there != high - low:
        raise InputError(f"table {spec.name!r}: {there} rows came for rows {low} to {high - 1}; each must come once")
    return out


def _numpy(parts: Sequence[Part], spec: TableSpec) -> Any:
    return _pairs(parts, spec) if spec.rows is None else _filled(parts, spec, 0, spec.rows)


def _pandas(parts: Sequence[Part], spec: TableSpec) -> Any:
    import pandas as pd

    if spec.rows is not None:
        return pd.DataFrame(_filled(parts, spec, 0, spec.rows), copy=False)
    keys, values = _pairs(parts, spec)
    return pd.DataFrame(values, index=pd.Index(keys, name="key"), copy=False)


def _scipy(parts: Sequence[Part], spec: TableSpec) -> Any:
    import scipy.sparse as sp

    found = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, spec.dtype))]
    rows = spec.rows or 0
    for keys, values in _pieces(parts, spec):
        if len(keys) and keys.min() < 0:
            raise InputError(f"table {spec.name!r} has the key {keys.min()}; a matrix has no negative rows: use numpy")
        if spec.rows is None:
            rows = max(rows, int(keys.max(initial=-1)) + 1)
        i, j = np.nonzero(values)
        found.append((keys[i], j, values[i, j]))
    where, columns, data = (np.concatenate(column) for column in zip(*found, strict=True))
    return sp.coo_array((data, (where, columns)), shape=(rows, spec.dim))


def _parquet(parts: Sequence[Part], spec: TableSpec, path: str = "") -> None:
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.from_numpy_dtype(np.dtype(spec.dtype))
    value = number if spec.dim == 1 else pa.list_(number, spec.dim)
    schema = pa.schema([pa.field("key", pa.int64(), False), pa.field("value", value, False)])
    with fsspec.open(path, "wb") as file, pq.ParquetWriter(file, schema) as writer:
        for keys, rows in _pieces(parts, spec):
            flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
            values = flat if spec.dim == 1 else pa.FixedSizeListArray.from_arrays(flat, spec.dim)
            writer.write_table(pa.table([pa.array(keys), values], schema=schema))


def _dask(parts: Sequence[Part], spec: TableSpec) -> Any:
    import dask.array as da

    if spec.rows is not None and len(parts) == spec.shards:
        bounds = [bound(shard, spec.rows, spec.shards) for shard in range(spec.shards + 1)]
        load = dask.delayed(_filled, pure=False)
        return da.concatenate(
            [
                da.from_delayed(load([part], spec, low, high), (high - low, spec.dim), spec.dtype)
                for part, low, high in zip(parts, bounds, bounds[1:], strict=False)
            ]
        )
    if spec.rows is not None:
        raise InputError(
            f"table {spec.name!r}: {len(parts)} parts for its {spec.shards} shards; dask wants one for each"
        )
    loaded = [dask.delayed(_pairs, pure=False, nout=2)([part], spec) for part in parts]
    keys = [da.from_delayed(pair[0], (np.nan,), np.int64) for pair in loaded]
    values = [da.from_delayed(pair[1], (np.nan, spec.dim), spec.dtype) for pair in loaded]
    return da.concatenate(keys), da.concatenate(values, allow_unknown_chunksizes=True)
