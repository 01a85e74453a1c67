"""ReadGate: a trainer waits here before it reads a table that has a staleness of its own.

The rule is in `coordination/clock.py`. A trainer may read at once where it knows of a clock that all others have
reached and that suffices: the answers to its ticks say one. Only where that is too low it asks the controller, with
AWAIT, and waits for the answer. So tables without a staleness of their own cost nothing, and the others nothing once
the trainers are as close together as the table demands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dps.engine.coordination.clock import may_serve, tightest
from dps.engine.state.ops import TableSpec
from dps.engine.training.rows_ahead import Standing
from dps.errors import ClockTimeoutError

__all__ = ["ReadGate"]


class ReadStanding(Standing, Protocol):
    """What a trainer's gate knows of the others."""

    read_clock: float


class ReadGate:
    """The gate of one trainer; its session has the reads go through it, under the session's lock.

    `await_lowest` asks the controller, and returns when all other trainers have reached a clock, or when the staleness
    of a table has changed.
    """

    def __init__(self, standing: ReadStanding, await_lowest: Callable[[int], None]):
        self._standing, self._await_lowest = standing, await_lowest

    def is_open(self, spec: TableSpec) -> bool:
        """Whether the trainer may read the table at its clock, as far as it knows now."""
        standing = self._standing
        clock = standing.client.session.own.clock
        return may_serve(standing.read_clock, clock, tightest(standing.staleness, spec.staleness))

    def wait(self, table: str) -> None:
        """Return when the trainer may read the table at its clock.

        Raises ClockTimeoutError where that takes longer than ``dps.timeouts.clock``.
        """
        session = self._standing.client.session
        while not self.is_open(spec := session.ready(table).spec):
            bound = tightest(self._standing.staleness, spec.staleness)
            try:
                self._await_lowest(int(session.own.clock - bound))
            except ClockTimeoutError as error:
                raise ClockTimeoutError(f"table {table!r} has staleness {bound:g}: {error}") from None
