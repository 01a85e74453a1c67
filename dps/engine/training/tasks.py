"""The tasks of a run: one for each trainer, on a thread of its own, and on another one when its worker is gone.

A task is pinned to its worker: Dask would put one that it runs again behind another trainer, on a thread that waits
for the very trainer which waits for the thread. So it is the driver that finds out which trainer has lost its worker,
and submits the task anew where a thread is free: on a worker that had one to spare, or on one that the nanny has
started again. Each time it is a new attempt, with a higher run id, which fences off what may be left of the one before.
Partitions that were lost with the worker are computed again by Dask, or sent again by the driver (`data.py`).

Where trainers come and go (`vacancies.py`), the driver goes on without a trainer whose worker is gone, if the run can
do without it, and begins new trainers on threads that become free.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import dask
from distributed import Client, Future, KilledWorker, Status, Worker, get_worker

from dps import config
from dps.engine.client.client import Ticket
from dps.engine.daskapi.failed_tasks import drop_failures_told_elsewhere
from dps.engine.daskapi.processes import check_versions_of
from dps.engine.telemetry.snapshot import RunStatus
from dps.engine.training.data import cannot_be_sent_again, send_again
from dps.engine.training.leased_batches import FetchablePartitions, LeasedBatches
from dps.engine.training.participant import Participant
from dps.engine.training.threads import Threads
from dps.engine.training.trainer import Trainer
from dps.engine.training.types import Function, Options, Partition, Result
from dps.engine.training.vacancies import Vacancies
from dps.errors import ControllerGoneError, StoppedError, TrainerLostError

__all__ = ["Stopped", "Tasks", "TrainerJob", "TrainerTask", "holders"]

logger = logging.getLogger(__name__)

# A worker imports this module, as all of dps, before it runs any task of dps; an estimator's tasks are plain tasks of
# Dask, and nothing else of dps runs before they fail.
drop_failures_told_elsewhere()


# How many run ids a scheduler may give to tasks: an incarnation is one of them, and the controller's term.
RUN_IDS = 1 << 40


class TrainerJob(NamedTuple):
    """What all trainers of a run are to do."""

    ticket: Ticket
    run: int
    function: Function
    args: tuple
    kwargs: Options
    retries: int
    stock: FetchablePartitions | None = None  # all partitions, where work is re-assigned
    term: int = 0  # of the controller; another one has another scheduler, which counts the runs of its tasks from 0


class Stopped(NamedTuple):
    """What the task of a trainer that was told to stop gives back: no failure of its own, so nothing for a log."""

    reason: str


def train(job: TrainerJob, number: int, partition_numbers: list[int], parts: list[Partition]) -> Result:
    """The task of one trainer: join, call the user's function, leave."""
    worker = get_worker()
    state = worker.state.tasks[worker.get_current_task()]

    def cancelled() -> bool:  # the scheduler took the task back, or is gone: the thread must end by itself
        return is_closing(worker) or (state.state != "executing" and state.state != "long-running")

    stock, incarnation = job.stock, job.term * RUN_IDS + state.run_id
    try:
        participant = Participant(
            job.ticket, job.run, number, incarnation, worker.address, cancelled, leased=stock is not None
        )
    except StoppedError as error:
        return Stopped(str(error))
    leased = None
    if stock is not None:
        leased = LeasedBatches(participant, stock.shares, parts, stock)
    trainer = Trainer(participant, partition_numbers, leased)
    try:
        result = job.function(trainer, parts, *job.args, **job.kwargs)
        trainer.leave()
        return result
    except (StoppedError, TrainerLostError) as error:  # the latter tells of another one
        if not is_closing(worker):  # otherwise the trainer is lost, and may be begun again elsewhere
            _leave(trainer, error)
        return Stopped(str(error))
    except BaseException as error:
        if is_closing(worker) or isinstance(error, ControllerGoneError):
            logger.warning("trainer %d is lost with its worker or its scheduler: %s", number, error)
        elif job.retries:  # Dask may run it again, and then this is all that tells of the failure
            logger.warning("trainer %d failed, and is run again if any retry is left", number, exc_info=True)
        else:
            _leave(trainer, error)
        raise
    finally:
        trainer.close()


def _leave(trainer: Trainer, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # the run is over, or the controller is: what counts is the first error
        trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])


def is_closing(worker: Worker) -> bool:
    """Whether a worker is about to end, or has lost its scheduler: then its tasks count no more."""
    return worker.status in (Status.closing, Status.closed, Status.failed)


