"""Vectors on real servers: in threads of this process, and in processes of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_random_programs import DTYPES, Machine, random_programs

import dps
from dps.arrays import Space
from dps.arrays.sparse_space import SparseSpace
from dps.errors import FunctionError, InputError, InputTypeError, KeyRangeError, PoolFullError


@pytest.fixture(scope="module", params=[1, 2], ids=["1 server", "2 servers"])
def ps(request):
    count = request.param
    with (
        dps.LocalCluster(servers=count, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster, servers=count, copies=count) as ps,
    ):
        dps.arrays.on(ps).zeros(2_000_000)  # the first long function starts a thread on each server, which stays
        yield ps


PROGRAMS = {
    "shape": st.one_of(st.tuples(st.integers(1, 40)), st.tuples(st.integers(2, 4), st.integers(2, 20))),
    "dtypes": st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    "program": random_programs,
    "seed": st.integers(0, 1000),
}


@settings(max_examples=8)
@given(**PROGRAMS)
def test_random_programs_do_what_numpy_does(ps, shape, dtypes, program, seed):
    run(ps, shape, dtypes, program, seed)


@pytest.mark.thorough
@settings(max_examples=25)
@given(**PROGRAMS)
def test_more_random_programs_do_what_numpy_does(ps, shape, dtypes, program, seed):
    run(ps, shape, dtypes, program, seed)


def run(ps, shape, dtypes, program, seed):
    machine = Machine(1, shape, [], seed)
    machine.space = Space(dps.arrays.on(ps).space.store)
    for size in {shape[-1]}:
        for dtype in ("float32", "float64", "int64"):
            machine.space.pool(size, np.dtype(dtype), 256)
    machine.bring(shape, dtypes)
    for step in program:
        machine.step(*step)
    machine.check()
    for name in machine.space.used():
        ps.drop_table(name)


def test_what_is_made(ps):
    assert dps.arrays.on(ps).zeros(3).tolist() == [0, 0, 0]
    assert dps.arrays.on(ps).ones((2, 3), dtype="float32").sum() == 6
    assert dps.arrays.on(ps).full(3, 7).dtype == np.int64
    assert dps.arrays.on(ps).asarray([1.5, 2]).tolist() == [1.5, 2]
    xp = dps.arrays.on(ps)
    np.testing.assert_array_equal(
        dps.arrays.on(ps).random(101, seed=5).to_numpy(), np.random.Generator(np.random.Philox(key=5)).random(101)
    )
    numbers = np.random.Generator(np.random.Philox(key=6)).random((3, 21))
    np.testing.assert_array_equal(dps.arrays.on(ps).random((3, 21), seed=6).to_numpy(), numbers)
    normal = xp.normal(10_001, seed=1).to_numpy()
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 1) < 0.05
    np.testing.assert_array_equal(xp.arange(3, 20, 4).to_numpy(), np.arange(3, 20, 4))
    np.testing.assert_allclose(xp.arange(0, 1, 0.1).to_numpy(), np.arange(0, 1, 0.1))
    np.testing.assert_allclose(xp.linspace(0, 1, 7).to_numpy(), np.linspace(0, 1, 7))
    np.testing.assert_array_equal(xp.eye(3).to_numpy(), np.eye(3))
    assert xp.zeros(3).__array_namespace__().sqrt(xp.ones(3)).tolist() == [1, 1, 1]
    assert xp.var(xp.arange(4), correction=1) == pytest.approx(np.var(np.arange(4), ddof=1))
    with pytest.raises(AttributeError, match="to_numpy"):
        xp.__getattr__("sort")


def test_clients_and_tables(ps):
    client, v = ps.client(), dps.arrays.on(ps).asarray(np.arange(6.0))
    client.add(v, [1, 4], [10, 20])
    v *= 2
    client.push(v, None, np.ones(6))
    assert client.pull(v).tolist() == v.tolist() == [1, 23, 5, 7, 49, 11]
    assert client.pull(v, [4, 0]).tolist() == [49, 1]
    assert client.pull(v, slice(1, 3)).tolist() == [23, 5]
    with pytest.raises(InputTypeError, match="in a table of float64"):
        client.add(v > 1, [0], 1)


def test_a_push_reaches_no_earlier_expression(ps):
    v = dps.arrays.on(ps).asarray(np.arange(3.0))
    doubled = v * 2
    ps.client().add(v, [1], 5)
    assert (v.tolist(), doubled.tolist()) == ([0, 6, 2], [0, 2, 4])


def test_trainers_add_to_a_vector(ps):
    w, g = dps.arrays.on(ps).zeros(8, dtype="float32"), dps.arrays.on(ps).asarray(np.arange(8, dtype="float32"))

    def train(trainer, partitions):
        for part in partitions:
            trainer.add(w, np.asarray(part), np.ones(len(part), "f4"))
        return float(w @ g), float(np.max(g))

    results = ps.run(train, np.array([0, 1, 2, 2, 7]), trainers=1)
    assert results[0] == (pytest.approx(0 + 1 + 2 * 2 + 7), 7)
    assert w.tolist() == [1, 1, 2, 0, 0, 0, 0, 1]


def test_a_sparse_vector(ps):
    """Trainers push to it by key, beside others in its table."""
    w, g = (
        dps.arrays.on(ps).zeros(None, dtype="float32", sparse=True),
        dps.arrays.on(ps).from_items([1, 7, -5], [1.0, 2.0, 3.0], dtype="float32"),
    )
    client = ps.client()

    def train(trainer, partitions):
        for part in partitions:
            trainer.add(w, part, np.ones(len(part), "f4"))
            trainer.push(w, part, 1.0)
        trainer.push_async(w, [2**62], 5).result()
        w[[70, 71]] = 2
        return trainer.pull(w, [[1, 2], [7, 8]]).tolist(), float(w @ g), trainer.push_pull(w, [-5], [1.0]).tolist()

    results = ps.run(train, np.array([1, 7, 7]), trainers=1)
    assert results == [([[2, 0], [4, 0]], 10, [1])]
    assert w.items()[0].tolist() == [-5, 1, 7, 70, 71, 2**62]
    assert w.items()[1].tolist() == [1, 2, 4, 2, 2, 5]
    assert g.items()[1].tolist() == [3, 1, 2]
    lazy = w * 2
    client.add(w, [1], 1)
    assert (lazy[1], w[1]) == (4, 3)
    client.add(w, [1], -1)
    w -= 0.5 * g / (np.abs(w) + 1)
    assert client.pull(w, [1, 70]).tolist() == w[[1, 70]].tolist() == [pytest.approx(2 - 0.5 / 3), 2]
    with pytest.raises(InputError, match=r"v\[keys\] = values"):
        client.assign(w, [1], 2.0)
    with pytest.raises(InputError, match="leave out"):
        client.pull(w, [1], out=np.zeros(1, "f4"))
    w[:] = w.soft_threshold(1.9)
    assert w.items()[0].tolist() == [7, 70, 71, 2**62]
    del lazy
    assert w.eliminate_zeros() == 0  # because `g` is not zero at the other keys


@pytest.mark.quick(1)
def test_a_function_of_the_user_is_mapped(ps):
    numbers = np.arange(300_000.0)
    v, base = dps.arrays.on(ps).asarray(numbers), 3

    def shifted(values, others, index, by):
        return np.where(index % base == 0, values + by, -others)

    found = (v * 2).map(shifted, v, index=True, by=10)
    np.testing.assert_array_equal(found.to_numpy(), np.where(np.arange(300_000) % 3 == 0, 2 * numbers + 10, -numbers))
    for wrong, message in (
        (lambda values: values[:-1] if len(values) > 1 else values, "value for each of"),
        (lambda values: 1 / 0 if len(values) > 1 else values, "ZeroDivisionError"),
        (lambda values: np.add(values, 1, out=values) if len(values) > 1 else values, "read-only"),
    ):
        with pytest.raises((FunctionError, InputError), match=message):
            v.map(wrong)
    np.testing.assert_array_equal(v.to_numpy(), numbers)
    sparse = dps.arrays.on(ps).from_items([5, 2**50], [2.0, -3.0])
    assert sparse.map(lambda x, index: x * (index > 5), index=True).items()[1].tolist() == [-3]


def test_trainers_merge_into_vectors(ps):
    dense, sparse = dps.arrays.on(ps).zeros(7), dps.arrays.on(ps).from_items([2, 5], [9.0, -1.0])

    def train(trainer, partitions):
        for part in trainer.iterate(partitions, batch_size=1):
            part = float(part[0])
            for vector in (dense, sparse):
                trainer.increment(vector, [1, 1, 5], [1.0, 2.0, part])
                trainer.merge_max(vector, [2, 6], [part, -part])
                trainer.merge_min(vector, [3, 4], [-part, part])
            before = trainer.pull(sparse, [1]).tolist()
        trainer.increment(dense, None, 1.0)
        return before

    assert ps.run(train, np.array([1.0, 4.0]), trainers=1) == [[3]]
    assert dense.tolist() == [1, 7, 5, -3, 1, 6, 1]
    assert sparse.items()[0].tolist() == [1, 2, 3, 5]
    assert sparse.items()[1].tolist() == [6, 9, -4, 4]


def test_sparse_vectors_of_scipy(ps):
    from scipy.sparse import coo_array, csr_matrix

    for matrix in (coo_array(([1.0, 2.0], ([3, 5],)), shape=(9,)), csr_matrix(([1.0, 2.0], ([0, 0], [3, 5])), (1, 9))):
        v = dps.arrays.on(ps).asarray(matrix)
        assert (v.size, v.to_scipy().toarray().tolist()) == (9, [0, 0, 0, 1, 0, 2, 0, 0, 0])
    with pytest.raises(InputError, match="one axis"):
        dps.arrays.on(ps).asarray(csr_matrix(np.eye(3)))
    with pytest.raises(InputError, match="lie in different tables"):
        v + dps.arrays.on(ps).zeros(9)


@pytest.mark.parametrize("capacity", [1, 8])
def test_a_sparse_vector_with_a_size_takes_no_other_keys(ps, capacity):
    v = dps.arrays.on(ps).zeros(5, dtype="int64", sparse=True, capacity=capacity)
    with pytest.raises(KeyRangeError):
        ps.client().add(v, [5], 1)
    ps.client().add(v, [4, 4, 0], [1, 2, 3])
    assert v.tolist() == [3, 0, 0, 0, 3]
    ps.drop_table(v.node.block.pool.table)
    dps.arrays.on(ps).space.of_kind(SparseSpace)._pools.clear()


def test_a_trainer_makes_no_vectors(ps):
    w = dps.arrays.on(ps).zeros(8)

    def train(trainer, partitions):
        with pytest.raises(PoolFullError, match="change it in place"):
            (w + 1).compute()
        with pytest.raises(InputError, match="a trainer makes no vectors"):
            np.zeros_like(w, dtype="float32").compute()
        trainer.pull(w)
        return float((w + 1).sum())

    assert ps.run(train, np.ones(1), trainers=1) == [8]


def test_to_dask_array(ps):
    v = dps.arrays.on(ps).asarray(np.arange(11.0))
    array = v.to_dask_array()
    assert array.chunks == ((11,),) if dps.arrays.on(ps).space.store.shards == 1 else ((6, 5),)
    assert float((array * 2).sum().compute()) == 110


@pytest.mark.processes
def test_servers_in_processes():
    with dps.LocalCluster(servers=2, trainers=1) as cluster, dps.ParameterServer(cluster, servers=2) as ps:
        rng = np.random.default_rng(0)
        a, g, s = rng.random((3, 100_003)).astype("f4")
        x, y, z = map(dps.arrays.on(ps).asarray, (a, g, s))
        x -= 0.1 * y / (np.sqrt(z) + 1e-8)
        expected = a - 0.1 * g / (np.sqrt(s) + 1e-8)
        np.testing.assert_array_equal(x.to_numpy(), expected)
        assert x @ y == pytest.approx(expected @ g, rel=1e-5)
        assert x.to_dask_array().sum().compute() == pytest.approx(expected.sum(), rel=1e-4)
