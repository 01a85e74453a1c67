"""A server's replicas of shards, and the feeds that bring new replicas up to date.

A *feed* sends a shard to a joiner, as a dump that travels piece by piece between the ops of the same connection. Until
the end of the dump leaves, the joiner is *learning*: no answer waits until it has confirmed an op. From then on answers
wait for it, because it may be put into the chain as soon as it has the end.

Several shards may be on their way to one joiner. Their feeds take turns, at the pace of `pace.py`. A piece is a copy,
because the rows go on changing; the memory of a piece that was confirmed is used for a later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from dps.engine.core.requests.forwards import Forward, Forwards, Successor
from dps.engine.core.shards.states import ReplicaState
from dps.engine.server.beside_thread import WORK_SECONDS, Carrier, Outcome
from dps.engine.server.pace import END_SECONDS, MOST_UNDER_WAY, PIECE_BYTES, DumpPace, Traffic, may_end, next_piece
from dps.engine.state.ops import Op, TableSpec
from dps.engine.state.shard import KeyedShard, make_shard
from dps.engine.state.spill import attach_file
from dps.engine.state.transfer import Dump
from dps.engine.wire import frames
from dps.engine.wire.bandwidth import LinkBudget
from dps.engine.wire.frames import encode_header, pack_arrays, padded
from dps.engine.wire.headers import DumpPiece
from dps.engine.wire.messages import CaughtUp, ShardPlace
from dps.engine.wire.protocols import RoleEndpoint

__all__ = [
    "BEGIN",
    "ROWS",
    "FeedsOfJoiner",
    "JoinerFeed",
    "PieceMemory",
    "Replica",
    "ReplicaPart",
    "new_replicas",
]


# ---- Replicas, and the parts of requests that fall to them


class Replica(ReplicaState):
    """One shard's rows on this server, and its place in the shard's chain."""

    __slots__ = ("behind", "place", "spec")

    tail: Forward | None
    feed: JoinerFeed | None

    def __init__(self, spec: TableSpec, number: int, shard: Any):
        self.spec, self.number, self.shard = spec, number, shard
        self.behind: Sequence[int] = ()  # the servers behind this one in the shard's chain
        self.place: ShardPlace | None = None  # the shard's, by the last placement; None: no placement has named it

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
        _, keys, start, a, b = self
        unborn = None if request.unborn is None else request.unborn[a:b]
        return request._replace(keys=keys, start=start, values=values[a:b], unborn=unborn)


def new_replicas(spec: TableSpec, shards: Iterable[int], directory: str | None = None) -> list[Replica]:
    """Replicas of these shards with initial rows, which take long to make. Any thread may do it.

    `directory` is where shards may have files of rows.
    """
    replicas = [Replica(spec, number, make_shard(spec, number)) for number in shards]
    for replica in replicas:
        if isinstance(replica.shard, KeyedShard):
            attach_file(replica.shard, directory)
    return replicas


# ---- Feeds of joiners

AHEAD_SECONDS = 0.01  # that a dump may be ahead of `dps.limits.move`, because timers are not exact
BEGIN, ROWS, END = 0, 1, 2  # content of a DUMP frame


class PieceMemory:
    """Memory of pieces, to be used again: fresh memory costs the system as much time as the copy itself."""

    def __init__(self) -> None:
        self._spare: list[np.ndarray] = []

    def copies(self, arrays: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
        """Copies of the arrays, and the memory in which they are."""
        sizes = [padded(array.nbytes) for array in arrays]
        memory = self._spare.pop() if self._spare else np.empty(0, np.uint8)
        if len(memory) < sum(sizes):
            memory = np.empty(sum(sizes), np.uint8)
        copies, end = [], 0
        for array, size in zip(arrays, sizes, strict=True):
            copy = memory[end : end + array.nbytes].view(array.dtype).reshape(array.shape)
            copy[...] = array
            copies.append(copy)
            end += size
        return memory, copies

    def release(self, memory: np.ndarray) -> None:
        if len(memory) <= 2 * PIECE_BYTES and len(self._spare) <= MOST_UNDER_WAY:
            self._spare.append(memory)


class FeedingRelay(Protocol):
    """What feeds need of the server's relay (`replication.py`), over whose connections their pieces travel."""

    endpoint: RoleEndpoint
    ops: Forwards
    carrier: Carrier
    memory: PieceMemory
    pace: DumpPace
    rate: float  # bytes a second that the dump of a shard may have: `dps.limits.move`
    budget: LinkBudget  # of the server: `dps.limits.bandwidth`
    piece: int  # bytes of rows in a frame

    @property
    def report(self) -> Callable[[int, msgspec.Struct], None]:
        """Sends a message to the controller, in a frame of that kind."""


