"""Estimators under scikit-learn's checks, as they come: with their defaults, and with no failure but the declared ones.

Other tests have these checks with quick settings, a test for each check. Here an estimator is one test, and its fits
share a parameter server, because the start of one is no part of what is checked.
"""

from __future__ import annotations

import warnings

import dask
import pytest
from dask.distributed import Client
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

import dps
from dps import models
from dps.models import kept_servers


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": None}
    with (
        dask.config.set({"dps.timeouts.reuse": "600 s"}),
        dps.LocalCluster(servers=1, trainers=1, **options) as cluster,
        Client(cluster) as client,
    ):
        yield client
        kept_servers.close_kept()


ESTIMATORS = [getattr(models, name) for name in models.__all__]
ESTIMATORS = [each for each in ESTIMATORS if isinstance(each, type) and issubclass(each, BaseEstimator)]
NO_TABLES = {"MatrixFactorization", "Node2Vec", "Word2Vec"}
CHECKED = sorted({each.__name__ for each in ESTIMATORS} - NO_TABLES)

BATCHES = "a row that stands twice is in other batches than one of weight 2: the sums are equal, and not the steps"
ENDED = "partial_fit cannot go on after fit where the servers have ended with fit"
ROUNDING = "L-BFGS ends where the loss falls by rounding only: the margins, near 1, then differ by up to 2e-5"
MACHINES = {
    "check_fit_score_takes_y": ENDED,
    "check_regressor_data_not_an_array": "columns of a frame are hashed, and their factors begin at other numbers",
    "check_sample_weight_equivalence_on_dense_data": BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": BATCHES,
}
EXPECTED: dict[str, dict[str, str]] = {
    "FactorizationMachine": MACHINES,
    "FactorizationMachineRegressor": MACHINES,
    "LinearSVC": {
        "check_sample_weight_equivalence_on_dense_data": ROUNDING,
        "check_sample_weight_equivalence_on_sparse_data": ROUNDING,
    },
    "LogisticRegression": {"check_fit_score_takes_y": ENDED},
}


def test_estimators_whose_data_are_no_table_of_features_say_so():
    """scikit-learn's checks pass such tables, so they are not for these, which their tags tell."""
    told = {each.__name__ for each in ESTIMATORS if not get_tags(each()).input_tags.two_d_array}
    assert told == NO_TABLES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_scikit_learn_with_defaults(client, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator, expected = getattr(models, name)(), EXPECTED.get(name)
        found = check_estimator(estimator, expected_failed_checks=expected, on_fail=None, on_skip=None)
    assert len(found) > 20
    assert {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"} == {}
