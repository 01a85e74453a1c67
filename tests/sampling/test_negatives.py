"""Negatives: never what is avoided, distributed as what is left; the same draws when a trainer runs again."""

from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
import scipy.sparse
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.errors import InputError, InputTypeError
from dps.sampling import AliasTable, generator, negative_items, rejection, unigram_table
from dps.sampling import negatives as draw_negatives


def chi_square(draws, probabilities) -> None:
    counts = np.bincount(draws.reshape(-1), minlength=len(probabilities))
    occurs = probabilities > 0
    assert not counts[~occurs].any()
    if occurs.sum() > 1:
        expected = probabilities[occurs] / probabilities[occurs].sum() * draws.size
        assert scipy.stats.chisquare(counts[occurs], expected).pvalue > 1e-3


@pytest.mark.parametrize("counts", [[50, 30, 20], [1, 1], [10**6, 1, 16], [0, 3, 0, 5, 5]])
def test_negatives_have_the_distribution_without_what_they_avoid(counts):
    table = unigram_table(counts)
    words = np.repeat(np.arange(len(counts)), 2000)
    drawn = draw_negatives(table, (len(words), 10), np.random.default_rng(0), avoid=words[:, None])
    assert drawn.shape == (len(words), 10)
    for word in range(len(counts)):
        chi_square(drawn[words == word], np.where(np.arange(len(counts)) == word, 0, table.probabilities))


def test_a_pool_avoids_all_words_of_a_batch():
    table = AliasTable([5, 4, 3, 2, 1])
    drawn = draw_negatives(table, 20_000, np.random.default_rng(1), avoid=np.array([[0, 3, 3, -1, 99]]))
    chi_square(drawn, np.array([0, 4, 3, 0, 1]) / 8)
    free = draw_negatives(table, 20_000, np.random.default_rng(1))
    chi_square(free, table.probabilities)
    assert draw_negatives(table, (0, 5), np.random.default_rng(1), avoid=np.empty((0, 1), int)).shape == (0, 5)


@pytest.mark.parametrize(
    ("avoid", "error", "message"),
    [
        ([[0, 1, 2]], InputError, "leaves nothing to draw: it has all 3 numbers"),
        (np.zeros(7, int), InputError, r"avoid of shape \(7,\) does not fit negatives of shape \(10,\)"),
        ([0.0] * 10, InputTypeError, "of dtype float64"),
    ],
)
def test_wrong_avoid_is_refused(avoid, error, message):
    with pytest.raises(error, match=message):
        draw_negatives(AliasTable([1, 2, 3, 0]), 10, np.random.default_rng(0), avoid=avoid)


def seen_of(rows, items, density, seed=0):
    return scipy.sparse.random(rows, items, density, format="csr", random_state=seed)


@given(st.integers(0, 2**31), st.floats(0, 0.8), st.integers(1, 4))
def test_items_are_not_seen(seed, density, n):
    seen = seen_of(20, 15, density, seed)
    seen = scipy.sparse.csr_array((seen.data, seen.indices, seen.indptr), (20, 16))  # one item is free ...
    seen.data[:] = 0  # ... and what is stored is seen, whatever its value
    users = np.random.default_rng(seed).integers(0, 20, (6, 2))
    drawn = negative_items(users, seen, n, np.random.default_rng(seed))
    assert drawn.shape == (6, 2, n)
    stored = {(int(u), int(i)) for u, i in zip(*seen.tocoo().coords, strict=True)}
    pairs = zip(np.repeat(users, n), drawn.reshape(-1), strict=True)
    assert not stored & {(int(u), int(i)) for u, i in pairs}
    assert ((drawn >= 0) & (drawn < 16)).all()


@pytest.mark.parametrize("free", [1, 2, 500])
def test_all_unseen_items_are_drawn_alike(free):
    items = 1000
    seen = scipy.sparse.lil_matrix((3, items))
    for user in range(3):
        seen[user, np.random.default_rng(user).permutation(items)[free:]] = 1
    csr = seen.tocsr()
    csr.indices[: csr.indptr[1]] = csr.indices[: csr.indptr[1]][::-1]  # rows need not be sorted
    users = np.array([0, 2, 0, 1])
    drawn = negative_items(users, csr, 4000, np.random.default_rng(5))
    for user, mine in zip(users, drawn, strict=True):
        unseen = csr[[user]].toarray()[0] == 0
        chi_square(mine, unseen / unseen.sum())


