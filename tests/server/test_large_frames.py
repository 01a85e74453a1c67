"""Frames that do not fit an inbox, through the compiled step and past it: the same answers, rows and ledgers."""

from __future__ import annotations

import itertools
import mmap
import resource
import threading
import time

import numpy as np
import pytest
from oracles import mutant
from peers import Raw
from servers import Servers, wait_until

import dps
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.state.transfer import first_difference
from dps.engine.wire import frames
from dps.engine.wire.connection import PEER_INBOX_BYTES, Connection
from dps.engine.wire.departures import DirectWriter
from dps.engine.wire.frames import ANSWER, RANGE, RULE_ADD, RULE_ASSIGN, Header, encode_header, padded
from dps.engine.wire.memory import Buffer, GrowingBody
from dps.engine.wire.plain_answers import PlainAnswers
from dps.engine.wire.sockets import connected_locally

SPECS = [
    TableSpec("add", rows=30_000, dim=16, shards=4),
    TableSpec("adagrad", rows=20_000, dim=8, shards=3, optimizer=dps.Adagrad(0.1), dtype="float64", finite=True),
    TableSpec("keyed", dim=16, shards=4, optimizer=dps.SGD(0.1), init=dps.Normal(1.0, seed=3)),
    TableSpec("mean", rows=30_000, dim=4, shards=2, optimizer=dps.SGD(0.1), aggregate="mean"),
]


class Peer(Raw):
    """A client on a Unix socket, or over TCP, that sends its frames in pieces."""

    def __init__(self, servers: Servers, local: bool):
        if local:
            self.sock = connected_locally(servers.addresses[0])
            self.sock.settimeout(20)
        else:
            super().__init__(servers.addresses[0])
        self.introduce()

    def send_in_pieces(self, frame: bytes, cuts: list[int], pause: float) -> None:
        for a, b in itertools.pairwise([0, *sorted(cuts), len(frame)]):
            self.send(frame[a:b])
            time.sleep(pause)


@pytest.mark.parametrize("what", ["pull", "push", "push_pull"])
def test_errors_in_the_place_of_several_answers(what: str) -> None:
    """A call in several requests to one server, which has no lease for a moment: the call is made again, and counts
    once."""
    count = 400_000
    keys, ones = np.arange(count), np.ones((count, 1))
    with Servers(2) as servers, servers.client() as client:
        servers.table(TableSpec("w", dtype="float64", shards=1, copies=2, ack="memory"), owners=[0])
        client.push("w", keys, ones)
        assert (client.pull("w", keys) == 1).all()
        role = servers.servers[0]
        lease = role.heartbeat.lease_until
        for _ in range(3):
            role.heartbeat.lease_until = -1.0
            timer = threading.Timer(0.05, setattr, (role.heartbeat, "lease_until", lease))
            timer.start()
            if what == "pull":
                assert (client.pull("w", keys) == 1).all()
            elif what == "push":
                client.push("w", keys, 0 * ones)
            else:
                assert (client.push_pull("w", keys, 0 * ones) == 1).all()
            timer.join()
        assert (client.pull("w", keys) == 1).all()


class Twins:
    """The same tables on two servers; the second one has no compiled step."""

    def __init__(self, local: bool):
        self.local, self.servers, self.peers = local, [Servers(1), Servers(1)], []
        self.servers[1].endpoints[0].service = None
        self.specs = [servers.table(spec) for spec in SPECS for servers in self.servers][::2]
        self.peers = [Peer(servers, local) for servers in self.servers]

    def __enter__(self) -> Twins:
        return self

    def __exit__(self, *exc: object) -> None:
        for peer, servers in zip(self.peers, self.servers, strict=True):
            peer.sock.close()
            servers.__exit__()

    def ask(self, frame: bytes, cuts: list[int], pause: float = 0.0) -> tuple[Header, bytes]:
        """The answer of both, which has to be the same."""
        answers = []
        for n, peer in enumerate(self.peers):
            peer.send_in_pieces(frame, cuts, pause)
            answers.append(peer.frame())
            if answers[-1] is None or answers[-1][0].request == 0:  # refused: the connection is closed
                peer.sock.close()
                self.peers[n] = Peer(self.servers[n], self.local)
        assert answers[0] == answers[1]
        return answers[0]

    def check(self) -> None:
        one, other = (servers.servers[0] for servers in self.servers)
        assert one.requests == other.requests
        for spec in self.specs:
            for number, replica in one.tables[spec.id].replicas.items():
                assert first_difference(replica.shard, other.tables[spec.id].replicas[number].shard) is None


