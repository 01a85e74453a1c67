"""`ps.run(..., reassign=True)`: whoever works on a batch, it counts once in each epoch."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import signal
import threading
import time
from types import SimpleNamespace

import dask
import dask.array as da
import dask.bag as db
import msgspec
import numpy as np
import pytest
from distributed import Client
from oracles import mutant
from run_peers import state_of
from servers import PATIENCE, wait_until

import dps
from dps.engine.client.origin import Origin
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.run import Run
from dps.engine.controller.runs import Runs
from dps.engine.controller.work_leases import WorkLeases
from dps.engine.core.shards.ledger import Ledger
from dps.engine.training.launch import RunOptions, resumed
from dps.engine.training.leased_batches import MAX_TRIES, FetchablePartitions, LeasedBatches
from dps.engine.wire.messages import LeaseAnswer, LeaseRequest, PartitionsAtHand, SavedRun, decode, encode
from dps.errors import DataLostError, InputError, RequestTimeoutError, ServerGoneError, StoppedError
from dps.testing import Faults, Simulation

EPOCH = 10**6  # a row's key in the next epoch is so much greater
SEEDS = 3
GO, REFUSED, FETCHED = threading.Event(), threading.Event(), threading.Event()  # for tasks in this process
NOTES = []


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=4, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        yield client


@pytest.fixture
def ps(client):
    GO.clear()
    NOTES.clear()
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("n", dtype="int64")
        yield ps
        GO.set()


def rows(*chunks):
    """An array of the numbers 0, 1, 2, ..., in partitions of so many."""
    return da.arange(sum(chunks), chunks=(chunks,))


def count(trainer, batch):
    """Each row of a batch counts one, in this epoch."""
    trainer.push("n", np.asarray(batch) + EPOCH * trainer.clock, 1)


def counted(ps, rows, epochs):
    """How often each row has been counted: [epochs, rows]."""
    return ps.client().pull("n", np.add.outer(EPOCH * np.arange(epochs), np.arange(rows)))


def portions(ps):
    return ps.status().runs[0].portions


def slowly(trainer, parts, epochs=2, slow=0, seconds=0.01, **how):
    """Count; one trainer is much slower than the others."""
    done = 0
    for batch in trainer.iterate(parts, epochs, **how):
        time.sleep(seconds if trainer.number == slow else seconds / 10)
        count(trainer, batch)
        done += 1
    return done, trainer.clock


@pytest.mark.parametrize("shuffle", [None, 7])
@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_each_batch_counts_once_in_an_epoch(ps, staleness, shuffle):
    data = rows(90, 40, 90, 40)
    how = {"kwargs": {"batch_size": 3, "shuffle": shuffle}, "staleness": staleness}
    results = ps.run(slowly, data, trainers=2, reassign=True, **how)
    assert [clock for _, clock in results] == [2, 2]
    assert (counted(ps, 260, 2) == 1).all()
    assert results[0][0] < results[1][0]
    about = portions(ps)
    assert about.moved > 0
    assert about.left == 0
    assert about.done == 2 * sum(min(16, math.ceil(n / 3)) for n in (90, 40, 90, 40))


@pytest.mark.parametrize(
    ("chunks", "trainers"),
    [((50,), 1), ((50,), 4), ((2, 0, 100, 1), 3), ((1, 1, 1, 0), 4), ((0, 0), 2), ((5, 60, 7, 8, 9, 2, 1), 2)],
    ids=str,
)
def test_uneven_partitions(ps, chunks, trainers):
    results = ps.run(slowly, rows(*chunks), trainers=trainers, reassign=True, kwargs={"batch_size": 4})
    assert {clock for _, clock in results} == {2}
    assert (counted(ps, sum(chunks), 2) == 1).all()


def lingers(trainer, parts):
    """Trainer 0 stays in its first batch until somebody else has done it; then it does it, too."""
    done = []
    for batch in trainer.iterate(parts, epochs=2, batch_size=2):
        time.sleep(0.01)
        if trainer.number == 0 and not done:
            wait_until(lambda keys=batch: trainer.pull("n", keys).all())
        count(trainer, batch)
        trainer.push_async("n", batch[:1] + EPOCH * trainer.clock, 10)
        done.append(int(batch[0]))
    return done


@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_run_twice_counts_once(ps, staleness):
    first, second = ps.run(lingers, rows(80, 80), trainers=2, staleness=staleness, reassign=True)
    assert first[0] in second, "it was run twice"
    assert len(first) + len(second) < 160 + 2 * 3, "and dropped between two batches by the one that was late"
    assert (counted(ps, 160, 2) == [11, 1] * 80).all()
    assert portions(ps).twice >= 1


def pairs(trainer, parts):
    seen = set()
    for X, y in trainer.iterate(parts, epochs=3, batch_size=5, prepare=doubled):
        assert (X[:, 0] == 2 * y).all()
        time.sleep(0.02 if trainer.number else 0.001)
        count(trainer, y)
        seen.add(id(X))
    return len(seen), len(trainer._leased._foreign)


def doubled(partition):
    NOTES.append(len(partition[1]))
    X, y = partition
    return X * 2, y


def test_pairs_and_what_is_prepared(ps):
    X = da.arange(200, chunks=50).reshape(200, 1).rechunk((50, 1))
    results = ps.run(pairs, (X, da.arange(200, chunks=50)), trainers=2, reassign=True)
    assert (counted(ps, 200, 3) == 1).all()
    assert results[0][0] > 20, "it has worked on the other's"
    assert results[0][1] <= 2
    assert len(NOTES) <= 4 + 2 * 2, "prepared once each where they lie, and once where fetched"


def items(trainer, parts):
    for item in trainer.iterate(parts, prepare=list):
        count(trainer, [item])


def test_a_bag_and_prepare_without_reassign(ps):
    bag = db.from_sequence(range(30), npartitions=3)
    ps.run(items, bag, reassign=True)
    assert (counted(ps, 30, 1) == 1).all()
    ps.drop_table("n")
    ps.table("n", dtype="int64")
    ps.run(items, bag.map(lambda n: n % 10 * EPOCH), staleness=math.inf)
    assert ps.client().pull("n", 0) > 0


def around(trainer, parts):
    """What is done before, between and after the loops is the trainer's own, and counts for each of them."""
    trainer.barrier()
    trainer.push("n", [-1], 1)
    for _ in range(2):
        for batch in trainer.iterate(parts, batch_size=4):
            count(trainer, batch)
            values, certificate = trainer.pull_certified("n", batch + EPOCH * trainer.clock)
            assert (values == 1).all()
            assert all(
                last.get(trainer.client.session.acting.id, (0, 0))[0] == trainer.clock
                for last in certificate.shards.values()
            )
        trainer.push("n", [-1, -2], 1)
    trainer.push("n", [-2], 1)
    assert trainer.allreduce(1) == trainer.trainers
    return trainer.tick()


