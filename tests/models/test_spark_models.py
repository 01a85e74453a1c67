"""LogisticRegression on Spark's data, and as a stage of Spark's pipelines: beside the Dask run and MLlib."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
import sparks
from dask.distributed import Client
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml import classification as mllib
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import StringIndexer, VectorAssembler
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from servers import wait_until
from sklearn import cluster

import dps
from dps.errors import ClockTimeoutError, InputError, InputTypeError, StoppedError, TrainerLostError
from dps.models import KMeans, LogisticRegression
from dps.models.inputs import pieces as pieces_module
from dps.models.inputs.features import piece_of, spark_parts, summary
from dps.models.inputs.source import block_of
from dps.models.spark import SparkLogisticRegression, SparkLogisticRegressionModel

ps, spark = sparks.ps, sparks.spark
ROWS, WIDTH = 400, 6


def on_spark(test):
    """A test that needs a session. PySpark keeps threads, sockets and workers for it; after the module all are gone."""
    marks = [pytest.mark.spark, pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.leaks_ok(on_spark.__doc__)]
    for mark in marks:
        test = mark(test)
    return test


def gaussian(classes=2, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    margins = X @ rng.normal(size=(WIDTH, classes)) + rng.gumbel(size=(ROWS, classes)) * 0.7
    return np.where(np.abs(X) > 0.3, X, 0), margins.argmax(axis=1)


X, Y = gaussian()


# -- without Spark: blocks and pieces


def arrow(vectors):
    """Spark's vectors as it hands them over."""
    rows = [(None,) * 4 if vector is None else VectorUDT().serialize(vector) for vector in vectors]
    columns = zip(*rows, strict=True)
    kinds = (pa.int8(), pa.int32(), pa.list_(pa.int32()), pa.list_(pa.float64()))
    return [pa.array(list(column), kind) for column, kind in zip(columns, kinds, strict=True)]


def sparse_vectors(X):
    return [Vectors.sparse(len(x), np.flatnonzero(x), x[x != 0]) for x in X]


def test_vectors_dense_sparse_and_both_in_one_block():
    dense, sparse = list(map(Vectors.dense, X[:8])), sparse_vectors(X[:8])
    block = block_of(*arrow(dense))
    assert isinstance(block, np.ndarray)
    np.testing.assert_array_equal(block, X[:8])
    for vectors in (sparse, [*dense[:3], *sparse[3:]], [*sparse[:5], *dense[5:]]):
        block = block_of(*arrow(vectors))
        assert scipy.sparse.issparse(block)
        assert block.dtype == np.float32
        assert block.nnz == np.count_nonzero(X[:8])
        np.testing.assert_array_equal(block.toarray(), X[:8])
        later = scipy.sparse.csr_array(block_of(*(column.slice(2, 3) for column in arrow(vectors))))
        np.testing.assert_array_equal(later.toarray(), X[2:5])


def test_vectors_that_are_refused():
    with pytest.raises(InputError, match="1 rows have no features"):
        block_of(*arrow([Vectors.dense([1.0]), None]))
    with pytest.raises(InputError, match="different widths: 2, 3"):
        block_of(*arrow([Vectors.dense([1.0, 2.0]), Vectors.sparse(3, [0], [1.0])]))


class Items:
    """What stands for an RDD, of which only the items are read."""


def piece_of_items(items):
    """What a trainer gets of a partition of an RDD."""
    check = functools.partial(piece_of, layout=None, bits=20, seed=None)
    return spark_parts((Items(), None, None), True).reader(check)(0, iter(items))


def test_blocks_of_a_partition_are_one_piece():
    blocks = [(scipy.sparse.csr_matrix(X[:3]), Y[:3]), (X[3:3], Y[3:3]), (X[3:10], Y[3:10])]
    block, y, layout, weights, _ = piece_of_items(blocks)
    np.testing.assert_array_equal(block.toarray(), X[:10])
    np.testing.assert_array_equal(y, Y[:10])
    assert layout.features == WIDTH
    assert weights is None
    assert piece_of_items(blocks[1:2]) is None


