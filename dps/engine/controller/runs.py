"""Runs: the controller's data plane. Trainers join, tick, meet and leave; this file applies the rules of
`coordination/clock.py` to frames and wall time.

Everything in this file happens in the thread of the controller's endpoint. A tick that may not pass yet is parked, and
answered when a slower trainer ticks or leaves; other frames of the same connection are handled meanwhile.

======== ===================================== ========================================================
frame    from the trainer                      answer
======== ===================================== ========================================================
JOIN     `Join`                                `Joined`
TICK     `Tick`; in some a report              `TickAnswer`, when it may go on
AWAIT    `Await`, before it reads a table      `TickAnswer`, when it may read, or when it is to look again
         that has a staleness of its own       whether it has to wait
COLLECT  `Collect`; JSON of the call (op,      the reduced array, raw; of allgather all parts
         dtype, shape, root), the array, raw
LEAVE    `Leave`                               nothing, when it is noted
RESERVE  `Reserve`                             `Reserved`
LEASE    `LeaseRequest`, see `work_leases.py`  `LeaseAnswer`
PEEK     `Peek`                                `TrainerStanding`
ORIGIN   `OriginRequest` (from a client in a   `OriginAnswer`: see `coordination/origins.py`
         Dask task)
======== ===================================== ========================================================

`wire/messages.py` has the fields of these messages, `wire/headers.py` those of `Tick`, `Await`, `TickAnswer` and
`Collect`.

A trainer whose connection breaks without LEAVE is *lost*. If it is not back within `dps.timeouts.rejoin` (or, in a run
on Spark, the time for which Spark lets a barrier stage wait for slots), the run is stopped: every waiting trainer gets
the reason at once, every other one at its next tick.

Repeats, and frames that come late. A trainer is the *connection* that has joined last for it. JOIN may come again over
another connection: of the same incarnation, because the first connection broke, or of a later one, because the task was
run again. An earlier incarnation is refused. Any other frame over a connection that is no longer the trainer's (of a
zombie, or delayed on its way), and the end of such a connection, changes nothing; requests parked there are failed.
Each distinct incarnation is one *attempt*, by which the servers know its ops. The *origin* is the trainer's number
among all parties that make ops.

A trainer has one parked request. If it sends another TICK, AWAIT or COLLECT over the same connection before the first
is answered, the later one is parked (a tick for the higher clock), and the first is refused at once.

A run *may grow* (`Run.may_grow`) where it was begun with vacant seats: trainers take them while the run goes on, and
one that is lost for too long is given up instead of ending the run. Its work is leased (`work_leases.py`), so others do
what a trainer has left behind, and a trainer that comes late finds work. A lost trainer without which batches would be
left out is not given up (`Leases.needs`).

An *elastic* run is one whose trainers come when a scheduler starts them, leave, and perhaps come again: no trainer
waits for another, a lost one is not missed, and a failed one does not stop the run. It goes on until it is ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dps import config
from dps.engine.controller.collectives import MAX_COLLECTED_BYTES
from dps.engine.controller.origin_numbers import OriginNumbers
from dps.engine.controller.run import ParkedRequest, Run, TrainerParty, answer_meeting, park
from dps.engine.controller.run_records import missing_for_too_long, surplus
from dps.engine.controller.work_leases import WorkLeases
from dps.engine.coordination.clock import checked_staleness
from dps.engine.coordination.meetings import Meeting
from dps.engine.coordination.origins import TaskOrigins, decode_key
from dps.engine.state.names import check_name, shown
from dps.engine.telemetry.reports import TrainerReport
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import Await, Collect, Tick, TickAnswer
from dps.engine.wire.messages import (
    Join,
    LeaseRequest,
    Leave,
    OriginAnswer,
    OriginRequest,
    Peek,
    Reserve,
    Reserved,
    SavedRun,
    TrainerStanding,
    decode,
    encode,
)
from dps.engine.wire.protocols import RoleConnection
from dps.errors import (
    ClockTimeoutError,
    DPSError,
    InputError,
    LimitError,
    ProtocolError,
    StoppedError,
    TrainerLostError,
)

if TYPE_CHECKING:
    from dps.engine.daskapi.protocols import DaskTask

__all__ = ["Run", "Runs"]

logger = logging.getLogger(__name__)

# Largest attempt, because the field in a frame holds no more.
MAX_ATTEMPTS = (1 << 16) - 1
# Time between two checks which Dask tasks have ended.
SWEEP_SECONDS = 1.0
# Number of elastic runs that are open at a time.
MAX_ELASTIC_RUNS = 1000
# Number of runs that wait for a driver which begins their trainers anew.
MAX_INTERRUPTED_RUNS = 16


class Note(Protocol):
    """Takes an event of a run, as `Membership.note` does; `stands` says whether it still matters."""

    def __call__(self, text: str, *, stands: Callable[[], bool]) -> None: ...


def _log_event(text: str, *, stands: Callable[[], bool]) -> None:
    logger.info(text)


class Runs:
    """All runs of one parameter server.

    Parameters
    ----------
    now : callable
        Gives the time, in seconds, by which all waiting is measured.
    note : callable
        Takes the events of runs; by default, they are only logged.
    task_of : callable
        Given the key of a Dask task, returns the task's life and its latest run; None if there is no such task.
    at_work : callable
        Given a life: whether the task is being run.
    """

    def __init__(
        self,
        session: str,
        now: Callable[[], float] = time.monotonic,
        *,
        note: Note = _log_event,
        task_of: Callable[[Any], tuple[DaskTask, int] | None] = lambda key: None,
        at_work: Callable[[DaskTask], bool] = lambda life: False,
    ):
        self.session, self.now = session, now
        self.patience, self.rejoin = config.seconds("clock"), config.seconds("rejoin")
        self.runs: dict[int, Run] = {}
        self._before = 0  # the last run that another controller may have begun
        self._last = 0  # the last run
        self.origins = OriginNumbers(session)
        # Has the effect of a decision take place once that is committed; at once where there is no journal.
        self.decide: Callable[[Callable[[], object]], None] = take_effect
        # Called when all trainers of a leased run have completed an epoch.
        self.on_epoch: Callable[[], object] = lambda: None
        self.recorded: set[int] | None = None  # runs that the last committed record has; None: there is no journal
        self.grace = 0.0  # seconds for which trainers wait for another scheduler when this one dies
        self.tasks = TaskOrigins(self.origins.allot, at_work)
        self.note, self._task_of = note, task_of
        self._swept_at = now()
        self._renewals = 0  # changes of the staleness of tables so far

    def begin_after(self, last: int) -> None:
        """The first run gets the number after this one, because other controllers have used those before."""
        self._last = self._before = last

    # -- the driver's side

    def start(
        self,
        trainers: int,
        staleness: float | None,
        collecting: Sequence[str] = (),
        resumed: SavedRun | None = None,
        partitions: Sequence[Sequence[int]] = (),
        elastic: bool = False,
        reassign: bool | str = False,
        warm_start: int = 0,
        vacant: int = 0,
        lends: bool = False,
    ) -> int:
        """Begin a run of that many trainers; returns its number. `collecting` are tables that collect a clock's pushes.

        The last `vacant` seats are for trainers that join later; the work of such a run is leased (`reassign`). With
        `lends`, trainers fetch partitions from each other, and outlive a scheduler.
        With `resumed`, it resumes the run of a checkpoint: at its clock, with its origins. With `warm_start`, trainer
        0 begins alone, and the others when it has come to that clock.
        """
        active = [n for n, run in self.runs.items() if run.active and not run.elastic]
        if elastic and sum(run.elastic and not run.over for run in self.runs.values()) >= MAX_ELASTIC_RUNS:
            raise LimitError(f"{MAX_ELASTIC_RUNS} elastic runs are open already: end those that are no longer needed")
        if active and collecting and not elastic:
            raise InputError(
                f"run {active[0]} of parameter server {self.session!r} is going on, and table {collecting[0]!r} "
                f"collects the pushes of a clock (aggregate=...), of one run at a time; wait for its end"
            )
        if collecting and not elastic:  # because a table has the sums of one such run at a time
            self._give_up(0)
        clock = 0 if resumed is None else resumed.clock
        bound = math.inf if staleness is None else staleness
        if vacant and not reassign:
            raise InputError("trainers may join a run while it goes on only where its work is leased: reassign=True")
        run = Run(self._last + 1, trainers, bound, clock, elastic, warm_start, vacant)
        run.origin = self.origins.allot(trainers) if resumed is None else resumed.origin
        run.partitions = [list(part) for part in partitions]
        if reassign:
            run.lease_work(WorkLeases(run.partitions, clock, self.origins.allot, lends), reassign)
            for trainer in run.left():
                run.give_back(trainer, for_good=True)
        self._last = run.number
        self.runs[run.number] = run
        for number in [n for n, run in self.runs.items() if run.over][:-16]:
            del self.runs[number]  # the last few stay, because drivers may ask for them
        self._give_up(MAX_INTERRUPTED_RUNS)
        return self._last

    def _give_up(self, left: int) -> None:
        """End interrupted runs that no driver has resumed, until so many are left; the oldest first."""
        for run in surplus(self.runs.values(), left):
            text = f"run {run.number}, whose scheduler had died, was given up, because another run began in its place"
            self.note(text, stands=lambda: True)
            self.stop(run.number, StoppedError(text))

    def retire(self) -> list[list[int]]:
        """[first origin, how many] of the runs and tasks that have ended since the last call."""
        going = self.recorded or ()  # for another controller, these runs would go on
        over = [run for run in self.runs.values() if run.over and not run.retired and run.number not in going]
        for run in over:
            run.retired = True
        return [origins for run in over for origins in run.origins()] + self.tasks.take_ended()

    def only_active(self) -> Run | None:
        """The active run; None if there is none, or several."""
        active = [run for run in self.runs.values() if run.active and not run.elastic]
        return active[0] if len(active) == 1 else None

    def end(self, number: int) -> bool:
        """End a run: no trainer can join it any more. Returns whether it had no error, and no other run is active."""
        run = self.runs.get(number)
        if run is None:  # it ended long ago, and is forgotten
            return False
        well = run.stopped is None or run.ended
        if run.stopped is None:
            run.ended = True
            self.stop(number, StoppedError(f"run {number} was closed"))
        return well and not any(run.active and not run.elastic for run in self.runs.values())

    def is_active_origin(self, origin: int) -> bool:
        return any(run.origin == origin and run.active for run in self.runs.values())

    def failed(self) -> int:
        """The number of the last run, if it failed; else 0."""
        run = self.runs.get(self._last)
        return 0 if run is None or run.stopped is None or run.ended else run.number

    def going(self, number: int = 0) -> list[Run]:
        """The run of that number, or all active runs with a staleness (0)."""
        going = [self.known(number)] if number else [run for run in self.runs.values() if not (run.over or run.elastic)]
        if not going:
            raise InputError(
                f"no run of parameter server {self.session!r} goes on, so neither staleness nor reassign can be set"
            )
        return going

    def set_staleness(self, staleness: float, number: int = 0, by: str = "") -> list[int]:
        """Set the bound of a run, or of all active ones (0), from now on. Returns the numbers of these runs.

        Trainers learn of it with the answers to their ticks; one that is too far ahead waits at its next tick.
        """
        going, bound = self.going(number), checked_staleness(staleness)
        for run in going:
            run.decided = bound
            self.decide(partial(self._take_staleness, run, bound, by))
        return [run.number for run in going]

    def _take_staleness(self, run: Run, bound: float, by: str) -> None:
        """The staleness of a run is decided: from now on it holds."""
        released, text = run.take_staleness(bound, by)
        self._tell(run, text)
        self.release(run, released)

    def _tell(self, run: Run, *texts: str) -> None:
        for text in filter(None, texts):
            self.note(text, stands=lambda: not run.over)

    def set_reassign(self, reassign: bool | str, number: int = 0, why: str = "") -> None:
        """Say whether trainers of a run, or of all active ones (0), help each other from now on; see `Run.reassign`.

        It holds at once, and not after others know of it, because each batch counts once either way.
        """
        going = self.going(number)
        for run in [run for run in going if run.work_leases is not None] or going:
            self.decide(partial(self._tell, run, run.set_reassign(reassign, why)))

    def renew_tables(self) -> None:
        """The staleness of a table has changed, and clients that ask for the route are told of it.

        Each trainer learns with the answer to its next tick that it has to ask. Those that wait before a read get that
        answer now, because they may not have to wait any more.
        """
        self._renewals += 1
        for run in self.runs.values():
            self.release(run, run.clock.recall_reads())

    def set_rejoin(self, number: int, seconds: float, setting: str) -> None:
        """Give lost trainers of a run so long to be back, if that is longer than ``dps.timeouts.rejoin``."""
        run = self.known(number)
        if seconds > (run.rejoin or (self.rejoin,))[0]:
            run.rejoin = seconds, setting

    def stop(self, number: int, error: DPSError) -> None:
        """Stop a run with an error: waiting trainers get it now, the others at their next tick."""
        run = self.known(number)
        if run.stopped is None:
            run.stopped = error
        for waiting in (*run.ticking.values(), *run.meeting.values()):
            waiting.fail(run.stopped)
        run.ticking.clear()
        run.meeting.clear()

    def give_up(self, number: int, trainer: int) -> bool:
        """Go on without a trainer, if the run allows it; whether the run does. The driver says that its worker is gone,
        or it was lost for too long."""
        run = self.known(number)
        record = run.record(trainer)
        if record.left:  # or it has never come
            return True
        if not run.can_do_without(trainer):
            return False
        clock, place = run.clock.clock_of(trainer), record.where or "no worker yet"
        for request in run.give_up(trainer):
            request.fail(run.replaced(trainer))
        text = f"run {number}: trainer {trainer} (on {place}) is gone, at clock {clock}; the others do its work"
        self._tell(run, text)
        self._trainer_left(run, trainer)
        return True

    def close(self, error: DPSError) -> None:
        for number in self.runs:
            self.stop(number, error)

    # -- frames

    def join(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        request = decode(Join, body)
        trainer, incarnation = request.trainer, request.incarnation
        if request.run not in self.runs and request.run <= self._before:
            raise StoppedError(f"run {request.run} has ended: its trainers have left, or it was stopped")
        run = self.known(request.run)
        if run.stopped is not None:
            raise run.stopped.with_traceback(None)  # because each raise would add its own traceback
        if connection.party is not None and connection.party != (run, trainer):
            raise ProtocolError("a connection is for one trainer, and this one has joined as another before")
        record, current = run.record(trainer), run.clock.incarnation_of(trainer)
        if incarnation is None:
            incarnation = 0 if current is None else current + 1
        again = current == incarnation
        run.check_may_join(trainer, request, again)
        back = current is None and request.attempt >= 0  # another controller has counted its attempt
        attempt = request.attempt if back else record.attempt + (not again)
        if attempt > MAX_ATTEMPTS:
            raise LimitError(f"trainer {trainer} of run {run.number} was begun {attempt} times already")
        self.release(run, run.clock.advance(trainer, request.clock))
        clock = run.clock.join(trainer, incarnation, self.now())
        for waiting in run.withdraw(trainer):
            waiting.fail(run.replaced(trainer))
        run.join(trainer, connection, attempt, request.joins, shown(request.where, 200))
        if run.telemetry is not None and not again:
            run.telemetry.joined(trainer, self.now())
        if run.may_grow:
            run.ticked(trainer)
        run.records[trainer].renewals = self._renewals  # because a trainer that joins asks for the route
        connection.party = TrainerParty(run, trainer)
        answer = run.welcome(trainer, clock, attempt, incarnation, self.grace)
        reply = partial(connection.reply, Header(frames.OK, request=header.request), encode(answer))
        if attempt > run.presumed_attempt(trainer):  # or a controller that takes over would give the number again
            self.decide(reply)
        else:
            reply()

    def tick(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        clock, planned = Tick.of(header)
        run.records[trainer].planned = planned or run.records[trainer].planned
        now = self.now()
        if body:
            self._reported(run, trainer, lambda: TrainerReport.decode(body), clock)
        before = run.clock.minimum
        released = run.clock.tick(trainer, clock, now)  # refuses one that may not tick
        park(run.ticking, trainer, ParkedRequest(connection, header, now))
        run.ticked(trainer)
        if run.work_leases is not None and run.clock.minimum > before:
            self.on_epoch()
        self.release(run, released)

    def await_lowest(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        now = self.now()
        released = run.clock.await_lowest(trainer, Await.of(header).lowest, now)
        park(run.ticking, trainer, ParkedRequest(connection, header, now))
        self.release(run, released)

    def _reported(self, run: Run, trainer: int, read: Callable[[], TrainerReport], clock: int) -> None:
        self._tell(run, *run.reported(trainer, read, clock, self.now()))

    def lease(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        request = decode(LeaseRequest, body)
        answer = run.leased(trainer, request, self.now())
        if request.report is not None:
            self._reported(run, trainer, lambda: TrainerReport.read(request.report), run.clock.clock_of(trainer))
        connection.reply(Header(frames.OK, request=header.request), encode(answer))

    def collect(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if run.elastic or run.may_grow:
            raise InputError(f"the trainers of run {run.number} come and go: they cannot meet (barrier, allreduce)")
        if len(body) > MAX_COLLECTED_BYTES:
            raise LimitError(
                f"a collective takes up to {MAX_COLLECTED_BYTES} bytes a trainer, not {len(body)}: use a table"
            )
        run.check_can_meet(trainer)
        clock, number, call_bytes = Collect.of(header)
        call = bytes(body[:call_bytes]).decode(errors="replace").strip()
        place, now = (clock, number), self.now()
        met = run.meetings.recall(call, trainer, place)
        if met is not None:  # a repeat: the other trainers have gone on since
            answer_meeting(ParkedRequest(connection, header, now), met)
            return
        met = run.meetings.arrive(call, trainer, place, bytes(body[call_bytes:]))
        park(run.meeting, trainer, ParkedRequest(connection, header, now))
        # A trainer that waits here pushes nothing before the others are here, so it does not hold back their ticks.
        self.release(run, run.clock.leave(trainer, now))
        self._end_meeting(run, met)

    def leave(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection, stopped_too=True)
        record = run.records[trainer]
        request = decode(Leave, body)
        if request.report is not None:
            self._reported(run, trainer, lambda: TrainerReport.read(request.report), run.clock.clock_of(trainer))
        if run.elastic and request.failed:
            self.disconnected(connection)  # because its task may be run again
        else:
            run.leave(record)
        record.seconds = msgspec.structs.asdict(request.seconds)
        connection.party = None
        reply = partial(connection.reply, Header(frames.OK, request=header.request))
        if run.elastic:
            reply()
        if not record.left:
            return
        if request.failed:
            self.stop(run.number, StoppedError(f"trainer {trainer} failed: {shown(request.failed, 1000)}"))
        else:
            self._trainer_left(run, trainer)
        if not run.elastic:  # otherwise a controller that takes over would wait for this trainer
            self.decide(reply)

    def reserve(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        request = decode(Reserve, body)
        run = self.known(request.run)
        name = check_name("trainer", request.name)
        count = request.count
        if run.stopped is not None:
            raise run.stopped.with_traceback(None)
        first = sum(taken for _, taken in run.reserved.values())
        first, taken = run.reserved.get(name, (first, count))
        if count < 1 or first + count > run.trainers or count != taken:
            raise InputError(
                f"{count} trainers under the name {name!r} do not fit into run {run.number} of {run.trainers}, of "
                f"which are reserved: {', '.join(f'{n} for {w!r}' for w, (_, n) in run.reserved.items()) or 'none'}"
            )
        run.reserved[name] = first, count
        self.decide(partial(connection.reply, Header(frames.OK, request=header.request), encode(Reserved(first))))

    def peek(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        request = decode(Peek, body)
        run, trainer = self.known(request.run), request.trainer
        incarnation = run.clock.incarnation_of(trainer) if trainer in run.records else None
        stopped = None if run.stopped is None else str(run.stopped)
        answer = TrainerStanding(incarnation, run.state(trainer), stopped)
        connection.reply(Header(frames.OK, request=header.request), encode(answer))

    def origin(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        request = decode(OriginRequest, body)
        try:
            key = decode_key(request.task)
        except (TypeError, KeyError, ValueError):
            raise ProtocolError(f"an ORIGIN whose task is no key: {request.task!r:.200}") from None
        task = self._task_of(key)
        if task is None:
            raise StoppedError(
                f"the scheduler knows no task {key!r} any more: it was cancelled, or its futures were released, so its "
                f"pushes do not count"
            )
        origin, attempt = self.tasks.assign(key, *task, request.run, request.client)
        connection.reply(Header(frames.OK, request=header.request), encode(OriginAnswer(origin, attempt)))

    def disconnected(self, connection: RoleConnection) -> None:
        """A trainer's connection broke without LEAVE."""
        if isinstance(connection.party, TrainerParty):
            run, trainer = connection.party
            if run.records[trainer].connection is connection:
                run.disconnect(run.records[trainer], self.now())

    def check_timeouts(self) -> None:
        """Stop runs whose lost trainers are not back in time, and fail requests that were parked for too long."""
        now = self.now()
        if now - self._swept_at > SWEEP_SECONDS:
            self._swept_at = now
            self.tasks.sweep(lambda key, life: (self._task_of(key) or (None,))[0] is life)
        for run in list(self.runs.values()):
            if run.stopped is not None:
                continue
            rejoin, setting = run.rejoin or (self.rejoin, "dps.timeouts.rejoin")
            if (error := missing_for_too_long(run, now, max(self.grace, self.rejoin))) is not None:
                self.stop(run.number, error)
            alone = run.interrupted and not run.connected  # no trainer waits, and a driver may begin them all anew
            lost = {} if run.elastic or alone else run.lost
            for trainer in [t for t, since in lost.items() if now - since > rejoin]:
                if self.give_up(run.number, trainer):
                    continue
                place = run.record(trainer).where
                clock = run.clock.clock_of(trainer)
                self.stop(
                    run.number,
                    TrainerLostError(
                        f"trainer {trainer} of run {run.number} (on {place}) vanished at clock {clock} and was not "
                        f"back within {rejoin:g} s ({setting}); did its worker die, or run out of memory?"
                    ),
                )
            for trainer in run.clock.overdue(now, self.patience):
                if (waiting := run.ticking.pop(trainer, None)) is not None:
                    why = f"{run.clock.explain(trainer, now)}; the limit is {config.limit('clock', self.patience)}"
                    waiting.fail(ClockTimeoutError(why))
            for trainer in [t for t, waiting in run.meeting.items() if now - waiting.since > self.patience]:
                waiting = run.meeting.pop(trainer)
                absent = [n for n in run.staying() if n not in run.meeting and n != trainer]
                text = (
                    f"trainer {trainer} has waited {now - waiting.since:.0f} s in a barrier or another collective; "
                    f"not there: trainers {', '.join(map(str, absent))}. All must make the same collective calls; "
                    f"the limit is {config.limit('clock', self.patience)}"
                )
                waiting.fail(ClockTimeoutError(text))

    # -- inside

    def known(self, number: int) -> Run:
        run = self.runs.get(number)
        if run is None:
            raise InputError(f"parameter server {self.session!r} has no run number {number}")
        return run

    def _party(self, connection: RoleConnection, stopped_too: bool = False) -> tuple[Run, int]:
        if not isinstance(connection.party, TrainerParty):
            raise ProtocolError("a tick, collective or leave over a connection on which no trainer has joined")
        run, trainer = connection.party
        if run.records[trainer].connection is not connection:
            raise run.replaced(trainer)
        if run.stopped is not None and not stopped_too:
            raise run.stopped.with_traceback(None)  # because each raise would add its own traceback
        return run, trainer

    def release(self, run: Run, trainers: list[int]) -> None:
        """Answer the ticks of these trainers, whose wait is over, and their questions before reads."""
        for trainer in trainers:
            waiting = run.ticking.pop(trainer, None)
            if waiting is not None:
                lowest, record = run.lowest_of_others(trainer), run.records[trainer]
                answer = TickAnswer(run.trainers - run.left_count, run.staleness, lowest)
                known, record.renewals = record.renewals, self._renewals
                told = answer if known == self._renewals else answer._replace(renewed=True)
                waiting.connection.reply(told.header(waiting.header.request))

    def _trainer_left(self, run: Run, trainer: int) -> None:
        self.release(run, run.clock.leave(trainer, self.now()))
        self._end_meeting(run, run.meetings.leave(trainer))

    def _end_meeting(self, run: Run, meeting: Meeting | None) -> None:
        """A meeting is complete: its trainers go on, and hold back ticks of others again."""
        if meeting is None:
            return
        now = self.now()
        for trainer in meeting.places:
            run.count_again(trainer, now)
        for waiting in run.meeting.values():
            answer_meeting(waiting, meeting)
        run.meeting.clear()


def take_effect(effect: Callable[[], object]) -> None:
    effect()
