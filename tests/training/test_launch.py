"""`ps.run`: who runs where, the promise of the clock, aggregation, collectives, and every way a run may end."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from background import in_thread
from cases import varied
from distributed import Client, Future, get_worker, wait
from servers import wait_until

import dps
from dps.engine.training.threads import Threads
from dps.errors import (
    ClockTimeoutError,
    InputError,
    InputTypeError,
    StoppedError,
    TooFewWorkersError,
    TrainerLostError,
    UnknownTableError,
)

GO = threading.Event()  # for tasks in this process: they find this very module


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=3, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    GO.clear()
    with Client(cluster) as client:
        yield client
        GO.set()
        wait_until(lambda: not any(client.processing().values()))  # all threads are free for the next test


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client, servers=2) as ps:
        yield ps


@pytest.fixture
def impatient():
    """Limits for what is about to be broken; the controller reads them when a parameter server starts."""
    times = {"rejoin": "0.5 s", "stop": "3 s", "clock": "0.5 s"}
    with dask.config.set({f"dps.timeouts.{name}": value for name, value in times.items()}):
        yield


def some(client, count):
    """`count` partitions: 0, 1, 2, ... spread over the workers of trainers, in the order of their names."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    workers = sorted((a for a, info in known.items() if not info["resources"]), key=lambda a: known[a]["name"])
    spread = [[client.submit(int, n, workers=[workers[n % len(workers)]], pure=False)] for n in range(count)]
    wait(spread)
    return [future for (future,) in spread]


# -- data, and where it goes


def parts_and_place(trainer, parts):
    trainer.barrier()  # would wait for ever if not all ran at once
    return trainer.number, trainer.trainers, get_worker().address, parts


def flat(results):
    return [part for _, _, _, parts in results for part in parts]


def test_a_bag(ps):
    bag = db.from_sequence(range(10), npartitions=5)
    results = ps.run(parts_and_place, bag)
    assert [number for number, *_ in results] == [0, 1, 2]
    assert sorted(flat(results)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_an_array(ps):
    assert sorted(part.tolist() for part in flat(ps.run(parts_and_place, da.arange(6, chunks=2)))) == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]


def test_pairs_of_arrays(ps):
    X, y = da.arange(8, chunks=8).reshape(8, 1).rechunk((2, 1)), da.arange(8, chunks=2) * 10
    results = flat(ps.run(parts_and_place, (X, y)))
    assert len(results) == 4
    assert all(isinstance(part, tuple) and (part[0][:, 0] * 10 == part[1]).all() for part in results)
    assert sorted(labels.tolist()[0] for _, labels in results) == [0, 20, 40, 60]


def test_a_dataframe(ps):
    pd, dd = pytest.importorskip("pandas"), pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"a": range(7), "b": 1.5})
    found = pd.concat(flat(ps.run(parts_and_place, dd.from_pandas(frame, npartitions=3))))
    pd.testing.assert_frame_equal(found.sort_values("a"), frame)


def test_delayed_values(ps):
    parts = [dask.delayed(int)(n) for n in range(4)]
    assert sorted(flat(ps.run(parts_and_place, parts))) == [0, 1, 2, 3]
    assert flat(ps.run(parts_and_place, parts[3])) == [3]


def numbered(trainer, parts):
    trainer.barrier()
    assert len(trainer.partition_numbers) == len(parts)
    return dict(zip(trainer.partition_numbers, parts, strict=True))


@pytest.mark.parametrize("reassign", [False, True])
def test_a_trainer_knows_which_partitions_it_has(client, ps, reassign):
    results = ps.run(numbered, some(client, 7), reassign=reassign)
    assert [len(found) for found in results] in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert {number: part for found in results for number, part in found.items()} == {n: n for n in range(7)}


def test_trainers_of_an_open_run_know_the_numbers_of_their_callers_data(client, ps):
    with ps.open_run(trainers=2, staleness=math.inf) as run, run.trainer("alone") as trainer:
        assert trainer.partition_numbers == []
        function = lambda trainer, parts: (trainer.number, trainer.partition_numbers)  # noqa: E731
        assert ps.run(function, some(client, 3), trainers=1, run=run) == [(1, [0, 1, 2])]


