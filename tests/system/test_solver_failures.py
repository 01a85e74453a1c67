"""L-BFGS whose vectors lie on servers and whose loss comes from trainers, while servers' processes are killed."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import contextlib
import os
import signal

import numpy as np
from distributed import Client
from servers import wait_until

import dps
from dps import optimize

pytestmark = pytest.mark.processes
ROWS, COLUMNS, ITERATIONS = 400, 12, 10


def numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS))
    return X, np.where(X @ rng.normal(size=COLUMNS) + rng.normal(size=ROWS) > 0, 1.0, -1.0)


def log_loss(batch, w, pid=None, at=None):
    """The logistic loss of a batch, in whole multiples of 2**-30: sums of these are exact in whatever order.

    With `pid`, it kills that process once the weights are as large as `at`, in the middle of an evaluation.
    """
    if pid is not None and np.abs(w).sum() > at:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    X, y = batch
    margins = y * (X @ w)
    loss, gradient = np.logaddexp(0.0, -margins).sum(), -X.T @ (y / (1.0 + np.exp(margins)))
    return float(np.round(loss * 2**30) / 2**30), np.round(gradient * 2**30) / 2**30


def is_whole(ps: dps.ParameterServer) -> bool:
    """Whether each shard of each table has two replicas, on servers that are up, and none moves."""
    status = ps.status()
    up = {server.number for server in status.servers if server.alive}
    return all(
        all(len(chain) == 2 and set(chain) <= up for chain in table.chains)
        and all(joiner is None for joiner in table.joiners)
        for table in status.tables.values()
    )


@pytest.mark.thorough
def test_the_iterates_are_those_of_undisturbed_servers():
    """One server is killed by a trainer within an evaluation, another one between two iterations of the solver."""
    with (
        dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):

        def pid_of(number: int) -> int:
            (address,) = [server.worker for server in ps.status().servers if server.number == number]
            return client.run(os.getpid, workers=[address])[address]

        def iterates(kill_next: bool, *args: object) -> list[np.ndarray]:
            points: list[np.ndarray] = []

            def note(result):
                points.append(result.x.to_numpy())
                if kill_next and len(points) == 7:
                    wait_until(lambda: is_whole(ps))
                    os.kill(pid_of(1), signal.SIGKILL)

            settings = {"tol": 0.0, "f_tol": 0.0, "max_iter": ITERATIONS, "m": 4, "callback": note}
            with np.errstate(all="raise"):
                optimize.minimize(ps, log_loss, numbers(), COLUMNS, l2=0.0625, batch_size=10, args=args, **settings)
            return points

        undisturbed = iterates(False)
        assert len(undisturbed) == ITERATIONS
        np.testing.assert_array_equal(iterates(False), undisturbed)
        disturbed = iterates(True, pid_of(0), float(np.abs(undisturbed[3]).sum()) * 0.95)
        np.testing.assert_array_equal(disturbed, undisturbed)
        wait_until(lambda: is_whole(ps))
        assert min(server.number for server in ps.status().servers if server.alive) >= 2, "both were lost"
