"""Random faults on real processes: servers are killed and stopped, trainers are killed, servers come and go.

The seed decides what happens to whom, and after what pause. CHAOS_SEED repeats it, CHAOS_SECONDS is how long the slow
tests go on (`make chaos-processes`).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time

import dask
import pytest
from distributed import Client
from servers import wait_until

import dps
from dps.errors import InputError, RequestTimeoutError

__all__ = ["LONG", "SECONDS", "SEED", "SERVERS", "SHORT", "TRAINERS", "Chaos", "chains", "is_whole", "pid_of", "ready"]
__all__ += ["steps_amid_chaos"]

SEED = int(os.environ.get("CHAOS_SEED", time.time_ns() % 10**9))
SECONDS = float(os.environ.get("CHAOS_SECONDS", "600"))
SERVERS, WORKERS, TRAINERS = 3, 4, 2
SHORT = 4.0
MOST_SHARDS = 8  # of a table that is split
LONG = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 300)]


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


def can_be_merged(spec):
    return not (spec["shards"] == 1 or spec["aggregate"] or spec.keys() & {"fixed_shards", "life"})


KINDS = ("kill", "stop", "scale", "split", "merge", "rebalance", "trainer")


class Chaos(threading.Thread):
    """Kills and stops servers (never all copies of a shard), kills trainers, scales up and down, splits and merges
    tables, evens the load out; until `end`."""

    def __init__(self, client, ps, seed, copies, kill_trainers, merges=True):
        super().__init__(name="chaos")
        self.client, self.ps, self.copies = client, ps, copies
        self.random, self.over = random.Random(seed), threading.Event()
        self.serving = {server.worker for server in ps.connection.describe().servers}
        self.faults, self.error = dict.fromkeys(KINDS, 0), None
        self.choices = [*KINDS[:-1], "kill", "stop", *(["trainer"] if kill_trainers else [])]
        if not merges:
            self.choices.remove("merge")
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

    def split(self):
        """Cut a table into more shards; at half of the times, kill servers meanwhile."""
        tables = [table.spec for table in chains(self.ps)[1] if table.spec["shards"] <= MOST_SHARDS]
        names = [spec["name"] for spec in tables if spec["rows"] != 1 and "fixed_shards" not in spec]
        if not names:
            self.scale()
            return
        name = self.random.choice(names)
        spec = next(spec for spec in tables if spec["name"] == name)
        alone = "life" not in spec and self.random.random() < 0.5
        shard = self.random.randrange(spec["shards"]) if alone else None
        self._perhaps_killing(lambda: self.ps.split(name, shard=shard), 0.1)

    def merge(self):
        """Cut a table into fewer shards; at half of the times, kill servers meanwhile."""
        names = [table.spec["name"] for table in chains(self.ps)[1] if can_be_merged(table.spec)]
        if not names:
            self.split()
            return
        name = self.random.choice(names)
        spec = next(table.spec for table in chains(self.ps)[1] if table.spec["name"] == name)
        alone = spec.get("edges") or spec["shards"] % 2 or self.random.random() < 0.5
        shard = self.random.randrange(spec["shards"] - 1) if alone else None
        self._perhaps_killing(lambda: self.ps.merge(name, shard=shard, timeout=30.0), 2.0)

    def rebalance(self):
        """Even out what servers have worked; at half of the times, kill servers meanwhile."""
        self._perhaps_killing(lambda: self.ps.rebalance(timeout=5.0), 2.0)

    def _perhaps_killing(self, call, seconds):
        def run():
            # Servers fail again and again; or the table has other shards by now, because of its load.
            with contextlib.suppress(RequestTimeoutError, InputError):
                call()

        calling = threading.Thread(target=run, name="calling")
        calling.start()
        if self.random.random() < 0.5:
            time.sleep(self.random.uniform(0.0, seconds))
            self.kill()
        calling.join()

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


def steps_amid_chaos(client, ps, seed, copies, seconds, work, staleness):
    """The steps of each trainer that does `work` until there was a fault, and so many seconds are over."""
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
        steps = ps.run(work, parts, trainers=TRAINERS, staleness=staleness, progress=False)
    finally:
        timer.cancel()
        timer.join()
        chaos.over.set()
    chaos.end()
    print(f"staleness {staleness}, steps {steps}")
    return steps
