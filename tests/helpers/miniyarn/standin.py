"""A stand-in for YARN on this machine: MiniYarn.java, and the environment in which skein and Spark find it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from servers import wait_until

HERE = Path(__file__).parent
JARS = ("hadoop-client-*", "slf4j-api-*", "log4j-*", "jcl-over-slf4j*")  # of pyspark's


def needed() -> str | None:
    """What is missing here."""
    if shutil.which("javac") is None:
        return "needs a Java compiler: make jdk"
    return None


@cache
def hadoop() -> str:
    """The class path of Hadoop's clients, as they come with pyspark."""
    pyspark = pytest.importorskip("pyspark")
    jars = Path(pyspark.__file__).parent / "jars"
    return ":".join(str(jar) for pattern in JARS for jar in sorted(jars.glob(f"{pattern}.jar")))


class MiniYarn:
    """A running one, with one node for each label.

    Parameters
    ----------
    folder : Path
        Compiled classes, configuration, logs: all is in here.
    labels : list of str
    """

    def __init__(self, folder: Path, labels: list[str]):
        skein = pytest.importorskip("skein")
        self.folder = folder / "yarn"
        classes, filters = folder / "classes", folder / "filters"
        skein_jar = Path(skein.__file__).parent / "java" / "skein.jar"
        for path, source, target in [
            (hadoop(), "MiniYarn.java", classes),
            (str(skein_jar), "AmIpFilter.java", filters),
        ]:
            subprocess.run(["javac", "-nowarn", "-cp", path, "-d", target, HERE / source], check=True, timeout=100)
        script = folder / "bin" / "yarn"  # skein asks `yarn classpath --glob`
        script.parent.mkdir()
        script.write_text(f"#!/bin/sh\necho {self.folder}/conf:{hadoop()}\n")
        script.chmod(0o755)
        self.env = {
            "HADOOP_CONF_DIR": f"{self.folder}/conf",
            "PATH": f"{script.parent}:{os.environ['PATH']}",
            "SKEIN_CONFIG": f"{folder}/skein",
        }
        self._log = folder / "yarn.log"
        command = ["java", "-cp", f"{classes}:{hadoop()}", "MiniYarn", self.folder]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, f"{hadoop()}:{filters}", ",".join(labels)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.env},
            )
        wait_until(lambda: "READY" in self.log() or self._process.poll() is not None)
        assert self._process.poll() is None, self.log()

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def labels(self) -> dict[str, str]:
        """YARN's container -> the label of the node that it was started on."""
        return dict(re.findall(r"LAUNCH (\S+) on \S+ '(\w*)'", self.log()))

    def pids(self) -> dict[str, int]:
        """YARN's container -> its first process."""
        return {name: int(pid) for name, pid in re.findall(r"LAUNCH (\S+) on .* pid (\d+)", self.log())}

    def logs(self) -> str:
        """The logs of all containers."""
        files = sorted(path for path in (self.folder / "logs").rglob("*") if path.is_file())
        return "\n".join(f"== {path.parent.name} {path.name}\n{path.read_text(errors='replace')}" for path in files)

    def stop(self) -> None:
        """Its containers end with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield
