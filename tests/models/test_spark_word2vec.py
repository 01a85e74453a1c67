"""Vectors of words in Spark: the same as from lists in this process, and errors that name the column."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import sparks

import dps
import dps.graph
from dps.errors import InputError, InputTypeError
from dps.models import Node2Vec, Word2Vec
from dps.models.words import text

ps, spark = sparks.ps, sparks.spark
pytestmark = [
    pytest.mark.spark,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.leaks_ok("PySpark keeps threads, sockets and workers for its session; after the module all are gone."),
]
rng = np.random.default_rng(0)
GROUPS = np.array([[f"g{group}w{number}" for number in range(6)] for group in range(5)])
SENTENCES = [list(map(str, rng.choice(GROUPS[rng.integers(5)], 10))) for _ in range(600)]
SENTENCES[7] = []
SMALL = {"vector_size": 6, "batch_words": 700, "epochs": 2, "seed": 3, "progress": False}
TEXT = list(map(" ".join, SENTENCES))


@pytest.fixture
def one(ps, monkeypatch):
    """A parameter server whose runs have one trainer."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=1, **options))
    return ps


@pytest.fixture(scope="module")
def here():
    """The model of one trainer, from lists in this process."""
    with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
        yield Word2Vec(client=cluster, **SMALL).fit(SENTENCES)


def words_of(spark, sentences=SENTENCES, parts=3, name="some.words"):
    """A column of arrays of words, beside a number and another text."""
    rows = [(number, words, "a note") for number, words in enumerate(sentences)]
    data = spark.sparkContext.parallelize(rows, parts)
    return spark.createDataFrame(data, f"number int, `{name}` array<string>, note string")


def text_of(spark, text=TEXT, parts=3):
    """A column of text beside a number."""
    return spark.createDataFrame(
        spark.sparkContext.parallelize(list(enumerate(text)), parts), "number int, text string"
    )


def neighbours_of_the_same_group(wv):
    found = [(word, near) for word in wv.index_to_key for near, _ in wv.most_similar(word, topn=4)]
    return np.mean([word[:2] == near[:2] for word, near in found])


@pytest.mark.parametrize("source", [words_of, text_of, lambda spark: spark.sparkContext.parallelize(SENTENCES, 3)])
def test_one_trainer_makes_the_model_of_lists(spark, one, here, source):
    model = Word2Vec(client=one, **SMALL).fit(source(spark))
    assert model.wv.index_to_key == here.wv.index_to_key
    np.testing.assert_array_equal(model.counts_, here.counts_)
    np.testing.assert_allclose(model.wv.vectors, here.wv.vectors, atol=1e-6)
    np.testing.assert_allclose(model.loss_curve_, here.loss_curve_, rtol=1e-5)
    model.forget()
    assert not one.tables()


@pytest.mark.parametrize("source", [words_of, text_of])
def test_words_of_a_group_are_similar(spark, ps, source):
    """Two trainers and five partitions, of which one is empty."""
    frame = source(spark, parts=5).where("number < 480")
    model = Word2Vec(16, client=ps, sample=0, epochs=10, progress=False).fit(frame)
    assert model.counts_.sum() == sum(map(len, SENTENCES[:480]))
    model.partial_fit(source(spark), epochs=5)
    assert len(model.loss_curve_) == 15
    assert model.loss_curve_[10] < model.loss_curve_[0]  # it goes on with the vectors
    assert neighbours_of_the_same_group(model.wv) > 0.95
    with pytest.raises(InputError, match="has 0 rows"):
        model.partial_fit(source(spark).limit(0))
    model.forget()
    assert not ps.tables()


