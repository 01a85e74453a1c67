"""A cluster of `dask scheduler` and `dask worker`, from a shell: nothing else to run; and what --preload dps does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from dask.distributed import Client
from servers import wait_until
from shell import SECONDS, Shell, pretend

import dps
from dps.engine.driver.preload import opening
from dps.errors import DPSError, VersionMismatchError

pytestmark = pytest.mark.processes


@pytest.fixture
def shell(tmp_path):
    with Shell(tmp_path) as shell:
        yield shell


def counting(steps: int):
    """A training function that adds one to each row, so many times. (Inner functions travel by value.)"""

    def count(trainer, partitions):
        for keys in trainer.iterate(partitions, epochs=steps):
            trainer.push("counts", keys, 1)

    return count


@pytest.mark.thorough
def test_a_scheduler_and_workers_are_all_there_is_to_run(shell):
    address = shell.scheduler()
    for n in range(2):
        shell.server(f"server-{n}")
    shell.worker("trainers", "--nthreads", 2)
    with dps.ParameterServer(address, servers=2, copies=2) as ps, ThreadPoolExecutor(1) as pool:
        client, steps = ps.dask_client, 300
        client.wait_for_workers(1, timeout=SECONDS)
        ps.table("counts", dtype="int64")
        run = pool.submit(ps.run, counting(steps), client.scatter([np.arange(100), np.arange(100)]))
        wait_until(lambda: run.done() or any(r.clocks[0] > steps // 10 for r in ps.status().runs), SECONDS)
        assert not run.done(), run.exception()
        victim = ps.status().servers[1].worker
        shell.processes[client.scheduler_info()["workers"][victim]["name"]].kill()
        run.result(SECONDS)
        np.testing.assert_array_equal(ps.client().pull("counts", np.arange(100)), 2 * steps)
        shell.server("server-2")  # it takes the place of the one that died
        wait_until(lambda: ps.servers() == 2 and victim not in {s.worker for s in ps.status().servers}, SECONDS)
        np.testing.assert_array_equal(ps.client().pull("counts", np.arange(100)), 2 * steps)


@pytest.mark.thorough
def test_preload_starts_a_parameter_server_when_the_workers_have_come(shell):
    shell.scheduler("--preload", "dps", "--servers", 2, "--copies", 2, "--name", "mine")
    shell.server("server-0", "--preload", "dps")
    with Client(shell.address) as client:
        plugins = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
        assert "dps-controller" in plugins  # though no driver has been there
        with pytest.raises(DPSError, match="no parameter server named 'mine'"):
            dps.ParameterServer.attach(client, "mine")
        shell.server("server-1", "--preload", "dps")
        shell.worker("trainer-0")

        def there() -> bool:
            try:
                dps.ParameterServer.attach(client, "mine").detach()
                return True
            except DPSError:
                return False

        wait_until(there, SECONDS)
        status = json.loads(shell.dask("ps", "status", "--name", "mine", "--json").stdout)
        assert [server["state"] for server in status["servers"]] == ["up", "up"]
        with dps.ParameterServer.attach(client, "mine") as ps:
            assert ps.table("counts", dtype="int64").spec.copies == 2
            ps.client().push("counts", [1, 2], 5)
            assert ps.client().pull("counts", [1, 2]).tolist() == [5, 5]
        client.wait_for_workers(1, timeout=SECONDS)
        names = {info["name"] for info in client.scheduler_info()["workers"].values()}
        assert names == {"server-0", "server-1", "trainer-0"}
        where = set(client.gather(client.map(lambda n: __import__("distributed").get_worker().name, range(20))))
        assert where == {"trainer-0"}


def preloaded(*argv: str):
    """A cluster in this process, with its scheduler's preload in Dask's configuration."""
    where = "distributed.scheduler."
    with dask.config.set({where + "preload": ["dps"], where + "preload-argv": list(argv)}):
        return dps.LocalCluster(servers=1, trainers=0, processes=False, dashboard_address=None)


def test_preload_by_configuration():
    with preloaded("--servers", "1") as cluster, Client(cluster) as client:
        controller = cluster.scheduler.plugins["dps-controller"]
        wait_until(lambda: controller.sessions, SECONDS)
        with dps.ParameterServer.attach(client) as ps:  # waits until the servers are up
            assert ps.servers() == 1
        wait_until(lambda: not opening, SECONDS)


def test_a_scheduler_that_closes_waits_for_no_workers():
    with preloaded("--servers", "2") as cluster:
        assert list(opening) == [cluster.scheduler.id]
    assert not opening


def test_preload_refuses_more_copies_than_servers(caplog):
    with preloaded("--servers", "1", "--copies", "2"):
        assert not opening
    assert "--copies 2 of each row need as many servers, not 1" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        (["--serverz", "2"], "No such option"),
        (["--servers", "0"], "0 is not in the range"),
        (["--servers"], "requires"),
    ],
)
def test_preload_with_wrong_options(shell, args, pattern):
    answer = shell.dask("scheduler", "--port", 0, "--no-dashboard", "--preload", "dps", *args)
    assert answer.returncode == 2
    assert pattern in answer.stderr


def test_another_dps_on_the_scheduler(shell):
    address = shell.scheduler(**pretend(shell.folder, "0.0.1"))
    pattern = rf"0\.0\.1 on the scheduler {address}; {dps.__version__} on this client.*Install one version"
    with pytest.raises(VersionMismatchError, match=pattern):
        dps.ParameterServer(address, timeout=5)
    answer = shell.dask("ps", "status")
    assert answer.returncode == 1
    assert answer.stderr.startswith("Error: dps is not the same everywhere: 0.0.1 on the scheduler")
    with Client(address) as client:
        plugins = client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.plugins))
        assert not [name for name in plugins if name.startswith("dps")]  # nothing was begun


@pytest.mark.thorough
def test_another_dps_on_workers(shell):
    address = shell.scheduler()
    shell.server("server-0", **pretend(shell.folder, "0.0.2"))
    shell.worker("trainer-0", **pretend(shell.folder, "0.0.3"))
    with Client(address) as client:
        client.wait_for_workers(2, timeout=SECONDS)
        pattern = rf"0\.0\.2 on worker tcp\S+; {dps.__version__} on the client, the scheduler {address}\. Install"
        with pytest.raises(VersionMismatchError, match=pattern):
            dps.ParameterServer(client, timeout=30)
        shell.processes["server-0"].terminate()
        shell.server("server-1")
        wait_until(lambda: "server-1" in {w["name"] for w in client.scheduler_info()["workers"].values()}, SECONDS)
        with dps.ParameterServer(client, timeout=30) as ps:
            pattern = rf"0\.0\.3 on worker tcp\S+; {dps.__version__} on this client, the scheduler {address}\. Install"
            with pytest.raises(VersionMismatchError, match=pattern):
                ps.run(counting(1), client.scatter([np.arange(3)]))
