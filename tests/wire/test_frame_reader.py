"""The frame reader as values: streams of frames in chunks of any size, beside the list of frames that made the stream.

The inbox is small here, so that frames of each size beside it are frequent: those that fit, those that do not, and
those that fit by a byte.
"""

from __future__ import annotations

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant
from peers import framed

from dps.engine.wire.frame_reader import FrameReader, WholeBody, pour
from dps.engine.wire.frames import HEADER_SIZE, Header, padded
from dps.errors import ProtocolError

INBOX, LIMIT = HEADER_SIZE + 128, 1 << 12
WHOLE, PIECES = 100, 101  # kinds: the body goes into one buffer, or into a sink of many pieces


class Pieces:
    """A destination of small pieces of memory, which takes no padding."""

    def __init__(self, size: int, draw: random.Random):
        self.size, self.taken, self._draw = size, bytearray(), draw
        self._piece, self._at = bytearray(), 0

    def buffer(self) -> memoryview:
        assert len(self.taken) + self._at < self.size, "asked for more than it takes"
        if self._at == len(self._piece):
            self.taken += self._piece
            self._piece = bytearray(min(self._draw.randint(1, 100), self.size - len(self.taken)))
            self._at = 0
        return memoryview(self._piece)[self._at :]

    def advance(self, nbytes: int) -> None:
        assert 0 <= nbytes <= len(self._piece) - self._at, "more than there was room for"
        self._at += nbytes

    def body(self) -> memoryview:
        self.taken += self._piece[: self._at]
        self._piece = bytearray()
        self._at = 0
        return memoryview(b"")


class Driver:
    """Feeds a reader a stream, and keeps the frames that come out of it: header, body."""

    def __init__(self, draw: random.Random, waits: int = 0):
        self.draw, self.waits, self.refused = draw, waits, 0
        self.reader = FrameReader(LIMIT, self._place, INBOX)
        self.frames: list[tuple[Header, bytes]] = []
        self._pieces: Pieces | None = None

    def _place(self, header: Header) -> WholeBody | Pieces | None:
        assert header.body > INBOX - HEADER_SIZE, "a frame that fits needs no place"
        if self.refused < self.waits:
            self.refused += 1
            return None
        self.refused = 0
        if header.kind == WHOLE:
            return WholeBody(header)
        self._pieces = Pieces(header.count, self.draw)
        return self._pieces

    def take(self) -> None:
        """Take all frames that are complete."""
        while True:
            frame = self.reader.next()
            if frame is None and 0 < self.refused <= self.waits:
                continue  # the memory for it comes later
            if frame is None:
                return
            header, body = frame
            if self._pieces is not None:
                assert len(body) == 0
                body, self._pieces = self._pieces.taken + bytes(header.body - header.count), None
            elif len(body):
                assert np.frombuffer(body, np.uint8).ctypes.data % 8 == 0, "arrays are read in place"
            assert len(body) == header.body
            self.frames.append((header, bytes(body)))

    def read(self, stream: bytes, largest: int) -> None:
        at = 0
        while at < len(stream):
            view = self.reader.buffer()
            assert len(view) > 0, "there is always room"
            nbytes = min(len(view), len(stream) - at, self.draw.randint(1, largest))
            view[:nbytes] = stream[at : at + nbytes]
            self.reader.advance(nbytes)
            at += nbytes
            self.take()

    def feed(self, stream: bytes, largest: int) -> None:
        """The same stream, in chunks that were read elsewhere."""
        at = 0
        while at < len(stream):
            chunk = memoryview(stream)[at : at + self.draw.randint(1, largest)]
            at += len(chunk)
            while chunk:
                fed = self.reader.feed(chunk)
                assert fed > 0
                chunk = chunk[fed:]
                self.take()


def made(draw: random.Random, count: int) -> list[bytes]:
    """Frames with random bodies. `count` of a header is the size of the content, without padding."""
    frames = []
    for number in range(count):
        size = draw.choice((0, draw.randint(0, 40), draw.randint(100, 160), draw.randint(0, 1000), LIMIT))
        content = draw.randbytes(size)
        body = content + bytes(padded(size) - size)
        frames.append(framed(draw.choice((WHOLE, PIECES)), body, count=size, request=number))
    return frames


def check_stream(seed: int, largest: int, waits: int, fed: bool) -> None:
    draw = random.Random(seed)
    frames = made(draw, draw.randint(1, 12))
    driver = Driver(draw, waits)
    assert driver.reader.between_frames
    (driver.feed if fed else driver.read)(b"".join(frames), largest)
    assert [framed(h.kind, body, count=h.count, request=h.request) for h, body in driver.frames] == frames
    assert driver.reader.between_frames


def check_truncated(seed: int) -> None:
    draw = random.Random(seed)
    frames = made(draw, 4)
    stream = b"".join(frames)
    end = draw.randrange(len(stream) + 1)
    driver = Driver(draw)
    driver.read(stream[:end], 200)
    ends = np.cumsum([len(frame) for frame in frames])
    assert len(driver.frames) == (ends <= end).sum()
    assert driver.reader.between_frames == (end in (0, *ends))


