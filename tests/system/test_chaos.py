"""Random faults on real processes: whatever is killed or stopped, what was acknowledged is in the tables, once.

The seed decides what happens to whom, and after what pause; it is printed. CHAOS_SEED repeats it, CHAOS_SECONDS is how
long the slow tests go on (`make chaos-processes`).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import threading
import time

import dask
import numpy as np
import pytest
from distributed import Client
from servers import wait_until

import dps
from dps.engine.training.tasks import TrainerJob, train
from dps.errors import DataLostError

pytestmark = pytest.mark.processes

SEED = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10**9))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
SERVERS, WORKERS, TRAINERS = 3, 4, 2
SPACE, KEYS, OWN, ALL = 5_000, 40, 10**6, 10**7
SHORT = 4.0
LONG = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


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


# -- the faults


def chains(ps):
    info = ps.connection.describe()
    return {server.number: server.worker for server in info.servers if server.alive}, info.tables.values()


def is_whole(ps):
    """All chains are full, of servers that are up, and there are as many servers as there should be."""
    alive, tables = chains(ps)
    return len(alive) >= SERVERS and all(
        joiner is None and len(chain) >= table.spec["copies"] and alive.keys() >= set(chain)
        for table in tables
        for chain, joiner in zip(table.chains, table.joiners, strict=True)
    )


def pid_of(client, worker):
    return client.run(os.getpid, workers=[worker])[worker]


class Chaos(threading.Thread):
    """Kills and stops servers (never all copies of a shard), kills trainers, scales up and down; until `end`."""

    def __init__(self, client, ps, seed, copies, kill_trainers):
        super().__init__(name="chaos")
        self.client, self.ps, self.copies = client, ps, copies
        self.random, self.over = random.Random(seed), threading.Event()
        self.serving = {server.worker for server in ps.connection.describe().servers}
        self.faults, self.error = dict.fromkeys(("kill", "stop", "scale", "trainer"), 0), None
        self.choices = ["kill", "kill", "stop", "stop", "scale", *(["trainer"] if kill_trainers else [])]
        self.start()

    def run(self):
        try:
            fault = "start"
            while not self.over.wait(self.random.uniform(0.1, 1.0)):
                wait_until(lambda: is_whole(self.ps) or self.over.is_set(), what=f"not whole again after {fault}")
                if self.over.is_set():  # perhaps not whole: another kill might take the last copy
                    return
                fault = self.random.choice(self.choices)
                getattr(self, fault)()
                self.faults[fault] += 1
        except BaseException as error:
            self.error = error

    def end(self):
        self.over.set()
        self.join(120)
        assert not self.is_alive(), "hangs"
        print(f"faults: {self.faults}")
        if self.error is not None:
            raise self.error
        assert sum(self.faults.values()) > 0

    def suffered(self):
        """Whether there has been a fault: a busy machine may take long to be whole, and ready for the first."""
        return sum(self.faults.values()) > 0 or self.error is not None

    def victims(self):
        """Up to copies - 1 servers, and their processes."""
        alive, _ = chains(self.ps)
        count = self.random.randint(1, self.copies - 1)
        return {n: pid_of(self.client, alive[n]) for n in self.random.sample(sorted(alive), count)}

    def kill(self):
        victims = self.victims()
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not victims.keys() & chains(self.ps)[0].keys(), what=f"{victims} were not missed")

    def stop(self):
        pids, seconds = self.victims().values(), self.random.choice([0.05, 0.5, 2.2, 4.0])
        with contextlib.ExitStack() as stack:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
                stack.callback(os.kill, pid, signal.SIGCONT)
            time.sleep(seconds)

    def scale(self):
        self.ps.scale(self.random.randint(SERVERS, WORKERS))

    def trainer(self):
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        trainers = sorted(w for w, info in workers.items() if not info["resources"].get("dps"))
        if len(trainers) == TRAINERS:  # else the last one is not back yet
            os.kill(pid_of(self.client, self.random.choice(trainers)), signal.SIGKILL)


@contextlib.contextmanager
def ready(copies, trainers=TRAINERS, **options):
    """A cluster with servers to spare, a parameter server, a table that counts."""
    limits = {"distributed.scheduler.allowed-failures": 10**6, "dps.timeouts.stop": "60 s"}
    limits |= {"distributed.deploy.lost-worker-timeout": "120 s"}  # a busy machine is slow to start a process again
    with (
        dask.config.set(limits),
        dps.LocalCluster(servers=WORKERS, trainers=trainers, dashboard_address=None, **options) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=SERVERS, copies=copies) as ps,
    ):
        ps.table("n", dtype="int64")
        ps.table("stop", rows=1, dtype="int64")
        yield client, ps


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
        chaos = Chaos(client, ps, seed, copies, kill_trainers=True)

        def stop():
            try:
                wait_until(chaos.suffered)
            finally:
                ps.client().assign("stop", [0], 1)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            parts = [dask.delayed(n) for n in range(TRAINERS)]
            steps = ps.run(count_until_told, parts, trainers=TRAINERS, staleness=staleness, progress=False)
        finally:
            timer.cancel()
            timer.join()
            chaos.over.set()
        chaos.end()
        print(f"staleness {staleness}, steps {steps}")
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
        chaos = Chaos(client, ps, SEED, 2, kill_trainers=False)
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