def test_results_by_partition(client, ps):
    def squares(trainer, parts):
        return [part**2 for part in parts]

    assert ps.run(squares, some(client, 7), by="partition") == [n**2 for n in range(7)]
    assert ps.run(squares, some(client, 4), trainers=1, by="partition", reassign=True) == [0, 1, 4, 9]


@pytest.mark.parametrize(
    ("result", "count_text"), [([1], "list of 1"), ((1, 2, 3), "tuple of 3"), (None, "NoneType"), ("ab", "str")]
)
def test_results_by_partition_are_as_many_as_partitions(client, ps, result, count_text):
    with pytest.raises(
        InputError, match=rf"trainer 0 has 2 \(trainer.partition_numbers\), and returned a {count_text}$"
    ):
        ps.run(lambda trainer, parts: result, some(client, 2), trainers=1, by="partition")


def test_the_same_data_is_assigned_in_the_same_way_in_every_run(client, ps):
    """Also where partitions were fetched, and lie on two workers in the second run."""
    names = {
        w: info["name"] for w, info in client.scheduler_info(n_workers=-1)["workers"].items() if not info["resources"]
    }
    last = max(names, key=names.get)
    data = [client.submit(int, n, workers=[last], pure=False) for n in range(8)]
    wait(data)

    def which(trainer, parts):
        trainer.barrier()
        return get_worker().name, trainer.partition_numbers

    first = ps.run(which, data)
    assert [name for name, _ in first] == sorted(names.values())  # not in the order of addresses, which are random
    for _ in range(5):
        assert ps.run(which, data) == first


def test_what_is_persisted_is_trained_where_it_lies(client, ps):
    futures = some(client, 6)
    lies = {n: [*client.who_has([future])[future.key]] for n, future in enumerate(futures)}
    assert Counter(Counter(worker for (worker,) in lies.values()).values()) == {2: 3}
    results = ps.run(parts_and_place, futures)
    assert all(lies[part] == [worker] for _, _, worker, parts in results for part in parts)
    array = client.persist(da.arange(6, chunks=1))
    wait(array)
    lies = {n: [*client.who_has(array)[key]] for n, key in enumerate(array.__dask_keys__())}
    for _, _, worker, parts in ps.run(parts_and_place, array):
        assert len(parts) == 2
        if Counter(w for (w,) in lies.values())[worker] >= 2:
            assert all([worker] == lies[int(part[0])] for part in parts)


def test_a_single_trainer_goes_to_the_data(client, ps):
    for worker in sorted(
        a for a, info in client.scheduler_info(n_workers=-1)["workers"].items() if not info["resources"]
    ):
        futures = [client.submit(int, n, workers=[worker], pure=False) for n in range(3)]
        assert ps.run(parts_and_place, futures, trainers=1) == [(0, 1, worker, [0, 1, 2])]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_all_trainers_run_at_once_and_each_partition_is_used_once_an_epoch(client, ps, count):
    results = ps.run(epochs, some(client, count))
    assert len(results) == min(3, count)
    assert Counter(part for seen in results for part in seen) == dict.fromkeys(range(count), 4)
    assert max(map(len, results)) - min(map(len, results)) in (0, 4)


def epochs(trainer, parts):
    trainer.barrier()
    return list(trainer.iterate(parts, epochs=4))


def test_iterate_may_be_called_once_an_epoch(client, ps):
    assert ps.run(epoch_by_epoch, some(client, 3), kwargs={"epochs": 3}) == [([n] * 3, 3) for n in range(3)]


def epoch_by_epoch(trainer, parts, epochs):
    return [part for _ in range(epochs) for part in trainer.iterate(parts)], trainer.clock


def test_more_arguments(client, ps):
    assert ps.run(arguments, some(client, 2), args=(1, "a"), kwargs={"b": [2]}) == [(1, "a", [2])] * 2


def arguments(trainer, parts, *args, **kwargs):
    return (*args, *kwargs.values())


def test_nothing_is_left_of_a_run(client, ps):
    before = set(client.cluster.scheduler.tasks)
    ps.run(epochs, [dask.delayed(int)(n) for n in range(4)])
    wait_until(lambda: set(client.cluster.scheduler.tasks) <= before)
    assert [run.connected for run in ps.status().runs] == [[]]


