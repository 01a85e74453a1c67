"""Seats: which worker threads the trainers of a run take, and which are reserved for tasks on their way. Pure.

All trainers of a run must run at the same time, so each one needs a worker thread of its own. The rule sees the workers
at one moment, and its answer describes the same moment: threads for servers, threads with a task, threads that another
run has reserved, and free threads add up to all threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

__all__ = ["Choice", "Reservations", "WorkerThreads", "choose", "free_threads"]

# Number of tasks that a message names.
MAX_TASKS_SHOWN = 3


class WorkerThreads(NamedTuple):
    """A worker at one moment.

    `busy` has the keys of the tasks that have a thread of it, or wait for one.
    `paused` says that the worker begins no tasks now.
    """

    address: str
    threads: int
    busy: Sequence[str] = ()
    for_servers: bool = False
    paused: bool = False


class Choice(NamedTuple):
    """The answer of :func:`choose`.

    Parameters
    ----------
    workers : list of str
        The worker of each trainer; empty if there are too few threads.
    numbers : str
        How many threads there are and what occupies them, as a text for users.
    later : bool
        Whether threads may suffice once tasks have ended or reservations are over.
    """

    workers: list[str]
    free: int
    numbers: str
    later: bool


class Reservations:
    """Threads that are reserved for tasks which the scheduler does not have yet.

    A reservation ends when its task arrives or its driver releases it. It ends too when the driver has disconnected; at
    a fixed time, because a driver may hang; and with its parameter server, because a driver whose parameter server was
    closed cannot release it.

    Examples
    --------
    >>> reservations = Reservations()
    >>> reservations.reserve(["a", "b"], ["tcp://x:1", "tcp://x:2"], until=60.0, driver="notebook")
    >>> reservations.count(now=1.0, arrived=lambda key: key == "a")  # the task has the thread from now on
    Counter({'tcp://x:2': 1})
    >>> reservations.count(now=60.0, arrived=lambda key: False)
    Counter()
    """

    def __init__(self) -> None:
        self._reservations: dict[str, _Reservation] = {}  # by key of the task

    def reserve(
        self, keys: Sequence[str], workers: Sequence[str], until: float, driver: str = "", session: str = ""
    ) -> None:
        """Reserve, for the task of each key, a thread of the worker at the same position in `workers`, until a time.

        `driver` will submit the tasks, for the parameter server `session`.
        """
        pairs = zip(keys, workers, strict=True)
        self._reservations.update((key, _Reservation(worker, until, driver, session)) for key, worker in pairs)

    def release(self, keys: Collection[str]) -> None:
        for key in keys:
            self._reservations.pop(key, None)

    def release_driver(self, driver: str) -> None:
        """End the reservations of a driver that has disconnected, because it will submit nothing."""
        self._keep(lambda key, reservation: reservation.driver != driver)

    def release_session(self, session: str) -> None:
        """End the reservations for a parameter server that was closed, because its runs are over."""
        self._keep(lambda key, reservation: reservation.session != session)

    def count(self, now: float, arrived: Callable[[str], bool]) -> Counter[str]:
        """How many threads of each worker are reserved now; ends reservations out of time or with an `arrived` task."""
        self._keep(lambda key, reservation: now < reservation.until and not arrived(key))
        return Counter(reservation.worker for reservation in self._reservations.values())

    def _keep(self, wanted: Callable[[str, _Reservation], bool]) -> None:
        self._reservations = {key: kept for key, kept in self._reservations.items() if wanted(key, kept)}


class _Reservation(NamedTuple):
    worker: str
    until: float
    driver: str
    session: str


def choose(
    workers: Sequence[WorkerThreads],
    reserved: Counter[str],
    trainers: int | None,
    max_trainers: int,
    holding: Collection[str],
) -> Choice:
    """Choose a worker thread for each trainer.

    Parameters
    ----------
    workers : sequence of WorkerThreads
        All workers, in the order in which trainers are numbered.
    trainers : int, optional
        How many trainers are needed; as many as threads are free by default.
    max_trainers : int
        The largest useful number of trainers: further ones would have no partition.
    holding : collection of str
        Workers that hold data. Trainers go there first.

    Examples
    --------
    >>> workers = [WorkerThreads("a", 2, ["load"]), WorkerThreads("b", 2), WorkerThreads("c", 1, for_servers=True)]
    >>> choose(workers, Counter(), None, max_trainers=9, holding=())[:2]
    (['a', 'b', 'b'], 3)
    >>> choice = choose(workers, Counter(b=1), 3, max_trainers=9, holding=())
    >>> print(choice.workers, choice.later, choice.numbers)
    [] True of 3 workers with 5 threads, 1 worker with 1 thread is for servers, 1 thread has a task (load), 1 thread is reserved for another run, 2 threads are free
    """  # noqa: E501
    threads = free_threads(workers, reserved)
    numbers = _numbers(workers, reserved, len(threads))
    wanted = len(threads) if trainers is None else trainers
    if not threads or wanted > len(threads):
        all_free = sum(worker.threads for worker in workers if not worker.for_servers)
        return Choice([], len(threads), numbers, later=all_free >= max(wanted, 1))
    chosen = sorted(range(len(threads)), key=lambda n: threads[n] not in holding)[: min(wanted, max_trainers)]
    return Choice([threads[n] for n in sorted(chosen)], len(threads), numbers, later=True)


def free_threads(workers: Sequence[WorkerThreads], reserved: Counter[str]) -> list[str]:
    """For each free thread its worker: the first threads of all workers come before the second ones."""
    free = {worker.address: _parts(worker, reserved)[-1] for worker in workers}
    return [address for turn in range(max(free.values(), default=0)) for address in free if free[address] > turn]


def _parts(worker: WorkerThreads, reserved: Counter[str]) -> tuple[int, int, int, int, int]:
    """How many threads of a worker are for servers, paused, busy, reserved and free: together all its threads."""
    if worker.for_servers:
        return worker.threads, 0, 0, 0, 0
    busy = min(len(worker.busy), worker.threads)
    kept = min(reserved[worker.address], worker.threads - busy)
    free = worker.threads - busy - kept
    return (0, free, busy, kept, 0) if worker.paused else (0, 0, busy, kept, free)


def _numbers(workers: Sequence[WorkerThreads], reserved: Counter[str], free: int) -> str:
    parts = [_parts(worker, reserved) for worker in workers]
    servers, paused, busy, kept, _ = (sum(column) for column in zip(*parts, strict=True)) if parts else (0,) * 5
    clauses = []
    if servers:
        count = sum(worker.for_servers for worker in workers)
        clauses.append(f"{_count(count, 'worker')} with {_count(servers, 'thread')} {_is(count)} for servers")
    if busy:
        keys = [str(key) for worker in workers if not worker.for_servers for key in worker.busy[: worker.threads]]
        named = ", ".join(keys[:MAX_TASKS_SHOWN]) + (", ..." if len(keys) > MAX_TASKS_SHOWN else "")
        clauses.append(f"{_count(busy, 'thread')} {'has a task' if busy == 1 else 'have tasks'} ({named})")
    if kept:
        clauses.append(f"{_count(kept, 'thread')} {_is(kept)} reserved for another run")
    if paused:
        clauses.append(f"{_count(paused, 'thread')} {_is(paused)} of workers that are paused or about to close")
    clauses.append(f"{_count(free, 'thread')} {_is(free)} free")
    threads = sum(worker.threads for worker in workers)
    return f"of {_count(len(workers), 'worker')} with {_count(threads, 'thread')}, {', '.join(clauses)}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