class TrainerTask:
    """One trainer: its data, its task, and what became of it."""

    is_late = False  # it has come while the run went on
    is_given_up = False  # its worker is gone, and the run goes on without it

    def __init__(self, number: int, place: tuple[str, str], partition_numbers: list[int], parts: list):
        self.number, self.partition_numbers, self.parts = number, partition_numbers, parts
        self.worker, self.key = place  # where its task runs, and what the task is called
        self.future: Future | None = None
        self.losses = 0
        self.homeless: float | None = None  # since when it has no thread,
        self.why = ""  # and why it found none
        self.over = False
        self.result: Result = None

    @property
    def status(self) -> str:
        """Of the task: "pending", "finished", "error", "cancelled" or "lost"."""
        return "finished" if self.over else "pending" if self.future is None else str(self.future.status)

    @property
    def data(self) -> list[Future]:
        return [future for part in self.parts for future in (part if isinstance(part, tuple) else (part,))]

    def lost(self) -> list[Future]:
        """Those of them that Dask cannot compute again: they were scattered to workers that died."""
        return [future for future in self.data if future.cancelled()]


class Tasks:
    """The trainers' tasks of a run, as the driver sees them.

    `threads` are reserved for them; `seats` are in the order of the trainers. `ask` asks the controller how the run is,
    and raises an error if that has died. `vacancies` are there where trainers come and go.
    """

    def __init__(
        self,
        client: Client,
        job: TrainerJob,
        threads: Threads,
        seats: list[TrainerTask],
        ask: Callable[[], RunStatus],
        vacancies: Vacancies | None = None,
    ):
        self.client = client
        self._ask = ask
        self.job = job
        self.threads = threads
        self.seats = seats
        self._vacancies = vacancies
        self._deserted: float | None = None  # since when no trainer is left

    def start(self) -> None:
        """Submit all tasks. Their threads stay reserved until the scheduler has them."""
        for seat in self.seats:
            self._submit(seat)

    def collect(self) -> bool:
        """Fetch the results that are there; whether all are, but for those of trainers that were given up."""
        for seat in self.seats:
            if not seat.over and seat.future is not None and seat.future.status == "finished":
                with contextlib.suppress(TimeoutError):  # its worker died: the task will be run again
                    seat.result = seat.future.result(timeout=config.seconds("request"))
                    seat.over, seat.future = True, None
        if over := [seat.key for seat in self.seats if seat.over]:
            self.threads.give_back(over)
        return len(over) == len(self.seats) and not all(seat.is_given_up for seat in self.seats)

    def results(self) -> list[Result]:
        """What each trainer has returned, in the order of their numbers, without those that were given up."""
        return [seat.result for seat in sorted(self.seats, key=lambda seat: seat.number) if not seat.is_given_up]

    def ended(self) -> bool:
        """Whether a trainer has ended otherwise than by returning."""
        if any(seat.status in ("cancelled", "lost") for seat in self.seats):
            self.look()
        self._give_up_stopped()
        return any(
            seat.status in ("error", "cancelled", "lost") or isinstance(seat.result, Stopped)
            for seat in self.seats
            if not seat.is_given_up
        )

    def look(self) -> None:
        """Find another thread for each trainer whose worker is gone; send the partitions again that went with it.

        Where trainers come and go, go on without it if that can be, and seat new ones on free threads.
        """
        # First, because all tasks have ended if the scheduler has, and another driver may begin them anew.
        seen = self._ask()
        try:
            there = self.client.nthreads()
        except OSError as error:
            raise ControllerGoneError(f"the scheduler does not say which workers there are: {error}") from error
        running = [seat for seat in self.seats if not seat.over]
        around = sorted({seat.worker for seat in running if seat.worker in there})
        for seat in [*running, *(seat for seat in self.seats if seat.is_given_up)]:  # others work on its data
            lost = seat.lost()
            if gone := cannot_be_sent_again(lost):
                raise TrainerLostError(
                    f"{len(gone)} of the {len(seat.data)} partitions of trainer {seat.number} were lost with a worker, "
                    f"and cannot be made again: they were scattered, and Dask keeps one copy of scattered data. Pass "
                    f"the data themselves, which this process then sends again, or a Dask collection (it may be "
                    f"persisted)"
                )
            if around:
                send_again(self.client, lost, around)
            taken_back = lost and seat.status in ("cancelled", "lost")  # by Dask, because it lacked its data
            homeless = seat.worker not in there or taken_back or seat.future is None
            if homeless and not seat.over and not self._goes_on_without(seat, seen):
                self._move(seat)
        if self._vacancies is not None:
            self._fill(self._vacancies)
            self._check_deserted()

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
        """Raise the error of a trainer, as far as it is known, that no other trainer has caused."""
        for seat in self.seats:
            if seat.future is not None and seat.future.status == "error":
                error = seat.future.exception()
                if isinstance(error, KilledWorker):
                    raise TrainerLostError(f"trainer {seat.number} was lost: {error}") from error
                seat.future.result()

    def cancel(self) -> None:
        self.client.cancel([seat.future for seat in self.seats if seat.future is not None and seat.status == "pending"])

    # -- trainers that come and go

    def _goes_on_without(self, seat: TrainerTask, seen: RunStatus) -> bool:
        """Whether the run goes on without a trainer, whose task is cancelled then."""
        vacancies = self._vacancies
        if vacancies is None or not vacancies.give_up(seat.number, bool(seat.partition_numbers)):
            return False
        logger.warning("trainer %d is gone with its worker %s; the others do its work", seat.number, seat.worker)
        self._drop(seat)
        vacancies.note_loss(0 if seen.portions is None else seen.portions.done)
        return True

    def _drop(self, seat: TrainerTask) -> None:
        """Cancel a trainer's task, and expect no result of it."""
        if seat.future is not None:
            self.client.cancel([seat.future])
        self.threads.give_back([seat.key])
        seat.over = seat.is_given_up = True
        seat.future = None

    def _give_up_stopped(self) -> None:
        """Go on without trainers that were told to stop while the run goes on, or that have lost the controller."""
        for seat in self.seats if self._vacancies is not None else ():
            error = None if seat.future is None or seat.future.status != "error" else seat.future.exception()
            gone = isinstance(error, (ControllerGoneError, KilledWorker))
            if (gone or isinstance(seat.result, Stopped)) and not seat.is_given_up:
                seen = self._ask()
                if seen.stopped is None:
                    self._goes_on_without(seat, seen)

    def _fill(self, vacancies: Vacancies) -> None:
        """Begin a trainer on each free thread, while there are vacant seats and no other has done its work."""
        if not vacancies.free or any(seat.over and not seat.is_given_up for seat in self.seats):
            return
        found = self.threads.ask(None, vacancies.free, [], config.seconds("join"))["seats"]
        if found:
            check_versions_of(self.client, sorted({worker for worker, _ in found}))
        for number, place in zip(vacancies.take(len(found)), found, strict=True):
            seat = TrainerTask(number, place, [], [])
            seat.is_late = True
            self.seats.append(seat)
            self._submit(seat)
            logger.info("trainer %d comes to the run, on %s", number, seat.worker)

    def _check_deserted(self) -> None:
        """Do not wait for ever for another trainer when all are gone."""
        if not all(seat.is_given_up for seat in self.seats):
            self._deserted = None
            return
        now, patience = time.monotonic(), config.seconds("rejoin")
        self._deserted = now if self._deserted is None else self._deserted
        if now - self._deserted > patience:
            raise TrainerLostError(
                f"all trainers of run {self.job.run} are gone with their workers, and no thread was free for another "
                f"one within {patience:g} s (dps.timeouts.rejoin)"
            )

    def dismiss_late(self, seen: RunStatus) -> None:
        """Do not wait for trainers that have not joined while all others have ended."""
        waiting = [seat for seat in self.seats if not seat.over]
        if self._vacancies is None or not all(seat.is_late for seat in waiting):
            return
        came = {trainer.number for trainer in seen.trainers if trainer.attempts}
        if came.isdisjoint(seat.number for seat in waiting):
            for seat in waiting:
                if self._vacancies.give_up(seat.number, has_partitions=False):
                    self._drop(seat)

    # -- inside

    def _submit(self, seat: TrainerTask) -> None:
        seat.future = self.client.submit(
            train,
            self.job,
            seat.number,
            seat.partition_numbers,
            seat.parts,
            workers=[seat.worker],
            key=seat.key,
            pure=False,
            retries=self.job.retries,
            priority=100,
        )

    def _move(self, seat: TrainerTask) -> None:
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
            self.threads.give_back([seat.key])
        patience = config.seconds("rejoin")
        lying = [] if seat.lost() else holders(self.client, [seat.data])[0]
        found = self.threads.ask(1, 1, lying, patience)
        if found["seats"]:
            gone, seat.homeless = seat.worker, None
            ((seat.worker, seat.key),) = found["seats"]
            send_again(self.client, seat.lost(), [seat.worker])
            if seat.lost():  # that worker has gone, too
                return
            self._submit(seat)
            logger.warning("trainer %d lost its worker %s and is run again on %s", seat.number, gone, seat.worker)
            return
        seat.why = found["numbers"]
        if news:
            logger.warning(
                "trainer %d lost its worker %s, and there is no thread for it: %s. The run ends if there is none "
                "within %g s (dps.timeouts.rejoin)",
                seat.number,
                seat.worker,
                seat.why,
                patience,
            )
        assert seat.homeless is not None
        if now - seat.homeless > patience:
            raise TrainerLostError(
                f"trainer {seat.number} lost its worker {seat.worker}, and for {patience:g} s (dps.timeouts.rejoin) no "
                f"thread was free to run it again: {seat.why}"
            )


def holders(client: Client, shares: list[list[Future]]) -> list[list[str]]:
    holding = client.who_has([future for share in shares for future in share])
    return [[worker for future in share for worker in holding.get(future.key, ())] for share in shares]
