"""An online click model over a stream without an end, in a fixed number of bytes: rows come, fade and go.

Each day brings new adverts and new visitors, who come less and less from then on; sites stay. A table without a budget
keeps a row of each feature for ever. This one has BUDGET bytes: when they are full, rows go that were not used for
longest. Rows that were not used for KEPT days go in any case: at the weekend, when there are fewer impressions.

The loss of a batch is taken before the model learns from it. With --compare, a table without a budget learns from the
same stream, too. A day lasts DAY seconds here.
"""

import sys
import time

import numpy as np
from dask.distributed import Client

import dps

DAYS, DAY, BATCHES, WEEKEND, ROWS = 14, 0.8, 25, 3, 2_000  # batches of a day and of one at the weekend, rows of a batch
BUDGET, KEPT = "2 MB", 2
SITES, ADVERTS, VISITORS = 1_000, 200, 40_000  # sites; adverts and visitors that are new on a day
LIKING = np.random.default_rng(0).normal(size=(3, 1 << 20))


def impressions(rng, day):
    """The keys of four features of each row, and clicks. What is new on a day is seen half as often on the next."""
    ages = np.minimum(rng.geometric(0.5, (2, ROWS)) - 1, day)
    sites, ranks = rng.zipf(1.2, ROWS) % SITES, rng.zipf(1.3, ROWS) % ADVERTS
    adverts = (day - ages[0]) * ADVERTS + ranks
    visitors = ((day - ages[1] + rng.random(ROWS) ** 3) * VISITORS).astype(int)
    liking = sum(each[numbers % len(each)] for each, numbers in zip(LIKING, (sites, adverts, visitors), strict=True))
    named = {"site": sites, "advert": adverts, "visitor": visitors, "pair": adverts * SITES + sites}
    keys = dps.hash_columns({name: numbers.astype(str) for name, numbers in named.items()}, bits=40)
    return keys, rng.random(ROWS) < 1 / (1 + np.exp(1 - liking))


def learn(table, keys, clicked):
    """One step of logistic regression; the log-loss before it."""
    unique, places = np.unique(keys, return_inverse=True)
    weights = table.pull(unique)[places.reshape(keys.shape)]  # zeros for a key without a row
    p = 1 / (1 + np.exp(-weights.sum(axis=1)))
    table.push(unique, np.bincount(places.ravel(), np.repeat(p - clicked, keys.shape[1])))
    return -np.log(np.where(clicked, p, 1 - p)).mean()


if __name__ == "__main__":
    with dps.LocalCluster(servers=1) as cluster, Client(cluster) as client, dps.ParameterServer(client) as ps:
        bounded = {"max_bytes": BUDGET, "evict": "lru", "expire": dps.ExpireUnused(KEPT * DAY)}
        tables = {"bounded": ps.table("bounded", optimizer=dps.Adagrad(0.1), shards=2, **bounded)}
        if "--compare" in sys.argv:
            tables["unbounded"] = ps.table("unbounded", optimizer=dps.Adagrad(0.1), shards=2)
        rng, losses, began = np.random.default_rng(1), {name: [] for name in tables}, time.monotonic()
        for day in range(DAYS):
            batches = BATCHES if day % 7 < 5 else WEEKEND
            for batch in range(batches):
                keys, clicked = impressions(rng, day)
                time.sleep(max(0, began + (day + batch / batches) * DAY - time.monotonic()))
                for name, table in tables.items():
                    losses[name].append(learn(table, keys, clicked))
            status = ps.status()
            for name in tables:
                held, loss = status.tables[name], np.mean(losses[name][-batches:])
                went = f", {held.turnover.evicted} evicted, {held.turnover.expired} expired" if held.turnover else ""
                print(f"day {day + 1}, {name}: log-loss {loss:.4f}, {held.rows} rows, {held.bytes / 1e6:.2f} MB{went}")
        for name in tables:
            print(f"all days, {name}: log-loss {np.mean(losses[name]):.4f}")
