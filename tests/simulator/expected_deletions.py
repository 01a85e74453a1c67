"""Expected contents where rows go: which ops a row may have, beside those that a deletion has taken away.

A deletion takes all marks from a row, those of all authors. So a row has the marks of the ops behind its *last*
deletion. Which deletion was the last one, and which ops of other authors came before it, is not known beforehand. But a
row is right only if some deletion that was issued, or none, explains it:

- Of each author the row has a run of ops without a gap and without a deletion of this author in it. The run ends at or
  behind the ops that must be there.
- Of the author of the last deletion the run begins just behind it. Of another author it begins anywhere, but an op that
  was acknowledged before the deletion was issued is not in it, and an op that was issued after the deletion was
  acknowledged is no op before it.
- Where the sums of a clock are stepped when it closes, clocks order the ops of trainers instead: those that a trainer
  pushes come behind all deletions at their clock.

So the oracle sees a deletion that is lost, that counts again later, that does not reach a copy, a checkpoint or a
joiner, and a row that comes back.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from expected_contents import ExpectedTable

from dps.engine.state.ops import NO_CLOCK, TableSpec

__all__ = ["DeletingTable"]

NEVER = float("inf")


class Touch(NamedTuple):
    """One op of an author on a row."""

    author: int
    digit: int
    deletes: bool
    clock: int


class DeletingTable(ExpectedTable):
    """For one table whose rows are deleted, too: see the module's docstring."""

    def __init__(self, spec: TableSpec, authors: int):
        super().__init__(spec, authors)
        self._deletions: set[tuple[int, int]] = set()  # (author, digit)
        self._touches: dict[int, list[list[Touch]]] = {key: [[] for _ in range(authors)] for key in self.touched}
        self._moments = itertools.count()  # that order what authors do and learn
        self._issued_at: dict[tuple[int, int], float] = {}  # (author, digit) -> moment
        self._acknowledged_at: dict[tuple[int, int], float] = {}

    # -- what happens

    def draw(self, author: int, seq: tuple[int, int], keys: np.ndarray, deletes: bool = False) -> int:
        digit = super().draw(author, seq, keys[:0] if deletes else keys)
        for key in keys.tolist():
            touches = self._touches[key][author]
            touches.append(Touch(author, digit, deletes, seq[0]))
            if self.collects:
                touches.sort(key=lambda touch: (touch.clock, self._is_summed(touch)))
        return digit

    def issue(self, author: int, marks: int) -> None:
        super().issue(author, marks)
        self._note(self._issued_at, author, marks)

    def acknowledge(self, author: int, marks: int) -> None:
        super().acknowledge(author, marks)
        self._note(self._acknowledged_at, author, marks)

    def rewind(self, author: int, clock: int) -> None:
        super().rewind(author, clock)
        for moments in (self._issued_at, self._acknowledged_at):
            for digit, (when, _) in enumerate(self.seqs[author]):
                if when >= clock:
                    moments.pop((author, digit), None)

    def _note(self, moments: dict[tuple[int, int], float], author: int, marks: int) -> None:
        now = next(self._moments)
        for digit in range(len(self.seqs[author])):
            if marks >> 2 * digit & 1:
                moments.setdefault((author, digit), now)

    # -- what must hold

    def check(
        self, what: str, keys: np.ndarray, rows: np.ndarray, least: list[int], most: list[int] | None = None
    ) -> None:
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            touches = [
                [touch for touch in of_author if limit >> 2 * touch.digit & 1]
                for of_author, limit in zip(self._touches[key], most or self.issued, strict=True)
            ]
            lasts = [touch for touch in itertools.chain(*touches) if touch.deletes]
            if not any(self._explains(last, touches, row, least) for last in (None, *lasts)):
                where = f"{what} of table {self.name!r}, key {key} in shard {self.shard[key]}"
                has = {author: f"{value:b}" for author, value in enumerate(row)}
                ops = [
                    f"{'deletion' if t.deletes else 'op'} {t.digit} of {t.author} at {self._when(t)}"
                    f"{', must be there' if least[t.author] >> 2 * t.digit & 1 else ''}"
                    for t in itertools.chain(*touches)
                ]
                raise AssertionError(f"{where}: no deletion explains marks {has}; {'; '.join(ops)}")

    def whole(self, keys: np.ndarray, rows: np.ndarray) -> dict[tuple[int, int], int]:
        """Nothing: a deletion takes an op from some of its rows."""
        return {}

    def certify(
        self, keys: np.ndarray, rows: np.ndarray, certificate: Any, origins: dict[int, int], merges: bool
    ) -> None:
        shard_of = self.shards_of(certificate.edges)
        for key, row in zip(keys, rows, strict=True):
            last = certificate.shards[shard_of[int(key)]]
            least, most = [0] * len(self.seqs), list(self.issued)
            for author, origin in origins.items():
                least[author] = self.up_to(author, last.get(origin, (-1, -1)))
                most[author] = most[author] if merges else least[author]
            self.check("a certified pull", key[None], row[None], least, most)

    def close(self, client: Any, rows: np.ndarray) -> None:
        if self.spec.keyed:
            ranged, _ = client.pull(self.name, slice(None))
            listed = np.sort(np.concatenate([np.zeros(0, np.int64), *client.keys(self.name)]))
            there = np.sort(self.keys[rows.any(axis=1)])
            for found in (listed, ranged):
                assert found.tolist() == there.tolist(), (
                    f"{self.name!r} lists keys {found.tolist()}, and {there.tolist()} have marks"
                )

    def _explains(self, last: Touch | None, touches: list[list[Touch]], row: list[int], least: list[int]) -> bool:
        """Whether the row is right if `last` is its last deletion (None: there was none)."""
        return all(
            self._explains_column(last, author, touches[author], row[author], least[author])
            for author in range(len(row))
        )

    def _explains_column(self, last: Touch | None, author: int, touches: list[Touch], value: int, least: int) -> bool:
        marks = sum(1 << 2 * t.digit for t in touches if not t.deletes)
        if value < 0 or value & ~marks:
            return False
        first, end = self._first(last, author, touches)
        must = 1 + max((n for n, t in enumerate(touches) if least >> 2 * t.digit & 1), default=-1)
        there = [n for n, t in enumerate(touches) if value >> 2 * t.digit & 1]
        if not there:
            return max(first, must) <= end
        a, b = there[0], there[-1] + 1
        return first <= a <= end and must <= b == a + len(there)

    def _first(self, last: Touch | None, author: int, touches: list[Touch]) -> tuple[int, int]:
        """Between which numbers of `touches` the author's ops behind the last deletion begin."""
        if last is None:
            return 0, 0
        if last.author == author:
            return touches.index(last) + 1, touches.index(last) + 1
        before = [n for n, touch in enumerate(touches) if self._precedes(touch, last)]
        behind = [n for n, touch in enumerate(touches) if self._precedes(last, touch)]
        return 1 + max(before, default=-1), min(behind, default=len(touches))

    def _precedes(self, a: Touch, b: Touch) -> bool:
        """Whether `a` certainly came before `b`, an op of another author."""
        if self.collects and (self._is_summed(a) or self._is_summed(b)):
            if a.clock != NO_CLOCK and b.clock != NO_CLOCK:
                return (a.clock, self._is_summed(a)) < (b.clock, self._is_summed(b))
            if self._is_summed(a):
                return False
        acknowledged = self._acknowledged_at.get((a.author, a.digit), NEVER)
        return acknowledged < self._issued_at.get((b.author, b.digit), NEVER)

    def _is_summed(self, touch: Touch) -> bool:
        return self.collects and touch.clock != NO_CLOCK and not touch.deletes

    def _when(self, touch: Touch) -> str:
        at = touch.author, touch.digit
        return f"{self._issued_at.get(at, '-')}..{self._acknowledged_at.get(at, '-')} (clock {touch.clock})"
