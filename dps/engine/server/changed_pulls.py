"""Pulls with the flag CHANGED: a trainer names the fingerprints of rows that it has, and gets the rows that differ.

A row is the trainer's row if it has the same bits. So the server remembers nothing of what it has sent, and nothing of
what has changed since: a deleted row, one that a function has changed, and one of a server that has taken over are
compared as any other. `core/fingerprints.pyx` says how seldom two rows that differ count as the same. The pull is one
like others in all else: the server has to be the primary, with a lease, and closes the sums of earlier clocks first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dps.engine.core.fingerprints import fingerprints
from dps.engine.core.requests.service import Service
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable, TableRequest
from dps.engine.telemetry.server_meter import ServerMeter
from dps.engine.wire import frames
from dps.engine.wire.changed_rows import changed_rows_of
from dps.engine.wire.frames import Header
from dps.engine.wire.protocols import RoleConnection
from dps.engine.wire.rights import Handler
from dps.errors import ProtocolError

__all__ = ["ChangedPulls", "changed_since"]

PIECE_ROWS = 1 << 14  # whose values are compared at a time


class ChangedPulls:
    """The answers of one server to pulls of rows that have changed.

    Parameters
    ----------
    leased : callable
        The table of a frame, if no other server can have become the primary of its shards here.
    close_before : callable
        Closes the sums of a replica before a clock.
    meters : ServerMeter
    service : Service
        Counts requests.
    """

    def __init__(
        self,
        leased: Callable[[Header], ServerTable],
        close_before: Callable[[Replica, int], None],
        meters: ServerMeter,
        service: Service,
    ):
        self._leased, self._close_before, self._meters, self._service = leased, close_before, meters, service

    def first(self, handler: Handler) -> Handler:
        """The handler of pulls, for those of all rows that are named; those of changed rows are answered here."""

        def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
            (self._answer if header.flags & frames.CHANGED else handler)(connection, header, body)

        return handle

    def _answer(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self._service.requests += 1
        began, table = self._meters.clock(), self._leased(header)
        request = table.cut(header, body)
        if request.used + 8 * header.count != len(body):
            raise ProtocolError(f"a pull of {header.count} rows that have changed has a body of {len(body)} bytes")
        if table.spec.aggregate is not None:
            for part in request.parts:
                self._close_before(part.replica, header.clock)
        changed, rows = changed_since(table, request, np.frombuffer(body, np.int64, header.count, request.used))
        answer = changed_rows_of(changed, rows)
        connection.reply(Header(frames.OK, request=header.request, count=len(rows), body=len(answer)), answer)
        self._meters.compared(table.meter, request.parts, header, len(answer), began)


def changed_since(table: ServerTable, request: TableRequest, prints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of a pull have other fingerprints than those named, bool[m]; and these rows."""
    spec, found = table.spec, list[np.ndarray]()
    changed = np.ones(len(prints), np.bool_)
    for replica, keys, _, first, last in request.parts:
        assert keys is not None
        for a in range(first, last, PIECE_ROWS):
            b = min(a + PIECE_ROWS, last)
            rows = np.empty((b - a, spec.dim), table.dtype)
            replica.shard.pull(keys[a - first : b - first], rows)
            changed[a:b] = fingerprints(rows, spec.salt) != prints[a:b]
            found.append(rows[changed[a:b]])
    return changed, np.concatenate(found) if found else np.empty((0, spec.dim), table.dtype)