def test_a_progress_bar(client, ps, capsys, monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # its thread would stay for ever
    ps.run(epochs, some(client, 3), progress=True)
    assert "training: 100%" in capsys.readouterr().err
    ps.run(epochs, some(client, 3))  # nobody looks
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wish", "error", "words"),
    [
        ({"staleness": -1}, InputError, r"staleness is 0, 1, 2, \.\.\., math\.inf or \"auto\", not -1"),
        ({"staleness": 0.5}, InputError, "not 0.5"),
        ({"staleness": math.nan}, InputError, "not nan"),
        ({"staleness": "1"}, InputError, "not '1'"),
        ({"staleness": None}, InputError, "not None"),
        ({"trainers": 0}, InputError, "trainers is 1 or more"),
        ({"trainers": "2"}, InputError, "trainers is 1 or more"),
        ({"trainers": 4}, TooFewWorkersError, "4 trainers asked for and 3 threads are free"),
    ],
)
def test_wishes_that_cannot_be_granted(client, ps, wish, error, words):
    with pytest.raises(error, match=words):
        ps.run(epochs, some(client, 1), **wish)
    assert ps.status().runs == []


# -- threads that are busy


def occupy():
    GO.wait(60)


def test_busy_threads_are_not_counted(client, ps):
    futures = some(client, 6)
    tasks = [client.submit(occupy, pure=False) for _ in range(2)]
    wait_until(lambda: sum(map(len, client.processing().values())) == 2)
    (free,) = (a for a, keys in client.processing().items() if not keys and "dps" not in resources(client, a))
    assert [result[:3] for result in ps.run(parts_and_place, futures)] == [(0, 1, free)]
    tasks.append(client.submit(occupy, pure=False))
    wait_until(lambda: sum(map(len, client.processing().values())) == 3)
    numbers = (
        "of 5 workers with 5 threads, 2 workers with 2 threads are for servers, 3 threads have tasks "
        r"\(occupy-[^,]*, occupy-[^,]*, occupy-[^,]*\), 0 threads are free"
    )
    with pytest.raises(TooFewWorkersError, match=rf"no thread is free .* \(5 tries within 1 s\): {numbers}"):
        ps.run(parts_and_place, futures)
    GO.set()
    wait(tasks)
    assert len(ps.run(parts_and_place, futures)) == 3


def resources(client, address):
    return client.scheduler_info(n_workers=-1)["workers"][address]["resources"]


def test_each_thread_takes_a_trainer():
    options = {"trainers": 2, "threads_per_trainer": 2, "processes": False, "dashboard_address": None}
    with dps.LocalCluster(**options) as cluster, Client(cluster) as client, dps.ParameterServer(client) as ps:
        results = ps.run(parts_and_place, some(client, 4))
        assert Counter(Counter(worker for _, _, worker, _ in results).values()) == {2: 2}
        assert sorted(flat(results)) == [0, 1, 2, 3]


def test_two_runs_at_once(client, ps):
    ps.table("flags")
    data = some(client, 3)
    first = in_thread(ps.run, await_flag, data, args=(7,), trainers=1)
    wait_until(lambda: any(run.connected for run in ps.status().runs))
    assert ps.run(raise_flag, data, args=(7,)) == [0, 1]
    assert first() == [0]
    assert [run.left for run in ps.status().runs] == [[0, 1], [0]]


def await_flag(trainer, parts, flag):
    while not trainer.pull("flags", [flag]):
        time.sleep(0.005)
    return trainer.number


def raise_flag(trainer, parts, flag):
    trainer.push("flags", [flag], 1.0)
    return trainer.number


def test_runs_that_collect_pushes_take_turns(client, ps):
    ps.table("flags")
    ps.table("sums", aggregate="sum")
    data = some(client, 1)
    first = in_thread(ps.run, await_flag, data, args=(7,))
    wait_until(lambda: any(run.connected for run in ps.status().runs))
    with pytest.raises(InputError, match=r"run 1 .* is going on, and table 'sums' collects"):
        ps.run(raise_flag, data, args=(7,))
    ps.client().push("flags", [7], 1.0)
    assert first() == [0]
    assert ps.run(raise_flag, data, args=(7,)) == [0]


