"""What every client promises, against a dumb model: what was pushed is what is pulled.

The tests of this file run where they are imported: each module gives them its own fixture `clusters`, which maps a
number of servers to servers that run.
"""

from __future__ import annotations

import pickle
import threading

import dask
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import COLUMNS, WHOLE_COLUMNS, Model, mix

import dps
from dps.engine.client.origin import Origin
from dps.engine.state.columns import of_columns
from dps.engine.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec
from dps.errors import InputError

POOL = [0, 1, -1, 2**63 - 1, -(2**63), *range(100, 130)]
ROWS = 37
OPTIMIZERS = [dps.Add(), dps.Assign(), dps.SGD(0.5), dps.SGD(0.5, l1=0.1), dps.Adagrad(0.5), dps.Adam(0.1), dps.FTRL()]


@pytest.fixture
def servers(clusters):
    return clusters[2]


class Twin:
    """A table on servers, and its model; every call is made to both."""

    def __init__(self, client, spec: TableSpec):
        self.client, self.spec, self.model = client, spec, Model(spec)

    def push(self, verb: str, keys, flat: list[int], shape: tuple[int, ...], values: np.ndarray, out=None):
        """`keys` as the client gets them; `flat`, `shape`, the same as the model sees them. Returns what it answers."""
        rule = {"add": ADD, "assign": ASSIGN}.get(verb, PUSH)
        model_keys, model_values = flat, values.reshape(len(flat), self.spec.dim)
        if rule == PUSH and self.spec.optimizer.repeats == "sum":
            model_keys = list(dict.fromkeys(flat))
            sums = [sum((v for k, v in zip(flat, model_values, strict=True) if k == key), 0) for key in model_keys]
            model_values = np.array(sums, self.spec.dtype).reshape(len(model_keys), self.spec.dim)
        self.model.apply(rule, model_keys, model_values, NO_CLOCK, 1)
        call = getattr(self.client, verb)
        if verb == "push_pull":
            return self.compare(call(self.spec.name, keys, values, out), flat, shape, out)
        return call(self.spec.name, keys, values)

    def pull(self, keys, flat: list[int], shape: tuple[int, ...], out=None) -> None:
        self.compare(self.client.pull(self.spec.name, keys, out), flat, shape, out)

    def compare(self, answer: np.ndarray, flat: list[int], shape: tuple[int, ...], out) -> None:
        assert out is None or answer is out
        assert answer.dtype == self.spec.dtype
        assert answer.shape == (shape if self.spec.dim == 1 else (*shape, self.spec.dim))
        expected = [self.model.value(key) for key in flat]
        np.testing.assert_array_equal(answer, np.reshape(expected, answer.shape))


@st.composite
def specs(draw: st.DrawFn) -> TableSpec:
    dtype = draw(st.sampled_from(["float32", "float64", "int64"]))
    whole, dense = dtype == "int64", draw(st.booleans())
    dim = draw(st.sampled_from([1, 2, 3, 64]))
    optimizer = draw(st.sampled_from([dps.Add(), dps.Assign()] if whole else OPTIMIZERS))
    init = draw(st.sampled_from([dps.Zeros(), dps.Constant(2)] if whole else [dps.Zeros(), dps.Normal(1.0, seed=5)]))
    if draw(st.integers(0, 5)) == 5:
        dim, optimizer, init = of_columns(WHOLE_COLUMNS if whole else COLUMNS)
    return TableSpec(
        "t",
        rows=ROWS if dense else None,
        dim=dim,
        dtype=dtype,
        optimizer=optimizer,
        init=init,
        finite=draw(st.booleans()),
        shards=draw(st.integers(1, 9)) if dense else 2 ** draw(st.integers(0, 4)),
    )


