"""Pulls that a backup answers, of tables with ``reads="copies"``.

Theory of operation
-------------------
`docs/design/replication.md`, "Pulls from backups", has the proof. A backup does not know whether it is still in the
chain of a shard, nor which pushes are acknowledged. So it asks the primary of the shard for its version (VERSIONS),
after the pull has come, and answers when its own replica has that version. The primary answers as it would answer a
pull: while it takes requests for the shard and holds a lease. It tells no version to a server that is no backup by its
placement, or whose replica has another fence, because that replica may be one of an earlier time in the chain.

While a question about a table is on its way to a primary, later pulls wait for the next question, because an answer
counts only for pulls that came before it was asked for. A connection is not read further while a pull of it waits, so
a client's requests are answered in their order. A pull that cannot be answered in time is refused, and the client sends
it to the primary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from dps.engine.core.requests.service import Service
from dps.engine.server.replicas import Replica, ReplicaPart
from dps.engine.server.tables import ServerTable, TableRequest
from dps.engine.telemetry.server_meter import ServerMeter, TableMeter
from dps.engine.wire import frames
from dps.engine.wire.frames import BORN, CHANGED, Header
from dps.engine.wire.headers import Versions
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint, RoleLink
from dps.engine.wire.rights import Handler
from dps.errors import BehindError, DPSError, MovedError, ProtocolError

__all__ = ["WAIT_SECONDS", "BackupPulls", "has_version", "version_for"]

WAIT_SECONDS = 0.25  # for which a pull waits at most: less than a client waits before it doubts a server
CONNECT_SECONDS = 2.0  # a connection to a primary that takes longer to open is closed, and tried again
LOOK_SECONDS = 0.001  # between two looks whether a replica has got the version that its primary told
SWEEP_SECONDS = 0.05  # between two looks for pulls that have waited for too long
UNTOLD = -1  # in the place of a version: the server may not answer pulls of the shard


# ---- The rules


def version_for(replica: Replica | None, server: int, fence: int) -> int:
    """The version that a primary tells a backup, which names its fence; UNTOLD if it is to answer no pulls."""
    if replica is None or not replica.serves or replica.place is None:
        return UNTOLD
    place = replica.place
    backups = dict(zip(place.chain[1:], place.fences[1:], strict=False))  # no joiner: its dump may not be complete
    return int(replica.shard.version) if backups.get(server) == fence else UNTOLD


def has_version(replica: Replica, now: Replica | None, version: int) -> bool | None:
    """Whether a backup may answer for the replica of which it has asked; None: not for this one any more.

    `now` is its replica of the shard at present.
    """
    if now is not replica or replica.joining or version == UNTOLD:
        return None
    return int(replica.shard.version) >= version


# ---- Pulls that wait


class WaitingPull:
    """A pull that waits for versions. Its body is a copy, because the connection uses the memory again."""

    __slots__ = ("body", "connection", "header", "left", "own", "replicas", "request", "table", "until", "versions")

    def __init__(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview, until: float):
        self.table, self.connection, self.header, self.until = table, connection, header, until
        self.body = memoryview(bytes(body))
        self.request: TableRequest = table.cut(header, self.body, primary=False)
        self.replicas = {part.replica.number: part.replica for part in self.request.parts if not part.replica.primary}
        self.own = [part.replica for part in self.request.parts if part.replica.primary]
        self.versions: dict[int, int] = {}  # shard -> the version that its primary has told
        self.left = 0  # primaries that have not answered

    @property
    def parts(self) -> list[ReplicaPart]:
        return self.request.parts

    def is_ready(self) -> bool | None:
        """Whether all its replicas have the versions that they need; None, if the pull is to be refused."""
        standing = [
            has_version(replica, self.table.replicas.get(shard), self.versions.get(shard, UNTOLD))
            for shard, replica in self.replicas.items()
        ]
        return None if None in standing else all(standing)


class Questions:
    """What a backup asks one primary about one table: the pulls of the open question, and those of the next one."""

    def __init__(self, table: ServerTable) -> None:
        self.table = table
        self.open: list[WaitingPull] = []
        self.next: list[WaitingPull] = []
        self.shards: list[int] = []  # of the open question
        self.request = 0  # its number; 0: none is open
        self.asked_at = 0.0


class BackupPulls:
    """The pulls that one server answers as a backup, and its answers to backups.

    Parameters
    ----------
    endpoint
        The server's; its `now`, `later` and `connect` are used.
    peers, secret : str
        Name and secret under which servers connect to each other.
    number : int
        The server's.
    table_of : callable
        The table of a frame.
    addresses : callable
        Where the servers listen, by the placement.
    holds_lease : callable
        Whether no other server can be the primary of this one's shards yet.
    refuse : callable
        Tells a peer (first argument) that its request (its number) failed, because of an error (third argument).
    meters : ServerMeter
    service : Service
        Counts requests.
    """

    def __init__(
        self,
        endpoint: RoleEndpoint,
        peers: str,
        secret: str,
        number: int,
        table_of: Callable[[Header], ServerTable],
        addresses: Callable[[], Mapping[int, tuple[str, int]]],
        holds_lease: Callable[[], bool],
        refuse: Callable[[RoleConnection, int, DPSError], None],
        meters: ServerMeter,
        service: Service,
    ):
        self._endpoint, self._peers, self._secret, self._number = endpoint, peers, secret, number
        self._table_of, self._addresses, self._holds_lease, self._refuse = table_of, addresses, holds_lease, refuse
        self._respond, self._service = meters.timed(self._respond_to), service
        self._parts: list[ReplicaPart] = []  # of the pull that is being answered
        self._links: dict[int, RoleLink] = {}  # to primaries
        self._begun_at: dict[int, float] = {}  # when the connection to a primary was begun
        self._questions: dict[tuple[int, int], Questions] = {}  # by primary, and number of the table
        self._requests = 0
        self._waiting: dict[WaitingPull, None] = {}
        self._behind: list[WaitingPull] = []  # whose versions are known, and which a replica has not got yet
        self._looks = self._sweeps = False  # whether the timer of `_look`, and of `_sweep`, runs

    # -- as a primary

    def tell(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """Tell a backup the versions of shards, so that it may answer pulls of these."""
        table, asked = self._table_of(header), Versions.of(header)
        if len(body) != 16 * asked.shards:
            raise ProtocolError(f"a question for the versions of {asked.shards} shards has a body of {len(body)} bytes")
        named = np.frombuffer(body, np.int64).reshape(-1, 2).tolist()
        leads = table.reads_copies and self._holds_lease()
        versions = [
            version_for(table.replicas.get(shard), asked.server, fence) if leads else UNTOLD for shard, fence in named
        ]
        answer = np.array(versions, np.int64).tobytes()
        connection.reply(Header(frames.OK, request=header.request, count=len(versions), body=len(answer)), answer)

    # -- as a backup

    def first(self, handler: Handler) -> Handler:
        """The handler of pulls, for those that name no shard of which the server is a backup; others are taken here."""

        def handle(connection: RoleConnection, header: Header, body: memoryview) -> None:
            table = self._table_of(header)
            if table.reads_copies and not header.flags & (BORN | CHANGED) and self._is_backup(table, header):
                self._take(table, connection, header, body)
            else:
                handler(connection, header, body)

        return handle

    @staticmethod
    def _is_backup(table: ServerTable, header: Header) -> bool:
        """Whether the server has a replica of a shard that the pull names, and is not its primary."""
        end = min(header.shard + header.shards, table.spec.shards)
        replicas = (table.replicas.get(shard) for shard in range(header.shard, end))
        return any(replica is not None and not replica.primary for replica in replicas)

    def _take(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """Take a pull: ask the primaries of the shards that have rows of it."""
        self._service.requests += 1
        pull = WaitingPull(table, connection, header, body, self._endpoint.now() + WAIT_SECONDS)
        if pull.request.used != len(body):
            raise ProtocolError(f"a pull of {header.count} rows has a body of {len(body)} bytes")
        leaders = set[int]()
        for part in pull.parts:
            replica = part.replica
            if part.keys is not None:
                table.check_own(replica.number, part.keys)
            if not replica.primary:
                if replica.joining or replica.place is None:
                    raise self._behind_error(table, f"shard {replica.number} is still being copied to it")
                leaders.add(replica.place.chain[0])
        self._check_own_shards(pull)
        self._waiting[pull] = None
        pull.left = len(leaders)
        if not leaders:  # its keys lie in shards of which the server is the primary
            self._answer(pull)
            return
        connection.suspend()
        for leader in leaders:
            questions = self._questions.setdefault((leader, table.spec.id), Questions(table))
            questions.next.append(pull)
            self._ask(leader, questions)
        self._keep_looking()

    def _check_own_shards(self, pull: WaitingPull) -> None:
        """Refuse a pull that names shards of which the server was the primary, and may not be any more."""
        for replica in pull.own:
            held = pull.table.replicas.get(replica.number) is replica and replica.serves
            if not (held and self._holds_lease()):
                raise self._behind_error(pull.table, f"it may not be the primary of shard {replica.number}")

    def _behind_error(self, table: ServerTable, why: str) -> MovedError:
        return BehindError(f"server {self._number} does not answer a pull of table {table.spec.name!r}: {why}")

    # -- questions

    def _ask(self, leader: int, questions: Questions) -> None:
        """Ask a primary for the versions that pulls wait for, unless a question is open or the connection is not up."""
        if questions.request or not questions.next:
            return
        link = self._link(leader)
        if link is None or not link.open:
            return
        self._requests += 1
        questions.open, questions.next, questions.request = questions.next, [], self._requests
        questions.asked_at = self._endpoint.now()
        asked: dict[int, int] = {}
        for pull in questions.open:
            for shard, replica in pull.replicas.items():
                if replica.place is not None and replica.place.chain[0] == leader:
                    asked[shard] = replica.fence
        questions.shards = list(asked)
        body = np.array(list(asked.items()), np.int64).tobytes()
        epoch = max((pull.header.epoch for pull in questions.open), default=0)
        head = Versions(questions.table.spec.id, epoch, self._number, len(asked)).header()
        link.send(head._replace(request=questions.request, body=len(body)), (body,))

    def _link(self, leader: int) -> RoleLink | None:
        """The connection to another server; it is begun where there is none."""
        link, address = self._links.get(leader), self._addresses().get(leader)
        if link is None and address is not None:
            told = partial(self._on_up, leader), partial(self._on_frame, leader), partial(self._on_end, leader)
            link = self._links[leader] = self._endpoint.connect(address, self._peers, self._secret, *told)
            self._begun_at[leader] = self._endpoint.now()
        return link

    def _on_up(self, leader: int, link: RoleLink) -> None:
        for (server, _), questions in self._questions.items():
            if server == leader:
                self._ask(leader, questions)

    def _on_frame(self, leader: int, link: RoleLink, header: Header, body: memoryview) -> None:
        """A primary has answered: pulls go on with the versions that it has told."""
        found = [
            (key, questions)
            for key, questions in self._questions.items()
            if key[0] == leader and questions.request == header.request
        ]
        if self._links.get(leader) is not link or not found:
            return
        (key, questions), told = found[0], np.frombuffer(body, np.int64).tolist() if header.kind == frames.OK else []
        versions = dict(zip(questions.shards, told, strict=False))
        pulls, questions.open, questions.request = questions.open, [], 0
        if questions.next:
            self._ask(leader, questions)
        else:
            del self._questions[key]
        for pull in pulls:
            pull.versions.update((shard, versions[shard]) for shard in pull.replicas.keys() & versions.keys())
            pull.left -= 1
            if pull.left == 0 and pull in self._waiting:
                self._answer(pull)
        self._keep_looking()

    def _on_end(self, leader: int, link: RoleLink) -> None:
        """The connection to a primary broke: pulls that wait for its answer are refused."""
        if self._links.get(leader) is link:
            self._forget_link(leader)

    def _forget_link(self, leader: int) -> None:
        del self._links[leader]
        for key in [key for key in self._questions if key[0] == leader]:
            questions = self._questions.pop(key)
            for pull in questions.open + questions.next:
                self._give_up(pull, f"server {leader}, its primary, does not answer")

    # -- answers

    def _answer(self, pull: WaitingPull) -> None:
        """Answer a pull whose versions are known, wait on, or refuse it."""
        ready = pull.is_ready()
        if ready is None:
            self._give_up(pull, "it may have lost the shard")
        elif not ready:
            self._behind.append(pull)
        else:
            del self._waiting[pull]
            self._parts = pull.parts
            try:
                self._check_own_shards(pull)
                self._respond(pull.connection, pull.header, pull.body)
            except DPSError as error:
                self._refuse(pull.connection, pull.header.request, error)
            pull.connection.resume()

    def _respond_to(
        self, connection: RoleConnection, header: Header, body: memoryview
    ) -> tuple[TableMeter, list[ReplicaPart]]:
        table = self._table_of(header)
        table.answer(connection, header, self._parts)
        table.meter.pulls_as_backup += 1
        return table.meter, self._parts

    def _give_up(self, pull: WaitingPull, why: str) -> None:
        if pull in self._waiting:
            del self._waiting[pull]
            self._refuse(pull.connection, pull.header.request, self._behind_error(pull.table, why))
            pull.connection.resume()

    def _keep_looking(self) -> None:
        if self._behind and not self._looks:
            self._looks = True
            self._endpoint.later(LOOK_SECONDS, self._look)
        if self._waiting and not self._sweeps:
            self._sweeps = True
            self._endpoint.later(SWEEP_SECONDS, self._sweep)

    def _look(self) -> None:
        """Answer pulls whose replicas have got the versions that they need by now."""
        self._looks, behind, self._behind = False, self._behind, []
        for pull in behind:
            if pull in self._waiting:
                self._answer(pull)
        self._keep_looking()

    def _sweep(self) -> None:
        """Refuse pulls that have waited for too long; close connections to primaries that do not answer."""
        self._sweeps, now = False, self._endpoint.now()
        for pull in [pull for pull in self._waiting if now > pull.until]:
            self._give_up(pull, f"its replica has not got the version of the primary for {WAIT_SECONDS:g} s")
        late = {
            leader
            for (leader, _), questions in self._questions.items()
            if questions.request and now > questions.asked_at + WAIT_SECONDS
        }
        for questions in self._questions.values():  # because they hold the bodies of their pulls
            questions.next = [pull for pull in questions.next if pull in self._waiting]
        late |= {
            leader
            for leader, link in self._links.items()
            if not link.open and now > self._begun_at[leader] + CONNECT_SECONDS
        }
        for leader in late:
            link = self._links[leader]
            self._forget_link(leader)
            link.close()
        self._keep_looking()

    def close(self) -> None:
        """Close all connections to other servers."""
        self._waiting.clear()
        links, self._links = self._links, {}
        for link in links.values():
            link.close()
