"""Factorization machines under scikit-learn's own checks of estimators."""

from __future__ import annotations

import warnings

import pytest
from dask.distributed import Client
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps.models import FactorizationMachine


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=1, **options) as cluster, Client(cluster) as client:
        yield client


BATCHES = "a row that stands twice is in other batches than one of weight 2: the sums are equal, and not the steps"
EXPECTED = {
    "check_fit_score_takes_y": "partial_fit cannot go on after fit where the servers have ended with fit",
    "check_sample_weight_equivalence_on_dense_data": BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": BATCHES,
}
SMALL = {"factors": 2, "batch_size": 10, "epochs": 10, "aggregate": True, "random_state": 0}


@pytest.mark.thorough
@parametrize_with_checks(
    [FactorizationMachine(**SMALL)],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_checks_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)
