"""The user's handle: start, tables, attach, status, close. What is left behind is judged by conftest.py."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import dask
import distributed
import msgspec
import numpy as np
import pytest
from distributed import Client
from servers import wait_until

import dps
import dps.engine.controller.plugin
import dps.engine.server.actor
from dps.engine.telemetry.snapshot import RunStatus, Status
from dps.errors import (
    AccessDeniedError,
    ClosedError,
    ControllerGoneError,
    DataLostError,
    DPSError,
    InputError,
    InputTypeError,
    NameInUseError,
    RequestTimeoutError,
    ServerGoneError,
    TooFewWorkersError,
    UnknownTableError,
)
from dps.functions import library


@pytest.fixture
def cluster():
    with dps.LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def processes():
    with dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client


def push_ones(trainer, parts):
    for _ in trainer.iterate(parts):
        trainer.push("w", [trainer.number], 1.0)
    return trainer.number


def dps_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dps")]


@dps.function(changes=True)
def waits(rows, directory):
    import function_gates

    if rows.shard == 0:
        function_gates.wait_at(directory)
    rows.values += 1


# -- from start to close


def test_a_parameter_server_starts_serves_and_closes(client):
    with dps.ParameterServer(client, servers=2) as ps:
        assert (ps.servers(), ps.name, ps.closed) == (2, "dps", False)
        text = f"2 servers in {client.scheduler.address}, {len(ps.tables())} tables, "
        assert repr(ps).startswith(f"<dps.ParameterServer 'dps': {text}")
        ps.table("w")
        ps.client().push("w", range(100), np.arange(100))
        assert ps.client().pull("w", range(100)).tolist() == list(range(100))
        assert ps.client() is ps.client()
    assert ps.closed
    assert repr(ps) == "<dps.ParameterServer 'dps' (closed)>"
    for use in (ps.client, ps.status, lambda: ps.tables(), lambda: ps.table("v"), lambda: ps.drop_table("w")):
        with pytest.raises(ClosedError, match="parameter server 'dps' was closed"):
            use()
    with pytest.raises(ClosedError):
        ps.run(push_ones, client.scatter([1]))
    ps.close()


# -- threads


def test_a_long_call_in_one_thread_keeps_no_other_waiting(client, tmp_path):
    with dps.ParameterServer(client, servers=2) as ps, ThreadPoolExecutor(3) as pool:
        held, free = ps.table("held", rows=8), ps.table("free")
        call = pool.submit(ps.call, waits, held, directory=str(tmp_path))
        try:
            wait_until((tmp_path / "began").exists)
            push = pool.submit(held.push, [0], [1.0])  # it waits for the function, as it should
            for _ in range(2):
                assert pool.submit(held.pull, [0, 7]).result(60).tolist() == [0, 0], "pulls do not wait"
                pool.submit(free.push, [5], [2.0]).result(60)
            assert ps.call(library.sum, free) == 4
            assert free.pull([5]).tolist() == [4]
            assert not call.done()
            assert not push.done()
        finally:
            (tmp_path / "go_on").touch()
        call.result(60)
        push.result(60)
        assert held.pull().tolist() == [2, *[1] * 7]


def test_the_client_of_a_thread_ends_with_it_and_its_pushes_count(client):
    with dps.ParameterServer(client, servers=2) as ps:
        w = ps.table("w", dtype="int64")
        w.push([0], 1)
        pushing = [threading.Thread(target=w.push_async, args=(range(1000), 1)) for _ in range(8)]
        sessions = weakref.WeakSet(each.session for each in ps._connection._clients)
        for thread in pushing:
            thread.start()
        for thread in pushing:
            thread.join()
        assert w.pull(range(3)).tolist() == [9, 8, 8]
        assert [each.session for each in ps._connection._clients] == list(sessions), "only this thread's is left"


def test_a_client_that_outlives_its_thread_is_closed_with_the_parameter_server(client):
    with dps.ParameterServer(client, servers=2) as ps, ThreadPoolExecutor(1) as pool:
        ps.table("w").push([1], 2.0)
        kept = pool.submit(ps.client).result()
        assert kept is not ps.client()
        pool.shutdown()
        assert kept.pull("w", [1]).tolist() == [2.0]
    assert kept.session.closed


def test_after_close_nothing_is_left_and_the_cluster_goes_on(cluster, client):
    tasks, clients = set(cluster.scheduler.tasks), set(cluster.scheduler.clients)
    for _ in range(3):
        with dps.ParameterServer(client, servers=2) as ps:
            ps.table("w")
            ps.run(push_ones, client.scatter([1, 2]))
            kept = ps.client()
            assert len(dps_threads()) == 3
        with pytest.raises(ClosedError, match="client of parameter server 'dps' was closed"):
            kept.pull("w", [1])
        assert not dps_threads()
        wait_until(lambda: set(cluster.scheduler.tasks) <= tasks)
        assert set(cluster.scheduler.clients) == clients
        assert not any(worker.state.actors for worker in cluster.workers.values())
        assert client.submit(sum, [1, 2], pure=False).result() == 3


def test_it_makes_and_closes_a_client_of_its_own_for_a_cluster(cluster):
    with dps.ParameterServer(cluster) as ps:
        assert ps.dask_client.status == "running"
        ps.table("w")
    assert ps.dask_client.status == "closed"
    with pytest.raises(TooFewWorkersError):
        dps.ParameterServer(cluster, servers=3, timeout=0.01)


def test_without_a_client_it_takes_the_current_one(client):
    with dps.ParameterServer() as ps:
        assert ps.dask_client is client
    assert client.status == "running"


def test_a_verb_that_the_controller_does_not_have_is_refused_with_its_release(client, caplog):
    with dps.ParameterServer(client) as ps, pytest.raises(InputError, match=f"'fly'.* dps {dps.__version__}"):
        ps.connection.call("fly", height=3)
    assert "fly" not in caplog.text, "the scheduler logs no traceback"
    hooks = set(dir(distributed.SchedulerPlugin))
    own = {name for name in vars(dps.engine.controller.plugin.Controller) if not name.startswith("_")}
    assert own - hooks == {"name"}, "its public methods are hooks of Dask"


def test_a_driver_of_another_controller_neither_learns_of_a_run_nor_stops_it(client):
    """Its tasks ended with their scheduler, and the run may go on with other ones."""
    with dps.ParameterServer(client) as ps:
        call = ps.connection.call
        run, term = call("start_run", trainers=1, staleness=None), ps.connection.describe().term
        for verb, fields in (
            ("progress", {"run": run}),
            ("stop_run", {"run": run, "reason": ""}),
            ("settle", {"keep": False}),
        ):
            with pytest.raises(ControllerGoneError, match=r"has taken the server over: .*'dps'\)\.resume_run"):
                call(verb, term=term + 1, **fields)
        assert msgspec.msgpack.decode(call("progress", run=run, term=term), type=RunStatus).stopped is None
        call("stop_run", run=run, reason="by this one", term=term)
        with pytest.raises(InputError, match=r"no single run .* was interrupted"):
            ps.resume_run(print, [1])
        with pytest.raises(InputError, match=r"run is the number of a run, or None for the only one .*, not 'last'"):
            ps.resume_run(print, [1], run="last")


def test_the_cell_of_a_notebook_runs_again(client):
    def cell(**changed):
        ps = dps.ParameterServer.get_or_start(client, servers=2, copies=2)
        return ps, ps.table("w", **{"dim": 2, "optimizer": dps.SGD(0.5), "exist_ok": True, **changed})

    first, table = cell()
    first.client().push("w", [7], [[2.0, 4.0]])
    second, again = cell()
    assert again == table
    assert second.client().pull("w", [7]).tolist() == [[-1.0, -2.0]]
    with pytest.raises(NameInUseError, match=r"dim is 2, not 3.*Ask for the same"):
        cell(dim=3)
    with pytest.raises(NameInUseError, match=r"'w' already; .*pass exist_ok=True"):
        cell(exist_ok=False)
    with pytest.raises(NameInUseError, match="shards is 8, not 2"):
        cell(shards=2)
    with pytest.raises(NameInUseError, match="runs with copies=2, not 1"):
        dps.ParameterServer.get_or_start(client)
    with second:
        pass
    assert second.closed
    assert first.client().pull("w", [7]).tolist() == [[-1.0, -2.0]]
    first.close()


def test_get_or_start_twice_at_once_is_one_parameter_server(client):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        handles = list(pool.map(lambda _: dps.ParameterServer.get_or_start(client, servers=2), range(2)))
    handles[0].table("w")
    assert list(handles[1].tables()) == ["w"]
    for handle in handles:
        handle.close()


def test_an_asynchronous_client_is_refused(cluster):
    async def start():
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            with pytest.raises(InputTypeError, match="asynchronous=False"):
                dps.ParameterServer(client)

    asyncio.run(start())


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a" * 65, None, 7])
def test_names_that_are_none(name):
    with pytest.raises(InputError, match="name is 1 to 64 letters"):
        dps.ParameterServer(name=name)
    with pytest.raises(InputError, match="name is 1 to 64 letters"):
        dps.ParameterServer.attach(None, name=name)


@pytest.mark.parametrize("servers", [0, -1, 1025, 1.0, "2", True, None])
def test_numbers_of_servers_that_are_none(servers):
    with pytest.raises(InputError, match="servers is a whole number"):
        dps.ParameterServer(servers=servers)


def test_the_handle_survives_its_dask_client(cluster):
    client = Client(cluster)
    ps = dps.ParameterServer(client)
    client.close()
    assert "dps" in repr(ps)
    with pytest.raises(ClosedError, match="Dask client"):
        ps.table("w")
    ps.close()
    with Client(cluster) as other:
        again = dps.ParameterServer.attach(other)
        again.table("w")
        again.close()


CLOSING = """
import threading, time
import dps
from distributed import Client
cluster = dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None)
client = Client(cluster)
ps = dps.ParameterServer(client, servers=2)
ps.table("w")
ps.client().push("w", [1], 1.0)
cluster.close()
client.close()
ps.close()
until = time.monotonic() + 20
while any(thread.name.startswith("dps") for thread in threading.enumerate()) and time.monotonic() < until:
    time.sleep(0.05)
