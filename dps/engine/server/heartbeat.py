"""Heartbeat: a server's standing with the controller. It announces the server, beats, and holds the lease.

The lease of a heartbeat counts from when the server *sent* it, and the controller's patience counts from when the
heartbeat *arrived*. So the lease of a server is over before the controller takes the server for silent, whatever
happened in between, and no machine has to compare its clock with another machine's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import msgspec

from dps import config
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import FullServers, Placement, Serve, ServerFailed, decode, encode
from dps.engine.wire.protocols import RoleEndpoint, RoleLink

__all__ = ["HEARTBEAT_SECONDS", "Heartbeat"]

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25  # between two heartbeats
BEATS_PER_REPORT = 2


class Heartbeat:
    """The link to the controller, and the lease. The first parameters are those of `ServerRole` in `requests.py`.

    `adopt` takes each placement that the controller sends.
    `make_report` gives the report that travels with every `BEATS_PER_REPORT`-th heartbeat. Its argument says whether
    the connection is new. `learn_full` is told with each answer which servers have used up their budgets of memory.
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
    ):
        self.endpoint, self.number = endpoint, number
        self.lease_until = 0.0
        self._session, self._secret, self._controller = session, secret, controller
        self._adopt, self._make_report, self._learn_full = adopt, make_report, learn_full
        self._lease = config.seconds("lease")
        self._link: RoleLink | None = None
        self._sent: dict[int, float] = {}  # number of a heartbeat without an answer -> when it was sent
        self._last_beat = 0
        self._connection_is_new = False  # no report has gone over this connection
        self._stopped = False
        self._failure: ServerFailed | None = None

    def connect(self) -> None:
        """Connect to the controller, and again whenever the connection breaks."""
        if not self._stopped:
            self._link = self.endpoint.connect(
                self._controller, self._session, self._secret, self._on_up, self._on_frame, self._on_end
            )

    def stop(self) -> None:
        self._stopped = True
        if self._link is not None:
            self._link.close()

    def beat(self, epoch: int) -> None:
        """Send a heartbeat; to be called every `HEARTBEAT_SECONDS`.

        A link on which no heartbeat was answered for the time of a lease is closed, and made again.
        """
        if self._sent and self.endpoint.now() - next(iter(self._sent.values())) > self._lease:
            assert self._link is not None  # it has sent them
            self._sent.clear()
            self._link.close()
        elif self._link is not None and self._link.open:
            self._last_beat += 1
            self._sent[self._last_beat] = self.endpoint.now()
            body = (
                self._make_report(self._connection_is_new)
                if self._connection_is_new or self._last_beat % BEATS_PER_REPORT == 0
                else b""
            )
            self._connection_is_new = False
            self._link.send(Header(frames.BEAT, request=self._last_beat, epoch=epoch, body=len(body)), (body,))

    def fail(self, why: str) -> None:
        """Give the lease up, and tell the controller that this server has failed, now and on each new connection."""
        self._failure, self.lease_until = ServerFailed(self.number, why), 0.0
        self.report(frames.FAILED, self._failure)

    def report(self, kind: int, message: msgspec.Struct) -> None:
        """Send a message to the controller. It is lost while there is no connection, so a caller that needs its effect
        repeats it."""
        if self._link is not None and self._link.open:
            _send(self._link, kind, message)

    def _on_up(self, link: RoleLink) -> None:
        if self._failure is not None:
            _send(link, frames.FAILED, self._failure)
            return
        _send(link, frames.SERVE, Serve(self.number, self.endpoint.host, self.endpoint.port))
        self._connection_is_new = True
        self.beat(0)

    def _on_frame(self, link: RoleLink, header: Header, body: memoryview) -> None:
        if self._failure is not None:
            return
        if header.kind == frames.PLACE:
            self._adopt(decode(Placement, body))
        elif header.kind == frames.OK:
            sent = self._sent.pop(header.request, None)
            if sent is not None:
                self.lease_until = max(self.lease_until, sent + self._lease)
            self._learn_full(decode(FullServers, body).servers if len(body) else ())
        elif header.kind == frames.ERROR:
            logger.warning(
                "server %d: the controller answers with an error: %s", self.number, frames.decode_error(body)
            )

    def _on_end(self, link: RoleLink) -> None:
        self.lease_until = 0.0  # the controller may have put another server in this one's place
        self._sent.clear()
        self.endpoint.later(HEARTBEAT_SECONDS, self.connect)


def _send(link: RoleLink, kind: int, message: msgspec.Struct) -> None:
    body = encode(message)
    link.send(Header(kind, body=len(body)), (body,))
