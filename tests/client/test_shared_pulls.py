"""Large pulls through memory that a client and a server share: the same rows as through a socket, whatever happens."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from compiled import error_beside
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import files, memories
from servers import Servers, wait_until

import dps
from dps.engine.client.client import Client
from dps.engine.core.requests.ring import SLOT_BYTES
from dps.engine.state.ops import TableSpec
from dps.engine.wire import channel, connection, plain_answers, shared_memory
from dps.engine.wire.channel import Channel
from dps.engine.wire.loans import Loans
from dps.errors import ProtocolError

if not hasattr(os, "memfd_create"):
    pytest.skip("the system has no such memory", allow_module_level=True)

MB = 1 << 20
FOREVER = 10**12  # nanoseconds


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes through the socket because the machine is busy, or to memory that the client has lent."""
    monkeypatch.setattr(plain_answers, "patience", lambda nbytes: FOREVER)
    monkeypatch.setattr(Loans, "offered", staticmethod(lambda mark: None))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pieces that were made in shared memory, by their bytes."""
    made: list[int] = []
    share = plain_answers.PlainAnswers._send_shared

    def counted(answers: plain_answers.PlainAnswers, step: plain_answers.PlainStep, nbytes: int) -> None:
        class Step:
            left = property(lambda _: step.left)
            more = staticmethod(step.more)

            def share(self, out: np.ndarray) -> int:
                made.append(step.share(out))
                return made[-1]

        share(answers, Step(), nbytes)

    monkeypatch.setattr(plain_answers.PlainAnswers, "_send_shared", counted)
    return made


def settled(client: Client) -> Client:
    """The client, once it knows where the rows are: from then on its calls are plain."""
    spec = client.spec_of("a")
    client.pull("a", np.linspace(0, (spec.rows or 1000) - 1, 100).astype(np.int64))
    return client


def channels_of() -> list[Channel]:
    """Those that share memory."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is Channel and each.stream.ring is not None]


def delay(servers: Servers) -> None:
    """The first server does nothing for longer than a compiled call waits for an answer."""
    begun = threading.Event()

    def sleep() -> None:
        begun.set()
        time.sleep(0.7)

    servers.endpoints[0].submit(sleep)
    assert begun.wait(60)


SPECS = [
    TableSpec("a", rows=70_000, dim=16),
    TableSpec("a", rows=300_000, dim=3),  # rows of which two are no whole number of words
    TableSpec("a", rows=700_001, dim=1, shards=3),
    TableSpec("a", dim=16, init=dps.Uniform(-1.0, 1.0)),
    TableSpec("a", dim=5, dtype="float64", init=dps.Uniform(-2.0, 2.0), shards=8),
    TableSpec("a", dim=3, dtype="int64", shards=2),
    TableSpec("a", dim=40_000, dtype="float64"),  # rows of which one has no room in a slot
]


def row_bytes(spec: TableSpec) -> int:
    return spec.dim * np.dtype(spec.dtype).itemsize


def keys_of(spec: TableSpec, order: str, rng: np.random.Generator) -> slice | np.ndarray:
    rows = spec.rows or (20 if row_bytes(spec) > SLOT_BYTES else 3 * MB // row_bytes(spec))
    if order == "range":
        return slice(1, rows - 1) if spec.rows else np.arange(rows)
    keys = rng.permutation(rows) if spec.rows else rng.permutation(rows * 3)[:rows] * 7919
    return np.sort(keys) if order == "sorted" else np.concatenate([keys, keys[:9]])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.dtype}-{spec.rows}-{spec.dim}")
