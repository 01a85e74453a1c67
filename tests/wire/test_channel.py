"""Channel: the blocking side, alone in the caller's thread: time-outs, interruptions, odd answers."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
import threading
import time

import dask
import numpy as np
import pytest
from peers import (
    EAT,
    FILL,
    JSON,
    PARK,
    RELEASE,
    SECRET,
    Kit,
    Raw,
    ViewSink,
    ask_echo,
    feed,
    framed,
    fulfilled,
    impostor,
    pattern,
    soon,
)

from dps import config
from dps.engine.wire import channel as channel_module
from dps.engine.wire import frames, handshake, sockets
from dps.engine.wire.channel import Channel
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import Header, padded
from dps.engine.wire.sockets import Plain
from dps.errors import ClosedError, ControllerGoneError, DPSError, RequestTimeoutError, ServerGoneError

MB = 1 << 20


@pytest.fixture(params=["unix", "tcp"])
def kit(request):
    with dask.config.set({"dps.unix-sockets": request.param == "unix"}), Kit() as kit:
        yield kit


def test_an_answer_may_be_padded_beyond_its_sink(kit) -> None:
    with kit.channels() as (channel,):
        for size in range(1, 41):
            out = np.zeros(48, np.uint8)
            header = Header(FILL, count=padded(size) // 8, number=3)
            requests = [channel.send(header, (), ViewSink(memoryview(out)[:size]), size), *[channel.ask(Header(PARK))]]
            requests[0].result(soon())
            assert out[:size].tobytes() == pattern(6, 3).tobytes()[:size]
            assert not out[size:].any()
        channel.ask(Header(RELEASE)).result(soon())


@pytest.mark.parametrize("length", [30_000, 40_000, 70_000, 5 * MB])
def test_a_long_text_is_an_answer_too(kit, length: int) -> None:
    """The route of a parameter server with many tables, the result of a collective."""
    with kit.channels() as (channel,):
        before, request, after = (channel.ask(Header(JSON, count=n)) for n in (3, length, 4))
        assert frames.decode_json(after.result(soon()).body) == "xxxx"
        assert frames.decode_json(request.result(soon()).body) == "x" * length
        assert frames.decode_json(before.result(soon()).body) == "xxx"


def test_request_numbers_wrap_around(kit) -> None:
    with kit.channels() as (channel,):
        channel.stream.number = 0xFFFFFFFE
        parked = channel.ask(Header(PARK, number=7))
        assert [feed(channel, pattern(i, 0))["bytes"] for i in range(4)] == [0, 8, 16, 24]
        channel.ask(Header(RELEASE)).result(soon())
        assert parked.result(soon()).header.count == 7


def test_a_time_out_closes_the_channel_and_names_the_peer(kit) -> None:
    with kit.channels(2) as (channel, other):
        parked, second = channel.ask(Header(PARK)), channel.ask(Header(PARK))
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match="the peer has not answered in time"):
            parked.result(soon(0.2))
        assert 0.15 < time.monotonic() - began < 30  # not the 60 s of dps.timeouts.request
        assert channel.closed
        with pytest.raises(DPSError, match="the peer"):
            second.result(soon())
        assert feed(other, pattern(1, 1))["bytes"] == 8


def test_idle_is_called_while_waiting_and_may_interrupt(kit, monkeypatch) -> None:
    monkeypatch.setattr(channel_module, "SLICE_SECONDS", 0.01)
    with kit.channels() as (channel,):
        calls = []

        def idle() -> None:
            calls.append(1)
            if len(calls) > 3:
                raise ClosedError("told to stop")

        channel.idle = idle
        with pytest.raises(ClosedError, match="told to stop"):
            channel.ask(Header(PARK)).result(soon())
        assert len(calls) == 4
        assert channel.closed


def test_a_peer_that_takes_nothing_is_given_up(monkeypatch) -> None:
    """The other side neither reads nor answers."""
    done = threading.Event()

    def sit(raw: Raw) -> None:
        raw.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greet(raw)
        done.wait(20)

    with dask.config.set({"dps.timeouts.request": "300 ms"}), impostor(sit) as address:
        channel = Channel(address, "s", SECRET, "the peer")
        with pytest.raises(RequestTimeoutError, match=r"the peer has taken no bytes for 0\.3 s"):
            channel.send(Header(EAT, body=20 * MB), (bytes(20 * MB),))
        assert channel.closed
        done.set()


def vanish(sock) -> None:
    """From now on nothing that arrives there is taken or acknowledged, as when the machine were gone: a filter of the
    system's (BPF) whose one instruction lets 0 bytes pass."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="filters of sockets, and times of keep-alive, are Linux's")
