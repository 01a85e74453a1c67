"""Allreduce of large arrays: the ring, its rounds with trainers that die at any step, and real runs."""

from __future__ import annotations

import inspect
import os
import signal
import threading

import numpy as np
import pytest
from dask import delayed
from dask.distributed import Client
from distributed.security import Security
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps.engine.client.environment import ProcessEnvironment
from dps.engine.client.ticket import Ticket
from dps.engine.coordination.meetings import Meetings
from dps.engine.training.allreduce import RingAllreduce, RingPeer, ring_steps

PATIENCE = 60.0  # seconds that a trainer waits for numbers
MEETING = 12.0  # and for the others to meet it: so a round must not end by its patience
SIZE = 70_001  # elements; more than RING_BYTES as float64
OPS = {"sum": np.add.reduce, "max": np.maximum.reduce, "min": np.minimum.reduce, "mean": lambda a: np.mean(a, 0)}

# -- the rule


@given(members=st.integers(1, 7), size=st.integers(0, 40))
def test_each_member_has_the_sum_and_sends_no_more_than_it_must(members, size):
    arrays = [np.random.default_rng(rank).integers(0, 100, size) for rank in range(members)]
    steps = [ring_steps(rank, members, size) for rank in range(members)]
    held = [array.copy() for array in arrays]
    for number in range(2 * (members - 1)):
        before = [each.copy() for each in held]
        for rank in range(members):
            step, sender = steps[rank][number], (rank - 1) % members
            assert step.received == steps[sender][number].sent
            where = slice(step.received.start, step.received.stop)
            held[rank][where] = before[sender][where] + (held[rank][where] if step.is_sum else 0)
    assert all((each == sum(arrays)).all() for each in held)
    for each in steps:
        assert sum(len(step.sent) for step in each) <= 2 * (members - 1) * (size // members + 1)


# -- rounds, over real connections, with a controller in memory


class Died(Exception):
    """A trainer ends here, between any two lines."""


class Controller:
    """The meetings of a run, for trainers in threads."""

    def __init__(self, trainers):
        self.meetings = Meetings(trainers, lambda tag, payloads: b"".join(payloads.values()))
        self.news = threading.Condition()

    def meet(self, trainer, place, call, raw):
        tag = repr(call)
        with self.news:
            if self.meetings.recall(tag, trainer, place) is None:
                self.meetings.arrive(tag, trainer, place, raw)
                self.news.notify_all()
            assert self.news.wait_for(lambda: self.meetings.recall(tag, trainer, place), MEETING), (
                "the others never came"
            )
            return self.meetings.recall(tag, trainer, place).answer


class Mortal:
    """A trainer's peer and its meetings, of which the `at`-th call is the last."""

    def __init__(self, peer, controller, trainer, at):
        self.peer, self.controller, self.trainer, self.left = peer, controller, trainer, at
        self.address, self.calls = peer.address, 0

    def _count(self):
        self.left -= 1
        if self.left == 0:
            raise Died

    def __getattr__(self, name):
        method = getattr(self.peer, name)

        def call(*args):
            self._count()
            result = method(*args)
            self._count()
            return result

        return call

    def meet(self, call, raw):
        self._count()
        answer = self.controller.meet(self.trainer, (0, self.calls), call, raw)
        self.calls += 1
        self._count()
        return answer


def arrays_of(trainers, rounds=2):
    return [np.random.default_rng(n).normal(size=(rounds, SIZE)) for n in range(trainers)]


def attempt(controller, arrays, number, at, results, done):
    """One attempt at a trainer: two allreduces, then it waits for the others, as a program with a barrier does."""
    peer = RingPeer(Ticket("dps", ("127.0.0.1", 1), "ab" * 16), ProcessEnvironment(), lambda: None)
    mortal = Mortal(peer, controller, number, at)
    ring = RingAllreduce(number, mortal, mortal.meet, PATIENCE)
    try:
        results[number] = [ring.combine(array, "sum") for array in arrays[number]]
        done.wait(MEETING)
    finally:
        peer.close()


def run(trainers=3, dies=None, at=0):
    """The results of all trainers; trainer `dies` is run again after its `at`-th step."""
    controller, arrays, results = Controller(trainers), arrays_of(trainers), {}
    done, errors = threading.Barrier(trainers), []

    def live(number):
        try:
            try:
                attempt(controller, arrays, number, at if number == dies else 0, results, done)
            except Died:
                attempt(controller, arrays, number, 0, results, done)
        except BaseException as error:
            errors.append(error)
            done.abort()

    threads = [threading.Thread(target=live, args=(number,)) for number in range(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * MEETING)
    assert not errors, errors
    return [results[number] for number in range(trainers)]


def check(results):
    expected = sum(arrays_of(len(results)))
    for result in results:
        assert np.allclose(result, expected, rtol=1e-12)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("trainers", [1, 2, 3, 5])
def test_all_trainers_get_the_same_bits(trainers):
    check(run(trainers))


def check_many(steps):
    for at in steps:
        check(run(3, dies=at % 3, at=at))


@pytest.mark.parametrize("at", range(1, 60, 3))
def test_a_trainer_dies_at_any_step(at):
    check_many([at])


VARIANTS = [
    (RingAllreduce, "_round", "members[rank].identity != self._identity", "False"),
    (RingAllreduce, "combine", 'if b"0" not in verdicts', "if True"),
    (RingAllreduce, "_reduced", 'np.array(array, order="C")', "array"),
    (RingAllreduce, "_go_round", "if step.is_sum", "if False"),
    (RingPeer, "give_up", "self._channel.ask(", "len("),
    (RingPeer, "end", "self._kept[number] = ", "_ = "),
]


@pytest.mark.slow
@pytest.mark.parametrize(("owner", "name", "old", "new"), VARIANTS)
def test_a_wrong_variant_is_noticed(monkeypatch, owner, name, old, new):
    assert inspect.getsource(getattr(owner, name)).count(old) == 1
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    monkeypatch.setitem(globals(), "MEETING", 3.0)
    with pytest.raises(AssertionError):
        check_many(range(1, 60, 2))


# -- real runs


@pytest.fixture(scope="module")
def ps():
    with (
        dps.LocalCluster(servers=1, trainers=3, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        yield ps


def combine(trainer, parts, marks):
    arrays = arrays_of(3)[trainer.number]
    results = {op: trainer.allreduce(arrays[0], op) for op in OPS}
    if trainer.number == 1 and marks is not None and not os.path.exists(marks):
        open(marks, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    results["later"] = trainer.allreduce(arrays[1])
    trainer.barrier()
    return results


def check_run(results):
    first, later = np.array(arrays_of(3)).swapaxes(0, 1)
    for result in results:
        for op, oracle in OPS.items():
            assert np.allclose(result[op], oracle(first), rtol=1e-12)
        assert np.allclose(result["later"], later.sum(0), rtol=1e-12)
        assert all(result[key].tobytes() == results[0][key].tobytes() for key in result)


def test_a_run(ps):
    check_run(ps.run(combine, [delayed(n) for n in range(3)], args=(None,)))


def quarrel(trainer, parts):
    trainer.allreduce(np.zeros(SIZE + trainer.number))


def test_arrays_of_different_shapes_are_refused(ps):
    with pytest.raises(Exception, match="must make the same collective calls"):
        ps.run(quarrel, [delayed(n) for n in range(2)])


@pytest.mark.thorough
@pytest.mark.processes
def test_a_killed_trainer_gets_the_results_that_it_had(tmp_path):
    with (
        dps.LocalCluster(servers=1, trainers=3, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        check_run(ps.run(combine, [delayed(n) for n in range(3)], args=(str(tmp_path / "killed"),)))
        (run,) = ps.status().runs
        assert sorted(run.attempts) == [1, 1, 2]


@pytest.mark.tls
def test_the_ring_is_encrypted_where_the_cluster_is():
    security = Security.temporary()
    with (
        dps.LocalCluster(servers=1, trainers=3, processes=False, security=security, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        check_run(ps.run(combine, [delayed(n) for n in range(3)], args=(None,)))
