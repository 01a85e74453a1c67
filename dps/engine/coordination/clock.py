"""The clock of a run: which trainers may go on. Pure: no threads, no sockets, and time is an argument.

Theory of operation
-------------------
A run has a fixed number of trainers. Each counts the iterations it has completed: that number is its **clock**. It
starts at 0 and only grows. The run has one number, its **staleness** s (0, 1, 2, ... or infinity), and one promise:

    A pull by a trainer at clock c sees every push that any trainer made before its clock c - s.

A trainer sends TICK(c) after the pushes of its first c iterations were acknowledged, that is, are on the servers. So
the promise holds if no trainer pulls at clock c before all the others have ticked c - s:

    A trainer at clock c may go on if and only if  c - min(clocks of all trainers that count) <= s.

s = 0 is bulk-synchronous (BSP), a finite s stale-synchronous (SSP), infinity asynchronous (ASP). The slowest trainer is
the minimum itself and never waits, so some trainer can always go on. What published systems get wrong, and this file
does not: the rule says *minimum over trainers*, not a number of ticks divided by trainers (a fast trainer's ticks must
not stand in for a slow one's); it says ``<=``, not ``==`` (a minimum may rise by more than one at once when a trainer
leaves); and whenever the minimum rises, *all* trainers that may go on are released, not one.

Which trainers count:

============ ====== ==================================================================================
a trainer    counts
============ ====== ==================================================================================
expected     yes    not joined yet: at the first clock, else the early ones would run ahead of the late
joined       yes    at its clock
lost         yes    its connection broke; it may come back, and its pushes of this clock are missing
left         no     it is done. Should it join again, it counts again, at the clock it had
vacant       no     a seat that no trainer has taken yet, in a run that trainers may join while it goes on
============ ====== ==================================================================================

Trainers that come and go
-------------------------
A run may have **vacant** seats. A trainer that takes one begins at the *minimum*: below it, the minimum would fall, and
trainers that went on because of it could have read rows without pushes that are still to come; above it, a trainer
could be more than s ahead of the slowest. In such a run a trainer that has left, or was given up because it was lost
for too long, and comes again, begins at the minimum or at its own clock, whichever is greater. So the minimum of such a
run never falls, and the promise holds for all trainers that count: nothing is promised about pushes that a trainer
which was given up may still have on their way.

Reads of single tables
----------------------
A table may have a staleness t of its own. It tightens the promise for that table:

    A read of it by a trainer at clock c sees every push that any trainer made before its clock c - min(s, t).

A trainer that knows of a clock o >= c - min(s, t) that all others have reached may read, and asks nothing
(:func:`may_serve`). Otherwise it asks, before the read is sent, with AWAIT(c - min(s, t)):

    A trainer may read if and only if  min(clocks of all trainers that count) >= the clock that it awaits.

A trainer has one wait at a time, that of its tick or that of its read. Neither can deadlock: a trainer that waits at
its tick is more than s >= 0 ahead of the minimum, and one that waits before a read awaits a clock that is greater than
the minimum and not greater than its own (:meth:`Clock.await_lowest` refuses any other), so its own clock is greater
than the minimum, too. A trainer whose clock is the minimum therefore waits for nothing here. It goes on until it ticks,
leaves or is given up, which raises the minimum; by induction over the clocks each wait ends. A larger t than s changes
nothing, because c - s was already reached when the trainer went on to clock c. As for ticks, a trainer in a meeting
does not count.

In a run without vacant seats the minimum falls only when a trainer that had left joins again. What becomes of a lost
trainer is the controller's decision; this file only knows that it holds the others back until it leaves.

The controller (`controller/runs.py`) calls, and gets back the trainers whose TICK it now answers: :meth:`Clock.tick`
makes a trainer wait and at once releases all trainers whose wait is over, maybe the same trainer; so does
:meth:`Clock.await_lowest`. Every call may be repeated. An **incarnation** is one attempt to be a trainer; a later one
fences off the earlier (:meth:`Clock.check`). The later one receives the clock to go on at, and asks with a tick of just
that clock whether it may, because the earlier one may have been waiting there.

Cost: a tick that releases no trainer is O(log n), a release O(log n) a waiter. All heaps are lazy: entries that have
become untrue stay until they come to the top.
"""

