"""Sparse logistic regression kernels against scipy's products, plain formulas and scikit-learn's loss."""

import numpy as np
import pytest
import scipy.sparse
import scipy.special
import sklearn.metrics
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.errors import InputError
from dps.kernels import (
    binary_residuals,
    field_gradient,
    field_scores,
    gradient,
    logistic,
    margins,
    multinomial_residuals,
    pair_gradient,
    pair_scores,
)
from dps.kernels.loops import sparse

PARAMETERS = np.zeros((5, 3), np.float32)


def batch(rows=300, k=70, dtype=np.float32, seed=0, density=0.1):
    X = scipy.sparse.random(rows, k, density=density, format="csr", random_state=seed, dtype=np.float64).astype(dtype)
    rng = np.random.default_rng(seed)
    return X, rng.normal(size=k).astype(np.float32), rng.integers(0, 2, rows), rng.random(rows)


def parts(X, ones=False):
    return X.indptr, X.indices, None if ones else X.data


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("m", [None, 1, 2, 5])
def test_products(dtype, ones, m):
    X, _, _, _ = batch(dtype=dtype)
    dense = (X.toarray() != 0) if ones else X.toarray()
    rng = np.random.default_rng(1)
    shape = () if m is None else (m,)
    w, b = rng.normal(size=(70, *shape)).astype(np.float32), rng.normal(size=shape)
    z = margins(*parts(X, ones), w, b)
    assert z.dtype == np.float32
    np.testing.assert_allclose(z, dense @ w.astype(float) + b, rtol=1e-4, atol=1e-5)
    residual = rng.normal(size=(300, *shape)).astype(np.float32)
    out = gradient(*parts(X, ones), residual, 70)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, dense.T.astype(float) @ residual, rtol=1e-4, atol=1e-5)
    twice = gradient(*parts(X, ones), residual, 70, out=out)
    assert twice is out
    np.testing.assert_allclose(out, 2 * (dense.T.astype(float) @ residual), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 256, 1000])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ones", [False, True])