def test_rows_are_those_that_a_socket_brings(
    spec: TableSpec, servers: Servers, pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    servers.table(spec)
    with settled(servers.client()) as client, settled(servers.client()) as other:
        if spec.rows is None:
            keys = keys_of(spec, "sorted", rng)[::2]
            client.add("a", keys, rng.integers(1, 99, (len(keys), spec.dim)).astype(spec.dtype))
        for order in ("range", "sorted", "random"):
            keys = keys_of(spec, order, np.random.default_rng(1))
            with monkeypatch.context() as patched:
                patched.setattr(channel, "offered", lambda: None)
                expected = other.pull("a", keys)
            assert not pieces
            np.testing.assert_array_equal(client.pull("a", keys), expected)
            if order == "range" or spec.dim > 3:  # else there are many keys, and they are cut into small requests
                assert bool(pieces) == (8 * row_bytes(spec) <= SLOT_BYTES)
            assert all(0 < nbytes <= SLOT_BYTES and nbytes % 8 == 0 for nbytes in pieces)
            pieces.clear()


@pytest.mark.parametrize("rows", [MB // 64 - 1, MB // 64, MB // 64 + 1])
def test_a_small_answer_comes_through_the_socket(rows: int, servers: Servers, pieces: list[int]) -> None:
    servers.table(TableSpec("a", rows=MB // 32, dim=16, init=dps.Uniform(-1.0, 1.0)), [0] * 4)
    with settled(servers.client()) as client:
        expected = client.pull("a", slice(0, MB // 128)), client.pull("a", slice(MB // 128, rows))
        assert not pieces
        np.testing.assert_array_equal(client.pull("a", slice(0, rows)), np.concatenate(expected))
        assert sum(pieces) == (64 * rows if rows >= MB // 64 else 0)


@settings(max_examples=30, deadline=None)
@given(waits=st.lists(st.sampled_from([FOREVER, FOREVER, -1]), min_size=1, max_size=30), data=st.data())
def test_whatever_finds_no_room_comes_through_the_socket(
    waits: list[int], data: st.DataObject, world: tuple[Servers, Client, np.ndarray]
) -> None:
    """At any piece the server may find that the client has given nothing back, or that the socket takes no more."""
    _, client, expected = world
    left = iter(waits)
    takes = iter(data.draw(st.lists(st.sampled_from([64, 64, 64, 0, 1, 63]), max_size=30)))

    class Ring:
        def __init__(self, ring: object):
            self.slot, self.made, self._wait = ring.slot, ring.made, ring.wait  # type: ignore[attr-defined]

        def wait(self, patience: int) -> int:
            return -1 if next(left, FOREVER) < 0 else self._wait(patience)

    class Writer:
        def __init__(self, writer: object):
            self.write, self._writer = writer.write, writer  # type: ignore[attr-defined]

        def write_soon(self, head: np.ndarray, count: int, patience: int) -> tuple[int, int]:
            taken = next(takes, count)
            return self._writer.write_soon(head, taken, patience) if taken else (0, patience)

    share = plain_answers.PlainAnswers._send_shared

    def limited(answers: plain_answers.PlainAnswers, step: plain_answers.PlainStep, made: int) -> None:
        peer, writer = answers._peer, answers._writer
        answers._writer = Writer(writer)  # type: ignore[assignment]
        ring, peer.ring = peer.ring, Ring(peer.ring)  # type: ignore[assignment]
        try:
            share(answers, step, made)
        finally:
            answers._writer, peer.ring = writer, ring

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plain_answers.PlainAnswers, "_send_shared", limited)
        first = data.draw(st.integers(0, 50))
        np.testing.assert_array_equal(client.pull("a", slice(first, None)), expected[first:])
        order = np.random.default_rng(first).permutation(len(expected))
        np.testing.assert_array_equal(client.pull("a", order), expected[order])


@pytest.fixture
def world(servers: Servers) -> Iterator[tuple[Servers, Client, np.ndarray]]:
    """A table of 4.2 MB on one server: more than a ring holds; a client; and the rows."""
    servers.table(TableSpec("a", rows=90_001, dim=12, init=dps.Uniform(-1.0, 1.0)), [0] * 4)
    with settled(servers.client()) as client:
        expected = np.concatenate([client.pull("a", slice(n, n + 10_000)) for n in range(0, 90_001, 10_000)])
        yield servers, client, expected


def test_an_answer_that_is_late_goes_on_over_the_channel(
    world: tuple[Servers, Client, np.ndarray], pieces: list[int]
) -> None:
    servers, client, expected = world
    client.pull("a", slice(0, 90_001))
    for keys in (slice(0, 90_001), np.random.default_rng(0).permutation(90_001)):
        pieces.clear()
        delay(servers)
        np.testing.assert_array_equal(client.pull("a", keys), expected[keys])
        assert sum(pieces) >= expected.nbytes
    delay(servers)
    client.pull("a", slice(0, 10))
    np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("nbytes", [0, -8, 8, SLOT_BYTES + 8, SLOT_BYTES - 4, 1 << 40])
def test_a_wrong_length_ends_the_connection(
    nbytes: int, late: bool, world: tuple[Servers, Client, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, client, expected = world
    client.pull("a", slice(0, 90_001))
    (used,) = (each.stream for each in channels_of() if each.stream.ring.pieces)
    made = plain_answers.PlainAnswers._send_shared

    def wrong(answers: plain_answers.PlainAnswers, step: plain_answers.PlainStep, size: int) -> None:
        class Step:
            left = property(lambda _: step.left)
            more = staticmethod(step.more)

            def share(self, out: np.ndarray) -> int:
                step.share(out)
                return nbytes

        made(answers, Step(), size)

    with monkeypatch.context() as patched:
        patched.setattr(plain_answers.PlainAnswers, "_send_shared", wrong)
        patched.setattr(plain_answers, "patience", lambda _: 0)
        if late:  # the channel reads the answer, and else the compiled call, which asks again over a new connection
            delay(servers)
            with pytest.raises(ProtocolError, match=r"answered .* bytes"):
                client.pull("a", slice(0, 90_001))
        else:
            np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)
        assert used.ended
    np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)


def test_a_server_that_tells_of_a_piece_too_early_is_noticed(
    world: tuple[Servers, Client, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong server: the client copies what was in the slot before."""
    _, client, expected = world
    np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)

    def early(answers: plain_answers.PlainAnswers, step: plain_answers.PlainStep, made: int) -> None:
        head, words, ring = answers._head, answers._words, answers._peer.ring
        assert ring is not None
        rows = SLOT_BYTES // 384 * 8  # of 48 bytes, in whole words
        head[plain_answers.FLAGS], words[plain_answers.BODY] = plain_answers.SHARED, 0
        while step.left:
            ring.wait(FOREVER)
            words[plain_answers.START] = min(48 * rows, step.left)
            answers._writer.write_soon(head, made, FOREVER)
            time.sleep(0.01)
            step.share(ring.slot())
            ring.made()

    monkeypatch.setattr(plain_answers.PlainAnswers, "_send_shared", early)
    assert not np.array_equal(client.pull("a", slice(0, 90_001)), expected)


def test_memory_goes_with_its_connection(world: tuple[Servers, Client, np.ndarray]) -> None:
    servers, client, _ = world
    client.pull("a", slice(0, 90_001))
    for _ in range(3):
        before = memories()
        with settled(servers.client()) as other:
            other.pull("a", slice(0, 90_001))
            assert list((memories() - before).values()) == [2], "one at each end"
            assert files() == 0
        wait_until(lambda before=before: not memories() - before)


def test_a_server_opens_a_number_of_memories(
    world: tuple[Servers, Client, np.ndarray], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, _, expected = world
    monkeypatch.setattr(connection, "MOST_RINGS", 0)
    with settled(servers.client()) as client:
        for _ in range(2):
            np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)
    assert not pieces


def test_a_server_that_cannot_open_it_answers_through_the_socket(
    world: tuple[Servers, Client, np.ndarray], pieces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of a process in another container names none here, or another one."""
    servers, _, expected = world
    monkeypatch.setattr(shared_memory, "peer_process", lambda sock: 0)
    with settled(servers.client()) as client:
        for _ in range(2):
            np.testing.assert_array_equal(client.pull("a", slice(0, 90_001)), expected)
    assert not pieces
    assert files() == 0


BEFORE = """                a = self._place(call, leg, a, ring.piece(), head.start)
                left -= head.start
                ring.taken()
"""
AFTER = """                rows = ring.piece()
                left -= head.start
                ring.taken()
                import time; time.sleep(0.02)
                a = self._place(call, leg, a, rows, head.start)
"""
WRONG = [
    ("exchange", BEFORE, AFTER),  # a slot goes back before it is read
    ("service", "self._values.whole_words(cnp.PyArray_SIZE(out))", "cnp.PyArray_SIZE(out) // 12 * 12"),
]
CODE = """
import pathlib, sys
import numpy as np
import dps
from dps.engine.client import plain
from dps.engine.state.ops import TableSpec
from dps.engine.wire import plain_answers
from dps.engine.wire.loans import Loans
from servers import Servers

plain_answers.patience = lambda nbytes: {patience}
Loans.offered = staticmethod(lambda mark: None)
with Servers(1) as servers:
    servers.table(TableSpec("a", rows=600_001, dim=3, shards=1, init=dps.Uniform(-1.0, 1.0)))
    with servers.client() as client:
        parts = [client.pull("a", slice(n, n + 20_000)) for n in range(0, 600_001, 20_000)]
        expected = np.concatenate(parts)
        plain.PlainCalls._go_on = None  # a wrong piece would be asked for again over the channels
        for _ in range(3):
            assert np.array_equal(client.pull("a", slice(0, None)), expected), "other rows"
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("module", "old", "new"), WRONG)
def test_a_wrong_variant_is_caught(module: str, old: str, new: str) -> None:
    patience = 10**12 if module == "exchange" else 0
    assert error_beside(module, old, new, CODE.format(patience=patience)).strip()


@pytest.mark.thorough
def test_the_code_of_the_variants_finds_nothing_else() -> None:
    for patience in (0, 10**12):
        assert not error_beside(
            "exchange", "LEAST_SHARED = 1 << 20", "LEAST_SHARED = 1 << 19", CODE.format(patience=patience)
        )