from __future__ import annotations

import collections
import enum
import heapq
import math
import numbers

from dps.errors import InputError, StoppedError

__all__ = ["Clock", "checked_staleness", "may_serve", "tightest"]


MAX_GIVEN_UP = 64  # waits in the heap that a trainer has given up for the next one


class TrainerState(enum.Enum):
    """What the clock knows of a trainer; the value completes "trainer 3 ..." in messages."""

    EXPECTED = "never joined"
    JOINED = "joined"
    LOST = "lost its connection"
    LEFT = "left"


class Clock:
    """The rule of one run: see the module's docstring.

    Parameters
    ----------
    staleness : int or math.inf
        By how many clocks a trainer that goes on may be ahead of the slowest.
    trainers : int
        How many trainers the run has; they are numbered from 0.
    warm_start : int
        Trainer 0 begins first: the others begin at this clock, and wait there until trainer 0 has come to it, or left.
    vacant : int
        How many of these seats, the last ones, are vacant: trainers may take them while the run goes on.

    Examples
    --------
    >>> clock = Clock(staleness=0, trainers=2)
    >>> clock.join(0, incarnation=1, now=0.0), clock.join(1, incarnation=1, now=0.0)
    (0, 0)
    >>> clock.tick(0, 1, now=1.0)  # trainer 0 has to wait ...
    []
    >>> clock.tick(1, 1, now=2.0)  # ... until trainer 1 is there: now both go on
    [0, 1]
    """

    def __init__(self, staleness: float, trainers: int, start: int = 0, warm_start: int = 0, vacant: int = 0):
        if trainers - vacant < 1:
            raise InputError(f"a run needs at least one trainer, not {trainers - vacant}")
        self.staleness = checked_staleness(staleness)
        self.trainers = trainers
        self.warm_start = warm_start
        self._may_grow = vacant > 0
        others = max(start, warm_start)
        self._clocks = [start] + [others] * (trainers - 1)
        self._states = [TrainerState.EXPECTED] * (trainers - vacant) + [TrainerState.LEFT] * vacant
        self._incarnations: list[int | None] = [None] * trainers
        self._last_heard: list[float | None] = [None] * trainers  # time of each trainer's last call; None: not yet
        self._began: float | None = None  # time at which the first trainer joined
        self._counts = dict(
            collections.Counter(self._clocks[: trainers - vacant])
        )  # clock -> how many of the trainers that count are at it; never 0
        self._values = sorted(self._counts)  # heap of clocks: the keys of _counts, and some that are no longer keys
        self._minimum = start
        self._waiting: dict[int, float] = {}  # trainer -> since when it waits
        # Heap of (clock, trainer): those that wait at a tick, and some that no longer do.
        self._queue: list[tuple[int, int]] = []
        self._awaited: dict[int, int] = {}  # trainer that waits before a read -> the lowest clock that it awaits
        # Heap of (awaited clock, trainer): those that wait before a read, and some that no longer do.
        self._reads: list[tuple[int, int]] = []

    # -- events

    def join(self, trainer: int, incarnation: int, now: float) -> int:
        """`trainer` joins, or joins again. Returns the clock to go on at; older incarnations are fenced off."""
        self._check_trainer(trainer)
        current = self._incarnations[trainer]
        if current is not None and incarnation < current:
            self.check(trainer, incarnation)
        if self._states[trainer] is TrainerState.LEFT:
            if self._may_grow:
                self._clocks[trainer] = max(self._clocks[trainer], self._minimum)
            self._count(self._clocks[trainer])
            self._settle()  # releases no trainer, because the minimum can only fall here
        if incarnation != current:
            self._end_wait(trainer)  # the wait was that of the earlier incarnation
        self._incarnations[trainer] = incarnation
        self._states[trainer] = TrainerState.JOINED
        self._last_heard[trainer] = now
        self._began = now if self._began is None else self._began
        return self._clocks[trainer]

    def check(self, trainer: int, incarnation: int) -> None:
        """Raise StoppedError when another incarnation of `trainer` has joined since."""
        self._check_trainer(trainer)
        if self._incarnations[trainer] != incarnation:
            raise StoppedError(
                f"attempt {incarnation} of trainer {trainer} was replaced by attempt {self._incarnations[trainer]} "
                "(its task was run again); nothing that it does counts any more"
            )

    def tick(self, trainer: int, clock: int, now: float) -> list[int]:
        """`trainer` has completed `clock` iterations. Returns all trainers whose wait is over.

        If `trainer` is not among them it waits from now on. Repeats, and late ticks of earlier clocks, move nothing.
        """
        self._check_trainer(trainer)
        if self._states[trainer] is not TrainerState.JOINED:
            raise InputError(f"a tick of trainer {trainer}, which {self._states[trainer].value}: it has to join first")
        self._last_heard[trainer] = now
        higher = clock > self._clocks[trainer]
        if higher:
            self._uncount(self._clocks[trainer])
            self._count(clock)
            self._clocks[trainer] = clock
        if higher or trainer in self._awaited:  # a trainer that ticks has given up its read
            self._end_wait(trainer)
        if trainer not in self._waiting:
            self._waiting[trainer] = now
            heapq.heappush(self._queue, (self._clocks[trainer], trainer))
        return self._settle()

    def await_lowest(self, trainer: int, lowest: int, now: float) -> list[int]:
        """`trainer` reads when all trainers that count have reached `lowest`. Returns all trainers whose wait is over.

        If `trainer` is not among them it waits from now on; an earlier wait of its own ends without an answer, unless
        this is a repeat.
        """
        self._check_trainer(trainer)
        if self._states[trainer] is not TrainerState.JOINED:
            raise InputError(f"a read of trainer {trainer}, which {self._states[trainer].value}: it has to join first")
        if lowest > self._clocks[trainer]:
            raise InputError(
                f"trainer {trainer} is at clock {self._clocks[trainer]} and awaits clock {lowest}, which would wait "
                "for the trainer itself: it ticks before"
            )
        self._last_heard[trainer] = now
        if self._awaited.get(trainer) != lowest:
            self._end_wait(trainer)
            self._waiting[trainer], self._awaited[trainer] = now, lowest
            if len(self._reads) > MAX_GIVEN_UP + len(self._clocks):
                self._reads = sorted((awaited, each) for each, awaited in self._awaited.items())
            else:
                heapq.heappush(self._reads, (lowest, trainer))
        return self._settle()

    def recall_reads(self) -> list[int]:
        """End all waits before reads, because a table's staleness has changed. Returns these trainers: they look again
        whether they have to wait."""
        recalled = sorted(self._awaited)
        for trainer in recalled:
            self._end_wait(trainer)
        return recalled

    def leave(self, trainer: int, now: float) -> list[int]:
        """`trainer` is done and no longer counts. Returns all trainers whose wait is over."""
        self._check_trainer(trainer)
        if self._states[trainer] is not TrainerState.LEFT:
            self._uncount(self._clocks[trainer])
            self._states[trainer] = TrainerState.LEFT
            self._last_heard[trainer] = now
            self._end_wait(trainer)
        return self._settle()

    def lost(self, trainer: int, now: float) -> None:
        """The connection of `trainer` broke: its wait ends without an answer, but it counts until it leaves."""
        self._check_trainer(trainer)
        if self._states[trainer] is TrainerState.JOINED:
            self._states[trainer] = TrainerState.LOST
            self._end_wait(trainer)

    def advance(self, trainer: int, clock: int) -> list[int]:
        """It is known without a tick that `trainer` has completed `clock` iterations. Returns as :meth:`tick` does.

        If it was waiting at an earlier clock, that wait ends without an answer: it will ask again.
        """
        self._check_trainer(trainer)
        if clock > self._clocks[trainer]:
            if self._states[trainer] is not TrainerState.LEFT:
                self._uncount(self._clocks[trainer])
                self._count(clock)
            self._clocks[trainer] = clock
            self._end_wait(trainer)
        return self._settle()

    def expect(self, trainer: int) -> None:
        """`trainer` is to be begun anew: it counts at its clock, and whichever incarnation joins first is it."""
        self._check_trainer(trainer)
        if self._states[trainer] is TrainerState.LEFT:
            self._count(self._clocks[trainer])
        self._states[trainer], self._incarnations[trainer] = TrainerState.EXPECTED, None
        self._end_wait(trainer)
        self._settle()  # releases no trainer, because the minimum can only fall here

    def set_staleness(self, staleness: float) -> list[int]:
        """Set the bound. Returns all trainers whose wait is over; a trainer too far ahead waits at its next tick."""
        self.staleness = checked_staleness(staleness)
        return self._settle()

    # -- questions

    @property
    def minimum(self) -> int:
        """The lowest clock of all trainers that count; once no trainer counts, the last such clock."""
        return self._minimum

    def lowest_of_others(self, trainer: int) -> int:
        """A clock that all other trainers that count have reached: the lowest of theirs.

        In a run without a bound, where no trainer is held back, it may be the clock of the trainer itself.

        >>> clock = Clock(staleness=2, trainers=2)
        >>> clock.join(0, 0, now=0.0), clock.join(1, 0, now=0.0), clock.tick(1, 2, now=0.0)
        (0, 0, [1])
        >>> clock.lowest_of_others(0), clock.lowest_of_others(1)
        (2, 0)
        """
        own = self._clocks[trainer]
        is_last = own == self._minimum and self._counts.get(own) == 1 and self._states[trainer] is not TrainerState.LEFT
        if not is_last or math.isinf(self.staleness):  # else there would be as many clocks as trainers to look at
            return self._minimum
        return min((clock for clock in self._counts if clock != own), default=own)

    @property
    def maximum(self) -> int:
        return max(self._clocks)

    def clock_of(self, trainer: int) -> int:
        self._check_trainer(trainer)
        return self._clocks[trainer]

    def incarnation_of(self, trainer: int) -> int | None:
        """The incarnation that has joined last as `trainer`; None if none has joined yet."""
        self._check_trainer(trainer)
        return self._incarnations[trainer]

    def waiting(self) -> dict[int, float]:
        """For each trainer that waits the time at which its wait began."""
        return dict(self._waiting)

    def overdue(self, now: float, timeout: float) -> list[int]:
        return [trainer for trainer, since in self._waiting.items() if now - since >= timeout]

    def ages(self, now: float) -> list[float]:
        """Seconds since each trainer's last call; for a trainer that never joined, since the first trainer joined."""
        return [self._age(n, now) for n in range(self.trainers)]

    def slowest(self, now: float, max_trainers: int = 3) -> list[tuple[int, int, float]]:
        """Up to `max_trainers` of the slowest trainers that count: (trainer, clock, seconds as in :meth:`ages`)."""
        count = (n for n in range(self.trainers) if self._states[n] is not TrainerState.LEFT)
        return [
            (n, self._clocks[n], self._age(n, now)) for n in heapq.nsmallest(max_trainers, count, key=self._slowness)
        ]

    def explain(self, trainer: int, now: float) -> str:
        """The text of a ClockTimeoutError: which trainer waits at which clock, for which others, and what to do."""
        since = self._waiting.get(trainer, now)
        behind = [self._describe(n, clock, age) for n, clock, age in self.slowest(now) if n != trainer]
        if trainer in self._awaited:
            rule = (
                f"it reads a table whose own staleness asks that all trainers have come to clock "
                f"{self._awaited[trainer]}, and the slowest is at {self.minimum}"
            )
        else:
            rule = (
                f"with staleness {self.staleness} it goes on when it is at most {self.staleness} ahead of the slowest, "
                f"which is at {self.minimum}"
            )
        return (
            f"trainer {trainer} has waited {now - since:.0f} s at clock {self.clock_of(trainer)}: {rule}. "
            f"Slowest: {'; '.join(behind) or 'none'}. See what these do (dashboard, logs of their workers); if they "
            "are merely slow, allow a larger staleness or a longer dps.timeouts.clock"
        )

    # -- inside

    def _settle(self) -> list[int]:
        """Bring the minimum up to date; take all trainers that may go on off the queue, and return them."""
        while self._values and self._values[0] not in self._counts:
            heapq.heappop(self._values)
        if self._values:
            self._minimum = self._values[0]
        released = []
        while self._queue and self._may_pass(self._queue[0][0]) and not self._is_early(self._queue[0][1]):
            clock, trainer = heapq.heappop(self._queue)
            if trainer in self._waiting and trainer not in self._awaited and clock == self._clocks[trainer]:
                self._end_wait(trainer)
                released.append(trainer)
        while self._reads and self._reads[0][0] <= self.minimum:
            lowest, trainer = heapq.heappop(self._reads)
            if self._awaited.get(trainer) == lowest:
                self._end_wait(trainer)
                released.append(trainer)
        return released

    def _end_wait(self, trainer: int) -> None:
        """The trainer waits no more, neither at a tick nor before a read."""
        self._waiting.pop(trainer, None)
        self._awaited.pop(trainer, None)

    def _may_pass(self, clock: int) -> bool:
        return clock - self.minimum <= self.staleness

    def _is_early(self, trainer: int) -> bool:
        """Whether trainer 0 is to be alone still. Its clock is the lowest then, so it is the first in the queue."""
        return trainer > 0 and self._clocks[0] < self.warm_start and self._states[0] is not TrainerState.LEFT

    def _count(self, clock: int) -> None:
        if clock not in self._counts:
            self._counts[clock] = 0
            heapq.heappush(self._values, clock)
        self._counts[clock] += 1

    def _uncount(self, clock: int) -> None:
        self._counts[clock] -= 1
        if not self._counts[clock]:
            del self._counts[clock]

    def _check_trainer(self, trainer: int) -> None:
        if not 0 <= trainer < self.trainers:
            raise InputError(f"there is no trainer {trainer}: the run has {self.trainers}, numbered from 0")

    def _slowness(self, trainer: int) -> tuple[int, bool, float, int]:
        heard = self._last_heard[trainer]
        return self._clocks[trainer], heard is not None, heard or 0.0, trainer  # of equal clocks, the longest silent

    def _age(self, trainer: int, now: float) -> float:
        heard = self._last_heard[trainer] if self._last_heard[trainer] is not None else self._began
        return 0.0 if heard is None else now - heard

    def _describe(self, trainer: int, clock: int, age: float) -> str:
        state = self._states[trainer]
        if state is TrainerState.EXPECTED:
            return f"trainer {trainer} never joined ({age:.0f} s after the first one did)"
        lost = f" and {state.value}" if state is TrainerState.LOST else ""
        return f"trainer {trainer} is at clock {clock}, last heard of {age:.0f} s ago{lost}"


def checked_staleness(value: float) -> float:
    """A staleness, or an InputError that says why it is none."""
    if value == math.inf:
        return math.inf
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not value >= 0 or value != int(value):
        raise InputError(f"staleness is 0, 1, 2, ... or math.inf, not {value!r}")
    return int(value)


def tightest(run: float, *tables: float | None) -> float:
    """The staleness that holds for a read of these tables in a run; None: a table that has none of its own.

    >>> tightest(3, None), tightest(3, 1, None), tightest(1, 4), tightest(math.inf, 2)
    (3, 1, 1, 2)
    """
    return min([run, *(own for own in tables if own is not None)])


def may_serve(others_clock: float, clock: float, staleness: float) -> bool:
    """Whether rows read now contain all pushes of other trainers that a trainer has to see at a clock.

    Parameters
    ----------
    others_clock : float
        A clock that all other trainers had reached when the read was sent; infinite where there were none.
    clock : float
        At which the rows are used.
    staleness : float
        That holds then.

    Examples
    --------
    >>> may_serve(4, clock=5, staleness=1), may_serve(4, clock=5, staleness=0), may_serve(math.inf, 5, 0)
    (True, False, True)
    """
    return others_clock >= clock - staleness
