"""What a user has, as partitions: on which workers each of them lies, and which trainer takes it.

`Partitions.of` takes data of Dask, futures and delayed values. `Partitions.sent` cuts data in memory by rows into
partitions, one for each thread that may take a trainer, and sends them to the workers. Dask cannot make scattered data
again. Nor do more copies help, because its Active Memory Manager drops all but one of them within seconds. So the
driver keeps the way to make a partition: a cut of the caller's array, which takes no memory, and not the partition
itself. `send_again` sends a partition again where a worker died with it.

A training function should see one kind of partition, whatever the data comes from. With ``columns=``, the partitions of
all frames are tuples of numpy arrays. Data of Spark (`is_spark`) goes its own way (`spark.py`). What a trainer makes of
its partitions is in `batches.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from dask import delayed
from dask.base import is_dask_collection, tokenize
from dask.delayed import Delayed
from distributed import Client, Future, futures_of, wait

from dps.engine.daskapi.workers import workers_of
from dps.engine.training.batches import row_count, taker
from dps.engine.training.dataframes import as_pandas, names_of
from dps.engine.training.types import Columns, Data, Function, Key, Partition, Result
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, InputTypeError, TooFewWorkersError, told

if TYPE_CHECKING:
    from dps.engine.training.spark_tasks import Build

__all__ = [
    "ByPartition",
    "Partitions",
    "ReadWith",
    "Shares",
    "arrays",
    "by_partition",
    "cannot_be_sent_again",
    "chosen",
]
__all__ += ["in_memory", "is_spark", "names_in", "refuse_missing", "send", "send_again", "send_mapped", "share"]
__all__ += ["threads_outside_servers"]

REMEMBERED_ASSIGNMENTS = 64  # of the data that was trained on last
Make: TypeAlias = Callable[[], Partition]

_makers: weakref.WeakKeyDictionary[Future, Make] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Partitions:
    """The partitions of a user's data: futures, computed where Dask puts them.

    `rows` has one tuple for each partition.
    If `paired`, a partition is a tuple of what its futures hold; otherwise it has one future, and is what this holds.
    """

    rows: list[tuple[Future, ...]]
    paired: bool

    @classmethod
    def of(cls, client: Client, data: Data) -> Partitions:
        """The partitions of data of Dask; what is already persisted stays where it is.

        `data` is a bag, array (in row blocks) or dataframe; a list of futures or delayed values, one for each
        partition. A tuple of collections of equal partitioning, such as ``(X, y)``, gives partitions that are tuples.
        """
        paired = isinstance(data, tuple)
        if paired:
            columns = [_futures(client, part, f"part {n} of the data") for n, part in enumerate(data)]
            if len({len(column) for column in columns}) > 1:
                counts = ", ".join(str(len(column)) for column in columns)
                raise InputError(f"the parts of the data have {counts} partitions: rechunk or repartition them alike")
            rows = list(zip(*columns, strict=True))
        else:
            rows = [(future,) for future in _futures(client, data, "the data")]
        if not rows:
            raise InputError("the data has no partitions")
        with client.as_current():  # `wait` asks for the current client
            wait([future for row in rows for future in row])
        for row in rows:
            for future in row:
                if future.status == "error":
                    future.result()  # raises what went wrong in the user's own graph
        return cls(rows, paired)

    @classmethod
    def sent(
        cls,
        client: Client,
        data: Data,
        role: Container[str],
        trainers: int | None,
        restored: SavedRun | None = None,
    ) -> Partitions:
        """Data in memory, cut into partitions of consecutive rows, on the workers that trainers run on.

        There is a partition for each trainer: as many as asked for, or as there are threads outside the servers; as
        many as before in a run that goes on. They differ by at most one row. A run sends those again that are lost with
        a worker.

        `role` has the workers with servers.
        Raises InputError if there are no rows, or parts of a tuple or dict with different numbers of rows.
        Raises TooFewWorkersError if all workers are servers.
        """
        rows = row_count(data)
        if not rows:
            raise InputError(f"the data, a {type(data).__name__} in memory, has no rows")
        threads = threads_outside_servers(client, role)
        before = 0 if restored is None else sum(map(len, restored.partitions))
        count = min(before or trainers or sum(threads.values()), rows)
        take, edges = taker(data), [n * rows // count for n in range(count + 1)]
        makers = [functools.partial(take, slice(start, stop)) for start, stop in itertools.pairwise(edges)]
        return cls.of(client, send(client, makers, threads))

    @property
    def keys(self) -> list[list[Key]]:
        return [[future.key for future in row] for row in self.rows]

    def taken(self, numbers: Sequence[int]) -> list:
        return [self.rows[n] if self.paired else self.rows[n][0] for n in numbers]


def _futures(client: Client, data: Data, what: str) -> list[Future]:
    if isinstance(data, Future):
        return [data]
    if is_dask_collection(data) and not isinstance(data, Delayed):
        blocks = getattr(data, "numblocks", (1,))
        if any(n != 1 for n in blocks[1:]):
            raise InputError(f"{what} is an array of {blocks} blocks: trainers take whole rows, so rechunk((rows, -1))")
        return futures_of(client.persist(data))
    if isinstance(data, Delayed):
        return [client.compute(data)]
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)) and len(data):
        if all(isinstance(part, Future) for part in data):
            return list(data)
        if all(isinstance(part, Delayed) for part in data):
            return client.compute(list(data))
    raise InputTypeError(
        f"{what} is a {type(data).__name__}; ps.run takes a Dask bag, array or dataframe, a list of futures or "
        f"delayed values, or data in memory (arrays, frames, lists and dicts of columns), or a tuple of these, "
        f"of which either all are in memory or none (dask.array.from_array makes a Dask array of one)"
    )


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
    return is_dask_collection(value) or isinstance(value, (Delayed, Future)) or is_spark(value)


def threads_outside_servers(client: Client, role: Container[str]) -> dict[str, int]:
    """Address -> threads of each worker that is not for servers.

    `role` has workers with servers, beside those that have the resource ``dps``.
    Raises TooFewWorkersError if all workers are for servers.
    """
    workers = workers_of(client)
    threads = {
        worker: int(info["nthreads"])
        for worker, info in workers.items()
        if worker not in role and not info.get("resources", {}).get("dps")
    }
    if not threads:
        raise TooFewWorkersError(
            f"no worker is left for data in memory and its trainers: all {len(workers)} are for servers; add workers"
        )
    return threads


def send(client: Client, makers: Iterable[Make], workers: Iterable[str]) -> list[Future]:
    """Scatter what these functions return, in turn among the workers."""
    makers = list(makers)
    futures = client.scatter([make() for make in makers], workers=sorted(workers), hash=False)
    _makers.update(zip(futures, makers, strict=True))
    return futures


def send_mapped(client: Client, function: Callable, futures: Sequence[Future], *columns: Sequence) -> list[Future]:
    """As ``client.map(function, futures, *columns, pure=False)``, which computes on the workers.

    Where a result is lost together with the partition that it was made of, :func:`send_again` computes it here.
    """
    results = client.map(function, futures, *columns, pure=False)
    for result, future, *arguments in zip(results, futures, *columns, strict=True):
        if (make := _makers.get(future)) is not None:
            _makers[result] = functools.partial(_made, function, make, arguments)
    return results


def _made(function: Callable, make: Make, arguments: Sequence) -> Partition:
    return function(make(), *arguments)


def cannot_be_sent_again(futures: Iterable[Future]) -> list[Future]:
    return [future for future in futures if future not in _makers]


def send_again(client: Client, futures: Iterable[Future], workers: Sequence[str]) -> None:
    """Make lost partitions and scatter them under the keys that they had, so that their futures are finished again.

    A partition stays lost where the worker that was to get it has gone meanwhile; its caller looks again.
    """
    for number, future in enumerate(futures):
        partition = _makers[future]()
        with contextlib.suppress(KeyError, OSError):  # of Dask, for an unknown worker and a broken connection
            client.scatter({future.key: partition}, workers=[workers[number % len(workers)]])


@dataclasses.dataclass(frozen=True)
class ReadWith:
    """An RDD or DataFrame, and what makes a trainer's partition of the records or Arrow batches of one of its own."""

    data: Data
    read: Build


