"""Memory for large bodies: reusable buffers, and a bound on the sum of all buffers of an endpoint. Pure.

A frame of 1 GiB is allowed, and so are thousands of connections, so a bound that fits a machine has to be one on their
sum. A body that finds no room waits, unread, until other bodies are handled: this is back-pressure, as by a socket
whose buffer is full.

A body does not take the memory that it announces: its buffer begins small and grows with the bytes that have arrived,
to at most `GROWTH_FACTOR` times their number. So the memory of a client is bounded by what it has sent, and a thousand
giants that trickle take a thousand small buffers. A buffer may grow only while all bodies can still be completed one
after another (this is the banker's algorithm; Dijkstra, EWD 623; the safe sequence is the order of arrival). So no body
waits for ever: the first one may always go on, no body is larger than the bound, and a connection gives up a body that
does not arrive, or arrives more slowly than `dps.limits.trickle`.

One host that sends fast on many connections and then stalls would still hold all of the memory until it is given up. So
the bodies of one origin get at most half of the limit (or as much as the largest body may need), by the same rule once
more: the banker then has two bounds, and the order of arrival is a safe sequence for both, because the first body of
all is also the first of its origin. A body that waits for its origin's share lets bodies of other origins pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Protocol

import numpy as np

__all__ = ["FIRST_BYTES", "GROWTH_FACTOR", "Buffer", "GrowingBody", "Holder", "Incoming"]

# Size of a new body's buffer.
FIRST_BYTES = 1 << 18
# Factor by which a buffer exceeds the bytes that have arrived, when it grows.
GROWTH_FACTOR = 4
# Number of messages in a row that need no buffer of that size, after which it is made smaller.
SHRINK_AFTER_MESSAGES = 64


class Buffer:
    """Reusable memory: grows for a giant message, shrinks back when later ones do not need it."""

    def __init__(self, keep: int):
        self._keep = keep
        self._bytes = np.empty(0, np.uint8)
        self._messages = 0
        self._largest = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def take(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes], aligned; it still has the content of an earlier message."""
        self._messages, self._largest = self._messages + 1, max(self._largest, nbytes)
        if nbytes > len(self._bytes) or (
            self._messages > SHRINK_AFTER_MESSAGES and len(self._bytes) > max(self._keep, 2 * self._largest)
        ):
            self._bytes = np.empty(max(nbytes, min(self._largest, self._keep)), np.uint8)
        if self._messages > SHRINK_AFTER_MESSAGES or nbytes > len(self._bytes) // 2:
            self._messages = self._largest = 0
        return self._bytes[:nbytes]

    def grow(self, nbytes: int, used: int) -> np.ndarray:
        """uint8[nbytes] that begins with the first `used` bytes of the buffer, for a message that is larger."""
        if nbytes > len(self._bytes):
            larger = np.empty(nbytes, np.uint8)
            larger[:used] = self._bytes[:used]
            self._bytes = larger
        self._largest = max(self._largest, nbytes)
        return self._bytes[:nbytes]


class GrowingBody:
    """A large body that is arriving in a buffer, behind its header, so that the frame is in one piece.

    It has at first `nbytes` of the buffer, and may get more later: `full` is called when these are full and more of the
    body is to come; it may `grow` the body.
    """

    def __init__(self, buffer: Buffer, header: bytes, size: int, nbytes: int, full: Callable[[], None]):
        self.size, self.filled = size, 0  # bytes of the body, and how many of them have arrived
        self._buffer = buffer
        self._full = full
        self._first = len(header)
        self._keep(buffer.take(len(header) + nbytes))
        memoryview(self.frame)[: len(header)] = header

    def _keep(self, memory: np.ndarray) -> None:
        self.frame, self._memory = memory, memoryview(memory)[self._first :]

    def buffer(self) -> memoryview:
        """Where the next bytes go; empty if the body waits for memory."""
        return self._memory[self.filled :]

    def advance(self, nbytes: int) -> None:
        self.filled += nbytes
        if self.filled == len(self._memory) < self.size:
            self._full()

    def grow(self, nbytes: int) -> None:
        """Let the body have `nbytes` of the buffer."""
        self._keep(self._buffer.grow(self._first + nbytes, self._first + self.filled))

    def body(self) -> memoryview:
        """The body, once it is complete."""
        return self._memory