def test_the_trainers_own_pushes(ps):
    assert ps.run(around, rows(20, 30, 40), reassign=True) == [3, 3, 3]
    assert (counted(ps, 90, 2) == 1).all()
    assert ps.client().pull("n", [-1, -2]).tolist() == [9, 9]
    _, certificate = ps.client().pull_certified("n", np.arange(90))
    assert all(set(last) <= {ps.client().origin} for last in certificate.shards.values()), "portions are retired"


def breaks_off(trainer, parts):
    """Only the first batch of epoch 0; all of epoch 1."""
    for batch in trainer.iterate(parts, batch_size=1):
        count(trainer, batch)
        break
    trainer.barrier()
    trainer.tick()
    for batch in trainer.iterate(parts, batch_size=1):
        count(trainer, batch)


def test_a_loop_that_is_broken_off(ps):
    ps.run(breaks_off, rows(20, 20), trainers=2, reassign=True)
    found = counted(ps, 40, 2)
    assert found[0].tolist() == [1, *[0] * 19] * 2
    assert (found[1] == 1).all()


def raises_once(trainer, parts):
    trainer.push("n", [-1], 1)
    for batch in trainer.iterate(parts, epochs=3, batch_size=2):
        count(trainer, batch)
        if (trainer.number, trainer.clock, trainer.attempt) == (0, 1, 0):
            raise RuntimeError("once")
    return trainer.attempt


