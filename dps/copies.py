"""What a server holds of a shard (`Copy`), and an op on its way to the next server of the chain (`Forward`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dps.errors import DPSError
from dps.state.ops import Op, TableSpec
from dps.wire import frames
from dps.wire.frames import Header, padded

__all__ = ["Copy", "Forward", "Part", "Waiter"]


class Copy:
    """One shard's rows on this server, and its place in the shard's chain."""

    __slots__ = (
        *("deposed", "feed", "fence", "joining", "number", "primary", "shard", "spec", "stepping_down"),
        *("successor", "tail"),
    )

    def __init__(self, spec: TableSpec, number: int, shard: Any):
        self.spec, self.number, self.shard = spec, number, shard
        self.primary = False
        self.joining = False  # its rows are still coming in
        self.stepping_down = False  # it takes no more requests, so that another may become the primary
        self.deposed = False  # another has become the primary
        self.fence = 0  # ops of earlier epochs are refused: their sender was replaced
        self.successor: int | None = None  # the server behind us
        self.tail: Forward | None = None  # the last op that was passed on
        self.feed: Any = None  # of a joiner behind us: see `replication.py`

    @property
    def serves(self) -> bool:
        """Whether it makes the shard's ops: the primary, unless it is about to hand over or has been replaced."""
        return self.primary and not (self.stepping_down or self.deposed)

    @property
    def drained(self) -> bool:
        """Whether everything that was passed on is confirmed."""
        return self.tail is None or self.tail.done


class Part(NamedTuple):
    """A request's part that falls to one shard: keys, or rows from `start` on; its rows a to b - 1."""

    copy: Copy
    keys: np.ndarray | None
    start: int
    a: int
    b: int

    def op(self, request: Op, values: np.ndarray) -> Op:
        """What the request with these `values` asks of this shard."""
        _, keys, start, a, b = self
        rule, _, _, _, clock, parties, origin, attempt, number, answer, rows = request
        return Op(rule, keys, start, values[a:b], clock, parties, origin, attempt, number, answer, rows)


class Waiter:
    """An answer that is owed until all forwards of its request are confirmed."""

    __slots__ = ("_then", "error", "left")

    def __init__(self) -> None:
        self.left = 0
        self.error: DPSError | None = None
        self._then: Callable[[], None] | None = None

    def then(self, function: Callable[[], None]) -> None:
        """Call `function` when nothing is left to wait for, or now."""
        if self.left == 0 or self.error is not None:
            function()
        else:
            self._then = function

    def confirm(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._finish()

    def fail(self, error: DPSError) -> None:
        if self.error is None and self.left > 0:
            self.error = error
            self._finish()

    def _finish(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class Forward:
    """One frame on its way to a successor: an op on neighbouring shards, or a piece of a dump."""

    __slots__ = ("done", "feed", "header", "keys", "nbytes", "parts", "pieces", "since", "values", "waiters")

    def __init__(self, header: Header, parts: list[tuple[Part, int]], keys: Any, values: Any, waiters: list[Waiter]):
        self.header, self.parts, self.keys, self.values, self.waiters = header, parts, keys, values, waiters
        self.done = False
        self.since = math.inf  # when it was first passed on
        self.feed: Any = None  # of a dump: see `replication.py`
        self.pieces: Sequence[Any] = ()  # its buffers
        self.nbytes = (parts[-1][0].b - parts[0][0].a) * (8 + values.strides[0]) if parts else 0  # of rows

    def frame(self, request: int, epoch: int) -> tuple[Header, list[Any]]:
        """As it travels: versions, then what a PUSH has."""
        head = self.header
        if self.feed is not None:
            return head._replace(request=request, epoch=epoch), list(self.pieces)
        first, last = self.parts[0][0], self.parts[-1][0]
        low, a, b = first.copy.number, first.a, last.b
        shards = last.copy.number - low + 1
        listed = not head.flags & (frames.CONTROL | frames.RANGE)
        numbers = np.zeros((1 + listed, shards), np.int64)  # versions; how many keys
        for part, version in self.parts:
            numbers[0, part.copy.number - low] = version
            if listed:
                numbers[1, part.copy.number - low] = part.b - part.a
        buffers: list[Any] = [numbers]
        values = self.values[a:b]
        if listed:
            buffers.append(self.keys[a:b])
        if a < b:
            buffers.append(values)
        nbytes = values.nbytes
        padding = padded(nbytes) - nbytes
        if padding:
            buffers.append(bytes(padding))
        body = numbers.nbytes + (8 * (b - a) if listed else 0) + nbytes + padding
        who = (head.trainer, head.number, head.clock)  # a header is made once: `_replace` takes longer than all else
        where = (low, shards, head.rows, first.start, b - a)
        kind, flags, table = frames.REPLICATE, head.flags, head.table
        return Header(kind, flags, request, table, epoch, *who, *where, head.parties, head.attempt, body), buffers
