"""Steps of FTRL after each row beside the paper's algorithm in float64; what is refused; broken variants."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st

import dps
from dps.errors import InputError
from dps.kernels import ftrl_steps, ftrl_weights

RULES = [{"alpha": 0.1}, {"alpha": 1.0, "beta": 0.1, "l1": 0.3, "l2": 0.2}]


def weight(z: np.ndarray, n: np.ndarray, alpha: float, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0):
    return np.where(abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / alpha + l2))


def textbook(X, sums, y, weights, rule, fit_intercept=True, trainers=1) -> tuple[float, np.ndarray]:
    """(sum of losses, the sums after all steps) in float64. X is dense; the last row of sums is the intercept's."""
    m = sums.shape[1] // 2
    z, n, losses = *np.split(sums.astype(float), 2, axis=1), 0.0
    total, squares = np.zeros_like(z), np.zeros_like(z)
    free = {name: value for name, value in rule.items() if name not in ("l1", "l2")}
    for x, label, own in zip(X, y, weights, strict=True):
        w = np.vstack([weight(z[:-1], n[:-1], **rule), weight(z[-1:], n[-1:], **free)])
        margins = np.append(x, 1.0) @ w
        p = 1 / (1 + np.exp(-margins)) if m == 1 else np.exp(margins) / np.exp(margins).sum()
        right = p[label] if m > 1 else p[0] if label else 1 - p[0]
        losses -= own * np.log(right)
        residual = own * (p - (np.arange(m) == label if m > 1 else label))
        g = np.outer(np.append(x, float(fit_intercept)), residual)
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / rule["alpha"]
        z, n = z + g - sigma * w, n + g**2
        total, squares = total + g, squares + g**2
    return losses, np.hstack([z, n + (trainers - 1) * np.maximum(total**2 - squares, 0)])


