"""Books: which ops trainers have made, which were acknowledged, and so what must be in the tables.

Each op leaves a mark of its own. A row has a column for each trainer, and in it a digit (of two bits) for each of the
trainer's ops, to which the op adds one. So the value of a row names the ops that are in it, and how often: a lost op, a
repeated one, and two mistakes that would cancel out in a plain sum are all seen, in every pull and at the end.
"""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np

from dps.calls import Certificate
from dps.state.ops import TableSpec
from dps.state.partition import group

__all__ = ["Books", "Table"]

OPS = 30  # that a trainer may make to one table: digits of an int64
KEYED = np.array([-(2**63), -5, 0, 1, 2, 3, 10**6, 10**6 + 1, 2**40, 2**40 + 7, 2**62, 2**63 - 1])
CHANGES = ("push", "push", "push_async", "push_async", "push_pull", "push_both")
LOOKS = ("pull", "pull_async", "pull_certified", "meet")


class Act(NamedTuple):
    """One call of a trainer: an op that makes the mark `digit`, or a look."""

    verb: str
    table: Table
    keys: np.ndarray
    digit: int = -1


class Table:
    """One table's books."""

    def __init__(self, spec: TableSpec, trainers: int):
        self.spec, self.name = spec, spec.name
        self.keys = KEYED if spec.keyed else np.arange(spec.rows or 0)
        shards = group(self.keys, spec.rows or 0, spec.shards, spec.name)
        order = np.arange(len(self.keys)) if shards.order is None else shards.order
        self.shard = {int(self.keys[j]): n for n in range(spec.shards) for j in order[slice(*shards.starts[n : n + 2])]}
        self.collects = spec.aggregate is not None
        self.touched = {key: [0] * trainers for key in self.keys.tolist()}  # marks of the ops on each row
        self.seqs: list[list[tuple[int, int]]] = [[] for _ in range(trainers)]  # (clock, number) by digit
        self.issued, self.acknowledged = [0] * trainers, [0] * trainers  # marks

    def before(self, trainer: int, clock: float) -> int:
        """The marks of a trainer's ops of clocks before `clock`."""
        return sum(1 << 2 * digit for digit, (when, _) in enumerate(self.seqs[trainer]) if when < clock)

    def up_to(self, trainer: int, last: tuple[int, int]) -> int:
        """The marks of a trainer's ops up to one of them."""
        return sum(1 << 2 * digit for digit, seq in enumerate(self.seqs[trainer]) if seq <= last)

    def check(self, what: str, keys: np.ndarray, rows: np.ndarray, least: list[int], exact: bool = False) -> None:
        """Each op at most once; none before an earlier one of the same trainer; all of `least` (`exact`: no other)."""
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            for trainer, value in enumerate(row):
                touched, issued = self.touched[key][trainer], self.issued[trainer]
                missing = touched & (least[trainer] | (1 << value.bit_length()) - 1) & ~value
                surplus = value & ~(touched & (least[trainer] if exact else issued))
                if missing or surplus or value < 0:
                    wrong, how = (
                        (missing, "is missing") if missing else (surplus, "is there, and should not be (again)")
                    )
                    seq = (self.seqs[trainer] + [(-1, -1)] * OPS)[((wrong & -wrong).bit_length() - 1) // 2]
                    raise AssertionError(
                        f"{what} of table {self.name!r}, key {key} in shard {self.shard[key]}: op {seq} (clock, "
                        f"number) of trainer {trainer} {how}; the row has {value:b}, of {touched:b}, at least "
                        f"{least[trainer]:b}"
                    )

    def certify(self, keys: np.ndarray, rows: np.ndarray, certificate: Certificate, origin: int) -> None:
        """The rows contain just what the certificate says; `origin` is that of trainer 0."""
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            last = certificate.shards[self.shard[key]]
            for trainer, value in enumerate(row):
                said = self.up_to(trainer, last.get(origin + trainer, (-1, -1))) & self.touched[key][trainer]
                assert value == said, f"key {key} of {self.name!r} has {value:b} of trainer {trainer}, not {said:b}"


class Books:
    """A random program for each trainer, and the books about it.

    Parameters
    ----------
    draw : random.Random
        Of the programs.
    specs : list of TableSpec
        int64 tables with as many columns as there are trainers.
    trainers, clocks : int
    staleness : int or math.inf
    """

    def __init__(self, draw: random.Random, specs: list[TableSpec], trainers: int, clocks: int, staleness: float):
        self.staleness, self.trainers, self.clocks = staleness, trainers, clocks
        self.tables = [Table(spec, trainers) for spec in specs]
        self.answers: dict[tuple[int, int, int], bytes] = {}  # to push_pull, by op
        meet = [draw.random() < 0.1 for _ in range(clocks)]
        self.programs = [[self._draw(draw, n, c, meet[c]) for c in range(clocks)] for n in range(trainers)]

    def _draw(self, draw: random.Random, trainer: int, clock: int, meet: bool) -> list[Act]:
        """What a trainer does at a clock."""
        acts, number = [], 0
        for _ in range(draw.choice((0, 1, 2, 3))):
            table = draw.choice(self.tables)
            verb = draw.choice(CHANGES if draw.random() < 0.6 else LOOKS[:3])
            if table.collects and verb in ("push_pull", "pull_certified"):
                verb = "push"
            tables = self.tables if verb == "push_both" else [table]
            for changed in tables:
                keys = np.array(draw.sample(changed.keys.tolist(), draw.randint(1, 5)))
                if not changed.spec.keyed and draw.random() < 0.3:
                    keys = np.arange(keys.min(), keys.max() + 1)
                digit = -1
                if verb in CHANGES:
                    digit = len(changed.seqs[trainer])
                    changed.seqs[trainer].append((clock, number))
                    number += 1
                    for key in keys.tolist():
                        changed.touched[key][trainer] |= 1 << 2 * digit
                    assert digit < OPS
                acts.append(Act(verb, changed, keys, digit))
        return [*acts, Act("meet", self.tables[0], np.zeros(0))] if meet else acts

    def train(self, trainer: Any, partitions: Any, skipping: bool) -> int:
        """What `run` is given; with `skipping`, completed clocks are not gone through again."""
        attempt = Attempt(self, trainer)
        if skipping:
            for _ in trainer.iterate([np.zeros(1)], epochs=self.clocks):
                attempt.iteration()
        else:
            while trainer.clock < self.clocks:
                attempt.iteration()
                trainer.tick()
        for table in self.tables:
            table.acknowledged[trainer.number] = table.before(trainer.number, math.inf)
        return trainer.clock

    def close(self, client: Any) -> None:
        """All runs are over: every op is in the tables, once."""
        for table in self.tables:
            every = [table.before(n, math.inf) for n in range(self.trainers)]
            rows = client.pull(table.name, table.keys).reshape(len(table.keys), -1)
            table.check("the end", table.keys, rows, every, exact=True)


class Attempt:
    """One attempt at being a trainer."""

    def __init__(self, books: Books, trainer: Any):
        self.books, self.trainer, self.number = books, trainer, trainer.number
        self.own = {table.name: 0 for table in books.tables}  # marks that this attempt has made
        self.pulls: list[tuple[Act, Any, list[int]]] = []

    def iteration(self) -> None:
        """Carry out the program of the trainer's clock."""
        clock = self.trainer.clock
        for table in self.books.tables:
            table.acknowledged[self.number] |= table.before(self.number, clock)
        acts = iter(self.books.programs[self.number][clock])
        for act in acts:
            batch = [act, *(next(acts) for _ in self.books.tables[1:])] if act.verb == "push_both" else [act]
            for each in batch:
                self._issue(each)
            getattr(self, f"_{act.verb}")(*batch)
        while self.pulls:
            act, pending, least = self.pulls.pop()
            act.table.check(f"a pull_async at clock {clock}", act.keys, self._rows(pending.result()), least)

    def _issue(self, act: Act) -> None:
        if act.digit >= 0:
            act.table.issued[self.number] |= 1 << 2 * act.digit

    def _least(self, table: Table, acknowledged: bool = True) -> list[int]:
        """The marks that an answer to a request made now must contain."""
        books, clock = self.books, self.trainer.clock
        least = [table.before(n, clock - books.staleness) for n in range(books.trainers)]
        if not table.collects:
            if acknowledged:
                least = [a | b for a, b in zip(least, table.acknowledged, strict=True)]
            least[self.number] |= self.own[table.name]
        return least

    def _rows(self, answer: np.ndarray) -> np.ndarray:
        return answer.reshape(len(answer), -1)

    def _values(self, act: Act) -> np.ndarray:
        self.own[act.table.name] |= 1 << 2 * act.digit
        values = np.zeros((len(act.keys), self.books.trainers), np.int64)
        values[:, self.number] = 1 << 2 * act.digit
        return values.reshape(-1) if self.books.trainers == 1 else values

    def _where(self, act: Act) -> Any:
        """The keys, or a slice where they are a range of a dense table."""
        dense = not act.table.spec.keyed and (np.diff(act.keys) == 1).all()
        return slice(int(act.keys[0]), int(act.keys[-1]) + 1) if dense else act.keys

    def _acknowledged(self, act: Act) -> None:
        act.table.acknowledged[self.number] |= 1 << 2 * act.digit

    def _push(self, act: Act) -> None:
        self.trainer.push(act.table.name, self._where(act), self._values(act))
        self._acknowledged(act)

    def _push_async(self, act: Act) -> None:
        self.trainer.push_async(act.table.name, self._where(act), self._values(act))

    def _push_both(self, *acts: Act) -> None:
        self.trainer.push({act.table.name: (self._where(act), self._values(act)) for act in acts})
        for act in acts:
            self._acknowledged(act)

    def _push_pull(self, act: Act) -> None:
        values, table = self._values(act), act.table
        least = self._least(table, acknowledged=False)  # it may be answered as it was first, long ago
        answer = self._rows(self.trainer.push_pull(table.name, self._where(act), values))
        self._acknowledged(act)
        table.check(f"a push_pull at clock {self.trainer.clock}", act.keys, answer, least)
        op = (self.number, *table.seqs[self.number][act.digit])
        first = self.answers.setdefault(op, answer.tobytes())
        assert first == answer.tobytes(), f"push_pull {op} (trainer, clock, number) was answered in two ways"

    @property
    def answers(self) -> dict[tuple[int, int, int], bytes]:
        return self.books.answers

    def _pull(self, act: Act) -> None:
        least = self._least(act.table)
        rows = self._rows(self.trainer.pull(act.table.name, self._where(act)))
        act.table.check(f"a pull at clock {self.trainer.clock}", act.keys, rows, least)

    def _pull_async(self, act: Act) -> None:
        least = self._least(act.table)
        self.pulls.append((act, self.trainer.pull_async(act.table.name, self._where(act)), least))

    def _pull_certified(self, act: Act) -> None:
        least = self._least(act.table)
        rows, certificate = self.trainer.pull_certified(act.table.name, self._where(act))
        rows = self._rows(rows)
        act.table.check(f"a pull at clock {self.trainer.clock}", act.keys, rows, least)
        act.table.certify(act.keys, rows, certificate, self.trainer.trainer - self.number)

    def _meet(self, act: Act) -> None:
        clock = self.trainer.clock
        assert self.trainer.allreduce([clock, 1]).tolist() == [clock * self.books.trainers, self.books.trainers]