def test_a_user_who_has_seen_everything_is_named():
    seen = scipy.sparse.csr_array(np.array([[1, 0], [1, 1], [0, 0]]))
    assert negative_items([0, 2], seen, 3, np.random.default_rng(0))[0].tolist() == [1, 1, 1]
    with pytest.raises(InputError, match="user 1 has seen all 2 items"):
        negative_items([0, 1], seen, 3, np.random.default_rng(0))
    assert negative_items([], seen, 3, np.random.default_rng(0)).shape == (0, 3)
    with pytest.raises(InputError, match="user 0 has seen all 0 items"):
        negative_items([0], scipy.sparse.csr_array((3, 0)), 1, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("users", "seen", "error", "message"),
    [
        ([0, 3], scipy.sparse.csr_array((3, 5)), InputError, "users from 0 to 3, and seen_csr has 3 rows"),
        ([-1], scipy.sparse.csr_array((3, 5)), InputError, "users from -1 to -1"),
        ([0.5], scipy.sparse.csr_array((3, 5)), InputTypeError, "of dtype float64"),
        ([0], scipy.sparse.csc_array((3, 5)), InputTypeError, r"not a csc_array: call its tocsr\(\)"),
        ([0], np.zeros((3, 5)), InputTypeError, "not a ndarray"),
    ],
)
def test_wrong_users_are_refused(users, seen, error, message):
    with pytest.raises(error, match=message):
        negative_items(users, seen, 2, np.random.default_rng(0))


# ---- generators of trainers -----------------------------------------------------------------------------------------


def test_a_generator_depends_on_seed_trainer_and_clock_alone():
    def first(number, clock, seed):
        return generator(SimpleNamespace(number=number, clock=clock, attempt=0), seed).integers(2**60)

    places = [(number, clock, seed) for number in range(4) for clock in range(4) for seed in range(4)]
    assert len({first(*place) for place in places}) == len(places)
    assert [first(*place) for place in places] == [first(*place) for place in places]
    for seed in (-1, 0.5, "a", True, None):
        with pytest.raises(InputError, match="seed is a whole number"):
            first(0, 0, seed)


def draws_of(trainer, partitions, fails):
    """Push a draw of each batch to a row of its own; the first attempt of trainer 1 fails on its way."""
    for batch in trainer.iterate(partitions, batch_size=2):
        drawn = dps.sampling.generator(trainer, 5).integers(1, 1000)
        trainer.push("draws", [int(batch[0]) // 2], [drawn])
        if fails and trainer.number == 1 and trainer.attempt == 0 and trainer.clock == 2:
            raise OSError("the attempt ends here")
    return trainer.attempt


def test_a_trainer_that_runs_again_draws_the_same(tmp_path):
    cluster = dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None)
    with cluster, dps.ParameterServer(cluster) as ps:
        for name in ("draws", "again"):
            table = ps.table("draws", rows=10)
            ps.run(draws_of, da.arange(20, chunks=10), args=(name == "again",), retries=1)
            if name == "draws":
                expected = table.pull()
            else:
                np.testing.assert_array_equal(table.pull(), expected)
            ps.drop_table("draws")
    assert len(set(expected)) == 10


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # function, a piece of it, and what stands there instead
    ("negatives", "flat[left] = table", "flat[left] = 0 * table"),
    ("negatives", "== avoided[places]).any(axis=-1)", "== avoided[places]).all(axis=-1)"),
    ("_drawn_among", "allowed = probabilities.copy()", "allowed = np.ones(len(probabilities))"),
    ("_pairs", "repeat(starts - begins", "repeat(starts"),
    ("_pairs", "owners * items +", ""),
    ("negative_items", "np.repeat(np.arange(len(askers)), n)", "np.tile(np.arange(len(askers)), n)"),
    ("negative_items", "unseen[rng.integers(0, len(unseen))]", "unseen[0]"),
]


def check_all() -> None:
    for counts in ([50, 30, 20], [10**6, 1, 16]):
        test_negatives_have_the_distribution_without_what_they_avoid(counts)
    test_a_pool_avoids_all_words_of_a_batch()
    for free in (2, 500):
        test_all_unseen_items_are_drawn_alike(free)


@pytest.mark.parametrize(("name", "old", "new"), WRONG)
def test_a_broken_variant_is_caught(monkeypatch, name, old, new):
    monkeypatch.setattr(rejection, name, mutant(getattr(rejection, name), old, new))
    for name in ("draw_negatives", "negative_items"):
        monkeypatch.setitem(globals(), name, getattr(rejection, name.removeprefix("draw_")))
    with pytest.raises((AssertionError, IndexError, InputError)):
        check_all()
