"""The estimator on a Dask dataframe with categorical columns, and its score beside scikit-learn's.

Each (column, value) pair becomes a feature by hashing: no dictionary of values is made, so a column may have millions
of them. Numbers are features too. scikit-learn gets the same rows in one process, one-hot encoded.
"""

import dask.dataframe as dd
import numpy as np
import pandas as pd
from dask.distributed import Client
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import dps

ROWS, SITES, ADS = 40_000, 300, 100


def make_data(seed=0):
    """Clicks on advertisements: they depend on the site, the advertisement and the length of the visit."""
    rng = np.random.default_rng(seed)
    site, ad = rng.zipf(1.5, ROWS) % SITES, rng.integers(ADS, size=ROWS)
    visit = rng.random(ROWS)
    odds = np.exp(rng.normal(size=SITES)[site] + rng.normal(size=ADS)[ad] + 2 * visit - 2)
    frame = pd.DataFrame({"site": site, "ad": ad}).astype(str).astype("category").assign(visit=visit)
    return frame, pd.Series(rng.random(ROWS) < odds / (1 + odds)).astype(int)


if __name__ == "__main__":
    X, y = make_data()
    train, test = slice(0, ROWS * 3 // 4), slice(ROWS * 3 // 4, ROWS)

    encode = make_column_transformer((OneHotEncoder(handle_unknown="ignore"), ["site", "ad"]), remainder="passthrough")
    alone = make_pipeline(encode, LogisticRegression(max_iter=1000)).fit(X[train], y[train])
    accuracy, loss = alone.score(X[test], y[test]), log_loss(y[test], alone.predict_proba(X[test]))
    print(f"scikit-learn: accuracy {accuracy:.3f}, log-loss {loss:.4f}")

    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        frame, labels = dd.from_pandas(X[train], npartitions=4), dd.from_pandas(y[train], npartitions=4)
        model = dps.models.LogisticRegression(client=client, solver="adagrad", epochs=10, batch_size=500, staleness=1)
        model.fit(frame, labels)
    ours, our_loss = model.score(X[test], y[test]), log_loss(y[test], model.predict_proba(X[test]))
    print(f"dps:          accuracy {ours:.3f}, log-loss {our_loss:.4f}")
    assert our_loss < 1.02 * loss
    assert ours > accuracy - 0.01
