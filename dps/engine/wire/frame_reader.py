"""FrameReader: whole frames out of bytes that arrive in chunks of any size, for every end of a connection. Pure.

A driver asks where the next bytes go (`buffer`), says how many have arrived there (`advance`), and takes the frames
that are complete (`next`). Frames that fit into the reader's inbox are handed out in place, aligned, without a copy.
The body of a larger frame goes to a destination that the driver chooses (`place`): its bytes are read straight there,
but for those that came along with the header. A driver that has no memory for a body yet lets the frame wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dps.engine.core.blocks import empty
from dps.engine.wire.frames import HEADER_SIZE, Header, decode_header

__all__ = ["INBOX_BYTES", "Destination", "FrameReader", "Sink", "WholeBody", "pour"]

INBOX_BYTES = 1 << 16


class Sink(Protocol):
    """Where bytes go that arrive one after the other."""

    def buffer(self) -> memoryview:
        """Where the next bytes go; not empty before all have arrived."""

    def advance(self, nbytes: int) -> None: ...


class Destination(Sink, Protocol):
    """Where the body of a large frame goes."""

    @property
    def size(self) -> int:
        """Bytes that it takes: all of the body, or all but the padding at its end."""

    def body(self) -> memoryview:
        """The body for the frame's handler, once it is complete; empty if the bytes are where they belong already."""


def pour(data: memoryview, sink: Sink) -> None:
    while data:
        view = sink.buffer()
        nbytes = len(data)
        if len(view) >= nbytes:
            view[:nbytes] = data
            sink.advance(nbytes)
            return
        view[:] = data[: len(view)]
        sink.advance(len(view))
        data = data[len(view) :]


class WholeBody:
    """A destination in memory of its own, of which nothing else becomes a part as long as there is a view of it."""

    def __init__(self, header: Header):
        self.size = header.body
        self._memory, self._filled = memoryview(empty((header.body // 8,), "int64")).cast("B"), 0

    def buffer(self) -> memoryview:
        return self._memory[self._filled :]

    def advance(self, nbytes: int) -> None:
        self._filled += nbytes

    def body(self) -> memoryview:
        return self._memory


class FrameReader:
    """The receiving end of one stream of frames.

    A body may have `limit` bytes; the attribute may be changed at any time.
    `place` gives, for the header of a frame that does not fit into the inbox, the destination of its body, or None: the
    frame has to wait, and the next call of `next` asks again. It may raise the error that ends the connection.
    """

    def __init__(
        self, limit: int, place: Callable[[Header], Destination | None] = WholeBody, inbox_bytes: int = INBOX_BYTES
    ):
        self.limit = limit
        self.start = self.end = 0  # the unread part of the inbox
        self.inbox = np.empty(inbox_bytes, np.uint8)
        self._view = memoryview(self.inbox)
        self._place = place
        self._large: Destination | None = None  # destination of the body that is arriving
        self._header = Header(0)  # header of the body that is arriving
        self._wanted = self._padding = 0  # bytes that the body still takes, and those that follow

    @property
    def between_frames(self) -> bool:
        """Whether nothing of the next frame has arrived."""
        return self.start == self.end and self._large is None

    def resize(self, inbox_bytes: int) -> None:
        """Go on with an inbox of another size, which takes what is in the present one."""
        rest = self._view[self.start : self.end]
        self.inbox = np.empty(inbox_bytes, np.uint8)
        self._view = memoryview(self.inbox)
        self._view[: len(rest)] = rest
        self.start, self.end = 0, len(rest)

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty, unless a frame waits."""
        if self._wanted:
            assert self._large is not None
            return self._large.buffer()
        return self._view[self.end :]

    def advance(self, nbytes: int) -> None:
        if self._wanted:
            assert self._large is not None
            self._wanted -= nbytes
            self._large.advance(nbytes)
        else:
            self.end += nbytes

    def feed(self, data: memoryview) -> int:
        """Take bytes that were read elsewhere; how many fit. When all frames are taken, there is room for the next."""
        view = self.buffer()
        nbytes = min(len(view), len(data))
        view[:nbytes] = data[:nbytes]
        self.advance(nbytes)
        return nbytes

    def next(self) -> tuple[Header, memoryview] | None:
        """The next frame, None if it is not complete. Its body is valid until the reader is used again.

        Raises ProtocolError if the bytes are no frame, or one above the limit.
        """
        if self._large is not None:
            return self._finished()
        start, end = self.start, self.end
        if start == end:
            self.start = self.end = 0
            return None
        if end - start >= HEADER_SIZE:
            header = decode_header(self._view, start, self.limit)
            after = start + HEADER_SIZE + header.body
            if after <= end:
                self.start = after
                return header, self._view[start + HEADER_SIZE : after]
            if header.body > len(self._view) - HEADER_SIZE:
                destination = self._place(header)
                if destination is None:
                    return None
                self._begin(header, destination)
                return self._finished()
        if start:
            self._to_front(start)
        return None

    def _to_front(self, start: int) -> None:
        """Move what is in the inbox from `start` on to its front, so that the rest of a frame fits and is aligned."""
        rest = bytes(self._view[start : self.end])
        self._view[: len(rest)] = rest
        self.start, self.end = 0, len(rest)

    def _begin(self, header: Header, destination: Destination) -> None:
        first = self.start + HEADER_SIZE
        after = min(self.end, first + destination.size)
        self._header, self._large = header, destination
        pour(self._view[first:after], destination)
        self._wanted = destination.size - (after - first)
        self._padding = header.body - destination.size
        self._to_front(after)

    def _finished(self) -> tuple[Header, memoryview] | None:
        if self._wanted or self.end < self._padding:
            return None
        assert self._large is not None
        body, self._large = self._large.body(), None
        self._to_front(self._padding)
        return self._header, body