def test_fused_two_classes(rows, weighted, ones):
    X, w, y, sample = batch(rows=rows)
    sample = sample if weighted else None
    loss, slope, intercept = logistic(*parts(X, ones), w, 0.3, y, sample)
    z = margins(*parts(X, ones), w, 0.3)
    residual, expected = binary_residuals(z, y, sample)
    np.testing.assert_allclose(loss, expected, rtol=1e-9)
    np.testing.assert_allclose(slope, gradient(*parts(X, ones), residual, 70), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(intercept, residual.sum(dtype=float), rtol=1e-4, atol=1e-6)
    if rows:
        p = scipy.special.expit(z.astype(float))
        np.testing.assert_allclose(residual, (p - y) * (1 if sample is None else sample), rtol=1e-5, atol=1e-7)
        skl = sklearn.metrics.log_loss(y, p, sample_weight=sample, labels=[0, 1])
        np.testing.assert_allclose(loss, skl, rtol=1e-6)
    column = logistic(*parts(X, ones), w[:, None], 0.3, y, sample, scale=0.5, out=np.ones((70, 1), np.float32))
    np.testing.assert_allclose(column[1][:, 0], 1 + 0.5 * slope, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(column[2], 0.5 * intercept, rtol=1e-4, atol=1e-6)
    assert column[0] == loss


def test_gradient_is_the_slope_of_the_loss():
    X, w, y, _ = batch(rows=100, k=10, dtype=np.float64)
    _, slope, intercept = logistic(*parts(X), w, 0.1, y, scale=1 / 100)

    def loss(v, b):
        z = X @ v + b
        return float(np.mean(np.logaddexp(0, z) - y * z))

    for j in range(10):
        step = np.zeros(10)
        step[j] = 1e-5
        slope_j = (loss(w + step, 0.1) - loss(w - step, 0.1)) / 2e-5
        np.testing.assert_allclose(slope[j], slope_j, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(intercept, (loss(w, 0.1 + 1e-5) - loss(w, 0.1 - 1e-5)) / 2e-5, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_many_classes(weighted):
    rng = np.random.default_rng(2)
    z = rng.normal(size=(200, 7)).astype(np.float32) * 4
    y = rng.integers(0, 7, 200)
    sample = rng.random(200) if weighted else None
    residual, loss = multinomial_residuals(z, y, sample)
    p = scipy.special.softmax(z.astype(float), axis=1)
    expected = (p - np.eye(7)[y]) * (1 if sample is None else sample[:, None])
    np.testing.assert_allclose(residual, expected, rtol=1e-4, atol=1e-6)
    assert residual.dtype == np.float32
    np.testing.assert_allclose(loss, sklearn.metrics.log_loss(y, p, sample_weight=sample, labels=range(7)), rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4, 7, 8, 16, 21, 29])
@pytest.mark.parametrize("ones", [False, True])
def test_pairs_are_rendles_formula(k, ones):
    """Also of a machine with fields that all vectors are for: there is one."""
    X, _, _, _ = batch(rows=60)
    dense, rng = (X.toarray() != 0) if ones else X.toarray().astype(float), np.random.default_rng(3)
    rows, residual = rng.normal(size=(70, 1 + k)).astype(np.float32), rng.normal(size=60).astype(np.float32)
    s = dense @ rows[:, 1:]
    expected = 0.25 + dense @ rows[:, 0] + (s**2 - (dense**2) @ rows[:, 1:].astype(float) ** 2).sum(axis=1) / 2
    z, sums = pair_scores(*parts(X, ones), rows, 0.25)
    np.testing.assert_allclose(z, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(sums, s, rtol=1e-4, atol=1e-5)
    slope = dense.T @ (residual[:, None] * s) - ((dense**2).T @ residual)[:, None] * rows[:, 1:]
    made = pair_gradient(*parts(X, ones), rows, sums, residual, out=np.ones_like(rows))
    np.testing.assert_allclose(made[:, 1:] - 1, slope, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(made[:, 0] - 1, dense.T @ residual, rtol=1e-3, atol=1e-4)
    field = np.zeros(X.nnz, np.int32)
    np.testing.assert_allclose(field_scores(*parts(X, ones), field, rows, 1, 0.25), expected, rtol=1e-4, atol=1e-4)
    aware = field_gradient(*parts(X, ones), field, rows, 1, residual)
    np.testing.assert_allclose(aware, made - 1, rtol=1e-3, atol=1e-3)


def test_two_classes_both_ways():
    z = np.linspace(-30, 30, 301).astype(np.float32)
    y = np.arange(301) % 2
    one, loss_one = binary_residuals(z, y)
    two, loss_two = multinomial_residuals(np.stack([np.zeros_like(z), z], axis=1), y)
    np.testing.assert_allclose(one, two[:, 1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss_one, loss_two, rtol=1e-9)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(-(2.0**120), 2.0**120, width=32), st.floats(0, 1, width=32)), min_size=1, max_size=600)
)
def test_nothing_overflows(pairs):
    z, y = (np.array(part) for part in zip(*pairs, strict=True))
    residual, loss = binary_residuals(z, y)
    assert np.isfinite(residual).all()
    assert (abs(residual) <= 1).all()
    assert loss >= -1e-9 * abs(z).max() - 1e-9
    expected = np.mean(np.logaddexp(0, z) - y * z)
    np.testing.assert_allclose(loss, expected, rtol=1e-6, atol=1e-9 * (1 + abs(z).max()))
    wide = np.stack([z, -z, np.zeros_like(z)], axis=1)
    residual, loss = multinomial_residuals(wide, np.zeros(len(z), int))
    assert np.isfinite(residual).all()
    assert np.isfinite(loss)


def test_a_column_of_margins():
    residual, loss = binary_residuals(np.zeros((5, 1)), np.ones(5, bool))
    assert residual.shape == (5, 1)
    np.testing.assert_allclose(loss, np.log(2))


def test_no_rows_and_no_columns():
    X = scipy.sparse.csr_matrix((3, 0), dtype=np.float32)
    np.testing.assert_array_equal(margins(*parts(X), np.empty(0, np.float32), 2.0), [2, 2, 2])
    assert gradient(*parts(X), np.ones(3), 0).shape == (0,)
    assert margins([0], [], None, np.empty((4, 3))).shape == (0, 3)
    assert multinomial_residuals(np.empty((0, 3)), [])[1] == 0.0
    assert binary_residuals([], [])[1] == 0.0


def test_views_of_a_larger_batch():
    X, w, y, _ = batch()
    indptr = X.indptr[100:201]
    np.testing.assert_allclose(margins(indptr, X.indices, X.data, w), X[100:200] @ w, rtol=1e-4, atol=1e-5)
    loss, _, _ = logistic(indptr, X.indices, X.data, w, 0.0, y[100:200])
    np.testing.assert_allclose(loss, logistic(*parts(X[100:200]), w, 0.0, y[100:200])[0])


def test_arrays_of_any_dtype_in_any_memory() -> None:
    X, w, y, _ = batch()
    expected = logistic(*parts(X), w, 0.0, y)

    def check(*arguments) -> None:
        loss, slope, intercept = logistic(*arguments)
        np.testing.assert_array_equal(slope, expected[1])
        assert (loss, intercept) == (expected[0], expected[2])

    indptr, indices, data = X.indptr.astype(np.int64), X.indices.astype(np.int64), X.data.copy()
    unaligned = np.frombuffer(b"x" + X.data.tobytes(), X.dtype, offset=1)
    for part in (indptr, indices, data, w, y):
        part.flags.writeable = False
    check(indptr, indices, data, w, 0.0, y.astype(np.int8))
    check(indptr, X.indices.astype(np.uint32), unaligned, w.astype(np.float64), 0.0, list(y))
    check(indptr, np.repeat(indices, 2)[::2], data.astype(np.longdouble), w[:, None][:, 0], 0.0, y)
    half = data.astype(np.float16)
    check_loss = logistic(indptr, indices, half, w, 0.0, y)[0]
    assert check_loss == logistic(indptr, indices, half.astype(np.float32), w, 0.0, y)[0]


def test_the_sum_of_a_row_has_a_fixed_order() -> None:
    """Three sums, then these sums: in every other order, the large numbers would swallow others of the small ones."""
    big = np.float32(2.0**24)
    for ones in (False, True):
        w = np.array([big, 1, 1, -big, 1, 1, 1], np.float32)
        data = None if ones else np.ones(7, np.float32)
        sums = [np.float32(0)] * 3
        for j in range(6):
            sums[j % 3] += w[j]
        sums[0] += w[6]
        expected = (sums[0] + sums[1]) + sums[2]
        assert margins([0, 7], np.arange(7), data, w)[0] == expected
        assert expected != np.cumsum(w, dtype=np.float32)[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: margins([0, 1], np.array([5], np.int32), [1.0], np.zeros(5)), "index 5 .* 5 weights"),
        (lambda: margins([0, 1], np.array([-1], np.int32), [1.0], np.zeros(5)), "index -1"),
        (lambda: margins([0, 1], np.array([2**40]), [1.0], np.zeros(5)), "1099511627776"),
        (lambda: margins([0, 2], [0], [1.0], np.zeros(5)), "indptr"),
        (lambda: margins([1, 0, 1], [0], [1.0], np.zeros(5)), "indptr"),
        (lambda: margins([-1, 1], [0], [1.0], np.zeros(5)), "indptr"),
        (lambda: margins([], [0], [1.0], np.zeros(5)), "indptr"),
        (lambda: margins([[0, 1]], [0], [1.0], np.zeros(5)), "indptr"),
        (lambda: margins([0, 1], np.array([2**31], np.uint32), [1.0], np.zeros(5)), "index -2147483648"),
        (lambda: margins([0, 1], [0], [1.0, 2.0], np.zeros(5)), "2 values for 1 indices"),
        (lambda: gradient([0, 1], [0], [1.0], [1.0, 2.0], 5), "2 residuals for 1 rows"),
        (lambda: gradient([0, 1], [0], [1.0], [1.0], 5, out=np.zeros(4, np.float32)), r"shape \(5,\)"),
        (lambda: gradient([0, 1], [0], [1.0], [1.0], 5, out=np.zeros(5)), "float32"),
        (lambda: binary_residuals([0.0], [-1]), "between 0 and 1"),
        (lambda: binary_residuals([0.0], [np.nan]), "between 0 and 1"),
        (lambda: binary_residuals([0.0], [1, 0]), "targets of shape"),
        (lambda: binary_residuals([0.0], [1], [1.0, 2.0]), "weights of shape"),
        (lambda: multinomial_residuals([[0.0, 1.0]], [2]), "0 to 1"),
        (lambda: multinomial_residuals([[0.0, 1.0]], [0.5]), "class numbers"),
        (lambda: multinomial_residuals([0.0, 1.0], [0, 0]), "rows x classes"),
        (lambda: logistic([0, 1], [0], None, np.zeros((1, 2)), 0.0, [1]), "two classes"),
        (lambda: pair_scores([0, 1], [5], None, np.zeros((5, 3))), "indices from 5 to 5, and there are 5"),
        (lambda: pair_scores([0, 1], np.int32([-1]), None, np.zeros((5, 3))), "index -1 in the batch"),
        (lambda: pair_scores([0, 1], [0], None, np.zeros(5)), "features x"),
        (lambda: field_scores([0, 1], [0], None, [2], np.zeros((5, 5)), 2), "field 2 in the batch, and there are 2"),
        (lambda: field_scores([0, 1], [0], None, [-1], np.zeros((5, 5)), 2), "field -1 in the batch"),
        (lambda: field_scores([0, 1], [0], None, [0, 1], np.zeros((5, 5)), 2), "2 fields for 1 indices"),
        (lambda: field_scores([0, 1], [0], None, [0], np.zeros((5, 4)), 2), "with 2 fields"),
        (lambda: field_scores([0, 1], [0], None, [0], np.zeros((5, 4)), 0), "with 0 fields"),
        (lambda: pair_gradient([0, 1], [0], None, PARAMETERS, np.zeros((1, 2)), [1.0], PARAMETERS), "of its own"),
        (lambda: field_gradient([0, 1], [0], None, [0], PARAMETERS, 1, [1.0], PARAMETERS), "of its own"),
    ],
)
def test_wrong_input_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # file of dps/engine/core, its text, the wrong text
    ("sparse_of.h", "sum1 += VALUE(j + 1) * w[indices[j + 1]]", "sum1 += VALUE(j) * w[indices[j + 1]]"),
    ("sparse_of.h", "((sum0 + sum1) + sum2) + b", "(sum0 + sum1) + b"),
    ("sparse_of.h", "out[i - start] =", "out[0] ="),
    ("sparse_of.h", "residual[i - start]", "residual[0]"),
    ("sparse_of.h", "+ r * VALUE(j)", "+ r"),
    ("sparse_of.h", "sums[c] + value * row[c]", "sums[c] + row[c]"),
    ("sparse_of.h", "row[c] + value * r[c]", "value * r[c]"),
    ("sparse_of.h", "b + c, m, (int)", "b, m, (int)"),
    ("sparse.h", "#define VALUE(j) 1.0f", "#define VALUE(j) 0.5f"),
    ("sparse.pyx", "exp(-fabs(margin))", "exp(-margin)"),
    ("sparse.pyx", "(1.0 if margin >= 0 else q)", "(q if margin >= 0 else 1.0)"),
    ("sparse.pyx", "<float> (scale * weights[start + i]", "<float> (scale * weights[i]"),
    ("sparse.pyx", "z[i], y[start + i]", "z[i], y[i]"),
    ("sparse.pyx", "loss + log(product)", "loss"),
    ("sparse.pyx", "(linear + log1p(q))", "(linear + q)"),
    ("sparse.pyx", "top = max(top, z[c])", "pass"),
    ("sparse.pyx", "(weight / total)", "weight"),
    ("sparse.pyx", "intercept += residual[i]", "intercept = residual[i]"),
    ("sparse.pyx", "z += m", "z += 1"),
]