def is_spark(data: Data) -> bool:
    """Whether it is an RDD or a DataFrame of PySpark's, classic or Connect, or one that is read in a special way."""
    if isinstance(data, ReadWith):
        return True
    kinds = [kind for kind in type(data).__mro__ if kind.__module__.partition(".")[0] == "pyspark"]
    if any(kind.__module__.startswith("pyspark.pandas") for kind in kinds):
        raise InputTypeError(f"a {type(data).__name__} of pandas on Spark: pass its .to_spark()")
    if isinstance(data, tuple) and any(map(is_spark, data)):
        raise InputTypeError("a tuple of Spark's data: make one of them, rdd.zip(other) or a DataFrame of all columns")
    return any(kind.__name__ in ("RDD", "DataFrame") for kind in kinds)


def arrays(frame: Partition, columns: Columns) -> Partition:
    """Columns of a table as numpy arrays.

    In `columns`, a name gives an array [rows]; a list of names within the list gives one array [rows, names]. The
    result is a tuple, but for a single name.

    Examples
    --------
    >>> arrays({"a": [1, 2], "b": [3, 4], "y": [0.5, 1.5]}, (["a", "b"], "y"))
    (array([[1, 3],
           [2, 4]]), array([0.5, 1.5]))
    """
    frame = as_pandas(frame, names_in(columns))
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


def names_in(columns: Columns) -> list[Hashable]:
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