class Holder(Protocol):
    """A connection, as far as the memory of its bodies goes."""

    @property
    def origin(self) -> Hashable:
        """The source of its bodies: holders of one origin have one share."""

    @property
    def spare(self) -> int:
        """Bytes of its own buffer."""

    @property
    def lent(self) -> int:
        """Bytes of the buffers of earlier bodies that a role still uses."""

    @property
    def busy(self) -> bool: ...

    def drop(self) -> None:
        """Give the buffer back."""

    def granted(self) -> None:
        """There is room for the buffer that it waits for."""


class Incoming:
    """The bodies that are arriving at an endpoint: at most `limit` bytes, of one origin at most its share. Others wait.

    A buffer counts also between two bodies; when there is no room, buffers without a body are dropped first.

    Parameters
    ----------
    limit : int
        Bytes of all buffers together; at least `largest`.
    largest : int
        Bytes that a body may have. The share of an origin is half of the limit, or that much if it is more.
    holders : collection of Holder
        All connections of the endpoint; the caller keeps it up to date.
    """

    def __init__(self, limit: int, largest: int, holders: Collection[Holder]):
        self.limit, self._holders = max(limit, largest), holders
        self.share = max(self.limit // 2, largest)
        self._bodies: dict[Holder, int] = {}  # size of each body that arrives or waits, in the order of arrival
        self._line: dict[Holder, int] = {}  # bytes of the buffer that each waiting connection needs

    @property
    def contended(self) -> bool:
        return bool(self._line)

    def admit(self, holder: Holder, size: int, nbytes: int) -> bool:
        """Whether a body of `size` may have a buffer of `nbytes` now. If not, `holder` is put in line; its `granted` is
        called when there is room."""
        self._bodies.setdefault(holder, size)
        if nbytes <= holder.spare:
            return True
        self._line[holder] = nbytes
        if next(self._next_in_line(), None) is not holder:
            return False
        del self._line[holder]
        return True

    def done(self, holder: Holder) -> None:
        """The holder's body is complete, or given up."""
        self._bodies.pop(holder, None)
        self._line.pop(holder, None)

    def move_up(self) -> None:
        """Memory has become free: grant it to those in line, in the order of arrival."""
        for holder in self._next_in_line():
            del self._line[holder]
            holder.granted()

    def _next_in_line(self) -> Iterator[Holder]:
        """Those in line that have room now; the caller grants memory to each before it asks for the next.

        A body that has begun comes before those that have not, because these may wait for the memory that it has. A
        body that waits for its origin's share holds up no other origin, one that waits for the limit all behind it.
        """
        full = set()  # origins
        for holder in sorted(filter(self._line.__contains__, self._bodies), key=lambda body: not body.busy):
            if holder not in self._line or holder.origin in full:  # it may have left the line since `sorted`
                continue
            if not self._fits(holder, self.share, [other for other in self._holders if other.origin == holder.origin]):
                full.add(holder.origin)
            elif self._fits(holder, self.limit, self._holders):
                yield holder
            else:
                break

    def _fits(self, holder: Holder, limit: int, holders: Collection[Holder]) -> bool:
        """Whether there is room for the buffer that `holder` waits for, if need be after dropping idle buffers."""
        if self._safe(holder, limit, holders):
            return True
        for other in holders:
            if other is not holder and not other.busy:
                other.drop()
        return self._safe(holder, limit, holders)

    def _safe(self, holder: Holder, limit: int, holders: Collection[Holder]) -> bool:
        """Whether the bodies of `holders` can still be completed one after another, in the order of arrival.

        Each may need all the bytes that it has announced while the later ones keep the buffers that they have by then.
        """
        nbytes = self._line[holder]
        held = sum(other.spare + other.lent for other in holders) - holder.spare + nbytes
        if held + max(self._bodies.values()) <= limit:
            return True  # in any order: this shortcut saves the loop over all bodies
        among = set(holders)
        under_way = [body for body in self._bodies if body in among and (body.busy or body is holder)]
        held -= sum(nbytes if body is holder else body.spare for body in under_way)
        for body in reversed(under_way):
            buffer = nbytes if body is holder else body.spare
            held += buffer
            if held + max(0, self._bodies[body] - buffer) > limit:
                return False
        return True
