"""Export: a table's values, from a checkpoint or from servers, as arrays, data frames, Parquet or dask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import dask
import numpy as np

from dps.engine.checkpoints.reading import SavedShard
from dps.engine.checkpoints.store import Store
from dps.engine.state.dtypes import widened
from dps.engine.state.names import Named, table_name
from dps.engine.state.ops import TableSpec
from dps.errors import CheckpointError, InputError, MissingPackageError, UnknownTableError, needing

if TYPE_CHECKING:
    import dask.array as da
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from scipy.sparse import csr_matrix

__all__ = ["Part", "export", "export_checkpoint", "saved_parts"]

# A function that gives a part of a table, mostly a shard, as pieces: (keys or number of the first row, values [m, dim
# or more]), each row once. The next piece may overwrite the arrays of this one. For export to dask a Part must pickle,
# because workers call it.
Part: TypeAlias = "Callable[[], Iterable[tuple[np.ndarray | int, np.ndarray]]]"


def saved_parts(store: Store, checkpoint: str, table: str) -> list[Part]:
    """The shards of a table in a checkpoint, for :func:`export`.

    Examples
    --------
    >>> from dps.engine.checkpoints.store import write_shard
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
    table: str | Named,
    format: str = "numpy",  # noqa: A002
    path: str | None = None,
    *,
    checkpoint: str | None = None,
    storage_options: dict[str, object] | None = None,
) -> Any:
    """A table's values in a checkpoint, in another form. No parameter server is needed, and no cluster.

    Parameters
    ----------
    url : str
        The directory of checkpoints, as in :meth:`dps.ParameterServer.checkpoint`.
    table : str or Table
    format : {"numpy", "pandas", "polars", "arrow", "scipy", "parquet", "dask"}
        As in :meth:`dps.ParameterServer.export`.
    path : str
        The file to write, for Parquet only.
    checkpoint : str, optional
        The name of a checkpoint; by default the newest whole one.
    storage_options : dict, optional
        For fsspec, of `url`.

    Returns
    -------
    ndarray, DataFrame, Arrow table, coo_array, dask array or None
        As in :meth:`dps.ParameterServer.export`.

    Raises
    ------
    CheckpointError
        There is no such checkpoint, or it is damaged.

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
    source = store.latest() if checkpoint is None else store.whole(checkpoint)
    if source is None:
        raise CheckpointError(f"there is no whole checkpoint under {url}")
    name = table_name(table)
    if name not in source.tables:
        known = ", ".join(map(repr, sorted(source.tables)))
        raise UnknownTableError(f"checkpoint {source.name!r} has no table {name!r}; it has {known}")
    return export(saved_parts(store, source.name, name), source.tables[name], format, path)


def export(parts: Sequence[Part], spec: TableSpec, form: str, path: str | None = None) -> Any:
    """A table's values in another form.

    Parameters
    ----------
    parts : sequence of callables
        From :func:`saved_parts`, for instance.
    format, path
        As in :meth:`dps.ParameterServer.export`, which also documents what each format returns.

    Examples
    --------
    >>> part = lambda: [(np.array([7, 2]), np.array([[1, 2], [0, 4]], "f4"))]
    >>> spec = dps.TableSpec("w", dim=2)
    >>> export([part], spec, "numpy")
    (array([7, 2]), array([[1., 2.], [0., 4.]], dtype=float32))
    >>> export([part], spec, "scipy").shape
    (8, 2)
    """
    forms = {"numpy": _numpy, "pandas": _pandas, "polars": _polars, "arrow": _arrow}
    forms |= {"scipy": _scipy, "parquet": _parquet, "dask": _dask}
    if form not in forms:
        raise InputError(f"a table is exported to {', '.join(forms)}, not to {form!r}")
    if (path is None) == (form == "parquet"):
        raise InputError(f"export to {form}: {'it needs a path' if path is None else 'it takes no path'}")
    with needing("checkpoint" if form in ("arrow", "parquet") else "models"):
        return forms[form](parts, spec) if path is None else _parquet(parts, spec, path)


def _pieces(parts: Iterable[Part], spec: TableSpec) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(keys, values) of the pieces of all parts; a piece is valid until the next one."""
    for part in parts:
        for first, rows in part():
            keys = first if isinstance(first, np.ndarray) else np.arange(first, first + len(rows))
            yield keys, rows[:, : spec.dim]


