"""Runs: the controller's data plane. Trainers join, tick, meet and leave; here the rules of `coordination/clock.py`
meet sockets and wall time.

Everything in this file happens in the controller's endpoint thread. A tick that may not pass yet is remembered and
answered when a slower trainer's tick (or leaving) lets it go; other frames of the same connection go on meanwhile.

======== ===================================== ========================================================
frame    from the trainer                      answer
======== ===================================== ========================================================
JOIN     JSON run, trainer, incarnation,       JSON clock (to go on at), staleness, trainers,
         where, joins (how often before)       origin, attempt, incarnation (the next one for null)
TICK     clock: iterations completed;          when it may go on: parties: trainers that count,
         count: iterations planned (0 unknown) start: the staleness + 1 (NO_BOUND: none)
         a report, now and then (`reports.py`)
COLLECT  JSON about (op, dtype, shape, root)   the reduced array, raw; of allgather all parts
         then the array, raw; clock and
         number: the place, see `gather.py`
LEAVE    JSON failed (a text, or null),        nothing, when it is noted
         seconds (where the time went),
         report (the last one)
RESERVE  JSON run, name, count                 JSON first: so many trainers' numbers, from there on;
                                               of the same name the same
LEASE    JSON, see `portions.py`                JSON: which batches to work on
PEEK     JSON run, trainer                     JSON incarnation, state (joined, lost, left or
                                               expected), stopped (a text, or null)
ORIGIN   JSON task (its key), run, client      JSON origin, attempt: see `coordination/origins.py`
         (from a client in a Dask task)
======== ===================================== ========================================================

A trainer whose connection breaks without LEAVE is *lost*. If it is not back within `dps.timeouts.rejoin` (of a run on
Spark, as long as Spark lets a barrier stage wait for slots), the run is stopped: every waiting trainer gets the reason
at once, every other one at its next tick.

Twice, late, out of date. A trainer is the *connection* that joined last for it. JOIN may come again: over another
connection, of the same incarnation (the first one broke) or a later one (the task was run again); an earlier one is
refused. Whatever else comes over a connection that is no longer the trainer's (the frames of a zombie, what was still
on its way, its LEAVE, its end) changes nothing, and what waited there is told so. Each distinct incarnation is one
*attempt*, which the servers know the ops of; the *origin* is the trainer's number among all that make ops.

A trainer has one request that waits. Should it send another TICK or COLLECT over the same connection before the first
is answered, the later one waits (a tick for the higher clock), and the first is refused at once.

An *elastic* run is one whose trainers come when somebody schedules them, leave, and perhaps come again: nobody waits
for another, who is lost is not missed, who fails stops nobody. It goes on until it is ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from dps import config
from dps.coordination.gather import Meeting
from dps.coordination.origins import TaskOrigins, decode_key
from dps.errors import (
    ClockTimeoutError,
    DPSError,
    InputError,
    LimitError,
    ProtocolError,
    StoppedError,
    TrainerLostError,
)
from dps.names import check_name, shown
from dps.portions import Portions
from dps.reductions import COLLECT_LIMIT
from dps.reports import TrainerReport
from dps.run import Run, Waiting
from dps.wire import frames
from dps.wire.endpoint import Connection
from dps.wire.frames import Header

__all__ = ["Run", "Runs"]

logger = logging.getLogger(__name__)

SPLIT = ("compute", "pull", "push", "wait", "serialise")
MOST_ORIGINS, MOST_ATTEMPTS = (1 << 32) - 1, (1 << 16) - 1  # their fields in a frame hold no more
SWEEP = 1.0  # seconds between two looks whether tasks have ended
MOST_ELASTIC = 1000  # runs that go on until they are ended


class Runs:
    """All runs of one parameter server.

    `now` tells the time; all waiting is measured by it.
    """

    def __init__(self, session: str, now: Callable[[], float] = time.monotonic):
        self.session, self.now = session, now
        self.patience, self.rejoin = config.seconds("clock"), config.seconds("rejoin")
        self.runs: dict[int, Run] = {}
        self.note: Callable[[str, Callable[[], bool]], None] = lambda text, stands: logger.info(text)  # where news goes
        self._last = self._origins = 0
        self.tasks = TaskOrigins(self.allot)
        self.task: Callable[[Any], tuple[Any, int] | None] = lambda key: None  # of Dask: its life and latest run
        self._swept = now()

    # -- the driver's side

    def start(
        self,
        trainers: int,
        staleness: float | None,
        collecting: Sequence[str] = (),
        restored: dict[str, Any] | None = None,
        partitions: Sequence[Sequence[int]] = (),
        elastic: bool = False,
        reassign: bool = False,
    ) -> int:
        """A new run of that many trainers; its number. `collecting` are the tables that collect a clock's pushes.

        With `restored`, it goes on with the run of a checkpoint: at its clock, as its origins.
        """
        active = [n for n, run in self.runs.items() if run.active and not run.elastic]
        if elastic and sum(run.elastic and not run.over for run in self.runs.values()) >= MOST_ELASTIC:
            raise LimitError(f"{MOST_ELASTIC} elastic runs are open already: end those that are no longer needed")
        if active and collecting and not elastic:
            raise InputError(
                f"run {active[0]} of parameter server {self.session!r} is going on, and table {collecting[0]!r} "
                f"collects the pushes of a clock (aggregate=...), of one run at a time; wait for its end"
            )
        clock = 0 if restored is None else restored["clock"]
        run = Run(self._last + 1, trainers, math.inf if staleness is None else staleness, clock, elastic)
        run.origin = self.allot(trainers) if restored is None else restored["origin"]
        run.partitions = [list(part) for part in partitions]
        if reassign:
            run.portions = Portions(run.partitions, clock, self.allot)
        self._last = run.number
        self.runs[run.number] = run
        for number in [n for n, run in self.runs.items() if run.over][:-16]:
            del self.runs[number]  # the last few are kept to be asked about
        return self._last

    def allot(self, count: int) -> int:
        """The first of `count` origins that nobody has had, in a row."""
        if self._origins + count > MOST_ORIGINS:
            raise LimitError(f"parameter server {self.session!r} has handed out all {MOST_ORIGINS} origins; start anew")
        self._origins += count
        return self._origins - count + 1

    def retire(self) -> list[list[int]]:
        """[first origin, how many] of the runs and tasks that have ended since this was asked last."""
        over = [run for run in self.runs.values() if run.over and not run.retired]
        for run in over:
            run.retired = True
        return [origins for run in over for origins in run.origins()] + self.tasks.take_ended()

    def only(self) -> Run | None:
        """The run that is going on; None if there is none, or several."""
        active = [run for run in self.runs.values() if run.active and not run.elastic]
        return active[0] if len(active) == 1 else None

    def end(self, number: int) -> bool:
        """The driver is done with a run: nobody joins it any more. Whether it went well, and no other one goes on."""
        run = self.runs.get(number)
        if run is None:  # it ended long ago
            return False
        well = run.stopped is None or run.ended
        if run.stopped is None:
            run.ended = True
            self.stop(number, StoppedError(f"run {number} was closed"))
        return well and not any(run.active and not run.elastic for run in self.runs.values())

    def going_on(self, origin: int) -> bool:
        """Whether the run whose first origin this is goes on."""
        return any(run.origin == origin and run.active for run in self.runs.values())

    def failed(self) -> int:
        """The number of the last run, if it failed; else 0."""
        run = self.runs.get(self._last)
        return 0 if run is None or run.stopped is None or run.ended else run.number

    def describe(self, number: int) -> dict[str, Any]:
        return self.known(number).describe()

    def going(self, number: int = 0) -> list[Run]:
        """The run of that number, or all that go on and have a staleness (0)."""
        going = [self.known(number)] if number else [run for run in self.runs.values() if not (run.over or run.elastic)]
        if not going:
            raise InputError(f"no run of parameter server {self.session!r} goes on whose staleness could be set")
        return going

    def set_staleness(self, staleness: float, number: int = 0, by: str = "") -> list[int]:
        """Another bound for a run, or for all that go on (0), from now on. Returns which ones it was new to.

        Trainers learn of it with the answers to their ticks; one that is too far ahead waits at its next.
        """
        going = self.going(number)
        for run in going:
            released = run.clock.set_staleness(staleness)  # refuses what is no staleness
            if run.staleness != run.clock.staleness:
                before, run.staleness = run.staleness, run.clock.staleness
                text = f"run {run.number}: staleness {run.staleness:g}, before {before:g} {by}".rstrip()
                self.note(text, lambda run=run: not run.over)  # type: ignore[misc]
            self._release(run, released)
        return [run.number for run in going]

    def set_rejoin(self, number: int, seconds: float, setting: str) -> None:
        """Lost trainers of a run may take so long to be back, where that is longer than ``dps.timeouts.rejoin``."""
        run = self.known(number)
        if seconds > (run.rejoin or (self.rejoin,))[0]:
            run.rejoin = seconds, setting

    def stop(self, number: int, error: DPSError) -> None:
        """End a run: all who wait are told now, the others at their next tick."""
        run = self.known(number)
        if run.stopped is None:
            run.stopped = error
        for waiting in (*run.ticking.values(), *run.meeting.values()):
            waiting.fail(run.stopped)
        run.ticking.clear()
        run.meeting.clear()

    def close(self, error: DPSError) -> None:
        for number in self.runs:
            self.stop(number, error)

    # -- frames

    def join(self, connection: Connection, header: Header, body: memoryview) -> None:
        wish = frames.decode_json(body)
        try:
            number, trainer, named = int(wish["run"]), int(wish["trainer"]), wish["incarnation"]
            place, joins = shown(wish.get("where", ""), 200), int(wish.get("joins", 0))
            incarnation = None if named is None else int(named)
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
            raise ProtocolError(f"a trainer's JOIN lacks its run, trainer or incarnation: {wish!r:.200}") from None
        run = self.known(number)
        if run.stopped is not None:
            raise run.stopped.with_traceback(None)  # else each one that is told adds its own
        if connection.party is not None and connection.party != (run, trainer):
            raise ProtocolError("a connection is one trainer: it has joined as another before")
        if incarnation is None:
            incarnation = run.incarnations.get(trainer, -1) + 1
        again = run.incarnations.get(trainer) == incarnation
        if again and joins < run.joins[trainer]:
            raise _replaced(run, trainer)  # out of an older connection, which broke
        if again and run.elastic and trainer in run.left and joins == run.joins[trainer]:
            raise InputError(
                f"trainer {trainer} of run {number} has left, and comes again within one attempt ({incarnation}): are "
                f"two partitions computed by one task (coalesce)? They would be taken for one; use repartition"
            )
        attempt = run.attempts.get(trainer, -1) + (not again)
        if attempt > MOST_ATTEMPTS:
            raise LimitError(f"trainer {trainer} of run {number} was begun {attempt} times already")
        clock = run.clock.join(trainer, incarnation, self.now())
        for waiting in (run.ticking.pop(trainer, None), run.meeting.pop(trainer, None)):
            if waiting is not None:
                waiting.fail(_replaced(run, trainer))
        run.incarnations[trainer], run.attempts[trainer], run.joins[trainer] = incarnation, attempt, joins
        run.connections[trainer] = connection
        run.where[trainer] = place
        if run.watch is not None and not again:
            run.watch.joined(trainer, self.now())
        run.lost.pop(trainer, None)
        run.left.discard(trainer)
        run.gather.join(trainer)
        connection.party = (run, trainer)
        staleness = None if math.isinf(run.staleness) else run.staleness
        told = {"clock": clock, "staleness": staleness, "trainers": run.trainers}
        told |= {"origin": run.origin + trainer, "attempt": attempt, "incarnation": incarnation}
        if run.portions is not None:
            told["portions"] = run.portions.origin
        connection.reply_json(Header(frames.OK, request=header.request), told)

    def tick(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if header.count:
            run.planned[trainer] = header.count
        now = self.now()
        if body:
            run.reported(trainer, lambda: TrainerReport.decode(body), header.clock, now)
        released = run.clock.tick(trainer, header.clock, now)  # refuses one that may not tick
        _await(run.ticking, trainer, Waiting(connection, header, now))
        run.passed(trainer)
        self._release(run, released)

    def lease(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        wish = frames.decode_json(body)
        told = run.leased(trainer, wish, self.now())
        if wish.get("report") is not None:
            run.reported(trainer, lambda: TrainerReport.read(wish["report"]), run.clock.clock_of(trainer), self.now())
        connection.reply_json(Header(frames.OK, request=header.request), told)

    def collect(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if run.elastic:
            raise InputError(f"the trainers of run {run.number} come and go: they cannot meet (barrier, allreduce)")
        if len(body) > COLLECT_LIMIT:
            raise LimitError(f"a collective takes up to {COLLECT_LIMIT} bytes a trainer, not {len(body)}: use a table")
        about = bytes(body[: header.count]).decode(errors="replace").strip()
        place, now = (header.clock, header.number), self.now()
        met = run.gather.recall(about, trainer, place)
        if met is not None:  # the others have gone on since
            _tell(Waiting(connection, header, now), met)
            return
        met = run.gather.arrive(about, trainer, place, bytes(body[header.count :]))
        _await(run.meeting, trainer, Waiting(connection, header, now))
        # Who waits here pushes nothing before the others are here too: it does not hold back their ticks.
        self._release(run, run.clock.leave(trainer, now))
        self._met(run, met)

    def leave(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection, stopped_too=True)
        report = frames.decode_json(body)
        try:
            seconds = {name: float(report["seconds"][name]) for name in SPLIT}
        except (TypeError, KeyError, ValueError, OverflowError):
            raise ProtocolError(f"a trainer's LEAVE lacks its seconds: {report!r:.200}") from None
        if (last := report.get("report")) is not None:
            run.reported(trainer, lambda: TrainerReport.read(last), run.clock.clock_of(trainer), self.now())
        if run.elastic and report.get("failed"):
            self.disconnected(connection)  # it may be run again
        else:
            run.left.add(trainer)
            del run.connections[trainer]
            run.returned(trainer, for_good=True)
        run.seconds[trainer] = seconds
        connection.party = None
        connection.reply(Header(frames.OK, request=header.request))
        if trainer not in run.left:
            return
        if report.get("failed"):
            self.stop(run.number, StoppedError(f"trainer {trainer} failed: {shown(report['failed'], 1000)}"))
        else:
            self._gone(run, trainer)

    def reserve(self, connection: Connection, header: Header, body: memoryview) -> None:
        wish = frames.decode_json(body)
        try:
            run, name, count = self.known(int(wish["run"])), check_name("trainer", wish["name"]), int(wish["count"])
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise _unread("RESERVE", "run, name or count", wish, error) from None
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
        connection.reply_json(Header(frames.OK, request=header.request), {"first": first})

    def peek(self, connection: Connection, header: Header, body: memoryview) -> None:
        wish = frames.decode_json(body)
        try:
            run, trainer = self.known(int(wish["run"])), int(wish["trainer"])
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise _unread("PEEK", "run or trainer", wish, error) from None
        told = {"incarnation": run.incarnations.get(trainer), "state": run.state(trainer)}
        told |= {"stopped": None if run.stopped is None else str(run.stopped)}
        connection.reply_json(Header(frames.OK, request=header.request), told)

    def origin(self, connection: Connection, header: Header, body: memoryview) -> None:
        wish = frames.decode_json(body)
        try:
            key, run, client = decode_key(wish["task"]), int(wish["run"]), int(wish["client"])
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise _unread("ORIGIN", "task, run or client", wish, error) from None
        found = self.task(key)
        if found is None:
            raise StoppedError(
                f"the scheduler knows no task {key!r} any more: it was cancelled, or its futures were released, so its "
                f"pushes do not count"
            )
        origin, attempt = self.tasks.of(key, *found, run, client)
        connection.reply_json(Header(frames.OK, request=header.request), {"origin": origin, "attempt": attempt})

    def disconnected(self, connection: Connection) -> None:
        """A trainer's connection broke without LEAVE."""
        if connection.party is not None:
            run, trainer = connection.party
            if run.connections.get(trainer) is connection:
                run.connections.pop(trainer)
                run.ticking.pop(trainer, None)
                run.meeting.pop(trainer, None)
                run.lost[trainer] = self.now()
                run.clock.lost(trainer, run.lost[trainer])
                run.returned(trainer)

    def look(self) -> None:
        """Now and then: give up the lost, answer those who have waited too long."""
        now = self.now()
        if now - self._swept > SWEEP:
            self._swept = now
            self.tasks.sweep(lambda key, life: (self.task(key) or (None,))[0] is life)
        for run in list(self.runs.values()):
            if run.stopped is not None:
                continue
            rejoin, setting = run.rejoin or (self.rejoin, "dps.timeouts.rejoin")
            for trainer in [t for t, since in run.lost.items() if now - since > rejoin and not run.elastic]:
                place = run.where.get(trainer, "?")
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
                absent = sorted(set(range(run.trainers)) - run.meeting.keys() - run.left - {trainer})
                text = (
                    f"trainer {trainer} has waited {now - waiting.since:.0f} s in a barrier or another collective; "
                    f"not there: trainers {', '.join(map(str, absent))}. All must make the same collective calls; "
                    f"the limit is {config.limit('clock', self.patience)}"
                )
                waiting.fail(ClockTimeoutError(text))

    # -- inside

    def known(self, number: int) -> Run:
        """The run of that number."""
        run = self.runs.get(number)
        if run is None:
            raise InputError(f"parameter server {self.session!r} has no run number {number}")
        return run

    def _party(self, connection: Connection, stopped_too: bool = False) -> tuple[Run, int]:
        if connection.party is None:
            raise ProtocolError("a tick, collective or leave by somebody who has not joined")
        run, trainer = connection.party
        if run.connections.get(trainer) is not connection:
            raise _replaced(run, trainer)
        if run.stopped is not None and not stopped_too:
            raise run.stopped.with_traceback(None)  # else each one that is told adds its own
        return run, trainer

    def _release(self, run: Run, trainers: list[int]) -> None:
        """Answer the ticks of trainers that may go on."""
        bound = int(min(run.staleness + 1, frames.NO_BOUND))
        told = Header(frames.OK, parties=run.trainers - len(run.left), start=bound)
        for trainer in trainers:
            waiting = run.ticking.pop(trainer, None)
            if waiting is not None:
                waiting.connection.reply(told._replace(request=waiting.header.request))

    def _gone(self, run: Run, trainer: int) -> None:
        """A trainer left in order: the others no longer wait for it."""
        self._release(run, run.clock.leave(trainer, self.now()))
        self._met(run, run.gather.leave(trainer))

    def _met(self, run: Run, meeting: Meeting | None) -> None:
        """Everybody is there, or was: all go on, and count again."""
        if meeting is None:
            return
        now = self.now()
        for trainer in meeting.places:
            run.clock.join(trainer, run.incarnations[trainer], now)
            if trainer in run.lost:  # after it had brought its part: it will ask again
                run.clock.lost(trainer, now)
        for waiting in run.meeting.values():
            _tell(waiting, meeting)
        run.meeting.clear()


