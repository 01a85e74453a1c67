"""Ops on their way to a successor: their frames, in order; and the answers that wait until they are confirmed."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from compiled import FILES, variants

from dps.engine.core.requests import answers, forwards
from dps.engine.server.replicas import Replica, ReplicaPart
from dps.engine.state.ops import TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import CONTROL, HEADER_SIZE, RANGE, Header, decode_header, encode_header, padded
from dps.errors import MovedError

SPEC = TableSpec("t", dim=3, dtype="float32", shards=8, copies=2)
LARGE = 40_000  # rows, whose frame holds no copy of them


class World:
    """Servers 1 and 2 behind this one, whose links write down what they are sent."""

    def __init__(self, open_=True, limit=1 << 30):
        self.time, self.written, self.refused, self.connected = 5.0, {1: [], 2: []}, [], []
        self.ops = forwards.Forwards(lambda: self.time, lambda successor: None, self.connect, limit)
        self.ops.epoch, self.open = 7, open_

    def connect(self, successor):
        self.connected.append(successor.number)
        number = successor.number
        successor.link = SimpleNamespace(open=self.open, write=lambda buffers: self.written[number].append(buffers))

    def replica(self, number, successor=1):
        replica = Replica(SPEC, number, None)
        replica.successor = successor
        return replica

    def reach(self):
        """Make the connections, so that writing begins."""
        for number in (1, 2):
            self.connect(self.ops.successor(number))

    def sent(self, number=1):
        """The frames that a server was sent."""
        return split(b"".join(bytes(piece) for buffers in self.written[number] for piece in buffers))

    def push(self, parts, count=1, flags=0, rows=-1, peer=None, request=0):
        """Pass a push on: the parts are (replica, first row, a, b); its keys and values are made up."""
        keys = None if flags & (RANGE | CONTROL) else np.arange(1000, 1000 + count)
        values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
        fresh = [
            (ReplicaPart(r, None if keys is None else keys[a:b], start, a, b), 10 + r.number)
            for r, start, a, b in parts
        ]
        owed = answers.OwedAnswer()
        header = Header(frames.PUSH, flags, request, SPEC.id, 3, 4, 5, 6, 0, 8, rows, 0, count, 2, 1, 0)
        self.ops.forward(encode_header(header), fresh, keys, values, owed)
        if peer is not None:
            answer = encode_header(Header(frames.OK, request=request))
            owed.answer(self.ops.answers, peer, answer, lambda *args: self.refused.append(args))
        return owed

    def confirm(self, *requests, successor=1):
        """Let a successor confirm these requests in one go; how many bytes were taken."""
        inbox = b"".join(encode_header(Header(frames.OK, request=n)) for n in requests)
        return self.ops.confirm(self.ops.successors[successor], np.frombuffer(inbox, np.uint8), 0, len(inbox))


class Peer:
    """A client: the requests that were answered, one list for each delivery."""

    def __init__(self):
        self.answered = []

    def deliver(self, answers):
        self.answered.append([header.request for header, _ in split(answers)])


def split(data):
    """Headers and bodies of whole frames."""
    found = []
    while data:
        header = decode_header(data, 0, 1 << 40)
        end = HEADER_SIZE + header.body
        found.append((header, data[HEADER_SIZE:end]))
        data = data[end:]
    return found


@pytest.fixture
def world():
    world = World()
    world.reach()
    return world


# ---- frames


def body_of(parts, low, shards, keys, values):
    """The body of a forwarded op, as docs and `wire/frames.py` describe it."""
    numbers = np.zeros((1 if keys is None else 2, shards), np.int64)
    for replica, _, a, b in parts:
        numbers[0, replica.number - low] = 10 + replica.number
        if keys is not None:
            numbers[1, replica.number - low] = b - a
    listed = b"" if keys is None else keys.tobytes()
    return numbers.tobytes() + listed + values.tobytes().ljust(padded(values.nbytes), b"\0")


@pytest.mark.parametrize("count", [1, 7, LARGE])
@pytest.mark.parametrize("flags", [0, RANGE])
@pytest.mark.parametrize("rows", [-1, 9])
def test_neighbours_with_one_successor_travel_in_one_frame(world, count, flags, rows):
    middle = count // 2
    cut = [0, middle, middle, count]
    one, two, three = world.replica(1), world.replica(2), world.replica(5)
    parts = [(r, 100 + a, a, b) for r, a, b in zip((one, two, three), cut, cut[1:], strict=False)]
    world.push(parts, count, flags, rows)
    groups = [parts[:2], parts[2:]] if rows > 0 else [parts]
    sent = world.sent()
    assert len(sent) == len(groups)
    keys = None if flags else np.arange(1000, 1000 + count)
    values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    for n, (group, (header, body)) in enumerate(zip(groups, sent, strict=True)):
        low, a, b = group[0][0].number, group[0][2], group[-1][3]
        shards = group[-1][0].number - low + 1
        expected = Header(
            *(frames.REPLICATE, flags, 1 + n, SPEC.id, 7, 4, 5, 6, low, shards, rows, 100 + a, b - a, 2, 1, len(body))
        )
        assert header == expected
        assert body == body_of(group, low, shards, None if flags else keys[a:b], values[a:b])


def test_parts_go_to_their_own_successors(world):
    parts = [(world.replica(n, successor), 0, n, n + 1) for n, successor in enumerate([1, 1, None, 2, 1])]
    owed = world.push(parts, 5)
    assert owed.left == 3
    assert [(h.shard, h.shards, h.count) for h, _ in world.sent(1)] == [(0, 2, 2), (4, 1, 1)]
    assert [(h.shard, h.shards, h.count) for h, _ in world.sent(2)] == [(3, 1, 1)]


@pytest.mark.parametrize("count", [6, 2 * LARGE])
@pytest.mark.parametrize("flags", [0, RANGE])
def test_split_makes_a_frame_for_each_shard(world, count, flags):
    half = count // 2
    parts = [(world.replica(3), 50, 0, half), (world.replica(4), 50 + half, half, count)]
    owed = world.push(parts, count, flags)
    (forward,) = world.ops.successors[1].unconfirmed.values()
    singles = forward.split()
    assert owed.left == 2
    keys = np.arange(1000, 1000 + count)
    values = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    for single, part in zip(singles, parts, strict=True):
        replica, start, a, b = part
        ((header, body),) = split(b"".join(bytes(piece) for piece in single.buffers()))
        assert (header.shard, header.shards, header.start, header.count) == (replica.number, 1, start, b - a)
        assert body == body_of([part], replica.number, 1, None if flags else keys[a:b], values[a:b])
        assert replica.tail is single
        assert single.nbytes == (b - a) * (8 + 12)


def test_a_control_op_has_versions_only(world):
    world.push([(world.replica(3), 42, 0, 0)], 0, CONTROL)
    ((header, body),) = world.sent()
    assert (header.flags, header.shard, header.start, header.count) == (CONTROL, 3, 42, 0)
    assert body == np.int64(13).tobytes()


def test_a_frame_that_is_sent_again_is_another_one(world):
    world.push([(world.replica(0), 0, 0, 1)])
    before = [bytes(piece) for buffers in world.written[1] for piece in buffers]
    successor = world.ops.successors[1]
    forward = successor.unconfirmed.pop(1)
    world.ops.epoch = 8
    world.ops.send(1, forward)
    assert [bytes(piece) for buffers in world.written[1][:1] for piece in buffers] == before
    assert [(h.request, h.epoch) for h, _ in world.sent()] == [(1, 7), (2, 8)]


def test_without_a_connection_nothing_is_written():
    world = World(open_=False)
    world.push([(world.replica(0), 0, 0, 1)])
    assert world.connected == [1]
    assert not world.sent()
    assert list(world.ops.successors[1].unconfirmed) == [1]


@pytest.mark.parametrize("wrong", ["header", "keys", "values", "rows"])
def test_arrays_that_do_not_fit_are_refused(world, wrong):
    header = encode_header(Header(frames.PUSH, count=2))
    keys, values = np.arange(2), np.zeros((2, 3), np.float32)
    part = ReplicaPart(world.replica(0), keys, 0, 0, 3 if wrong == "rows" else 2)
    if wrong == "header":
        header = header[:-1]
    elif wrong == "keys":
        keys = np.arange(3)
    elif wrong == "values":
        values = np.zeros((2, 6), np.float32)[:, ::2]
    with pytest.raises((ValueError, TypeError)):
        world.ops.forward(header, [(part, 1)], keys, values, answers.OwedAnswer())
    assert not world.sent()


# ---- confirmations


def three_pushes(world, peers):
    """Three pushes on one shard, each of a peer."""
    replica = world.replica(0)
    for n, peer in enumerate(peers):
        world.push([(replica, 0, 0, 1)], peer=peer, request=101 + n)


def test_an_answer_leaves_when_its_op_is_confirmed_and_not_before(world):
    one, other = Peer(), Peer()
    three_pushes(world, [one, other, one])
    assert one.answered == other.answered == []
    assert world.ops.backlog == 3 * 20
    world.time = 9.0
    assert world.confirm(2) == HEADER_SIZE
    assert (one.answered, other.answered) == ([], [[102]])
    assert world.ops.backlog == 2 * 20
    assert world.ops.successors[1].progressed_at == 9.0
    assert list(world.ops.successors[1].unconfirmed) == [1, 3]


def test_confirmations_that_arrive_together_release_answers_together(world):
    one, other = Peer(), Peer()
    three_pushes(world, [one, other, one])
    assert world.confirm(1, 2, 3) == 3 * HEADER_SIZE
    assert (one.answered, other.answered) == ([[101, 103]], [[102]])
    assert world.ops.backlog == 0


def test_an_answer_waits_for_all_successors(world):
    peer = Peer()
    world.push([(world.replica(0, 1), 0, 0, 1), (world.replica(1, 2), 0, 1, 2)], 2, peer=peer, request=5)
    world.confirm(1, successor=2)
    assert not peer.answered
    world.confirm(1, successor=1)
    assert peer.answered == [[5]]


def test_a_repeat_waits_for_what_it_repeats(world):
    replica, owed, peer = world.replica(0), answers.OwedAnswer(), Peer()
    world.push([(replica, 0, 0, 1)])
    world.ops.follow(replica, owed)
    owed.answer(world.ops.answers, peer, encode_header(Header(frames.OK, request=8)), None)
    assert not peer.answered
    world.confirm(1)
    assert peer.answered == [[8]]
    world.ops.follow(replica, again := answers.OwedAnswer())
    assert again.left == 0


LEFT = {
    "an unknown request": encode_header(Header(frames.OK, request=9)),
    "a body": encode_header(Header(frames.OK, request=1, body=8)) + bytes(8),
    "an error": encode_header(Header(frames.ERROR, request=1)),
    "half a frame": encode_header(Header(frames.OK, request=1))[:56],
    "a piece of a dump": encode_header(Header(frames.OK, request=2)),
    "no frame": bytes(64),
}


@pytest.mark.parametrize("what", LEFT)
def test_whatever_is_no_confirmation_of_an_op_is_left(world, what):
    peer = Peer()
    world.push([(world.replica(0), 0, 0, 1)], peer=peer)
    head = encode_header(Header(frames.DUMP))
    world.ops.send(1, forwards.Forward.of_piece(SimpleNamespace(), None, head, (), 100))
    inbox = np.frombuffer(LEFT[what], np.uint8)
    assert world.ops.confirm(world.ops.successors[1], inbox, 0, len(inbox)) == 0
    assert (peer.answered, world.ops.backlog, len(world.ops.successors[1].unconfirmed)) == ([], 120, 2)


def test_a_refusal_is_told_at_once_and_the_end_comes_later(world):
    peer, ended = Peer(), []
    owed = world.push([(world.replica(0, 1), 0, 0, 1), (world.replica(1, 2), 0, 1, 2)], 2, peer=peer, request=5)
    owed.at_end(lambda: ended.append(True))
    error = MovedError("elsewhere")
    world.ops.successors[1].unconfirmed.pop(1).refuse(error)
    assert world.refused == [(peer, 5, error)]
    assert not ended
    world.confirm(1, successor=2)
    assert ended
    assert (peer.answered, len(world.refused)) == ([], 1)


def test_clients_wait_above_the_limit():
    world = World(limit=30)
    world.push([(world.replica(0), 0, 0, 1)])
    assert not world.ops.full
    world.push([(world.replica(0), 0, 0, 1)])
    assert world.ops.full


# ---- joiners that are learning


def learner(world, number):
    replica = world.replica(number)
    replica.learning = True
    return replica


def test_no_answer_waits_for_a_joiner_that_is_learning(world):
    """But the body is needed until it has confirmed the op; and one that knows all rows is waited for."""
    peer, released = Peer(), []
    owed = world.push([(learner(world, 0), 0, 0, 1)], peer=peer, request=8)
    owed.at_end(lambda: released.append(8))
    assert (peer.answered, released, (owed.left, owed.learning)) == ([[8]], [], (0, 1))
    assert world.ops.backlog == world.ops.successors[1].learning_bytes == 20
    assert not world.ops.successors[1].awaits_op
    world.confirm(1)
    assert (released, world.ops.backlog, world.ops.successors[1].learning_bytes) == ([8], 0, 0)


def test_a_request_of_several_shards_waits_for_those_that_the_successor_has(world):
    peer, released = Peer(), []
    owed = world.push([(learner(world, 0), 0, 0, 1), (world.replica(1), 0, 1, 2)], 2, peer=peer, request=8)
    owed.at_end(lambda: released.append(8))
    assert [header.shard for header, _ in world.sent()] == [0, 1]  # a frame each
    assert world.ops.successors[1].awaits_op
    world.confirm(2)
    assert (peer.answered, released) == ([[8]], [])
    assert not world.ops.successors[1].awaits_op
    world.confirm(1)
    assert (peer.answered, released) == ([[8]], [8])


def test_above_the_limit_answers_wait_for_a_joiner_that_is_learning():
    """So a backup, which no client asks, holds back its predecessor."""
    world = World(limit=30)
    world.reach()
    replica = learner(world, 0)
    assert [world.push([(replica, 0, 0, 1)]).left for _ in range(4)] == [0, 0, 1, 1]
    world.confirm(1, 2, 3)
    assert world.push([(replica, 0, 0, 1)]).left == 0


def test_a_repeat_does_not_wait_for_a_joiner_that_is_learning(world):
    replica, peer = learner(world, 0), Peer()
    world.push([(replica, 0, 0, 1)])
    owed = answers.OwedAnswer()
    world.ops.follow(replica, owed)
    owed.answer(world.ops.answers, peer, encode_header(Header(frames.OK, request=9)), None)
    assert peer.answered == [[9]]


@pytest.mark.parametrize("ends", ["confirmed", "refused"])
def test_an_op_that_a_learning_joiner_refuses_fails_no_answer(world, ends):
    """Nor does one that is sent again shard by shard, as where the joiner is withdrawn."""
    peer, released = Peer(), []
    owed = world.push([(learner(world, 0), 0, 0, 1), (learner(world, 1), 0, 1, 2)], 2, peer=peer, request=8)
    owed.at_end(lambda: released.append(8))
    successor = world.ops.successors[1]
    singles = successor.take(1).split()
    assert (len(singles), owed.learning, successor.learning_bytes) == (2, 2, 0)
    successor.replace(dict(enumerate(singles)))
    assert successor.learning_bytes == 40
    for single in singles:
        assert released == []
        single.confirm() if ends == "confirmed" else single.refuse(MovedError("it is not the primary"))
    assert (peer.answered, released, owed.error) == ([[8]], [8], None)


# ---- what must not pass

WRONG = {
    "an answer before the confirmation": ("if self.left == 0 or self.error is not None:", "if True:"),
    "a confirmation of another op": ("request = head.request\n", "request = next(iter(successor.unconfirmed))\n"),
    "no backlog": ("self.backlog -= forward.nbytes", "pass"),
    "a piece for an op": ("forward is None or forward.feed is not None", "forward is None"),
    "one delivery each": ("if not self._collects:\n            peer", "if True:\n            peer"),
    "rows of another shard": ("single._fill(keys, values, row)", "single._fill(keys, values, 0)"),
    "a frame that changes after it was sent": ("if self._written:", "if False:"),
    "a gap where a frame stands for all shards": ("if head.rows > 0 and other.number", "if False and other.number"),
    "answers wait for a joiner that is learning": ("if learning:\n", "if False:\n"),
    "a body that a learning joiner needs is given back": (
        *("self.left == 0 and self.learning == 0 and", "self.left == 0 and"),
    ),
    "a backup that feeds a slow joiner holds back nothing": (" and self.backlog <= self.limit", ""),
    "a frame for shards of both kinds": (" or other.learning != replica.learning", ""),
    "repeats wait for a joiner that is learning": ("and not tail.learning", ""),
    "parts of an op are not waited for by its body": ("owed.learning += len(singles) - 1", "pass"),
    "the ops of a learning joiner hold back its dump": ("elif forward.feed is None:", "if forward.feed is None:"),
}
TESTS = [
    test_an_answer_leaves_when_its_op_is_confirmed_and_not_before,
    test_confirmations_that_arrive_together_release_answers_together,
    lambda world: test_whatever_is_no_confirmation_of_an_op_is_left(world, "a piece of a dump"),
    lambda world: test_split_makes_a_frame_for_each_shard(world, 6, 0),
    lambda world: test_neighbours_with_one_successor_travel_in_one_frame(world, 7, 0, 9),
    test_a_frame_that_is_sent_again_is_another_one,
    test_no_answer_waits_for_a_joiner_that_is_learning,
    test_a_request_of_several_shards_waits_for_those_that_the_successor_has,
    lambda world: test_above_the_limit_answers_wait_for_a_joiner_that_is_learning(),
    test_a_repeat_does_not_wait_for_a_joiner_that_is_learning,
    lambda world: test_an_op_that_a_learning_joiner_refuses_fails_no_answer(world, "refused"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [next(iter(WRONG)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*WRONG][1:])]
)
def test_a_broken_variant_is_caught(monkeypatch, name):
    old, new = WRONG[name]
    (wrong,) = (module for module in ("answers", "forwards") if old in FILES[f"{module}.pyx"].read_text())
    modules = ["answers", "forwards"] if wrong == "answers" else ["forwards"]
    for module, variant in zip(modules, variants(modules, f"{wrong}.pyx", old, new), strict=True):
        monkeypatch.setitem(globals(), module, variant)
    failed = 0
    for test in TESTS:
        world = World()
        world.reach()
        try:
            test(world)
        except AssertionError:
            failed += 1
    assert failed
