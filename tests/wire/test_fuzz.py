"""Endpoints under random and mutated frames: they stay up, keep their data, their memory and their manners.

`make fuzz` runs a million frames against a server; `FRAMES` and `SEED` may be set. What is drawn: `fuzzing.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import mmap
import os
import random
import socket
import struct
import threading
import time
import tracemalloc
from collections import Counter

import dask
import numpy as np
import pytest
from fuzzing import Grammar, Witness, converse, only_warnings, resident, wild_text
from oracles import mutant
from peers import NAME, SECRET, Raw, ViewSink, framed, soon
from servers import Servers

import dps
from dps.engine.controller.runs import Runs
from dps.engine.server.requests import ServerRole
from dps.engine.server.tables import ServerTable
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import group
from dps.engine.wire import frames, handshake, rights
from dps.engine.wire.channel import Channel
from dps.engine.wire.endpoint import Connection, Endpoint
from dps.engine.wire.frame_reader import FrameReader
from dps.engine.wire.frames import Header, encode_json, padded
from dps.engine.wire.handshake import ListeningHandshake
from dps.errors import DPSError

FRAMES = int(os.environ.get("FUZZ_FRAMES", 20_000))
SEED = int(os.environ.get("FUZZ_SEED", 1))
GROWTH = 48 << 20  # bytes: of the process with the server, its clients and the fuzzer
WORST = 5.0  # seconds: a witness's slowest call, on a machine of two cores that others use as well
LIMITS = {"dps.limits.frame": "1 MiB", "dps.limits.incoming": "2 MiB", "dps.limits.buffer": "64 KiB"}
LIMITS["dps.limits.connections"] = "100"
endpoint_logger = logging.getLogger("dps.engine.wire.connection")

POOL = [0, 1, -1, 2**63 - 1, -(2**63), *range(100, 160)]
ROWS = 41
SACRED = [  # what nobody may change
    TableSpec("dense", rows=ROWS, dim=3, init=dps.Normal(1.0, seed=1)),
    TableSpec("keyed", dim=2, dtype="float64", optimizer=dps.Adam(0.1), init=dps.Uniform(-1.0, 1.0, seed=2)),
    TableSpec("whole", dtype="int64", shards=2),
    TableSpec("summed", rows=ROWS, optimizer=dps.SGD(0.5), aggregate="sum"),
    TableSpec("finite", rows=ROWS, dim=2, finite=True, shards=1),
]
OPEN = [  # what they may
    TableSpec("open dense", rows=ROWS, dim=4, optimizer=dps.Adam(0.1)),
    TableSpec("open keyed", dim=3, optimizer=dps.Adagrad(0.1), init=dps.Normal(0.1, seed=3)),
    TableSpec("open whole", rows=ROWS, dtype="int64", optimizer=dps.Assign()),
    TableSpec("open mean", optimizer=dps.FTRL(), aggregate="mean", shards=2),
    TableSpec("open finite", rows=ROWS, dtype="float64", optimizer=dps.SGD(dps.Exponential(0.1, 0.9)), finite=True),
]


class Tables:
    """The tables of a test on one server, and frames for them."""

    def __init__(self, servers: Servers):
        self.servers, self.client = servers, servers.client()
        rng = np.random.default_rng(0)
        self.specs = [servers.table(spec) for spec in (*SACRED, *OPEN)]
        self.sacred = {spec.id: spec for spec in self.specs[: len(SACRED)]}
        for spec in self.sacred.values():
            keys = np.arange(ROWS) if spec.rows else np.array(POOL)
            values = rng.integers(-9, 9, (len(keys), spec.dim)).astype(spec.dtype)
            self.client.push(spec.name, keys, values if spec.dim > 1 else values[:, 0])
        self.requests = {spec.id: [self._request(spec, rng) for _ in range(60)] for spec in self.specs}

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    @staticmethod
    def _request(spec: TableSpec, rng: np.random.Generator) -> tuple[dict, bytes]:
        """Fields and keys of a request that is right."""
        if spec.rows and rng.random() < 0.3:
            start = int(rng.integers(0, ROWS))
            count = int(rng.integers(0, ROWS - start + 1))
            return {"flags": frames.RANGE, "shards": spec.shards, "start": start, "count": count}, b""
        count = 12_000 if rng.random() < 0.03 else int(rng.integers(0, 9))
        keys = rng.choice(np.arange(ROWS) if spec.rows else np.array(POOL), count)
        grouped = group(keys, spec.shard_map)
        counts = np.diff(grouped.starts).astype(np.int64)
        return {"shards": spec.shards, "count": count}, counts.tobytes() + grouped.keys.tobytes()

    def valid(self, draw: random.Random) -> tuple[int, dict, bytes]:
        """A frame that a handler may take seriously; pushes to sacred tables have a fault."""
        if draw.random() < 0.04:
            return draw.choice((frames.STATUS, draw.randrange(256))), {}, draw.randbytes(8 * draw.randint(0, 4))
        push = draw.random() < 0.5
        spec = draw.choice(self.specs)
        fields, body = draw.choice(self.requests[spec.id])
        fields = {"table": spec.id, **fields}
        if not push:
            return frames.PULL, fields, body
        fields["clock"] = draw.choice((-1, draw.getrandbits(5)))
        fields["parties"] = draw.randint(0, 3)
        fields["flags"] = fields.get("flags", 0) | draw.choice((0, frames.RULE_ADD, frames.RULE_ASSIGN, frames.ANSWER))
        values = draw.randbytes(padded(fields["count"] * spec.dim * spec.itemsize))
        if spec.id in self.sacred:
            body = self._spoiled(draw, fields, body)
        return frames.PUSH, fields, body + values

    def tame(self, draw: random.Random) -> tuple[int, dict, bytes]:
        """A pull."""
        spec = draw.choice(self.specs)
        fields, body = draw.choice(self.requests[spec.id])
        return frames.PULL, {"table": spec.id, **fields}, body

    @staticmethod
    def _spoiled(draw: random.Random, fields: dict, body: bytes) -> bytes:
        """With a first row, a count or a key that is wrong."""
        if not body:
            fields["start"] += draw.choice((-ROWS, ROWS, 1 << 40, -(1 << 62)))
            return body
        spoiled, words = bytearray(body), fields["shards"] + draw.choice((0, fields["count"]))
        struct.pack_into("<q", spoiled, 8 * draw.randrange(words), draw.choice((-1, ROWS, 1 << 40, -1 << 63)))
        return bytes(spoiled)

    def harmless(self, header: Header, body: bytes) -> bool:
        """Whether the frame can change no row of a sacred table. An oracle: what the server must refuse."""
        spec = self.sacred.get(header.table)
        if spec is None or header.kind not in (frames.PUSH, frames.REPLICATE, frames.DUMP):
            return True
        if header.kind != frames.PUSH:
            return False
        ranged, count = header.flags & frames.RANGE, header.count
        used = 0 if ranged else 8 * (header.shards + count)
        if count == 0 or used + padded(count * spec.dim * spec.itemsize) != len(body):
            return True
        if ranged:
            return spec.rows is None or not 0 <= header.start <= header.start + count <= spec.rows
        counts = struct.unpack_from(f"<{header.shards}q", body)
        keys = struct.unpack_from(f"<{count}q", body, 8 * header.shards)
        outside = spec.rows is not None and not 0 <= min(keys) <= max(keys) < spec.rows
        return outside or min(counts, default=0) < 0 or sum(counts) != count

    def grammar(self, seed: int) -> Grammar:
        return Grammar(seed, self.valid, self.harmless, tame=self.tame)

    def digest(self) -> str:
        """Of all rows of the sacred tables, and of rows that are not there."""
        checksum = hashlib.sha256()
        with self.servers.client() as client:
            for spec in self.sacred.values():
                keys = np.arange(ROWS) if spec.rows else np.array([*POOL, 7, 8, 9])
                checksum.update(client.pull(spec.name, keys).tobytes())
                checksum.update(b"%d" % self.servers.rows(spec.name))
        return checksum.hexdigest()


@pytest.fixture
def tables():
    with dask.config.set(LIMITS), Servers(1) as servers, Tables(servers) as tables:
        yield tables


def fuzz_server(tables: Tables, seed: int, count: int) -> str:
    """Fuzz, and judge. Returns a line about it."""
    (address,), grammar = tables.servers.addresses.values(), tables.grammar(seed)
    before = tables.digest()
    keys, expected = np.arange(ROWS), tables.client.pull("dense", np.arange(ROWS))
    client = tables.servers.client()

    def call() -> None:
        np.testing.assert_array_equal(client.pull("dense", keys), expected)

    with client, only_warnings(endpoint_logger) as bugs, only_warnings(logging.getLogger("asyncio")) as losses:
        converse(address, grammar, min(count // 10, 5_000))  # until caches are full and buffers have their size
        had, began = resident(), time.perf_counter()
        with Witness(call) as witness:
            answers = converse(address, grammar, count)
        seconds, grown = time.perf_counter() - began, resident() - had
    assert not bugs + losses, f"{len(bugs)} handlers broke, e.g. {bugs[:1]}; {losses[:1]}"
    assert witness.error is None, f"another client suffered: {witness.error!r}"
    assert tables.digest() == before, "rows changed"
    assert max(witness.seconds) < WORST, f"another client waited: {witness}"
    assert grown < GROWTH, f"{grown >> 20} MiB more than before"
    judged = answers[frames.OK] + answers[frames.ERROR]
    assert min(answers[frames.OK], answers[frames.ERROR]) > judged // 10, "the frames are too tame, or too wild"
    return (
        f"seed {seed}: {judged} frames judged ({answers[frames.OK]} carried out, {answers[frames.ERROR]} refused) by "
        f"{answers[frames.WELCOME]} proved connections of {answers[frames.GREETING]} in {seconds:.0f} s, "
        f"{judged / seconds:.0f} a second; memory {grown / 2**20:+.1f} MiB; a witness: {witness}"
    )


@pytest.mark.thorough
@pytest.mark.timeout(300 + FRAMES // 200)
def test_a_server_under_random_frames(tables) -> None:
    print("\n" + fuzz_server(tables, SEED, FRAMES))


def test_more_shards_than_there_are(tables) -> None:
    """Each costs a look: a body of nothing but empty shards is refused before the first."""
    (address,) = tables.servers.addresses.values()
    spec = tables.specs[0]
    for extra, kind in ((0, frames.OK), (1, frames.ERROR), (60_000, frames.ERROR)):
        shards = spec.shards + extra
        with Raw(address) as raw:
            raw.introduce().send(framed(frames.PULL, bytes(8 * shards), table=spec.id, shards=shards))
            assert raw.frame()[0].kind == kind


# ---- what must not pass ---------------------------------------------------------------------------------------------

SLOW = "another client (waited|suffered)"  # by then its client asks the controller, which is none
CHANGED = "rows changed|another client suffered"
SERVE = "if self.session is None"
MUTANTS = [
    (ServerTable, "cut", "used > len(body)", "used > 1 << 40", "handlers broke"),
    (ServerTable, "values", "rest != len(body)", "rest > len(body)", CHANGED),
    (ListeningHandshake, "receive", "not proves(", "not (lambda *_: True)(", "welcomed with no proof"),
    (FrameReader, "next", "end - start >= HEADER_SIZE", "end - start > 0", "without a fault was refused"),
    (Endpoint, "forget", "self.connections.discard(connection)", "pass", "closed where it should have greeted"),
]


def fuzz_variant() -> None:
    with dask.config.set(LIMITS), Servers(1) as servers, Tables(servers) as tables:
        fuzz_server(tables, 1, 4_000)


@pytest.mark.thorough
@pytest.mark.parametrize(("owner", "name", "old", "new", "words"), MUTANTS)
def test_a_broken_variant_is_caught(monkeypatch, owner: type, name: str, old: str, new: str, words: str) -> None:
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises(AssertionError, match=words):
        fuzz_variant()


def test_a_frame_that_is_served_before_the_proof_is_caught(monkeypatch) -> None:
    """Two fences stand before it: the connection's, and the table of rights."""
    monkeypatch.setattr(rights, "role_of", mutant(rights.role_of, "return STRANGER", "return CLIENT"))
    monkeypatch.setattr(Connection, "_handle", mutant(Connection._handle, SERVE, f"{SERVE} and header.kind == 2"))
    with pytest.raises(AssertionError, match="served before"):
        fuzz_variant()


