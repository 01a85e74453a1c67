"""Endpoint and Channel on real sockets: nothing is lost, mixed up, held up or left behind. Both loops, with TLS too."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import numpy as np
import pytest
from distributed.security import Security
from oracles import mutant
from peers import (
    CRASH,
    EAT,
    FAIL,
    FILL,
    HALF,
    PARK,
    RELEASE,
    Kit,
    Raw,
    ViewSink,
    ask_echo,
    feed,
    framed,
    fulfilled,
    pattern,
    soon,
)

from dps.engine.wire import endpoint as endpoint_module
from dps.engine.wire import frames
from dps.engine.wire.connection import PEER_INBOX_BYTES as INBOX_BYTES
from dps.engine.wire.connection import Connection
from dps.engine.wire.frames import Header
from dps.engine.wire.memory import Buffer
from dps.errors import InputError, ServerGoneError

MB = 1 << 20
BEST_LOOP = endpoint_module.new_loop


@pytest.fixture(scope="module")
def security():
    return Security.temporary()


class Ways:
    """How to reach the kit of a test."""

    def __init__(self, kit: Kit, tls):
        self.kit, self.tls = kit, tls

    def channels(self, count: int = 1):
        return self.kit.channels(count, self.tls)

    def raw(self) -> Raw:
        return Raw(self.kit.address, self.tls)


@pytest.fixture(params=["best", "asyncio", "best-tls", "asyncio-tls"])
def ways(request, monkeypatch):
    """An endpoint on the best loop there is, and on asyncio's own; in the clear, and with TLS."""
    loop, _, tls = request.param.partition("-")
    monkeypatch.setattr(endpoint_module, "new_loop", BEST_LOOP if loop == "best" else asyncio.new_event_loop)
    listen = connect = None
    if tls:
        security = request.getfixturevalue("security")
        listen = security.get_listen_args("worker")["ssl_context"]
        connect = security.get_connection_args("client")["ssl_context"]
    with Kit(listen) as kit:
        yield Ways(kit, connect)


@pytest.fixture
def kit():
    with Kit() as kit:
        yield kit


# ---- bodies ---------------------------------------------------------------------------------------------------------

SIZES = [
    0,
    8,
    16,
    INBOX_BYTES // 2,
    *(INBOX_BYTES + d for d in (-128, -72, -64, -56, -8, 0, 8)),
    4 * INBOX_BYTES + 8,
    MB,
    16 * MB,
]


