"""Dumps to a joiner among pushes, in virtual time: three relays, and a joiner that handles frame by frame."""

from __future__ import annotations

import heapq
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import mutant

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.server import pace, replicas
from dps.engine.server.pace import DumpPace
from dps.engine.server.replicas import FeedsOfJoiner, JoinerFeed, PieceMemory, Replica, ReplicaPart
from dps.engine.server.replication import Relay
from dps.engine.state.ops import ADD, Op, TableSpec
from dps.engine.state.shard import KeyedShard
from dps.engine.wire import frames
from dps.engine.wire.bandwidth import BURST_SECONDS, LinkBudget
from dps.engine.wire.frames import Header, decode_header, encode_header
from dps.engine.wire.headers import DumpPiece

JOINER = 9
ROWS, DIM = 32768, 64  # of each shard: 8.6 MB
PIECES = ROWS * (8 + 4 * DIM) / pace.PIECE_BYTES
FRAME_SECONDS, BYTE_SECONDS = 20e-6, 1e-9  # that the joiner takes for a frame
THINK_SECONDS = 0.3e-3  # from the end of a push to the next one
DELAY_SECONDS = 0.1e-3  # that a message is on its way
LOOP_SECONDS = 0.5e-3  # that a piece takes of the feeder's loop


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
            self.free_at = (
                max(self.free_at, self.clock.time + DELAY_SECONDS) + FRAME_SECONDS + header.body * BYTE_SECONDS
            )
            if header.kind == frames.DUMP and DumpPiece.of(header).content == replicas.ROWS:
                self.pieces.append((self.clock.time, header.body))
            answer = Header(frames.OK, request=header.request)
            self.clock.later(self.free_at + DELAY_SECONDS - self.clock.time, on_answer, link, answer, memoryview(b""))

        link.write = write
        self.clock.later(0, on_up, link)
        return link


class WorkingMemory(PieceMemory):
    """A piece takes so many seconds of the feeder's loop."""

    def __init__(self, seconds):
        super().__init__()
        self.worked, self._seconds = 0.0, seconds

    def copies(self, arrays):
        self.worked += self._seconds
        return super().copies(arrays)


class Feeder:
    """A server that feeds the joiner a shard, and passes pushes on to it, also those of one that it has already."""

    def __init__(self, clock, joiner, loop_seconds):
        self.clock, self.caught_up_at, self.latencies, self.served = clock, None, [], 0
        endpoint = SimpleNamespace(
            now=clock.now,
            later=clock.later,
            connect=lambda address, session, secret, on_up, on_answer, on_end: joiner.link(on_up, on_answer),
        )
        memory = WorkingMemory(loop_seconds)
        rules = DumpPace(lambda: self.served, lambda: memory.worked)
        self.relay = Relay(endpoint, "s", "secret", self._report, SimpleNamespace(run=None), rules)
        self.relay.memory = memory
        self.relay.addresses = {JOINER: ("127.0.0.1", 1)}
        self.relay.rate = 1e12
        self.replica, self.neighbour = (Replica(spec, number, KeyedShard(spec, number)) for number in range(2))
        self.replica.shard.apply(Op(ADD, np.arange(ROWS), 0, np.ones((ROWS, DIM), np.float32), 0, 1))

    def _report(self, kind, message):
        assert kind == frames.CAUGHT_UP
        self.caught_up_at = self.clock.time

    def join(self):
        self.relay.rechain(self.neighbour, JOINER, None)
        self.relay.rechain(self.replica, JOINER, feed=1)

    def push(self, replica, then, rows=4):
        """Pass an op on; when it is answered, note when it began and how long that took, and call `then`."""
        keys, values, began = np.arange(rows), np.ones((rows, DIM), np.float32), self.clock.time
        self.served += 1
        replica.shard.apply(Op(ADD, keys, 0, values, 0, 1))
        owed, part = OwedAnswer(), ReplicaPart(replica, keys, 0, 0, rows)
        header = encode_header(Header(frames.PUSH, rows=0))
        self.relay.ops.forward(header, [(part, replica.shard.version)], keys, values, owed)
        owed.then(lambda: (self.latencies.append(self.clock.time - began), then()))


