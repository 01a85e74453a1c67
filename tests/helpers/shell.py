"""For tests: `dask scheduler`, `dask worker` and other commands of Dask, started as from a shell."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import distributed.versions
import pytest
from click.testing import CliRunner
from servers import PATIENCE, wait_until

DASK = Path(sys.executable).with_name("dask")
SECONDS = PATIENCE
# Click before 8.2 keeps standard error apart only where it is told to.
APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
RUNNER = CliRunner(**APART)  # `dask ps`, in this process
VARIABLES = {"OMP_NUM_THREADS": "1", "DASK_DISTRIBUTED__SCHEDULER__IDLE_TIMEOUT": "5 m"}


class Shell:
    """Processes that end with it; what they print is in `folder`, in a file for each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.address = ""
        self.processes: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *exc: object) -> None:
        scheduler = self.processes.pop("scheduler", None)
        self._end(list(self.processes.values()))
        self._end([scheduler] if scheduler else [])  # last: workers take leave of it

    def _end(self, processes: list[subprocess.Popen]) -> None:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, *args: object, **env: str) -> subprocess.Popen:
        """`dask ARGS`, in the background."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [DASK, *map(str, args)], cwd=self.folder, env=os.environ | VARIABLES | env, stdout=log, stderr=log
            )
        return self.processes[name]

    def scheduler(self, *args: object, **env: str) -> str:
        """`dask scheduler`; its address, once it is up."""
        file = self.folder / "scheduler.json"
        here = ("--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
        process = self.start("scheduler", "scheduler", *here, "--scheduler-file", file, *args, **env)

        def up() -> bool:
            assert process.poll() is None, self.log("scheduler")
            return file.exists() and file.read_text().rstrip().endswith("}")

        wait_until(up, SECONDS)
        self.address = json.loads(file.read_text())["address"]
        return self.address

    def worker(self, name: str, *args: object, **env: str) -> subprocess.Popen:
        """`dask worker`, one process, one thread."""
        one = ("--no-nanny", "--nthreads", 1, "--memory-limit", 0, "--no-dashboard", "--host", "127.0.0.1")
        return self.start(name, "worker", self.address, "--name", name, *one, *args, **env)

    def server(self, name: str, *args: object, **env: str) -> subprocess.Popen:
        """A worker for servers."""
        return self.worker(name, "--resources", "dps=1", *args, **env)

    def dask(self, *args: object, **env: str) -> subprocess.CompletedProcess:
        """`dask ARGS`, to its end."""
        known = {"DASK_SCHEDULER_ADDRESS": self.address} if self.address else {}
        return subprocess.run(
            [DASK, *map(str, args)],
            cwd=self.folder,
            env=os.environ | VARIABLES | known | env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def pretend(folder: Path, version: str) -> dict[str, str]:
    """Environment of a process in which another version of dps is installed, as far as its metadata go."""
    if not hasattr(distributed.versions, "version"):
        pytest.skip("this Dask asks the imported module for its version, not its metadata")
    info = folder / version / f"dps-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dps\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(info.parent), os.environ.get("PYTHONPATH")]))}
