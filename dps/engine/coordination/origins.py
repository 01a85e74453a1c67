"""Origins of tasks: the origin and the attempt under which the clients of a Dask task make their ops.

Theory of operation
-------------------
Dask may run a task again: its function raised and may be retried, its worker was lost, another worker stole it. Each
assignment of a task to a worker is a *run* with a higher number. The function is then called from its beginning, so it
makes the same ops again, numbered from 0. They count once if they come from the same origin as before, because a
shard's ledger knows the last op of each origin (`ledger.pyx`). So an origin belongs to (task, client): the n-th
client with which the task pushes. Each distinct run is one *attempt* at it, and shards refuse ops of an earlier attempt
once they have seen a later one.

A task *lives* from its submission until the scheduler forgets it, because nothing needs its result any more. While it
lives Dask may run it again at any time, and its origins are remembered. When it has ended its origins are retired:
shards refuse what a late attempt still pushes. The same key submitted after that is a new task, which counts again.

At most `max_origins` origins are remembered. If there are more, the tasks that asked first, except those at work, are
*spent*: their origins are retired. When Dask runs a spent task again its pushes are refused, because it is unknown
which of them counted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeAlias, TypeVar

from dps.errors import LimitError, StoppedError

__all__ = ["EncodedKey", "TaskKey", "TaskOrigins", "decode_key", "encode_key"]

# Life of a task: the scheduler's record of it.
Life = TypeVar("Life")
# Key of a task as Dask has it.
TaskKey: TypeAlias = "str | bytes | int | float | tuple[TaskKey, ...]"
# Key of a task as JSON has it.
EncodedKey: TypeAlias = "str | int | float | dict[str, str] | list[EncodedKey]"

# Number of origins: half as many as a shard's ledger remembers.
MAX_ORIGINS = 1 << 15
# Number of clients with which one task may push.
MAX_CLIENTS = 1024
# Largest attempt, because the field in a frame holds no more.
MAX_ATTEMPTS = (1 << 16) - 1


def encode_key(key: TaskKey) -> EncodedKey:
    """A Dask key (text, bytes, number, or tuple of these) as JSON can hold it.

    >>> decode_key(encode_key(("sum", (0, b"x"), 1.5)))
    ('sum', (0, b'x'), 1.5)
    """
    if isinstance(key, tuple):
        return [encode_key(part) for part in key]
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def decode_key(value: object) -> TaskKey:
    """The key that :func:`encode_key` encoded.

    Raises TypeError, KeyError or ValueError if the value does not encode a key.
    """
    if isinstance(value, list):
        return tuple(map(decode_key, value))
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"not the key of a task: {value!r:.100}")


class KnownOrigin(Generic[Life]):
    """A task that has pushed: its life, and for each of its clients the origin, the latest run and its attempt."""

    def __init__(self, life: Life):
        self.life = life
        self.clients: dict[int, tuple[int, int, int]] = {}  # number of the client -> origin, latest run, attempt


class TaskOrigins(Generic[Life]):
    """The origins of all tasks of one parameter server.

    ``allot(1)`` gives an origin that was never used.
    `at_work` says of a life whether its task is being run. Such a task is never spent.

    Examples
    --------
    >>> import itertools
    >>> numbers = itertools.count(1)
    >>> origins = TaskOrigins(lambda count: next(numbers))
    >>> origins.assign("task", "life", latest=5, run=5, client=0)
    (1, 0)
    >>> origins.assign("task", "life", latest=8, run=8, client=0)  # run again: a later attempt at the same origin
    (1, 1)
    >>> origins.sweep(lambda task, life: False)
    >>> origins.take_ended()
    [[1, 1]]
    """

    def __init__(
        self,
        allot: Callable[[int], int],
        at_work: Callable[[Life], bool] = lambda life: False,
        max_origins: int = MAX_ORIGINS,
    ):
        self._allot = allot
        self.at_work = at_work
        self.max_origins = max_origins
        # By task; the task that asked first is first.
        self._known: OrderedDict[Hashable, KnownOrigin[Life]] = OrderedDict()
        self._spent: dict[Hashable, Life] = {}  # task -> life
        self._count = 0  # origins in `_known`
        self._ended: list[int] = []  # origins that the servers do not know to be retired yet

    def __len__(self) -> int:
        return self._count

    def assign(self, task: Hashable, life: Life, latest: int, run: int, client: int) -> tuple[int, int]:
        """The (origin, attempt) of one client of a task; the same again for the same run.

        Parameters
        ----------
        life : object
            The scheduler's record of the task: another object once the key was forgotten and submitted again.
        latest, run : int
            The task's latest run, and the run that asks.
        client : int
            The number of the client: with how many others the task has pushed before it.

        Raises
        ------
        StoppedError
            A later run has begun, or the task is spent.
        LimitError
            The task has too many attempts or clients.
        """
        renewed = task in self._known and self._known[task].life is not life
        if renewed or self._spent.get(task, life) is not life:
            self._end(task)
        if task in self._spent:
            raise StoppedError(
                f"task {task!r} was run again, and it is unknown which of its pushes counted: the pushes of "
                f"{self.max_origins} clients in tasks are remembered, and later tasks have taken its place; release "
                "the results of tasks that are done with (del future), or submit the task under another "
                "key to count it again"
            )
        known = self._known.get(task, None)
        origin, before, attempt = (0, -1, -1) if known is None else known.clients.get(client, (0, -1, -1))
        if run < max(latest, before):
            raise StoppedError(
                f"run {run} of task {task!r} is over: Dask has begun run {max(latest, before)} of it, which counts"
            )
        if attempt + (run != before) > MAX_ATTEMPTS:
            raise LimitError(f"task {task!r} was begun {attempt + 1} times already")
        if not 0 <= client < MAX_CLIENTS:
            raise LimitError(f"task {task!r} pushes with more than {MAX_CLIENTS} clients: share one")
        if known is None:
            known = self._known[task] = KnownOrigin(life)
        if not origin:
            origin = self._allot(1)
            self._count += 1
        attempt += run != before
        known.clients[client] = origin, run, attempt
        self._make_room(task)
        return origin, attempt

    def sweep(self, lives: Callable[[Hashable, Life], bool]) -> None:
        """End the tasks for which ``lives(task, life)`` is false."""
        for task in [task for task, known in self._known.items() if not lives(task, known.life)]:
            self._end(task)
        for task in [task for task, life in self._spent.items() if not lives(task, life)]:
            self._end(task)

    def take_ended(self) -> list[list[int]]:
        """The origins that have ended since the last call, as ranges [first origin, how many]."""
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
        return bool(self._ended)

    def _end(self, task: Hashable) -> None:
        self._spent.pop(task, None)
        known = self._known.pop(task, None)
        if known is not None:
            self._ended += [origin for origin, _, _ in known.clients.values()]
            self._count -= len(known.clients)

    def _make_room(self, asking: Hashable) -> None:
        """While there are too many origins, spend the tasks that asked first; never the one that is `asking`."""
        if self._count <= self.max_origins:
            return
        spent, excess = [], self._count - self.max_origins
        for task, known in self._known.items():
            if task != asking and not self.at_work(known.life):
                spent.append((task, known.life))
                excess -= len(known.clients)
                if excess <= 0:
                    break
        for task, life in spent:
            self._end(task)
            self._spent[task] = life
