"""Estimators whose features are ids of a vocabulary: against ids given by hand, saved, shared, and refused."""

from __future__ import annotations

import pickle

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest

import dps
from dps.errors import InputError, UnknownTableError
from dps.models import FactorizationMachine, LinearRegression, LogisticRegression, encode_frame
from dps.models.vocabularies import KnownWords

ROWS = 120


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        yield ps


def data():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"city": rng.choice(["Oslo", "Rome", "Bonn"], ROWS), "age": rng.integers(1, 9, ROWS) / 8})
    return frame, np.where((frame["city"] == "Oslo") | (rng.random(ROWS) < 0.1), 1, 0)


KINDS = {
    "lbfgs": (LogisticRegression, {"solver": "lbfgs", "l2": 0.01}),
    "ftrl": (LogisticRegression, {"solver": "ftrl", "aggregate": True}),
    "linear": (LinearRegression, {}),
    "machine": (FactorizationMachine, {"random_state": 0, "aggregate": True}),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_model_of_ids_given_by_hand(ps, kind):
    make, settings = KINDS[kind]
    frame, y = data()
    words = ps.vocabulary(f"ids-{kind}", lanes=1)
    X = encode_frame(frame, bits=6, vocabulary=words)
    expected = make(client=ps, **settings).fit(X, y)
    for given in (words, words.name):
        model = make(client=ps, vocabulary=given, hash_bits=6, **settings).fit(frame, y)
        np.testing.assert_array_equal(model.coef_, expected.coef_)
        assert (model.n_features_in_, model.feature_names_in_.tolist()) == (64, ["city", "age"])
        np.testing.assert_array_equal(model.predict(frame), expected.predict(X))
        lazy = dd.from_pandas(frame, npartitions=3)
        np.testing.assert_array_equal(np.asarray(model.predict(lazy)), expected.predict(X))
    assert len(words) == 5, "no fit or prediction gives another id to a word that has one"


def test_a_field_aware_machine(ps):
    frame, y = data()
    words = ps.vocabulary("fields", lanes=1)
    X = encode_frame(frame, bits=6, by_field=True, vocabulary=words)
    settings = {"random_state": 0, "aggregate": True, "client": ps}
    expected = FactorizationMachine(fields=2, **settings).fit(X, y)
    model = FactorizationMachine(fields="columns", vocabulary=words, hash_bits=6, **settings).fit(frame, y)
    np.testing.assert_array_equal(model.predict_proba(frame), expected.predict_proba(X))


def test_two_fits_share_ids_and_words_of_others_are_unknown(ps):
    frame, y = data()
    words = ps.vocabulary("shared", lanes=1)
    first = LogisticRegression(client=ps, solver="ftrl", vocabulary=words, hash_bits=3).fit(frame, y)
    more = pd.DataFrame({"city": [f"town {n}" for n in range(40)], "age": 1.0})
    second = LogisticRegression(client=ps, solver="ftrl", vocabulary="shared").fit(
        pd.concat([frame, more]), [*y, *[0, 1] * 20]
    )
    assert len(words) == words.size == 45
    oslo = words.ids(["city=Oslo"], assign=False)[0]
    assert min(first.coef_[0, oslo], second.coef_[0, oslo]) > 0
    without = first.predict_proba(pd.DataFrame({"city": ["nowhere", "town 39"], "age": [1.0, 1.0]}))
    assert len(words) == 45, "predictions give no ids"
    np.testing.assert_array_equal(without[0], without[1])


def test_a_saved_and_a_pickled_model_predict(ps, tmp_path):
    frame, y = data()
    words = ps.vocabulary("saved", lanes=1)
    model = LogisticRegression(client=ps, solver="ftrl", vocabulary=words, hash_bits=6).fit(frame, y)
    path = str(tmp_path / "model.safetensors")
    model.save(path)
    expected = model.predict_proba(frame)
    for settings in ({"client": ps}, {"vocabulary": ps.vocabulary("saved")}):
        np.testing.assert_array_equal(LogisticRegression.load(path, **settings).predict_proba(frame), expected)
    alone = LogisticRegression.load(path)
    assert alone.vocabulary == "saved"
    X = encode_frame(frame, bits=6, vocabulary=words)
    np.testing.assert_array_equal(alone.predict_proba(X), expected)
    with pytest.raises(InputError, match=r"ids of vocabulary 'saved', which is not at hand: set client=ps"):
        alone.predict(frame)
    with pytest.raises(InputError, match=r"ids of vocabulary 'saved', which is not vocabulary 'others'"):
        LogisticRegression.load(path, vocabulary=ps.vocabulary("others")).predict(frame)
    packed = pickle.dumps(model)
    assert ps.client().ticket.secret.encode() not in packed
    again = pickle.loads(packed)
    assert again.vocabulary == "saved"
    np.testing.assert_array_equal(again.predict_proba(frame), expected)


def test_partial_fit_numbers_the_words_of_later_data(ps):
    frame, y = data()
    words = ps.vocabulary("later", lanes=1)
    model = LogisticRegression(client=ps, solver="ftrl", vocabulary=words, hash_bits=6).partial_fit(frame, y)
    model.partial_fit(frame.replace("Rome", "Ghent"), y)
    assert model.coef_[0, words.ids(["city=Ghent"], assign=False)[0]] != 0
    with pytest.raises(InputError, match="fitted with ids of vocabulary 'later', which is not at hand"):
        model.set_params(vocabulary=None).partial_fit(frame, y)


def test_refusals(ps):
    frame, y = data()
    cluster = ps.dask_client
    with pytest.raises(InputError, match=r"vocabulary is a vocabulary \(ps\.vocabulary\), or the name of one, or None"):
        LogisticRegression(client=ps, vocabulary=["a"]).fit(frame, y)
    with pytest.raises(InputError, match=r"vocabulary 'mine' is a name, and client is no dps\.ParameterServer"):
        LinearRegression(client=cluster, vocabulary="mine").fit(frame, y)
    with pytest.raises(UnknownTableError, match="nowhere"):
        FactorizationMachine(client=ps, vocabulary="nowhere").fit(frame, y)
    words = ps.vocabulary("refused", lanes=1)
    with pytest.raises(InputError, match="numbers the words of DataFrames, and X is a ndarray whose 3 columns"):
        LogisticRegression(client=ps, vocabulary=words).fit(np.ones((ROWS, 3)), y)
    with pytest.raises(InputError, match=r"takes ids below 2: raise bits \(hash_bits of a model\)"):
        LogisticRegression(client=ps, vocabulary=words, hash_bits=1).fit(frame, y)


def test_words_beyond_the_model_are_known_where_they_are_not_bounded(ps, monkeypatch):
    """A deliberately wrong variant, without the bound, is caught: it takes ids that the model has no feature for."""
    frame, y = data()
    words = ps.vocabulary("bounded", lanes=1)
    model = LogisticRegression(client=ps, solver="ftrl", vocabulary=words, hash_bits=3).fit(frame, y)
    words.ids([f"city=town {n}" for n in range(40)])
    towns = pd.DataFrame({"city": ["town 39"], "age": [1.0]})
    assert model.predict(towns).shape == (1,)
    monkeypatch.setattr(KnownWords, "ids", lambda self, given: words.ids(given, assign=False))
    with pytest.raises(InputError, match="takes ids below 8"):
        model.predict(towns)


@pytest.mark.integration
def test_processes_number_their_partitions_alike():
    frame, y = data()
    with (
        dps.LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        words = ps.vocabulary("words")
        lazy = dd.from_pandas(frame.assign(bought=y), npartitions=4)
        model = LogisticRegression(client=ps, solver="lbfgs", l2=0.01, vocabulary="words").fit(lazy, "bought")
        X = encode_frame(frame, vocabulary=words.frozen())
        assert len(words) == 5
        expected = LogisticRegression(client=ps, solver="lbfgs", l2=0.01).fit(X, y).predict_proba(X)
        np.testing.assert_allclose(model.predict_proba(frame), expected, atol=1e-4)
        np.testing.assert_allclose(np.asarray(model.predict_proba(lazy[["city", "age"]])), expected, atol=1e-4)
