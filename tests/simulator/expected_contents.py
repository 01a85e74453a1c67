"""Expected contents: the ops that were issued, the ops that were acknowledged, and so what the tables must hold.

Each op leaves a mark of its own. A row has a column for each *author*, and in it a digit (of two bits) for each of the
author's ops, to which the op adds one. So the value of a row names the ops that are in it, and how often. Every pull
and the end of a schedule show a lost op, a repeated op, and two errors that would cancel each other in a plain sum.

Authors are the trainers, by number, and after them clients without a clock. A trainer that is lost is run again until
it is done, so in the end all its ops are in the tables. A client that dies is not run again: in the end the tables hold
its acknowledged ops, perhaps also its last ones, and in each shard no op without the earlier ones of this client.

Where programs delete rows, too, a row need not have all ops: `expected_deletions.py` says which it may have.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import random
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from losses import Losses

import dps
from dps.engine.client.ticket import Certificate
from dps.engine.functions.rows import Rows
from dps.engine.state.ops import NO_CLOCK, TableSpec
from dps.errors import ControllerGoneError
from dps.functions import deleting

__all__ = ["FUNCTIONS", "ExpectedContents", "ExpectedTable", "delete_listed"]

MAX_OPS = 30  # of one author on one table, because an int64 has room for 31 digits of two bits
KEYED = np.array([-(2**63), -5, 0, 1, 2, 3, 10**6, 10**6 + 1, 2**40, 2**40 + 7, 2**62, 2**63 - 1])
CONTROLLER_RETRY_SECONDS = 0.01
CHANGE_VERBS = ("push", "push", "push_async", "push_async", "push_pull", "push_both")
READ_VERBS = ("pull", "pull_async", "pull_certified", "meet")
DELETE_VERBS = ("delete", "delete", "delete", "delete_async", "delete_where", "clear")


@dps.function
def read_rows(rows: Rows) -> Any:
    return [rows.keys, rows.values]


@dps.function(changes=True)
def mark_rows(rows: Rows, author: int, amount: int) -> Any:
    """Leave a mark on rows; their values before."""
    rows.values[:, author] += amount
    return [rows.keys, rows.before]


@dps.function(changes=True)
def mark_all(rows: Rows, author: int, amount: int) -> None:
    fresh = rows.replace(0, len(rows))
    fresh[...] = rows.before
    fresh[:, author] += amount


@read_rows.merge
def _(parts: list[Any]) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


mark_rows.merge(lambda parts: tuple(np.concatenate(column) for column in zip(*parts, strict=True)))
delete_listed = deleting(lambda rows, listed: np.isin(rows.keys, listed))
FUNCTIONS = (read_rows, mark_rows, mark_all)


class Act(NamedTuple):
    """One call of a program: an op that leaves the mark `digit`, or a read (`digit` is -1)."""

    verb: str
    table: ExpectedTable
    keys: np.ndarray
    digit: int = -1


class ExpectedTable:
    """For one table: the rows that each op touches, and the marks of the ops issued and acknowledged."""

    def __init__(self, spec: TableSpec, authors: int):
        self.spec, self.name = spec, spec.name
        self.keys = KEYED if spec.keyed else np.arange(spec.rows or 0)
        self.shard = self.shards_of(spec.shard_map.edges)
        self.collects = spec.aggregate is not None
        self.touched = {key: [0] * authors for key in self.keys.tolist()}  # key: by author, marks of the ops on its row
        self.seqs: list[list[tuple[int, int]]] = [[] for _ in range(authors)]  # (clock, number) by digit
        self.excused: Callable[[int, int], int] = lambda shard, author: 0  # marks of the ops that may be lost
        self.issued, self.acknowledged = [0] * authors, [0] * authors  # marks, by author

    def shards_of(self, edges: Sequence[int]) -> dict[int, int]:
        """The shard of each key, where the shards of the table have these edges."""
        places = self.spec.shard_map.places(self.keys)
        shards = np.searchsorted(edges, places, side="right") - 1
        return dict(zip(self.keys.tolist(), shards.tolist(), strict=True))

    def draw(self, author: int, seq: tuple[int, int], keys: np.ndarray, deletes: bool = False) -> int:
        """Put one more op on these rows into an author's program; its digit."""
        assert not deletes, "only a table of `expected_deletions.py` knows what deletions leave"
        digit = len(self.seqs[author])
        assert digit < MAX_OPS
        self.seqs[author].append(seq)
        for key in keys.tolist():
            self.touched[key][author] |= 1 << 2 * digit
        return digit

    def issue(self, author: int, marks: int) -> None:
        """The author is about to send the ops that leave these marks."""
        self.issued[author] |= marks

    def acknowledge(self, author: int, marks: int) -> None:
        """The author knows that these ops count."""
        self.acknowledged[author] |= marks

    def rewind(self, author: int, clock: int) -> None:
        """The table is as of a clock again."""
        self.acknowledged[author] = self.issued[author] = self.before(author, clock)

    def close(self, client: Any, rows: np.ndarray) -> None:
        """Assert what else must hold at rest, when the table has these rows."""

    def before(self, author: int, clock: float) -> int:
        """The marks of an author's ops of clocks before `clock`."""
        return sum(1 << 2 * digit for digit, (when, _) in enumerate(self.seqs[author]) if when < clock)

    def up_to(self, author: int, last: tuple[int, int]) -> int:
        """The marks of an author's ops up to and including `last`."""
        return sum(1 << 2 * digit for digit, seq in enumerate(self.seqs[author]) if seq <= last)

    def check(
        self, what: str, keys: np.ndarray, rows: np.ndarray, least: list[int], most: list[int] | None = None
    ) -> None:
        """Assert that each row holds each op at most once, and no op without the earlier ones of its author.

        Each row also holds all ops of `least` that touch it, and no op that is not in `most`.
        """
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
                    seq = (self.seqs[author] + [(-1, -1)] * MAX_OPS)[((wrong & -wrong).bit_length() - 1) // 2]
                    raise AssertionError(
                        f"{what} of table {self.name!r}, key {key} in shard {self.shard[key]}: op {seq} (clock, "
                        f"number) of author {author} {how}; the row has {value:b}, of {touched:b}, at least "
                        f"{least[author]:b}"
                    )

    def marks(self, author: int, seqs: Container[tuple[int, int]]) -> int:
        """The marks of those ops of an author that are in `seqs`."""
        return sum(1 << 2 * digit for digit, seq in enumerate(self.seqs[author]) if seq in seqs)

    def ops(self, author: int, marks: int) -> set[tuple[int, int]]:
        """The ops of an author that left these marks."""
        return {seq for digit, seq in enumerate(self.seqs[author]) if marks >> 2 * digit & 1}

    def whole(self, keys: np.ndarray, rows: np.ndarray) -> dict[tuple[int, int], int]:
        """Assert that each op is on all its rows of a shard, or on none, given all rows; (shard, author) -> marks."""
        there: dict[tuple[int, int], int] = {}
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

    def certify(
        self, keys: np.ndarray, rows: np.ndarray, certificate: Certificate, origins: dict[int, int], merges: bool
    ) -> None:
        """Assert that the rows hold exactly the ops that the certificate names, except for excused losses.

        `origins`: author -> origin, of the authors that are checked. Where shards may have been merged, a row may hold
        more, because the certificate of a merged shard says what two answers with rows of it have in common.
        """
        shard_of = self.shards_of(certificate.edges)
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            last, shard = certificate.shards[shard_of[key]], self.shard[key]
            for author, origin in origins.items():
                certified = self.up_to(author, last.get(origin, (-1, -1))) & self.touched[key][author]
                if certified != row[author]:
                    certified &= row[author] | ~self.excused(shard, author)
                    certified |= row[author] if merges else 0
                assert certified == row[author], (
                    f"key {key} of {self.name!r}: {row[author]:b} of author {author}, not {certified:b}"
                )


class ExpectedContents:
    """A random program for each author, and what the tables must hold during the programs and after them.

    Parameters
    ----------
    draw : random.Random
        Draws the programs.
    specs : list of TableSpec
        int64 tables with as many columns as there are authors.
    trainers, clocks : int
    staleness : int or math.inf
    clients : int
        Number of authors without a clock.
    losses : Losses, optional
        Says which ops tables with ``ack="memory"`` may lose.
    functions : float
        The share of changes that are calls of a function: `mark_rows` or, where they name all rows, `mark_all`.
    deletions : float
        The share of ops by which rows go.
    table : callable
        Makes what is expected of one table, given its definition and the number of authors.
    cut : bool
        Checkpoints are taken. Then functions delete rows only where the rows that they see are those of one clock,
        because a function does not choose a row that an op of a later clock has deleted.
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
        functions: float = 0.0,
        deletions: float = 0.0,
        table: Callable[[TableSpec, int], ExpectedTable] = ExpectedTable,
        cut: bool = False,
    ):
        self._functions, self._deletions, self._cut = functions, deletions, cut
        self.staleness, self.trainers, self.clocks = staleness, trainers, clocks
        self.authors = range(trainers + clients)
        self.tables = [table(spec, len(self.authors)) for spec in specs]
        self.losses = losses or Losses()
        for each in self.tables:
            each.excused = functools.partial(self._excused, each)
        self.answers: dict[tuple[int, int, int], bytes] = {}  # of push_pull, by author, clock, number
        self.callers: dict[int, Any] = {}  # author -> the client or trainer of its last attempt
        self.done: set[int] = set()  # authors whose programs have ended
        self.splits = False  # tables are split, so that servers forget the answers that they keep
        self.merges = False  # and merged
        self.kept = False  # trainers keep rows, which have what is promised and perhaps no more
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
                number = max(1 + seq[1] for each in self.tables for seq in [(0, -1), *each.seqs[n]])

    def _draw(
        self, draw: random.Random, author: int, clock: int, number: int, calls: int, meet: bool = False
    ) -> list[Act]:
        """The calls of an author at a clock; `number` is the number of its next op."""
        acts = []
        for _ in range(calls):
            table = draw.choice(self.tables)
            verb = draw.choice(CHANGE_VERBS if draw.random() < 0.6 else READ_VERBS[:3])
            if table.collects and verb in ("push_pull", "pull_certified"):
                verb = "push"
            if self._functions and not table.collects and draw.random() < self._functions:
                verb = draw.choice(("call", "call", "call_all", "call_reading"))
            if self._deletions and draw.random() < self._deletions:
                verb = draw.choice(DELETE_VERBS)
                if self._cut and verb == "delete_where" and (self.staleness > 0 or clock == NO_CLOCK):
                    verb = "delete"
            tables = self.tables if verb == "push_both" else [table]
            for changed in tables:
                lists = changed.spec.wire.lists  # of which the same few come again
                drawn = random.Random(draw.randrange(3)) if lists else draw
                keys = np.array(drawn.sample(changed.keys.tolist(), drawn.randint(1, 5)))
                if verb == "clear" or (verb == "call_all" and not changed.spec.keyed):
                    keys = changed.keys
                if not changed.spec.keyed and draw.random() < 0.3:
                    keys = np.arange(keys.min(), keys.max() + 1)
                digit = -1
                if verb in (*CHANGE_VERBS, *DELETE_VERBS, "call", "call_all"):
                    digit = changed.draw(author, (clock, number), keys, verb in DELETE_VERBS)
                    number += 1
                acts.append(Act(verb, changed, keys, digit))
        return [*acts, Act("meet", self.tables[0], np.zeros(0))] if meet else acts

    def train(self, trainer: Any, partitions: Any, skipping: bool) -> int:
        """The training function; with `skipping`, a trainer that is run again skips completed clocks."""
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
        """The program of a client without a clock; `pause()` is the seconds to wait before each part."""
        while not client.origin:  # a client does not retry its first connection: the controller might not exist
            with contextlib.suppress(ControllerGoneError):
                client.session.sleep(CONTROLLER_RETRY_SECONDS)
                client.session.fetch_route()
        attempt = Attempt(self, client, author)
        for part in range(len(self.programs[author])):
            client.session.sleep(pause())
            attempt.iteration(part)
        client.wait()
        self._finished(author)

    def _finished(self, author: int) -> None:
        for table in self.tables:
            table.acknowledge(author, table.before(author, math.inf))
        self.done.add(author)

    def origin(self, author: int) -> int:
        """The origin by which the servers know an author; 0 before its first connection."""
        if author >= self.trainers:
            return self.callers[author].origin if author in self.callers else 0
        return next((caller.origin - n + author for n, caller in self.callers.items() if n < self.trainers), 0)

    def origins(self) -> dict[int, int]:
        """The origins of the authors that the servers know. They forget the trainers of a run that is over."""
        over = self.trainers if self.done.issuperset(range(self.trainers)) else 0
        return {n: self.origin(n) for n in self.authors[over:]}

    def _excused(self, table: ExpectedTable, shard: int, author: int) -> int:
        return table.marks(author, self.losses.excused(table.spec.id, shard, self.origin(author)))

    def close(self, client: Any) -> None:
        """Assert at the end that every op is in the tables, once; of a client that died, its acknowledged ops."""
        for table in self.tables:
            if self.splits:  # a client that died may have sent an op again to some of the new shards
                table.shard = table.shards_of(client.session.route(table.name).spec.shard_map.edges)
            if self.merges:  # or of those before they were merged: each place may be one
                table.shard = table.shards_of(range(table.spec.shard_map.edges[-1] + 1))
            most = [table.before(n, math.inf) if n in self.done else table.issued[n] for n in self.authors]
            rows = client.pull(table.name, table.keys).reshape(len(table.keys), -1)
            table.check("the end", table.keys, rows, table.acknowledged, most)
            for (shard, author), marks in table.whole(table.keys, rows).items():
                touched = [of[author] for key, of in table.touched.items() if table.shard[key] == shard]
                both = [table.ops(author, some) for some in (marks, functools.reduce(operator.or_, touched) & ~marks)]
                self.losses.check(table.spec.id, shard, self.origin(author), *both)
            table.close(client, rows)


class Attempt:
    """One attempt of an author: a trainer or client without a clock that goes through the author's program."""

    def __init__(self, expected: ExpectedContents, caller: Any, author: int):
        self.expected, self.caller, self.author = expected, caller, author
        self.timed = author < expected.trainers
        self.sums = {table.name for table in expected.tables if self.timed and table.spec.wire.merge}
        self.own = {table.name: 0 for table in expected.tables}  # marks of this attempt's ops
        self.pulls: list[tuple[Act, Any, list[int]]] = []
        expected.callers[author] = caller

    def iteration(self, part: int) -> None:
        """Carry out one part of the program. A trainer has one part for each clock."""
        if self.timed:
            for table in self.expected.tables:
                table.acknowledge(self.author, table.before(self.author, part))
        acts = iter(self.expected.programs[self.author][part])
        for act in acts:
            batch = [act, *(next(acts) for _ in self.expected.tables[1:])] if act.verb == "push_both" else [act]
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
            act.table.issue(self.author, 1 << 2 * act.digit)

    def _least(self, table: ExpectedTable, acknowledged: bool = True) -> list[int]:
        """The marks that an answer to a request made now must contain."""
        expected = self.expected
        least = [0 for _ in expected.authors]
        if self.timed:
            least[: expected.trainers] = [
                table.before(n, self.caller.clock - expected.staleness) for n in range(expected.trainers)
            ]
        at_once = expected.authors[expected.trainers if table.collects else 0 :]  # whose ops are applied at once
        for n in at_once:
            least[n] |= table.acknowledged[n] * acknowledged | self.own[table.name] * (n == self.author)
        return least

    def _rows(self, answer: np.ndarray) -> np.ndarray:
        return answer.reshape(len(answer), -1)

    def _values(self, act: Act) -> np.ndarray:
        self.own[act.table.name] |= 1 << 2 * act.digit
        values = np.zeros((len(act.keys), len(self.expected.authors)), np.int64)
        values[:, self.author] = 1 << 2 * act.digit
        return values.reshape(-1) if len(self.expected.authors) == 1 else values

    def _where(self, act: Act) -> Any:
        """The keys, or a slice if they are a range of a dense table."""
        dense = not act.table.spec.keyed and (np.diff(act.keys) == 1).all()
        return slice(int(act.keys[0]), int(act.keys[-1]) + 1) if dense else act.keys

    def _acknowledged(self, act: Act) -> None:
        act.table.acknowledge(self.author, 1 << 2 * act.digit)

    def _delete(self, act: Act) -> None:
        self.own[act.table.name] |= 1 << 2 * act.digit
        self.caller.delete(act.table.name, self._where(act))
        self._acknowledged(act)

    def _delete_async(self, act: Act) -> None:
        self.own[act.table.name] |= 1 << 2 * act.digit
        self.caller.delete_async(act.table.name, self._where(act))

    def _clear(self, act: Act) -> None:
        self.own[act.table.name] |= 1 << 2 * act.digit
        self.caller.clear(act.table.name)
        self._acknowledged(act)

    def _delete_where(self, act: Act) -> None:
        self.own[act.table.name] |= 1 << 2 * act.digit
        self.caller.call(delete_listed, act.table.name, listed=act.keys)
        self._acknowledged(act)

    def _pushed(self, act: Act) -> None:
        """A push has returned; where the trainers of a process sum theirs, servers have it at the end of the clock."""
        if act.table.name not in self.sums:
            self._acknowledged(act)

    def _push(self, act: Act) -> None:
        self.caller.push(act.table.name, self._where(act), self._values(act))
        self._pushed(act)

    def _push_async(self, act: Act) -> None:
        self.caller.push_async(act.table.name, self._where(act), self._values(act))

    def _push_both(self, *acts: Act) -> None:
        self.caller.push({act.table.name: (self._where(act), self._values(act)) for act in acts})
        for act in acts:
            self._pushed(act)

    def _push_pull(self, act: Act) -> None:
        values, table = self._values(act), act.table
        least = self._least(table, acknowledged=False)  # the server may repeat an earlier attempt's answer
        answer = self._rows(self.caller.push_pull(table.name, self._where(act), values))
        self._acknowledged(act)
        table.check(f"a push_pull{self._when}", act.keys, answer, least)
        op = (self.author, *table.seqs[self.author][act.digit])
        first = self.answers.setdefault(op, answer.tobytes())
        assert table.spec.ack == "memory" or self.expected.splits or first == answer.tobytes(), (
            f"push_pull {op} (author, clock, number) was answered in two ways"
        )

    @property
    def answers(self) -> dict[tuple[int, int, int], bytes]:
        return self.expected.answers

    def _call(self, act: Act) -> None:
        """A function that does what a push would, and returns the rows before it."""
        least = self._least(act.table, acknowledged=False)  # because a repeat may return what an earlier attempt saw
        self._values(act)
        arguments = {"author": self.author, "amount": 1 << 2 * act.digit}
        keys, rows = self.caller.call(mark_rows, act.table.name, self._where(act), **arguments)
        self._acknowledged(act)
        act.table.check(f"a call{self._when}", keys, rows, least)

    def _call_all(self, act: Act) -> None:
        if act.table.spec.keyed:
            self._call(act)
            return
        self._values(act)
        self.caller.call(mark_all, act.table.name, author=self.author, amount=1 << 2 * act.digit)
        self._acknowledged(act)

    def _call_reading(self, act: Act) -> None:
        least = self._least(act.table)
        keys, rows = self.caller.call(read_rows, act.table.name, self._where(act))
        act.table.check(f"a reading call{self._when}", keys, rows, least)

    def _pull(self, act: Act) -> None:
        least = self._least(act.table, acknowledged=not (self.timed and self.expected.kept))
        rows = self._rows(self.caller.pull(act.table.name, self._where(act)))
        act.table.check(f"a pull{self._when}", act.keys, rows, least)

    def _pull_async(self, act: Act) -> None:
        least = self._least(act.table, acknowledged=not (self.timed and self.expected.kept))
        self.pulls.append((act, self.caller.pull_async(act.table.name, self._where(act)), least))

    def _pull_certified(self, act: Act) -> None:
        least = self._least(act.table)
        rows, certificate = self.caller.pull_certified(act.table.name, self._where(act))
        rows = self._rows(rows)
        act.table.check(f"a pull{self._when}", act.keys, rows, least)
        act.table.certify(act.keys, rows, certificate, self.expected.origins(), self.expected.merges)

    def _meet(self, act: Act) -> None:
        clock = self.caller.clock
        assert self.caller.allreduce([clock, 1]).tolist() == [clock * self.expected.trainers, self.expected.trainers]
