"""The cordon, tried with a small plugin of its own on real clusters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

import pytest
from cordons import Plugin, Shard, actor, admit, cordoned
from distributed import Client, Worker, get_worker, wait
from distributed.core import Status
from servers import PATIENCE, wait_until

from dps.engine.daskapi import cordon
from dps.engine.daskapi.cordon import EVENT, Cordon, incompatibility
from dps.engine.deploy.local import LocalCluster


def where(seconds=0.0, *_):
    time.sleep(seconds)
    return get_worker().name


def scheduler_side(cluster, function):
    """Run `function(scheduler)` on the scheduler's loop."""

    async def call():
        return function(cluster.scheduler)

    return cluster.sync(call)


def join(cluster, name):
    """One more server, as LocalCluster would have made it."""
    cluster.worker_spec[name] = cluster.worker_spec["server-0"]
    return cluster.sync(cluster._correct_state)


@pytest.fixture
def cluster():
    with LocalCluster(servers=2, trainers=2, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        client.register_plugin(Plugin())
        yield client


def trainers_only(results):
    count = Counter(results)
    assert all(name.startswith("trainer") for name in count), count
    return count


def load(client, seconds):
    """Tasks of all kinds in which Dask chooses workers: queued roots, followers of data, actors-to-be, one by one."""
    roots = client.map(where, [seconds] * 200, pure=False)
    followers = [client.submit(where, seconds, *pair, pure=False) for pair in zip(roots[::2], roots[1::2], strict=True)]
    spread = [client.submit(where, seconds, pure=False) for _ in range(100)]
    return roots + followers + spread


@pytest.mark.thorough
def test_no_ordinary_task_lands_on_servers_that_join_under_load(cluster, client):
    futures = load(client, 0.005)
    for n in range(2, 6):
        join(cluster, f"server-{n}")
    futures += client.map(where, [0.001] * 100, pure=False)
    trainers_only(client.gather(futures))
    assert len(client.run_on_scheduler(cordoned)) == 6
    assert {ws.name for ws in cluster.scheduler.running} == {"trainer-0", "trainer-1"}


@pytest.mark.thorough
@pytest.mark.processes
def test_no_ordinary_task_lands_on_server_processes():
    with LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        client.register_plugin(Plugin())
        futures = load(client, 0.005)
        join(cluster, "server-1")
        trainers_only(client.gather(futures))
        addresses = client.run_on_scheduler(cordoned)
        shards = [actor(client, address, n).result() for n, address in enumerate(addresses)]
        assert [shard.where().result(PATIENCE) for shard in shards] == [("server-0", 0), ("server-1", 1)]

        # its process dies: the nanny brings up a new one, which is cordoned off from the first moment
        futures = load(client, 0.005)
        pid = cluster.workers["server-0"].pid
        cluster.sync(cluster.workers["server-0"].kill)
        wait_until(
            lambda: len(client.run_on_scheduler(cordoned)) == 2 and cluster.workers["server-0"].pid not in (None, pid)
        )
        trainers_only(client.gather(futures))
        address = client.run_on_scheduler(cordoned)[0]
        assert address == cluster.workers["server-0"].worker_address
        assert actor(client, address, 7).result().where().result(PATIENCE) == ("server-0", 7)

        client.restart()
        trainers_only(client.gather(load(client, 0.0)))
        assert len(client.run_on_scheduler(cordoned)) == 2


def test_order_of_workers(cluster, client):
    for n in (10, 9):
        join(cluster, f"server-{n}")
    names = {ws.address: ws.name for ws in cluster.scheduler.workers.values()}
    assert [names[a] for a in client.run_on_scheduler(cordoned)] == ["server-0", "server-1", "server-9", "server-10"]


def test_only_admitted_keys_pass(cluster, client):
    second = client.run_on_scheduler(cordoned)[1]
    held = client.submit(where, resources={"dps": 1}, pure=False)
    shard = actor(client, second, 1)
    assert shard.result().where().result(PATIENCE) == ("server-1", 1)
    wait_until(
        lambda: scheduler_side(cluster, lambda s: held.key in s.tasks and s.tasks[held.key].state == "no-worker")
    )
    time.sleep(0.1)
    assert not held.done()
    assert client.run_on_scheduler(admit, [held.key, "nothing"])["nothing"] == "unknown"
    assert held.result(PATIENCE).startswith("server")
    assert client.run_on_scheduler(admit, [held.key]) == {held.key: "memory"}
    trainers_only(client.gather(client.map(where, [0.0] * 50, pure=False)))


def test_several_actors_of_one_worker_and_data_of_trainers(cluster, client):
    address = client.run_on_scheduler(cordoned)[0]
    shards = [actor(client, address, n).result() for n in range(3)]
    assert [s.where().result(PATIENCE)[1] for s in shards] == [0, 1, 2]
    data = client.scatter(list(range(20)), broadcast=True)
    client.replicate(client.map(abs, range(5)))
    held = scheduler_side(cluster, lambda s: [len(ws.has_what) for ws in s.workers.values() if "dps" in ws.resources])
    assert sorted(held) == [0, 3], "the actors alone"
    assert len(data) == 20


def test_no_actor_for_a_worker_that_is_out_of_memory(cluster, client):
    address = client.run_on_scheduler(cordoned)[0]
    worker = cluster.workers["server-0"]
    cordon = cluster.scheduler.plugins["test-cordon"].cordon

    def becomes(status):
        worker.loop.add_callback(setattr, worker, "status", status)
        wait_until(lambda: status in {own for ws, own in cordon.reported.items() if ws.address == address})

    becomes(Status.paused)
    future = client.submit(Shard, actor=True, workers=[address], resources={"dps": 1}, key="shard")
    wait_until(lambda: client.run_on_scheduler(admit, ["shard"]) == {"shard": "no-worker"})
    assert client.run_on_scheduler(admit, ["shard"]) == {"shard": "no-worker"}
    assert client.run_on_scheduler(cordoned)[0] == address, "paused is not gone"
    becomes(Status.running)
    assert client.run_on_scheduler(admit, ["shard"])["shard"] in ("processing", "memory")
    assert future.result(PATIENCE).where().result(PATIENCE) == ("server-0", 0)


def test_a_worker_that_dask_does_not_retire_goes_on(cluster, client):
    address = client.run_on_scheduler(cordoned)[0]
    shard = actor(client, address, 5).result()
    assert client.retire_workers([address]) == {}
    worker = cluster.workers["server-0"]
    wait_until(lambda: worker.status is Status.running)
    wait_until(lambda: scheduler_side(cluster, lambda s: s.workers[address].status is Status.paused))
    assert shard.where().result(PATIENCE) == ("server-0", 5)
    assert actor(client, address, 6).result().where().result(PATIENCE) == ("server-0", 6)
    trainers_only(client.gather(load(client, 0.0)))


def test_a_worker_that_is_retired_is_gone(cluster, client):
    first, second = client.run_on_scheduler(cordoned)
    assert list(client.retire_workers([first])) == [first]
    assert client.run_on_scheduler(cordoned) == [second]
    trainers_only(client.gather(load(client, 0.0)))


def test_workers_come_and_go(cluster, client):
    for cycle in range(5):
        join(cluster, f"server-{5 + cycle}")
        futures = client.map(where, [0.001] * 60, pure=False)
        assert len(client.run_on_scheduler(cordoned)) == 3
        del cluster.worker_spec[f"server-{5 + cycle}"]
        cluster.sync(cluster._correct_state)
        trainers_only(client.gather(futures))
        wait_until(lambda: len(client.run_on_scheduler(cordoned)) == 2)
    cordon = cluster.scheduler.plugins["test-cordon"].cordon
    assert len(cordon.reported) == 2


def test_a_worker_gets_the_resource_later(cluster, client):
    worker = cluster.workers["trainer-1"]
    cluster.sync(worker.set_resources, dps=1)
    assert worker.address in client.run_on_scheduler(cordoned)
    assert set(client.gather(client.map(where, [0.0] * 50, pure=False))) == {"trainer-0"}


# attach, detach, take-over


@pytest.mark.thorough
def test_detach_restores_and_several_cycles(cluster, client):
    scheduler = cluster.scheduler
    cordon = scheduler.plugins["test-cordon"].cordon
    scheduler_side(cluster, lambda s: cordon.detach())
    original = scheduler.stream_handlers[EVENT]
    assert original == scheduler.handle_worker_status_change
    for _ in range(3):
        assert len(scheduler.running) == 4
        held = client.map(where, [0.02] * 40, pure=False)
        assert len(set(client.gather(held))) == 4, "all are ordinary workers"
        scheduler_side(cluster, cordon.attach)
        scheduler_side(cluster, cordon.attach)
        assert cordon.problem() is None
        trainers_only(client.gather(client.map(where, [0.001] * 100, pure=False)))
        scheduler_side(cluster, lambda s: (cordon.detach(), cordon.detach()))
        assert scheduler.stream_handlers[EVENT] == original
        assert cordon.workers() == []
        assert cordon.admit(["a"]) == {}


def test_detach_lets_tasks_that_waited_go(cluster, client):
    cluster.scale(0)
    wait_until(lambda: len(cluster.scheduler.workers) == 2)
    futures = client.map(where, [0.0] * 20, pure=False)
    time.sleep(0.1)
    assert not any(f.done() for f in futures)
    cordon = cluster.scheduler.plugins["test-cordon"].cordon
    scheduler_side(cluster, lambda s: cordon.detach())
    assert set(client.gather(futures)) == {"server-0", "server-1"}


def test_another_cordon_takes_over_without_a_gap(cluster, client):
    scheduler = cluster.scheduler
    first, second = scheduler.plugins["test-cordon"].cordon, Cordon()
    futures = load(client, 0.001)
    scheduler_side(cluster, second.attach)
    assert len(second.workers()) == 2
    scheduler_side(cluster, lambda s: first.detach())
    trainers_only(client.gather(futures))
    assert len(scheduler.running) == 2
    scheduler_side(cluster, lambda s: second.detach())
    assert scheduler.stream_handlers[EVENT] == scheduler.handle_worker_status_change
    assert len(scheduler.running) == 4


def test_another_plugin_wraps_the_handler_too(cluster, client):
    scheduler = cluster.scheduler
    cordon = scheduler.plugins["test-cordon"].cordon
    ours = scheduler.stream_handlers[EVENT]
    seen = []

    def theirs(**message):
        seen.append(message["status"])
        ours(**message)

    scheduler.stream_handlers[EVENT] = theirs
    scheduler_side(cluster, lambda s: cordon.detach())
    assert scheduler.stream_handlers[EVENT] is theirs
    worker = cluster.workers["server-0"]
    worker.loop.add_callback(setattr, worker, "status", Status.paused)
    wait_until(lambda: "paused" in seen)
    assert len(scheduler.running) == 3, "passed on to Dask"
    worker.loop.add_callback(setattr, worker, "status", Status.running)
    wait_until(lambda: len(scheduler.running) == 4)
    scheduler_side(cluster, cordon.attach)
    worker.loop.add_callback(setattr, worker, "status", Status.running)
    trainers_only(client.gather(load(client, 0.0)))
    scheduler_side(cluster, lambda s: cordon.detach())
    assert scheduler.stream_handlers[EVENT] is theirs


# Where Dask has changed


class Fake:
    """As much of a scheduler as the self-test looks at."""

    def __init__(self):
        self.stream_handlers = {EVENT: self.handle_worker_status_change}
        self.running, self.workers, self.tasks, self.stream_comms = set(), {}, {}, {}

    def handle_worker_status_change(self, status, worker, stimulus_id): ...

    def transitions(self, recommendations, stimulus_id): ...


def test_self_test_of_this_version(cluster):
    assert incompatibility(Fake()) is None
    assert incompatibility(cluster.scheduler) is None


@pytest.mark.parametrize("name", ["stream_handlers", "running", "workers", "tasks", "stream_comms", "transitions"])
def test_self_test_names_what_is_missing(name):
    scheduler = Fake()
    if name == "transitions":
        scheduler.transitions = lambda keys: None
    else:
        delattr(scheduler, name)
    assert f"Scheduler.{name}" in incompatibility(scheduler)
    cordon = Cordon()
    cordon.attach(scheduler)
    assert name in cordon.problem()


def test_self_test_other_changes():
    scheduler = Fake()
    scheduler.stream_handlers = {}
    assert EVENT in incompatibility(scheduler)
    scheduler = Fake()
    scheduler.running = deque()
    assert "running" in incompatibility(scheduler)


def test_a_scheduler_that_does_not_do_what_it_is_told():
    scheduler = Fake()
    scheduler.workers = {"tcp://a:1": (ws := FakeWorker("tcp://a:1"))}
    scheduler.running = {ws}
    cordon = Cordon()
    cordon.attach(scheduler)
    assert "tcp://a:1" in cordon.problem()


class FakeWorker:
    name, status = "w", Status.running

    def __init__(self, address):
        self.address, self.resources = address, {"dps": 1}


def test_without_a_cordon_actors_work_all_the_same(cluster, monkeypatch):
    monkeypatch.setattr("dps.engine.daskapi.cordon.incompatibility", lambda scheduler: "it is another Dask")
    with Client(cluster) as client:
        client.register_plugin(Plugin())
        cordon = cluster.scheduler.plugins["test-cordon"].cordon
        assert cordon.problem() == "it is another Dask"
        assert cluster.scheduler.stream_handlers[EVENT] == cluster.scheduler.handle_worker_status_change
        addresses = client.run_on_scheduler(cordoned)
        assert len(addresses) == 2
        assert actor(client, addresses[1], 3).result().where().result(PATIENCE) == ("server-1", 3)
        assert len(set(client.gather(client.map(where, [0.02] * 40, pure=False)))) == 4
        assert len(cordon.valid_workers_downscaling(cluster.scheduler.workers.values())) == 2


def test_an_error_inside_does_not_cost_the_worker(cluster, client, monkeypatch):
    """Dask removes a worker whose message makes a stream handler raise."""
    monkeypatch.setattr(Cordon, "_keeps", lambda *args: 1 / 0)
    worker = cluster.workers["server-0"]
    worker.loop.add_callback(setattr, worker, "status", Status.running)
    wait(client.map(where, [0.01] * 20, pure=False))
    assert len(cluster.scheduler.workers) == 4


def test_workers_of_other_kinds(cluster, client):
    """Workers that no cluster object started: `dask worker`, with and without the resource, in any order of events."""

    async def come_and_go():
        kinds = [{"resources": {"dps": 1}}, {"resources": {"GPU": 1}}, {}]
        workers = await asyncio.gather(*(Worker(cluster.scheduler.address, nthreads=1, **kind) for kind in kinds))
        try:
            return [w.address in cluster.scheduler.plugins["test-cordon"].cordon.workers() for w in workers]
        finally:
            await asyncio.gather(*(w.close() for w in workers))

    assert cluster.sync(come_and_go) == [True, False, False]


def test_a_client_of_a_scheduler_that_is_gone_does_not_keep_its_loop(cluster, monkeypatch):
    """The loop's thread would never end. (The leak fixture sees none, because the cluster of these tests lives on.)"""
    left, leave = [], cordon._leave_loop

    async def broken(self, **_):
        raise OSError("no scheduler there")

    async def use():
        with pytest.raises(OSError, match="no scheduler there"):
            async with cordon.client_of(cluster.scheduler, cluster.security):
                pass

    with monkeypatch.context() as patched:
        patched.setattr(Client, "_ensure_connected", broken)
        patched.setattr(cordon, "_leave_loop", lambda client: (left.append(client), leave(client)))
        cluster.sync(use)
    assert len(left) == 1