def refuse_missing(known: Sequence[Hashable], names: list[Hashable]) -> None:
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
    data : DataFrame of Dask, pandas, polars or Arrow, dict of columns, or list of frames
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
    names, pick = names_in(columns), functools.partial(arrays, columns=columns)
    if is_dask_collection(data) and hasattr(data, "columns") and hasattr(data, "to_delayed"):
        refuse_missing(data.columns, names)
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
                refuse_missing(known, names)
            makers = [functools.partial(pick, part) for part in data]
            return send(client, makers, threads_outside_servers(client, role))
    if (known := list(data) if isinstance(data, dict) else _columns_of_frame(data)) is not None:
        refuse_missing(known, names)
        return pick(data)
    raise InputTypeError(
        f"columns= names columns of a table, and a {type(data).__name__} has none: pass a DataFrame of Dask, Spark, "
        "pandas, polars or Arrow, or a dict of arrays (a bag or an RDD becomes a frame by .to_dataframe() or .toDF())"
    )


def _columns_of_frame(frame: Partition) -> Sequence[Hashable] | None:
    return list(frame.columns) if hasattr(frame, "iloc") and hasattr(frame, "columns") else names_of(frame)


def share(holders: Sequence[Sequence[str]], slots: Sequence[str]) -> list[list[int]]:
    """Which partitions each trainer takes: its own worker's where possible, and none more than one ahead of another.

    `holders` has for each partition the workers that hold it, `slots` for each trainer its worker. The result
    has for each trainer its partitions, ascending.

    Examples
    --------
    >>> share([["a"], ["a"], ["b"], ["a"]], ["a", "b"])
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in slots]
    homeless = []
    for part, workers in enumerate(holders):
        local = [n for n, worker in enumerate(slots) if worker in workers]
        if local:
            shares[min(local, key=lambda n: len(shares[n]))].append(part)
        else:
            homeless.append(part)
    for part in homeless:
        min(shares, key=len).append(part)
    while max(map(len, shares)) > min(map(len, shares)) + 1:
        min(shares, key=len).append(max(shares, key=len).pop())
    return [sorted(parts) for parts in shares]


class Shares:
    """Assignments that were made before, so that the same data on the same workers is assigned in the same way again.

    :func:`share` alone does not ensure that, because a partition that was fetched by its trainer lies on two workers
    afterwards.

    Examples
    --------
    >>> shares, keys, slots = Shares(), ["x0", "x1", "x2"], ["a", "b"]
    >>> shares.of(keys, [["a"], ["a"], ["a"]], slots)
    [[0, 1], [2]]
    >>> shares.of(keys, [["a"], ["a", "b"], ["a", "b"]], slots)  # by itself, `share` would give [[0], [1, 2]]
    [[0, 1], [2]]
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several threads may each have a run
        self._before: OrderedDict[str, list[list[int]]] = OrderedDict()  # the one used least recently comes first

    def of(self, keys: Sequence[object], holders: Sequence[Sequence[str]], slots: Sequence[str]) -> list[list[int]]:
        """The assignment of before, unless more partitions would lie at their trainers with that of :func:`share`."""

        def local(shares: list[list[int]]) -> int:
            return sum(slots[n] in holders[part] for n, parts in enumerate(shares) for part in parts)

        name, shares = tokenize(keys, slots), share(holders, slots)
        with self._lock:
            before = self._before.pop(name, shares)
            chosen = self._before[name] = before if local(before) >= local(shares) else shares
            while len(self._before) > REMEMBERED_ASSIGNMENTS:
                self._before.popitem(last=False)
        return [list(parts) for parts in chosen]


class Numbered(Protocol):
    """What is told of a trainer: its number, and those of its partitions."""

    @property
    def number(self) -> int: ...

    partition_numbers: Sequence[int]


class ByPartition:
    """A training function whose result is checked: a list with one result for each of its partitions."""

    def __init__(self, function: Function):
        self.function = function

    def __call__(self, trainer: Numbered, parts: list[Partition], *args: object, **kwargs: object) -> list[Result]:
        results = self.function(trainer, parts, *args, **kwargs)
        count = len(trainer.partition_numbers)
        if not isinstance(results, (list, tuple)) or len(results) != count:
            found = f" of {len(results)}" if isinstance(results, (list, tuple)) else ""
            raise InputError(
                f'with by="partition" the function returns a list with one result for each of its partitions: trainer '
                f"{trainer.number} has {count} (trainer.partition_numbers), and returned a {type(results).__name__}"
                f"{found}"
            )
        return list(results)


def by_partition(results: Sequence[Sequence[Result]], shares: Sequence[Sequence[int]]) -> list[Result]:
    """The results in the order of the partitions, where each trainer has returned one for each of its own.

    >>> by_partition([["a", "c"], ["b"]], [[0, 2], [1]])
    ['a', 'b', 'c']
    """
    pairs = (pair for mine, found in zip(shares, results, strict=True) for pair in zip(mine, found, strict=True))
    return [result for _, result in sorted(pairs, key=lambda pair: pair[0])]
