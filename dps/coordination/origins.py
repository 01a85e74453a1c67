"""Origins of tasks: under which origin, and as which attempt, a Dask task's clients make their ops.

Theory of operation
-------------------
Dask may run a task again: its function raised and may be retried, its worker was lost, another worker stole it. Each
assignment of a task to a worker is a *run* with a higher number. The function is then called from its beginning, so it
makes the same ops again, numbered from 0. They count once if they come from the same origin as before, because a
shard's ledger knows the last op of each origin (`state/ledger.py`). So an origin belongs to (task, client): the n-th
client with which the task pushes. Each distinct run is one *attempt* at it, and shards refuse ops of an earlier attempt
once they have seen a later one.

A task *lives* from its submission until the scheduler forgets it, because nothing needs its result any more. While it
lives Dask may run it again at any time, and the origin is remembered. When it has ended the origin is retired: what a
late attempt still pushes is refused. The same key submitted after that is a new task, which counts again.

At most `most` origins are remembered. If there are more, those of the tasks that asked first are retired, but not of a
task that is at work. Such a task is *spent*: when Dask runs it again its pushes are refused, because it is unknown
which of them counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from dps.errors import LimitError, StoppedError

__all__ = ["TaskOrigins", "decode_key", "encode_key"]

MOST = 1 << 15  # origins remembered, half as many as a shard's ledger holds
MOST_CLIENTS = 1024  # with which one task pushes
MOST_ATTEMPTS = (1 << 16) - 1  # the field in a frame holds no more


def encode_key(key: Any) -> Any:
    """A Dask key (text, bytes, number, or tuple of these) as JSON can hold it.

    >>> decode_key(encode_key(("sum", (0, b"x"), 1.5)))
    ('sum', (0, b'x'), 1.5)
    """
    if isinstance(key, tuple):
        return [encode_key(part) for part in key]
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def decode_key(value: Any) -> Any:
    """The key that :func:`encode_key` encoded.

    Raises
    ------
    TypeError, KeyError, ValueError
        It is none.
    """
    if isinstance(value, list):
        return tuple(map(decode_key, value))
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"no key of a task: {value!r:.100}")


class Held:
    """A task that has pushed: its life, and for each of its clients the origin, the latest run and its attempt."""

    def __init__(self, life: Any):
        self.life = life
        self.clients: dict[int, tuple[int, int, int]] = {}


class TaskOrigins:
    """The origins of all tasks of one parameter server.

    Parameters
    ----------
    allot : callable
        ``allot(1)`` gives an origin that was never used.
    at_work : callable
        Given a life: whether its task is being run. Such a task is never spent.
    most : int
        How many origins are remembered.

    Examples
    --------
    >>> import itertools
    >>> numbers = itertools.count(1)
    >>> origins = TaskOrigins(lambda count: next(numbers))
    >>> origins.of("task", "life", latest=5, run=5, client=0)
    (1, 0)
    >>> origins.of("task", "life", latest=8, run=8, client=0)  # it is run again: a later attempt at the same origin
    (1, 1)
    >>> origins.sweep(lambda task, life: False)
    >>> origins.take_ended()
    [[1, 1]]
    """

    def __init__(
        self, allot: Callable[[int], int], at_work: Callable[[Any], bool] = lambda life: False, most: int = MOST
    ):
        self._allot, self.at_work, self.most = allot, at_work, most
        self._held: OrderedDict[Hashable, Held] = OrderedDict()  # by task; the one that asked first comes first
        self._spent: dict[Hashable, Any] = {}  # task -> life
        self._count = 0  # origins of `_held`
        self._ended: list[int] = []  # origins that the servers are still to be told of

    def __len__(self) -> int:
        return self._count

    def of(self, task: Hashable, life: Any, latest: int, run: int, client: int) -> tuple[int, int]:
        """(origin, attempt) for one client of a task; the same again for the same run.

        Parameters
        ----------
        task : hashable
            Its key.
        life : object
            The scheduler's record of it: another object once the key was forgotten and submitted again.
        latest, run : int
            The task's latest run, and the one that asks.
        client : int
            How many other clients the task has pushed with before this one.

        Raises
        ------
        StoppedError
            A later run was begun, or the task is spent.
        LimitError
            Too many attempts, or clients.
        """
        if (task in self._held and self._held[task].life is not life) or self._spent.get(task, life) is not life:
            self._end(task)
        if task in self._spent:
            raise StoppedError(
                f"task {task!r} was run again, and it is unknown which of its pushes counted: the pushes of "
                f"{self.most} clients in tasks are remembered, and later tasks have taken its place; release the "
                f"results of tasks that are done with (del future), or submit it under another key to count it again"
            )
        held = self._held.get(task, None)
        origin, before, attempt = (0, -1, -1) if held is None else held.clients.get(client, (0, -1, -1))
        if run < max(latest, before):
            raise StoppedError(
                f"run {run} of task {task!r} is over: Dask has begun run {max(latest, before)} of it, which counts"
            )
        if attempt + (run != before) > MOST_ATTEMPTS:
            raise LimitError(f"task {task!r} was begun {attempt + 1} times already")
        if not 0 <= client < MOST_CLIENTS:
            raise LimitError(f"task {task!r} pushes with more than {MOST_CLIENTS} clients: share one")
        if held is None:
            held = self._held[task] = Held(life)
        if not origin:
            origin = self._allot(1)
            self._count += 1
        attempt += run != before
        held.clients[client] = origin, run, attempt
        self._make_room(task)
        return origin, attempt

    def sweep(self, lives: Callable[[Any, Any], bool]) -> None:
        """End the tasks for which ``lives(task, life)`` is false."""
        for task in [task for task, held in self._held.items() if not lives(task, held.life)]:
            self._end(task)
        for task in [task for task, life in self._spent.items() if not lives(task, life)]:
            self._end(task)

    def take_ended(self) -> list[list[int]]:
        """[first origin, how many] of those that have ended since this was asked last."""
        ranges: list[list[int]] = []
        for origin in sorted(self._ended):
            if ranges and sum(ranges[-1]) == origin:
                ranges[-1][1] += 1
            else:
                ranges.append([origin, 1])
        self._ended.clear()
        return ranges

    @property
    def ended(self) -> bool:
        """Whether there are any of which the servers are still to be told."""
        return bool(self._ended)

    def _end(self, task: Hashable) -> None:
        self._spent.pop(task, None)
        held = self._held.pop(task, None)
        if held is not None:
            self._ended += [origin for origin, _, _ in held.clients.values()]
            self._count -= len(held.clients)

    def _make_room(self, but: Hashable) -> None:
        """Spend the tasks that asked first, while there are too many origins."""
        if self._count <= self.most:
            return
        spent, excess = [], self._count - self.most
        for task, held in self._held.items():
            if task != but and not self.at_work(held.life):
                spent.append((task, held.life))
                excess -= len(held.clients)
                if excess <= 0:
                    break
        for task, life in spent:
            self._end(task)
            self._spent[task] = life
