"""Alias tables: the probabilities that a table has are the weights', and draws follow them."""

import pickle

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.errors import InputError, InputTypeError
from dps.sampling import AliasTable, alias, subsample, unigram_table

WEIGHTS = st.lists(
    st.one_of(st.floats(0, 1e6), st.integers(0, 5).map(float), st.floats(0, 1e308)), min_size=1, max_size=60
).filter(any)


def reconstructed(table) -> np.ndarray:
    """The probabilities that draws of the table have, from its buckets."""
    n = len(table)
    assert ((table.share >= 0) & (table.share <= 1)).all()
    return (table.share + np.bincount(table.alias, 1 - table.share, n)) / n


def check_table(weights) -> None:
    table = AliasTable(weights)
    expected = np.array(weights, np.longdouble) / np.array(weights, np.longdouble).sum()
    np.testing.assert_allclose(table.probabilities, expected.astype(float), rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(reconstructed(table), expected.astype(float), rtol=0, atol=1e-12)
    never = np.flatnonzero(np.asarray(weights) == 0)
    assert not table.share[never].any()
    assert not np.isin(never, table.alias[table.share < 1]).any()


@given(WEIGHTS)
def test_a_table_has_the_probabilities_of_its_weights(weights):
    check_table(weights)


@pytest.mark.parametrize("n", [1, 2, 1000, 300_000])
def test_large_tables(n):
    rng = np.random.default_rng(n)
    for weights in (np.ones(n), np.arange(1, n + 1), rng.random(n), rng.pareto(1, n), rng.integers(0, 2, n) + (n == 1)):
        check_table(weights)


def check_draws(weights, draws, probabilities) -> None:
    """Chi-square against the exact probabilities; what has probability 0 never comes."""
    counts = np.bincount(draws.reshape(-1), minlength=len(weights))
    assert not counts[probabilities == 0].any()
    occurs = probabilities > 0
    expected = probabilities[occurs] / probabilities[occurs].sum() * draws.size
    if occurs.sum() > 1:
        assert scipy.stats.chisquare(counts[occurs], expected).pvalue > 1e-3


@pytest.mark.parametrize("weights", [[1], [1, 0, 3], [5, 1, 1, 1, 1, 1], np.arange(50), 0.9 ** np.arange(40)])
def test_draws(weights):
    table = AliasTable(weights)
    draws = table.draw((200, 500), np.random.default_rng(1))
    assert draws.shape == (200, 500)
    assert draws.dtype == np.int64
    check_draws(weights, draws, table.probabilities)
    again = pickle.loads(pickle.dumps(table)).draw((200, 500), np.random.default_rng(1))
    np.testing.assert_array_equal(draws, again)


def test_successive_draws_are_independent():
    table = AliasTable([3, 2, 1])
    draws = table.draw((100_000, 2), np.random.default_rng(2))
    pairs = np.outer(table.probabilities, table.probabilities).reshape(-1)
    check_draws(pairs, draws[:, 0] * 3 + draws[:, 1], pairs)


@pytest.mark.parametrize("power", [0, 0.5, 0.75, 1, 2])
def test_unigram_table(power):
    counts = np.array([0, 1000, 30, 5, 5, 0, 1])
    weights = np.where(counts > 0, counts.astype(float) ** power, 0)
    np.testing.assert_allclose(unigram_table(counts, power).probabilities, weights / weights.sum(), rtol=1e-12)


def word2vec_keeps(counts, sample):
    """The rule of word2vec.c, line by line."""
    train_words, kept = sum(counts), []
    for cn in counts:
        ran = (np.sqrt(cn / (sample * train_words)) + 1) * (sample * train_words) / cn if cn else 1.0
        kept.append(min(ran, 1.0))
    return np.array(kept)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=30).filter(any), st.sampled_from([1e-5, 1e-3, 0.1, 5.0]))
def test_subsample_keeps_as_word2vec_does(counts, t):
    np.testing.assert_allclose(subsample(counts, t), word2vec_keeps(counts, t), rtol=1e-10)


WRONG_WEIGHTS = [
    ([], "empty"),
    ([[1.0, 2.0]], r"shape \(1, 2\)"),
    (3.0, r"shape \(\)"),
    ([1.0, -1.0], "number 1 is -1"),
    ([np.nan, 1.0], "number 0 is nan"),
    ([1.0, np.inf, np.inf], "2 of 3 are not"),
    ([0, 0, 0], r"all zero \(3 of them\)"),
]


@pytest.mark.parametrize(("weights", "message"), WRONG_WEIGHTS)
@pytest.mark.parametrize("make", [AliasTable, unigram_table, subsample])
def test_wrong_weights_are_refused(make, weights, message):
    with pytest.raises(InputError, match=message):
        make(weights)


@pytest.mark.parametrize("weights", [["a", "b"], [1j], [None, 1.0]])
def test_weights_are_numbers(weights):
    with pytest.raises(InputTypeError, match="are numbers, and this array has dtype"):
        AliasTable(weights)


@pytest.mark.parametrize("t", [0, -1e-3, np.nan, np.inf])
def test_wrong_settings_are_refused(t):
    with pytest.raises(InputError, match="t is a finite number above 0"):
        subsample([1, 2], t)
    with pytest.raises(InputError, match="power is a finite number"):
        unigram_table([1, 2], np.inf * (1 if t == 0 else -1))


def test_probabilities_cannot_be_changed():
    table = dps.sampling.AliasTable([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        table.probabilities[0] = 1
    assert len(table) == 2
    assert repr(table) == "AliasTable of 2 weights"


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # a piece of `buckets`, and what stands there instead
    ("filled >= 1", "filled > 1.5"),
    ('needed[:-1], side="right"', 'needed[1:], side="right"'),
    ('needed[:-1], side="right"', 'needed[:-1], side="left"'),
    ('given[:-1], side="left"', 'given[:-1], side="right"'),
    ("share[light] = filled[light]", "share[light] = 1"),
    ("heavy[emptied + 1]", "heavy[emptied]"),
    ("np.clip(1 + given", "np.clip(given"),
]


def check_some() -> None:
    for weights in ([1, 0, 3], [1, 1, 1, 5], [2, 2, 0, 0], np.arange(50), 0.9 ** np.arange(40), [0, 3, 1, 3, 1, 1, 3]):
        check_table(weights)


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_broken_variant_is_caught(monkeypatch, old, new):
    check_some()
    monkeypatch.setattr(alias, "buckets", mutant(alias.buckets, old, new))
    with pytest.raises((AssertionError, IndexError)):
        check_some()


@pytest.mark.parametrize(("old", "new"), [("< self.share", "> self.share"), ("self.alias[places]", "places")])
def test_a_broken_draw_is_caught(monkeypatch, old, new):
    monkeypatch.setattr(AliasTable, "draw", mutant(AliasTable.draw, old, new))
    with pytest.raises(AssertionError):
        test_draws([1, 0, 3])
