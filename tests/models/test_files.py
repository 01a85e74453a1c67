"""Files of lines as data of estimators: libsvm and libffm, blocks of files, lines that are wrong."""

from __future__ import annotations

import gzip
import io

import dask
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask.distributed import Client
from sklearn.datasets import dump_svmlight_file, load_svmlight_file

import dps
from dps.errors import InputError, InputTypeError
from dps.kernels import parse_rows
from dps.models import (
    FactorizationMachine,
    FactorizationMachineRegressor,
    LinearRegression,
    LogisticRegression,
    read_files,
    read_libffm,
    read_libsvm,
)


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=1, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


ROWS, FEATURES, F = 240, 30, 3
rng = np.random.default_rng(0)
X = scipy.sparse.random(ROWS, FEATURES, density=0.2, format="csr", random_state=0, dtype=np.float32)
X.data = rng.normal(size=X.nnz).astype(np.float32)
Y = (X.toarray()[:, 0] + X.toarray()[:, 2] + rng.logistic(size=ROWS) / 4 > 0).astype(float)
FIELDS = np.arange(FEATURES) % F
PAIRS = scipy.sparse.csr_matrix((X.data, X.indices * F + FIELDS[X.indices], X.indptr), shape=(ROWS, FEATURES * F))


def libffm(rows):
    """The text of some rows."""
    lines = []
    for row in rows:
        places = range(X.indptr[row], X.indptr[row + 1])
        entries = [f"{FIELDS[X.indices[p]]}:{X.indices[p]}:{X.data[p]:.9g}" for p in places]
        lines.append(" ".join([f"{Y[row]:g}", *entries]))
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path):
    """The rows in three files of each kind; one of them is compressed."""
    for part in range(3):
        rows = slice(80 * part, 80 * part + 80)
        dump_svmlight_file(X[rows], Y[rows], str(tmp_path / f"{part}.svm"), zero_based=True)
        text = libffm(range(rows.start, rows.stop)).encode()
        if part == 1:
            (tmp_path / f"{part}.ffm.gz").write_bytes(gzip.compress(text))
        else:
            (tmp_path / f"{part}.ffm").write_bytes(text)
    return tmp_path


def stacked(parts):
    """X and y of partitions, in their order."""
    blocks = dask.compute(*parts, scheduler="sync")
    return scipy.sparse.vstack([block for block, _ in blocks]), np.concatenate([y for _, y in blocks])