def test_a_trainer_that_is_run_again(ps):
    assert ps.run(raises_once, rows(80, 80, 80), retries=1, reassign=True) == [1, 0, 0]
    assert (counted(ps, 240, 3) == 1).all()
    assert ps.client().pull("n", [-1]) == 3


def slowly_in_the_end(trainer, parts, batch_size):
    """However busy the machine: trainer 1 gets to ask for both partitions of trainer 0."""
    for batch in trainer.iterate(parts, 2, batch_size=batch_size):
        if trainer.number == 0:
            assert REFUSED.wait(PATIENCE)
            assert FETCHED.wait(PATIENCE)
        count(trainer, batch)


def test_a_partition_that_cannot_be_fetched(ps, monkeypatch, caplog):
    fetch = FetchablePartitions.fetch
    REFUSED.clear()
    FETCHED.clear()

    def fetch_some(self, partition, peer, check):
        if partition == self.shares[0][0]:
            REFUSED.set()
            raise OSError("no such luck")
        found = fetch(self, partition, peer, check)
        FETCHED.set()
        return found

    monkeypatch.setattr(FetchablePartitions, "fetch", fetch_some)
    ps.run(slowly_in_the_end, rows(60, 60, 60, 60), trainers=2, reassign=True, kwargs={"batch_size": 3})
    assert (counted(ps, 240, 2) == 1).all()
    assert caplog.text.count("trainer 1 does without partition") == 1
    assert "no such luck" in caplog.text
    assert portions(ps).moved > 0


class Lone:
    """Trainer 1 of two, without connections; trainer 0 is played by the test."""

    number, trainers, clock = 1, 2, 0
    reached = planned = first_portion = 0
    clock_patience, time = 100.0, 0.0

    def __init__(self, lends=False):
        self.controller = WorkLeases([[0], [1]], 0, lambda count: 0, lends)
        self.meter, self.own, self.session = SimpleNamespace(rows=0), Origin(clock=0), self
        self.other(declare=[[0, 2]], next=OFFER)

    def other(self, **wish):
        return self.controller.asked(0, LeaseRequest(0, **wish), self.time)

    def lease(self, request):
        answer = self.controller.asked(self.number, decode(LeaseRequest, encode(request)), self.time)
        return decode(LeaseAnswer, encode(answer))

    def sleep(self, seconds):
        self.time += seconds

    def now(self):
        return self.time

    @contextlib.contextmanager
    def waiting(self):
        yield self.time

    @contextlib.contextmanager
    def acting_as(self, origin):
        yield

    def wait(self):
        pass

    check = wait

    def tick(self):
        self.clock += 1

    def iterate(self, fetch):
        own = [np.arange(1)]
        source = SimpleNamespace(address=None, fetch=lambda partition, peer, check: fetch(partition))
        portions = LeasedBatches(self, [[0], [1]], own, source)
        return [batch.tolist() for batch in portions.iterate(self.tick, lambda done: None, own, 1, 1, None, None)]


OFFER = PartitionsAtHand([], [])


def columns(trainer, parts):
    for batch in trainer.iterate(parts, epochs=2, batch_size=3):
        assert len(batch["id"]) == len(batch["names"]) == 3
        count(trainer, batch["id"])
    return trainer.client.session.meter.rows


def test_portions_of_columns(ps, client):
    """A dict with a list in it is cut into rows in a run with leases as well: it was one batch an epoch."""
    parts = client.scatter(
        [{"id": np.arange(6), "names": list("abcdef")}, {"id": np.arange(6, 9), "names": list("ghi")}]
    )
    assert sum(ps.run(columns, parts, reassign=True, trainers=2)) >= 18  # more: a portion that two trainers ran
    assert (counted(ps, 9, 2) == 1).all()
    parts = client.scatter([(np.arange(6), list("abcde"))])
    with pytest.raises(InputError, match=r"tuple have 6, 5 rows.*prepare=function"):
        ps.run(columns, parts, reassign=True)


