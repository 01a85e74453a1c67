"""Estimators under scikit-learn's checks, as they come: with their defaults, and without a failure.

Other tests have these checks with quick settings, a test for each check. Here an estimator is one test, and its fits
share a parameter server, because the start of one is no part of what is checked.
"""

from __future__ import annotations

import contextlib
import sys
import warnings

import pytest
from dask.distributed import Client
from sklearn.base import BaseEstimator
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

import dps
from dps import models


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    with (
        dps.LocalCluster(servers=1, trainers=1, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


@pytest.fixture
def sharing(ps, monkeypatch):
    """Fits find servers that are up, and leave them without their tables, as if these had been started for them."""

    @contextlib.contextmanager
    def serving(client, X, servers, detaches=None):
        before, collected = set(ps.tables()), False
        try:
            yield ps, True
        except GeneratorExit:  # of a model that nothing holds any more; by any thread, also Dask's own
            collected = True
            raise
        finally:
            for name in [] if collected else set(ps.tables()) - before:
                ps.drop_table(name)

    for name, module in list(sys.modules.items()):
        if name.startswith("dps.models.") and name != "dps.models.where" and hasattr(module, "serving"):
            monkeypatch.setattr(module, "serving", serving)


ESTIMATORS = [getattr(models, name) for name in models.__all__]
ESTIMATORS = [each for each in ESTIMATORS if isinstance(each, type) and issubclass(each, BaseEstimator)]
NO_TABLES = {"MatrixFactorization", "Node2Vec", "Word2Vec"}
CHECKED = ["ElasticNet", "Lasso", "LinearRegression", "PoissonRegressor", "Ridge", "Similarity"]


def test_estimators_whose_data_are_no_table_of_features_say_so():
    """scikit-learn's checks pass such tables, so they are not for these, which their tags tell."""
    told = {each.__name__ for each in ESTIMATORS if not get_tags(each()).input_tags.two_d_array}
    assert told == NO_TABLES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_scikit_learn_with_defaults(sharing, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_estimator(getattr(models, name)(), on_fail=None, on_skip=None)
    assert len(found) > 20
    assert {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"} == {}
