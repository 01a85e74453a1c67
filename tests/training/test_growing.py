"""`ps.run(..., trainers="all")`: trainers come and go, and each batch counts once in an epoch."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time

import dask.array as da
import numpy as np
import pytest
from background import in_thread
from distributed import Client
from servers import wait_until

import dps
from dps.engine.training.launch import RunOptions, resumed
from dps.engine.training.vacancies import Vacancies
from dps.engine.wire.messages import SavedRun
from dps.errors import InputError, TrainerLostError

EPOCH = 10**6  # a row's key in the next epoch is so much greater
GO = threading.Event()  # for tasks in this process


def counts(trainer, parts, epochs, seconds=0.01, until=None):
    """Each row counts one; the number of batches, and the clock at the end."""
    done = 0
    for batch in trainer.iterate(parts, epochs=epochs, batch_size=4):
        if until is None or until.is_set():
            time.sleep(seconds)
        else:
            until.wait(0.2)
        trainer.push("n", np.asarray(batch) + EPOCH * trainer.clock, 1)
        done += 1
    return done, trainer.clock


def waits(trainer, parts, epochs):
    """Batches are slow until the test lets them go."""
    return counts(trainer, parts, epochs, 0.001, GO)


def all_count_once(ps, rows, epochs):
    return (ps.client().pull("n", np.add.outer(EPOCH * np.arange(epochs), np.arange(rows))) == 1).all()


@pytest.fixture
def cluster():
    with dps.LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster:
        yield cluster


def beside(change):
    """Call it while a run goes on, and let the run go then; returns what raises its error."""

    def call():
        try:
            change()
        finally:
            GO.set()

    GO.clear()
    return in_thread(call)


@pytest.mark.parametrize("staleness", [0, 1])
def test_trainers_come_with_workers_and_go_with_them(cluster, staleness):
    with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("n", dtype="int64")
        data = client.persist(da.arange(480, chunks=120))

        def connected():
            runs = ps.status().runs
            return len(runs[0].connected) if runs else 0

        def change():
            wait_until(lambda: connected() == 2)
            cluster.scale(4)
            wait_until(lambda: connected() == 4)
            first = next(trainer for trainer in ps.status().runs[0].trainers if trainer.number == 0)
            client.retire_workers([first.where])
            wait_until(lambda: connected() == 3 and ps.status().runs[0].trainers[0].state == "left")

        end = beside(change)
        results = ps.run(waits, data, staleness=staleness, trainers="all", reassign=True, args=(6,), progress=False)
        end()
        assert all_count_once(ps, 480, 6)
        assert len(results) == 3, "one has no result, because it was lost"
        assert {clock for _, clock in results} == {6}
        assert any(done for done, _ in results[1:]), "those that came had work"
        (run,) = ps.status().runs
        assert (len(run.trainers), run.portions.left) == (4, 0)
        assert any("is gone" in text for _, text in ps.status().events)


def test_more_trainers_than_partitions(cluster):
    """Two threads and one partition: the second trainer comes to help."""
    with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("n", dtype="int64")
        end = beside(lambda: wait_until(lambda: ps.status().runs and len(ps.status().runs[0].connected) == 2))
        results = ps.run(waits, da.arange(200, chunks=200), trainers="all", reassign=True, args=(5,), progress=False)
        end()
        assert all_count_once(ps, 200, 5)
        assert len(results) == 2


def fails(trainer, parts, epochs):
    """As `waits`, but the function raises an error when the test lets it go."""
    for batch in trainer.iterate(parts, epochs=epochs, batch_size=4):
        trainer.push("n", np.asarray(batch) + EPOCH * trainer.clock, 1)
        GO.wait(0.01)
        if GO.is_set():
            raise OSError("on purpose")


def test_a_run_that_is_resumed_has_the_same_seats(cluster, tmp_path):
    how = {"trainers": "all", "reassign": True, "progress": False, "args": (200,)}
    with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("n", dtype="int64")
        data = client.persist(da.arange(80, chunks=20))
        clocks = []

        def change():
            wait_until(lambda: ps.status().runs and ps.status().runs[0].minimum > 0)
            clocks.append(ps.checkpoint(str(tmp_path))["clock"])

        end = beside(change)
        with pytest.raises(OSError, match="on purpose"):
            ps.run(fails, data, **how)
        end()
        ps.drop_table("n")
        ps.restore(str(tmp_path))
        with pytest.raises(InputError, match='begun with trainers="all": go on in the same way'):
            ps.run(counts, data, reassign=True, resume=True, args=(200, 0.0))
        results = ps.run(counts, data, resume=True, **{**how, "args": (clocks[0] + 3, 0.0)})
        assert {clock for _, clock in results} == {clocks[0] + 3}
        # A portion may be run by two trainers. All batches of an epoch are 20.
        assert 3 * 20 <= sum(done for done, _ in results) < 4 * 20, "the epochs before are passed over"
        assert all_count_once(ps, 80, clocks[0] + 3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "others do the work of a trainer that is gone, so say reassign=True"),
        ({"reassign": True, "by": "partition"}, 'so they cannot come by="partition"'),
        ({"trainers": "some", "reassign": True}, 'trainers is 1 or more, "all", or None'),
    ],
)
def test_what_does_not_go_together(options, why):
    with pytest.raises(InputError, match=why):
        RunOptions(**{"trainers": "all", **options})


def test_a_run_without_vacant_seats_is_not_resumed_with_them():
    saved = SavedRun(2, 0.0, 5, 1, True, partitions=[[0], [1]])
    with pytest.raises(InputError, match='begun without trainers="all"'):
        resumed(saved, RunOptions(trainers="all", reassign=True, resume=True), 2)


def test_trainers_that_do_nothing_but_end():
    vacancies = Vacancies(lambda verb, **fields: True, 1, begun=1, seats=3)
    for done in (5, 5, 5, 6, 6, 6):  # a portion is done meanwhile
        vacancies.note_loss(done)
    with pytest.raises(TrainerLostError, match="4 trainers were lost with their workers since the last portion"):
        vacancies.note_loss(6)


def test_a_cluster_that_shrinks_loses_many_at_once():
    vacancies = Vacancies(lambda verb, **fields: True, 1, begun=1, seats=9)
    assert vacancies.take(7) == list(range(1, 8))
    for _ in range(7):
        vacancies.note_loss(5)


# -- real processes, which are killed


def dies(trainer, parts, folder, epochs):
    """Trainers 1 and 2 kill their processes, once each, in the middle of a portion."""
    mark = pathlib.Path(folder, f"died-{trainer.number}")
    for n, batch in enumerate(trainer.iterate(parts, epochs=epochs, batch_size=2)):
        time.sleep(0.005)
        trainer.push("n", batch[:1] + EPOCH * trainer.clock, 1)
        if trainer.number in (1, 2) and trainer.clock >= 1 and n > 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.push("n", batch[1:] + EPOCH * trainer.clock, 1)
    return trainer.clock


@pytest.mark.processes
@pytest.mark.thorough
def test_killed_trainers_are_not_missed_and_others_come(tmp_path):
    """The nanny begins the worker anew, and another trainer takes its thread."""
    with (
        dps.LocalCluster(trainers=3, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, copies=1) as ps,
    ):
        ps.table("n", dtype="int64")
        data = client.persist(da.arange(600, chunks=200))
        how = {"trainers": "all", "reassign": True, "progress": False}
        results = ps.run(dies, data, staleness=1, args=(str(tmp_path), 6), **how)
        assert set(results) == {6}
        assert all_count_once(ps, 600, 6)
        assert {path.name for path in tmp_path.iterdir()} == {"died-1", "died-2"}
        (run,) = ps.status().runs
        assert len(run.trainers) > 3 or len(results) < 3