def check_all() -> None:
    for kind in (np.float32, np.float64):
        for ones in (False, True):
            for m in (None, 1, 5, 21):
                test_products(kind, ones, m)
    for weighted in (False, True):
        test_fused_two_classes(1000, weighted, False)
        test_many_classes(weighted)
    test_two_classes_both_ways()
    residual, loss = binary_residuals([-1000.0, 1000.0], [1, 0])
    assert (residual.tolist(), loss) == ([-1.0, 1.0], 1000.0)
    assert multinomial_residuals([[0.0, 1000.0]], [1])[1] == 0.0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("file", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_broken_variant_is_caught(monkeypatch, file: str, old: str, new: str) -> None:
    check_all()
    monkeypatch.setattr("dps.kernels.sparse.loops", variant("sparse", file, old, new))
    with pytest.raises(AssertionError):
        check_all()


# ---- what the core refuses ------------------------------------------------------------------------------------------


def test_arrays_that_do_not_fit_are_refused() -> None:
    """The models check what users pass; the core checks again what would lead to foreign memory."""
    ends, indices, rows = np.array([0, 1, 2]), np.zeros(2, np.int32), np.zeros(2, np.float32)
    w, b = np.zeros((5, 3), np.float32), np.zeros(3, np.float32)
    out = np.zeros((2, 3), np.float32)
    sparse.margins(ends, indices, None, w, b, out)
    with pytest.raises(ValueError, match=r"out of shape \(2, 2\), and 2 rows of 3 wanted"):
        sparse.margins(ends, indices, None, w, b, out[:, :2].copy())
    with pytest.raises(ValueError, match=r"w of shape \(5, 3\), and 5 rows of 2 wanted"):
        sparse.margins(ends, indices, None, w, b[:2], out)
    with pytest.raises(TypeError, match="array of int64 wanted"):
        sparse.margins(ends.astype(np.int32), indices, None, w, b, out)
    with pytest.raises(TypeError, match="array of float32 wanted, and this is int64"):
        sparse.margins(ends, indices, ends[:2], w, b, out)
    with pytest.raises(InputError, match="index 5 in the batch, and there are 5 weights"):
        sparse.gradient(ends, indices + 5, None, out, w)
    with pytest.raises(ValueError, match=r"residual of shape \(2, 3\), and 2 rows of 1 wanted"):
        sparse.gradient(ends, indices, None, out, w[:, 0].copy())
    with pytest.raises(ValueError, match=r"y of shape \(1,\), and 2 rows of 1 wanted"):
        sparse.binary_residuals(rows, rows[:1], None, rows.copy())
    with pytest.raises(ValueError, match="weights of shape"):
        sparse.binary_residuals(rows, rows, rows[:1], rows.copy())
    with pytest.raises(InputError, match="class numbers 0 to 2"):
        sparse.multinomial_residuals(out, np.array([0, 3]), None, out.copy())
    with pytest.raises(ValueError, match="residual of shape"):
        sparse.multinomial_residuals(out, np.array([0, 1]), None, rows)
    for wrong in ({"w": w}, {"out": rows[:1]}, {"y": rows[:1]}, {"weights": rows[:1]}):
        given = {"w": w[:, 0].copy(), "y": rows, "weights": None, "out": w[:, 0].copy()} | wrong
        with pytest.raises(ValueError, match="wanted"):
            sparse.logistic(ends, indices, None, b=0.0, scale=1.0, **given)