# -- the promise: a pull at clock c sees all pushes before clock c - s, and nobody is further ahead than s


def count_up(trainer, parts, clocks, slow):
    """Each adds 1 to its own row each clock; what each saw at each clock."""
    everybody, seen = np.arange(trainer.trainers), []
    for clock in range(clocks):
        assert trainer.clock == clock
        if trainer.number == slow:
            time.sleep(0.002)
        seen.append(trainer.pull("counts", everybody))
        trainer.push("counts", [trainer.number], [1])
        trainer.tick()
    return np.array(seen)


@pytest.mark.parametrize("slow", [None, 1])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_promise(client, ps, staleness, slow):
    ps.table("counts", dtype="int64")
    results = ps.run(count_up, some(client, 3), staleness=staleness, args=(100, slow))
    clocks = np.arange(100)
    for me, seen in enumerate(results):
        assert (seen[:, me] == clocks).all()
        for counts in seen.T:
            assert (counts >= clocks - staleness).all()
            assert (counts <= clocks + staleness + 1).all()  # pushed in its own clock, not yet ticked
    assert ps.client().pull("counts", [0, 1, 2]).tolist() == [100] * 3


def hold_back(trainer, parts, clocks, expected):
    """Trainer 0 stays at clock 0 until the others have gone as far as they may."""
    others = np.arange(1, trainer.trainers)
    if trainer.number == 0:
        until = time.monotonic() + 30
        while (trainer.pull("counts", others) < expected).any():
            assert time.monotonic() < until
        time.sleep(0.1)
        seen = trainer.pull("counts", others)
    for _ in range(clocks):
        trainer.push("counts", [trainer.number], [1])
        trainer.tick()
    return seen.tolist() if trainer.number == 0 else None


@pytest.mark.parametrize(("staleness", "expected"), [(0, 1), (1, 2), (4, 5), (math.inf, 50)])
def test_fast_trainers_go_as_far_as_they_may_and_no_further(client, ps, staleness, expected):
    ps.table("counts", dtype="int64")
    results = ps.run(hold_back, some(client, 3), staleness=staleness, args=(50, expected))
    assert results == [[expected] * 2, None, None]


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_asynchronous_pushes_are_on_the_servers_before_the_tick(client, ps, staleness):
    ps.table("counts", dtype="int64")
    ps.run(count_up_async, some(client, 3), staleness=staleness)
    assert ps.client().pull("counts", [0, 1, 2]).tolist() == [50] * 3


def count_up_async(trainer, parts):
    for clock in range(50):
        seen = trainer.pull("counts", np.arange(trainer.trainers))
        assert (seen >= clock - trainer.staleness).all()
        trainer.push_async("counts", [trainer.number], [1])
        trainer.tick()


# -- aggregation: BSP is a one-process run


def gradient(batch, w):
    X, y = batch
    return X.T @ (X @ w - y) / len(y)


def fit(trainer, parts):
    for batch in trainer.iterate(parts):
        trainer.push("w", None, gradient(batch, trainer.pull("w")))


def fit_keyed(trainer, parts):
    keys = np.arange(20) * 1_000_003
    for batch in trainer.iterate(parts):
        trainer.push("w", keys, gradient(batch, trainer.pull("w", keys)))


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("optimizer", "aggregate", "kind"),
    varied([dps.SGD(0.02), dps.Adagrad(0.1), dps.Adam(0.05)], ["sum", "mean"], ["dense", "keyed"]),
    ids=str,
)
def test_bsp_is_a_one_process_run(client, ps, optimizer, aggregate, kind):
    random = np.random.default_rng(1)
    X = random.normal(size=(90, 20))
    y = X @ random.normal(size=20) + random.normal(size=90)
    batches = [(X[a : a + 10], y[a : a + 10]) for a in range(0, 90, 10)]
    data = client.scatter(batches)
    dense = kind == "dense"
    ps.table("w", rows=20 if dense else None, dtype="float64", optimizer=optimizer, aggregate=aggregate)
    ps.run(fit if dense else fit_keyed, data)

    shares = [[batches[n] for n in parts] for parts in shares_of(client, data)]
    rows = np.zeros((20, 1 + optimizer.init(1)))
    rows[:, 1:] = optimizer.slot_start
    for clock, together in enumerate(zip(*shares, strict=True)):
        update = np.sum([gradient(batch, rows[:, 0]) for batch in together], axis=0)
        optimizer.step(rows, (update / len(together) if aggregate == "mean" else update)[:, None], clock=clock)
    found = ps.client().pull("w") if dense else ps.client().pull("w", np.arange(20) * 1_000_003)
    np.testing.assert_allclose(found, rows[:, 0], rtol=1e-9, atol=1e-12)
    assert np.abs(found).max() > 0.05