def test_what_is_wrong_with_the_data_is_no_failure_to_read_it():
    for record, message in (
        ((Vectors.dense([1.0]), 1.0), "items of an RDD are pairs"),
        ((X[:3], Y[:2]), r"shape \(3, 6\) and labels y of shape \(2,\)"),
    ):
        outcome = piece_of_items([record])
        with pytest.raises((InputError, InputTypeError), match=message):
            pieces_module._surveyed(None, [outcome], None, None)


@pytest.fixture
def little():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, dps.ParameterServer(cluster, servers=1) as ps:
        yield ps


def meet(ps, pieces, plan, function=lambda trainer, pieces, plan: plan, retries=0):
    """As SparkPieces.train, with trainers of Dask: (what each trained with, or the error; the driver's error)."""
    data = [dask.delayed(piece) for piece in pieces]
    with ThreadPoolExecutor(1) as threads:
        try:
            with ps.open_run(trainers=2) as meeting:
                planned = threads.submit(pieces_module._planned, ps, meeting, plan)
                outcome = ps.run(pieces_module._surveyed, data, args=(meeting, function), retries=retries)
        except dps.DPSError as error:
            outcome = error
        return outcome, planned.exception(60)


@pytest.mark.thorough
def test_the_driver_plans_by_what_all_trainers_have_seen(little):
    piece = piece_of(0, (X[:3], np.array([1, 2, 1])), None, 20, None)
    other = piece_of(1, (X[:4], np.array([7, 7, 7, 2])), None, 20, None)
    seen = []

    def plan(surveys):
        seen.append(summary(surveys()))
        return "b" * seen[0].rows

    little.table("collects", rows=1, aggregate="sum")
    assert meet(little, [piece, other], plan) == (["bbbbbbb"] * 2, None)
    assert (seen[0].labels.tolist(), seen[0].rows, seen[0].layout.features) == ([1, 2, 7], 7, WIDTH)
    assert meet(little, [None, piece], lambda surveys: len(surveys())) == ([1, 1], None)
    outcome, error = meet(little, [None, None], plan)
    assert isinstance(outcome, StoppedError)
    assert "0 rows" in str(error)
    outcome, error = meet(little, [InputError("a bad row"), piece], plan)
    assert "a bad row" in str(outcome)
    assert isinstance(error, StoppedError)


def test_who_comes_again_is_told_what_it_was_told(little):
    def fail_once(trainer, pieces, plan):
        if trainer.attempt == 0:
            pieces[0][1][:] = 7  # what it reads again has other labels
            raise ValueError("again, please")
        return trainer.attempt, plan

    piece, planned = piece_of(0, (X[:3], np.array([1, 2, 1])), None, 20, None), []

    def plan(surveys):
        planned.append(len(surveys()))
        return "plan"

    assert meet(little, [piece, piece], plan, fail_once, retries=1) == ([(1, "plan")] * 2, None)
    assert planned == [2]


@pytest.mark.thorough
def test_nobody_waits_in_vain_for_spark_to_read(monkeypatch):
    """Waits that were too long for the controller begin again: of trainers for each other, and for the driver."""
    allgather, late = dps.Trainer.allgather, Counter()

    def watched(trainer, content):
        try:
            return allgather(trainer, content)
        except ClockTimeoutError:
            late[trainer.run] += 1
            raise

    monkeypatch.setattr(dps.Trainer, "allgather", watched)
    with (
        dask.config.set({"dps.timeouts.clock": "200 ms"}),
        dps.LocalCluster(servers=1, trainers=0, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=1) as ps,
        ps.open_run(trainers=2) as meeting,
        ps.open_run(trainers=3) as run,
        ThreadPoolExecutor(4) as threads,
    ):

        def plan(surveys):
            before = late[meeting.number]
            wait_until(lambda: late[meeting.number] > before + 1, 30)
            return summary(surveys()).rows

        def surveyed(rows):
            with run.trainer() as me:
                pieces = [piece_of(0, (X[:rows], Y[:rows]), None, 20, None)]
                return pieces_module._surveyed(me, pieces, meeting, lambda trainer, pieces, plan: plan)

        planned = threads.submit(pieces_module._planned, ps, meeting, plan)
        outcome = [threads.submit(surveyed, rows) for rows in (3, 4)]
        wait_until(lambda: late[run.number] > 3, 30)
        outcome.append(threads.submit(surveyed, 5))
        assert [each.result(60) for each in outcome] == [12] * 3
        assert planned.exception(60) is None


