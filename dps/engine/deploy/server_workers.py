"""Which workers of a cluster have servers, because a cluster that shrinks may end only workers without any.

A worker has a server if it holds the server's actor. After a scheduler's death a worker may also bring a server that no
controller has taken over yet, so there is no actor; such a worker has told the scheduler so when it joined.
"""

from __future__ import annotations

from distributed.deploy import Cluster

from dps.engine.daskapi.lost_scheduler import brought_names
from dps.errors import DPSError

__all__ = ["too_few_are_free", "workers_in_use"]

# Prefix of the Dask keys of servers' actors.
ACTOR_PREFIX = "dps-server-"


async def workers_in_use(cluster: Cluster) -> set[str]:
    """The names of the workers on which there is a server."""
    workers = cluster.scheduler_info["workers"]
    assert cluster.scheduler_comm is not None, "the cluster is up"
    held = await cluster.scheduler_comm.has_what()
    actors = {address for address, keys in held.items() if any(str(k).startswith(ACTOR_PREFIX) for k in keys)}
    return {about["name"] for address, about in workers.items() if address in actors or brought_names(about)}


def too_few_are_free(missing: int, wanted: int, seconds: float) -> DPSError:
    """The error of a cluster whose workers did not become free in time, so that only `wanted` of them stay."""
    return DPSError(
        f"{missing} workers that are to go still hold servers after {seconds:g} s: have fewer servers first, with "
        f"ps.scale({wanted}), and let their shards move"
    )