@pytest.mark.parametrize("side", ["an endpoint", "a client that is told something"])
def test_a_peer_whose_machine_is_gone_is_missed(monkeypatch, side: str) -> None:
    assert (
        sockets.KEEPALIVE_OPTIONS["TCP_KEEPIDLE"]
        + sockets.KEEPALIVE_OPTIONS["TCP_KEEPINTVL"] * sockets.KEEPALIVE_OPTIONS["TCP_KEEPCNT"]
        <= sockets.DEAD_PEER_SECONDS
    )
    assert sockets.DEAD_PEER_SECONDS < config.seconds("rejoin")
    monkeypatch.setattr(sockets, "DEAD_PEER_SECONDS", 1)
    monkeypatch.setitem(dask.config.config["dps"], "unix-sockets", False)
    monkeypatch.setattr(sockets, "KEEPALIVE_OPTIONS", dict.fromkeys(sockets.KEEPALIVE_OPTIONS, 1))
    with Kit() as kit, kit.channels() as (channel,):
        parked = channel.ask(Header(PARK))
        feed(channel, pattern(1, 1))  # that one has arrived, too
        (connection,) = kit.endpoint.connections
        if side == "an endpoint":
            vanish(connection.transport.get_extra_info("socket"))
            with pytest.raises(ServerGoneError, match="the peer closed the connection"):
                parked.result(soon(60))
        else:
            vanish(channel._socket._sock)
            kit.endpoint.call(connection.reply, kit.parked[0][1]._replace(body=0))
            until = soon(60)
            while connection not in kit.ended:
                assert time.monotonic() < until
                time.sleep(0.01)


def greet(raw: Raw) -> None:
    """What an endpoint does when somebody connects."""
    nonce = "00" * 16
    raw.send(framed(frames.GREETING, frames.encode_json({"version": frames.VERSION, "nonce": nonce})))
    header, body = raw.frame()
    theirs = frames.decode_json(body)["nonce"]
    proof = handshake.proof(SECRET, "server", theirs, nonce)
    raw.send(framed(frames.WELCOME, frames.encode_json({"proof": proof}), request=header.request))


def test_an_address_in_use_by_nobody(kit) -> None:
    with pytest.raises(OSError, match=r"."):
        Endpoint("x", "203.0.113.1", {})  # not an address of this machine
    kit.endpoint.stop()
    for gone in (ServerGoneError, ControllerGoneError):
        with pytest.raises(gone, match=rf"the peer cannot be reached at 127.0.0.1:{kit.address[1]}: .*refused"):
            Channel(kit.address, "s", SECRET, "the peer", gone)


def flood(channel: Channel) -> None:
    """Requests and answers of 8 MB each, all written before one is read."""
    words = pattern(MB, 1)
    wishes = []
    for i in range(8):
        wishes.append((i, ask_echo(channel, MB, i)))
        channel.send(Header(EAT, body=words.nbytes), (words,))
    fulfilled(wishes)


def test_a_channel_that_cannot_write_reads(kit) -> None:
    with kit.channels() as (channel,):
        flood(channel)


def test_a_channel_that_would_not_read_locks_up(kit, monkeypatch) -> None:
    """The endpoint stops reading as long as its answers are not taken: the reason for the rule."""
    wait = Plain.wait
    monkeypatch.setattr(Plain, "wait", lambda self, *how, **more: wait(self, *how, **more) and False)
    limit = dask.config.set({"dps.timeouts.request": "300 ms"})
    with limit, kit.channels() as (channel,), pytest.raises(RequestTimeoutError, match="no bytes"):
        flood(channel)


def test_time_limits_name_their_settings() -> None:
    """Each says which setting it is, its value, what was being done, and what helps."""
    pattern = r"the peer has not answered in time, 0.[0-9]+ s; the limit is 0.3 s \(dps.timeouts.request\) unless"
    busy = r"the thread of test has not come to _snapshot within 0.3 s \(dps.timeouts.request\): it is busy"
    with dask.config.set({"dps.timeouts.request": "300 ms", "dps.timeouts.clock": "700 s"}), Kit() as kit:
        kit.endpoint.handlers[frames.TICK] = kit.park
        with kit.channels() as (channel,), pytest.raises(RequestTimeoutError, match=pattern):
            channel.send(Header(PARK), ()).result(time.monotonic() + 0.2)
        with kit.channels() as (channel,), pytest.raises(RequestTimeoutError, match=r"700 s \(dps.timeouts.clock\)"):
            channel.send(Header(frames.TICK), ()).result(time.monotonic() + 0.1)
        blocking = threading.Event()
        kit.endpoint.submit(blocking.wait)
        with pytest.raises(RequestTimeoutError, match=busy):
            kit.endpoint.call(_snapshot)
        blocking.set()


def _snapshot() -> None:
    """What an endpoint's thread may be asked for."""
