"""The tasks of a run: one for each trainer, on a thread of its own, and on another one when its worker is gone.

A task is pinned to its worker: Dask would put one that it runs again behind another trainer, on a thread that waits
for the very trainer which waits for the thread. So it is the driver that looks who has lost the worker, and submits the
task anew where a thread is free: on a worker that had one to spare, or on one that the nanny has started again. Each
time it is a new attempt, with a higher run id, which fences off what may be left of the one before.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import dask
from distributed import Client, Future, KilledWorker, Lock, get_worker

from dps import config
from dps.client import Ticket
from dps.cordon import natural
from dps.errors import ControllerGoneError, StoppedError, TrainerLostError
from dps.training.portions import Portions, Stock
from dps.training.trainer import Trainer

__all__ = ["Job", "Seat", "Stopped", "Tasks", "choosing", "free_threads", "holders", "lack", "spread"]

logger = logging.getLogger(__name__)

KNOWN = 2.0  # seconds for the scheduler to hear of tasks that were submitted
POLL = 0.01


class Job(NamedTuple):
    """What all trainers of a run are to do."""

    ticket: Ticket
    run: int
    function: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    retries: int
    stock: Stock | None = None  # all partitions, where work is re-assigned


class Stopped(NamedTuple):
    """What the task of a trainer that was told to stop gives back: no failure of its own, so nothing for a log."""

    reason: str


def train(job: Job, number: int, partition_numbers: list[int], parts: list) -> Any:
    """The task of one trainer: join, call the user's function, leave."""
    worker = get_worker()
    state = worker.state.tasks[worker.get_current_task()]

    def cancelled() -> bool:  # the scheduler took the task back: the thread must end by itself
        return state.state != "executing" and state.state != "long-running"

    try:
        about = (job.ticket, job.run, number, state.run_id, worker.address, cancelled)
        trainer = Trainer(*about, partition_numbers=partition_numbers)
    except StoppedError as error:
        return Stopped(str(error))
    if (stock := job.stock) is not None:
        trainer._portions = Portions(trainer, stock.shares, parts, lambda n: stock.fetch(n, trainer._check))
    try:
        result = job.function(trainer, parts, *job.args, **job.kwargs)
        trainer.leave()
        return result
    except (StoppedError, TrainerLostError) as error:  # the latter tells of another one
        _leave(trainer, error)
        return Stopped(str(error))
    except BaseException as error:
        if not job.retries:  # else Dask may run it again, and the driver knows when not
            _leave(trainer, error)
        raise
    finally:
        trainer.close()


def _leave(trainer: Trainer, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the run is over, or the controller is: what counts is the first error
        trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])


class Seat:
    """One trainer: its data, its task, and what became of it."""

    def __init__(self, number: int, worker: str, partition_numbers: list[int], parts: list):
        self.number, self.worker, self.partition_numbers, self.parts = number, worker, partition_numbers, parts
        self.future: Future | None = None
        self.losses = 0
        self.homeless: float | None = None  # since when it has no thread,
        self.why = ""  # and why it found none
        self.over = False
        self.result: Any = None

    @property
    def status(self) -> str:
        """Of the task: "pending", "finished", "error", "cancelled" or "lost"."""
        return "finished" if self.over else "pending" if self.future is None else str(self.future.status)

    @property
    def data(self) -> list[Future]:
        """What its partitions are made of."""
        return [future for part in self.parts for future in (part if isinstance(part, tuple) else (part,))]

    def missing(self) -> int:
        """How many of them are gone for good: they were scattered to workers that died."""
        return sum(future.cancelled() for future in self.data)


