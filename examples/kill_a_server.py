"""A server is killed while trainers push, and nothing is lost: two servers hold each row.

The trainers do not notice, but for a pause: their clients send again what was not acknowledged, and the backups count
each push once. Dask's nanny starts the worker anew, and a new server on it is brought up to date.
"""

import os
import signal
import threading
import time

import numpy as np
from dask.distributed import Client

import dps

KEYS, ITERATIONS = 10_000, 150


def train(trainer, parts):
    longest = 0.0
    for _ in range(ITERATIONS):
        began = time.perf_counter()
        trainer.push("counts", np.arange(KEYS), 1)
        trainer.tick()
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.02)
    return longest


def kill_one(client, ps):
    """Kill the process of the server that answers for shard 0."""
    victim = ps.status().tables["counts"].chains[0][0]
    worker = next(server.worker for server in ps.status().servers if server.number == victim)
    os.kill(client.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
    print(f"server {victim} is killed")


if __name__ == "__main__":
    with (
        dps.LocalCluster(servers=3, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=3, copies=2) as ps,
    ):
        ps.table("counts", dtype="int64")
        timer = threading.Timer(1.5, kill_one, (client, ps))
        timer.start()
        pauses = ps.run(train, client.scatter([0, 1]), progress=False)
        timer.join()
        counts = ps.client().pull("counts", np.arange(KEYS))
        events = [what for _, what in ps.status().events]
        print(next(what for what in events if "was lost" in what))
        print(sum("holds shard" in what for what in events), "shards have found new servers")
    assert (counts == 2 * ITERATIONS).all()
    print(f"each of {KEYS} counts is {2 * ITERATIONS}; the longest iteration took {max(pauses):.2f} s")
