from __future__ import annotations

import asyncio
import os
import time

import dask
import psutil
import pytest
from cordons import Plugin, actor, cordoned
from distributed import Client, Event, Security, get_worker
from servers import PATIENCE, wait_until

from dps.engine.deploy.interrupts import ignoring_interrupts
from dps.engine.deploy.local import LocalCluster
from dps.errors import InputError, InputTypeError


def settled(cluster, servers, trainers):
    """Until Dask and the cluster have these and no others: how many trainers there are is told by their number."""

    def there():
        present = sorted(ws.name for ws in cluster.scheduler.workers.values())
        kinds = [name.partition("-")[0] for name in present]
        right = [name for name in present if name.startswith("server")] == [f"server-{n}" for n in range(servers)]
        return right and kinds.count("trainer") == trainers and present == sorted(cluster.workers)

    wait_until(there)


def addresses(cluster):
    return {ws.name: ws.address for ws in cluster.scheduler.workers.values()}


def quick(**options):
    return LocalCluster(processes=False, dashboard_address=None, **options)


def slow_task(seconds):
    time.sleep(seconds)
    return get_worker().name


def task_until_told(_):
    Event("told").wait()
    return get_worker().name


def test_shape():
    with quick(servers=2, trainers=3, threads_per_trainer=2) as cluster:
        settled(cluster, 2, 3)
        workers = {ws.name: ws for ws in cluster.scheduler.workers.values()}
        assert [workers[f"server-{n}"].resources for n in range(2)] == [{"dps": 1}] * 2
        assert [workers[f"server-{n}"].nthreads for n in range(2)] == [1, 1]
        assert [workers[f"trainer-{n}"].resources for n in range(3)] == [{}] * 3
        assert [workers[f"trainer-{n}"].nthreads for n in range(3)] == [2, 2, 2]
        assert workers["server-0"].memory_limit == 0
        assert cluster.scheduler.address.startswith("inproc://")
        assert repr(cluster) == (
            f"LocalCluster({cluster.scheduler.address!r}, servers=2, trainers=3, status='running')"
        )
        assert "LocalCluster" in cluster._repr_html_()
    assert cluster.status.name == "closed"
    assert "closed" in repr(cluster)


@pytest.mark.parametrize(("servers", "trainers"), [(0, 1), (1, 0), (0, 0)])
def test_none_of_a_kind(servers, trainers):
    with quick(servers=servers, trainers=trainers) as cluster:
        assert len(cluster.workers) == servers + trainers
        cluster.scale(1)
        settled(cluster, servers, 1)


def test_scale_means_trainers():
    with quick(servers=2, trainers=2) as cluster:
        cluster.scale(4)
        settled(cluster, 2, 4)
        cluster.scale(1)
        settled(cluster, 2, 1)
        assert "trainer-0" in cluster.workers, "the newest go first"
        cluster.scale(5)
        cluster.scale(2)  # three of them were never there
        settled(cluster, 2, 2)
        cluster.scale(0)
        settled(cluster, 2, 0)
        cluster.scale(-1)
        cluster.scale(cores=3)
        settled(cluster, 2, 3)
        newest = max(cluster.workers)
        cluster.sync(cluster.scale_down, ["server-1", newest])
        settled(cluster, 2, 2)
        assert newest not in cluster.workers


def test_scale_by_memory():
    with quick(servers=1, trainers=1, memory_limit="100 MB") as cluster:
        cluster.scale(memory="250 MB")
        settled(cluster, 1, 3)


@pytest.mark.parametrize("plugin", [False, True])
def test_adapt_means_trainers(plugin):
    with quick(servers=3, trainers=1) as cluster, Client(cluster) as client:
        if plugin:
            client.register_plugin(Plugin())
            address = client.run_on_scheduler(cordoned)[0]
            shard = actor(client, address, 4).result()
        cluster.adapt(minimum=0, maximum=3, interval="20 ms", wait_count=2, target_duration="100 ms")
        if plugin:  # else the idle servers take what little there is to do
            settled(cluster, 3, 0)
            assert client.submit(slow_task, 0.01, pure=False).result(PATIENCE).startswith("trainer")
        futures = client.map(task_until_told, range(100), pure=False)
        wait_until(lambda: len(cluster.workers) == 6)  # three are needed, and there are more than three workers already
        Event("told", client).set()
        ran = set(client.gather(futures))
        del futures  # Adaptive keeps workers for the sake of what they hold
        settled(cluster, 3, 0)
        cluster.adapt(minimum=2, maximum=2)
        settled(cluster, 3, 2)
        if plugin:
            assert all(name.startswith("trainer") for name in ran)
            assert shard.where().result(PATIENCE) == ("server-0", 4)


def test_an_asynchronous_cluster():
    async def story():
        async with LocalCluster(1, 1, processes=False, dashboard_address=None, asynchronous=True) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(sum, [1, 2]) == 3
            await cluster.scale(2)
            while len(cluster.scheduler.workers) < 3:
                await asyncio.sleep(0.01)
        return cluster.status.name

    assert asyncio.run(story()) == "closed"


