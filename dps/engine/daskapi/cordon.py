"""Keeping ordinary tasks off the workers of servers: all private Dask interfaces that placement needs are used here.

Theory of operation
-------------------
A *dps worker* carries the resource ``dps`` (``dask worker ... --resources dps=1``). A resource pins tasks that ask for
it, but it does not keep other tasks away. A worker that counts as paused in the scheduler gets no new task. So for each
dps worker

- the cordon tells the scheduler that the worker is paused (the worker itself is not: it runs on, and so do the tasks
  that it had before);
- the cordon keeps to itself what the worker reports of its running or being paused, because a "running" would undo the
  cordon. Every other status that the worker reports (closing, ...) goes on to Dask;
- `admit` lets chosen keys through, those of the servers' actors: for the length of one transition the workers count as
  running.

The cordon closes around a worker inside `Scheduler.add_worker`, before any task can be assigned to it, or at `attach`
for workers that are there already. Everything happens on the scheduler's event loop, and no method awaits.

A trap: when Dask gives up retiring a worker (it refuses to while the worker holds an actor), it tells the worker to go
back to the status that the *scheduler* had for it, and then the worker really pauses. The cordon then tells it to run.

A hole: `client.rebalance()` ignores the status of workers, and may put data (no tasks) on dps workers.

Beside placement, `execution` and `task_of` say which assignment of which task a thread executes, and which one is the
latest: `distributed.worker.thread_state`, `TaskState.run_id` of workers and of the scheduler.

The private interfaces of the cordon are the stream handler ``worker-status-change``, `Scheduler.running` and
`Scheduler.transitions`. If they are not as this file expects, :meth:`Cordon.problem` says why. Then nothing is cordoned
off, servers start all the same (their actors are pinned to addresses), and ordinary tasks may run beside them.

Versions: these interfaces are the same in distributed 2024.12, the oldest release that dps allows, and in 2026.8; the
tests run with both. Two differences between these releases need nothing here. `Client.scheduler_info` takes
``n_workers`` since 2025, and ignored it before. The versions that processes report were those of the imported modules,
and are now those of the installed packages.
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
from typing import TYPE_CHECKING, Protocol, TypeVar

from dask.typing import Key
from distributed import Client, Security
from distributed.core import Status
from distributed.worker import thread_state

from dps.engine.daskapi.protocols import DaskScheduler, DaskTask, DaskWorker

if TYPE_CHECKING:
    from distributed import Scheduler, Worker
    from distributed.scheduler import WorkerState

__all__ = [
    "RESOURCE",
    "Cordon",
    "Execution",
    "client_of",
    "close_client",
    "execution",
    "is_at_work",
    "meta_of",
    "natural",
    "task_of",
]

logger = logging.getLogger("distributed.dps.cordon")

T_co = TypeVar("T_co", covariant=True)
RESOURCE = "dps"
EVENT = "worker-status-change"
OPEN_STATUSES = (Status.init, Status.running, Status.paused)  # a worker in any other status is closing or closed


class Cordon:
    """Keeps all but admitted keys off the dps workers of one scheduler: see the module's docstring.

    Not a plugin: the controller's plugin calls it from `start`, `add_worker`, `valid_workers_downscaling` and `close`.
    """

    def __init__(self) -> None:
        self._scheduler: Scheduler | None = None
        self._problem: str | None = None
        self._handler: partial[None] | None = None  # this cordon's entry in scheduler.stream_handlers
        self.reported: dict[WorkerState, Status] = {}  # worker behind the cordon -> the worker's own last report

    # -- hooks of the plugin

    def attach(self, scheduler: Scheduler) -> None:
        """Cordon off the dps workers of `scheduler`, those that are there and those that will come.

        More than one call does no harm. The cordon of another plugin, closed or not, is taken over without a gap.
        """
        if self._scheduler is not None and self._scheduler is not scheduler:
            self.detach()
        self._scheduler = scheduler
        self._problem = incompatibility(scheduler)
        if self._problem is not None:
            return
        current = scheduler.stream_handlers[EVENT]
        if current is not self._handler:
            if isinstance(current, partial) and isinstance(other := getattr(current.func, "__self__", None), Cordon):
                current = current.args[0]
                self.reported = other.hand_over()
            self._handler = partial(self._on_status, current)
            scheduler.stream_handlers[EVENT] = self._handler
        self._renew()

    def add_worker(self, address: str) -> None:
        """Cordon off a worker that joins. `SchedulerPlugin.add_worker` must call it directly, not from a coroutine."""
        self._renew()

    def valid_workers_downscaling(self, workers: Iterable[WorkerState]) -> list[WorkerState]:
        """Those of `workers` that Dask's Adaptive may stop: all but dps workers."""
        return [ws for ws in workers if not is_dps(ws)]

    def hand_over(self) -> dict[WorkerState, Status]:
        """Stop, and return what the workers reported, for another cordon that takes the place of this one."""
        reported = self.reported
        self.reported = {}
        self._scheduler = None
        return reported

    def detach(self) -> None:
        """Open the cordon: dps workers are workers like all others again."""
        scheduler, self._scheduler = self._scheduler, None
        reported, self.reported = self.reported, {}
        handler, self._handler = self._handler, None
        if scheduler is None or handler is None:
            return
        (original,) = handler.args
        # Another plugin may have wrapped this handler meanwhile. Then it stays inside and passes everything on.
        if scheduler.stream_handlers.get(EVENT) is handler:
            scheduler.stream_handlers[EVENT] = original
        for ws, status in reported.items():
            if scheduler.workers.get(ws.address) is ws and ws.status is Status.paused:
                scheduler.handle_worker_status_change(status, ws, _stimulus("detach"))

    # -- for the controller

    def problem(self) -> str | None:
        """Why no worker can be cordoned off; None if workers can."""
        return self._problem

    def workers(self) -> list[str]:
        """Addresses of the dps workers that are not closing, ordered by name as :func:`natural` does."""
        if self._scheduler is None:
            return []
        self._renew()
        workers = [ws for ws in self._scheduler.workers.values() if is_dps(ws) and ws.status in OPEN_STATUSES]
        return [ws.address for ws in sorted(workers, key=lambda ws: (natural(ws.name), ws.address))]

    def admit(self, keys: Iterable[str]) -> dict[str, str]:
        """Let these keys through, and return the state of each: "unknown" before the scheduler has its task.

        The caller repeats this until the state is "memory" (or "erred"): a key can be let through once its task is
        "no-worker" and a worker for it has come up.
        """
        if self._scheduler is None:
            return {}
        self._renew()
        tasks = self._scheduler.tasks
        states: dict[str, str] = {}
        for key in keys:
            if key in tasks and tasks[key].state == "no-worker":
                self._let_through(self._scheduler, key)
            states[key] = tasks[key].state if key in tasks else "unknown"
        return states

    # -- inside

    def _let_through(self, scheduler: Scheduler, key: str) -> None:
        running = scheduler.running
        # Workers that retire, have no memory left or have not yet come up are not ready.
        ready = {ws for ws, own in self.reported.items() if own is Status.running and ws.status is Status.paused}
        running |= ready
        try:
            scheduler.transitions({key: "processing"}, _stimulus("admit"))
        finally:
            running -= ready

    def _renew(self) -> None:
        if self._scheduler is None or self._problem is not None:
            return
        workers = self._scheduler.workers
        for ws in [ws for ws in self.reported if workers.get(ws.address) is not ws]:
            del self.reported[ws]
        for ws in list(workers.values()):
            if ws not in self.reported and ws.status in OPEN_STATUSES and is_dps(ws):
                self.reported[ws] = ws.status
                self._scheduler.handle_worker_status_change(Status.paused, ws, _stimulus("cordon"))
                if ws in self._scheduler.running:
                    self._problem = f"the scheduler counts {ws.address} as running although it was told that it paused"

    def _on_status(self, original: Callable[..., None], *, worker: str, status: str, **message: object) -> None:
        """The stream handler. It must not raise, because Dask would remove the worker."""
        try:
            if self._keeps(worker, status):
                return
        except Exception:
            logger.exception("status %r of worker %s", status, worker)
        original(worker=worker, status=status, **message)

    def _keeps(self, worker: str, status: str) -> bool:
        """Whether the cordon keeps a worker's report of its status, so that Dask does not get it."""
        if self._scheduler is None:
            return False
        ws = self._scheduler.workers.get(worker)
        if ws not in self.reported or status not in ("running", "paused"):
            return False
        if ws.status is Status.closing_gracefully:  # Dask gave up retiring it
            self._scheduler.handle_worker_status_change(Status.paused, ws, _stimulus("kept"))
            if status == "paused":
                message = {"op": EVENT, "status": Status.running.name, "stimulus_id": _stimulus("kept")}
                self._scheduler.stream_comms[worker].send(message)
        self.reported[ws] = Status[status]
        return True


