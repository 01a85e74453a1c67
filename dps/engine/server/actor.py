"""Server: the Dask actor that holds shards. `requests.py` says what it does; this file gives it a worker and a thread.

The actor lives on a dedicated Dask worker and opens an endpoint of its own (`wire/endpoint.py`). Its methods are the
control plane: the controller calls them through Dask. They run on the worker's actor thread, and hand every change of
state to the endpoint's thread. Pulls, pushes and the frames of other servers arrive at the endpoint.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import dask
import msgspec
from dask.utils import parse_bytes
from distributed import Worker, get_worker
from distributed.system import MEMORY_LIMIT

from dps import config
from dps.engine.checkpoints.reading import Origins, fill_all
from dps.engine.checkpoints.store import Store
from dps.engine.coordination.journal import Ballot
from dps.engine.core.requests.polling import Polling
from dps.engine.core.shards.ledger import Ledger
from dps.engine.daskapi.nanny import is_bounded, stop_memory_monitor
from dps.engine.daskapi.processes import host_of, linking_tls, listening_tls
from dps.engine.functions.definition import opened
from dps.engine.server.beside_thread import BesideThread
from dps.engine.server.checkpoint_writer import CheckpointWriter, WritingThread
from dps.engine.server.closings import Settled
from dps.engine.server.function_process import FunctionRunner
from dps.engine.server.hold import held_server, hold_with
from dps.engine.server.replicas import new_replicas
from dps.engine.server.requests import SETTLE_SHARE, ServerRole
from dps.engine.server.resharding import AHEAD_SECONDS, BetweenTurns, Resharding, Reshardings
from dps.engine.state.ledger_parts import last_clocks
from dps.engine.state.memory import bytes_of_memory
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.hosts import host_load, starved
from dps.engine.telemetry.server_meter import ServerMeter, process_usage
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.journal_messages import ReturnedServer
from dps.engine.wire.once import Once

__all__ = ["Server"]

WORKER_CHECK_SECONDS = 0.25  # between two checks that the worker has not closed


class Server:
    """Holds shards of the tables of one parameter server, and answers pulls and pushes.

    `secrets` are the one that clients prove, and the one that servers prove.
    """

    def __init__(self, session: str, number: int, secrets: tuple[str, str], controller: tuple[str, int]):
        worker = get_worker()
        self.session, self.number, self._secrets = session, number, (secrets[0], secrets[1])
        self.released, self.awaits_restart, self.claimed = False, False, True
        self.checkpoint: str | None = None  # the last one in which it has taken part, in words
        self._saving = ""
        self._closing = Once(f"closing server {number}")
        name, host = f"server-{session}-{number}", host_of(worker.address)
        seconds = config.polling("server-polling")
        polling = Polling(seconds) if seconds else None
        self.endpoint = Endpoint(name, host, {}, None, listening_tls(worker), linking_tls(worker), polling)
        meters = ServerMeter(time.perf_counter, process_usage, starved, host_load, polling, time.thread_time)
        runner = FunctionRunner(self.endpoint, f"dps-functions-{session}-{number}")
        beside = BesideThread(self.endpoint, f"dps-beside-{session}-{number}")
        limit = memory_of(worker)
        budget = bytes_of_memory(dask.config.get("dps.memory"), limit, parse_bytes)
        self.role = ServerRole(
            self.endpoint,
            session,
            number,
            secrets[1],
            (controller[0], controller[1]),
            runner,
            beside,
            meters,
            memory=budget,
            directory=config.spill_directory() or worker.local_directory,
        )
        self.reshardings = Reshardings(self.role)
        self.checkpoint_writer = CheckpointWriter(self.role, partial(WritingThread, self.role, self.endpoint))
        self.endpoint.call(self._begin, session, secrets, worker)
        if is_bounded(worker, budget, limit):
            worker.loop.add_callback(stop_memory_monitor, worker, config.seconds("connect"))
        hold_with(worker, self)

    def _begin(self, session: str, secrets: tuple[str, str], worker: Worker) -> None:
        self.endpoint.handlers.update(self.role.handlers)
        self.endpoint.service = self.role.service
        self.endpoint.secrets.update(zip((session, of_servers(session)), secrets, strict=True))
        self.role.start()
        self._stop_with(worker)

    def _stop_with(self, worker: Worker) -> None:
        """Stop when the worker has closed, because the endpoint's thread outlives a worker that is no process.

        A worker that is held (`hold.py`) is closing until the hold is over.
        """
        if worker.status.name in ("closed", "failed"):
            self.checkpoint_writer.end(None)
            self.role.stop()
            self.endpoint.loop.stop()
        else:
            self.endpoint.later(WORKER_CHECK_SECONDS, self._stop_with, worker)

    def add_function(self, identity: str, code: bytes) -> None:
        """Take a function of the user, as cloudpickle, under its number."""
        opened(identity, code)  # in this thread first, because modules that it imports may take long
        self.endpoint.call(self.role.functions.add, identity, code)

    def create_table(self, spec: dict[str, Any], shards: list[int]) -> None:
        """Make a new table with initial replicas of these shards; the server serves it once a placement says so."""
        table = TableSpec.from_dict(spec).opened()
        self.endpoint.call(self.role.memory.check_table, table, shards)
        self.endpoint.call(self.role.take_table, table, new_replicas(table, shards, self.role.directory))

    def copy_ahead(self, table: int, spec: dict[str, Any], shards: list[int]) -> bool:
        """Copy rows of these shards of a table, which is to be cut anew, while requests go on: for a short time, so
        that other calls get their turn. Returns whether many are left.
        """
        begun = self.endpoint.call(self.reshardings.of, table, TableSpec.from_dict(spec).opened(), shards)
        return self._turn(begun, begun.copy_ahead, AHEAD_SECONDS)

    def reshard(self, table: int, spec: dict[str, Any], shards: list[int]) -> bytes:
        """Make a new table of these shards of another one, which rest meanwhile: see `resharding.py`. Returns
        (shard, version) of each: `Shards` of `wire/messages.py`, encoded.
        """
        begun = self.endpoint.call(self.reshardings.of, table, TableSpec.from_dict(spec).opened(), shards)
        self._turn(begun, begun.turn)
        self.endpoint.call(self.reshardings.end, table)
        return msgspec.msgpack.encode(begun.versions)

    def _turn(self, begun: Resharding, turn: Callable[[], BetweenTurns | None], seconds: float = math.inf) -> bool:
        """Have the loop take turns, for so many seconds at most; whether there is more to do."""
        until = time.monotonic() + seconds
        try:
            while (between := self.endpoint.call(turn)) is not None:
                if between.listing is not None:
                    between.listing()
                time.sleep(between.seconds)
                if time.monotonic() > until:
                    return True
        except BaseException:
            self.endpoint.call(self.reshardings.end, begun.table)
            raise
        return False

    def drop_table(self, table: int) -> None:
        self.endpoint.call(self.reshardings.end, table)
        self.endpoint.call(self.role.drop, table)

    def settle(self, keep: bool | None, over: list[list[int]]) -> bytes:
        """A run has ended: see :meth:`dps.engine.server.requests.ServerRole.settle`. Returns (table, shard) of those
        whose copies have confirmed it in time: `Shards` of `wire/messages.py`, encoded.
        """
        done = threading.Event()

        def settle() -> list[Settled]:
            settled, every = self.role.settle(keep, over)
            every.then(done.set)
            return settled

        settled = self.endpoint.call(settle)
        done.wait(SETTLE_SHARE * config.seconds("silence"))
        return msgspec.msgpack.encode([each[:2] for each in settled if each.confirmed])

    def cut(self, tables: list[int], clock: int | None, parent: str | None, track: bool) -> bytes:
        """Begin a checkpoint: see `checkpoint_writer.py`. Returns the shards that are cut: `Shards`, encoded."""
        return msgspec.msgpack.encode(self.endpoint.call(self.checkpoint_writer.cut, tables, clock, parent, track))

    def complete(self) -> None:
        self.endpoint.call(self.checkpoint_writer.complete)

    def save(self, url: str, name: str, storage_options: dict[str, object]) -> None:
        self._saving = f"checkpoint {name!r} in {url}"
        self.checkpoint_writer.save(url, name, storage_options)

    def saved(self) -> bytes:
        """The records of the files, a list of `FileRecord`, encoded; None while some are still being written."""
        return msgspec.msgpack.encode(self.checkpoint_writer.saved())

    def end_cut(self, name: str | None) -> None:
        if name is not None:
            self.checkpoint = self._saving
        self.endpoint.call(self.checkpoint_writer.end, name)
        self.checkpoint_writer.wait_for_writing()

    def load(
        self,
        table: int,
        url: str,
        name: str,
        shards: list[int],
        origins: tuple[Any, ...],
        storage_options: dict[str, object],
    ) -> None:
        """Fill the replicas of a new table, which no client can see yet, from a checkpoint."""
        replicas = self.role.tables[table].replicas
        if shards:
            store = Store(url, storage_options=storage_options)
            of_table = replicas[shards[0]].spec.name
            fill_all({n: replicas[n].shard for n in shards}, store, name, of_table, Origins(*origins))

    def status(self) -> bytes:
        """Tables, rows and bytes: a `ServerAnswer` of `telemetry/snapshot.py`, encoded."""
        return msgspec.msgpack.encode(self.endpoint.call(self.role.status))

    @staticmethod
    def taken_up(session: str, number: int, ballot: tuple[int, str], controller: tuple[str, int]) -> Server:
        """A server that this process has held; it follows another controller from now on, which listens there.

        The controller makes an actor of it by calling this in place of the class.
        """
        server = held_server(get_worker(), session, number)
        assert isinstance(server, Server)
        server.endpoint.call(server.role.heartbeat.follow, Ballot(*ballot), (controller[0], controller[1]))
        return server

    def kept_record(self) -> bytes:
        """The record of the journal that this server keeps, a `KeptRecord`, encoded; None where there is none."""
        return msgspec.msgpack.encode(self.endpoint.call(lambda: self.role.holder.record))

    def functions_code(self) -> dict[str, bytes]:
        """The code of all functions of users, by their numbers."""
        return dict(self.endpoint.call(lambda: self.role.functions.codes))

    def last_clocks(self, origins: list[list[int]]) -> bytes:
        """The clocks of the last ops of these origins, [first, how many], in all replicas here: a dict, encoded."""
        found: dict[int, int] = {}
        for ledger in self.endpoint.call(self._ledgers):
            for origin, clock in self.endpoint.call(last_clocks, ledger, origins).items():
                found[origin] = max(clock, found.get(origin, clock))
        return msgspec.msgpack.encode(found)

    def _ledgers(self) -> list[Ledger]:
        return [each.shard.ledger for table in self.role.tables.values() for each in table.replicas.values()]

    def claim(self, tables: list[int]) -> None:
        """The controller has taken over: drop all tables but these, which it does not know, and do not wait for it."""
        self.endpoint.call(self.reshardings.end_all)
        for table in [number for number in list(self.role.tables) if number not in tables]:
            self.endpoint.call(self.role.drop, table)
        self.claimed, self.awaits_restart = True, False

    def returned(self, worker: str) -> bytes:
        """What a controller must know to take over: a `ReturnedServer`, encoded."""
        return msgspec.msgpack.encode(self.endpoint.call(self._returned, worker))

    def _returned(self, worker: str) -> ReturnedServer:
        holder = self.role.holder
        return ReturnedServer(self.number, worker, self._secrets, holder.followed, holder.record)

    def end_with_worker(self) -> None:
        """The scheduler ends on purpose: the server is not held, but ends with its worker."""
        self.released = True

    def await_restart(self) -> None:
        """The scheduler ends on purpose, and another one follows: the server is held this once."""
        self.awaits_restart = True

    def close(self) -> None:
        self._closing(self._close)

    @property
    def closed(self) -> bool:
        return self.role.stopped

    def _close(self) -> None:
        self.checkpoint_writer.close()
        self.endpoint.call(self.role.stop)
        self.endpoint.stop()


def memory_of(worker: Worker) -> int:
    """Bytes that a worker may take: the limit that it has, or else all that there are, for it or for its container."""
    manager = getattr(worker, "memory_manager", None)
    return int(getattr(manager, "memory_limit", None) or MEMORY_LIMIT)
