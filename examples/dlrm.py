"""A DLRM of torch on two trainers (Naumov et al., "Deep learning recommendation model", 2019), for generated clicks.

A bottom network makes a vector of the numbers of a row, embeddings make one of each category, and a top network takes
the inner products of all pairs. The embeddings of all features lie in one table: the feature is part of the key.
"""

import numpy as np
from dask import delayed

import dps

try:
    import torch
except ImportError:
    raise SystemExit("this example needs torch: pip install 'dps[torch]'") from None

NUMBERS, SIZES, DIM, ROWS, TRAINED = 4, [50, 200, 1_000, 5_000, 20_000], 16, 60_000, 50_000
BASES = np.arange(len(SIZES)) << 40  # of keys, for each feature


def make_clicks(rng):
    numbers = rng.normal(size=(ROWS, NUMBERS)).astype(np.float32)
    ids = np.minimum(rng.zipf(1.3, (ROWS, len(SIZES))), SIZES) - 1
    tastes = [rng.normal(size=(size, 3)) for size in SIZES]
    vectors = np.stack([numbers[:, :3], *(taste[ids[:, n]] for n, taste in enumerate(tastes))], axis=1)
    products = vectors @ vectors.transpose(0, 2, 1)
    score = np.triu(products, 1).sum(axis=(1, 2)) / 3 + numbers[:, 3]
    return {"numbers": numbers, "keys": ids + BASES, "click": np.float32(score > rng.logistic(scale=0.5, size=ROWS))}


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        linear, relu, count = torch.nn.Linear, torch.nn.ReLU(), len(SIZES) + 1
        self.bottom = torch.nn.Sequential(linear(NUMBERS, 32), relu, linear(32, DIM), relu)
        self.top = torch.nn.Sequential(linear(DIM + count * (count - 1) // 2, 32), relu, linear(32, 1))
        self.pairs = np.triu_indices(count, 1)

    def forward(self, numbers, embedded):
        low = self.bottom(torch.as_tensor(numbers))
        vectors = torch.cat([low[:, None], embedded], 1)  # of the numbers, and of each category
        products = (vectors @ vectors.transpose(1, 2))[:, *self.pairs]
        return self.top(torch.cat([low, products], 1))[:, 0]


def train(trainer, parts):
    embedding = dps.torch.Embedding(trainer, "categories", DIM)
    network = dps.torch.DenseParameters(trainer, "networks", Network())
    wanted = {"pull": lambda batch: {"categories": batch["keys"]}, "ahead": 1}  # while torch computes
    for batch, rows in trainer.iterate(parts, batch_size=250, epochs=5, shuffle=0, **wanted):
        network.pull()
        logits = network(batch["numbers"], embedding(rows["categories"]))
        torch.nn.BCEWithLogitsLoss()(logits, torch.from_numpy(batch["click"])).backward()
        dps.torch.push_gradients(embedding, network)


if __name__ == "__main__":
    clicks = make_clicks(np.random.default_rng(0))
    parts = [delayed({name: each[n:TRAINED:2] for name, each in clicks.items()}) for n in range(2)]
    rest = {name: each[TRAINED:] for name, each in clicks.items()}
    with dps.LocalCluster(servers=1, trainers=2) as cluster, dps.ParameterServer(cluster) as ps:
        table = ps.table("categories", dim=DIM, init=dps.Normal(0.1, seed=1), optimizer=dps.Adagrad(0.1))
        dps.torch.dense_table(ps, "networks", Network(), optimizer=dps.Adagrad(0.03))
        ps.run(train, parts, staleness=1, progress=False)
        network, embedding = Network(), dps.torch.Embedding(ps.client(), "categories", DIM)
        dps.torch.DenseParameters(ps.client(), "networks", network).pull()
        with torch.no_grad():
            clicked = (network(rest["numbers"], embedding(rest["keys"])) > 0).numpy()
        right, guess = (clicked == rest["click"]).mean(), max(rest["click"].mean(), 1 - rest["click"].mean())
        print(f"{len(table)} embeddings; {right:.3f} of other rows are right, and {guess:.3f} by guessing")
