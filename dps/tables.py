"""Table: a table's copies on a server; requests for them are cut by shard here, and answered."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dps.copies import Copy, Part
from dps.errors import InputError, LimitError, MovedError, ProtocolError
from dps.meters import Meter
from dps.state.ops import ADD, ASSIGN, CLOSE, PUSH, RETIRE, Op, TableSpec
from dps.state.partition import bound
from dps.state.shard import DenseShard
from dps.wire import frames
from dps.wire.frames import HEADER_SIZE, Header, encode_header, padded

__all__ = ["Request", "Table", "op_of"]

PIECE = 1 << 19  # bytes of an answer gathered before they are passed on: the peer reads while we gather more


class Request(NamedTuple):
    """A pull or push, cut by shard."""

    parts: list[Part]
    keys: np.ndarray | None
    used: int  # bytes of the body


class Table:
    """A table's copies on this server."""

    def __init__(self, spec: TableSpec, server: int, frame_limit: int):
        self.spec, self.server, self.frame_limit = spec, server, frame_limit
        self.copies: dict[int, Copy] = {}
        self.elsewhere: dict[int, int] = {}  # shard -> the last placement (its epoch) that gave us no part in it
        self.dtype = np.dtype(spec.dtype)
        self.row_bytes = spec.dim * spec.itemsize
        self.waits = spec.ack == "copies"
        self.meter = Meter(spec.shards, self.row_bytes)

    def cut(self, header: Header, body: memoryview, primary: bool = True) -> Request:
        """A request cut by shard; refused unless this server is the primary of all of them (or need not be).

        A push that stands for rows of data has a part for each shard that it names, also without keys there: so the
        divisor of a mean is the same in all shards.
        """
        spec = self.spec
        parts: list[Part] = []
        if header.count * self.row_bytes > self.frame_limit:
            raise LimitError(f"{header.count} rows of table {spec.name!r} do not fit a frame of dps.limits.frame bytes")
        if header.flags & frames.RANGE:
            if spec.rows is None:
                raise InputError(f"table {spec.name!r} is keyed: it has no ranges of rows, name the keys")
            row, end = header.start, header.start + header.count
            for number in range(header.shard, min(header.shard + header.shards, spec.shards)):
                stop = min(end, bound(number + 1, spec.rows, spec.shards))
                if row < stop or header.rows > 0:
                    copy, stop = self.copy(number, primary), max(row, stop)
                    if not copy.joining:
                        copy.shard.check(None, row, stop - row)
                    parts.append(Part(copy, None, row, row - header.start, stop - header.start))
                    row = stop
            if row != end:
                raise InputError(f"rows {row} to {end - 1} of table {spec.name!r} do not lie in the shards named")
            return Request(parts, None, 0)
        used = 8 * (header.shards + header.count)
        if header.shards > spec.shards or used > len(body):
            raise ProtocolError(f"{header.count} keys in {header.shards} shards do not fit a body of {len(body)} bytes")
        counts = np.frombuffer(body, np.int64, header.shards).tolist()
        keys = np.frombuffer(body, np.int64, header.count, 8 * header.shards)
        a = 0
        for number, count in enumerate(counts, header.shard):
            if count > 0 or (header.rows > 0 and count == 0):
                copy = self.copy(number, primary)
                if not copy.joining:
                    copy.shard.check(keys[a : a + count], 0, count)
                parts.append(Part(copy, keys[a : a + count], 0, a, a + count))
                a += count
        if a != header.count or min(counts, default=0) < 0:
            raise ProtocolError(f"the counts of a request for {header.count} keys add up to {sum(counts)}")
        return Request(parts, keys, used)

    def scan(self, header: Header) -> np.ndarray:
        """Some keys of one shard, in the order of their birth."""
        if self.spec.rows is not None:
            raise InputError(f"table {self.spec.name!r} has no keys of its own, but rows 0 to {self.spec.rows - 1}")
        if 8 * header.count > self.frame_limit or header.start < 0:
            raise LimitError(f"{header.count} keys from {header.start} on do not fit a frame of dps.limits.frame bytes")
        keys = self.copy(header.shard, primary=True).shard.index.keys()
        return keys[header.start : header.start + header.count]

    def answer(self, connection: Any, header: Header, parts: list[Part], repeated: Op | None = None) -> None:
        """Copy the rows into the connection's outgoing buffer and pass them on, piece by piece."""
        certificate = b""
        if header.flags & frames.CERTIFICATE:
            certificate = frames.encode_json({p.copy.number: p.copy.shard.ledger.certificate().tolist() for p in parts})
        nbytes = header.count * self.row_bytes
        buffer = connection.outgoing(HEADER_SIZE + padded(nbytes))
        view = memoryview(buffer)
        answer = Header(frames.OK, request=header.request, count=header.count, body=padded(nbytes) + len(certificate))
        view[:HEADER_SIZE] = encode_header(answer)
        out = buffer[HEADER_SIZE : HEADER_SIZE + nbytes].view(self.dtype).reshape(header.count, self.spec.dim)
        step, passed = max(1, PIECE // self.row_bytes), 0
        for copy, keys, start, first, last in parts:
            if repeated is not None and self._kept(copy, repeated, out[first:last]):
                continue
            for a in range(first, last, step):
                b = min(a + step, last)
                if keys is None:
                    assert isinstance(copy.shard, DenseShard)
                    copy.shard.pull_range(start + a - first, out[a:b])
                else:
                    copy.shard.pull(keys[a - first : b - first], out[a:b])
                ready = HEADER_SIZE + b * self.row_bytes
                if ready - passed >= PIECE:
                    connection.write(view[passed:ready])
                    passed = ready
        if passed < len(view):
            connection.write(view[passed:])
        if certificate:
            connection.write(certificate)

    @staticmethod
    def _kept(copy: Copy, op: Op, out: np.ndarray) -> bool:
        """The answer that an op was given first, if it is still known."""
        kept = copy.shard.ledger.answer(op.origin, op.clock, op.number) if op.origin else None
        if kept is None or kept.shape != out.shape:
            return False
        out[:] = kept
        return True

    def copy(self, number: int, primary: bool = False) -> Copy:
        """A shard's copy on this server, if it is there (and the primary)."""
        copy = self.copies.get(number)
        if copy is None or (primary and not copy.serves):
            if not 0 <= number < self.spec.shards:
                raise InputError(f"table {self.spec.name!r} has {self.spec.shards} shards; there is no {number}")
            raise MovedError(f"server {self.server} does not serve shard {number} of table {self.spec.name!r} now")
        return copy

    def size(self) -> tuple[int, int]:
        """Rows that this server is the primary of; bytes of all that it has."""
        rows = sum(len(copy.shard) for copy in self.copies.values() if copy.primary)
        return rows, sum(copy.shard.nbytes for copy in self.copies.values() if not copy.joining)

    def describe(self) -> dict[str, Any]:
        """Rows, bytes, and which copies are here."""
        rows, nbytes = self.size()
        primary: dict[bool, list[int]] = {True: [], False: []}
        for number, copy in sorted(self.copies.items()):
            primary[copy.primary].append(number)
        return {"rows": rows, "bytes": nbytes, "shards": primary[True], "copies": primary[False]}


def op_of(header: Header) -> Op:
    """The op of a frame, but for its rows."""
    answer = bool(header.flags & frames.ANSWER)
    if header.flags & frames.CONTROL:
        rule = RETIRE if header.flags & frames.RULE_ADD else CLOSE
        values: Any = np.empty((0, 1))
    else:
        rule = ADD if header.flags & frames.RULE_ADD else ASSIGN if header.flags & frames.RULE_ASSIGN else PUSH
        values = None
    who = (header.trainer, header.attempt, header.number)
    return Op(rule, None, header.start, values, header.clock, header.parties, *who, answer, header.rows)