@pytest.mark.thorough
@pytest.mark.parametrize("block_bytes", [1, 40, 1000, 1 << 25])
def test_blocks_of_files_are_all_of_their_lines(folder, block_bytes):
    parts = read_libsvm(str(folder / "*.svm"), FEATURES, zero_based=True, block_bytes=block_bytes)
    assert len(parts) == sum(-(-path.stat().st_size // block_bytes) for path in folder.glob("*.svm"))
    if block_bytes == 1:
        parts = parts[: (folder / "0.svm").stat().st_size]
    found, y = stacked(parts)
    np.testing.assert_allclose(found.toarray(), X.toarray()[: len(y)], rtol=1e-6)
    np.testing.assert_array_equal(y, Y[:80] if block_bytes == 1 else Y)


def test_libffm_files_have_a_column_for_each_pair(folder):
    parts = read_libffm([str(folder / "*.ffm"), str(folder / "*.ffm.gz")], FEATURES, F, block_bytes=1000)
    found, y = stacked(parts)
    assert found.shape == (ROWS, FEATURES * F)
    np.testing.assert_allclose(found.toarray(), PAIRS.toarray(), rtol=1e-6)
    np.testing.assert_array_equal(y, Y)


def test_rows_are_those_of_scikit_learn():
    text = b"# of all\n1 1:0.5 3:-2e-3 # of a row\n\n-1 qid:7 2:1e2\r\n  0\t1:+.25\n3"
    rows = parse_rows(text, 3, zero_based=False)
    expected, y = load_svmlight_file(io.BytesIO(text), n_features=3, zero_based=False)
    made = scipy.sparse.csr_matrix((rows.data, rows.indices, rows.indptr), shape=(4, 3))
    np.testing.assert_allclose(made.toarray(), expected.toarray(), rtol=1e-7)
    np.testing.assert_array_equal(rows.labels, y)
    numbers = [*rng.normal(0, 1e3, 300), 1e22, 5e-324, 1.7976931348623157e308, 0.1, 2**53 + 2.0, -123456789012345.6]
    read = parse_rows("\n".join(map(repr, map(float, numbers))).encode(), 1).labels
    np.testing.assert_array_equal(read, numbers)


WRONG_LINES = [
    ("svm", "1 0:1\nx 1:1\n", "line 2 .*'x' is no label"),
    ("svm", "1 0:1\n\n# more\n1 0:1 2\n", "line 4 .*'2' is no feature:value"),
    ("svm", "1 -3:1\n", "line 1 .*'-3:1' has no feature from 0 to 1023"),
    ("svm", "1 1024:1\n", "line 1 .*'1024:1' has no feature from 0 to 1023"),
    ("svm", "1 1:nan\n", "line 1 .*'1:nan' has no finite value"),
    ("svm", "1 1:1e39\n", "line 1 .*'1:1e39' has no finite value"),
    ("svm", "nan 1:1\n", "line 1 .*'nan' is no label"),
    ("ffm", "1 3:1:1\n", "line 1 .*'3:1:1' has no field from 0 to 2"),
    ("ffm", "1 0:1:1\n0 -1:1:1\n", "line 2 .*'-1:1:1' has no field from 0 to 2"),
    ("ffm", "1 0:1\n", "line 1 .*'0:1' is no field:feature:value"),
    ("ffm", "1 0:-1:1\n", "line 1 .*'0:-1:1' has no feature from 0 to 1023"),
]


@pytest.mark.parametrize(("ending", "text", "message"), WRONG_LINES)
def test_lines_that_are_wrong_are_named(client, tmp_path, ending, text, message):
    (tmp_path / f"good.{ending}").write_text("1 0:1:1\n0\n" if ending == "ffm" else "1 0:1\n0\n")
    (tmp_path / f"wrong.{ending}").write_text(text)
    model = FactorizationMachine(fields=F if ending == "ffm" else None, hash_bits=10, client=client)
    with pytest.raises(InputError, match=rf"wrong\.{ending}, {message}"):
        model.fit(str(tmp_path / f"*.{ending}"))


@pytest.mark.parametrize("block_bytes", [1, 7, 64])
def test_a_wrong_line_of_a_later_block_has_its_number_in_the_file(tmp_path, block_bytes):
    (tmp_path / "a.svm").write_text("1 0:1\n" * 40 + "1 wrong\n" + "1 0:1\n" * 40)
    with pytest.raises(InputError, match=r"a\.svm, line 41 \(read with n_features=2"):
        dask.compute(*read_libsvm(str(tmp_path / "a.svm"), 2, True, block_bytes), scheduler="sync")


def test_machines_learn_from_paths(client, folder):
    settings = {
        "factors": 2,
        "epochs": 5,
        "batch_size": 20,
        "random_state": 0,
        "factor_learning_rate": 0.1,
        "client": client,
        "hash_bits": 5,
    }
    paths = [str(folder / "*.ffm"), folder / "1.ffm.gz"]
    model = FactorizationMachine(fields=F, **settings).fit(paths)
    assert model.factors_.shape == (32, F, 2)
    predicted = model.predict_proba(paths)
    assert dask.is_dask_collection(predicted), "the workers read and predict"
    wide = scipy.sparse.csr_matrix((PAIRS.data, PAIRS.indices, PAIRS.indptr), shape=(ROWS, 32 * F))
    np.testing.assert_allclose(predicted.compute(), model.predict_proba(wide), rtol=1e-5)
    assert model.score(wide, Y) > 0.75
    with dps.ParameterServer(client, servers=1) as ps:
        live = FactorizationMachine(**{**settings, "client": ps})
        for part in range(3):
            live.partial_fit(str(folder / f"{part}.svm"), classes=[0, 1])
        np.testing.assert_array_equal(
            live.predict(str(folder / "*.svm")).compute(),
            live.predict(scipy.sparse.csr_matrix((X.data, X.indices, X.indptr), shape=(ROWS, 32))),
        )
        live.forget()
    numbers = FactorizationMachineRegressor(**settings).fit(str(folder / "*.svm"))
    assert numbers.predict(str(folder / "0.svm")).compute().shape == (80,)


def test_linear_models_learn_from_paths(client, folder):
    line = LogisticRegression(client=client, hash_bits=5, epochs=5, batch_size=20, shuffle=None)
    line.fit(str(folder / "*.svm"))
    wide = scipy.sparse.csr_matrix((X.data, X.indices, X.indptr), shape=(ROWS, 32))
    lazy = line.predict_proba(str(folder / "*.svm"))
    np.testing.assert_allclose(lazy.compute(), line.predict_proba(wide), rtol=1e-5)
    np.testing.assert_array_equal(line.predict(str(folder / "*.svm")).compute(), line.predict(wide))
    squares = LinearRegression(client=client, hash_bits=5).fit(str(folder / "*.svm"))
    expected = LinearRegression(client=client).fit(wide, Y)
    np.testing.assert_allclose(squares.coef_, expected.coef_, atol=1e-3)
    np.testing.assert_allclose(squares.predict(str(folder / "*.svm")).compute(), squares.predict(wide), rtol=1e-5)


def test_tables_of_paths(client, tmp_path):
    frame = pd.DataFrame({"city": ["Oslo", "Rome"] * 50, "age": np.arange(100), "bought": np.arange(100) % 2})
    for part in range(2):
        frame[part::2].to_csv(tmp_path / f"{part}.csv", index=False)
    pattern = str(tmp_path / "*.csv")
    model = FactorizationMachine(fields="columns", factors=2, hash_bits=10, client=client, batch_size=10)
    model.fit(pattern, "bought")
    assert model.feature_names_in_.tolist() == ["city", "age"]
    mixed = pd.concat([frame[0::2], frame[1::2]])
    np.testing.assert_array_equal(model.predict(pattern).compute(), model.predict(mixed[["city", "age"]]))


BAD = [
    ({}, "nowhere/*.svm", None, InputError, "no file matches"),
    ({}, "nowhere/a.svm", None, InputError, "there is no file"),
    ({}, "rows.txt", None, InputError, "say which kind of files"),
    ({}, "rows.svm", np.zeros(3), InputTypeError, "libsvm files have the labels"),
    ({}, "rows.csv", None, InputTypeError, "y is the name of a column"),
    ({}, "rows.ffm", None, InputError, r"FactorizationMachine\(fields=n\)"),
    ({"fields": 3}, "rows.svm", None, InputError, "libsvm files have no fields"),
]


@pytest.mark.parametrize(("settings", "path", "y", "error", "message"), BAD)
def test_paths_that_are_refused(client, tmp_path, settings, path, y, error, message):
    for name in ("rows.svm", "rows.ffm", "rows.csv", "rows.txt"):
        (tmp_path / name).write_text("1\n")
    with pytest.raises(error, match=message):
        FactorizationMachine(client=client, **settings).fit(str(tmp_path / path), y)


def test_files_without_rows_are_refused(client, tmp_path):
    (tmp_path / "empty.svm").write_text("")
    (tmp_path / "comment.svm").write_text("# nothing\n")
    for kind in (FactorizationMachine, FactorizationMachineRegressor, LogisticRegression):
        with pytest.raises(InputError, match="X has 0 rows"):
            kind(client=client, hash_bits=4).fit(str(tmp_path / "*.svm"))
    with pytest.raises(InputTypeError, match="sample_weight is None"):
        FactorizationMachine(client=client).fit(str(tmp_path / "empty.svm"), None, [1.0])


def test_settings_of_files_are_checked():
    with pytest.raises(InputError, match="give the number of features"):
        read_files("a.ffm")
    with pytest.raises(InputError, match="how many fields"):
        read_files("a.ffm", n_features=3)
    with pytest.raises(InputError, match="n_features is a whole number, 1 or more; not 0"):
        read_libsvm("a.svm", 0)
    with pytest.raises(InputError, match="n_fields is a whole number, 1 or more; not -1"):
        read_libffm("a.ffm", 5, -1)
    with pytest.raises(InputError, match="block_bytes is a whole number, 1 or more; not 0"):
        read_libsvm("a.svm", 5, block_bytes=0)