def test_a_driver_that_cannot_come_stops_the_trainers(little, monkeypatch):
    def broken(ps, meeting):
        raise OSError("no scheduler")

    monkeypatch.setattr(pieces_module, "_begun", broken)
    outcome, error = meet(little, [piece_of(0, (X[:3], Y[:3]), None, 20, None)], None)
    assert isinstance(outcome, StoppedError)
    assert isinstance(error, OSError)


def test_the_driver_waits_for_its_own_run(little):
    with little.open_run(trainers=2) as meeting, little.open_run(trainers=1) as other, other.trainer():
        assert not pieces_module._begun(little, meeting)
        with meeting.trainer():
            assert pieces_module._begun(little, meeting)


@pytest.mark.parametrize("kind", [StoppedError, TrainerLostError])
def test_what_ends_the_meeting_too_is_told_by_the_run(monkeypatch, kind):
    """A trainer that is lost is missed by both runs."""

    class Server:
        @contextlib.contextmanager
        def open_run(self, trainers):
            yield None

        def run(self, *args, **options):
            raise TrainerLostError("by the run")

    def planned(*args):
        raise kind("by the meeting")

    monkeypatch.setattr(pieces_module, "_planned", planned)
    pieces = object.__new__(pieces_module.SparkPieces)
    pieces._ps, pieces.data = Server(), None
    with pytest.raises(TrainerLostError, match="by the run"):
        pieces.train(None, None, staleness=0, progress=None)


def test_a_driver_whose_run_never_begins_plans_nothing(little):
    with ThreadPoolExecutor(1) as threads:
        with little.open_run(trainers=2) as meeting:
            planned = threads.submit(pieces_module._planned, little, meeting, None)
        assert isinstance(planned.exception(30), StoppedError)


# -- on Spark


@pytest.fixture(scope="module")
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


def halves(spark, vectors, labels):
    """A DataFrame whose first partition holds the first half."""
    rows = [(vector, float(y)) for vector, y in zip(vectors, labels, strict=True)]
    return spark.sparkContext.parallelize(rows, 2).toDF(["features", "label"])


STEADY = {"aggregate": True, "batch_size": 50, "epochs": 3}


