"""The solvers of dps.optimize beside scipy's, scikit-learn's and closed forms, on numpy arrays and on plain vectors."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")
pytest.importorskip("sklearn")

import numpy as np
from oracles import mutant
from plain_vectors import PlainVector
from scipy.optimize import minimize, rosen, rosen_der
from scipy.optimize._dcsrch import DCSRCH
from scipy.sparse.linalg import cg
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression

from dps import optimize
from dps.errors import DPSError, InputError, InputTypeError, NotFiniteError
from dps.optimize import line_search, orthants, pairs
from dps.optimize.line_search import WolfeSearch


def rosenbrock(x):
    return float(rosen(x)), rosen_der(x)


def quartic(x):
    scales = np.arange(1.0, len(x) + 1)
    return float((scales * (x - 1) ** 2).sum() + ((x - 1) ** 4).sum()), 2 * scales * (x - 1) + 4 * (x - 1) ** 3


def blobs(rows=300, columns=8, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, columns))
    w = np.where(np.arange(columns) % 2, 0.0, rng.normal(size=columns) * 2)
    return X, X @ w + 0.3 * rng.normal(size=rows), (X @ w + rng.normal(size=rows) > 0).astype(float)


def logistic(X, y, l2=0.0):
    signs = 2 * y - 1

    def loss(w):
        z = signs * (X @ w)
        residual = -signs / (1 + np.exp(z))
        return float(np.logaddexp(0, -z).mean() + l2 / 2 * w @ w), X.T @ residual / len(y) + l2 * w

    return loss


def squares(X, y):
    def loss(w):
        error = X @ w - y
        return float(error @ error) / 2 / len(y), X.T @ error / len(y)

    return loss


def away(fun):
    """The function of numpy arrays, for plain vectors."""

    def of_plain(x, *more):
        value, gradient = fun(x.home(), *more)
        return value, PlainVector(gradient)

    return of_plain


def trace(solver, fun, x0, **settings):
    points = []
    result = solver(fun, x0, callback=lambda r: points.append(r.x), **settings)
    return result, points


SMOOTH = {"rosenbrock": (rosenbrock, np.full(10, -1.2)), "quartic": (quartic, np.zeros(30))}
SMOOTH["logistic"] = (logistic(*blobs()[::2], l2=0.01), np.zeros(8))


@pytest.mark.parametrize("m", [1, 3, 10])
@pytest.mark.parametrize("problem", SMOOTH)
def test_lbfgs_makes_the_iterates_of_scipy(problem, m):
    fun, x0 = SMOOTH[problem]
    theirs = []
    settings = {"maxcor": m, "gtol": 0, "ftol": 0, "maxiter": 25}
    minimize(fun, x0, jac=True, method="L-BFGS-B", callback=lambda x: theirs.append(x.copy()), options=settings)
    result, ours = trace(optimize.lbfgs, fun, x0, m=m, tol=0, f_tol=0, max_iter=25)
    assert result.nit == len(ours)
    assert len(ours) >= 10
    for n, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6, err_msg=f"iteration {n}")


@pytest.mark.parametrize("solver", ["lbfgs", "conjugate_gradient", "gradient_descent", "fista"])
@pytest.mark.parametrize("problem", ["quartic", "logistic"])
def test_solvers_find_the_minimum_of_scipy(problem, solver):
    fun, x0 = SMOOTH[problem]
    best = minimize(fun, x0, jac=True, method="L-BFGS-B", options={"gtol": 1e-10, "ftol": 0, "maxiter": 1000})
    settings = {} if solver in ("gradient_descent", "fista") else {"f_tol": 0}
    result = getattr(optimize, solver)(fun, x0, tol=1e-6, max_iter=5000, **settings)
    assert result.success
    assert result.status == 0
    assert "1e-06" in result.message
    np.testing.assert_allclose(result.x, best.x, atol=1e-4)
    np.testing.assert_allclose([result.fun, 0], [best.fun, np.linalg.norm(result.jac) - 1e-6 > 0], atol=1e-9)


def solved(solver, fun, x0, **settings):
    return getattr(optimize, solver)(fun, x0, **settings)


EVERY = {
    "lbfgs": {"m": 4},
    "owlqn": {"l1": 0.02, "m": 4},
    "conjugate_gradient": {},
    "gradient_descent": {},
    "fista": {"l1": 0.02},
    "mini_batch_gradient_descent": {"penalty": "l1", "regularization": 0.01, "tol": 0},
}


@pytest.mark.parametrize("solver", EVERY)
def test_vectors_of_another_class_give_the_same_numbers(solver):
    """PlainVector refuses everything but the documented operations."""
    fun = logistic(*blobs()[::2], l2=0.01)
    fun = (lambda inner: lambda x, _: inner(x))(fun) if solver.startswith("mini") else fun
    expected = solved(solver, fun, np.zeros(8), max_iter=15, **EVERY[solver])
    result = solved(solver, away(fun), PlainVector(np.zeros(8)), max_iter=15, **EVERY[solver])
    assert (result.nit, result.nfev, result.status) == (expected.nit, expected.nfev, expected.status)
    np.testing.assert_allclose(result.x.home(), expected.x, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(result.jac.home(), expected.jac, rtol=1e-9, atol=1e-12)
    assert result.fun == pytest.approx(expected.fun)


def test_a_vector_of_penalties_may_be_plain():
    fun, l1 = logistic(*blobs()[::2]), np.r_[0.0, np.full(7, 0.05)]
    for solver in (optimize.owlqn, optimize.fista):
        expected = solver(fun, np.zeros(8), l1=l1, max_iter=10)
        np.testing.assert_allclose(
            solver(away(fun), PlainVector(np.zeros(8)), l1=PlainVector(l1), max_iter=10).x.home(), expected.x
        )


def test_admm_and_linear_systems_of_plain_vectors():
    X, y, _ = blobs()
    parts = [squares(X[n::3], y[n::3]) for n in range(3)]
    expected = optimize.admm(parts, np.zeros(8), l1=0.1, max_iter=5)
    result = optimize.admm([away(part) for part in parts], PlainVector(np.zeros(8)), l1=0.1, max_iter=5)
    np.testing.assert_allclose(result.x.home(), expected.x, rtol=1e-6, atol=1e-9)
    A = X.T @ X
    result = optimize.linear_conjugate_gradient(lambda v: PlainVector(A @ v.home()), PlainVector(X.T @ y), tol=1e-10)
    np.testing.assert_allclose(result.x.home(), np.linalg.solve(A, X.T @ y), rtol=1e-4)


def test_round_trips_and_vectors_of_an_iteration_of_lbfgs():
    trips = []
    fun, m = away(rosenbrock), 3
    PlainVector.count()
    start = PlainVector.alive
    result = optimize.lbfgs(
        fun,
        PlainVector(np.full(10, -1.2)),
        m=m,
        max_iter=30,
        callback=lambda r: trips.append((r.nfev, PlainVector.trips["dots"])),
    )
    assert result.nit == 30
    steps = np.diff(trips, axis=0)
    assert (steps[:, 1] == steps[:, 0] + 1).all(), "one call for each evaluation, and one for the direction"
    # Pairs; x, gradient and direction; a trial's x and gradient; intermediate results of expressions; the caller's x0.
    assert PlainVector.most - start <= 2 * m + 3 + 2 + 4 + 1


def test_dots_of_float32_are_summed_in_float64():
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=100_000).astype(np.float32) for _ in range(2))
    exact = np.dot(a.astype(np.float64), b.astype(np.float64))
    assert optimize.dots([(a, b), (a, a)])[0] == pytest.approx(exact, rel=1e-12)
    assert abs(np.dot(a, b) - exact) > 1e-8 * abs(exact), "numpy's own is not"
    assert optimize.combine([0.5, 2.0], [a, b]).dtype == np.float32
    np.testing.assert_allclose(optimize.combine([0.5, 2.0], [a, b]), 0.5 * a + 2 * b, rtol=1e-6)


def test_a_coefficient_of_zero_hides_nan():
    assert optimize.combine([0.0, 1.0], [np.array([np.nan]), np.array([2.0])]).tolist() == [2.0]
    assert optimize.combine([0.0], [np.array([np.nan])]).tolist() == [0.0]


def test_arrays_without_the_method_go_through_dot():
    class Bare:
        def __init__(self, values):
            self.values = np.asarray(values)

        def __array_function__(self, function, types, arguments, more):
            assert function is np.dot
            return np.float32(np.dot(*(each.values for each in arguments)))

    assert optimize.dots([(Bare([1.0, 2.0]), Bare([3.0, 4.0]))]).tolist() == [11.0]


# -- the line search


FUNCTIONS = {
    "parabola": (lambda a: (a - 3) ** 2, lambda a: 2 * (a - 3)),
    "wave": (lambda a: np.sin(3 * a) - a / 5 + a * a / 50, lambda a: 3 * np.cos(3 * a) - 1 / 5 + a / 25),
    "more": (lambda a: -a / (a * a + 2), lambda a: (a * a - 2) / (a * a + 2) ** 2),
    "wall": (lambda a: np.exp(a) - 30 * a, lambda a: np.exp(a) - 30),
    "quintic": (
        lambda a: (a + 0.004) ** 5 - 2 * (a + 0.004) ** 4,
        lambda a: 5 * (a + 0.004) ** 4 - 8 * (a + 0.004) ** 3,
    ),
}


def hills(seed):
    """A random sum of waves and a parabola, which falls at 0."""
    rng = np.random.default_rng(seed)
    heights, rates, phases = rng.normal(size=5), np.exp(rng.normal(size=5)), rng.uniform(0, 6, 5)
    tilt = float((heights * rates * np.cos(phases)).sum() + abs(rng.normal()))

    def value(a):
        return float((heights * np.sin(rates * a + phases)).sum()) - tilt * a + a * a / 10

    return value, lambda a: float((heights * rates * np.cos(rates * a + phases)).sum()) - tilt + a / 5


FUNCTIONS |= {f"hills {seed}": hills(seed) for seed in range(60)}


def searched(search, phi, slope, begin):
    seen = []
    while not search.done and len(seen) < 30:
        seen.append(search.step)
        search.tell(phi(search.step), slope(search.step))
    return seen


def scipys(phi, slope, begin, curvature):
    seen = []

    def noted(a):
        seen.append(float(a))
        return phi(a)

    DCSRCH(noted, slope, 1e-3, curvature, 0.1, 0, 1e10)(begin, phi0=phi(0.0), derphi0=slope(0.0), maxiter=30)
    return seen


def wrong_steps(make) -> list:
    """(function, first step, curvature) where the steps differ from scipy's."""
    wrong = []
    for name, (phi, slope) in FUNCTIONS.items():
        if slope(0.0) >= 0:
            phi, slope = (lambda a, f=phi: f(a + 1.0)), (lambda a, f=slope: f(a + 1.0))
        for begin in (1e-3, 0.1, 1.0, 10.0, 100.0):
            for curvature in (0.1, 0.9):
                expected = scipys(phi, slope, begin, curvature)
                try:
                    seen = searched(make(phi(0.0), slope(0.0), begin, curvature), phi, slope, begin)
                    np.testing.assert_allclose(seen, expected, rtol=1e-9)
                except (AssertionError, ArithmeticError, ValueError):
                    wrong.append((name, begin, curvature))
    return wrong