class Tasks:
    """The trainers' tasks of a run, as the driver sees them.

    Parameters
    ----------
    client : distributed.Client
    job : Job
    serving : set of str
        Workers that trainers keep off.
    seats : list of Seat
        By trainer.
    """

    def __init__(self, client: Client, job: Job, serving: set[str], seats: list[Seat]):
        self.client, self.job, self.serving, self.seats = client, job, serving, seats

    def start(self) -> None:
        """Submit all tasks; when this returns the scheduler has them, and everybody sees their threads taken."""
        for seat in self.seats:
            self._submit(seat)
        self._wait_until_known(self.seats)

    def collect(self) -> bool:
        """Fetch the results that are there; whether all are."""
        for seat in self.seats:
            if not seat.over and seat.future is not None and seat.future.status == "finished":
                with contextlib.suppress(TimeoutError):  # its worker died: the task will be run again
                    seat.result = seat.future.result(timeout=config.seconds("request"))
                    seat.over, seat.future = True, None
        return all(seat.over for seat in self.seats)

    def ended(self) -> bool:
        """Whether a trainer has ended otherwise than by returning."""
        if any(seat.status in ("cancelled", "lost") for seat in self.seats):
            self.look()
        return any(
            seat.status in ("error", "cancelled", "lost") or isinstance(seat.result, Stopped) for seat in self.seats
        )

    def look(self) -> None:
        """Find another thread for each trainer whose worker is gone."""
        try:
            there = self.client.nthreads()
        except OSError as error:
            raise ControllerGoneError(f"the scheduler does not say which workers there are: {error}") from error
        for seat in self.seats:
            if missing := not seat.over and seat.missing():
                raise TrainerLostError(
                    f"{missing} of the {len(seat.data)} partitions of trainer {seat.number} were lost with a worker, "
                    f"and cannot be computed again: they were scattered. Scatter with broadcast=True, or pass a Dask "
                    f"collection (it may be persisted)"
                )
            if not seat.over and seat.worker not in there:
                self._move(seat)

    def among(self, trainers: list[int]) -> set[int]:
        """Those of them that are ours: other callers may have trainers in the same run."""
        return {seat.number for seat in self.seats}.intersection(trainers)

    def trouble(self) -> str:
        """Why trainers that were lost are not back."""
        found = ""
        for seat in self.seats:
            if seat.homeless is not None:
                found += f"; trainer {seat.number} waits for a thread: {seat.why}"
            elif coming := sum(future.status == "lost" for future in seat.data):
                found += (
                    f"; {coming} partitions of trainer {seat.number} are being computed again, or wait for a thread"
                )
        return found

    def own_error(self) -> None:
        """Raise the error of a trainer, as far as it is known, that nobody else has caused."""
        for seat in self.seats:
            if seat.future is not None and seat.future.status == "error":
                error = seat.future.exception()
                if isinstance(error, KilledWorker):
                    raise TrainerLostError(f"trainer {seat.number} was lost: {error}") from error
                seat.future.result()

    def cancel(self) -> None:
        """Take back the tasks that have not ended."""
        self.client.cancel([seat.future for seat in self.seats if seat.future is not None and seat.status == "pending"])

    # -- inside

    def _submit(self, seat: Seat) -> None:
        # No task of an earlier attempt, or of an earlier session of that name, may be taken for this one.
        key = f"dps-train-{self.job.ticket.session}-{self.job.run}-{seat.number}-{uuid.uuid4().hex[:8]}"
        seat.future = self.client.submit(
            *(train, self.job, seat.number, seat.partition_numbers, seat.parts),
            workers=[seat.worker],
            key=key,
            pure=False,
            retries=self.job.retries,
            priority=100,
        )

    def _wait_until_known(self, seats: list[Seat]) -> None:
        until = time.monotonic() + KNOWN
        waiting = {seat.future.key: seat for seat in seats if seat.future is not None}
        while waiting and time.monotonic() < until:
            taken = {key for keys in self.client.processing().values() for key in keys}
            waiting = {key: s for key, s in waiting.items() if key not in taken and s.status == "pending"}
            if waiting:
                time.sleep(POLL)

    def _move(self, seat: Seat) -> None:
        now, news = time.monotonic(), seat.homeless is None
        if news:
            seat.losses, seat.homeless = seat.losses + 1, now
            allowed = int(dask.config.get("distributed.scheduler.allowed-failures"))
            if seat.losses > allowed:
                raise TrainerLostError(
                    f"trainer {seat.number} has lost its worker {seat.losses} times, the last one was {seat.worker}: "
                    f"does it run out of memory, or crash? (distributed.scheduler.allowed-failures is {allowed})"
                )
            if seat.future is not None:
                self.client.cancel([seat.future])
                seat.future = None
        with choosing(self.client):
            threads = free_threads(self.client, self.serving)
            if threads:
                seat.worker, gone = spread(threads, holders(self.client, [seat.data]), 1)[0], seat.worker
                seat.homeless = None
                self._submit(seat)
                self._wait_until_known([seat])
                logger.warning("trainer %d lost its worker %s and is run again on %s", seat.number, gone, seat.worker)
                return
        seat.why, patience = lack(self.client, self.serving), config.seconds("rejoin")
        if news:
            logger.warning(
                "trainer %d lost its worker %s, and there is no thread for it: %s. The run ends if there is none "
                "within %g s (dps.timeouts.rejoin)",
                *(seat.number, seat.worker, seat.why, patience),
            )
        assert seat.homeless is not None
        if now - seat.homeless > patience:
            raise TrainerLostError(
                f"trainer {seat.number} lost its worker {seat.worker}, and for {patience:g} s (dps.timeouts.rejoin) no "
                f"thread was free to run it again: {seat.why}"
            )


