"""A recommender from implicit feedback: who watched what, kept out in part, and how many of it are recommended.

Films have a genre and a popularity, viewers have tastes. The last film of each viewer is held out. The model never
sees it, and recommends ten films out of 600: a guess would find it once in 60 times, the most popular films more often.
"""

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.distributed import Client

import dps

VIEWERS, FILMS, GENRES, VIEWS, N = 2_000, 600, 12, 30, 10


def make_views(seed=0):
    """For each viewer the films that it watched, in order."""
    rng = np.random.default_rng(seed)
    tastes = rng.dirichlet(np.full(GENRES, 0.15), VIEWERS)
    chances = tastes[:, rng.integers(GENRES, size=FILMS)] * rng.pareto(2.0, FILMS)
    return np.array([rng.choice(FILMS, VIEWS, replace=False, p=(row + 1e-4) / (row + 1e-4).sum()) for row in chances])


if __name__ == "__main__":
    views = make_views()
    known, last = views[:, :-1], views[:, -1]
    viewers = np.arange(VIEWERS) + 10**12  # ids may be any int64
    feedback = pd.DataFrame({"user": np.repeat(viewers, VIEWS - 1), "item": known.reshape(-1), "rating": 1.0})

    counts = np.tile(np.bincount(known.reshape(-1), minlength=FILMS), (VIEWERS, 1))
    np.put_along_axis(counts, known, -1, axis=1)
    popular = np.argsort(-counts, axis=1)[:, :N]
    print(f"most popular: {(popular == last[:, None]).any(axis=1).mean():.3f} of the films found")

    with (
        dps.LocalCluster(servers=1, trainers=2) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        model = dps.models.MatrixFactorization(
            "als", factors=16, alpha=10.0, regularization=1.0, epochs=10, random_state=0, client=ps
        )
        model.fit(dd.from_pandas(feedback, npartitions=4))
        films, _ = model.recommend(viewers, N=N)  # the servers look for them
        print(f"als:          {(films == last[:, None]).any(axis=1).mean():.3f} of the films found")

        model.partial_fit(([1], [int(last[0])], [1.0]))  # somebody new, who liked one film
        alike, cosines = model.similar_items(last[0], N=4)
        print(f"new viewer:   {model.recommend(1, N=3)[0]}; like film {last[0]}: {alike[1:]} {cosines[1:].round(2)}")
        assert last[0] not in model.recommend(1, N=3)[0]
