"""What was done to even the load of servers out, as typed, frozen values for drivers and pages."""

from __future__ import annotations

import msgspec

from dps.engine.wire.structs import read_annotations

__all__ = ["RebalanceReport", "RebalancingStatus", "ReplacedShard", "SplitTable"]


class RebalancingStatus(msgspec.Struct, frozen=True):
    """Whether shards follow their load by themselves, and what was done so far, also by :meth:`rebalance`."""

    on: bool  # the setting `dps.rebalancing`
    moves: int = 0  # shards that were to move
    splits: int = 0  # tables that were split
    why: str = ""  # the reason of the last decision, or why there was none

    @property
    def text(self) -> str:
        """What was done, in one line; empty where nothing was."""
        done = f"shards moved by their load: {self.moves}, tables split: {self.splits}"
        return "" if not (self.moves or self.splits) else f"{done}; {self.why}" if self.on else done


class ReplacedShard(msgspec.Struct, frozen=True):
    """A shard that has other servers than before, the primary first."""

    table: str
    shard: int
    before: list[int]
    after: list[int]


class SplitTable(msgspec.Struct, frozen=True):
    """A table that was split."""

    table: str
    before: int  # shards
    after: int


class RebalanceReport(msgspec.Struct, frozen=True):
    """What :meth:`dps.ParameterServer.rebalance` has done, and how busy the servers were before and after.

    Examples
    --------
    >>> moved = ReplacedShard("w", 3, [0], [1])
    >>> print(RebalanceReport([moved], [], {0: 0.6, 1: 0.1}, {0: 0.36, 1: 0.34}, "in balance"))
    shard 3 of table 'w': [0] -> [1]
    servers work (of a core): 0: 0.60 -> 0.36, 1: 0.10 -> 0.34
    in balance
    """

    moves: list[ReplacedShard]
    splits: list[SplitTable]
    before: dict[int, float]  # server -> part of its time that it worked
    after: dict[int, float]
    why: str  # why nothing more was done

    def to_dict(self) -> dict[str, object]:
        """The same as plain values, as JSON has them."""
        values: dict[str, object] = msgspec.to_builtins(self)
        return values

    def __str__(self) -> str:
        lines = [f"table {each.table!r}: {each.before} -> {each.after} shards" for each in self.splits]
        lines += [f"shard {each.shard} of table {each.table!r}: {each.before} -> {each.after}" for each in self.moves]
        loads = [f"{n}: {busy:.2f} -> {self.after.get(n, 0.0):.2f}" for n, busy in sorted(self.before.items())]
        lines += [f"servers work (of a core): {', '.join(loads)}"] if loads else []
        return "\n".join([*lines, self.why])


read_annotations(globals())
