"""`ps.map`: a function of partitions and tables over Dask collections, lazily. The driver's side.

What runs on workers is in `training/lazy_reads.py`. Dask's own means make the result, so its graph is culled and fused
as any other.
"""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from dask import delayed
from dask.base import is_dask_collection

from dps.engine.client.client import Client
from dps.engine.client.table import Table
from dps.engine.client.verbs import TableLike
from dps.engine.daskapi.cordon import meta_of
from dps.engine.driver.kinds import Kind, kind_of
from dps.engine.state.names import table_name
from dps.engine.training.data import is_spark
from dps.engine.training.lazy_reads import ReadingBagStage, ReadingBlockStage, ReadingStage
from dps.engine.training.types import Data, Function, Options, Partition, Result
from dps.errors import InputError, InputTypeError

__all__ = ["mapped"]

STAGES = {"array": ReadingBlockStage, "bag": ReadingBagStage, "delayed": ReadingStage, "frame": ReadingStage}


def mapped(
    client: Client,
    function: Function,
    data: Data,
    tables: TableLike | Sequence[TableLike],
    meta: object,
    args: tuple,
    kwargs: Options,
) -> Data:
    """What :meth:`dps.ParameterServer.map` returns; `client` is one of the parameter server's."""
    several = isinstance(data, tuple)
    columns = list(data) if isinstance(data, tuple) else [data]
    kind = _kind(columns)
    if kind in ("bag", "delayed") and meta is not None:
        raise InputError("meta is for arrays and frames: bags and delayed values have none")
    if any(is_dask_collection(value) for value in (*args, *kwargs.values())):
        raise InputTypeError("args and kwargs are values, not Dask collections: compute them first, or push a table")
    names = _names(client, tables)
    stage = STAGES[kind](client.ticket, names, uuid.uuid4().hex, function, several, args, kwargs)
    if isinstance(stage, ReadingBlockStage):
        return _array(stage, columns, meta)
    if kind == "frame":
        return _frame(stage, columns, meta)
    if kind == "bag":
        _check_counts([bag.npartitions for bag in columns])
        return columns[0].map_partitions(stage, *columns[1:])
    return _delayed(stage, columns)


def _kind(columns: list[Data]) -> Kind:
    kinds = [kind_of(column) for column in columns]
    for column, kind in zip(columns, kinds, strict=True):
        if is_spark(column):
            raise InputTypeError(
                "ps.map takes Dask collections: in Spark, dps.spark.map_partitions_with_ps reads tables"
            )
        if kind is None:
            raise InputTypeError(
                f"ps.map takes a Dask array, dataframe, bag, delayed value or list of these, or a tuple of such, not a "
                f"{type(column).__name__}: of data in memory, call the function with the tables' handles"
            )
    found = set(kinds)
    if len(found) != 1 or kinds[0] is None:
        raise InputTypeError(
            f"ps.map takes a tuple of collections of one kind, and these are {', '.join(map(str, kinds)) or 'none'}: "
            f"make them alike, for example by frame.to_dask_array(lengths=True)"
        )
    return kinds[0]


def _names(client: Client, tables: TableLike | Sequence[TableLike]) -> tuple[str, ...]:
    listed = [tables] if isinstance(tables, (str, Table)) else [*cast("Sequence[TableLike]", tables)]
    if not listed:
        raise InputError('tables= has no table: name at least one, such as tables=("P", "Q")')
    for table in listed:
        if isinstance(table, Table) and table.session != client.ticket.session:
            raise InputError(
                f"{table!r} is a table of parameter server {table.session!r}, and this one is {client.ticket.session!r}"
            )
    names = tuple(table_name(table.name if isinstance(table, Table) else table) for table in listed)
    for name in names:
        client.table(name)
    return names


def _check_counts(counts: list[int]) -> None:
    if len(set(counts)) > 1:
        raise InputError(
            f"the collections have {', '.join(map(str, counts))} partitions: repartition them, so that each partition "
            f"has the same rows"
        )


def _delayed(stage: ReadingStage, columns: list[Data]) -> Data:
    lists = [column if isinstance(column, list) else [column] for column in columns]
    _check_counts([len(parts) for parts in lists])
    made = [delayed(stage, pure=False)(*parts) for parts in zip(*lists, strict=True)]
    return made if isinstance(columns[0], list) else made[0]


def _tried(stage: ReadingStage, parts: list[Partition]) -> Result:
    try:
        return stage(*parts)
    except Exception as error:
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise InputError(
            f"what the result looks like could not be found out: the function raised {error!r:.300} when it was given "
            f"a made-up partition ({kinds} of {len(parts[0])} rows); pass meta="
        ) from error


def _array(stage: ReadingBlockStage, columns: list[Data], meta: Any) -> Data:
    import dask.array as da

    if min(column.ndim for column in columns) < 1:
        raise InputError("ps.map takes arrays with an axis of rows, and one of these has none (shape ())")
    columns = [_row_blocks(column, columns[0]) for column in columns]
    _check_counts([column.numblocks[0] for column in columns])
    if meta is None:
        shapes = [(1, *(1 if math.isnan(n) else n for n in column.shape[1:])) for column in columns]
        made = [np.ones_like(meta_of(column), shape=shape) for column, shape in zip(columns, shapes, strict=True)]
        meta = _tried(stage, made)[:0]
    elif not hasattr(meta, "dtype") or not getattr(meta, "ndim", 0):
        raise InputTypeError(f"meta of an array is an empty array, such as np.empty((0, 3)), not {meta!r:.100}")
    stage.shape = meta.shape[1:]
    # Axis 0 is that of the rows; each other axis of the arrays and of the result has a number of its own. Dask joins
    # the blocks along axes that the result does not have.
    axes = itertools.count(1)
    arguments: list[object] = []
    for column in columns:
        arguments += [column, (0, *itertools.islice(axes, column.ndim - 1))]
    made_axes = dict(zip(axes, stage.shape, strict=False))
    return da.blockwise(
        stage, (0, *made_axes), *arguments, new_axes=made_axes, concatenate=True, align_arrays=False,
        dtype=meta.dtype, meta=meta,
    )  # fmt: skip


def _row_blocks(column: Data, first: Data) -> Data:
    """The array, its rows cut as those of the first one are, if their number is known."""
    if column.chunks[0] == first.chunks[0] or math.isnan(column.shape[0]) or math.isnan(first.shape[0]):
        return column
    if column.shape[0] != first.shape[0]:
        raise InputError(f"the arrays have {first.shape[0]} and {column.shape[0]} rows")
    return column.rechunk({0: first.chunks[0]})


def _frame(stage: ReadingStage, columns: list[Data], meta: Any) -> Data:
    from dask.dataframe.dispatch import meta_nonempty

    _check_counts([column.npartitions for column in columns])
    if meta is None:
        meta = _tried(stage, [meta_nonempty(meta_of(column)) for column in columns])
        if not hasattr(meta, "iloc"):
            raise InputTypeError(
                f"of a frame the function returns a frame or a series, not a {type(meta).__name__}: give it the index "
                f"of the partition, pd.Series(values, part.index)"
            )
        meta = meta.iloc[:0]
    return columns[0].map_partitions(stage, *columns[1:], meta=meta, align_dataframes=False)