def shares_of(client, data):
    """Who had which partition: scattered data lies on one worker each, and stays there."""
    from dps.engine.training.data import share

    workers = list(
        dict.fromkeys(a for a, i in client.scheduler_info(n_workers=-1)["workers"].items() if not i["resources"])
    )
    lies = [client.who_has([future])[future.key] for future in data]
    shares = share(lies, workers)
    assert {len(parts) for parts in shares} == {3}
    return shares


def test_unequal_numbers_of_batches(client, ps):
    ps.table("n", dtype="float64", optimizer=dps.SGD(1.0), aggregate="sum")
    ps.run(push_ones, some(client, 8))
    assert ps.client().pull("n", [0]) == -8


def push_ones(trainer, parts):
    for _ in trainer.iterate(parts):
        trainer.push("n", [0], 1.0)


def test_aggregation_needs_staleness_0(client, ps):
    ps.table("n", aggregate="mean")
    for staleness in (1, math.inf):
        with pytest.raises(InputError, match=r"table 'n' collects .*aggregate='mean'.*needs staleness 0; this run has"):
            ps.run(push_ones, some(client, 3), staleness=staleness)
    assert ps.client().pull("n", [0]) == 0


# -- collectives


def every_collective(trainer, parts):
    me, n = trainer.number, trainer.trainers
    trainer.barrier()
    assert trainer.allreduce(me + 1).tolist() == 6
    assert trainer.allreduce([me, -me, 1.5]).tolist() == [3, -3, 4.5]
    assert trainer.allreduce(np.full((2, 3), me, np.int8), "max").tolist() == [[2] * 3] * 2
    assert trainer.allreduce(np.float32(me), "min") == 0
    assert trainer.allreduce(np.array([me, 1]), "mean").tolist() == [1.0, 1.0]
    assert trainer.allreduce(np.zeros(0)).tolist() == []
    assert trainer.allgather(b"x" * 5 * me) == [b"", b"xxxxx", b"xxxxxxxxxx"]
    brought = trainer.allgather({"me": me, "rows": np.arange(me), "more": (None, "x")})
    assert [(each["me"], each["rows"].tolist(), each["more"]) for each in brought] == [
        (n, list(range(n)), [None, "x"]) for n in range(3)
    ]
    with pytest.raises(InputTypeError, match=r"allgather: a builtins\.set does not travel"):
        trainer.allgather({1, 2})
    assert trainer.broadcast(np.arange(3) * me, root=2).tolist() == [0, 2, 4]
    assert trainer.broadcast(me).tolist() == 0
    assert trainer.broadcast(np.full(5, me % 2 == 1), root=1).tolist() == [True] * 5
    return trainer.allreduce(np.random.default_rng(me).normal(size=1000).astype(np.float32) / n)


def test_collectives(client, ps):
    one, two, three = ps.run(every_collective, some(client, 3))
    assert one.tobytes() == two.tobytes() == three.tobytes()
    parts = [np.random.default_rng(me).normal(size=1000).astype(np.float32) / 3 for me in range(3)]
    np.testing.assert_allclose(one, sum(parts), rtol=1e-5)
    assert ps.run(every_collective, some(client, 3))[0].tobytes() == one.tobytes()


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_collectives_after_unequal_numbers_of_batches(client, ps, staleness):
    assert ps.run(epochs_and_sums, some(client, 7), staleness=staleness) == [[7, 14, 21]] * 3


