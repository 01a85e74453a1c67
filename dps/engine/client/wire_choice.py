"""Which way the rows of a table travel: a trainer tries each way for some batches, and goes on with the fastest. Pure.

It is for tables with ``Wire(measured=True)``, as ``wire="auto"`` is, and for links between machines. `WireChoice` has
the rules: given what turns took, it says which way the next one takes. `WireTrials` cuts a trainer's calls into turns,
reads from the trainer's meter what they took, and lets one table try at a time, because calls to several tables that
are made together have one time.

The rules, and why the choice is at most 3 % worse than the best of the ways, are in `docs/design/training.md`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dps.engine.telemetry.trainer_meter import TrainerMeter

__all__ = ["SHARE", "TableTrial", "WireChoice", "WireTrials", "WireTurn"]

TURN_CALLS = 4  # A turn has at least so many calls that count.
WARM_CALLS = 2  # So many calls before these do not count, because they wait for what the turn before has sent.
EARLY_ROUNDS = 2  # After so many rounds of a trial the slowest ways are left out, because their turns cost most.
LEAST_ROUNDS, MOST_ROUNDS = 4, 60  # A trial has at least and at most so many rounds.
FAR = 3.0  # A way is left out early if it takes so many times as long as the fastest way in each round.
TRIMMED = 0.1  # This share of rounds is left out at either end, because the system may pause a process in a turn.
SURE = 3.0  # A way is left out later if it is slower by so many standard errors.
DOUBT = 0.1  # This over the rounds is added to the standard deviation, because a few turns may agree by chance.
SAME = 0.01  # Ways count as equally fast if their times differ by less than this share.
SHARE = 0.01  # Later trials may cost this share of all time.
REST_TURNS, REST_CALLS = 500, 16  # A table rests for so many turns of so many calls between two trials.
SHIFT = 1.5  # A turn tells of another link if a row takes so many times as long as before, or so much less.
SHIFTED_TURNS = 8  # So many such turns, one after another, end the rest, because one alone may be a pause.
RESERVE = 4  # So many trials may go beyond the share where the link has changed.
OTHER_CALLS = 64  # A turn counts if calls to all tables are at most so many times those to this one.
IDLE_CALLS = 256  # After so many calls to other tables a trial ends, because its table may not be called again.


class WireTurn(NamedTuple):
    """What some calls of a trainer have taken: seconds, rows that they pulled or pushed, bytes, their number."""

    seconds: float
    rows: int
    nbytes: int
    calls: int

    def since(self, before: WireTurn) -> WireTurn:
        """What the calls between an earlier mark and this one have taken."""
        seconds, rows = self.seconds - before.seconds, self.rows - before.rows
        return WireTurn(seconds, rows, self.nbytes - before.nbytes, self.calls - before.calls)


class WireChoice:
    """The ways of one table, and which of them its next turn takes.

    Parameters
    ----------
    ways : int
        How many there are; what loses nothing comes first. The last one is used until the first trial has begun.

    Attributes
    ----------
    current : int
        The way that the next turn takes.
    chosen : int or None
        The way that the last trial has found to be the fastest; None before the first one has ended.
    trying : bool
        A trial goes on.

    Examples
    --------
    >>> choice = WireChoice(2)
    >>> choice.begin()
    >>> while choice.trying:
    ...     choice.ended(WireTurn((2.0, 1.0)[choice.current], 100, 0, 4), 3.0)
    >>> choice.chosen
    1
    """

    def __init__(self, ways: int):
        self.ways = ways
        self.current, self.trying = ways - 1, False
        self.chosen: int | None = None
        self.turns: list[list[WireTurn]] = [[] for _ in range(ways)]  # of the last trial
        self._left = list(range(ways))  # not left out yet
        self._order: list[int] = []  # of the rest of this round
        self._rounds = 0
        self._tried: list[tuple[float, float]] = []  # seconds of each turn of the trial, and of each row
        self._worked = self._spent = self._expected = 0.0  # seconds: in all, by later trials, by the next one
        self._usual = self._rested = self._changes = 0.0  # seconds a row as chosen; turns since the trial, and changed

    def is_due(self) -> bool:
        """Whether a trial is to begin."""
        if self.trying or self.chosen is None:
            return not self.trying
        changed = self._changes >= SHIFTED_TURNS
        allowed = SHARE * self._worked + (RESERVE * self._expected if changed else 0.0)
        return (changed or self._rested >= REST_TURNS) and self._spent + self._expected <= allowed

    def begin(self) -> None:
        """Try all ways, one after the other, some rounds long."""
        self.trying, self._rounds, self._left = True, 0, list(range(self.ways))
        self.turns, self._tried = [[] for _ in range(self.ways)], []
        self._next_round()

    def ended(self, turn: WireTurn, whole: float) -> None:
        """A turn of the current way is over; with the calls before those that count it took `whole` seconds."""
        if turn.rows <= 0:
            return
        self._worked += whole
        each = max(turn.seconds, 1e-9) / turn.rows
        if not self.trying:
            self._rested += 1
            changed = self._usual > 0 and not 1 / SHIFT < each / self._usual < SHIFT
            self._changes = self._changes + 1 if changed else 0.0
            return
        self.turns[self.current].append(turn)
        self._tried.append((whole, each))
        if self._order:
            self.current = self._order.pop(0)
            return
        self._rounds += 1
        if self._rounds == EARLY_ROUNDS:
            self._leave_out_the_slowest()
        if self._rounds >= LEAST_ROUNDS and self._is_decided():
            self.decide()
        else:
            self._next_round()

    def decide(self) -> None:
        """End the trial with what is known: the first way that is as fast as the fastest one, or almost."""
        if self._rounds:
            best = self._fastest()
            chosen = next(way for way in self._left if way == best or self._slower(way, best)[0] <= SAME)
            self.chosen, self._usual = chosen, statistics.median(cost(self.turns[chosen]))
            excess = sum(whole * max(0.0, 1 - self._usual / each) for whole, each in self._tried)
            self._spent += excess if self._expected else 0.0  # the first trial has to be made
            self._expected = max(excess, 1e-9)
        self.current = self.ways - 1 if self.chosen is None else self.chosen
        self.trying, self._order, self._rested, self._changes = False, [], 0.0, 0.0

    def _next_round(self) -> None:
        """All that are left take a turn, in a shuffled order and in the next round in the reverse one. So a drift is no
        way's advantage, nor are calls whose sizes come again every few turns."""
        order = random.Random(self._rounds // 2).sample(self._left, len(self._left))
        self._order = order if self._rounds % 2 == 0 else order[::-1]
        self.current = self._order.pop(0)

    def _leave_out_the_slowest(self) -> None:
        """Because a turn of these costs as much as several rounds of the others."""
        best = cost(self.turns[self._fastest()])
        slow = {way: zip(cost(self.turns[way]), best, strict=True) for way in self._left}
        self._left = [way for way, pairs in slow.items() if not all(one > FAR * other for one, other in pairs)]

    def _is_decided(self) -> bool:
        """Leave out the ways that are slower for sure; whether the others are as fast as each other."""
        best = self._fastest()
        others = {way: self._slower(way, best) for way in self._left if way != best}
        self._left = [way for way in self._left if way == best or others[way][0] <= max(SAME, others[way][1])]
        same = all(slower + unsure <= SAME for way, (slower, unsure) in others.items() if way in self._left)
        return same or self._rounds >= MOST_ROUNDS

    def _fastest(self) -> int:
        first = self._left[0]
        return min(self._left, key=lambda way: self._slower(way, first)[0])

    def _slower(self, way: int, other: int) -> tuple[float, float]:
        """By which share of its time a way is slower than another one, and how sure that is: by the ratios of turns of
        the same round, because these have met the same link."""
        pairs = zip(cost(self.turns[way]), cost(self.turns[other]), strict=False)
        shares = sorted(math.log(one / another) for one, another in pairs)
        cut = int(TRIMMED * len(shares))
        shares = shares[cut : len(shares) - cut]
        spread = statistics.pstdev(shares) + DOUBT / len(shares)
        return statistics.fmean(shares), SURE * spread / math.sqrt(len(shares))


def cost(turns: Sequence[WireTurn]) -> list[float]:
    """Seconds for each row."""
    return [max(turn.seconds, 1e-9) / turn.rows for turn in turns]


class WireTrials:
    """The tables of one trainer whose ways are measured. Its methods are called under the session's lock."""

    def __init__(self, meter: TrainerMeter):
        self.meter = meter
        self._tables: dict[object, TableTrial] = {}
        self._holder: TableTrial | None = None  # the table that tries
        self._others = 0  # calls to other tables since the last one to that

    def of(self, key: object, name: str, labels: Sequence[str], travel: Callable[[int], None]) -> TableTrial:
        """The trial of a table, whose calls `travel` by the current way from now on. What is known of the `key` from an
        earlier route holds on."""
        trial = self._tables.get(key)
        if trial is None:
            trial = self._tables[key] = TableTrial(self, name, labels)
        trial.follow(travel)
        return trial

    def may_try(self, table: TableTrial) -> bool:
        """Whether no other table tries; one that is called no more ends its trial."""
        if self._holder is not None and self._holder is not table and self._holder.choice.trying:
            self._others += 1
            if self._others < IDLE_CALLS // TURN_CALLS:
                return False
            self._holder.end()
        self._holder, self._others = table, 0
        return True

    def called(self, table: TableTrial) -> None:
        if table is self._holder:
            self._others = 0

    def mark(self) -> WireTurn:
        """What the trainer's calls have taken since it began: their time, also for other tables made beside them."""
        meter, traffic = self.meter, self.meter.servers.values()
        seconds = meter.seconds
        return WireTurn(
            seconds["pull"] + seconds["push"] + seconds["serialise"],
            meter.keys_pulled + meter.keys_pushed,
            sum(each.sent + each.received for each in traffic),
            meter.pulls + meter.pushes,
        )


class TableTrial:
    """The turns of one table. A turn ends before a call that follows a push, so that a pull and the push that names its
    list are in one; where a trainer only pulls, behind three times as many calls."""

    def __init__(self, trials: WireTrials, name: str, labels: Sequence[str]):
        self.choice, self.labels = WireChoice(len(labels)), labels
        self._trials, self._name = trials, name
        self._travel: Callable[[int], None] = lambda way: None
        self._way = self.choice.current
        self._calls, self._due, self._pushes, self._warm = 0, TURN_CALLS, 0, False
        self._began = self._counted = trials.mark()

    def follow(self, travel: Callable[[int], None]) -> None:
        """Calls go by another route."""
        self._travel, self._way = travel, self.choice.current
        travel(self._way)

    def called(self) -> None:
        """A call to the table is about to be prepared."""
        self._calls += 1
        pushes, before = self._trials.meter.pushes, self._pushes
        self._pushes = pushes
        if self._calls > self._due and (pushes > before or self._calls > 3 * self._due):
            self._turn()

    def end(self) -> None:
        """End a trial of a table that is not called any more."""
        self.choice.decide()
        self._begin()

    def _turn(self) -> None:
        now = self._trials.mark()
        self._trials.called(self)
        if self._warm:
            self._warm, self._counted, self._calls, self._due = False, now, 1, TURN_CALLS
            return
        choice, known = self.choice, self.choice.chosen
        tried = choice.trying
        turn = now.since(self._counted)
        if turn.calls <= OTHER_CALLS * self._calls:  # else the turn says more of other tables than of this one
            choice.ended(turn, now.seconds - self._began.seconds)
        if tried and not choice.trying and choice.chosen != known and choice.chosen is not None:
            self._trials.meter.chose(self._name, f"{self.labels[choice.chosen]} between machines", self._found())
        if choice.is_due() and self._trials.may_try(self):
            choice.begin()
        self._began = now
        self._begin()

    def _begin(self) -> None:
        """Begin a turn of the current way. While ways are tried, the first calls of a turn do not count, because they
        wait for what was sent before."""
        if self._way != self.choice.current:
            self._way = self.choice.current
            self._travel(self._way)
        self._counted, self._warm, self._calls = self._began, self.choice.trying, 1
        self._due = WARM_CALLS if self._warm else REST_CALLS

    def _found(self) -> dict[str, str]:
        """Bytes a row and milliseconds a call, of each way."""
        found = {}
        for label, turns in zip(self.labels, self.choice.turns, strict=True):
            seconds, rows, nbytes, calls = (sum(each) for each in zip(*turns, strict=True))
            found[label] = f"{nbytes / max(rows, 1):.3g} bytes a row and {1e3 * seconds / max(calls, 1):.3g} ms a call"
        return found
