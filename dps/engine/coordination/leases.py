"""Which trainer works on what: the batches of an epoch, leased to trainers in portions. Pure: time is an argument.

Theory of operation
-------------------
A **portion** is some consecutive batches of one partition, in that partition's order of the epoch. Each partition
belongs to a trainer, its **owner**, and is cut into so many portions that a trainer has about `PORTIONS_PER_TRAINER`.
Portions have numbers, 0, 1, 2, ..., the same in every epoch: portion 5 of epoch 3 is about the same data as portion 5
of epoch 2.

A trainer at clock e works on epoch e, on one portion at a time. Each time it asks for the next portion it gets, of
those that are *free* (no trainer has done them in this epoch, no trainer holds them):

1. a portion of its own partitions, the first;
2. else a portion of another trainer's partition that it has at hand, because it has fetched it before;
3. else a portion of the trainer that has most left to do, of the partition with most of it, the last: the trainer has
   to fetch that partition;
4. else, as no portion is free, the portion that another trainer has held longest, once more: the trainer that is done
   first counts;
5. else nothing: the epoch is over for it, it ticks. (Where it would only wait then, it asks again and again, because
   the trainers that it would wait for may still need help. Of the trainers that need not wait, the first to come when
   other trainers hold all that is left asks again too, `stays`: no other trainer would be there to help if they hang.)

2 to 4 only if the trainer is expected to be done sooner than the others would be without its help. So a slow trainer
does not take the last portion away from a fast one, and no trainer fetches a partition that is not worth it. And only
while portions are *shared*, which may change at any time: otherwise a trainer gets, beside its own portions, only those
whose owner will not do them, and once more its own ones that another trainer holds, which helped before.

Exactly once. A portion has one number: the *epoch that it is to be done in next*. It is leased in that epoch only, and
the first report that it is done moves it to the next epoch; a later or repeated report changes nothing. At most two
trainers hold a portion. The ops made in it count once, whichever trainer makes them: a portion is an *origin* of its
own, its ops are numbered from 0, and their clock is the epoch. So the servers' ledgers take the second of each op for a
repeat, and that is why portion p of epoch e + 1 must not begin before p of epoch e is done.

Nothing is left out. A trainer does all free portions of its own partitions before an epoch is over for it, so others
may leave those to it. Where the owner will not do a portion (it is lost, has left, is at a later clock, or has been
answered that the epoch is over for it while another trainer held the portion), the next trainer that asks takes it, at
whatever price. A trainer that asks then and cannot fetch the partition stays in that epoch until the portion is done
(`missing`). A lost trainer holds nothing from that moment on; it counts for the clock, so what is left of its epoch is
still there when it comes back. A run that trainers may join while it goes on gives a lost trainer up only if nothing
would be left out (`needs`). Once no trainer that counts is at clock e or earlier, what has not been done of epoch e is
given up: a training function has broken off its loop.

Where trainers *lend* each other their partitions (Spark), only the owner has a partition, and another trainer fetches
it there. So an owner stays in an epoch until all portions of its own partitions are done, also those that other
trainers hold (`owed`): no trainer ever needs a partition of one that has gone on or has left. It follows that, when a
trainer is at clock e, all of its own partitions are done before epoch e (`completed`). A controller that takes a run
over relies on that: it knows of no portion that was done, and begins with the epoch that all trainers have come to.

Up to 1000 trainers ask, some of them several times a second, in the thread that answers ticks: so loops over all
trainers or portions are numpy's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dps.errors import InputError

__all__ = ["MAX_PORTIONS", "Lease", "Leases", "Missing", "Portion"]

# Number of portions of each trainer, about.
PORTIONS_PER_TRAINER = 32
# Number of portions of a run, because a shard remembers the last op of each.
MAX_PORTIONS = 4096
# Time by which a trainer may seem late, because it reports only now and then how far it is.
SLACK_SECONDS = 0.2
# Weight of the latest portion in a trainer's average pace.
PACE_WEIGHT = 0.5
# Number of partitions that a message names.
MAX_PARTITIONS_SHOWN = 8
# No run has so many epochs.
MOST_EPOCHS = np.iinfo(np.int64).max
# Number of epochs for which the arguments of `iterate` are remembered.
MAX_EPOCHS_REMEMBERED = 1000


class Portion(NamedTuple):
    """Batches `first` to `end - 1` of a partition that has `batches` batches."""

    number: int
    partition: int
    first: int
    end: int
    batches: int


class Lease(NamedTuple):
    """A portion that a trainer holds."""

    portion: int
    epoch: int
    since: float
    at: int = 0  # batches of the portion that the trainer has reported as completed


class Missing(NamedTuple):
    """Free portions whose partitions a trainer cannot fetch: the trainer may not go on before they are done."""

    why: str
    stuck: bool  # an owner will not do its portions, so another trainer has to
    alone: bool  # all other trainers have gone on


class Leases:
    """The portions of a run, which trainers hold them, and the choice of the next one: see the module's docstring.

    `shared` says whether trainers help each other; it may be set at any time.
    `done`, `moved` and `twice` say how many times a portion was done; was done by a trainer other than its owner; was
    leased to a second trainer.

    Examples
    --------
    >>> leases = Leases([[0], [1]])
    >>> leases.declare(0, {0: 1}), leases.declare(1, {1: 2})
    (None, None)
    >>> leases.next(0, epoch=0, now=0.0)
    Portion(number=0, partition=0, first=0, end=1, batches=1)
    >>> leases.report(0, 0, epoch=0, pace=1.0)
    >>> leases.next(0, epoch=0, now=1.0)  # the last portion of trainer 1, which has not begun
    Portion(number=33, partition=1, first=1, end=2, batches=2)
    """

    def __init__(self, shares: Sequence[Sequence[int]], start: int = 0):
        count = sum(map(len, shares))
        if count > MAX_PORTIONS:
            raise InputError(
                f"reassign=True leases the portions of up to {MAX_PORTIONS} partitions, not of {count}: "
                "repartition the data"
            )
        each = max(1, min(PORTIONS_PER_TRAINER, MAX_PORTIONS // max(1, len(shares))))
        self.shares = [list(share) for share in shares]
        owner: list[int] = []
        partition: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}  # partition -> its first portion, how many it has
        for trainer, share in enumerate(self.shares):
            for number in share:
                slots = max(1, each // len(share))
                self._places[number] = len(owner), slots
                owner += [trainer] * slots
                partition += [number] * slots
        self.total = len(owner)
        self._owner, self._partition = np.array(owner, np.int64), np.array(partition, np.int64)
        self._first = np.zeros(self.total, np.int64)  # the batches of each portion: none before its owner declares them
        self._end = np.zeros(self.total, np.int64)
        self._epoch = np.full(self.total, start, np.int64)  # the epoch in which each portion is to be done next
        self._holders = np.zeros(self.total, np.int64)  # how many trainers hold each portion
        self._declared: dict[int, int] = {}  # partition -> batches
        # epoch -> the first trainer that told its arguments of `iterate`, and these arguments
        self._arguments: dict[int, tuple[int, dict[str, object]]] = {}
        self._latest = start - 1  # the latest epoch that a trainer has begun
        self._stays = -1  # the last trainer that `stays` chose to stay in case the others hang
        trainers = len(self.shares)  # the arrays below have a value for each trainer
        self._leases = np.zeros(trainers, [("portion", "i8"), ("epoch", "i8"), ("since", "f8"), ("at", "i8")])
        self._leases["portion"] = -1  # it holds none
        self._gone = np.zeros(trainers, bool)  # it is lost or has left
        self._left = np.zeros(trainers, bool)  # it has left
        self._clocks = np.full(trainers, start, np.int64)  # epochs that it has completed
        self._last_asked = np.full(trainers, np.nan)  # the time at which it last asked for a portion
        self._pace = np.full(trainers, np.nan)  # seconds for a batch, smoothed
        self._fetch = np.zeros(trainers)  # seconds to fetch a partition
        self.shared = True
        self.done = self.moved = self.twice = 0

    # -- events

    def declare(self, trainer: int, batches: Mapping[int, int]) -> None:
        """`trainer` begins, for the first time or again, and says how many batches its partitions have.

        It holds nothing from then on.
        """
        self._check(trainer)
        for partition, count in batches.items():
            if partition not in self.shares[trainer]:
                raise InputError(
                    f"partition {partition} is not one of trainer {trainer}'s, but it declared batches of it"
                )
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

    def agree(self, trainer: int, epoch: int, arguments: Mapping[str, object]) -> None:
        """Check that `trainer` goes through an epoch with the same arguments of `iterate` as the other trainers.

        With another order, or other batches, a portion would be other data.
        """
        first, agreed = self._arguments.setdefault(epoch, (trainer, dict(arguments)))
        for name, value in arguments.items():
            if agreed.get(name) != value:
                raise InputError(
                    f"trainer {trainer} calls iterate({name}={value!r}) in epoch {epoch}, and trainer {first} "
                    f"iterate({name}={agreed.get(name)!r}): with reassign=True all trainers must call it alike"
                )
        if len(self._arguments) > MAX_EPOCHS_REMEMBERED:
            del self._arguments[min(self._arguments)]

    def next(
        self,
        trainer: int,
        epoch: int,
        now: float,
        have: Collection[int] = (),
        without: Collection[int] = (),
    ) -> Portion | None:
        """A portion for a trainer that holds none, as far as it knows; None if there is none for it in this epoch.

        `epoch` is the clock of the trainer that asks.
        `have` are partitions of other trainers that it has at hand, and `without` those that it cannot get.
        """
        self._check(trainer)
        self._here(trainer)
        self._last_asked[trainer] = now
        self._clocks[trainer] = epoch  # its tick may have been lost, or the answer that the epoch is over for it
        self._latest = max(self._latest, epoch)
        lease = self._lease(trainer)
        if lease is not None and lease.epoch == epoch and self._partition[lease.portion] not in without:
            return self._portion(lease.portion)  # the trainer asks again because the answer was lost
        self._drop(trainer)
        there = self._there(epoch)
        free = there & (self._holders == 0)
        own = np.flatnonzero(free & (self._owner == trainer))
        if len(own):
            return self._grant(trainer, int(own[0]), epoch, now)
        if without:
            there &= ~np.isin(self._partition, list(without))
        to_help = there if self.shared else there & self._will_not_do(epoch)[self._owner]
        chosen = self._from_others(trainer, epoch, np.flatnonzero(free & to_help), now, have)
        if chosen is None:
            again = there if self.shared else there & (self._owner == trainer)
            chosen = self._second(trainer, again & (self._holders == 1), now, have)
        return None if chosen is None else self._grant(trainer, chosen, epoch, now)

    def missing(self, trainer: int, epoch: int, without: Collection[int]) -> Missing | None:
        """What a trainer without a portion has to wait for: free portions of partitions that it cannot get; or None."""
        free = self._there(epoch) & (self._holders == 0)
        partitions = {int(n) for n in self._partition[free]} & set(without)
        if not partitions:
            return None
        owners = {n: self.owner_of(n) for n in sorted(partitions)}
        past = self._left | (self._clocks > epoch)
        names = ", ".join(
            f"{n} (of trainer {owner}, {'which has left' if self._left[owner] else f'at clock {self._clocks[owner]}'})"
            for n, owner in list(owners.items())[:MAX_PARTITIONS_SHOWN]
        )
        if len(owners) > MAX_PARTITIONS_SHOWN:
            names += f" and {len(owners) - MAX_PARTITIONS_SHOWN} more"
        why = (
            f"trainer {trainer} could not fetch partitions {names}, and has to do what is left of them in epoch {epoch}"
        )
        return Missing(why, any(bool(past[n]) for n in owners.values()), bool(np.delete(past, trainer).all()))

    def completed(self, trainer: int, epoch: int) -> None:
        """All of the partitions of `trainer`, which it lends, are done before this epoch: it is the trainer's clock."""
        given_up = np.flatnonzero((self._owner == trainer) & (self._epoch < epoch))
        for holder in np.flatnonzero(np.isin(self._leases["portion"], given_up)):
            self._drop(int(holder))
        self._epoch[given_up] = epoch

    def owed(self, trainer: int, epoch: int) -> Missing | None:
        """Why `trainer`, which lends its partitions, has to stay in an epoch: they are not done; None if they are."""
        left = self._there(epoch) & (self._owner == trainer)
        if not left.any():
            return None
        holders = [n for n, lease in self.held().items() if left[lease.portion]]
        why = (
            f"trainer {trainer} waits in epoch {epoch}, because trainers {', '.join(map(str, holders))} work on "
            f"portions of its partitions, and only trainer {trainer} has these"
        )
        return Missing(why, False, False)

    def owner_of(self, partition: int) -> int:
        return int(self._owner[self._places[partition][0]])

    def over(self, trainer: int, epoch: int) -> None:
        """`trainer` is answered that the epoch is over for it: portions that become free later are for others."""
        self._clocks[trainer] = max(self._clocks[trainer], epoch + 1)

    def report(self, trainer: int, portion: int, epoch: int, pace: float) -> None:
        """`trainer` has done a portion and all its ops are on the servers; each batch took it `pace` seconds."""
        self._check(trainer, portion)
        before = self._pace[trainer]
        self._pace[trainer] = pace if np.isnan(before) else PACE_WEIGHT * pace + (1 - PACE_WEIGHT) * before
        if self._epoch[portion] == epoch:
            self._epoch[portion] = epoch + 1
            self.done += 1
            self.moved += int(self._owner[portion] != trainer)
            for other in np.flatnonzero(self._leases["portion"] == portion):
                self._drop(int(other))

    def wanted(self, trainer: int, portion: int, epoch: int, at: int, now: float) -> bool:
        """Whether a trainer that has completed `at` batches of a portion is to go on with it."""
        self._check(trainer, portion)
        lease = self._lease(trainer)
        if lease is not None and (lease.portion, lease.epoch) == (portion, epoch) and self._epoch[portion] == epoch:
            self._leases["at"][trainer] = at
            return True
        if self._epoch[portion] != epoch or self._holders[portion] > 1:
            return False
        self._here(trainer)  # it was lost for a moment, because its connection broke
        self._hold(trainer, portion, epoch, now)
        return True

    def fetched(self, trainer: int, seconds: float) -> None:
        """`trainer` needed that many seconds to fetch a partition of another trainer."""
        self._fetch[trainer] = seconds

    def lost(self, trainer: int, for_good: bool = False) -> None:
        """`trainer` is lost, or, if `for_good`, has left."""
        self._drop(trainer)
        self._gone[trainer] = True
        self._left[trainer] |= for_good

    def ticked(self, trainer: int, clock: int, lowest: int) -> None:
        """`trainer` has completed `clock` epochs; no trainer that counts has completed fewer than `lowest`."""
        self._clocks[trainer] = max(self._clocks[trainer], clock)
        lease = self._lease(trainer)
        if lease is not None and lease.epoch < clock:
            self._drop(trainer)
        np.maximum(self._epoch, lowest, out=self._epoch)
        for epoch in [n for n in self._arguments if n < lowest]:
            del self._arguments[epoch]

    # -- questions

    def needs(self, trainer: int, present: Collection[int]) -> bool:
        """Whether batches would be left out if `trainer` did not come back; `present` are others, which are there.

        No other trainer can say how many batches its partitions have before it has declared them. And what is left of
        an epoch is only done by a trainer that has not gone on to the next one. A trainer that is in the first epoch of
        which something is left, from that of the lost trainer on, does that and all that comes later.
        """
        if not self._declared.keys() >= set(self.shares[trainer]):
            return True
        epoch = self._clocks[trainer]
        first = np.min(self._epoch[(self._epoch >= epoch) & (self._end > self._first)], initial=MOST_EPOCHS)
        return not any(self._clocks[n] <= first for n in present)

    def pending(self, epoch: int, now: float) -> float | None:
        """Seconds until the next held portion of an epoch is expected to be done; None if none is left to do."""
        if not self._there(epoch).any():
            return None
        held = (self._leases["portion"] >= 0) & (self._leases["epoch"] == epoch)
        return max(0.0, float(np.min(self._ends(now)[held], initial=np.inf)) - now)

    def stays(self, trainer: int, epoch: int, without: Collection[int] = ()) -> bool:
        """Whether `trainer` is to stay while others do what is left of an epoch, to help if they hang.

        One trainer stays; the others go on.
        """
        left = self._there(epoch)
        if (
            not self.shared
            or not left.any()
            or not self._holders[left].all()
            or np.isin(self._partition[left], list(without)).all()
        ):
            return False
        other = self._stays
        there = other != -1 and self._clocks[other] <= epoch and not self._gone[other] and self._lease(other) is None
        if not there:
            self._stays = trainer
        return self._stays == trainer

    @property
    def present(self) -> int:
        """How many trainers are neither lost nor have left."""
        return int(np.count_nonzero(~self._gone))

    def left(self) -> int:
        """How many portions are not done yet, of the earliest epoch that is under way."""
        earliest = np.min(self._clocks[~self._left], initial=self._latest)
        return int(np.count_nonzero((self._end > self._first) & (self._epoch <= earliest)))

    def held(self) -> dict[int, Lease]:
        return {int(n): Lease(*self._leases[n].item()) for n in np.flatnonzero(self._leases["portion"] >= 0)}

    # -- inside

    def _there(self, epoch: int) -> np.ndarray:
        return (self._epoch == epoch) & (self._end > self._first)

    def _from_others(self, trainer: int, epoch: int, free: np.ndarray, now: float, have: Collection[int]) -> int | None:
        """A portion of `free`, if helping its owner is worth it."""
        if not len(free):
            return None
        until = self._busy_until(epoch, free, now)
        backwards = free[::-1]
        partitions, at, counts = np.unique(self._partition[backwards], return_index=True, return_counts=True)
        last = backwards[at]  # the last free portion of each partition
        ends, at_hand = until[self._owner[last]], np.isin(partitions, list(have))
        worth = now + self._takes(trainer, last, at_hand) < ends
        ranks = np.lexsort((-partitions, counts, ends, at_hand))  # the last key of lexsort counts most
        ranks = ranks[worth[ranks]]
        return int(last[ranks[-1]]) if len(ranks) else None

    def _second(self, trainer: int, held: np.ndarray, now: float, have: Collection[int]) -> int | None:
        """The portion that has been held longest, of those for which a second holder is worth it."""
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
        """Seconds for a batch of each trainer; a trainer that has done none gets the average of the others."""
        unknown = np.isnan(self._pace)
        return np.where(unknown, 0.0 if unknown.all() else self._pace[~unknown].mean(), self._pace)

    def _ends(self, now: float) -> np.ndarray:
        """The time at which each trainer is expected to be done with the portion it holds.

        A trainer that is late is expected to go on at the speed it has had in this portion. The value of a trainer that
        holds no portion has no meaning.
        """
        portion = self._leases["portion"]
        since = self._leases["since"]
        at = self._leases["at"]
        count = self._end[portion] - self._first[portion]
        pace, passed = np.nan_to_num(self._pace), now - since
        late = now + (count - at) * passed / (at + 1)
        return np.where(passed <= (at + 1) * pace + SLACK_SECONDS, since + count * pace, late)

    def _busy_until(self, epoch: int, free: np.ndarray, now: float) -> np.ndarray:
        """The time at which each trainer would be done, without help, with its portion and its own part of `free`."""
        batches = np.bincount(self._owner[free], self._end[free] - self._first[free], len(self.shares))
        silent = np.nan_to_num(now - self._last_asked)
        idle = now + np.maximum(0.0, silent - SLACK_SECONDS)
        begins = np.where(self._leases["portion"] >= 0, np.maximum(now, self._ends(now)), idle)
        paces = self._paces()
        until = begins + batches * np.where(paces == 0, 1.0, paces)
        return np.where(self._will_not_do(epoch), np.inf, until)

    def _will_not_do(self, epoch: int) -> np.ndarray:
        """For each trainer, whether it will do no free portion of an epoch: it is gone, or the epoch is over for it."""
        return self._gone | (self._clocks > epoch)

    def _grant(self, trainer: int, portion: int, epoch: int, now: float) -> Portion:
        self._hold(trainer, portion, epoch, now)
        return self._portion(portion)

    def _hold(self, trainer: int, portion: int, epoch: int, now: float) -> None:
        self._drop(trainer)
        self.twice += int(self._holders[portion] == 1)
        self._holders[portion] += 1
        self._leases[trainer] = portion, epoch, now, 0

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

    def _check(self, trainer: int, portion: int = 0) -> None:
        if not 0 <= trainer < len(self.shares) or not 0 <= portion < max(1, self.total):
            raise InputError(
                f"there is no trainer {trainer} or no portion {portion}: the run has {len(self.shares)} trainers and "
                f"{self.total} portions"
            )
