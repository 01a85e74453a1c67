"""Server procedures: how the servers of one parameter server are started, replaced, retired and closed. Pure.

Which server holds which shard is the matter of `failover.py`. Here it is which servers there are. What holds, and why:

* A server gets shards only when it is *ready*: it has announced itself, the scheduler keeps its actor, and it has all
  functions and tables. These do not change between the last of these calls and that moment, because a lock is held.
* A server that is only slow is not started a second time: it counts as long as the membership has it, unless it has
  been silent for longer than its lease. When it is back, there may be too many servers, and the surplus is emptied.
* A server is closed only when no chain has it: `Membership.retire` and `trim` mark it as leaving, its shards move, and
  then it is *empty*. No table is made meanwhile, because a table may put shards on an empty server.
* A server that has failed is closed, and another one takes its place, perhaps on the same worker.
* A start that fails, or is cancelled, leaves nothing: the actor is closed, and the membership forgets the server.
* Two changes of the number of servers do not overlap, because a lock is held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.procedures import (
    Ask,
    CallServers,
    Commit,
    InEndpoint,
    Lock,
    Procedure,
    ServerCall,
    Sleep,
    Together,
    Uninterrupted,
    holding,
    raised,
)
from dps.engine.controller.server_record import ServerRecord
from dps.engine.wire.journal_messages import KeptRecord
from dps.errors import ClosedError, ServerGoneError, TooFewWorkersError

__all__ = ["MAINTENANCE_SECONDS", "ServerProcedures", "Workers"]

logger = logging.getLogger(__name__)

# Wait for workers with the dps resource, before ordinary workers are taken.
DEDICATED_WAIT_SECONDS = 2.0
# Pause between two checks whether there are enough workers.
WORKER_POLL_SECONDS = 0.05
# Pause between two checks whether a server is up.
START_POLL_SECONDS = 0.02
# Pause until the next attempt to replace a server, after one that failed.
RETRY_SECONDS = 5.0
# Pause between two checks whether a server is missing, or is empty and to be closed.
MAINTENANCE_SECONDS = 0.5


class Workers(Protocol):
    """Dask's workers, and the actors on them, as far as the procedures need them."""

    def candidates(self) -> tuple[list[str], bool]:
        """Workers without a server of this session, the least used first; and whether they are dedicated to servers."""
        ...

    def shortage(self) -> tuple[str, str]:
        """How many workers there are, and how to start more: for an error."""
        ...

    def is_there(self, worker: str) -> bool: ...

    def admit(self, server: ServerRecord) -> str:
        """Let the actor run on its worker, and say how far it is: "pending", "finished" or "error"."""
        ...

    # These may wait, so procedures have them carried out by the instruction `Ask`.

    def submit(self, server: ServerRecord) -> object:
        """Begin to make the server's actor on its worker."""
        ...

    def take_up(self, server: ServerRecord, ballot: tuple[int, str]) -> object:
        """Begin to make an actor of a server that is there already, and have it follow this controller."""
        ...

    def failure(self, server: ServerRecord) -> object:
        """Raise the error with which the actor failed."""
        ...

    def adopt(self, server: ServerRecord) -> object:
        """Have the scheduler keep the actor, if it was made."""
        ...

    def leave_actor(self, server: ServerRecord) -> object:
        """Have the scheduler forget the actor, whose server goes on."""
        ...

    def close(self, server: ServerRecord) -> object:
        """Close the actor, if there is one, and have the scheduler forget it. No error is raised."""
        ...

    def check_versions(self, workers: list[str]) -> object: ...


