"""Readers of keys that went: a server tells which rows have gone by themselves lately, and why (`state/gone.py`).

The answer waits until the copies have confirmed all that the shard has done so far. If it did not, a reader could learn
of a row that went on this server alone. Should that server die then, the row would be there on the next primary, and
the number of its key would go to another key, over which the reader would pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.core.requests.forwards import Forwards
from dps.engine.server.tables import ServerTable
from dps.engine.state.gone import GonePiece
from dps.engine.wire.frames import Header, padded
from dps.engine.wire.headers import Gone, GoneAnswer
from dps.engine.wire.protocols import RoleConnection
from dps.errors import DPSError, InputError, LimitError, ProtocolError

__all__ = ["GoneReaders"]

BYTES_OF_KEY = 9  # the key, and why it went


class GoneReaders:
    """The answers of one server to readers of keys that went.

    `leased` gives the table of a request, and `refuse` tells a peer that its request failed: see `ServerRole`.
    """

    def __init__(
        self,
        ops: Forwards,
        leased: Callable[[Header], ServerTable],
        refuse: Callable[[RoleConnection, int, DPSError], None],
    ):
        self._ops, self._leased, self._refuse = ops, leased, refuse

    def answer(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """Answer a GONE, when the copies of its shard know of all that went until now."""
        request, table = Gone.of(header), self._leased(header)
        replica = table.replica(request.shard, primary=True)
        gone = replica.shard.gone
        if len(body):
            raise ProtocolError(f"a request for keys that went has a body of {len(body)} bytes, and needs none")
        if gone is None:
            raise InputError(
                f"table {table.spec.name!r} does not remember the keys of rows that went: make it with remember=True"
            )
        if not 1 <= request.limit <= table.frame_limit // BYTES_OF_KEY:
            raise LimitError(f"{request.limit} keys that went do not fit a frame of dps.limits.frame bytes")
        owed, stop = OwedAnswer(), gone.count

        def reply() -> None:
            if owed.error is not None:
                self._refuse(connection, header.request, owed.error)
            elif not connection.transport.is_closing():
                send(connection, header.request, gone.piece(request.number, request.limit, stop), stop)

        self._ops.follow(replica, owed)
        owed.then(reply)


def send(connection: RoleConnection, request: int, piece: GonePiece, stop: int) -> None:
    body = np.zeros(padded(BYTES_OF_KEY * len(piece.keys)), np.uint8)
    keys = 8 * len(piece.keys)
    body[:keys] = piece.keys.view(np.uint8)
    body[keys : keys + len(piece.whys)] = piece.whys.view(np.uint8)
    answer = GoneAnswer(len(piece.keys), piece.first, stop).header(request, len(body))
    connection.reply(answer, body.tobytes())
