"""A Dask cluster of real processes, for programs that stop, kill and cut off servers: scheduler, workers with nannies.

Each server's worker is a process group of its own, so that one can be hit without its nanny, and may run in a network
namespace (Linux, as root), so that it can be cut off from all others as by a broken cable.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
from distributed import Client

import dps
from benchmarks.common import ROOT

__all__ = ["Machines", "Namespace", "machines", "primaries", "server_pid", "wait_for", "whole"]

T = TypeVar("T")
PATIENCE = 60.0
HOST = "127.0.0.1"
BURST_SECONDS = 0.001
LARGEST_PACKET = 1 << 17


def wait_for(what: str, condition: Callable[[], T], seconds: float = PATIENCE, pause: float = 0.02) -> T:
    """The first true value of `condition()`."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(pause)
    return found


class Namespace:
    """A network namespace, joined to ours by one cable that can be pulled (`cut`, `mend`) and made slow (`limit`)."""

    name, ours, theirs = "dps-bench", "10.87.0.1", "10.87.0.2"

    def __init__(self) -> None:
        ip("netns", "add", self.name)
        try:
            ip("link", "add", "dpsbench0", "type", "veth", "peer", "name", "dpsbench1", "netns", self.name)
            ip("address", "add", f"{self.ours}/30", "dev", "dpsbench0")
            ip("link", "set", "dpsbench0", "up")
            ip("-n", self.name, "address", "add", f"{self.theirs}/30", "dev", "dpsbench1")
            ip("-n", self.name, "link", "set", "lo", "up")
            self.mend()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def problem() -> str | None:
        """Why there can be none here."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return "network namespaces need Linux and root"
        done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
        return f"`ip netns` does not work here: {done.stderr.strip()}" if done.returncode else None

    def command(self) -> list[str]:
        """What runs a program inside."""
        return ["ip", "netns", "exec", self.name]

    def cut(self) -> None:
        """Pull the cable, at the far end: no packet gets through, and no connection is closed."""
        ip("-n", self.name, "link", "set", "dpsbench1", "down")

    def mend(self) -> None:
        ip("-n", self.name, "link", "set", "dpsbench1", "up")

    def limit(self, gigabits: float | None, bands: bool = False) -> None:
        """Let so many Gb/s through in each direction, as :func:`limit_cable` does."""
        limit_cable("dpsbench0", "dpsbench1", self.command(), gigabits, bands)

    def traffic(self) -> tuple[int, int]:
        """Bytes that went in so far, and out, with the headers of Ethernet, IP and TCP."""
        counts = Path("/sys/class/net/dpsbench0/statistics")
        return int((counts / "tx_bytes").read_text()), int((counts / "rx_bytes").read_text())

    def close(self) -> None:
        """The namespace goes, and the cable with it."""
        ip("netns", "delete", self.name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def shaping_problem() -> str | None:
    """Why no cable can be made slow here."""
    return Namespace.problem() or (None if shutil.which("tc") else "there is no tc (iproute2)")


def limit_cable(ours: str, theirs: str, inside: list[str], gigabits: float | None, bands: bool = False) -> None:
    """Let so many Gb/s through a cable in each direction; None: as many as the processors can. `inside` runs a program
    in the namespace of the far end.

    A token bucket (tc-tbf) in front of the cable at either end, of what the cable takes in BURST_SECONDS, and at least
    one packet of the largest kind: as Linux hands packets of up to 64 KiB to such a cable. Packets wait in one line,
    or, with `bands`, those of sockets with a priority pass the others (tc-pfifo_fast).
    """
    for device, where in ((ours, []), (theirs, inside)):
        words = [*where, "tc", "qdisc"]
        subprocess.run([*words, "delete", "dev", device, "root"], check=False, capture_output=True)
        if gigabits is None:
            continue
        burst = max(LARGEST_PACKET, int(gigabits * 1e9 / 8 * BURST_SECONDS))
        root = ["add", "dev", device, "root", "handle", "1:", "tbf", "rate", f"{int(gigabits * 1e9)}bit"]
        root += ["burst", str(burst), "latency", "50ms"]
        subprocess.run([*words, *root], check=True, capture_output=True, text=True)
        if bands:
            inner = ["add", "dev", device, "parent", "1:1", "pfifo_fast"]
            subprocess.run([*words, *inner], check=True, capture_output=True, text=True)


class Machines:
    """The processes of one cluster; each worker but those of trainers is started with the resource ``dps``."""

    def __init__(self, folder: str, host: str):
        self.folder, self.host, self.address = folder, host, ""
        self._processes: list[subprocess.Popen] = []
        self._log = open(Path(folder, "log"), "wb")  # noqa: SIM115

    def start_scheduler(self) -> None:
        """Start a scheduler; where there was one before, at its address."""
        file, port = Path(self.folder, "scheduler.json"), self.address.rpartition(":")[2] or "0"
        file.unlink(missing_ok=True)
        self._scheduler = self._start(
            "dask_scheduler", "--host", self.host, "--port", port, "--scheduler-file", str(file)
        )
        wait_for("scheduler", lambda: file.exists() and file.read_text())
        self.address = json.loads(file.read_text())["address"]

    def kill_scheduler(self) -> None:
        self._scheduler.kill()
        self._scheduler.wait()

    @contextlib.contextmanager
    def scheduler_stopped(self) -> Iterator[None]:
        """Within the block the scheduler stands still (SIGSTOP)."""
        self._scheduler.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._scheduler.send_signal(signal.SIGCONT)

    def start_worker(self, name: str, namespace: Namespace | None = None) -> None:
        host, inside = (self.host, []) if namespace is None else (namespace.theirs, namespace.command())
        self._start_worker(name, host, inside, "--resources", "dps=1")

    def start_trainer(self, name: str, namespace: Namespace | None = None) -> None:
        host, inside = (self.host, []) if namespace is None else (namespace.theirs, namespace.command())
        self._start_worker(name, host, inside)

    def _start_worker(self, name: str, host: str, inside: list[str], *more: str) -> None:
        options = ["--name", name, "--host", host, "--nthreads", "1", *more, "--memory-limit", "0"]
        options += ["--local-directory", self.folder, "--nanny", "--nworkers", "1", self.address]
        self._start("dask_worker", *options, inside=inside)

    def log(self) -> str:
        """What they have written."""
        return Path(self.folder, "log").read_text(errors="replace")

    def _start(self, module: str, *options: str, inside: list[str] | None = None) -> subprocess.Popen:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        threads = {"OMP_NUM_THREADS": "1"}
        command = [*(inside or []), sys.executable, "-m", f"distributed.cli.{module}", "--no-dashboard", *options]
        out: dict[str, Any] = {"stdout": self._log, "stderr": self._log}
        environment = {**os.environ, "PYTHONPATH": path, **threads}
        process = subprocess.Popen(command, **out, env=environment, cwd=ROOT, start_new_session=True)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End them all, those that are stopped as well."""
        processes = []
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                here = psutil.Process(process.pid)
                processes += [here, *here.children(recursive=True)]
        for one in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self._processes:
            process.wait()
        psutil.wait_procs(processes, 10)
        self._log.close()


