"""Keeping ordinary tasks off the workers of servers: all private Dask interfaces that placement needs are used here.

Theory of operation
-------------------
A *dps worker* carries the resource ``dps`` (``dask worker ... --resources dps=1``). A resource pins tasks that ask for
it but repels nobody else. A worker that the scheduler holds for paused gets no new task. So for each dps worker

- the scheduler is told that it is paused (the worker is not: it runs on, also what it was given before);
- what the worker itself says of its running or being paused is kept here and goes no further, since its "running"
  would undo the cordon. Everything else that it says (closing, ...) goes on to Dask;
- chosen keys, the servers' actors, are let through by `admit`: for the length of one transition the workers count as
  running.

A cordon begins inside `Scheduler.add_worker`, before any task can be assigned, or at `attach` for workers that are
there. Everything happens on the scheduler's event loop, and no method awaits.

A trap: when Dask gives up retiring a worker (it refuses to while the worker holds an actor), it tells the worker to go
back to the status that the *scheduler* had for it, and then the worker really pauses. It is told to run again.

A hole: `client.rebalance()` looks at no status, and may put data (no tasks) on servers.

Beside placement, `execution` and `task_of` say which assignment of which task a thread executes, and which one is the
latest: `distributed.worker.thread_state`, `TaskState.run_id` of workers and of the scheduler.

The private interfaces of the cordon are the stream handler ``worker-status-change``, `Scheduler.running` and
`Scheduler.transitions`. :meth:`Cordon.problem` says why they do not look as they should; then nothing is cordoned off,
servers start all the same (their actors are pinned to addresses), and ordinary tasks may land beside them.

Versions: these interfaces are the same in distributed 2024.12, the oldest release that dps allows, and in 2026.8; the
tests run with both. What differs between the two needs nothing here: `Client.scheduler_info` takes ``n_workers`` since
2025, and before took and ignored it; the versions that processes report were those of the imported modules, and are
those of the installed packages.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from time import time
from typing import Any

from distributed import Client
from distributed.core import Status
from distributed.worker import thread_state

__all__ = [
    "RESOURCE",
    "Cordon",
    "Execution",
    "client_of",
    "close_client",
    "execution",
    "is_at_work",
    "natural",
    "task_of",
]

logger = logging.getLogger("distributed.dps.cordon")

RESOURCE = "dps"
EVENT = "worker-status-change"
OPEN = (Status.init, Status.running, Status.paused)  # a worker in another status is on its way out


class Cordon:
    """Keeps all but admitted keys off the dps workers of one scheduler: see the module's docstring.

    Not a plugin: the controller's plugin calls it from `start`, `add_worker`, `valid_workers_downscaling` and `close`.
    """

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._problem: str | None = None
        self._handler: partial[None] | None = None  # what we put into scheduler.stream_handlers
        self._said: dict[Any, Status] = {}  # WorkerState behind the cordon -> what the worker itself said last

    # -- hooks of the plugin

    def attach(self, scheduler: Any) -> None:
        """Cordon off the dps workers of `scheduler`, those that are there and those that will come.

        Once is enough, more do no harm. A cordon of another plugin, closed or not, is taken over without a gap.
        """
        if self._scheduler is not None and self._scheduler is not scheduler:
            self.detach()
        self._scheduler = scheduler
        self._problem = missing(scheduler)
        if self._problem is not None:
            return
        current = scheduler.stream_handlers[EVENT]
        if current is not self._handler:
            other = getattr(current.func, "__self__", None) if isinstance(current, partial) else None
            if isinstance(other, Cordon):
                current = current.args[0]
                self._said, other._said, other._scheduler = other._said, {}, None
            self._handler = partial(self._on_status, current)
            scheduler.stream_handlers[EVENT] = self._handler
        self._renew()

    def add_worker(self, address: str) -> None:
        """A worker joins: to be called by `SchedulerPlugin.add_worker`, and not from a coroutine of it."""
        self._renew()

    def valid_workers_downscaling(self, workers: Iterable[Any]) -> list[Any]:
        """Those of `workers` (WorkerState) that may be scaled away: dps workers are not for Adaptive to choose."""
        return [ws for ws in workers if not is_dps(ws)]

    def detach(self) -> None:
        """Open the cordon: dps workers are workers like all others again."""
        scheduler, self._scheduler = self._scheduler, None
        said, self._said = self._said, {}
        handler, self._handler = self._handler, None
        if scheduler is None or handler is None:
            return
        # Somebody may have wrapped our handler meanwhile. Then it stays inside theirs, and passes everything on.
        if scheduler.stream_handlers.get(EVENT) is handler:
            scheduler.stream_handlers[EVENT] = handler.args[0]
        for ws, status in said.items():
            if scheduler.workers.get(ws.address) is ws and ws.status is Status.paused:
                scheduler.handle_worker_status_change(status, ws, _stimulus("detach"))

    # -- for the controller

    def problem(self) -> str | None:
        """Why nothing can be cordoned off; None when all is well."""
        return self._problem

    def workers(self) -> list[str]:
        """Addresses of the dps workers that are not closing, ordered by name, numbers in names as numbers."""
        if self._scheduler is None:
            return []
        self._renew()
        found = [ws for ws in self._scheduler.workers.values() if is_dps(ws) and ws.status in OPEN]
        return [ws.address for ws in sorted(found, key=lambda ws: (natural(ws.name), ws.address))]

    def admit(self, keys: Iterable[str]) -> dict[str, str]:
        """Let these keys through, and tell the state of each: "unknown" before the scheduler has heard of it.

        To be repeated until the state is "memory" (or "erred"): a key can be let through once it is "no-worker" and a
        worker that fits it has come up.
        """
        if self._scheduler is None:
            return {}
        self._renew()
        tasks = self._scheduler.tasks
        states = {}
        for key in keys:
            if key in tasks and tasks[key].state == "no-worker":
                self._let_through(key)
            states[key] = tasks[key].state if key in tasks else "unknown"
        return states

    # -- inside

    def _let_through(self, key: str) -> None:
        running = self._scheduler.running
        # Not those that retire, nor those that are out of memory or have not yet come up.
        ready = {ws for ws, said in self._said.items() if said is Status.running and ws.status is Status.paused}
        running |= ready
        try:
            self._scheduler.transitions({key: "processing"}, _stimulus("admit"))
        finally:
            running -= ready

    def _renew(self) -> None:
        """Forget workers that are gone, cordon off those that are new."""
        if self._scheduler is None or self._problem is not None:
            return
        workers = self._scheduler.workers
        for ws in [ws for ws in self._said if workers.get(ws.address) is not ws]:
            del self._said[ws]
        for ws in list(workers.values()):
            if ws not in self._said and ws.status in OPEN and is_dps(ws):
                self._said[ws] = ws.status
                self._scheduler.handle_worker_status_change(Status.paused, ws, _stimulus("cordon"))
                if ws in self._scheduler.running:
                    self._problem = f"the scheduler counts {ws.address} as running although it was told that it paused"

    def _on_status(self, original: Callable[..., None], *, worker: Any, status: Any, **message: Any) -> None:
        """The stream handler. It must not raise: Dask would remove the worker."""
        try:
            if self._keeps(worker, status):
                return
        except Exception:
            logger.exception("status %r of worker %s", status, worker)
        original(worker=worker, status=status, **message)

    def _keeps(self, worker: str, status: str) -> bool:
        """Whether a worker's word about its status is for us alone."""
        if self._scheduler is None:
            return False
        ws = self._scheduler.workers.get(worker)
        if ws not in self._said or status not in ("running", "paused"):
            return False
        if ws.status is Status.closing_gracefully:  # Dask gave up retiring it
            self._scheduler.handle_worker_status_change(Status.paused, ws, _stimulus("kept"))
            if status == "paused":
                message = {"op": EVENT, "status": Status.running.name, "stimulus_id": _stimulus("kept")}
                self._scheduler.stream_comms[worker].send(message)
        self._said[ws] = Status[status]
        return True


