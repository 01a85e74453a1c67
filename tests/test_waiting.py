"""What has come and was not read, against what was sent."""

from __future__ import annotations

import itertools
import socket

import numpy as np
import pytest
from servers import wait_until

from dps.wire import waiting as module
from dps.wire.frames import HEADER_SIZE, Header, encode_header
from dps.wire.waiting import PEEK, unread, waiting


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def frame(body: int) -> bytes:
    return encode_header(Header(1, body=body)) + bytes(body)


@pytest.mark.parametrize("seed", range(20))
def test_frames_are_counted_wherever_they_are_cut(pair, seed):
    """Some bytes were read into the inbox, or into a body; the others are in the system; the end is still to come."""
    ours, theirs = pair
    rng = np.random.default_rng(seed)
    sizes = (8 * rng.integers(0, 400, rng.integers(1, 16))).tolist()
    sent = b"".join(map(frame, sizes))
    ends = [0, *itertools.accumulate(size + HEADER_SIZE for size in sizes)]
    last, first = int(rng.integers(1, len(sent) + 1)), int(rng.integers(0, ends[1] + 1))
    first = min(first, last)
    theirs.sendall(sent[first:last])
    wait_until(lambda: unread(ours) == last - first)
    begun = sum(end < last for end in ends[:-1])
    if first > HEADER_SIZE:  # the first body is being read
        assert waiting(ours, False, memoryview(b""), ends[1] - first) == (begun, last - first)
    assert waiting(ours, False, memoryview(sent[:first]), None) == (begun, last)
    assert waiting(ours, False, memoryview(sent[:first]), None) == (begun, last), "nothing was taken away"


def test_of_what_is_not_to_be_seen_there_is_one_frame_at_least(pair, monkeypatch):
    ours, theirs = pair
    assert waiting(ours, False, memoryview(b""), None) == waiting(ours, True, memoryview(b""), None) == (0, 0)
    sent = frame(0) + frame(PEEK - 2 * HEADER_SIZE) + frame(0) + frame(0)
    theirs.sendall(sent)
    wait_until(lambda: unread(ours) == len(sent))
    assert waiting(ours, False, memoryview(b""), None) == (3, len(sent)), "as far as one looks, and one more"
    assert waiting(ours, True, memoryview(b""), None) == (1, len(sent)), "encrypted"
    monkeypatch.setattr(module, "fcntl", None)  # as on Windows
    assert waiting(ours, False, memoryview(frame(0)), None) == (1, HEADER_SIZE), "what is in the inbox"


def test_a_socket_that_was_closed_has_nothing():
    ours, theirs = socket.socketpair()
    ours.close()
    theirs.close()
    assert unread(ours) == 0