@contextlib.asynccontextmanager
async def client_of(scheduler: DaskScheduler, security: Security) -> AsyncIterator[Client]:
    """An asynchronous Dask client in the scheduler's own process and loop.

    Such a client counts itself among the users of the loop, and Dask's asynchronous close does not count it out again.
    If the loop belongs to a cluster in this process, the loop's thread would then never end, so this function does it.
    """
    client = Client(scheduler.address, asynchronous=True, security=security, set_as_default=False)
    try:
        async with client:
            yield client
    finally:  # because a client whose scheduler does not answer has counted itself, too
        _leave_loop(client)


def close_client(client: Client) -> None:
    """Close a synchronous Dask client.

    A client whose scheduler has gone closes itself, and does not count itself out of the users of its loop. If the loop
    belongs to a cluster in this process, the loop's thread would then never end, so this function does it.
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
        The key of the task.
    run : int
        The number of the task's assignment to this worker. Dask gives a higher one each time that it assigns the task.
    clients : Counter
        How many clients of each parameter server have pushed in this execution, by the parameter server's name.
    """

    def __init__(self, worker: Worker, key: Key, began: float | None):
        self.worker = worker
        self.key = key
        self.began = began
        self.clients: Counter[str] = Counter()
        self._run = -1

    @property
    def run(self) -> int:
        # Dask may reuse an execution that it had cancelled for a new assignment of the task, so the number may rise.
        task = self.worker.state.tasks.get(self.key)
        if task is not None:  # else the task was cancelled and forgotten
            self._run = int(task.run_id)
        return self._run


