"""Autoscaler: carries out what `autoscaling_procedures.py` says, on the scheduler's loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from dps.controller.actors import ServerActors
from dps.controller.autoscaling_procedures import AutoscalingProcedures
from dps.controller.checkpoints import Checkpointer
from dps.controller.executor import Executor
from dps.controller.failover import Membership
from dps.coordination.autoscaling import AutoscalingRule
from dps.telemetry.monitor import Monitor

__all__ = ["Autoscaler"]


class Autoscaler:
    """The number of servers follows the load.

    Parameters
    ----------
    membership, monitor
        Which servers hold which shards, and how loaded they are. The endpoint's thread owns both.
    actors : ServerActors
        Adds and retires servers.
    checkpointer : Checkpointer
        While it takes a checkpoint, the number stays.
    in_endpoint : callable
        Runs a function in the endpoint's thread.
    copies : int
        Replicas of a shard, in tables that are made later.
    """

    def __init__(
        self,
        membership: Membership,
        monitor: Monitor,
        actors: ServerActors,
        checkpointer: Checkpointer,
        in_endpoint: Callable[..., Awaitable[Any]],
        copies: int,
    ):
        self.membership, self.monitor, self.actors, self.checkpointer = membership, monitor, actors, checkpointer
        self._executor = Executor(in_endpoint)
        self._procedures = AutoscalingProcedures(
            membership, monitor, actors, self._limit, lambda: self.checkpointer.busy, copies
        )
        self._options: dict[str, Any] = {}
        self._task: asyncio.Future | None = None

    @property
    def why(self) -> str:
        """The reason of the last decision."""
        return self._procedures.why

    def begin(self, interval: float, memory: float | None, **rule: Any) -> None:
        """Follow the load from now on, in place of an earlier rule. `rule` are parameters of `AutoscalingRule`."""
        adaptive = AutoscalingRule(**rule)
        self.end()
        procedures = self._procedures
        procedures.rule, procedures.memory, procedures.why = adaptive, memory, "not looked yet"
        self._options = {**rule, "interval": interval, "memory": memory}
        self._task = asyncio.ensure_future(self._executor.run(procedures.follow(adaptive, interval)))

    def end(self) -> dict[str, Any] | None:
        """Follow the load no more: the number stays. Returns the arguments of :meth:`begin`, or None."""
        if self._task is not None:
            self._task.cancel()
        options = None if self._procedures.rule is None else self._options
        self._task = self._procedures.rule = None
        return options

    def describe(self) -> dict[str, Any] | None:
        """The rule and its last decision, as plain values and as a line; None where no rule is followed."""
        rule = self._procedures.rule
        if rule is None:
            return None
        least, most, now = rule.minimum, rule.maximum, len(self.actors.up())
        limits = f"{least} to {most}" if math.isfinite(most) else f"{least} or more"
        status = {**self._options, "maximum": most if math.isfinite(most) else None, "servers": now, "why": self.why}
        return status | {"text": f"adapt: {limits}, now {now}: {self.why}"}

    async def tick(self, rule: AutoscalingRule) -> None:
        """Read the load, have the rule decide, and carry that out."""
        await self._executor.run(self._procedures.tick(rule))

    def _limit(self) -> float:
        """Bytes that each server may have in use: the smallest memory limit of their workers; infinite without one."""
        workers = [self.actors.scheduler.workers.get(server.worker) for server in self.actors.servers()]
        return min((ws.memory_limit for ws in workers if ws is not None and ws.memory_limit), default=math.inf)
