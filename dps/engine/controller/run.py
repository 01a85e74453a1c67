"""Run: the state of one run in the controller. `runs.py` has the frames that change it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dps.engine.controller.collectives import answer
from dps.engine.controller.work_leases import WorkLeases
from dps.engine.coordination.clock import Clock
from dps.engine.coordination.meetings import Meeting, Meetings
from dps.engine.telemetry.reports import TrainerReport
from dps.engine.telemetry.run_telemetry import RunTelemetry
from dps.engine.telemetry.snapshot import TrainerPhase
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Join, Joined, LeaseAnswer, LeaseRequest, SavedRun
from dps.engine.wire.protocols import RoleConnection
from dps.errors import DPSError, InputError, StoppedError

__all__ = ["ParkedRequest", "Run", "TrainerParty", "TrainerRecord", "answer_meeting", "park"]

logger = logging.getLogger(__name__)

# Number of trainers up to which a run keeps their reports.
MAX_REPORTING_TRAINERS = 4096


class ParkedRequest(NamedTuple):
    """A request that is answered later: a tick, a read or a collective that waits for other trainers."""

    connection: RoleConnection
    header: Header
    since: float

    def fail(self, error: DPSError) -> None:
        self.connection.reply_error(self.header, error)


class TrainerParty(NamedTuple):
    run: Run
    trainer: int


class TrainerRecord:
    """One trainer of a run that has joined at least once, or a vacant seat. Its clock, its incarnation and whether it
    counts are facts of the run's `Clock`; when it was lost and what it waits for are in the indices of the run."""

    __slots__ = (
        "attempt",
        "connection",
        "given_up",
        "joins",
        "left",
        "number",
        "planned",
        "renewals",
        "seconds",
        "where",
    )

    def __init__(self, number: int):
        self.number = number
        self.connection: RoleConnection | None = None  # by which it has joined last; None: it is lost, or has left
        self.attempt = -1  # counts its incarnations, from 0
        self.joins = 0  # how often this attempt had joined before
        self.renewals = 0  # how many changes of tables' staleness it was told of (`Runs.renew_tables`)
        self.where = ""  # its host and process, as it says
        self.planned = 0  # the clock that it will reach; 0: unknown
        self.seconds: dict[str, float] | None = None  # once it has left
        # It has sent LEAVE. (The clock's state "left" says less: a trainer that waits in a collective has that, too.)
        self.left = False
        self.given_up = False  # it was lost, and the others go on without it: this attempt counts no more


# Record of a trainer that has none yet; it never changes.
NEVER_JOINED = TrainerRecord(-1)


