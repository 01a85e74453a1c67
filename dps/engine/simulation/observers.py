"""Observers: what a test may watch in a simulated cluster, to say afterwards what must be true of it."""

from __future__ import annotations

from dps.engine.coordination.journal import Record
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request
from dps.engine.wire.messages import Placement

__all__ = ["Observer"]


class Observer:
    """The base of observers. The simulation calls each method when the event happens; here they do nothing."""

    def table_made(self, spec: TableSpec) -> None:
        """The controller makes a table; `spec` has its number."""

    def answered(self, request: Request, server: str) -> None:
        """A client or trainer has received the answer to a request from the party `server`."""

    def server_started(self, number: int) -> None:
        """The controller begins to start another server."""

    def server_closed(self, number: int, wanted: bool) -> None:
        """The controller closes a server; `wanted`: although it was not to be emptied."""

    def scaled(self, servers: int, wanted: int) -> None:
        """Autoscaling wants so many servers; `servers`: how many there are."""

    def primary_changed(self, table: int, shard: int, old: str | None, new: str | None, stepped_down: bool) -> None:
        """The primary of a shard is the server `new` from now on, and not `old`; None where there is none.

        `stepped_down`: whether the old primary has handed over itself. Otherwise it was given up.
        """

    def placement_adopted(self, server: int, placement: Placement) -> None:
        """A server is about to adopt a placement, which is newer than the one that it has."""

    def record_committed(self, record: Record) -> None:
        """A controller knows that a record of its journal is committed; its effects follow."""
