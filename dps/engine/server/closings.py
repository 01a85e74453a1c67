"""Closing clocks with many sums, without a pause: shard by shard, each in a turn of the loop of its own.

Theory of operation
-------------------
The first request of a later clock closes the sums of the open one (`state/shard.py`), and so does the end of a run.
With millions of sums that takes long. So such a request is postponed first, and the shards whose clocks it closes are
held, as for a large op. A thread carries out the steps that would stop the loop for too long, on copies of their shards
(`large_ops.py`). Then one shard after the other gets its CLOSE, which its backups follow; between two of them the loop
serves others. In the end the request is handled again, as if it had come just now, and finds nothing to close.

A backup gets each CLOSE as a frame of its own, and prepares a large one as any other large op.

Where a hold is revoked, the requests that waited for it close what is left to close, in their own turn.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.server.changes import Changes
from dps.engine.server.functions import FunctionCalls, Hold, Target
from dps.engine.server.large_ops import LargeOps
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable
from dps.engine.state.beside import close_is_large
from dps.engine.state.op_views import CloseOp, RetireOp
from dps.engine.state.ops import DROP, KEEP, OLDER, Op
from dps.engine.state.shard import Shard
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.errors import DPSError

__all__ = ["Closings", "Settled"]

# A primary, the op CLOSE that it is to get, and a function that applies the op and passes it on to the backups.
Closing = tuple[Replica, Op, Callable[[], None]]


class Settled(NamedTuple):
    """A primary that a run's end has reached, and an owed answer for which its backups have to confirm that."""

    table: int
    shard: int
    owed: OwedAnswer

    @property
    def confirmed(self) -> bool:
        """Whether all copies of the shard have the end of the run."""
        return self.owed.left == 0 and self.owed.error is None


class ClosingOwner(Protocol):
    """The parts of a server's role that closings use: see :class:`dps.engine.server.requests.ServerRole`."""

    endpoint: RoleEndpoint
    tables: dict[int, ServerTable]
    epoch: int
    changes: Changes

    def holds_lease(self) -> bool: ...
    def revoke(self, replica: Replica) -> None: ...


class Closings:
    """The closes of one server that may be large: see the module's docstring.

    The holds of `functions` make requests wait.
    """

    def __init__(self, owner: ClosingOwner, functions: FunctionCalls, large: LargeOps):
        self._owner, self._functions, self._large = owner, functions, large

    def first(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview) -> bool:
        """Whether a request has to wait until the clock of its shards is closed. Then it is handled again."""
        closings = self._before(table, header, body) if table.spec.aggregate is not None else []
        if not closings or any(replica.hold for replica, _, _ in closings):
            return False
        hold = self._hold(closings, connection, header)
        hold.wait(connection, header, body)
        self._begin(hold, closings, lambda: self._large.release(hold))
        return True

    def settle(self, keep: bool | None, over: list[list[int]]) -> tuple[list[Settled], OwedAnswer]:
        """A run has ended: see :meth:`dps.engine.server.requests.ServerRole.settle`."""
        settled: list[Settled] = []
        ends: list[Closing] = []
        close = CloseOp(0, KEEP if keep else DROP).op()
        retire = [RetireOp(first, count).op() for first, count in over]
        for table in self._owner.tables.values():
            closes = table.spec.aggregate is not None and keep is not None
            for _, replica in sorted(table.replicas.items()):
                if replica.serves:
                    owed = OwedAnswer()
                    owed.left = 1  # until the ops are applied
                    settled.append(Settled(table.spec.id, replica.number, owed))
                    ops = [close, *retire] if closes else retire
                    ends.append((replica, close, partial(self._settle, table, replica, ops, owed)))
                    if closes:
                        self._owner.revoke(replica)
        large = [end for end in ends if end[0].shard.closes(close)] if keep else []
        large = large if are_large(large) else []
        for end in ends:
            if end not in large:
                end[2]()
        if large:
            hold = self._hold(large, None, Header(frames.OK))
            self._begin(hold, large, lambda: self._functions.release(hold))
        every = OwedAnswer()
        every.left = len(settled)
        for _, _, owed in settled:
            owed.then(every.confirm)
        return settled, every

    # -- inside

    def _before(self, table: ServerTable, header: Header, body: memoryview) -> list[Closing]:
        """The closes of the shards of a request whose clock is a later one; none, where their sums are few."""
        op, owner = CloseOp(header.clock, OLDER).op(), self._owner
        found = [table.replicas.get(number) for number in range(header.shard, header.shard + header.shards)]
        closings: list[Closing] = [
            (replica, op, partial(owner.changes.control, table, owner.epoch, [replica], op, OwedAnswer()))
            for replica in found
            if replica is not None and replica.serves and isinstance(replica.shard, Shard) and replica.shard.closes(op)
        ]
        if not (closings and owner.holds_lease() and are_large(closings)):
            return []
        if header.kind == frames.CALL and header.flags & frames.RANGE:
            return closings
        used = table.named(header, body)
        return [closing for closing in closings if closing[0] in used]

    def _settle(self, table: ServerTable, replica: Replica, ops: list[Op], owed: OwedAnswer) -> None:
        for op in ops:
            self._owner.changes.control(table, self._owner.epoch, [replica], op, owed)
        owed.confirm()

    def _hold(self, closings: list[Closing], connection: RoleConnection | None, header: Header) -> Hold:
        hold = Hold(header, connection, [Target(replica, None) for replica, _, _ in closings], False)
        hold.running = False  # it is no call, which could be aborted
        self._functions.holds.add(hold)
        return hold

    def _begin(self, hold: Hold, closings: list[Closing], end: Callable[[], None]) -> None:
        waiting = collections.deque(closings)
        ops = [(replica, op) for replica, op, _ in closings]
        self._large.run(hold, ops, lambda made: self._next(hold, waiting, dict(made), end))

    def _next(
        self, hold: Hold, waiting: collections.deque[Closing], made: dict[Replica, object], end: Callable[[], None]
    ) -> None:
        """Close one shard's clock in this turn of the loop, and the others in later ones."""
        if hold.revoked:  # then the requests are handled again already
            return
        if not waiting:
            end()
            return
        replica, _, close = waiting.popleft()
        replica.shard.made_beside = made.get(replica)
        with contextlib.suppress(DPSError):  # the server has ended
            close()
            self._large.clean([replica])
        self._owner.endpoint.later(0, self._next, hold, waiting, made, end)


def are_large(closings: Iterable[Closing]) -> bool:
    """Whether these closes together take too long for one turn of the loop."""
    shards = [replica.shard for replica, _, _ in closings if isinstance(replica.shard, Shard)]
    return close_is_large(sum(shard.sums.work for shard in shards if shard.sums is not None))