class Run:
    """One `ps.run`: its clock, a record for each trainer, the requests that wait, and how it ended.

    Runs of thousands of trainers get ten thousands of ticks a second. So no tick goes through all records: what a tick,
    or the timer ten times a second, asks of all trainers together is kept beside them, in two counters
    (`connected`, `left_count`) and three indices (`ticking`, `meeting`, `lost`).
    """

    def __init__(
        self,
        number: int,
        trainers: int,
        staleness: float,
        clock: int = 0,
        elastic: bool = False,
        warm_start: int = 0,
        vacant: int = 0,
    ):
        self.number = number
        self.trainers = trainers
        self.staleness = staleness
        self.decided = staleness  # the staleness that holds once it is committed
        self.elastic = elastic
        self.start = clock
        self.origin = 0  # origin of trainer 0; those of the other trainers follow
        self.partitions: list[list[int]] = []  # partitions of each trainer, by the driver's numbers
        self.begun = trainers - vacant  # how many trainers it was begun with; the seats of the others were vacant
        self.clock = Clock(staleness, trainers, clock, warm_start, vacant)
        self.meetings = Meetings(trainers, answer)
        self.records: dict[int, TrainerRecord] = {}  # a trainer has one from its first JOIN, a vacant seat at once
        self.connected, self.left_count = 0, vacant  # trainers with a connection, and those that have left
        for trainer in range(self.begun, trainers):
            self.records[trainer] = TrainerRecord(trainer)
            self.records[trainer].left = True
        self.ticking: dict[int, ParkedRequest] = {}  # ticks that wait, and reads that do, by trainer
        self.meeting: dict[int, ParkedRequest] = {}  # collectives that wait, by trainer
        self.lost: dict[int, float] = {}  # trainer -> when its connection broke, until it joins again
        self.rejoin: tuple[float, str] | None = None  # seconds for a lost trainer to be back, and the setting's name
        self.reserved: dict[str, tuple[int, int]] = {}  # name -> first trainer, how many
        self.stopped: DPSError | None = None
        self.ended = False  # the driver has ended it, without an error
        self.began = time.time()
        self.finish: float | None = None
        self.telemetry: RunTelemetry | None = (
            RunTelemetry(trainers, number) if trainers <= MAX_REPORTING_TRAINERS else None
        )
        self.work_leases: WorkLeases | None = None  # with `reassign=True` or "auto"
        self.reassign: bool | str = False  # whether trainers help each other; "auto": not before one of them is slow
        self.retired = False  # the servers know that its trainers have ended
        self.taken_over: float | None = None  # when this controller has taken it over from another one
        self.missing: set[int] = set()  # trainers of the controller before that are not back
        # Trainers that were begun again, and would repeat collective calls of which another controller had the answers.
        self.estranged: set[int] = set()
        self.is_forgetful = False  # a trainer that is begun again is one of those

    @property
    def may_grow(self) -> bool:
        """Whether trainers may join that it was not begun with, and lost ones may be given up."""
        return self.begun < self.trainers

    @property
    def seated(self) -> int:
        """How many of its seats, from 0 on, trainers have, or have had."""
        return max([self.begun, *(n + 1 for n in range(self.begun, self.trainers) if self.records[n].attempt >= 0)])

    @property
    def over(self) -> bool:
        """Whether the run has ended, with or without an error."""
        return self.stopped is not None or (self.left_count == self.trainers and not self.elastic)

    @property
    def active(self) -> bool:
        """Whether trainers are connected, or may be back."""
        return self.stopped is None and bool(self.connected or (self.lost and not self.elastic))

    @property
    def interrupted(self) -> bool:
        """Whether trainers are missing that there were when another controller had the run."""
        return bool(self.missing) and not self.elastic and self.stopped is None

    def record(self, trainer: int) -> TrainerRecord:
        return self.records.get(trainer, NEVER_JOINED)

    def join(self, trainer: int, connection: RoleConnection, attempt: int, joins: int, where: str) -> None:
        """A trainer has joined, or joined again, by this connection; the clock has allowed it."""
        record = self.records.get(trainer)
        if record is None:
            record = self.records[trainer] = TrainerRecord(trainer)
        self.connected += record.connection is None
        self.left_count -= record.left
        self.lost.pop(trainer, None)
        self.missing.discard(trainer)
        record.connection, record.left, record.given_up = connection, False, False
        if self.is_forgetful and attempt > record.attempt:
            self.estranged.add(trainer)
        record.attempt = attempt
        record.joins = joins
        record.where = where
        self.meetings.join(trainer)

    def wait_for_return(self, attempts: Mapping[int, int], left: Sequence[int], now: float) -> None:
        """Another controller had this run: note the latest attempts there, and wait for all that have not left."""
        self.taken_over, self.is_forgetful, self.left_count = now, True, 0
        for trainer in range(self.trainers):
            record = self.records[trainer] = TrainerRecord(trainer)
            record.attempt = attempts.get(trainer, self.presumed_attempt(trainer))
        for trainer in left:
            self.records[trainer].left = True
            self.left_count += 1
            self.clock.leave(trainer, now)
            self.meetings.leave(trainer)
            self.give_back(trainer, for_good=True)
        self.missing = set(range(self.trainers)).difference(left)

    def presumed_attempt(self, trainer: int) -> int:
        """The latest attempt at a trainer of which a record says nothing; at a vacant seat there was none (-1)."""
        return 0 if trainer < self.begun else -1

    def expect_all(self) -> None:
        """All trainers with which the run began are to be begun anew; the other seats are vacant again.

        Earlier attempts are refused from now on, because a number is left out.
        """
        self.is_forgetful = False  # because all of them repeat their calls
        for trainers in (self.missing, self.lost, self.estranged):
            trainers.clear()
        self.left_count = self.trainers - self.begun
        self.meetings = Meetings(self.trainers, answer)
        for trainer, record in self.records.items():
            record.attempt += record.attempt >= 0
            record.left, record.given_up = trainer >= self.begun, False
            self.give_back(trainer, for_good=record.left)
            if not record.left:
                self.clock.expect(trainer)
        self.ticked(0)  # the epochs that all trainers have completed are over

    def check_can_meet(self, trainer: int) -> None:
        """Refuse a trainer that would repeat collective calls of which another controller had the answers."""
        if trainer in self.estranged:
            raise InputError(
                f"trainer {trainer} of run {self.number} was begun again after the scheduler had died, and would "
                f"repeat its collective calls: what they gave was lost with the scheduler. End the others, and resume "
                f"the run"
            )

    def welcome(self, trainer: int, clock: int, attempt: int, incarnation: int, grace: float) -> Joined:
        """The answer to a trainer that joins: the clock at which it goes on, and what it must know of this run."""
        return Joined(
            clock,
            staleness=None if math.isinf(self.staleness) else self.staleness,
            trainers=self.trainers - self.left_count if self.may_grow else self.trainers,
            origin=self.origin + trainer,
            attempt=attempt,
            incarnation=incarnation,
            portions=0 if self.work_leases is None else self.work_leases.origin,
            warm_start=self.clock.warm_start,
            grace=grace,
            elastic=self.elastic,
        )

    def check_may_join(self, trainer: int, request: Join, again: bool) -> None:
        """Refuse a JOIN of an attempt that counts no more, or of a trainer that comes to a run that is over. `again`:
        the attempt has joined before."""
        record = self.record(trainer)
        if self.is_outdated(trainer, request.attempt):
            raise self.replaced(trainer)
        # The new leases know no batches yet, because trainers tell them when they begin. So a trainer that goes on
        # would hear that nothing is left of its epoch. Where trainers lend each other their partitions, each has done
        # its own ones before it goes on, and is asked to declare them again.
        if self.is_forgetful and self.work_leases is not None and not self.work_leases.lends:
            raise StoppedError(
                f"run {self.number} has leased its batches (reassign=True), and the leases have ended with the "
                f"scheduler: ps.resume_run begins its trainers anew"
            )
        if again and (record.given_up or request.joins < record.joins):
            raise self.replaced(trainer)  # or the JOIN is from an older connection, which broke
        if self.may_grow and self.over and not again:
            raise StoppedError(f"run {self.number} is over: all its work was done before this trainer came")
        if again and self.elastic and record.left and request.joins == record.joins:
            raise InputError(
                f"trainer {trainer} of run {self.number} has left, and comes again within one attempt "
                f"({request.incarnation}): are two partitions computed by one task (coalesce)? They would be taken for "
                f"one; use repartition"
            )

    def lowest_of_others(self, trainer: int) -> int:
        """A clock that all other trainers have reached, also those in a meeting, which hold back no tick: a trainer may
        keep what it reads now until they have pushed at their clocks."""
        meeting = (self.clock.clock_of(n) for n in self.meeting if n != trainer)
        return min(self.clock.lowest_of_others(trainer), *meeting, math.inf)  # type: ignore[return-value]

    def replaced(self, trainer: int) -> StoppedError:
        """Why requests of this attempt at a trainer, or over this connection, count no more."""
        if self.record(trainer).given_up:
            return StoppedError(
                f"trainer {trainer} of run {self.number} was given up, because its worker or its connection was gone, "
                f"and the others do its work: nothing that this attempt does counts any more"
            )
        return StoppedError(
            f"trainer {trainer} of run {self.number} has joined again (its task was run again, or its connection "
            f"broke): requests over this connection count no more"
        )

    def is_outdated(self, trainer: int, attempt: int) -> bool:
        """Whether a later attempt at a trainer counts than this one, which a controller has counted (-1: none has)."""
        return 0 <= attempt < self.record(trainer).attempt

    def disconnect(self, record: TrainerRecord, now: float) -> None:
        """The connection of a trainer broke without LEAVE."""
        self.connected -= 1
        record.connection = None
        self.ticking.pop(record.number, None)
        self.meeting.pop(record.number, None)
        self.lost[record.number] = now
        self.clock.lost(record.number, now)
        self.give_back(record.number)

    def leave(self, record: TrainerRecord) -> None:
        self.connected -= 1
        self.left_count += 1
        record.connection, record.left = None, True
        self.give_back(record.number, for_good=True)

    def can_do_without(self, trainer: int) -> bool:
        """Whether the run may go on without a trainer, because others do its share of the work."""
        if not self.may_grow or self.stopped is not None or self.work_leases is None:
            return False
        present = [n for n in self.staying() if n != trainer and self.record(n).connection is not None]
        return not self.work_leases.leases.needs(trainer, present)

    def give_up(self, trainer: int) -> list[ParkedRequest]:
        """Go on without a trainer that is lost; what it does counts no more. Returns its requests that wait."""
        record = self.records.setdefault(trainer, TrainerRecord(trainer))
        self.connected -= record.connection is not None
        self.left_count += not record.left
        record.connection, record.left, record.given_up = None, True, True
        self.lost.pop(trainer, None)
        self.give_back(trainer, for_good=True)
        return self.withdraw(trainer)

    def withdraw(self, trainer: int) -> list[ParkedRequest]:
        """Take back the requests of a trainer that wait."""
        waiting = self.ticking.pop(trainer, None), self.meeting.pop(trainer, None)
        return [request for request in waiting if request is not None]

    def left(self) -> list[int]:
        return [n for n, record in sorted(self.records.items()) if record.left]

    def places(self) -> dict[int, str]:
        """Where each trainer that has joined runs, or ran last."""
        return {n: record.where for n, record in self.records.items()}

    def staying(self) -> Iterator[int]:
        """The trainers that have not left, also those that have yet to join."""
        return (n for n in range(self.trainers) if not self.record(n).left)

    def saved(self, clock: int) -> SavedRun:
        """For a checkpoint: the state that a later run needs to resume from `clock`."""
        return SavedRun(
            trainers=self.trainers,
            staleness=None if math.isinf(self.staleness) else self.staleness,
            clock=clock,
            origin=self.origin,
            reassign=self.work_leases is not None,
            origins=self.origins(),
            partitions=self.partitions,
            warm_start=self.clock.warm_start,
            vacant=self.trainers - self.begun,
        )

    def origins(self) -> list[list[int]]:
        """[first, how many] of the origins of its ops."""
        leases = self.work_leases
        portions = [] if leases is None or not leases.total else [[leases.origin, leases.total]]
        return [[self.origin, self.trainers], *portions]

    def lease_work(self, leases: WorkLeases, reassign: bool | str) -> None:
        """Lease the work of this run from now on."""
        self.work_leases = leases
        self.set_reassign(reassign)

    def take_staleness(self, bound: float, by: str) -> tuple[list[int], str]:
        """From now on that bound holds. Returns the trainers whose wait is over, and what to tell of a change."""
        before, self.staleness = self.staleness, bound
        text = f"run {self.number}: staleness {bound:g}, before {before:g} {by}".rstrip()
        return self.clock.set_staleness(bound), "" if before == bound else text

    def set_reassign(self, reassign: bool | str, why: str = "") -> str:
        """Say whether trainers help each other from now on. Returns what to tell of a change."""
        if self.work_leases is None:
            raise InputError(
                f"run {self.number} was begun with reassign=False, so its clock counts batches and not epochs: begin "
                f'runs with reassign="auto", where work stays with its trainers until that is changed'
            )
        before, self.reassign = self.reassign, reassign
        self.work_leases.leases.shared = reassign is True
        text = f"run {self.number}: reassign={reassign!r}, before {before!r} {why}".rstrip()
        return "" if before == reassign else text

    def leased(self, trainer: int, request: LeaseRequest, now: float) -> LeaseAnswer:
        if self.work_leases is None:
            raise InputError(f"run {self.number} was begun without reassign=True: there is nothing to lease")

        def held_back() -> bool:
            others = (n for n in self.staying() if n != trainer and n not in self.meeting)
            next_clock = self.clock.clock_of(trainer) + 1
            return any(next_clock - self.clock.clock_of(n) > self.staleness for n in others)

        return self.work_leases.asked(trainer, request, now, held_back)

    def ticked(self, trainer: int) -> None:
        """A trainer has ticked, or has joined at a clock that others have come to."""
        if self.work_leases is not None:
            # Trainers that wait in a collective count, too.
            clocks = [self.clock.clock_of(n) for n in self.staying()]
            self.work_leases.ticked(trainer, self.clock.clock_of(trainer), min(clocks))

    def count_again(self, trainer: int, now: float) -> None:
        """The meeting to which a trainer came has ended, so it holds back the ticks of others again."""
        incarnation = self.clock.incarnation_of(trainer)
        assert incarnation is not None, "a trainer that has not joined comes to no meeting"
        self.clock.join(trainer, incarnation, now)
        if trainer in self.lost:  # since it brought its part; it will send it again
            self.clock.lost(trainer, now)

    def give_back(self, trainer: int, for_good: bool = False) -> None:
        """A trainer is lost, or has left: other trainers may have its portions."""
        if self.work_leases is not None:
            self.work_leases.lost(trainer, for_good)

    def behind(self, clock: int) -> int | None:
        """A trainer that has not left and has yet to complete `clock` iterations; None if there is none.

        A trainer that waits in a collective counts, because it may push at its own clock afterwards.
        """
        return next((n for n in self.staying() if self.clock.clock_of(n) < clock), None)

    def state(self, trainer: int) -> str:
        """Whether a trainer is "joined", "left", "lost" or "expected"."""
        record = self.record(trainer)
        if record.connection is not None:
            return "joined"
        return "left" if record.left else "lost" if trainer in self.lost else "expected"

    def phase(self, trainer: int) -> TrainerPhase:
        record = self.record(trainer)
        if record.connection is not None:
            waits = trainer in self.ticking or trainer in self.meeting
            return TrainerPhase.WAITING if waits else TrainerPhase.RUNNING
        return TrainerPhase(self.state(trainer))

    def reported(self, trainer: int, read: Callable[[], TrainerReport], clock: int, now: float) -> list[str]:
        """Keep a trainer's report; what of it is an event. An error in it must not stop a trainer."""
        if self.telemetry is not None:
            try:
                return self.telemetry.reported(trainer, self.records[trainer].attempt, read(), clock, now)
            except Exception:
                self.stop_telemetry()
        return []

    def stop_telemetry(self) -> None:
        """Keep no more reports, because an error there must not harm the run."""
        logger.exception("run %d goes on, and its trainers are not diagnosed any more", self.number)
        self.telemetry = None


def park(waiting: dict[int, ParkedRequest], trainer: int, request: ParkedRequest) -> None:
    """Park a request until it can be answered. A trainer has one such request: an earlier one is refused now, because
    otherwise it would never be answered."""
    earlier, waiting[trainer] = waiting.get(trainer), request
    if earlier is not None and earlier.header.request != request.header.request:
        earlier.fail(
            InputError(
                f"trainer {trainer} asked again (clock {request.header.clock}) before its request of clock "
                f"{earlier.header.clock} was answered: only the later one counts"
            )
        )


def answer_meeting(waiting: ParkedRequest, meeting: Meeting) -> None:
    if isinstance(meeting.answer, DPSError):
        waiting.fail(meeting.answer)
    else:
        waiting.connection.reply(Header(frames.OK, request=waiting.header.request), meeting.answer)