def test_walks_over_edges_of_a_frame(spark, ps):
    """Five cliques in a row: walks keep to edges, and vertices of a clique are similar."""
    pairs = [(10 * c + a, 10 * c + b) for c in range(5) for a in range(8) for b in range(a)]
    pairs += [(10 * c + 7, 10 * c + 10) for c in range(4)]
    frame = spark.createDataFrame(pairs, "source long, target long").repartition(3)
    there = {*pairs, *((b, a) for a, b in pairs)}
    with dps.graph.random_walks(ps, frame, walk_length=6, num_walks=4, seed=3) as walks:
        found = np.array(list(walks))
        assert {(a, b) for walk in found for a, b in itertools.pairwise(walk)} <= there
        assert np.bincount(found[:, 0]).tolist() == ([4] * 8 + [0] * 2) * 4 + [4] * 8
    model = Node2Vec(8, client=ps, walk_length=20, num_walks=20, window=5, epochs=5, progress=False).fit(frame)
    near = [
        (int(vertex), int(other))
        for vertex in model.wv.index_to_key
        for other, _ in model.wv.most_similar(vertex, topn=5)
    ]
    assert np.mean([a // 10 == b // 10 for a, b in near]) > 0.9
    model.forget()
    assert not ps.tables()


def test_the_first_partial_fit_counts_the_words(spark, ps):
    model = Word2Vec(client=ps, **SMALL).partial_fit(text_of(spark))
    assert model.counts_.sum() == sum(map(len, SENTENCES))
    assert len(model.loss_curve_) == 1
    model.forget()


def test_a_server_beside_the_driver_is_started_for_a_fit(spark):
    model = Word2Vec(client=spark, **SMALL).fit(words_of(spark))
    assert model.wv.vectors.shape == (30, 6)


@pytest.mark.parametrize(
    ("rows", "schema", "error", "message"),
    [
        ([(1, 2.5)], "number int, weight double", InputTypeError, r"columns are number \(int\), weight \(double\)"),
        ([([1],)], "codes array<int>", InputTypeError, r"columns are codes \(array<int>\); pyspark.ml's Tokenizer"),
        (
            [("a", "b")],
            "title string, text string",
            InputError,
            r"2 columns of strings, title, text: .*select\('title'",
        ),
        ([(["a"], ["b"])], "x array<string>, y array<string>", InputError, "2 columns of arrays of strings, x, y"),
        ([], "text string", InputError, "column 'text' has 0 rows"),
        (
            [("a b",), (None,)],
            "text string",
            InputError,
            r"partition \d: column 'text' has no sentence \(null\) in 1 r",
        ),
        ([(None,)], "w array<string>", InputError, r"column 'w' has no sentence \(null\) in 1 rows; .*dropna"),
        ([(["a", None],)], "w array<string>", InputError, r"1 words of column 'w' are null; leave .*array_compact"),
        ([("  ",), ("",)], "text string", InputError, "0 words in column 'text'"),
        ([("a b",)], "text string", InputError, "min_count=5 removes all 2 words of column 'text'"),
    ],
)
def test_wrong_frames(spark, ps, rows, schema, error, message):
    with pytest.raises(error, match=message):
        Word2Vec(client=ps, **SMALL).fit(spark.createDataFrame(rows, schema))
    assert not ps.tables()


def test_wrong_rdds(spark, ps):
    context = spark.sparkContext
    with pytest.raises(InputTypeError, match="'cat dog' is text: call its split"):
        Word2Vec(client=ps, **SMALL).fit(context.parallelize(["cat dog"], 1))
    with pytest.raises(InputTypeError, match="words are str, and 1 is a int"):
        Word2Vec(client=ps, **SMALL).fit(context.parallelize([["a"], [1]], 2))
    with pytest.raises(InputError, match="0 items"):
        Word2Vec(client=ps, **SMALL).fit(context.emptyRDD())
    with pytest.raises(InputTypeError, match="DataFrame or an RDD, not a SparkSession"):
        Word2Vec(client=ps, **SMALL).fit(spark)
    with pytest.raises(InputTypeError, match="with a Spark session, X is"):
        Word2Vec(client=spark, **SMALL).fit(SENTENCES)


def test_a_partition_is_numbers_as_soon_as_it_is_read():
    """A trainer holds its text as numbers, and no list of words in Python."""
    import pyarrow as pa

    batches = [pa.RecordBatch.from_pydict({"w": [["a", "b"], []]}), pa.RecordBatch.from_pydict({"w": [["b"]]})]
    partition = text._of_arrow(0, batches, "w", False)
    assert partition.words == ["a", "b"]
    assert (partition.numbers.tolist(), partition.lengths.tolist()) == ([0, 1, 1], [2, 0, 1])
    assert partition.counts() == {"a": 1, "b": 2}