@pytest.mark.thorough
@pytest.mark.parametrize("words", [SLOW, "MiB more than before"])
def test_a_slow_or_greedy_variant_is_caught(monkeypatch, words: str) -> None:
    pull, hoard = ServerRole._pull, []

    def slow(self, connection, header, body):
        hoard.append(0)
        if len(hoard) == 2_000:
            time.sleep(WORST + 0.1)
        return pull(self, connection, header, body)

    def greedy(self, connection, header, body):
        hoard.append(mmap.mmap(-1, 1 << 16))  # fresh memory, though earlier tests may have left some to the process
        hoard[-1].write(b"x" * (1 << 16))
        return pull(self, connection, header, body)

    monkeypatch.setattr(Connection, "_answer_plain", lambda *_: 0)
    monkeypatch.setattr(ServerRole, "_pull", slow if words == SLOW else greedy)
    with pytest.raises(AssertionError, match=words):
        fuzz_variant()


# ---- the controller's side ------------------------------------------------------------------------------------------

OPS = ("sum", "mean", "max", "min", "barrier", "broadcast")
DTYPES = ("<f8", "<f4", "<i8", "|O", "|V0", "S8", "(2,)f8", "f4,f4", "(1,f4", "M8[s]", "|b1", ">c16", "V1000000000")
SHAPES = ([0], [1], [3], [-1], [1 << 62], [1 << 80], [2, -1], [1.0], ["1"], 3, None, {})


