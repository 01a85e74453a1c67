"""Changes: the one place where a server applies ops to its replicas and passes them on; and what happens if that fails.

Fail-stop. A server checks an op before it changes anything: what it refuses then leaves no trace. From the first change
on, until the op is in the lists of all successors and its result is in the ledgers, nothing may fail. If an exception
comes all the same (a bug, or no memory), the replicas may have a part of the op, or an op that no backup will ever get.
So the server ends itself, as if its process had died: see `ServerRole.fail`. Its clients send their requests again, to
servers whose replicas have the op whole or not at all. `service.pyx` holds the same rule for plain requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dps.engine.core.requests.answers import OwedAnswer
from dps.engine.core.requests.forwards import Forwards
from dps.engine.server.replicas import Replica, ReplicaPart
from dps.engine.server.tables import (
    ServerTable,
    TableRequest,
    control_header,
    keys_header,
    more_of,
    rows_after,
    rows_header,
)
from dps.engine.state.ops import ADD, CLOSE, DELETE, ROWS, Op
from dps.engine.wire.frames import MORE, REPLAYED, RULE_ROWS, Header, encode_header
from dps.errors import MovedError

__all__ = ["Changes"]

Applied = list[tuple[ReplicaPart, int]]  # the parts of an op, each with its shard's version


class Changes:
    """The changes of one server's replicas: see the module's docstring.

    `fail` ends the server because of an error, and returns the error for the peer whose request was being handled.
    """

    def __init__(self, ops: Forwards, fail: Callable[[Exception], MovedError]):
        self._ops, self._fail = ops, fail

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What is done within is done whole, or ends the server."""
        try:
            yield
        except Exception as error:
            raise self._fail(error) from error

    def push(self, header: Header, ops: list[Op], request: TableRequest, values: np.ndarray, owed: OwedAnswer) -> None:
        """Apply each shard's op; forward it where it was new, wait for the earlier one where it is a repeat.

        A replayed op is a repeat also for a shard that does not know it, because an earlier attempt of the trainer may
        have had other keys.
        """
        with self.whole():
            fresh: Applied = []
            for part, op in zip(request.parts, ops, strict=True):
                shard = part.replica.shard
                if not header.flags & REPLAYED and shard.apply(op):
                    fresh.append((part, shard.version))
                else:
                    self._ops.follow(part.replica, owed)
            if _is_forwarded(fresh):
                rows = rows_after(request, ops, values)
                if rows is not None:
                    header, values = header._replace(flags=header.flags | RULE_ROWS), rows
                counted = {part.replica: op for part, op in zip(request.parts, ops, strict=True) if more_of(op)}
                plain = [each for each in fresh if each[0].replica not in counted]
                if plain:
                    self._ops.forward(encode_header(header), plain, request.keys, values, owed)
                head = encode_header(header._replace(flags=header.flags | MORE))
                for part, version in fresh:  # a frame each, because what stands behind its values is of its keys alone
                    if part.replica in counted:
                        more = more_of(counted[part.replica])
                        self._ops.forward(head, [(part, version)], request.keys, values, owed, more)

    def follow(
        self, header: Header, fresh: Applied, ops: list[Op], request: TableRequest, values: np.ndarray, owed: OwedAnswer
    ) -> None:
        """Apply the ops that the predecessor has passed on, and pass them on."""
        with self.whole():
            for (part, _), op in zip(fresh, ops, strict=True):
                part.replica.shard.apply(op)
            if _is_forwarded(fresh):
                self._ops.forward(encode_header(header), fresh, request.keys, values, owed, more_of(ops[0]))

    def control(self, table: ServerTable, epoch: int, replicas: Sequence[Replica], op: Op, owed: OwedAnswer) -> None:
        """Apply an op of the primary's own to these replicas, and to those behind them in their chains."""
        with self.whole():
            for replica in replicas:
                made = op
                if op.rule == CLOSE:
                    made = replica.shard.close(op)
                else:
                    replica.shard.apply(op)
                self._pass_on(table, epoch, replica, made, owed)

    def effects(self, table: ServerTable, made: Sequence[tuple[Replica, Op]], owed: OwedAnswer) -> None:
        """Apply what a function has made for shards, and pass it on; wait for the earlier one where it is a repeat."""
        with self.whole():
            for replica, op in made:
                if replica.shard.apply(op):
                    self._pass_on(table, 0, replica, op, owed)
                else:
                    self._ops.follow(replica, owed)

    def _pass_on(self, table: ServerTable, epoch: int, replica: Replica, op: Op, owed: OwedAnswer) -> None:
        if replica.successor is None:
            return
        number, part = replica.number, ReplicaPart(replica, op.keys, op.start, 0, len(op.values))
        if op.rule == ROWS:
            header = rows_header(table.spec.id, number, op)
        elif op.rule in (DELETE, ADD):
            header = keys_header(table.spec.id, number, op)
        else:
            header = control_header(table.spec.id, epoch, op)
        fresh = [(part, replica.shard.version)]
        self._ops.forward(encode_header(header), fresh, op.keys, op.values, owed, more_of(op))


def _is_forwarded(fresh: Applied) -> bool:
    return any(part.replica.successor is not None for part, _ in fresh)
