"""A server's replica of a shard (`Replica`), and an op on its way to the next server of the chain (`Forward`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dps.core.states import ReplicaState
from dps.errors import DPSError
from dps.state.ops import Op, TableSpec
from dps.wire import frames
from dps.wire.frames import Header, padded

if TYPE_CHECKING:
    from dps.server.feeds import JoinerFeed

__all__ = ["Forward", "OwedAnswer", "Replica", "ReplicaPart"]


class Replica(ReplicaState):
    """One shard's rows on this server, and its place in the shard's chain."""

    __slots__ = ("feed", "number", "spec", "tail")

    def __init__(self, spec: TableSpec, number: int, shard: Any):
        self.spec, self.number, self.shard = spec, number, shard
        self.tail: Forward | None = None  # the last op that was passed on
        self.feed: JoinerFeed | None = None  # of a successor that joins

    @property
    def drained(self) -> bool:
        """Whether the successor has confirmed every op that was passed on."""
        return self.tail is None or self.tail.done


class ReplicaPart(NamedTuple):
    """The part of a request that falls to one shard: its keys, or the rows from `start` on.

    Its values are the request's rows a to b - 1.
    """

    replica: Replica
    keys: np.ndarray | None
    start: int
    a: int
    b: int

    def op(self, request: Op, values: np.ndarray) -> Op:
        """The op on this shard, of a request with these `values`."""
        _, keys, start, a, b = self
        rule, _, _, _, clock, parties, origin, attempt, number, answer, rows = request
        return Op(rule, keys, start, values[a:b], clock, parties, origin, attempt, number, answer, rows)


class OwedAnswer:
    """An answer that a client is owed, once every forward of its request is confirmed, or one is refused.

    A refusal does not end the other forwards of the request. They may be sent again, to another successor or over
    another connection, so the request's body is needed until each of them has ended.
    """

    __slots__ = ("_at_end", "_then", "error", "left")

    def __init__(self) -> None:
        self.left = 0  # forwards that are neither confirmed nor refused
        self.error: DPSError | None = None
        self._then: Callable[[], None] | None = None
        self._at_end: Callable[[], None] | None = None

    def then(self, function: Callable[[], None]) -> None:
        """Call `function` when all forwards are confirmed or one is refused; now, where that is so already."""
        if self.left == 0 or self.error is not None:
            function()
        else:
            self._then = function

    def at_end(self, function: Callable[[], None]) -> None:
        """Call `function` when no forward is under way any more, before the function of `then`; now, where none is."""
        if self.left == 0:
            function()
        else:
            self._at_end = function

    def confirm(self) -> None:
        """A forward is confirmed."""
        self._ended()

    def refuse(self, error: DPSError) -> None:
        """A forward is refused; the answer is `error`."""
        self.error = self.error or error
        self._ended()

    def _ended(self) -> None:
        self.left -= 1
        if self.left == 0 and (at_end := self._at_end) is not None:
            self._at_end = None
            at_end()
        if (self.left == 0 or self.error is not None) and (then := self._then) is not None:
            self._then = None
            then()


class Forward:
    """One frame on its way to a successor: an op on neighbouring shards, or a piece of a dump."""

    __slots__ = (
        *("done", "feed", "first_sent", "followers", "header", "keys", "nbytes", "owed_answers", "parts", "pieces"),
        "values",
    )

    def __init__(
        self,
        header: Header,
        parts: list[tuple[ReplicaPart, int]],
        keys: Any,
        values: Any,
        owed_answers: list[OwedAnswer],
    ):
        self.header = header
        self.parts = parts
        self.keys = keys
        self.values = values
        self.owed_answers = owed_answers  # they wait for all parts,
        self.followers: list[tuple[Replica, OwedAnswer]] = []  # and these, of repeats, for the part of a replica
        self.done = False
        self.first_sent = math.inf  # when it was first passed on
        self.feed: JoinerFeed | None = None  # of a piece of a dump
        self.pieces: Sequence[Any] = ()  # of a piece of a dump, its buffers
        self.nbytes = (parts[-1][0].b - parts[0][0].a) * (8 + values.strides[0]) if parts else 0  # of rows

    def split(self) -> list[Forward]:
        """One forward for each shard; the owed answers now wait for all of them."""
        singles = []
        for item in self.parts:
            single = Forward(self.header, [item], self.keys, self.values, list(self.owed_answers))
            single.first_sent, replica = self.first_sent, item[0].replica
            single.followers = [follower for follower in self.followers if follower[0] is replica]
            if replica.tail is self:
                replica.tail = single
            singles.append(single)
        for owed in self.owed_answers:
            owed.left += len(singles) - 1
        return singles

    def confirm(self) -> None:
        """The successor has the op."""
        self.done = True
        for owed in self._waiting():
            owed.confirm()

    def refuse(self, error: DPSError) -> None:
        """The op went to a shard that another server has taken over."""
        self.done = True
        for owed in self._waiting():
            owed.refuse(error)

    def _waiting(self) -> list[OwedAnswer]:
        return [*self.owed_answers, *(owed for _, owed in self.followers)]

    def frame(self, request: int, epoch: int) -> tuple[Header, list[Any]]:
        """Header and buffers of the frame: the versions of its shards, then the body of a PUSH."""
        head = self.header
        if self.feed is not None:
            return head._replace(request=request, epoch=epoch), list(self.pieces)
        first, last = self.parts[0][0], self.parts[-1][0]
        low, a, b = first.replica.number, first.a, last.b
        shards = last.replica.number - low + 1
        listed = not head.flags & (frames.CONTROL | frames.RANGE)
        numbers = np.zeros((1 + listed, shards), np.int64)  # versions; how many keys
        for part, version in self.parts:
            numbers[0, part.replica.number - low] = version
            if listed:
                numbers[1, part.replica.number - low] = part.b - part.a
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
        # The header is made in one go, because `_replace` takes longer than all the rest.
        origin = (head.trainer, head.number, head.clock)
        span = (low, shards, head.rows, first.start, b - a)
        kind, flags, table = frames.REPLICATE, head.flags, head.table
        return Header(kind, flags, request, table, epoch, *origin, *span, head.parties, head.attempt, body), buffers