class Talk:
    """Random requests, most of them large, some of them broken."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.number = 1000 * seed + 1

    def frame(self, spec: TableSpec) -> bytes:
        rng, self.number = self.rng, self.number + 1
        pushed, count = rng.random() < 0.7, int(rng.choice([3, 4_000, 9_000, 20_000]))
        flags, body = 0, b""
        fields = {"shards": spec.shards, "request": self.number, "clock": int(rng.integers(3))}
        if spec.rows is not None and rng.random() < 0.7:
            flags, fields["start"] = RANGE, int(rng.integers(spec.rows - count + 1))
        else:
            keys = rng.choice(spec.rows or 100_000, count, replace=False).astype(np.int64)
            parts = group(keys, spec.shard_map)
            body = np.diff(parts.starts).astype(np.int64).tobytes() + parts.keys.tobytes()
        if pushed:
            values = rng.normal(size=(count, spec.dim)).astype(spec.dtype)
            if rng.random() < 0.1:
                values[count // 2, -1] = np.nan
            body += values.tobytes().ljust(padded(values.nbytes), b"\0")
            flags |= int(rng.choice([0, 0, RULE_ADD, RULE_ASSIGN])) | ANSWER * (rng.random() < 0.2)
            fields |= {"trainer": 1, "number": self.number - (rng.random() < 0.1), "attempt": 1, "parties": 1}
        if rng.random() < 0.1:
            body = body[:-8] if rng.random() < 0.5 and body else body + bytes(8)
        header = Header(frames.PUSH if pushed else frames.PULL, flags, table=spec.id, count=count, body=len(body))
        return encode_header(header._replace(**fields)) + body

    def cuts(self, frame: bytes) -> list[int]:
        odd = [1, 63, 64, 65, 200, PEER_INBOX_BYTES - 1, PEER_INBOX_BYTES, PEER_INBOX_BYTES + 1, len(frame) - 1]
        chosen = self.rng.choice(odd, 3).tolist() + self.rng.integers(0, len(frame) + 1, 3).tolist()
        return [cut for cut in chosen if cut < len(frame)] if self.rng.random() < 0.7 else []


def play(seed: int, local: bool, turns: int = 25) -> None:
    with Twins(local) as twins:
        talk = Talk(seed)
        for _ in range(turns):
            frame = talk.frame(twins.specs[talk.rng.integers(len(SPECS))])
            twins.ask(frame, talk.cuts(frame), 0.001 * (talk.rng.random() < 0.3))
        twins.check()


@pytest.mark.thorough
@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_as_the_general_way(seed: int, local: bool) -> None:
    play(seed, local)


@pytest.fixture
def twins():
    with Twins(local=True) as twins:
        yield twins


def whole_push(spec: TableSpec, number: int, **fields: int) -> bytes:
    """A push to all rows of a table."""
    body = np.full((spec.rows, spec.dim), 0.5, spec.dtype).tobytes()
    stamp = {"trainer": 1, "number": number, "attempt": 1, "clock": 1, "parties": 1, "request": number}
    header = Header(frames.PUSH, RANGE, table=spec.id, shards=spec.shards, count=spec.rows, body=len(body), **stamp)
    return encode_header(header._replace(**fields)) + body


def test_a_connection_that_dies_in_mid_body_changes_nothing(twins) -> None:
    spec = twins.specs[1]
    for number in (1, 2):
        assert twins.ask(whole_push(spec, number), [])[0].kind == frames.OK
    for share in (0.1, 0.5, 0.9, 1.0):
        frame = whole_push(spec, 3)
        for n, (peer, servers) in enumerate(zip(twins.peers, twins.servers, strict=True)):
            if n == 0:  # the second server hears nothing of it
                peer.send(frame[: int(share * len(frame)) - 8])
                peer.sock.close()
                wait_until(lambda servers=servers: not servers.endpoints[0].connections)
                twins.peers[0] = Peer(servers, local=True)
        twins.check()
    assert twins.ask(whole_push(spec, 3), [])[0].kind == frames.OK
    twins.check()


def spied(servers: Servers, kind: int) -> list[Header]:
    """The frames of a kind that come to the handlers of the first server from now on."""
    handlers, seen = servers.endpoints[0].handlers, []
    handler = handlers[kind]

    def spy(connection: Connection, header: Header, body: memoryview) -> object:
        seen.append(header)
        return handler(connection, header, body)

    handlers[kind] = spy
    return seen


def test_a_large_push_with_backups_goes_the_general_way() -> None:
    """It lends the memory of its body, where the compiled step would copy it."""
    with Servers(2) as servers:
        servers.table(TableSpec("copies", rows=40_000, dim=8, shards=2, copies=2), [0, 0])
        seen = spied(servers, frames.PUSH)
        with servers.client() as client:
            for count in (10, 10, 40_000, 40_000):
                client.push("copies", slice(0, count), 1.0)
            assert (client.pull("copies", slice(0, 20)) == np.repeat([4.0, 2.0], 10)[:, None]).all()
        assert [header.count for header in seen] == [10, 40_000, 40_000], "the first op of an origin, and large ones"
        assert servers.differences() == []


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
def test_an_answer_to_a_slow_reader_shows_no_later_push(local: bool) -> None:
    """Other clients are answered meanwhile."""
    with Servers(1) as servers:
        spec = servers.table(TableSpec("large", rows=200_000, dim=16, shards=4))
        seen = spied(servers, frames.PULL)
        slow, other = Peer(servers, local), Peer(servers, local)
        with slow, other:
            ask = Header(frames.PULL, RANGE, table=spec.id, shards=spec.shards, count=spec.rows, request=9)
            for number in (1, 2, 3):
                slow.send(encode_header(ask))
                if number == 2:
                    time.sleep(0.05)
                other.send(whole_push(spec, number))
                assert other.frame()[0].kind == frames.OK
                header, body = slow.frame()
                assert (header.kind, header.count, len(body)) == (frames.OK, spec.rows, spec.rows * 64)
                values = set(np.frombuffer(body, np.float32).tolist())
                assert values in ({0.5 * (number - 1)}, {0.5 * number}), "never a part of a push"
                if number == 2:
                    assert values == {0.5}, "the pull came first"
        assert not seen, "all of them took the compiled step"


on_linux = pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="only Linux counts a thread's page faults")


@pytest.mark.thorough
@on_linux
@pytest.mark.parametrize("verb", ["push", "pull", "push and pull"])
def test_large_frames_touch_no_fresh_pages(verb: str) -> None:
    """The memory of bodies, answers and kept answers is used again. malloc itself keeps blocks below 32 MB."""

    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

    with Servers(1) as servers:
        spec = servers.table(TableSpec("large", rows=200_000, dim=64, shards=4))
        ask = Header(frames.PULL, RANGE, table=spec.id, shards=spec.shards, count=spec.rows, request=9)
        flags, number = RANGE | ANSWER * (verb == "push and pull"), 0
        with Peer(servers, local=True) as peer:

            def call() -> None:
                nonlocal number
                number += 1
                peer.send(encode_header(ask) if verb == "pull" else whole_push(spec, number, flags=flags))
                assert peer.frame()[0].kind == frames.OK

            for _ in range(5):
                call()
            before = servers.endpoints[0].call(faults)
            for _ in range(5):
                call()
            fresh = servers.endpoints[0].call(faults) - before
            assert fresh < 5_000, "each body has 25 huge pages, or 12,500 small ones"


@on_linux
def test_fresh_pages_would_be_noticed(monkeypatch) -> None:
    def take(buffer: Buffer, nbytes: int) -> np.ndarray:
        buffer._bytes = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)  # not what the C library has kept
        return buffer._bytes

    monkeypatch.setattr(Buffer, "take", take)
    with pytest.raises(AssertionError, match="huge pages"):
        test_large_frames_touch_no_fresh_pages("push")


def test_a_large_answer_through_the_transport(monkeypatch) -> None:
    """As over TLS, where no byte goes past it."""
    begin = DirectWriter.__init__

    def without_a_socket(writer: DirectWriter, *args: object) -> None:
        begin(writer, *args)
        writer._fd = -1

    monkeypatch.setattr(DirectWriter, "__init__", without_a_socket)
    test_an_answer_to_a_slow_reader_shows_no_later_push(True)
    play(7, local=True, turns=10)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("step.more(rest[made - sent :])", "pass"),
        ("rest[: made - sent] = self._answers[sent:made]", "pass"),
        ("made = step.more(self._answers)", "made = step.left"),
    ],
)
def test_a_wrong_rest_of_an_answer_is_caught(monkeypatch, old: str, new: str) -> None:
    broken = mutant(PlainAnswers._send_large, old, new)
    monkeypatch.setattr(PlainAnswers, "_send_large", broken)
    with pytest.raises(AssertionError):
        test_an_answer_to_a_slow_reader_shows_no_later_push(True)


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (Connection, "_handle_large", "if not self._answer_plain(whole, 0, len(whole)):", "if True:"),
        (GrowingBody, "__init__", "[: len(header)] = header", "[: len(header)] = bytes(len(header))"),
    ],
)
def test_without_the_step_it_is_noticed(monkeypatch, owner: type, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises(AssertionError, match="general"), Twins(local=True) as twins:
        check_plain(twins)


def check_plain(twins: Twins) -> None:
    """Large frames do not come to the handlers."""
    seen = spied(twins.servers[0], frames.PUSH)
    for number in (1, 2, 3):
        twins.ask(whole_push(twins.specs[0], number), [])
    twins.check()
    assert len(seen) == 1, f"{len(seen)} of 3 pushes went the general way, not the first one alone"


def test_large_frames_take_the_compiled_step(twins) -> None:
    check_plain(twins)
