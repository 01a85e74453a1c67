"""A parameter server in jobs of a batch system: Slurm here, and with other clusters of dask-jobqueue likewise.

A cluster of dask-jobqueue has one kind of job, and these are the trainers. `add_servers` adds jobs of a second kind.
On a login node: ``python deploy/batch_system.py``.
"""

from __future__ import annotations

import dask.array as da
import numpy as np
from dask.distributed import Client
from dask_jobqueue import SLURMCluster
from dask_jobqueue.core import JobQueueCluster

import dps


def add_servers(cluster: JobQueueCluster, servers: int, memory: str) -> None:
    """Ask for `servers` jobs of one core and so much memory, whose workers are for servers alone."""
    options = cluster.new_spec["options"] | {"cores": 1, "processes": 1, "memory": memory}
    options["worker_extra_args"] = ["--resources", "dps=1", "--memory-limit", "0"]  # Dask cannot spill tables
    for n in range(servers):
        cluster.worker_spec[f"server-{n}"] = {"cls": cluster.new_spec["cls"], "options": options}
    cluster.sync(cluster._correct_state)


def count(trainer, partitions):
    for numbers in trainer.iterate(partitions, batch_size=1000):
        trainer.push("counts", numbers % 2, np.ones(len(numbers), np.int64))


def main() -> None:
    with SLURMCluster(cores=1, processes=1, memory="4 GiB", walltime="01:00:00") as cluster, Client(cluster) as client:
        cluster.scale(jobs=4)  # trainers
        add_servers(cluster, servers=2, memory="16 GiB")
        with dps.ParameterServer(client, servers=2, copies=2) as ps:
            counts = ps.table("counts", rows=2, dtype="int64")
            ps.run(count, da.arange(1_000_000, chunks=250_000))
            print(counts.pull())  # [500000 500000]


if __name__ == "__main__":
    main()
