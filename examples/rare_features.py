"""A click model over a stream in which most features occur once: a feature has a weight while it is worth the memory.

A count-min sketch (Cormode and Muthukrishnan, 2005), DEPTH x 2^BITS counts in a table, has the occurrences of a day. An
estimate is never too low. Of N occurrences, it is too high by e / 2^BITS * N at most, with probability 1 - e^-DEPTH. A
feature is admitted at its third occurrence in a day. Another table has the day on which it was last seen, and at night
the features go that were not seen for two days.
"""

import numpy as np
from dask.distributed import Client

import dps

DAYS, BATCHES, ROWS = 8, 20, 500  # batches of a day for each trainer, rows of a batch
DEPTH, BITS, ADMITTED, KEPT = 4, 16, 3, 2  # 60,000 occurrences in a day: at most 2.5 too high, at 98 %
FACTORS, SUMMANDS = np.random.default_rng(1).integers(2**64, size=(2, DEPTH, 1), dtype=np.uint64)
LIKING = np.random.default_rng(2).normal(0, 1.5, 2_000)


def impressions(rng, day):
    """Keys of sites, adverts and visitors, and clicks. Adverts run for three days, and most visitors come once."""
    sites, adverts = rng.zipf(1.3, ROWS) % 1_000, 20 * day + rng.integers(60, size=ROWS)
    odds = LIKING[sites] + LIKING[1_000 + adverts] - 1
    columns = {"site": sites, "advert": adverts, "visitor": rng.integers(2**40, size=ROWS)}
    keys = dps.hash_columns({name: values.astype(str) for name, values in columns.items()}, bits=32)
    return keys, rng.random(ROWS) < 1 / (1 + np.exp(-odds))


def cells(keys):
    """A count of each key in each line of the sketch, by pairwise independent hashes (Dietzfelbinger, 1996)."""
    places = (FACTORS * keys.astype(np.uint64) + SUMMANDS) >> np.uint64(64 - BITS)
    return places.astype(np.int64) + (np.arange(DEPTH)[:, None] << BITS)


def learn(trainer, parts, day, least):
    losses = []
    for batch in range(BATCHES):
        X, clicked = impressions(np.random.default_rng([day, trainer.number, batch]), day)
        keys, codes, counts = np.unique(X, return_inverse=True, return_counts=True)
        counted = trainer.push_pull("sketch", cells(keys).ravel(), np.tile(counts, DEPTH)).reshape(DEPTH, -1)
        rows = trainer.pull({"w": keys, "seen": keys})  # zeros for a key without a row
        p = 1 / (1 + np.exp(-rows["w"][codes.reshape(X.shape)].sum(axis=1)))
        losses.append(-np.log(np.where(clicked, p, 1 - p)).mean())  # before it learns from these rows
        gradient = np.bincount(codes.ravel(), np.repeat(p - clicked, X.shape[1]))
        mine = (rows["seen"] > 0) | (counted.min(axis=0) >= least)
        trainer.push("w", keys[mine], gradient[mine])
        trainer.assign("seen", keys[mine], day)
        trainer.tick()
    return np.mean(losses)


def forget(client, day, kept):
    """Delete what has not been seen for long, and begin the counts of another day; how old the weights are, in days."""
    keys = np.concatenate([*client.keys("seen")])
    ages = day - client.pull("seen", keys)
    client.delete(dict.fromkeys(("w", "seen"), keys[ages >= kept]))
    client.clear("sketch")
    return np.bincount(ages[ages < kept])


if __name__ == "__main__":
    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        for name, least in ("all features", 1), ("admitted", ADMITTED):
            with dps.ParameterServer(client) as ps:
                weights, _ = ps.table("w", optimizer=dps.Adagrad(0.2)), ps.table("seen", dtype="int64")
                ps.table("sketch", rows=DEPTH << BITS, dtype="int64")
                for day in range(1, DAYS + 1):
                    loss = np.mean(ps.run(learn, [0, 1], args=(day, least), staleness=1, progress=False))
                    ages = forget(ps.client(), day, KEPT if least > 1 else DAYS)
                print(f"{name}: {len(weights)} weights, log-loss of the last day {loss:.4f}, by age in days {ages}")
