"""A run goes on after its scheduler was killed: each push counts once, and none is lost."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from background import in_thread
from servers import wait_until
from shell import Shell
from survivors import Survivors

import dps

KEYS, BATCHES = 100, 400


def training():
    """The function of the trainers; made within another one, because processes of workers cannot import this file."""

    def train(trainer, parts, seconds):
        import time

        for batch in trainer.iterate(parts, batch_size=1):
            trainer.push("counts", np.arange(int(batch[0]) % 50, 100), 1)
            trainer.push("steps", [trainer.number], 1)
            time.sleep(seconds)
        return trainer.number, trainer.clock, trainer.attempt

    return train


def expected_counts(batches):
    return sum((np.arange(KEYS) >= batch % 50).astype(np.int64) for batch in range(batches))


def reaches(ps: dps.ParameterServer) -> bool:
    """Whether a handle reaches its controller: an old one does when Dask's client has connected again."""
    try:
        return len(ps.status().servers) == 2
    except dps.errors.ControllerGoneError:
        return False


def data():
    return np.arange(2 * BATCHES)


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [1, math.inf])
def test_a_run_goes_on_after_its_scheduler_was_killed(tmp_path, staleness):
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, trainers=2)
        with cluster.client(4) as first:
            ps = dps.ParameterServer(first, servers=2)
            ps.table("counts", rows=KEYS, dtype="int64", copies=2)
            ps.table("steps", rows=2, dtype="int64")
            how = {"staleness": staleness, "args": (0.01,), "progress": False}
            end = in_thread(ps.run, training(), data(), **how)
            client = ps.client()
            wait_until(lambda: client.pull("steps").min() > 50)
            cluster.kill_scheduler()
            time.sleep(1.0)
            cluster.start_scheduler()
            cluster.start_trainers(2)
            with cluster.client(4) as second:
                # A driver attaches, or goes on with its handle: Dask's client has connected to the next scheduler.
                again = dps.ParameterServer.attach(second) if staleness == 1 else ps
                wait_until(lambda: reaches(again))
                before = again.client().pull("steps")
                assert 50 < before.min() <= before.max() < BATCHES
                results = again.resume_run(training(), data(), args=(0.0,), progress=False)
                assert [number for number, _, _ in results] == [0, 1]
                assert [clock for _, clock, _ in results] == [BATCHES, BATCHES]
                assert all(attempt > 0 for _, _, attempt in results)
                assert again.client().pull("steps").tolist() == [BATCHES, BATCHES]
                counts = again.client().pull("counts")
                assert (counts == expected_counts(2 * BATCHES)).all()
            # A scheduler that has not taken the parameter server over yet does not know it.
            with pytest.raises((dps.errors.ControllerGoneError, dps.errors.ClosedError)):
                end()


def leased():
    """The function of trainers whose work is leased: each batch counts its rows, in its epoch."""

    def train(trainer, parts, epochs, seconds):
        import time

        for batch in trainer.iterate(parts, epochs=epochs, batch_size=4):
            trainer.push("seen", np.asarray(batch) + 10_000 * trainer.clock, 1)
            time.sleep(seconds)
        return trainer.clock

    return train


@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_with_leased_work_goes_on_after_its_scheduler_was_killed(tmp_path):
    """Trainers come and go in it, and what was done of the open epochs is made again, and counts once."""
    epochs, rows = 6, np.arange(400)
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, trainers=2)
        with cluster.client(4) as first:
            ps = dps.ParameterServer(first, servers=2)
            ps.table("seen", dtype="int64", copies=2)
            how = {"staleness": 1, "trainers": "all", "reassign": True, "progress": False}
            end = in_thread(ps.run, leased(), rows, args=(epochs, 0.02), **how)
            client = ps.client()
            wait_until(lambda: client.pull("seen", rows + 20_000).any())
            cluster.kill_scheduler()
            time.sleep(1.0)
            cluster.start_scheduler()
            cluster.start_trainers(2)
            with cluster.client(4) as second:
                again = dps.ParameterServer.attach(second)
                wait_until(lambda: reaches(again))
                (run,) = again.status().runs
                assert 1 <= run.minimum <= 2, "epochs that all had completed are not done again"
                results = again.resume_run(leased(), rows, args=(epochs, 0.0), progress=False)
                assert set(results) == {epochs}
                found = again.client().pull("seen", np.add.outer(10_000 * np.arange(epochs), rows))
                assert (found == 1).all()
            with pytest.raises((dps.errors.ControllerGoneError, dps.errors.ClosedError)):
                end()
