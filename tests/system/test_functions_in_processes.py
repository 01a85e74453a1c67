"""A function that a test defines, on servers that are processes of their own."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from distributed import Client
from servers import wait_until

import dps
from dps.errors import DPSError, FunctionError, FunctionTimeoutError, InputError, InputTypeError, LimitError
from dps.functions import deleting


@dps.function(changes=True)
def times(rows, by):
    rows.values *= by
    return len(rows)


times.merge(sum)


@dps.function
def divides_by_zero(rows):
    return 1 / 0


class OnlyHere:
    """Something that no other process can open."""

    def __reduce__(self):
        return (__import__, ("a_module_that_is_not_there",))


def test_functions_on_servers_in_processes() -> None:
    here = OnlyHere()
    with dps.LocalCluster(servers=2, trainers=1, processes=True) as cluster, dps.ParameterServer(cluster) as ps:
        w = ps.table("w", rows=100)
        w[:] = 3.0
        assert ps.call(times, "w", by=2.0) == 100
        assert ps.call(times, w, keys=[5, 5], by=2.0) == 1
        assert w.pull([0, 5, 99]).tolist() == [6, 12, 6]
        with pytest.raises(FunctionError, match="ZeroDivisionError"):
            ps.call(divides_by_zero, "w")
        with pytest.raises(DPSError, match="cannot be opened on the servers"):
            ps.register(dps.function(lambda rows: here))
        assert ps.client().call(times, "w", by=1.0) == 100


def raises_half_way(rows):
    rows.values += 1
    if rows.shard == 3:
        raise ValueError("not this one")


def loops_for_ever(rows):
    rows.values += 1
    while True:
        pass


def waits_in_c(rows):
    rows.values += 1
    time.sleep(20)


def has_another_shape(rows):
    rows.values = np.ones((len(rows), 7))


def writes_what_it_reads(rows):
    rows.values[:] = 0


def unlocks_what_it_reads(rows):
    rows.values.flags.writeable = True
    rows.values[:] = 0


def deletes_what_it_reads(rows):
    rows.delete(np.ones(len(rows), np.bool_))


def makes_nan(rows):
    rows.values[len(rows) - 1] = np.nan


def returns_an_object(rows):
    rows.values += 1
    return {1, 2}


def returns_too_much(rows):
    rows.values += 1
    return np.zeros(1 << 18)


def changing(part):
    return dps.function(changes=True)(part)


MISBEHAVING = [
    (changing(raises_half_way), FunctionError, "ValueError: not this one"),
    (changing(loops_for_ever), FunctionTimeoutError, r"'loops_for_ever'.*within 1 s \(dps.timeouts.function\)"),
    (changing(waits_in_c), FunctionTimeoutError, r"'waits_in_c'.*within 1 s"),
    (changing(has_another_shape), InputError, r"shape \(\d+, 2\); the function gave \(\d+, 7\)"),
    (dps.function(writes_what_it_reads), FunctionError, "read-only"),
    (dps.function(unlocks_what_it_reads), FunctionError, "cannot set WRITEABLE flag"),
    (dps.function(deletes_what_it_reads), InputError, "declare it with @dps.function"),
    (changing(makes_nan), DPSError, "refuses NaN and infinity, and the function made some"),
    (changing(returns_an_object), InputTypeError, "the result of function 'returns_an_object'"),
    (changing(returns_too_much), LimitError, "dps.limits.frame"),
    (deleting(lambda rows: [True]), InputError, "as an array of bool"),
]


@dps.function(changes=True)
def differs(rows):
    """Makes something else in each process, and each time."""
    rows.values += np.random.default_rng().random(rows.values.shape) + time.time() + os.getpid()


@pytest.mark.thorough
def test_functions_that_misbehave() -> None:
    """Each of them is a clear error, no row has changed on any copy, and the servers go on."""
    settings = {"dps.timeouts.function": "1s", "dps.limits.frame": "1 MiB"}
    with (
        dask.config.set(settings),
        dps.LocalCluster(servers=2, trainers=1, processes=True) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(cluster, servers=2, copies=2) as ps,
    ):
        pids = client.run(os.getpid)
        tables = [ps.table("d", dim=2, rows=100, shards=4, finite=True), ps.table("k", dim=2, shards=4, finite=True)]
        for table in tables:
            table.push(range(100), np.arange(200.0).reshape(100, 2))
        before = [table.pull(range(100)) for table in tables]
        for function, error, words in MISBEHAVING:
            for table, values in zip(tables, before, strict=True):
                with pytest.raises(error, match=words):
                    ps.call(function, table)
                np.testing.assert_array_equal(table.pull(range(100)), values)
        assert client.run(os.getpid) == pids, "no server was lost"
        for table in tables:
            ps.call(differs, table)
            assert ps.call(times, table, by=2.0) == 100
        after = [table.pull(range(100)) for table in tables]
        first = next(server for server in ps.status().servers if server.number == 0)
        os.kill(pids[first.worker], signal.SIGKILL)
        for table, values in zip(tables, after, strict=True):
            np.testing.assert_array_equal(table.pull(range(100)), values)
        wait_until(lambda: all(server.number for server in ps.status().servers if server.alive))
        assert ps.call(times, tables[0], by=2.0) == 100


@dps.function(changes=True)
def holds_the_lock(rows):
    rows.values += 1
    return sum(range(3 * 10**8))


@pytest.mark.thorough
def test_one_long_call_of_c_silences_no_server() -> None:
    """It keeps the interpreter's lock for longer than a server may be silent; no server is replaced."""
    with (
        dask.config.set({"dps.timeouts.function": "4s"}),  # longer than dps.timeouts.silence
        dps.LocalCluster(servers=2, trainers=1, processes=True) as cluster,
        dps.ParameterServer(cluster, servers=2, copies=2) as ps,
        ThreadPoolExecutor(1) as pool,
    ):
        w = ps.table("w", rows=100, shards=4)
        ps.register(holds_the_lock)
        assert ps.call(times, w, by=2.0) == 100, "the processes of functions run"
        before = ps.status()
        call = pool.submit(ps.call, holds_the_lock, w)
        pulls = 0
        while not call.done():
            assert not w.pull().any()
            pulls += 1
        with pytest.raises(FunctionTimeoutError, match="within 4 s"):
            call.result()
        assert pulls > 1
        after = ps.status()
        assert after.epoch == before.epoch, "no server was replaced"
        assert len(after.events) == len(before.events), "no server was silent"
        assert ps.call(times, w, by=2.0) == 100


@pytest.mark.thorough
def test_a_server_that_comes_later_has_the_functions() -> None:
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=True) as cluster,
        dps.ParameterServer(cluster, servers=1) as ps,
        ps.client() as client,
    ):
        w = ps.table("w", rows=100, shards=4)
        w[:] = 3.0
        ps.register(times)
        ps.scale(2)
        wait_until(lambda: {chain[0] for chain in ps.status().tables["w"].chains} == {0, 1})
        assert client.call(times, "w", by=2.0) == 100, "no call of ps.call, which would register it"
        assert w.pull().tolist() == [6.0] * 100
