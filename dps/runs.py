"""Runs: the controller's data plane. Trainers join, tick, meet and leave; here the rules of `coordination/clock.py`
meet sockets and wall time.

Everything in this file happens in the controller's endpoint thread. A tick that may not pass yet is remembered and
answered when a slower trainer's tick (or leaving) lets it go; other frames of the same connection go on meanwhile.

======== ===================================== ========================================================
frame    from the trainer                      answer
======== ===================================== ========================================================
JOIN     JSON run, trainer, incarnation, where JSON clock (to go on at), staleness, trainers
TICK     clock: iterations completed;          when it may go on: parties: trainers that count
         count: iterations planned (0 unknown)
COLLECT  JSON about (op, dtype, shape, root)   the reduced array, raw
         then the array, raw; number: round
LEAVE    JSON failed (a text, or null),        nothing, when it is noted
         seconds (compute, pull, push, wait)
======== ===================================== ========================================================

A trainer whose connection breaks without LEAVE is *lost*. If it is not back within `dps.timeouts.vanish`, the run is
stopped: every waiting trainer gets the reason at once, every other one at its next tick.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dps import config
from dps.coordination.clock import Clock
from dps.coordination.gather import Gather
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
from dps.wire.frames import Header, encode_header

__all__ = ["Run", "Runs"]

COLLECT_LIMIT = 1 << 24  # bytes of one trainer's part of a collective: they are for small things
REDUCTIONS: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


class Run:
    """One `ps.run`: its clock, who waits, and how it ended."""

    def __init__(self, number: int, trainers: int, staleness: float):
        self.number, self.trainers, self.staleness = number, trainers, staleness
        self.clock = Clock(staleness, trainers)
        self.gather = Gather(trainers)
        self.connections: dict[int, Connection] = {}
        self.incarnations: dict[int, int] = {}
        self.where: dict[int, str] = {}
        self.planned: dict[int, int] = {}
        self.seconds: dict[int, dict[str, float]] = {}
        self.ticking: dict[int, Header] = {}  # trainers whose tick waits
        self.meeting: dict[int, Header] = {}  # trainers whose collective waits,
        self.met: dict[int, float] = {}  # and since when
        self.lost: dict[int, float] = {}  # trainer -> when its connection broke
        self.left: set[int] = set()
        self.stopped: DPSError | None = None

    @property
    def active(self) -> bool:
        """Whether trainers are at work, or may be back."""
        return self.stopped is None and bool(self.connections or self.lost)

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
            "connected": sorted(self.connections),
            "lost": sorted(self.lost),
            "seconds": {str(n): split for n, split in self.seconds.items()},
            "stopped": None if self.stopped is None else str(self.stopped),
            "error": None if self.stopped is None else type(self.stopped).__name__,
        }


class Runs:
    """All runs of one parameter server."""

    def __init__(self, session: str):
        self.session = session
        self.patience, self.vanish = config.seconds("clock"), config.seconds("vanish")
        self.runs: dict[int, Run] = {}
        self._last = 0

    # -- the driver's side

    def start(self, trainers: int, staleness: float | None, collecting: Sequence[str] = ()) -> int:
        """A new run of that many trainers; its number. `collecting` are the tables that collect a clock's pushes."""
        active = [n for n, run in self.runs.items() if run.active]
        if active and collecting:
            raise InputError(
                f"run {active[0]} of parameter server {self.session!r} is going on, and table {collecting[0]!r} "
                f"collects the pushes of a clock (aggregate=...), of one run at a time; wait for its end"
            )
        self._last += 1
        self.runs[self._last] = Run(self._last, trainers, math.inf if staleness is None else staleness)
        for number in [n for n, run in self.runs.items() if run.stopped or len(run.left) == run.trainers][:-16]:
            del self.runs[number]  # the last few are kept to be asked about
        return self._last

    def describe(self, number: int) -> dict[str, Any]:
        return self._run(number).describe()

    def stop(self, number: int, error: DPSError) -> None:
        """End a run: all who wait are told now, the others at their next tick."""
        run = self._run(number)
        if run.stopped is None:
            run.stopped = error
        for trainer, header in [*run.ticking.items(), *run.meeting.items()]:
            if trainer in run.connections:
                run.connections[trainer].reply_error(header, run.stopped)
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
        except (TypeError, KeyError, ValueError):
            raise ProtocolError(f"a trainer's JOIN lacks its run, trainer or incarnation: {wish!r}") from None
        run = self._run(number)
        if run.stopped is not None:
            raise run.stopped
        clock = run.clock.join(trainer, incarnation, time.monotonic())
        run.incarnations[trainer] = incarnation
        run.connections[trainer] = connection
        run.where[trainer] = str(wish.get("where", ""))[:200]
        run.lost.pop(trainer, None)
        run.left.discard(trainer)
        run.gather.join(trainer)
        connection.party = (run, trainer, incarnation)
        staleness = None if math.isinf(run.staleness) else run.staleness
        answer = {"clock": clock, "staleness": staleness, "trainers": run.trainers}
        connection.reply_json(Header(frames.OK, request=header.request), answer)

    def tick(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if header.count:
            run.planned[trainer] = header.count
        run.ticking[trainer] = header
        self._release(run, run.clock.tick(trainer, header.clock, time.monotonic()))

    def collect(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection)
        if len(body) > COLLECT_LIMIT:
            raise LimitError(f"a collective takes up to {COLLECT_LIMIT} bytes a trainer, not {len(body)}: use a table")
        about = bytes(body[: header.count]).decode(errors="replace").strip()
        arrived = run.gather.arrive(f"{header.number} {about}", trainer, bytes(body[header.count :]))
        now = time.monotonic()
        run.meeting[trainer], run.met[trainer] = header, now
        # Who waits here pushes nothing before the others are here too: it does not hold back their ticks.
        self._release(run, run.clock.leave(trainer, now))
        self._met(run, about, arrived)

    def leave(self, connection: Connection, header: Header, body: memoryview) -> None:
        run, trainer = self._party(connection, stopped_too=True)
        report = frames.decode_json(body)
        run.left.add(trainer)
        run.connections.pop(trainer, None)
        run.seconds[trainer] = {str(k): float(v) for k, v in dict(report.get("seconds") or {}).items()}
        connection.party = None
        connection.reply(Header(frames.OK, request=header.request))
        if report.get("failed"):
            self.stop(run.number, StoppedError(f"trainer {trainer} failed: {report['failed']}"))
        else:
            self._gone(run, trainer)

    def disconnected(self, connection: Connection) -> None:
        """A trainer's connection broke without LEAVE."""
        if connection.party is not None:
            run, trainer, _ = connection.party
            if run.connections.get(trainer) is connection:
                run.connections.pop(trainer)
                run.ticking.pop(trainer, None)
                run.meeting.pop(trainer, None)
                run.lost[trainer] = time.monotonic()
                run.clock.lost(trainer, run.lost[trainer])

    def look(self) -> None:
        """Now and then: give up the lost, answer those who have waited too long."""
        now, vanish = time.monotonic(), self.vanish
        for run in list(self.runs.values()):
            if run.stopped is not None:
                continue
            for trainer in [t for t, since in run.lost.items() if now - since > vanish]:
                place = run.where.get(trainer, "?")
                clock = run.clock.clock_of(trainer)
                self.stop(
                    run.number,
                    TrainerLostError(
                        f"trainer {trainer} of run {run.number} (on {place}) vanished at clock {clock} and was not "
                        f"back within {vanish:g} s (dps.timeouts.vanish); did its worker die, or run out of memory?"
                    ),
                )
            for trainer in run.clock.overdue(now, self.patience):
                header = run.ticking.pop(trainer, None)
                if header is not None and trainer in run.connections:
                    text = run.clock.explain(trainer, now)
                    run.connections[trainer].reply_error(header, ClockTimeoutError(text))
            for trainer in [t for t in run.meeting if now - run.met[t] > self.patience]:
                header = run.meeting.pop(trainer)
                absent = sorted(set(range(run.trainers)) - run.meeting.keys() - run.left - {trainer})
                text = (
                    f"trainer {trainer} has waited {now - run.met[trainer]:.0f} s in a barrier or another collective; "
                    f"not there: trainers {', '.join(map(str, absent))}. All must make the same collective calls; "
                    f"dps.timeouts.clock is the limit"
                )
                run.connections[trainer].reply_error(header, ClockTimeoutError(text))

    # -- inside

    def _run(self, number: int) -> Run:
        run = self.runs.get(number)
        if run is None:
            raise InputError(f"parameter server {self.session!r} has no run number {number}")
        return run

    def _party(self, connection: Connection, stopped_too: bool = False) -> tuple[Run, int]:
        if connection.party is None:
            raise ProtocolError("a tick, collective or leave by somebody who has not joined")
        run, trainer, incarnation = connection.party
        run.clock.check(trainer, incarnation)
        if run.stopped is not None and not stopped_too:
            raise run.stopped
        return run, trainer

    def _release(self, run: Run, trainers: list[int]) -> None:
        """Answer the ticks of trainers that may go on."""
        answer = Header(frames.OK, parties=run.trainers - len(run.left))
        for trainer in trainers:
            header = run.ticking.pop(trainer, None)
            if header is not None and trainer in run.connections:
                run.connections[trainer].transport.write(encode_header(answer, header.request))

    def _gone(self, run: Run, trainer: int) -> None:
        """A trainer left in order: the others no longer wait for it."""
        self._release(run, run.clock.leave(trainer, time.monotonic()))
        tag, arrived = run.gather.leave(trainer)
        if tag is not None:
            self._met(run, tag.partition(" ")[2], arrived)

    def _met(self, run: Run, about: str, arrived: dict[int, bytes] | None) -> None:
        """Everybody is there: reduce, and answer all."""
        if arrived is None:
            return
        try:
            result, error = reduce(about, arrived), None
        except DPSError as failure:
            result, error = b"", failure
        for trainer, header in run.meeting.items():
            run.clock.join(trainer, run.incarnations[trainer], time.monotonic())
            if trainer in run.connections:
                if error is not None:
                    run.connections[trainer].reply_error(header, error)
                else:
                    run.connections[trainer].reply(Header(frames.OK, request=header.request), result)
        run.meeting.clear()


def reduce(about: str, parts: dict[int, bytes]) -> bytes:
    """What a collective answers: in trainer order, so that the same parts give the same bits."""
    try:
        wish = frames.decode_json(about.encode())
        op, shape, dtype = wish["op"], tuple(wish["shape"]), np.dtype(wish["dtype"])
        arrays = [np.frombuffer(parts[n], dtype, math.prod(shape)).reshape(shape) for n in sorted(parts)]
        if op == "barrier":
            return b""
        if op == "broadcast":
            root = int(wish["root"])
            if root not in parts:
                raise InputError(f"broadcast from trainer {root}, which is not in the run (any more)")
            return parts[root]
        result = np.ascontiguousarray(REDUCTIONS[op](np.stack(arrays), axis=0), dtype).tobytes()
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise (
            error if isinstance(error, DPSError) else InputError(f"a collective that cannot be done: {about}: {error}")
        ) from None
    return result.ljust(frames.padded(len(result)), b"\0")
