"""Books: which ops were made, which were acknowledged, and so what must be in the tables.

Each op leaves a mark of its own. A row has a column for each *author*, and in it a digit (of two bits) for each of the
author's ops, to which the op adds one. So the value of a row names the ops that are in it, and how often: a lost op, a
repeated one, and two mistakes that would cancel out in a plain sum are all seen, in every pull and at the end.

Authors are the trainers, by number, and after them clients without a clock. A trainer is run again until it is done:
in the end all its ops are there. A client that dies stays dead: in the end what was acknowledged is there, perhaps
what was on its way as well, and in each shard nothing without what it did there before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import random
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import numpy as np

from dps.calls import Certificate
from dps.errors import ControllerGoneError
from dps.state.ops import NO_CLOCK, TableSpec
from dps.state.partition import group
from dps.testing.losses import Losses

__all__ = ["Books", "Table"]

OPS = 30  # that a trainer may make to one table: digits of an int64
KEYED = np.array([-(2**63), -5, 0, 1, 2, 3, 10**6, 10**6 + 1, 2**40, 2**40 + 7, 2**62, 2**63 - 1])
AGAIN = 0.01  # seconds until a client looks for the controller again
CHANGES = ("push", "push", "push_async", "push_async", "push_pull", "push_both")
LOOKS = ("pull", "pull_async", "pull_certified", "meet")


class Act(NamedTuple):
    """One call: an op that makes the mark `digit`, or a look."""

    verb: str
    table: Table
    keys: np.ndarray
    digit: int = -1


class Table:
    """One table's books."""

    def __init__(self, spec: TableSpec, authors: int):
        self.spec, self.name = spec, spec.name
        self.keys = KEYED if spec.keyed else np.arange(spec.rows or 0)
        shards = group(self.keys, spec.rows or 0, spec.shards, spec.name)
        order = np.arange(len(self.keys)) if shards.order is None else shards.order
        self.shard = {int(self.keys[j]): n for n in range(spec.shards) for j in order[slice(*shards.starts[n : n + 2])]}
        self.collects = spec.aggregate is not None
        self.touched = {key: [0] * authors for key in self.keys.tolist()}  # marks of the ops on each row
        self.seqs: list[list[tuple[int, int]]] = [[] for _ in range(authors)]  # (clock, number) by digit
        self.excused: Callable[[int, int], int] = lambda shard, author: 0  # marks of ops that may be gone
        self.issued, self.acknowledged = [0] * authors, [0] * authors  # marks

    def before(self, author: int, clock: float) -> int:
        """The marks of an author's ops of clocks before `clock`."""
        return sum(1 << 2 * digit for digit, (when, _) in enumerate(self.seqs[author]) if when < clock)

    def up_to(self, author: int, last: tuple[int, int]) -> int:
        """The marks of an author's ops up to one of them."""
        return sum(1 << 2 * digit for digit, seq in enumerate(self.seqs[author]) if seq <= last)

    def check(
        self, what: str, keys: np.ndarray, rows: np.ndarray, least: list[int], most: list[int] | None = None
    ) -> None:
        """Each op at most once; none before an earlier one of its author; all of `least`, no other than `most`."""
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            for author, value in enumerate(row):
                touched = self.touched[key][author]
                missing = touched & (least[author] | (1 << value.bit_length()) - 1) & ~value
                surplus = value & ~(touched & (most or self.issued)[author])
                if missing:
                    missing &= ~self.excused(self.shard[key], author)
                if missing or surplus or value < 0:
                    wrong, how = (
                        (missing, "is missing") if missing else (surplus, "is there, and should not be (again)")
                    )
                    seq = (self.seqs[author] + [(-1, -1)] * OPS)[((wrong & -wrong).bit_length() - 1) // 2]
                    raise AssertionError(
                        f"{what} of table {self.name!r}, key {key} in shard {self.shard[key]}: op {seq} (clock, "
                        f"number) of author {author} {how}; the row has {value:b}, of {touched:b}, at least "
                        f"{least[author]:b}"
                    )

    def marks(self, author: int, seqs: Container[tuple[int, int]]) -> int:
        """The marks of these of an author's ops."""
        return sum(1 << 2 * digit for digit, seq in enumerate(self.seqs[author]) if seq in seqs)

    def ops(self, author: int, marks: int) -> set[tuple[int, int]]:
        """Those of an author's ops that have made these marks."""
        return {seq for digit, seq in enumerate(self.seqs[author]) if marks >> 2 * digit & 1}

    def whole(self, keys: np.ndarray, rows: np.ndarray) -> dict[tuple[int, int], int]:
        """Each op is on all its rows of a shard, or on none. These are all rows; (shard, author) -> marks."""
        there: dict[tuple[int, int], int] = {}  # shard, author -> marks
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            for author, value in enumerate(row):
                where = self.shard[key], author
                there[where] = there.get(where, 0) | value
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            for author, value in enumerate(row):
                lacks = self.touched[key][author] & there[self.shard[key], author] & ~value
                assert not lacks, (
                    f"key {key} of {self.name!r} lacks ops of author {author} that its shard has: {lacks:b}"
                )
        return there

    def certify(self, keys: np.ndarray, rows: np.ndarray, certificate: Certificate, origins: dict[int, int]) -> None:
        """The rows contain just what the certificate says of these authors (author -> origin), but for losses."""
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            last, shard = certificate.shards[self.shard[key]], self.shard[key]
            for author, origin in origins.items():
                said = self.up_to(author, last.get(origin, (-1, -1))) & self.touched[key][author]
                if said != row[author]:
                    said &= row[author] | ~self.excused(shard, author)
                assert said == row[author], (
                    f"key {key} of {self.name!r}: {row[author]:b} of author {author}, not {said:b}"
                )


class Books:
    """A random program for each author, and the books about it.

    Parameters
    ----------
    draw : random.Random
        Of the programs.
    specs : list of TableSpec
        int64 tables with as many columns as there are authors.
    trainers, clocks : int
    staleness : int or math.inf
    clients : int
        Authors without a clock.
    losses : Losses, optional
        Of tables with ``ack="memory"``.
    """

    def __init__(
        self,
        draw: random.Random,
        specs: list[TableSpec],
        trainers: int,
        clocks: int,
        staleness: float,
        clients: int = 0,
        losses: Losses | None = None,
    ):
        self.staleness, self.trainers, self.clocks = staleness, trainers, clocks
        self.authors = range(trainers + clients)
        self.tables = [Table(spec, len(self.authors)) for spec in specs]
        self.losses = losses or Losses()
        for table in self.tables:
            table.excused = functools.partial(self._excused, table)
        self.answers: dict[tuple[int, int, int], bytes] = {}  # to push_pull, by op
        self.callers: dict[int, Any] = {}  # the last attempt of each author
        self.done: set[int] = set()  # authors whose programs have ended
        meet = [draw.random() < 0.1 for _ in range(clocks)]
        self.programs = [
            [self._draw(draw, n, c, 0, draw.choice((0, 1, 2, 3)), meet[c]) for c in range(clocks)]
            for n in range(trainers)
        ]
        for n in self.authors[trainers:]:
            self.programs.append([])
            number = 0
            for _ in range(draw.randint(2, 6)):
                self.programs[n].append(self._draw(draw, n, NO_CLOCK, number, draw.choice((0, 1, 2))))
                number = max(1 + seq[1] for table in self.tables for seq in [(0, -1), *table.seqs[n]])

    def _draw(
        self, draw: random.Random, author: int, clock: int, number: int, calls: int, meet: bool = False
    ) -> list[Act]:
        """What an author does at a clock, where that op of its is the next."""
        acts = []
        for _ in range(calls):
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
                    digit = len(changed.seqs[author])
                    changed.seqs[author].append((clock, number))
                    number += 1
                    for key in keys.tolist():
                        changed.touched[key][author] |= 1 << 2 * digit
                    assert digit < OPS
                acts.append(Act(verb, changed, keys, digit))
        return [*acts, Act("meet", self.tables[0], np.zeros(0))] if meet else acts

    def train(self, trainer: Any, partitions: Any, skipping: bool) -> int:
        """What `run` is given; with `skipping`, completed clocks are not gone through again."""
        attempt = Attempt(self, trainer, trainer.number)
        if skipping:
            for _ in trainer.iterate([np.zeros(1)], epochs=self.clocks):
                attempt.iteration(trainer.clock)
        else:
            while trainer.clock < self.clocks:
                attempt.iteration(trainer.clock)
                trainer.tick()
        self._finished(trainer.number)
        return trainer.clock

    def call(self, client: Any, author: int, pause: Callable[[], float]) -> None:
        """What a client without a clock does; `pause` gives the seconds before each part of its program."""
        while not client.trainer:  # of a first connection a client is told that it broke: there may be nobody
            with contextlib.suppress(ControllerGoneError):
                client._sleep(AGAIN)
                client._fetch_route()
        attempt = Attempt(self, client, author)
        for part in range(len(self.programs[author])):
            client._sleep(pause())
            attempt.iteration(part)
        client.wait()
        self._finished(author)

    def _finished(self, author: int) -> None:
        for table in self.tables:
            table.acknowledged[author] = table.before(author, math.inf)
        self.done.add(author)

    def origin(self, author: int) -> int:
        """What an author is to the servers; 0: nobody yet."""
        if author >= self.trainers:
            return self.callers[author].trainer if author in self.callers else 0
        return next((caller.trainer - n + author for n, caller in self.callers.items() if n < self.trainers), 0)

    def origins(self) -> dict[int, int]:
        """The origins of authors that servers know: those of a run that may be over are forgotten there."""
        over = self.trainers if self.done.issuperset(range(self.trainers)) else 0
        return {n: self.origin(n) for n in self.authors[over:]}

    def _excused(self, table: Table, shard: int, author: int) -> int:
        return table.marks(author, self.losses.excused(table.spec.id, shard, self.origin(author)))

    def close(self, client: Any) -> None:
        """All is over: every op is in the tables, once; of a client that has died, those that were acknowledged."""
        for table in self.tables:
            most = [table.before(n, math.inf) if n in self.done else table.issued[n] for n in self.authors]
            rows = client.pull(table.name, table.keys).reshape(len(table.keys), -1)
            table.check("the end", table.keys, rows, table.acknowledged, most)
            for (shard, author), marks in table.whole(table.keys, rows).items():
                touched = [of[author] for key, of in table.touched.items() if table.shard[key] == shard]
                both = [table.ops(author, some) for some in (marks, functools.reduce(operator.or_, touched) & ~marks)]
                self.losses.check(table.spec.id, shard, self.origin(author), *both)


class Attempt:
    """One attempt at being an author: a trainer, or a client without a clock."""

    def __init__(self, books: Books, caller: Any, author: int):
        self.books, self.caller, self.author = books, caller, author
        self.timed = author < books.trainers
        self.own = {table.name: 0 for table in books.tables}  # marks that this attempt has made
        self.pulls: list[tuple[Act, Any, list[int]]] = []
        books.callers[author] = caller

    def iteration(self, part: int) -> None:
        """Carry out that part of the program: the trainer's clock."""
        if self.timed:
            for table in self.books.tables:
                table.acknowledged[self.author] |= table.before(self.author, part)
        acts = iter(self.books.programs[self.author][part])
        for act in acts:
            batch = [act, *(next(acts) for _ in self.books.tables[1:])] if act.verb == "push_both" else [act]
            for each in batch:
                self._issue(each)
            getattr(self, f"_{act.verb}")(*batch)
        while self.pulls:
            act, pending, least = self.pulls.pop()
            act.table.check(f"a pull_async{self._when}", act.keys, self._rows(pending.result()), least)

    @property
    def _when(self) -> str:
        return f" at clock {self.caller.clock}" if self.timed else f" by author {self.author}"

    def _issue(self, act: Act) -> None:
        if act.digit >= 0:
            act.table.issued[self.author] |= 1 << 2 * act.digit

    def _least(self, table: Table, acknowledged: bool = True) -> list[int]:
        """The marks that an answer to a request made now must contain."""
        books = self.books
        least = [0 for _ in books.authors]
        if self.timed:
            least[: books.trainers] = [
                table.before(n, self.caller.clock - books.staleness) for n in range(books.trainers)
            ]
        for n in books.authors[books.trainers if table.collects else 0 :]:  # whose ops count at once
            least[n] |= table.acknowledged[n] * acknowledged | self.own[table.name] * (n == self.author)
        return least

    def _rows(self, answer: np.ndarray) -> np.ndarray:
        return answer.reshape(len(answer), -1)

    def _values(self, act: Act) -> np.ndarray:
        self.own[act.table.name] |= 1 << 2 * act.digit
        values = np.zeros((len(act.keys), len(self.books.authors)), np.int64)
        values[:, self.author] = 1 << 2 * act.digit
        return values.reshape(-1) if len(self.books.authors) == 1 else values

    def _where(self, act: Act) -> Any:
        """The keys, or a slice where they are a range of a dense table."""
        dense = not act.table.spec.keyed and (np.diff(act.keys) == 1).all()
        return slice(int(act.keys[0]), int(act.keys[-1]) + 1) if dense else act.keys

    def _acknowledged(self, act: Act) -> None:
        act.table.acknowledged[self.author] |= 1 << 2 * act.digit

    def _push(self, act: Act) -> None:
        self.caller.push(act.table.name, self._where(act), self._values(act))
        self._acknowledged(act)

    def _push_async(self, act: Act) -> None:
        self.caller.push_async(act.table.name, self._where(act), self._values(act))

    def _push_both(self, *acts: Act) -> None:
        self.caller.push({act.table.name: (self._where(act), self._values(act)) for act in acts})
        for act in acts:
            self._acknowledged(act)

    def _push_pull(self, act: Act) -> None:
        values, table = self._values(act), act.table
        least = self._least(table, acknowledged=False)  # it may be answered as it was first, long ago
        answer = self._rows(self.caller.push_pull(table.name, self._where(act), values))
        self._acknowledged(act)
        table.check(f"a push_pull{self._when}", act.keys, answer, least)
        op = (self.author, *table.seqs[self.author][act.digit])
        first = self.answers.setdefault(op, answer.tobytes())
        assert table.spec.ack == "memory" or first == answer.tobytes(), (
            f"push_pull {op} (author, clock, number) was answered in two ways"
        )

    @property
    def answers(self) -> dict[tuple[int, int, int], bytes]:
        return self.books.answers

    def _pull(self, act: Act) -> None:
        least = self._least(act.table)
        rows = self._rows(self.caller.pull(act.table.name, self._where(act)))
        act.table.check(f"a pull{self._when}", act.keys, rows, least)

    def _pull_async(self, act: Act) -> None:
        least = self._least(act.table)
        self.pulls.append((act, self.caller.pull_async(act.table.name, self._where(act)), least))

    def _pull_certified(self, act: Act) -> None:
        least = self._least(act.table)
        rows, certificate = self.caller.pull_certified(act.table.name, self._where(act))
        rows = self._rows(rows)
        act.table.check(f"a pull{self._when}", act.keys, rows, least)
        act.table.certify(act.keys, rows, certificate, self.books.origins())

    def _meet(self, act: Act) -> None:
        clock = self.caller.clock
        assert self.caller.allreduce([clock, 1]).tolist() == [clock * self.books.trainers, self.books.trainers]