def epochs_and_sums(trainer, parts):
    """Who has fewer batches is early at the meeting, while the others still tick."""
    done, sums = 0, []
    for _ in range(3):
        for _ in trainer.iterate(parts):
            done += 1
        sums.append(int(trainer.allreduce(done)))
    return sums


def test_who_has_left_is_not_waited_for(client, ps):
    assert ps.run(leave_early, some(client, 3)) == ["left", 2, 2]
    with pytest.raises(InputError, match="broadcast from trainer 0, which is not in the run"):
        ps.run(leave_early, some(client, 3), kwargs={"then": "broadcast"})


def leave_early(trainer, parts, then="allreduce"):
    if trainer.number == 0:
        return "left"
    for _ in range(3):
        trainer.tick()
    return int(getattr(trainer, then)(1))


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (["barrier()", "allreduce(1)", "allreduce(1)"], "must make the same collective calls"),
        (["allreduce([1, 2])", "allreduce([1])", "allreduce([1])"], "must make the same collective calls"),
        (["allreduce(1)", "allreduce(1.0)", "allreduce(1)"], "must make the same collective calls"),
        (["allreduce(1, 'min')", "allreduce(1, 'max')", "barrier()"], "must make the same collective calls"),
        (["broadcast(1)", "broadcast(1, root=1)", "broadcast(1)"], "must make the same collective calls"),
        (["broadcast(1, root=3)"] * 3, "broadcast from trainer 3: the run has trainers 0 to 2"),
        (["allreduce(1, 'median')"] * 3, "allreduce takes sum, mean, max or min, not 'median'"),
        (["allreduce('a')"] * 3, "takes arrays of numbers"),
        (["broadcast(np.zeros(1 << 22))"] * 3, "a collective takes up to"),
        (["allgather(bytes(6 << 20))"] * 3, "a collective takes up to"),
    ],
)
def test_collectives_that_do_not_fit(client, ps, calls, words):
    with pytest.raises(InputError, match=words):
        ps.run(call, some(client, 3), args=(calls,))
    assert ps.run(call, some(client, 3), args=(["allreduce(1)"] * 3,)) == [3, 3, 3]


def test_a_collective_that_took_too_long_is_asked_for_again(impatient, client, ps):
    """What was brought stays there: whoever comes in between finds it, and who asks again is at the same place."""
    with ps.open_run(trainers=2) as run, run.trainer() as early, run.trainer() as late:
        for _ in range(2):
            with pytest.raises(ClockTimeoutError, match="not there: trainers 1"):
                early.allgather(b"a")
        assert late.allgather(b"b") == [b"a", b"b"]
        assert early.allgather(b"a") == [b"a", b"b"]


def call(trainer, parts, calls):
    return eval(f"trainer.{calls[trainer.number]}")


# -- errors


class OwnError(Exception):
    """A user's."""


def fail(trainer, parts, what):
    """Trainer 1 fails at clock 3, having pushed; the others are elsewhere."""
    while True:
        trainer.push("sums", [0], 1.0)
        trainer.push("n", [0], 1.0)
        if trainer.number == 1 and trainer.clock == 3:
            raise OwnError("the user's own")  # this line
        if trainer.clock == 3 and what == "barrier":
            trainer.barrier()
        elif trainer.clock == 3 and what == "pull":
            while True:
                trainer.pull("n", [0])
        trainer.tick()


@pytest.mark.parametrize(("what", "staleness"), [("tick", 0), ("barrier", 0), ("pull", 0), ("tick", math.inf)])
def test_an_error_stops_all_and_reaches_the_caller(client, ps, what, staleness):
    ps.table("n")
    ps.table("sums", optimizer=dps.Add(), aggregate=None if staleness else "sum")
    with pytest.raises(OwnError, match=r"^the user's own$") as caught:
        ps.run(fail, some(client, 3), args=(what,), staleness=staleness)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert ("fail", 'raise OwnError("the user\'s own")  # this line') in [(f.name, f.line) for f in frames]
    (run,) = ps.status().runs
    assert run.connected == []
    assert "OwnError: the user's own" in run.stopped
    before = ps.client().pull("n", [0])
    if staleness == 0:  # clocks 0, 1, 2 were complete, 3 was not
        assert ps.client().pull("sums", [0]) == 9
        assert ps.client().pull("n", [0]) >= 10
    caught = None
    wait_until(lambda: not any(client.processing().values()))
    ps.run(epochs, some(client, 3))
    assert ps.client().pull("n", [0]) == before
    if staleness == 0:
        assert ps.client().pull("sums", [0]) == 9


