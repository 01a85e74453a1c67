"""Online learning: trainers learn from a stream, while a plain process answers questions with the newest weights.

The process that serves is no part of the Dask cluster. It gets a pickled client and pulls the few weights of each
question, so it predicts with a model that is milliseconds old. The taste of the users changes half-way, and the
predictions follow.
"""

import pickle
import subprocess
import sys
import time

import numpy as np
from dask.distributed import Client

import dps

FEATURES, STEPS = 50, 600


def sample(rng, count, turned):
    """Rows of three features each, and what users chose; `turned`: they like now what they did not like before."""
    rows = rng.integers(FEATURES, size=(count, 3))
    taste = np.where(np.arange(FEATURES) % 2, 2.0, -2.0) * (-1 if turned else 1)
    return rows, (rng.random(count) < 1 / (1 + np.exp(-taste[rows].sum(axis=1)))).astype(float)


def probability(weights):
    return 1 / (1 + np.exp(-weights.sum(axis=1)))


def learn(trainer, parts):
    rng = np.random.default_rng(trainer.number)
    for step in range(STEPS):
        rows, chosen = sample(rng, 20, turned=step >= STEPS // 2)
        error = probability(trainer.pull("w", rows.ravel()).reshape(rows.shape)) - chosen
        trainer.push("w", rows.ravel(), np.repeat(error, 3))  # the optimizer makes a step of the summed gradients
        trainer.push("steps", [0], 1)
        trainer.tick()
        time.sleep(0.005)


def serve():
    """What the other process does until the stream ends: it asks for the newest weights, and counts its hits."""
    rng, hits, asked = np.random.default_rng(9), np.zeros(2), np.zeros(2)
    with pickle.load(sys.stdin.buffer) as client:
        while (steps := client.pull("steps", [0])[0]) < 2 * STEPS:
            turned = steps >= STEPS
            rows, chosen = sample(rng, 5, turned)
            found = probability(client.pull("w", rows.ravel()).reshape(rows.shape))
            hits[int(turned)] += np.sum((found > 0.5) == chosen)
            asked[int(turned)] += 5
            time.sleep(0.002)
    print(f"right answers before the change: {hits[0] / asked[0]:.3f}, after it: {hits[1] / asked[1]:.3f}")


if __name__ == "__main__" and sys.argv[1:] == ["serve"]:
    serve()

elif __name__ == "__main__":
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as dask, dps.ParameterServer(dask) as ps:
        ps.table("w", dtype="float64", optimizer=dps.SGD(0.1))
        ps.table("steps", rows=1, dtype="int64")
        other = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE)
        other.stdin.write(pickle.dumps(ps.client()))
        other.stdin.close()
        ps.run(learn, dask.scatter([0, 1]), staleness=2, progress=False)
        assert other.wait(60) == 0