def scene(m: int, rows: int = 40, features: int = 7, ones: bool = False, seed: int = 0) -> tuple:
    """(a batch, sums to begin with, labels, weights)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, features)) * (rng.random((rows, features)) < 0.5)
    X = scipy.sparse.csr_matrix((X != 0).astype(float) if ones else X.astype(np.float32))
    sums = np.hstack([rng.normal(size=(features + 1, m)), rng.exponential(size=(features + 1, m))])
    return X, sums.astype(np.float32), rng.integers(max(m, 2), size=rows), rng.exponential(size=rows)


def check(
    m: int, rule: dict, ones: bool, weighted: bool, fit_intercept: bool, seed: int = 0, trainers: int = 1
) -> None:
    X, sums, y, weights = scene(m, ones=ones, seed=seed)
    before = sums.copy()
    loss, gains, level = ftrl_steps(
        X.indptr, X.indices, None if ones else X.data, sums[:-1], sums[-1], y, weights if weighted else None,
        **rule, fit_intercept=fit_intercept, trainers=trainers,
    )  # fmt: skip
    own = weights if weighted else np.ones(len(y))
    wanted_loss, wanted = textbook(X.toarray(), sums, y, own, rule, fit_intercept, trainers)
    assert loss == pytest.approx(wanted_loss / own.sum(), rel=1e-4)
    np.testing.assert_allclose(before + np.vstack([gains, level]), wanted, rtol=2e-3, atol=2e-4)
    np.testing.assert_array_equal(sums, before)
    assert level.any() == fit_intercept


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("rule", RULES, ids=["plain", "penalties"])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_steps(m: int, rule: dict, ones: bool, weighted: bool, fit_intercept: bool) -> None:
    check(m, rule, ones, weighted, fit_intercept)


@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 4]), st.sampled_from(RULES), st.booleans(), st.integers(1, 9))
def test_any_batch(seed: int, m: int, rule: dict, weighted: bool, trainers: int) -> None:
    check(m, rule, False, weighted, True, seed, trainers)


def together(trainers: int, told: int) -> float:
    """The loss after 40 clocks of trainers with batches of 200 rows, each told that trainers are so many."""
    rng = np.random.default_rng(0)
    X = scipy.sparse.csr_matrix((rng.random((40 * trainers * 200, 12)) < 0.5).astype(np.float32))
    y = (X @ np.linspace(-2, 2, 12) + rng.logistic(size=X.shape[0]) > 0).astype(int)
    sums = np.zeros((13, 2), np.float32)
    for clock in np.split(np.arange(X.shape[0]), 40):
        gained = np.zeros_like(sums)
        for rows in np.split(clock, trainers):
            part = X[rows]
            _, gains, level = ftrl_steps(
                part.indptr, part.indices, part.data, sums[:-1], sums[-1], y[rows], alpha=1.0, trainers=told
            )
            gained += np.vstack([gains, level])
        sums += gained
    w = ftrl_weights(sums, alpha=1.0)
    z = X @ w[:-1] + w[-1]
    return float(np.mean(np.logaddexp(0, np.where(y == 1, -z, z))))


def test_many_trainers_do_not_overshoot_together() -> None:
    alone, right, wrong = together(1, 1), together(16, 16), together(16, 1)
    assert right < 1.02 * alone < wrong


def test_gains_of_batches_add_up() -> None:
    X, sums, y, _ = scene(1)
    _, whole, _ = ftrl_steps(X.indptr, X.indices, X.data, sums[:-1], sums[-1], y, alpha=0.5)
    now = sums.copy()
    for start in range(0, len(y), 10):
        part = X[start : start + 10]
        _, gains, level = ftrl_steps(
            part.indptr, part.indices, part.data, now[:-1], now[-1], y[start : start + 10], alpha=0.5
        )
        now += np.vstack([gains, level])
    np.testing.assert_allclose(now[:-1], sums[:-1] + whole, rtol=1e-4, atol=1e-5)


def test_small_gains_are_not_lost_beside_large_sums() -> None:
    sums = np.array([[0.0, 1e8]], np.float32)
    _, gains, _ = ftrl_steps([0, 1], [0], [0.01], sums, [0.0, 0.0], [1], alpha=0.1)
    assert gains[0, 1] == pytest.approx(0.005**2, rel=1e-4)  # a 10^12th of n, of which float32 keeps seven digits


@pytest.mark.parametrize("rule", RULES, ids=["plain", "penalties"])
def test_weights_are_those_of_the_optimizer(rule: dict) -> None:
    optimizer, rng = dps.FTRL(**rule), np.random.default_rng(0)
    rows = np.zeros((20, 3), np.float32)
    for _ in range(5):
        optimizer.step(rows, rng.normal(size=(20, 1)).astype(np.float32))
    np.testing.assert_allclose(ftrl_weights(rows[:, 1:], **rule), rows[:, 0], rtol=1e-5, atol=1e-7)
    assert (rows[:, 0] == 0).any() == ("l1" in rule)
    assert ftrl_weights(np.hstack([rows[:, [1, 1]], rows[:, [2, 2]]]), **rule).shape == (20, 2)
    for beta in (0.0, 1.0):
        nothing = ftrl_weights([[0.0, 0.0]], **{**rule, "beta": beta})
        assert nothing.tolist() == [0]
        assert not np.signbit(nothing).any()


GOOD = {"indptr": [0, 1, 2], "indices": [0, 1], "data": None, "sums": np.zeros((2, 2)), "intercept": [0.0, 0.0],
        "y": [0, 1], "alpha": 0.1}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"indices": [0, 2]}, "indices from 0 to 2, and there are 2 weights"),
        ({"indptr": [0, 3, 2]}, "indptr does not describe"),
        ({"y": [0, 2]}, "y from 0 to 2: the numbers of 2 classes"),
        ({"y": [0]}, "y of shape"),
        ({"weights": [1.0]}, "weights of shape"),
        ({"sums": np.zeros((2, 3))}, r"sums of shape \(2, 3\)"),
        ({"sums": np.zeros(2)}, r"sums of shape \(2,\)"),
        ({"sums": np.zeros((2, 8)), "intercept": np.zeros(8), "y": [0, 4]}, "numbers of 4 classes"),
        ({"intercept": [0.0]}, "an intercept of shape"),
        ({"alpha": 0.0}, "alpha is a number above 0, not 0.0"),
        ({"beta": -1.0}, "beta is a number, 0 or more, not -1.0"),
        ({"l1": np.nan}, "l1 is a number, 0 or more, not nan"),
        ({"l2": -0.1}, "l2 is a number, 0 or more"),
        ({"sums": [[0.0, -1.0], [0.0, 0.0]]}, "n is a sum of squares, 0 or more, and the least is -1"),
        ({"sums": [[0.0, np.nan], [0.0, 0.0]]}, "n is a sum of squares"),
        ({"intercept": [0.0, -2.0]}, "n is a sum of squares"),
        ({"trainers": 0}, "trainers is 1 or more, not 0"),
        ({"data": [1.0]}, "1 values for 2 indices"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict, message: str) -> None:
    ftrl_steps(**GOOD)
    with pytest.raises(InputError, match=message):
        ftrl_steps(**{**GOOD, **wrong})


def test_no_rows() -> None:
    loss, gains, level = ftrl_steps([0], [], None, np.ones((2, 2)), [1.0, 1.0], [], alpha=0.1)
    assert loss == 0
    assert not gains.any()
    assert not level.any()


def check_all() -> None:
    for m in (1, 3):
        for rule in RULES:
            check(m, rule, False, True, True, trainers=3)
            check(m, rule, True, False, False)
    test_small_gains_are_not_lost_beside_large_sums()


WRONG = [  # the text of kernels/loops/ftrl.h, and the wrong text
    ("gains[m + c] += g * g;", "gains[m + c] += g;"),
    ("(root - *last) * rule->per_alpha", "(root - *last)"),
    ("*last = root;", ""),
    ("*w = dps_ftrl_weight(sums[c] + gains[c], root, rule);", ""),
    ("(rule->beta + root)", "(1 + root)"),
    ("+ rule->l2)", ")"),
    ("const dps_ftrl_rule free = {rule->beta, 0, 0,", "const dps_ftrl_rule free = {rule->beta, rule->l1, 0,"),
    ("const float chosen = residual[y[i]];", "const float chosen = residual[0];"),
    ("residual[y[i]] = (float)(residual[y[i]] - weight);", "residual[y[i]] = (float)(residual[y[i]] - 1);"),
    ("if (!fixed) {", "if (1) {"),
    ("fmaxf(sum * sum - gains[c], 0)", "sum * sum"),
    ("rows->gradients[m * i + c] += g;", "rows->gradients[m * i + c] = g;"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])])
def test_a_broken_variant_is_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    check_all()
    monkeypatch.setattr("dps.kernels.ftrl.loops", variant("ftrl", "ftrl.h", old, new))
    with pytest.raises(AssertionError):
        check_all()
