"""The setting `wire` of estimators: it goes to the tables of their rows, and its default changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from dask.distributed import Client
from sklearn.base import clone

import dps
from dps.errors import InputError
from dps.models import (
    FactorizationMachine,
    FactorizationMachineRegressor,
    LatentDirichletAllocation,
    LogisticRegression,
    MatrixFactorization,
    Node2Vec,
    Word2Vec,
)

HALVES = dps.Wire("bfloat16", "bfloat16", lists=True)
LISTS = dps.Wire(lists=True)  # also within one machine, so that the tests have connections with lists
EXACT = dps.Wire(local=False, lists=True)
rng = np.random.default_rng(0)
ROWS = scipy.sparse.random(200, 40, density=0.2, format="csr", random_state=0, dtype=np.float32)
LABELS = (ROWS.toarray()[:, :3].sum(axis=1) > 0).astype(int)
RATINGS = rng.integers(0, 20, 300), rng.integers(0, 15, 300), rng.integers(1, 6, 300).astype(float)
SENTENCES = [[str(word) for word in rng.integers(0, 30, 12)] for _ in range(60)]
EDGES = rng.integers(0, 20, (60, 2))

# By name: the class, settings, what is fitted, and the numbers of a row.
STEPS = {"epochs": 3, "batch_size": 30}
FACTORS = {"factors": 5, "random_state": 0, **STEPS}
VECTORS = {"vector_size": 6, "epochs": 3, "seed": 1}
MODELS = {
    "LogisticRegression": (LogisticRegression, {"solver": "adagrad", **STEPS}, (ROWS, LABELS), 1),
    "LogisticRegression ftrl": (LogisticRegression, {"solver": "ftrl", **STEPS}, (ROWS, LABELS), 2),
    "FactorizationMachine": (FactorizationMachine, FACTORS, (ROWS, LABELS), 6),
    "FactorizationMachineRegressor": (FactorizationMachineRegressor, FACTORS, (ROWS, LABELS), 6),
    "MatrixFactorization sgd": (MatrixFactorization, FACTORS, (RATINGS,), 6),
    "MatrixFactorization als": (MatrixFactorization, {"method": "als", **FACTORS}, (RATINGS,), 5),
    "MatrixFactorization bpr": (MatrixFactorization, {"method": "bpr", **FACTORS}, (RATINGS,), 6),
    "Word2Vec": (Word2Vec, {"min_count": 1, "batch_words": 100, **VECTORS}, (SENTENCES,), 6),
    "Node2Vec": (Node2Vec, {"walk_length": 8, "num_walks": 4, "batch_words": 100, **VECTORS}, (EDGES,), 6),
}


@pytest.fixture(scope="module")
def ps():
    options = {"processes": False, "dashboard_address": None}
    with (
        dps.LocalCluster(servers=1, trainers=1, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps
        assert not ps.tables(), "models leave no tables"


def fitted(ps, name, wire):
    """All that was learnt, table by table, and the wires of the tables with more than one row."""
    kind, settings, data, dim = MODELS[name]
    model = kind(client=ps, wire=wire, progress=False, **settings).fit(*data)
    client = ps.client()
    tables = [client.table(table) for table in sorted(ps.tables())]
    wide = [table.spec for table in tables if table.spec.rows != 1]
    assert {spec.dim for spec in wide} == {dim}
    assert all(table.spec.wire == dps.Wire() for table in tables if table.spec.rows == 1)
    keys = [np.sort(np.concatenate(list(client.keys(table)))) if table.spec.keyed else None for table in tables]
    rows = [client.pull(table, named) for table, named in zip(tables, keys, strict=True)]
    model.forget()
    return rows, {spec.wire for spec in wide}


def are_same(some, others):
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_default_changes_no_bit_and_each_wire_goes_to_the_tables(ps, name):
    """Lists that are kept also within a machine change none either; halves do, so the trainers do use the wire."""
    as_it_is, wires = fitted(ps, name, dps.Wire())
    assert wires == {dps.Wire()}
    by_default, wires = fitted(ps, name, None)
    assert wires == {EXACT}
    assert are_same(by_default, as_it_is)
    by_lists, wires = fitted(ps, name, LISTS)
    assert wires == {LISTS}
    assert are_same(by_lists, as_it_is)
    in_halves, wires = fitted(ps, name, HALVES)
    assert wires == {HALVES}
    assert not are_same(in_halves, as_it_is)
    assert all(np.allclose(one, other, atol=0.3) for one, other in zip(in_halves, as_it_is, strict=True))


@pytest.mark.parametrize("method", ["batch", "online", "gibbs"])
def test_topics_of_lists_are_those_without(ps, method, monkeypatch):
    """Tables of topics are gone after a fit, so the test notes the wires with which they are made."""
    made = []
    make = dps.ParameterServer.table

    def noting(self, name, dim=1, **settings):
        made.append((settings.get("rows"), settings.get("wire")))
        return make(self, name, dim, **settings)

    monkeypatch.setattr(dps.ParameterServer, "table", noting)

    def topics(wire):
        made.clear()
        model = LatentDirichletAllocation(
            3, client=ps, learning_method=method, wire=wire, random_state=0, max_iter=4, progress=False
        )
        found = model.fit(np.ceil(ROWS[:50].toarray())).components_
        words = [given for rows, given in made if rows in (None, ROWS.shape[1])]
        assert set(words) == {"lists" if wire is None else wire}
        assert len(words) == (4 if method == "gibbs" else 2)
        return found

    expected = topics(dps.Wire())
    assert np.array_equal(topics(None), expected)
    assert np.array_equal(topics(LISTS), expected)
    if method == "gibbs":
        with pytest.raises(InputError, match=r"counts in whole numbers, .* set wire='lists'"):
            topics(HALVES)
    else:
        in_halves = topics(HALVES)
        assert not np.array_equal(in_halves, expected)
        assert np.allclose(in_halves, expected, rtol=0.2, atol=0.3)
    assert not ps.tables()


@pytest.mark.parametrize("wire", ["auto", dps.Wire("float16"), dps.Wire(keep=0.5)])
def test_counts_do_not_travel_narrow(wire):
    model = LatentDirichletAllocation(3, learning_method="gibbs", wire=wire)
    with pytest.raises(InputError, match="set wire='lists', or leave it out"):
        model.fit(np.ones((4, 5), int))  # no server was started for it


KINDS = dict.fromkeys([*(each[0] for each in MODELS.values()), LatentDirichletAllocation])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_constructor_keeps_the_wire_as_it_is(kind):
    for wire in (None, "auto", HALVES, "no wire"):
        assert kind(wire=wire).get_params()["wire"] is wire
        assert clone(kind(wire=wire)).wire is wire
    assert kind().wire is None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("wire", ["float16", True, {"pull": "float16"}])
def test_what_is_no_wire_is_refused_before_any_server_starts(name, wire):
    kind, settings, data, _ = MODELS[name]  # there is no cluster: a fit that looked for one would raise another error
    with pytest.raises(InputError, match=r"wire is 'auto', 'lists' or a dps.Wire, .*; not"):
        kind(wire=wire, **settings).fit(*data)


SHORT = {
    "LogisticRegression": {},
    "LogisticRegression ftrl": {},
    "FactorizationMachine": {"factors": 3},
    "MatrixFactorization sgd": {"factors": 3},
    "MatrixFactorization als": {"factors": 4},
    "Word2Vec": {"vector_size": 4},
    "Node2Vec": {"vector_size": 4},
}


@pytest.mark.parametrize("name", SHORT)
def test_bytes_for_short_rows_are_refused_and_nothing_stays(ps, name):
    kind, settings, data, _ = MODELS[name]
    remedy = r"set wire=dps.Wire\(pull='float16', push='bfloat16', lists=True\)"
    model = kind(client=ps, wire=dps.Wire("float16", "int8", lists=True), **settings | SHORT[name])
    with pytest.raises(InputError, match=remedy):
        model.fit(*data)
    assert not ps.tables()


@pytest.mark.parametrize("wire", [HALVES, "auto"])
def test_tables_of_whole_batch_solvers_travel_as_they_are(ps, wire):
    """L-BFGS has tables of float64, which no narrow wire can have."""
    as_it_is = LogisticRegression(client=ps, solver="lbfgs").fit(ROWS, LABELS)
    other = LogisticRegression(client=ps, solver="lbfgs", wire=wire).fit(ROWS, LABELS)
    assert np.array_equal(as_it_is.coef_, other.coef_)
