"""Server: the Dask actor that holds shards.

It lives on a dedicated Dask worker and opens an endpoint of its own (`wire/endpoint.py`). Its methods are the control
plane, called by the controller through Dask; they run on the worker's actor thread and hand every change of state to
the endpoint's thread. pull and push arrive at the endpoint and are carried out there, start to end.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from distributed import get_worker

from dps.dask_side import host_of, listening_tls
from dps.errors import InputError, LimitError, NotFiniteError, ProtocolError, UnknownTableError
from dps.state.kernels import all_finite
from dps.state.ops import ADD, ASSIGN, PUSH, Op, TableSpec
from dps.state.partition import bound
from dps.state.shard import DenseShard, KeyedShard, make_shard
from dps.state.warm import warm
from dps.wire import frames
from dps.wire.endpoint import Connection, Endpoint, Handler
from dps.wire.frames import HEADER_SIZE, Header, encode_header, padded

__all__ = ["Server"]

LOOK = 1.0  # seconds between two looks whether the worker is still there
PIECE = 1 << 19  # bytes of an answer gathered before they are passed on: the peer reads while we gather more


class Table:
    """A table's shards on this server."""

    def __init__(self, spec: TableSpec, shards: list[int]):
        self.spec = spec
        self.shards: dict[int, DenseShard | KeyedShard] = {n: make_shard(spec, n) for n in shards}
        self.dtype = np.dtype(spec.dtype)
        self.row_bytes = spec.dim * spec.itemsize