def test_the_line_search_makes_the_steps_of_scipy():
    assert not wrong_steps(WolfeSearch)


@pytest.mark.parametrize(
    ("method", "old", "new"),
    [
        ("tell", "self._wanted if self._stage == 1 and value <= self._best.value and value > enough else 0.0", "0.0"),
        ("tell", "abs(slope) <= self._curvature", "slope <= self._curvature"),
        ("_narrow", "0.66", "1.66"),
        ("_narrow", "step + 4.0 *", "step + 2.0 *"),
        ("_narrow", "min(best, other), max(best, other)", "0.0, max(best, other)"),
    ],
)
def test_wrong_line_searches_are_noticed(monkeypatch, method, old, new):
    monkeypatch.setattr(WolfeSearch, method, mutant(getattr(WolfeSearch, method), old, new))
    assert wrong_steps(WolfeSearch)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if closer else cubic + (quadratic - cubic) / 2.0", "if closer else quadratic"),
        ("cubic if abs(cubic - here.step) > abs(secant - here.step) else secant", "secant"),
        ("0.66", "0.9"),
        ("_cubic(here, other)", "(here.step + other.step) / 2"),
        ("secant if nearer else cubic", "cubic if nearer else secant"),
    ],
)
def test_wrong_interpolations_are_noticed(monkeypatch, old, new):
    monkeypatch.setattr(line_search, "_next", mutant(line_search._next, old, new))
    assert wrong_steps(WolfeSearch)


