"""Bytes handed to a socket without waiting: what the system takes arrives, and no memory beside them is read."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from dps.core.socket_calls import send

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
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)
