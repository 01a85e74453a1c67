"""A run fails half-way, and another cluster goes on with it from a checkpoint.

The second cluster has another number of servers. Trainers skip the batches that the checkpoint contains, so the model
is that of a run without a failure.
"""

import tempfile
import time

import numpy as np
from dask.distributed import Client

import dps

EPOCHS = 40


def train(trainer, parts, breaks):
    for batch in trainer.iterate(parts, batch_size=100, epochs=EPOCHS):
        if breaks and trainer.clock == 250:
            time.sleep(1)  # a regular checkpoint ends meanwhile
            raise RuntimeError("the power is cut")
        trainer.push("sums", batch % 50, batch)
        time.sleep(0.002)
    return trainer.clock


def session(folder, servers, breaks):
    """One cluster's life: it begins with the checkpoint in the folder, if there is one."""
    with (
        dps.LocalCluster(servers=servers, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=servers) as ps,
    ):
        data = client.scatter([np.arange(1_000), np.arange(1_000, 2_000)])
        if breaks:
            ps.table("sums", dtype="int64")
            ps.schedule_checkpoints(folder, clocks=50)
        else:
            print("the run goes on at clock", ps.restore(folder)["clock"], "with", servers, "servers")
        try:
            ps.run(train, data, args=(breaks,), resume=not breaks, progress=False)
        except RuntimeError as error:
            print("the run ended:", error)
        return ps.client().pull("sums", np.arange(50))


if __name__ == "__main__":
    checkpoints = tempfile.mkdtemp()
    session(checkpoints, servers=1, breaks=True)
    sums = session(checkpoints, servers=2, breaks=False)
    expected = EPOCHS * np.arange(2_000).reshape(-1, 50).sum(axis=0)
    assert sums.tolist() == expected.tolist()
    print(f"all {len(sums)} sums are those of a run without a failure, the first {sums[0]}")
