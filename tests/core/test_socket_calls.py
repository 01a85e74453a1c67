"""Bytes handed to a socket: what the system takes arrives, no memory beside them is read, and no wait is long."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np
import pytest

from dps.engine.core.requests.socket_calls import send, send_soon

LARGE = 1 << 14  # from here on the interpreter's lock is released


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("count", [1, 100, LARGE - 1, LARGE, LARGE + 1])
def test_what_is_sent_arrives(pair, count):
    data = np.random.default_rng(count).integers(0, 256, count + 7, np.uint8)
    assert send(pair[0].fileno(), data, count) == count
    assert pair[1].recv(2 * count) == data[:count].tobytes()
    assert send(pair[0].fileno(), data, 0) == 0


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_a_socket_that_is_full_takes_nothing(pair, count):
    data, taken = np.full(count, 7, np.uint8), 0
    while sent := send(pair[0].fileno(), data, count):  # which would wait for ever, if it waited
        taken += sent
    assert taken > count
    arrived = 0
    while arrived < taken:
        arrived += len(pair[1].recv(1 << 20))
    assert arrived == taken
    assert send(pair[0].fileno(), data, count) > 0


@pytest.mark.parametrize("count", [1, LARGE])
def test_a_broken_connection_takes_nothing(pair, count):
    pair[1].close()
    assert send(pair[0].fileno(), np.zeros(count, np.uint8), count) == 0


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (np.zeros(8, np.uint8), -1),
        (np.zeros(8, np.uint8), 9),
        (np.zeros(16, np.uint8)[::2], 8),
    ],
    ids=["less than none", "more than there are", "with gaps"],
)
def test_arrays_that_do_not_fit_are_refused(pair, data, count):
    with pytest.raises((ValueError, TypeError)):
        send(pair[0].fileno(), data, count)
    with pytest.raises((ValueError, TypeError)):
        send_soon(pair[0].fileno(), data, count, 10**9)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


def test_a_peer_that_reads_is_waited_for(pair):
    data = np.random.default_rng(3).integers(0, 256, 8 << 20, np.uint8)
    arrived = bytearray()

    def read() -> None:
        while len(arrived) < len(data):
            arrived.extend(pair[1].recv(1 << 16))

    reader = threading.Thread(target=read)
    reader.start()
    sent, left = send_soon(pair[0].fileno(), data, len(data), 100 * 10**9)
    assert sent == len(data)
    assert 0 < left < 100 * 10**9
    reader.join()
    assert arrived == data.tobytes()


@pytest.mark.parametrize("patience", [0, 10**6, 2 * 10**7])
def test_a_peer_that_does_not_read_is_not_waited_for_long(pair, patience):
    data, began = np.zeros(8 << 20, np.uint8), time.monotonic()
    sent, left = send_soon(pair[0].fileno(), data, len(data), patience)
    assert 0 < sent < len(data)
    assert left <= 0
    assert patience * 1e-9 <= time.monotonic() - began < 10
    assert send_soon(pair[0].fileno(), data, len(data), 0) == (0, 0)


def test_a_peer_that_has_gone_is_not_waited_for(pair):
    pair[1].close()
    assert send_soon(pair[0].fileno(), np.zeros(1 << 20, np.uint8), 1 << 20, 10**9)[0] == 0