def test_what_a_dead_run_has_left_open_does_not_get_into_the_next(client, ps):
    ps.table("n", optimizer=dps.Add(), aggregate="sum")
    run = ps.connection.call("start_run", trainers=1, staleness=0)
    with dps.Trainer.join(ps.ticket, run, 0) as trainer:
        trainer.push("n", [0], 100.0)  # and its driver dies: nobody settles
    ps.connection.call("stop_run", run=run, reason="the test")
    ps.run(push_ones, some(client, 4))
    assert ps.client().pull("n", [0]) == 4


@pytest.mark.parametrize("error", [KeyError("k"), UnknownTableError("mine"), OSError(5, "x")])
def test_any_error_comes_as_it_is(client, ps, error):
    with pytest.raises(type(error)) as caught:
        ps.run(throw, some(client, 3), args=(error,))
    assert caught.value.args == error.args
    assert ps.run(epochs, some(client, 1)) == [[0] * 4]


def throw(trainer, parts, error):
    if trainer.number == 2:
        raise error
    trainer.barrier()


def test_the_first_error_is_the_one(client, ps):
    with pytest.raises(OwnError, match="trainer 2"):
        ps.run(fail_after_another, some(client, 3))


def fail_after_another(trainer, parts):
    if trainer.number == 2:
        raise OwnError("trainer 2")
    with pytest.raises(StoppedError, match="trainer 2 failed: OwnError"):
        trainer.barrier()
    raise StoppedError("told of trainer 2")


def push_for_ever(trainer, parts):
    while True:
        trainer.push("n", [trainer.number], 1.0)
        trainer.tick()


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [0, math.inf])
def test_cancelled_trainers_push_no_more(client, ps, staleness):
    ps.table("n")
    ended = in_thread(ps.run, push_for_ever, some(client, 3), staleness=staleness)
    wait_until(lambda: (ps.client().pull("n", [0, 1, 2]) > 10).all())
    keys = [key for key in client.futures if key.startswith("dps-train-")]
    assert len(keys) == 3
    client.cancel([Future(key, client) for key in keys])
    with pytest.raises(StoppedError):
        ended()
    before = ps.client().pull("n", [0, 1, 2])
    assert ps.run(epochs, some(client, 3)) == [[0] * 4, [1] * 4, [2] * 4]
    assert (ps.client().pull("n", [0, 1, 2]) == before).all()


@pytest.mark.thorough
def test_closing_the_parameter_server_ends_a_run(client, impatient):
    ps = dps.ParameterServer(client)
    ps.table("n")
    ended = in_thread(ps.run, push_for_ever, some(client, 3))
    wait_until(lambda: (ps.client().pull("n", [0, 1, 2]) > 3).all())
    with dps.ParameterServer.attach(client) as other:
        other.close()
    with pytest.raises(dps.DPSError):
        ended()
    ps.close()
    wait_until(lambda: not any(client.processing().values()))


# -- time-outs


def wait_alone(trainer, parts, what):
    while trainer.number == 1:
        trainer.pull("n", [0])
        time.sleep(0.005)
    getattr(trainer, what)()


def test_a_time_out_names_the_slowest(client, impatient):
    with dps.ParameterServer(client) as ps:
        ps.table("n")
        with pytest.raises(ClockTimeoutError, match=r"Slowest: trainer 1 is at clock 0, last heard of .* s ago"):
            ps.run(wait_alone, some(client, 3), args=("tick",))
        late = r"not there: trainers? ([02], )?1"  # because a busy machine may keep another one, too
        with pytest.raises(ClockTimeoutError, match=rf"waited .* in a barrier .*; {late}"):
            ps.run(wait_alone, some(client, 3), args=("barrier",))
        assert len(ps.run(epochs, some(client, 3))) == 3


