"""Memory for large bodies: reusable buffers, and the bound on all those of an endpoint together. Pure.

A frame of 1 GiB is allowed, and so are thousands of connections: only their sum can be bounded by something that a
machine has. A body that finds no room waits, unread, until others are done: back-pressure, as by a socket whose buffer
is full. Nobody waits for ever, because first come is first served, because whoever has memory is read on
(and closed when nothing comes), and because no body is larger than the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Protocol

import numpy as np

__all__ = ["Buffer", "Holder", "Incoming"]

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


class Holder(Protocol):
    """A connection, as far as the memory of its bodies goes."""

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
        """There is room for the body that waited."""


class Incoming:
    """The bodies on their way into an endpoint: `limit` bytes at most; what finds no room waits in line.

    Buffers count as they are, also between two bodies; but when there is no room, idle ones are dropped first.
    """

    def __init__(self, limit: int, holders: Collection[Holder]):
        self.limit, self._holders = limit, holders
        self._line: deque[tuple[Holder, int]] = deque()

    @property
    def contended(self) -> bool:
        """Whether somebody waits."""
        return bool(self._line)

    def admit(self, holder: Holder, nbytes: int) -> bool:
        """Whether a body of that size may come now; if not, `holder` stands in line and will be told."""
        if nbytes <= holder.spare or (not self._line and self._fits(holder, nbytes)):
            return True
        self._line.append((holder, nbytes))
        return False

    def move_up(self) -> None:
        """Memory has become free: let in from the front of the line who has room now."""
        while self._line:
            holder, nbytes = self._line[0]
            there = holder in self._holders
            if there and not self._fits(holder, nbytes):
                break
            self._line.popleft()
            if there:
                holder.granted()

    def _fits(self, holder: Holder, nbytes: int) -> bool:
        if self._held() - holder.spare + nbytes <= self.limit:
            return True
        for other in self._holders:
            if not other.busy:
                other.drop()
        return self._held() + nbytes <= self.limit

    def _held(self) -> int:
        return sum(holder.spare + holder.lent for holder in self._holders)
