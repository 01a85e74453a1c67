"""Seating: the controller's part in giving each trainer a thread of its own. It runs on the scheduler's loop.

A driver asks for threads in one call. The scheduler's state is read once, threads are chosen and reserved in the same
step, and another driver that asks at the same time finds them reserved.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable

from distributed.core import Status

from dps.engine.coordination.seats import Reservations, WorkerThreads, choose
from dps.engine.daskapi.cordon import is_dps, natural
from dps.engine.daskapi.protocols import DaskScheduler

__all__ = ["Seating"]


class Seating:
    """The threads of a cluster, for the trainers of all its parameter servers."""

    def __init__(self, scheduler: DaskScheduler, serving: Callable[[], Iterable[str]]):
        self._scheduler, self._serving = scheduler, serving
        self._reservations = Reservations()

    def take(
        self, session: str, driver: str, trainers: int | None, most: int, holding: list[str], seconds: float
    ) -> dict[str, object]:
        """Choose threads (see `seats.choose`) and reserve them: for `seconds`, until their tasks have them, or until
        the `driver` (the id of its Dask client) disconnects.

        The answer has the `seats`, a (worker, key of the task) for each trainer, and how many threads are `free`,
        the `numbers` for an error, and whether a `later` call may find more.
        """
        now = time.monotonic()
        choice = choose(self._places(), self._reservations.count(now, self._at_work), trainers, most, set(holding))
        # The keys are new, because no task of an earlier attempt may be taken for this one.
        keys = [f"dps-train-{session}-{uuid.uuid4().hex[:12]}" for _ in choice.workers]
        self._reservations.reserve(keys, choice.workers, now + seconds, driver, session)
        return {
            "seats": list(zip(choice.workers, keys, strict=True)),
            "free": choice.free,
            "numbers": choice.numbers,
            "later": choice.later,
        }

    def give_back(self, keys: Iterable[str]) -> None:
        """Release the threads of these tasks, which have ended, or will never run."""
        self._reservations.release(set(keys))

    def gone(self, driver: str) -> None:
        """The Dask client of a driver was closed, or its process has ended."""
        self._reservations.release_driver(driver)

    def closed(self, session: str) -> None:
        self._reservations.release_session(session)

    def _at_work(self, key: str) -> bool:
        task = self._scheduler.tasks.get(key)
        return task is not None and task.processing_on is not None

    def _places(self) -> list[WorkerThreads]:
        """All workers in the order of their names, because a worker is to get the same trainers in every run."""
        serving = set(self._serving())
        workers = sorted(self._scheduler.workers.items(), key=lambda item: (natural(item[1].name), item[0]))
        return [
            WorkerThreads(
                address,
                worker.nthreads,
                # A task that has seceded, to wait for others, has given its thread back.
                [str(task.key) for task in worker.processing if task not in worker.long_running],
                for_servers=address in serving or is_dps(worker),
                paused=worker.status is not Status.running,
            )
            for address, worker in workers
        ]