class ServerProcedures:
    """How the servers of one parameter server are started, replaced, retired and closed.

    Parameters
    ----------
    scaling, tables_change : Lock
        Held while servers are added or retired; and while a table is made or dropped.
    key : str
        The key of a server's actor, with a place for the server's number.
    clock, current_task : callable
        Seconds; and the task that carries the procedure out.
    start_poll : float
        Seconds between two checks whether a server is up.
    """

    def __init__(
        self,
        membership: Membership,
        workers: Workers,
        scaling: Lock,
        tables_change: Lock,
        key: str,
        clock: Callable[[], float],
        current_task: Callable[[], object],
        start_poll: float = START_POLL_SECONDS,
    ):
        self.membership = membership
        self._workers = workers
        self._now = clock
        self.scaling = scaling
        self.tables_change = tables_change
        self._key = key
        self._start_poll = start_poll
        self._current_task = current_task
        self.starting: set[Any] = set()  # the tasks that start servers
        self.wanted = 0
        self.dedicated = False  # the servers have workers of their own, and so will later ones
        self.closed = False

    def servers(self) -> list[ServerRecord]:
        return list(self.membership.servers.values())

    def spares(self) -> list[str]:
        """Workers that further servers could have now; ordinary ones only if the first servers were on such."""
        workers, dedicated = self._workers.candidates()
        return workers if dedicated or not self.dedicated else []

    # -- starting servers

    def start(self, servers: int, timeout: float) -> Procedure[None]:
        self.wanted = servers
        workers = yield from self._find_workers(servers, timeout)
        self.dedicated = self._workers.candidates()[1]
        yield Ask(self._workers.check_versions, (workers,))
        yield Together(tuple(self.start_server(worker, timeout) for worker in workers))

    def _find_workers(self, servers: int, timeout: float) -> Procedure[list[str]]:
        """Addresses of the workers that will hold servers, the least used first."""
        began = self._now()
        while True:
            workers, dedicated = self._workers.candidates()
            waited = self._now() - began
            if len(workers) >= servers and (dedicated or waited > min(DEDICATED_WAIT_SECONDS, timeout)):
                break
            if waited > timeout:
                have, remedy = self._workers.shortage()
                raise TooFewWorkersError(
                    f"parameter server {self.membership.session!r} needs {servers} workers for its servers, and {have} "
                    f"after {timeout:g} s; {remedy}, or ask for fewer"
                )
            yield Sleep(WORKER_POLL_SECONDS)
        if not dedicated:
            logger.warning(
                "no worker carries the resource dps: the servers of %r share workers with ordinary tasks",
                self.membership.session,
            )
        return workers[:servers]

    def start_server(self, worker: str, timeout: float) -> Procedure[None]:
        """Start a server on that worker, and make the session's tables on it, without rows."""
        if self.closed:
            raise ClosedError(f"parameter server {self.membership.session!r} was closed")
        task = self._current_task()
        self.starting.add(task)
        try:
            yield from self._make_server(worker, timeout)
        finally:
            self.starting.discard(task)

    def _make_server(self, worker: str, timeout: float) -> Procedure[None]:
        number = yield InEndpoint(self.membership.add_server, (worker, self._key))
        server = self.membership.servers[number]
        try:
            yield Ask(self._workers.submit, (server,))
            yield from self._wait_until_up(server, config.seconds("start") + timeout)
            yield from holding([self.tables_change], self._bring_tables(server))
        except BaseException:
            yield Uninterrupted(self._close_server(server))
            raise

    def _bring_tables(self, server: ServerRecord) -> Procedure[None]:
        for function in list(self.membership.functions.items()):
            raised((yield CallServers((ServerCall(server.number, "add_function", function),))))
        for spec in list(self.membership.specs.values()):
            raised((yield CallServers((ServerCall(server.number, "create_table", (spec, [])),))))
        server.ready = True

    def _wait_until_up(self, server: ServerRecord, patience: float) -> Procedure[None]:
        """Wait until the server has announced itself and the scheduler has its actor, which it then is to keep."""
        number, worker = server.number, server.worker
        until = self._now() + patience
        try:
            while number in self.membership.servers:
                status = self._workers.admit(server)
                if server.up and status == "finished":
                    break
                if status == "error":
                    yield Ask(self._workers.failure, (server,))
                if self._now() > until:
                    raise ServerGoneError(
                        f"server {number} on {worker} was not up within {patience:g} s: {config.limit('start')}, "
                        f"and the timeout of the call. See the worker's log; if it is only busy, raise the setting"
                    )
                yield Sleep(self._start_poll)
            if number not in self.membership.servers:
                raise ServerGoneError(
                    f"worker {worker} was lost while server {number} started on it; see its log. Is dps installed "
                    f"there, in this version?"
                )
        finally:
            yield Uninterrupted(self._adopt(server))

    def _adopt(self, server: ServerRecord) -> Procedure[None]:
        """After a failure, too: the actor may still be made, and has to be known to be closed."""
        until = self._now() + config.seconds("stop")
        while (
            self._workers.is_there(server.worker) and self._workers.admit(server) == "pending" and self._now() < until
        ):
            yield Sleep(self._start_poll)
        yield Ask(self._workers.adopt, (server,))

    # -- after another controller

    def take_up(self, number: int, worker: str, ballot: tuple[int, str]) -> Procedure[KeptRecord | None]:
        """Take up a server that there was before this controller, on that worker; what it keeps of the journal.

        It is not ready yet. Where this fails, for one because the server still hears from another controller, it may be
        tried again.
        """
        server = yield InEndpoint(self.membership.expect_server, (number, worker, self._key.format(number)))
        try:
            yield Ask(self._workers.take_up, (server, ballot))
            yield from self._wait_until_up(server, config.seconds("start"))
            (answer,) = raised((yield CallServers((ServerCall(number, "kept_record"),))))
        except BaseException:
            yield Uninterrupted(self._leave(server))
            raise
        return msgspec.msgpack.decode(answer, type=KeptRecord | None)

    def _leave(self, server: ServerRecord) -> Procedure[None]:
        yield Ask(self._workers.leave_actor, (server,))

    def resume(self, servers: int) -> Procedure[None]:
        """Go on with the servers that were taken up, and have so many from now on."""
        self.wanted = servers
        self.dedicated = self._workers.candidates()[1]
        up = [server for server in self.servers() if server.up]
        for server in up:
            (code,) = raised((yield CallServers((ServerCall(server.number, "functions_code"),))))
            self.membership.functions.update(code)
        for server in up:
            yield from self.bring(server)

    def bring(self, server: ServerRecord) -> Procedure[None]:
        """Bring a server that was taken up what it lacks, and have it drop what is not this session's."""
        yield from holding([self.tables_change], self._bring_tables(server))
        tables = [spec["id"] for spec in self.membership.specs.values()]
        raised((yield CallServers((ServerCall(server.number, "claim", (tables,)),))))

    # -- changing their number

    def scale(self, servers: int) -> Procedure[None]:
        """Have that many servers; if there are more, retire those that came last."""
        return holding([self.scaling], self._scale(servers))

    def _scale(self, servers: int) -> Procedure[None]:
        staying = sorted(s.number for s in self.servers() if not s.leaving)
        if len(staying) > servers:
            yield InEndpoint(self.membership.retire, (staying[servers:],))
        self.wanted = servers

    def retire(self, number: int) -> Procedure[None]:
        """Have one server emptied, and then closed; another one takes its place, if there is a worker for it."""
        return holding([self.scaling], self._retire(number))

    def _retire(self, number: int) -> Procedure[None]:
        for worker in self._workers.candidates()[0][:1]:
            yield Ask(self._workers.check_versions, ([worker],))
            yield from self.start_server(worker, config.seconds("start"))
        yield InEndpoint(self.membership.retire, ([number],))

    def _close_server(self, server: ServerRecord) -> Procedure[None]:
        yield Ask(self._workers.close, (server,))
        yield InEndpoint(self.membership.remove_server, (server.number,))

    # -- keeping their number

    def maintain(self) -> Procedure[None]:
        """Until the end: replace servers that were lost, retire surplus ones, close retired ones that are empty."""
        while True:
            yield Sleep(MAINTENANCE_SECONDS)
            if self.closed:
                return
            try:
                servers = self.servers()
                if not (self.scaling.locked() or self.tables_change.locked()):
                    # The second lock, because a table that is being made may put shards on an empty server.
                    yield from holding([self.scaling, self.tables_change], self._shrink(servers))
                for server in servers:
                    if server.failed:
                        yield from self._close_server(server)
                    elif server.missed and server.up:
                        yield from holding([self.tables_change], self._catch_up(server))
                for worker in self.spares()[: max(0, self._missing())]:
                    if self._missing() > 0:  # else a silent server has come back while another one was started
                        yield Ask(self._workers.check_versions, ([worker],))
                        yield from self.start_server(worker, config.seconds("start"))
            except Exception as error:
                logger.warning(
                    "parameter server %r: a server could not be replaced: %s", self.membership.session, error
                )
                yield Sleep(RETRY_SECONDS)

    def _catch_up(self, server: ServerRecord) -> Procedure[None]:
        """Make the calls that a server missed while it was out of reach. Then it may have shards again."""
        while server.missed:
            call = ServerCall(server.number, *server.missed[0])
            if isinstance((yield CallServers((call,)))[0], BaseException):
                return  # it is out of reach again
            del server.missed[0]
        server.ready = True

    def _missing(self) -> int:
        """How many servers are to be started. Those that start slowly are there already."""
        return self.wanted - sum(not (s.leaving or s.silent or s.failed) for s in self.servers())

    def _shrink(self, servers: list[ServerRecord]) -> Procedure[None]:
        if self._missing() < 0:  # a server that had been replaced is back
            yield InEndpoint(self.membership.trim, (self.wanted,))
        empty = [s for s in servers if s.leaving and self.membership.empty(s.number)]
        if empty:
            yield Commit()  # until then another controller could still count on their replicas
        for server in empty:
            # While a server keeps the journal, the next controller needs its record.
            if not self.membership.holders.keeps_journal(server.number):
                yield from self._close_server(server)
