"""From what a user calls data to partitions, each where it lies, shared out among the trainers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from dask.base import is_dask_collection, tokenize
from dask.delayed import Delayed
from distributed import Client, Future, futures_of, wait

from dps.engine.training.types import Data, Function, Partition, Result
from dps.errors import InputError, InputTypeError

__all__ = ["ByPartition", "Shares", "by_partition", "partitions", "share"]

REMEMBERED_ASSIGNMENTS = 64  # of the data that was trained on last


def partitions(client: Client, data: Data) -> list[tuple[Future, ...]]:
    """The partitions of `data` as futures, computed where Dask puts them (data already persisted stays).

    Parameters
    ----------
    data : dask collection, sequence of Future or Delayed, or tuple of collections
        A bag, array (in row blocks) or dataframe; a list of futures or delayed values, one for each partition. A tuple
        of collections of equal partitioning, such as ``(X, y)``, gives partitions that are tuples.

    Returns
    -------
    list of tuple of Future
        One tuple for each partition; of length 1 unless `data` is a tuple.
    """
    if isinstance(data, tuple):
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
    return rows


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


def share(holders: Sequence[Sequence[str]], slots: Sequence[str]) -> list[list[int]]:
    """Which partitions each trainer takes: its own worker's where possible, and none more than one ahead of another.

    Parameters
    ----------
    holders : sequence of sequences of str
        For each partition the workers that hold it.
    slots : sequence of str
        For each trainer its worker.

    Returns
    -------
    list of list of int
        For each trainer its partitions, ascending.

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
        """The assignment of before, unless more partitions would lie at their trainers with that of :func:`share`.

        Parameters
        ----------
        keys : sequence
            What the partitions are known by.
        holders, slots
            As for :func:`share`.
        """

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
    def number(self) -> int:
        """Which trainer of the run it is."""

    partition_numbers: Sequence[int]


class ByPartition:
    """A training function whose result is checked: a list with one result for each of its partitions.

    Parameters
    ----------
    function : callable
        The user's training function.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(number=0, partition_numbers=[1, 4])
    >>> ByPartition(lambda trainer, parts: [sum(part) for part in parts])(trainer, [[1, 2], [3]])
    [3, 3]
    """

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