def test_a_loss_that_overflows_makes_the_step_smaller():
    def barrier(x):
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(-np.log(1 - x).sum() + (0.5 * x).sum() * -8), 1 / (1 - x) - 4

    result = optimize.lbfgs(barrier, np.full(3, -20.0))
    assert result.success
    np.testing.assert_allclose(result.x, 0.75, atol=1e-4)


# -- the history


def two_loops(steps, changes, gradient):
    """The recursion as in Nocedal and Wright, algorithm 7.4, on the vectors themselves."""
    q, alphas = gradient.copy(), []
    for s, y in zip(steps[::-1], changes[::-1], strict=True):
        alphas.append(s @ q / (s @ y))
        q -= alphas[-1] * y
    q *= steps[-1] @ changes[-1] / (changes[-1] @ changes[-1])
    for s, y, alpha in zip(steps, changes, alphas[::-1], strict=True):
        q += (alpha - y @ q / (s @ y)) * s
    return -q


def history_is_right() -> bool:
    rng, most, known = np.random.default_rng(1), 4, pairs.Pairs(4)
    A = np.diag(np.arange(1.0, 13.0))
    steps = []
    for n in range(9):
        gradient = rng.normal(size=12)
        direction, slope = known.direction(gradient)
        expected = two_loops(steps, [A @ s for s in steps], gradient) if steps else -gradient
        if not np.allclose(direction, expected, rtol=1e-8) or not np.isclose(slope, expected @ gradient):
            return False
        if n % 3 != 2:  # an iteration whose pair is not kept
            known.make_room()
            steps = [*steps, rng.normal(size=12)][-most:]
            known.add(steps[-1], A @ steps[-1])
    return len(known) == most


