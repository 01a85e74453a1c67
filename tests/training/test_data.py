"""What `ps.run` takes for data, and who gets which part of it."""

from __future__ import annotations

from collections import Counter

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from distributed import Client, Future
from hypothesis import example, given
from hypothesis import strategies as st

import dps
from dps.engine.training.data import Partitions, Shares, share
from dps.errors import InputError, InputTypeError

WORKERS = st.sampled_from("abcde")
SLOTS = st.lists(WORKERS, min_size=1, max_size=8)
HOLDERS = st.lists(st.sets(WORKERS, max_size=3).map(sorted), max_size=40)
ONE_HOLDER = st.lists(st.sets(WORKERS, max_size=1).map(sorted), max_size=40)


@given(HOLDERS, SLOTS)
def test_every_partition_is_shared_out_once_and_nobody_gets_two_more_than_another(holders, slots):
    shares = share(holders, slots)
    assert len(shares) == len(slots)
    assert sorted(part for parts in shares for part in parts) == list(range(len(holders)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(parts == sorted(parts) for parts in shares)


@given(ONE_HOLDER, SLOTS)
@example([["a"]] * 5 + [[]], ["a", "b"])
@example([["a"]] * 3 + [["b"]] * 2, ["a", "b"])
def test_as_many_partitions_stay_where_they_lie_as_balance_allows(holders, slots):
    shares = share(holders, slots)
    local = sum(slots[n] in holders[part] for n, parts in enumerate(shares) for part in parts)
    # Everybody gets `least`, and `more` of them one more: those that can use it for a partition of their own worker.
    least, more = divmod(len(holders), len(slots))
    lying, threads = Counter(worker for workers in holders for worker in workers), Counter(slots)
    wanted = sum(min(lying[w], least * threads[w]) for w in threads)
    wanted += min(more, sum(min(threads[w], max(0, lying[w] - least * threads[w])) for w in threads))
    assert local == wanted


@given(st.integers(1, 5).flatmap(lambda copies: st.tuples(st.just(copies), SLOTS)))
def test_partitions_that_lie_everywhere_are_all_local(case):
    copies, slots = case
    holders = [sorted(set(slots))] * (copies * len(slots))
    shares = share(holders, slots)
    assert [len(parts) for parts in shares] == [copies] * len(slots)


@given(ONE_HOLDER, SLOTS)
@example([["a"]] * 6, ["a", "b"])
def test_partitions_that_were_fetched_do_not_change_the_assignment(holders, slots):
    shares, keys = Shares(), list(range(len(holders)))
    first = shares.of(keys, holders, slots)
    now_at = {part: slots[n] for n, parts in enumerate(first) for part in parts}
    copied = [[*workers, now_at[part]] for part, workers in enumerate(holders)]
    for lying in (copied, holders, copied):
        assert shares.of(keys, lying, slots) == first


def test_an_assignment_that_fits_no_more_is_made_anew():
    shares, keys = Shares(), [0, 1, 2, 3]
    assert shares.of(keys, [["a"], ["b"]] * 2, ["a", "b"]) == [[0, 2], [1, 3]]
    assert shares.of(keys, [["b"], ["a"]] * 2, ["a", "b"]) == [[1, 3], [0, 2]]
    assert shares.of(keys, [["b"], ["a"]] * 2, ["a"]) == [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def client():
    with (
        dps.LocalCluster(servers=0, trainers=2, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def values(rows: list[tuple[Future, ...]]) -> list[tuple]:
    return [tuple(future.result() for future in row) for row in rows]


def inc(x):
    return x + 1


def test_a_bag(client):
    assert values(Partitions.of(client, db.from_sequence(range(6), npartitions=3)).rows) == [
        ([0, 1],),
        ([2, 3],),
        ([4, 5],),
    ]


def test_an_array_and_its_labels(client):
    X, y = da.arange(12, chunks=6).reshape(6, 2).rechunk((2, 2)), da.arange(6, chunks=2)
    values_found = values(Partitions.of(client, (X, y)).rows)
    assert [(x.tolist(), labels.tolist()) for x, labels in values_found] == [
        ([[0, 1], [2, 3]], [0, 1]),
        ([[4, 5], [6, 7]], [2, 3]),
        ([[8, 9], [10, 11]], [4, 5]),
    ]


def test_a_dataframe(client):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"a": range(6)})
    values_found = values(Partitions.of(client, dd.from_pandas(frame, npartitions=2)).rows)
    assert [part.a.tolist() for (part,) in values_found] == [[0, 1, 2], [3, 4, 5]]


def test_delayed_values_and_futures_one_or_many(client):
    inced = dask.delayed(inc)
    assert values(Partitions.of(client, [inced(1), inced(2)]).rows) == [(2,), (3,)]
    assert values(Partitions.of(client, inced(1)).rows) == [(2,)]
    futures = client.scatter([7, 8])
    assert Partitions.of(client, futures).rows == [(futures[0],), (futures[1],)]
    assert Partitions.of(client, futures[0]).rows == [(futures[0],)]
    assert values(Partitions.of(client, (futures, [inced(1), inced(2)])).rows) == [(7, 2), (8, 3)]


def test_what_is_persisted_is_taken_as_it_is(client):
    array = client.persist(da.ones(6, chunks=2))
    keys = [key for (key,) in Partitions.of(client, array).keys]
    assert keys == list(array.__dask_keys__())


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (lambda c: da.ones((4, 4), chunks=(2, 2)), InputError, r"rechunk\(\(rows, -1\)\)"),
        (lambda c: (da.ones((4, 2), chunks=2), da.ones(4, chunks=4)), InputError, "2, 1 partitions"),
        (lambda c: (da.ones(4, chunks=2), da.ones((4, 2), chunks=1)), InputError, "part 1 of the data"),
        (lambda c: np.ones(4), InputTypeError, "the data is a ndarray"),
        (lambda c: (np.ones(4), np.ones(4)), InputTypeError, "part 0 of the data is a ndarray"),
        (lambda c: [1, 2], InputTypeError, "list"),
        (lambda c: [*c.scatter([1]), dask.delayed(inc)(1)], InputTypeError, "list"),
        (lambda c: [], InputTypeError, "list"),
        (lambda c: (), InputError, "no partitions"),
        (lambda c: "text", InputTypeError, "str"),
        (lambda c: None, InputTypeError, "NoneType"),
        (lambda c: dask.delayed(divmod)(1, 0), ZeroDivisionError, "by zero"),
        (lambda c: [c.submit(divmod, 1, 0)], ZeroDivisionError, "by zero"),
        (lambda c: db.from_sequence([1, 0]).map(lambda x: 1 // x), ZeroDivisionError, "by zero"),
    ],
)
def test_what_is_no_data_is_refused(client, data, error, words):
    with pytest.raises(error, match=words):
        Partitions.of(client, data(client))
