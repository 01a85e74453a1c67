"""Session: the controller's parts for one parameter server, put together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

from dps.engine.controller.actors import ServerActors
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.failover import Membership
from dps.engine.controller.resharding_procedures import ReshardingProcedures
from dps.engine.controller.run_procedures import RunProcedures
from dps.engine.controller.runs import Runs
from dps.engine.daskapi.cordon import Cordon, is_at_work, task_of
from dps.engine.daskapi.protocols import DaskScheduler
from dps.engine.telemetry.monitor import Monitor
from dps.engine.telemetry.reports import ReceivedReport
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.handshake import new_secret
from dps.engine.wire.messages import AdaptRule, CheckpointSchedule
from dps.engine.wire.protocols import EndpointCaller

__all__ = ["Session"]

logger = logging.getLogger(__name__)


class Session:
    """One parameter server, as the controller has it.

    Parameters
    ----------
    copies : int
        Replicas of a shard, in tables that do not say how many.
    endpoint : Endpoint
        The controller's. Its thread owns the membership, the runs and the monitor.
    serving : callable
        Gives the workers of all servers in this cluster, once for each server.
    on_event : callable
        Called with the text of each event, in the endpoint's thread.
    version : str, optional
        The driver's version of dps, for error messages.
    """

    def __init__(
        self,
        name: str,
        copies: int,
        endpoint: Endpoint,
        *,
        scheduler: DaskScheduler,
        cordon: Cordon,
        actor: type,
        in_endpoint: EndpointCaller,
        serving: Callable[[], list[str]],
        on_event: Callable[[str], None],
        announced: set[str],
        version: str | None = None,
    ):
        self.name, self.copies = name, copies
        self.opened = asyncio.Event()  # set when the servers are up, or the session was given up
        self.secret, self.servers_secret = new_secret(), new_secret()
        self.in_endpoint = in_endpoint
        self.retiring: asyncio.Task[None] | None = None  # tells the servers which tasks have ended
        self.membership = Membership(endpoint, name, on_event=on_event, on_report=self._on_report)
        self.runs = Runs(name, note=self.membership.note, task_of=partial(task_of, scheduler), at_work=is_at_work)
        args = (name, (self.secret, self.servers_secret), (endpoint.host, endpoint.port))
        self.actors = actors = ServerActors(
            scheduler, cordon, self.membership, actor, args, in_endpoint, serving, version
        )
        clock = asyncio.get_running_loop().time
        self.ends = RunProcedures(self.membership, self.runs, actors.up, clock)
        self.carry_out = actors.executor.run
        checkpointing = asyncio.Lock()
        self.checkpoints = CheckpointProcedures(
            self.runs,
            self.membership,
            actors.up,
            actors.tables,
            actors.changing,
            checkpointing,
            clock=time.monotonic,
            wall_clock=time.time,
            session=secrets.token_hex(8),
        )
        locks = (checkpointing, actors.changing)
        self.resharding = ReshardingProcedures(self.membership, actors.up, actors.tables, locks, time.monotonic)
        self.monitor = Monitor(
            self.runs,
            self.membership,
            self.runs.now,
            wanted=lambda: actors.wanted,
            checkpoints=self.checkpoints.status,
            adapt=lambda: self.autoscaling.status(len(actors.up())),
            announced=announced,
        )
        self.autoscaling = AutoscalingProcedures(
            self.membership, self.monitor, actors, actors.memory_limit, checkpointing.locked, copies
        )
        self._scheduled: asyncio.Future | None = None  # takes checkpoints at intervals
        self._adapting: asyncio.Future | None = None  # follows the load

    def _on_report(self, server: int, report: ReceivedReport) -> None:
        """The monitor, which reads the membership and so is made after it, takes the reports of servers."""
        self.monitor.heartbeat(server, report)

    def schedule_checkpoints(self, schedule: CheckpointSchedule | None) -> None:
        """Take checkpoints at intervals, in place of an earlier schedule; None: no more."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled = None
        if schedule is not None:
            self._scheduled = asyncio.ensure_future(self.carry_out(self.checkpoints.repeat(schedule)))

    def adapt(self, rule: AdaptRule) -> None:
        """Let the number of servers follow the load from now on, in place of an earlier rule."""
        following = self.autoscaling.begin(rule)
        if self._adapting is not None:
            self._adapting.cancel()
        self._adapting = asyncio.ensure_future(self.carry_out(following))

    def end_adapting(self) -> AdaptRule | None:
        if self._adapting is not None:
            self._adapting.cancel()
        self._adapting = None
        return self.autoscaling.end()

    def stop(self) -> None:
        """The parameter server is being closed: take no more checkpoints, and follow no load."""
        self.checkpoints.closed = True
        self.schedule_checkpoints(None)
        self.end_adapting()

    async def settle(self, keep: bool | None) -> None:
        """A run has ended, or (None) only tasks: see `RunProcedures.settle`."""
        await self.carry_out(self.ends.settle(keep))

    async def retire_tasks(self) -> None:
        """Tell the servers which tasks have ended, so that they refuse ops of these origins from now on."""
        try:
            await self.settle(keep=None)
        except Exception as error:  # a late attempt is not refused then, but its pushes still count once
            logger.warning("parameter server %r: not all servers know which tasks have ended: %s", self.name, error)
        finally:
            self.retiring = None
