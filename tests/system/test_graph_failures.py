"""PageRank while the processes of a server and of a trainer are killed: the ranks are those of an undisturbed run."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import contextlib
import os
import signal
import threading

import numpy as np
from distributed import Client
from graphs import random_edges
from servers import wait_until

import dps
import dps.graph

pytestmark = pytest.mark.processes
ITERATIONS = 300


@contextlib.contextmanager
def killed_at(ps: dps.ParameterServer, pid: int, clock: int):
    """Kill a process once the slowest trainer of the next run has reached a clock."""
    before = max((run.run for run in ps.status().runs), default=-1)

    def reached() -> bool:
        return any(run.run > before and clocks(run) >= clock for run in ps.status().runs)

    def kill() -> None:
        wait_until(reached)
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killed: list[int] = []
    thread = threading.Thread(target=kill)
    thread.start()
    yield
    thread.join()
    assert killed


def clocks(run) -> int:
    return min((trainer.clock for trainer in run.trainers), default=0)


def test_ranks_do_not_tell_that_a_server_and_a_trainer_were_lost():
    ring = np.column_stack([np.arange(400), np.roll(np.arange(400), -1)])  # ranks spread slowly
    edges = np.concatenate([ring, random_edges(40, 400)])
    with (
        dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):

        def ranks() -> np.ndarray:
            with pytest.warns(RuntimeWarning, match="not converged"):
                result = dps.graph.page_rank(ps, edges, 0.95, {399: 1.0}, tol=0.0, max_iter=ITERATIONS)
            with result:
                assert result.iterations == ITERATIONS
                return result.values

        undisturbed = ranks()
        pids = client.run(os.getpid)
        of_servers = [server.worker for server in ps.status().servers]
        of_trainers = [worker for worker in pids if worker not in of_servers]
        for worker in (of_trainers[0], of_servers[0]):
            with killed_at(ps, pids[worker], 20):
                np.testing.assert_allclose(ranks(), undisturbed, rtol=0, atol=1e-14)
