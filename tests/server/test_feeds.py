"""Dumps to a joiner among pushes, in virtual time: three relays, and a joiner that handles frame by frame."""

from __future__ import annotations

import heapq
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import mutant

from dps.engine.core.requests.forwards import OwedAnswer
from dps.engine.server import replicas
from dps.engine.server.replicas import FeedsOfJoiner, Replica, ReplicaPart
from dps.engine.server.replication import Relay
from dps.engine.state.ops import ADD, Op, TableSpec
from dps.engine.state.shard import KeyedShard
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, decode_header, encode_header
from dps.engine.wire.headers import DumpPiece

JOINER = 9
ROWS, DIM = 8192, 64  # of each shard: 2 MB
FRAME_SECONDS, BYTE_SECONDS = 20e-6, 1e-9  # that the joiner takes for a frame
THINK_SECONDS = 0.3e-3  # from the end of a push to the next one


class Clock:
    """Virtual time, and what is to happen."""

    def __init__(self):
        self.time, self._timers, self._numbers = 0.0, [], itertools.count()

    def now(self):
        return self.time

    def later(self, seconds, function, *args):
        heapq.heappush(self._timers, (self.time + max(0.0, seconds), next(self._numbers), function, args))

    def run(self, until):
        while self._timers and self._timers[0][0] <= until:
            self.time, _, function, args = heapq.heappop(self._timers)
            function(*args)
        self.time = until


class Joiner:
    """It takes the frames of all feeders in the order in which they arrive, and confirms each when it is handled."""

    def __init__(self, clock):
        self.clock, self.free_at, self.pieces = clock, 0.0, []

    def link(self, on_up, on_answer):
        link = SimpleNamespace(open=True, party=None, close=lambda: None)

        def write(buffers):
            header = decode_header(buffers[0], 0, 1 << 40)
            self.free_at = max(self.free_at, self.clock.time) + FRAME_SECONDS + header.body * BYTE_SECONDS
            if header.kind == frames.DUMP and DumpPiece.of(header).content == replicas.ROWS:
                self.pieces.append((self.clock.time, header.body))
            answer = Header(frames.OK, request=header.request)
            self.clock.later(self.free_at - self.clock.time, on_answer, link, answer, memoryview(b""))

        link.write = write
        self.clock.later(0, on_up, link)
        return link


class Feeder:
    """A server that feeds the joiner one shard, and passes pushes on to it."""

    def __init__(self, clock, joiner):
        self.clock, self.caught_up_at, self.latencies = clock, None, []
        endpoint = SimpleNamespace(
            now=clock.now,
            later=clock.later,
            connect=lambda address, session, secret, on_up, on_answer, on_end: joiner.link(on_up, on_answer),
        )
        self.relay = Relay(endpoint, "s", "secret", self._report, SimpleNamespace(run=None))
        self.relay.addresses = {JOINER: ("127.0.0.1", 1)}
        self.shard = KeyedShard(TableSpec("n", dim=DIM, shards=1), 0)
        self.shard.apply(Op(ADD, np.arange(ROWS), 0, np.ones((ROWS, DIM), np.float32), 0, 1))
        self.replica = Replica(self.shard.spec, 0, self.shard)

    def _report(self, kind, message):
        assert kind == frames.CAUGHT_UP
        self.caught_up_at = self.clock.time

    def join(self):
        self.relay.rechain(self.replica, JOINER, feed=1)

    def push(self, then):
        """Pass an op of four rows on; when it is confirmed, note how long that took, and call `then`."""
        keys, values, began = np.arange(4), np.ones((4, DIM), np.float32), self.clock.time
        self.shard.apply(Op(ADD, keys, 0, values, 0, 1))
        owed, part = OwedAnswer(), ReplicaPart(self.replica, keys, 0, 0, 4)
        header = encode_header(Header(frames.PUSH, rows=0))
        self.relay.ops.forward(header, [(part, self.shard.version)], keys, values, owed)
        owed.then(lambda: (self.latencies.append(self.clock.time - began), then()))


def feeders(push=None):
    """Three servers feed one joiner for a second; `push(feeder)` begins the pushes of each."""
    clock = Clock()
    joiner = Joiner(clock)
    three = [Feeder(clock, joiner) for _ in range(3)]
    for feeder in three:
        feeder.join()
        if push is not None:
            clock.later(0.0001, push, feeder)
    clock.run(1.0)
    return joiner, three


def one_by_one(feeder):
    """The next push follows soon after the one before."""
    feeder.push(lambda: feeder.clock.later(THINK_SECONDS, one_by_one, feeder))


def always_one(feeder):
    """Some push is unconfirmed at any time."""
    for _ in range(2):
        again(feeder)


def again(feeder):
    feeder.push(lambda: again(feeder))


def pushes_wait_for_small_pieces_only():
    _, three = feeders(one_by_one)
    small = FRAME_SECONDS + 1.1 * replicas.DUMP_PIECE_BYTES / replicas.BETWEEN_OPS_PART * BYTE_SECONDS
    for feeder in three:
        latencies = [latency for latency in feeder.latencies[1:] if latency]
        assert max(latencies) < 3 * small + 4 * FRAME_SECONDS, max(latencies)
        assert feeder.caught_up_at < 0.02, feeder.caught_up_at


def dumps_go_on_among_pushes_without_a_gap():
    _, three = feeders(always_one)
    pieces = ROWS * (8 + 4 * DIM) // replicas.DUMP_PIECE_BYTES
    for feeder in three:
        assert feeder.caught_up_at is not None
        assert pieces * replicas.REST_SECONDS * 0.6 < feeder.caught_up_at < pieces * replicas.REST_SECONDS * 1.5


WRONG = {
    "many pieces are under way among pushes": ("1 if among_ops else ", "", pushes_wait_for_small_pieces_only),
    "pieces among pushes are large": ("if among_ops and not awaits_op", "if False", pushes_wait_for_small_pieces_only),
    "a dump waits for a gap": (
        "self._confirmed_at + REST_SECONDS if", "math.inf if", dumps_go_on_among_pushes_without_a_gap
    ),
    "a dump never rests": ("self._confirmed_at + REST_SECONDS if", "now if", dumps_go_on_among_pushes_without_a_gap),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pace_is_caught(monkeypatch, name):
    old, new, scenario = WRONG[name]
    monkeypatch.setattr(FeedsOfJoiner, "go_on", mutant(FeedsOfJoiner.go_on, old, new))
    with pytest.raises(AssertionError):
        scenario()


def test_a_dump_does_not_wait_for_a_timer_after_a_push(monkeypatch):
    monkeypatch.setattr(FeedsOfJoiner, "op_confirmed", lambda feeds, relay: None)
    with pytest.raises(AssertionError):
        pushes_wait_for_small_pieces_only()


def test_a_push_waits_for_a_small_piece_of_each_feeder():
    pushes_wait_for_small_pieces_only()


def test_a_dump_goes_on_where_pushes_leave_no_gap():
    dumps_go_on_among_pushes_without_a_gap()


def test_pieces_are_large_and_two_are_under_way_where_there_are_no_pushes():
    joiner, three = feeders()
    assert max(size for _, size in joiner.pieces) > 0.9 * replicas.DUMP_PIECE_BYTES
    total = 3 * ROWS * (8 + 4 * DIM)
    assert max(feeder.caught_up_at for feeder in three) < 1.2 * total * BYTE_SECONDS
