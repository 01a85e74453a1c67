"""A cluster of processes whose scheduler is killed or stopped; `dps.scheduler.grace` holds the servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from distributed import Client
from servers import PATIENCE, wait_until
from shell import Shell

from dps.engine.daskapi.workers import workers_of

__all__ = ["Survivors"]

# Processes of the cluster can run functions of the files in this folder.
HELPERS = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
GRACE = {"DASK_DPS__SCHEDULER__GRACE": "10 m", "PYTHONPATH": HELPERS}
SCHEDULER = "scheduler"
# An address of this machine that hardly any other process listens at (Linux has 127.0.0.0/8), because other tests would
# take the port of the scheduler or of its controller at times, between the death of one scheduler and the next one.
OWN_HOST = f"127.1.{os.getpid() >> 8 & 255}.{1 + os.getpid() % 254}" if sys.platform == "linux" else "127.0.0.1"


class Survivors:
    """A scheduler, workers for servers and workers for trainers, each of them a process of a shell.

    A process has a name in the shell: "scheduler", "server-0", "trainer-0" and so on. The first scheduler listens at a
    free port, and each next one at the same address. What a process prints is in `shell.log(name)`.

    Parameters
    ----------
    shell : Shell
        Ends the processes with itself.
    nanny : str
        "--nanny" or "--no-nanny", for the workers of servers.
    servers, trainers : int
        How many workers there are at first.
    """

    def __init__(self, shell: Shell, nanny: str = "--no-nanny", servers: int = 2, trainers: int = 0):
        self.shell, self.nanny = shell, nanny
        self.address = shell.scheduler("--host", OWN_HOST, **GRACE)
        self.servers: list[str] = []  # workers for servers that were not killed
        self.trainers: list[str] = []
        self._started = 0
        self.start_servers(servers)
        self.start_trainers(trainers)

    def start_servers(self, count: int) -> None:
        """More workers for servers, with or without a scheduler, which they wait for."""
        for _ in range(count):
            self.servers.append(f"server-{self._started}")
            self._started += 1
            self.shell.server(self.servers[-1], self.nanny, **GRACE)

    def start_trainers(self, count: int) -> None:
        """More workers for trainers."""
        for _ in range(count):
            self.trainers.append(f"trainer-{len(self.trainers)}")
            self.shell.worker(self.trainers[-1], **GRACE)

    def client(self, workers: int = 1) -> Client:
        """A client of the scheduler that is there, once it has so many workers."""
        client = Client(self.address, timeout=PATIENCE, set_as_default=False)
        # `wait_for_workers` does not count the workers of servers.
        wait_until(lambda: len(workers_of(client)) >= workers, what=f"fewer than {workers} workers have joined")
        return client

    def process(self, name: str) -> subprocess.Popen:
        return self.shell.processes[name]

    def alive(self) -> list[str]:
        """The workers for servers whose processes have not ended."""
        return [name for name in self.servers if self.process(name).poll() is None]

    def kill(self, name: str) -> None:
        """SIGKILL, also to a process that is stopped."""
        self.process(name).kill()
        self.process(name).wait(PATIENCE)

    def kill_server(self, name: str) -> None:
        self.servers.remove(name)
        self.kill(name)

    def replace_ended(self) -> list[str]:
        """Start a worker for each one that has ended with its scheduler, as those do that have no server; the names."""
        ended = [name for name in self.servers if self.process(name).poll() is not None]
        for name in ended:
            assert self.process(name).returncode == 0, f"{name} has failed: {self.shell.log(name)[-2000:]}"
            self.servers.remove(name)
        self.start_servers(len(ended))
        return ended

    def kill_scheduler(self) -> None:
        self.kill(SCHEDULER)

    def start_scheduler(self) -> subprocess.Popen:
        """Another scheduler at the address of the first one, which was killed before."""
        return self.start_at_the_address(SCHEDULER)

    def start_at_the_address(self, name: str) -> subprocess.Popen:
        port = self.address.rpartition(":")[2]
        listening = ("--host", OWN_HOST, "--port", port, "--no-dashboard", "--dashboard-address", "127.0.0.1:0")
        return self.shell.start(name, "scheduler", *listening, **GRACE)

    def stop(self, name: str) -> None:
        self.process(name).send_signal(signal.SIGSTOP)

    def wake(self, name: str) -> None:
        self.process(name).send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """Within the block, a process stands still (SIGSTOP); it may be killed meanwhile."""
        self.stop(name)
        try:
            yield
        finally:
            self.wake(name)

    def end_scheduler(self) -> None:
        """End the scheduler on purpose (SIGTERM)."""
        self.process(SCHEDULER).terminate()
        self.process(SCHEDULER).wait(PATIENCE)

    def end(self) -> None:
        """End the scheduler on purpose (SIGTERM), which ends the servers' processes: all without an error."""
        self.process(SCHEDULER).terminate()
        for name in [*self.alive(), SCHEDULER]:
            code = self.process(name).wait(PATIENCE)
            assert code == 0, f"{name} has ended with {code}: {self.shell.log(name)[-2000:]}"
