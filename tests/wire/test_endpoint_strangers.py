"""Peers that do not follow the protocol, by accident or on purpose: they are put off, and others do not notice."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import socket
import ssl
import sys
import threading
import time

import dask
import numpy as np
import pytest
from distributed.security import Security
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import BREAK, CRASH, EAT, FAIL, FILL, NAME, SECRET, Kit, Raw, ViewSink, feed, framed, impostor
from servers import wait_until

from dps.engine.wire import frames, handshake
from dps.engine.wire.channel import Channel
from dps.engine.wire.connection import PEER_INBOX_BYTES as INBOX_BYTES
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_json
from dps.engine.wire.handshake import MAX_HELLO_BYTES
from dps.engine.wire.memory import FIRST_BYTES
from dps.errors import (
    AccessDeniedError,
    ClockTimeoutError,
    DPSError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
)

GB = 1 << 30


@pytest.fixture(scope="module")
def kit():
    with dask.config.set({"dps.limits.frame": "64 MiB"}), Kit() as kit:
        yield kit


@pytest.fixture
def witness(kit, caplog):
    """Somebody who behaves, and must not notice anything."""
    caplog.set_level(logging.CRITICAL)  # that warnings are logged is wanted, to see them here is not
    with kit.channels() as (channel,):
        yield channel
        assert healthy(channel)


def healthy(channel: Channel) -> bool:
    body = np.arange(100)
    answer = channel.send(Header(EAT, body=800), (body,)).result(time.monotonic() + 10)
    return frames.decode_json(answer.body)["sum"] == 4950


def refusal(raw: Raw) -> str:
    """The error that the other side sends before it closes, as text; "" if it just closes."""
    text = ""
    while (frame := raw.frame()) is not None:
        header, body = frame
        if header.kind == frames.ERROR:
            error = frames.decode_error(body)
            text = f"{type(error).__name__}: {error}"
    return text


# ---- before the proof -----------------------------------------------------------------------------------------------


def hello(**changes) -> bytes:
    fields = {"session": NAME, "nonce": "00" * 16, "proof": "00" * 32, **changes}
    return framed(frames.HELLO, encode_json(fields))


DENIED, BAD = "AccessDeniedError: no proof of the secret of parameter server", "ProtocolError: "
STRANGERS = {
    "a proof of nothing": (hello(), DENIED + " 's'"),
    "no such session": (hello(session="other"), DENIED + " 'other'"),
    "no session": (hello(session=None), DENIED + " ''"),
    "a session that is no text": (hello(session=[[NAME]]), DENIED + " ''"),
    "no proof": (hello(proof=None), DENIED),
    "a proof that is a number": (hello(proof=7), DENIED),
    "a proof in no alphabet": (hello(proof="\ud800"), DENIED),
    "a nonce in no alphabet": (hello(nonce="\ud800"), DENIED),
    "a list": (framed(frames.HELLO, encode_json([NAME])), DENIED + " ''"),
    "no JSON": (framed(frames.HELLO, b"{" * 8), BAD + "a frame's text is no JSON"),
    "deep JSON": (framed(frames.HELLO, b"[" * MAX_HELLO_BYTES), BAD + "a frame's text is no JSON"),
    "nothing in it": (framed(frames.HELLO), BAD + "a frame's text is no JSON"),
    "another kind first": (framed(EAT, bytes(8)), BAD + "the first frame must prove the session secret"),
    "a greeting back": (framed(frames.GREETING), BAD + "the first frame must prove"),
    "more than a stranger may say": (
        framed(frames.HELLO, says=MAX_HELLO_BYTES + 8),
        BAD + "a frame announces a body",
    ),
    "a gigabyte": (framed(EAT, says=GB), BAD + f"a frame announces a body of {GB} bytes; at most 4096"),
    "half a word": (framed(frames.HELLO, says=12), BAD + "a frame announces a body of 12 bytes"),
    "garbage": (b"\x16\x03\x01" + bytes(200), BAD + "not a frame of dps: it begins with 0x0316"),
    "a browser": (b"GET / HTTP/1.1\r\nHost: somewhere\r\nAccept: */*\r\n\r\n" + bytes(64), BAD + "not a frame of dps"),
    "garbage without end": (b"\xff" * (4 * INBOX_BYTES), BAD + "not a frame"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused(kit, witness, name: str) -> None:
    data, words = STRANGERS[name]
    with Raw(kit.address) as raw:
        header, _ = raw.frame()
        assert header.kind == frames.GREETING
        with contextlib.suppress(ConnectionError):
            raw.send(data)
        text = refusal(raw)
    assert text.startswith(words) or (text == "" and len(data) > INBOX_BYTES)  # what was not read resets the connection
    assert SECRET not in text


def test_a_wrong_secret_and_a_wrong_name(kit, witness) -> None:
    with pytest.raises(AccessDeniedError, match="no proof of the secret of parameter server 's'"):
        kit.channel(secret="cd" * 32)
    with pytest.raises(AccessDeniedError, match="no proof of the secret of parameter server 'q'"):
        kit.channel(name="q")


def test_a_proof_may_not_be_used_twice(kit, witness) -> None:
    with Raw(kit.address) as first, Raw(kit.address) as second:
        proof = first.hello()
        first.send(proof)
        assert first.frame()[0].kind == frames.WELCOME
        second.frame()
        second.send(proof)
        assert refusal(second).startswith(DENIED)


def test_strangers_get_no_memory(kit, witness) -> None:
    """A connection takes a small inbox until it has proved itself; a length that is only announced takes nothing."""

    def held() -> list[int]:
        strangers = [c for c in kit.endpoint.connections if c.session is None]
        assert set(strangers) == kit.endpoint.strangers.keys()
        return [len(c._incoming) + len(c._outgoing) + len(c._reader.inbox) for c in strangers]

    with contextlib.ExitStack() as stack:
        for _ in range(20):
            raw = stack.enter_context(Raw(kit.address))
            raw.frame()
            raw.send(framed(frames.HELLO, bytes(100), says=4096))
        assert healthy(witness)
        assert kit.endpoint.call(held) == [HEADER_SIZE + MAX_HELLO_BYTES] * 20


# ---- after the proof ------------------------------------------------------------------------------------------------

LONG = BAD + "a frame announces a body of"
MEMBERS = {
    "a kind that nobody handles": (framed(99), BAD + "no handler for frames of kind 99"),
    "hello again": (hello(), BAD + "no handler for frames of kind 2"),
    "an answer": (framed(frames.OK), BAD + "no handler for frames of kind 64"),
    "too large": (framed(EAT, says=(64 << 20) + 8), LONG + " 67108872 bytes; at most 67108864"),
    "half a word": (framed(EAT, bytes(9)), LONG + " 9 bytes; at most 67108864, in whole words"),
    "wrong magic": (framed(EAT) + bytes(64), BAD + "not a frame of dps: it begins with 0x0000"),
    "what a handler calls wrong": (framed(BREAK), BAD + "the counts do not add up"),
    "a handler's bug": (framed(CRASH), ""),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_breaks_the_protocol_is_put_off(kit, witness, name: str) -> None:
    data, words = MEMBERS[name]
    with Raw(kit.address) as raw:
        raw.introduce().send(data + framed(FAIL) * 3)
        text = refusal(raw)
    assert text.startswith(words)
    assert words or not text


def test_frames_before_a_wrong_one_are_answered(kit, witness) -> None:
    with Raw(kit.address) as raw:
        raw.introduce().send(framed(EAT, bytes(8), request=5) + framed(EAT, says=4) + framed(EAT, request=6))
        assert raw.frame()[0].request == 5
        assert raw.frame()[0].kind == frames.ERROR
        assert raw.frame() is None


def test_a_frame_may_come_byte_by_byte(kit, witness) -> None:
    with Raw(kit.address) as raw:
        for part in [raw.hello(), framed(EAT, bytes(16), request=3), framed(EAT, bytes(INBOX_BYTES), request=4)]:
            raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for a in range(min(len(part), 200)):
                raw.send(part[a : a + 1])
            raw.send(part[200:])
        assert [raw.frame()[0].request for _ in range(3)] == [0, 3, 4]


def test_a_peer_that_goes_in_the_middle_of_a_frame(kit, witness) -> None:
    for data in (b"", b"D", framed(EAT)[:63], framed(EAT, bytes(100), says=GB // 32), framed(FILL, count=1 << 20) * 3):
        with Raw(kit.address) as raw:
            raw.introduce().send(data)
        assert healthy(witness)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_the_number_of_connections_is_limited(caplog) -> None:
    with dask.config.set({"dps.limits.connections": 3}), Kit() as kit:
        with kit.channels(2) as (one, two), Raw(kit.address) as stranger:
            stranger.frame()
            with kit.channels() as (three,):  # a stranger makes room
                assert stranger.frame() is None
                for _ in range(5):
                    with pytest.raises(ServerGoneError, match="the peer closed the connection"):
                        kit.channel()
                assert healthy(one)
                assert healthy(two)
                assert healthy(three)
            assert "3 connections are open already" in caplog.text
        deadline = time.monotonic() + 5
        while len(kit.endpoint.connections) == 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        with kit.channels() as (again,):
            assert healthy(again)


def test_a_flood_of_strangers_keeps_no_member_out(caplog) -> None:
    """Each that is one too many puts off the one that has been silent for the longest."""
    caplog.set_level(logging.CRITICAL)
    with dask.config.set({"dps.limits.connections": 20}), Kit() as kit, contextlib.ExitStack() as stack:
        (early,) = stack.enter_context(kit.channels())
        flood = [stack.enter_context(Raw(kit.address)) for _ in range(100)]
        for raw in flood[-5:]:
            raw.frame()
        assert len(kit.endpoint.connections) == 20
        (late,) = stack.enter_context(kit.channels())
        assert healthy(early)
        assert healthy(late)
        for raw in flood[:80]:
            raw.take(1 << 12)
            assert raw.frame() is None
        assert len(kit.endpoint.connections) == 20
        assert len(kit.endpoint.strangers) == 18


@pytest.mark.parametrize("sent", [b"", b"D", framed(frames.HELLO, bytes(8), says=4000)])
def test_who_does_not_prove_himself_in_time_is_put_off(sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        kit = stack.enter_context(Kit())
        (channel,) = stack.enter_context(kit.channels())
        stack.enter_context(dask.config.set({"dps.timeouts.connect": "300 ms"}))
        raw = stack.enter_context(Raw(kit.address))
        raw.frame()
        raw.send(sent)
        began = time.monotonic()
        assert raw.frame() is None
        assert time.monotonic() - began < 8  # not the 10 s that are usual
        time.sleep(0.1)
        assert healthy(channel), "a member stays"


# ---- memory for large bodies ----------------------------------------------------------------------------------------

MB = 1 << 20
SMALL = {"dps.limits.frame": "8 MiB", "dps.limits.incoming": "32 MiB", "dps.limits.buffer": "64 KiB"}  # a host: 16 MiB


def held(kit: Kit) -> int:
    return kit.endpoint.call(lambda: sum(c.spare + c.lent for c in kit.endpoint.connections))


def in_threads(functions) -> None:
    """Call all at once; raise what one of them raised."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result(60)