def test_bodies_of_all_sizes_both_ways(ways) -> None:
    with ways.channels() as (channel,):
        for nbytes in [*SIZES, 8, 0]:
            words = pattern(nbytes // 8, 5)
            assert feed(channel, words) == {"bytes": nbytes, "sum": int(words.sum()), "aligned": True}
        fulfilled((i, ask_echo(channel, nbytes // 8, i)) for i, nbytes in enumerate([*SIZES, 8, 0]))
        everything = [(i, ask_echo(channel, nbytes // 8, i)) for i, nbytes in enumerate(SIZES)]
        fulfilled(reversed(everything))


def test_large_frames_of_one_connection_leave_turns_to_others(kit, monkeypatch) -> None:
    """Many of them arrive at once, and no two are handled in the same turn of the loop."""
    turns, handled, handle = [0], [], Connection._handle_large

    def count() -> None:
        turns[0] += 1
        kit.endpoint.loop.call_soon(count)

    def noted(connection: Connection, *frame) -> None:
        handled.append(turns[0])
        handle(connection, *frame)

    monkeypatch.setattr(Connection, "_handle_large", noted)
    kit.endpoint.call(count)
    with kit.channels() as (channel,):
        body = bytes(INBOX_BYTES)
        for request in [channel.send(Header(EAT, body=len(body)), (body,)) for _ in range(20)]:
            request.result(soon())
    assert len(handled) == len(set(handled)) == 20


def test_bodies_in_pieces(ways) -> None:
    """Many small buffers, empty ones among them; and a generator that reuses its memory."""
    words = pattern(50_000, 1)
    total = {"bytes": words.nbytes, "sum": int(words.sum()), "aligned": True}

    def reused():
        piece = np.empty(1000, np.int64)
        for a in range(0, len(words), 1000):
            piece[:] = words[a : a + 1000]
            yield piece
            yield b""
        piece[:] = 0

    with ways.channels() as (channel,):
        for pieces in (np.array_split(words, 333), [b"", *np.array_split(words, 7), b"", b""], reused()):
            request = channel.send(Header(EAT, body=words.nbytes), pieces)
            assert frames.decode_json(request.result(soon()).body) == total


# ---- many at once ---------------------------------------------------------------------------------------------------


def test_answers_in_any_order(ways) -> None:
    """A parked request holds up nobody, least of all on its own channel."""
    with ways.channels(2) as (one, two):
        parked = [channel.ask(Header(PARK, number=i)) for i in range(20) for channel in (one, two)]
        mixed = [(i, ask_echo(one, 1000 * i, i)) for i in range(20)]
        feeds = [feed(two, pattern(i, i))["bytes"] for i in range(20)]
        assert feeds == [8 * i for i in range(20)]
        fulfilled(reversed(mixed))
        assert not any(request.done for request in parked)
        released = two.ask(Header(RELEASE))
        assert [r.result(soon()).header.count for r in parked] == [i for i in range(20) for _ in range(2)]
        released.result(soon())


def test_of_news_that_cannot_leave_only_the_newest_is_kept(ways) -> None:
    size = 32 * MB
    with ways.channels() as (channel,):
        sinks = [ViewSink(memoryview(bytearray(size))) for _ in range(4)]
        requests = [channel.send(Header(PARK), (), sink, size) for sink in sinks]
        assert feed(channel, pattern(1, 1))["bytes"] == 8  # all are parked now
        connection = ways.kit.parked[0][0]

        def tell() -> None:
            for _, parked in ways.kit.parked:
                connection.send_newest(Header(frames.OK, request=parked.request), bytes(size))

        ways.kit.endpoint.call(tell)
        requests[3].result(soon())
        first, _, third, last = [request.done for request in requests]  # TLS takes one more before it is full
        assert (first, third, last) == (True, False, True)
        assert feed(channel, pattern(1, 1))["bytes"] == 8


def test_a_client_that_only_writes_does_not_lock_up(ways) -> None:
    """64 MB of requests, answered by as much, before the first answer is asked for."""
    words = pattern(MB, 9)  # 8 MB
    with ways.channels() as (channel,):
        wishes, fed = [], []
        for i in range(8):
            wishes.append((i, ask_echo(channel, len(words), i)))
            fed.append(channel.send(Header(EAT, body=words.nbytes), (words,)))
        fulfilled(wishes)
        for request in fed:
            assert frames.decode_json(request.result(soon()).body)["sum"] == int(words.sum())


def test_a_slow_reader_holds_up_nobody_and_gets_its_answers_whole(ways) -> None:
    slow_reader(ways)


@pytest.mark.skipif(BEST_LOOP is asyncio.new_event_loop, reason="asyncio copies what it could not send (Python 3.11)")
def test_a_buffer_that_is_filled_too_early_is_noticed(kit, monkeypatch) -> None:
    monkeypatch.setattr(endpoint_module.Connection, "pause_writing", lambda self: None)
    with pytest.raises(AssertionError):
        slow_reader(Ways(kit, None))


def slow_reader(ways) -> None:
    """Its answers are views of one buffer: that must not be filled again before they have left."""
    words = MB // 2  # 4 MB an answer
    with ways.raw().introduce() as slow, ways.channels() as (channel,):
        slow.send(b"".join(framed(FILL, request=i, number=i, count=words) for i in range(1, 9)))
        for i in range(50):
            assert feed(channel, pattern(i, i))["bytes"] == 8 * i
        fulfilled([(77, ask_echo(channel, words, 77))])

        def held() -> list[int]:
            return [c.transport.get_write_buffer_size() for c in ways.kit.endpoint.connections]

        assert max(ways.kit.endpoint.call(held)) <= 8 * words + 64 * 1024, "more than one answer is waiting"
        for i in range(1, 9):
            time.sleep(0.005)
            header, body = slow.frame()
            assert (header.kind, header.request) == (frames.OK, i)
            np.testing.assert_array_equal(np.frombuffer(body, np.int64), pattern(words, i))


def test_threads_of_requests(kit) -> None:
    """Many channels at once, each in a thread of its own."""
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with kit.channels() as (channel,):
                for i in range(30):
                    fulfilled([(number + i, ask_echo(channel, 5000 * number + i, number + i))])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_is_an_answer(ways) -> None:
    with ways.channels() as (channel,):
        failing, after = channel.ask(Header(FAIL)), channel.ask(Header(EAT))
        with pytest.raises(InputError, match="table 'w': 3 is not 4"):
            failing.result(soon())
        after.result(soon())
        out = np.zeros(5000, np.int64)
        with pytest.raises(InputError, match="3 is not 4"):
            channel.send(Header(FAIL), (), ViewSink(memoryview(out).cast("B")), out.nbytes).result(soon())
        fulfilled([(3, ask_echo(channel, 5000, 3))])


@pytest.mark.parametrize(("kind", "number"), [(CRASH, 0), (HALF, 0), (HALF, 1), (HALF, 2)])
def test_a_peer_that_goes_in_the_middle(ways, kind: int, number: int) -> None:
    """A handler that breaks, also in the middle of an answer, ends the connection: what is half can be nobody's."""
    with ways.channels(2) as (channel, other):
        out = np.zeros(1000, np.int64)
        lost = channel.send(Header(kind, number=number), (), ViewSink(memoryview(out).cast("B")), out.nbytes)
        behind = lost
        with contextlib.suppress(ServerGoneError):  # it may be gone already
            behind = channel.ask(Header(EAT))
        for request in (lost, behind):
            with pytest.raises(ServerGoneError, match="the peer"):
                request.result(soon())
        assert lost.done
        assert channel.closed
        with pytest.raises(ServerGoneError, match="the connection to the peer is closed"):
            channel.ask(Header(EAT))
        assert feed(other, pattern(3, 3))["bytes"] == 24


# ---- the endpoint itself --------------------------------------------------------------------------------------------


def test_call_runs_in_the_endpoints_thread(kit) -> None:
    assert kit.endpoint.call(threading.current_thread).name == "dps-test"
    with pytest.raises(InputError, match="no"):
        kit.endpoint.call(raise_, InputError("no"))


def raise_(error: BaseException):
    raise error


def test_stop_leaves_nothing(ways) -> None:
    """With every kind of connection open; the leak fixture counts threads and sockets."""
    with contextlib.ExitStack() as stack:
        idle, waiting, slow, writing = (stack.enter_context(ways.raw().introduce()) for _ in range(4))
        stranger = stack.enter_context(ways.raw())
        silent = stack.enter_context(Raw(ways.kit.address))  # with TLS: no handshake yet
        (channel,) = stack.enter_context(ways.channels())
        waiting.send(framed(PARK))
        slow.send(framed(FILL, count=MB) * 3)
        writing.send(framed(EAT, bytes(1000), says=MB))
        stranger.frame()
        assert feed(channel, pattern(1, 1))["bytes"] == 8
        began = time.monotonic()
        ways.kit.endpoint.stop()
        assert time.monotonic() - began < 8  # not the 10 s of dps.timeouts.connect
        assert not [t for t in threading.enumerate() if t.name == "dps-test"]
        assert not ways.kit.endpoint.connections
        with pytest.raises(ServerGoneError):
            channel.ask(Header(EAT)).result(soon())
        silent.take(1 << 20)  # a greeting, if anything
        for raw in (idle, waiting, writing, stranger, silent):
            assert raw.frame() is None
        ways.kit.endpoint.stop()  # once more does no harm
        with pytest.raises(ServerGoneError, match="test has been closed"):
            ways.kit.endpoint.call(threading.current_thread)


def test_connections_that_end_are_told_once(kit) -> None:
    with kit.channels(3):
        assert len(kit.endpoint.connections) == 3
    deadline = soon(5)
    while kit.endpoint.connections and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(kit.ended) == len(set(map(id, kit.ended))) == 3
    assert {c.session for c in kit.ended} == {"s"}


def memory_of_ended_connections(kit: Kit) -> list[object]:
    """What is left of the memory of connections that have ended, while Python looks for no cycles."""
    gc.disable()
    try:
        with kit.channels(2) as (channel, other), Raw(kit.address) as stranger:
            stranger.frame()
            fulfilled([(n, ask_echo(each, 10, n)) for n, each in enumerate((channel, other))])
            feed(other, np.zeros(4 * MB, np.int64))
            there = list(kit.endpoint.call(lambda: [*kit.endpoint.connections]))
            memory = [weakref.ref(c._reader.inbox) for c in there]
            memory += [weakref.ref(c._plain._answers) for c in there if c._plain is not None]
            connections = [weakref.ref(c) for c in there]
            del there
        kit.ended.clear()
        deadline = soon(5)
        while kit.endpoint.connections and time.monotonic() < deadline:
            time.sleep(0.005)
        kit.endpoint.call(kit.ended.clear)
        return [each() for each in memory + connections if each() is not None]
    finally:
        gc.enable()


def test_the_memory_of_an_ended_connection_is_free_at_once(kit) -> None:
    """A peer that comes and goes again and again must not fill a server's memory between two collections."""
    assert memory_of_ended_connections(kit) == []


def test_memory_that_waits_for_a_collection_is_noticed(kit, monkeypatch) -> None:
    released = ["self._reader = FrameReader(0, inbox_bytes=0)", "self._plain = None", "self._body = None"]
    lost = mutant(Connection.connection_lost, "\n    ".join(released), "pass")
    monkeypatch.setattr(Connection, "connection_lost", lost)
    assert len(memory_of_ended_connections(kit)) >= 2


def test_buffers_shrink_after_a_giant_message(kit) -> None:
    def held() -> list[int]:
        return [len(b._bytes) for c in kit.endpoint.connections for b in (c._incoming, c._outgoing)]

    with kit.channels() as (channel,):
        feed(channel, np.zeros(4 * MB, np.int64))
        fulfilled([(1, ask_echo(channel, 4 * MB, 1))])
        assert min(kit.endpoint.call(held)) >= 32 * MB
        for i in range(200):
            feed(channel, np.zeros(INBOX_BYTES // 8, np.int64))
            fulfilled([(i, ask_echo(channel, 10, i))])
        assert max(kit.endpoint.call(held)) <= 4 * MB


def test_a_buffer_does_not_flap() -> None:
    """Between messages of two sizes, and with small ones between large ones, the memory stays the same."""
    buffer, seen = Buffer(MB), set()
    for nbytes in [8 * MB, 64, 64, 6 * MB, 100] * 60:
        got = buffer.take(nbytes)
        assert len(got) == nbytes
        assert got.ctypes.data % 8 == 0
        seen.add(id(buffer._bytes))
    assert len(seen) == 1
    for _ in range(300):
        buffer.take(100)
    assert len(buffer._bytes) <= MB
