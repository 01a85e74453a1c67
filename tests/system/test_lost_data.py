"""Data in memory: a trainer's process is killed, its data with it, and the result is that of an undisturbed run."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from distributed import Client
from kills import killed_at, pids_of
from servers import wait_until

import dps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ROWS = 400


def counted(trainer, partitions):
    """Push each row once; trainer 1 kills its process in the middle, once."""
    for number, rows in enumerate(trainer.iterate(partitions, batch_size=5)):
        if (trainer.number, trainer.attempt, number) == (1, 0, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.push("n", rows, 1)
    return trainer.attempt


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


@pytest.mark.parametrize("reassign", [False, True], ids=["own batches", "leased batches"])
def test_each_row_counts_once(ps, reassign):
    ps.table("n", dtype="int64")
    assert ps.run(counted, np.arange(ROWS), trainers=2, staleness=1, reassign=reassign) == [0, 1]
    assert ps.client().pull("n", np.arange(ROWS)).tolist() == [1] * ROWS
    ps.drop_table("n")
    wait_until(lambda: len(ps.dask_client.nthreads()) == 3)


@pytest.mark.thorough
def test_a_fit_goes_on_after_each_worker_was_lost_in_turn(ps):
    pytest.importorskip("sklearn")
    from dps.models import LogisticRegression

    rng = np.random.default_rng(0)
    X = rng.random((ROWS, 5))
    y = (X @ rng.random(5) > X.sum(axis=1) / 2).astype(int)

    def fitted():
        return LogisticRegression(client=ps, epochs=60, batch_size=5, aggregate=True).fit(X, y)

    expected = fitted()
    before = max(run.run for run in ps.status().runs)
    _, pids = pids_of(ps)
    with killed_at(ps, dict(zip((50, 350), pids, strict=True))):
        found = fitted()
    (run,) = (run for run in ps.status().runs if run.run > before)
    assert [trainer.attempts for trainer in run.trainers] == [2, 2]
    np.testing.assert_allclose(found.coef_, expected.coef_, rtol=1e-5)
    wait_until(lambda: len(ps.dask_client.nthreads()) == 3)