spec = TableSpec("n", dim=DIM, shards=2)


def feeders(push=None, count=3, seconds=1.0, loop_seconds=0.0, rate=math.inf):
    """Servers feed one joiner; `push(feeder)` begins the pushes of each. `rate`: of the budget of each server."""
    clock = Clock()
    joiner = Joiner(clock)
    found = [Feeder(clock, joiner, loop_seconds) for _ in range(count)]
    for feeder in found:
        feeder.relay.budget = LinkBudget(rate)
        feeder.join()
        if push is not None:
            clock.later(0.0001, push, feeder)
    clock.run(seconds)
    return joiner, found


def of_the_shard(feeder):
    """Pushes of the shard that moves, one after another."""
    feeder.push(feeder.replica, lambda: feeder.clock.later(THINK_SECONDS, of_the_shard, feeder))


def of_the_neighbour(feeder):
    """Pushes of a shard that the joiner has already, one after another."""
    feeder.push(feeder.neighbour, lambda: feeder.clock.later(THINK_SECONDS, of_the_neighbour, feeder))


def too_many(feeder):
    """Pushes of the shard that moves, of more bytes than the joiner takes; they end after a while."""
    if feeder.clock.time < pace.END_SECONDS / 2:
        feeder.push(feeder.replica, lambda: feeder.clock.later(275e-6, too_many, feeder), rows=1000)


def no_push_waits_for_a_learning_joiner():
    """But for those after the end of the dump, which wait for the pieces and ops that are under way."""
    _, three = feeders(of_the_shard)
    for feeder in three:
        assert feeder.caught_up_at is not None
        learning = int(0.8 * feeder.caught_up_at / THINK_SECONDS)
        assert learning > 10
        assert max(feeder.latencies[:learning]) == 0
        assert max(feeder.latencies) < 0.005, max(feeder.latencies)
        assert min(feeder.latencies[-100:]) > 0  # the joiner may be the primary next


def pushes_that_wait_for_the_joiner_keep_their_rate():
    _, three = feeders(of_the_neighbour)
    last = max(feeder.caught_up_at for feeder in three)
    assert 0.03 < last < 0.3, last
    for feeder in three:
        alone, among = feeder.latencies[-100:], feeder.latencies[1 : int(last / THINK_SECONDS / 2)]
        assert THINK_SECONDS + np.mean(alone) > 0.7 * (THINK_SECONDS + np.mean(among)), np.mean(among)
        most = 3 * (FRAME_SECONDS + 1.1 * pace.PIECE_BYTES * BYTE_SECONDS) + 4 * FRAME_SECONDS
        assert max(among) < 2 * DELAY_SECONDS + most


def a_dump_has_its_share_of_a_loop_that_serves():
    _, (feeder,) = feeders(of_the_shard, count=1, loop_seconds=LOOP_SECONDS)
    assert feeder.caught_up_at is not None
    seconds = PIECES * LOOP_SECONDS * (1 - pace.SHARE) / pace.SHARE
    assert 0.9 * seconds < feeder.caught_up_at < 1.2 * seconds, feeder.caught_up_at


def a_dump_has_all_of_a_loop_that_serves_nothing():
    joiner, (feeder,) = feeders(count=1, loop_seconds=LOOP_SECONDS)
    assert max(size for _, size in joiner.pieces) > 0.9 * pace.PIECE_BYTES
    assert feeder.caught_up_at < 2e-3 + 1.2 * PIECES * (FRAME_SECONDS + pace.PIECE_BYTES * BYTE_SECONDS)


