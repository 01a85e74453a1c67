"""Dumps that a server takes: the pieces of a shard that it is to hold, in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable

from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.transfer import Joining
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, unpack_arrays
from dps.engine.wire.headers import DumpPiece
from dps.engine.wire.protocols import RoleConnection
from dps.errors import DPSError, FencedError

__all__ = ["Dumps"]


class Dumps:
    """The dumps that come to server `number`; `table_of` gives the table of a frame, `directory` the place of files."""

    def __init__(self, number: int, directory: str | None, table_of: Callable[[Header], ServerTable]):
        self._number, self._directory, self._table_of = number, directory, table_of

    def take(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """A piece of a dump of a shard that this server is to hold: its beginning, rows, or its end."""
        table, piece = self._table_of(header), DumpPiece.of(header)
        meta, arrays = unpack_arrays(piece.text_bytes, body)
        replica = table.replicas.get(piece.shard)
        if piece.content == 0:
            if piece.epoch <= table.elsewhere.get(piece.shard, -1):  # it is late: the server is not to join any more
                raise FencedError(f"server {self._number} no longer takes shard {piece.shard} of epoch {piece.epoch}")
            if replica is not None and (not replica.joining or piece.epoch < replica.fence):
                raise DPSError(f"server {self._number} does not begin shard {piece.shard} anew at {piece.epoch}")
            joining = Joining(table.spec, piece.shard, self._directory)
            joining.begin(meta, [array.copy() for array in arrays])
            replica = table.replicas[piece.shard] = Replica(table.spec, piece.shard, joining)
            replica.joining, replica.fence = True, piece.epoch
        elif replica is None or not replica.joining or piece.epoch < replica.fence:
            raise DPSError(f"server {self._number} does not wait for shard {piece.shard} of {table.spec.name!r}")
        elif piece.content == 1:
            replica.shard.add(meta, arrays)
        else:
            replica.shard, replica.joining = replica.shard.finish(), False
        connection.reply(Header(frames.OK, request=header.request))
