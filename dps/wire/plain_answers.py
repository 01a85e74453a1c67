"""PlainAnswers: the answers to a peer's plain frames, which one compiled step makes of the bytes that have arrived.

The step (`dps.core.service.Service`) belongs to the role behind the endpoint. It leaves every frame that is not plain;
the connection hands that one to its handler. What the step has made leaves at once (`direct.py`). A step is made only
when the answers of the one before have left, so one buffer is enough.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dps.wire.direct import DirectWriter
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
    writer : DirectWriter
    from_server : bool
        The peer is a server, and no client.
    """

    def __init__(self, peer: object, writer: DirectWriter, from_server: bool):
        self._peer, self._writer, self._from_server = peer, writer, from_server
        self._answers = np.empty(ROOM_BYTES, np.uint8)

    def answer(self, step: PlainStep, inbox: np.ndarray, start: int, end: int) -> int:
        """Answer the plain frames at the beginning of inbox[start:end]; how many bytes they have."""
        answered, made = step.step(inbox, start, end, self._answers, self._peer, self._from_server)
        if made:
            self._writer.write(self._answers, made)
        return answered
