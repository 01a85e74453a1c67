"""Session: the controller's parts for one parameter server, put together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from functools import partial

import msgspec

from dps import config
from dps.engine.controller.actors import ServerActors
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.failover import TICK_SECONDS, Membership
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.journaling import FIRST_TERM, SessionJournal
from dps.engine.controller.rebalancing_procedures import RebalancingProcedures
from dps.engine.controller.resharding_procedures import ReshardingProcedures
from dps.engine.controller.run_procedures import RunProcedures
from dps.engine.controller.runs import Runs
from dps.engine.controller.session_record import CONTROLLER_BLOCK, RecordContent
from dps.engine.controller.takeover_procedures import Reports, go_on
from dps.engine.coordination.journal import Ballot
from dps.engine.daskapi.cordon import Cordon, is_at_work, task_of
from dps.engine.daskapi.protocols import DaskScheduler
from dps.engine.telemetry.monitor import Monitor
from dps.engine.telemetry.reports import ReceivedReport
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.handshake import new_secret
from dps.engine.wire.messages import AdaptRule, CheckpointSchedule
from dps.engine.wire.protocols import EndpointCaller
from dps.errors import ServerGoneError

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
    of_servers : (str, str), optional
        Those that clients and servers prove, where this controller takes over; by default, new ones.
    ballot : Ballot, optional
        The standing of a controller that takes over; by default, it begins anew.
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
        of_servers: tuple[str, str] | None = None,
        ballot: Ballot | None = None,
    ):
        self.name, self.copies = name, copies
        self.opened = asyncio.Event()  # set when the servers are up, or the session was given up
        self.secret, self.servers_secret = of_servers or (new_secret(), new_secret())
        self.term = FIRST_TERM if ballot is None else ballot.term  # the next controller has a higher one
        self.recovering = ballot is not None  # another controller's parameter server is not taken over yet
        ballot = ballot or Ballot(FIRST_TERM, secrets.token_hex(8))
        first = (ballot.term - FIRST_TERM) * CONTROLLER_BLOCK
        self.in_endpoint = in_endpoint
        self.retiring: asyncio.Task[None] | None = None  # tells the servers which tasks have ended
        self.membership = Membership(endpoint, name, on_event=on_event, on_report=self._on_report)
        self.runs = Runs(name, note=self.membership.note, task_of=partial(task_of, scheduler), at_work=is_at_work)
        self.runs.begin_after(first)
        self.interrupted_runs = InterruptedRuns(self.runs)
        args = (name, (self.secret, self.servers_secret), (endpoint.host, endpoint.port))
        self.actors = actors = ServerActors(
            scheduler, cordon, self.membership, actor, args, in_endpoint, serving, version, first + 1, self.commit
        )
        self.ends = RunProcedures(self.membership, self.runs, actors.up, asyncio.get_running_loop().time)
        self.carry_out = actors.executor.run
        checkpointing = asyncio.Lock()
        self.checkpoints = self._make_checkpoints(checkpointing)
        locks = asyncio.Lock(), (checkpointing, actors.changing)
        self.resharding = ReshardingProcedures(self.membership, actors.up, actors.tables, *locks, time.monotonic)
        self.monitor = Monitor(
            self.runs,
            self.membership,
            self.runs.now,
            wanted=lambda: actors.wanted,
            checkpoints=self.checkpoints.status,
            adapt=lambda: self.autoscaling.status(len(actors.up())),
            rebalancing=lambda: self.rebalancing.status(),
            announced=announced,
        )
        self.autoscaling = AutoscalingProcedures(
            self.membership, self.monitor, actors, actors.memory_limit, checkpointing.locked, copies
        )
        self.rebalancing = RebalancingProcedures(
            self.membership,
            self.monitor,
            actors,
            self.resharding,
            checkpointing.locked,
            asyncio.Lock(),
            enabled=partial(config.flag, "rebalancing"),
        )
        self.content = self._content(copies, endpoint)
        self.journal = self._journal(ballot)
        self.on_hold = False  # servers wait for another scheduler also when this one ends on purpose
        self._balancing: asyncio.Future | None = None  # lets shards follow the load
        self._scheduled: asyncio.Future | None = None  # takes checkpoints at intervals
        self._adapting: asyncio.Future | None = None  # follows the load

    def _make_checkpoints(self, checkpointing: asyncio.Lock) -> CheckpointProcedures:
        actors = self.actors
        return CheckpointProcedures(
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

    def _content(self, copies: int, endpoint: Endpoint) -> RecordContent:
        return RecordContent(
            self.membership,
            self.runs,
            (self.secret, self.servers_secret),
            (endpoint.host, endpoint.port),
            copies,
            lambda: self.actors.wanted,
            lambda: self.autoscaling.followed,
        )

    def _journal(self, ballot: Ballot) -> SessionJournal | None:
        """None: servers end with their scheduler."""
        if config.scheduler_grace() == 0:
            return None
        parts = self.membership, self.runs, self.content
        return SessionJournal(*parts, self.membership.endpoint.now, ballot, self.in_endpoint, self.recovering)

    def _on_report(self, server: int, report: ReceivedReport) -> None:
        """The monitor, which reads the membership and so is made after it, takes the reports of servers."""
        self.monitor.heartbeat(server, report)

    async def take_over(self, reports: Reports, ballot: Ballot, force: bool) -> None:
        """Go on with the parameter server of another controller, of which servers have come back."""
        assert self.journal is not None, "there is a grace, or no server would have come back"
        journal = await self.actors.follow(reports, ballot, force)
        record = await self.carry_out(
            go_on(self.membership, self.interrupted_runs, self.content, journal, self.journal.take_over)
        )
        self.recovering = False
        await self.actors.resume(record.wanted)
        await self.journal.committed()  # the first record waits for the end of grants
        await self.learn_clocks()
        self.begin()
        self.schedule_checkpoints(record.schedule)
        if record.adapt is not None:
            self.adapt(record.adapt)
        await self.in_endpoint(self.content.resumed)
        self.opened.set()

    async def commit(self) -> None:
        """Return when all that was decided is committed; at once where servers end with their scheduler."""
        if self.journal is not None:
            await self.journal.committed()

    async def learn_clocks(self) -> None:
        """Ask the servers for the clocks of the last ops of trainers that another controller had."""
        origins = await self.in_endpoint(self.interrupted_runs.origins)
        if origins:
            for answer in (await self.actors.call_all("last_clocks", origins)).values():
                await self.in_endpoint(
                    self.interrupted_runs.advance, msgspec.msgpack.decode(answer, type=dict[int, int])
                )

    async def await_end_of_trainers(self, run: int) -> None:
        """Return when no trainer of a run is at work, or none that is about to end with its scheduler."""
        until = time.monotonic() + config.seconds("stop")
        while await self.in_endpoint(self.interrupted_runs.is_at_work, run) and time.monotonic() < until:
            await asyncio.sleep(TICK_SECONDS)

    async def await_shards(self) -> None:
        """Return when all servers that hold shards are up, because only together they know all clocks."""
        until = time.monotonic() + config.seconds("request")
        while absent := await self.in_endpoint(holders, self.membership) - {
            server.number for server in self.actors.up()
        }:
            if time.monotonic() > until:
                raise ServerGoneError(
                    f"parameter server {self.name!r}: servers {sorted(absent)} have not come back within "
                    f"{config.limit('request')}, and their shards know how far the trainers were; try again when "
                    f"`dask ps status` shows them up, or others in their place"
                )
            await asyncio.sleep(TICK_SECONDS)

    def begin(self) -> None:
        """The servers are up: let shards follow the load, while the setting ``dps.rebalancing`` is on."""
        self._balancing = asyncio.ensure_future(self.carry_out(self.rebalancing.follow()))

    def schedule_checkpoints(self, schedule: CheckpointSchedule | None) -> None:
        """Take checkpoints at intervals, in place of an earlier schedule; None: no more."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled = None
        self.content.schedule = schedule
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
        self.rebalancing.closed = True
        if self._balancing is not None:
            self._balancing.cancel()
        if self.journal is not None:
            self.journal.stop()

    async def settle(self, keep: bool | None) -> None:
        """A run has ended, or (None) only tasks: see `RunProcedures.settle`.

        First the end is committed, because the servers refuse the pushes of its trainers from then on.
        """
        await self.commit()
        if keep is False and await self.in_endpoint(self.interrupted_runs.wait):
            keep = None  # because an interrupted run may go on, which needs the sums of its open clock
        await self.carry_out(self.ends.settle(keep))

    async def retire_tasks(self) -> None:
        """Tell the servers which tasks have ended, so that they refuse ops of these origins from now on."""
        try:
            await self.settle(keep=None)
        except Exception as error:  # a late attempt is not refused then, but its pushes still count once
            logger.warning("parameter server %r: not all servers know which tasks have ended: %s", self.name, error)
        finally:
            self.retiring = None


def holders(membership: Membership) -> set[int]:
    """The servers that hold shards, or are to."""
    return {number for places in membership.places.values() for place in places for number in place.chain}
