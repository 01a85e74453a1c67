"""PlainAnswers: the answers to a peer's plain frames, which one compiled step makes of the bytes that have arrived.

The step (`dps.core.service.Service`) belongs to the role behind the endpoint. It leaves every frame that is not plain;
the connection hands that one to its handler. What the step has made leaves at once, in one system call, if the
transport holds nothing that has to leave before; the transport sends what the system does not take. A step is made only
when the answers of the one before have left, so one buffer is enough.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

import numpy as np

from dps.core.socket_calls import send
from dps.wire.coalescer import Coalescer
from dps.wire.frames import HEADER_SIZE

__all__ = ["ROOM_BYTES", "PlainAnswers", "PlainStep"]

ROOM_BYTES = (1 << 19) + HEADER_SIZE  # of answers that leave together; the system gives memory to those that are used


class PlainStep(Protocol):
    """Answers frames: see :class:`dps.core.service.Service`."""

    def step(
        self, inbox: np.ndarray, start: int, end: int, out: np.ndarray, peer: object, from_server: bool
    ) -> tuple[int, int]:
        """Answer the frames in inbox[start:end] until one is not plain: bytes that are answered, and bytes in `out`."""


class PlainAnswers:
    """The answers of one connection.

    Parameters
    ----------
    peer : object
        The connection, for answers that leave later.
    transport : asyncio.Transport
    coalescer : Coalescer
        The frames that wait for the end of the loop's turn.
    from_server : bool
        The peer is a server, and no client.
    """

    def __init__(self, peer: object, transport: asyncio.Transport, coalescer: Coalescer, from_server: bool):
        self._peer = peer
        self._transport, self._coalescer, self._from_server = transport, coalescer, from_server
        self._answers = np.empty(ROOM_BYTES, np.uint8)
        sock = transport.get_extra_info("socket")
        encrypted = transport.get_extra_info("ssl_object") is not None
        self._fd = -1 if sock is None or encrypted else sock.fileno()

    def answer(self, step: PlainStep, inbox: np.ndarray, start: int, end: int) -> int:
        """Answer the plain frames at the beginning of inbox[start:end]; how many bytes they have."""
        answered, made = step.step(inbox, start, end, self._answers, self._peer, self._from_server)
        if made:
            self._coalescer.flush()
            self._send(made)
        return answered

    def _send(self, count: int) -> None:
        transport = self._transport
        if transport.is_closing():
            return
        sent = 0
        if self._fd >= 0 and transport.get_write_buffer_size() == 0:
            sent = send(self._fd, self._answers, count)
        if sent < count:
            transport.write(memoryview(self._answers)[sent:count])
