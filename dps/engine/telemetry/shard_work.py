"""The work of each shard, from what the servers report of their tables. Pure.

A server reports how long its thread was at work, and of each table how long requests took and how many keys each shard
had. Requests name no shard, because one request goes to many; so the time of a table's requests is divided among its
shards by their keys. The work of a server is more than the time of requests: it reads and writes sockets, and applies
ops as a backup. All of that is added in proportion to the time of requests, over all servers. In this way a server
that is busy as a backup does not make the shards that it leads look busy. On a crowded machine, a request takes longer
by the time in which its thread has no processor: that part is taken off, because a shard is not more work by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dps.engine.telemetry.monitored import MonitoredPlace
from dps.engine.telemetry.server_telemetry import ServerTelemetry, TableWork

__all__ = ["MeasuredWork", "ServerWork", "ShardWork", "work_of_shards"]


class ShardWork(NamedTuple):
    """What one shard takes: part of a core on its primary, bytes of each replica, and the largest part of its accesses
    that one key can have."""

    busy: float
    held: float
    hottest: float


class ServerWork(NamedTuple):
    """The part of its time that a server's thread is at work, and the part of the time for which it could have had a
    processor; the bytes that its tables take, and may take (0: any)."""

    busy: float
    used: float
    taken: float
    budget: float


class MeasuredWork(NamedTuple):
    """The work of all servers, and of the shards of all tables, by the tables' numbers."""

    servers: dict[int, ServerWork]
    tables: dict[int, list[ShardWork]]
    hot: Mapping[
        int, Sequence[tuple[int, int, float]]
    ] = {}  # table -> server, hot key, and the part of a core that it takes


def work_of_shards(
    watches: Mapping[int, ServerTelemetry], placed: Mapping[int, Sequence[MonitoredPlace]], since: float
) -> MeasuredWork:
    """The work since a time from which on no shard has moved; all servers have reported since then."""
    seen = {server: {table: watch.work(table, since) for table in placed} for server, watch in watches.items()}
    busy = {server: watch.busy(since) for server, watch in watches.items()}
    waits = {server: watch.starved(since) for server, watch in watches.items()}
    runs = {server: busy[server] / max(busy[server] + waits[server], 1e-9) for server in watches}
    service = sum(runs[server] * work.service for server, tables in seen.items() for work in tables.values())
    factor = sum(busy.values()) / service if service > 0 else 0.0
    tables: dict[int, list[ShardWork]] = {}
    hot: dict[int, list[tuple[int, int, float]]] = {}
    for table, places in placed.items():
        held = _bytes_of_replicas(table, places, seen)
        accesses = {server: sum(works[table].shards.values()) for server, works in seen.items()}
        shards = []
        for shard, place in enumerate(places):
            work = seen[place.chain[0]][table] if place.chain and place.chain[0] in seen else None
            keys = 0.0 if work is None else work.shards.get(shard, 0.0)
            if work is None or keys <= 0:
                shards.append(ShardWork(0.0, held[shard], 0.0))
                continue
            share = keys / accesses[place.chain[0]]
            taken = factor * runs[place.chain[0]] * work.service * share
            shards.append(ShardWork(taken, held[shard], min(1.0, work.hottest / keys)))
        tables[table] = shards
        hot[table] = [
            (server, key, factor * runs[server] * works[table].service * rate / max(accesses[server], 1e-9))
            for server, works in seen.items()
            for key, rate in works[table].hot
        ]
    budgets = {n: (0.0, 0.0) if w.last is None else w.last.get("budget", (0.0, 0.0)) for n, w in watches.items()}
    used = {server: watch.utilisation(since) for server, watch in watches.items()}
    return MeasuredWork(
        {server: ServerWork(busy[server], used[server], *budgets[server]) for server in watches}, tables, hot
    )


def _bytes_of_replicas(
    table: int, places: Sequence[MonitoredPlace], seen: Mapping[int, Mapping[int, TableWork]]
) -> list[float]:
    """The bytes of a replica of each shard: of all that a server has of the table, each of its replicas has as much."""
    replicas = Counter(server for place in places for server in place.chain if server in seen)
    each = {server: seen[server][table].held / count for server, count in replicas.items()}
    return [max((each.get(server, 0.0) for server in place.chain), default=0.0) for place in places]
