"""Which rows of a shard go: rows that expire, and the coldest ones of a shard that is full. Pure.

Only the primary of a shard asks these rules. What they choose becomes an op, which all copies carry out: see
``docs/design/rows.md``. The rules read records, so they cost nothing while rows are pushed; a :class:`Hand` looks at a
bounded number of rows at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dps.engine.core.shards.records import (
    MAX_COUNT,
    MOMENTS,
    ages,
    counts,
    live_slots,
    records_of,
    take_pulled,
    uses_of,
)
from dps.engine.state.ages import distance, moment_of
from dps.engine.state.life import ExpireSmall, ExpireUnused, Expiry, RowLife
from dps.engine.state.own_ranks import EvictByFunction
from dps.engine.state.partition import distinct
from dps.engine.state.shard import KeyedShard

__all__ = ["Coldest", "Expiring", "Hand", "must_go", "new_rows"]

COLD_SHARE = 8  # a round collects one of so many rows: the coldest
BINS = 16  # by which they are ordered
SAMPLE_SLOTS = 1 << 13  # from which the ranks are estimated at which a row is among the coldest
SAMPLE_PLACES = 32
SLOTS_PER_ROW = 3 * COLD_SHARE  # slots that a round looks at for each row that goes: faster than the rows are used up
MAX_SLOTS = 1 << 16  # that one step looks at
SPARE, MOST_SPARE = 128, 4096  # one of so many rows goes early, but not more: not each push has to let others go
MOST_MOMENTS = 1 << 40  # in which a shard is used, without the 24 bits of a record as a limit: five hundred years
NO_KEYS = np.zeros(0, np.int64)
USES = np.array([uses_of(count) for count in range(MAX_COUNT + 1)])  # that a count of a record stands for

Ranks = Callable[[KeyedShard, np.ndarray], np.ndarray]


class Hand:
    """A place in the index of a shard, which goes round. Rows that come or move meanwhile may be seen in the next
    round only."""

    def __init__(self) -> None:
        self._tables: tuple[np.ndarray, ...] = ()
        self._at = 0

    def piece(self, shard: KeyedShard, slots: int) -> tuple[np.ndarray, np.ndarray, bool]:
        """Keys and rows of the next so many slots, and whether the round has ended with them."""
        tables = shard.index.tables
        if [id(each) for each in tables] != [id(each) for each in self._tables]:
            self._tables, self._at = tables, 0
        table, start = tables[0], self._at
        if start >= len(table):
            table, start = tables[1], start - len(table)
        stop = min(start + slots, len(table))
        keys, rows = live_slots(table, start, stop, shard.vacant if shard.vacancies else None)
        self._at += stop - start
        ended = self._at >= sum(map(len, tables))
        if ended:
            self._at = 0
        return keys, rows, ended


def sample(shard: KeyedShard) -> np.ndarray:
    """Rows from all over the index, because a hand that stopped half-way leaves old rows on one side."""
    table, vacant = shard.index.slots, shard.vacant if shard.vacancies else None
    size = SAMPLE_SLOTS // SAMPLE_PLACES
    if len(table) <= SAMPLE_SLOTS:
        return live_slots(table, 0, len(table), vacant)[1]
    starts = np.linspace(0, len(table) - size, SAMPLE_PLACES).astype(np.int64)
    return np.concatenate([live_slots(table, start, start + size, vacant)[1] for start in starts.tolist()])


class Found(NamedTuple):
    """What a piece of a round has found: the keys that are to go, and those whose rows were pulled since the last."""

    gone: np.ndarray
    pulled: np.ndarray


class Expiring:
    """The rows that the rules of a table let expire."""

    def __init__(self, rules: tuple[Expiry, ...]):
        self._rules = rules
        self._counts_pulls = RowLife(rules).counts_pulls
        self._hand = Hand()

    def piece(self, shard: KeyedShard, time: int, slots: int) -> Found:
        """What is found in the next so many slots; `time` in milliseconds since 1970."""
        keys, rows, _ = self._hand.piece(shard, slots)
        if not len(keys):
            return Found(NO_KEYS, NO_KEYS)
        pulled = take_pulled(shard, rows) if self._counts_pulls else np.zeros(len(keys), np.bool_)
        gone = self._gone(shard, records_of(shard, rows), shard.rows, rows, time)
        return Found(keys[gone & ~pulled], keys[pulled])

    def spilled_piece(self, shard: KeyedShard, time: int, most: int) -> np.ndarray:
        """The keys of rows that are to go, among about `most` of those in the file of a shard."""
        assert shard.spill is not None
        keys, rows = shard.spill.walk(most)
        records = np.ascontiguousarray(rows[:, shard.record_at :]).view(np.uint64).reshape(-1)
        gone: np.ndarray = keys[self._gone(shard, records, rows, np.arange(len(keys)), time)]
        return gone

    def _gone(
        self, shard: KeyedShard, records: np.ndarray, rows: np.ndarray, index: np.ndarray, time: int
    ) -> np.ndarray:
        """Which of rows[index[i]], with these records, are to go."""
        age = ages(records, moment_of(shard))
        gone = np.zeros(len(records), np.bool_)
        for rule in self._rules:
            moment = _moment_before(shard, rule, time)
            if moment is None:
                continue
            old = age > distance(moment_of(shard), moment)
            if isinstance(rule, ExpireSmall):
                which = np.flatnonzero(old)
                values = rows[index[which], : shard.dim].astype(np.float64, copy=False)
                old[which] = np.einsum("ij,ij->i", values, values) <= rule.norm**2
            gone |= old
        return gone


def _moment_before(shard: KeyedShard, rule: Expiry, time: int) -> int | None:
    """The moment such that rows that were used before it are old by this rule."""
    if rule.seconds is not None:
        return shard.ages.before(time - int(1000 * rule.seconds))
    assert isinstance(rule, ExpireUnused)
    return shard.ages.before_clock(shard.clock - rule.clocks)


def _by_use(shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    """The moments of the last uses. Not ages, because these grow: they would say that a row got colder since it was
    collected, although it was used since, and that all rows are colder than edges that are some time old."""
    moment = moment_of(shard)
    return moment - ages(records_of(shard, rows), moment)


def _by_count(shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    used = counts(records_of(shard, rows), moment_of(shard) % MOMENTS).astype(np.int64)
    return used * MOST_MOMENTS + _by_use(shard, rows)


def _by_norm(shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    values = shard.rows[rows, : shard.dim].astype(np.float64, copy=False)
    return np.einsum("ij,ij->i", values, values)


def _by_function(function: EvictByFunction, shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    records, moment = records_of(shard, rows), moment_of(shard)
    uses, moments = USES[counts(records, moment % MOMENTS)], moment - ages(records, moment)
    return function(shard.rows[rows, : shard.dim], uses, shard.ages.seconds_since(moments))


RANKS: dict[str, Ranks] = {"lru": _by_use, "spill": _by_use, "lfu": _by_count, "norm": _by_norm}


class Coldest:
    """The rows of a shard that go first, in their order; see the module, and ``docs/design/rows.md``.

    Parameters
    ----------
    life : RowLife
        Its `evict` says which rows are cold.
    """

    def __init__(self, life: RowLife):
        self._ranks = RANKS[life.evict] if isinstance(life.evict, str) else functools.partial(_by_function, life.evict)
        self._hand = Hand()
        self._edges: np.ndarray | None = None  # of the bins of the round that goes on
        self._coming = Bins()  # what it has collected
        self._cold = Bins()  # what the last round has collected

    def take(self, shard: KeyedShard, count: int, spared: np.ndarray) -> np.ndarray:
        """The keys of `count` rows that are to go now, but none of `spared`, which are distinct and sorted."""
        self.prepare(shard, SLOTS_PER_ROW * count)
        chosen = self._chosen(shard, self._cold, count, spared)
        slots = sum(map(len, shard.index.tables))
        while len(chosen) < count and slots > 0:  # at first, no round has ended: what this one has found has to do
            self._go_on(shard, SAMPLE_SLOTS)
            slots -= SAMPLE_SLOTS
            found = self._cold if self._cold.left else self._coming
            others = np.sort(np.concatenate([spared, chosen]))
            chosen = np.concatenate([chosen, self._chosen(shard, found, count - len(chosen), others)])
        rest = self._coldest_of_all(shard, count - len(chosen), np.concatenate([spared, chosen]))
        return np.concatenate([chosen, rest])

    def _coldest_of_all(self, shard: KeyedShard, count: int, spared: np.ndarray) -> np.ndarray:
        """Keys of the coldest rows, where nearly all that a round has collected are spared."""
        if not count:
            return NO_KEYS
        tables, vacant = shard.index.tables, shard.vacant if shard.vacancies else None
        found = [live_slots(table, 0, len(table), vacant) for table in tables]
        keys, rows = (np.concatenate(each) for each in zip(*found, strict=True))
        keys, first = np.unique(keys, return_index=True)  # while an index grows, it has some keys twice
        others = ~is_among(keys, np.sort(spared))
        keys, rows = keys[others], rows[first[others]]
        return keys[np.argsort(self._ranks(shard, rows), kind="stable")[:count]]

    def prepare(self, shard: KeyedShard, slots: int) -> None:
        """Go on with the round, if there is use for it."""
        if self._cold.left > self._cold.collected // 2:
            return
        self._go_on(shard, min(slots, MAX_SLOTS))

    def _go_on(self, shard: KeyedShard, slots: int) -> None:
        """Go on with the round; when it ends, what it has collected takes the place of what is left of the last one."""
        if self._scan(shard, slots):
            self._cold, self._coming = self._coming, Bins()

    def _scan(self, shard: KeyedShard, slots: int) -> bool:
        """Collect the coldest of the next so many slots; whether the round has ended."""
        if self._edges is None:
            rows = sample(shard)
            if not len(rows):
                return True
            shares = np.arange(1, BINS + 1) / (BINS * COLD_SHARE)
            self._edges = np.quantile(self._ranks(shard, rows), shares, method="higher")
        keys, rows, ended = self._hand.piece(shard, slots)
        ranks = self._ranks(shard, rows)
        cold = np.flatnonzero(ranks <= self._edges[-1])
        self._coming.add(np.searchsorted(self._edges, ranks[cold]), keys[cold], ranks[cold])
        if ended:
            self._edges = None
            self._coming.join()
        return ended

    def _chosen(self, shard: KeyedShard, bins: Bins, count: int, spared: np.ndarray) -> np.ndarray:
        """Keys of rows that are still as cold as when they were collected, from the coldest bin on, each once.

        While rows may not go from the index (a copy is being made), the index grows, so the hand finds some keys twice.
        """
        found = NO_KEYS
        while len(found) < count and bins.left:
            keys, ranks = bins.take(count - len(found))
            rows = np.empty(len(keys), np.int64)
            shard.index.find(keys, rows)
            there = rows >= 0
            if shard.vacancies:
                assert shard.vacant is not None
                there[there] = shard.vacant[rows[there]] == 0
            keys, rows, ranks = keys[there], rows[there], ranks[there]
            keys = distinct(keys[self._ranks(shard, rows) <= ranks])
            others = is_among(keys, spared) | is_among(keys, np.sort(found))
            found = np.concatenate([found, keys[~others]])
        return found


class Bins:
    """Keys and their ranks, in bins from the coldest on."""

    def __init__(self) -> None:
        self._bins: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(BINS)]
        self.collected = self.left = 0

    def add(self, bins: np.ndarray, keys: np.ndarray, ranks: np.ndarray) -> None:
        order = np.argsort(bins, kind="stable")
        ends = np.searchsorted(bins[order], np.arange(BINS), side="right")
        for number, which in enumerate(np.split(order, ends[:-1])):
            if len(which):
                self._bins[number].append((keys[which], ranks[which]))
        self.collected += len(keys)
        self.left += len(keys)

    def join(self) -> None:
        """Make one piece of the pieces of each bin."""
        for pieces in self._bins:
            if len(pieces) > 1:
                keys, ranks = zip(*pieces, strict=True)
                pieces[:] = [(np.concatenate(keys), np.concatenate(ranks))]

    def take(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """At most so many keys and ranks, of the coldest bin that has any."""
        pieces = next(pieces for pieces in self._bins if pieces)
        keys, ranks = pieces.pop()
        if len(keys) > most:
            pieces.append((keys[most:], ranks[most:]))
        self.left -= min(most, len(keys))
        return keys[:most], ranks[:most]


def is_among(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which of the keys are among others, which are sorted. (np.isin hashes both, and takes 50 times as long.)"""
    if not len(others):
        return np.zeros(len(keys), np.bool_)
    places = np.searchsorted(others, keys)
    places[places == len(others)] = 0
    found: np.ndarray = others[places] == keys
    return found


