"""Frames and libsvm files as sparse rows: against encoding by hand."""

import dask
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from sklearn.datasets import dump_svmlight_file

import dps
from dps.errors import InputError
from dps.models import encode_frame, read_libsvm
from dps.models.inputs.encoding import Layout

FRAME = pd.DataFrame({"city": ["Oslo", "Rome", "Oslo", None], "age": [0.0, 30.0, np.nan, -2.5], "n": [1, 2, 3, 4]})


def by_hand(frame, bits, words):
    """One row at a time, one value at a time."""
    mask = (1 << bits) - 1
    dense = np.zeros((len(frame), 1 << bits), np.float32)
    for i in range(len(frame)):
        for name in frame.columns:
            value = frame[name].iloc[i]
            if name in words:
                dense[i, dps.hash_columns({name: [value]}, bits=bits)[0, 0]] += 1
            elif pd.isna(value):
                dense[i, dps.hash_strings([f"{name} is missing"])[0] & mask] += 1
            else:
                dense[i, dps.hash_strings([str(name)])[0] & mask] += value
    return dense


@pytest.mark.parametrize("bits", [1, 3, 12])  # in 2 or 8 features almost everything collides: values add up
def test_like_by_hand(bits):
    X = encode_frame(FRAME, bits)
    assert X.shape == (4, 1 << bits)
    assert X.dtype == np.float32
    assert X.indices.dtype == X.indptr.dtype == np.int32
    np.testing.assert_allclose(X.toarray(), by_hand(FRAME, bits, {"city"}), rtol=1e-6)


def test_zeros_are_not_stored_and_missing_values_are():
    X = encode_frame(FRAME, 12)
    assert np.diff(X.indptr).tolist() == [2, 3, 3, 3]
    assert X[2].sum() == 1 + 1 + 3  # Oslo, "age is missing", n


def test_categories_strings_and_objects_are_alike():
    words = FRAME[["city"]]
    expected = encode_frame(words.astype(object), 16).toarray()
    kinds = ["category", "string"]
    if pd.Series(["a"]).dtype != object:  # before pandas 3, "str" makes the word "None" of what is missing
        kinds.append("str")
    for kind in kinds:
        np.testing.assert_array_equal(encode_frame(words.astype(kind), 16).toarray(), expected)


def test_numbers_of_any_kind():
    plain = pd.DataFrame({"a": [1, 0, 3], "b": [True, False, True]})
    expected = encode_frame(plain.astype("float64"), 10).toarray()
    for kinds in ({"a": "int8"}, {"a": "Int64", "b": "boolean"}, {"a": "float32", "b": "Float32"}):
        np.testing.assert_array_equal(encode_frame(plain.astype(kinds), 10).toarray(), expected)
    missing = encode_frame(plain.astype("Int64").mask(plain["a"] == 3), 10)
    assert missing[2].sum() == 2  # both columns of the last row


def test_order_of_columns_does_not_matter():
    np.testing.assert_array_equal(
        encode_frame(FRAME, 10).toarray(), encode_frame(FRAME[["n", "city", "age"]], 10).toarray()
    )


def test_the_same_word_in_two_columns_is_two_features():
    X = encode_frame(pd.DataFrame({"from": ["JFK"], "to": ["JFK"]}), 20)
    assert X.nnz == len(set(X.indices)) == 2


def test_no_rows():
    assert encode_frame(FRAME.iloc[:0], 10).shape == (0, 1024)


@pytest.mark.parametrize(
    ("frame", "bits", "message"),
    [
        (FRAME, 0, "bits is 1 to 31"),
        (FRAME, 32, "bits is 1 to 31"),
        (FRAME[[]], 10, "no columns"),
        (FRAME[["n", "n"]], 10, "columns of one name: \\['n'\\]"),
        (FRAME.assign(when=pd.Timestamp("2020-01-01")), 10, "column 'when'"),
    ],
)
def test_wrong_frames(frame, bits, message):
    with pytest.raises((InputError, TypeError), match=message):
        encode_frame(frame, bits)


