"""A training loop of your own, beside the serial numpy loop that it came from.

Both fit a logistic regression to sparse rows. The serial loop has one array of weights. On the parameter server the
weights are a keyed table: each trainer pulls those that its batch needs, and pushes their gradient. The table averages
the gradients of all trainers and takes one step for each clock, so both loops do the same arithmetic.
"""

import numpy as np
import scipy.sparse
from dask import delayed
from dask.distributed import Client

import dps

FEATURES, ROWS, BATCH, EPOCHS, RATE = 2_000, 8_000, 500, 10, 20.0


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random(ROWS, FEATURES, density=0.01, format="csr", dtype=np.float32, rng=rng)
    return X, (X @ rng.normal(size=FEATURES) > 0).astype(np.float32)


def gradient(X, y, w):
    return X.T @ (1 / (1 + np.exp(-(X @ w))) - y) / len(y)


def serial(X, y):
    w = np.zeros(FEATURES, np.float32)
    for _ in range(EPOCHS):
        for i in range(0, len(y), BATCH):
            batch = slice(i, i + BATCH)
            w -= RATE * gradient(X[batch], y[batch], w)
    return w


def train(trainer, parts):
    for X, y in trainer.iterate(parts, EPOCHS, BATCH // trainer.trainers):  # a batch is shared by all trainers
        keys, X = dps.localize(X)  # the features of this batch, and the batch with its columns renumbered to them
        w = trainer.pull("w", keys)
        trainer.push("w", keys, gradient(X, y, w))


def loss(X, y, w):
    z = X @ w
    return float(np.mean(np.logaddexp(0, z) - y * z))


if __name__ == "__main__":
    X, y = make_data()
    alone = serial(X, y)
    parts = [delayed((X[n::2], y[n::2])) for n in range(2)]  # every other row: half of each batch of the serial loop
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as dask, dps.ParameterServer(dask) as ps:
        table = ps.table("w", optimizer=dps.SGD(RATE), aggregate="mean")
        ps.run(train, parts, staleness=0)
        w = table.pull(np.arange(FEATURES))
    print(f"loss of the serial loop {loss(X, y, alone):.6f}, of two trainers {loss(X, y, w):.6f}")
    assert np.allclose(w, alone, atol=1e-4), np.abs(w - alone).max()