def _unread(kind: str, fields: str, wish: Any, error: Exception) -> DPSError:
    """What is wrong with a frame's JSON, unless it is about the run."""
    return error if isinstance(error, DPSError) else ProtocolError(f"a {kind} lacks its {fields}: {wish!r:.200}")


def _await(waiting: dict[int, Waiting], trainer: int, request: Waiting) -> None:
    """Keep a request until it can be answered. A trainer has one such request: an earlier one is refused now, because
    otherwise nothing would ever answer it."""
    earlier, waiting[trainer] = waiting.get(trainer), request
    if earlier is not None and earlier.header.request != request.header.request:
        earlier.fail(
            InputError(
                f"trainer {trainer} asked again (clock {request.header.clock}) before its request of clock "
                f"{earlier.header.clock} was answered: only the later one counts"
            )
        )


def _replaced(run: Run, trainer: int) -> StoppedError:
    return StoppedError(
        f"trainer {trainer} of run {run.number} has joined again (its task was run again, or its connection broke): "
        f"what comes over this connection counts no more"
    )


def _tell(waiting: Waiting, meeting: Meeting) -> None:
    if isinstance(meeting.answer, DPSError):
        waiting.fail(meeting.answer)
    else:
        waiting.connection.reply(Header(frames.OK, request=waiting.header.request), meeting.answer)
