"""Holding: the plugin that keeps a worker's process, with the servers in it, when the worker has lost its scheduler.

`coordination/holding.py` has the rules, and `docs/design/scheduler.md` says why the state of a server stays in the
process. The first server of a worker adds the plugin, if the setting ``dps.scheduler.grace`` is not 0. What it uses of
Dask is in `daskapi/lost_scheduler.py`.

`teardown` is called when the worker closes. It returns at once, unless the scheduler is lost. Otherwise it returns when
the hold is over, and so Dask neither ends the process nor deletes the worker's directory before. Meanwhile the servers'
endpoints answer clients and each other, as far as that needs no controller. When a scheduler is there again at the same
address, the process joins it with another worker. This plugin is that worker's, too, and holds it in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from distributed import Worker, WorkerPlugin

from dps import config
from dps.engine.coordination.holding import HoldStep, SchedulerLoss
from dps.engine.daskapi.lost_scheduler import is_cut_off, join_scheduler, scheduler_id, step_aside
from dps.engine.daskapi.nanny import resume_nanny
from dps.engine.daskapi.refusals import value
from dps.errors import DPSError, ServerGoneError

__all__ = ["HoldPlugin", "HoldableServer", "held_server", "hold_with"]

logger = logging.getLogger(__name__)

# Pause between two looks for a scheduler.
LOOK_SECONDS = 1.0
# Time in which a scheduler has to answer a look.
ANSWER_SECONDS = 1.0
# Longest pause between two reports to a scheduler in which there is no controller yet.
LONGEST_PAUSE_SECONDS = 4.0
# What a controller answers to the report of a server that it has given up.
REFUSED = "refused"
# Longest time for joining a scheduler that has answered, because it may have died since.
JOIN_SECONDS = 30.0


class HoldableServer(Protocol):
    """A server of this process, as far as the plugin needs it."""

    session: str
    number: int
    released: bool  # the controller has said that its scheduler ends on purpose: it is not held
    awaits_restart: bool  # the controller has said that its scheduler is about to be started again: it is held
    claimed: bool  # a controller has it

    @property
    def closed(self) -> bool:
        """Whether it has ended."""

    @property
    def checkpoint(self) -> str | None:
        """The last checkpoint in which it has taken part, in words."""

    def returned(self, worker: str) -> bytes:
        """What a controller must know to take it up."""

    def close(self) -> None: ...


class HoldPlugin(WorkerPlugin):
    """Holds the process of one worker, and of the workers that follow it there."""

    name = "dps-hold"

    def __init__(self, grace: float):
        self.grace = grace
        self.servers: list[HoldableServer] = []
        self._scheduler: str | None = None  # id of the worker's scheduler

    def add(self, server: HoldableServer) -> None:
        self.servers = [*self._held(), server]

    async def setup(self, worker: Worker) -> None:
        self._scheduler = await scheduler_id(worker, ANSWER_SECONDS)

    async def teardown(self, worker: Worker) -> None:
        # A scheduler without a controller that has the servers cannot say what its end means for them.
        planned = any(server.awaits_restart or not server.claimed for server in self._held())
        loss = SchedulerLoss(time.monotonic(), self.grace, self._scheduler, planned)
        if loss.holds(len(self._held()), is_cut_off(worker)):
            try:
                await self._hold(worker, loss)
            except Exception:
                logger.exception("the process of worker %s is not held any longer", worker.name)

    def _held(self) -> list[HoldableServer]:
        return [server for server in self.servers if not (server.released or server.closed)]

    async def _hold(self, worker: Worker, loss: SchedulerLoss) -> None:
        step_aside(worker)
        for server in self.servers:
            if server.released and not server.closed:  # the process is held for others
                await asyncio.to_thread(server.close)
        for server in self._held():
            server.claimed = False
        logger.warning(
            "worker %s has lost its scheduler: its process keeps %s for %g s (dps.scheduler.grace), and waits for a "
            "scheduler at %s",
            *(worker.name, self._names(), self.grace, worker.scheduler.address),
        )
        again = await self._join(worker, loss)
        if again is not None:
            closing = asyncio.ensure_future(again.finished())
            try:
                await self._wait_for_controller(again, closing, loss)
            except Exception:
                logger.exception("worker %s stays, whether a controller has taken up its servers or not", again.name)
            await closing  # for as long as the worker lives, because Dask ends the process after that

    async def _join(self, worker: Worker, loss: SchedulerLoss) -> Worker | None:
        """The worker with which this process has joined a scheduler; None: the process is to end."""
        while True:
            found = await scheduler_id(worker, ANSWER_SECONDS)
            step = loss.look(time.monotonic(), len(self._held()), found)
            if step is HoldStep.END:
                self._log_end(loss, found)
                return None
            if step is HoldStep.JOIN:
                again = await self._try_to_join(worker, loss)
                if again is not None:
                    return again
            await asyncio.sleep(LOOK_SECONDS)

    async def _try_to_join(self, worker: Worker, loss: SchedulerLoss) -> Worker | None:
        try:
            names, left = {server.session for server in self._held()}, loss.left(time.monotonic())
            again = await join_scheduler(worker, self, names, left, min(left, JOIN_SECONDS))
        except (OSError, RuntimeError, ValueError, TimeoutError) as error:
            logger.warning("worker %s could not join the scheduler that has answered: %r", worker.name, error)
            return None
        await resume_nanny(again, config.seconds("connect"))
        logger.warning(
            "worker %s has joined the scheduler at %s, with %s in its process",
            *(again.name, again.scheduler.address, self._names()),
        )
        return again

    async def _wait_for_controller(self, again: Worker, closing: asyncio.Future[None], loss: SchedulerLoss) -> None:
        """Wait until a controller has claimed the servers; close those that none has claimed when the grace is over.

        `closing` is done when the worker has closed.
        """
        pause = LOOK_SECONDS / 4
        while not closing.done():
            unclaimed = [server for server in self._held() if not server.claimed]
            step = loss.wait(time.monotonic(), len(unclaimed))
            if step is HoldStep.WAIT:
                await self._report(again, unclaimed)
                await asyncio.wait([closing], timeout=pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            if step is HoldStep.CLOSE:
                self._log_end(loss, None)
                for server in unclaimed:
                    await asyncio.to_thread(server.close)
            break

    async def _report(self, again: Worker, unclaimed: list[HoldableServer]) -> None:
        """Tell the controller that these servers are back. A server that the controller refuses is closed."""
        for server in unclaimed:
            try:
                report = await asyncio.to_thread(server.returned, again.address)
            except DPSError as error:  # its endpoint is busy
                logger.warning(
                    "server %d of parameter server %r is not reported yet: %s", server.number, server.session, error
                )
                continue
            answer = await call_controller(again, JOIN_SECONDS, "returned", server.session, report=report)
            if answer == REFUSED:
                logger.warning(
                    "server %d of parameter server %r ends, because its controller has no place for it any more",
                    *(server.number, server.session),
                )
                await asyncio.to_thread(server.close)

    def _names(self) -> str:
        names = [f"server {each.number} of parameter server {each.session!r}" for each in self._held()]
        return " and ".join(names) or "no server"

    def _log_end(self, loss: SchedulerLoss, found: str | None) -> None:
        if found is not None and found == loss.lost and not loss.planned:
            logger.warning("the scheduler lives and has removed this worker: %s ends", self._names())
            return
        for server in self._held():
            logger.error(
                "server %d of parameter server %r ends, because no controller has taken it up within %g s "
                "(dps.scheduler.grace); %s",
                *(server.number, server.session, self.grace, rescue(server.checkpoint)),
            )


def held_server(worker: Worker, session: str, number: int) -> HoldableServer:
    """The server of that number, which the process of this worker has held."""
    plugin = worker.plugins.get(HoldPlugin.name)
    for server in plugin.servers if isinstance(plugin, HoldPlugin) else ():
        if (server.session, server.number) == (session, number) and not server.closed:
            return server
    raise ServerGoneError(f"worker {worker.address} has no server {number} of parameter server {session!r}")


async def call_controller(worker: Worker, seconds: float, verb: str, name: str, **fields: object) -> object:
    """Ask the controller of a worker's scheduler; None where there is none, or it does not answer in time."""
    try:
        call = worker.scheduler.dps_call(verb=verb, name=name, fields=fields)
        return value(await asyncio.wait_for(call, seconds))
    except (OSError, TimeoutError, DPSError) as error:
        logger.info("the controller has not answered %r of parameter server %r: %r", verb, name, error)
        return None


def rescue(checkpoint: str | None) -> str:
    """What is left of the rows, in words."""
    return "it knows of no checkpoint" if checkpoint is None else f"restore {checkpoint}"


def hold_with(worker: Worker, server: HoldableServer) -> None:
    """Have the process of a worker held for this server's sake; called in any thread.

    Not that of a worker in the process of its scheduler, because the scheduler cannot die without it.
    """
    grace = config.scheduler_grace()
    if grace > 0 and not worker.address.startswith("inproc://"):
        worker.loop.add_callback(_add, worker, server, grace)


async def _add(worker: Worker, server: HoldableServer, grace: float) -> None:
    plugin = worker.plugins.get(HoldPlugin.name)
    if not isinstance(plugin, HoldPlugin):
        plugin = HoldPlugin(grace)
        plugin.add(server)
        await worker.plugin_add(plugin, name=HoldPlugin.name)
    else:
        plugin.add(server)
