"""Crew: the servers of one parameter server as Dask sees them. Workers are found, actors started, called and closed.

Everything here happens on the scheduler's loop. Which server holds what is the fleet's affair (`fleet.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from distributed.protocol import Serialized, deserialize
from distributed.protocol.pickle import loads

from dps import config
from dps.cordon import Cordon, client_of
from dps.dask_side import ASK, own_security, own_version, same_versions, version_in
from dps.errors import ClosedError, DPSError, ServerGoneError, TooFewWorkersError
from dps.fleet import Fleet, Recruit
from dps.wire.session import new_nonce

__all__ = ["Crew"]

logger = logging.getLogger(__name__)

PREFER_DEDICATED = 2.0  # seconds to wait for a worker with the dps resource before taking ordinary ones
ALREADY = 0.02  # seconds between two looks whether a server has come up
FAILED = 5.0  # seconds until it is tried again, where that failed
PATIENCE = {"status": "connect", "create_table": "start", "close": "stop", "load": "checkpoint"}  # else "request"
DOING = {
    "create_table": ": the first table of a kind makes it compile kernels, which a busy machine takes long for",
    "load": ": it was reading a checkpoint",
}
AGAIN = 0.5  # seconds between two looks whether a server is missing, or may be closed


class Crew:
    """Servers' workers and actors.

    Parameters
    ----------
    scheduler, cordon
        Dask's scheduler, and what keeps ordinary tasks off its servers' workers.
    fleet : Fleet
        Who is up, and what they hold.
    actor : type
        The servers' class.
    args : tuple
        (session, secrets, controller's address), for the actors.
    in_endpoint : callable
        Runs a function in the endpoint's thread: the fleet's.
    others : callable
        The workers of all servers in this cluster, once for each server.
    version : str, optional
        The driver's dps, for messages.
    """

    def __init__(
        self,
        scheduler: Any,
        cordon: Cordon,
        fleet: Fleet,
        actor: type,
        args: tuple[str, tuple[str, str], tuple[str, int]],
        in_endpoint: Callable[..., Awaitable[Any]],
        others: Callable[[], list[str]],
        version: str | None = None,
    ):
        self.scheduler, self.cordon, self.fleet = scheduler, cordon, fleet
        self.session, self.secrets, self.controller = args
        self.wanted = 0
        self.dedicated = False  # its servers have workers of their own, also those that come later
        self.changing = asyncio.Lock()  # tables
        self._staffing = asyncio.Lock()  # servers: those that are to come and to go, as one
        self._actor, self._in_endpoint, self._others = actor, in_endpoint, others
        self._versions = {"the client": version, f"the scheduler {scheduler.address}": own_version()}
        self._tag = new_nonce()[:8]
        self._holder = f"dps-{self.session}"  # under this name the scheduler keeps the actors, as it would for a client
        self._minder: asyncio.Future | None = None
        self._starting: set[asyncio.Task] = set()  # those that start servers
        self._closed = False

    def servers(self) -> list[Recruit]:
        """Those that there are, whatever their state."""
        return list(self.fleet.servers.values())

    def up(self) -> list[Recruit]:
        """Those that can be called."""
        return [server for server in self.servers() if server.up and self._made(server)]

    @property
    def settled(self) -> bool:
        """Whether there are as many as are wanted, or as there can be, and no server or table is being made."""
        making = self._starting or self._staffing.locked() or self.changing.locked()
        up = len(self.up())
        enough = up == self.wanted or (up < self.wanted and not self.spares())
        return not making and up == len(self.servers()) and enough

    def _made(self, server: Recruit) -> bool:
        """Whether its actor is there; it reports to the fleet a moment before."""
        task = self.scheduler.tasks.get(server.key)
        return task is not None and task.state == "memory"

    async def start(self, servers: int, timeout: float) -> None:
        """The first servers; from then on, as many as are wanted."""
        self.wanted = servers
        workers = await self._find_workers(servers, timeout)
        self.dedicated = self._candidates()[1]
        await self._check_versions(workers)
        await asyncio.gather(*(self._start_server(worker, timeout) for worker in workers))
        self._minder = asyncio.ensure_future(self._mind())

    async def close(self) -> None:
        """Stop all servers; the scheduler lets go of their actors."""
        self._closed = True
        working = {*self._starting} if self._minder is None else {*self._starting, self._minder}
        for task in working:
            task.cancel()
        await self.call_all("close")
        if working:  # who was starting a server now closes it
            await asyncio.wait(working, timeout=config.seconds("start"))
        self._release([server.key for server in self.servers()])
        if self._holder in self.scheduler.clients:
            self.scheduler.remove_client(self._holder, f"dps-close-{self.session}")

    def _release(self, keys: list[str]) -> None:
        if self._holder in self.scheduler.clients:
            self.scheduler.client_releases_keys(keys, self._holder, f"dps-close-{self.session}")

    async def _find_workers(self, servers: int, timeout: float) -> list[str]:
        """Addresses of the workers that will hold servers, the least used first."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            workers, dedicated = self._candidates()
            waited = loop.time() - began
            if len(workers) >= servers and (dedicated or waited > min(PREFER_DEDICATED, timeout)):
                break
            if waited > timeout:
                have = f"{len(self.cordon.workers())} of {len(self.scheduler.workers)} workers carry the resource dps"
                raise TooFewWorkersError(
                    f"parameter server {self.session!r} needs {servers} workers for its servers, and {have} after "
                    f"{timeout:g} s; start more with `dask worker {self.scheduler.address} --resources dps=1`, or ask "
                    f"for fewer"
                )
            await asyncio.sleep(0.05)
        if not dedicated:
            logger.warning(
                "no worker carries the resource dps: the servers of %r share workers with ordinary tasks", self.session
            )
        return workers[:servers]

    def _candidates(self) -> tuple[list[str], bool]:
        """Workers without a server of this session, the least used first; and whether they are dedicated ones."""
        dedicated = self.cordon.workers()
        mine = {server.worker for server in self.servers()}
        uses = self._others()
        workers = [w for w in dedicated or self.scheduler.workers if w not in mine]
        return sorted(workers, key=uses.count), bool(dedicated)

    def spares(self) -> list[str]:
        """Workers that further servers could have now; no ordinary ones where there have been dedicated ones."""
        workers, dedicated = self._candidates()
        return workers if dedicated or not self.dedicated else []

    async def _start_server(self, worker: str, timeout: float) -> None:
        """An actor on that worker, with the session's tables but without rows; up when it reports to the fleet."""
        if self._closed:
            raise ClosedError(f"parameter server {self.session!r} was closed")
        me = asyncio.current_task()
        assert me is not None
        self._starting.add(me)
        try:
            await self._make_server(worker, timeout)
        finally:
            self._starting.discard(me)

    async def _make_server(self, worker: str, timeout: float) -> None:
        key = f"dps-server-{self.session}-{{}}-{self._tag}"
        number = await self._in_endpoint(self.fleet.enlist, worker, key)
        server = self.fleet.servers[number]
        dedicated = {"resources": {"dps": 1}} if worker in self.cordon.workers() else {}
        security = own_security(self.scheduler)
        try:
            async with client_of(self.scheduler, security) as client:
                args = (self.session, number, self.secrets, self.controller)
                future = client.submit(self._actor, *args, actor=True, key=server.key, workers=[worker], **dedicated)
                await self._come_up(server, future, config.seconds("start") + timeout)
            async with self.changing:
                for spec in list(self.fleet.specs.values()):
                    await self.call(server, "create_table", spec, [])
            server.ready = True
        except BaseException:
            await self._close_server(server)
            raise

    async def _come_up(self, server: Recruit, future: Any, patience: float) -> None:
        """Wait until it has reported to the fleet and its actor is there; from then on the scheduler keeps that."""
        number, worker, now = server.number, server.worker, asyncio.get_running_loop().time
        until = now() + patience
        try:
            while number in self.fleet.servers and not (server.up and future.status == "finished"):
                self.cordon.admit([server.key])
                if future.status == "error":
                    await future  # raises its own error
                if now() > until:
                    raise ServerGoneError(
                        f"server {number} on {worker} was not up within {patience:g} s: {config.limit('start')}, "
                        f"and the timeout of the call. See the worker's log; if it is only busy, raise the setting"
                    )
                await asyncio.sleep(ALREADY)
            if number not in self.fleet.servers:
                raise ServerGoneError(
                    f"worker {worker} was lost while server {number} started on it; see its log. Is dps installed "
                    f"there, in this version?"
                )
        finally:  # whoever gives up waiting has to close an actor that is being made: nobody else would
            until = now() + config.seconds("stop")
            while future.status == "pending" and worker in self.scheduler.workers and now() < until:
                self.cordon.admit([server.key])
                await asyncio.sleep(ALREADY)
            self.scheduler.client_desires_keys([server.key], self._holder)

    async def _check_versions(self, workers: list[str]) -> None:
        """Workers with another dps would take the actor's name for something else."""
        found = dict(self._versions)
        for worker in workers:
            try:
                answer = await asyncio.wait_for(self.scheduler.rpc(worker).versions(**ASK), config.seconds("connect"))
            except (OSError, TimeoutError) as error:
                raise ServerGoneError(
                    f"worker {worker}, meant for a server, has not said its version of dps within "
                    f"{config.limit('connect')}: {error!r}. See its log; if it is only busy, raise the setting"
                ) from error
            found[f"worker {worker}"] = version_in(answer)
        same_versions(found)

    async def scale(self, servers: int) -> None:
        """Have that many; those that came last go."""
        async with self._staffing:
            staying = sorted(s.number for s in self.servers() if not s.leaving)
            if len(staying) > servers:
                await self._in_endpoint(self.fleet.retire, staying[servers:])
            self.wanted = servers

    async def retire(self, number: int) -> None:
        """Have one server emptied, and then closed; another takes its place, if there is a worker for it."""
        async with self._staffing:
            for worker in self._candidates()[0][:1]:
                await self._check_versions([worker])
                await self._start_server(worker, config.seconds("start"))
            await self._in_endpoint(self.fleet.retire, [number])

    async def _close_server(self, server: Recruit) -> None:
        if self._made(server):
            with contextlib.suppress(Exception):
                await self.call(server, "close")
        self._release([server.key])
        await self._in_endpoint(self.fleet.dismiss, server.number)

    async def _mind(self) -> None:
        """Until the end: replace servers that were lost, let go of those too many, close those to go that are empty."""
        while True:
            await asyncio.sleep(AGAIN)
            if self._closed:  # `asyncio.wait_for` may swallow that we were cancelled
                return
            try:
                servers = self.servers()
                missing = self.wanted - sum(not (s.leaving or s.silent) for s in servers)
                if not (self._staffing.locked() or self.changing.locked()):
                    async with self._staffing, self.changing:  # a new table's shards may be on who seems empty
                        if missing < 0:  # one that had been replaced is back
                            await self._in_endpoint(self.fleet.trim, self.wanted)
                        for server in [s for s in servers if s.leaving and self.fleet.empty(s.number)]:
                            await self._close_server(server)
                for worker in self.spares()[: max(0, missing)]:
                    await self._check_versions([worker])
                    await self._start_server(worker, config.seconds("start"))
            except Exception as error:
                logger.warning("parameter server %r: a server could not be replaced: %s", self.session, error)
                await asyncio.sleep(FAILED)

    async def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """Call all servers that can answer; what they said, by number. Those that fail are logged."""
        level = logging.INFO if self._closed else logging.WARNING  # a server may close with its cluster meanwhile
        there = self.up()
        answers = await asyncio.gather(*(self.call(s, method, *args) for s in there), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.log(level, "parameter server %r: %r failed: %s", self.session, method, answer)
        return {s.number: a for s, a in zip(there, answers, strict=True) if not isinstance(a, BaseException)}

    async def call(self, server: Recruit, method: str, *args: Any) -> Any:
        """Call a server's actor, through its worker."""
        where, setting = f"server {server.number} on {server.worker}", PATIENCE.get(method, "request")
        patience = config.seconds(setting)
        try:
            call = self.scheduler.rpc(server.worker).actor_execute(
                actor=server.key, function=method, args=list(args), kwargs={}
            )
            answer = await asyncio.wait_for(call, patience)
        except (TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise ServerGoneError(
                    f"{where} has not answered {method!r} within {config.limit(setting, patience)}"
                    f"{DOING.get(method, '')}. See its log; if it is only busy, raise the setting"
                ) from error
            raise ServerGoneError(f"{where} did not answer {method!r}: {error!r}") from error
        if answer["status"] != "OK":
            raise _unpack(answer["exception"], where)
        return _plain(answer["result"])


def _plain(value: Any) -> Any:
    """A value as the scheduler got it: it leaves what it only passes on serialized."""
    return deserialize(value.header, value.frames) if isinstance(value, Serialized) else getattr(value, "data", value)


def _unpack(error: Any, where: str) -> BaseException:
    found = _plain(error)
    if isinstance(found, bytes):
        found = loads(found)
    return found if isinstance(found, DPSError) else DPSError(f"{where} failed: {found!r}")
