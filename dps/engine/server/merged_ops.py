"""Pushes that stand for those of several trainers of a process: which of them a primary takes.

The frame has the stamps of the trainers behind its values (the flag MERGED), and its shards take all of these or none:
where some of the trainers' pushes are there already, the sum cannot be divided, and the frame is refused before
anything has changed. Its sender then lets each trainer send its own pushes, which the ledger knows one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dps.engine.server.replicas import ReplicaPart
from dps.engine.server.tables import ServerTable
from dps.engine.state.ops import NO_CLOCK, Op
from dps.engine.wire import frames
from dps.engine.wire.frames import Header, padded
from dps.errors import ProtocolError, StoppedError

__all__ = ["merged_op"]

STAMP_BYTES = 32  # an origin, its attempt, and the first and the last number of its pushes


def merged_op(table: ServerTable, header: Header, body: memoryview, parts: Sequence[ReplicaPart], op: Op) -> Op:
    """The op of a push with the stamps that stand behind its values, where its frame says that there are some.

    Raises StoppedError where a shard of its `parts` has the pushes of some of the trainers, and lacks others.
    """
    if not header.flags & frames.MERGED:
        return op
    stamps = _stamps(table, header, body)
    for part in parts:
        if part.replica.shard.ledger.merges(header.clock, stamps) is None:
            raise StoppedError(
                f"shard {part.replica.number} of table {table.spec.name!r} has some of the pushes that were summed, or "
                "takes no more from one of their trainers: the sum counts for none of them, so each sends its own"
            )
    return op._replace(stamps=stamps)


def _stamps(table: ServerTable, header: Header, body: memoryview) -> np.ndarray:
    """int64[n, 4]: what stands behind the values."""
    keys = 0 if header.flags & frames.RANGE else 8 * (header.shards + header.count)
    rest = body[keys + padded(header.count * table.row_bytes) :]
    if not len(rest) or len(rest) % STAMP_BYTES or header.clock == NO_CLOCK or header.rows >= 0:
        raise ProtocolError(f"a push to table {table.spec.name!r} has stamps of {len(rest)} bytes behind its values")
    stamps = np.frombuffer(rest, np.int64).reshape(-1, 4).copy()  # because the body is released before backups confirm
    origins, attempts, firsts, lasts = stamps.T
    of_header = origins[0], attempts[0], lasts[0]
    if of_header != (header.trainer, header.attempt, header.number) or len(np.unique(origins)) < len(stamps):
        raise ProtocolError(f"the stamps of a push to table {table.spec.name!r} are {stamps.tolist()}")
    if (origins <= 0).any() or (attempts < 0).any() or (firsts < 0).any() or (firsts > lasts).any():
        raise ProtocolError(f"the stamps of a push to table {table.spec.name!r} are {stamps.tolist()}")
    if not table.spec.wire.merge:
        raise ProtocolError(f"a sum of pushes to table {table.spec.name!r}, whose pushes are not merged")
    return stamps
