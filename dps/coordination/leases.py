"""Who works on what: the batches of an epoch, leased to trainers in portions. Pure: time is an argument.

Theory of operation
-------------------
A **portion** is some consecutive batches of one partition, in that partition's order of the epoch. Each partition
belongs to a trainer, and is cut into so many portions that a trainer has about `EACH`. Portions have numbers, 0, 1, 2,
..., the same in every epoch: portion 5 of epoch 3 is about the same data as portion 5 of epoch 2.

A trainer at clock e works on epoch e, on one portion at a time. Each time it asks for the next one it gets, of those
that are *free* (nobody has done them, nobody holds them):

1. one of its own partitions, the first;
2. else one of a partition of another trainer that it has at hand (it has fetched it before);
3. else one of the trainer that has most left to do, of the partition with most of it, the last: that is to be fetched;
4. else, none being free, the one that another trainer has held longest, once more: whoever is done first counts;
5. else nothing: the epoch is over for it, it ticks. (Where it would only wait then, it asks again and again: those
   whom it would wait for may need help yet. So does, of those that need not wait, the first to come when all that is
   left is in others' hands, `stays`: nobody else would be there to help, should they hang.)

2 to 4 only if it is expected to be done sooner than the others would be without its help. So a slow trainer does not
take the last portion away from a fast one, and nobody fetches what is not worth it.

Exactly once. A portion has one number: the *epoch that it is to be done in next*. It is leased in that epoch only, and
whoever reports it done first moves it on; whoever does so later, or again, changes nothing. Two trainers at most hold
a portion. The ops made in it count once, whoever makes them: a portion is an *origin* of its own, its ops are numbered
from 0, and their clock is the epoch. So the servers' ledgers take the second of each for a repeat, and that is why
portion p of epoch e + 1 must not begin before p of epoch e is done.

Nothing is left out. A trainer does all that is free of its own partitions before an epoch is over for it, so others
may leave that to it. Where its owner is no longer there for a portion (lost, left, at a later clock or told that the
epoch is over for it: somebody else had held the portion), whoever comes takes it, at whatever price. Who comes and
cannot fetch it stays in that epoch until it is done (`missing`). A trainer that is lost holds nothing from that moment
on; it counts for the clock, so what is left of its epoch is still there when it is back. Once nobody who counts is at a
clock as early as e any more, what has not been done of epoch e is given up: a function has broken off its loop.

Up to 1000 trainers ask, some of them several times a second, in the thread that answers ticks: what goes through all
trainers or portions is numpy's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps.errors import InputError

__all__ = ["MOST", "Lease", "Leases", "Missing", "Portion"]

EACH = 32  # portions of a trainer, about
MOST = 4096  # portions of a run: a shard remembers the last op of each
SLACK = 0.2  # seconds that a trainer may be late: it says only now and then how far it is
SMOOTH = 0.5  # weight of the latest portion in a trainer's pace
NAMED = 8  # partitions in a text
LEAD = 1000  # epochs, at most, of which it is remembered how trainers go through them


class Portion(NamedTuple):
    """Batches `first` to `end - 1` of a partition, which has so many."""

    number: int
    partition: int
    first: int
    end: int
    batches: int


class Lease(NamedTuple):
    """What a trainer holds."""

    portion: int
    epoch: int
    since: float
    at: int = 0  # batches it has completed, as far as it has said


class Missing(NamedTuple):
    """What is free, and cannot be fetched by a trainer: it may not go on without it."""

    why: str
    stuck: bool  # its owner will not do it: others have to
    alone: bool  # all others have gone on


class Leases:
    """The portions of a run, who holds them, and who gets the next one: see the module's docstring.

    Parameters
    ----------
    shares : sequence of sequences of int
        The partitions of each trainer.
    start : int
        The first epoch.

    Attributes
    ----------
    total : int
        How many portions there may be.
    done, moved, twice : int
        Portions that were done; of them, by another trainer than theirs; leased to a second one.

    Examples
    --------
    >>> leases = Leases([[0], [1]])
    >>> leases.declare(0, {0: 1}), leases.declare(1, {1: 2})
    (None, None)
    >>> leases.next(0, epoch=0, now=0.0)
    Portion(number=0, partition=0, first=0, end=1, batches=1)
    >>> leases.report(0, 0, epoch=0, pace=1.0)
    >>> leases.next(0, epoch=0, now=1.0)  # trainer 1 has not begun: the last of its portions
    Portion(number=33, partition=1, first=1, end=2, batches=2)
    """

    def __init__(self, shares: Sequence[Sequence[int]], start: int = 0):
        count = sum(map(len, shares))
        if count > MOST:
            raise InputError(
                f"reassign=True leases the portions of up to {MOST} partitions, not of {count}: repartition the data"
            )
        each = max(1, min(EACH, MOST // max(1, len(shares))))
        self.shares = [list(share) for share in shares]
        owner: list[int] = []
        partition: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # partition -> its first portion, how many
        for trainer, share in enumerate(self.shares):
            for number in share:
                slots = max(1, each // len(share))
                self._places[number] = len(owner), slots
                owner += [trainer] * slots
                partition += [number] * slots
        self.total = len(owner)
        self._owner, self._partition = np.array(owner, np.int64), np.array(partition, np.int64)
        self._first = np.zeros(self.total, np.int64)  # batches of a portion: none before they are declared
        self._end = np.zeros(self.total, np.int64)
        self._epoch = np.full(self.total, start, np.int64)  # that each is to be done in next
        self._holders = np.zeros(self.total, np.int64)
        self._declared: dict[int, int] = {}  # partition -> batches
        self._alike: dict[int, tuple[int, dict[str, Any]]] = {}  # epoch -> who was first to say how, and how
        self._latest = start - 1  # epoch that anybody has begun
        self._stays = -1  # the trainer that was told last to stay, in case the others hang
        trainers = len(self.shares)  # of each:
        self._leases = np.zeros(trainers, [("portion", "i8"), ("epoch", "i8"), ("since", "f8"), ("at", "i8")])
        self._leases["portion"] = -1  # it holds none
        self._gone = np.zeros(trainers, bool)  # it is lost or has left,
        self._left = np.zeros(trainers, bool)  # and that for good
        self._clocks = np.full(trainers, start, np.int64)  # epochs that it has completed
        self._heard = np.full(trainers, np.nan)  # when it has asked last
        self._pace = np.full(trainers, np.nan)  # seconds a batch, lately
        self._fetch = np.zeros(trainers)  # seconds to fetch a partition
        self.done = self.moved = self.twice = 0

    # -- what happens

    def declare(self, trainer: int, batches: Mapping[int, int]) -> None:
        """`trainer` begins, for the first time or again: its partitions have so many batches. It holds nothing."""
        self._known(trainer)
        for partition, count in batches.items():
            if partition not in self.shares[trainer]:
                raise InputError(f"partition {partition} is not one of trainer {trainer}, which has told of it")
            before = self._declared.get(partition, count)
            if count != before or count < 0:
                raise InputError(
                    f"partition {partition} was cut into {before} batches before, and into {count} now: with "
                    f"reassign=True all calls of iterate must cut the partitions alike (the same batch_size)"
                )
        self._drop(trainer)
        self._here(trainer)
        for partition, count in batches.items():
            first, slots = self._places[partition]
            self._declared[partition] = count
            used = min(count, slots)
            cuts = np.arange(used + 1) * count // max(1, used)
            self._first[first : first + used], self._end[first : first + used] = cuts[:-1], cuts[1:]

    def agree(self, trainer: int, epoch: int, how: Mapping[str, Any]) -> None:
        """`trainer` goes through an epoch in this way: with another order, "the second half" were other batches."""
        first, kept = self._alike.setdefault(epoch, (trainer, dict(how)))
        for name, value in how.items():
            if kept.get(name) != value:
                raise InputError(
                    f"trainer {trainer} calls iterate({name}={value!r}) in epoch {epoch}, and trainer {first} "
                    f"iterate({name}={kept.get(name)!r}): with reassign=True all trainers must call it alike"
                )
        if len(self._alike) > LEAD:
            del self._alike[min(self._alike)]

    def next(
        self,
        trainer: int,
        epoch: int,
        now: float,
        have: Collection[int] = (),
        without: Collection[int] = (),
    ) -> Portion | None:
        """A portion for a trainer that holds none, as far as it knows; None: there is none for it in this epoch.

        Parameters
        ----------
        trainer, epoch : int
            Who asks, and its clock.
        now : float
        have, without : collection of int
            Partitions of others that it has at hand; partitions that it cannot get.
        """
        self._known(trainer)
        self._here(trainer)
        self._heard[trainer] = now
        self._clocks[trainer] = epoch  # its tick may have been lost; or what it was told, that the epoch is over
        self._latest = max(self._latest, epoch)
        lease = self._lease(trainer)
        if lease is not None and lease.epoch == epoch and self._partition[lease.portion] not in without:
            return self._portion(lease.portion)  # it has not heard of it
        self._drop(trainer)
        there = self._there(epoch)
        free = there & (self._holders == 0)
        own = np.flatnonzero(free & (self._owner == trainer))
        if len(own):
            return self._grant(trainer, int(own[0]), epoch, now)
        if without:
            there &= ~np.isin(self._partition, list(without))
        chosen = self._from_others(trainer, epoch, np.flatnonzero(free & there), now, have)
        if chosen is None:
            chosen = self._second(trainer, there & (self._holders == 1), now, have)
        return None if chosen is None else self._grant(trainer, chosen, epoch, now)

    def missing(self, trainer: int, epoch: int, without: Collection[int]) -> Missing | None:
        """What a trainer that was given nothing has to wait for, as it is free and among those it cannot get."""
        free = self._there(epoch) & (self._holders == 0)
        partitions = {int(n) for n in self._partition[free]} & set(without)
        if not partitions:
            return None
        owners = {n: int(self._owner[self._places[n][0]]) for n in sorted(partitions)}
        past = self._left | (self._clocks > epoch)
        told = ", ".join(
            f"{n} (of trainer {owner}, {'which has left' if self._left[owner] else f'at clock {self._clocks[owner]}'})"
            for n, owner in list(owners.items())[:NAMED]
        )
        told += f" and {len(owners) - NAMED} more" if len(owners) > NAMED else ""
        why = (
            f"trainer {trainer} could not fetch partitions {told}, and has to do what is left of them in epoch {epoch}"
        )
        return Missing(why, any(bool(past[n]) for n in owners.values()), bool(np.delete(past, trainer).all()))

    def over(self, trainer: int, epoch: int) -> None:
        """`trainer` is told that nothing is left for it of an epoch: what comes free from now on is for others."""
        self._clocks[trainer] = max(self._clocks[trainer], epoch + 1)

    def report(self, trainer: int, portion: int, epoch: int, pace: float) -> None:
        """`trainer` has done a portion, all its ops are on the servers; each batch took it `pace` seconds."""
        self._known(trainer, portion)
        before = self._pace[trainer]
        self._pace[trainer] = pace if np.isnan(before) else SMOOTH * pace + (1 - SMOOTH) * before
        if self._epoch[portion] == epoch:
            self._epoch[portion] = epoch + 1
            self.done += 1
            self.moved += int(self._owner[portion] != trainer)
            for other in np.flatnonzero(self._leases["portion"] == portion):
                self._drop(int(other))

    def wanted(self, trainer: int, portion: int, epoch: int, at: int, now: float) -> bool:
        """Whether a trainer that has completed `at` batches of a portion is to go on with it."""
        self._known(trainer, portion)
        lease = self._lease(trainer)
        if lease is not None and (lease.portion, lease.epoch) == (portion, epoch):
            self._leases["at"][trainer] = at
            return True
        if self._epoch[portion] != epoch or self._holders[portion] > 1:
            return False
        self._here(trainer)  # it was lost, for a moment: its connection broke
        self._grant(trainer, portion, epoch, now)
        return True

    def fetched(self, trainer: int, seconds: float) -> None:
        """It took a trainer so long to get another's partition."""
        self._fetch[trainer] = seconds

    def lost(self, trainer: int, for_good: bool = False) -> None:
        """`trainer` is lost; for good: it has left."""
        self._drop(trainer)
        self._gone[trainer] = True
        self._left[trainer] |= for_good

    def ticked(self, trainer: int, clock: int, lowest: int) -> None:
        """`trainer` has completed so many epochs; nobody who counts has completed fewer than `lowest`."""
        self._clocks[trainer] = max(self._clocks[trainer], clock)
        lease = self._lease(trainer)
        if lease is not None and lease.epoch < clock:
            self._drop(trainer)
        np.maximum(self._epoch, lowest, out=self._epoch)
        for epoch in [n for n in self._alike if n < lowest]:
            del self._alike[epoch]

    # -- what is known

    def pending(self, epoch: int, now: float) -> float | None:
        """Seconds until something of an epoch that is still to be done may be done; None if there is nothing."""
        if not self._there(epoch).any():
            return None
        held = (self._leases["portion"] >= 0) & (self._leases["epoch"] == epoch)
        return max(0.0, float(np.min(self._ends(now)[held], initial=np.inf)) - now)

    def stays(self, trainer: int, epoch: int, without: Collection[int] = ()) -> bool:
        """Whether `trainer` is to stay while others do what is left of an epoch: who else would help, if they hang?"""
        left = self._there(epoch)
        if not left.any() or not self._holders[left].all() or np.isin(self._partition[left], list(without)).all():
            return False
        other = self._stays
        there = other != -1 and self._clocks[other] <= epoch and not self._gone[other] and self._lease(other) is None
        if not there:
            self._stays = trainer
        return self._stays == trainer

    def left(self) -> int:
        """Portions that are not done yet, of the earliest epoch that is under way."""
        earliest = np.min(self._clocks[~self._left], initial=self._latest)
        return int(np.count_nonzero((self._end > self._first) & (self._epoch <= earliest)))

    def held(self) -> dict[int, Lease]:
        """What each trainer holds."""
        return {int(n): Lease(*self._leases[n].item()) for n in np.flatnonzero(self._leases["portion"] >= 0)}

    # -- inside

    def _there(self, epoch: int) -> np.ndarray:
        """Which portions are still to be done in that epoch."""
        return (self._epoch == epoch) & (self._end > self._first)

    def _from_others(self, trainer: int, epoch: int, free: np.ndarray, now: float, have: Collection[int]) -> int | None:
        """One of these portions, if helping their trainers is worth it."""
        if not len(free):
            return None
        until = self._busy_until(epoch, free, now)
        backwards = free[::-1]
        partitions, at, counts = np.unique(self._partition[backwards], return_index=True, return_counts=True)
        last = backwards[at]  # of each partition
        ends, at_hand = until[self._owner[last]], np.isin(partitions, list(have))
        worth = now + self._takes(trainer, last, at_hand) < ends
        ranks = np.lexsort((-partitions, counts, ends, at_hand))  # the first of them counts least
        ranks = ranks[worth[ranks]]
        return int(last[ranks[-1]]) if len(ranks) else None

    def _second(self, trainer: int, held: np.ndarray, now: float, have: Collection[int]) -> int | None:
        """The portion that has been held longest, of those that are worth being run twice."""
        if not held.any():
            return None
        holders = np.flatnonzero(self._leases["portion"] >= 0)
        holders = holders[held[self._leases["portion"][holders]] & (holders != trainer)]
        portions = self._leases["portion"][holders]
        at_hand = np.isin(self._partition[portions], [*have, *self.shares[trainer]])
        worth = now + self._takes(trainer, portions, at_hand) < self._ends(now)[holders]
        since = self._leases["since"][holders][worth]
        return int(portions[worth][np.argmin(since)]) if len(since) else None

    def _takes(self, trainer: int, portions: np.ndarray, at_hand: np.ndarray) -> np.ndarray:
        """Seconds that each portion is expected to take a trainer."""
        fetch = np.where(at_hand, 0.0, self._fetch[trainer])
        return fetch + (self._end[portions] - self._first[portions]) * self._paces()[trainer]

    def _paces(self) -> np.ndarray:
        """Seconds a batch of each trainer; of one that has done none, as the others."""
        unknown = np.isnan(self._pace)
        return np.where(unknown, 0.0 if unknown.all() else self._pace[~unknown].mean(), self._pace)

    def _ends(self, now: float) -> np.ndarray:
        """When each trainer is expected to be done with what it holds. One that is late goes on as it has done so far.

        (What is said of those that hold nothing, means nothing.)
        """
        portion, since, at = self._leases["portion"], self._leases["since"], self._leases["at"]
        count = self._end[portion] - self._first[portion]
        pace, passed = np.nan_to_num(self._pace), now - since
        late = now + (count - at) * passed / (at + 1)
        return np.where(passed <= (at + 1) * pace + SLACK, since + count * pace, late)

    def _busy_until(self, epoch: int, free: np.ndarray, now: float) -> np.ndarray:
        """When each trainer would be done with what it holds and with its part of `free`, without help."""
        batches = np.bincount(self._owner[free], self._end[free] - self._first[free], len(self.shares))
        silent = np.nan_to_num(now - self._heard)
        idle = now + np.maximum(0.0, silent - SLACK)
        begins = np.where(self._leases["portion"] >= 0, np.maximum(now, self._ends(now)), idle)
        paces = self._paces()
        until = begins + batches * np.where(paces == 0, 1.0, paces)
        return np.where(self._gone | (self._clocks > epoch), np.inf, until)

    def _grant(self, trainer: int, portion: int, epoch: int, now: float) -> Portion:
        self._drop(trainer)
        self.twice += int(self._holders[portion] == 1)
        self._holders[portion] += 1
        self._leases[trainer] = portion, epoch, now, 0
        return self._portion(portion)

    def _drop(self, trainer: int) -> None:
        lease = self._lease(trainer)
        if lease is not None:
            self._holders[lease.portion] -= 1
            self._leases["portion"][trainer] = -1

    def _lease(self, trainer: int) -> Lease | None:
        lease = Lease(*self._leases[trainer].item())
        return lease if lease.portion >= 0 else None

    def _portion(self, n: int) -> Portion:
        partition = int(self._partition[n])
        return Portion(n, partition, int(self._first[n]), int(self._end[n]), self._declared[partition])

    def _here(self, trainer: int) -> None:
        self._gone[trainer] = self._left[trainer] = False

    def _known(self, trainer: int, portion: int = 0) -> None:
        if not 0 <= trainer < len(self.shares) or not 0 <= portion < max(1, self.total):
            raise InputError(
                f"there is no trainer {trainer} or no portion {portion}: the run has {len(self.shares)} trainers and "
                f"{self.total} portions"
            )
