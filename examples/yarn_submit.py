"""A click model on YARN: this program submits a cluster with two servers and two trainers, trains, and ends it.

``python examples/yarn_submit.py hdfs:///envs/dps.tar.gz`` names the packed Python of the containers (docs/yarn.md).
Without a name they use the Python of this program, which all nodes then need at the same path.
"""

import sys

import dask
import numpy as np
from dask.distributed import Client

import dps

FEATURES, NONZEROS, ROWS, PARTS = 2_000, 20, 20_000, 4


@dask.delayed
def clicks(part):
    """Rows of features and whether each was clicked; made in the containers, where real files would be read."""
    weights = np.random.default_rng(0).normal(0, 0.7, FEATURES)  # the truth, the same for all parts
    rng = np.random.default_rng(part + 1)
    features = rng.integers(FEATURES, size=(ROWS // PARTS, NONZEROS))
    return features, weights[features].sum(axis=1) > rng.logistic(size=len(features))


def train(trainer, parts):
    for features, clicked in trainer.iterate(parts, batch_size=200, epochs=5):
        keys, codes = np.unique(features, return_inverse=True)
        codes = codes.reshape(features.shape)
        chance = 1 / (1 + np.exp(-trainer.pull("w", keys)[codes].sum(axis=1)))
        error = np.repeat(chance - clicked, NONZEROS)
        trainer.push("w", keys, np.bincount(codes.ravel(), error, len(keys)))
    return trainer.clock


def submit(environment):
    """The cluster; in a program for one Hadoop cluster these belong into ~/.config/dask/dps.yaml."""
    sizes = {f"{kind}_memory": "1 GiB" for kind in ("worker", "server", "scheduler")}
    return dps.YarnCluster(environment, n_workers=2, n_servers=2, name="clicks", **sizes)


if __name__ == "__main__":
    environment = sys.argv[1] if len(sys.argv) > 1 else f"python://{sys.executable}"
    with submit(environment) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        names = sorted(container.id for container in cluster.containers())
        print(f"{cluster.app_id}: {', '.join(names)}")
        with dps.ParameterServer(client, servers=2, copies=2) as ps:
            ps.table("w", optimizer=dps.FTRL(alpha=0.1, l1=0.1))
            clocks = ps.run(train, [clicks(part) for part in range(PARTS)], staleness=1, progress=False)
            features, clicked = clicks(PARTS).compute()
            right = (
                (ps.client().pull("w", features.ravel()).reshape(features.shape).sum(axis=1) > 0) == clicked
            ).mean()
        print(f"{sum(clocks)} steps on {len(clocks)} trainers; {right:.3f} of new rows are right")