print(*[thread.name for thread in threading.enumerate() if thread.name.startswith("dps")], "end")
"""


def test_a_cluster_that_closes_first_takes_it_along():  # in a process of its own: Dask leaves threads behind
    run = subprocess.run([sys.executable, "-c", CLOSING], capture_output=True, text=True, timeout=250)
    assert run.stdout == "end\n", run.stderr


# -- several of them


def test_those_of_different_names_do_not_see_each_other(client):
    with dps.ParameterServer(client, name="a") as a, dps.ParameterServer(client, servers=2, name="b") as b:
        a.table("w", dim=2)
        b.table("w", rows=5)
        a.table("only-a")
        a.client().push("w", [1], [[1, 2]])
        b.client().push("w", [1], [5])
        assert a.client().pull("w", [1]).tolist() == [[1, 2]]
        assert b.client().pull("w", [1]).tolist() == [5]
        assert (sorted(a.tables()), sorted(b.tables())) == (["only-a", "w"], ["w"])
        assert (len(a.status().servers), len(b.status().servers)) == (1, 2)
        with pytest.raises(UnknownTableError, match=r"'b' has no table 'only-a'; it has 'w'"):
            b.client().pull("only-a", [1])
        with pytest.raises(UnknownTableError, match="'b' has no table 'only-a'"):
            b.drop_table("only-a")
        stolen = dps.Ticket("b", b.ticket.controller, a.ticket.secret)
        with dps.Client(stolen) as thief, pytest.raises(AccessDeniedError, match="'b'"):
            thief.pull("w", [1])
        assert a.run(push_ones, client.scatter([1])) == b.run(push_ones, client.scatter([1])) == [0]
        a.close()
        assert b.client().pull("w", [1]).tolist() == [5]
        b.table("more")


def test_servers_of_two_take_the_least_used_workers(client):
    with dps.ParameterServer(client, name="a") as a, dps.ParameterServer(client, name="b") as b:
        (one,), (two,) = a.status().servers, b.status().servers
        assert one.worker != two.worker


def test_a_name_in_use(client):
    with dps.ParameterServer(client, name="mine") as ps:
        with pytest.raises(NameInUseError, match=r"'mine' exists.*attach\(client, 'mine'\)"):
            dps.ParameterServer(client, name="mine")
        ps.table("w")
        ps.client().push("w", [1], [1])
    with dps.ParameterServer(client, name="mine") as ps:
        assert ps.tables() == {}


def test_of_many_who_start_one_name_at_once_one_succeeds(client):
    made, errors = [], []

    def start():
        try:
            made.append(dps.ParameterServer(client))
        except NameInUseError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(errors)) == (1, 3)
    made[0].table("w")
    made[0].close()


# -- attach


@pytest.mark.thorough
def test_attach(cluster, client):
    with dps.ParameterServer(client, servers=2, name="mine") as ps:
        spec = ps.table("w", dim=3, optimizer=dps.Adagrad(0.5))
        ps.client().push("w", [1, 2], 1.0)
        with dps.ParameterServer.attach(cluster, "mine") as other:
            assert other.tables() == {"w": spec}
            assert other.servers() == 2
            np.testing.assert_array_equal(other.client().pull("w", [1, 2]), ps.client().pull("w", [1, 2]))
            other.table("v")
            assert sorted(ps.tables()) == ["v", "w"]
        assert other.closed  # it has let go; the servers go on
        ps.table("u")
        dps.ParameterServer.attach(client, "mine").close()
        with pytest.raises(ClosedError, match="'mine'"):
            ps.table("x")
        ps.client()._insisting = 0.5
        with pytest.raises(DPSError, match="'mine'"):
            ps.client().pull("w", [1])


def test_whoever_starts_it_may_let_go(cluster, client, monkeypatch):
    ps = dps.ParameterServer(client, servers=2)
    ps.table("w")
    ps.client().push("w", [1], 5.0)
    ps.detach()
    assert ps.closed
    ps.close()  # no longer its own to stop
    client.close()
    with Client(cluster) as other:
        again = dps.ParameterServer.attach(other)
        assert again.client().pull("w", [1]) == 5
        again.close()
        with pytest.raises(ClosedError, match=r"there are: none$"):
            dps.ParameterServer.attach(other)
        # As if servers of it had outlived another scheduler.
        monkeypatch.setattr(dps.engine.controller.plugin, "held_names", lambda scheduler: {"dps"})
        short = dask.config.set({"dps.timeouts.start": 0.1})
        with short, pytest.raises(ClosedError, match="not taken them over yet"):
            dps.ParameterServer.attach(other)


def test_attach_to_nothing(client):
    with pytest.raises(ClosedError, match=r"no parameter server named 'x' in this cluster; there are: none"):
        dps.ParameterServer.attach(client, "x")
    b, a = dps.ParameterServer(client, name="b"), dps.ParameterServer(client, name="a")
    with a, b, pytest.raises(ClosedError, match=r"named 'x' in this cluster; there are: 'a', 'b'"):
        dps.ParameterServer.attach(client, "x")


DRIVER = """
import sys, time
import numpy as np, dps
from distributed import Client

