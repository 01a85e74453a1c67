"""A click model with FTRL, from files that do not fit one process.

The workers read the files, hash each value of each column into one of 2^20 features, and train. Many features of such
data are rare, and FTRL-Proximal (McMahan et al., 2013) with an l1 penalty leaves the weights of most of them at zero.
"""

import os
import tempfile

import numpy as np
import pandas as pd
from dask.distributed import Client
from sklearn.metrics import log_loss, roc_auc_score

import dps
from dps.models import LogisticRegression, read_files

FILES, ROWS, BITS = 4, 20_000, 20


def clicks(seed):
    """Impressions of pages, some of which sites are liked, and advertisements, some of which are."""
    rng = np.random.default_rng(seed)
    site = rng.zipf(1.3, ROWS) % 5_000
    advert = rng.zipf(1.2, ROWS) % 500
    liking = np.random.default_rng(99).normal(0, 1, 5_500)
    odds = liking[site] + liking[5_000 + advert] - 1.5
    return pd.DataFrame(
        {
            "click": (rng.random(ROWS) < 1 / (1 + np.exp(-odds))).astype(int),
            "site": [f"site-{n}" for n in site],
            "advert": [f"ad-{n}" for n in advert],
            "hour": rng.integers(0, 24, ROWS).astype(str),
        }
    )


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    for number in range(FILES):
        clicks(number).to_csv(os.path.join(folder, f"day-{number}.csv.gz"), index=False)
    days = read_files(f"{folder}/day-*.csv.gz", label="click", categorical=["hour"])

    with dps.LocalCluster(servers=1, trainers=2) as cluster, Client(cluster) as client:
        model = LogisticRegression(
            solver="ftrl", learning_rate=0.3, l1=0.5, epochs=2, batch_size=1_000, hash_bits=BITS, client=client
        )
        model.fit(days)

    tomorrow = clicks(FILES)
    found = model.predict_proba(tomorrow.drop(columns="click"))[:, 1]
    guess = np.full(ROWS, tomorrow.click.mean())
    print(f"log-loss of the next day: {log_loss(tomorrow.click, found):.4f}, and {log_loss(tomorrow.click, guess):.4f}")
    print(f"AUC of the next day: {roc_auc_score(tomorrow.click, found):.4f}, and 0.5000 for a guess")
    print(f"{np.count_nonzero(model.coef_)} of {2**BITS} weights are not zero")
