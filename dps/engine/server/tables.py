"""The replicas of one table on a server: a request is cut by shard here, and answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dps.engine.core.codec import bytes_of_row, decode, encode
from dps.engine.core.requests.key_lists import KeyLists
from dps.engine.core.requests.request import Parts
from dps.engine.core.shards.rows import gather
from dps.engine.core.shards.states import TableState
from dps.engine.server.replicas import Replica, ReplicaPart
from dps.engine.state.ledger_parts import certificates
from dps.engine.state.op_views import AgeOp, CloseOp, RetireOp
from dps.engine.state.ops import ADD, AGE, ASSIGN, DELETE, PUSH, RETIRE, ROWS, Op, TableSpec
from dps.engine.state.partition import group
from dps.engine.state.scan import FoundRows
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.telemetry.server_meter import TableMeter
from dps.engine.telemetry.snapshot import HeldRows, Turnover
from dps.engine.wire import frames
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_header, pack_array, padded, unpack_items
from dps.engine.wire.headers import AgeRows, CloseSums, RetireOrigins, Scan, ScanAnswer
from dps.engine.wire.protocols import RoleConnection
from dps.errors import InputError, KeyRangeError, LimitError, MovedError, ProtocolError

__all__ = ["MAX_KEPT_RESULT_BYTES", "MAX_MORE_BYTES", "ServerTable", "TableRequest", "control_header", "more_of"]
__all__ += ["keys_header", "op_of", "rows_after", "rows_header", "unpacking"]

# flags of a frame -> rule of the op
RULES = {0: PUSH, frames.RULE_ADD: ADD, frames.RULE_ASSIGN: ASSIGN, frames.RULE_DELETE: DELETE, frames.RULE_ROWS: ROWS}
MAX_KEPT_RESULT_BYTES = 1 << 16  # of what a function returned for a shard, which the ledger keeps
MAX_MORE_BYTES = MAX_KEPT_RESULT_BYTES + 4096  # in a frame to the copies, beside rows and keys
PIECE_BYTES = 1 << 19  # of an answer that are passed on at a time: the peer reads them while more rows are gathered


class TableRequest(NamedTuple):
    """A pull or push, cut by shard."""

    parts: list[ReplicaPart]
    keys: np.ndarray | None
    used: int  # bytes of the body


class ServerTable(TableState):
    """The replicas of one table on this server."""

    replicas: dict[int, Replica]
    meter: TableMeter

    def __init__(self, spec: TableSpec, server: int, frame_limit: int):
        self.spec, self.server, self.frame_limit = spec, server, frame_limit
        self.reads_copies = spec.reads == "copies"
        self.elsewhere: dict[int, int] = {}  # shard -> epoch of the last placement that gave this server no part in it
        self.dtype = np.dtype(spec.dtype)
        self._parts = Parts()
        self.refused = 0  # requests that the budget had no room for, since the table is here
        self.warned = self.rank_failed = False  # that its budget is nearly full; that its function of rows has failed
        pulled, pushed = spec.wire.codecs
        super().__init__(
            dtype=self.dtype.num,
            dim=spec.dim,
            shard_map=spec.shard_map,
            finite=spec.finite,
            aggregated=spec.aggregate is not None,
            replicated=spec.copies > 1,
            waits=spec.ack == "copies",
            kernel=spec.optimizer.kernel,
            row_start=spec.absent_start(),
            meter=TableMeter(spec.shards, spec.dim * spec.itemsize, bytes_of_row(pulled, spec.dim, spec.itemsize)),
            pulled=pulled,
            pushed=pushed,
        )

    def cut(self, header: Header, body: memoryview, primary: bool = True) -> TableRequest:
        """Cut a request by shard. With `primary`, this server has to be the primary of each of them.

        A push that stands for rows of data gets a part for each shard that it names, also for a shard without keys in
        it, because the divisor of a mean has to be the same in all shards.
        """
        spec, is_range = self.spec, header.flags & frames.RANGE
        used = 0 if is_range else 8 * (header.shards + header.count)
        if header.count * self.row_bytes > self.frame_limit:
            raise LimitError(f"{header.count} rows of table {spec.name!r} do not fit a frame of dps.limits.frame bytes")
        if header.kind == frames.PULL and header.flags & frames.NARROW and not self.pulled:
            raise ProtocolError(f"a narrow pull of table {spec.name!r}, which travels by {spec.wire!r}")
        if is_range and spec.rows is None:
            raise InputError(
                f"table {spec.name!r} is keyed: a range of its keys can be pulled, and for all else name the keys"
            )
        if not is_range and (header.shards > spec.shards or used > len(body)):
            raise ProtocolError(f"{header.count} keys in {header.shards} shards do not fit a body of {len(body)} bytes")
        divided = self._parts.divide(self, header, body)
        if divided is None and is_range:
            rows = f"rows {header.start} to {header.start + header.count - 1}"
            if header.start < 0:
                raise KeyRangeError(f"{rows} were asked of table {spec.name!r}, which begins with row 0")
            raise InputError(f"{rows} of table {spec.name!r} do not lie in the shards named")
        if divided is None:
            counts = np.frombuffer(body, np.int64, header.shards)
            raise ProtocolError(f"the counts of a request for {header.count} keys add up to {counts.sum()}")
        keys = None if is_range else np.frombuffer(body, np.int64, header.count, 8 * header.shards)
        parts = []
        for number, start, a, b in divided:
            replica, named = self.replica(number, primary), None if keys is None else keys[a:b]
            if not replica.joining:
                replica.shard.check(named, start, b - a)
            if primary and named is not None:  # a backup takes what its primary has checked
                self.check_own(number, named)
            parts.append(ReplicaPart(replica, named, start, a, b))
        return TableRequest(parts, keys, used)

    def named(self, header: Header, body: memoryview) -> list[Replica]:
        """The replicas of the shards that a request of a client is for."""
        if header.kind == frames.SCAN:
            return [self.replica(header.shard, primary=True)]
        return [part.replica for part in self.cut(header, body).parts]

    def check_own(self, number: int, keys: np.ndarray) -> None:
        """Refuse keys that belong to other shards, because a second row of a key would come to life here."""
        if self.shard_map.cells is None:
            return
        stray = self.shard_map.stray(keys, number)
        if stray >= 0:
            key = keys[stray : stray + 1]
            owner = int(np.argmax(np.diff(group(key, self.shard_map).starts)))
            raise InputError(
                f"table {self.spec.name!r}: key {int(key[0])} belongs to shard {owner} by {self.spec.partition!r}, and "
                f"a client asked shard {number} for it: that client divides keys by another rule or version of dps"
            )

    def unpacked(self, header: Header, body: memoryview, listed: tuple[bytes, int] | None) -> tuple[Header, memoryview]:
        """A pull or push as if its keys, and the values that it brings, had come as they are.

        `listed` are the keys of a list, with the counts of its shards, and how many bytes named them: its `start` is
        ~bytes then, for the meter.
        """
        spec, pushed = self.spec, header.kind == frames.PUSH
        codec = self.pushed if header.flags & frames.NARROW and pushed else 0
        if pushed and header.flags & frames.NARROW and not codec:
            raise ProtocolError(f"a narrow push to table {spec.name!r}, which travels by {spec.wire!r}")
        if header.count * self.row_bytes > self.frame_limit:
            raise LimitError(f"{header.count} rows of table {spec.name!r} do not fit a frame of dps.limits.frame bytes")
        given = header.count * bytes_of_row(codec, spec.dim, self.row_bytes) if pushed else 0
        used = len(body) - padded(given)
        if used < 0:
            raise ProtocolError(f"{header.count} rows pushed to table {spec.name!r} in {len(body)} bytes")
        if listed is None:
            keys = bytes(body[:used])
        else:
            keys, named = listed
            if used != named:
                raise ProtocolError(f"{used} bytes name rows of table {spec.name!r} beside a list of {named} bytes")
            header = header._replace(flags=header.flags & ~frames.LIST, start=~used)
        if codec:
            header = header._replace(flags=header.flags & ~frames.NARROW)
        wide = np.zeros(len(keys) + (padded(header.count * self.row_bytes) if pushed else 0), np.uint8)
        wide[: len(keys)] = np.frombuffer(keys, np.uint8)
        if pushed:
            rows = self._rows_in(wide[len(keys) :][: header.count * self.row_bytes])
            sent = np.frombuffer(body, np.uint8, given, used)
            if codec:
                decode(codec, sent, rows)
            else:
                rows[:] = self._rows_in(sent)
        return header, memoryview(wide)

    def values(self, header: Header, body: memoryview, used: int) -> np.ndarray:
        """The values of an op, which begin behind `used` bytes of the body; a deletion has rows without columns."""
        columns = self.spec.dim + (self.spec.slots if header.flags & frames.RULE_ROWS else 0)
        if header.flags & frames.RULE_DELETE == frames.RULE_DELETE:
            columns = 0
        rest = used + padded(header.count * columns * self.dtype.itemsize)
        if rest != len(body) and not (header.flags & frames.MORE and rest < len(body)):
            raise ProtocolError(
                f"{header.count} rows pushed to table {self.spec.name!r} in {len(body)} bytes, not {rest}"
            )
        return np.frombuffer(body, self.dtype, header.count * columns, used).reshape(header.count, columns)

    def with_more(self, op: Op, header: Header, body: memoryview, used: int) -> Op:
        """The op of the predecessor, with what :func:`more_of` has put behind its values."""
        columns = self.spec.dim + (self.spec.slots if header.flags & frames.RULE_ROWS else 0)
        deleted, result, unborn, *stamps = unpack_items(
            body[used + padded(header.count * columns * self.dtype.itemsize) :]
        )
        if len(unborn) not in (0, header.count):
            raise ProtocolError(f"{header.count} keys for table {self.spec.name!r}, and flags of {len(unborn)}")
        return op._replace(
            deleted=np.frombuffer(deleted, np.int64) if deleted else None,
            result=np.frombuffer(result, self.dtype).reshape(-1, 1) if result else None,
            unborn=np.frombuffer(unborn, np.bool_) if unborn else None,
            stamps=np.frombuffer(stamps[0], np.int64).reshape(-1, 4) if stamps else None,
        )

    def check_copied(self, rows: int, what: str, more: int = 0) -> None:
        """Raise LimitError if so many whole rows, and so many bytes beside them, do not fit a frame to the copies."""
        nbytes = rows * ((self.spec.dim + self.spec.slots) * self.dtype.itemsize + 16) + more
        if self.replicated and nbytes > self.frame_limit:
            raise LimitError(
                f"table {self.spec.name!r}: {what} {rows} rows, {nbytes} bytes, and its copies take {self.frame_limit} "
                "at once (dps.limits.frame): make the table with more shards, or change fewer rows at once"
            )

    def scanned(self, scan: Scan, body: memoryview) -> tuple[Replica, int, int]:
        """What a SCAN asks for: the replica, the least key and the greatest one."""
        if self.spec.rows is not None:
            raise InputError(f"table {self.spec.name!r} has no keys of its own, but rows 0 to {self.spec.rows - 1}")
        if not 1 <= scan.limit <= self.frame_limit // (8 + self.row_bytes):
            raise LimitError(
                f"{scan.limit} rows of table {self.spec.name!r} do not fit a frame of dps.limits.frame bytes"
            )
        if len(body) != 16:
            raise ProtocolError(f"a scan has a body of {len(body)} bytes, and not of two keys")
        first, last = np.frombuffer(body, np.int64).tolist()
        return self.replica(scan.shard, primary=True), first, last

    def answer_scan(self, connection: RoleConnection, header: Header, shard: KeyedShard, found: FoundRows) -> int:
        """Send a piece of a scan, piece by piece as :meth:`answer` does; the bytes of its body."""
        scan, count = Scan.of(header), len(found.keys)
        keys, values = 8 * count, count * self.row_bytes if scan.values else 0
        buffer = connection.outgoing(HEADER_SIZE + keys + padded(values))
        view = memoryview(buffer)
        answer = ScanAnswer(count, found.rest).header(header.request, keys + padded(values))
        view[:HEADER_SIZE] = encode_header(answer)
        buffer[HEADER_SIZE : HEADER_SIZE + keys].view(np.int64)[:] = found.keys
        passed, begin = 0, HEADER_SIZE + keys
        if scan.values:
            out = buffer[begin : begin + values].view(self.dtype).reshape(count, self.spec.dim)
            step = max(1, PIECE_BYTES // self.row_bytes)
            for a in range(0, count, step):
                b = min(a + step, count)
                gather(shard.rows, found.rows[a:b], out[a:b])
                if shard.spilled and shard.spill is not None:  # an error is answered, so nothing may have left before
                    shard.spill.peek(found.keys[a:b], found.rows[a:b], out[a:b])
                    continue
                connection.write(view[passed : begin + b * self.row_bytes])
                passed = begin + b * self.row_bytes
        if passed < len(view):
            connection.write(view[passed:])
        return keys + values

    def answer(
        self, connection: RoleConnection, header: Header, parts: list[ReplicaPart], repeated: Op | None = None
    ) -> None:
        """Copy the rows into the connection's outgoing buffer, and pass them on piece by piece.

        For an op that was `repeated`, rows that the ledger keeps from the first answer go out instead.
        """
        certificate = b""
        if header.flags & frames.CERTIFICATE:
            replicas, edges = [part.replica for part in parts], self.shard_map.edges
            certificate = frames.encode_json(
                {r.number: certificates(r.shard.ledger, edges[r.number]) for r in replicas}
            )
        codec = self.pulled if header.flags & frames.NARROW else 0
        row = bytes_of_row(codec, self.spec.dim, self.row_bytes)
        nbytes = header.count * row
        buffer = connection.outgoing(HEADER_SIZE + padded(nbytes))
        view = memoryview(buffer)
        answer = Header(frames.OK, request=header.request, count=header.count, body=padded(nbytes) + len(certificate))
        view[:HEADER_SIZE] = encode_header(answer)
        out, step = buffer[HEADER_SIZE : HEADER_SIZE + nbytes], max(1, PIECE_BYTES // self.row_bytes)
        passed, spills = 0, self.spec.life.spills
        for replica, keys, start, first, last in parts:
            if repeated is not None and self._kept_answer(
                replica, repeated, self._rows_in(out[first * row : last * row])
            ):
                continue
            for a in range(first, last, step):
                b = min(a + step, last)
                piece = out[a * row : b * row]
                rows = self._rows_in(piece) if not codec else np.empty((b - a, self.spec.dim), self.dtype)
                if keys is None:
                    assert isinstance(replica.shard, DenseShard)
                    replica.shard.pull_range(start + a - first, rows)
                else:
                    replica.shard.pull(keys[a - first : b - first], rows)
                if codec:
                    encode(codec, rows, piece)
                ready = HEADER_SIZE + b * row
                if ready - passed >= PIECE_BYTES and not spills:  # its error is answered, so nothing has left before
                    connection.write(view[passed:ready])
                    passed = ready
        if passed < len(view):
            connection.write(view[passed:])
        if certificate:
            connection.write(certificate)

    def _rows_in(self, piece: np.ndarray) -> np.ndarray:
        """The rows that bytes of an answer have room for."""
        return piece.view(self.dtype).reshape(-1, self.spec.dim)

    def answer_born(self, connection: RoleConnection, header: Header, parts: list[ReplicaPart]) -> None:
        """Send rows with one column more: whether the row is there."""
        rows = np.ones((header.count, self.spec.dim + 1), self.dtype)
        for replica, keys, start, first, last in parts:
            values = np.empty((last - first, self.spec.dim), self.dtype)
            if keys is None:
                assert isinstance(replica.shard, DenseShard)
                replica.shard.pull_range(start, values)
            else:
                replica.shard.pull(keys, values)
                if isinstance(replica.shard, KeyedShard):
                    rows[first:last, -1] = replica.shard.is_there(keys)
            rows[first:last, :-1] = values
        nbytes = padded(rows.nbytes)
        buffer = connection.outgoing(HEADER_SIZE + nbytes)
        head = Header(frames.OK, request=header.request, count=header.count, body=nbytes)
        memoryview(buffer)[:HEADER_SIZE] = encode_header(head)
        buffer[HEADER_SIZE : HEADER_SIZE + rows.nbytes] = rows.reshape(-1).view(np.uint8)
        connection.write(memoryview(buffer))

    @staticmethod
    def _kept_answer(replica: Replica, op: Op, out: np.ndarray) -> bool:
        """Put the answer that an op was given first into `out`; False if the ledger has it no more."""
        kept = replica.shard.ledger.answer(op.origin, op.clock, op.number) if op.origin else None
        if kept is None or kept.shape != out.shape:
            return False
        out[:] = kept
        return True

    def replica(self, number: int, primary: bool = False) -> Replica:
        """This server's replica of a shard. MovedError if it has none, or if it has to be the primary and is not."""
        replica = self.replicas.get(number)
        if replica is None or (primary and not replica.serves):
            if not 0 <= number < self.spec.shards:
                raise InputError(f"table {self.spec.name!r} has {self.spec.shards} shards; there is no {number}")
            raise MovedError(f"server {self.server} does not serve shard {number} of table {self.spec.name!r} now")
        return replica

    def size(self) -> tuple[int, int]:
        """Rows in shards that this server is the primary of, and bytes of all its replicas."""
        rows = sum(len(replica.shard) for replica in self.replicas.values() if replica.primary)
        return rows, sum(replica.shard.nbytes for replica in self.replicas.values() if not replica.joining)

    def turnover(self) -> Turnover | None:
        """The rows that came and went, of the shards that this server is the primary of; None: rows stay."""
        if not self.spec.life.asks:
            return None
        shards = [replica.shard for replica in self.replicas.values() if replica.primary]
        counted = [shard.admission for shard in shards if shard.admission is not None]
        return Turnover(
            full=max((shard.resident / shard.most_rows for shard in shards if shard.most_rows), default=0.0),
            evicted=sum(shard.evicted for shard in shards),
            expired=sum(shard.expired for shard in shards),
            refused=self.refused,
            admitted=sum(each.admitted for each in counted),
            dropped=sum(each.dropped for each in counted),
            waiting=sum(map(len, counted)),
            spilled=sum(shard.spilled for shard in shards),
            brought=sum(shard.spill.brought for shard in shards if shard.spill is not None),
            spill_bytes=sum(shard.spill.file_bytes for shard in shards if shard.spill is not None),
            written=sum(shard.spill.written for shard in shards if shard.spill is not None),
        )

    def held(self) -> HeldRows:
        """Rows, bytes, the shards that this server is the primary and the backup of, and bytes without rows."""
        rows, nbytes = self.size()
        by_role: dict[bool, list[int]] = {True: [], False: []}
        for number, replica in sorted(self.replicas.items()):
            by_role[replica.primary].append(number)
        kept = sum(replica.shard.kept for replica in self.replicas.values() if not replica.joining)
        return HeldRows(rows, nbytes, by_role[True], by_role[False], kept, self.turnover())


