"""Lazy stages on Dask collections: a trainer for each partition, when Dask computes it. The driver's side.

The result is a collection of the same kind, made by Dask's own means for it. Each task knows the number of its
partition in the collection that the stage was made of, also where only some partitions are computed: Dask's dataframes
tell a function the place among those that are computed, so their partitions become delayed values first.

What runs on workers is in `lazy_tasks.py`.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from dask import delayed
from dask.base import is_dask_collection
from dask.delayed import Delayed

from dps.engine.daskapi.cordon import meta_of
from dps.engine.driver.kinds import Kind, kind_of
from dps.engine.driver.parameter_server import ParameterServer
from dps.engine.training.data import is_spark
from dps.engine.training.lazy_tasks import BagStage, BlockStage, Stage, rehearsal
from dps.engine.training.types import Data, Function, Options, Partition, Result
from dps.errors import InputError, InputTypeError, told

__all__ = ["end_run", "map_partitions_with_ps"]

# Description of a result as Dask takes it: an empty array or frame, or names and dtypes.
Meta: TypeAlias = Any

# parameter server -> name of a result -> number of its run
_runs: weakref.WeakKeyDictionary[ParameterServer, dict[str, int]] = weakref.WeakKeyDictionary()


def map_partitions_with_ps(
    data: Data,
    function: Function,
    ps: ParameterServer,
    *,
    meta: Meta = None,
    args: tuple = (),
    kwargs: Options | None = None,
    **options: Any,
) -> Data:
    """As Dask's ``map_partitions``, with a parameter server: lazy, in ordinary tasks.

    A partition's trainer joins when Dask runs its task, so no trainer waits for another: there is no staleness, and
    there are no collective calls. Whatever Dask computes again (tasks that are retried, lost workers, a second
    ``compute()``, two results that are made of this one) changes the tables once: pushes carry their place in the
    function's program, and those at a place that was reached before are repeats. For that the function makes the same
    pushes in the same order whenever it sees the partition, and leaves the partition as it is.

    Parameters
    ----------
    data : dask.bag.Bag, dask.array.Array, dask.dataframe.DataFrame or Series, Delayed, or list of Delayed
        An array's blocks are its partitions, in C order; of a list each delayed value is one.
    function : callable
        Called as ``function(trainer, partition)``; returns the new partition. Of a bag it is given a list, and returns
        an iterable, or None for nothing.
    ps : ParameterServer
    meta : object, optional
        What the result looks like, as in Dask: for arrays an empty array, for dataframes an empty frame or series, or
        a mapping of names to dtypes. By default the function is called here, with a small made-up partition and a
        trainer that pulls and does not push. Bags and delayed values have none.
    args, kwargs
        More arguments for `function`.
    **options
        For arrays: ``chunks``, ``drop_axis``, ``new_axis`` of :func:`dask.array.map_blocks`, where the new blocks have
        another shape.

    Returns
    -------
    Bag, Array, DataFrame or Series, Delayed, or list of Delayed
        As `data`. The divisions of a dataframe are unknown, because the function may change the index. When nothing
        will compute it again, tell :func:`end_run`.

    Raises
    ------
    InputError, InputTypeError
        Data that is none of these, or has no partitions; `meta` does not fit, or cannot be found out.

    Examples
    --------
    >>> import dask.bag as db
    >>> from distributed import Client
    >>> def count(trainer, numbers):
    ...     for number in numbers:
    ...         trainer.push("count", [number % 2], 1)
    ...         yield 10 * number
    >>> cluster = dps.LocalCluster(servers=1, trainers=2, processes=False)
    >>> with Client(cluster) as client, dps.ParameterServer(client) as ps:
    ...     _ = ps.table("count", rows=2, dtype="int64")
    ...     counted = dps.map_partitions_with_ps(db.range(10, npartitions=3), count, ps)
    ...     counted.sum().compute(), counted.max().compute()
    ...     ps.client().pull("count")  # each number has counted once
    ...     dps.end_run(counted)
    (450, 90)
    array([5, 5])
    >>> cluster.close()
    """
    kind = _kind(data)
    if kind is not _array and options:
        raise InputTypeError(f"{', '.join(options)}: only arrays take more options than meta, args and kwargs")
    if kind in (_bag, _delayed) and meta is not None:
        raise InputError("meta is for arrays and dataframes: bags and delayed values have none")
    kwargs = kwargs or {}
    if any(is_dask_collection(value) for value in (*args, *kwargs.values())):
        raise InputTypeError("args and kwargs are values, not Dask collections: compute them first, or push a table")
    return kind(_StagePlan(ps, function, args, kwargs), data, meta, options)


def end_run(data: Data) -> None:
    """Say that a result of :func:`map_partitions_with_ps` will not be computed again: what is kept for it may go.

    Without this it is kept until the parameter server is closed: a few hundred bytes a partition. Tasks that compute a
    partition again after this fail with a `StoppedError`.

    Parameters
    ----------
    data : Bag, Array, DataFrame or Series, Delayed, or list of Delayed
        As it was returned.

    Raises
    ------
    InputError
        It is no such result, or its run was ended before.

    Examples
    --------
    >>> def total(numbers, ps):
    ...     counted = dps.map_partitions_with_ps(numbers, count, ps)
    ...     result = counted.sum().compute()
    ...     dps.end_run(counted)
    ...     return result
    """
    name = _name(data)
    for ps, runs in list(_runs.items()):
        if (run := runs.pop(name, None)) is not None:
            if not ps.closed:
                ps.connection.call("end_run", run=run)
            return
    raise InputError(
        f"{told(data, 200)} is not a result of map_partitions_with_ps, as it was returned to this process, or its run "
        f"was ended before"
    )


class _StagePlan:
    """A stage to be: its function, and of which parameter server."""

    def __init__(self, ps: ParameterServer, function: Function, args: tuple, kwargs: Options):
        self.ps = ps
        self.function = function
        self.args = args
        self.kwargs = kwargs

    def rehearse(self, partition: Partition, partitions: int) -> Result:
        """What the function makes of a small partition, without pushing."""
        with rehearsal(self.ps.ticket, partitions) as trainer:
            try:
                return self.function(trainer, partition, *self.args, **self.kwargs)
            except Exception as error:
                raise InputError(
                    f"what the result looks like could not be found out: the function raised {error!r:.300} when it "
                    f"was given a made-up partition ({type(partition).__name__} of {len(partition)} rows); pass meta="
                ) from error

    def begin(self, kind: type[Stage], partitions: int, make: Callable[[Stage], Data]) -> Data:
        if not partitions:
            raise InputError("the data has no partitions")
        run = self.ps.connection.call("start_run", trainers=partitions, staleness=None, elastic=True)
        try:
            result = make(kind(self.ps.ticket, run, uuid.uuid4().hex, self.function, self.args, self.kwargs))
        except BaseException:
            self.ps.connection.call("end_run", run=run)
            raise
        _runs.setdefault(self.ps, {})[_name(result)] = run
        return result


Make = Callable[[_StagePlan, Data, Meta, Options], Data]


def _kind(data: Data) -> Make:
    makes: dict[Kind, Make] = {"array": _array, "bag": _bag, "delayed": _delayed, "frame": _frame}
    if kind := kind_of(data):
        return makes[kind]
    if is_spark(data):
        raise InputTypeError("Spark's data: use dps.spark.map_partitions_with_ps(data, function, ps)")
    raise InputTypeError(
        f"map_partitions_with_ps takes a Dask bag, array or dataframe, a delayed value or a list of them, not a "
        f"{type(data).__name__}"
    )


def _name(data: Data) -> str:
    first = data[0] if isinstance(data, list) and data else data
    return str(first.key if isinstance(first, Delayed) else getattr(first, "name" if _is_bag(first) else "_name", ""))


def _is_bag(data: Data) -> bool:
    return type(data).__module__.startswith("dask.bag")


def _bag(plan: _StagePlan, data: Data, meta: Meta, options: Options) -> Data:
    import dask.bag as db

    numbers = db.from_sequence(range(data.npartitions), npartitions=data.npartitions)
    return plan.begin(BagStage, data.npartitions, lambda stage: data.map_partitions(stage, numbers))


def _delayed(plan: _StagePlan, data: Data, meta: Meta, options: Options) -> Data:
    parts = data if isinstance(data, list) else [data]

    def make(stage: Stage) -> Data:
        made = _each(stage, parts)
        return made if isinstance(data, list) else made[0]

    return plan.begin(Stage, len(parts), make)


def _each(stage: Stage, parts: list[Delayed]) -> list[Delayed]:
    return [delayed(stage, pure=False)(part, number) for number, part in enumerate(parts)]


def _array(plan: _StagePlan, data: Data, meta: Meta, options: Options) -> Data:
    import dask.array as da

    if unknown := set(options) - {"chunks", "drop_axis", "new_axis"}:
        raise InputTypeError(
            f"no options of an array: {', '.join(sorted(unknown))}; there are chunks, drop_axis, new_axis"
        )
    dropped = options.get("drop_axis")
    for axis in [] if dropped is None else np.atleast_1d(dropped):
        if data.numblocks[axis] != 1:
            raise InputError(f"axis {axis} has {data.numblocks[axis]} blocks: to drop it, rechunk it into one before")
    if meta is None:
        found = plan.rehearse(np.ones_like(meta_of(data), shape=(1,) * data.ndim), data.npartitions)
        if not hasattr(found, "dtype"):
            raise InputTypeError(f"of a block the function returns an array, not a {type(found).__name__}")
        meta = found[(slice(0, 0),) * found.ndim]
    elif not hasattr(meta, "dtype"):
        raise InputTypeError(f"meta of an array is an empty array, such as np.empty((0, 0)), not {meta!r:.100}")

    def make(stage: Stage) -> Data:
        return da.map_blocks(stage, data, dtype=meta.dtype, meta=meta, enforce_ndim=True, **options)

    return plan.begin(BlockStage, data.npartitions, make)


def _frame(plan: _StagePlan, data: Data, meta: Meta, options: Options) -> Data:
    import dask.dataframe as dd
    from dask.dataframe.dispatch import meta_nonempty

    if meta is None:
        meta = plan.rehearse(meta_nonempty(meta_of(data)), data.npartitions)
        if not hasattr(meta, "iloc"):
            raise InputTypeError(f"of a frame the function returns a frame or a series, not a {type(meta).__name__}")
        meta = meta.iloc[:0]
    parts = data.to_delayed()
    return plan.begin(Stage, len(parts), lambda stage: dd.from_delayed(_each(stage, parts), meta=meta))
