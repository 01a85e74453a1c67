"""Member: a server's standing with the controller. It reports for duty, beats, and holds the lease that beats renew.

The lease of a beat is counted from when the beat was *sent*, and the controller counts its patience from when the beat
*came*. So a server's lease is over before the controller takes it for silent, whatever happened in between, without
anybody comparing clocks of two machines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dps import config
from dps.wire import frames
from dps.wire.frames import Header

__all__ = ["BEAT", "Member"]

logger = logging.getLogger(__name__)

BEAT = 0.25  # seconds between two beats
REPORT = 2  # beats to a report


class Member:
    """The link to the controller; parameters as in :class:`dps.serving.Serving`, and who takes a placement.

    `tell` gives what goes with every `REPORT`-th beat; it is called with whether the connection is a new one.
    """

    def __init__(
        self,
        endpoint: Any,
        session: str,
        number: int,
        secret: str,
        controller: tuple[str, int],
        adopt: Callable[[dict[str, Any]], None],
        tell: Callable[[bool], bytes],
    ):
        self.endpoint, self.number = endpoint, number
        self.lease_until = 0.0
        self._session, self._secret, self._controller = session, secret, controller
        self._adopt, self._tell = adopt, tell
        self._lease = config.seconds("lease")
        self._link: Any = None
        self._sent: dict[int, float] = {}  # beat -> when it was sent
        self._last = 0
        self._new = False  # nothing has been told over this connection
        self._stopped = False

    def connect(self) -> None:
        """Find the controller; again and again, when the connection breaks."""
        if not self._stopped:
            self._link = self.endpoint.connect(
                self._controller, self._session, self._secret, self._up, self._told, self._lost
            )

    def stop(self) -> None:
        self._stopped = True
        if self._link is not None:
            self._link.close()

    def beat(self, epoch: int) -> None:
        """A sign of life, to be called every `BEAT` seconds. A link on which none is answered is made again."""
        if self._sent and self.endpoint.now() - next(iter(self._sent.values())) > self._lease:
            self._sent.clear()
            self._link.close()
        elif self._link is not None and self._link.open:
            self._last += 1
            self._sent[self._last] = self.endpoint.now()
            body = self._tell(self._new) if self._new or self._last % REPORT == 0 else b""
            self._new = False
            self._link.send(Header(frames.BEAT, request=self._last, epoch=epoch, body=len(body)), (body,))

    def report(self, kind: int, about: dict[str, Any]) -> None:
        """Tell the controller something; lost if there is no connection, so whoever needs an effect says it again."""
        if self._link is not None and self._link.open:
            self._link.send_json(Header(kind), about)

    def _up(self, link: Any) -> None:
        about = {"server": self.number, "host": self.endpoint.host, "port": self.endpoint.port}
        link.send_json(Header(frames.SERVE), about)
        self._new = True
        self.beat(0)

    def _told(self, link: Any, header: Header, body: memoryview) -> None:
        if header.kind == frames.PLACE:
            self._adopt(frames.decode_json(body))
        elif header.kind == frames.OK:
            sent = self._sent.pop(header.request, None)
            if sent is not None:
                self.lease_until = max(self.lease_until, sent + self._lease)
        elif header.kind == frames.ERROR:
            logger.warning("server %d: the controller says: %s", self.number, frames.decode_error(body))

    def _lost(self, link: Any) -> None:
        self.lease_until = 0.0  # it may have given us up
        self._sent.clear()
        self.endpoint.later(BEAT, self.connect)
