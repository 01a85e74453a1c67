"""Run: what the controller knows of one run; its rules are in `runs.py`."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from dps.coordination.clock import Clock
from dps.coordination.gather import Gather
from dps.errors import DPSError, InputError
from dps.portions import Portions
from dps.reductions import answer
from dps.reports import TrainerReport
from dps.run_watch import RunWatch
from dps.wire.endpoint import Connection
from dps.wire.frames import Header

__all__ = ["Run", "Waiting"]

logger = logging.getLogger(__name__)

WATCHED = 4096  # trainers of a run, at most, whose reports are kept


class Waiting(NamedTuple):
    """A request whose answer is still to come."""

    connection: Connection
    header: Header
    since: float

    def fail(self, error: DPSError) -> None:
        self.connection.reply_error(self.header, error)


class Run:
    """One `ps.run`: its clock, who waits, and how it ended."""

    def __init__(self, number: int, trainers: int, staleness: float, clock: int = 0, elastic: bool = False):
        self.number, self.trainers, self.staleness, self.elastic = number, trainers, staleness, elastic
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
        self.rejoin: tuple[float, str] | None = None  # seconds until it must be back, and which setting says so
        self.left: set[int] = set()
        self.reserved: dict[str, tuple[int, int]] = {}  # name -> first number, how many
        self.stopped: DPSError | None = None
        self.ended = False  # by the driver, in good order
        self.began = time.time()
        self.finish: float | None = None
        self.watch: RunWatch | None = RunWatch(trainers) if trainers <= WATCHED else None
        self.portions: Portions | None = None  # of work that is re-assigned
        self.retired = False  # the servers were told that its trainers have ended

    @property
    def over(self) -> bool:
        """Whether it has ended, well or badly."""
        return self.stopped is not None or (len(self.left) == self.trainers and not self.elastic)

    @property
    def active(self) -> bool:
        """Whether trainers are at work, or may be back."""
        return self.stopped is None and bool(self.connections or (self.lost and not self.elastic))

    def saved(self, clock: int | None) -> dict[str, Any]:
        """For a checkpoint: what it takes to go on from `clock`."""
        staleness = None if math.isinf(self.staleness) else self.staleness
        about: dict[str, Any] = {"trainers": self.trainers, "staleness": staleness, "clock": clock}
        about |= {"origin": self.origin}
        about |= {"reassign": self.portions is not None, "origins": self.origins()}
        return {**about, "partitions": self.partitions}

    def origins(self) -> list[list[int]]:
        """[first, how many] of those that made its ops."""
        portions = [] if self.portions is None else [[self.portions.origin, self.portions.total]]
        return [[self.origin, self.trainers], *portions]

    def leased(self, trainer: int, wish: Any, now: float) -> dict[str, Any]:
        """What a trainer is told about portions."""
        if self.portions is None:
            raise InputError(f"run {self.number} was begun without reassign=True: there is nothing to lease")

        def held_back() -> bool:
            there = (n for n in range(self.trainers) if n != trainer and n not in self.left and n not in self.meeting)
            next_clock = self.clock.clock_of(trainer) + 1
            return any(next_clock - self.clock.clock_of(n) > self.staleness for n in there)

        return self.portions.asked(trainer, wish, now, held_back)

    def passed(self, trainer: int) -> None:
        """A trainer has ticked."""
        if self.portions is not None:
            # those that wait in a collective included
            clocks = [self.clock.clock_of(n) for n in range(self.trainers) if n not in self.left]
            self.portions.ticked(trainer, self.clock.clock_of(trainer), min(clocks))

    def returned(self, trainer: int, for_good: bool = False) -> None:
        """A trainer is lost, or has left: what it held is for others."""
        if self.portions is not None:
            self.portions.lost(trainer, for_good)

    def behind(self, clock: int) -> int | None:
        """One of those, not gone for good, who have yet to complete `clock` iterations. (Who waits in a collective may
        push at its own clock afterwards.)"""
        there = (n for n in range(self.trainers) if n not in self.left)
        return next((n for n in there if self.clock.clock_of(n) < clock), None)

    def state(self, trainer: int) -> str:
        """What has become of a trainer."""
        if trainer in self.connections:
            return "joined"
        return "left" if trainer in self.left else "lost" if trainer in self.lost else "expected"

    def working(self, trainer: int) -> str:
        """As `state`; of those that have joined, whether they wait."""
        state = self.state(trainer)
        if state != "joined":
            return state
        return "waiting" if trainer in self.ticking or trainer in self.meeting else "running"

    def reported(self, trainer: int, read: Callable[[], TrainerReport], clock: int, now: float) -> None:
        """What a trainer says of its work; nothing that may be wrong with it stops anybody."""
        if self.watch is not None:
            try:
                self.watch.reported(trainer, self.attempts.get(trainer, 0), read(), clock, now)
            except Exception:
                self.unwatched()

    def unwatched(self) -> None:
        """Looking at it has failed, which must not harm it."""
        logger.exception("run %d goes on, and nobody looks any more who is slow in it", self.number)
        self.watch = None

    def describe(self) -> dict[str, Any]:
        """For the driver: clocks, plans, who waits, who is slow."""
        return {
            "run": self.number,
            "staleness": None if math.isinf(self.staleness) else self.staleness,
            "auto": self.watch is not None and self.watch.auto is not None,
            "clocks": [self.clock.clock_of(n) for n in range(self.trainers)],
            "planned": [self.planned.get(n, 0) for n in range(self.trainers)],
            "waiting": sorted(self.ticking),
            "left": sorted(self.left),
            "joined": len(self.where),
            "attempts": [self.attempts.get(n, -1) + 1 for n in range(self.trainers)],
            "connected": sorted(self.connections),
            "lost": sorted(self.lost),
            "seconds": {str(n): split for n, split in self.seconds.items()},
            "stragglers": [] if self.watch is None else self.watch.stragglers(),
            "portions": None if self.portions is None else self.portions.describe(),
            "metrics": {} if self.watch is None else self.watch.latest(),
            "stopped": None if self.stopped is None else str(self.stopped),
            "error": None if self.stopped is None else type(self.stopped).__name__,
        }