def unpacking(
    table_of: Callable[[Header], ServerTable], handler: Callable[[RoleConnection, Header, memoryview], object]
) -> Callable[[RoleConnection, Header, memoryview], None]:
    """The handler of pulls and pushes, for those whose keys or values may have come in fewer bytes."""

    def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
        if header.flags & frames.LIST or (header.flags & frames.NARROW and header.kind == frames.PUSH):
            listed = _listed(header, body, connection.key_lists) if header.flags & frames.LIST else None
            header, body = table_of(header).unpacked(header, body, listed)
        handler(connection, header, body)

    return handle


def _listed(header: Header, body: memoryview, lists: KeyLists) -> tuple[bytes, int]:
    """The counts and keys of a request that keeps a list, or names one, and how many bytes of its body name them."""
    try:
        return lists.take(header.start, header.table, header.shard, header.shards, header.count, body)
    except ValueError as error:
        raise ProtocolError(f"table number {header.table}: {error}") from None


def op_of(header: Header) -> Op:
    """The op that a frame describes, without its rows."""
    if header.flags & frames.CONTROL:
        return control_op(header)
    answer = bool(header.flags & frames.ANSWER)
    rule = RULES[header.flags & (frames.RULE_DELETE | frames.RULE_ROWS)]
    values: Any = None
    stamp = (header.trainer, header.attempt, header.number)
    return Op(rule, None, header.start, values, header.clock, header.parties, *stamp, answer, header.rows)


