"""Dask's check for silent workers, so that it removes no worker because the scheduler itself stood still.

The scheduler removes each worker whose last heartbeat (`WorkerState.last_seen`) is older than the setting
``distributed.scheduler.worker-ttl``. If its own process was stopped, or its machine suspended, for longer than that,
the overdue check runs before a heartbeat is read, and removes all workers. With them go all servers and their rows.

So a guard notes the time once an interval. A note that comes late says for how long the scheduler stood still, and all
workers are given that time: their `last_seen` moves forward by as much as the note is late, as
`coordination/liveness.py` does for servers. The guard notes the time directly before each check of Dask, too, because
both are overdue after a stop, and the check may come first. The check itself and its interval stay as Dask has them, so
a worker that really is silent is removed, later by the time of the stop.

The interval is a twentieth of worker-ttl, and Dask waits for ten heartbeats at least. So directly after a stop the last
heartbeat counts as two intervals and one heartbeat old at most, which is a fifth of what a worker is allowed.

What this file uses of Dask beside public names: the entry ``worker-ttl`` of `Scheduler.periodic_callbacks`, the
attribute `callback` of that entry, `Scheduler.worker_ttl`, and `WorkerState.last_seen`, which is a time of the wall
clock. If these are not as expected, :meth:`WorkerTtl.problem` says why, and the check stays as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from distributed import Scheduler
    from tornado.ioloop import PeriodicCallback

__all__ = ["WorkerTtl"]

CHECK = "worker-ttl"  # the name of Dask's callback
INTERVALS = 20  # of the guard in one worker-ttl
SHORTEST_SECONDS = 0.1  # of an interval; Dask removes no worker that was seen in the last 5 s


class DueCall(Protocol):
    """What a loop returns for a call that is to come."""

    def cancel(self) -> None: ...


class WorkerTtl:
    """Gives the workers of one scheduler the time for which the scheduler stood still.

    Not a plugin: the controller's plugin calls :meth:`attach` and :meth:`detach`, on the scheduler's loop.

    `clock` is the clock of `last_seen`, and `later(seconds, function)` calls a function once; by default both are those
    of the process and of the running loop.
    """

    def __init__(
        self, clock: Callable[[], float] = time, later: Callable[[float, Callable[[], None]], DueCall] | None = None
    ) -> None:
        self._clock, self._later = clock, later
        self._scheduler: Scheduler | None = None
        self._dask_check: Callable[[], Awaitable[None] | None] | None = None  # what Dask's callback called before
        self._timer: DueCall | None = None  # of the next note
        self._interval = SHORTEST_SECONDS
        self._noted = 0.0  # time of the last note
        self._problem: str | None = None

    def attach(self, scheduler: Scheduler) -> None:
        """Guard the check of `scheduler`. A scheduler without worker-ttl has no check, and needs no guard."""
        self.detach()
        self._problem = incompatibility(scheduler)
        if self._problem is not None or not scheduler.worker_ttl:
            return
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later
        callback = self._callback_of(scheduler)
        self._scheduler, self._dask_check, callback.callback = scheduler, callback.callback, self._check
        self._interval = max(scheduler.worker_ttl / INTERVALS, SHORTEST_SECONDS)
        self._noted = self._clock()
        self._timer = self._later(self._interval, self._turn)

    def detach(self) -> None:
        """Let Dask check as if there were no guard."""
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        callback = self._callback_of(scheduler)
        # Another plugin may have wrapped the guard meanwhile. Then the guard stays inside, and only calls Dask's check.
        if callback.callback == self._check and self._dask_check is not None:
            callback.callback = self._dask_check

    def problem(self) -> str | None:
        """Why the check cannot be guarded; None if it can, or if there is none."""
        return self._problem

    @staticmethod
    def _callback_of(scheduler: Scheduler) -> PeriodicCallback:
        return scheduler.periodic_callbacks[CHECK]

    def _turn(self) -> None:
        self._note()
        if self._scheduler is not None and self._later is not None:
            self._timer = self._later(self._interval, self._turn)

    def _check(self) -> Awaitable[None] | None:
        self._note()
        return None if self._dask_check is None else self._dask_check()

    def _note(self) -> None:
        if self._scheduler is None:
            return
        now = self._clock()
        late = max(0.0, now - self._noted - 2 * self._interval)
        self._noted = now
        for worker in self._scheduler.workers.values() if late else ():
            worker.last_seen = min(now, worker.last_seen + late)


def incompatibility(scheduler: Scheduler) -> str | None:
    """Why the check of `scheduler` is not as this file expects it; None if it is, or if there is none."""
    if not isinstance(getattr(scheduler, "worker_ttl", ""), (int, float, type(None))):
        return "Scheduler.worker_ttl is not a number"
    if not scheduler.worker_ttl:
        return None
    callback = getattr(scheduler, "periodic_callbacks", {}).get(CHECK)
    if not callable(getattr(callback, "callback", None)):
        return f"the scheduler has no periodic callback {CHECK!r}"
    if not all(isinstance(getattr(worker, "last_seen", None), float) for worker in scheduler.workers.values()):
        return "WorkerState.last_seen is not a number"
    return None
