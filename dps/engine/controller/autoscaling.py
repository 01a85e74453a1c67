"""Autoscaler: carries out what `autoscaling_procedures.py` says, on the scheduler's loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dps.engine.controller.actors import ServerActors
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.checkpoints import Checkpointer
from dps.engine.controller.executor import Executor
from dps.engine.controller.failover import Membership
from dps.engine.coordination.autoscaling import AutoscalingRule
from dps.engine.telemetry.monitor import Monitor
from dps.engine.telemetry.snapshot import AdaptStatus
from dps.engine.wire.messages import AdaptRule

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
        self._followed: AdaptRule | None = None  # what `begin` was given
        self._task: asyncio.Future | None = None

    @property
    def why(self) -> str:
        """The reason of the last decision."""
        return self._procedures.why

    @property
    def followed(self) -> AdaptRule | None:
        """The rule that is followed, if there is one."""
        return self._followed

    def begin(self, followed: AdaptRule) -> None:
        """Follow the load from now on, in place of an earlier rule."""
        most = math.inf if followed.maximum is None else followed.maximum
        rule = AutoscalingRule(followed.minimum, most, followed.wait_count, followed.busy)
        self.end()
        procedures = self._procedures
        procedures.rule, procedures.memory, procedures.why = rule, followed.memory, "not looked yet"
        self._followed = followed
        self._task = asyncio.ensure_future(self._executor.run(procedures.follow(rule, followed.interval)))

    def end(self) -> AdaptRule | None:
        """Follow the load no more: the number stays. Returns what :meth:`begin` was given, or None."""
        if self._task is not None:
            self._task.cancel()
        followed, self._followed = self._followed, None
        self._task = self._procedures.rule = None
        return followed

    def describe(self) -> AdaptStatus | None:
        """The rule and its last decision, also as a line; None where no rule is followed."""
        rule, now, why = self._followed, len(self.actors.up()), self.why
        if rule is None:
            return None
        limits = f"{rule.minimum} or more" if rule.maximum is None else f"{rule.minimum} to {rule.maximum}"
        text = f"adapt: {limits}, now {now}: {why}"
        return AdaptStatus(servers=now, why=why, text=text, **msgspec.structs.asdict(rule))

    async def tick(self, rule: AutoscalingRule) -> None:
        """Read the load, have the rule decide, and carry that out."""
        await self._executor.run(self._procedures.tick(rule))

    def _limit(self) -> float:
        """Bytes that each server may have in use: the smallest memory limit of their workers; infinite without one."""
        workers = [self.actors.scheduler.workers.get(server.worker) for server in self.actors.servers()]
        return min((ws.memory_limit for ws in workers if ws is not None and ws.memory_limit), default=math.inf)