@pytest.mark.parametrize("failures", [1, MAX_TRIES - 1, MAX_TRIES])
def test_what_nobody_else_will_do_is_tried_again(failures):
    trainer, tried = Lone(), []

    def fetch(partition):
        if not tried:  # the other one is done with all else, and has gone on
            trainer.other(done=[0, 1.0])
            trainer.controller.ticked(0, 1, 0)
        tried.append(trainer.time)
        if len(tried) <= failures:
            raise OSError("no such luck")
        return np.arange(2)

    if failures < MAX_TRIES:
        assert trainer.iterate(fetch) == [[0], [1]]
        assert trainer.controller.describe()["done"] == 3
    else:
        with pytest.raises(DataLostError, match=r"trainer 1 could not fetch partitions 0 \(of trainer 0, at clock 1\)"):
            trainer.iterate(fetch)
    assert tried == sorted(set(tried)), "it waits in between"
    assert len(tried) == min(failures + 1, MAX_TRIES)


@pytest.mark.parametrize("error", [OSError, RequestTimeoutError, ServerGoneError])
@pytest.mark.parametrize("comes", [True, False])
def test_what_cannot_be_fetched_is_waited_for(comes, error):
    trainer = Lone()

    def fetch(partition):
        raise error("no such luck")

    def sleep(seconds):
        trainer.time += seconds
        if comes and 10 < trainer.time < 10.1:
            trainer.other(done=[0, 10.0], next=OFFER)
            trainer.other(done=[1, 10.0], next=OFFER)

    trainer.sleep = sleep
    if comes:
        assert trainer.iterate(fetch) == [[0]]
        assert trainer.time < 11
    else:
        with pytest.raises(DataLostError, match=r"partitions 0 \(of trainer 0, at clock 0\)"):
            trainer.iterate(fetch)
        assert trainer.time == pytest.approx(100, abs=1)


def test_a_trainer_that_lends_tells_another_controller_what_it_has_declared(monkeypatch):
    def batches():
        trainer, own = Lone(lends=True), [np.arange(3)]
        source = SimpleNamespace(address="b:2", fetch=lambda partition, peer, check: pytest.fail("nobody lends it"))
        portions = LeasedBatches(trainer, [[0], [1]], own, source)
        found = portions.iterate(trainer.tick, lambda done: None, own, 1, 1, None, None)
        first = next(found).tolist()
        assert trainer.controller.peers == {1: "b:2"}
        trainer.controller = WorkLeases([[0], [1]], 0, lambda count: 0, lends=True)
        assert [first, *(batch.tolist() for batch in found)] == [[0], [1], [2]]
        assert trainer.controller.peers == {1: "b:2"}
        assert trainer.controller.describe()["done"] == 3

    batches()
    monkeypatch.setattr(LeasedBatches, "_epoch", mutant(LeasedBatches._epoch, "if answer.declare", "if False"))
    with pytest.raises(AssertionError):
        batches()


def wait_for_go():
    return GO.wait(30)


def fetches(trainer, parts, key):
    FetchablePartitions([[key]], [[0]], False).fetch(0, None, trainer._participant.check)


def test_a_fetch_ends_in_time(ps, client):
    unfinished = client.submit(wait_for_go, pure=False)
    late = r"partition 0 was not here within 0.3 s \(dps.timeouts.fetch\)"
    with dask.config.set({"dps.timeouts.fetch": "0.3 s"}), pytest.raises(RequestTimeoutError, match=late):
        ps.run(fetches, rows(1), trainers=1, args=(unfinished.key,))
    GO.set()
    assert unfinished.result()


# -- what is refused


def unlike(trainer, parts, what):
    how = {"epochs": 2, "batch_size": 5, "shuffle": 3, "prepare": None}
    how[what] = how[what] + trainer.number if how[what] else [lambda x: x, lambda x: x[:50]][trainer.number]
    for batch in trainer.iterate(parts, **how):
        time.sleep(0.001 if trainer.number else 0.05)
        count(trainer, batch)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("epochs", r"epochs=.\) in epoch 0, and trainer . iterate\(epochs=.\): with reassign=True all"),
        ("batch_size", r"batch_size=.\) in epoch 0, and trainer . iterate\(batch_size="),
        ("shuffle", r"shuffle=.\) in epoch 0, and trainer . iterate\(shuffle="),
        ("prepare", r"trainer 1 cuts partition . into 10 batches, and the trainer whose it is into 20"),
    ],
)
def test_trainers_that_iterate_unlike_each_other(ps, what, why):
    with pytest.raises(InputError, match=why):
        ps.run(unlike, rows(100, 100), trainers=2, reassign=True, args=(what,))


