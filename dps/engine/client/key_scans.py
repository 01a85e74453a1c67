"""KeyScans: reads the keys of keyed tables, shard after shard, in the name of one client.

A server answers a SCAN with some of the keys of a shard, in the order of their creation, so a scan goes on behind the
keys that it has. Where the shard has moved to another server meanwhile, that server is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dps.engine.client.session import BACK_OFF_SECONDS, RETRIED, ClientSession
from dps.engine.client.ticket import Pending, SentCall
from dps.engine.state.ops import TableSpec
from dps.engine.wire.channel import Request
from dps.engine.wire.headers import Scan
from dps.errors import DataLostError, InputError, UnknownTableError

__all__ = ["KeyScans"]

KEYS_A_SCAN = 1 << 20


class SentScans(SentCall):
    """The first scan of each of some shards, on its way; the rest is asked for when the keys are wanted."""

    __slots__ = ("by_shard", "keys", "spec")

    def __init__(self, sender: KeyScans, spec: TableSpec, by_shard: dict[int, Request | None]):
        super().__init__(sender, "pull", [request for request in by_shard.values() if request is not None])
        self.spec, self.by_shard = spec, by_shard
        self.keys: list[np.ndarray] = []


class KeyScans:
    def __init__(self, session: ClientSession):
        self._session, self.now = session, session.now

    def iterate(self, table: str, shard: int | None) -> Iterator[np.ndarray]:
        session = self._session
        with session.lock:
            spec = keyed_spec(session, table)
        for number in shards_of(spec, shard):
            start, count = 0, KEYS_A_SCAN
            while count == KEYS_A_SCAN:
                with session.lock:
                    session.meter.begin(session.now())
                    keys = self._scan(spec, number, start, session.now() + session.patience)
                    session.meter.lap("pull", session.now())
                start, count = start + len(keys), len(keys)
                if count:
                    yield keys

    def send(self, table: str, shard: int | None) -> Pending[list[np.ndarray]]:
        session = self._session
        with session.lock:
            spec = keyed_spec(session, table)
            session.steady()
            sent = SentScans(self, spec, {number: self._ask(spec, number) for number in shards_of(spec, shard)})
        return Pending((sent,), lambda: sent.keys)

    # -- what a `Pending` asks of the sender of its calls

    def poll(self, call: SentCall) -> None:
        self._session.poll(call)

    def result(self, call: SentCall, timeout: float | None) -> None:
        assert isinstance(call, SentScans)
        session = self._session
        deadline = session.now() + (session.patience if timeout is None else timeout)
        with session.lock:
            session.meter.begin(session.now())
            try:
                found: list[np.ndarray] = []
                for number, request in call.by_shard.items():
                    start, count, first = 0, KEYS_A_SCAN, request
                    while count == KEYS_A_SCAN:
                        keys = self._scan(call.spec, number, start, deadline, first)
                        start, count, first = start + len(keys), len(keys), None
                        if count:
                            found.append(keys)
                call.keys, call.by_shard = found, {}
            finally:
                session.meter.lap(call.verb, session.now())

    # -- inside

    def _ask(self, spec: TableSpec, shard: int) -> Request | None:
        """The first scan of a shard, sent; None where its server is not reached."""
        try:
            return self._sent(spec, shard, 0)
        except RETRIED:
            return None

    def _sent(self, spec: TableSpec, shard: int, start: int) -> Request:
        session = self._session
        route = session.route(spec.name)
        if route.spec.id != spec.id:
            raise UnknownTableError(f"table {spec.name!r} was replaced while its keys were read; begin again")
        server = next(server for server, first, end in route.runs if first <= shard < end)
        if server < 0:
            raise DataLostError(f"table {spec.name!r}: the last copy of shard {shard} is gone; {session.remedy}")
        scan = Scan(spec.id, session.epoch, shard, start, KEYS_A_SCAN)
        return session.channel(server).ask(scan.header())

    def _scan(
        self, spec: TableSpec, shard: int, start: int, deadline: float, sent: Request | None = None
    ) -> np.ndarray:
        """Keys of a shard behind the `start` oldest ones; asked again where the shard has moved."""
        session = self._session
        while True:
            try:
                if sent is None:
                    session.steady()
                    sent = self._sent(spec, shard, start)
                return np.frombuffer(bytes(sent.result(deadline).body), np.int64)
            except RETRIED as error:
                sent = None
                if isinstance(error, DataLostError) or session.now() > deadline:
                    raise
                session.sleep(BACK_OFF_SECONDS[1])
                session.recover(deadline)


def keyed_spec(session: ClientSession, table: str) -> TableSpec:
    spec = session.route(table).spec
    if not spec.keyed:
        raise InputError(f"table {spec.name!r} is dense: its keys are the rows 0 to {(spec.rows or 0) - 1}")
    return spec


def shards_of(spec: TableSpec, shard: int | None) -> list[int]:
    return list(range(spec.shards)) if shard is None else [shard]
