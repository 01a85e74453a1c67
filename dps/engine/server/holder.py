"""Holder: a server's part in the journal. It keeps the controller's last record for the next controller, and grants.

`coordination/journal.py` has the rules. A server keeps records in memory, as it keeps rows: a server that has died is
never the same one again, so it cannot forget what it has promised and come back. Everything here happens in the
endpoint's thread. Times are those of the endpoint's clock.
"""

from __future__ import annotations

import msgspec

from dps.engine.coordination.journal import Acceptor, Ballot, Record
from dps.engine.wire.journal_messages import GrantAsked, Granted, KeptRecord, Recorded, SessionRecord

__all__ = ["RecordHolder"]


class RecordHolder:
    """What the server with that number keeps of the journal, and what it has granted."""

    def __init__(self, number: int):
        self.number = number
        self.waiting: KeptRecord | None = None  # a record that has to wait
        self._acceptor = Acceptor(epoch_of)
        self._granted: dict[int, tuple[int, float]] = {}  # server -> (epoch of its placement, when the grant is over)

    def keep(self, record: KeptRecord, now: float) -> Recorded | None:
        """Keep a record of a controller, unless this server follows another one; the answer.

        None: the record has to wait for the end of grants, and is to be kept again then (`waiting`).
        """
        new = Record.made(*msgspec.structs.astuple(record))
        self.waiting = None
        if self._acceptor.must_wait(new, self._earliest_granted(now)):
            self.waiting = record
            return None
        return Recorded(self.number, record.ballot, record.number, self._acceptor.write(new))

    def grant(self, asked: GrantAsked, until: float, bound: bool) -> Granted:
        """Answer a server that hears of no controller, or gives its grant back. `bound`: the controller lives.

        While a record waits for the end of grants, there are no new ones, or it would wait for ever.
        """
        granted = False
        if asked.epoch is None:
            self._granted.pop(asked.server, None)
        elif self.waiting is None and self._acceptor.may_grant(asked.epoch, bound=bound):
            self._granted[asked.server] = asked.epoch, until
            granted = True
        kept = self.record
        return Granted(self.number, granted, None if kept is None else msgspec.structs.replace(kept, content=b""))

    def has_granted(self, now: float) -> bool:
        """Whether a grant of this server is not over."""
        return self._earliest_granted(now) is not None

    def _earliest_granted(self, now: float) -> int | None:
        self._granted = {server: grant for server, grant in self._granted.items() if now <= grant[1]}
        return min((epoch for epoch, _ in self._granted.values()), default=None)

    @property
    def followed(self) -> Ballot:
        """The controller that this server follows."""
        return self._acceptor.followed

    def follow(self, ballot: Ballot, bound: bool) -> bool:
        """Follow another controller from now on; returns whether it does. `bound`: the one that it follows lives."""
        return self._acceptor.follow(ballot, bound=bound)

    @property
    def record(self) -> KeptRecord | None:
        """The newest record that it keeps."""
        record = self._acceptor.record
        if record is None:
            return None
        return KeptRecord(record.ballot, record.number, sorted(record.holders), sorted(record.before), record.content)


def epoch_of(content: bytes) -> int:
    """The epoch of the placement in a record."""
    return SessionRecord.decode(content).epoch