def test_the_vector_free_recursion_equals_the_two_loops():
    assert history_is_right()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("make_room", "[0, pairs], 0)", "[0, pairs - 1], 0)"),
        ("make_room", "self._known -= 1", "pass"),
        ("direction", "[*range(known), *range(pairs, pairs + known)]", "[*range(2 * known)]"),
        ("direction", "not (i in old and j in old)", "i not in old"),
    ],
)
def test_wrong_histories_are_noticed(monkeypatch, name, old, new):
    monkeypatch.setattr(pairs.Pairs, name, mutant(getattr(pairs.Pairs, name), old, new))
    try:
        assert not history_is_right()
    except (ValueError, IndexError):
        pass


# -- penalties


@pytest.mark.parametrize("solver", ["owlqn", "fista"])
@pytest.mark.parametrize("l1", [0.01, 0.1, 1.0])
def test_l1_least_squares_beside_lasso(solver, l1):
    X, y, _ = blobs()
    theirs = Lasso(alpha=l1, fit_intercept=False, tol=1e-12, max_iter=100_000).fit(X, y).coef_
    result = solved(solver, squares(X, y), np.zeros(8), l1=l1, tol=1e-8, f_tol=0, max_iter=2000)
    np.testing.assert_allclose(result.x, theirs, atol=1e-6)
    assert ((result.x == 0) == (theirs == 0)).all(), "the zeros are exact"


