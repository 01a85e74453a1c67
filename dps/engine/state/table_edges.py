"""Definitions of tables that are split and merged: which edges their shards may have, and which tables refuse. Pure.

Shards are ranges of places, whose *edges* are a field of the table's definition (:mod:`dps.engine.core.shard_map`). A
split keeps all edges and adds some; a merge keeps some. What a table needs its shards for may forbid that: an error
says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from dps.engine.core.shard_map import SLOTS, ShardMap
from dps.engine.state.ops import TableSpec
from dps.errors import InputError

__all__ = ["equal_edges", "halved_edges", "joined_edges", "merged", "resharded"]

MAX_SHARDS = 1 << 12
REMEDY = (
    ": merge some with their neighbours before (ps.merge(table, shard=)), or restore it so (ps.restore(url, shards=))"
)


def resharded(spec: TableSpec, edges: Sequence[int], number: int) -> TableSpec:
    """The definition of a table once its shards are divided, with these edges, as table number `number`.

    Raises InputError if the table cannot be split so.

    Examples
    --------
    >>> spec = TableSpec("w", shards=2)
    >>> resharded(spec, [0, 1024, 2048, 3072, 4096], number=7).shards
    4
    >>> resharded(spec, [0, 2048, 3072, 4096], number=7).edges
    (0, 2048, 3072, 4096)
    """
    where, edges = f"table {spec.name!r}", tuple(edges)
    if not set(spec.shard_map.edges) < set(edges):
        raise InputError(
            f"{where} has {spec.shards} shards: it is split into 2, 4, 8, ... times as many, not {len(edges) - 1}"
            + ("" if spec.shard_map.is_even else f"; they are not equal, and each is divided into whole shards{REMEDY}")
        )
    if len(edges) > MAX_SHARDS + 1:
        raise InputError(f"{where}: a table has {MAX_SHARDS} shards at most, not {len(edges) - 1}")
    if spec.fixed_shards:
        raise InputError(
            f"{where} keeps its {spec.shards} shards (fixed_shards=True), because its rows are laid out by them: make "
            "another table, or another vector, with more servers"
        )
    counts = spec.life.counts
    if counts is not None and counts.approximate:
        raise InputError(
            f"{where} counts pushes approximately, in a sketch for each of its {spec.shards} shards that cannot be "
            "divided: make it with more shards from the beginning, or with AdmitByCount(..., approximate=False)"
        )
    if spec.life.remember:
        raise InputError(
            f"{where} remembers the keys of rows that went (remember=), numbered by each of its {spec.shards} shards: "
            "make it with more shards from the beginning"
        )
    return with_edges(spec, edges, number)


def merged(spec: TableSpec, edges: Sequence[int], number: int) -> TableSpec:
    """The definition of a table once shards are merged, so that these edges are left, as table number `number`.

    Raises InputError if the table cannot be merged so.

    Examples
    --------
    >>> spec = TableSpec("w", shards=4)
    >>> merged(spec, [0, 2048, 4096], number=7).shards, merged(spec, [0, 2048, 3072, 4096], number=7).shards
    (2, 3)
    """
    where = f"table {spec.name!r}"
    if not set(edges) < set(spec.shard_map.edges):
        raise InputError(
            f"{where} has {spec.shards} shards: it is merged into 1/2, 1/4, ... of them, not into {len(edges) - 1}"
            + ("" if spec.shard_map.is_even else f"; they are not equal, and whole shards are put together{REMEDY}")
        )
    if spec.fixed_shards:
        raise InputError(f"{where} keeps its {spec.shards} shards (fixed_shards=True), because its rows lie by them")
    life = spec.life
    asks = {
        "sums the pushes of a clock (aggregate=), and its shards may be at different clocks": spec.aggregate,
        "counts pushes of new keys (admit=), by the parts of their hashes that its shards do not have": life.admit,
        "notes when rows were used (expire=, evict='lru'), at moments that each shard counts alone": life.has_records,
        "remembers the keys of rows that went (remember=), numbered by each shard": life.remember,
    }
    if why := next((why for why, is_asked in asks.items() if is_asked), None):
        raise InputError(f"{where} {why}: restore it from a checkpoint with fewer shards (ps.restore(url, shards=))")
    return with_edges(spec, edges, number)


def with_edges(spec: TableSpec, edges: Sequence[int], number: int) -> TableSpec:
    """The definition of a table with these edges.

    Raises InputError if its shards are to be equal, because each has the same part of what the table may take.
    """
    made = dataclasses.replace(spec, shards=len(edges) - 1, edges=tuple(edges), id=number)
    life = spec.life
    asks = {f"max_bytes={life.max_bytes}": life.max_bytes, "admit=AdmitByCount": life.counts}
    if made.edges and (what := next((what for what, is_asked in asks.items() if is_asked), None)):
        raise InputError(
            f"table {spec.name!r} has {what}, of which each shard has an equal part: its shards have to be equal, too. "
            "Split or merge the whole table (shards=)"
        )
    return made


def equal_edges(spec: TableSpec, shards: object) -> tuple[int, ...]:
    """The edges of so many equal shards of a table. Raises InputError if it cannot have so many.

    >>> equal_edges(TableSpec("w", rows=10), 4)
    (0, 2, 5, 7, 10)
    """
    where = f"table {spec.name!r}"
    if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)):
        raise InputError(f"{where}: shards is a whole number, not {shards!r}")
    count, most = int(shards), min(MAX_SHARDS, spec.rows or MAX_SHARDS)
    if not 1 <= count <= most or (spec.keyed and count & (count - 1)):
        what = "a power of two, " if spec.keyed else ""
        raise InputError(f"{where} has {spec.shards} shards: it can have {what}1 to {most}, not {count}")
    return ShardMap(spec.rows or 0, count).edges


def halved_edges(spec: TableSpec, shard: object = None) -> tuple[int, ...]:
    """The edges with one shard divided in the middle, or all. Raises InputError if that cannot be divided.

    >>> halved_edges(TableSpec("w", shards=2), 1), halved_edges(TableSpec("w", shards=1))
    ((0, 2048, 3072, 4096), (0, 2048, 4096))
    """
    edges = spec.shard_map.edges
    if shard is None and spec.shard_map.is_even:
        return equal_edges(spec, 2 * spec.shards)
    chosen = range(spec.shards) if shard is None else [checked_shard(spec, shard)]
    for n in chosen:
        if edges[n + 1] - edges[n] < 2:
            what = "row" if spec.rows else f"slot, of the {SLOTS} in which keys lie"
            raise InputError(f"table {spec.name!r}: shard {n} is one {what}, and cannot be divided")
    return tuple(sorted({*edges, *((edges[n] + edges[n + 1]) // 2 for n in chosen)}))


def joined_edges(spec: TableSpec, shard: object = None) -> tuple[int, ...]:
    """The edges with one shard merged with the next one, or, of equal shards, each with its neighbour.

    Raises InputError if there is no next one; and for all shards that are not equal.

    >>> joined_edges(TableSpec("w", shards=4), 1), joined_edges(TableSpec("w", shards=4))
    ((0, 1024, 3072, 4096), (0, 2048, 4096))
    """
    edges = spec.shard_map.edges
    if spec.shards == 1:
        raise InputError(f"table {spec.name!r} has 1 shard, so there is none to merge it with")
    if shard is not None:
        first = checked_shard(spec, shard)
        if first == spec.shards - 1:
            raise InputError(f"table {spec.name!r}: shard {first} is the last one, so there is none to merge it with")
        return edges[: first + 1] + edges[first + 2 :]
    if not spec.shard_map.is_even:
        raise InputError(
            f"table {spec.name!r} has {spec.shards} shards that are not equal: say which one is merged with the next "
            "(shard=), or how many equal ones there are to be (shards=)"
        )
    return equal_edges(spec, spec.shards // 2)


def checked_shard(spec: TableSpec, shard: object) -> int:
    """The number of a shard that a user has named. Raises InputError if the table has no such shard."""
    whole = isinstance(shard, (int, np.integer)) and not isinstance(shard, bool)
    if not whole or not 0 <= int(shard) < spec.shards:  # type: ignore[call-overload]
        raise InputError(f"table {spec.name!r} has shards 0 to {spec.shards - 1}; there is no {shard!r}")
    return int(shard)  # type: ignore[call-overload]
