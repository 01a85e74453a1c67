"""Runs: the controller's data plane. Trainers join, tick, meet and leave; here the rules of `coordination/clock.py`
meet sockets and wall time.

Everything in this file happens in the controller's endpoint thread. A tick that may not pass yet is remembered and
answered when a slower trainer's tick (or leaving) lets it go; other frames of the same connection go on meanwhile.

======== ===================================== ========================================================
frame    from the trainer                      answer
======== ===================================== ========================================================
JOIN     JSON run, trainer, incarnation,       JSON clock (to go on at), staleness, trainers,
         where, joins (how often before)       origin, attempt
TICK     clock: iterations completed;          when it may go on: parties: trainers that count
         count: iterations planned (0 unknown)
COLLECT  JSON about (op, dtype, shape, root)   the reduced array, raw
         then the array, raw; clock and
         number: the place, see `gather.py`
LEAVE    JSON failed (a text, or null),        nothing, when it is noted
         seconds (compute, pull, push, wait)
======== ===================================== ========================================================

A trainer whose connection breaks without LEAVE is *lost*. If it is not back within `dps.timeouts.rejoin`, the run is
stopped: every waiting trainer gets the reason at once, every other one at its next tick.

Twice, late, out of date. A trainer is the *connection* that joined last for it. JOIN may come again: over another
connection, of the same incarnation (the first one broke) or a later one (the task was run again); an earlier one is
refused. Whatever else comes over a connection that is no longer the trainer's (the frames of a zombie, what was still
on its way, its LEAVE, its end) changes nothing, and what waited there is told so. Each distinct incarnation is one
*attempt*, which the servers know the ops of; the *origin* is the trainer's number among all that make ops.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps import config
from dps.coordination.clock import Clock
from dps.coordination.gather import Gather, Meeting
from dps.errors import (
    ClockTimeoutError,
    DPSError,
    InputError,
    LimitError,
    ProtocolError,
    StoppedError,
    TrainerLostError,
)
from dps.wire import frames
from dps.wire.endpoint import Connection
from dps.wire.frames import Header

__all__ = ["Run", "Runs"]

COLLECT_LIMIT = 1 << 24  # bytes of one trainer's part of a collective: they are for small things
SPLIT = ("compute", "pull", "push", "wait")
MOST_ORIGINS, MOST_ATTEMPTS = (1 << 32) - 1, (1 << 16) - 1  # their fields in a frame hold no more
NUMBERS: Any = re.compile("[<>|][biufc][0-9]{1,2}")  # dtypes; numpy takes much more
REDUCTIONS: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


class Waiting(NamedTuple):
    """A request whose answer is still to come."""

    connection: Connection
    header: Header
    since: float

    def fail(self, error: DPSError) -> None:
        self.connection.reply_error(self.header, error)


class Run:
    """One `ps.run`: its clock, who waits, and how it ended."""

    def __init__(self, number: int, trainers: int, staleness: float, clock: int = 0):
        self.number, self.trainers, self.staleness = number, trainers, staleness
        self.origin = 0  # of trainer 0; the others follow
        self.partitions: list[list[int]] = []  # of each trainer, as the driver counts them
        self.clock = Clock(staleness, trainers, clock)
        self.gather = Gather(trainers, answer)
        self.connections: dict[int, Connection] = {}
        self.incarnations: dict[int, int] = {}
        self.attempts: dict[int, int] = {}  # from 0
        self.joins: dict[int, int] = {}  # how often this attempt had joined
        self.where: dict[int, str] = {}
        self.planned: dict[int, int] = {}
        self.seconds: dict[int, dict[str, float]] = {}
        self.ticking: dict[int, Waiting] = {}  # trainers whose tick waits,
        self.meeting: dict[int, Waiting] = {}  # or whose collective does
        self.lost: dict[int, float] = {}  # trainer -> when its connection broke
        self.left: set[int] = set()
        self.stopped: DPSError | None = None
        self.retired = False  # the servers were told that its trainers have ended

    @property
    def over(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.stopped is not None or len(self.left) == self.trainers

    @property
    def active(self) -> bool:
        """Whether trainers are at work, or may be back."""
        return self.stopped is None and bool(self.connections or self.lost)

    def saved(self, clock: int | None) -> dict[str, Any]:
        """For a checkpoint: what it takes to go on from `clock`."""
        staleness = None if math.isinf(self.staleness) else self.staleness
        about = {"trainers": self.trainers, "staleness": staleness, "origin": self.origin, "clock": clock}
        return {**about, "partitions": self.partitions}

    def behind(self, clock: int) -> int | None:
        """One of those, not gone for good, who have yet to complete `clock` iterations. (Who waits in a collective may
        push at its own clock afterwards.)"""
        there = (n for n in range(self.trainers) if n not in self.left)
        return next((n for n in there if self.clock.clock_of(n) < clock), None)

    def describe(self) -> dict[str, Any]:
        """For the driver: clocks, plans, who waits."""
        return {
            "run": self.number,
            "staleness": None if math.isinf(self.staleness) else self.staleness,
            "clocks": [self.clock.clock_of(n) for n in range(self.trainers)],
            "planned": [self.planned.get(n, 0) for n in range(self.trainers)],
            "waiting": sorted(self.ticking),
            "left": sorted(self.left),
            "joined": len(self.where),
            "attempts": [self.attempts.get(n, -1) + 1 for n in range(self.trainers)],
            "connected": sorted(self.connections),
            "lost": sorted(self.lost),
            "seconds": {str(n): split for n, split in self.seconds.items()},
            "stopped": None if self.stopped is None else str(self.stopped),
            "error": None if self.stopped is None else type(self.stopped).__name__,
        }


class Runs:
    """All runs of one parameter server.

    `now` tells the time; all waiting is measured by it.
    """

    def __init__(self, session: str, now: Callable[[], float] = time.monotonic):
        self.session, self.now = session, now
        self.patience, self.rejoin = config.seconds("clock"), config.seconds("rejoin")
        self.runs: dict[int, Run] = {}
        self._last = self._origins = 0

    # -- the driver's side

    def start(
        self,
        trainers: int,
        staleness: float | None,
        collecting: Sequence[str] = (),
        restored: dict[str, Any] | None = None,
        partitions: Sequence[Sequence[int]] = (),
    ) -> int:
        """A new run of that many trainers; its number. `collecting` are the tables that collect a clock's pushes.

        With `restored`, it goes on with the run of a checkpoint: at its clock, as its origins.
        """
        active = [n for n, run in self.runs.items() if run.active]
        if active and collecting:
            raise InputError(
                f"run {active[0]} of parameter server {self.session!r} is going on, and table {collecting[0]!r} "
                f"collects the pushes of a clock (aggregate=...), of one run at a time; wait for its end"
            )
        clock = 0 if restored is None else restored["clock"]
        run = Run(self._last + 1, trainers, math.inf if staleness is None else staleness, clock)
        run.origin = self.allot(trainers) if restored is None else restored["origin"]
        run.partitions = [list(part) for part in partitions]
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
        """[first origin, how many] of the runs that have ended since this was asked last: nobody is to hear of them."""
        over = [run for run in self.runs.values() if run.over and not run.retired]
        for run in over:
            run.retired = True
        return [[run.origin, run.trainers] for run in over]

    def only(self) -> Run | None:
        """The run that is going on; None if there is none, or several."""
        active = [run for run in self.runs.values() if run.active]
        return active[0] if len(active) == 1 else None

    def going_on(self, origin: int) -> bool:
        """Whether the run whose first origin this is goes on."""
        return any(run.origin == origin and run.active for run in self.runs.values())

    def failed(self) -> int:
        """The number of the last run, if it failed; else 0."""
        run = self.runs.get(self._last)
        return 0 if run is None or run.stopped is None else run.number

    def describe(self, number: int) -> dict[str, Any]:
        return self._run(number).describe()

    def stop(self, number: int, error: DPSError) -> None:
        """End a run: all who wait are told now, the others at their next tick."""
        run = self._run(number)
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
            number, trainer, incarnation = int(wish["run"]), int(wish["trainer"]), int(wish["incarnation"])
            place, joins = str(wish.get("where", ""))[:200], int(wish.get("joins", 0))
        except (AttributeError, TypeError, KeyError, ValueError, OverflowError):
            raise ProtocolError(f"a trainer's JOIN lacks its run, trainer or incarnation: {wish!r:.200}") from None
        run = self._run(number)
        if run.stopped is not None:
            raise run.stopped.with_traceback(None)  # else each one that is told adds its own
        if connection.party is not None and connection.party != (run, trainer):
            raise ProtocolError("a connection is one trainer: it has joined as another before")
        again = run.incarnations.get(trainer) == incarnation
        if again and joins < run.joins[trainer]:
            raise _replaced(run, trainer)  # out of an older connection, which broke
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
        run.lost.pop(trainer, None)
        run.left.discard(trainer)
        run.gather.join(trainer)
        connection.party = (run, trainer)
        staleness = None if math.isinf(run.staleness) else run.staleness
        told = {"clock": clock, "staleness": staleness, "trainers": run.trainers}
        told |= {"origin": run.origin + trainer, "attempt": attempt}
        connection.reply_json(Header(frames.OK, request=header.request), told)

    def tick(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if header.count:
            run.planned[trainer] = header.count
        now = self.now()
        released = run.clock.tick(trainer, header.clock, now)  # refuses one that may not tick
        run.ticking[trainer] = Waiting(connection, header, now)
        self._release(run, released)

    def collect(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if len(body) > COLLECT_LIMIT:
            raise LimitError(f"a collective takes up to {COLLECT_LIMIT} bytes a trainer, not {len(body)}: use a table")
        about = bytes(body[: header.count]).decode(errors="replace").strip()
        place, now = (header.clock, header.number), self.now()
        met = run.gather.recall(about, trainer, place)
        if met is not None:  # the others have gone on since
            _tell(Waiting(connection, header, now), met)
            return
        met = run.gather.arrive(about, trainer, place, bytes(body[header.count :]))
        run.meeting[trainer] = Waiting(connection, header, now)
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
        run.left.add(trainer)
        del run.connections[trainer]
        run.seconds[trainer] = seconds
        connection.party = None
        connection.reply(Header(frames.OK, request=header.request))
        if report.get("failed"):
            self.stop(run.number, StoppedError(f"trainer {trainer} failed: {str(report['failed'])[:1000]}"))
        else:
            self._gone(run, trainer)

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

    def look(self) -> None:
        """Now and then: give up the lost, answer those who have waited too long."""
        now, rejoin = self.now(), self.rejoin
        for run in list(self.runs.values()):
            if run.stopped is not None:
                continue
            for trainer in [t for t, since in run.lost.items() if now - since > rejoin]:
                place = run.where.get(trainer, "?")
                clock = run.clock.clock_of(trainer)
                self.stop(
                    run.number,
                    TrainerLostError(
                        f"trainer {trainer} of run {run.number} (on {place}) vanished at clock {clock} and was not "
                        f"back within {rejoin:g} s (dps.timeouts.rejoin); did its worker die, or run out of memory?"
                    ),
                )
            for trainer in run.clock.overdue(now, self.patience):
                if (waiting := run.ticking.pop(trainer, None)) is not None:
                    waiting.fail(ClockTimeoutError(run.clock.explain(trainer, now)))
            for trainer in [t for t, waiting in run.meeting.items() if now - waiting.since > self.patience]:
                waiting = run.meeting.pop(trainer)
                absent = sorted(set(range(run.trainers)) - run.meeting.keys() - run.left - {trainer})
                text = (
                    f"trainer {trainer} has waited {now - waiting.since:.0f} s in a barrier or another collective; "
                    f"not there: trainers {', '.join(map(str, absent))}. All must make the same collective calls; "
                    f"dps.timeouts.clock is the limit"
                )
                waiting.fail(ClockTimeoutError(text))

    # -- inside

    def _run(self, number: int) -> Run:
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
        told = Header(frames.OK, parties=run.trainers - len(run.left))
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


def answer(about: str, parts: dict[int, bytes]) -> bytes | DPSError:
    """What all who meet are told."""
    try:
        return reduce(about, parts)
    except DPSError as error:
        return error


def reduce(about: str, parts: dict[int, bytes]) -> bytes:
    """What a collective answers: in trainer order, so that the same parts give the same bits."""
    try:
        wish = frames.decode_json(about.encode())
        op, shape, dtype = wish["op"], tuple(wish["shape"]), np.dtype(NUMBERS.fullmatch(wish["dtype"])[0])
        arrays = [np.frombuffer(parts[n], dtype, math.prod(shape)).reshape(shape) for n in sorted(parts)]
        if op == "barrier":
            return b""
        if op == "broadcast":
            root = int(wish["root"])
            if root not in parts:
                raise InputError(f"broadcast from trainer {root}, which is not in the run (any more)")
            return parts[root].ljust(frames.padded(len(parts[root])), b"\0")
        result = np.ascontiguousarray(REDUCTIONS[op](np.stack(arrays), axis=0), dtype).tobytes()
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        raise (
            error if isinstance(error, DPSError) else InputError(f"a collective that cannot be done: {about}: {error}")
        ) from None
    return result.ljust(frames.padded(len(result)), b"\0")