class JoinerFeed:
    """Brings a joiner up to date: it sends a dump of the shard, piece by piece, between the ops."""

    def __init__(self, relay: FeedingRelay, replica: Replica, to: int, fence: int):
        self.relay = relay
        self.replica = replica
        self.to = to
        self.fence = fence
        self.done = False
        self.sent_bytes = 0
        self.under_way = 0  # bytes that the joiner has not confirmed
        self.due = -math.inf  # when the next piece may leave, as `dps.limits.move` allows
        self.sent_at = -math.inf  # when the last one left
        self._dump: Dump | None = None  # None: all of it was sent
        self._listing: Dump | None = None  # of which keys are being listed

    def begin(self) -> None:
        """Send the head of the dump. From here on every op of the shard goes to the joiner, too."""
        self.done = False
        self.sent_bytes = self.under_way = 0
        self.close()
        self.replica.learning = True
        self._dump = Dump(self.replica.shard)
        self._send(BEGIN, *self._dump.head())
        self._list_keys()

    def close(self) -> None:
        """Send no more of the dump; the shard may move its rows again."""
        if self._dump is not None:
            self._dump.close()
            self._dump = None

    @property
    def has_more(self) -> bool:
        """Whether there are pieces to send, whose keys are listed."""
        return self._dump is not None and self._dump is not self._listing

    def may_leave(self, now: float, learning_bytes: int) -> float:
        """When the next piece may leave."""
        assert self._dump is not None
        if self._dump.is_given and not may_end(learning_bytes, now - self.sent_at):
            return max(self.due, self.sent_at + END_SECONDS)
        return self.due

    def send_piece(self, max_bytes: int) -> None:
        """Send the next piece, of about `max_bytes`; after the last one, the end."""
        assert self._dump is not None
        piece = self._dump.piece(max_bytes)
        if piece is None:
            self._dump = None
            self.replica.learning = False
            self._send(END, {}, [])
        else:
            self._send(ROWS, *piece)
            self._list_keys()

    def confirmed(self, forward: Forward) -> None:
        self.under_way -= forward.nbytes
        memory, content = forward.piece
        self.relay.memory.release(memory)
        if content == END and self.replica.feed is self:
            self.done = True
            self.report_caught_up()

    def refused(self) -> None:
        """The joiner does not take the dump: send no more of it, until the controller has decided."""
        self.close()
        self.under_way = 0

    def report_caught_up(self) -> None:
        """Tell the controller that the joiner has caught up, so that it may put the joiner into the chain."""
        message = CaughtUp(self.replica.spec.name, self.replica.number, self.to, self.relay.ops.epoch)
        self.relay.report(frames.CAUGHT_UP, message)

    def _list_keys(self) -> None:
        """Have the keys of the next pieces listed beside the loop, where that takes long."""
        dump = self._dump
        work = None if dump is None else dump.lists()
        if dump is None or work is None:
            return

        def ended(outcome: Outcome) -> None:
            if self._listing is not dump:  # the dump has begun anew
                return
            self._listing = None
            if self._dump is not dump:  # it was given up
                return
            if outcome.error is None:
                dump.take(outcome.value)
            self.relay.ops.successor(self.to).feeds.go_on(self.relay)

        self._listing = dump
        try:
            self.relay.carrier.run(work, WORK_SECONDS, ended)
        except RuntimeError:  # there are too many threads: the next piece lists its keys itself
            self._listing = None

    def _send(self, content: int, meta: dict[str, Any], arrays: list[np.ndarray]) -> None:
        memory, copies = self.relay.memory.copies(arrays)
        text_bytes, pieces = pack_arrays(meta, copies)
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        self.sent_bytes += nbytes
        self.under_way += nbytes
        self.sent_at = self.relay.endpoint.now()
        self.due = max(self.due, self.sent_at) + nbytes / self.relay.rate
        self.relay.budget.spend(nbytes, self.sent_at)
        piece = DumpPiece(self.replica.spec.id, self.relay.ops.epoch, self.replica.number, content, text_bytes)
        head = encode_header(piece.header()._replace(body=nbytes))
        self.relay.ops.send(self.to, Forward.of_piece(self, (memory, content), head, tuple(pieces), nbytes))


