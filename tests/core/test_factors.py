"""Steps of factor models beside the same steps in numpy, in float64; what is refused; broken variants."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variant

from dps.errors import InputError
from dps.kernels import least_squares, ranking_steps, rating_steps
from dps.kernels.loops import factors

USERS, ITEMS, STEPS = 6, 9, 150  # more than the factors of which a loss has the logarithm


def rows_of(factors_count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(factors_count)
    return tuple(rng.normal(0, 0.4, (count, 1 + factors_count)).astype(np.float32) for count in (USERS, ITEMS))


def codes_of(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    users, items = rng.integers(USERS, size=STEPS), rng.integers(ITEMS, size=STEPS)
    return users, items, (items + rng.integers(1, ITEMS, STEPS)) % ITEMS


WIDTHS = [0, 1, 3, 16, 17, 33, 64]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rate", [0.05, 3.0])
def test_rating_steps(width: int, rate: float) -> None:
    p, q = rows_of(width)
    users, items, _ = codes_of(width)
    ratings = np.random.default_rng(1).normal(3, 1, STEPS)
    a, b, loss = p.astype(float), q.astype(float), 0.0
    wanted = np.zeros(USERS), np.zeros(ITEMS)
    for u, i, r in zip(users, items, ratings, strict=True):
        e = r - 3.0 - a[u, 0] - b[i, 0] - a[u, 1:] @ b[i, 1:]
        curvature = 2 + a[u, 1:] @ a[u, 1:] + b[i, 1:] @ b[i, 1:] + 0.1
        step, before = min(rate, 1 / curvature), (a[u, 1:].copy(), b[i, 1:].copy())
        new = a[u] + step * (e * np.append(1, b[i, 1:]) - 0.1 * a[u])
        b[i] += step * (e * np.append(1, a[u, 1:]) - 0.1 * b[i])
        a[u] = new
        loss += e**2
        sizes = 1.1 + before[0] @ before[0], 1.1 + before[1] @ before[1]
        wanted[0][u] += sizes[1]
        wanted[1][i] += sizes[0]
    reach = np.zeros(USERS, np.float32), np.zeros(ITEMS, np.float32)
    again = p.copy(), q.copy()
    found = rating_steps(p, q, users, items, ratings, mean=3.0, rate=rate, penalty=0.1, reach=reach)
    assert found == pytest.approx(loss, rel=1e-4)
    for ours, theirs in ((p, a), (q, b), (reach[0], wanted[0]), (reach[1], wanted[1])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    rating_steps(*again, users, items, ratings, mean=3.0, rate=rate, penalty=0.1)
    assert all(np.array_equal(x, y) for x, y in zip(again, (p, q), strict=True)), "the same bits without reach"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rate", [0.05, 30.0])
def test_ranking_steps(width: int, rate: float) -> None:
    p, q = rows_of(width)
    users, items, others = codes_of(width)
    a, b, loss = p.astype(float), q.astype(float), 0.0
    wanted = np.zeros(USERS), np.zeros(ITEMS)
    for u, i, j in zip(users, items, others, strict=True):
        apart = b[i] - b[j]
        margin = apart[0] + a[u, 1:] @ apart[1:]
        s = 1 / (1 + np.exp(margin))
        curvature = (apart[1:] @ apart[1:] + 2 + 2 * a[u, 1:] @ a[u, 1:]) / 4 + 0.1
        step = min(rate, 1 / curvature)
        one, user = np.append(1, a[u, 1:]), (apart[1:] @ apart[1:]) / 4 + 0.1
        a[u, 1:] += step * (s * apart[1:] - 0.1 * a[u, 1:])
        b[i] += step * (s * one - 0.1 * b[i])
        b[j] += step * (-s * one - 0.1 * b[j])
        loss += np.logaddexp(0, -margin)
        wanted[0][u] += user
        wanted[1][i] += one @ one / 4 + 0.1
        wanted[1][j] += one @ one / 4 + 0.1
    reach = np.zeros(USERS, np.float32), np.zeros(ITEMS, np.float32)
    found = ranking_steps(p, q, users, items, others, rate=rate, penalty=0.1, reach=reach)
    assert found == pytest.approx(loss, rel=1e-4)
    for ours, theirs in ((p, a), (q, b), (reach[0], wanted[0]), (reach[1], wanted[1])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def test_large_margins_do_not_overflow() -> None:
    q = np.array([[2000.0], [0.0]], np.float32)
    assert ranking_steps(np.zeros((1, 1), np.float32), q, [0], [1], [0], rate=0.1, penalty=0.0) == 2000.0
    assert ranking_steps(np.zeros((1, 1), np.float32), q, [0], [0], [1], rate=0.1, penalty=0.0) == 0.0


@pytest.mark.parametrize("width", WIDTHS[1:])
@pytest.mark.parametrize("steps", [0, 1, 3, 200])
def test_least_squares(width: int, steps: int) -> None:
    rng = np.random.default_rng(width)
    counts = np.array([0, 1, 3, 4, 5, 9, 30])
    starts = np.append(0, np.cumsum(counts))
    others, extra = rng.integers(50, size=starts[-1]), rng.exponential(2.0, starts[-1])
    y, x = rng.normal(0, 0.5, (50, width)), rng.normal(0, 0.5, (len(counts), width)).astype(np.float32)
    gram = y.T @ y + 3.0 * np.eye(width)
    value, wanted = 0.0, []
    for n, start in enumerate(starts[:-1]):
        rows, e = y[others[start : starts[n + 1]]], extra[start : starts[n + 1]]
        A, b = gram + rows.T @ (e[:, None] * rows), rows.T @ (1 + e)
        solution = np.linalg.solve(A, b) if steps == 0 else by_conjugate_gradients(A, b, x[n].astype(float), steps)
        wanted.append(solution)
        value += solution @ A @ solution - 2 * b @ solution
    found = least_squares(x, y, starts, others, extra, gram, steps)
    np.testing.assert_allclose(x, wanted, rtol=1e-3, atol=1e-3)
    assert found == pytest.approx(value, rel=1e-4, abs=1e-4)


def by_conjugate_gradients(A: np.ndarray, b: np.ndarray, x: np.ndarray, steps: int) -> np.ndarray:
    residual = b - A @ x
    direction = residual.copy()
    for _ in range(steps):
        size = residual @ residual
        if size < 1e-20:
            break
        image = A @ direction
        x = x + size / (direction @ image) * direction
        residual = residual - size / (direction @ image) * image
        direction = residual + residual @ residual / size * direction
    return x


P, Q = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
RATED, RANKED = {"mean": 0.0, "rate": 0.1, "penalty": 0.0}, {"rate": 0.1, "penalty": 0.0}
EYE = np.eye(3, dtype=np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rating_steps(P.astype(float), Q, [0], [0], [1.0], **RATED), "users' rows are rows that change"),
        (lambda: rating_steps(P, Q[:, ::2], [0], [0], [1.0], **RATED), "contiguous array"),
        (lambda: rating_steps(P, Q[:, :2].copy(), [0], [0], [1.0], **RATED), r"shapes \(2, 3\) and \(2, 2\)"),
        (lambda: rating_steps(P, Q, [2], [0], [1.0], **RATED), "users from 2 to 2, and there are 2 rows"),
        (lambda: rating_steps(P, Q, [0], np.array([-1], np.int32), [1.0], **RATED), "items: code -1"),
        (lambda: rating_steps(P, Q, [0], [0, 1], [1.0], **RATED), "2 items for 1 steps"),
        (lambda: rating_steps(P, Q, [0.5], [0], [1.0], **RATED), "numbers of rows, integers"),
        (lambda: rating_steps(P, Q, [0], [0], [1.0], **RATED, reach=(P[0], Q[0])), "a number for each row"),
        (lambda: rating_steps(P, Q, [0], [0], [1.0], **RATED, reach=(P[0].astype(float), Q[0])), "two contiguous"),
        (lambda: ranking_steps(P, Q, [0], [1], [1], **RANKED), "place 0 compares item 1 with itself"),
        (lambda: ranking_steps(P, Q, [0], [1], [3], **RANKED), "others from 3 to 3"),
        (lambda: least_squares(P, Q, [0, 1, 1], [5], [1.0], EYE), "others from 5 to 5"),
        (lambda: least_squares(P, Q, [0, 1], [0], [1.0], EYE), "starts does not describe the 1 ratings of 2 rows"),
        (lambda: least_squares(P, Q, [0, 2, 1], [0], [1.0], EYE), "starts does not describe"),
        (lambda: least_squares(P, Q, [0, 1, 1], [0], [1.0], EYE[:2]), "wanted"),
        (lambda: least_squares(P, Q, [0, 1, 1], [0], [1.0], 0 * EYE), "a regularization above 0 makes one"),
        (lambda: least_squares(P, Q, [0, 1, 1], [0], [1.0], EYE, steps=-1), "steps is a number of steps"),
    ],
)
def test_wrong_input_is_refused(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_arrays_of_another_type_are_refused_by_the_core() -> None:
    codes, values = np.zeros(1, np.int32), np.zeros(1, np.float32)
    with pytest.raises(TypeError, match="float32 wanted"):
        factors.rating_steps(P.astype(float), Q, None, None, codes, codes, values, 0.0, 0.1, 0.0)
    with pytest.raises(TypeError, match="int32 wanted"):
        factors.rating_steps(P, Q, None, None, codes.astype(np.int64), codes, values, 0.0, 0.1, 0.0)


WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("factors.h", "p[k] = keep * before + move * q[k];", "p[k] = before + move * q[k];"),
    ("factors.h", "sums[k] + sums[k + 8]", "sums[k] + sums[k]"),
    ("factors.h", "q[k] = keep * q[k] + move * before;\n        }", "q[k] = keep * q[k] + move * p[k];\n        }"),
    ("factors.h", "fminf(rows->rate, 1.0f / (p_size + q_size + penalty))", "rows->rate"),
    ("factors.h", "p_reach[users[j]] += q_size", "p_reach[users[j]] += p_size"),
    ("factors.h", "o[0] = keep * o[0] - move", "o[0] = keep * o[0] + move"),
    ("factors.h", "            product = 1;", ""),
    ("factors.h", "return total + log(product);", "return total;"),
    ("factors.h", "apart[k] += difference * difference", "apart[k] += difference"),
    ("factors.h", "size[k] += p[i] * p[i]", "size[k] += p[i]"),
    ("factors.h", "form -= (double)by * size", "form += (double)by * size"),
    ("factors.h", "weights[c] = right ? 1.0f + extra - part", "weights[c] = right ? extra - part"),
    ("factors.h", "residual[k] + again * direction[k]", "residual[k]"),
    ("factors.h", "sum -= matrix[c * n + row] * solution[c]", "sum -= matrix[row * n + c] * solution[c]"),
    ("factors.h", "+ weights[3] * d[k]", "+ weights[3] * c[k]"),
    ("factors.pyx", "places + ends[owner]", "places"),
    ("factors.pyx", "solved + owner * n, steps", "solved, steps"),
]


def check_all() -> None:
    for width in (3, 33):
        for rate in (0.05, 30.0):
            test_rating_steps(width, rate)
            test_ranking_steps(width, rate)
        for steps in (0, 3, 200):
            test_least_squares(width, steps)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_variant_is_caught(monkeypatch, file: str, old: str, new: str) -> None:
    check_all()
    monkeypatch.setattr("dps.kernels.factors.loops", variant("factors", file, old, new))
    with pytest.raises(AssertionError):
        check_all()
