"""Fitted estimators in MLflow: logged as those of scikit-learn are, and loaded where there is no cluster."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import dps

pytestmark = pytest.mark.integration  # importing mlflow takes seconds

RNG = np.random.default_rng(5)
X = RNG.poisson(1.0, (200, 6)).astype(float)
Y = (X[:, 0] > X[:, 1]).astype(int)
ESTIMATORS = {
    "logistic": dps.models.LogisticRegression(epochs=3),
    "regression": dps.models.LinearRegression(),
    "machine": dps.models.FactorizationMachine(epochs=3),
    "clusters": dps.models.KMeans(n_clusters=3),
}
SERVE = """
import distributed, mlflow.pyfunc, numpy as np, sys
np.save(sys.argv[3], mlflow.pyfunc.load_model(sys.argv[1]).predict(np.load(sys.argv[2])))
try:
    sys.exit(f"it has made {distributed.default_client()}")
except ValueError:
    pass  # there is no client
"""


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=1, **options) as cluster, dps.ParameterServer(cluster) as ps:
        yield ps


@pytest.mark.parametrize("name", ESTIMATORS)
def test_another_process_predicts_the_same_without_a_cluster(name, ps, tmp_path):
    pytest.importorskip("mlflow.pyfunc")  # here, because it takes seconds, also of a run that leaves this test out
    mlflow = pytest.importorskip("mlflow")
    model = ESTIMATORS[name].set_params(client=ps).fit(X, Y)
    path, rows, predicted = tmp_path / "model", tmp_path / "rows.npy", tmp_path / "predicted.npy"
    options = {"serialization_format": "cloudpickle", "pip_requirements": ["dps[models]"]}
    mlflow.sklearn.save_model(model, path, **options)
    np.save(rows, X)
    subprocess.run([sys.executable, "-c", SERVE, path, rows, predicted], env=os.environ.copy(), check=True)
    np.testing.assert_array_equal(np.load(predicted), model.predict(X))
