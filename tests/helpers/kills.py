"""Kill processes while a run goes on: when the slowest trainer has reached a clock, or when a condition holds."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from servers import wait_until

import dps

__all__ = ["killed_at", "killed_when", "pids_of"]


@contextlib.contextmanager
def killed_at(ps: dps.ParameterServer, pids: Mapping[int, int]) -> Iterator[None]:
    """Within the block, kill these processes in the runs that begin; `pids` has them by their clocks."""
    before = max((run.run for run in ps.status().runs), default=-1)
    killed = []

    def kill() -> None:
        for clock, pid in sorted(pids.items()):
            wait_until(lambda clock=clock: any(r.run > before and r.minimum >= clock for r in ps.status().runs))
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert sorted(killed) == sorted(pids.values())


@contextlib.contextmanager
def killed_when(condition: Callable[[], bool], pid: int) -> Iterator[None]:
    """Within the block, kill this process when the condition holds. It has to hold."""
    killed = []

    def kill() -> None:
        wait_until(condition)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert killed == [pid]


def pids_of(ps: dps.ParameterServer) -> tuple[list[int], list[int]]:
    """(the processes of the servers, by number; those of the workers without one)."""
    pids = ps.dask_client.run(os.getpid)
    servers = [server.worker for server in ps.status().servers if server.alive]
    spare = ps.dask_client.scheduler_info(n_workers=-1)["workers"]
    others = [worker for worker in pids if worker not in servers and not spare[worker].get("resources", {}).get("dps")]
    return [pids[worker] for worker in servers], [pids[worker] for worker in others]
