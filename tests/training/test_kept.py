"""Partitions that the driver keeps are as before after they were lost."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from distributed import Client, LocalCluster
from servers import wait_until

from dps.engine.training import data as kept
from dps.engine.training.tasks import Tasks, TrainerTask


@pytest.fixture
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def cut(number):
    return np.arange(4) + 10 * number


def plus(part, n, factor):
    return part * factor + n


def test_parts_go_to_the_workers_in_turn(client):
    workers = sorted(client.nthreads())
    parts = kept.send(client, [functools.partial(cut, n) for n in range(4)], workers)
    assert sorted(worker for (worker,) in client.who_has(parts).values()) == sorted(2 * workers)
    assert [part.tolist() for part in client.gather(parts)] == [cut(n).tolist() for n in range(4)]


async def lose(address, dask_scheduler):
    await dask_scheduler.remove_worker(address, stimulus_id="test", expected=False)


@pytest.mark.parametrize("lost", [[0], [1, 2], [0, 1, 2]], ids=str)
def test_what_was_lost_is_as_before(client, lost):
    first, second = sorted(client.nthreads())
    parts = [kept.send(client, [functools.partial(cut, n)], [first if n in lost else second])[0] for n in range(3)]
    made = kept.send_mapped(client, plus, parts, range(3), [2, 3, 4])
    before, futures = client.gather([*parts, *made]), [*parts, *made]
    keys = [future.key for future in futures]
    client.run_on_scheduler(lose, first)
    wait_until(lambda: all(parts[n].cancelled() and made[n].cancelled() for n in lost))
    gone = [future for future in futures if future.cancelled()]
    assert len(gone) == 2 * len(lost)
    assert kept.cannot_be_sent_again(gone) == []
    kept.send_again(client, gone, [second])
    assert not any(future.cancelled() for future in futures)
    for there, again in zip(before, client.gather(futures), strict=True):
        np.testing.assert_array_equal(there, again)
    assert [future.key for future in futures] == keys, "trainers fetch partitions by key"


def test_only_what_was_sent_here_is_sent_again(client):
    (mine,) = kept.send(client, [functools.partial(cut, 0)], client.nthreads())
    theirs = client.scatter(cut(1), hash=False)
    (from_theirs,) = kept.send_mapped(client, plus, [theirs], [1], [1])
    assert kept.cannot_be_sent_again([mine, theirs, from_theirs]) == [theirs, from_theirs]
    assert from_theirs.result().tolist() == [11, 12, 13, 14]


def test_nothing_is_kept_for_futures_that_are_gone(client):
    before = len(kept._makers)
    parts = kept.send(client, [functools.partial(cut, 0)], client.nthreads())
    made = kept.send_mapped(client, plus, parts, [1], [1])
    assert len(kept._makers) == before + 2
    del parts, made
    assert len(kept._makers) == before


class Threads:
    """Has no thread for the first who asks, and one afterwards."""

    def __init__(self, worker):
        self.worker, self.asked, self.given_back = worker, 0, []

    def ask(self, *_):
        self.asked += 1
        return {"seats": [(self.worker, "again")] if self.asked > 1 else [], "numbers": "0 threads are free"}

    def give_back(self, keys):
        self.given_back += keys


def test_a_trainer_whose_worker_lives_waits_for_a_thread_after_its_data_was_lost(client, monkeypatch):
    first, second = sorted(client.nthreads())
    part, other = kept.send(client, [functools.partial(cut, 3)] * 2, [first])
    client.run_on_scheduler(lose, first)
    wait_until(lambda: part.cancelled() and other.cancelled())
    seat = TrainerTask(0, (second, "before"), [0], [part])
    seat.future = other  # cancelled, as Dask leaves the task that lacked its data
    tasks = Tasks(client, None, Threads(second), [seat], lambda: None)
    submitted = []
    monkeypatch.setattr(Tasks, "_submit", lambda self, seat: submitted.append(seat.key))
    monkeypatch.setattr(
        "dps.engine.training.tasks.send_again", lambda *_: None
    )  # the worker that was to get it has gone
    tasks.look()
    assert (seat.future, seat.homeless is not None, submitted) == (None, True, [])
    tasks.look()
    assert submitted == [], "its data are still lost"
    monkeypatch.undo()
    monkeypatch.setattr(Tasks, "_submit", lambda self, seat: submitted.append(seat.key))
    tasks.look()
    assert submitted == ["again"]
    assert part.result().tolist() == cut(3).tolist()


def test_a_worker_that_is_gone_leaves_a_partition_lost(client):
    first, second = sorted(client.nthreads())
    (part,) = kept.send(client, [functools.partial(cut, 3)], [first])
    client.run_on_scheduler(lose, first)
    wait_until(part.cancelled)
    kept.send_again(client, [part], [first])
    assert part.cancelled()
    kept.send_again(client, [part], [second])
    assert part.result().tolist() == cut(3).tolist()