@contextlib.asynccontextmanager
async def client_of(scheduler: Any, security: Any) -> AsyncIterator[Client]:
    """An asynchronous Dask client in the scheduler's own process and loop.

    It counts itself among the users of the loop, and its asynchronous end forgets to count back: where the loop is a
    cluster's of this process, its thread would never end.
    """
    try:
        async with Client(scheduler.address, asynchronous=True, security=security, set_as_default=False) as client:
            yield client
    finally:
        _leave_loop(client)


def close_client(client: Client) -> None:
    """Close a synchronous Dask client.

    A client whose scheduler has gone closes itself, and forgets to count itself out of the users of its loop: where the
    loop is a cluster's of this process, its thread would never end.
    """
    client.close()
    _leave_loop(client)


def _leave_loop(client: Client) -> None:
    runner = getattr(client, "_loop_runner", None)
    if runner is not None:
        runner.stop()


class Execution:
    """One execution of an ordinary Dask task, in the thread that executes it.

    Attributes
    ----------
    key : str, tuple, ...
        The task's.
    run : int
        The number of the assignment that it is: Dask gives a higher one each time that it assigns the task to a worker.
    clients : Counter
        How many clients of each parameter server have pushed in it, by the name of the server.
    """

    def __init__(self, worker: Any, key: Any, began: Any):
        self.worker, self.key, self.began = worker, key, began
        self.clients: Counter[str] = Counter()
        self._run = -1

    @property
    def run(self) -> int:
        # Dask may take an execution that it had cancelled for a new assignment of the task, so the number may rise.
        task = self.worker.state.tasks.get(self.key)
        if task is not None:  # else the task was cancelled and forgotten
            self._run = int(task.run_id)
        return self._run


