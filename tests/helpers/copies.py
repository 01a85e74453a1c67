"""Whether the copies of shards on servers in other processes are equal, bit for bit, and what they have let go."""

from __future__ import annotations

from typing import Any

from distributed import Worker
from servers import wait_until

import dps
from dps.engine.state.transfer import digest

__all__ = ["digests_of_worker", "gone", "wait_until_copies_are_equal"]

Digests = dict[tuple[str, int], tuple[int, str]]  # (table, shard) -> version and hash of a copy


def digests_of_worker(dask_worker: Worker) -> Digests:
    """The copies that the servers of a Dask worker have."""
    found: Digests = {}
    for server in dask_worker.state.actors.values():
        found |= server.endpoint.call(_digests, server.role)
    return found


def _digests(role: Any) -> Digests:
    return {
        (table.spec.name, number): (replica.shard.version, digest(replica.shard))
        for table in role.tables.values()
        for number, replica in table.replicas.items()
        if not replica.joining
    }


def wait_until_copies_are_equal(ps: dps.ParameterServer, table: str) -> None:
    """Each shard of a table has as many copies as the table asks for, and these become equal. Copies may be late."""
    differing: list[object] = []

    def are_equal() -> bool:
        status = ps.status()
        workers = [server.worker for server in status.servers if server.alive]
        on_servers = ps.dask_client.run(digests_of_worker, workers=workers).values()
        differing.clear()
        for shard in range(status.tables[table].shards):
            copies = [found[table, shard] for found in on_servers if (table, shard) in found]
            if len(copies) != status.tables[table].copies or len(set(copies)) != 1:
                differing.append((shard, copies))
        return not differing

    try:
        wait_until(are_equal)
    except AssertionError:
        raise AssertionError(
            f"copies of table {table!r} differ or are missing (shard, its copies): {differing}"
        ) from None


def gone(ps: dps.ParameterServer, table: str) -> tuple[int, int]:
    """The rows of a table that were evicted, and those that expired, as the servers report."""
    turnover = ps.status().tables[table].turnover
    assert turnover is not None
    return turnover.evicted, turnover.expired