class Meetings:
    """Runs behind an endpoint: some for the fuzzer, in session `NAME`, and one of somebody else's."""

    def __init__(self):
        self.fuzzed, self.others = Runs(NAME), Runs("other")
        handlers = {
            frames.JOIN: self._to("join"),
            frames.TICK: self._to("tick"),
            frames.COLLECT: self._to("collect"),
            frames.LEAVE: self._to("leave"),
            frames.RESERVE: self._to("reserve"),
            frames.PEEK: self._to("peek"),
            frames.AWAIT: self._to("await_lowest"),
        }
        self.endpoint = Endpoint("test", "127.0.0.1", handlers, self._gone)
        self.endpoint.secrets |= {NAME: SECRET, "other": "cd" * 32}
        self.address = (self.endpoint.host, self.endpoint.port)
        self.numbers: list[int] = []

    def _of(self, connection: Connection) -> Runs:
        return self.fuzzed if connection.session == NAME else self.others

    def _to(self, verb: str):
        return lambda connection, header, body: getattr(self._of(connection), verb)(connection, header, body)

    def _gone(self, connection: Connection) -> None:
        self._of(connection).disconnected(connection)

    def renew(self) -> None:
        """New runs in the place of those that the fuzzer has spoilt; also what the controller does now and then."""

        def start() -> None:
            self.fuzzed.check_timeouts()
            self.numbers[:] = [self.fuzzed.start(trainers, s) for trainers, s in ((1, 0), (2, 0), (3, 2), (2, None))]
            elastic = self.fuzzed.start(2, None, elastic=True)
            self.fuzzed.end(elastic - len(self.numbers) - 1)
            self.numbers.append(elastic)

        self.endpoint.call(start)

    def opening(self, draw: random.Random) -> bytes:
        fields = {"run": draw.choice(self.numbers), "trainer": draw.randrange(3), "incarnation": draw.getrandbits(2)}
        return framed(frames.JOIN, encode_json(fields))

    def valid(self, draw: random.Random) -> tuple[int, dict, bytes]:
        often = frames.JOIN, frames.TICK, frames.TICK, frames.COLLECT, frames.COLLECT
        kind = draw.choice((*often, frames.LEAVE, frames.RESERVE, frames.PEEK, frames.AWAIT))
        fields = {"clock": draw.getrandbits(2), "number": draw.getrandbits(2)}
        if kind == frames.AWAIT:
            return kind, {"clock": draw.getrandbits(2) - 1}, b""
        if kind == frames.TICK:
            return kind, {**fields, "count": draw.getrandbits(4)}, b""
        if kind == frames.JOIN:
            request_fields = {
                "run": draw.choice(self.numbers),
                "trainer": draw.randrange(3),
                "incarnation": draw.getrandbits(2),
            }
            return kind, {}, wild_text(draw, {**request_fields, "where": "here"})
        if kind in (frames.RESERVE, frames.PEEK):
            request_fields = {"run": draw.choice(self.numbers), "trainer": draw.randrange(-1, 4)}
            return (
                kind,
                {},
                wild_text(draw, {**request_fields, "name": draw.choice("ab"), "count": draw.randrange(-1, 4)}),
            )
        if kind == frames.LEAVE:
            seconds = dict.fromkeys(("compute", "pull", "push", "wait", "serialise"), 1.0)
            return kind, {}, wild_text(draw, {"failed": draw.choice((None, None, "x")), "seconds": seconds})
        request_fields = {"op": draw.choice(OPS), "dtype": draw.choice(DTYPES), "shape": draw.choice(SHAPES), "root": 0}
        if draw.random() < 0.5:
            request_fields |= {"dtype": "<f8", "shape": [3]}
        text = wild_text(draw, request_fields) if draw.random() < 0.3 else encode_json(request_fields)
        return kind, {**fields, "count": len(text)}, text + draw.randbytes(8 * draw.choice((0, 1, 3, 3, 3)))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about the numbers in random bytes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.timeout(300 + FRAMES // 200)
def test_runs_under_random_frames() -> None:
    """Trainers that break all rules: others, of another parameter server, tick on; memory stays."""
    count = min(FRAMES, 200_000) // 4
    with dask.config.set({**LIMITS, "dps.timeouts.rejoin": "50 ms", "dps.timeouts.vanish": "50 ms"}):
        meetings = Meetings()
    grammar, answers = Grammar(SEED, meetings.valid, opening=meetings.opening), Counter()
    channel = Channel(meetings.address, "other", "cd" * 32, "the controller")
    with contextlib.ExitStack() as stack:
        stack.callback(meetings.endpoint.stop)
        channel = stack.enter_context(contextlib.closing(channel))
        number = meetings.endpoint.call(meetings.others.start, 1, 0)
        channel.ask(Header(frames.JOIN), encode_json({"run": number, "trainer": 0, "incarnation": 0})).result(soon())
        clocks = itertools.count(1)

        def call() -> None:
            channel.ask(Header(frames.TICK, clock=next(clocks))).result(soon())

        bugs = stack.enter_context(only_warnings(endpoint_logger))
        losses = stack.enter_context(only_warnings(logging.getLogger("asyncio")))
        with Witness(call) as witness:
            for n in range(count // 100):  # few, for a run is soon spoilt
                if n == 5:
                    had = resident()
                meetings.renew()
                answers += converse(meetings.address, grammar, 100, limit=20)
        assert not bugs + losses, f"{len(bugs)} handlers broke, e.g. {bugs[:1]}; {losses[:1]}"
        assert witness.error is None, f"another trainer suffered: {witness.error!r}"
        assert max(witness.seconds) < WORST, f"another trainer waited: {witness}"
        assert resident() - had < GROWTH
        assert min(answers[frames.OK], answers[frames.ERROR]) > count // 20
        # A run that its driver never ends stays; the controller has a limit for these.
        assert len(meetings.endpoint.call(lambda: list(meetings.fuzzed.runs))) < max(60, count // 400)


# ---- the client's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(behave):
    """As `peers.impostor`, for one connection after the other."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(OSError):
            while True:
                raw = Raw.__new__(Raw)
                raw.sock, _ = listener.accept()
                raw.sock.settimeout(10)
                with raw, contextlib.suppress(OSError):
                    behave(raw)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)


class Answers:
    """What a peer that is none, or a broken one, says to a client: the right words, with wild ones among them."""

    def __init__(self, seed: int):
        self.grammar = Grammar(seed, self._answer)
        self.random = self.grammar.random

    @staticmethod
    def _answer(draw: random.Random) -> tuple[int, dict, bytes]:
        kind = draw.choice((frames.OK, frames.OK, frames.ERROR, frames.WELCOME))
        fields = {"request": draw.randint(1, 4)}
        if kind == frames.ERROR:
            return kind, fields, wild_text(draw, {"type": "InputError", "message": "no"})
        return kind, fields, draw.randbytes(draw.choice((0, 0, 8, 800, 80_000)))

    def behave(self, raw: Raw) -> None:
        """One connection: honest up to some point."""
        draw = self.random
        offer = {"version": frames.VERSION, "nonce": "00" * 16}
        if draw.random() < 0.2:
            return self._say(raw, framed(frames.GREETING, wild_text(draw, offer)))
        raw.send(framed(frames.GREETING, encode_json(offer)))
        frame = raw.frame()
        if frame is None:
            return None
        theirs = frames.decode_json(frame[1])["nonce"]
        text = {"proof": handshake.proof(SECRET, "server", theirs, "00" * 16)}
        if draw.random() < 0.2:
            return self._say(raw, framed(frames.WELCOME, wild_text(draw, text), request=1))
        raw.send(framed(frames.WELCOME, encode_json(text), request=1))
        return self._say(raw, b"".join(self.grammar.frame() for _ in range(draw.randint(0, 6))))

    def _say(self, raw: Raw, data: bytes) -> None:
        """In pieces, mutated or not; then the end, or silence."""
        if self.random.random() < 0.3:
            data = self.grammar.mutated(data)
        for piece in self.grammar.pieces(data):
            raw.send(piece)
        if self.random.random() < 0.1:
            raw.sock.settimeout(2)
            raw.take(1 << 20)


def test_a_client_under_random_answers() -> None:
    """Every call ends in time, with what was asked for or an error of ours; no length is believed."""
    answers, ends = Answers(SEED), Counter()
    limits = {**LIMITS, "dps.timeouts.connect": "100 ms", "dps.timeouts.request": "100 ms"}
    tracemalloc.start()
    with dask.config.set(limits), listening(answers.behave) as address:
        for _ in range(min(FRAMES, 200_000) // 40):
            began = time.monotonic()
            try:
                with contextlib.closing(Channel(address, NAME, SECRET, "the peer")) as channel:
                    out = np.zeros(100, np.int64)
                    asked = [
                        channel.send(Header(frames.PULL), (), ViewSink(memoryview(out).cast("B")), out.nbytes),
                        channel.ask(Header(frames.ROUTE)),
                    ]
                    for request in asked:
                        request.result(time.monotonic() + 0.1)
                    channel.ask(Header(frames.TICK)).result(time.monotonic() + 0.1)
                    ends["well"] += 1
            except DPSError as error:
                ends[type(error).__name__] += 1
            assert time.monotonic() - began < 8  # not the 10 s of dps.timeouts.connect
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20, f"{peak} bytes at once: more than a frame may have"
    assert {"ProtocolError", "ServerGoneError", "InputError", "RequestTimeoutError", "DPSError"} <= ends.keys(), ends
