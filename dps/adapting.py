"""Adapter: the number of servers follows the load. The rule is `coordination/adaptive.py`; here are its eyes and hands.

It lives on the scheduler's loop, beside `ps.scale`, whose path its decisions take; so it outlives the driver that asked
for it. Every so often it looks at what servers have told with their beats. It only decides where nothing is unfinished:
every server is up, every shard has its copies and stays where it is, no table is being made, no checkpoint written.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from dps.checkpointing import Checkpointer
from dps.coordination.adaptive import Adaptive, Load
from dps.coordination.placement import next_steps
from dps.crew import Crew
from dps.fleet import Fleet
from dps.monitor import Monitor

__all__ = ["Adapter"]

logger = logging.getLogger(__name__)


class Adapter:
    """See the module's docstring.

    Parameters
    ----------
    fleet, monitor
        Who serves what, and how loaded servers are: of the endpoint's thread.
    crew, checkpointer
        Servers' workers, and who must not be disturbed.
    in_endpoint : callable
        Runs a function in the endpoint's thread.
    copies : int
        Of tables that are still to come.
    """

    def __init__(
        self,
        fleet: Fleet,
        monitor: Monitor,
        crew: Crew,
        checkpointer: Checkpointer,
        in_endpoint: Callable[..., Awaitable[Any]],
        copies: int,
    ):
        self.fleet, self.monitor, self.crew, self.checkpointer = fleet, monitor, crew, checkpointer
        self._in_endpoint, self._copies = in_endpoint, copies
        self._rule: Adaptive | None = None
        self._memory: float | None = None
        self._wish: dict[str, Any] = {}
        self.why = ""
        self._rests: tuple[Any, float] = None, math.inf  # what is where, and since when it is
        self._task: asyncio.Future | None = None

    def begin(self, interval: float, memory: float | None, **rule: Any) -> None:
        """Follow the load from now on, in place of what was wished before; the rest is `Adaptive`'s."""
        adaptive = Adaptive(**rule)
        self.end()
        self._rule, self._memory, self.why = adaptive, memory, "not looked yet"
        self._wish = {**rule, "interval": interval, "memory": memory}
        self._task = asyncio.ensure_future(self._mind(adaptive, interval))

    def end(self) -> dict[str, Any] | None:
        """The number stays what it is, until somebody says another. Returns what :meth:`begin` was told, if it was."""
        if self._task is not None:
            self._task.cancel()
        wish = None if self._rule is None else self._wish
        self._task = self._rule = None
        return wish

    def describe(self) -> dict[str, Any] | None:
        """What is followed, and what was seen last, as plain values and as a line; None where nothing is."""
        if self._rule is None:
            return None
        least, most, now = self._rule.minimum, self._rule.maximum, len(self.crew.up())
        limits = f"{least} to {most}" if math.isfinite(most) else f"{least} or more"
        about = {**self._wish, "maximum": most if math.isfinite(most) else None, "servers": now, "why": self.why}
        return about | {"text": f"adapt: {limits}, now {now}: {self.why}"}

    async def _mind(self, rule: Adaptive, interval: float) -> None:
        failed = ""
        while self._rule is rule:  # `asyncio.wait_for` may swallow that we were cancelled
            try:
                await self.look(rule)
                failed = ""
            except Exception as error:
                self.why = f"{type(error).__name__}: {error}"
                if self.why != failed:  # said once
                    failed = self.why
                    logger.warning("parameter server %r: its number of servers stays: %s", self.fleet.session, self.why)
            await asyncio.sleep(interval)

    async def look(self, rule: Adaptive) -> None:
        """See, decide, act."""
        if self.checkpointer.busy:  # nothing has moved: what was seen before counts
            self.why = "waits for a checkpoint"
            return
        load = await self._in_endpoint(self._load) if self.crew.settled else None
        if load is None:
            self.why = "waits for servers, shards and reports on their way"
            rule.restart()
            return
        load = load._replace(limit=self._memory or self._limit(), spare=len(self.crew.spares()))
        servers, self.why, news = rule.look(load)
        if servers != load.servers:
            text = f"adapt: {load.servers} -> {servers} servers, {self.why}"
            await self._in_endpoint(self.fleet.note, text, logging.INFO)
        elif news:
            await self._in_endpoint(self.fleet.note, f"adapt: {self.why}")
        if servers != load.servers or self.crew.wanted > max(servers, rule.maximum):  # asked for, and not to be had
            await asyncio.shield(self._scale(rule, servers))  # whole, or not at all

    async def _scale(self, rule: Adaptive, servers: int) -> None:
        if self._rule is rule:  # nobody has said another number meanwhile
            await self.crew.scale(servers)

    def _limit(self) -> float:
        """Bytes that each server may have in use: Dask's limit of its worker; infinite without one."""
        workers = [self.crew.scheduler.workers.get(server.worker) for server in self.crew.servers()]
        return min((ws.memory_limit for ws in workers if ws is not None and ws.memory_limit), default=math.inf)

    def _load(self) -> Load | None:
        """What the servers bear; None while one of them comes or goes, or a shard moves. The endpoint's thread."""
        fleet, servers = self.fleet, self.fleet.servers
        tables = {name: (spec["copies"], fleet.places[name]) for name, spec in fleet.specs.items()}
        places = [p for _, shards in tables.values() for p in shards]
        what = sorted(servers), {fleet.specs[name]["id"]: tuple(shards) for name, (_, shards) in tables.items()}
        if (
            what != self._rests[0]  # the epoch would tell more: a checkpoint begins one, too
            or any(s.gone or s.doubted or s.leaving or not (s.up and s.ready) for s in servers.values())
            or any(p.joiner is not None or p.stepping_down or not p.chain for p in places)
            or any(next_steps(tables, servers, (), 1))
        ):
            self._rests = what, self.monitor.now()
        loads = self.monitor.loads(self._rests[1])  # what was told before may count a shard twice that has moved
        if not servers or servers.keys() != loads.keys():
            return None
        copies = max(self._copies, *(copies for copies, _ in tables.values()), 1)
        busy, held = (sum(values) for values in zip(*loads.values(), strict=True))
        return Load(len(servers), busy, held, copies=copies, pieces=max(1, sum(len(p.chain) for p in places)))