@pytest.mark.parametrize("solver", ["owlqn", "fista"])
def test_elastic_net(solver):
    X, y, _ = blobs()
    inner = squares(X, y)
    theirs = ElasticNet(alpha=0.2, l1_ratio=0.5, fit_intercept=False, tol=1e-12).fit(X, y).coef_
    result = solved(
        solver, lambda w: (inner(w)[0] + 0.05 * w @ w, inner(w)[1] + 0.1 * w), np.zeros(8), l1=0.1, tol=1e-8, f_tol=0
    )
    np.testing.assert_allclose(result.x, theirs, atol=1e-6)


@pytest.mark.parametrize("solver", ["owlqn", "fista"])
def test_l1_logistic_beside_liblinear(solver):
    X, _, y = blobs(columns=20)
    strength = 0.03
    model = LogisticRegression(
        l1_ratio=1, solver="saga", C=1 / (strength * len(y)), fit_intercept=False, tol=1e-10, max_iter=100_000
    )
    theirs = model.fit(X, y).coef_[0]
    result = solved(solver, logistic(X, y), np.zeros(20), l1=strength, tol=1e-7, f_tol=0, max_iter=2000)
    np.testing.assert_allclose(result.x, theirs, atol=1e-5)
    assert 0 < (result.x == 0).sum() < 20
    assert ((result.x == 0) == (theirs == 0)).all()


def owlqn_is_right() -> bool:
    X, _, y = blobs(columns=20)
    fun, l1 = logistic(X, y), np.r_[0.0, np.full(19, 0.03)]
    seen = []
    result = optimize.owlqn(
        fun, np.zeros(20), l1=l1, tol=1e-7, f_tol=0, max_iter=60, callback=lambda r: seen.append(r.fun)
    )
    gradient = fun(result.x)[1]
    there = result.x != 0
    if not there.any():
        return False
    stationary = (
        np.abs(gradient + l1 * np.sign(result.x))[there].max() < 1e-6 and (np.abs(gradient) <= l1 + 1e-6)[~there].all()
    )
    return bool(result.success and stationary and (np.diff(seen) <= 0).all() and 0 < there.sum() < 20)


def test_owlqn_ends_where_no_direction_is_downhill():
    assert owlqn_is_right()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("pseudo_gradient", "soft_threshold(gradient, l1)", "gradient"),
        ("pseudo_gradient", "gradient + l1 *", "gradient - l1 *"),
        ("_step", "x * orthant > 0.0, x, 0.0", "x * orthant > 0.0, x, x"),
        ("_step", "-np.sign(slopes)", "np.sign(slopes)"),
    ],
)
def test_wrong_owlqn_is_noticed(monkeypatch, name, old, new):
    monkeypatch.setattr(orthants, name, mutant(getattr(orthants, name), old, new))
    assert not owlqn_is_right()


def test_fista_is_faster_than_its_steps_alone_and_restarts():
    rng = np.random.default_rng(0)
    A = np.diag(np.logspace(0, -4, 50))
    b = rng.normal(size=50)
    fun = squares(A, A @ b)
    ends = {}
    for restart in (True, False):
        ends[restart] = optimize.fista(fun, np.zeros(50), curvature=1 / 50, restart=restart, tol=0, max_iter=300).fun
    plain = optimize.gradient_descent(fun, np.zeros(50), step_size=50, tol=0, max_iter=300).fun
    assert ends[True] < plain / 5
    assert ends[False] < plain / 5


def test_fista_with_a_proximal_operator_of_the_user():
    """Nonnegative least squares."""
    from scipy.optimize import nnls

    X, y, _ = blobs()
    result = optimize.fista(
        squares(X, y), np.zeros(8), proximal=lambda v, step: (np.maximum(v, 0), 0.0), tol=1e-9, max_iter=2000
    )
    np.testing.assert_allclose(result.x, nnls(X, y)[0], atol=1e-6)


