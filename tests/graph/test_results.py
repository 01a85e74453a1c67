"""Values of vertices that are looked up on the servers; ids that the graph does not have, and what is no id."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import numpy as np
from dask.distributed import Client
from graphs import random_edges
from oracles import mutant

import dps
import dps.graph
from dps.errors import ClosedError, InputError, InputTypeError
from dps.graph import VertexValues
from dps.graph import results as results_module

ALGORITHMS = ["page_rank", "connected_components", "label_propagation", "k_core"]
EDGES = np.concatenate([random_edges(60, 30), [[-7, 4], [-7, 0], [-7, -7]]])
VERTICES = np.unique(EDGES)
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
of_each_algorithm = pytest.mark.parametrize("result", ALGORITHMS, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def client():
    options = {"processes": False, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2) as ps:
        yield ps
        assert not ps.tables(), "results were closed, and nothing else is left"


@pytest.fixture(scope="module")
def result(ps, request):
    with getattr(dps.graph, request.param)(ps, EDGES) as result:
        yield result


def check_values(result: VertexValues) -> None:
    """Values are those of the table, in the shape of the ids."""
    expected = dict(zip(VERTICES.tolist(), result.table[VERTICES], strict=True))
    ids = np.random.default_rng(0).permutation(np.concatenate([VERTICES, VERTICES[:5]]))
    ids = ids[: len(ids) // 2 * 2].reshape(2, -1)  # two rows, with repeated ids
    found = result[ids]
    assert found.dtype == result.table.spec.dtype
    np.testing.assert_array_equal(found, [[expected[vertex] for vertex in row] for row in ids.tolist()])
    for vertex in (-7, np.int64(-7), np.array(-7), -7.0):
        assert np.shape(result[vertex]) == ()
        assert result[vertex] == expected[-7]


@of_each_algorithm
def test_values_in_the_shape_of_the_ids(monkeypatch, result):
    check_values(result)
    monkeypatch.setattr(results_module, "LOOKUP_IDS", 7)
    check_values(result)
    assert "_arrays" not in vars(result), "the servers were asked, and not all values were read"


@of_each_algorithm
def test_no_ids(result):
    for nothing in ([], np.empty((0, 3), int)):
        assert result[nothing].shape == np.shape(nothing)
        assert result[nothing].dtype == result.table.spec.dtype


UNKNOWN = [  # ids, how many of them the graph does not have, which are named
    (-8, 1, "-8"),
    ([4, -8, 0], 1, "-8"),
    (np.array([[99, 0], [-8, 99]]), 2, "-8, 99"),
    (np.arange(100, 106), 6, "100, 101, 102, 103, 104, ..."),
    ([2**63 - 1, -(2**63)], 2, f"{-(2**63)}, {2**63 - 1}"),
]


@pytest.mark.parametrize(("ids", "count", "named"), UNKNOWN, ids=["scalar", "negative", "rows", "many", "extreme"])
@of_each_algorithm
def test_vertices_that_the_graph_does_not_have(result, ids, count, named):
    assert not np.any(result.table[np.setdiff1d(ids, VERTICES)]), "the table reads 0 for them, without an error"
    words = f"^{count} of the ids (is|are) not among the {len(VERTICES)} vertices of the graph: {named}; leave them out"
    with pytest.raises(InputError, match=words):
        result[ids]
    assert len(result.vertices) == len(VERTICES), "a look-up makes no vertex"
    with pytest.raises(InputError, match=words):
        result[ids]


REFUSED = [
    (InputError, "ids of vertices contain NaN", [4.0, np.nan]),
    (InputError, "1.5, which is no whole number", 1.5),
    (InputError, "no int64", np.array([2**63], np.uint64)),
    (InputTypeError, "hash_strings", "a"),
    (InputTypeError, "hash_strings", np.array(["4"])),
    (InputTypeError, "dtype bool", True),
    (InputTypeError, "dtype object", None),
    (InputTypeError, "dtype object", slice(0, 4)),
]


@pytest.mark.parametrize(("error", "words", "ids"), REFUSED, ids=lambda value: str(value)[:20])
@of_each_algorithm
def test_what_is_no_id(result, error, words, ids):
    with pytest.raises(error, match=words):
        result[ids]


@each_algorithm
def test_after_close(ps, algorithm):
    results = [getattr(dps.graph, algorithm)(ps, EDGES) for _ in range(2)]
    expected = results[0].values
    for result in results:
        result.close()
    np.testing.assert_array_equal(results[0][VERTICES], expected)
    with pytest.raises(InputError, match=f"among the {len(VERTICES)} vertices of the graph: -8; leave"):
        results[0][[4, -8]]
    for read in (lambda it: it[4], lambda it: it[[]], lambda it: it.values, VertexValues.to_dict, VertexValues.to_dask):
        with pytest.raises(ClosedError, match=r"close\(\) has dropped the values in"):
            read(results[1])


def test_a_result_is_no_sequence(ps):
    with dps.graph.k_core(ps, EDGES) as result:
        with pytest.raises(TypeError, match="not iterable"):
            iter(result)
        with pytest.raises(TypeError, match="not a container"):
            4 in result  # noqa: B015


WRONG = [
    ("__getitem__", "distinct[~there]", "distinct"),
    ("__getitem__", "not there.all()", "False"),
    ("__getitem__", "values[places.reshape(wanted.shape)]", "values"),
    ("_existing", "known[order], np.concatenate(values)[order]", "known[order], np.concatenate(values)"),
    ("_existing", "found[1].reshape(-1)", "found[1].reshape(-1) * 0"),
]


@pytest.mark.parametrize(("method", "old", "new"), WRONG)
def test_wrong_variants_are_noticed(ps, monkeypatch, method, old, new):
    monkeypatch.setattr(VertexValues, method, mutant(getattr(VertexValues, method), old, new))
    with dps.graph.connected_components(ps, EDGES) as result:

        def check() -> None:
            check_values(result)
            test_vertices_that_the_graph_does_not_have(result, [4, -8, 0], 1, "-8")

        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check()