def test_trainers_that_do_not_come(client, ps):
    data = some(client, 3)
    first = in_thread(ps.run, occupy_trainer, data, trainers=1)
    wait_until(lambda: any(run.connected for run in ps.status().runs))
    (worker,) = (a for a, keys in client.processing().items() if keys)
    real = Threads.take

    def taken_meanwhile(*args):
        return [(worker, "dps-train-behind-another-task"), *real(*args)]

    with pytest.MonkeyPatch.context() as patch, dask.config.set({"dps.timeouts.join": "0.3 s"}):
        patch.setattr(Threads, "take", taken_meanwhile)
        with pytest.raises(TooFewWorkersError, match=f"2 of 3 trainers have joined within 0.3 s.*{worker}"):
            ps.run(epochs, data)
    GO.set()
    assert first() == [None]
    assert len(ps.run(epochs, data)) == 3


def occupy_trainer(trainer, parts):
    GO.wait(60)


# -- with processes, to be killed


def die(trainer, parts, who):
    for _ in range(5):
        trainer.push("n", [trainer.number], 1.0)
        trainer.tick()
    if trainer.number == who:
        os.kill(os.getpid(), signal.SIGKILL)
    push_for_ever(trainer, parts)


HELD = """
import os, time

while os.path.exists({path!r}):
    time.sleep(0.01)
"""


@pytest.mark.processes
def test_a_trainer_that_vanishes(impatient, tmp_path):
    held, preload = tmp_path / "held", tmp_path / "hold.py"
    preload.write_text(HELD.format(path=os.fspath(held)))
    with (
        dask.config.set({"dps.timeouts.clock": "60 s", "distributed.worker.preload": [os.fspath(preload)]}),
        dps.LocalCluster(trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n")
        held.touch()  # because a nanny may restart its worker sooner than the limit ends
        words = (  # controller and driver wait equally long: either may be the first to say so
            r"trainer 1 (of run 1 \(on tcp://.*\) vanished at clock 5 and was not back within 0.5 s|"
            r"lost its worker tcp://.*, and for 0.5 s .* no thread was free to run it again)"
        )
        with pytest.raises(TrainerLostError, match=words):
            ps.run(die, da.arange(2, chunks=1), args=(1,))
        held.unlink()
        wait_until(lambda: len(client.cluster.scheduler.running) == 2)
        assert len(ps.run(epochs, client.scatter([0, 1]))) == 2


@pytest.mark.thorough
@pytest.mark.processes
def test_a_trainer_that_is_lost_again_and_again():
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        dps.LocalCluster(trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n")
        with pytest.raises(TrainerLostError, match=r"trainer 1 has lost its worker 2 times, .* is 1\)"):
            ps.run(die, da.arange(2, chunks=1), args=(1,))
        wait_until(lambda: len(client.cluster.scheduler.running) == 2)
        assert len(ps.run(epochs, client.scatter([0, 1]))) == 2


INTERRUPTED = """
import signal, sys, threading, time
import dps
from distributed import Client, wait

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it

def push_for_ever(trainer, parts):
    while True:
        trainer.push("n", [trainer.number], 1.0)
        trainer.tick()

def short(trainer, parts):
    trainer.barrier()
    return len([trainer.push("n", [trainer.number], 1.0) for _ in trainer.iterate(parts)])

with dps.LocalCluster(trainers=2, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
    ps = dps.ParameterServer(client)
    ps.table("n")

    def tell():
        with dps.Client(ps.ticket) as watcher:
            while not (watcher.pull("n", [0, 1]) > 10).all():
                time.sleep(0.01)
        print("running", flush=True)

    data = client.scatter([0, 1], hash=False)
    threading.Thread(target=tell).start()
    try:
        ps.run(push_for_ever, data)
    except KeyboardInterrupt:
        print("interrupted", any(run.connected for run in ps.status().runs), flush=True)
    before = ps.client().pull("n", [0, 1])
    print(ps.run(short, data), ps.client().pull("n", [0, 1]) - before, flush=True)
    while any(client.processing().values()):
        time.sleep(0.01)
    ps.close()
    print("closed", flush=True)
"""


def test_ctrl_c_cleans_up():
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline() == "running\n"
            driver.send_signal(signal.SIGINT)
            out, err = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert out == "interrupted False\n[1, 1] [1. 1.]\nclosed\n", err
    assert driver.returncode == 0
