"""Late parts: a push that comes again, of which a merged shard has the rows of some of its parts only.

A push was on its way when the shards of its table were merged (`state/merging.py`), and some of them had applied it.
Its client sends all of it again, because the merged shard is one. The primary leaves out the rows that have it, and
goes on as if the client had named the others only: so its copies, joiners, cuts and budgets need to know nothing of
this. The answer has all rows of the request, as they are now.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.server.replicas import Replica, ReplicaPart
from dps.engine.server.tables import ServerTable, TableRequest
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import StoppedError

__all__ = ["NamedPart", "has_effect", "late_rows"]


def late_rows(
    table: ServerTable, header: Header, request: TableRequest, values: np.ndarray
) -> tuple[Header, TableRequest, np.ndarray]:
    """A push without the rows that have it already: its header, its parts and its values; mostly all that was given.

    Raises StoppedError for a deletion of all rows that some parts have, because the others cannot be named.
    """
    lacking = [_lacking(part.replica, header) for part in request.parts]
    if all(each is None for each in lacking):
        return header, request, values
    if header.rows > 0:
        late = next(n for n, each in enumerate(lacking) if each is not None)
        raise _half("clear()", request.parts[late].replica, lacking[late])
    parts, keys, rows, end = [], [], [], 0
    for part, lacks in zip(request.parts, lacking, strict=True):
        named = part.keys if part.keys is not None else np.arange(part.start, part.start + part.b - part.a)
        which = np.ones(len(named), np.bool_) if lacks is None else lacks[_parts_of_keys(table, part.replica, named)]
        if which.any():
            keys.append(named[which])
            rows.append(values[part.a : part.b][which])
            parts.append(ReplicaPart(part.replica, keys[-1], 0, end, end + len(keys[-1])))
            end += len(keys[-1])
    named, values = np.concatenate([np.empty(0, np.int64), *keys]), np.concatenate([values[:0], *rows])
    parts = [part._replace(keys=named[part.a : part.b]) for part in parts]
    header = header._replace(flags=header.flags & ~(frames.RANGE | frames.ANSWER), count=end)
    return header, TableRequest(parts, named, request.used), values


class NamedPart(NamedTuple):
    """The rows of a shard that a function sees: those of the keys; without keys, of a dense shard those from `start` to
    `stop` - 1, of a keyed one all."""

    replica: Replica
    keys: np.ndarray | None
    start: int
    stop: int


def has_effect(table: ServerTable, header: Header, named: NamedPart, function: str) -> bool:
    """Whether the effect of a function counts already on these rows.

    Raises StoppedError where it counts on some of them only: nothing can say of which it returned what.
    """
    replica = named.replica
    if not header.trainer:
        return False
    if replica.shard.ledger.seen(header.trainer, header.attempt, header.clock, header.number):
        return True
    lacks = _lacking(replica, header)
    if lacks is None:
        return False
    if named.keys is not None:
        some = lacks[_parts_of_keys(table, replica, named.keys)]
    elif table.spec.rows is not None:
        edges = replica.shard.ledger.edges
        some = lacks[(edges[:-1] < named.stop) & (edges[1:] > named.start)]
    else:
        some = lacks
    if some.any() and not some.all():
        raise _half(f"function {function!r}", replica, lacks)
    return not some.any()


def _half(what: str, replica: Replica, lacks: np.ndarray | None) -> StoppedError:
    assert lacks is not None
    return StoppedError(
        f"the effect of {what} counts in {len(lacks) - lacks.sum()} of the {len(lacks)} shards of table "
        f"{replica.spec.name!r} that were merged into shard {replica.number} while it ran, and what it returned there "
        "is lost: look at the rows before you call it again"
    )


def _lacking(replica: Replica, header: Header) -> np.ndarray | None:
    if replica.joining or not header.trainer:
        return None
    found: np.ndarray | None = replica.shard.ledger.lacking(header.trainer, header.clock, header.number)
    return found


def _parts_of_keys(table: ServerTable, replica: Replica, keys: np.ndarray) -> np.ndarray:
    """In which part of a merged shard each key lies, int64[m]."""
    places = table.shard_map.places(np.ascontiguousarray(keys))
    found: np.ndarray = np.searchsorted(replica.shard.ledger.edges, places, side="right") - 1
    return found