class FeedsOfJoiner:
    """The feeds of all shards that one server joins."""

    def __init__(self, joiner: Successor) -> None:
        self._joiner = joiner
        self._confirmed_at = -math.inf  # when the joiner last confirmed a piece,
        self._took = 0.0  # which took so many seconds
        self.queue: list[JoinerFeed] = []  # the one first whose turn it is
        self._wakes_at = math.inf  # when a timer goes on

    def add(self, feed: JoinerFeed) -> None:
        self.queue.append(feed)

    def remove(self, feed: JoinerFeed, relay: FeedingRelay) -> None:
        self.queue = [each for each in self.queue if each is not feed]
        relay.endpoint.later(0, self.go_on, relay)

    def begin_anew(self) -> None:
        """The connection to the joiner is a new one: the dumps that it has not got whole begin again."""
        for feed in self.queue:
            if not feed.done:
                feed.begin()

    def piece_confirmed(self, forward: Forward, relay: FeedingRelay) -> None:
        assert forward.feed is not None
        forward.feed.confirmed(forward)
        self._confirmed_at = relay.endpoint.now()
        self._took = self._confirmed_at - forward.first_sent
        self.go_on(relay)

    def op_confirmed(self, relay: FeedingRelay) -> None:
        """The joiner has an op. If no answer waits for another, go on as soon as the sender of this one is told."""
        if not self._joiner.awaits_op:
            relay.endpoint.later(0, self.go_on, relay)

    def go_on(self, relay: FeedingRelay) -> None:
        """Send pieces, the feeds in turn, at the server's pace, and as `dps.limits.move` and `.bandwidth` allow."""
        joiner, clock = self._joiner, relay.endpoint.now
        while waiting := [feed for feed in self.queue if feed.has_more]:
            now, under_way = clock(), sum(feed.under_way for feed in self.queue) / relay.piece
            tail = joiner.awaits_op, joiner.op_sent_at, joiner.learning_bytes
            when = next_piece(Traffic(*tail, under_way, self._confirmed_at, self._took), now)
            if when == math.inf:  # until a piece is confirmed
                return
            dues = [feed.may_leave(now, joiner.learning_bytes) for feed in waiting]
            feed = next((feed for feed, due in zip(waiting, dues, strict=True) if due <= now + AHEAD_SECONDS), None)
            when = max(when, relay.pace.rested_at(now), relay.budget.due(now))
            if feed is None or when > now:
                self._wake(relay, max(when, min(dues)))
                return
            self.queue.remove(feed)
            self.queue.append(feed)
            with relay.pace.work(clock):
                feed.send_piece(relay.piece)

    def _wake(self, relay: FeedingRelay, when: float) -> None:
        """Go on at that time, unless a timer does so earlier."""
        if when < self._wakes_at:
            self._wakes_at = when
            relay.endpoint.later(when - relay.endpoint.now(), self._woken, relay, when)

    def _woken(self, relay: FeedingRelay, when: float) -> None:
        if self._wakes_at == when:
            self._wakes_at = math.inf
        self.go_on(relay)
