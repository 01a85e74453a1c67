"""dps on YARN: skein's own driver and application master, on a stand-in for YARN that speaks Hadoop's protocols."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import re
import subprocess
import sys
import tarfile
import threading
from contextlib import contextmanager
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import psutil
import pytest
import yarn_program
from blocks import blocks
from distributed import Client
from miniyarn import standin
from servers import wait_until

import dps
from dps.errors import DPSError

skein = pytest.importorskip("skein")

pytestmark = [
    *(pytest.mark.yarn, pytest.mark.processes),
    pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning"),  # skein's
    pytest.mark.leaks_ok("a cluster of several tests comes and goes: it is judged at the end of the module"),
]
SECONDS = 120  # a limit for what hangs, on a busy machine
PROGRAM = Path(yarn_program.__file__)
KEYS = np.random.default_rng(0).integers(0, 50, 1200)
SMALL = {f"{kind}_memory": "1 GiB" for kind in ("worker", "server", "scheduler")}


@pytest.fixture(scope="module")
def yarn(tmp_path_factory):
    """YARN with one plain node, and one with the label "ps"."""
    if missing := standin.needed():
        pytest.skip(missing)
    yarn = standin.MiniYarn(tmp_path_factory.mktemp("yarn"), ["", "ps"])
    yield yarn
    yarn.stop()


@pytest.fixture(scope="module")
def driver(yarn):
    """skein's connection to it."""
    with standin.environment(**yarn.env):
        security, log = skein.Security.new_credentials(), str(yarn.folder / "driver.log")
        with skein.Client(security=security, log=log) as client:
            yield client


@contextmanager
def showing(yarn):
    """What YARN and its containers have said, where something fails."""
    try:
        yield
    except BaseException:
        print(yarn.log(), yarn.logs())
        raise