def wrong(trainer, parts, what):
    if what == "other partitions":
        next(trainer.iterate([part * 2 for part in parts]))
    if what == "aggregate":
        trainer.push("sums", [0], 1)
    for batch in trainer.iterate(parts, batch_size=2):
        if what == "tick":
            trainer.tick()
        if what == "barrier":
            trainer.barrier()
        if what == "iterate":
            next(trainer.iterate(parts))
        count(trainer, batch)
    next(trainer.iterate(parts, batch_size=3))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("other partitions", "takes the partitions that the function was given"),
        ("tick", "tick within the loop over trainer.iterate"),
        ("barrier", "barrier within the loop over trainer.iterate"),
        ("iterate", "iterate within the loop over trainer.iterate"),
        ("batch_size", "was cut into 5 batches before, and into 4 now"),
        ("aggregate", "table 'sums' collects a clock's pushes"),
    ],
)
def test_what_a_function_may_not_do(ps, what, why):
    if what == "aggregate":
        ps.table("sums", rows=1, aggregate="sum")
    with pytest.raises(InputError, match=why):
        ps.run(wrong, rows(10), args=(what,), reassign=True)


def test_what_cannot_be_run(ps, monkeypatch):
    with ps.open_run(1) as run, pytest.raises(InputError, match="one caller's data"):
        ps.run(slowly, rows(1), run=run, reassign=True)
    with pytest.raises(InputError, match="up to 4096 partitions, not of 4097: repartition"):
        ps.connection.call("start_run", trainers=1, staleness=0, partitions=[list(range(4097))], reassign=True)
    monkeypatch.setattr("dps.engine.driver.running.is_spark", lambda data: True)
    with pytest.raises(InputError, match=r'trainers="all" is for Dask data: .* Spark begin and end together'):
        ps.run(slowly, rows(1), trainers="all", reassign=True)


@pytest.mark.parametrize("value", ["often", 1, None])
def test_what_reassign_can_be(ps, value):
    with pytest.raises(InputError, match='reassign is True, False or "auto", not'):
        ps.run(slowly, rows(1), reassign=value)
    with pytest.raises(InputError, match='reassign is True, False or "auto", not'):
        ps.set_reassign(value)


def test_only_leased_work_is_given_to_others():
    runs = Runs("s")
    with pytest.raises(InputError, match="goes on, so neither staleness"):
        runs.set_reassign(True)
    first, second = runs.start(1, 0), runs.start(1, 0, partitions=[[0]], reassign="auto")
    with pytest.raises(InputError, match=r"run 1 was begun with reassign=False, so its clock counts batches"):
        runs.set_reassign(True, first)
    runs.set_reassign(True)
    assert [runs.runs[number].reassign for number in (first, second)] == [False, True]
    with pytest.raises(InputError, match="others do the work of a trainer that is gone"):
        RunOptions(trainers="all", reassign="auto")


# -- each trainer keeps its work until it is told otherwise


def events(ps, word):
    return [text for _, text in ps.status().events if word in text]


def test_help_is_switched_on_while_a_run_goes_on(ps):
    found = []

    def work():
        data, how = rows(60, 60), {"kwargs": {"epochs": 1, "seconds": 0.05, "batch_size": 1}, "staleness": 0}
        found.extend(ps.run(slowly, data, trainers=2, reassign="auto", progress=False, **how))

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: ps.status().runs and portions(ps).done > 33)  # the fast trainer has 32, and waits
    time.sleep(0.2)
    assert (ps.status().runs[0].reassign, portions(ps).moved, portions(ps).twice) == ("auto", 0, 0)
    ps.set_reassign(True)
    thread.join(PATIENCE)
    assert portions(ps).moved > 0
    assert found[0][0] < 60 < found[1][0]
    assert (counted(ps, 120, 1) == 1).all()
    assert events(ps, "reassign=True, before 'auto'")


