"""Ledger: which ops a shard has applied, so that none is applied twice.

The ops of one origin reach a shard in the order of their seqs (clock, number). So the ledger needs one seq for each
origin: an op that is not later than the last one is a repeat. Everything in the ledger is bounded. The rules by which
it drops something depend on the ops alone, so the ledgers of all replicas of a shard stay equal.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque

import numpy as np

from dps.errors import StoppedError

__all__ = ["Ledger"]

MAX_ORIGINS = 1 << 16  # remembered at once
MAX_RETIRED_RANGES = 1 << 16  # ranges of retired origins
MAX_ANSWERS = 64  # kept answers of one origin
MAX_ANSWER_BYTES = 16 << 20  # of all kept answers of a shard
ANSWER_OVERHEAD_BYTES = 512  # that an answer takes beside its values


class Ledger:
    """The last op of each origin, the retired origins, and answers that a client may ask for again.

    Parameters
    ----------
    answer_bytes : int
        Bytes that all kept answers may take together.
    origins : int
        How many origins are remembered. If there are more, those whose last op is oldest are retired.

    Examples
    --------
    >>> ledger = Ledger()
    >>> ledger.note(origin=7, attempt=0, clock=3, number=1)
    >>> ledger.seen(7, 0, 3, 1), ledger.seen(7, 0, 3, 2), ledger.seen(8, 0, 3, 1)
    (True, False, False)
    """

    def __init__(self, answer_bytes: int = MAX_ANSWER_BYTES, origins: int = MAX_ORIGINS):
        self.answer_bytes, self.origins = answer_bytes, origins
        # origin -> attempt, clock, number; the origin noted least recently comes first
        self._last: OrderedDict[int, tuple[int, int, int]] = OrderedDict()
        self._firsts: list[int] = []  # the first origin of each retired range, ascending; no range touches another
        self._ends: list[int] = []  # one past the last origin of each retired range
        # (origin, clock, number) -> the kept answer; the oldest first
        self._answers: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()
        self._seqs: dict[int, deque[tuple[int, int, int]]] = {}  # origin -> its keys in `_answers`, the oldest first
        self._kept_bytes = 0  # of all kept answers

    def __len__(self) -> int:
        return len(self._last)

    def check(self, origin: int, attempt: int) -> None:
        """Raise StoppedError if the origin was retired, or the shard has seen a later attempt of it."""
        last = self._last.get(origin)
        if last is not None and last[0] > attempt:
            raise StoppedError(f"attempt {attempt} of origin {origin} is over: attempt {last[0]} has taken its place")
        if last is None and self.retired(origin):
            raise StoppedError(
                f"origin {origin} (attempt {attempt}) was retired: its run or task has ended, or {self.origins} others "
                f"have pushed since it did; if you still need this client, make a new one (ps.client())"
            )

    def retired(self, origin: int) -> bool:
        """Whether the origin was retired, so that its ops are refused."""
        i = bisect_right(self._firsts, origin)
        return i > 0 and origin < self._ends[i - 1]

    def seen(self, origin: int, attempt: int, clock: int, number: int) -> bool:
        """Whether this op is a repeat. Raises as :meth:`check` does."""
        last = self._last.get(origin)
        if last is None or last[0] > attempt:
            self.check(origin, attempt)
            return False
        return clock < last[1] or (clock == last[1] and number <= last[2])

    def note(self, origin: int, attempt: int, clock: int, number: int) -> None:
        """Record an applied op as the last one of its origin."""
        self._last[origin] = attempt, clock, number
        self._last.move_to_end(origin)
        if len(self._last) > self.origins:  # retired, because the ledger could not recognise its repeats any more
            self.retire(next(iter(self._last)), 1)

    def keep(self, origin: int, clock: int, number: int, values: np.ndarray) -> None:
        """Keep `values`, which must not change any more, as the answer to an op that was noted."""
        seq, size = (origin, clock, number), values.nbytes + ANSWER_OVERHEAD_BYTES
        if size > self.answer_bytes or seq in self._answers or origin not in self._last:
            return
        seqs = self._seqs.setdefault(origin, deque())
        seqs.append(seq)
        self._answers[seq] = values
        self._kept_bytes += size
        if len(seqs) > MAX_ANSWERS:
            self._drop(seqs[0])
        while self._kept_bytes > self.answer_bytes:
            self._drop(next(iter(self._answers)))

    def answer(self, origin: int, clock: int, number: int) -> np.ndarray | None:
        """The kept answer to an op; None if none was kept, or it was dropped."""
        return self._answers.get((origin, clock, number))

    def retire(self, first: int, count: int) -> None:
        """Forget the origins first .. first + count - 1, and refuse them from now on."""
        if count <= 0:
            return
        end = first + count
        in_range = range(first, end) if count <= len(self._last) else [o for o in self._last if first <= o < end]
        for origin in in_range:
            self._forget(origin)
        a, b = bisect_right(self._ends, first - 1), bisect_right(self._firsts, end)
        if a < b:  # the new range touches the ranges a .. b - 1
            first, end = min(first, self._firsts[a]), max(end, self._ends[b - 1])
        self._firsts[a:b], self._ends[a:b] = [first], [end]
        if len(self._firsts) > MAX_RETIRED_RANGES:
            # Merge the two lowest ranges. The origins between them are retired too, because they are older than all
            # others that are left.
            self.retire(self._ends[0], self._firsts[1] - self._ends[0])

    def certificate(self) -> np.ndarray:
        """int64[m, 3]: origin, clock and number of each last op, by origin."""
        rows = [(origin, clock, number) for origin, (_, clock, number) in sorted(self._last.items())]
        return np.array(rows, np.int64).reshape(-1, 3)

    def to_arrays(self, answers: bool = True) -> dict[str, np.ndarray]:
        """The ledger as arrays; the kept answers only with `answers`."""
        kept = list(self._answers.items()) if answers else []
        return {
            "limits": np.array([self.answer_bytes, self.origins], np.int64),
            "last": np.array([(origin, *last) for origin, last in self._last.items()], np.int64).reshape(-1, 4),
            "retired": np.array([self._firsts, self._ends], np.int64).T.copy(),
            "answers": np.array([(*seq, *values.shape) for seq, values in kept], np.int64).reshape(-1, 5),
            "values": np.concatenate([values.reshape(-1) for _, values in kept]) if kept else np.zeros(0),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Ledger:
        """The ledger that :meth:`to_arrays` turned into arrays; it keeps no view of them."""
        ledger = cls(*arrays["limits"].tolist())
        ledger.restore(arrays)
        return ledger

    def restore(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the content of another ledger, as :meth:`to_arrays` gives it, into this new one."""
        self._last.update((origin, tuple(last)) for origin, *last in arrays["last"].tolist())
        self._firsts, self._ends = arrays["retired"].T.tolist()
        start = 0
        for origin, clock, number, rows, dim in arrays["answers"].tolist():
            values = arrays["values"][start : start + rows * dim].reshape(rows, dim)
            self.keep(origin, clock, number, values.copy())
            start += rows * dim

    def _forget(self, origin: int) -> None:
        self._last.pop(origin, None)
        for seq in tuple(self._seqs.get(origin, ())):
            self._drop(seq)

    def _drop(self, seq: tuple[int, int, int]) -> None:
        self._kept_bytes -= self._answers.pop(seq).nbytes + ANSWER_OVERHEAD_BYTES
        seqs = self._seqs[seq[0]]
        seqs.popleft()  # the oldest answer is the oldest of its origin, too
        if not seqs:
            del self._seqs[seq[0]]
