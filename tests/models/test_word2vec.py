"""word2vec beside a textbook program, finite differences and gensim; planted words; files; failures."""

from __future__ import annotations

import gc
import pickle
from types import SimpleNamespace

import dask.bag
import numpy as np
import pytest
from dask.distributed import Client
from servers import wait_until
from sklearn.base import clone
from sklearn.exceptions import NotFittedError

import dps
from dps.errors import InputError, InputTypeError, UnknownWordError
from dps.models import Word2Vec, WordVectors
from dps.models.words import training, word2vec
from dps.models.words.text import batches_of, vocabulary_of

rng = np.random.default_rng(0)
GROUPS = np.array([[f"g{group}w{number}" for number in range(6)] for group in range(5)])
SENTENCES = [list(map(str, rng.choice(GROUPS[rng.integers(5)], 10))) for _ in range(600)]
SMALL = {"vector_size": 6, "batch_words": 700, "epochs": 2, "seed": 3, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2, copies=2) as ps:
        yield ps
        assert not ps.tables(), "fits leave no tables"


@pytest.fixture
def one(ps, monkeypatch):
    """A parameter server whose runs have one trainer."""
    run = ps.run
    monkeypatch.setattr(ps, "run", lambda *args, **options: run(*args, trainers=1, **options))
    return ps


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def textbook(
    inside, outside, words, counts, batches, sg, many, alpha=0.025, last=0.0001, window=5, k=5, epochs=2, seed=3,
    step=16,
):  # fmt: skip
    """Pair after pair, in float64; a step for each `step` places, from the rows of before it."""
    noise, keep = dps.sampling.unigram_table(counts), dps.sampling.subsample(counts)
    clock = 0
    for epoch in range(epochs):
        for b in np.random.default_rng((seed, epoch)).permutation(len(batches)):
            rate = alpha - (alpha - last) * clock / (epochs * len(batches))
            draw = dps.sampling.generator(SimpleNamespace(number=0, clock=clock), seed)
            clock += 1
            w, s = batches[b]
            kept = draw.random(len(w)) < keep[w]
            w, s = w[kept], s[kept]
            reach = draw.integers(1, window + 1, len(w))
            drawn = noise.draw(max(many, len(w)), draw)
            pools = drawn[draw.integers(0, len(drawn), (-(-len(w) // step), many))]
            for number, pool in enumerate(pools):
                g_in, g_out = np.zeros_like(inside), np.zeros_like(outside)
                c_in, c_out = np.full(len(inside), 1e-30), np.full(len(outside), 1e-30)
                for i in range(step * number, min(len(w), step * number + step)):
                    around = [j for j in range(i - reach[i], i + reach[i] + 1) if 0 <= j < len(w) and j != i]
                    around = [w[j] for j in around if s[j] == s[i]]
                    for source, target in [([w[i]], v) for v in around] if sg else [(around, w[i])] * bool(around):
                        h = inside[source].mean(axis=0)
                        for v, label, weight in [(target, 1, 1), *((n, 0, k / many) for n in pool)]:
                            error = weight * (sigmoid(h @ outside[v]) - label)
                            bent = weight * (h @ h + outside[v] @ outside[v]) / 4 + abs(error)
                            g_out[v] += error * h
                            c_out[v] += bent
                            for u in source:
                                g_in[u] += error * outside[v] / len(source)
                                c_in[u] += bent / len(source)
                inside = inside - np.minimum(rate, 1 / c_in)[:, None] * g_in
                outside = outside - np.minimum(rate, 1 / c_out)[:, None] * g_out
    return inside, outside


@pytest.mark.parametrize(
    ("sg", "window", "long", "step", "pool"),
    [(1, 5, False, 16, 64), (0, 5, False, 16, 64), (1, 5, True, 16, 32), (1, 12, True, 6, 77), (0, 12, True, 16, 32)],
)
def test_one_trainer_is_the_textbook_program(one, sg, window, long, step, pool, monkeypatch):
    if long:
        monkeypatch.setattr(training, "SHORT_BATCH", 700)
    sentences = SENTENCES[:120]
    model = Word2Vec(client=one, sg=sg, window=window, **SMALL).fit(sentences)
    one.table("first", 6, rows=len(model.wv), init=dps.Uniform(-0.5 / 6, 0.5 / 6, seed=3))
    begin = one.client().pull("first").astype(float)
    one.drop_table("first")
    words = model.wv.index_to_key
    batches = batches_of([sentences[n : n + 2] for n in range(0, 120, 2)], words, 700)
    expected = textbook(begin, np.zeros_like(begin), words, model.counts_, batches, sg, pool, window=window, step=step)
    outside = model._learnt.outside.find(np.arange(len(words)))[0]
    model_vectors = model.wv.vectors
    model.forget()
    np.testing.assert_allclose(model_vectors, expected[0], atol=2e-6)
    np.testing.assert_allclose(outside, expected[1], atol=2e-6)


def neighbours_of_the_same_group(wv):
    found = [(word, near) for word in wv.index_to_key for near, _ in wv.most_similar(word, topn=4)]
    return np.mean([word[:2] == near[:2] for word, near in found])


@pytest.mark.parametrize("sg", [1, 0])
def test_words_of_a_group_are_similar(client, sg):
    model = Word2Vec(16, client=client, sg=sg, sample=0, epochs=15, progress=False).fit(SENTENCES)
    assert neighbours_of_the_same_group(model.wv) > 0.95
    assert len(model.loss_curve_) == 15
    assert model.loss_curve_[-1] < 0.9 * model.loss_curve_[0]
    assert clone(model).client is client


def test_bags_and_files(client, tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(map(" ".join, SENTENCES[:300])))
    (tmp_path / "b.txt").write_text("\n".join(map(" ".join, SENTENCES[300:])))
    expected = vocabulary_of([dict(zip(*np.unique(SENTENCES, return_counts=True), strict=True))], 1)
    for data in (tmp_path / "*.txt", dask.bag.from_sequence(SENTENCES, npartitions=3)):
        model = Word2Vec(client=client, **SMALL).fit(data)
        assert model.wv.index_to_key == expected.words
        np.testing.assert_array_equal(model.counts_, expected.counts)


def test_vectors_stay_on_your_servers_and_go_on(ps):
    model = Word2Vec(client=ps, **SMALL).fit(SENTENCES)
    copy = pickle.loads(pickle.dumps(model))
    home = WordVectors(model.wv.index_to_key, model.wv.vectors)
    for wv in (copy.wv, home):
        assert dict(wv.most_similar("g1w1")) == pytest.approx(dict(model.wv.most_similar("g1w1")), abs=1e-6)
    before = model.loss_curve_[-1]
    model.partial_fit([*SENTENCES, ["unseen", "g1w1"]], epochs=10)
    assert model.loss_curve_[-1] < before
    assert len(model.loss_curve_) == 12
    assert "unseen" not in model.wv
    model.forget()
    with pytest.raises(NotFittedError):
        model._fitted()


class DyingTrainer:
    """Passes calls on to a trainer; at its third clock, the first attempt dies before it changes rows."""

    def __init__(self, trainer):
        self.trainer = trainer

    def __getattr__(self, name):
        if name == "rows" and self.trainer.attempt == 0 and self.trainer.clock == 2:
            raise OSError("lost")
        return getattr(self.trainer, name)


def with_a_death(trainer, *arguments):
    return training.train_words(DyingTrainer(trainer), *arguments)


def test_a_trainer_that_is_run_again_gives_the_same_model(one, monkeypatch):
    run = one.run
    monkeypatch.setattr(one, "run", lambda *args, **options: run(*args, retries=1, **options))
    vectors = []
    for function in (training.train_words, with_a_death):
        monkeypatch.setattr(word2vec, "train_words", function)
        model = Word2Vec(client=one, **SMALL).fit(SENTENCES)
        vectors.append(model.wv.vectors)
        model.forget()
    np.testing.assert_array_equal(*vectors)


@pytest.mark.parametrize("binary", [False, True])
def test_files_are_those_of_gensim(tmp_path, binary):
    wv = WordVectors(["a", "größe", "c"], rng.normal(size=(3, 4)).astype(np.float32))
    wv.save_word2vec_format(tmp_path / "ours", binary)
    again = WordVectors.load_word2vec_format(tmp_path / "ours", binary)
    assert again.index_to_key == wv.index_to_key
    np.testing.assert_array_equal(again.vectors, wv.vectors)
    models = pytest.importorskip("gensim.models")
    theirs = models.KeyedVectors.load_word2vec_format(tmp_path / "ours", binary=binary)
    theirs.save_word2vec_format(tmp_path / "theirs", binary=binary)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    found, expected = wv.most_similar(["a"], ["c"]), theirs.most_similar(["a"], ["c"])
    assert dict(found) == pytest.approx(dict(expected), abs=1e-6)


def test_bad_input(ps):
    def fit(sentences, **settings):
        Word2Vec(client=ps, progress=False, **settings).fit(sentences)

    for sentences in ([], [[]], [["a"] * 9], [["a", "b"]]):
        with pytest.raises(InputError, match=r"0 sentences|0 words|only word|removes all"):
            fit(sentences)
    for wrong in (["some text"], [[1, 2]], [7]):
        with pytest.raises(InputTypeError, match=r"split\(\)|words are str|list of words"):
            fit(wrong)
    for name, value in {"vector_size": 0, "window": 1.5, "alpha": -1, "sg": 2, "seed": -1, "negative": 0}.items():
        with pytest.raises(InputError, match=name):
            fit(SENTENCES, **{name: value})


def test_unknown_words_and_broken_files(tmp_path):
    wv = WordVectors(["a", "b"], np.eye(2, dtype=np.float32))
    for ask in (lambda: wv["x"], lambda: wv.similarity("a", "x"), lambda: wv.most_similar("x")):
        with pytest.raises(UnknownWordError, match="'x' has no vector"):
            ask()
    with pytest.raises(InputError, match="needs a word"):
        wv.most_similar()
    for number, (raw, binary) in enumerate([(b"nothing", False), (b"1 3\na 1 2\n", False), (b"1 3\na 1234", True)]):
        (tmp_path / str(number)).write_bytes(raw)
        with pytest.raises(InputError, match=r"first line|ends early"):
            WordVectors.load_word2vec_format(tmp_path / str(number), binary)


def test_the_words_of_a_vocabulary_are_learnt_without_another_count():
    sentences = [["a", "b", "c", "b"]] * 20 + [["rare", "a"]]
    with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        words = ps.vocabulary("words", counts=True)
        for sentence in sentences:
            words.count(sentence)
        options = {"client": ps, "epochs": 2, "min_count": 2, "seed": 3}
        model = Word2Vec(4, vocabulary=words, **options).fit(sentences)
        other = Word2Vec(4, **options).fit(sentences)
        assert model.wv.index_to_key == other.wv.index_to_key == ["b", "a", "c"]
        assert model.counts_.tolist() == [40, 21, 20]
        assert np.array_equal(model.wv["a"], other.wv["a"])
        assert len(ps.status().runs) == 3, "one run less"
        with pytest.raises(InputError, match="counts=True"):
            Word2Vec(4, vocabulary=ps.vocabulary("uncounted"), **options).fit(sentences)
        named = Word2Vec(4, vocabulary="words", **options).fit(sentences)
        assert np.array_equal(named.wv["a"], other.wv["a"])
        again = pickle.loads(pickle.dumps(model))
        assert again.vocabulary == "words"
        assert np.array_equal(again.fit(sentences).wv["a"], other.wv["a"])
        with pytest.raises(InputError, match="vocabulary 'words' is a name, and client is no"):
            Word2Vec(4, vocabulary="words", client=cluster).fit(sentences)
        # Its connection, of its own since it was pickled, would look for the scheduler for 30 s after the end of it.
        tables = len(ps.tables())
        del again
        gc.collect()
        wait_until(lambda: len(ps.tables()) < tables)
