"""PlainAnswers: the answers to a peer's plain frames, which one compiled step makes of the bytes that have arrived.

The step (`dps.engine.core.requests.service.Service`) belongs to the role behind the endpoint. It leaves every frame
that is not plain; the connection hands that one to its handler. What the step has made leaves at once
(`departures.py`). A step is made only when the answers of the one before have left, so one buffer is enough.

A large answer leaves piece by piece: the next one is made when the peer has taken the one before, so that the pieces
stay in the processor's cache, and the peer reads them meanwhile. No other request may come in between, because the
answer would show a part of it. So the endpoint waits only for a process of this machine, and only as long as
`patience` says; then the rest of the answer is copied, and the transport sends it.

Where the peer shares memory (`shared_memory.py`), the pieces are made there, and only a header for each leaves through
the socket. The same time of waiting counts, now for the peer to give a piece back. A peer in this process lends the
memory in which the rows are to be (`loans.py`): then they go there in one piece, and nothing waits.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dps.engine.wire.departures import DirectWriter
from dps.engine.wire.frames import HEADER_SIZE, SHARED
from dps.engine.wire.protocols import RoleConnection

__all__ = ["ROOM_BYTES", "PlainAnswers", "PlainStep"]

# Room for answers that leave together; the system gives memory to those that are used.
ROOM_BYTES = (1 << 19) + HEADER_SIZE
# Time that an endpoint waits for a peer to take a large answer: this, whatever its size, and one nanosecond for each
# BYTES_A_NANOSECOND, which a peer that reads takes.
WAIT_NANOSECONDS = 100_000
BYTES_A_NANOSECOND = 10
# Where fields of a header are: a byte, half a word, and words.
FLAGS, REQUEST, START, BODY = 3, 1, 5, 7


def patience(nbytes: int) -> int:
    """Nanoseconds that an endpoint may wait in all for the peer that takes an answer of so many bytes."""
    return WAIT_NANOSECONDS + nbytes // BYTES_A_NANOSECOND


class PlainStep(Protocol):
    """Answers frames: see :class:`dps.engine.core.requests.service.Service`."""

    def step(
        self, inbox: np.ndarray, start: int, end: int, out: np.ndarray, peer: object, from_server: bool
    ) -> tuple[int, int]:
        """Answer the frames in inbox[start:end] until one is not plain: bytes that are answered, and bytes in `out`."""

    @property
    def left(self) -> int:
        """Bytes of the last answer that are still to be made."""

    def more(self, out: np.ndarray) -> int:
        """Go on with the last answer: how many bytes are in `out`."""

    @property
    def shared(self) -> bool:
        """Whether the last answer, of which only the header is made, goes on with :meth:`share`."""

    def share(self, out: np.ndarray) -> int:
        """As `more`, for a piece in the memory that the peer shares."""


class PlainAnswers:
    """The answers of one connection, the `peer`, which has memory for large ones and sends those that leave later."""

    def __init__(self, peer: RoleConnection, writer: DirectWriter, from_server: bool):
        self._peer = peer
        self._writer = writer
        self._from_server = from_server
        self._answers = np.empty(ROOM_BYTES, np.uint8)
        self._head = self._answers[:HEADER_SIZE]
        self._words = self._head.view(np.int64)

    def answer(self, step: PlainStep, inbox: np.ndarray, start: int, end: int) -> int:
        """Answer the plain frames at the beginning of inbox[start:end]; how many bytes they have."""
        answered, made = step.step(inbox, start, end, self._answers, self._peer, self._from_server)
        if step.left:
            (self._send_shared if step.shared else self._send_large)(step, made)
        elif made:
            self._writer.write(self._answers, made)
        return answered

    def _send_large(self, step: PlainStep, made: int) -> None:
        """Send a large answer, of which `made` bytes are made, as far as the peer takes it; copy the rest."""
        sent, left = self._writer.write_soon(self._answers, made, patience(made + step.left))
        while sent == made and step.left:
            made = step.more(self._answers)
            sent, left = self._writer.write_soon(self._answers, made, left)
        if sent < made or step.left:
            rest = self._peer.outgoing(made - sent + step.left)
            rest[: made - sent] = self._answers[sent:made]
            step.more(rest[made - sent :])
            self._writer.write(rest, len(rest))

    def _write_lent(self, step: PlainStep) -> bool:
        """Put a large answer in the memory that a peer in this process has lent for it, if it has."""
        loans, head, words = self._peer.loans, self._head, self._words
        if loans is None:
            return False
        nbytes = step.left
        with loans.taken(int(head.view(np.uint32)[REQUEST]), nbytes) as memory:
            if memory is None:
                return False
            step.more(memory)
        head[FLAGS], words[START], words[BODY] = SHARED, nbytes, 0
        self._writer.write(bytes(head), HEADER_SIZE)
        return True

    def _send_shared(self, step: PlainStep, made: int) -> None:
        """Put a large answer in the memory that the peer shares, as far as the peer takes it; send the rest."""
        ring, head, words = self._peer.ring, self._head, self._words
        assert ring is not None
        assert made == HEADER_SIZE
        if self._write_lent(step):
            return
        sent, left = HEADER_SIZE, patience(step.left)
        head[FLAGS], words[BODY] = SHARED, 0
        while sent == HEADER_SIZE and step.left and (left := ring.wait(left)) >= 0:
            words[START] = step.share(ring.slot())
            ring.made()
            sent, left = self._writer.write_soon(head, HEADER_SIZE, left)
        unsent = HEADER_SIZE - sent
        if step.left:
            rest = self._peer.outgoing(unsent + HEADER_SIZE + step.left)
            rest[:unsent] = head[sent:]
            head[FLAGS], words[START], words[BODY] = 0, 0, step.left
            rest[unsent : unsent + HEADER_SIZE] = head
            step.more(rest[unsent + HEADER_SIZE :])
            self._writer.write(rest, len(rest))
        elif unsent:
            self._writer.write(bytes(head[sent:]), unsent)
