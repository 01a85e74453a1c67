"""Serving: what a server does with frames. The role itself, without Dask, threads or sockets.

Everything here happens in the server's endpoint thread. A server holds *copies* of shards. For some it is the primary:
it answers clients' pulls and pushes. For others it is a backup: it takes the same ops from the one before it in the
chain. Which, the controller says (PLACE); `replication.py` forwards ops and waits for their confirmation.

Three rules keep an old primary from doing harm. It answers pulls of replicated tables only while it holds a lease,
renewed by beats to the controller, who waits for the lease to end before it puts another in its place. It acknowledges
a push only when the next in the chain has it, who refuses senders that have been replaced (or, with ``ack="memory"``,
while it holds the lease). And what it holds when it learns that it was replaced, it drops.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dps.copies import Copy, Part, Waiter
from dps.errors import (
    DPSError,
    FencedError,
    MovedError,
    NotFiniteError,
    ProtocolError,
    UnknownTableError,
)
from dps.member import BEAT, Member
from dps.meters import Meter, Meters
from dps.replication import Relay
from dps.reports import ServerReport
from dps.state.kernels import all_finite
from dps.state.ops import CLOSE, DROP, KEEP, OLDER, RETIRE, Op, TableSpec
from dps.state.shard import make_shard
from dps.state.transfer import Joining
from dps.tables import Request, Table, op_of
from dps.wire import frames
from dps.wire.frames import Header, padded, unpack_arrays
from dps.wire.rights import TO_SERVER, guarded
from dps.wire.session import of_servers

__all__ = ["Serving"]

Handler = Callable[[Any, Header, memoryview], None]
Served = tuple[Meter, list[Part]]  # what a request was for, to be counted

logger = logging.getLogger(__name__)


class Serving:
    """The server's role; see the module's docstring.

    Parameters
    ----------
    endpoint : Endpoint
        Where frames come from: it offers `now`, `later`, `connect` and `frame_limit`.
    session : str
        Name of the parameter server.
    number : int
        Which of its servers this is; never used again.
    secret : str
        The servers'.
    controller : (str, int)
        Where the controller listens.
    meters : Meters, optional
        By default, times are the endpoint's.
    """

    def __init__(
        self,
        endpoint: Any,
        session: str,
        number: int,
        secret: str,
        controller: tuple[str, int],
        meters: Meters | None = None,
    ):
        self.endpoint, self.session, self.number = endpoint, session, number
        self.tables: dict[int, Table] = {}
        self.epoch = self.requests = 0
        self.stopped = False
        self._mute = False  # reports have failed
        peers = of_servers(session)
        self.meters = meters or Meters(endpoint.now)
        self.member = Member(endpoint, peers, number, secret, controller, self.adopt, self._report)
        self.relay = Relay(endpoint, peers, secret, self.member.report)
        handlers: dict[int, Handler] = {
            frames.PULL: self.meters.timed(self._pull),
            frames.PUSH: self.meters.timed(self._push),
            frames.SCAN: self._scan,
            frames.STATUS: self._status,
            frames.REPLICATE: self._replicate,
            frames.DUMP: self._take_dump,
        }
        self.handlers = guarded(TO_SERVER, handlers)

    def start(self) -> None:
        """Report to the controller, and go on doing so."""
        self.member.connect()
        self._look()

    def stop(self) -> None:
        """Forget everything."""
        self.stopped = True
        self.member.stop()
        self.relay.close()
        self.tables.clear()

    def _look(self) -> None:
        if not self.stopped:
            self.meters.looked(BEAT)
            self.member.beat(self.epoch)
            self.relay.look()
            self.endpoint.later(BEAT, self._look)

    def _report(self, anew: bool) -> bytes:
        """What goes with a beat; a beat goes without, sooner than not at all."""
        if self._mute:
            return b""
        try:
            about = self.meters.report(self.tables, self.relay.unconfirmed(), len(self.endpoint.connections), anew)
            return ServerReport.encode(about)
        except Exception:
            logger.exception("server %d cannot say how busy it is", self.number)
            self._mute = True
            return b""

    # -- what the controller says

    def create(self, spec: TableSpec, shards: Iterable[int]) -> None:
        """Begin a table with initial copies of these shards; PLACE says what they are for."""
        table = self.tables[spec.id] = Table(spec, self.number, self.endpoint.frame_limit)
        for number in shards:
            table.copies[number] = Copy(spec, number, make_shard(spec, number))

    def drop(self, table: int) -> None:
        """Forget a table; whoever still waits for an op on it is refused."""
        gone = self.tables.pop(table, None)
        for copy in gone.copies.values() if gone is not None else ():
            self.relay.drop(copy)
        self.relay.settle()

    def settle(self, keep: bool | None, over: list[list[int]]) -> tuple[list[tuple[int, int]], Waiter]:
        """A run has ended: close the open clock of every primary (without `keep`, drop it); retire origins.

        Where `keep` is None no run has ended, and clocks stay open: origins are retired only.
        `over` are pairs (first origin, how many). Returns (table, shard) of the primaries, and who waits until their
        copies have done so, too.
        """
        done, waiter = [], Waiter()
        for table in self.tables.values():
            primaries = [c for _, c in sorted(table.copies.items()) if c.serves]
            done += [(table.spec.id, copy.number) for copy in primaries]
            if table.spec.aggregate is not None and keep is not None:
                self._control(table, primaries, self._close_op(table, 0, KEEP if keep else DROP), waiter)
            for first, count in over:
                retire = self._close_op(table, 0, first)._replace(rule=RETIRE, parties=count)
                self._control(table, primaries, retire, waiter)
        return done, waiter

    def close_before(self, copy: Copy, clock: int) -> None:
        """Close the sums of clocks before `clock`, on this copy and those behind it."""
        if copy.shard.would_close(clock):
            table = self.tables[copy.spec.id]
            self._control(table, [copy], self._close_op(table, clock, OLDER))

    def leads(self, copy: Copy) -> bool:
        """Whether nobody else can have become the primary of a shard that we are the primary of."""
        return copy.spec.copies == 1 or self.endpoint.now() <= self.member.lease_until

    def adopt(self, placement: dict[str, Any]) -> None:
        """A new placement: take up and give up roles, forward to new successors what is not yet confirmed."""
        if placement["epoch"] <= self.epoch:
            return
        self.epoch = self.relay.epoch = placement["epoch"]
        self.relay.addresses = {int(n): (host, port) for n, (host, port) in placement["servers"].items()}
        for key, places in placement["tables"].items():
            table = self.tables.get(int(key))
            if table is not None:
                for number, place in enumerate(places):
                    self._adopt_shard(table, number, *place)
        self.relay.settle()

    def _adopt_shard(
        self, table: Table, number: int, chain: list[int], joiner: int | None, fences: list[int], stepping_down: bool
    ) -> None:
        me, copy = self.number, table.copies.get(number)
        if copy is not None and copy.fence > self.epoch:
            return  # begun by a dump of a later placement, which overtook this one
        line = chain if joiner is None else [*chain, joiner]
        if me not in line:
            table.elsewhere[number] = self.epoch
            if copy is not None:
                del table.copies[number]
                self.relay.drop(copy)
            return
        place = line.index(me)
        if copy is not None and copy.fence < fences[place] and me == joiner:
            self.relay.drop(table.copies.pop(number))  # it was a copy once; it starts anew
            copy = None
        if copy is None:
            if me != joiner:
                about = {"server": me, "shards": [[table.spec.name, number]], "why": "it has no such copy"}
                self.relay.report(frames.SUSPECT, about)
            return
        successor = line[place + 1] if place + 1 < len(line) else None
        if (copy.fence, copy.successor) != (fences[place], successor):
            copy.deposed = False  # news of this shard; without any, whoever refused our ops knows more than we
        copy.fence = fences[place]
        copy.primary = place == 0
        copy.stepping_down = stepping_down and copy.primary
        self.relay.rechain(copy, successor, fences[place + 1] if joiner is not None and successor == joiner else None)

    # -- clients

    def _status(self, connection: Any, header: Header, body: memoryview) -> None:
        connection.reply_json(Header(frames.OK, request=header.request), self.describe())

    def describe(self) -> dict[str, Any]:
        """Tables, rows and bytes."""
        tables = {table.spec.name: table.describe() for table in self.tables.values()}
        about = {"server": self.number, "epoch": self.epoch, "requests": self.requests, "tables": tables}
        about["queue"] = self.meters.waiting()[0]
        return {**about, "connections": len(self.endpoint.connections), **self.relay.describe()}

    def _table(self, header: Header) -> Table:
        table = self.tables.get(header.table)
        if table is None:
            if self.stopped:  # in the moment before the connection is closed
                raise MovedError(f"server {self.number} has stopped")
            raise UnknownTableError(f"server {self.number} has no table number {header.table}; was it dropped?")
        return table

    def _leased(self, header: Header) -> Table:
        """The table, where nobody else can be the primary of our shards."""
        table = self._table(header)
        if table.spec.copies > 1 and self.endpoint.now() > self.member.lease_until:
            raise MovedError(f"server {self.number} has lost touch with the controller")
        return table

    def _scan(self, connection: Any, header: Header, body: memoryview) -> None:
        self.requests += 1
        keys = self._leased(header).scan(header)
        connection.reply(Header(frames.OK, request=header.request, count=len(keys)), keys.tobytes())

    def _pull(self, connection: Any, header: Header, body: memoryview) -> Served:
        self.requests += 1
        table = self._leased(header)
        request = table.cut(header, body)
        if request.used != len(body):
            raise ProtocolError(f"a pull of {header.count} rows has a body of {len(body)} bytes, not {request.used}")
        if table.spec.aggregate is not None:
            for part in request.parts:
                self.close_before(part.copy, header.clock)
        table.answer(connection, header, request.parts)
        return table.meter, request.parts

    def _push(self, connection: Any, header: Header, body: memoryview) -> Served:
        self.requests += 1
        if self.relay.busy:
            return self._holding(self._take_push, connection, header, body)
        return self._take_push(connection, header, body, lambda: None)

    @staticmethod
    def _holding(function: Callable[..., Any], connection: Any, header: Header, body: memoryview) -> Any:
        """Handle a frame whose body may be needed for longer; `function` sees to its release, unless it raises."""
        body, release = connection.hold(body)
        try:
            return function(connection, header, body, release)
        except BaseException:
            release()
            raise

    def _take_push(self, connection: Any, header: Header, body: memoryview, release: Callable[[], None]) -> Served:
        table, count = self._table(header), header.count
        if not table.waits:  # no backup will refuse it: a primary that was replaced must do so itself
            self._leased(header)
        spec = table.spec
        request = table.cut(header, body)
        nbytes = count * table.row_bytes
        if request.used + padded(nbytes) != len(body):
            raise ProtocolError(f"a push of {count} rows of table {spec.name!r} has a body of {len(body)} bytes")
        values = np.frombuffer(body, table.dtype, count * spec.dim, request.used).reshape(count, spec.dim)
        if spec.finite and spec.dtype != "int64" and not all_finite(values.reshape(-1)):
            raise NotFiniteError(f"a push to table {spec.name!r} holds NaN or infinity, which the table refuses")
        op = op_of(header)
        for copy, keys, _, a, b in request.parts:  # all that can fail comes before the first change
            if op.origin:
                copy.shard.ledger.check(op.origin, op.attempt)
            copy.shard.check_weight(op)
            if keys is not None and spec.keyed:
                copy.shard.reserve(b - a)
        waiter = Waiter()
        self._change(table, header, op, request, values, waiter)

        def reply() -> None:
            if connection.transport.is_closing():
                return
            if waiter.error is not None:
                connection.reply_error(header, waiter.error)
                connection.transport.close()
            elif op.answer:
                table.answer(connection, header, request.parts, op)
            else:
                connection.acknowledge(Header(frames.OK, request=header.request, count=count))

        def finish() -> None:
            release()
            if table.waits:
                reply()

        if not table.waits:
            reply()
        waiter.then(finish)
        self.relay.press(connection)
        return table.meter, request.parts

    def _change(
        self, table: Table, header: Header, op: Op, request: Request, values: np.ndarray, waiter: Waiter
    ) -> None:
        """Apply to every shard; forward what was new; follow what was a repeat."""
        fresh = []
        for part in request.parts:
            shard = part.copy.shard
            if shard.apply(part.op(op, values)):
                fresh.append((part, shard.version))
            else:
                self.relay.follow(part.copy, waiter)
        if fresh and self.relay.busy:
            self.relay.forward(header, fresh, request.keys, values, waiter)

    def _control(self, table: Table, copies: list[Copy], op: Op, waiter: Waiter | None = None) -> None:
        """An op without rows, on these copies and those behind them."""
        flags = frames.CONTROL | (frames.RULE_ADD if op.rule == RETIRE else 0)
        header = Header(
            frames.REPLICATE, flags, 0, table.spec.id, self.epoch, clock=op.clock, start=op.start, parties=op.parties
        )
        for copy in copies:
            copy.shard.apply(op)
            if self.relay.busy:
                fresh = [(Part(copy, None, op.start, 0, 0), copy.shard.version)]
                self.relay.forward(header, fresh, None, op.values, waiter or Waiter())

    @staticmethod
    def _close_op(table: Table, clock: int, what: int) -> Op:
        return Op(CLOSE, None, what, np.empty((0, table.spec.dim), table.dtype), clock, 1)

    # -- the server before us in a chain

    def _replicate(self, connection: Any, header: Header, body: memoryview) -> None:
        self._holding(self._take_op, connection, header, body)

    def _take_op(self, connection: Any, header: Header, body: memoryview, release: Callable[[], None]) -> None:
        table = self._table(header)
        spec, count = table.spec, header.count
        versions = np.frombuffer(body, np.int64, header.shards).tolist()
        rest = body[8 * header.shards :]
        op = op_of(header)
        if header.flags & frames.CONTROL:
            copies = [table.copy(n) for n in range(header.shard, header.shard + header.shards)]
            request = Request([Part(copy, None, header.start, 0, 0) for copy in copies], None, 0)
        else:
            request = table.cut(header, rest, primary=False)
        values = np.frombuffer(rest, table.dtype, count * spec.dim, request.used).reshape(count, spec.dim)
        waiter, fresh = Waiter(), []
        for part in request.parts:  # all that can fail comes before the first change
            copy, version = part.copy, versions[part.copy.number - header.shard]
            if copy.fence == 0:  # a new table, and we have not heard yet who is behind us: it will be sent again
                release()
                connection.transport.close()
                return
            self._take_from(header, copy)
            if version > copy.shard.version + 1:
                raise DPSError(f"server {self.number} is at {copy.shard.version} of shard {copy.number}, not {version}")
            if version > copy.shard.version:
                fresh.append((part, version))
            else:
                self.relay.follow(copy, waiter)
        for part, _ in fresh:
            part.copy.shard.apply(part.op(op, values))
        if fresh and self.relay.busy:
            self.relay.forward(header, fresh, request.keys, values, waiter)

        def finish() -> None:
            release()
            if waiter.error is None and not connection.transport.is_closing():  # else: the controller knows what next
                connection.acknowledge(Header(frames.OK, request=header.request))

        waiter.then(finish)

    @staticmethod
    def _take_from(header: Header, copy: Copy) -> None:
        """Refuse a sender that may no longer change the copy."""
        if header.epoch < copy.fence:
            where = f"shard {copy.number} of table {copy.spec.name!r}"
            raise FencedError(f"{where}: no ops of epoch {header.epoch} any more")

    def _take_dump(self, connection: Any, header: Header, body: memoryview) -> None:
        """A piece of a shard that we are to hold: its beginning, rows, or its end."""
        table = self._table(header)
        meta, arrays = unpack_arrays(header, body)
        copy = table.copies.get(header.shard)
        if header.number == 0:
            if header.epoch <= table.elsewhere.get(header.shard, -1):  # late: we are not to join any more
                raise FencedError(f"server {self.number} no longer takes shard {header.shard} of epoch {header.epoch}")
            if copy is not None and (not copy.joining or header.epoch < copy.fence):
                raise DPSError(f"server {self.number} does not begin shard {header.shard} anew at {header.epoch}")
            joining = Joining(table.spec, header.shard)
            joining.begin(meta, [array.copy() for array in arrays])
            copy = table.copies[header.shard] = Copy(table.spec, header.shard, joining)
            copy.joining, copy.fence = True, header.epoch
        elif copy is None or not copy.joining or header.epoch < copy.fence:
            raise DPSError(f"server {self.number} does not wait for shard {header.shard} of {table.spec.name!r}")
        elif header.number == 1:
            copy.shard.add(meta, arrays)
        else:
            copy.shard, copy.joining = copy.shard.finish(), False
        connection.reply(Header(frames.OK, request=header.request))