def for_ever(trainer, parts):
    while True:
        trainer.push("clocks", [trainer.number], [1])
        trainer.tick()

client = Client(sys.argv[1])
ps = dps.ParameterServer(client, servers=2, name="kept")
ps.table("w", dim=2, optimizer=dps.SGD(0.5))
ps.table("W", rows=10)
ps.table("clocks", dtype="int64")
ps.client().push("w", np.arange(1000), np.ones((1000, 2)))
ps.client().assign("W", None, np.arange(10))
if sys.argv[2] == "run":
    import threading
    threading.Thread(target=ps.run, args=(for_ever, client.scatter([1, 2]))).start()
    while not (ps.client().pull("clocks", [0, 1]) > 10).all():
        time.sleep(0.01)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.quick(1)
@pytest.mark.processes
@pytest.mark.parametrize("what", ["idle", "run"])
def test_tables_survive_the_driver(processes, what):
    command = [sys.executable, "-c", DRIVER, processes.scheduler.address, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout.readline() == "ready\n"
        finally:
            driver.kill()
    scheduler = processes.cluster.scheduler
    wait_until(lambda: set(scheduler.clients) <= {processes.id, "dps-kept", "fire-and-forget"})
    ps = dps.ParameterServer.attach(processes, "kept")
    assert sorted(ps.tables()) == ["W", "clocks", "w"]
    assert (ps.client().pull("w", np.arange(1000)) == -0.5).all()
    assert ps.client().pull("W").tolist() == list(range(10))
    if what == "run":  # the trainers of the dead driver stop, and leave their threads to others
        wait_until(lambda: not any(run.connected for run in ps.status().runs))
    assert sorted(ps.run(push_ones, processes.scatter([1, 2]))) == [0, 1]
    ps.close()
    with pytest.raises(ClosedError):
        dps.ParameterServer.attach(processes, "kept")


# -- where servers go


def test_too_few_workers(client):
    message = r"'big' needs 3 workers for its servers, and 2 of 4 workers carry the resource dps after 0.1 s"
    with pytest.raises(TooFewWorkersError, match=message):
        dps.ParameterServer(client, servers=3, name="big", timeout=0.1)
    with dps.ParameterServer(client, servers=2, name="big") as ps:
        ps.table("w")
    with dask.config.set({"dps.timeouts.start": "0.05 s"}), pytest.raises(TooFewWorkersError, match=r"after 0.05 s"):
        dps.ParameterServer(client, servers=3)


@pytest.mark.thorough
def test_a_worker_that_comes_in_time(cluster, client):
    coming = threading.Timer(0.3, cluster.scale, [3])  # a trainer: no place for a server
    coming.start()
    with pytest.raises(TooFewWorkersError, match=r"2 of [45] workers carry"):
        dps.ParameterServer(client, servers=3, timeout=1.5)
    coming.join()


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setattr(dps.engine.controller.server_procedures, "DEDICATED_WAIT_SECONDS", 0.05)
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with distributed.LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


def test_no_worker_carries_the_resource(plain):
    with dps.ParameterServer(plain) as ps:
        ps.table("w")
        (server,) = ps.status().servers
        other = ({*plain.scheduler_info()["workers"]} - {server.worker}).pop()
        assert ps.trainer_threads() == {other: 1}
        assert ps.run(where, plain.scatter([1, 2, 3])) == [other]
        assert ps.client().pull("w", [7]) == 3
        assert plain.submit(sum, [1, 2]).result() == 3
    assert not dps_threads()


def test_no_worker_is_left_for_trainers(plain):
    with dps.ParameterServer(plain, servers=2) as ps:
        ps.table("w")
        with pytest.raises(
            TooFewWorkersError,
            match=r"no thread is free.*: of 2 workers with 2 threads, 2 workers with 2 threads are for servers, 0",
        ):
            ps.run(where, plain.scatter([1]))
        with pytest.raises(TooFewWorkersError, match="all 2 are for servers"):
            ps.trainer_threads()
    with pytest.raises(TooFewWorkersError, match=r"needs 3 workers.*0 of 2 workers carry the resource dps"):
        dps.ParameterServer(plain, servers=3, timeout=0.2)


def where(trainer, parts):
    for _ in trainer.iterate(parts):
        trainer.push("w", [7], 1.0)
    return distributed.get_worker().address


# -- tables


def test_tables_and_what_they_are(client):
    with dps.ParameterServer(client, servers=2) as ps:
        keyed = ps.table("keyed", dim=3, dtype="float64", optimizer=dps.Adam(0.1), init=dps.Normal(0.1, seed=3))
        dense = ps.table("dense", rows=3, finite=True)
        few = ps.table("few", dtype=np.int64, shards=2)
        assert ps.tables() == {"keyed": keyed, "dense": dense, "few": few}
        assert (keyed.spec.shards, dense.spec.shards, few.spec.shards) == (8, 3, 2)
        assert len({table.spec.id for table in ps.tables().values()}) == 3


def test_a_handle_outlives_the_client_that_it_was_made_with(client):
    with dps.ParameterServer(client) as ps:
        w = ps.table("w", dtype="int64")
        w.push([1], 1)
        ps.client().close()
        assert w[1] == 1
        assert ps.export(w)[0].tolist() == [1]
    with pytest.raises(ClosedError):
        w.pull([1])
    assert repr(w).startswith("<dps.Table 'w' of 'dps': any key")


def with_a_handle(trainer, partitions, w):
    mine = trainer.table(w)
    mine.push([trainer.number], 1)
    trainer.push({w: ([trainer.number], 1)})
    trainer.tick()
    return trainer.pull(w, [trainer.number]).tolist() + mine[[trainer.number]].tolist() + [mine == w]


def in_an_ordinary_task(w, number):
    w.push([number], 1)
    return w[number].item()


def test_handles_travel_into_tasks(client, tmp_path):
    with dps.ParameterServer(client) as ps:
        w = ps.table("w", dtype="int64")
        again = pickle.loads(pickle.dumps(w))
        assert again == w
        data = client.scatter([[1], [2]])
        assert ps.run(with_a_handle, data, args=(w,)) == [[2, 2, True]] * 2
        assert ps.run(lambda trainer, _: trainer.pull(w, [0]).tolist(), data) == [[2]] * 2  # in a closure
        assert sorted(client.gather(client.map(in_an_ordinary_task, [w, w], [10, 11]))) == [1, 1]
        ps.checkpoint(str(tmp_path))
        w[0] = 9
        assert ps.restore(str(tmp_path), tables=[w])["tables"] == ["w"]
        assert dps.export_checkpoint(str(tmp_path), w)[1].tolist() == ps.export(w)[1].tolist()
        assert len(w) == 4
        ps.drop_table(w)
        assert ps.tables() == {}


def test_a_table_may_be_described_with_numbers_and_texts_of_numpy(client):
    with dps.ParameterServer(client, servers=2) as ps:
        made = ps.table(
            np.str_("w"), rows=np.int64(5), optimizer=dps.SGD(np.float64(0.25)), init=dps.Constant(np.float64(2))
        )
        assert (made.spec.name, made.spec.rows, made.spec.optimizer) == ("w", 5, dps.SGD(0.25))
        made.push([0], [4.0])
        assert made.pull([0, 1]).tolist() == [1.0, 2.0]


def test_two_tables_of_one_name(client):
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w", dim=2)
        ps.client().push("w", [1], [[1, 2]])
        with pytest.raises(NameInUseError, match="'dps' has a table 'w' already"):
            ps.table("w", dim=3)
        assert ps.tables()["w"].dim == 2
        assert ps.client().pull("w", [1]).tolist() == [[1, 2]]


def test_an_unknown_table(client):
    with dps.ParameterServer(client) as ps:
        for use in (
            lambda: ps.client().pull("w", [1]),
            lambda: ps.drop_table("w"),
            lambda: ps.client().push("w", [1], [1]),
        ):
            with pytest.raises(UnknownTableError, match="'dps' has no table 'w'; it has none"):
                use()
        ps.table("b")
        ps.table("a")
        with pytest.raises(KeyError, match="'dps' has no table 'w'; it has 'a', 'b'"):
            ps.client().pull("w", [1])
        ps.table("w")
        assert ps.client().pull("w", [1]) == 0


def test_a_dropped_table(cluster, client):
    with dps.ParameterServer(client, servers=2) as ps, dps.Client(ps.ticket) as old:
        ps.table("w")
        ps.table("v")
        old.push("w", range(10), 1.0)
        ps.drop_table("w")
        assert [*ps.tables()] == ["v"]
        assert all([*server.tables] == ["v"] for server in ps.status().servers)
        for use in (lambda: old.pull("w", range(10)), lambda: old.push("w", range(10), 1.0)):
            with pytest.raises(UnknownTableError, match=r"dropped|has no table .w.; it has .v."):
                use()
        with pytest.raises(UnknownTableError, match="it has 'v'"):
            ps.client().pull("w", [1])
        assert old.pull("v", [1]) == 0


def test_a_table_dropped_and_made_anew(client):
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w")
        ps.client().push("w", range(10), 1.0)
        ps.drop_table("w")
        ps.table("w", dim=2)
        assert ps.client().pull("w", range(10)).tolist() == [[0, 0]] * 10


def test_a_table_that_one_server_cannot_make_is_made_nowhere(client, monkeypatch):
    create = dps.engine.server.actor.Server.create_table

    def fail_on_one(self, spec, shards):
        if self.role.number == 1 and spec["name"] == "w":
            raise MemoryError("no room")
        create(self, spec, shards)

    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("v")
        monkeypatch.setattr(dps.engine.server.actor.Server, "create_table", fail_on_one)
        with pytest.raises(DPSError, match=r"server 1.*MemoryError.*no room"):
            ps.table("w")
        assert [*ps.tables()] == ["v"]
        assert [[*server.tables] for server in ps.status().servers] == [["v"], ["v"]]
        with pytest.raises(UnknownTableError, match="it has 'v'"):
            ps.client().pull("w", [1])
        monkeypatch.undo()
        ps.table("w")
        ps.client().push("w", range(10), 1.0)


def test_a_table_that_takes_too_long_to_make_names_the_limit(client, monkeypatch):
    create = dps.engine.server.actor.Server.create_table

    def busy(self, spec, shards):
        time.sleep(0.5)
        create(self, spec, shards)

    with dps.ParameterServer(client) as ps:
        monkeypatch.setattr(dps.engine.server.actor.Server, "create_table", busy)
        words = r"server 0 .* 'create_table' within 0.05 s \(dps.timeouts.start\)"
        with dask.config.set({"dps.timeouts.start": "50 ms"}), pytest.raises(ServerGoneError, match=words):
            ps.table("w")
        assert [*ps.tables()] == []
        monkeypatch.undo()
        ps.table("w")


def test_what_a_table_cannot_be(client):
    with dps.ParameterServer(client) as ps:
        for error, options in [
            (InputError, {"dim": 0}),
            (InputError, {"rows": 0}),
            (InputError, {"rows": 2.5}),
            (InputError, {"dtype": "int8"}),
            (InputTypeError, {"optimizer": "sgd"}),
            (InputError, {"shards": 3}),
            (InputError, {"rows": 2, "shards": 3}),
            (InputError, {"aggregate": "max"}),
        ]:
            with pytest.raises(error, match="'w'"):
                ps.table("w", **options)
        with pytest.raises(InputError):
            ps.table("")
        assert ps.tables() == {}


def test_status(client):
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w", dim=2)
        ps.table("W", rows=100)
        ps.client().push("w", range(1000), np.ones((1000, 2)))
        ps.run(push_ones_dense, client.scatter([1, 2]), staleness=1)
        status = ps.status()
        plain = json.loads(json.dumps(status.to_dict()))
        assert msgspec.convert(plain, Status).to_dict() == status.to_dict()
        assert status.name == "dps"
        assert [server.number for server in status.servers] == [0, 1]
        assert all(server.alive and server.requests > 0 for server in status.servers)
        assert sum(server.tables["w"].rows for server in status.servers) == 1000
        assert sum(server.tables["W"].rows for server in status.servers) == 100
        assert sum(server.tables["w"].bytes for server in status.servers) >= 1000 * (8 + 8)
        assert sorted(n for s in status.servers for n in s.tables["w"].shards) == list(range(8))
        assert {name: table.dim for name, table in status.tables.items()} == {"w": 2, "W": 1}
        assert (status.rows, status.tables["w"].rows) == (1100, 1000)
        (run,) = status.runs
        assert (run.clocks, run.left, run.staleness) == ([1, 1], [0, 1], 1)
        assert [trainer.planned for trainer in run.trainers] == [1, 1]
        assert run.stopped is None
        assert set(plain["runs"][0]["trainers"][1]["spent"]) == {"compute", "pull", "push", "wait", "serialise"}


def push_ones_dense(trainer, parts):
    for _ in trainer.iterate(parts):
        trainer.push("W", None, np.ones(100))


# -- the cluster restarts


@pytest.mark.thorough
@pytest.mark.processes
def test_a_restart_of_the_cluster_takes_the_rows_and_says_so(processes):
    """Other servers come up in the place of those that were lost; the rows are gone, and nobody reads zeros."""
    with dps.ParameterServer(processes, servers=2) as ps:
        ps.table("w")
        ps.client().push("w", range(10), 1.0)
        processes.restart()
        for _ in range(2):
            with pytest.raises(DataLostError, match=r"table 'w': the last copy of shards .* is gone.*checkpoint"):
                ps.client().pull("w", range(10))
        wait_until(lambda: ps.servers() == 2)
        with pytest.raises(DataLostError):
            ps.run(push_ones, processes.scatter([1, 2]))
        ps.drop_table("w")
        ps.table("w")
        assert ps.run(push_ones, processes.scatter([1, 2])) in ([0], [0, 1])


# -- TLS


@pytest.mark.thorough
@pytest.mark.tls
def test_a_cluster_with_tls():
    pytest.importorskip("cryptography")
    options = {"processes": False, "security": True, "dashboard_address": None}
    with dps.LocalCluster(servers=2, trainers=2, **options) as cluster, Client(cluster) as client:
        assert client.scheduler.address.startswith("tls://")
        with dps.ParameterServer(client, servers=2) as ps:
            ps.table("w", dim=4)
            values = np.arange(400_000, dtype=np.float32).reshape(-1, 4)
            ps.client().push("w", range(100_000), values)
            np.testing.assert_array_equal(ps.client().pull("w", range(100_000)), values)
            ps.table("n")
            assert ps.run(add_up, client.scatter([1, 2, 3])) == [3.0, 3.0]

            (server, _) = ps.status().servers
            plain_ticket = dps.Ticket(ps.name, ps.ticket.controller, ps.ticket.secret)
            refused = pytest.raises((RequestTimeoutError, ConnectionError))
            with dask.config.set({"dps.timeouts.connect": "0.5 s"}), dps.Client(plain_ticket) as unencrypted, refused:
                unencrypted.pull("w", [1])
            for address in (ps.ticket.controller, server.address):
                with socket.create_connection(address, timeout=10) as plain:
                    plain.sendall(b"DP" * 100)
                    with contextlib.suppress(ConnectionResetError):
                        assert b"nonce" not in plain.recv(1000)


def add_up(trainer, parts):
    for _ in trainer.iterate(parts):
        trainer.push("n", [1], 1.0)
    trainer.barrier()
    return float(trainer.pull("n", [1])[0])


@pytest.mark.thorough
def test_who_seems_empty_stays_until_the_table_is_there_that_is_being_made(client, monkeypatch):
    making, create = threading.Event(), dps.engine.server.actor.Server.create_table

    def slowly(self, spec, shards):
        making.set()
        time.sleep(1.0)
        create(self, spec, shards)

    with dps.ParameterServer(client, servers=2) as ps:
        monkeypatch.setattr(dps.engine.server.actor.Server, "create_table", slowly)
        maker = threading.Thread(target=ps.table, args=("w",), kwargs={"rows": 8, "shards": 4})
        maker.start()
        assert making.wait(30)
        ps.scale(1)
        maker.join()
        ps.client().push("w", np.arange(8), 1.0)
        wait_until(lambda: ps.servers() == 1)
        assert ps.client().pull("w", np.arange(8)).tolist() == [1.0] * 8


def test_closing_while_a_server_comes_up_leaves_nothing_behind(client, monkeypatch, caplog):
    making, start = threading.Event(), dps.engine.server.actor.Endpoint

    def slowly(*args, **options):
        making.set()
        time.sleep(0.2)
        return start(*args, **options)

    ps = dps.ParameterServer(client, servers=1)
    ps.table("w", rows=4)
    monkeypatch.setattr(dps.engine.server.actor, "Endpoint", slowly)
    ps.scale(2)
    assert making.wait(30)
    ps.close()
    assert not [record.getMessage() for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
    assert not [record.getMessage() for record in caplog.records if "could not be replaced" in record.getMessage()]
    assert not [thread.name for thread in threading.enumerate() if f"server-{ps.name}-" in thread.name]
    assert not client.run_on_scheduler(lambda dask_scheduler: [k for k in dask_scheduler.tasks if "dps-server" in k])


def test_servers_poll_where_that_is_wanted():
    options = {"processes": False, "dashboard_address": None}
    with (
        dask.config.set({"dps.server-polling": "1 ms"}),  # so long, because long waits end polling on a busy machine
        mock.patch("dps.engine.wire.departures._processors", return_value=8),
        dps.LocalCluster(servers=2, trainers=1, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):
        ps.table("v", rows=100)
        ours = ps.client()

        def polled() -> bool:
            for _ in range(20):  # on a busy machine an endpoint does not poll for 256 waits
                ours.push("v", slice(0, 100), np.ones(100, np.float32))
                ours.pull("v", slice(0, 100))
            return all(server.polled > 0 for server in ps.status().servers)

        wait_until(polled)
        value = ours.pull("v", slice(0, 1))[0]
        assert value > 0
        assert value % 20 == 0