def rows_after(request: TableRequest, ops: list[Op], values: np.ndarray) -> np.ndarray | None:
    """The rows that the user's optimizer has made of a push, in the order of its `values`; None where it made none."""
    rows = None
    for part, op in zip(request.parts, ops, strict=True):
        if op.after is not None:
            if rows is None:
                rows = np.zeros((len(values), op.after.shape[1]), values.dtype)
            rows[part.a : part.b] = op.after
    return rows


def more_of(op: Op) -> tuple[bytes | memoryview, ...]:
    """What stands behind the values of an op in a frame to the backups: the keys that go, the result, which keys have
    no row, and only where the op stands for those of several origins, their stamps."""
    more = (op.deleted, op.result, op.unborn) + (() if op.stamps is None else (op.stamps,))
    return () if all(array is None for array in more) else tuple(each for array in more for each in pack_array(array))


def rows_header(table: int, shard: int, op: Op) -> Header:
    """The header of an op of rule ROWS, for the backups. Its `rows` say that the shard is meant also without rows."""
    return Header(
        frames.REPLICATE,
        frames.RULE_ROWS | (frames.RANGE if op.keys is None else 0) | (frames.MORE if more_of(op) else 0),
        table=table,
        trainer=op.origin,
        attempt=op.attempt,
        number=op.number,
        clock=op.clock,
        parties=op.parties,
        shard=shard,
        shards=1,
        start=op.start,
        count=len(op.values),
        rows=max(1, op.rows),
    )