def new_rows(shard: KeyedShard, keys: np.ndarray, unborn: np.ndarray | None = None) -> int:
    """How many rows an op on these keys would create; of `unborn` ones, those that are admitted."""
    if unborn is not None and shard.admission is not None:
        return len(shard.admission.most_born(keys[unborn]))
    rows = np.empty(len(keys), np.int64)
    missing = shard.index.find(keys, rows)
    if shard.vacancies:
        assert shard.vacant is not None
        missing += int(np.count_nonzero(shard.vacant[rows[rows >= 0]]))
    if missing and missing < len(keys):
        return len(distinct(keys[_absent(shard, rows)]))
    return len(distinct(keys)) if missing else 0


def _absent(shard: KeyedShard, rows: np.ndarray) -> np.ndarray:
    absent = rows < 0
    if shard.vacancies:
        assert shard.vacant is not None
        absent[~absent] = shard.vacant[rows[~absent]] != 0
    return absent


def must_go(shard: KeyedShard, new: int) -> int:
    """How many rows have to go before an op that creates `new` ones, so that the shard keeps within its budget."""
    if not shard.most_rows or len(shard) + new <= shard.most_rows:
        return 0
    return min(len(shard), len(shard) + new - shard.most_rows + min(shard.most_rows // SPARE, MOST_SPARE))