@st.composite
def batches(draw: st.DrawFn, spec: TableSpec):
    """(what the client is given, the same as flat ints, its shape)."""
    if not spec.keyed and draw(st.booleans()):
        edges = st.one_of(st.none(), st.integers(-ROWS - 3, ROWS + 3))
        how = draw(st.one_of(st.none(), st.builds(slice, edges, edges)))
        flat = list(range(ROWS))[how or slice(None)]
        return how, flat, (len(flat),)
    pool = POOL if spec.keyed else range(ROWS)
    flat = draw(st.lists(st.sampled_from(pool), max_size=30))
    how = draw(st.sampled_from(["any", "by hash", "unique by hash", "sorted", "one", "square", "series", "uint64"]))
    if "hash" in how:  # as `localize` hands them out
        flat = sorted(set(flat) if "unique" in how else flat, key=mix)
    elif how == "sorted":
        flat = sorted(flat)
    elif how == "one" and flat:
        return flat[0], flat[:1], ()
    elif how == "square":
        flat = flat[: len(flat) // 3 * 3]
        return np.array(flat, np.int64).reshape(3, -1), flat, (3, len(flat) // 3)
    keys = np.array(flat, np.int64)
    made = {"series": pd.Series(keys), "uint64": keys.view(np.uint64), "sorted": flat}.get(how, keys)
    return made, flat, (len(flat),)


VERBS = ["push", "push", "push_pull", "add", "assign", "pull", "pull"]


@settings(max_examples=60)
@given(data=st.data(), count=st.integers(1, 3), chunk=st.sampled_from(["256 MiB", "1 kiB", "100 B"]))
def test_any_calls(clusters, data, count: int, chunk: str) -> None:
    servers, spec = clusters[count], data.draw(specs())
    owners = data.draw(st.lists(st.integers(0, count - 1), min_size=spec.shards, max_size=spec.shards))
    servers.table(spec, owners)
    with dask.config.set({"dps.limits.chunk": chunk}), servers.client() as client:
        twin = Twin(client, spec)
        for _ in range(data.draw(st.integers(1, 8))):
            verb = data.draw(st.sampled_from(VERBS))
            keys, flat, shape = data.draw(batches(spec))
            if spec.optimizer.derived and verb in ("add", "assign"):
                continue
            full = shape if spec.dim == 1 else (*shape, spec.dim)
            out = np.full(full, 99, spec.dtype) if data.draw(st.booleans()) else None
            values = np.random.default_rng(len(flat)).integers(-16, 16, full).astype(spec.dtype)
            if spec.dtype != "int64":
                values = values / 8
            if verb == "pull":
                twin.pull(keys, flat, shape, out)
            elif verb != "push_pull" or chunk == "256 MiB" or spec.optimizer.repeats == "sum":
                twin.push(verb, keys, flat, shape, values, out)
        everything = POOL if spec.keyed else list(range(ROWS))
        twin.pull(np.array(everything), everything, (len(everything),))
    assert servers.rows("t") == (len(twin.model.rows) if spec.keyed else ROWS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("rows", [None, 40])
def test_repeated_keys(servers, optimizer, rows: int | None) -> None:
    """One push is one step: on the sum of what a key got, or with Assign on the last of it."""
    servers.table(TableSpec("t", rows=rows, dim=2, optimizer=optimizer, shards=8))
    servers.table(TableSpec("u", rows=rows, dim=2, optimizer=optimizer, shards=8))
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 40, 500)
    values = rng.integers(-8, 8, (500, 2)) / 8
    unique, place = np.unique(keys, return_inverse=True)
    once = np.zeros((len(unique), 2))
    if optimizer == dps.Assign():
        once[place] = values
    else:
        np.add.at(once, place, values)
    with servers.client() as client:
        for _ in range(3):
            new = client.push_pull("t", keys, values)
            client.push("u", unique, once)
            expected = client.pull("u", keys)
            np.testing.assert_allclose(new, expected, rtol=1e-6, atol=1e-6)
            np.testing.assert_array_equal(client.pull("t", keys), new)


# ---- asynchronous ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 3, 64])
@pytest.mark.parametrize("order", ["forth", "back", "mixed"])
def test_many_in_flight(servers, in_flight: int, order: str) -> None:
    """Calls of one client take effect in the order in which they were made, whenever they are asked for."""
    servers.table(TableSpec("t", dim=3, shards=8))
    servers.table(TableSpec("d", rows=50, shards=4))
    rng = np.random.default_rng(1)
    with dask.config.set({"dps.limits.in-flight": in_flight}), servers.client() as client:
        sums, level, waiting = np.zeros((200, 3), np.float32), 0.0, []
        for i in range(60):
            keys = rng.permutation(200)[: rng.integers(1, 200)]
            values = rng.integers(-8, 8, (len(keys), 3)).astype(np.float32)
            sums[keys] += values
            level += i
            waiting.append((client.push_async("t", keys, values), None))
            values[:] = 99  # may be reused at once
            waiting.append((client.pull_async("t", keys), sums[keys]))
            out = np.empty(50, np.float32)
            waiting.append((client.push_pull_async("d", None, float(i), out=out), np.full(50, level)))
        order_of = {
            "forth": waiting,
            "back": waiting[::-1],
            "mixed": [waiting[i] for i in rng.permutation(len(waiting))],
        }
        for pending, expected in order_of[order]:
            answer = pending.result()
            assert pending.done()
            assert pending.result() is answer, "asked for twice"
            if expected is not None:
                np.testing.assert_array_equal(answer, expected)
        client.wait()


def test_threads_share_a_client(servers) -> None:
    servers.table(TableSpec("t", dim=2, dtype="int64", shards=8))
    wrong: list[BaseException] = []

    def work(number: int) -> None:
        try:
            mine = np.arange(number, 4000, 8)
            for i in range(1, 21):
                client.push("t", np.arange(4000), 1)
                new = client.push_pull("t", mine + 10_000, i)
                assert (new == i * (i + 1) // 2).all()
        except BaseException as error:
            wrong.append(error)

    with servers.client() as client:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong
        assert (client.pull("t", np.arange(4000)) == 160).all()


# ---- forms of a call ------------------------------------------------------------------------------------------------


def test_several_tables_in_one_round_trip(clusters) -> None:
    servers = clusters[3]
    servers.table(TableSpec("a", dim=2, shards=8))
    servers.table(TableSpec("b", rows=9, shards=3))
    with servers.client() as client:
        client.push({"a": ([1, 2, 1], np.ones((3, 2))), "b": (slice(2, 5), 7.0)})
        out = np.empty(9, np.float32)
        pulled = client.pull({"a": [1, 5], "b": None}, out={"b": out})
        assert list(pulled) == ["a", "b"]
        assert pulled["a"].tolist() == [[2, 2], [0, 0]]
        assert pulled["b"] is out
        assert out.tolist() == [0, 0, 7, 7, 7, 0, 0, 0, 0]


def test_sparse_things(servers) -> None:
    servers.table(TableSpec("v", shards=8))
    servers.table(TableSpec("m", rows=6, dim=3, shards=2))
    vector = sp.csr_array(np.array([[0, 2.0, 0, 0, 5.0]]))
    matrix = np.zeros((6, 3))
    matrix[[1, 4], [2, 0]] = 7, 8
    with servers.client() as client:
        client.push("v", vector)
        client.push("v", sparse.COO(vector.toarray()[0]))
        assert client.pull("v", [0, 1, 4]).tolist() == [0, 4, 10]
        assert client.pull("v", vector).tolist() == [4, 10]
        assert servers.rows("v") == 2
        client.push("m", sp.coo_array(matrix))
        client.add("m", sparse.GCXS(matrix))
        client.assign("m", sp.csc_matrix(matrix * 2))
        np.testing.assert_array_equal(client.pull("m"), 2 * matrix)
        assert client.push_pull("m", sp.csr_array(matrix)).shape == (2, 3)


def test_many_keys_and_large_rows(clusters) -> None:
    """Beyond every buffer and piece on the way: scattered, gathered, cut, padded."""
    servers, rng = clusters[3], np.random.default_rng(2)
    servers.table(TableSpec("t", dim=5, shards=16, optimizer=dps.Adagrad(0.5)))
    servers.table(TableSpec("one", shards=16))
    servers.table(TableSpec("wide", rows=40, dim=30_001, shards=3, optimizer=dps.Momentum(0.5)))
    keys = rng.permutation(150_001)
    with servers.client() as client:
        values = rng.normal(size=(len(keys), 5)).astype(np.float32)
        client.push("t", keys, values)
        expected = -0.5 * values / (np.abs(values) + 1e-10)
        np.testing.assert_allclose(client.pull("t", keys), expected, rtol=1e-5)
        np.testing.assert_array_equal(client.pull("t", keys[::-1]), client.pull("t", keys)[::-1])
        marks = rng.normal(size=len(keys)).astype(np.float32)
        client.assign("one", keys, marks)
        order = np.argsort(keys)
        np.testing.assert_array_equal(client.pull("one", np.arange(150_001)), marks[order])
        wide = rng.normal(size=(40, 30_001)).astype(np.float32)
        client.push("wide", None, wide)
        np.testing.assert_allclose(client.pull("wide", slice(3, 39)), -0.5 * wide[3:39], rtol=1e-6)
        rows = rng.permutation(40)
        np.testing.assert_allclose(client.pull("wide", rows), -0.5 * wide[rows], rtol=1e-6)


def test_aggregated_tables(servers) -> None:
    """Two trainers push; nothing moves until one of them has a later clock, or the run is settled."""
    servers.table(TableSpec("t", dim=1, shards=4, aggregate="mean", optimizer=dps.SGD(1.0)))
    with servers.client() as one, servers.client() as two:
        for trainer, client in enumerate((one, two)):
            client.session.own = client.session.acting = Origin(trainer, clock=0, parties=2)
        one.push("t", [1, 2, 1], [2.0, 4.0, 2.0])
        two.push("t", [1, 3], [4.0, 8.0])
        assert one.pull("t", [1, 2, 3]).tolist() == [0, 0, 0]
        one.session.own.clock = 1
        assert one.pull("t", [1, 2, 3]).tolist() == [-4, -2, -4]
        one.push("t", [1], [2.0])
        servers.settle()
        assert two.pull("t", [1]).tolist() == [-5]


def trainers(servers, count: int) -> list:
    """Clients that say they are trainers of one run."""
    clients = [servers.client() for _ in range(count)]
    for number, client in enumerate(clients):
        client.session.own = client.session.acting = Origin(number + 1, clock=0, parties=count)
    return clients


@pytest.mark.parametrize("rows", [None, 40])
@pytest.mark.parametrize("shards", [1, 8])
def test_a_mean_over_rows(servers, rows: int | None, shards: int) -> None:
    """Trainers with batches of different sizes step as one process with the sum of their gradients over all rows.

    The divisor is that of the whole clock also in shards that some trainers have no keys in, of pushes without any
    keys, and of two pushes of one batch.
    """
    servers.table(TableSpec("t", rows, dim=2, dtype="float64", shards=shards, aggregate="mean", optimizer=dps.SGD(1.0)))
    rng, expected = np.random.default_rng(3), np.zeros((40, 2))
    clients = trainers(servers, 3)
    for clock in range(4):
        total, sums = 0, np.zeros((40, 2))
        for number, client in enumerate(clients):
            client.session.own.clock, client.session.own.number = clock, 0
            size = int(rng.integers(1, 2**20))
            keys = rng.permutation(40)[: [1, 7, 0][(number + clock) % 3]]
            gradient = rng.normal(size=(len(keys), 2))
            client.push("t", keys, gradient, rows=size)
            client.push_async("t", [39], [gradient.sum(axis=0)], rows=0).result()
            if rows is not None and number == 1:
                client.push({"t": (slice(3, 5), 1.0)}, rows=1)
                sums[3:5] += 1
                total += 1
            np.add.at(sums, keys, gradient)
            sums[39] += gradient.sum(axis=0)
            total += size
        expected -= sums / total
    servers.settle()
    np.testing.assert_allclose(clients[0].pull("t", np.arange(40)), expected, rtol=1e-12, atol=1e-18)
    for client in clients:
        client.close()


def test_rows_of_a_push_in_several_chunks(servers) -> None:
    """The rows of data count once, however many requests carry a push."""
    servers.table(TableSpec("t", dim=2, shards=4, aggregate="mean", optimizer=dps.SGD(1.0)))
    one, two = trainers(servers, 2)
    one.session.chunk = 64
    one.push("t", np.arange(50), np.full((50, 2), 6.0), rows=5)
    two.push("t", [7], [[4.0, 4.0]], rows=1)
    servers.settle()
    np.testing.assert_allclose(one.pull("t", [6, 7]), [[-1, -1], [-10 / 6] * 2], rtol=1e-6)


def test_who_may_say_rows(servers) -> None:
    servers.table(TableSpec("mean", aggregate="mean", optimizer=dps.SGD(1.0), shards=2))
    servers.table(TableSpec("sum", aggregate="sum"))
    one, two = trainers(servers, 2)
    for wrong in (-1, 1.5, "3", True, 2**31):
        with pytest.raises(InputError, match="rows is how many rows of data a push stands for, 0 or more"):
            one.push("mean", [1], [1.0], rows=wrong)
    with pytest.raises(InputError, match="in a table with aggregate='mean', and it has aggregate='sum'"):
        one.push("sum", [1], [1.0], rows=3)
    with servers.client() as client, pytest.raises(InputError, match="this client has no clock"):
        client.push("mean", [1], [1.0], rows=3)
    one.push("mean", [1], [8.0], rows=4)
    for keys in ([1], [2, 3, 4, 5, 6]):
        with pytest.raises(
            InputError, match=r"some pushes of clock 0 say rows=.*to all pushes to the table, or to none"
        ):
            two.push("mean", keys, np.ones(len(keys)))
    two.session.own.clock, two.session.own.number = 1, 0
    two.push("mean", [2], [2.0])  # of another clock: a mean over its trainers
    with pytest.raises(InputError, match="some pushes of clock 1"):
        two.push("mean", [2], [2.0], rows=1)
    servers.settle()
    assert one.pull("mean", [1, 2]).tolist() == [-2, -1]


def test_a_client_travels_as_its_ticket(servers) -> None:
    with servers.client() as client:
        again = pickle.loads(pickle.dumps(client))
        assert again.ticket == client.ticket
        again.close()
        shown = repr(client) + repr(client.ticket)
        assert client.ticket.secret not in shown
        assert "'s'" in shown


def test_time_is_accounted_for(servers) -> None:
    servers.table(TableSpec("t"))
    with servers.client() as client:
        client.push("t", [1], 1)
        client.pull("t", [1])
        assert set(client.session.meter.seconds) == {"pull", "push", "wait", "serialise"}
        assert 0 < client.session.meter.seconds["pull"] < 5
        assert 0 < client.session.meter.seconds["push"] < 5


# ---- known to be wrong ----------------------------------------------------------------------------------------------


def test_repeats_in_a_push_past_the_clock_to_an_aggregating_table(servers) -> None:
    """From a client without a clock such a push is applied at once: one step on the sum, as everywhere."""
    servers.table(TableSpec("t", aggregate="sum", optimizer=dps.Adagrad(1.0)))
    servers.table(TableSpec("u", optimizer=dps.Adagrad(1.0)))
    with servers.client() as client:
        for name in "tu":
            client.push(name, [1, 1], [1.0, 3.0])
        assert client.pull("t", [1]) == client.pull("u", [1])


@pytest.mark.parametrize("optimizer", [dps.Add(), dps.Assign()], ids=repr)
def test_push_pull_of_repeats_in_several_chunks(servers, optimizer) -> None:
    servers.table(TableSpec("t", optimizer=optimizer))
    with dask.config.set({"dps.limits.chunk": "60 B"}), servers.client() as client:
        new = client.push_pull("t", [1] * 10, np.arange(10.0))
        np.testing.assert_array_equal(new, client.pull("t", [1] * 10))


def test_push_to_the_coordinates_of_a_sparse_vector(servers) -> None:
    servers.table(TableSpec("t"))
    with servers.client() as client:
        client.push("t", sp.csr_array(np.array([[0, 2.0, 0, 5.0]])), 1.0)
        assert client.pull("t", [1, 3]).tolist() == [1, 1]
