"""My own update: what a push does to a row is a class of mine, and questions to the table are functions of mine.

Trainers learn the mean temperature of stations, some of whose thermometers are broken. The update clips each step, and
counts readings in a column of state. Which stations are warmest is asked on the servers: only the answer travels.
"""

import numpy as np

import dps

STATIONS, READINGS = 2_000, 200_000


class ClippedMean(dps.Optimizer):
    """The running mean of what is pushed, in clipped steps; how many readings there were is the state."""

    limit: float = 5.0

    def init(self, dim):
        return 1  # one column of state beside the values of a row

    def update(self, values, state, gradients, clock):
        state += 1
        values += np.clip((gradients - values) / state, -self.limit / state, self.limit / state)


@dps.function
def warmest(rows, count, least):
    """The warmest stations of one shard with at least so many readings."""
    known = np.flatnonzero(rows.state[:, 0] >= least)
    best = known[np.argsort(-rows.values[known, 0])[:count]]
    return [rows.keys[best], rows.values[best, 0]]


@warmest.merge
def _(parts, count):
    stations, means = (np.concatenate(column) for column in zip(*parts, strict=True))
    best = np.argsort(-means)[:count]
    return stations[best], means[best]


def train(trainer, parts):
    for batch in trainer.iterate(parts, batch_size=200):
        stations, first = np.unique(batch[:, 0].astype(int), return_index=True)  # a reading of each station at a time
        trainer.push("temperature", stations, batch[first, 1])


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    truth = rng.normal(10, 8, STATIONS)
    station = rng.integers(STATIONS, size=READINGS)
    reading = truth[station] + rng.normal(0, 1, READINGS)
    reading[rng.random(READINGS) < 0.02] = 999.0
    data = np.column_stack([station, reading])

    with dps.LocalCluster(servers=1, trainers=2) as cluster, dps.ParameterServer(cluster) as ps:
        table = ps.table("temperature", rows=STATIONS, dtype="float64", optimizer=ClippedMean(limit=20.0))
        ps.run(train, data, progress=False)
        found = table.pull()
        names, means = ps.call(warmest, table, count=5, least=10)
    plain = np.bincount(station, weights=reading) / np.bincount(station)
    print(f"plain means:   off by {np.abs(plain - truth).mean():.2f} degrees")
    print(f"clipped means: off by {np.abs(found - truth).mean():.2f} degrees")
    print("warmest:", ", ".join(f"station {name} at {mean:.1f}" for name, mean in zip(names, means, strict=True)))
    assert np.abs(found - truth).mean() < 0.2 * np.abs(plain - truth).mean()
