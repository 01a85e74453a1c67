"""Large ops on a server: carried out in a thread beside the endpoint's loop, and put in place between two requests.

Theory of operation
-------------------
A frame that changes many rows is *postponed*: its connection is read no further. Its shards are *held*, as for a
function, so that no other request changes them; pulls go on, and find the rows as they were. A thread carries the op
out on copies of the shards (`state/beside.py`). Then the frame is handled again, as if it had come just now: it is
checked, applied, forwarded, answered. Only that the shards find the op done, and take it over in one step. So clients
see all of an op or nothing, and nothing was promised before that step: where a hold is revoked, a connection breaks or
a shard has changed after all, the copies are dropped, and the frame is handled as any other.

A backup does the same with an op that its predecessor forwards, so it goes on to beat and to answer pulls of other
shards. Whatever the predecessor sends after that op waits behind it.

The effect of a function is prepared when the function has ended, under its own hold.

Memory that is not needed any more is given back in the same thread, because the system takes a second for some
gigabytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from dps.engine.server.beside_thread import WORK_SECONDS, Carrier, Outcome
from dps.engine.server.functions import BesideShards, FunctionCalls, Hold, Target
from dps.engine.server.memory import ServerMemory
from dps.engine.server.replicas import Replica
from dps.engine.server.tables import ServerTable, TableRequest, op_of
from dps.engine.state.beside import Compaction, MadeBeside, close_is_large, forget, gone_of, is_large, worth_it
from dps.engine.state.ops import CLOSE, DELETE, Op
from dps.engine.state.shard import Shard
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.protocols import RoleConnection, RoleEndpoint

__all__ = ["LargeOps"]

KEPT_SECONDS = 1.0  # from the end of the work until its frame is handled again, which is at once if it can be
COPIED_BYTES = 1 << 20  # of a body that is copied, because a postponed frame of this size may move in memory


class Ready(NamedTuple):
    """A frame whose ops are carried out beside their shards."""

    header: Header
    made: BesideShards


class LargeOps:
    """The large ops of one server: see the module's docstring. The holds of `functions` make requests wait."""

    def __init__(self, endpoint: RoleEndpoint, functions: FunctionCalls, runner: Carrier, memory: ServerMemory):
        self._endpoint, self._functions, self._runner, self._memory = endpoint, functions, runner, memory
        self._ready: dict[RoleConnection, Ready] = {}
        self._tidied: set[Replica] = set()
        self._closed = False

    def close(self) -> None:
        self._closed = True
        self._ready.clear()
        self._runner.close()

    def first(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview) -> bool:
        """Whether a frame that changes rows has to wait, because its ops are first carried out beside their shards.

        When it is handled again, its ops are prepared.
        """
        ready = self._ready.pop(connection, None)
        if ready is not None and ready.header == header:
            for replica, prepared in ready.made:
                replica.shard.made_beside = prepared
            return False
        if header.kind == frames.REPLICATE and self._functions.holds:
            for number in range(header.shard, header.shard + header.shards):  # of a new predecessor
                held = getattr(table.replicas.get(number), "hold", None)
                if held is not None:
                    held.wait(connection, header, body)
                    return True
        if header.flags & frames.CONTROL:
            return self._close_first(table, connection, header, body)
        if table.spec.most_rows or table.spec.life.admit:  # a copy would exceed a budget, or count keys twice
            return False
        if not is_large(*affected(table, header, body)):
            return False
        if len(body) <= COPIED_BYTES:
            body = memoryview(bytes(body))
        found = self._ops(table, header, body)
        if header.flags & frames.MORE and not is_large(header.count, sum(gone_of(op) for _, op in found)):
            return False
        ops = [(r, op) for r, op in found if isinstance(r.shard, Shard) and worth_it(r.shard, op)]
        if not ops or not self._memory.fits(sum(replica.shard.nbytes for replica, _ in ops)):
            return False
        self._postpone(ops, connection, header, body)
        return True

    def _close_first(self, table: ServerTable, connection: RoleConnection, header: Header, body: memoryview) -> bool:
        """Whether a CLOSE that the predecessor has passed on has to wait, as :meth:`first` says."""
        op, first = op_of(header), header.shard
        found = [table.replicas.get(number) for number in range(first, first + header.shards)]
        versions = np.frombuffer(body, np.int64, header.shards).tolist()
        ops = [
            (replica, op)
            for replica, version in zip(found, versions, strict=True)
            if replica is not None and isinstance(replica.shard, Shard) and op.rule == CLOSE
            if is_next(replica, header, version) and worth_it(replica.shard, op)
        ]
        if not close_is_large(sum(replica.shard.sums.work for replica, _ in ops)) or not ops:
            return False
        self._postpone(ops, connection, header, memoryview(bytes(body)))
        return True

    def _postpone(
        self, ops: list[tuple[Replica, Op]], connection: RoleConnection, header: Header, body: memoryview
    ) -> None:
        """Carry out ops beside their shards before their frame is handled again."""
        hold = Hold(header, connection, [Target(replica, None) for replica, _ in ops], False)
        hold.running = False  # it is no call, which could be aborted
        self._functions.holds.add(hold)
        hold.wait(connection, header, body)
        self.run(hold, ops, lambda made: self._again(hold, made))

    def run(self, hold: Hold, ops: list[tuple[Replica, Op]], done: Callable[[BesideShards], None]) -> None:
        """Carry out those of these ops on held shards that are worth it beside them; `done` is called in the endpoint's
        thread.

        Where the work fails, for want of memory perhaps, nothing is prepared: the ops are carried out as all others.
        """
        made = [(replica, MadeBeside(replica.shard, op)) for replica, op in ops if worth_it(replica.shard, op)]

        if not made:
            done([])
            return

        def work() -> None:
            for _, each in made:
                each.carry_out()

        def ended(outcome: Outcome) -> None:
            if self._closed:
                return
            for replica, each in made:
                each.end(replica.shard)
            done([] if outcome.error is not None or hold.revoked else made)

        try:
            self._runner.run(work, WORK_SECONDS, ended)
        except RuntimeError as error:  # there are too many threads
            self._endpoint.later(0, ended, Outcome(None, error))

    def leaves_nothing(self, header: Header) -> bool:
        """Whether a frame has too few rows for :meth:`clean` to find anything after it."""
        return header.rows <= 0 and not header.flags & frames.MORE and not is_large(0, header.count)

    def clean(self, replicas: Iterable[Replica]) -> None:
        """After ops: keep nothing that was prepared and not needed; give back memory that shards have left."""
        left: list[np.ndarray] = []
        for replica in replicas:
            if isinstance(replica.shard, Shard):
                replica.shard.made_beside = None
                left += replica.shard.discarded
                replica.shard.discarded = []
        self.forget(left)

    def tidy(self, replicas: Iterable[Replica]) -> None:
        """Free what deletions have left during cuts and dumps, a little in each turn of the loop."""
        for replica in replicas:
            if isinstance(replica.shard, Shard) and replica not in self._tidied:
                if replica.shard.is_untidy:
                    self._tidied.add(replica)
                    self._tidy(replica)
                elif replica.shard.is_sparse and replica.hold is None:
                    self._tidied.add(replica)
                    self._compact(replica)

    def leave(self, replica: Replica) -> None:
        """A replica is dropped: give back its memory, unless a checkpoint or a dump still reads it."""
        shard = replica.shard
        if isinstance(shard, Shard) and not shard.pins and shard.cut is None:
            self.forget(shard.give_up())

    def forget(self, arrays: list[np.ndarray]) -> None:
        if arrays:
            with contextlib.suppress(RuntimeError):  # there are too many threads: the memory goes with the arrays
                self._runner.run(lambda: forget(arrays), WORK_SECONDS, _nothing)

    def release(self, hold: Hold) -> None:
        """End a hold. The frame for which it was is handled now, before all that wait."""
        connection = hold.connection
        hold.waiting.remove(connection)
        others, hold.waiting = hold.waiting, []
        self._functions.release(hold)
        connection.resume()
        hold.waiting = others
        self._functions.release(hold)

    # -- inside

    def _again(self, hold: Hold, made: BesideShards) -> None:
        """The ops of a frame are carried out beside their shards: handle the frame again."""
        if hold.revoked:  # then it is handled again already
            return
        connection = hold.connection
        self._endpoint.later(KEPT_SECONDS, self._drop, connection, hold.header)
        self._ready[connection] = Ready(hold.header, made)
        self.release(hold)

    def _tidy(self, replica: Replica) -> None:
        if self._closed or replica.hold is not None or not replica.shard.is_untidy:
            self._tidied.discard(replica)
        else:
            replica.shard.tidy()
            self._endpoint.later(0, self._tidy, replica)

    def _compact(self, replica: Replica) -> None:
        """Give the free rows of a large shard back, beside the loop."""
        shard = replica.shard
        hold = Hold(Header(frames.OK), None, [Target(replica, None)], False)
        hold.running = False  # it is no call, which could be aborted
        self._functions.holds.add(hold)
        compaction = Compaction(shard)

        def ended(outcome: Outcome) -> None:
            self._tidied.discard(replica)
            if self._closed:
                return
            compaction.end(shard)
            if hold.revoked:
                return
            if outcome.error is None:
                compaction.install(shard)
                self.clean([replica])
            self._functions.release(hold)

        try:
            self._runner.run(compaction.carry_out, WORK_SECONDS, ended)
        except RuntimeError as error:  # there are too many threads
            self._endpoint.later(0, ended, Outcome(None, error))

    def _drop(self, connection: RoleConnection, header: Header) -> None:
        ready = self._ready.get(connection)
        if ready is not None and ready.header is header:
            del self._ready[connection]

    def _ops(self, table: ServerTable, header: Header, body: memoryview) -> list[tuple[Replica, Op]]:
        """The ops of a frame that are worth it, each with its replica."""
        op, listed = op_of(header), 8 * header.shards if header.kind == frames.REPLICATE else 0
        request: TableRequest = table.cut(header, body[listed:], primary=not listed)
        values = table.values(header, body[listed:], request.used)
        if listed and header.flags & frames.MORE:
            op = table.with_more(op, header, body[listed:], request.used)
        versions = np.frombuffer(body, np.int64, header.shards if listed else 0)
        found = []
        for part in request.parts:
            if listed and not is_next(part.replica, header, int(versions[part.replica.number - header.shard])):
                continue
            found.append((part.replica, part.op(op, values)))
        return found


def is_next(replica: Replica, header: Header, version: int) -> bool:
    """Whether a forwarded op is the next one of the replica, which takes it from this sender."""
    return 0 < replica.fence <= header.epoch and version == replica.shard.version + 1


def affected(table: ServerTable, header: Header, body: memoryview) -> tuple[int, int]:
    """How many rows a frame may change, and how many it may delete, at most."""
    if op_of(header).rule != DELETE:
        return header.count, len(body) // 8 if header.flags & frames.MORE else 0  # with the keys that go, and a result
    shards = range(header.shard, header.shard + header.shards) if header.rows > 0 else ()
    return 0, header.count + sum(len(table.replicas[n].shard) for n in shards if n in table.replicas)


def _nothing(outcome: Outcome) -> None:
    """Memory was given back, and no request waits for that."""
