"""ps.map: predictions and evaluations over Dask collections, in tasks that read tables."""

from __future__ import annotations

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from dask import delayed
from dask.delayed import Delayed
from distributed import Client, wait
from oracles import mutant
from servers import wait_until

import dps
from dps.engine.driver import mapping, parameter_server
from dps.engine.training import lazy_reads
from dps.errors import InputError, InputTypeError, UnknownTableError
from dps.functions import library

RNG = np.random.default_rng(0)
P0, Q0 = RNG.normal(size=(20, 4)).astype("float32"), RNG.normal(size=(30, 4)).astype("float32")
USERS, ITEMS = RNG.integers(0, 20, 50), RNG.integers(0, 30, 50)
RATINGS = (P0[USERS] * Q0[ITEMS]).sum(1)


@pytest.fixture(scope="module")
def client():
    with (
        dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def ps(client):
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("P", dim=4).assign(np.arange(20), P0)
        ps.table("Q", rows=30, dim=4).assign(None, Q0)
        yield ps


@pytest.fixture(autouse=True)
def same_rows(ps):
    ps.client().assign("P", np.arange(20), P0)


def rating(pairs, P, Q):
    return (P.pull(pairs[:, 0]) * Q[pairs[:, 1]]).sum(axis=1)


def ratings_of_list(pairs, P, Q):
    for user, item in pairs:
        yield float(P.pull([user])[0] @ Q.pull([item])[0])


def ratings_of_frame(frame, P, Q):
    predicted = rating(frame[["user", "item"]].to_numpy(), P, Q)
    return frame.assign(predicted=predicted)[["predicted", "user"]]


PAIRS = np.stack([USERS, ITEMS], axis=1)
FRAME = pd.DataFrame({"user": USERS, "item": ITEMS, "rating": RATINGS}, index=range(100, 150))
CASES = {
    "array": (da.from_array(PAIRS, chunks=(17, 1)), rating, lambda made: made),
    "frame": (dd.from_pandas(FRAME, npartitions=3), ratings_of_frame, lambda made: made.predicted.to_numpy()),
    "bag": (db.from_sequence(PAIRS.tolist(), npartitions=3), ratings_of_list, lambda made: np.array(made)),
    "list": ([delayed(PAIRS[:20]), delayed(PAIRS[20:])], rating, np.concatenate),
    "delayed": (delayed(PAIRS), rating, lambda made: made),
}


@pytest.mark.parametrize("kind", CASES)
def test_each_kind_keeps_its_kind_and_is_lazy(client, ps, kind):
    data, function, values = CASES[kind]
    result = ps.map(function, data, tables=("P", "Q"))
    assert isinstance(result, Delayed) if kind == "delayed" else type(result) is type(data)
    ps.client().add("P", np.arange(20), 1.0)  # what is pulled is as it is when Dask computes it
    np.testing.assert_allclose(
        values(dask.compute(result)[0]), ((P0[USERS] + 1) * Q0[ITEMS]).sum(1), rtol=1e-4, atol=1e-5
    )
    ps.client().assign("P", np.arange(20), P0)
    wait_until(lambda: not client.futures)  # Dask does not compute anew what it still holds
    for scheduler in (None, "sync", "threads"):
        computed = dask.compute(result, **({"scheduler": scheduler} if scheduler else {}))[0]
        np.testing.assert_allclose(values(computed), RATINGS, rtol=1e-4, atol=1e-5)


def test_chunks_and_dtypes_are_known(ps):
    pairs = da.from_array(PAIRS, chunks=(17, 1))
    one = ps.map(rating, pairs, ("P", "Q"))
    assert (one.chunks, one.dtype) == (((17, 17, 16),), np.float32)
    rows = ps.map(lambda pairs, P: P.pull(pairs[:, 0]).astype("float64"), pairs, ps.tables()["P"])
    assert (rows.chunks, rows.dtype) == (((17, 17, 16), (4,)), np.float64)
    np.testing.assert_array_equal(rows.compute(), P0[USERS])
    np.testing.assert_array_equal(rows[20:30, 1].compute(), P0[USERS[20:30], 1])  # one task of three
    wrong = ps.map(lambda pairs, P: P.pull(pairs[:, 0]), pairs, "P", meta=np.empty((0, 3)))
    with pytest.raises(InputError, match=r"has returned shape \((17|16), 4\) for a block .* \(\1, 3\) was wanted"):
        wrong.compute()
    cubes = ps.map(lambda part, Q: part[:, None, None] * Q.pull()[:3], da.arange(6, chunks=4), "Q")
    assert cubes.chunks == ((4, 2), (3,), (4,))
    np.testing.assert_array_equal(cubes.compute(), np.arange(6)[:, None, None] * Q0[:3])


def test_a_tuple_is_evaluated_part_by_part(ps):
    def squared_errors(part, P, Q, scale, power=1):
        pairs, ratings = part
        return (scale * (rating(pairs, P, Q) - ratings)) ** power

    pairs, ratings = da.from_array(PAIRS, chunks=(17, 2)), da.from_array(RATINGS + 0.5, chunks=20)
    errors = ps.map(squared_errors, (pairs, ratings), ("P", "Q"), args=(2,), kwargs={"power": 2})
    assert errors.chunks == ((17, 17, 16),)
    assert float(errors.mean()) == pytest.approx(1.0, rel=1e-4)

    frame = dd.from_pandas(FRAME, npartitions=3)

    def error(part, P, Q):
        frame, ratings = part
        return ratings - rating(frame[["user", "item"]].to_numpy(), P, Q)

    series = ps.map(error, (frame, frame.rating), ("P", "Q"))
    assert series.divisions == frame.divisions
    np.testing.assert_allclose(series.compute(), 0, atol=1e-5)
    bags = tuple(db.from_sequence(column.tolist(), npartitions=4) for column in (USERS, ITEMS))
    products = ps.map(lambda part, P, Q: (P[part[0]] * Q[part[1]]).sum(axis=1), bags, ("P", "Q"))
    np.testing.assert_allclose(products.compute(), RATINGS, rtol=1e-4, atol=1e-5)
    several = ps.map(lambda part, P, Q: part[0] + part[1], ([delayed(1)], [delayed(2)]), ("P", "Q"))
    assert dask.compute(*several) == (3,)


def test_blocks_along_other_axes_are_joined(ps):
    cube = RNG.normal(size=(6, 4, 5))
    blocks = da.from_array(cube, chunks=(2, 3, 2))
    result = ps.map(lambda block, P: np.einsum("nij,ij->n", block, P.pull(range(4))[:, [0, 1, 2, 3, 0]]), blocks, "P")
    expected = np.einsum("nij,ij->n", cube, P0[:4][:, [0, 1, 2, 3, 0]])
    np.testing.assert_allclose(result.compute(), expected, rtol=1e-4)


@pytest.mark.parametrize("make", [scipy.sparse.csr_matrix, scipy.sparse.csr_array])
def test_sparse_blocks(ps, make):
    X = RNG.random((12, 30)) * (RNG.random((12, 30)) < 0.2)
    sparse = da.from_array(X, chunks=(5, 11)).map_blocks(make, meta=make((0, 0)))
    result = ps.map(lambda X, Q: X @ Q.pull(), sparse, "Q", meta=np.empty((0, 4)))
    assert result.chunks == ((5, 5, 2), (4,))
    np.testing.assert_allclose(result.compute(), X @ Q0, rtol=1e-4, atol=1e-5)


def test_a_persisted_array_and_unknown_rows(ps, client):
    pairs = da.from_array(PAIRS, chunks=(17, 2)).persist()
    np.testing.assert_allclose(ps.map(rating, pairs, ("P", "Q")).compute(), RATINGS, rtol=1e-4, atol=1e-5)
    some = pairs[pairs[:, 0] > 5]
    np.testing.assert_allclose(ps.map(rating, some, ("P", "Q")).compute(), RATINGS[USERS > 5], rtol=1e-4, atol=1e-5)


def test_two_maps_of_the_same_are_not_mistaken_for_each_other(ps):
    users = da.from_array(USERS, chunks=25)
    before = ps.map(lambda users, P: P.pull(users), users, "P").persist()
    wait(before)
    ps.client().add("P", np.arange(20), 1.0)
    after = ps.map(lambda users, P: P.pull(users), users, "P")
    np.testing.assert_allclose(after.compute() - before.compute(), 1, atol=1e-6)
    ps.client().assign("P", np.arange(20), P0)


def test_handles_read_only(ps):
    changes = [
        lambda P: P.push([1], np.ones((1, 4))),
        lambda P: P.add_async([1], np.ones((1, 4))),
        lambda P: P.__setitem__([1], np.ones((1, 4))),
        lambda P: P.push_pull([1], np.ones((1, 4))),
        lambda P: P.delete([1]),
        lambda P: P.clear(),
    ]
    for change in changes:
        task = ps.map(lambda part, P, change=change: change(P), delayed(0), "P")
        with pytest.raises(InputTypeError, match="changes a table, and the function of ps"):
            task.compute()
    reads = ps.map(lambda part, P: (P.pull_async([1]).result(), len(P), P.call(library.size)), delayed(0), "P")
    values, length, count = reads.compute()
    np.testing.assert_array_equal(values, P0[[1]])
    assert length == count == 20
    with pytest.raises(InputTypeError, match="there are functions that read only"):
        ps.map(lambda part, P: P.call(library.scale, value=0), delayed(0), "P").compute()
    np.testing.assert_array_equal(ps.client().pull("P", np.arange(20)), P0)


def test_an_error_of_the_function_is_raised_and_no_client_is_left(ps, monkeypatch):
    closed = []
    close = dps.Client.close
    monkeypatch.setattr(dps.Client, "close", lambda self: closed.append(self) or close(self))

    def fails(part, P):
        P.pull([1])
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        ps.map(fails, delayed(0), "P").compute()
    assert len(closed) == 1
    ps.map(rating, da.from_array(PAIRS, chunks=(10, 2)), ("P", "Q"), meta=np.empty(0, "f4")).compute()
    assert len(closed) == 6


def test_wrong_input_is_named(ps):
    numbers, rows = da.arange(10, chunks=5), da.ones((10, 2), chunks=(5, 2))
    bag = db.range(4, npartitions=2)
    for data, message in [
        (np.arange(3), "not a ndarray: of data in memory"),
        ([1, 2], "not a list"),
        ((numbers, np.arange(10)), "not a ndarray"),
        ((numbers, bag), "these are array, bag"),
        ((), "these are none"),
    ]:
        with pytest.raises(InputTypeError, match=message):
            ps.map(rating, data, "P")
    for call, error, message in [
        (lambda: ps.map(rating, bag, ()), InputError, "tables= has no table"),
        (lambda: ps.map(rating, bag, ("P", "R")), UnknownTableError, "R"),
        (lambda: ps.map(rating, bag, "P", meta=[]), InputError, "meta is for arrays and frames"),
        (lambda: ps.map(rating, numbers, "P", meta={"x": int}), InputTypeError, "meta of an array is an empty array"),
        (lambda: ps.map(rating, numbers, "P", args=(bag,)), InputTypeError, "compute them first"),
        (lambda: ps.map(rating, (numbers, rows[:8]), "P"), InputError, "the arrays have 10 and 8 rows"),
        (lambda: ps.map(rating, (bag, db.range(4, npartitions=1)), "P"), InputError, "have 2, 1 partitions"),
        (lambda: ps.map(rating, da.ones(()), "P"), InputError, "an axis of rows"),
        (lambda: ps.map(rating, numbers, "P"), InputError, "could not be found out: .*made-up partition .*pass meta="),
        (lambda: ps.map(lambda x, P: 1, numbers, "P"), InputError, r"has returned shape \(\) for a block of 1 rows"),
        (lambda: ps.map(lambda f, P: 1, CASES["frame"][0], "P"), InputTypeError, "a frame or a series, not a int"),
        (lambda: ps.map(lambda x, P: 1, bag, "P").compute(), InputTypeError, "returns an iterable, not a int"),
        (
            lambda: ps.map(lambda x, P: P.pull([1, 2, 3]), numbers, "P", meta=np.empty((0, 4))).compute(),
            InputError,
            r"has returned shape \(3, 4\) for a block of 5 rows, and \(5, 4\)",
        ),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_a_table_of_another_parameter_server_is_refused(ps, client):
    with dps.ParameterServer(client, name="other") as other:
        table = other.table("P", dim=4)
        with pytest.raises(InputError, match="'other', and this one is 'dps'"):
            ps.map(rating, da.arange(4, chunks=2), table)


@pytest.mark.processes
def test_in_processes():
    cluster = dps.LocalCluster(servers=1, trainers=2, dashboard_address=None)
    with cluster, Client(cluster), dps.ParameterServer(cluster) as ps:
        ps.table("Q", rows=30, dim=4).assign(None, Q0)
        rows = ps.map(lambda items, Q: Q[items], da.from_array(ITEMS, chunks=13), "Q")
        np.testing.assert_array_equal(rows.compute(), Q0[ITEMS])


# ---- broken variants must not pass ----------------------------------------------------------------------------------

WRONG = [  # where, function, a piece of it, and what stands there instead
    (parameter_server, "mapped", "uuid.uuid4().hex", "'one'"),
    (mapping, "_array", "concatenate=True", "concatenate=False"),
    (mapping, "_row_blocks", "column.rechunk({0: first.chunks[0]})", "column"),
    (lazy_reads.ReadingStage, "compute", "parts if self.several else parts[0]", "parts[0]"),
    (lazy_reads.ReadingStage, "__call__", "ReadingClient(client)", "client"),
    (lazy_reads.ReadingStage, "__call__", "with Client(self.ticket) as client:", "if client := Client(self.ticket):"),
]


def check_all(ps, client, monkeypatch) -> None:
    test_each_kind_keeps_its_kind_and_is_lazy(ps, "array")
    test_a_tuple_is_evaluated_part_by_part(ps)
    test_two_maps_of_the_same_are_not_mistaken_for_each_other(ps)
    test_handles_read_only(ps)
    test_an_error_of_the_function_is_raised_and_no_client_is_left(ps, monkeypatch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "name", "old", "new"), WRONG, ids=range(len(WRONG)))
def test_a_broken_variant_is_caught(ps, client, monkeypatch, place, name, old, new):
    made = []
    begin = dps.Client.__init__
    monkeypatch.setattr(dps.Client, "__init__", lambda self, *args, **kw: made.append(self) or begin(self, *args, **kw))
    monkeypatch.setattr(place, name, mutant(getattr(place, name), old, new))
    try:
        with pytest.raises((Exception, pytest.fail.Exception)):
            check_all(ps, client, monkeypatch)
    finally:
        for each in made:
            each.close()
        ps.client().assign("P", np.arange(20), P0)
