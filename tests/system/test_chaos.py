"""Random faults on real processes: whatever is killed or stopped, what was acknowledged is in the tables, once.

The seed decides what happens to whom, and after what pause; it is printed. CHAOS_SEED repeats it, CHAOS_SECONDS is how
long the slow tests go on (`make chaos-processes`).
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from chaos import (
    LONG,
    SECONDS,
    SEED,
    SERVERS,
    SHORT,
    TRAINERS,
    Chaos,
    chains,
    is_whole,
    pid_of,
    ready,
    steps_amid_chaos,
)
from servers import wait_until

import dps
from dps.engine.training.tasks import TrainerJob, train
from dps.errors import DataLostError

pytestmark = pytest.mark.processes

SPACE, KEYS, OWN, ALL = 5_000, 40, 10**6, 10**7


# -- the job: what a trainer pushes is a function of its number and its clock


def keys_of(number, clock):
    return np.random.default_rng((number, clock)).integers(0, SPACE, KEYS)  # with repeats


def push_step(trainer, base):
    """Four pushes of one clock; and what one has pushed oneself is there, exactly."""
    number, clock = trainer.number, trainer.clock
    trainer.push_async("n", keys_of(number, clock), 1)
    trainer.push_async("n", [ALL], 1)
    own = trainer.push_pull("n", [OWN + number], 1)
    assert own[0] == base + clock + 1, f"trainer {number} has pushed {base + clock + 1} times, and reads {own[0]}"
    trainer.push("n", keys_of(number, clock), [clock] * KEYS)
    found = trainer.pull("n", [OWN + number])[0]
    if found > base + clock + 1:  # a later attempt is ahead, if the servers refuse the pushes of this one: StoppedError
        trainer.push("n", [ALL], 0)
    assert found == base + clock + 1, f"trainer {number} has pushed {base + clock + 1} times, and reads {found}"


def count_until_told(trainer, parts):
    """Steps until the table says stop; how many there were."""
    for _ in trainer.iterate(parts[:1], epochs=10**7):
        push_step(trainer, 0)
        if trainer.pull("stop", [0])[0]:
            return trainer.clock + 1


def count_steps(trainer, parts, steps, base, pause):
    for _ in trainer.iterate(parts, epochs=steps):
        push_step(trainer, base)
        time.sleep(pause)
    return trainer.attempt


def sums(jobs):
    """The table after (trainer, steps) of `jobs`, key by key."""
    keys, values = [np.array([ALL])], [np.array([sum(steps for _, steps in jobs)])]
    for number, steps in jobs:
        for clock in range(steps):
            keys.append(keys_of(number, clock))
            values.append(np.full(KEYS, 1 + clock))
        keys.append(np.array([OWN + number]))
        values.append(np.array([steps]))
    distinct, where = np.unique(np.concatenate(keys), return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, where, np.concatenate(values))
    return distinct, totals


def assert_table(ps, jobs):
    keys, values = sums(jobs)
    pulled = ps.client().pull("n", keys)
    wrong = np.flatnonzero(pulled != values)
    assert not len(wrong), f"{len(wrong)} of {len(keys)} keys, e.g. {keys[wrong[:5]]}: {(pulled - values)[wrong[:5]]}"
    status = ps.status()
    assert sum(server.tables["n"].rows for server in status.servers if server.alive) == len(keys)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("copies", "seconds"),
    [
        pytest.param(3, SHORT, id="short"),
        pytest.param(2, SECONDS, id="2-long", marks=LONG),
        pytest.param(3, SECONDS, id="3-long", marks=LONG),
    ],
)
def test_servers_and_trainers_are_killed_and_stopped(copies, seconds):
    seed = SEED + copies
    print(f"seed {seed}")
    staleness = random.Random(seed).choice([0, 2, math.inf])
    with ready(copies) as (client, ps):
        steps = steps_amid_chaos(client, ps, seed, copies, seconds, count_until_told, staleness)
        assert_table(ps, list(enumerate(steps)))


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [pytest.param(SHORT, id="short"), pytest.param(SECONDS, id="long", marks=LONG)])
def test_every_task_runs_twice_while_servers_are_killed_and_stopped(seconds):
    """A second attempt of each trainer, in another process, begins while the first is at work."""
    seed = SEED
    print(f"seed {seed}")
    rng = random.Random(seed)
    steps, rounds = 150, 0
    with ready(copies=2, trainers=2 * TRAINERS) as (client, ps):
        free = sorted(w for w, info in client.scheduler_info(n_workers=-1)["workers"].items() if not info["resources"])
        chaos = Chaos(client, ps, seed, 2, kill_trainers=False)
        until = time.monotonic() + seconds
        while time.monotonic() < until or not chaos.suffered():
            run = ps.connection.call("start_run", trainers=TRAINERS, staleness=1)
            job = TrainerJob(ps.ticket, run, count_steps, (steps, steps * rounds, 0.005), {}, 0)
            first = [client.submit(train, job, n, [n], [n], workers=[free[n]], pure=False) for n in range(TRAINERS)]
            wait_until(lambda: ps.status().runs[0].joined == TRAINERS)
            time.sleep(rng.uniform(0.0, 1.0))
            others = free[TRAINERS:]
            second = [client.submit(train, job, n, [n], [n], workers=[others[n]], pure=False) for n in range(TRAINERS)]
            client.gather([*first, *second])
            ps.connection.call("settle", keep=True)
            rounds += 1
        chaos.end()
        assert_table(ps, list(enumerate([steps] * TRAINERS)) * rounds)


# -- large ops: pushes, deletions, functions and vectors of many rows, one after the other, each of them exactly once


@dps.function(changes=True)
def triple(rows):
    rows.values *= 3
    return int(rows.values.sum())


@dps.function
def total(rows):
    return int(rows.values.sum())


def is_listed(rows, first, step):
    return (rows.keys >= first) & (rows.keys % step == 0)


class LargeOps:
    """Ops of many rows on a table and a vector of one client, and what both hold, by numpy."""

    def __init__(self, ps, name, rows, seed):
        self.ps, self.rows, self.rng, self.random = ps, rows, np.random.default_rng(seed), random.Random(seed)
        self.client = dps.Client(ps.ticket)
        self.table = ps.table(name, dtype="int64").name
        self.values, self.exists = np.zeros(rows, np.int64), np.zeros(rows, bool)
        self.vector, self.numbers = dps.arrays.on(ps).zeros(rows), np.zeros(rows)
        ops = self.push, self.assign, self.delete, self.delete_where, self.call, self.read, self.compute, self.look
        self.done = dict.fromkeys(ops, 0)

    def step(self):
        op = self.random.choice([*self.done])
        op()
        self.done[op] += 1

    def some(self):
        """All keys, or those of a random stretch."""
        first, last = sorted(self.random.randint(0, self.rows) for _ in range(2))
        return np.arange(first, last) if self.random.random() < 0.5 else np.arange(self.rows)

    def push(self):
        keys = self.some()
        more = self.rng.integers(-5, 6, len(keys))
        self.client.push(self.table, keys, more)
        self.values[keys] += more
        self.exists[keys] = True

    def assign(self):
        keys = self.some()
        self.client.assign(self.table, keys, keys % 1000)
        self.values[keys], self.exists[keys] = keys % 1000, True

    def delete(self):
        keys = self.some()
        self.client.delete(self.table, keys)
        self.values[keys], self.exists[keys] = 0, False

    def delete_where(self):
        first, step, keys = self.random.randint(0, self.rows), self.random.randint(1, 4), np.arange(self.rows)
        gone = self.exists & (keys >= first) & (keys % step == 0)
        assert self.ps.delete_where(self.table, is_listed, first=first, step=step) == gone.sum()
        self.values[gone], self.exists[gone] = 0, False

    def call(self):
        self.values *= 3
        assert sum(self.ps.call(triple, self.table)) == self.values.sum()
        if abs(self.values).max() > 2**40:
            self.client.assign(self.table, np.arange(self.rows), np.zeros(self.rows, np.int64))
            self.values[:], self.exists[:] = 0, True

    def read(self):
        assert sum(self.ps.call(total, self.table)) == self.values.sum()

    def compute(self):
        number = self.random.randint(1, 5)
        self.vector += number
        self.vector[: self.rows // 2] *= -1
        self.numbers += number
        self.numbers[: self.rows // 2] *= -1
        assert self.vector.sum() == self.numbers.sum()

    def look(self):
        keys = self.some()
        assert np.array_equal(self.client.pull(self.table, keys), self.values[keys])
        assert len(self.ps.tables()[self.table]) == self.exists.sum()
        assert np.array_equal(np.asarray(self.vector), self.numbers)

    def close(self):
        self.look()
        self.client.close()
        return {op.__name__: count for op, count in self.done.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows", "seconds"),
    [
        pytest.param(100_000, SHORT, id="short"),
        pytest.param(10**6, SECONDS, id="long", marks=LONG),
    ],
)
def test_large_ops_while_servers_are_killed_and_stopped(rows, seconds):
    """Each op counts once, whole, on all its rows: what it returns, and all that is there afterwards, is exact."""
    print(f"seed {SEED}")
    with ready(copies=2) as (client, ps):
        for function in (triple, total):
            ps.register(function)
        chaos = Chaos(client, ps, SEED, 2, kill_trainers=False, merges=False)  # a function of rows might be refused
        errors, counts = [], []

        def work(n):
            ops = LargeOps(ps, f"rows-{n}", rows, SEED + n)
            try:
                while (time.monotonic() < until or not chaos.suffered()) and not errors:
                    ops.step()
                counts.append(ops.close())
            except BaseException as error:
                errors.append(error)
                raise

        until = time.monotonic() + seconds
        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        chaos.over.set()
        assert not errors
        chaos.end()
        print(f"ops: {counts}")


# -- the last copy; TLS


def serving(ps, shard, copy=0, table="n"):
    """The worker of one copy of a shard."""
    alive, tables = chains(ps)
    (chain,) = [t.chains[shard] for t in tables if t.spec["name"] == table]
    return alive[chain[copy]]


def test_the_last_copy_is_restored_from_a_checkpoint(tmp_path):
    with ready(copies=2, trainers=0) as (client, ps):
        keys = np.arange(1000)
        ps.client().push("n", keys, keys)
        saved = ps.checkpoint(str(tmp_path))
        ps.client().push("n", keys, 1)
        for pid in [pid_of(client, serving(ps, 0, copy)) for copy in (0, 1)]:
            os.kill(pid, signal.SIGKILL)
        words = rf"table 'n': the last copy of shards? .* is gone, and with it \d+ keys \(.*{saved['name']}"
        with pytest.raises(DataLostError, match=words):
            ps.client().pull("n", keys)
        with pytest.raises(DataLostError, match=words):
            ps.client().push("n", keys, 1)
        wait_until(lambda: ps.servers() >= SERVERS)
        with pytest.raises(DataLostError, match=words):  # never zeros, although there are servers again
            ps.client().pull("n", keys)
        ps.restore(str(tmp_path))
        assert (ps.client().pull("n", keys) == keys).all()
        wait_until(lambda: is_whole(ps))
        os.kill(pid_of(client, serving(ps, 0)), signal.SIGKILL)
        assert (ps.client().pull("n", keys) == keys).all()


@pytest.mark.tls
def test_another_server_takes_over_on_a_tls_cluster():
    with ready(copies=2, trainers=0, security=True) as (client, ps):
        keys, done, over, errors = np.arange(500), [0], threading.Event(), []

        def push():
            try:
                with dps.Client(ps.ticket) as pusher:
                    while not over.is_set():
                        pusher.push("n", keys, 1)
                        done[0] += 1
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        try:
            for round_ in range(2):
                wait_until(lambda: done[0] > 20 * (round_ + 1) or errors)  # noqa: B023
                victim = serving(ps, 0)
                assert victim.startswith("tls://")
                os.kill(pid_of(client, victim), signal.SIGKILL)
                before = done[0]
                wait_until(lambda: done[0] > before + 10 or errors)  # noqa: B023
                wait_until(lambda: victim not in chains(ps)[0].values() and is_whole(ps))  # noqa: B023
        finally:
            over.set()
            thread.join(60)
        assert not errors, errors
        assert (ps.client().pull("n", keys) == done[0]).all()