@pytest.fixture(scope="module")
def cluster(yarn, driver):
    options = {"files": {PROGRAM.name: str(PROGRAM)}, "server_label": "ps", "tags": ["test"], **SMALL}
    with showing(yarn), dps.YarnCluster(f"python://{sys.executable}", 2, 2, skein_client=driver, **options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ps(yarn, cluster):
    with showing(yarn), Client(cluster) as client:
        client.wait_for_workers(4, SECONDS)
        with dps.ParameterServer(client, servers=2, copies=2) as ps:
            ps.table("counts", dtype="int64")
            yield ps


class Training(threading.Thread):
    """`ps.run` meanwhile."""

    def __init__(self, ps, pause=0.0):
        super().__init__(name="training")
        self.ps, self.pause, self.trainers = ps, pause, None
        self.before = pulled(ps)
        self.start()

    def run(self):
        data = da.from_array(KEYS, chunks=100)
        self.trainers = self.ps.run(yarn_program.count, data, staleness=2, kwargs={"pause": self.pause})

    def progress(self) -> int:
        return int((pulled(self.ps) - self.before).sum())

    def check(self, trainers: int) -> None:
        """It has ended, and each key was counted once."""
        self.join(SECONDS)
        assert len(self.trainers) == trainers
        np.testing.assert_array_equal(pulled(self.ps) - self.before, np.bincount(KEYS, minlength=50))


def pulled(ps):
    return ps.client().pull("counts", np.arange(50))


def names(cluster, service):
    return {container.id for container in cluster.containers(service)}


def kill(yarn, container):
    """SIGKILL to all processes of a container."""
    first = psutil.Process(yarn.pids()[container.yarn_container_id])
    for process in [*first.children(recursive=True), first]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a helper that has ended meanwhile
            process.kill()


def test_each_part_has_its_containers(yarn, cluster, ps):
    containers = cluster.containers()
    assert sorted(c.id for c in containers) == [
        *("dask.scheduler_0", "dask.worker_0", "dask.worker_1", "dps.server_0", "dps.server_1")
    ]
    labels = yarn.labels()
    for container in containers:
        assert labels[container.yarn_container_id] == ("ps" if container.service_name == "dps.server" else "")
    assert cluster.scheduler_address.startswith("tls://")
    assert cluster.dashboard_link.endswith("/status")
    assert cluster.app_id.startswith("application_")
    assert cluster.app_id in repr(cluster)
    workers = {info["name"]: info for info in cluster.scheduler_info["workers"].values()}
    assert workers["dask.worker_0"]["memory_limit"] == 2**30
    assert workers["dps.server_1"]["resources"] == {"dps": 1}
    assert any("dps.server" in str(log) for log in cluster.logs().values())


def test_a_server_that_is_killed(yarn, cluster, ps):
    training = Training(ps, pause=0.02)
    wait_until(lambda: training.progress() > 100, SECONDS)
    victim = cluster.containers("dps.server")[0]
    kill(yarn, victim)
    assert training.is_alive()
    training.check(trainers=2)
    # YARN starts another container, dps a server in it, and that one catches up.
    wait_until(lambda: names(cluster, "dps.server") == {"dps.server_1", "dps.server_2"}, SECONDS)
    wait_until(lambda: ps.servers() == 2 and whole(ps), SECONDS)
    Training(ps).check(trainers=2)


@pytest.mark.slow
def test_a_trainer_that_is_killed(yarn, cluster, ps):
    training = Training(ps, pause=0.02)
    wait_until(lambda: training.progress() > 100, SECONDS)
    victim = cluster.containers("dask.worker")[0]
    kill(yarn, victim)
    assert training.is_alive()
    training.check(trainers=2)  # one of them in the container that YARN has started meanwhile
    assert victim.id not in names(cluster, "dask.worker")
    assert len(names(cluster, "dask.worker")) == 2


def whole(ps) -> bool:
    """Whether all rows are there twice."""
    return all(len(chain) == 2 for chain in ps.status().tables["counts"].chains)


def test_more_and_fewer(cluster, ps):
    cluster.scale(3)
    cluster.scale_servers(3)
    ps.scale(3)
    wait_until(lambda: ps.servers() == 3 and len(cluster.observed) == 3, SECONDS)
    Training(ps).check(trainers=3)
    training = Training(ps, pause=0.02)
    ps.scale(2)
    cluster.scale_servers(2)
    assert len(names(cluster, "dps.server")) == 2
    training.check(trainers=3)
    cluster.scale(1)
    assert len(names(cluster, "dask.worker")) == 1
    wait_until(lambda: len(cluster.observed) == 1, SECONDS)
    Training(ps).check(trainers=1)


def test_servers_in_use_stay(cluster, ps):
    with pytest.raises(DPSError, match=r"1 workers that are to go still hold servers .* ps\.scale\(1\)"):
        cluster.scale_servers(1, timeout=0.5)
    assert ps.servers() == len(names(cluster, "dps.server")) == 2


def test_another_process_takes_it_up(driver, cluster, ps):
    other = dps.YarnCluster.from_application_id(cluster.app_id, skein_client=driver)
    with other:
        assert (other.spec.name, other.spec.tags) == ("dps", {"test"})
        with Client(other) as client:
            assert dps.ParameterServer.attach(client).ticket.secret == ps.ticket.secret
            assert client.submit(yarn_program.where_am_i).result(SECONDS) == cluster.app_id
    assert str(driver.application_report(cluster.app_id).state) == "RUNNING"  # it has only let go


SPARK = """
import pickle, sys
from pathlib import Path
import pyspark
from pyspark.sql import SparkSession

client = pickle.loads(Path(sys.argv[1]).read_bytes())

def count(keys):
    keys = list(keys)
    client.push("counts", keys, [1] * len(keys))
    yield len(keys), bool(client.pull("counts", keys).min() >= 1)

jars = Path(pyspark.__file__).parent / "jars"
settings = {"spark.yarn.jars": f"local:{jars}/*", "spark.executor.memory": "512m", "spark.yarn.am.memory": "512m"}
settings |= {"spark.executor.instances": "2", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
session = SparkSession.builder.master("yarn").config(map=settings).getOrCreate()
print(session.sparkContext.parallelize([n % 50 for n in range(1000)], 4).mapPartitions(count).collect())
session.stop()
"""


@pytest.mark.spark
def test_spark_on_the_same_yarn_uses_the_tables(yarn, ps, tmp_path):
    before = pulled(ps)
    (tmp_path / "client").write_bytes(pickle.dumps(ps.client()))
    (tmp_path / "program.py").write_text(SPARK)
    with showing(yarn):
        env = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        assert run_program(yarn, tmp_path, "client", **env) == f"{[(250, True)] * 4}\n"
    np.testing.assert_array_equal(pulled(ps) - before, np.full(50, 20))


def test_the_end(yarn, driver, cluster, ps):
    ps.close()
    ps.dask_client.close()
    cluster.shutdown("SUCCEEDED", "enough")
    over(driver, cluster.app_id, "SUCCEEDED", "enough")


def over(driver, app_id, status, why):
    wait_until(lambda: str(driver.application_report(app_id).state) == "FINISHED", SECONDS)
    report = driver.application_report(app_id)
    assert (str(report.final_status), report.diagnostics) == (status, why)


@pytest.mark.slow
def test_a_scheduler_here_and_trainers_with_the_load(yarn, driver):
    started = []

    async def story():
        options = {"deploy_mode": "local", "host": "127.0.0.1", "security": False, "asynchronous": True, **SMALL}
        python = f"python://{sys.executable}"
        async with dps.YarnCluster(python, 0, 0, skein_client=driver, **options) as cluster:
            started.append(cluster.app_id)
            assert cluster.scheduler_address.startswith("tcp://127.0.0.1:")
            cluster.adapt(minimum=0, maximum=2, interval="200ms", wait_count=2)
            async with Client(cluster, asynchronous=True) as client:
                assert await client.submit(abs, -1) == 1
                assert len(cluster.containers()) == 1
                while cluster.containers():
                    await asyncio.sleep(0.05)
                assert await client.submit(abs, -2) == 2  # the application lives on with no container
            raise ZeroDivisionError("as we like it")

    with showing(yarn), pytest.raises(ZeroDivisionError, match="as we like it"):
        asyncio.run(asyncio.wait_for(story(), SECONDS))
    over(driver, started[0], "FAILED", "ZeroDivisionError('as we like it')")


DOCTEST = """
import doctest, sys
from pathlib import Path

source = Path(sys.argv[1]).read_text()
session = doctest.DocTestParser().get_doctest(source, {"__name__": "__main__"}, "docs/yarn.md", None, 0)
sys.exit(doctest.DocTestRunner().run(session).failed)
"""


def pack(folder) -> str:
    """An archive that looks like one of conda-pack or venv-pack, and has this Python in it."""
    (folder / "bin").mkdir()
    (folder / "bin" / "activate").touch()
    (folder / "bin" / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(folder / "bin", "bin")
    return "env.tar.gz"


def test_the_session_of_the_page(yarn, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "yarn.md"
    session = [block.code for block in blocks(page.read_text()) if block.code.startswith(">>> ")]
    assert len(session) == 3
    (tmp_path / "session").write_text("".join(session))
    (tmp_path / "program.py").write_text(DOCTEST)
    settings = {"ENVIRONMENT": pack(tmp_path), "SERVER__LABEL": "ps"}
    settings |= {f"{kind}__MEMORY": "1 GiB" for kind in ("SCHEDULER", "WORKER", "SERVER")}
    settings = {f"DASK_DPS__YARN__{name}": value for name, value in settings.items()}
    with showing(yarn):
        run_program(yarn, tmp_path, "session", **settings)


def run_program(yarn, folder, argument, **env) -> str:
    """Run folder/program.py, as a user of this YARN would; what it prints."""
    env = {**os.environ, **yarn.env, "PYTHONPATH": str(PROGRAM.parent.parent), **env}
    command = [sys.executable, "program.py", argument]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_nothing_to_run_on(driver, tmp_path):
    path = str(tmp_path / "spec.yaml")
    dps.yarn.specification("venv:///nowhere", node_label="nowhere").to_file(path)
    with pytest.raises(DPSError, match=r"(?s)did not take .* no node for the application master"):
        dps.YarnCluster.from_specification(path, skein_client=driver)


def test_an_environment_that_is_not_there(driver):
    with pytest.raises(DPSError, match=r"application_\S+ is .*yarn logs -applicationId application_"):
        dps.YarnCluster("venv:///nowhere", 1, skein_client=driver, **SMALL)


def test_a_queue_that_is_full(driver):
    too_large = {"scheduler_memory": "8 GiB"}  # no node has that left
    with dask.config.set({"dps.timeouts.yarn": "2s"}), pytest.raises(DPSError, match=r"dps\.timeouts\.yarn") as caught:
        dps.YarnCluster("venv:///nowhere", skein_client=driver, **too_large)
    app_id = re.search(r"application_\w+", str(caught.value))[0]
    wait_until(lambda: str(driver.application_report(app_id).state) in ("KILLED", "FINISHED"), SECONDS)