def test_layout_refuses_what_does_not_fit():
    layout = Layout.of(np.zeros((2, 3)), 10)
    assert layout.block([[1, 2, 3]]).dtype == np.float32
    with pytest.raises(InputError, match=r"X has 2 features, but LogisticRegression is expecting 3"):
        layout.block(np.zeros((1, 2)))
    for bad in (np.nan, np.inf, 1e300):
        with (
            pytest.raises(InputError, match="1 values that are NaN, infinity or too large"),
            np.errstate(over="ignore"),
        ):
            layout.block(np.array([[bad, 0, 0]]))
    with pytest.raises(InputError, match="Reshape your data"):
        layout.block(np.zeros(3))
    frames = Layout.of(FRAME, 10)
    with pytest.raises(InputError, match="differ in \\['age', 'years'\\]"):
        frames.block(FRAME.rename(columns={"age": "years"}))


@pytest.mark.parametrize("zero_based", [True, False])
def test_libsvm_round_trip(tmp_path, zero_based):
    rng = np.random.default_rng(0)
    whole = scipy.sparse.random(60, 40, 0.2, "csr", np.float32, rng)
    y = rng.integers(2, size=60) * 2.0 - 1
    for part in range(3):
        rows = slice(20 * part, 20 * part + 20)
        dump_svmlight_file(whole[rows], y[rows], str(tmp_path / f"{part}.svm"), zero_based=zero_based)
    parts = read_libsvm(str(tmp_path / "*.svm"), n_features=40, zero_based=zero_based)
    assert len(parts) == 3
    read = dask.compute(*parts, scheduler="sync")
    np.testing.assert_allclose(scipy.sparse.vstack([X for X, _ in read]).toarray(), whole.toarray(), rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([y for _, y in read]), y)
    (single,) = read_libsvm([tmp_path / "1.svm"], n_features=40, zero_based=zero_based)
    assert single.compute(scheduler="sync")[0].shape == (20, 40)


def test_libsvm_errors(tmp_path):
    with pytest.raises(InputError, match="no file matches"):
        read_libsvm(str(tmp_path / "*.svm"), n_features=4)
    (tmp_path / "a.svm").write_text("1 0:1 9:1\n")
    for options in ({"n_features": 20}, {"n_features": 4, "zero_based": True}):
        (part,) = read_libsvm(str(tmp_path / "a.svm"), **options)
        with pytest.raises(InputError, match=r"a\.svm, line 1 .*n_features=.*zero_based="):
            part.compute(scheduler="sync")


@pytest.mark.parametrize("by_field", [False, True])
def test_features_are_numbered_by_a_vocabulary(by_field):
    frame = pd.DataFrame({"city": ["Oslo", "Rome", "Oslo"], "age": [2.0, np.nan, 3.0]})
    with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        words = ps.vocabulary("features", lanes=1)
        X = encode_frame(frame, bits=4, by_field=by_field, vocabulary=words)
        fields = 2 if by_field else 1
        assert X.shape == (3, 16 * fields)
        made = {
            (row, words.words([column // fields])[0]): X[row, column] for row, column in zip(*X.nonzero(), strict=True)
        }
        assert made == {
            (0, "city=Oslo"): 1, (1, "city=Rome"): 1, (2, "city=Oslo"): 1,
            (0, "age"): 2, (1, "age is missing"): 1, (2, "age"): 3,
        }  # fmt: skip
        if by_field:
            assert set((X.nonzero()[1] % 2).tolist()) == {0, 1}
        unknown = encode_frame(frame.replace("Rome", "Bonn"), bits=4, vocabulary=words.frozen())
        assert (unknown.sum(axis=1).ravel() == [[3, 1, 4]]).all(), "the unknown city is left out"
        with pytest.raises(InputError, match="bits=2 takes ids below 4"):
            encode_frame(pd.DataFrame({"x": [1.0], "y": [1.0]}), bits=2, vocabulary=words)
        y = [0, 1, 0]
        model = dps.models.LogisticRegression(client=ps, solver="ftrl").fit(X, y)
        assert model.coef_.shape == (1, X.shape[1])