@contextlib.contextmanager
def choosing(client: Client) -> Iterator[None]:
    """While threads are chosen and taken no other driver does so, of whichever parameter server of the cluster."""
    lock = Lock("dps-threads", scheduler_rpc=client.scheduler, loop=client.loop)
    held = lock.acquire(timeout=config.seconds("join"))
    try:
        yield
    finally:
        if held:
            lock.release()


def holders(client: Client, shares: list[list[Future]]) -> list[list[str]]:
    """For each list of futures the workers that hold them."""
    holding = client.who_has([future for share in shares for future in share])
    return [[worker for future in share for worker in holding.get(future.key, ())] for share in shares]


def free_threads(client: Client, serving: set[str]) -> list[str]:
    """For each thread that can take a trainer, its worker: the first threads of all workers before the second ones.

    Workers come in the order of their names, because the same workers are to get the same trainers in every run.
    """
    found = client.scheduler_info(n_workers=-1)["workers"]
    workers = dict(sorted(found.items(), key=lambda item: (natural(item[1]["name"]), item[0])))
    busy = client.run_on_scheduler(occupied)
    free = {
        address: info["nthreads"] - busy.get(address, 0)
        for address, info in workers.items()
        if address not in serving and not info.get("resources", {}).get("dps")
    }
    return [address for turn in range(max(free.values(), default=0)) for address in free if free[address] > turn]


def occupied(dask_scheduler: Any) -> dict[str, int]:
    """Threads of each worker that have a task. A task that has seceded, to wait for others, has given its thread back.

    Runs in the scheduler.
    """
    return {address: len(w.processing) - len(w.long_running) for address, w in dask_scheduler.workers.items()}


def lack(client: Client, serving: set[str]) -> str:
    """Why no thread is free."""
    tasks = sum(map(len, client.processing().values()))
    return (
        f"{len(client.nthreads())} workers, {len(serving)} of them servers, {tasks} tasks running; "
        f"add workers, or wait for the tasks to end"
    )


def spread(slots: list[str], holders: list[list[str]], count: int) -> list[str]:
    """The `count` slots to use, in the order of `slots`: those on workers that hold data come before others."""
    held = {worker for workers in holders for worker in workers}
    chosen = sorted(range(len(slots)), key=lambda n: slots[n] not in held)[:count]
    return [slots[n] for n in sorted(chosen)]