@on_spark
@pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.slow), "sparse", "three classes"])
def test_the_same_numbers_as_on_dask(spark, ps, client, kind):
    rows, y = gaussian(3) if kind == "three classes" else (X, Y)
    vectors = sparse_vectors(rows) if kind == "sparse" else map(Vectors.dense, rows)
    ours = LogisticRegression(client=ps, **STEADY).fit(halves(spark, vectors, y))
    blocks = scipy.sparse.csr_matrix(rows) if kind == "sparse" else rows
    pairs = client.scatter([(blocks[: ROWS // 2], y[: ROWS // 2]), (blocks[ROWS // 2 :], y[ROWS // 2 :])])
    theirs = LogisticRegression(client=client, **STEADY).fit(pairs)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.loss_curve_, theirs.loss_curve_, rtol=1e-5)


@on_spark
@pytest.mark.slow
def test_close_to_mllib_at_the_same_objective(spark, ps):
    frame = halves(spark, map(Vectors.dense, X), Y)
    theirs = mllib.LogisticRegression(regParam=0.1, standardization=False, tol=1e-10, maxIter=100).fit(frame)
    whole = {"aggregate": True, "batchSize": ROWS // 2, "maxIter": 120}  # all rows in a step: gradient descent
    ours = SparkLogisticRegression(ps=ps, solver="sgd", stepSize=0.8, regParam=0.1, **whole).fit(frame)
    np.testing.assert_allclose(ours.coefficients.toArray(), theirs.coefficients.toArray(), atol=1e-3)
    assert ours.intercept == pytest.approx(theirs.intercept, abs=1e-3)
    columns = ("rawPrediction", "probability", "prediction")
    for mine, other in zip(ours.transform(frame).collect(), theirs.transform(frame).collect(), strict=True):
        for name in columns[:2]:
            np.testing.assert_allclose(mine[name].toArray(), other[name].toArray(), atol=5e-3)
        assert mine["prediction"] == other["prediction"] or abs(other["rawPrediction"][0]) < 5e-3
    theirs = theirs.transform(frame).schema[-3:]
    assert [(f.name, f.dataType) for f in ours.transform(frame).schema[-3:]] == [(f.name, f.dataType) for f in theirs]


@on_spark
def test_raw_columns_are_hashed_as_those_of_other_frames(spark, ps, client):
    rng = np.random.default_rng(0)
    sites, hits = rng.choice(list("abcdef"), ROWS), rng.integers(9, size=ROWS)
    frame = pd.DataFrame({"site": sites, "visit": rng.random(ROWS), "hits": hits})
    frame["y"] = np.where((frame["site"] < "d") | (frame["hits"] > 5), "click", "no")
    frame["weight"] = rng.integers(1, 4, size=ROWS)
    rows = [tuple(row) for row in frame.astype(object).itertuples(index=False)]
    table = spark.sparkContext.parallelize(rows, 2).toDF("site string, visit double, hits long, y string, weight int")
    ours = LogisticRegression(client=ps, hash_bits=10, **STEADY).fit(table, "y", "weight")
    lazy = dd.from_pandas(frame, 2)
    theirs = LogisticRegression(client=client, hash_bits=10, **STEADY).fit(lazy, "y", "weight")
    with pytest.raises(InputError, match="no column 'heft' of weights among site, visit"):
        LogisticRegression(client=ps).fit(table, "y", "heft")
    assert ours.classes_.tolist() == ["click", "no"]
    assert ours.feature_names_in_.tolist() == ["site", "visit", "hits"]
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)
    assert ours.score(frame[["site", "visit", "hits"]], frame["y"]) > 0.7
    words = ps.vocabulary("features")
    ours = LogisticRegression(client=ps, hash_bits=10, vocabulary=words, **STEADY).fit(table, "y", "weight")
    theirs = LogisticRegression(client=client, hash_bits=10, vocabulary=words, **STEADY).fit(lazy, "y", "weight")
    assert len(words) == 10, "six sites, two numbers, and their being missing"
    np.testing.assert_allclose(ours.coef_, theirs.coef_, rtol=1e-5, atol=1e-6)


@on_spark
def test_a_stage_with_weights_that_ends_early(spark, ps):
    rows = [(Vectors.dense(x), float(y), 1.0 + n % 3) for n, (x, y) in enumerate(zip(X, Y, strict=True))]
    frame = spark.sparkContext.parallelize(rows, 2).toDF(["features", "label", "heft"])
    steady = {"aggregate": True, "batchSize": 50, "maxIter": 40, "tol": 0.01}
    ours = SparkLogisticRegression(ps=ps, weightCol="heft", **steady).fit(frame)
    theirs = LogisticRegression(client=ps, **{**STEADY, "epochs": 40}, tol=0.01).fit(frame, "label", "heft")
    assert theirs.n_iter_ < 40
    np.testing.assert_allclose(ours.coefficients.toArray(), theirs.coef_[0], rtol=1e-6)


@pytest.mark.slow
@on_spark
def test_servers_for_one_fit_and_more_partitions_than_slots(spark):
    blocks = [(scipy.sparse.csr_matrix(X[n::5]), Y[n::5]) for n in range(5)]
    model = LogisticRegression(epochs=10).fit(spark.sparkContext.parallelize(blocks, 7))
    assert model.score(X, Y) > 0.8
    assert model.loss_curve_[-1] < model.loss_curve_[0]
    with pytest.raises(InputTypeError, match=r"X\.mapInPandas"):
        model.predict(spark.range(3))
    with pytest.raises(InputTypeError, match="with a Spark session, X is an RDD or a DataFrame of Spark, not ndarray"):
        LogisticRegression(client=spark).fit(X, Y)


@pytest.mark.slow
@on_spark
def test_partial_fit_goes_on(spark, ps):
    frame = halves(spark, map(Vectors.dense, X), Y)
    model = LogisticRegression(client=ps, aggregate=True, batch_size=50)
    model.partial_fit(frame).partial_fit(frame)
    assert len(model.loss_curve_) == 2
    with pytest.raises(InputError, match="expecting 6 features"):
        model.partial_fit(halves(spark, map(Vectors.dense, X[:, :3]), Y))
    model.close()


@pytest.mark.slow
@on_spark
def test_a_pipeline_is_trained_judged_saved_and_loaded(spark, ps, tmp_path):
    rng = np.random.default_rng(0)
    sites, words = rng.choice(["x.org", "y.org", "z.org"], ROWS), np.where(Y, "click", "no")
    rows = [(*map(float, x), str(site), str(word)) for x, site, word in zip(X, sites, words, strict=True)]
    names = [f"x{n}" for n in range(WIDTH)]
    table = spark.createDataFrame(rows, [*names, "site", "word"]).coalesce(2)
    estimator = SparkLogisticRegression(
        ps=ps, labelCol="target", predictionCol="guess", rawPredictionCol="", maxIter=3, stepSize=0.3, wire="auto"
    )
    pipeline = Pipeline(
        stages=[
            StringIndexer(
                inputCols=["word", "site"], outputCols=["target", "siteIndex"], stringOrderType="alphabetAsc"
            ),
            VectorAssembler(inputCols=[*names, "siteIndex"], outputCol="features"),
            estimator,
        ]
    )
    before = ps.tables().keys()
    model = pipeline.fit(table)
    done = model.transform(table)
    assert done.columns == [*table.columns, "target", "siteIndex", "features", "probability", "guess"]
    assert done.where("target = guess").count() > 0.8 * ROWS
    assert model.stages[-1].numFeatures == WIDTH + 1
    assert ps.tables().keys() <= before  # the model holds its weights itself
    model.write().overwrite().save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    assert again.stages[-1].uid == model.stages[-1].uid
    pd.testing.assert_frame_equal(
        again.transform(table).select("probability", "guess").toPandas(),
        done.select("probability", "guess").toPandas(),
    )
    pipeline.save(str(tmp_path / "pipeline"))
    unfitted = Pipeline.load(str(tmp_path / "pipeline")).getStages()[-1]
    assert (unfitted.uid, unfitted.getPredictionCol(), unfitted.getMaxIter()) == (estimator.uid, "guess", 3)
    assert unfitted.getOrDefault("wire") == "auto"
    with pytest.raises(InputError, match=r"wire is 'auto', 'lists' or"):
        unfitted.setParams(wire="halves").fit(done)


@pytest.mark.slow
@on_spark
def test_cross_validation_chooses(spark, ps):
    frame = halves(spark, map(Vectors.dense, X), Y).cache()
    estimator = SparkLogisticRegression(ps=ps, maxIter=1)
    grid = ParamGridBuilder().addGrid(estimator.regParam, [0.0, 100.0]).build()
    search = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=BinaryClassificationEvaluator(), numFolds=2, seed=1
    )
    outcome = search.fit(frame)
    frame.unpersist()
    assert isinstance(outcome.bestModel, SparkLogisticRegressionModel)
    assert outcome.avgMetrics[0] > 0.8
    assert len(outcome.avgMetrics) == 2


@on_spark
@pytest.mark.parametrize(
    ("make", "label", "message"),
    [
        (lambda frame: frame, "clicked", "no column 'clicked' of labels among features, label"),
        (lambda frame: frame.selectExpr("features as a", "features as b", "label"), None, "2 columns of vectors, a, b"),
        (lambda frame: frame.selectExpr("features", "if(label = 0, null, label) as label"), None, "NaN"),
        (lambda frame: frame.where("label = 1"), None, "1 class"),
        (lambda frame: frame.where("label = 2"), None, "0 rows"),
        (lambda frame: frame.rdd, "label", "with an RDD, y and sample_weight are None"),
    ],
)
def test_what_is_refused(spark, ps, make, label, message):
    frame, before = halves(spark, map(Vectors.dense, X[:20]), Y[:20]), ps.tables().keys()
    with pytest.raises((InputError, InputTypeError), match=message):
        LogisticRegression(client=ps).fit(make(frame), label)
    assert ps.tables().keys() == before


@pytest.mark.slow
@on_spark
def test_columns_that_a_pipeline_cannot_take(spark, ps):
    frame, before = halves(spark, map(Vectors.dense, X[:20]), 2 * Y[:20] - 1), ps.tables().keys()
    with pytest.raises(InputError, match="column 'label' is of DoubleType, not of vectors"):
        SparkLogisticRegression(ps=ps, featuresCol="label").fit(frame)
    with pytest.raises(InputError, match=r"labels are 0, 1, \.\.\., as StringIndexer makes them; not -1"):
        SparkLogisticRegression(ps=ps).fit(frame)
    assert ps.tables().keys() == before


@pytest.mark.slow
@on_spark
def test_labels_that_were_not_seen(spark, ps):
    rows, y = gaussian(3)
    frame = halves(spark, sparse_vectors(rows), np.array([0, 1, 4])[y])
    model = SparkLogisticRegression(ps=ps, batchSize=20).fit(frame)
    assert (model.numClasses, model.numFeatures) == (5, WIDTH)
    assert model.coefficientMatrix.toArray().shape == (3, WIDTH)
    assert model.interceptVector.size == 3
    with pytest.raises(InputError, match="3 classes"):
        _ = model.coefficients
    done = model.transform(frame).select("label", "prediction", "probability", "rawPrediction").collect()
    assert np.mean([row["label"] == row["prediction"] for row in done]) > 0.7
    for row in done[:5]:
        probability = row["probability"].toArray()
        assert probability[[2, 3]].tolist() == [0, 0]
        assert probability.sum() == pytest.approx(1)
        assert row["rawPrediction"].toArray()[[2, 3]].tolist() == [-np.inf, -np.inf]


def test_parameters_are_those_of_spark(tmp_path):
    estimator = SparkLogisticRegression(maxIter=3, stepSize=None).setParams(staleness=2)
    assert estimator.getMaxIter() == 3
    assert not estimator.isDefined(estimator.stepSize)
    other = estimator.copy({estimator.maxIter: 7})
    assert (other.getMaxIter(), other.getOrDefault("staleness"), estimator.getMaxIter()) == (7, 2, 3)
    with pytest.raises(TypeError, match="maxIter"):
        SparkLogisticRegression(maxIter="many")


@on_spark
def test_clusters_beside_scikit_learn(spark, ps):
    settings = {"n_clusters": 4, "init": X[:4], "tol": 0, "client": ps}
    expected = cluster.KMeans(4, init=X[:4], n_init=1, tol=0).fit(X.astype(float), None, Y + 1.0)
    vectors = halves(spark, sparse_vectors(X), Y + 1).repartition(3)
    plain = spark.createDataFrame(pd.DataFrame(X).add_prefix("x").assign(label=Y + 1.0))
    items = spark.sparkContext.parallelize([(X[:150], None, Y[:150] + 1), (X[150:], None, Y[150:] + 1)], 3)
    for data, weights in ((vectors, "label"), (plain, "label"), (items, None)):
        model = KMeans(**settings).fit(data, sample_weight=weights)
        np.testing.assert_allclose(model.cluster_centers_, expected.cluster_centers_, atol=1e-5)
        assert not hasattr(model, "labels_")
    drawn = KMeans(n_clusters=4, client=ps, batch_size=50, random_state=0).fit(vectors.drop("label"))
    assert -drawn.score(X) == pytest.approx(drawn.inertia_)
    with pytest.raises(InputError, match="should be >= n_clusters=500"):
        KMeans(n_clusters=500, client=ps).fit(items)