def _pairs(parts: Iterable[Part], spec: TableSpec) -> tuple[np.ndarray, np.ndarray]:
    copies = [(keys.copy(), values.copy()) for keys, values in _pieces(parts, spec)]
    empty = (np.empty(0, np.int64), np.empty((0, spec.dim), spec.dtype))  # np.concatenate needs one array at least
    keys, values = zip(empty, *copies, strict=True)
    return np.concatenate(keys), np.concatenate(values)


def _filled(parts: Iterable[Part], spec: TableSpec, low: int, high: int) -> np.ndarray:
    out, count = np.empty((high - low, spec.dim), spec.dtype), 0
    for keys, values in _pieces(parts, spec):
        out[keys - low] = values
        count += len(keys)
    if count != high - low:
        raise InputError(f"table {spec.name!r}: {count} rows came for rows {low} to {high - 1}; each must come once")
    return out


def _numpy(parts: Sequence[Part], spec: TableSpec) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    return _pairs(parts, spec) if spec.rows is None else _filled(parts, spec, 0, spec.rows)


def _pandas(parts: Sequence[Part], spec: TableSpec) -> pd.DataFrame:
    import pandas as pd

    if spec.rows is not None:
        return pd.DataFrame(widened(_filled(parts, spec, 0, spec.rows)), copy=False)
    keys, values = _pairs(parts, spec)
    return pd.DataFrame(widened(values), index=pd.Index(keys, name="key"), copy=False)


def _columns(parts: Sequence[Part], spec: TableSpec) -> dict[str, np.ndarray]:
    """The columns of a frame without an index: "key" of a keyed table, then the values as "0", "1" and so on."""
    if spec.rows is None:
        keys, values = _pairs(parts, spec)
        columns = {"key": keys}
    else:
        columns, values = {}, _filled(parts, spec, 0, spec.rows)
    return columns | {str(n): widened(np.ascontiguousarray(values[:, n])) for n in range(spec.dim)}


def _polars(parts: Sequence[Part], spec: TableSpec) -> pl.DataFrame:
    try:
        import polars as pl
    except ImportError as error:
        raise MissingPackageError(f"{error}: pip install polars", name=error.name) from error
    return pl.DataFrame(_columns(parts, spec))


def _arrow(parts: Sequence[Part], spec: TableSpec) -> pa.Table:
    import pyarrow as pa

    return pa.table(_columns(parts, spec))


def _scipy(parts: Sequence[Part], spec: TableSpec) -> csr_matrix:
    import scipy.sparse as sp

    # row numbers, columns, values
    entries = [(np.empty(0, np.int64), np.empty(0, np.int64), widened(np.empty(0, spec.dtype)))]
    rows = spec.rows or 0
    for keys, values in _pieces(parts, spec):
        if len(keys) and keys.min() < 0:
            raise InputError(f"table {spec.name!r} has the key {keys.min()}; a matrix has no negative rows: use numpy")
        if spec.rows is None:
            rows = max(rows, int(keys.max(initial=-1)) + 1)
        i, j = np.nonzero(values)
        entries.append((keys[i], j, widened(values[i, j])))
    row_numbers, columns, data = (np.concatenate(column) for column in zip(*entries, strict=True))
    return sp.coo_array((data, (row_numbers, columns)), shape=(rows, spec.dim))


def _parquet(parts: Sequence[Part], spec: TableSpec, path: str = "") -> None:
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = pa.from_numpy_dtype(widened(np.empty(0, spec.dtype)).dtype)
    value = number if spec.dim == 1 else pa.list_(number, spec.dim)
    schema = pa.schema([pa.field("key", pa.int64(), False), pa.field("value", value, False)])
    with fsspec.open(path, "wb") as file, pq.ParquetWriter(file, schema) as writer:
        for keys, rows in _pieces(parts, spec):
            flat = pa.array(widened(np.ascontiguousarray(rows).reshape(-1)))
            values = flat if spec.dim == 1 else pa.FixedSizeListArray.from_arrays(flat, spec.dim)
            writer.write_table(pa.table([pa.array(keys), values], schema=schema))


def _dask(parts: Sequence[Part], spec: TableSpec) -> da.Array | tuple[da.Array, da.Array]:
    import dask.array as da

    if spec.rows is not None and len(parts) == spec.shards:
        load = dask.delayed(_filled, pure=False)
        return da.concatenate(
            [
                da.from_delayed(load([part], spec, low, high), (high - low, spec.dim), spec.dtype)
                for part, (low, high) in zip(parts, itertools.pairwise(spec.shard_map.edges), strict=True)
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
