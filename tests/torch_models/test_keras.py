"""Keras with the backend torch: the recipe of docs/torch.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dps  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "torch.md").read_text()
RECIPE = re.search(r"^## Keras$.*?^```text\n(.*?)^```$", PAGE, re.M | re.S)[1]


def test_the_recipe_learns(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras was imported with another backend")
    rng = np.random.default_rng(0)
    ratings = {"user": rng.integers(0, 60, 4000), "item": rng.integers(0, 40, 4000)}
    tastes, kinds = rng.random((60, 3)), rng.random((40, 3))
    ratings["rating"] = (tastes[ratings["user"]] * kinds[ratings["item"]]).sum(1).astype("float32")
    shape = {"servers": 1, "trainers": 2, "processes": False, "dashboard_address": None}
    with dps.LocalCluster(**shape) as cluster, dps.ParameterServer(cluster) as ps:
        for name, seed in (("taste", 3), ("kind", 4)):
            ps.table(name, dim=8, init=dps.Normal(0.3, seed=seed), optimizer=dps.Adagrad(0.1))
        printed = []
        names = {"dps": dps, "torch": torch, "ps": ps, "ratings": ratings, "print": printed.append}
        exec(RECIPE, names)
        ((first, second),) = printed
        assert max(first, second) < 0.5  # 0.69 is guessing
        before = names["keras_network"]().count_params()
        assert len(ps.client().pull("keras")) == before
