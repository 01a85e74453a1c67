"""Grants: without a controller, a primary answers pulls for as long as other servers let it.

`coordination/journal.py` has the rules. A primary needs a lease, because its controller may have put another server in
its place. While it hears of no controller, it asks all other servers (GRANT), and itself. A server grants if it hears
of no controller either and keeps no record of a later placement; then it takes no such record until the grant is over.
The primary goes on while the servers that have granted are a majority of those that keep the journal, so no controller
can have decided anything that the primary does not know.

A grant is over for the primary before it is over for its giver, because the primary counts from when it asked. It lasts
as long as a lease. When a scheduler dies, its servers find that out within milliseconds of each other, so a primary
that is refused asks again a moment later, a few times. A primary whose controller has renewed its lease gives its
grants back, because decisions wait for their end. Everything here happens in the endpoint's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from dps import config
from dps.engine.coordination.journal import Record, may_go_on
from dps.engine.server.holder import RecordHolder
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import GrantAsked, Granted
from dps.engine.wire.messages import decode, encode
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint, RoleLink

__all__ = ["Grants"]

# After which a server that has refused is asked again, in seconds. The last one comes before the next heartbeat.
PAUSES = (0.005, 0.01, 0.02, 0.04, 0.08)


class Grants:
    """What one server has been granted, and its answers to others.

    `peers` and `secret` are name and secret under which servers connect to each other. `is_alone` says whether this
    server hears of no controller.
    """

    def __init__(
        self, endpoint: RoleEndpoint, peers: str, secret: str, holder: RecordHolder, is_alone: Callable[[], bool]
    ):
        self.until = -math.inf  # this server may go on until then, if nothing else lets it
        self._endpoint, self._peers, self._secret = endpoint, peers, secret
        self._holder, self._is_alone = holder, is_alone
        self._lease = config.seconds("lease")
        self._links: dict[int, RoleLink] = {}
        self._returned: set[RoleLink] = set()  # those over which a grant was given back; the answer ends them
        self._requests = 0
        # Request without an answer -> (when it was sent, what it asks, how often that was refused).
        self._sent: dict[int, tuple[float, GrantAsked, int]] = {}
        self._grants: dict[int, tuple[float, Record | None]] = {}  # server -> (end of its grant, what it keeps)

    def answer(self, connection: RoleConnection, header: Header, body: memoryview) -> None:
        """Answer another server."""
        reply = encode(self._give(decode(GrantAsked, body)))
        connection.reply(Header(frames.OK, request=header.request, body=len(reply)), reply)

    def ask(self, epoch: int, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Ask the servers at these addresses; to be called some times in the time of a lease."""
        now = self._endpoint.now()
        self._sent = {request: sent for request, sent in self._sent.items() if now <= sent[0] + self._lease}
        asked = GrantAsked(self._holder.number, epoch)
        self._take(self._give(asked), now)
        for number in addresses.keys() - {self._holder.number}:
            link = self._links.get(number)
            if link is None:
                told = partial(self._send, asked), self._on_frame, partial(self._on_end, number)
                self._links[number] = self._endpoint.connect(addresses[number], self._peers, self._secret, *told)
            elif link.open:
                self._send(asked, link)

    def give_back(self) -> None:
        """There is a controller: go on by nothing that was granted, and say so to all."""
        if not self._grants and not self._links:
            return
        self.until = -math.inf
        self._grants.clear()
        self._sent.clear()  # because an answer that is on its way would count, too
        asked = GrantAsked(self._holder.number, None)
        self._give(asked)
        links, self._links = self._links, {}
        for link in links.values():
            if link.open:
                self._send(asked, link)
                self._returned.add(link)
            else:
                link.close()

    def close(self) -> None:
        """Close all connections to other servers."""
        for link in (*self._links.values(), *self._returned):
            link.close()

    def _give(self, asked: GrantAsked) -> Granted:
        return self._holder.grant(asked, self._endpoint.now() + self._lease, not self._is_alone())

    def _send(self, asked: GrantAsked, link: RoleLink, refusals: int = 0) -> None:
        self._requests += 1
        self._sent[self._requests] = self._endpoint.now(), asked, refusals
        body = encode(asked)
        link.send(Header(frames.GRANT, request=self._requests, body=len(body)), (body,))

    def _on_frame(self, link: RoleLink, header: Header, body: memoryview) -> None:
        request = self._sent.pop(header.request, None)
        if link in self._returned:
            link.close()
        elif header.kind == frames.OK and request is not None:
            sent, asked, refusals = request
            answer = decode(Granted, body)
            self._take(answer, sent)
            if not answer.granted and refusals < len(PAUSES):
                self._endpoint.later(PAUSES[refusals], self._ask_again, link, asked, refusals + 1)

    def _ask_again(self, link: RoleLink, asked: GrantAsked, refusals: int) -> None:
        if link.open and link in self._links.values():
            self._send(asked, link, refusals)

    def _on_end(self, number: int, link: RoleLink) -> None:
        self._returned.discard(link)
        if self._links.get(number) is link:
            del self._links[number]

    def _take(self, answer: Granted, sent: float) -> None:
        """Count an answer to what was asked at that time."""
        if answer.granted:
            kept = None if answer.kept is None else Record.made(*msgspec.structs.astuple(answer.kept))
            self._grants[answer.server] = sent + self._lease, kept
            for end in sorted((end for end, _ in self._grants.values()), reverse=True):
                if may_go_on({server: kept for server, (until, kept) in self._grants.items() if until >= end}):
                    self.until = max(self.until, end)
                    break