def test_tcp_without_processes():
    with quick(trainers=1, protocol="tcp") as cluster, Client(cluster.scheduler.address) as client:
        assert cluster.scheduler.address.startswith("tcp://127.0.0.1:")
        assert client.submit(sum, [1, 2]).result() == 3


def test_dashboard_is_on_a_free_port():
    pytest.importorskip("bokeh")
    with LocalCluster(1, 1, processes=False) as one, LocalCluster(1, 1, processes=False) as two:
        assert one.dashboard_link != two.dashboard_link


@pytest.mark.filterwarnings("error")
def test_without_a_dashboard_its_usual_port_is_left_alone():
    with quick() as one, quick() as two:
        ports = {cluster.scheduler.http_server.port for cluster in (one, two)}
        assert len(ports) == 2
        assert 8787 not in ports


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"servers": -1}, InputError),
        ({"trainers": -1}, InputError),
        ({"threads_per_trainer": 0}, InputError),
        ({"servers": 1.5}, InputTypeError),
        ({"trainers": True}, InputTypeError),
        ({"security": "yes"}, InputTypeError),
    ],
)
def test_wrong_options(options, error):
    with pytest.raises(error, match=next(iter(options))):
        quick(**options)


@pytest.mark.tls
def test_security():
    pytest.importorskip("cryptography")
    with quick(servers=1, trainers=1, security=True) as cluster:
        assert cluster.scheduler.address.startswith("tls://")
        assert isinstance(cluster.security, Security)
        with Client(cluster) as client:
            assert client.submit(sum, [1, 2]).result() == 3
            assert {ws.address[:6] for ws in cluster.scheduler.workers.values()} == {"tls://"}


def threads_of_libraries():
    return [os.environ.get(f"{name}_NUM_THREADS") for name in ("OMP", "OPENBLAS", "MKL")]


@pytest.mark.thorough
@pytest.mark.processes
def test_processes(capfd):
    with LocalCluster(servers=1, trainers=2, dashboard_address=None) as cluster, Client(cluster) as client:
        pids = {name: worker.pid for name, worker in cluster.workers.items()}
        assert len(set(pids.values()) | {os.getpid()}) == 4
        assert set(client.run(os.getpid).values()) == set(pids.values())
        assert list(client.run(threads_of_libraries).values()) == [["1", "1", "1"]] * 3
        limits = {ws.name: ws.memory_limit for ws in cluster.scheduler.workers.values()}
        assert limits["server-0"] == 0
        assert limits["trainer-0"] == limits["trainer-1"] > 0
        cluster.scale(1)
        settled(cluster, 1, 1)
        assert psutil.pid_exists(pids["server-0"])
        assert cluster.workers["server-0"].pid == pids["server-0"]
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids.values()))
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "still alive after" not in line]  # Dask's word for a busy machine
    assert (out, lines) == ("", []), "starting and stopping is quiet"


def test_a_preload_is_added_to_those_that_are_given():
    ours = "dps.engine.deploy.interrupts"
    assert ignoring_interrupts({}) == {"preload": [ours], "preload_argv": [[]]}
    given = {"preload": "mine", "preload_argv": ["--a", "b"]}
    assert ignoring_interrupts(given) == {"preload": ["mine", ours], "preload_argv": [["--a", "b"], []]}
    nested = {"preload": ["x", "y"], "preload_argv": [["1"], []]}
    assert ignoring_interrupts(nested) == {"preload": ["x", "y", ours], "preload_argv": [["1"], [], []]}
    with dask.config.set({"distributed.worker.preload": ["z"]}):
        assert ignoring_interrupts({})["preload"] == ["z", ours]


@pytest.mark.thorough
@pytest.mark.processes
def test_several_clusters_one_after_the_other():
    for _ in range(2):
        with LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster, Client(cluster) as client:
            client.register_plugin(Plugin())
            assert client.submit(slow_task, 0).result() == "trainer-0"
            shard = actor(client, client.run_on_scheduler(cordoned)[0], 1).result()
            assert shard.where().result(PATIENCE) == ("server-0", 1)


@pytest.mark.thorough
@pytest.mark.processes
def test_a_worker_that_is_given_up_is_replaced():
    """Dask gives a worker up that its nanny has not brought back in time, and leaves its place empty."""
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 ms"}),
        LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
    ):
        before = addresses(cluster)
        with Client(cluster) as client:
            (pid,) = client.run(os.getpid, workers=[before["server-0"]]).values()
            psutil.Process(pid).kill()
            wait_until(lambda: addresses(cluster).get("server-0", before["server-0"]) != before["server-0"])
            settled(cluster, 1, 1)
            assert addresses(cluster)["trainer-0"] == before["trainer-0"]
