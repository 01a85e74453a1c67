"""Handovers: primaries that are asked to hand their shard over, so that it moves or its chain gets another order.

Everything here happens in the thread of the controller's endpoint, as `failover.py` does, to whose placements it
belongs. A primary steps down in an epoch, and says so (`SteppedDown`) when its successor has every op. A primary that
could not do so in time goes on serving, and is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dps import config
from dps.engine.coordination.placement import Place, PlacementStep

__all__ = ["Handovers"]

# A primary that could not hand over serves for so many times `dps.timeouts.step-down` before it is asked again.
BACK_OFF_FACTOR = 3.0


class HandoverOwner(Protocol):
    """The parts of the membership that handovers use: see :class:`dps.engine.controller.failover.Membership`."""

    places: dict[str, list[Place]]
    epoch: int

    @property
    def note(self) -> Callable[[str], None]: ...
    def set_place(self, name: str, shard: int, new: Place) -> None: ...


class Handovers:
    """The handovers of one parameter server: see the module's docstring."""

    def __init__(self, owner: HandoverOwner):
        self._owner = owner
        # (table, shard) -> the step for which its primary is to hand over, the epoch since when, and until when
        self._steps: dict[tuple[str, int], tuple[PlacementStep, int, float]] = {}
        # (table, shard) -> a primary that could not hand over, and until when it is not asked again
        self._backing_off: dict[tuple[str, int], tuple[int, float]] = {}

    def begin(self, step: PlacementStep, now: float) -> None:
        """Ask the primary of a shard to step down."""
        p, seconds = self._owner.places[step.table][step.shard], config.seconds("step-down")
        self._owner.set_place(step.table, step.shard, p._replace(stepping_down=True))
        self._steps[step.table, step.shard] = step, self._owner.epoch + 1, now + seconds

    def stepped_down(self, name: str, shard: int, p: Place, server: int, epoch: int) -> PlacementStep | None:
        """The step for which a primary has stepped down in an epoch; None if it was not asked to."""
        step, since, _ = self._steps.get((name, shard), (None, 0, 0.0))
        if step is None or not p.stepping_down or p.chain[:1] != (server,) or epoch < since:
            return None
        del self._steps[name, shard]
        return step

    def end_late(self, now: float) -> bool:
        """Let primaries that could not hand over in time go on serving; returns whether there is one."""
        late = [key for key, (_, _, until) in self._steps.items() if now > until]
        changed = False
        for name, shard in late:
            del self._steps[name, shard]
            p = self._owner.places[name][shard]
            if not p.stepping_down:  # another server has become the primary meanwhile
                continue
            patience = config.seconds("step-down")
            self._owner.set_place(name, shard, p._replace(stepping_down=False))
            self._backing_off[name, shard] = p.chain[0], now + BACK_OFF_FACTOR * patience
            self._owner.note(
                f"server {p.chain[0]} could not hand over shard {shard} of table {name!r} within {patience:g} s "
                f"(dps.timeouts.step-down): it goes on serving, and is asked again in {BACK_OFF_FACTOR * patience:g} s"
            )
            changed = True
        return changed

    def backing_off(self, now: float) -> set[tuple[str, int]]:
        """The shards whose primary is not asked to hand over now, because it has just failed to do so."""
        self._backing_off = {
            (name, shard): (primary, until)
            for (name, shard), (primary, until) in self._backing_off.items()
            if now < until and self._owner.places[name][shard].chain[:1] == (primary,)
        }
        return set(self._backing_off)

    def forget(self, name: str) -> None:
        """Forget what was asked of a table's primaries."""
        self._steps = {key: value for key, value in self._steps.items() if key[0] != name}
        self._backing_off = {key: value for key, value in self._backing_off.items() if key[0] != name}