def pulls_slowly(trainer, parts):
    for batch in trainer.iterate(parts, batch_size=1):
        trainer.pull("n", batch)
        time.sleep(0.1 if trainer.number == 0 else 0.025)
        count(trainer, batch)


@pytest.mark.thorough
def test_a_trainer_that_is_found_to_be_slow_is_helped(ps):
    ps.run(pulls_slowly, rows(200, 200), trainers=2, reassign="auto", staleness=0, progress=False)
    assert (counted(ps, 400, 1) == 1).all()
    assert portions(ps).moved > 0
    assert events(ps, "reassign=True, before 'auto' because trainer 0 is slow (permanent)")


def test_a_run_without_portions_leases_nothing(ps):
    def asks(trainer, parts):
        trainer._participant.lease(LeaseRequest(0))

    with pytest.raises(InputError, match="without reassign=True"):
        ps.run(asks, rows(1))


# -- checkpoints


EPOCHS = 30  # so many that the checkpoint is written before the end, also on a busy machine


def until_go(trainer, parts):
    begun = trainer._participant.reached
    NOTES.append(trainer._participant.first_portion)
    for batch in trainer.iterate(parts, epochs=EPOCHS, batch_size=2):
        if GO.is_set() and trainer.clock >= 4 and not begun:
            raise OSError("the end of this run")
        time.sleep(0.001)
        count(trainer, batch)
    return begun


@pytest.mark.thorough
def test_a_checkpoint_is_of_whole_epochs_and_a_run_goes_on(ps, tmp_path):
    failed = []

    def run():
        try:
            ps.run(until_go, rows(60, 60, 60), trainers=3, reassign=True)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: (found := ps.status().runs) and found[0].connected)
    clock = ps.checkpoint(str(tmp_path))["clock"]
    GO.set()
    thread.join(60)
    assert failed
    assert 0 < clock < EPOCHS
    ps.drop_table("n")
    assert ps.restore(str(tmp_path))["clock"] == clock
    found = counted(ps, 180, EPOCHS)
    assert (found[:clock] == 1).all()
    assert not found[clock:].any()
    late = ps.client()
    late.session.own.id = NOTES[0] + 5  # a zombie works on a portion, as it was before
    with pytest.raises(StoppedError, match="was retired"):
        late.push("n", [0], 1)
    late.close()
    with pytest.raises(InputError, match="had reassign=True, and this one has reassign=False"):
        ps.run(until_go, rows(60, 60, 60), resume=True)
    assert ps.run(until_go, rows(60, 60, 60), reassign=True, resume=True) == [clock] * 3
    assert (counted(ps, 180, EPOCHS) == 1).all()


def test_a_run_goes_on_as_it_was():
    run = Run(1, 2, 0.0)
    run.partitions, run.origin = [[0], [1]], 7
    saved = run.saved(31)
    assert saved.origins == [[7, 2]]
    assert resumed(saved, RunOptions(), 2) == [[0], [1]]
    with pytest.raises(InputError, match=r"had reassign=False, and this one has reassign=True: .* clock counts epochs"):
        resumed(saved, RunOptions(reassign=True), 2)
    older = {name: value for name, value in msgspec.to_builtins(saved).items() if name != "reassign"}
    assert resumed(msgspec.convert(older, SavedRun), RunOptions(), 2) == [[0], [1]]
    run.work_leases = WorkLeases(run.partitions, 0, allot=lambda count: 9)
    assert run.saved(31).origins == [[7, 2], [9, run.work_leases.total]]
    assert resumed(run.saved(31), RunOptions(reassign=True), 2) == [[0], [1]]


def test_nobody_of_a_run_that_is_over_is_known_to_what_is_restored():
    runs = Runs("s")
    runs.start(2, 0, partitions=[[0], [1]], reassign=True)
    checkpointer = CheckpointProcedures(runs, None, None, None, None, None, None, None, "")
    saved = msgspec.structs.replace(runs.known(1).saved(3), origins=[[500, 2]])
    assert checkpointer.origins(True, saved).ended == [[500, 2]]
    runs.stop(1, StoppedError("the end"))
    for told in (None, saved):
        origins = checkpointer.origins(True, told)
        ledger = origins.take_over(Ledger().to_arrays())
        late = (1, 2, 3, 3 + runs.known(1).work_leases.total - 1)
        assert all(map(ledger.retired, late))
        assert ledger.retired(500) == (told is not None)
        assert not ledger.retired(runs.origins.allot(1))


def tells(trainer, parts):
    for when in ("before a lease", "at the end"):
        trainer._participant._report = trainer.client.session.meter.take(
            trainer.client.session.now()
        )  # it went with a tick that was lost
        if when == "before a lease":
            trainer.client.session.meter._due = 0.0
            for _ in range(2):
                trainer._participant.lease(LeaseRequest(0))


def test_no_report_is_overtaken(ps, monkeypatch):
    reported = Run.reported

    def note(self, trainer, report, *rest):
        NOTES.append(report() if callable(report) else report)
        return reported(self, trainer, report, *rest)

    monkeypatch.setattr(Run, "reported", note)
    ps.run(tells, rows(1), trainers=1, staleness=math.inf, reassign=True)
    numbers = [report.number for report in NOTES]
    assert numbers == [1, 2, 3, 4]


# -- simulated, with faults

TROUBLE = Faults(
    crashes=0.5,
    twins=0.5,
    breaks=1.0,
    stops=0.5,
    moves=0.2,
    repeats=0.05,
    slow=0.3,
    outage=0.3,
    restart=0.5,
    span=10.0,
    keep_alive=5.0,
)


def simulated(trainer, parts):
    for batch in trainer.iterate(parts, epochs=3, batch_size=2, shuffle=5):
        trainer.client.session.sleep(0.01 * trainer._host.slowness)
        trainer.push_async("n", batch[:1] + EPOCH * trainer.clock, 1)
        count(trainer, batch[1:])
    return trainer.clock


@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_faults_of_all_kinds(staleness):
    pytest.importorskip("greenlet")
    seen = {"done": 0, "twice": 0, "moved": 0, "attempts": 0}
    for seed in range(SEEDS):
        with Simulation(seed=seed, servers=3, trainers=3, copies=2, faults=TROUBLE) as sim:
            sim.table("n", dtype="int64", shards=4)
            data = np.split(np.arange(300), [40, 45, 120, 200, 280])
            assert sim.run(simulated, data, staleness=staleness, reassign=True) == [3, 3, 3]
            about = state_of(sim._controller.runs, 1)
            for what in ("done", "twice", "moved"):
                seen[what] += getattr(about.portions, what)
            seen["attempts"] += sum(about.attempts)
            found = sim.client().pull("n", np.add.outer(EPOCH * np.arange(3), np.arange(300)))
            assert (found == 1).all(), f"seed {seed}"
    assert min(seen.values()) > 0
    assert seen["attempts"] > 3 * SEEDS, "some were run again"


# -- a real process, which is killed


def dies(trainer, parts, folder):
    mark = pathlib.Path(folder, "died")
    for n, batch in enumerate(trainer.iterate(parts, epochs=3, batch_size=2)):
        time.sleep(0.002)
        trainer.push("n", batch[:1] + EPOCH * trainer.clock, 1)
        if trainer.number == 1 and trainer.clock == 1 and n > 5 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.push("n", batch[1:] + EPOCH * trainer.clock, 1)
    return trainer.clock


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("staleness", [math.inf, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_trainer_and_its_portions(tmp_path, staleness):
    with (
        dps.LocalCluster(trainers=3, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n", dtype="int64")
        data = client.persist(rows(100, 100, 100, 100))
        assert ps.run(dies, data, trainers=2, staleness=staleness, args=(str(tmp_path),), reassign=True) == [3, 3]
        (run,) = ps.status().runs
        assert run.attempts == [1, 2]
        assert (counted(ps, 400, 3) == 1).all()
