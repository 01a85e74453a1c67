"""Ranks, hits at k and the mean reciprocal rank, beside a loop over all candidates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.sparse

from dps.errors import InputError, InputTypeError
from dps.models import hits_at_k, mean_reciprocal_rank, ranks_of


def rank_by_orders(scores, true, left_out):
    """The mean place of the true candidate over all orders of the candidates that sort them by score."""
    candidates = [n for n in range(len(scores)) if n == true or n not in left_out]
    places = [
        order.index(true) + 1
        for order in itertools.permutations(candidates)
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return sum(places) / len(places)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_means_over_all_orders_of_ties(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, (12, 6)).astype(float)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    true = rng.integers(0, 6, 12)
    others = rng.random((12, 6)) < 0.3  # the true candidate is among them at times
    filtered = scipy.sparse.csr_matrix(others.astype(float))
    plain = [rank_by_orders(row, t, ()) for row, t in zip(scores, true, strict=True)]
    without = [rank_by_orders(row, t, np.flatnonzero(out)) for row, t, out in zip(scores, true, others, strict=True)]
    np.testing.assert_array_equal(ranks_of(scores, true), plain)
    np.testing.assert_array_equal(ranks_of(scores, true, filtered), without)
    assert plain != without


def test_what_is_stored_is_left_out_once_whatever_its_value():
    scores = np.array([[3.0, 2.0, 1.0]])
    twice = scipy.sparse.csr_array((np.zeros(3), [0, 0, 1], [0, 3]), shape=(1, 3))
    assert ranks_of(scores, [2], twice) == 1
    assert twice.nnz == 3  # the caller's matrix is as it was


def test_equal_scores_give_the_middle_rank():
    assert ranks_of(np.zeros((1, 9)), [0]) == 5


def test_hits_and_reciprocal_ranks():
    ranks = [1, 1.5, 2, 10, 11]
    assert [hits_at_k(ranks, k) for k in (1, 2, 10, 100)] == [0.2, 0.6, 0.8, 1.0]
    assert mean_reciprocal_rank(ranks) == pytest.approx((1 + 1 / 1.5 + 1 / 2 + 1 / 10 + 1 / 11) / 5)


def test_no_query_has_no_rank():
    assert ranks_of(np.empty((0, 4)), []).shape == (0,)
    for metric in (mean_reciprocal_rank, lambda ranks: hits_at_k(ranks, 3)):
        with pytest.raises(InputError, match="no rank"):
            metric([])


@pytest.mark.parametrize(
    ("scores", "true", "words"),
    [
        (np.zeros(3), [0], r"scores of shape \(3,\)"),
        (np.zeros((2, 3)), [0], r"true of shape \(1,\)"),
        (np.zeros((2, 3)), [0, 3], "from 0 to 3, and there are 3 candidates"),
        (np.zeros((2, 3)), [-1, 0], "from -1 to 0"),
        (np.array([[0.0, 1.0], [np.nan, 1.0]]), [0, 1], "query 1 have NaN"),
    ],
)
def test_wrong_scores_and_candidates_are_refused(scores, true, words):
    with pytest.raises(InputError, match=words):
        ranks_of(scores, true)


def test_other_wrong_arguments_are_refused():
    with pytest.raises(InputTypeError, match="dtype float64"):
        ranks_of(np.zeros((1, 2)), [0.5])
    with pytest.raises(InputTypeError, match="tocsr"):
        ranks_of(np.zeros((1, 2)), [0], scipy.sparse.coo_matrix((1, 2)))
    with pytest.raises(InputError, match=r"\(2, 2\), and scores are of shape \(1, 2\)"):
        ranks_of(np.zeros((1, 2)), [0], scipy.sparse.csr_matrix((2, 2)))
    with pytest.raises(InputError, match="k=0"):
        hits_at_k([1], 0)
    with pytest.raises(InputError, match=r"lowest rank is 0\.0"):
        mean_reciprocal_rank([0, 1])
