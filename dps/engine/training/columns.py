"""Data in memory, and columns of tables as arrays: what `ps.run` makes of them before it looks for partitions.

A training function should see one kind of partition, whatever the data comes from. With ``columns=``, the partitions of
all frames are tuples of numpy arrays. Data in memory is cut by rows into partitions, one for each thread that may take
a trainer, and sent to the workers (`kept.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from dask import delayed
from dask.base import is_dask_collection
from dask.delayed import Delayed
from distributed import Client, Future

from dps.engine.training import kept, spark, spark_tasks
from dps.engine.training.batches import cutter, row_count
from dps.engine.training.dataframes import as_pandas, names_of
from dps.engine.training.types import Batch, Columns, Data, Partition
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, InputTypeError, told

Pick: TypeAlias = Callable[[Mapping[Hashable, object]], Partition]  # the chosen columns, of all of a frame

__all__ = ["arrays", "chosen", "in_memory", "scattered"]


def arrays(frame: Partition, columns: Columns) -> Partition:
    """Columns of a table as numpy arrays.

    Parameters
    ----------
    frame : DataFrame of pandas, polars or Arrow, or mapping of names to columns
    columns : str, or list of names and of lists of names
        A name gives an array [rows]; a list of names within the list gives one array [rows, names].

    Returns
    -------
    ndarray or tuple of ndarray
        A tuple, but for a single name.

    Examples
    --------
    >>> arrays({"a": [1, 2], "b": [3, 4], "y": [0.5, 1.5]}, (["a", "b"], "y"))
    (array([[1, 3],
           [2, 4]]), array([0.5, 1.5]))
    """
    frame = as_pandas(frame, _names(columns))
    if not isinstance(columns, (list, tuple)):
        return _array(frame[columns])
    return tuple(
        np.column_stack([_array(frame[name]) for name in each])
        if isinstance(each, (list, tuple))
        else _array(frame[each])
        for each in columns
    )


def _array(column: Partition) -> np.ndarray:
    """One column; missing numbers are NaN, whatever marks them in the table."""
    dtype = getattr(column, "dtype", None)
    if hasattr(column, "to_numpy"):
        numeric = getattr(dtype, "kind", "O") in "biuf" and not isinstance(dtype, np.dtype)
        if numeric and column.isna().any():
            return column.to_numpy(np.float64, na_value=np.nan)
        return column.to_numpy(getattr(dtype, "numpy_dtype", None) if numeric else None)
    return np.asarray(column)


def _names(columns: Columns) -> list[Hashable]:
    """The names in `columns`, each once."""
    names: list[Hashable] = []
    for each in columns if isinstance(columns, (list, tuple)) else [columns]:
        names += each if isinstance(each, (list, tuple)) else [each]
        if isinstance(each, (list, tuple)) and (not each or any(isinstance(name, (list, tuple)) for name in each)):
            names = []
            break
    if not names:
        raise InputError(
            "columns is a name, or a list of names and of lists of names, such as ['user', 'item'] or (['a', 'b'],"
            f" 'y'); not {told(columns)}"
        )
    return list(dict.fromkeys(names))


def _check(known: Sequence[Hashable], names: list[Hashable]) -> None:
    known = list(known)
    if missing := [name for name in names if name not in known]:
        shown = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
        raise InputError(f"the data has no columns {', '.join(map(repr, missing))}; it has {shown}")
    if twice := [name for name in names if known.count(name) > 1]:
        raise InputError(f"the data has several columns of the name {', '.join(map(repr, twice))}: rename them")


def chosen(client: Client, data: Data, columns: Columns, role: set[str]) -> Data:
    """`data` with partitions that are tuples of arrays: these columns of each.

    Parameters
    ----------
    client : distributed.Client
    data : DataFrame of Dask, Spark, pandas, polars or Arrow, dict of columns, or list of frames
        The frames of a list are partitions, in memory, delayed or futures.
    columns
        As in :func:`arrays`.
    role : set of str
        Workers with servers, where partitions in memory are not sent.

    Raises
    ------
    InputError
        A column is not there, or `columns` is no choice of columns.
    InputTypeError
        The data has no named columns.
    """
    names, pick = _names(columns), functools.partial(arrays, columns=columns)
    if spark.is_spark(data):
        return _of_spark(data, names, pick)
    if is_dask_collection(data) and hasattr(data, "columns") and hasattr(data, "to_delayed"):
        _check(data.columns, names)
        return [delayed(pick)(part) for part in data[names].to_delayed()]
    if isinstance(data, (Delayed, Future)):
        data = [data]
    if isinstance(data, list) and data:
        if all(isinstance(part, Delayed) for part in data):
            return [delayed(pick)(part) for part in data]
        if all(isinstance(part, Future) for part in data):
            return client.map(pick, data, pure=False)
        tables = [known for part in data if (known := _columns_of_frame(part)) is not None]
        if len(tables) == len(data):
            for known in tables:
                _check(known, names)
            makers = [functools.partial(pick, part) for part in data]
            return kept.send(client, makers, kept.threads_outside_servers(client, role))
    if (known := list(data) if isinstance(data, dict) else _columns_of_frame(data)) is not None:
        _check(known, names)
        return pick(data)
    raise InputTypeError(
        f"columns= names columns of a table, and a {type(data).__name__} has none: pass a DataFrame of Dask, Spark, "
        "pandas, polars or Arrow, or a dict of arrays (a bag or an RDD becomes a frame by .to_dataframe() or .toDF())"
    )


def _columns_of_frame(frame: Partition) -> Sequence[Hashable] | None:
    """The names of the columns of a frame in memory; None for what is no frame."""
    return list(frame.columns) if hasattr(frame, "iloc") and hasattr(frame, "columns") else names_of(frame)


def _of_spark(data: Data, names: list[Hashable], pick: Pick) -> spark.ReadWith:
    if isinstance(data, spark.ReadWith) or not hasattr(data, "mapInArrow"):
        raise InputTypeError(f"columns= names columns of a Spark DataFrame; a {type(data).__name__} has none: .toDF()")
    _check(data.columns, names)
    frame = data.select(*("`" + str(name).replace("`", "``") + "`" for name in names))
    frame = frame.toDF(*(f"c{n}" for n in range(len(names))))  # a dot in a name stops Spark from passing the frame on
    return spark.ReadWith(frame, functools.partial(_pick_from_arrow, spark.as_pandas(frame), names, pick))


def _pick_from_arrow(
    read: spark_tasks.Build, names: list[Hashable], pick: Pick, index: int, batches: Iterator[Batch]
) -> Partition:
    frame = read(index, batches)
    return pick({name: frame[f"c{n}"] for n, name in enumerate(names)})


def in_memory(data: Data) -> bool:
    """Whether the rows themselves are here: arrays, frames, lists and dicts of columns, or a tuple of them.

    Examples
    --------
    >>> in_memory((np.ones(3), [1, 2, 3])), in_memory("text"), in_memory([])
    (True, False, False)
    """
    if isinstance(data, tuple):
        return bool(data) and all(part is None or in_memory(part) for part in data) and row_count(data) is not None
    if is_dask_collection(data) or isinstance(data, (Delayed, Future)):
        return False
    if isinstance(data, dict):
        return bool(data) and not any(map(_remote, data.values())) and row_count(data) is not None
    if isinstance(data, list):
        return bool(data) and not any(_remote(item) or (hasattr(item, "shape") and np.ndim(item)) for item in data)
    return row_count(data) is not None


def _remote(value: Data) -> bool:
    return is_dask_collection(value) or isinstance(value, (Delayed, Future)) or spark.is_spark(value)


def scattered(
    client: Client, data: Data, role: set[str], trainers: int | None, restored: SavedRun | None = None
) -> list[Future]:
    """Data in memory, cut into partitions of consecutive rows, on the workers that trainers run on.

    There is a partition for each trainer: as many as asked for, or as there are threads outside the servers; as many as
    before in a run that goes on. They differ by at most one row. A run sends those again that are lost with a worker.

    Raises
    ------
    InputError
        No rows, or parts of a tuple or dict with different numbers of rows.
    TooFewWorkersError
        All workers are servers.
    """
    rows = row_count(data)
    if not rows:
        raise InputError(f"the data, a {type(data).__name__} in memory, has no rows")
    threads = kept.threads_outside_servers(client, role)
    before = 0 if restored is None else sum(map(len, restored.partitions))
    count = min(before or trainers or sum(threads.values()), rows)
    cut, edges = cutter(data), [n * rows // count for n in range(count + 1)]
    makers = [functools.partial(cut, start, stop) for start, stop in itertools.pairwise(edges)]
    return kept.send(client, makers, threads)
