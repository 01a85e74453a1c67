"""The server's role: what a server does with each frame, without Dask, threads or sockets.

Everything here happens in the thread of the server's endpoint. A server holds *replicas* of shards. For some shards it
is the primary: it answers clients' pulls and pushes. For others it is a backup: it takes the same ops from its
predecessor in the chain. The controller decides which (PLACE); `replication.py` forwards ops and waits until the
successor confirms them.

Three rules keep an old primary from doing harm. It answers pulls of replicated tables only while it holds a lease;
heartbeats renew the lease, and the controller waits for its end before it makes another server the primary. It
acknowledges a push only when its successor in the chain has the op, and a successor refuses ops of a primary that was
replaced (with ``ack="memory"``, the primary acknowledges while it holds the lease). And it drops its replica as soon
as it learns that it was replaced.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import numpy as np

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.core.requests.service import Service
from dps.engine.core.shards.rows import all_finite
from dps.engine.server.backup_pulls import BackupPulls
from dps.engine.server.beside_thread import Carrier
from dps.engine.server.changed_pulls import ChangedPulls
from dps.engine.server.changes import Changes
from dps.engine.server.closings import Closings, Settled
from dps.engine.server.dumps import Dumps
from dps.engine.server.forgetting import Forgetting
from dps.engine.server.function_thread import Runner
from dps.engine.server.functions import FunctionCalls
from dps.engine.server.gone import GoneReaders
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from dps.engine.server.holder import RecordHolder
from dps.engine.server.large_ops import LargeOps
from dps.engine.server.late_parts import late_rows
from dps.engine.server.memory import ServerMemory
from dps.engine.server.merged_ops import merged_op
from dps.engine.server.pace import DumpPace
from dps.engine.server.replicas import Replica, ReplicaPart, new_replicas
from dps.engine.server.replication import Relay
from dps.engine.server.tables import ServerTable, TableRequest, op_of, unpacking
from dps.engine.state.custom import Custom
from dps.engine.state.op_views import CloseOp
from dps.engine.state.ops import OLDER, Op, TableSpec
from dps.engine.state.scan import scan
from dps.engine.state.shard import KeyedShard
from dps.engine.telemetry.reports import ServerReport
from dps.engine.telemetry.server_meter import ServerMeter, TableMeter
from dps.engine.telemetry.snapshot import ServerAnswer
from dps.engine.wire import frames
from dps.engine.wire.frames import BORN, Header, encode_header
from dps.engine.wire.handshake import of_servers
from dps.engine.wire.headers import Scan
from dps.engine.wire.messages import Placement, ShardPlace, Suspect
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.engine.wire.rights import TO_SERVER, Handler, guarded
from dps.errors import DPSError, FencedError, MovedError, NotFiniteError, ProtocolError, UnknownTableError

__all__ = ["SETTLE_SHARE", "ServerRole"]

Served = tuple[TableMeter, list[ReplicaPart]]  # the table and shards of a request, for its meter

logger = logging.getLogger(__name__)

MAX_DROPPED = 1024  # tables whose numbers are remembered, because a call that makes one may come after the drop
MOST_SCANNED = 1 << 17  # rows that a piece of a scan has at most, because a server serves nothing else meanwhile
SETTLE_SHARE = 0.5  # of dps.timeouts.silence, for which the controller waits, that a server waits until copies settle

MAX_REASON_LENGTH = 1000  # characters of an error, in a message to the controller
T = TypeVar("T")


class ServerRole:
    """The server's role; see the module's docstring.

    Parameters
    ----------
    endpoint : Endpoint
        The source of frames; the role uses its `now`, `later`, `connect` and `frame_limit`.
    session : str
        Name of the parameter server.
    number : int
        Which of its servers this is; no later server gets the same number.
    secret : str
        The servers' secret.
    controller : (str, int)
        Host and port at which the controller listens.
    runner : Runner
        Runs functions of users beside the endpoint's loop.
    beside : Carrier
        Carries out large ops beside the endpoint's loop.
    meters : ServerMeter, optional
        By default, one that takes the time from the endpoint.
    wall : callable, optional
        Returns seconds since 1970, for the ages of rows.
    memory : int
        Bytes that all tables together may take; 0: any number.
    directory : str, optional
        Where tables with ``evict="spill"`` have their files; by default where the system has temporary files.
    """

    def __init__(
        self,
        endpoint: RoleEndpoint,
        session: str,
        number: int,
        secret: str,
        controller: tuple[str, int],
        runner: Runner,
        beside: Carrier,
        meters: ServerMeter | None = None,
        wall: Callable[[], float] = time.time,
        memory: int = 0,
        directory: str | None = None,
    ):
        self.endpoint, self.session, self.number, self.directory = endpoint, session, number, directory
        self.tables: dict[int, ServerTable] = {}
        self._dropped: collections.deque[int] = collections.deque(maxlen=MAX_DROPPED)
        self.epoch, self.stopped = 0, False
        self._reports_failed = False  # then heartbeats go without reports
        peers = of_servers(session)
        self.meters = meters or ServerMeter(endpoint.now)
        self.memory = ServerMemory(self.tables, number, memory)
        self.holder = RecordHolder(number)
        told = self.adopt, self._make_report, self.memory.learn_full, self.holder
        self.heartbeat = Heartbeat(endpoint, peers, number, secret, controller, *told, self.tables)
        pace = DumpPace(lambda: self.requests, self.meters.worked)
        self.relay = Relay(endpoint, peers, secret, self.heartbeat.report, beside, pace)
        self.ops = self.relay.ops
        self.changes = Changes(self.ops, self.fail)
        self.functions = FunctionCalls(self, runner)
        self.large = LargeOps(endpoint, self.functions, beside, self.memory)
        self.closings = Closings(self, self.functions, self.large)
        self.forgetting = Forgetting(self, wall, self.memory)
        of_role = self.holds_lease, self.close_before, self.ops, self._refuse, self.relay.throttle, self.fail
        self.service = Service(self.tables, self.meters, self.meters.clock, *of_role, endpoint.frame_limit)
        self.memory.begin(self.service)
        asked = self._table, lambda: self.relay.addresses, self.holds_lease, self._refuse, self.meters, self.service
        self.backup_pulls = BackupPulls(endpoint, peers, secret, number, *asked)
        timed = self.meters.timed
        changed = ChangedPulls(self.leased, self.close_before, self.meters, self.service)
        pull = self._when_free(self._closed(changed.first(timed(self._pull))))
        handlers: dict[int, Handler] = {
            frames.PULL: unpacking(self._table, self.backup_pulls.first(pull)),
            frames.PUSH: unpacking(self._table, self._when_free(self._closed(self._beside(timed(self._push))))),
            frames.CALL: self._closed(self.functions.call),
            frames.COMMIT: self.functions.commit,
            frames.ABORT: self.functions.abort,
            frames.SCAN: self._when_free(self._closed(self._scan)),
            frames.GONE: GoneReaders(self.ops, self.leased, self._refuse).answer,
            frames.STATUS: self._status,
            frames.SHARE: lambda connection, header, body: connection.share(header),
            frames.REPLICATE: self._beside(self._replicate),
            frames.DUMP: Dumps(endpoint, number, directory, self._table, pace).take,
            frames.GRANT: self.heartbeat.grants.answer,
            frames.VERSIONS: self.backup_pulls.tell,
        }
        self.handlers = guarded(TO_SERVER, handlers)

    @property
    def requests(self) -> int:
        """How many requests of clients there have been."""
        return self.service.requests

    def start(self) -> None:
        """Connect to the controller, and begin to beat."""
        self.heartbeat.connect()
        self._tick()

    def stop(self) -> None:
        """Close all connections that this server has opened, and forget its tables."""
        self.heartbeat.stop()
        self._end()

    def _end(self) -> None:
        """End all that is under way, but for the connection to the controller."""
        self.stopped = True
        for part in (self.functions, self.large, self.relay, self.backup_pulls):
            part.close()
        for table in self.tables.values():
            for replica in table.replicas.values():
                replica.shard.close_file()
        self.tables.clear()

    def fail(self, error: Exception) -> MovedError:
        """End this server as a death would, because a change of its replicas broke off in the middle.

        What it has may differ from what its backups have, so it answers nothing any more, and passes nothing on. It
        tells the controller, which has other servers take over. Returns the error for the peer of the request.
        """
        why = f"{type(error).__name__}: {error}"
        if not self.stopped:
            logger.critical("server %d ends, because a change of its replicas broke off", self.number, exc_info=error)
            self.heartbeat.fail(why[:MAX_REASON_LENGTH])
            self._end()
            for connection in list(self.endpoint.connections):
                connection.transport.abort()
        return MovedError(f"server {self.number} has failed: {why}")

    def _tick(self) -> None:
        if not self.stopped:
            self.meters.timer_fired(HEARTBEAT_SECONDS)
            self.heartbeat.beat(self.epoch)
            self.relay.tick()
            if self.functions.holds:
                self.functions.drop_lost()
            self.forgetting.tick()
            self.large.tidy(replica for table in self.tables.values() for replica in table.replicas.values())
            self.endpoint.later(HEARTBEAT_SECONDS, self._tick)

    def _make_report(self, anew: bool) -> bytes:
        """The report that travels with a heartbeat; empty where it fails, because the heartbeat must go out anyway."""
        if self._reports_failed:
            return b""
        try:
            connections, budget = len(self.endpoint.connections), self.memory.budget
            report = self.meters.report(self.tables, self.relay.unconfirmed(), connections, anew, budget)
            return ServerReport.encode(report)
        except Exception:
            logger.exception("server %d cannot report its load; it sends no more reports", self.number)
            self._reports_failed = True
            return b""

    # -- requests of the controller

    def create(self, spec: TableSpec, shards: Iterable[int]) -> None:
        """Make a table with initial replicas of these shards; a placement gives them their roles."""
        spec = spec.opened()
        self.take_table(spec, new_replicas(spec, shards, self.directory))

    def take_table(self, spec: TableSpec, replicas: list[Replica]) -> None:
        """Take up a new table with these replicas."""
        if spec.id in self.tables or spec.id in self._dropped:  # the call was repeated, because its answer was lost; or
            return  # it was late, and the controller has given the table up since
        table = self.tables[spec.id] = ServerTable(spec, self.number, self.endpoint.frame_limit)
        table.replicas.update((replica.number, replica) for replica in replicas)
        self.memory.tick()

    def drop(self, table: int) -> None:
        """Forget a table; requests that still wait for an op on it fail."""
        self._dropped.append(table)
        gone = self.tables.pop(table, None)
        if gone is not None:
            for replica in list(gone.replicas.values()):
                self._give_up(gone, replica)
        self.relay.settle()

    def settle(self, keep: bool | None, over: list[list[int]]) -> tuple[list[Settled], OwedAnswer]:
        """A run has ended: close the open clock of every primary (without `keep`, drop it); retire origins.

        Where `keep` is None no run has ended, and clocks stay open: then this only retires origins. `over` are pairs
        (first origin, how many). Returns the settled primaries, and an owed answer that is due when the backups of each
        have confirmed or refused it.
        """
        return self.closings.settle(keep, over)

    def throttle(self, connection: RoleConnection) -> bool:
        """Read no more from this connection while too much is unconfirmed; whether it is."""
        return self.relay.throttle(connection)

    def close_before(self, replica: Replica, clock: int) -> None:
        """Close the sums of clocks before `clock`, on this replica and those behind it in the chain."""
        if replica.shard.would_close(clock):
            self._close(self.tables[replica.spec.id], [replica], CloseOp(clock, OLDER).op(), OwedAnswer())

    def _close(self, table: ServerTable, replicas: list[Replica], op: Op, owed: OwedAnswer) -> None:
        """Close sums, and end the holds of functions before."""
        for replica in replicas:
            self.revoke(replica)
        self.changes.control(table, self.epoch, replicas, op, owed)

    def revoke(self, replica: Replica) -> None:
        """End the hold of a function, because the replica changes, or goes."""
        if replica.hold is not None:
            self.functions.revoke(replica)

    def leads(self, replica: Replica) -> bool:
        """Whether no other server can have become the primary of this shard, of which this server is the primary."""
        return replica.spec.copies == 1 or self.holds_lease()

    def holds_lease(self) -> bool:
        """Whether no other server can be the primary of this one's shards yet: by the controller, or by grants."""
        return self.heartbeat.holds_lease()

    def adopt(self, placement: Placement) -> None:
        """Adopt a new placement: take up and give up roles, send unconfirmed ops to new successors."""
        if placement.epoch <= self.epoch or self.stopped:
            return
        self.epoch = self.ops.epoch = placement.epoch
        self.relay.addresses = self.heartbeat.servers = placement.servers
        for key, places in placement.tables.items():
            table = self.tables.get(key)
            if table is not None:
                for number, place in enumerate(places):
                    self._adopt_shard(table, number, place)
        for key in self.tables.keys() - placement.tables.keys():  # dropped, or not published yet
            placed = [each for each in self.tables[key].replicas.values() if 0 < each.fence <= self.epoch]
            for replica in placed:  # a later fence is that of a dump that has overtaken this placement
                self._give_up(self.tables[key], replica)
        self.relay.settle()

    def _adopt_shard(self, table: ServerTable, number: int, shard: ShardPlace) -> None:
        chain, joiner, fences = shard.chain, shard.joiner, shard.fences
        me, replica = self.number, table.replicas.get(number)
        if replica is not None and replica.fence > self.epoch:
            return  # because a dump of a later placement, which overtook this one, began the replica
        line = chain if joiner is None else [*chain, joiner]
        if me not in line:
            table.elsewhere[number] = self.epoch
            if replica is not None:
                self._give_up(table, replica)
            return
        place = line.index(me)
        if replica is not None and replica.fence < fences[place] and me == joiner:
            self.relay.drop(table.replicas.pop(number))  # of an earlier time in the chain: the joiner starts anew
            replica = None
        if replica is None:
            if me != joiner:
                message = Suspect(me, [(table.spec.name, number)], "it has no such replica", self.epoch)
                self.relay.report(frames.SUSPECT, message)
            return
        successor = line[place + 1] if place + 1 < len(line) else None
        if (replica.fence, replica.successor) != (fences[place], successor):
            # The placement changes this shard's chain. Where it does not, the backup that refused our ops knows of a
            # newer placement than this one, so the replica stays deposed.
            replica.deposed = False
        replica.fence, replica.behind, replica.place = fences[place], line[place + 1 :], shard
        replica.primary = place == 0
        replica.stepping_down = shard.stepping_down and replica.primary
        if not replica.serves:
            self.revoke(replica)
        feed = fences[place + 1] if joiner is not None and successor == joiner else None
        self.relay.rechain(replica, successor, feed)

    def _give_up(self, table: ServerTable, replica: Replica) -> None:
        """Drop a replica, because this server has left the chain of its shard."""
        self.revoke(replica)
        del table.replicas[replica.number]
        self.relay.drop(replica)
        self.large.leave(replica)

    # -- clients

    def _status(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        connection.reply_json(Header(frames.OK, request=header.request), msgspec.to_builtins(self.status()))

    def status(self) -> ServerAnswer:
        """Tables with their rows and bytes, the epoch, and what is under way."""
        return ServerAnswer(
            server=self.number,
            epoch=self.epoch,
            requests=self.requests,
            tables={table.spec.name: table.held() for table in self.tables.values()},
            connections=len(self.endpoint.connections),
            unconfirmed=self.relay.unconfirmed()[0],
            moves=self.relay.moves(),
        )

    def _table(self, header: Header) -> ServerTable:
        table = self.tables.get(header.table)
        if table is None:
            if self.stopped:  # and the connection is about to be closed
                raise MovedError(f"server {self.number} has stopped")
            raise UnknownTableError(f"server {self.number} has no table number {header.table}; was it dropped?")
        return table

    def leased(self, header: Header) -> ServerTable:
        """The table, if no other server can have become the primary of its shards here."""
        table = self._table(header)
        if table.replicated and not self.holds_lease():
            raise self.heartbeat.lost_lease()
        return table

    def _when_free(self, handler: Handler) -> Handler:
        """The handler, for requests that need not wait for a function."""

        def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
            if not (self.functions.holds and self.functions.postpone(self._table(header), connection, header, body)):
                handler(connection, header, body)

        return handle

    def _closed(self, handler: Handler) -> Handler:
        """The handler, for requests before which the clock of their shards is closed, if it has many sums."""

        def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
            table = self._table(header)
            if not self.closings.first(table, connection, header, body):
                handler(connection, header, body)

        return handle

    def _beside(self, handler: Handler) -> Handler:
        """The handler, for frames that change rows: large ops are carried out beside the loop first."""

        def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
            table = self._table(header)
            if self.large.first(table, connection, header, body):
                return
            try:
                handler(connection, header, body)
            finally:
                if not self.large.leaves_nothing(header):
                    self.large.clean(table.replicas.values())

        return handle

    def _scan(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self.service.requests += 1
        began, request, table = self.meters.clock(), Scan.of(header), self.leased(header)
        replica, first, last = table.scanned(request, body)
        if table.spec.aggregate is not None:
            self.close_before(replica, header.clock)
        shard = replica.shard
        assert isinstance(shard, KeyedShard)
        found = scan(shard, request.rank, first, last, min(request.limit, MOST_SCANNED))
        nbytes = table.answer_scan(connection, header, shard, found)
        self.meters.scanned(table.meter, request.shard, len(found.keys), nbytes, began)

    def _pull(self, connection: RoleConnection, header: Header, body: memoryview) -> Served:
        self.service.requests += 1
        table = self.leased(header)
        request = table.cut(header, body)
        if request.used != len(body):
            raise ProtocolError(f"a pull of {header.count} rows has a body of {len(body)} bytes, not {request.used}")
        if table.spec.aggregate is not None:
            for part in request.parts:
                self.close_before(part.replica, header.clock)
        (table.answer_born if header.flags & BORN else table.answer)(connection, header, request.parts)
        return table.meter, request.parts

    def _push(self, connection: RoleConnection, header: Header, body: memoryview) -> Served:
        self.service.requests += 1
        if self.relay.has_successors:
            return self._holding(self._take_push, connection, header, body)
        return self._take_push(connection, header, body, lambda: None)

    @staticmethod
    def _holding(
        function: Callable[[RoleConnection, Header, memoryview, Callable[[], None]], T],
        connection: RoleConnection,
        header: Header,
        body: memoryview,
    ) -> T:
        """Handle a frame whose body is needed until its forwards have ended. `function` calls `release` then; where it
        raises, the body is released here."""
        body, release = connection.hold(body)
        try:
            return function(connection, header, body, release)
        except BaseException:
            release()
            raise

    def _take_push(
        self, connection: RoleConnection, header: Header, body: memoryview, release: Callable[[], None]
    ) -> Served:
        table = self._table(header)
        if not table.waits:  # so no backup refuses the op in time: a primary that was replaced has to do so itself
            self.leased(header)
        spec, request = table.spec, table.cut(header, body)
        values = table.values(header, body, request.used)
        if spec.finite and not spec.is_whole and not all_finite(values):
            raise NotFiniteError(f"a push to table {spec.name!r} holds NaN or infinity, which the table refuses")
        given, parts = header, request.parts
        header, request, values = late_rows(table, header, request, values)
        op, ops = merged_op(table, given, body, parts, op_of(header)), []
        if isinstance(spec.optimizer, Custom):  # else the shards themselves close their sums, on all copies
            for part in request.parts:
                self.close_before(part.replica, header.clock)
        for part in request.parts:  # all that can fail comes before the first change
            shard = part.replica.shard
            if op.origin:
                shard.ledger.check(op.origin, op.attempt)
            shard.check_weight(op)
            if shard.made_beside is None and not self.memory.limit:
                shard.make_room(op, part.b - part.a)
            ops.append(shard.prepared(part.op(op, values)))
        if isinstance(spec.optimizer, Custom):
            self._check_copied(table, ops, request)
        if given.flags & frames.ANSWER and table.waits:  # because the body is released before the answer leaves
            parts = [part._replace(keys=None if part.keys is None else part.keys.copy()) for part in parts]
        owed = OwedAnswer()
        if not header.flags & frames.REPLAYED:  # else no shard applies what it does not know
            self.forgetting.make_room(table, [(part.replica, op) for part, op in zip(request.parts, ops, strict=True)])
        self.changes.push(header, ops, request, values, owed)

        def reply() -> None:
            if owed.error is not None:
                self._refuse(connection, header.request, owed.error)
            elif not connection.transport.is_closing():
                table.answer(connection, given, parts, op)

        waits = owed if table.waits else OwedAnswer()
        if given.flags & frames.ANSWER:
            waits.then(reply)
        else:
            acknowledgement = encode_header(Header(frames.OK, request=header.request, count=given.count))
            waits.answer(self.ops.answers, connection, acknowledgement, self._refuse)
        owed.at_end(release)
        self.relay.throttle(connection)
        return table.meter, parts

    @staticmethod
    def _refuse(connection: RoleConnection, request: int, error: DPSError) -> None:
        """Tell a client why one of the copies refuses its request."""
        if not connection.transport.is_closing():
            connection.reply_error(Header(frames.PUSH, request=request), error)
            connection.transport.close()

    @staticmethod
    def _check_copied(table: ServerTable, ops: list[Op], request: TableRequest) -> None:
        """Raise LimitError if the rows that the user's optimizer makes of a push do not fit a frame to the copies."""
        if any(op.after is not None for op in ops):
            table.check_copied(sum(len(op.values) for op in ops), "a push changes")
        elif table.spec.aggregate is not None:
            for part in request.parts:
                shard = part.replica.shard
                summed = part.b - part.a + (0 if shard.sums is None else shard.sums.count)
                summed = summed if table.spec.keyed else min(summed, len(shard))
                table.check_copied(summed, "the pushes of one clock change")

    # -- frames of the predecessor in a chain

    def _replicate(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        self._holding(self._take_op, connection, header, body)

    def _take_op(
        self, connection: RoleConnection, header: Header, body: memoryview, release: Callable[[], None]
    ) -> None:
        table = self._table(header)
        versions = np.frombuffer(body, np.int64, header.shards).tolist()
        rest = body[8 * header.shards :]
        op = op_of(header)
        if header.flags & frames.CONTROL:
            replicas = [table.replica(n) for n in range(header.shard, header.shard + header.shards)]
            request = TableRequest([ReplicaPart(replica, None, op.start, 0, 0) for replica in replicas], None, 0)
        else:
            request = table.cut(header, rest, primary=False)
        values = table.values(header, rest, request.used)
        if header.flags & frames.MORE:
            op = table.with_more(op, header, rest, request.used)
        owed, fresh, ops = OwedAnswer(), [], []
        for part in request.parts:  # all that can fail comes before the first change
            replica, version = part.replica, versions[part.replica.number - header.shard]
            # A placement has not come yet: the first one of a new table, or one by which another server is the primary.
            # The predecessor sends again. To pass the op on along the old chain would bring it back to its sender.
            if replica.fence == 0 or (replica.primary and header.epoch > self.epoch):
                release()
                connection.transport.close()
                return
            self._check_fence(header, replica)
            if version > replica.shard.version + 1:
                raise DPSError(
                    f"server {self.number} is at {replica.shard.version} of shard {replica.number}, not {version}"
                )
            if version > replica.shard.version:
                fresh.append((part, version))
                ops.append(part.op(op, values))
            else:
                self.ops.follow(replica, owed)
        self.changes.follow(header, fresh, ops, request, values, owed)
        owed.at_end(release)
        owed.answer(self.ops.answers, connection, encode_header(Header(frames.OK, request=header.request)), None)

    @staticmethod
    def _check_fence(header: Header, replica: Replica) -> None:
        """Refuse the ops of a sender that was replaced since the epoch it believes in."""
        if header.epoch < replica.fence:
            shard = f"shard {replica.number} of table {replica.spec.name!r}"
            raise FencedError(f"{shard} takes no ops of epoch {header.epoch} any more")
