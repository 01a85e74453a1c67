"""Reads that wait: a trainer reads a table that has a staleness of its own when the others are near enough."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dps.engine.client.requests import TableRoute
from dps.engine.state.ops import TableSpec

if TYPE_CHECKING:
    from dps.engine.client.session import ClientSession

__all__ = ["TableGate", "readable"]


class TableGate(Protocol):
    """It holds a trainer's reads back until the other trainers are near enough: `training/read_gate.py` has one."""

    def is_open(self, spec: TableSpec) -> bool:
        """Whether the table may be read at once."""

    def wait(self, table: str) -> None:
        """Return when the table may be read."""


def readable(session: ClientSession, table: str) -> TableRoute:
    """The route of a table that may be read now.

    Before, a trainer sends its own pushes that wait to be summed, and waits for the others, if the table asks it to.
    """
    route = session.ready(table)
    if session.merged is not None and route.spec.wire.merge:
        session.merged.show(table)  # because the trainer sees its own pushes
    if route.spec.staleness is None or session.gate is None:
        return route
    session.gate.wait(table)
    return session.ready(table)
