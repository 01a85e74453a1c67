"""Topic models beside scikit-learn's: components, bounds, transforms, data of all kinds, and what is refused."""

from __future__ import annotations

import pickle
import warnings

import dask
import dask.array as da
import dask.bag
import dask.dataframe
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from compiled import variant
from dask.distributed import Client
from oracles import GOLDEN, mix, mutant
from sklearn import decomposition
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

import dps
from dps import models
from dps.errors import InputError, InputTypeError
from dps.models.topics import allocation, gibbs, quality, variational
from dps.models.topics.plan import TwoTables
from dps.models.topics.variational import Discount


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client) as ps:
        yield ps
        assert not ps.tables(), "fits leave no tables"


TOPICS, WORDS, DOCUMENTS, LENGTH = 4, 40, 90, 50
rng = np.random.default_rng(0)
PLANTED = rng.dirichlet(np.full(WORDS, 0.1), TOPICS)
X = np.array([rng.multinomial(LENGTH, shares @ PLANTED) for shares in rng.dirichlet(np.full(TOPICS, 0.2), DOCUMENTS)])
X[7] = 0  # a document without words
HELD = np.array([rng.multinomial(LENGTH, shares @ PLANTED) for shares in rng.dirichlet(np.full(TOPICS, 0.2), 30)])
TIGHT = {"mean_change_tol": 1e-9, "max_doc_update_iter": 3000, "perp_tol": 0.0}
METHODS = ["batch", "online", "gibbs"]


def ours(ps, n=TOPICS, **settings) -> models.LatentDirichletAllocation:
    return models.LatentDirichletAllocation(n, client=ps, **{"random_state": 3, "batch_size": 16, **settings})


def theirs(n=TOPICS, **settings) -> decomposition.LatentDirichletAllocation:
    return decomposition.LatentDirichletAllocation(n, **{"random_state": 3, "batch_size": 16, **settings})


@pytest.fixture(scope="module")
def alone(ps):
    """A function that fits with one trainer: a dask array of one block goes to one trainer only."""

    def fit(data=X, how="fit", **settings):
        model = ours(ps, **settings)
        return getattr(model, how)(da.from_array(data, chunks=(len(data), -1)))

    return fit


# -- the same numbers


