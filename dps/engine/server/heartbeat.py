"""Heartbeat: a server's standing with the controller. It announces the server, beats, and holds the lease.

The lease of a heartbeat counts from when the server *sent* it, and the controller's patience counts from when the
heartbeat *arrived*. So the lease of a server is over before the controller takes the server for silent, whatever
happened in between, and no machine has to compare its clock with another machine's.

An answer with the flag CONTROL renews no lease: the controller does not know whether there is another one meanwhile
(`controller/recorder.py`), or has not taken over yet. So it does not bind this server to that controller either: the
attempts of a takeover, of which each needs most servers at once, would stand in each other's way. Each heartbeat says
which answer came last, so that the controller knows since when this server may have turned to another one. Its flag
CONTROL says that a grant of this server is not over (`grants.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from dps import config
from dps.engine.coordination.journal import Ballot
from dps.engine.server.grants import Grants
from dps.engine.server.holder import RecordHolder
from dps.engine.server.tables import ServerTable
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import KeptRecord
from dps.engine.wire.messages import FullServers, Placement, Serve, ServerFailed, decode, encode
from dps.engine.wire.protocols import RoleEndpoint, RoleLink
from dps.errors import ClosedError, FencedError, LeaseError, MovedError

__all__ = ["HEARTBEAT_SECONDS", "Heartbeat"]

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25  # between two heartbeats
BEATS_PER_REPORT = 2
# Pauses before a broken connection to the controller is made again, where servers outlive the scheduler; later ones are
# as long as those between heartbeats. The kernel closes the sockets of a scheduler that was killed one after another,
# and until it has closed the listener, it takes connections that break, so that a server would take the process for
# one that lives.
RETRY_SECONDS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08)


class Heartbeat:
    """The link to the controller, and the lease. The first parameters are those of `ServerRole` in `requests.py`.

    `adopt` takes each placement that the controller sends.
    `make_report` gives the report that travels with every `BEATS_PER_REPORT`-th heartbeat. Its argument says whether
    the connection is new. `learn_full` is told with each answer which servers have used up their budgets of memory.
    `holder` keeps the records of the controller's journal, and knows which controller the server follows. `tables`
    are those of the server, which needs no grants if no table has copies.
    """

    def __init__(
        self,
        endpoint: RoleEndpoint,
        session: str,
        number: int,
        secret: str,
        controller: tuple[str, int],
        adopt: Callable[[Placement], None],
        make_report: Callable[[bool], bytes],
        learn_full: Callable[[Collection[int]], None],
        holder: RecordHolder,
        tables: Mapping[int, ServerTable],
    ):
        self.endpoint, self.number = endpoint, number
        self.lease_until = 0.0
        self.bound_until = 0.0  # until then, the controller lives as far as this server knows
        self._session, self._secret, self._controller = session, secret, controller
        self._adopt, self._make_report, self._learn_full, self._holder = adopt, make_report, learn_full, holder
        self.grants = Grants(endpoint, session, secret, holder, self.is_alone)
        self.servers: Mapping[int, tuple[str, int]] = {}  # addresses of all servers, by the placement
        self._tables = tables
        self._outlives_scheduler = config.scheduler_grace() > 0
        self._epoch = 0  # of the placement
        self._lease = config.seconds("lease")
        self._link: RoleLink | None = None
        self._sent: dict[int, float] = {}  # number of a heartbeat without an answer -> when it was sent
        self._last_beat = self._last_answer = 0  # numbers of heartbeats: the last one sent, and the last one answered
        self._connection_is_new = False  # no report has gone over this connection
        self._retries: Iterator[float] = iter(())  # pauses before the next connections are made
        self._refused = False  # nothing listens where the controller was
        self._stopped = False
        self._failure: ServerFailed | None = None

    def is_alone(self) -> bool:
        """Whether this server hears of no controller: its process has ended, or it is silent or out of reach."""
        is_up = self._link is not None and self._link.open
        return self.endpoint.now() > self.bound_until or (self._refused and not is_up)

    def holds_lease(self) -> bool:
        """Whether the controller, or enough servers, let this one answer as a primary."""
        now = self.endpoint.now()
        return now <= self.lease_until or now <= self.grants.until

    def connect(self) -> None:
        """Connect to the controller, and again whenever the connection breaks."""
        if not self._stopped:
            self._link = self.endpoint.connect(
                self._controller, self._session, self._secret, self._on_up, self._on_frame, self._on_end
            )

    def follow(self, ballot: Ballot, controller: tuple[str, int]) -> None:
        """Follow another controller from now on, which listens there; FencedError if the last one still answers."""
        bound = self.endpoint.now() <= self.bound_until
        if not self._holder.follow(ballot, bound):
            why = "its controller still answers" if bound else f"it follows {self._holder.followed}"
            raise FencedError(f"server {self.number} does not follow controller {ballot}: {why}")
        self._controller, self.lease_until = controller, 0.0
        self._sent.clear()
        if self._link is not None:
            self._link.close()

    def lost_lease(self) -> MovedError:
        """The error for a client whose request needs a lease, which is over."""
        kind = LeaseError if self._outlives_scheduler else MovedError
        return kind(f"server {self.number} has lost its lease: the controller has not answered its heartbeats")

    def stop(self) -> None:
        self._stopped = True
        self.grants.close()
        if self._link is not None:
            self._link.close()

    def beat(self, epoch: int) -> None:
        """Send a heartbeat; to be called every `HEARTBEAT_SECONDS`.

        A link on which no heartbeat was answered for the time of a lease is closed, and made again.
        """
        self._epoch = epoch
        self._renew_grants()
        if self._sent and self.endpoint.now() - next(iter(self._sent.values())) > self._lease:
            assert self._link is not None  # it has sent them
            self._sent.clear()
            self._link.close()
        elif self._link is not None and self._link.open:
            if self._holder.waiting is not None:
                self._keep(self._holder.waiting)
            self._last_beat += 1
            self._sent[self._last_beat] = self.endpoint.now()
            body = (
                self._make_report(self._connection_is_new)
                if self._connection_is_new or self._last_beat % BEATS_PER_REPORT == 0
                else b""
            )
            self._connection_is_new = False
            flags = frames.CONTROL if self._holder.has_granted(self.endpoint.now()) else 0
            numbers = {"request": self._last_beat, "epoch": epoch, "number": self._last_answer}
            self._link.send(Header(frames.BEAT, flags=flags, **numbers, body=len(body)), (body,))

    def _renew_grants(self) -> None:
        """Ask other servers whether this one may go on, if the lease is over soon because nothing has renewed it."""
        if self.endpoint.now() <= self.lease_until - self._lease / 2:
            self.grants.give_back()
        elif self._may_be_granted() and any(table.replicated for table in self._tables.values()):
            self.grants.ask(self._epoch, self.servers)

    def _may_be_granted(self) -> bool:
        return self._outlives_scheduler and not self._stopped and self._failure is None

    def fail(self, why: str) -> None:
        """Give the lease up, and tell the controller that this server has failed, now and on each new connection."""
        self._failure, self.lease_until = ServerFailed(self.number, why), 0.0
        self.grants.close()
        self.report(frames.FAILED, self._failure)

    def report(self, kind: int, message: msgspec.Struct) -> None:
        """Send a message to the controller. It is lost while there is no connection, so a caller that needs its effect
        repeats it."""
        if self._link is not None and self._link.open:
            _send(self._link, kind, message)

    def _keep(self, record: KeptRecord) -> None:
        answer = self._holder.keep(record, self.endpoint.now())
        if answer is not None:
            self.report(frames.RECORDED, answer)

    def _on_up(self, link: RoleLink) -> None:
        self._refused = False
        self._retries = iter(RETRY_SECONDS if self._outlives_scheduler else ())
        if self._failure is not None:
            _send(link, frames.FAILED, self._failure)
            return
        _send(link, frames.SERVE, Serve(self.number, self.endpoint.host, self.endpoint.port, self._holder.followed))
        self._connection_is_new = True
        self.beat(0)

    def _on_frame(self, link: RoleLink, header: Header, body: memoryview) -> None:
        if self._failure is not None:
            return
        if header.kind == frames.PLACE:
            self._adopt(decode(Placement, body))
        elif header.kind == frames.RECORD:
            self._keep(decode(KeptRecord, body))
        elif header.kind == frames.OK:
            sent = self._sent.pop(header.request, None)
            if sent is not None:
                self._last_answer = header.request
                if not header.flags & frames.CONTROL:
                    self.lease_until = max(self.lease_until, sent + self._lease)
                    self.bound_until = max(self.bound_until, sent + self._lease)
            self._learn_full(decode(FullServers, body).servers if len(body) else ())
        elif header.kind == frames.ERROR:
            error = frames.decode_error(body)
            # Where a user has closed the parameter server, this server is about to be stopped: that needs no warning.
            level = logging.INFO if isinstance(error, ClosedError) else logging.WARNING
            logger.log(level, "server %d: the controller answers with an error: %s", self.number, error)

    def _on_end(self, link: RoleLink) -> None:
        self.lease_until = 0.0  # the controller may have put another server in this one's place
        self._sent.clear()
        self._holder.waiting = None
        self._refused = link.refused
        if link.refused:
            self._retries = iter(())
            self._renew_grants()
        self.endpoint.later(next(self._retries, HEARTBEAT_SECONDS), self.connect)


def _send(link: RoleLink, kind: int, message: msgspec.Struct) -> None:
    body = encode(message)
    link.send(Header(kind, body=len(body)), (body,))
