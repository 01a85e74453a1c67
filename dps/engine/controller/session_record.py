"""Session record: what the journal keeps of one parameter server, and which numbers it sets aside.

Numbers of servers and origins are used once. So a record names a bound, below which they may be used, before they are;
the next controller begins with the bound. Numbers that are set aside and not used are lost, which does no harm. A bound
is renewed while half a block is left, so that a number is rarely waited for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from dps.engine.controller.failover import Membership
from dps.engine.controller.run_records import recorded
from dps.engine.controller.runs import Runs
from dps.engine.wire.journal_messages import RecordedTable, SessionRecord
from dps.engine.wire.messages import AdaptRule, CheckpointSchedule, ShardPlace

__all__ = ["CONTROLLER_BLOCK", "ORIGIN_BLOCK", "SERVER_BLOCK", "RecordContent", "bound", "fingerprint_of"]

# Origins that are set aside at a time; as many clients may come before the next record.
ORIGIN_BLOCK = 4096
# Numbers of servers that are set aside at a time.
SERVER_BLOCK = 64
# Numbers of tables, and of runs, that each controller has for itself, so that none uses those of one before.
CONTROLLER_BLOCK = 1 << 20


class RecordContent:
    """Gathers everything that the next controller must know; all methods run in the endpoint's thread.

    Parameters
    ----------
    secrets : (str, str)
        Those that clients and servers prove. The record has a fingerprint of them only.
    controller : (str, int)
        Where its endpoint listens. The next one listens there, too, if it can, because clients know that address.
    copies : int
        Copies of a row, in tables that do not say how many.
    wanted, adapt : callable
        How many servers there are to be; and the rule by which the load decides that, if there is one.
    """

    def __init__(
        self,
        membership: Membership,
        runs: Runs,
        secrets: tuple[str, str],
        controller: tuple[str, int],
        copies: int,
        wanted: Callable[[], int],
        adapt: Callable[[], AdaptRule | None],
    ):
        self._membership, self._runs, self._controller = membership, runs, controller
        self._fingerprint, self._copies, self._wanted, self._adapt = fingerprint_of(secrets), copies, wanted, adapt
        self.schedule: CheckpointSchedule | None = None
        self._found: SessionRecord | None = None  # another controller's, from which this one is going on
        self._needed = 0  # origins that a run is about to take at once

    def encoded(self) -> bytes:
        membership, runs = self._membership, self._runs
        tables = [
            RecordedTable(
                membership.specs[name],
                [ShardPlace([*p.chain], p.joiner, [*p.fences], p.stepping_down) for p in places],
                membership.ancestors.get(name, []),
            )
            for name, places in membership.places.items()
        ]
        record = SessionRecord(
            name=membership.session,
            fingerprint=self._fingerprint,
            controller=self._controller,
            copies=self._copies,
            epoch=membership.epoch,
            wanted=self._wanted(),
            next_server=bound(membership.next_server, SERVER_BLOCK),
            next_origin=bound(runs.origins.given + self._needed, ORIGIN_BLOCK),
            addresses={n: s.address for n, s in membership.servers.items() if s.address is not None},
            tables=tables,
            runs=[recorded(run) for run in self._runs.runs.values() if not run.over],
            functions=list(membership.functions),
            remedy=membership.remedy,
            schedule=self.schedule,
            adapt=self._adapt(),
        )
        if self._found is not None:
            names = "wanted", "functions", "schedule", "adapt"
            record = msgspec.structs.replace(record, **{name: getattr(self._found, name) for name in names})
        return record.encode()

    def resume(self, found: SessionRecord) -> None:
        """Go on from the record of another controller: what is not set up again yet is as it says."""
        self._found = found

    def resumed(self) -> None:
        """All is set up again as the record said."""
        self._found = None

    def committed(self, content: bytes) -> None:
        """From now on the numbers below the bounds of this record may be used, and the runs that it lacks are over."""
        record = SessionRecord.decode(content)
        self._membership.announcements.committed(record)
        self._membership.last_server = record.next_server
        self._runs.origins.last = record.next_origin
        self._runs.recorded = {run.number for run in record.runs}

    def need_origins(self, count: int) -> None:
        """A run is about to take so many origins at once, so the next record sets these aside, too."""
        self._needed = max(self._needed, count)


def bound(used: int, block: int) -> int:
    """The bound of the numbers that are set aside: a multiple of the block, half a block or more beyond what is used.

    >>> [bound(used, 64) for used in (0, 32, 33, 95, 97)]
    [64, 64, 128, 128, 192]
    """
    return -(-(used + block // 2) // block) * block


def fingerprint_of(secrets: tuple[str, str]) -> str:
    """By which a record is known to be of a parameter server with these secrets."""
    return hashlib.sha256("\0".join(secrets).encode()).hexdigest()
