"""Dumps that a server takes: the pieces of a shard that it is to hold, in the order in which they come.

The server confirms a piece after a rest, so that requests of clients keep their part of its time: see `pace.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from dps.engine.server.pace import DumpPace
from dps.engine.server.replicas import BEGIN, ROWS, Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.transfer import Joining
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, unpack_arrays
from dps.engine.wire.headers import DumpPiece
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.errors import DPSError, FencedError

__all__ = ["Dumps"]


class Dumps:
    """The dumps that come to server `number`; `table_of` gives the table of a frame, `directory` the place of files."""

    def __init__(
        self,
        endpoint: RoleEndpoint,
        number: int,
        directory: str | None,
        table_of: Callable[[Header], ServerTable],
        pace: DumpPace,
    ):
        self._endpoint, self._pace = endpoint, pace
        self._number, self._directory, self._table_of = number, directory, table_of

    def take(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """A piece of a dump of a shard that this server is to hold: its beginning, rows, or its end."""
        table, piece = self._table_of(header), DumpPiece.of(header)
        meta, arrays = unpack_arrays(piece.text_bytes, body)
        replica, rest = table.replicas.get(piece.shard), 0.0
        if piece.content == BEGIN:
            if piece.epoch <= table.elsewhere.get(piece.shard, -1):  # it is late: the server is not to join any more
                raise FencedError(f"server {self._number} no longer takes shard {piece.shard} of epoch {piece.epoch}")
            if replica is not None and (not replica.joining or piece.epoch < replica.fence):
                raise DPSError(f"server {self._number} does not begin shard {piece.shard} anew at {piece.epoch}")
            joining = Joining(table.spec, piece.shard, self._directory)
            joining.begin(meta, [array.copy() for array in arrays])
            replica = table.replicas[piece.shard] = Replica(table.spec, piece.shard, joining)
            replica.joining, replica.fence, replica.so_far = True, piece.epoch, joining.so_far
        elif replica is None or not replica.joining or piece.epoch < replica.fence:
            raise DPSError(f"server {self._number} does not wait for shard {piece.shard} of {table.spec.name!r}")
        elif piece.content == ROWS:
            with self._pace.work(self._endpoint.now):
                replica.shard.add(meta, arrays)
            replica.so_far = replica.shard.so_far
            now = self._endpoint.now()
            rest = self._pace.rested_at(now) - now
        else:
            replica.shard, replica.joining, replica.so_far = replica.shard.finish(), False, None
        confirmation = Header(frames.OK, request=header.request)
        if rest > 0:
            self._endpoint.later(rest, connection.reply, confirmation)
        else:
            connection.reply(confirmation)