@pytest.mark.parametrize("rho", [0.01, 1.0, 100.0])
def test_consensus_lasso(rho):
    X, y, _ = blobs()
    theirs = Lasso(alpha=0.1, fit_intercept=False, tol=1e-12).fit(X, y).coef_
    parts = [squares(X[n::4], y[n::4]) for n in range(4)]  # means of as many rows each: four times the mean
    result = optimize.admm(parts, np.zeros(8), l1=0.4, rho=rho, tol=1e-6, max_iter=500)
    assert result.success
    assert "residual" in result.message
    np.testing.assert_allclose(result.x, theirs, atol=1e-4)
    assert result.fun == pytest.approx(sum(p(result.x)[0] for p in parts) + 0.4 * np.abs(result.x).sum())


def test_consensus_with_closed_forms_equals_the_paper():
    """Ridge of two parts: x_i = (A_i + rho)^-1 (b_i + rho v), written out for three iterations."""
    X, y, _ = blobs()
    halves = [(X[n::2].T @ X[n::2] / 150, X[n::2].T @ y[n::2] / 150) for n in range(2)]
    near = [lambda v, rho, A=A, b=b: np.linalg.solve(A + rho * np.eye(8), b + rho * v) for A, b in halves]
    z, us = np.zeros(8), [np.zeros(8), np.zeros(8)]
    for _ in range(3):
        xs = [each(z - u, 0.7) for each, u in zip(near, us, strict=True)]
        z = np.mean([x + u for x, u in zip(xs, us, strict=True)], axis=0)
        us = [u + x - z for x, u in zip(xs, us, strict=True)]
    parts = [squares(X[n::2], y[n::2]) for n in range(2)]
    result = optimize.admm(parts, np.zeros(8), proximals=near, rho=0.7, adapt=False, max_iter=3)
    np.testing.assert_allclose(result.x, z, rtol=1e-10)
    assert result.status == 1


# -- linear systems


@pytest.mark.parametrize("precondition", [False, True])
def test_linear_conjugate_gradients_beside_scipy(precondition):
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(40, 40)))[0]
    A = Q @ np.diag(np.logspace(0, 3, 40)) @ Q.T
    A, b = (A + A.T) / 2, rng.normal(size=40)
    inverse = 1 / np.diag(A)
    theirs, ours = [], []
    cg(
        A,
        b,
        rtol=1e-8,
        maxiter=20,
        M=np.diag(inverse) if precondition else None,
        callback=lambda x: theirs.append(x.copy()),
    )
    result = optimize.linear_conjugate_gradient(
        lambda x: A @ x, b, tol=1e-8, max_iter=20,
        preconditioner=(lambda r: inverse * r) if precondition else None, callback=lambda r: ours.append(r.x),
    )  # fmt: skip
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    np.testing.assert_allclose(result.jac, A @ result.x - b, atol=1e-9)
    assert result.fun == pytest.approx(result.x @ A @ result.x / 2 - b @ result.x)
    with pytest.raises(InputError, match="not positive definite"):
        optimize.linear_conjugate_gradient(lambda x: -(A @ x), b)
    with pytest.raises(InputError, match="one length"):
        optimize.linear_conjugate_gradient(lambda x: A @ x, b, np.zeros(3))


# -- ends, and what is refused


def test_an_end_by_each_reason():
    fun, x0 = SMOOTH["rosenbrock"]
    assert optimize.lbfgs(fun, x0, max_iter=3).status == 1
    done = optimize.lbfgs(fun, x0, f_tol=0.5, max_iter=50)
    assert done.success
    assert "f_tol=0.5" in done.message
    assert optimize.lbfgs(fun, np.ones(10)).nit == 0, "a minimum"

    def stop(result):
        if result.nit == 4:
            raise StopIteration

    for solver, settings in EVERY.items():
        f = (lambda x, _: fun(x)) if solver.startswith("mini") else fun
        result = solved(
            solver,
            f,
            x0 * 0.1,
            max_iter=50,
            callback=stop,
            **settings | ({"step_size": 1e-4} if solver.startswith("mini") else {}),
        )
        assert (result.status, result.nit, result.success) == (99, 4, False), solver
    wrong = optimize.lbfgs(lambda x: (fun(x)[0], -fun(x)[1]), x0)
    assert wrong.status == 2
    assert "not the gradient" in wrong.message
    assert not wrong.success
    np.testing.assert_array_equal(wrong.x, x0)


