"""Server actors: the servers of one parameter server as Dask sees them. It finds workers; starts, calls, closes actors.

Everything here happens on the scheduler's loop. `server_procedures.py` has the steps, and this file carries them out.
Which server holds which shard is the matter of `failover.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from distributed.protocol import Serialized, deserialize
from distributed.protocol.pickle import loads

from dps import config
from dps.engine.controller.executor import Executor
from dps.engine.controller.failover import Membership
from dps.engine.controller.function_procedures import FunctionProcedures
from dps.engine.controller.procedures import TIMEOUT_SETTINGS
from dps.engine.controller.server_procedures import ServerProcedures
from dps.engine.controller.server_record import ServerRecord
from dps.engine.controller.table_procedures import TableProcedures
from dps.engine.controller.takeover_procedures import Reports, follow
from dps.engine.coordination.journal import Ballot, Journal
from dps.engine.daskapi.cordon import Cordon, client_of
from dps.engine.daskapi.lost_scheduler import brought_names
from dps.engine.daskapi.processes import VERSIONS_REQUEST, check_versions, own_security, own_version, version_in
from dps.engine.wire.handshake import new_nonce
from dps.errors import DPSError, ServerGoneError

if TYPE_CHECKING:
    from dps.engine.daskapi.protocols import DaskScheduler
    from dps.engine.state.recipes import Description

__all__ = ["ServerActors"]

logger = logging.getLogger(__name__)

TIMEOUT_HINTS = {"load": ": it was reading a checkpoint"}


class ServerActors:
    """The workers and actors of one parameter server's servers.

    Parameters
    ----------
    args : tuple
        (session, secrets, controller's address), for the actors.
    in_endpoint : callable
        Runs a function in the endpoint's thread, which owns the membership.
    others : callable
        Gives the workers of all servers in this cluster, once for each server.
    version : str, optional
        The driver's version of dps, for error messages.
    first_table : int
        Number of the first table that is made.
    commit : callable, optional
        Waits until what was decided is committed to the journal.
    """

    def __init__(
        self,
        scheduler: DaskScheduler,
        cordon: Cordon,
        membership: Membership,
        actor: type,
        args: tuple[str, tuple[str, str], tuple[str, int]],
        in_endpoint: Callable[..., Awaitable[object]],
        others: Callable[[], list[str]],
        version: str | None = None,
        first_table: int = 1,
        commit: Callable[[], Awaitable[None]] | None = None,
    ):
        self.scheduler = scheduler
        self.membership = membership
        self.session = args[0]
        self.changing = asyncio.Lock()  # held while a table is made or dropped
        self._scaling = asyncio.Lock()  # held while servers are added or retired
        versions = {"the client": version, f"the scheduler {scheduler.address}": own_version()}
        self._workers = DaskWorkers(scheduler, cordon, membership, actor, args, others, versions, self._close_actor)
        key = f"dps-server-{self.session}-{{}}-{new_nonce()[:8]}"
        clock = asyncio.get_running_loop().time
        self._procedures = ServerProcedures(
            membership, self._workers, self._scaling, self.changing, key, clock, asyncio.current_task
        )
        self.executor = Executor(in_endpoint, self.call_number, self.call_all, commit)
        numbers, salt = itertools.count(first_table), functools.partial(secrets.randbits, 63)
        self.tables = TableProcedures(membership, self.up, self.changing, lambda: next(numbers), salt)
        self._functions = FunctionProcedures(membership, self.up, self.changing)
        self._maintenance: asyncio.Future | None = None
        self._taking_up: set[int] = set()  # servers that have come back late

    def servers(self) -> list[ServerRecord]:
        return self._procedures.servers()

    def memory_limit(self) -> float:
        """Bytes that each server may have in use: the smallest memory limit of their workers; infinite without one."""
        workers = [self.scheduler.workers.get(server.worker) for server in self.servers()]
        return min((ws.memory_limit for ws in workers if ws is not None and ws.memory_limit), default=math.inf)

    def up(self) -> list[ServerRecord]:
        return [server for server in self.servers() if server.up and self._workers.has_actor(server)]

    def spares(self) -> list[str]:
        return self._procedures.spares()

    def unused(self) -> int | None:
        """How many of the spares no parameter server uses; None where servers share workers with ordinary tasks."""
        workers, dedicated = self._workers.candidates()
        return sum(not self._workers.is_used(worker) for worker in workers) if dedicated else None

    @property
    def wanted(self) -> int:
        return self._procedures.wanted

    @property
    def settled(self) -> bool:
        """Whether no server or table is being made, and there are as many servers as wanted, or as workers allow."""
        making = self._procedures.starting or self._scaling.locked() or self.changing.locked()
        up = len(self.up())
        enough = up == self.wanted or (up < self.wanted and not self.spares())
        return not making and up == len(self.servers()) and enough

    async def start(self, servers: int, timeout: float) -> None:
        """Start the first servers; from then on, keep as many as are wanted."""
        await self.executor.run(self._procedures.start(servers, timeout))
        self._maintenance = asyncio.ensure_future(self.executor.run(self._procedures.maintain()))

    async def follow(self, reports: Reports, ballot: Ballot, force: bool) -> Journal:
        """Have the servers that were there before this controller follow it; the journal, with their newest record."""
        return await self.executor.run(follow(self._procedures, reports, ballot, force))

    async def resume(self, servers: int) -> None:
        """The servers that were taken up are those of this session: keep as many from now on."""
        await self.executor.run(self._procedures.resume(servers))
        self._maintenance = asyncio.ensure_future(self.executor.run(self._procedures.maintain()))

    async def take_up_late(self, number: int, worker: str, ballot: Ballot) -> None:
        """Take up a server that has come back later than the others, or did not follow with them."""
        if number not in self._taking_up:
            self._taking_up.add(number)
            try:
                if self.membership.servers[number] not in self.up():
                    await self.executor.run(self._procedures.take_up(number, worker, ballot))
                await self.executor.run(self._procedures.bring(self.membership.servers[number]))
            finally:
                self._taking_up.discard(number)

    async def scale(self, servers: int) -> None:
        await self.executor.run(self._procedures.scale(servers))

    async def retire(self, number: int) -> None:
        await self.executor.run(self._procedures.retire(number))

    async def close(self) -> None:
        """Stop all servers; the scheduler releases their actors."""
        self._procedures.closed = True
        starting = self._procedures.starting
        working = {*starting} if self._maintenance is None else {*starting, self._maintenance}
        for task in working:
            task.cancel()
        await self.call_all("close")
        if working:  # a task that was starting a server now closes it
            await asyncio.wait(working, timeout=config.seconds("start"))
        self._workers.leave(self.servers())

    async def add_table(self, fields: Description, exist_ok: bool, free: Iterable[str]) -> Description:
        return await self.executor.run(self.tables.add(fields, exist_ok, free))

    async def set_table_staleness(self, name: str, staleness: float | None) -> None:
        await self.executor.run(self.tables.set_staleness(name, staleness))

    async def drop_table(self, name: str) -> None:
        await self.executor.run(self.tables.drop(name))

    async def add_function(self, identity: str, code: bytes) -> None:
        await self.executor.run(self._functions.add(identity, code))

    async def _close_actor(self, server: ServerRecord) -> None:
        with contextlib.suppress(Exception):
            await self.call(server, "close")

    async def call_all(self, method: str, *args: object) -> dict[int, Any]:
        """Call all servers that can answer; returns their answers by number. Failures are logged."""
        level = logging.INFO if self._procedures.closed else logging.WARNING  # because the cluster may be closing, too
        servers = self.up()
        answers = await asyncio.gather(*(self.call(s, method, *args) for s in servers), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                logger.log(level, "parameter server %r: %r failed: %s", self.session, method, answer)
        return {s.number: a for s, a in zip(servers, answers, strict=True) if not isinstance(a, BaseException)}

    async def call_number(self, number: int, method: str, *args: object) -> object:
        if number not in self.membership.servers:
            raise ServerGoneError(f"server {number} was lost meanwhile")
        return await self.call(self.membership.servers[number], method, *args)

    async def call(self, server: ServerRecord, method: str, *args: object) -> object:
        where, setting = f"server {server.number} on {server.worker}", TIMEOUT_SETTINGS.get(method, "request")
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
                    f"{TIMEOUT_HINTS.get(method, '')}. See its log; if it is only busy, raise the setting"
                ) from error
            raise ServerGoneError(f"{where} did not answer {method!r}: {error!r}") from error
        if answer["status"] != "OK":
            failed = _unpack(answer["exception"], where)
            if not self._workers.has_actor(server):  # it was retired while the call was under way
                raise ServerGoneError(f"{where} was closed meanwhile") from failed
            raise failed
        return _plain(answer["result"])


class DaskWorkers:
    """The workers and actors of one parameter server's servers, for `ServerProcedures`.

    Parameters are as of `ServerActors`; `versions` are the versions of dps by party, and `close` closes an actor that
    the scheduler has.
    """

    def __init__(
        self,
        scheduler: DaskScheduler,
        cordon: Cordon,
        membership: Membership,
        actor: Any,
        args: tuple[str, tuple[str, str], tuple[str, int]],
        others: Callable[[], list[str]],
        versions: dict[str, str | None],
        close: Callable[[ServerRecord], Awaitable[None]],
    ):
        self.scheduler = scheduler
        self.cordon = cordon
        self.membership = membership
        self.session, self.secrets, self.controller = args
        self._actor = actor
        self._others = others
        self._versions = versions
        self._close = close
        self._holder = f"dps-{self.session}"  # the client name under which the scheduler keeps the actors
        # By server: what is to be closed when its actor is made, and its future.
        self._making: dict[int, tuple[contextlib.AsyncExitStack, Any]] = {}

    def candidates(self) -> tuple[list[str], bool]:
        dedicated = self.cordon.workers()
        mine = {server.worker for server in self.membership.servers.values()}
        uses = self._others()
        workers = [w for w in dedicated or self.scheduler.workers if w not in mine]
        return sorted(workers, key=uses.count), bool(dedicated)

    def shortage(self) -> tuple[str, str]:
        have = f"{len(self.cordon.workers())} of {len(self.scheduler.workers)} workers carry the resource dps"
        return have, f"start more with `dask worker {self.scheduler.address} --resources dps=1`"

    def is_used(self, worker: str) -> bool:
        """Whether another parameter server has a server there, or may have it again after a scheduler's death."""
        state = self.scheduler.workers.get(worker)
        return worker in self._others() or (state is not None and bool(brought_names(state.extra)))

    def is_there(self, worker: str) -> bool:
        return worker in self.scheduler.workers

    def has_actor(self, server: ServerRecord) -> bool:
        """Whether the scheduler has the server's actor. (The server announces itself to the controller before that.)"""
        task = self.scheduler.tasks.get(server.key)
        return task is not None and task.state == "memory"

    def admit(self, server: ServerRecord) -> str:
        self.cordon.admit([server.key])
        return self._making[server.number][1].status

    async def submit(self, server: ServerRecord) -> None:
        await self._submit(server, self._actor, self.session, server.number, self.secrets, self.controller)

    async def _submit(self, server: ServerRecord, make: Callable[..., object], *args: object) -> None:
        dedicated = {"resources": {"dps": 1}} if server.worker in self.cordon.workers() else {}
        stack = contextlib.AsyncExitStack()
        client = await stack.enter_async_context(client_of(self.scheduler, own_security(self.scheduler)))
        future = client.submit(make, *args, actor=True, key=server.key, workers=[server.worker], **dedicated)
        self._making[server.number] = stack, future

    async def take_up(self, server: ServerRecord, ballot: tuple[int, str]) -> None:
        """Begin to make an actor of a server that is there already; it follows this controller from now on."""
        await self._submit(server, self._actor.taken_up, self.session, server.number, tuple(ballot), self.controller)

    async def failure(self, server: ServerRecord) -> None:
        await self._making[server.number][1]

    async def adopt(self, server: ServerRecord) -> None:
        stack, _ = self._making.pop(server.number)
        self.scheduler.client_desires_keys([server.key], self._holder)
        await stack.aclose()

    async def leave_actor(self, server: ServerRecord) -> None:
        self._release([server.key])

    async def close(self, server: ServerRecord) -> None:
        if self.has_actor(server):
            await self._close(server)
        self._release([server.key])

    def leave(self, servers: list[ServerRecord]) -> None:
        self._release([server.key for server in servers])
        if self._holder in self.scheduler.clients:
            self.scheduler.remove_client(self._holder, f"dps-close-{self.session}")

    def _release(self, keys: list[str]) -> None:
        if self._holder in self.scheduler.clients:
            self.scheduler.client_releases_keys(keys, self._holder, f"dps-close-{self.session}")

    async def check_versions(self, workers: list[str]) -> None:
        """Refuse workers with another version of dps, because the names of its classes and frames may differ."""
        versions = dict(self._versions)
        for worker in workers:
            try:
                request = self.scheduler.rpc(worker).versions(**VERSIONS_REQUEST)
                answer = await asyncio.wait_for(request, config.seconds("connect"))
            except (OSError, TimeoutError) as error:
                raise ServerGoneError(
                    f"worker {worker}, meant for a server, has not said its version of dps within "
                    f"{config.limit('connect')}: {error!r}. See its log; if it is only busy, raise the setting"
                ) from error
            versions[f"worker {worker}"] = version_in(answer)
        check_versions(versions)


def _plain(value: object) -> object:
    """The value of an answer, which the scheduler leaves serialized because it usually passes it on."""
    return deserialize(value.header, value.frames) if isinstance(value, Serialized) else getattr(value, "data", value)


def _unpack(error: object, where: str) -> BaseException:
    value = _plain(error)
    if isinstance(value, bytes):
        value = loads(value)
    return value if isinstance(value, DPSError) else DPSError(f"{where} failed: {value!r}")