class Server:
    """Holds shards of the tables of one parameter server, and answers pulls and pushes.

    Parameters
    ----------
    session : str
        Name of the parameter server.
    number : int
        Which of its servers this is.
    secret : str
        What clients have to know.
    """

    def __init__(self, session: str, number: int, secret: str):
        self.session, self.number = session, number
        self.tables: dict[int, Table] = {}
        self.requests = 0
        worker = get_worker()
        for spec in (TableSpec("warm"), TableSpec("warm", rows=4)):
            warm(spec)
        handlers: dict[int, Handler] = {
            frames.PULL: self._pull,
            frames.PUSH: self._push,
            frames.STATUS: self._status,
        }
        tls = listening_tls(worker)
        self._endpoint = Endpoint(f"server-{session}-{number}", host_of(worker.address), handlers, tls=tls)
        self._endpoint.secrets[session] = secret
        self._endpoint.call(self._end_with, worker)

    # -- control plane: the worker's actor thread

    def address(self) -> str:
        """Host and port of the endpoint, as JSON."""
        return json.dumps([self._endpoint.host, self._endpoint.port])

    def create_table(self, spec: dict[str, Any], shards: list[int]) -> None:
        """Make shards of a new table; it is served from the moment they are all there."""
        table_spec = TableSpec.from_dict(spec)
        warm(table_spec)
        table = Table(table_spec, list(shards))
        self._endpoint.call(self.tables.__setitem__, table_spec.id, table)

    def drop_table(self, table: int) -> None:
        """Forget a table and its rows."""
        self._endpoint.call(self.tables.pop, table, None)

    def settle(self, keep: bool) -> None:
        """A run has ended: step the optimizers with the sums of clocks still open; without `keep`, drop them."""
        self._endpoint.call(self._settle, keep)

    def status(self) -> str:
        """Tables, rows and bytes, as JSON."""
        return json.dumps(self._endpoint.call(self._describe))

    def close(self) -> None:
        """Stop serving; the endpoint's thread ends."""
        self._endpoint.stop()
        self.tables.clear()

    # -- data plane: the endpoint's thread

    def _end_with(self, worker: Any) -> None:
        """Stop when the worker has closed: where it is no process of its own, our thread would go on without it."""
        if worker.status.name in ("closed", "failed"):
            self._endpoint.loop.stop()
        else:
            self._endpoint.loop.call_later(LOOK, self._end_with, worker)

    def _describe(self) -> dict[str, Any]:
        tables = {
            table.spec.name: {
                "rows": sum(len(shard) for shard in table.shards.values()),
                "bytes": sum(shard.nbytes for shard in table.shards.values()),
                "shards": sorted(table.shards),
            }
            for table in self.tables.values()
        }
        open_now = len(self._endpoint.connections)
        return {"server": self.number, "requests": self.requests, "connections": open_now, "tables": tables}

    def _status(self, connection: Connection, header: Header, body: memoryview) -> None:
        connection.reply_json(Header(frames.OK, request=header.request), self._describe())

    def _table(self, header: Header) -> Table:
        table = self.tables.get(header.table)
        if table is None:
            raise UnknownTableError(f"server {self.number} has no table number {header.table}; was it dropped?")
        return table

    def _pull(self, connection: Connection, header: Header, body: memoryview) -> None:
        self.requests += 1
        table = self._table(header)
        parts, used = self._parts(table, header, body)
        if used != len(body):
            raise ProtocolError(f"a pull of {header.count} rows has a body of {len(body)} bytes, not {used}")
        self._answer(connection, header, table, parts)

    def _push(self, connection: Connection, header: Header, body: memoryview) -> None:
        self.requests += 1
        table, count = self._table(header), header.count
        spec = table.spec
        parts, used = self._parts(table, header, body)
        nbytes = count * table.row_bytes
        if used + padded(nbytes) != len(body):
            raise ProtocolError(f"a push of {count} rows of table {spec.name!r} has a body of {len(body)} bytes")
        values = np.frombuffer(body, table.dtype, count * spec.dim, used).reshape(count, spec.dim)
        if spec.finite and spec.dtype != "int64" and not all_finite(values.reshape(-1)):
            raise NotFiniteError(f"a push to table {spec.name!r} holds NaN or infinity, which the table refuses")
        rule = ADD if header.flags & frames.RULE_ADD else ASSIGN if header.flags & frames.RULE_ASSIGN else PUSH
        for shard, keys, _, a, b in parts:  # all that can fail comes before the first change
            if isinstance(shard, KeyedShard) and keys is not None:
                shard.reserve(b - a)
        for shard, keys, start, a, b in parts:
            shard.apply(Op(rule, keys, start, values[a:b], header.clock, header.parties))
        if header.flags & frames.ANSWER:
            self._answer(connection, header, table, parts)
        else:
            connection.reply(Header(frames.OK, request=header.request, count=count))

    def _parts(self, table: Table, header: Header, body: memoryview) -> tuple[list[tuple], int]:
        """The request cut by shard: (shard, keys or None, first row, from, to); and the bytes of body used for it."""
        spec = table.spec
        parts: list[tuple] = []
        if header.count * table.row_bytes > self._endpoint.frame_limit:
            raise LimitError(f"{header.count} rows of table {spec.name!r} do not fit a frame of dps.limits.frame bytes")
        if header.flags & frames.RANGE:
            if spec.rows is None:
                raise InputError(f"table {spec.name!r} is keyed: it has no ranges of rows, name the keys")
            row, end = header.start, header.start + header.count
            for number in range(header.shard, min(header.shard + header.shards, spec.shards)):
                stop = min(end, bound(number + 1, spec.rows, spec.shards))
                if row < stop:
                    shard = self._shard(table, number)
                    shard.check(None, row, stop - row)
                    parts.append((shard, None, row, row - header.start, stop - header.start))
                    row = stop
            if row != end:
                raise InputError(f"rows {row} to {end - 1} of table {spec.name!r} do not lie in the shards named")
            return parts, 0
        used = 8 * (header.shards + header.count)
        if used > len(body):
            raise ProtocolError(f"{header.count} keys in {header.shards} shards do not fit a body of {len(body)} bytes")
        counts = np.frombuffer(body, np.int64, header.shards).tolist()
        keys = np.frombuffer(body, np.int64, header.count, 8 * header.shards)
        a = 0
        for number, count in enumerate(counts, header.shard):
            if count > 0:
                shard = self._shard(table, number)
                shard.check(keys[a : a + count], 0, count)
                parts.append((shard, keys[a : a + count], 0, a, a + count))
                a += count
        if a != header.count or min(counts, default=0) < 0:
            raise ProtocolError(f"the counts of a request for {header.count} keys add up to {sum(counts)}")
        return parts, used

    def _shard(self, table: Table, number: int) -> DenseShard | KeyedShard:
        shard = table.shards.get(number)
        if shard is None:
            raise InputError(f"server {self.number} does not hold shard {number} of table {table.spec.name!r}")
        return shard

    def _answer(self, connection: Connection, header: Header, table: Table, parts: list[tuple]) -> None:
        """Copy the rows into the connection's outgoing buffer and pass them on, piece by piece."""
        nbytes = header.count * table.row_bytes
        buffer = connection.outgoing(HEADER_SIZE + padded(nbytes))
        view = memoryview(buffer)
        answer = Header(frames.OK, request=header.request, count=header.count, body=padded(nbytes))
        view[:HEADER_SIZE] = encode_header(answer)
        out = buffer[HEADER_SIZE : HEADER_SIZE + nbytes].view(table.dtype).reshape(header.count, table.spec.dim)
        step, passed = max(1, PIECE // table.row_bytes), 0
        for shard, keys, start, first, last in parts:
            shard.close_before(header.clock)
            for a in range(first, last, step):
                b = min(a + step, last)
                if keys is None:
                    assert isinstance(shard, DenseShard)
                    shard.pull_range(start + a - first, out[a:b])
                else:
                    shard.pull(keys[a - first : b - first], out[a:b])
                ready = HEADER_SIZE + b * table.row_bytes
                if ready - passed >= PIECE:
                    connection.write(view[passed:ready])
                    passed = ready
        if passed < len(view):
            connection.write(view[passed:])

    def _settle(self, keep: bool) -> None:
        for table in self.tables.values():
            for shard in table.shards.values():
                shard.settle(keep)
