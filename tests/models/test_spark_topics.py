"""Topics of documents in Spark: the same as in this process, and errors that name the data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sparks

import dps
from dps.errors import InputError, InputTypeError
from dps.models import LatentDirichletAllocation

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone."),
]
DOCUMENTS, WORDS, TOPICS = 60, 12, 3
rng = np.random.default_rng(0)
X = rng.poisson(1.5, (DOCUMENTS, WORDS)) * (np.arange(WORDS) % TOPICS == np.arange(DOCUMENTS)[:, None] % TOPICS)
X[5] = 0  # a document without words


def vectors(spark, data=X, name="features"):
    """A DataFrame with a column of sparse and dense vectors, beside another one, in three partitions."""
    from pyspark.ml.linalg import Vectors

    rows = [
        (n, Vectors.dense(row) if n % 2 else Vectors.sparse(len(row), np.flatnonzero(row), row[row != 0]))
        for n, row in enumerate(np.asarray(data, float))
    ]
    return spark.createDataFrame(rows, ["number", name]).coalesce(1).repartition(3, "number")


def model_of(ps, method="gibbs", **settings):
    return LatentDirichletAllocation(
        TOPICS, client=ps, learning_method=method, random_state=1, **{"max_iter": 5, **settings}
    )


@pytest.mark.parametrize("method", ["batch", "online", "gibbs"])
def test_topics_of_vectors(spark, ps, method):
    model = model_of(ps, method, max_iter=20, batch_size=10, evaluate_every=20).fit(vectors(spark))
    if method == "gibbs":
        np.testing.assert_array_equal(model.counts_.sum(axis=0), X.sum(axis=0))
        again = model_of(ps, method, max_iter=20, batch_size=3).fit(vectors(spark))
        np.testing.assert_array_equal(again.counts_, model.counts_)
    assert {frozenset(words.tolist()) for words in model.top_words(WORDS // TOPICS)} == {
        frozenset(range(n, WORDS, TOPICS)) for n in range(TOPICS)
    }
    assert model.bound_ == pytest.approx(model.perplexity(X), rel=1e-4)


def test_the_components_are_those_of_data_in_memory(spark, ps):
    """`batch` has one result, whatever the partitions are."""
    plain = spark.createDataFrame(pd.DataFrame(X).add_prefix("word")).repartition(2)
    items = spark.sparkContext.parallelize([X[:20], scipy.sparse.csr_matrix(X[20:]), X[:0]], 3)
    with dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster:
        here = model_of(cluster, "batch").fit(X)
    for data in (vectors(spark, name="of.words"), plain, items, vectors(spark).repartition(9)):
        model = model_of(ps, "batch").fit(data)
        np.testing.assert_allclose(model.components_, here.components_, rtol=1e-4)
        assert hasattr(model, "feature_names_in_") == (data is plain)
    assert model.n_features_in_ == WORDS
    later = model_of(ps, "online").partial_fit(plain)
    assert later.partial_fit(plain).n_batch_iter_ > 2
    with pytest.raises(InputTypeError, match="mapInPandas"):
        later.transform(plain)
    with pytest.raises(InputTypeError, match="mapInPandas"):
        later.perplexity(plain)
    with pytest.raises(InputTypeError, match="mapInPandas"):
        model_of(ps).fit_transform(plain)


def test_a_server_beside_the_driver_is_started_for_a_fit(spark):
    model = LatentDirichletAllocation(TOPICS, max_iter=2, random_state=0).fit(vectors(spark))
    assert model.components_.shape == (TOPICS, WORDS)


def test_wrong_data(spark, ps):
    with pytest.raises(InputError, match="X has no documents"):
        model_of(ps).fit(vectors(spark).limit(0))
    with pytest.raises(InputError, match="X has no documents"):
        model_of(ps).fit(spark.sparkContext.parallelize([], 2))
    with pytest.raises(InputTypeError, match="blocks of counts"):
        model_of(ps).fit(spark.sparkContext.parallelize(["milk bread"], 1))
    with pytest.raises(InputTypeError, match=r"its column 'text' is no numbers; pyspark.ml's CountVectorizer"):
        model_of(ps).fit(spark.createDataFrame([(1, "milk bread")], ["number", "text"]))
    both = vectors(spark, name="counts").join(vectors(spark, name="weights"), "number")
    with pytest.raises(InputError, match="2 columns of vectors, counts, weights"):
        model_of(ps).fit(both)


def test_what_trainers_refuse_names_the_partition(spark, ps):
    wrong = X.astype(float)
    wrong[7, 2] = -1.0
    with pytest.raises(InputError, match=r"partition \d: Negative values in data passed to LatentDirichletAllocation"):
        model_of(ps).fit(vectors(spark, wrong))
    widths = spark.sparkContext.parallelize([X, X[:, 1:]], 2)
    with pytest.raises(InputError, match="X has 11 features, but LatentDirichletAllocation is expecting 12"):
        model_of(ps, "batch").fit(widths)
    with pytest.raises(InputError, match="documents of different widths: 11, 12"):
        model_of(ps, "batch").fit(spark.sparkContext.parallelize([X, X[:, 1:]], 1))
    assert not ps.tables()