def check_resized(seed: int, at: int) -> None:
    stream = b"".join(made(random.Random(seed), 5))
    driver = Driver(random.Random(seed))
    driver.read(stream[:at], 50)
    reader = driver.reader
    if len(stream) < at or (reader.start == reader.end and not reader.between_frames):
        return  # in the middle of a large body, which is no time to change the inbox
    reader.resize(2 * INBOX)
    assert len(reader.inbox) == 2 * INBOX
    assert bytes(reader.inbox[: reader.end]) == stream[at - reader.end : at]


seeds, chunks = st.integers(0, 2**32), st.sampled_from([1, 3, 64, 300, 5000])


@given(seeds, chunks, st.integers(0, 3), st.booleans())
def test_a_stream_is_cut_into_its_frames(seed: int, largest: int, waits: int, fed: bool) -> None:
    check_stream(seed, largest, waits, fed)


@given(seeds)
def test_a_truncated_stream_gives_the_frames_before_its_end(seed: int) -> None:
    check_truncated(seed)


@given(seeds, st.integers(0, 300))
def test_a_larger_inbox_takes_what_is_in_the_smaller(seed: int, at: int) -> None:
    check_resized(seed, at)


@pytest.mark.parametrize("before", [0, 72])
@pytest.mark.parametrize(("says", "words"), [(LIMIT + 8, "at most 4096"), (12, "body of 12 bytes"), (1 << 40, "body")])
def test_what_a_header_may_announce(says: int, words: str, before: int) -> None:
    driver = Driver(random.Random(0))
    stream = framed(WHOLE, bytes(before)) if before else b""
    driver.read(stream, 1000)
    with pytest.raises(ProtocolError, match=words):
        driver.read(framed(WHOLE, says=says), 1000)
    assert len(driver.frames) == bool(before)


def test_bytes_that_are_no_frame() -> None:
    with pytest.raises(ProtocolError, match="not a frame of dps"):
        Driver(random.Random(0)).read(b"GET / HTTP/1.1\r\n" * 5, 1000)


def test_the_error_of_a_place_ends_the_reading() -> None:
    def place(header: Header) -> WholeBody:
        raise ProtocolError("never asked for")

    reader = FrameReader(LIMIT, place, INBOX)
    reader.feed(memoryview(framed(WHOLE, says=LIMIT)))
    with pytest.raises(ProtocolError, match="never asked for"):
        reader.next()


def test_a_body_is_read_straight_into_its_memory() -> None:
    """Only what came along with the header is copied."""
    reader = FrameReader(1 << 20)
    frame = framed(WHOLE, bytes(1 << 20))
    reader.feed(memoryview(frame)[: 1 << 16])
    assert reader.next() is None
    inbox = memoryview(reader.inbox)
    while not np.shares_memory(np.frombuffer(reader.buffer(), np.uint8), inbox):
        nbytes = len(reader.buffer())
        assert nbytes == len(frame) - (1 << 16), "all that is left, in one piece"
        reader.advance(nbytes)
    header, body = reader.next()
    assert len(body) == header.body == 1 << 20


def test_pour_fills_piece_after_piece() -> None:
    for size in (1, 50, 1000):
        data = random.Random(size).randbytes(size)
        pieces = Pieces(size, random.Random(1))
        pour(memoryview(data), pieces)
        pieces.body()
        assert pieces.taken == data


# ---- what must not pass ---------------------------------------------------------------------------------------------


def every_check() -> None:
    for seed in range(40):
        check_stream(seed, (1, 3, 64, 300, 5000)[seed % 5], seed % 3, seed % 2 == 0)
        check_truncated(seed)
        check_resized(seed, 7 * seed)
    test_what_a_header_may_announce(LIMIT + 8, "at most 4096", 72)


MUTANTS = [
    ("next", "after <= end", "after < end"),
    ("next", "end - start >= HEADER_SIZE", "end - start > 0"),
    ("next", "len(self._view) - HEADER_SIZE", "len(self._view)"),
    ("next", "self.start = after", "self.start = after + 8"),
    ("next", "self._to_front(start)", "pass"),
    ("next", "self.limit", "1 << 30"),
    ("_begin", "self.start + HEADER_SIZE", "self.start"),
    ("_begin", "- (after - first)", ""),
    ("_begin", "header.body - destination.size", "0"),
    ("_begin", "self._to_front(after)", "pass"),
    ("_finished", "self.end < self._padding", "False"),
    ("_finished", "self._to_front(self._padding)", "self._to_front(0)"),
    ("_finished", "self._to_front(self._padding)", "self.start = self._padding"),
    ("_to_front", "len(rest)", "self.end"),
    ("advance", "self._wanted -= nbytes", "pass"),
    ("advance", "self._large.advance(nbytes)", "pass"),
    ("resize", "self._view[: len(rest)] = rest", "pass"),
    ("feed", "return nbytes", "return len(data)"),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_a_wrong_variant_is_caught(monkeypatch, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(FrameReader, name, mutant(getattr(FrameReader, name), old, new))
    with pytest.raises((AssertionError, ValueError, ProtocolError, struct.error, pytest.fail.Exception)):
        every_check()
