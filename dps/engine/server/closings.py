"""Closing clocks with many sums, without a pause: shard by shard, each in a turn of the loop of its own.

Theory of operation
-------------------
The first request of a later clock closes the sums of the open one (`state/shard.py`), and so does the end of a run.
With millions of sums that takes long. So such a request is postponed first, and the shards whose clocks it closes are
held, as for a large op. A thread carries out the steps of those that are worth it on copies of the shards
(`large_ops.py`). Then one shard after the other gets its CLOSE, which its backups follow; between two of them the loop
serves others. In the end the request is handled again, as if it had come just now, and finds nothing to close.

A backup gets each CLOSE as a frame of its own, and prepares a large one as any other large op.

Where a hold is revoked, the requests that waited for it close what is left to close, in their own turn.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable

from dps.engine.server.functions import FunctionCalls, Hold, Target
from dps.engine.server.large_ops import LargeOps
from dps.engine.server.replicas import Replica
from dps.engine.state.beside import close_is_large
from dps.engine.state.ops import Op
from dps.engine.state.shard import Shard
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint
from dps.errors import DPSError

__all__ = ["Closing", "Closings"]

Closing = tuple[Replica, Op, Callable[[], None]]  # a primary, its CLOSE, and what applies that and passes it on


class Closings:
    """The large closes of one server: see the module's docstring.

    Parameters
    ----------
    endpoint : Endpoint
    functions : FunctionCalls
        Whose holds make requests wait.
    large : LargeOps
        Carries out closes beside the loop.
    """

    def __init__(self, endpoint: RoleEndpoint, functions: FunctionCalls, large: LargeOps):
        self._endpoint, self._functions, self._large = endpoint, functions, large

    def are_large(self, closings: Iterable[Closing]) -> bool:
        """Whether these closes together take too long for one turn of the loop."""
        shards = [replica.shard for replica, op, _ in closings if isinstance(replica.shard, Shard)]
        return close_is_large(sum(shard.sums.work for shard in shards if shard.sums is not None))

    def first(self, closings: list[Closing], connection: RoleConnection, header: Header, body: memoryview) -> bool:
        """Whether a request has to wait until these clocks are closed. Then it is handled again."""
        if not closings or not self.are_large(closings) or any(replica.hold for replica, _, _ in closings):
            return False
        hold = self._hold(closings, connection, header)
        hold.wait(connection, header, body)
        self._begin(hold, closings, lambda: self._large.release(hold))
        return True

    def begin(self, closings: list[Closing]) -> None:
        """Close these clocks, for no request; nothing may hold the shards."""
        hold = self._hold(closings, None, Header(frames.OK))
        self._begin(hold, closings, lambda: self._functions.release(hold))

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
        replica, _, close = waiting.popleft()
        replica.shard.made_beside = made.get(replica)
        with contextlib.suppress(DPSError):  # the server has ended
            close()
            self._large.clean([replica])
        if waiting:
            self._endpoint.later(0, self._next, hold, waiting, made, end)
        else:
            end()