def keys_header(table: int, shard: int, op: Op) -> Header:
    """The header, for the backups, of an op of the primary's own that names keys.

    A DELETE forgets rows. An ADD of zeros counts as a use of rows that were pulled.
    """
    return Header(
        frames.REPLICATE,
        frames.RULE_DELETE if op.rule == DELETE else frames.RULE_ADD,
        table=table,
        clock=op.clock,
        parties=op.parties,
        shard=shard,
        shards=1,
        count=len(op.values),
        rows=op.rows,
    )


def control_header(table: int, epoch: int, op: Op) -> Header:
    """The header of an op without rows, for the backups of a table."""
    if op.rule == RETIRE:
        retire = RetireOp.of(op)
        return RetireOrigins(table, epoch, retire.first, retire.origins).header()
    if op.rule == AGE:
        age = AgeOp.of(op)
        return AgeRows(table, epoch, age.time, age.clock, age.ops).header()
    close = CloseOp.of(op)
    return CloseSums(table, epoch, close.clock, close.action).header()


def control_op(header: Header) -> Op:
    """The op that :func:`control_header` describes."""
    if RetireOrigins.matches(header):
        retire = RetireOrigins.of(header)
        return RetireOp(retire.first, retire.origins).op()
    if AgeRows.matches(header):
        age = AgeRows.of(header)
        return AgeOp(age.time, age.clock, age.ops).op()
    close = CloseSums.of(header)
    return CloseOp(close.clock, close.what).op()
