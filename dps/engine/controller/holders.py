"""Holders: the servers that keep the journal, as the membership of a controller sees them.

`recorder.py` says what is recorded, and `coordination/journal.py` has the rules. Everything here happens in the thread
of the controller's endpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from dps import config
from dps.engine.controller.recorder import Recorder
from dps.engine.controller.server_record import ServerRecord
from dps.engine.coordination.journal import Record
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import KeptRecord, Recorded
from dps.engine.wire.messages import encode
from dps.engine.wire.protocols import RoleEndpoint

__all__ = ["Holders"]


class HoldersOwner(Protocol):
    """The parts of the membership that this uses: see :class:`dps.engine.controller.failover.Membership`."""

    endpoint: RoleEndpoint

    @property
    def servers(self) -> Mapping[int, ServerRecord]: ...
    def empty(self, number: int) -> bool: ...


class Holders:
    """The servers to which the records of one parameter server go: see the module's docstring."""

    def __init__(self, owner: HoldersOwner):
        self._owner = owner
        self.recorder: Recorder | None = None  # commits decisions before they take effect; None: there is no journal
        # Where each server listens. Servers that have ended stay, because the journal asks whether their process lives.
        self.addresses: dict[int, tuple[str, int]] = {}
        # Server -> a moment after which the last lease began that the server surely got.
        self._bound_at: dict[int, float] = {}
        self._dead: dict[int, float] = {}  # server whose process has ended -> when that was found
        self._silence = config.seconds("silence")

    def hosts(self) -> dict[int, str]:
        """The machines of the servers that stay, and are up or were a moment ago: connections are made again."""
        there = {n: s for n, s in self._owner.servers.items() if not (s.silent or s.failed or s.worker_removed)}
        ending = {n for n, server in there.items() if server.leaving and self._owner.empty(n)}
        return {n: s.address[0] for n, s in there.items() if s.address is not None and n not in ending}

    def keeps_journal(self, number: int) -> bool:
        """Whether a server is needed to find the newest record, or is about to be."""
        return self.recorder is not None and number in self.recorder.keepers

    def send(self, number: int, record: Record) -> None:
        """Send a record of the journal to a server; it is lost where the server is not connected."""
        server = self._owner.servers.get(number)
        if server is not None and server.connection is not None:
            holders, before = sorted(record.holders), sorted(record.before)
            message = KeptRecord(record.ballot, record.number, holders, before, record.content)
            server.connection.reply(Header(frames.RECORD), encode(message))

    def recorded(self, answer: Recorded) -> None:
        """A server has kept a record, or refused it."""
        if self.recorder is not None:
            self.recorder.recorded(answer)

    def tick(self) -> None:
        """Send records again that servers have not answered; to be called some times a second."""
        if self.recorder is not None:
            self.recorder.tick()

    def suspects(self) -> dict[int, tuple[str, int]]:
        """Addresses of the servers that may be dead, while the journal waits for one of them; else none.

        These are also servers that do not keep the journal, because the death of one that does may count only if no
        server is left that follows another controller.
        """
        awaited = set() if self.recorder is None else self.recorder.unwritten
        connected = {n for n, server in self._owner.servers.items() if server.connection is not None}
        if awaited <= connected:
            return {}
        unknown = awaited | (self._concerned() - self._dead.keys())
        return {n: self.addresses[n] for n in unknown - connected if n in self.addresses}

    def died(self, number: int) -> None:
        """The process of a server has ended: nothing listens at its address.

        Its death counts while its last lease of this controller is not over. Later, it may have followed another
        controller before it died, and have kept a record of that one. Then its death counts when what it has granted is
        over, if all other servers have followed this controller since: none is left that follows another one.
        """
        if self.recorder is None or number not in self.suspects():
            return
        now, lease, servers = self._owner.endpoint.now(), config.seconds("lease"), self._owner.servers
        found = self._dead.setdefault(number, now)
        others = self._concerned() - self._dead.keys()
        follow = all(n in servers and servers[n].confirmed_at > found for n in others)
        if now - self._bound_at.get(number, -math.inf) <= lease or (now - found > lease and follow):
            self.recorder.died(number)

    def _concerned(self) -> set[int]:
        """The servers that may follow another controller: those that have followed this one, or keep the journal."""
        assert self.recorder is not None
        return self._bound_at.keys() | self.recorder.keepers

    def silences(self) -> dict[int, float]:
        """Seconds since each server has surely followed this controller, and not another one.

        What counts is an answer that the server has confirmed, and not the arrival of a heartbeat, because a controller
        that was stopped reads old heartbeats when it goes on.
        """
        now = self._owner.endpoint.now()
        return {number: now - server.confirmed_at for number, server in self._owner.servers.items()}

    @property
    def decides(self) -> bool:
        """Whether servers without which no other controller can take over have been heard lately.

        Otherwise the route may be out of date, and its clients belong to another controller.
        """
        now = self._owner.endpoint.now()
        heard = {n: now - max(server.confirmed_at, server.connected_at) for n, server in self._owner.servers.items()}
        return self.recorder is None or self.recorder.may_renew(heard, self._silence)

    def answer_flags(self, server: ServerRecord, heartbeat: Header, may_lease: bool) -> int:
        """The flags of the answer to a heartbeat: CONTROL where it renews no lease, as where there may be none."""
        if self.recorder is None:
            return 0
        renews = may_lease and self.recorder.may_renew(self.silences(), self._silence)
        server.answer(heartbeat.request, heartbeat.number, self._owner.endpoint.now(), renews)
        has_granted = heartbeat.flags & frames.CONTROL
        self._bound_at[server.number] = -math.inf if has_granted else server.bound_at
        self._dead.pop(server.number, None)  # because it lives: another program has refused in its place
        return 0 if renews else frames.CONTROL

    def forget(self, number: int) -> None:
        """Forget which controller a server followed, because it was closed."""
        self._bound_at.pop(number, None)
        self._dead.pop(number, None)