# State of the thread: its `execution` is the latest one.
_thread = threading.local()


def execution() -> Execution | None:
    """The execution of an ordinary Dask task that is going on in this thread; the same object until the task ends.

    None outside of tasks, in methods of actors (Dask does not run them again), in tasks that are coroutines, in threads
    that a task has started itself, and in executors that are processes.
    """
    key = getattr(thread_state, "key", None)
    if key is None or getattr(thread_state, "actor", False):
        return None
    began, current = getattr(thread_state, "start_time", None), getattr(_thread, "execution", None)
    if current is None or current.key != key or current.began != began:
        worker = getattr(thread_state, "execution_state", {}).get("worker")
        if worker is None or getattr(getattr(worker, "state", None), "tasks", None) is None:
            return None
        current = _thread.execution = Execution(worker, key, began)
    return current


def task_of(scheduler: DaskScheduler, key: Key) -> tuple[DaskTask, int] | None:
    """(the scheduler's record of a task, the number of its latest assignment to a worker); None without such a task.

    The record is another object once the scheduler has forgotten the key and the key was submitted again. Any thread
    may call this.
    """
    try:
        task = scheduler.tasks.get(key)
    except TypeError:  # not hashable, so it is not a key
        return None
    return None if task is None else (task, -1 if task.run_id is None else int(task.run_id))


def is_at_work(task: DaskTask) -> bool:
    """Whether the task of this record is assigned to a worker."""
    return bool(task.state == "processing")


def is_dps(ws: DaskWorker) -> bool:
    """Whether the worker of this WorkerState carries the resource."""
    return ws.resources.get(RESOURCE, 0) > 0


def incompatibility(scheduler: Scheduler) -> str | None:
    """Why the private interfaces of `scheduler` are not as this file expects them; None if they are."""
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


class HasMeta(Protocol[T_co]):
    """A Dask collection of arrays or frames."""

    @property
    def _meta(self) -> T_co: ...


def meta_of(collection: HasMeta[T_co]) -> T_co:
    """An empty array or frame with the types of a collection's partitions."""
    return collection._meta


def natural(name: object) -> Sequence[int | str]:
    """The sort key of a worker's name: numbers in it count as numbers, so server-2 comes before server-10.

    >>> sorted(["server-10", "server-2"], key=natural)
    ['server-2', 'server-10']
    """
    return [int(part) if part.isdecimal() else part for part in re.split("([0-9]+)", str(name))]


def _stimulus(what: str) -> str:
    return f"dps-{what}-{time()}"