def test_x0_is_kept_and_may_be_a_list():
    x0 = np.zeros(4)
    for solver, settings in EVERY.items():
        f = (lambda x, _: quartic(x)) if solver.startswith("mini") else quartic
        more = settings | ({"step_size": 0.01} if solver.startswith("mini") else {})
        one, two = (solved(solver, f, start, max_iter=5, **more) for start in (x0, [0, 0, 0, 0]))
        np.testing.assert_array_equal(one.x, two.x)
        assert not x0.any()
    assert (
        optimize.lbfgs(lambda x: (float(((x - 1) ** 2).sum()), 2 * (x - 1)), np.zeros(4, np.float32)).x.dtype
        == np.float32
    )


REFUSED = [
    (InputTypeError, "fun is a function", {"fun": 3}),
    (InputTypeError, "callback", {"callback": 3}),
    (InputTypeError, r"\(loss, gradient\)", {"fun": lambda x: 1.0}),
    (InputTypeError, "loss is a ndarray of shape", {"fun": lambda x: (x, x)}),
    (InputError, r"x has shape \(3,\)", {"fun": lambda x: (0.0, x[:2])}),
    (InputError, "new array", {"fun": lambda x: (1.0, x)}),
    (NotFiniteError, "x0 is nan", {"fun": lambda x: (np.nan, x * 1)}),
    (NotFiniteError, "gradient has NaN", {"fun": lambda x: (1.0, x * np.nan)}),
    (InputError, "one dimension", {"x0": np.zeros((2, 2))}),
    (InputError, "one dimension", {"x0": []}),
    (InputTypeError, "dtype", {"x0": np.array(["a"])}),
    (InputError, "tol is a finite", {"tol": -1}),
    (InputError, "tol is a finite", {"tol": "small"}),
    (InputError, "max_iter is a whole", {"max_iter": 0}),
    (InputError, "max_iter is a whole", {"max_iter": 1.5}),
    (InputError, "max_iter is a whole", {"max_iter": True}),
]


@pytest.mark.parametrize(("error", "words", "change"), REFUSED)
def test_what_is_refused(error, words, change):
    settings = {"fun": quartic, "x0": np.full(3, 0.5)} | change
    for solver in ("lbfgs", "owlqn", "conjugate_gradient", "gradient_descent", "fista"):
        more = {"l1": 0.1} if solver == "owlqn" else {}
        with pytest.raises(error, match=words) as caught:
            getattr(optimize, solver)(**settings, **more)
        assert isinstance(caught.value, DPSError)


def test_settings_of_one_solver_that_are_refused():
    x0 = np.zeros(3)
    for l1, words in [
        (-1, "l1 is a finite"),
        (np.ones(2), r"shape \(2,\)"),
        (np.array([1, -1, 0.0]), "smallest is -1"),
    ]:
        with pytest.raises(InputError, match=words):
            optimize.owlqn(quartic, x0, l1=l1)
    with pytest.raises(InputError, match="m is a whole"):
        optimize.lbfgs(quartic, x0, m=0)
    with pytest.raises(InputError, match="step_size"):
        optimize.gradient_descent(quartic, x0, step_size=0)
    with pytest.raises(InputError, match="penalty"):
        optimize.mini_batch_gradient_descent(lambda x, i: quartic(x), x0, penalty="l3")
    with pytest.raises(InputTypeError, match="2 funs and 1 proximals"):
        optimize.admm([quartic] * 2, x0, proximals=[lambda v, rho: v])
    with pytest.raises(InputTypeError, match="funs is a list"):
        optimize.admm([], x0)
    buffer = np.zeros(3)

    def reused(x):
        buffer[:] = quartic(x)[1]
        return quartic(x)[0], buffer

    with pytest.raises(InputError, match="new array each time"):
        optimize.lbfgs(reused, x0)