@pytest.mark.parametrize("method", ["batch", "online"])
def test_one_trainer_learns_the_components_of_scikit_learn(alone, method):
    settings = {"learning_method": method, "max_iter": 5, "evaluate_every": 2, **TIGHT}
    model, expected = alone(**settings), theirs(**settings).fit(X)
    np.testing.assert_allclose(model.components_, expected.components_, rtol=1e-5)
    np.testing.assert_allclose(model.exp_dirichlet_component_, expected.exp_dirichlet_component_, rtol=1e-4)
    np.testing.assert_allclose(model.transform(HELD), expected.transform(HELD), atol=1e-6)
    assert (model.n_iter_, model.n_batch_iter_) == (expected.n_iter_, expected.n_batch_iter_)
    assert len(model.perplexities_) == 2
    assert model.score(HELD) == pytest.approx(expected.score(HELD), rel=1e-6)
    assert model.perplexity(X) == pytest.approx(expected.perplexity(X), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_perplexity_is_that_of_scikit_learn_for_the_same_components(ps, method):
    """The last evaluation of the trainers, and the method of the model, beside scikit-learn's formula."""
    model = ours(ps, learning_method=method, max_iter=4, evaluate_every=2, **TIGHT).fit(X)
    expected = theirs(max_iter=1, **TIGHT).fit(X)
    expected.components_ = model.components_
    expected.exp_dirichlet_component_ = model.exp_dirichlet_component_
    assert model.bound_ == pytest.approx(expected.perplexity(X), rel=1e-5)
    assert model.perplexity(X) == pytest.approx(expected.perplexity(X), rel=1e-6)
    assert model.perplexity(HELD) == pytest.approx(expected.perplexity(HELD), rel=1e-6)
    assert model.score(HELD) == pytest.approx(expected.score(HELD), rel=1e-6)
    np.testing.assert_allclose(model.transform(HELD), expected.transform(HELD), atol=1e-6)
    gamma = model.transform(HELD, normalize=False)
    np.testing.assert_allclose(gamma.sum(axis=1), LENGTH + TOPICS * model.doc_topic_prior_, rtol=1e-6)


def test_partial_fit_goes_on_as_scikit_learns_does(alone, ps):
    settings = {"total_samples": 500, **TIGHT}
    expected = theirs(**settings).partial_fit(X[:50]).partial_fit(X[50:])
    model = alone(X[:50], "partial_fit", **settings)
    model.partial_fit(da.from_array(X[50:], chunks=(40, -1)))
    np.testing.assert_allclose(model.components_, expected.components_, rtol=1e-5)
    assert model.n_batch_iter_ == expected.n_batch_iter_
    with pytest.raises(InputError, match="X has 39 features, but"):
        model.partial_fit(X[:, 1:])
    with pytest.raises(AttributeError, match="partial_fit"):
        ours(ps, learning_method="gibbs").partial_fit(X)


def test_several_trainers_are_one_with_larger_batches(ps):
    """At each step, the batches of two trainers are one mini-batch: of 5 and 5 documents, one of 10."""
    settings = {"learning_method": "online", "max_iter": 3, **TIGHT}
    order = np.concatenate([np.r_[n : n + 5, 45 + n : 50 + n] for n in range(0, 45, 5)])
    expected = theirs(batch_size=10, **settings).fit(X[order])
    model = ours(ps, batch_size=5, aggregate=True, **settings).fit(X)
    np.testing.assert_allclose(model.components_, expected.components_, rtol=1e-5)
    # A trainer may see what the other one pushed at this step, or miss what it pushed before. So it may come to another
    # local optimum; their perplexities are 1.0 to 1.55 times the best one here, and that of the beginning is 5 times.
    for staleness in (0, 3):
        apart = ours(ps, batch_size=5, staleness=staleness, **settings).fit(X)
        assert apart.perplexity(X) < 2 * expected.perplexity(X)


def test_by_default_trainers_share_the_documents_of_a_mini_batch(ps):
    """Otherwise more trainers would mean fewer updates, and topics that are less far."""
    many = np.ones((512, 3))
    model = models.LatentDirichletAllocation(2, client=ps, learning_method="online", max_iter=1).fit(many)
    assert model.n_batch_iter_ - 1 == 512 / 128


def test_the_scale_is_brought_in_without_a_trace(alone, ps, monkeypatch):
    """The servers multiply the table by its scale many times, as after very many updates."""
    settings = {"learning_method": "online", "max_iter": 3, **TIGHT}
    expected, together = alone(**settings), ours(ps, aggregate=True, **settings).fit(X)
    monkeypatch.setattr(variational, "Discount", lambda rates: Discount(rates, least=0.5))
    np.testing.assert_allclose(alone(**settings).components_, expected.components_, rtol=1e-5)
    again = ours(ps, aggregate=True, **settings).fit(X)
    np.testing.assert_allclose(again.components_, together.components_, rtol=1e-5)


def test_scales_stay_in_bounds():
    rates = (10.0 + np.arange(1, 20_000)) ** -0.5
    discount = Discount(rates)
    assert discount.before.min() >= 1e-12
    assert (discount.brought_in != 1).sum() > 5
    scale = 1.0
    for step, rate in enumerate(rates):
        scale = 1.0 if discount.brought_in[step] != 1 else scale
        assert discount.before[step] == pytest.approx(scale, rel=1e-6)
        scale *= 1 - rate
        assert discount.after[step] == pytest.approx(scale, rel=1e-6)


WRONG_UPDATES = [
    ("rates[step] / discount.after[step]", "rates[step] / discount.before[step]"),
    ("discount.before[step] * rows[table]", "discount.after[step] * rows[table]"),
    ("plan.first + np.arange", "np.arange"),
    ("plan.eta * plan.words + discount", "discount"),
]


@pytest.mark.parametrize(("old", "new"), WRONG_UPDATES)
def test_wrong_variants_of_the_online_update(alone, monkeypatch, old, new):
    settings = {"learning_method": "online", "max_iter": 2, **TIGHT}
    wrong = mutant(variational.learn_online, old, new)
    monkeypatch.setitem(allocation.METHODS, "online", wrong)
    monkeypatch.setattr(allocation, "learn_online", wrong)
    expected = theirs(**settings).fit(X)
    assert not np.allclose(alone(**settings).components_, expected.components_, rtol=1e-3)


@pytest.mark.parametrize(("method", "what"), [("batch", "add"), ("online", "push"), ("gibbs", "add")])
def test_a_trainer_that_fails_and_runs_again_learns_the_same(alone, ps, monkeypatch, method, what):
    """It fails after a push, of which the tick does not tell any more."""
    settings = {"learning_method": method, "max_iter": 3, **TIGHT}
    expected, failures = alone(**settings), []
    owner = dps.Trainer if what == "push" else TwoTables
    true, run = getattr(owner, what), ps.run

    def once(self, *arguments):
        true(self, *arguments)
        trainer = self if what == "push" else self._trainer
        if trainer.attempt == 0 and trainer.clock == 8:
            failures.append(trainer.number)
            raise ConnectionError("the worker is gone")

    monkeypatch.setattr(owner, what, once)
    monkeypatch.setattr(ps, "run", lambda *arguments, **more: run(*arguments, retries=1, **more))
    np.testing.assert_allclose(alone(**settings).components_, expected.components_, rtol=1e-6)
    assert failures == [0]


# -- topics that were planted


APART = 0.9 * np.repeat(np.eye(TOPICS), 10, axis=1) / 10 + 0.1 / WORDS  # each topic has ten words nearly to itself
CLEAR = np.array([rng.multinomial(60, shares @ APART) for shares in rng.dirichlet(np.full(TOPICS, 0.1), 120)])


@pytest.mark.quick(3)
@pytest.mark.parametrize(("method", "passes"), [("batch", 20), ("online", 10), ("gibbs", 100)])
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_topics_are_found(ps, method, passes, seed):
    # One update for each step of both trainers, because apart they may come to another local optimum: see above.
    model = ours(ps, learning_method=method, max_iter=passes, random_state=seed, aggregate=True).fit(CLEAR)
    found = model.components_ / model.components_.sum(axis=1, keepdims=True)
    shared = np.minimum(APART[:, None], found[None]).sum(axis=2)  # of each planted topic with each one that was found
    assert sorted(shared.argmax(axis=1)) == [*range(TOPICS)]
    assert shared.max(axis=1).min() > 0.9
    leading = {tuple(sorted(words)) for words in model.top_words(10)}
    assert leading == {tuple(range(n, n + 10)) for n in range(0, 40, 10)}
    if method == "gibbs":
        assert model.counts_.dtype == np.int64
        np.testing.assert_array_equal(model.counts_.sum(axis=0), CLEAR.sum(axis=0))
        np.testing.assert_array_equal(model.components_, model.counts_ + model.topic_word_prior_)


def test_an_end_by_the_perplexity(ps):
    model = ours(ps, max_iter=40, evaluate_every=2, perp_tol=0.5).fit(X)
    last, before = model.perplexities_[-1], model.perplexities_[-2]
    assert abs(last - before) < 0.5 < abs(before - model.perplexities_[-3])
    assert model.n_iter_ == 2 * len(model.perplexities_) < 40
    assert model.bound_ == last
    never = ours(ps, max_iter=2).fit(X)
    assert never.perplexities_ == []
    assert not hasattr(never, "bound_")


# -- Gibbs sampling


def odds_of(here, old, counts, totals, alpha, eta, words):
    """Griffiths and Steyvers (2004), equation 5; `here` is without the token itself, and counts are with it."""
    itself = np.arange(len(totals)) == old
    return (here + alpha) * (counts - itself + eta) / (totals - itself + words * eta)


def drawn_one_by_one(csr, topics, counts, totals, random, alpha, eta, words):
    """The odds are laid side by side: topics of the document first, as they came; then the priors' share, of which the
    old topic is first."""
    new, token = topics.copy(), 0
    for document in range(csr.shape[0]):
        row = csr[document]
        seen = np.repeat(row.indices, row.data.astype(int))
        own, listed = slice(token, token + len(seen)), []
        for topic in topics[own]:
            listed += [topic] if topic not in listed else []
        for place, word in enumerate(seen):
            old = new[own][place]
            here = np.bincount(np.delete(new[own], place), minlength=len(totals))
            if not here[old]:  # the last one fills its place
                listed[listed.index(old)] = listed[-1]
                listed.pop()
            first = odds_of(here, old, counts[word], totals, 0.0, eta, words)
            second = odds_of(np.zeros(len(totals)), old, counts[word], totals, alpha, eta, words)
            order = [old, *(k for k in range(len(totals)) if k != old)]
            odds = np.cumsum(np.concatenate([first[listed], second[order]]))
            topic = (listed + order)[np.searchsorted(odds, random[token + place] * odds[-1], "right")]
            listed += [topic] if topic not in listed else []
            new[token + place] = topic
        token += len(seen)
    return new


def case_of_tokens(topics=TOPICS, alpha=0.3):
    csr = scipy.sparse.csr_matrix(X[:20].astype(np.float32))
    codes = np.repeat(csr.indices, csr.data.astype(int))
    rng = np.random.default_rng(5)
    old = rng.integers(0, topics, len(codes))
    counts = np.bincount(codes * topics + old, minlength=WORDS * topics).reshape(WORDS, topics)
    return csr, old, counts, counts.sum(axis=0), rng.random(len(codes)), alpha, 0.02, WORDS


@pytest.mark.parametrize("topics", [1, 2, TOPICS, 30, 200])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 20.0])
def test_tokens_are_drawn_as_the_equation_says(topics, alpha):
    case = case_of_tokens(topics, alpha)
    new, made = gibbs.sampled(*case)
    np.testing.assert_array_equal(new, drawn_one_by_one(*case))
    codes = np.repeat(case[0].indices, case[0].data.astype(int))
    expected = np.bincount(codes * topics + new, minlength=made.size).reshape(made.shape)
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("alpha", [0.05, 2.0])
def test_a_topic_is_drawn_as_often_as_its_odds_say(alpha):
    """The last token of a document, at many even shares of all odds; the tokens before it stay, at one share each."""
    topics, shares = 9, (np.arange(4000) + 0.5) / 4000
    csr, old, counts, totals, *_ = case_of_tokens(topics)
    csr, length = csr[:1], int(csr[0].sum())
    old, random = old[:length], np.random.default_rng(1).random(length)
    seen = []
    for share in shares:
        random[-1] = share
        new, _ = gibbs.sampled(csr, old, counts, totals, random, alpha, 0.02, WORDS)
        seen.append(new[-1])
    here = np.bincount(new[:-1], minlength=topics)
    odds = odds_of(here, old[-1], counts[csr.indices[-1]], totals, alpha, 0.02, WORDS)
    assert np.abs(np.bincount(seen, minlength=topics) / len(shares) - odds / odds.sum()).max() < 3 / len(shares)


