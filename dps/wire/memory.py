"""Memory for large bodies: reusable buffers, and the bound on all those of an endpoint together. Pure.

A frame of 1 GiB is allowed, and so are thousands of connections: only their sum can be bounded by something that a
machine has. A body that finds no room waits, unread, until others are done: back-pressure, as by a socket whose buffer
is full.

What a body has announced is not what it takes: its buffer begins small and grows with what has come, to `GROWTH` times
that at most. So a client's share is bounded by what it has sent, and a thousand giants that trickle take a thousand
small buffers. A buffer may grow only while all bodies can still come to their ends one after another (this is
the banker's algorithm; Dijkstra, EWD 623, with the order of their coming for the safe sequence). So no body waits for
ever: the one that came first may always go on, no body is larger than the bound, and one that does not come, or comes
more slowly than `dps.limits.trickle`, is given up by its connection.

One host that sends fast on many connections and then stalls would still hold all that there is until it is given up. So
the bodies of one origin have half of the limit at most (or as much as the largest body may need), by the same rule once
more: the banker has two bounds then, and the order of coming is a safe sequence for both, because the body that came
first is also the first of its origin. A body that waits for its origin's share lets those of other origins pass.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Protocol

import numpy as np

__all__ = ["FIRST", "GROWTH", "Buffer", "Holder", "Incoming"]

FIRST, GROWTH = 1 << 18, 4  # bytes of a new body's buffer; it grows to so many times what has come
PATIENCE = 64  # messages after which a buffer that none of them needed is given back


class Buffer:
    """Reusable memory: grows for a giant message, shrinks back when later ones do not need it."""

    def __init__(self, keep: int):
        self._keep, self._bytes, self._idle, self._most = keep, np.empty(0, np.uint8), 0, 0

    def __len__(self) -> int:
        return len(self._bytes)

    def take(self, nbytes: int) -> np.ndarray:
        """uint8[nbytes], aligned; its content is that of some earlier message."""
        self._idle, self._most = self._idle + 1, max(self._most, nbytes)
        if nbytes > len(self._bytes) or (self._idle > PATIENCE and len(self._bytes) > max(self._keep, 2 * self._most)):
            self._bytes = np.empty(max(nbytes, min(self._most, self._keep)), np.uint8)
        if self._idle > PATIENCE or nbytes > len(self._bytes) // 2:
            self._idle = self._most = 0
        return self._bytes[:nbytes]

    def grow(self, nbytes: int, used: int) -> np.ndarray:
        """The message is larger: uint8[nbytes] that begins with the `used` bytes of it that are here."""
        if nbytes > len(self._bytes):
            larger = np.empty(nbytes, np.uint8)
            larger[:used] = self._bytes[:used]
            self._bytes = larger
        self._most = max(self._most, nbytes)
        return self._bytes[:nbytes]


class Holder(Protocol):
    """A connection, as far as the memory of its bodies goes."""

    @property
    def origin(self) -> Hashable:
        """Where its bodies come from: holders of one origin have one share."""

    @property
    def spare(self) -> int:
        """Bytes of its buffer."""

    @property
    def lent(self) -> int:
        """Bytes of earlier bodies that are still needed."""

    @property
    def busy(self) -> bool:
        """A body is on its way into the buffer."""

    def drop(self) -> None:
        """Give the buffer back."""

    def granted(self) -> None:
        """There is room for what it waited for."""


class Incoming:
    """The bodies on their way into an endpoint: `limit` bytes at most, of one origin its share; others wait in line.

    Buffers count as they are, also between two bodies; but when there is no room, idle ones are dropped first.

    Parameters
    ----------
    limit : int
        Bytes of all buffers together; at least `largest`.
    largest : int
        Bytes that a body may have. The share of an origin is half of the limit, or that much if it is more.
    holders : collection of Holder
        All there are; the caller changes it.
    """

    def __init__(self, limit: int, largest: int, holders: Collection[Holder]):
        self.limit, self._holders = max(limit, largest), holders
        self.share = max(self.limit // 2, largest)
        self._bodies: dict[Holder, int] = {}  # those under way or waiting, the first come first: how large each will be
        self._line: dict[Holder, int] = {}  # connections that wait, each for a buffer of so many bytes

    @property
    def contended(self) -> bool:
        """Whether a body waits."""
        return bool(self._line)

    def admit(self, holder: Holder, size: int, nbytes: int) -> bool:
        """Whether a body of `size` may have a buffer of `nbytes` now; if not, `holder` is in line and will be told."""
        self._bodies.setdefault(holder, size)
        if nbytes <= holder.spare:
            return True
        self._line[holder] = nbytes
        if next(self._next_in_line(), None) is not holder:
            return False
        del self._line[holder]
        return True

    def done(self, holder: Holder) -> None:
        """Its body is complete, or given up."""
        self._bodies.pop(holder, None)
        self._line.pop(holder, None)

    def move_up(self) -> None:
        """Memory has become free: let in those that have room now, the first come first."""
        for holder in self._next_in_line():
            del self._line[holder]
            holder.granted()

    def _next_in_line(self) -> Iterator[Holder]:
        """Those in line that have room now; each is let in before the next is looked for.

        A body under way stands before those that have not begun, because these may wait for the memory that it has. A
        body that waits for its origin's share holds up no other origin, and one that waits for the limit all behind it.
        """
        full = set()  # origins
        for holder in sorted(filter(self._line.__contains__, self._bodies), key=lambda body: not body.busy):
            if holder not in self._line or holder.origin in full:  # it may have gone while another was let in
                continue
            if not self._fits(holder, self.share, [other for other in self._holders if other.origin == holder.origin]):
                full.add(holder.origin)
            elif self._fits(holder, self.limit, self._holders):
                yield holder
            else:
                break

    def _fits(self, holder: Holder, limit: int, holders: Collection[Holder]) -> bool:
        """Whether there is room for what `holder` waits for; if not, idle buffers of `holders` are dropped first."""
        if self._safe(holder, limit, holders):
            return True
        for other in holders:
            if other is not holder and not other.busy:
                other.drop()
        return self._safe(holder, limit, holders)

    def _safe(self, holder: Holder, limit: int, holders: Collection[Holder]) -> bool:
        """Whether the bodies of `holders` can still come to their ends one after another, the first come first.

        Each may need all that it has announced while those that came later keep what they have by then.
        """
        nbytes = self._line[holder]
        held = sum(other.spare + other.lent for other in holders) - holder.spare + nbytes
        if held + max(self._bodies.values()) <= limit:
            return True  # in any order: this saves a look at each body
        among = set(holders)
        under_way = [body for body in self._bodies if body in among and (body.busy or body is holder)]
        held -= sum(nbytes if body is holder else body.spare for body in under_way)
        for body in reversed(under_way):
            buffer = nbytes if body is holder else body.spare
            held += buffer
            if held + max(0, self._bodies[body] - buffer) > limit:
                return False
        return True
