"""Matrix factorization of ratings in a Spark DataFrame."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import sparks

import dps
from dps.errors import InputError, InputTypeError
from dps.models import MatrixFactorization

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone."),
]
USERS, ITEMS = 30, 20
rng = np.random.default_rng(0)
WHERE = np.flatnonzero(rng.random(USERS * ITEMS) < 0.6)
FRAME = pd.DataFrame({"user": WHERE // ITEMS, "item": WHERE % ITEMS, "rating": rng.integers(1, 6, len(WHERE)) * 1.0})


def test_als_gives_the_factors_of_one_process(spark, ps):
    settings = {"factors": 3, "regularization": 2.0, "solver": "exact", "epochs": 3, "random_state": 1}
    with dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster:
        here = MatrixFactorization("als", client=cluster, **settings).fit(FRAME)
    there = MatrixFactorization("als", client=ps, **settings).fit(spark.createDataFrame(FRAME).repartition(3))
    np.testing.assert_allclose(there.user_factors, here.user_factors, atol=1e-4)
    np.testing.assert_allclose(there.item_factors, here.item_factors, atol=1e-4)
    np.testing.assert_allclose(there.loss_curve_, here.loss_curve_, rtol=1e-5)
    assert set(there.recommend(0, N=ITEMS)[0]) == set(range(ITEMS)) - set(FRAME.item[FRAME.user == 0])
    there.forget()


@pytest.mark.parametrize("method", ["sgd", "bpr"])
def test_stochastic_methods_learn(spark, ps, method):
    frame = spark.createDataFrame(FRAME.rename(columns={"user": "who", "rating": "of.stars"})).repartition(3)
    model = MatrixFactorization(
        method, client=ps, factors=3, learning_rate=0.1, epochs=30, batch_size=100, columns=("who", "item", "of.stars")
    ).fit(frame)
    assert model.loss_curve_[-1] < 0.9 * model.loss_curve_[0]
    assert model.user_ids_.tolist() == list(range(USERS))
    assert set(model.recommend(0, N=ITEMS)[0]) == set(range(ITEMS)) - set(FRAME.item[FRAME.user == 0])
    model.forget()


def test_a_server_beside_the_driver_is_started_for_a_fit(spark):
    model = MatrixFactorization("als", factors=3, epochs=2).fit(spark.createDataFrame(FRAME))
    assert model.item_factors.shape == (ITEMS, 3)


@pytest.mark.parametrize("method", ["sgd", "als", "bpr"])
def test_empty_frames(spark, ps, method):
    """Whether there are partitions, all of them empty, or none."""
    frame, before = spark.createDataFrame(FRAME).repartition(3), ps.tables().keys()
    for empty in (frame.where("rating < 0"), spark.createDataFrame([], frame.schema)):
        with pytest.raises(InputError, match="there are 0 ratings"):
            MatrixFactorization(method, client=ps, factors=2).fit(empty)
        assert ps.tables().keys() == before


def test_feedback_of_which_nothing_is_above_zero(spark, ps):
    with pytest.raises(InputError, match=f"none of the {len(FRAME)} ratings is above 0: method 'bpr'"):
        MatrixFactorization("bpr", client=ps).fit(spark.createDataFrame(FRAME.assign(rating=-FRAME.rating)))


def test_wrong_frames(spark, ps):
    with pytest.raises(InputError, match="no column 'rating'"):
        MatrixFactorization(client=ps).fit(spark.createDataFrame(FRAME[["user", "item"]]))
    with pytest.raises(InputTypeError, match="not an RDD"):
        MatrixFactorization(client=ps).fit(spark.createDataFrame(FRAME).rdd)
    without = FRAME.assign(rating=FRAME.rating.where(FRAME.index != 0))
    for method in ("sgd", "als"):
        with pytest.raises(InputError, match=r"partition \d+: [12] of \d+ values are NaN"):
            MatrixFactorization(method, client=ps, factors=2).fit(spark.createDataFrame(without))
    with pytest.raises(InputTypeError, match="users are whole numbers"):
        MatrixFactorization(client=ps).fit(spark.createDataFrame(FRAME.astype({"user": str})))
