"""A wide-and-deep model of torch on two trainers (Cheng et al., "Wide & deep learning for recommender systems", 2016).

All parameters lie in tables: torch computes the gradients, and the optimizers on the servers take the steps.
"""

import numpy as np
from dask import delayed
from dask.distributed import Client

import dps

try:
    import torch
except ImportError:
    raise SystemExit("this example needs torch: pip install 'dps[torch]'") from None

USERS, ITEMS, DIM, ROWS, TRAINED = 400, 200, 8, 24_000, 20_000
NETWORK = torch.nn.Sequential(torch.nn.Linear(3 * DIM, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def make_data(rng):
    user, item = rng.integers(0, USERS, ROWS), rng.integers(0, ITEMS, ROWS)
    tastes, kinds = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
    liked = (tastes[user] * kinds[item]).sum(axis=1) > rng.logistic(scale=0.3, size=ROWS)
    return {"user": user, "item": item, "liked": liked.astype(np.float32)}


class WideAndDeep(torch.nn.Module):
    def __init__(self, caller):
        super().__init__()
        self.user, self.item = (dps.torch.Embedding(caller, name, DIM) for name in ("user", "item"))
        self.wide = dps.torch.EmbeddingBag(caller, "wide", 1)
        self.dense = dps.torch.DenseParameters(caller, "deep", NETWORK)

    def forward(self, batch):
        user, item = self.user(batch["user"]), self.item(batch["item"])
        pair = batch["user"] * ITEMS + batch["item"]  # a key of its own for each pair
        return (self.dense(torch.cat([user, item, user * item], 1)) + self.wide(pair[:, None]))[:, 0]


def train(trainer, parts):
    model = WideAndDeep(trainer)
    for epoch in trainer.epochs(8, parts, batch_size=400, shuffle="rows"):
        for batch in epoch:
            model.dense.pull()
            loss = torch.nn.BCEWithLogitsLoss()(model(batch), torch.from_numpy(batch["liked"]))
            loss.backward()
            dps.torch.push_gradients(model.user, model.item, model.wide, model.dense)
            epoch.mean(loss.item())
    return epoch.loss


if __name__ == "__main__":
    data = make_data(np.random.default_rng(0))
    parts = [delayed({name: each[n:TRAINED:2] for name, each in data.items()}) for n in range(2)]
    rest = {name: each[TRAINED:] for name, each in data.items()}
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as dask, dps.ParameterServer(dask) as ps:
        for name, seed in (("user", 1), ("item", 2)):
            ps.table(name, dim=DIM, init=dps.Normal(0.1, seed=seed), optimizer=dps.Adagrad(0.1))
        ps.table("wide", optimizer=dps.FTRL(0.05, l1=0.001))
        dps.torch.dense_table(ps, "deep", NETWORK, optimizer=dps.Adagrad(0.05))
        loss, _ = ps.run(train, parts, staleness=1)
        model = WideAndDeep(ps.client())
        model.dense.pull()
        right = ((model(rest).detach() > 0).numpy() == rest["liked"]).mean()
    print(f"loss {loss:.3f}, accuracy on rows that were not trained on {right:.3f}")