def a_joiner_catches_up_before_answers_wait_for_it():
    """Pushes are faster than the joiner: the dump goes on slowly, and does not end before it has caught up."""
    _, (feeder,) = feeders(too_many, count=1, seconds=3.0)
    assert feeder.latencies
    assert max(feeder.latencies) == 0
    assert feeder.caught_up_at < 0.75 * pace.END_SECONDS


def dumps_have_the_budget_of_their_server():
    _, three = feeders(seconds=2.0, rate=1e7)
    nbytes = ROWS * (8 + 4 * DIM)
    for feeder in three:
        assert 0.9 * nbytes / 1e7 - BURST_SECONDS < feeder.caught_up_at < 1.1 * nbytes / 1e7, feeder.caught_up_at


SCENARIOS = [
    dumps_have_the_budget_of_their_server,
    no_push_waits_for_a_learning_joiner,
    pushes_that_wait_for_the_joiner_keep_their_rate,
    a_dump_has_its_share_of_a_loop_that_serves,
    a_dump_has_all_of_a_loop_that_serves_nothing,
    a_joiner_catches_up_before_answers_wait_for_it,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_pace_of_dumps(scenario):
    scenario()


WRONG = {
    "answers wait for a joiner that learns": (
        JoinerFeed, "begin", "self.replica.learning = True", "pass", no_push_waits_for_a_learning_joiner
    ),
    "answers never wait for a joiner": (
        JoinerFeed, "send_piece", "self.replica.learning = False", "pass", no_push_waits_for_a_learning_joiner
    ),
    "the end of a dump leaves at once": (
        replicas, "may_end", "learning_bytes <= LAST_BYTES", "True", a_joiner_catches_up_before_answers_wait_for_it
    ),
    "many pieces are under way among ops that wait": (
        replicas, "next_piece", "(0 if among_ops or behind", "(MOST_UNDER_WAY - 1 if among_ops or behind",
        pushes_that_wait_for_the_joiner_keep_their_rate,
    ),
    "a dump never rests among ops that wait": (
        replicas, "next_piece", "if among_ops else 0.0", "if False else 0.0",
        pushes_that_wait_for_the_joiner_keep_their_rate,
    ),
    "a dump waits for a gap among ops": (
        replicas, "next_piece", "max(now, traffic.confirmed_at + rest)", "math.inf if traffic.awaited else now",
        pushes_that_wait_for_the_joiner_keep_their_rate,
    ),
    "a dump takes all of a loop that serves": (
        DumpPace, "rested_at", "self._rested_at if rests", "now if rests", a_dump_has_its_share_of_a_loop_that_serves
    ),
    "a dump rests for ever": (
        DumpPace, "rested_at", "self._rested_at if rests", "now + 1.0 if self._seen",
        a_dump_has_its_share_of_a_loop_that_serves,
    ),
    "a dump rests where nothing is served": (
        DumpPace, "rested_at", "now - self._seen_at < BUSY_SECONDS and", "",
        a_dump_has_all_of_a_loop_that_serves_nothing,
    ),
    "one piece is under way at a time": (
        replicas, "next_piece", "MOST_UNDER_WAY - 1", "0", a_dump_has_all_of_a_loop_that_serves_nothing
    ),
    "dumps take what they like of the link": (
        FeedsOfJoiner, "go_on", "relay.budget.due(now)", "now", dumps_have_the_budget_of_their_server
    ),
    "pieces cost nothing": (
        JoinerFeed, "_send", "self.relay.budget.spend(nbytes, self.sent_at)", "pass",
        dumps_have_the_budget_of_their_server,
    ),
    "no feed goes on after an op": (
        FeedsOfJoiner, "op_confirmed", "relay.endpoint.later(0, self.go_on, relay)", "pass",
        a_joiner_catches_up_before_answers_wait_for_it
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pace_is_caught(monkeypatch, name):
    owner, function, old, new, scenario = WRONG[name]
    monkeypatch.setattr(owner, function, mutant(getattr(owner, function), old, new))
    with pytest.raises(AssertionError):
        scenario()
