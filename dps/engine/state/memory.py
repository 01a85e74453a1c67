"""How much memory shards take, and how much more an op makes them take. Pure.

``docs/design/rows.md`` is the design. A server with a budget asks these rules before an op that may create rows; what
they say is what the arrays of a shard then grow by, or a little more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dps.engine.state.life import FLAG_BYTES, SLOT_BYTES
from dps.engine.state.ops import CLOSE, DELETE, NO_CLOCK, PUSH, Op, TableSpec
from dps.engine.state.shard import KeyedShard, KeyedSums, Shard
from dps.errors import InputError

__all__ = ["bytes_of_memory", "creates_rows", "first_bytes", "growth", "held_bytes", "is_summed", "missing"]

Parse = Callable[[str], int]


def bytes_of_memory(setting: object, share_of: int, parse: Parse) -> int:
    """The budget of a server in bytes, as ``dps.memory`` says it; 0: none.

    A number up to 1 is a share of `share_of` bytes; `parse` reads texts.

    >>> bytes_of_memory(None, 0, int), bytes_of_memory(0.5, 1000, int), bytes_of_memory("800", 1000, int)
    (0, 500, 800)
    """
    if setting is None:
        return 0
    try:
        value = parse(setting) if isinstance(setting, str) else setting
        number = float(value)  # type: ignore[arg-type]
        found = int(number * share_of) if isinstance(value, float) and number <= 1 else int(number)
    except (TypeError, ValueError):
        found = 0
    if found <= 0 or isinstance(setting, bool):
        raise InputError(
            f"dps.memory is {setting!r} but must be null, bytes such as '4 GiB', or a share of the worker's memory "
            "such as 0.6"
        )
    return found


def held_bytes(shard: Shard) -> int:
    """Bytes of a shard: rows with state and records, index, flags, sums, cuts, counters, and its ledger.

    Where rows go by themselves, the flags that this needs count from the beginning, because rows go when no byte is
    left.
    """
    flags = 0
    if isinstance(shard, KeyedShard) and shard.spec.life.asks:
        flags = FLAG_BYTES * len(shard.rows) - (0 if shard.vacant is None else shard.vacant.nbytes)
        flags -= shard.index.nbytes - sum(table.nbytes for table in shard.index.tables)
    return shard.nbytes + shard.ledger.nbytes + max(0, flags)  # type: ignore[attr-defined]


def first_bytes(spec: TableSpec, number: int) -> int:
    """Bytes that a shard takes when its table is made: the rows of a dense one, the index of one with a budget."""
    if spec.rows is not None:
        low, high = spec.shard_map.edges[number : number + 2]
        return (high - low) * (spec.dim + spec.slots) * spec.itemsize
    return int(SLOT_BYTES * spec.most_rows)


def is_summed(shard: Shard, op: Op) -> bool:
    """Whether the values of an op are summed until its clock is closed."""
    return shard.spec.aggregate is not None and op.rule == PUSH and op.clock != NO_CLOCK


def creates_rows(shard: Shard, op: Op) -> bool:
    """Whether an op may make rows: one that names keys of a keyed shard, and is not a repeat."""
    if not isinstance(shard, KeyedShard) or op.keys is None or op.rule == DELETE or op.rule >= CLOSE:
        return False
    return not (op.origin and shard.ledger.seen(op.origin, op.attempt, op.clock, op.number))


def missing(shard: KeyedShard, op: Op) -> int:
    """How many of the op's keys have neither a row in memory nor a sum of the open clock."""
    assert op.keys is not None
    if op.unborn is not None and shard.admission is not None:
        return len(shard.admission.most_born(op.keys[op.unborn]))
    rows = np.empty(len(op.keys), np.int64)
    count = shard.index.find(op.keys, rows)
    if count and is_summed(shard, op) and isinstance(shard.sums, KeyedSums) and shard.sums.clock == op.clock:
        return shard.sums.shard.index.find(op.keys[rows < 0], rows)
    return count


def growth(shard: KeyedShard, new: int, count: int) -> int:
    """Bytes by which an op on `count` keys, of which `new` have no row in memory, makes a shard grow at most."""
    flags = sum(each is not None for each in (shard.changed, shard.vacant, shard.pulled, shard.dirty))
    flags += FLAG_BYTES if shard.spec.life.asks else 0
    rows = shard.rows_with(new) - len(shard.rows)
    return rows * (shard.width * shard.rows.itemsize + flags) + shard.index.growth(count if new else 0)
