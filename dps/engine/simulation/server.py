"""A server of a simulation: its real role, without the Dask actor around it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from dps import config
from dps.engine.checkpoints.reading import Origins, SavedShard, fill, sources
from dps.engine.checkpoints.store import Store
from dps.engine.coordination.journal import Ballot
from dps.engine.server.checkpoint_writer import CheckpointWriter
from dps.engine.server.requests import SETTLE_SHARE, ServerRole
from dps.engine.server.resharding import AHEAD_SECONDS, BetweenTurns, Resharding, Reshardings
from dps.engine.simulation.beside import MAX_PIECE_SECONDS, SimRunner, SimWriting
from dps.engine.simulation.endpoint import SimEndpoint
from dps.engine.simulation.network import Network
from dps.engine.simulation.observers import Observer
from dps.engine.simulation.world import Party
from dps.engine.state.ops import TableSpec
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.journal_messages import ReturnedServer
from dps.engine.wire.messages import Placement
from dps.errors import CheckpointError, DPSError

__all__ = ["MAX_POLL_SECONDS", "POLL_SECONDS", "SECRET", "SESSION", "SimServer"]

Reply: TypeAlias = Callable[[object], None]  # takes a server's answer, or its error
SESSION, SECRET = "simulated", "00" * 32
POLL_SECONDS, MAX_POLL_SECONDS = 0.01, 0.1  # between two checks whether the called servers have answered
BLOCKING = {
    "save",
    "end_cut",
    "load",
    "settle",
    "copy_ahead",
    "reshard",
}  # methods of a server that wait, for its disk or its copies
MAX_LOAD_SECONDS = 0.02  # that a server takes to read a shard from its store,


class SimServerRole(ServerRole):
    """A server's role, whose placements are told to observers before it adopts them."""

    def __init__(self, observers: Sequence[Observer], *args: Any, **options: Any):
        self._observers = observers
        super().__init__(*args, **options)

    def adopt(self, placement: Placement) -> None:
        """Adopt a new placement; not one that is older than the one that it has."""
        if placement.epoch > self.epoch and not self.stopped:
            for observer in self._observers:
                observer.placement_adopted(self.number, placement)
        super().adopt(placement)


class SimServer:
    """A server's role without the Dask actor around it."""

    def __init__(self, network: Network, party: Party, number: int, controller: tuple[str, int]):
        self.party, self.number = party, number
        self.scheduler: Party | None = None  # the one that its worker has joined
        self.claimed = True  # the controller of that scheduler has it
        self.endpoint = SimEndpoint(network, party)
        runner = SimRunner(party)
        self.role = SimServerRole(
            network.observers,
            self.endpoint,
            SESSION,
            number,
            SECRET,
            controller,
            runner,
            runner,
            wall=self.endpoint.now,
        )
        relay = self.role.relay
        relay.piece, relay.rate = network.dump_piece, network.dump_rate
        self.endpoint.handlers.update(self.role.handlers)
        self.endpoint.service = self.role.service
        self.endpoint.secrets.update({SESSION: SECRET, of_servers(SESSION): SECRET})
        self.reshardings = Reshardings(self.role)
        self.checkpoint_writer = CheckpointWriter(self.role, functools.partial(SimWriting, party, number))
        self.role.start()

    def call(self, method: str, args: tuple[object, ...], reply: Reply) -> None:
        """Do what a method of `server/actor.py` does; `reply` gets its result, or its error."""

        def work() -> None:
            try:
                reply(getattr(self, f"_{method}")(*args))
            except Exception as error:
                reply(error)

        if method in BLOCKING:
            self.party.spawn(work)
        else:
            work()

    def returned(self) -> ReturnedServer:
        """What a controller must know to take it up."""
        holder = self.role.holder
        return ReturnedServer(self.number, self.party.name, (SECRET, SECRET), holder.followed, holder.record)

    def _follow(self, ballot: Ballot, controller: tuple[str, int]) -> None:
        self.role.heartbeat.follow(Ballot(*ballot), controller)

    def _kept_record(self) -> bytes:
        return msgspec.msgpack.encode(self.role.holder.record)

    def _functions_code(self) -> dict[str, bytes]:
        return dict(self.role.functions.codes)

    def _claim(self, tables: list[int]) -> None:
        self.reshardings.end_all()
        for table in [number for number in self.role.tables if number not in tables]:
            self.role.drop(table)
        self.claimed = True

    def _add_function(self, identity: str, code: bytes) -> None:
        self.role.functions.add(identity, code)

    def _create_table(self, spec: dict[str, object], shards: list[int]) -> None:
        self.role.create(TableSpec.from_dict(spec), shards)

    def _copy_ahead(self, table: int, spec: dict[str, object], shards: list[int]) -> bool:
        begun = self.reshardings.of(table, TableSpec.from_dict(spec).opened(), shards)
        return self._turn(begun, begun.copy_ahead, AHEAD_SECONDS)

    def _reshard(self, table: int, spec: dict[str, object], shards: list[int]) -> bytes:
        begun = self.reshardings.of(table, TableSpec.from_dict(spec).opened(), shards)
        self._turn(begun, begun.turn)
        self.reshardings.end(table)
        return msgspec.msgpack.encode(begun.versions)

    def _turn(self, begun: Resharding, turn: Callable[[], BetweenTurns | None], seconds: float = math.inf) -> bool:
        until = self.party.now() + seconds
        try:
            while (between := turn()) is not None:
                self.party.sleep(between.seconds + self.party.world.random.uniform(0.0, MAX_PIECE_SECONDS))
                if between.listing is not None:
                    between.listing()
                if self.party.now() > until:
                    return True
        except BaseException:
            self.reshardings.end(begun.table)
            raise
        return False

    def _drop_table(self, table: int) -> None:
        self.reshardings.end(table)
        self.role.drop(table)

    def _settle(self, keep: bool | None, over: list[list[int]]) -> bytes:
        settled, every = self.role.settle(keep, over)
        until = self.party.now() + SETTLE_SHARE * config.seconds("silence")
        while every.left and self.party.now() < until:
            self.party.sleep(POLL_SECONDS)
        return msgspec.msgpack.encode([each[:2] for each in settled if each.confirmed])

    def _cut(self, tables: list[int], clock: int | None, parent: str | None, track: bool) -> bytes:
        return msgspec.msgpack.encode(self.checkpoint_writer.cut(tables, clock, parent, track))

    def _complete(self) -> None:
        self.checkpoint_writer.complete()

    def _save(self, url: str, name: str, storage_options: dict[str, object]) -> None:
        self.checkpoint_writer.save(url, name, storage_options)

    def _saved(self) -> bytes:
        return msgspec.msgpack.encode(self.checkpoint_writer.saved())

    def _end_cut(self, name: str | None) -> None:
        self.checkpoint_writer.end(name)
        self.checkpoint_writer.wait_for_writing()

    def _load(
        self, table: int, url: str, name: str, shards: list[int], origins: Origins, options: dict[str, object]
    ) -> None:
        replicas = self.role.tables[table].replicas
        for number in shards:
            self.party.sleep(self.party.world.random.uniform(0.0, MAX_LOAD_SECONDS))
            store = Store(url, storage_options=options)
            spec, chain = replicas[number].spec, store.chain(name)
            which = sources(chain[-1].tables[spec.name], spec, number)
            saved = [SavedShard(store, chain, spec.name, n) for n in which]
            try:
                fill(replicas[number].shard, saved, Origins(*origins))
            except DPSError:
                raise
            except Exception as error:
                raise CheckpointError(f"{error!r:.500}") from error
