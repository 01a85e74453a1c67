"""Autoscaling procedures: the number of servers follows the load. `coordination/autoscaling.py` has the rule. Pure.

They change the number as `ps.scale` does, on the scheduler's loop, so autoscaling outlives the driver that asked for
it. At a fixed interval they read the load that servers have reported with their heartbeats. They decide only when
nothing is unfinished: every server is up, every shard has its replicas and none is moving, no table is being made, and
no checkpoint is being written. Because otherwise the load of a shard that moves may count twice or not at all, and a
checkpoint would be begun anew with each shard that moves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

import msgspec

from dps.engine.controller.failover import Membership
from dps.engine.controller.placement_rest import PlacementRest
from dps.engine.controller.procedures import Ask, InEndpoint, Procedure, Sleep, Uninterrupted
from dps.engine.coordination.autoscaling import AutoscalingRule, ServerLoad
from dps.engine.telemetry.snapshot import AdaptStatus
from dps.engine.wire.messages import AdaptRule

__all__ = ["AutoscalingProcedures", "LoadReports", "ScalableServers"]

logger = logging.getLogger(__name__)


class ScalableServers(Protocol):
    """The servers, as far as autoscaling needs them."""

    @property
    def wanted(self) -> int: ...

    @property
    def settled(self) -> bool: ...

    def spares(self) -> list[str]: ...

    def unused(self) -> int | None:
        """How many of the spares no parameter server uses; None where servers share workers with ordinary tasks."""
        ...

    def scale(self, servers: int) -> object:
        """It may wait."""
        ...


class LoadReports(Protocol):
    """What the servers have reported of their load."""

    def now(self) -> float:
        """Seconds, as `loads` takes them."""
        ...

    def loads(self, since: float) -> dict[int, tuple[float, float]]:
        """By server: the fraction of its time that it works, and the bytes that it holds, if reported since then."""
        ...


class AutoscalingProcedures:
    """How the number of servers follows the load.

    Parameters
    ----------
    membership : Membership
        Which servers hold which shards. The endpoint's thread owns it and the reports.
    limit : callable
        Bytes that each server may have in use.
    busy : callable
        Whether a checkpoint is being taken or restored: meanwhile, the number stays.
    copies : int
        Replicas of a shard, in tables that are made later.
    """

    def __init__(
        self,
        membership: Membership,
        reports: LoadReports,
        servers: ScalableServers,
        limit: Callable[[], float],
        busy: Callable[[], bool],
        copies: int,
    ):
        self.membership = membership
        self._reports = reports
        self._servers = servers
        self._limit = limit
        self._busy = busy
        self._copies = copies
        self.rule: AutoscalingRule | None = None  # the rule that is followed
        self.followed: AdaptRule | None = None  # rule that the driver gave
        self.memory: float | None = None  # bytes that each server may have in use; None: what `limit` says
        self.why = ""  # the reason of the last decision
        # How many workers for servers there are, and should be; None where the last look has led to no decision.
        self.workers: int | None = None
        self.workers_wanted: int | None = None
        self._rest = PlacementRest(membership, reports.now)

    def begin(self, followed: AdaptRule) -> Procedure[None]:
        """The procedure that follows the load, in place of an earlier rule."""
        most = math.inf if followed.maximum is None else followed.maximum
        self.rule = AutoscalingRule(followed.minimum, most, followed.wait_count, followed.busy)
        self.followed = followed
        self.memory = followed.memory
        self.why = "not looked yet"
        return self.follow(self.rule, followed.interval)

    def end(self) -> AdaptRule | None:
        """Follow the load no more: the number stays. Returns what :meth:`begin` was given, or None."""
        followed, self.followed = self.followed, None
        self.rule = None
        return followed

    def status(self, servers: int) -> AdaptStatus | None:
        """The rule and its last decision, also as a line; None where no rule is followed. So many servers are up."""
        rule, why = self.followed, self.why
        if rule is None:
            return None
        limits = f"{rule.minimum} or more" if rule.maximum is None else f"{rule.minimum} to {rule.maximum}"
        text = f"adapt: {limits}, now {servers}: {why}"
        status = AdaptStatus(servers=servers, why=why, text=text, **msgspec.structs.asdict(rule))
        return msgspec.structs.replace(status, workers=self.workers, workers_wanted=self.workers_wanted)

    def follow(self, rule: AutoscalingRule, interval: float) -> Procedure[None]:
        """Follow the load until another rule, or none, is followed."""
        failed = ""
        while self.rule is rule:  # because `asyncio.wait_for` may swallow the cancellation of this task
            try:
                yield from self.tick(rule)
                failed = ""
            except Exception as error:
                self.why = f"{type(error).__name__}: {error}"
                if self.why != failed:  # so that each failure is logged once
                    failed = self.why
                    logger.warning(
                        "parameter server %r: its number of servers stays: %s", self.membership.session, self.why
                    )
            yield Sleep(interval)

    def tick(self, rule: AutoscalingRule) -> Procedure[None]:
        self.workers = self.workers_wanted = None  # because something may have changed since the last decision
        if self._busy():  # no shard has moved, so earlier samples still count
            self.why = "waits for a checkpoint"
            return
        load: ServerLoad | None = (yield InEndpoint(self._load)) if self._servers.settled else None
        if load is None:
            self.why = "waits for servers, shards and reports on their way"
            rule.restart()
            return
        unused = self._servers.unused()
        about = {"spare": len(self._servers.spares()), "unused": unused or 0}
        load = load._replace(limit=self.memory or self._limit(), **about)
        servers, self.why, announce, workers = rule.decide(load)
        if unused is not None:
            self.workers, self.workers_wanted = load.servers + load.spare, workers
        if servers != load.servers:
            text = f"adapt: {load.servers} -> {servers} servers, {self.why}"
            yield InEndpoint(self.membership.note, (text, logging.INFO))
        elif announce:
            yield InEndpoint(self.membership.note, (f"adapt: {self.why}",))
        # More servers may be wanted than there are workers for, and then more than the maximum.
        if servers != load.servers or self._servers.wanted > max(servers, rule.maximum):
            yield Uninterrupted(self._scale(rule, servers))  # because half a change must not remain

    def _scale(self, rule: AutoscalingRule, servers: int) -> Procedure[None]:
        if self.rule is rule:  # unless a user has set a number meanwhile
            yield Ask(self._servers.scale, (servers,))

    def _load(self) -> ServerLoad | None:
        """The load of the servers; None while a server comes or goes, or a shard moves. In the endpoint's thread."""
        membership, servers = self.membership, self.membership.servers
        since = self._rest.since()
        loads = self._reports.loads(since)  # later reports only: an earlier one may count a moved shard twice
        if not servers or servers.keys() != loads.keys():
            return None
        copies = max(self._copies, *(spec["copies"] for spec in membership.specs.values()), 1)
        places = [p for places in membership.places.values() for p in places]
        busy, held = (sum(values) for values in zip(*loads.values(), strict=True))
        return ServerLoad(len(servers), busy, held, copies=copies, pieces=max(1, sum(len(p.chain) for p in places)))