@contextlib.contextmanager
def machines(workers: int, host: str = HOST, namespace: Namespace | None = None) -> Iterator[tuple[Machines, Client]]:
    """A scheduler and so many workers for servers, one more in `namespace` if given; and a client."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cluster = Machines(folder, host)
        try:
            cluster.start_scheduler()
            for n in range(workers):
                cluster.start_worker(f"server-{n}")
            if namespace is not None:
                cluster.start_worker("elsewhere", namespace)
            count = workers + (namespace is not None)
            with Client(cluster.address) as client:
                client.wait_for_workers(count, timeout=PATIENCE)
                yield cluster, client
        finally:
            cluster.close()


def server_pid(client: Client, worker: str) -> int:
    """The process of a worker."""
    return int(client.run(os.getpid, workers=[worker])[worker])


def primaries(ps: dps.ParameterServer, table: str) -> dict[int, list[int]]:
    """Server -> the shards of a table that it is the primary of."""
    found: dict[int, list[int]] = {}
    for shard, chain in enumerate(ps.connection.describe().tables[table].chains):
        found.setdefault(chain[0] if chain else -1, []).append(shard)
    return found


def whole(ps: dps.ParameterServer, servers: int) -> bool:
    """Whether there are as many servers as there should be (at least), all chains full, and nothing is moving."""
    description = ps.connection.describe()
    alive = {server.number for server in description.servers if server.alive}
    full = all(
        len(alive.intersection(chain)) == len(chain) >= table.spec["copies"] and joiner is None
        for table in description.tables.values()
        for chain, joiner in zip(table.chains, table.joiners, strict=True)
    )
    return len(alive) >= servers and full
