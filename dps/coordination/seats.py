"""Seats: which threads of a cluster the trainers of a run take, and which are reserved for tasks on their way. Pure.

All trainers of a run must run at once, so each has a thread of its own. The rule sees the workers at one moment, and
what it says of them is of the same moment: threads that are for servers, threads with a task, threads that another run
has reserved, and free ones add up to all threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

__all__ = ["Found", "Place", "Reservations", "choose", "free_threads"]

NAMED = 3  # tasks in a text


class Place(NamedTuple):
    """A worker at one moment.

    Parameters
    ----------
    address : str
    threads : int
    busy : sequence of str
        Keys of the tasks that have a thread, or wait for one.
    kept : bool
        Whether it is for servers.
    paused : bool
        Whether it begins no tasks now.
    """

    address: str
    threads: int
    busy: Sequence[str] = ()
    kept: bool = False
    paused: bool = False


class Found(NamedTuple):
    """What :func:`choose` says.

    Parameters
    ----------
    workers : list of str
        The worker of each trainer; empty if there are too few threads.
    free : int
        Threads that were free.
    numbers : str
        Where the threads are, for people.
    later : bool
        Whether threads may suffice once tasks have ended or reservations are over.
    """

    workers: list[str]
    free: int
    numbers: str
    later: bool


class Reservations:
    """Threads that are kept for tasks which the scheduler does not have yet, each with the time when it is given up.

    A reservation ends with its driver too: when the driver has gone, or by time, because it may hang. And it ends with
    its parameter server, because a driver whose parameter server was closed cannot give it back.

    Examples
    --------
    >>> held = Reservations()
    >>> held.reserve(["a", "b"], ["tcp://x:1", "tcp://x:2"], until=60.0, driver="notebook")
    >>> held.look(now=1.0, arrived=lambda key: key == "a")  # the task has the thread from now on
    Counter({'tcp://x:2': 1})
    >>> held.look(now=60.0, arrived=lambda key: False)
    Counter()
    """

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}  # by key of the task

    def reserve(
        self, keys: Sequence[str], workers: Sequence[str], until: float, driver: str = "", session: str = ""
    ) -> None:
        """Keep a thread of each worker for the task of the key, which `driver` will submit for parameter server
        `session`."""
        pairs = zip(keys, workers, strict=True)
        self._held.update((key, _Held(worker, until, driver, session)) for key, worker in pairs)

    def release(self, keys: Collection[str]) -> None:
        """Keep no thread for these tasks any longer."""
        for key in keys:
            self._held.pop(key, None)

    def gone(self, driver: str) -> None:
        """The driver is not there any more: it will submit nothing."""
        self._held = {key: held for key, held in self._held.items() if held.driver != driver}

    def closed(self, session: str) -> None:
        """The parameter server was closed: its runs are over."""
        self._held = {key: held for key, held in self._held.items() if held.session != session}

    def look(self, now: float, arrived: Callable[[str], bool]) -> Counter[str]:
        """How many threads of each worker are reserved, without those that are over or whose task has `arrived`."""
        self._held = {key: held for key, held in self._held.items() if now < held.until and not arrived(key)}
        return Counter(held.worker for held in self._held.values())


class _Held(NamedTuple):
    worker: str
    until: float
    driver: str
    session: str


def choose(
    places: Sequence[Place], reserved: Counter[str], trainers: int | None, most: int, holding: Collection[str]
) -> Found:
    """A thread for each trainer.

    Parameters
    ----------
    places : sequence of Place
        All workers, in the order in which trainers are numbered.
    reserved : Counter of str
        How many threads of each worker are reserved.
    trainers : int, optional
        How many are needed; as many as threads are free by default.
    most : int
        No more trainers than that: they would have no partition.
    holding : collection of str
        Workers that hold data. They come before others.

    Examples
    --------
    >>> places = [Place("a", 2, ["load"]), Place("b", 2), Place("c", 1, kept=True)]
    >>> choose(places, Counter(), None, most=9, holding=())[:2]
    (['a', 'b', 'b'], 3)
    >>> found = choose(places, Counter(b=1), 3, most=9, holding=())
    >>> print(found.workers, found.later, found.numbers)
    [] True of 3 workers with 5 threads, 1 worker with 1 thread is for servers, 1 thread has a task (load), 1 thread is reserved for another run, 2 threads are free
    """  # noqa: E501
    threads = free_threads(places, reserved)
    numbers = _numbers(places, reserved, len(threads))
    wanted = len(threads) if trainers is None else trainers
    if not threads or wanted > len(threads):
        all_free = sum(place.threads for place in places if not place.kept)
        return Found([], len(threads), numbers, later=all_free >= max(wanted, 1))
    chosen = sorted(range(len(threads)), key=lambda n: threads[n] not in holding)[: min(wanted, most)]
    return Found([threads[n] for n in sorted(chosen)], len(threads), numbers, later=True)


def free_threads(places: Sequence[Place], reserved: Counter[str]) -> list[str]:
    """For each free thread its worker: the first threads of all workers come before the second ones."""
    free = {place.address: _parts(place, reserved)[-1] for place in places}
    return [address for turn in range(max(free.values(), default=0)) for address in free if free[address] > turn]


def _parts(place: Place, reserved: Counter[str]) -> tuple[int, int, int, int, int]:
    """How many threads of a worker are for servers, paused, busy, reserved and free: together all."""
    if place.kept:
        return place.threads, 0, 0, 0, 0
    busy = min(len(place.busy), place.threads)
    kept = min(reserved[place.address], place.threads - busy)
    free = place.threads - busy - kept
    return (0, free, busy, kept, 0) if place.paused else (0, 0, busy, kept, free)


def _numbers(places: Sequence[Place], reserved: Counter[str], free: int) -> str:
    parts = [_parts(place, reserved) for place in places]
    servers, paused, busy, kept, _ = (sum(column) for column in zip(*parts, strict=True)) if parts else (0,) * 5
    told = []
    if servers:
        workers = sum(place.kept for place in places)
        told.append(f"{_count(workers, 'worker')} with {_count(servers, 'thread')} {_is(workers)} for servers")
    if busy:
        keys = [str(key) for place in places if not place.kept for key in place.busy[: place.threads]]
        named = ", ".join(keys[:NAMED]) + (", ..." if len(keys) > NAMED else "")
        told.append(f"{_count(busy, 'thread')} {'has a task' if busy == 1 else 'have tasks'} ({named})")
    if kept:
        told.append(f"{_count(kept, 'thread')} {_is(kept)} reserved for another run")
    if paused:
        told.append(f"{_count(paused, 'thread')} {_is(paused)} of workers that are paused or about to close")
    told.append(f"{_count(free, 'thread')} {_is(free)} free")
    threads = sum(place.threads for place in places)
    return f"of {_count(len(places), 'worker')} with {_count(threads, 'thread')}, {', '.join(told)}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