def test_large_bodies_share_a_bound() -> None:
    """Twelve of 6 MB each: what they announce takes nothing, what comes is bounded; in the end all are done."""
    body = bytes(6 * MB)
    with dask.config.set(SMALL), Kit() as kit, contextlib.ExitStack() as stack:
        (witness,) = stack.enter_context(kit.channels())
        raws = [stack.enter_context(Raw(kit.address)).introduce() for _ in range(12)]
        for raw in raws:
            raw.send(framed(EAT, body, request=7)[: HEADER_SIZE + INBOX_BYTES])
        wait_until(lambda: held(kit) == 12 * FIRST_BYTES)
        assert healthy(witness)

        def finish(raw: Raw) -> None:
            raw.send(body[INBOX_BYTES:])
            header, answer = raw.frame()
            assert (header.kind, header.request) == (frames.OK, 7)
            assert frames.decode_json(answer)["bytes"] == 6 * MB
            assert held(kit) <= 16 * MB

        in_threads([functools.partial(finish, raw) for raw in raws])
        assert not kit.endpoint.incoming.contended


def test_a_giant_among_many_gets_its_turn() -> None:
    """Others that send without a pause do not keep a body out that needs all the memory there is."""
    over = threading.Event()
    with dask.config.set({**SMALL, "dps.limits.incoming": "8 MiB"}), Kit() as kit, kit.channels(5) as channels:

        def busy(channel: Channel) -> None:
            while not over.is_set():
                feed(channel, np.ones(3 * MB // 8, np.int64))

        def giant() -> None:
            try:
                for _ in range(3):
                    assert feed(channels[0], np.ones(MB, np.int64))["sum"] == MB
            finally:
                over.set()

        in_threads([giant, *(functools.partial(busy, channel) for channel in channels[1:])])


@pytest.mark.thorough
def test_who_holds_memory_and_sends_nothing_is_put_off() -> None:
    with dask.config.set({**SMALL, "dps.timeouts.request": "1 s"}), Kit() as kit, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Raw(kit.address)).introduce() for _ in range(2)]
        for raw in idle:
            raw.send(framed(EAT, bytes(4 * MB), says=8 * MB))
        wait_until(lambda: held(kit) == 16 * MB)
        with dask.config.set({"dps.timeouts.request": "20 s"}), kit.channels() as (waiting,):
            began = time.monotonic()
            assert feed(waiting, np.ones(MB // 2, np.int64))["sum"] == MB // 2
            assert time.monotonic() - began < 15  # not its own limit
        for raw in idle:
            assert raw.frame() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 for itself")
def test_a_host_that_stalls_leaves_room_for_others() -> None:
    """A host sends fast on many connections, each almost to the end, and stalls: another host's requests go on."""
    with dask.config.set(SMALL), Kit() as kit, contextlib.ExitStack() as stack:
        for _ in range(6):
            raw = stack.enter_context(Raw(kit.address)).introduce()
            raw.sock.settimeout(0.2)  # what waits for its turn is not read
            with contextlib.suppress(TimeoutError):
                raw.send(framed(EAT, bytes(8 * MB - 8), says=8 * MB))
        wait_until(lambda: kit.endpoint.incoming.contended)
        assert held(kit) <= 16 * MB, "they wait for their share"
        with Raw(kit.address, source="127.0.0.2") as other:
            other.introduce()
            for _ in range(3):
                other.send(framed(EAT, bytes(8 * MB)))
                assert frames.decode_json(other.frame()[1])["bytes"] == 8 * MB
        assert kit.endpoint.incoming.contended, "they still do"


def test_one_that_waits_and_goes_makes_room() -> None:
    with dask.config.set(SMALL), Kit() as kit, contextlib.ExitStack() as stack:
        raws = [stack.enter_context(Raw(kit.address)).introduce() for _ in range(3)]
        for raw, sent in zip(raws, (4 * MB, 4 * MB, INBOX_BYTES), strict=True):
            raw.send(framed(EAT, bytes(sent), says=8 * MB))
            wait_until(lambda sent=sent: sent == INBOX_BYTES or held(kit) >= 8 * MB)
        wait_until(lambda: sum(c._awaits_memory for c in kit.endpoint.connections) == 1)
        with kit.channels() as (channel,):
            request = channel.send(Header(EAT, body=MB), (bytes(MB),))
            for raw in reversed(raws):  # the one in line before it, and then those that it waits for
                raw.sock.close()
            assert frames.decode_json(request.result(time.monotonic() + 10).body)["bytes"] == MB


def test_servers_do_not_wait_for_each_other() -> None:
    """What one server forwards to another is taken at once: memory that waits for it is freed by nothing else."""
    with dask.config.set(SMALL), Kit() as kit, contextlib.ExitStack() as stack:
        kit.endpoint.handlers[frames.REPLICATE] = kit.eat
        for _ in range(2):
            stack.enter_context(Raw(kit.address)).introduce().send(framed(EAT, bytes(4 * MB), says=8 * MB))
        wait_until(lambda: held(kit) == 16 * MB)
        with Raw(kit.address) as raw:
            raw.introduce().send(framed(frames.REPLICATE, bytes(4 * MB)))
            assert frames.decode_json(raw.frame()[1])["bytes"] == 4 * MB


@pytest.mark.thorough
def test_a_thousand_giants_that_trickle_hold_up_nobody() -> None:
    """Each announces all that a frame may have, and sends little: honest pushes are done while the giants hold on."""
    limits = {"dps.limits.frame": "1 GiB", "dps.limits.incoming": "4 GiB", "dps.limits.buffer": "64 KiB"}
    with dask.config.set({**limits, "dps.timeouts.trickle": "600 s"}), Kit() as kit, contextlib.ExitStack() as stack:
        (honest,) = stack.enter_context(kit.channels())
        giants = [stack.enter_context(Raw(kit.address)).introduce() for _ in range(1000)]
        for giant in giants:
            giant.send(framed(EAT, bytes(INBOX_BYTES), says=GB))
        wait_until(lambda: held(kit) >= len(giants) * FIRST_BYTES)
        for n in range(8):
            for giant in giants[n::100]:
                giant.send(bytes(8))
            assert feed(honest, np.ones(4 * MB, np.int64))["sum"] == 4 * MB
            assert held(kit) < 1 * GB
        assert len(kit.endpoint.connections) == 1001, "they hold on"
        assert not kit.endpoint.incoming.contended


def test_a_body_that_trickles_is_given_up_and_told_why(caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    pace = {"dps.timeouts.trickle": "300 ms", "dps.limits.trickle": "1 MiB"}
    with dask.config.set({**SMALL, **pace}), Kit() as kit, Raw(kit.address) as raw, Raw(kit.address) as quick:
        quick.introduce().send(framed(EAT, bytes(6 * MB), request=4))
        assert quick.frame()[0].kind == frames.OK
        raw.introduce().send(framed(EAT, bytes(INBOX_BYTES), says=8 * MB, request=3))
        header, body = raw.frame()
        assert (header.kind, header.request) == (frames.ERROR, 3)
        error = frames.decode_error(body)
        assert isinstance(error, RequestTimeoutError)
        for words in ("8388608 bytes comes too slowly", "in 0.3 s (dps.timeouts.trickle)", "1048576 bytes a second"):
            assert words in str(error)
        wait_until(lambda: len(kit.endpoint.connections) == 1)
        quick.send(framed(EAT, bytes(6 * MB), request=5))
        assert quick.frame()[0].request == 5


def test_a_body_that_this_side_holds_up_is_not_given_up(caplog) -> None:
    """One that waits for memory, or whose connection is suspended, is not slow by its own fault."""
    caplog.set_level(logging.CRITICAL)
    pace = {"dps.timeouts.trickle": "100 ms", "dps.limits.trickle": "1 MiB"}
    with dask.config.set({**SMALL, **pace}), Kit() as kit, Raw(kit.address) as raw:
        raw.introduce().send(framed(EAT, bytes(INBOX_BYTES), says=6 * MB, request=3))
        wait_until(lambda: any(c.busy for c in kit.endpoint.connections))
        (connection,) = kit.endpoint.connections
        kit.endpoint.call(connection.suspend)
        judged = []
        judge = connection._judge_pace

        def counting(before, due):
            judged.append(connection.transport.is_closing())
            judge(before, due)

        connection._judge_pace = counting
        wait_until(lambda: len(judged) >= 3)
        assert not any(judged)
        kit.endpoint.call(connection.resume)
        raw.send(bytes(6 * MB - INBOX_BYTES))
        assert raw.frame()[0].request == 3


@pytest.mark.thorough
def test_a_connection_that_closes_and_is_not_read_goes_away() -> None:
    with dask.config.set({"dps.timeouts.request": "1 s"}), Kit() as kit, Raw(kit.address) as raw:
        raw.introduce().send(framed(FILL, count=8 * MB))
        wait_until(lambda: any(c._paused for c in kit.endpoint.connections))
        kit.endpoint.call(lambda: [c.transport.close() for c in kit.endpoint.connections])
        wait_until(lambda: not kit.endpoint.connections)


# ---- any mutation of a conversation ---------------------------------------------------------------------------------

flips = st.tuples(st.just("flip"), st.integers(0, 2000), st.integers(0, 7))
cuts = st.tuples(st.just("cut"), st.integers(0, 2000), st.integers(1, 100))
puts = st.tuples(st.just("put"), st.integers(0, 2000), st.binary(min_size=1, max_size=80))
extremes = st.sampled_from([b"\xff" * 8, bytes(8), b"DP", b"\xff\xff\xff\x7f"])
sets = st.tuples(st.just("set"), st.integers(0, 2000), extremes)


def mutated(data: bytes, changes) -> bytes:
    for what, place, how in changes:
        place %= len(data) or 1
        if what == "flip":
            data = data[:place] + bytes([data[place] ^ 1 << how]) + data[place + 1 :] if data else data
        elif what == "cut":
            data = data[:place] + data[place + how :]
        else:
            data = data[:place] + how + data[place + len(how) * (what == "set") :]
    return data


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(st.one_of(flips, cuts, puts, sets), max_size=6),
    proved=st.booleans(),
    kinds=st.lists(st.sampled_from([EAT, FILL, FAIL]), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_any_mutation_leaves_the_endpoint_standing(kit, witness, changes, proved: bool, kinds, seed: int) -> None:
    rng = np.random.default_rng(seed)
    talk = b"".join(framed(kind, rng.bytes(8 * int(rng.integers(0, 20))), count=3) for kind in kinds)
    with Raw(kit.address, timeout=10) as raw:
        greeted = raw.hello()
        if proved:
            raw.send(greeted)
            raw.send(mutated(talk, changes))
        else:
            raw.send(mutated(greeted + talk, changes))
        with contextlib.suppress(OSError):
            raw.sock.shutdown(socket.SHUT_WR)
        while raw.take(1 << 20):
            pass
    assert healthy(witness)


# ---- a server that is none ------------------------------------------------------------------------------------------


def greeting(**changes) -> bytes:
    return framed(frames.GREETING, encode_json({"version": frames.VERSION, "nonce": "00" * 16, **changes}))


def welcome(raw: Raw, secret: str, side: str = "server") -> None:
    raw.send(greeting())
    header, body = raw.frame()
    proof = handshake.proof(secret, side, frames.decode_json(body)["nonce"], "00" * 16)
    raw.send(framed(frames.WELCOME, encode_json({"proof": proof}), request=header.request))
    raw.take(1)


def nod(raw: Raw) -> None:
    raw.send(greeting())
    raw.send(framed(frames.WELCOME, encode_json([]), request=raw.frame()[0].request))
    raw.take(1)


def echo(raw: Raw) -> None:
    """Sends the client's own proof back."""
    raw.send(greeting())
    header, body = raw.frame()
    raw.send(framed(frames.WELCOME, encode_json({"proof": frames.decode_json(body)["proof"]}), request=header.request))
    raw.take(1)


UNKNOWN = "the peer does not know the session secret"
ODD = "does not greet as an endpoint of dps does"
SLOW = framed(frames.ERROR, frames.encode_error(ClockTimeoutError("slow")))
IMPOSTORS = {
    "another secret": (lambda raw: welcome(raw, "cd" * 32), ProtocolError, UNKNOWN),
    "the client's side of a proof": (lambda raw: welcome(raw, SECRET, "client"), ProtocolError, UNKNOWN),
    "an echo": (echo, ProtocolError, UNKNOWN),
    "no proof": (nod, ProtocolError, UNKNOWN),
    "another version": (
        lambda raw: raw.send(greeting(version=9)),
        ProtocolError,
        f"version 9 of the protocol, we {frames.VERSION}",
    ),
    "no JSON": (lambda raw: raw.send(framed(frames.GREETING, b"nonsense")), ProtocolError, "no JSON"),
    "no nonce": (lambda raw: raw.send(framed(frames.GREETING, encode_json({"version": 1}))), ProtocolError, ODD),
    "no object": (lambda raw: raw.send(framed(frames.GREETING, encode_json([1]))), ProtocolError, ODD),
    "a web server": (lambda raw: raw.send(b"HTTP/1.1 400 Bad Request\r\n" * 3), ProtocolError, "not a frame of dps"),
    "an error": (lambda raw: raw.send(SLOW), ClockTimeoutError, "slow"),
    "nothing": (lambda raw: None, ServerGoneError, "the peer closed the connection"),
    "silence": (lambda raw: raw.take(1), ServerGoneError, "the peer has not greeted in time"),
    "too much": (lambda raw: raw.send(framed(frames.GREETING, says=2 * GB)), ProtocolError, "announces a body"),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_an_impostor_is_refused(name: str) -> None:
    behave, error, words = IMPOSTORS[name]
    limit = dask.config.set({"dps.timeouts.connect": "500 ms"} if name == "silence" else {})
    with limit, impostor(behave) as address, pytest.raises(error, match=words):
        Channel(address, NAME, SECRET, "the peer")


def test_answers_that_nobody_asked_for() -> None:
    """They end the connection; none of it reaches memory of the caller that it was not meant for."""
    for answer_bytes, words in [
        (framed(frames.OK, request=77), "answered request 77, which was never made"),
        (framed(frames.OK, bytes(1 << 20), request=77), "sent 1048576 bytes that no request asked for"),
        (framed(frames.OK, bytes(24), request=2), "answered 24 bytes where 16 were asked for"),
        (framed(frames.OK, bytes(8), request=2), "answered 8 bytes where 16 were asked for"),
        (framed(frames.ERROR, encode_json([]), request=2), "an error frame without an error"),
        (framed(frames.ERROR, bytes(1 << 20), request=2), "sent 1048576 bytes that no request asked for"),
        (bytes(64), "not a frame of dps"),
    ]:

        def answer(raw: Raw, answer_bytes: bytes = answer_bytes) -> None:
            welcome_only(raw)
            raw.frame()
            raw.send(answer_bytes)
            raw.take(1)

        with impostor(answer) as address, contextlib.closing(Channel(address, NAME, SECRET, "the peer")) as channel:
            out = bytearray(32)
            request = channel.send(Header(FILL, count=2), (), ViewSink(memoryview(out)[:16]), 16)
            with pytest.raises(ProtocolError, match=words):
                request.result(time.monotonic() + 10)
            assert channel.closed
            assert not any(out)


def welcome_only(raw: Raw) -> None:
    raw.send(greeting())
    header, body = raw.frame()
    proof = handshake.proof(SECRET, "server", frames.decode_json(body)["nonce"], "00" * 16)
    raw.send(framed(frames.WELCOME, encode_json({"proof": proof}), request=header.request))


# ---- TLS and none ---------------------------------------------------------------------------------------------------


@pytest.mark.tls
def test_tls_and_none_do_not_mix(caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    security = Security.temporary()
    listen = security.get_listen_args("worker")["ssl_context"]
    connect = security.get_connection_args("client")["ssl_context"]
    stranger = Security.temporary().get_connection_args("client")["ssl_context"]
    with contextlib.ExitStack() as stack:
        secure, plain = stack.enter_context(Kit(listen)), stack.enter_context(Kit())
        (one,), (two,) = stack.enter_context(secure.channels(1, connect)), stack.enter_context(plain.channels())
        with dask.config.set({"dps.timeouts.connect": "500 ms"}), pytest.raises(DPSError, match="the peer"):
            secure.channel()
        with pytest.raises(AccessDeniedError, match="cannot speak TLS with each other"):
            plain.channel(connect)
        with pytest.raises(AccessDeniedError, match="certificate verify failed"):  # another authority's
            secure.channel(stranger)
        with pytest.raises(AccessDeniedError):
            secure.channel(connect, secret="cd" * 32)
        assert healthy(one)
        assert healthy(two)


@pytest.mark.tls
def test_a_tls_handshake_has_a_time_limit() -> None:
    listen = Security.temporary().get_listen_args("worker")["ssl_context"]
    with dask.config.set({"dps.timeouts.connect": "1 s"}), Kit(listen) as kit, Raw(kit.address) as raw:
        began = time.monotonic()
        assert raw.take(HEADER_SIZE) == b""
        assert time.monotonic() - began < 8  # not the 10 s that are usual
        assert isinstance(listen, ssl.SSLContext)