_here = threading.local()


def execution() -> Execution | None:
    """The execution of an ordinary Dask task that this thread is in; the same object for all of its duration.

    None outside of tasks, in methods of actors (they are no tasks that Dask would run again), in tasks that are
    coroutines, in threads that a task has started itself, and in executors that are processes.
    """
    key = getattr(thread_state, "key", None)
    if key is None or getattr(thread_state, "actor", False):
        return None
    began, found = getattr(thread_state, "start_time", None), getattr(_here, "execution", None)
    if found is None or found.key != key or found.began != began:
        worker = getattr(thread_state, "execution_state", {}).get("worker")
        if getattr(getattr(worker, "state", None), "tasks", None) is None:
            return None
        found = _here.execution = Execution(worker, key, began)
    return found


def task_of(scheduler: Any, key: Any) -> tuple[Any, int] | None:
    """(the scheduler's record of a task, the number of its latest assignment to a worker); None if it has none.

    The record is another object once the scheduler has forgotten the key and was given it again. Any thread may call
    this.
    """
    try:
        task = scheduler.tasks.get(key)
    except TypeError:  # not hashable: no key
        return None
    return None if task is None else (task, -1 if task.run_id is None else int(task.run_id))


def is_at_work(task: Any) -> bool:
    """Whether a worker has the task of this record to execute."""
    return bool(task.state == "processing")


def is_dps(ws: Any) -> bool:
    """Whether the worker of this WorkerState carries the resource."""
    return ws.resources.get(RESOURCE, 0) > 0


def missing(scheduler: Any) -> str | None:
    """Why the private interfaces of `scheduler` are not those that this file knows; None when they are."""
    attributes = {
        "stream_handlers": dict,
        "running": set,
        "workers": Mapping,
        "tasks": Mapping,
        "stream_comms": Mapping,
    }
    for name, kind in attributes.items():
        if not isinstance(getattr(scheduler, name, None), kind):
            return f"Scheduler.{name} is not a {kind.__name__}"
    if EVENT not in scheduler.stream_handlers:
        return f"the scheduler has no stream handler {EVENT!r}"
    for name, takes in (
        ("handle_worker_status_change", ("status", "worker", "stimulus_id")),
        ("transitions", ("recommendations", "stimulus_id")),
    ):
        method = getattr(scheduler, name, None)
        if not callable(method) or tuple(inspect.signature(method).parameters)[: len(takes)] != takes:
            return f"Scheduler.{name} does not take ({', '.join(takes)})"
    if not all(isinstance(getattr(Status, name, None), Status) for name in ("init", "paused", "closing_gracefully")):
        return "distributed.core.Status lacks init, paused or closing_gracefully"
    return None


def natural(name: object) -> Sequence[Any]:
    """A key to sort the names of workers by: numbers in them count as numbers, so server-2 comes before server-10.

    >>> sorted(["server-10", "server-2"], key=natural)
    ['server-2', 'server-10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", str(name))]


def _stimulus(what: str) -> str:
    return f"dps-{what}-{time()}"