WRONG = [
    ("here[there[k]] = 0", "pass"),
    ("(row[old] - 1 + d.eta)", "(row[old] + d.eta)"),
    ("1.0 / (totals[k] - 1 + words * eta)", "1.0 / (totals[k] + words * eta)"),
    ("x += running[old] - before", "pass"),
    ("used = _leave(&d, used, now[token])", "pass"),
    ("made[places[place] * topics + now[token]] += 1", "made[places[place] * topics] += 1"),
    ("d.places[d.there[used]] = d.places[topic]", "pass"),
    ("random[token])", "random[0])"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_wrong_variants_of_the_draws(monkeypatch, old, new):
    cases = [case_of_tokens(30), case_of_tokens(5, 20.0)]
    expected = [gibbs.sampled(*case) for case in cases]
    monkeypatch.setattr("dps.kernels.topics.tokens", variant("tokens", "tokens.pyx", old, new))
    got = [gibbs.sampled(*case) for case in cases]
    assert any(
        (a != b).any() for mine, theirs in zip(got, expected, strict=True) for a, b in zip(mine, theirs, strict=True)
    )


def test_tokens_that_are_refused():
    csr, old, counts, totals, random, *priors = case_of_tokens()
    for wrong in (
        (csr, old[1:], counts, totals, random[1:]),
        (csr, old + TOPICS, counts, totals, random),
        (csr, old, counts[:5], totals, random),
    ):
        with pytest.raises(InputError, match="no matrix of documents with"):
            gibbs.sampled(*wrong, *priors)
    with pytest.raises(ValueError, match="and random numbers for"):
        gibbs.sampled(csr, old, counts, totals, random[1:], *priors)
    with pytest.raises(InputError, match=r"totals of shape \(3,\)"):
        gibbs.sampled(csr, old, counts, totals[1:], random, *priors)


def test_random_numbers_are_even():
    numbers = gibbs.uniforms(np.arange(100_000), seed=1, stream=2)
    assert 0 <= numbers.min() < numbers.max() < 1
    for power in (1, 2, 3):
        assert (numbers**power).mean() == pytest.approx(1 / (power + 1), abs=0.005)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.01
    for other in (gibbs.uniforms(np.arange(100_000), 1, 3), gibbs.uniforms(np.arange(100_000), 2, 2)):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.01


def learnt_one_by_one(csr, seed, passes, alpha, eta):
    """(counts [words, topics], topics of the tokens) after a whole fit: the tables are arrays, and there is no trainer.

    `mix` adds GOLDEN to its argument, and the numbers of the sampler are mixed as they are.
    """
    state = np.random.RandomState(seed)
    state.gamma(100.0, 0.01, (TOPICS, WORDS))  # from which variational inference would begin
    seed, seen = int(state.randint(1 << 31)), np.repeat(csr.indices, csr.data.astype(int))

    def random(number):
        stream = mix(seed * GOLDEN + number - GOLDEN)
        return np.array([(mix(token * GOLDEN + stream - GOLDEN) >> 11) / 2**53 for token in range(len(seen))])

    def counted(topics):
        counts = np.zeros((WORDS, TOPICS), int)
        np.add.at(counts, (seen, topics), 1)
        return counts

    topics = (random(0) * TOPICS).astype(int)
    for number in range(1, 1 + passes):
        counts = counted(topics)
        topics = drawn_one_by_one(csr, topics, counts, counts.sum(axis=0), random(number), alpha, eta, WORDS)
    return counted(topics), topics


def fits_as_one_by_one(alone, monkeypatch, passes) -> bool:
    """Whether the counts of one trainer, and the topics of all its tokens, are those of the plain program."""
    put, put_last = gibbs.Assignments.put, {}

    def noted(self, first, topics, number):
        put_last[first] = topics
        put(self, first, topics, number)

    monkeypatch.setattr(gibbs.Assignments, "put", noted)
    priors = {"doc_topic_prior": 0.3, "topic_word_prior": 0.02}
    model = alone(X[:40], learning_method="gibbs", random_state=3, max_iter=passes, batch_size=7, **priors)
    counts, topics = learnt_one_by_one(scipy.sparse.csr_matrix(X[:40]), 3, passes, *priors.values())
    same = np.array_equal(model.counts_, counts.T) and np.array_equal(model.components_, counts.T + 0.02)
    return same and np.array_equal(np.concatenate([put_last[first] for first in sorted(put_last)]), topics)


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_a_whole_fit_beside_a_plain_program(alone, monkeypatch, passes):
    assert fits_as_one_by_one(alone, monkeypatch, passes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uniforms(tokens, plan.seed, number)", "uniforms(tokens, plan.seed, number // 2)"),
        ("corpus.first_token[int(ids[0])]", "2 * corpus.first_token[int(ids[0])]"),
        ("len(tokens), number - 1)", "len(tokens), number)"),
        ("tables.begin(number)", "pass"),
        ("1 + plan.passes)", "plan.passes)"),
        ("alpha, eta = plan.inference.alpha, plan.eta", "eta, alpha = plan.inference.alpha, plan.eta"),
    ],
)
def test_wrong_variants_of_a_whole_fit(alone, monkeypatch, old, new):
    wrong = mutant(gibbs.learn_by_sampling, old, new)
    monkeypatch.setitem(allocation.METHODS, "gibbs", wrong)
    monkeypatch.setattr(allocation, "learn_by_sampling", wrong)
    assert not fits_as_one_by_one(alone, monkeypatch, 3)


def test_passes_by_default_are_those_that_a_method_needs(ps):
    for method, passes in (("batch", 10), ("online", 10), ("gibbs", 100)):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            assert ours(ps, learning_method=method).fit(X[:30]).n_iter_ == passes


def test_topics_that_have_not_settled_are_told(ps, monkeypatch):
    """The fall beside its formula, from the counts of fits that end at the passes that are compared."""
    settings, fallen = {"learning_method": "gibbs", "topic_word_prior": 0.02}, []
    fall = gibbs.Settling.fall
    monkeypatch.setattr(gibbs.Settling, "fall", lambda self, trainer: fallen.append(fall(self, trainer)) or fallen[-1])
    with pytest.warns(ConvergenceWarning, match="after 5 passes of Gibbs sampling the topics had not settled: .*%"):
        ours(ps, max_iter=5, **settings).fit(X)
    before, after = (ours(ps, max_iter=passes, **settings).fit(X).counts_ for passes in (3, 4))
    logs = [
        (counts * np.log((counts + 0.02) / (counts.sum(axis=1, keepdims=True) + WORDS * 0.02))).sum() / counts.sum()
        for counts in (before, after)
    ]
    assert fallen[0] == pytest.approx(1 - np.exp(-logs[1]) / np.exp(-logs[0]), rel=1e-9)
    assert fallen[0] == fallen[1], "both trainers come to the same"
    with pytest.warns(ConvergenceWarning, match="after 1 passes"):
        ours(ps, max_iter=1, **settings).fit(X)


def test_counts_are_the_same_for_any_number_of_trainers_and_batches(ps):
    settings = {"learning_method": "gibbs", "max_iter": 6}
    expected = ours(ps, **settings).fit(X).counts_
    lazy = da.from_array(X, chunks=(13, -1))
    for data, size in ((X, 7), (lazy, 16), (da.from_array(X, chunks=(90, -1)), 1000), (scipy.sparse.csc_matrix(X), 3)):
        np.testing.assert_array_equal(ours(ps, batch_size=size, **settings).fit(data).counts_, expected)
    other = ours(ps, random_state=4, **settings).fit(X).counts_
    assert (other != expected).any()


# -- data


@pytest.mark.quick(1)
@pytest.mark.parametrize("method", METHODS)
def test_data_of_all_kinds(ps, method):
    settings = {"learning_method": method, "max_iter": 3, "aggregate": True, **TIGHT}
    model = ours(ps, **settings).fit(X)
    lazy = da.from_array(X, chunks=(45, 20))
    sparse = da.from_array(X, chunks=(45, 40)).map_blocks(scipy.sparse.csr_matrix)
    frame = pd.DataFrame(X, columns=[f"word {n}" for n in range(WORDS)])
    for data in (scipy.sparse.csr_matrix(X), scipy.sparse.coo_array(X.astype(float)), lazy, sparse, frame):
        again = ours(ps, **settings).fit(data)
        np.testing.assert_allclose(again.components_, model.components_, rtol=1e-4)
        shares = again.transform(data)
        assert dask.is_dask_collection(shares) == dask.is_dask_collection(data)
        (shares,) = dask.compute(shares)
        np.testing.assert_allclose(shares, model.transform(X), atol=1e-4)
        assert again.perplexity(data) == pytest.approx(model.perplexity(X), rel=1e-5)
        np.testing.assert_allclose(again.coherence(data), model.coherence(X), rtol=1e-6)
    assert list(again.feature_names_in_[:2]) == ["word 0", "word 1"]
    assert again.top_words(1)[0][0].startswith("word ")
    np.testing.assert_allclose(model.transform(X)[7], 1 / TOPICS, err_msg="a document without words")
    frames = dask.dataframe.from_pandas(frame, npartitions=2)
    np.testing.assert_allclose(ours(ps, **settings).fit(frames).components_, model.components_, rtol=1e-4)


def test_a_matrix_of_the_user_stays_as_it_is(ps):
    csr = scipy.sparse.csr_matrix(X.astype(np.float32))
    csr.data[::3] = 0
    before = csr.copy()
    ours(ps, max_iter=1).fit(csr).transform(csr)
    for name in ("data", "indices", "indptr"):
        np.testing.assert_array_equal(getattr(csr, name), getattr(before, name))


def test_weights_that_are_no_counts(alone):
    weighted = X * 2.6
    settings = {"max_iter": 3, **TIGHT}
    np.testing.assert_allclose(
        alone(weighted, **settings).components_, theirs(**settings).fit(weighted).components_, rtol=1e-5
    )


def test_texts_in_a_pipeline(ps):
    texts = ["milk bread butter", "bread butter cheese", "goal ball team", "team ball coach"] * 5
    words = CountVectorizer()
    pipeline = make_pipeline(words, ours(ps, 2, max_iter=30))
    shares = pipeline.fit_transform(texts)
    assert (shares.argmax(axis=1)[0::4] == shares.argmax(axis=1)[1::4]).all()
    assert (shares.argmax(axis=1)[0::4] != shares.argmax(axis=1)[2::4]).all()
    leading = pipeline[1].top_words(2, words.get_feature_names_out())
    assert {frozenset(each.tolist()) for each in leading} == {
        frozenset({"bread", "butter"}),
        frozenset({"ball", "team"}),
    }
    assert pipeline[1].get_feature_names_out().tolist() == ["latentdirichletallocation0", "latentdirichletallocation1"]


def test_a_vocabulary_of_one_word(ps):
    for method in METHODS:
        model = ours(ps, 2, learning_method=method, max_iter=2).fit(np.full((5, 1), 3))
        assert model.components_.shape == (2, 1)
        assert model.perplexity(np.full((5, 1), 3)) >= 0.99


def test_fewer_documents_than_trainers(ps):
    model = ours(ps, learning_method="gibbs", max_iter=2).fit(X[:1])
    np.testing.assert_array_equal(model.counts_.sum(axis=0), X[0])


def test_a_server_for_each_fit_and_a_model_elsewhere(client):
    model = ours(None, learning_method="online", max_iter=2).fit(X)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.transform(X), model.transform(X))
    with pytest.raises(NotFittedError, match="this LatentDirichletAllocation is not fitted"):
        clone(model).transform(X)


# -- coherence


def coherence_of(topic: list[int], data: np.ndarray) -> float:
    """Mimno et al. (2011), as it is written there."""
    there, score = data > 0, 0.0
    for m in range(1, len(topic)):
        for l in range(m):  # noqa: E741
            both = (there[:, topic[m]] & there[:, topic[l]]).sum()
            score += np.log((both + 1) / there[:, topic[l]].sum())
    return score


def test_coherence_is_that_of_the_paper(ps, monkeypatch):
    model = ours(ps, max_iter=10).fit(X)
    expected = [coherence_of(words.tolist(), X) for words in model.top_words(6)]
    np.testing.assert_allclose(model.coherence(X, top_n=6), expected, rtol=1e-9)
    assert np.isfinite(model.coherence(X[:2], top_n=20)).all(), "words that no document has are left out"
    wrong = mutant(quality.u_mass, "terms[later[there], sooner[there]]", "terms[sooner[there], later[there]]")
    monkeypatch.setattr(allocation, "u_mass", wrong)
    assert not np.allclose(model.coherence(X, top_n=6), expected)


# -- what is refused


REFUSED = [
    (InputError, "0 sample", {}, X[:0]),
    (InputError, "all documents of X are without words", {}, X * 0),
    (InputError, "NaN", {}, np.where(X > 3, np.nan, X)),
    (InputError, "Negative values in data passed to LatentDirichletAllocation", {}, X - 1),
    (InputError, "no whole numbers", {"learning_method": "gibbs"}, X * 0.5),
    (InputError, r"Reshape your data", {}, X[0]),
    (InputError, r"0 feature", {}, X[:, :0]),
    (InputError, "no numbers", {}, np.array([["milk", "bread"]])),
    (InputError, "Complex", {}, X * 1j),
    (InputError, "n_components is a whole number", {"n_components": 0}, X),
    (InputError, "max_iter is a whole number", {"max_iter": 1.5}, X),
    (InputError, "batch_size is a whole number", {"batch_size": 0}, X),
    (InputError, "learning_method is one of", {"learning_method": "mcmc"}, X),
    (InputError, "doc_topic_prior is a finite number, above 0", {"doc_topic_prior": 0.0}, X),
    (InputError, "learning_decay is above 0", {"learning_decay": 0.0}, X),
    (InputError, "learning_offset", {"learning_offset": 0.5}, X),
    (InputError, "mean_change_tol is a finite number", {"mean_change_tol": np.inf}, X),
    (InputError, "aggregate=True needs staleness=0", {"aggregate": True, "staleness": 2}, X),
    (InputError, "at most 65,536 topics", {"learning_method": "gibbs", "n_components": 1 << 17}, X),
]


@pytest.mark.parametrize(("error", "words", "settings", "data"), REFUSED)
def test_what_is_refused(ps, error, words, settings, data):
    model = ours(ps).set_params(**settings)
    with pytest.raises(error, match=words):
        model.fit(data)
    assert not hasattr(model, "components_")


@pytest.mark.parametrize("method", METHODS)
def test_what_trainers_refuse_names_the_partition(ps, method):
    wrong = X.astype(float)
    wrong[70, 3] = np.nan
    with pytest.raises(InputError, match="partition 1: Input X contains NaN or infinity: 1 of its counts"):
        ours(ps, learning_method=method).fit(da.from_array(wrong, chunks=(45, 40)))
    with pytest.raises(InputError, match="X has no documents"):
        ours(ps, learning_method=method).fit(da.zeros((0, 5), chunks=(1, 5)))


def test_what_a_fitted_model_refuses(ps):
    model = ours(ps, max_iter=1).fit(X)
    with pytest.raises(InputError, match="X has 39 features, but LatentDirichletAllocation is expecting 40"):
        model.transform(X[:, 1:])
    with pytest.raises(InputError, match="Negative values"):
        model.perplexity(-X)
    with pytest.raises(InputError, match="without words"):
        model.perplexity(X * 0)
    with pytest.raises(InputError, match="'u_mass', not 'c_v'"):
        model.coherence(X, measure="c_v")
    with pytest.raises(InputError, match="top_n is a whole number, 2 or more"):
        model.coherence(X, top_n=1)
    with pytest.raises(InputError, match="the vocabulary has 3 words, and the topics have 40"):
        model.top_words(3, ["a", "b", "c"])
    with pytest.raises(InputTypeError, match="not a Bag"):
        ours(ps).fit(dask.bag.from_sequence([1, 2]))


@pytest.mark.thorough
@parametrize_with_checks([models.LatentDirichletAllocation(2, max_iter=2, progress=False)])
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)
