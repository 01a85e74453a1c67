"""Servers' processes die or stop during training: with copies a call only waits, without copies it raises an error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from distributed import Client
from servers import wait_until

import dps
from dps.errors import DataLostError

pytestmark = pytest.mark.processes
KEYS = np.arange(500)


@contextlib.contextmanager
def started(servers: int, spare: int = 0, **options):
    """A parameter server with a table "n" of counts, on that many servers and spare workers for more."""
    with (
        dps.LocalCluster(servers=servers + spare, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=servers) as ps,
    ):
        ps.table("n", **{"dtype": "int64", "copies": 2, **options})
        yield client, ps


class Load:
    """Clients that count up rows until told to stop, and what was acknowledged to them."""

    def __init__(self, ps, count: int = 2):
        self.total, self.done, self.errors, self.longest = np.zeros(len(KEYS), np.int64), [0] * count, [], 0.0
        self._over, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(dps.Client(ps.ticket), n)) for n in range(count)]

    def _run(self, client, number):
        rng, total = np.random.default_rng(number), np.zeros(len(KEYS), np.int64)
        try:
            with client:
                while not self._over.is_set():
                    began = time.monotonic()
                    keys = rng.choice(KEYS, 100)
                    client.push_async("n", keys, 1)
                    np.add.at(total, keys, 1)
                    if not rng.integers(5):
                        values = client.pull("n", KEYS)
                        assert (values >= total).all(), "what this client pushed is in what it pulls"
                    self.done[number] += 1
                    self.longest = max(self.longest, time.monotonic() - began)
                client.wait()
        except BaseException as error:
            self.errors.append(error)
        with self._lock:
            self.total += total

    def more(self, count: int = 50) -> None:
        before = list(self.done)
        wait_until(lambda: self.errors or all(n - b >= count for n, b in zip(self.done, before, strict=True)))

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        self.more()
        return self

    def __exit__(self, *exc):
        self._over.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors


def check(ps, load: Load) -> None:
    with dps.Client(ps.ticket) as client:
        np.testing.assert_array_equal(client.pull("n", KEYS), load.total)


def pid_of(client, ps, number: int) -> int:
    (address,) = [server.worker for server in ps.status().servers if server.number == number]
    return client.run(os.getpid, workers=[address])[address]


def chains(ps) -> list[list[int]]:
    return ps.status().tables["n"].chains


def full(ps, copies: int = 2) -> bool:
    """Whether every shard has its replicas, on servers that are up, and no shard moves."""
    status = ps.status()
    up = {server.number for server in status.servers if server.alive}
    table = status.tables["n"]
    return all(len(c) == copies and set(c) <= up for c in table.chains) and not any(
        joiner is not None for joiner in table.joiners
    )


def test_a_primary_is_killed_under_load_again_and_again():
    with started(2) as (client, ps):
        with Load(ps) as load:
            for victim in (0, 1):
                os.kill(pid_of(client, ps, victim), signal.SIGKILL)
                load.more()
                wait_until(lambda victim=victim: full(ps) and not any(victim in c for c in chains(ps)))
                load.more()
            assert {n for chain in chains(ps) for n in chain} == {2, 3}, "new servers, with new numbers"
        check(ps, load)


@pytest.mark.thorough
def test_a_primary_is_stopped_under_load_and_wakes_up():
    with started(3) as (client, ps):
        with Load(ps) as load:
            pid = pid_of(client, ps, 0)
            os.kill(pid, signal.SIGSTOP)
            try:
                threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
                wait_until(lambda: all(thread.status() == psutil.STATUS_STOPPED for thread in threads))
                wait_until(lambda: not any(0 in chain for chain in chains(ps)))
                load.more()
            finally:
                os.kill(pid, signal.SIGCONT)
            load.more()
            wait_until(lambda: full(ps) and any(0 in chain for chain in chains(ps)))
            load.more()
        check(ps, load)


@pytest.mark.thorough
def test_a_run_ends_although_a_server_stands_still():
    with started(3) as (client, ps):
        ps.table("sums", dtype="int64", aggregate="sum", copies=2)
        pid = pid_of(client, ps, 0)

        def train(trainer, parts):
            trainer.push("sums", KEYS, np.ones(len(KEYS), np.int64))
            trainer.barrier()
            if trainer.number == 0:  # all work is done
                os.kill(pid, signal.SIGSTOP)
            return trainer.number

        try:
            assert ps.run(train, [1, 2]) == [0, 1]
            with dps.Client(ps.ticket) as other:
                assert other.pull("sums", KEYS).tolist() == [2] * len(KEYS)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: full(ps))


@pytest.mark.slow
def test_who_wakes_up_after_it_was_replaced_is_one_too_many():
    with started(2, spare=1) as (client, ps):
        with Load(ps) as load:
            pid = pid_of(client, ps, 0)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: full(ps) and any(2 in chain for chain in chains(ps)), 60)
            finally:
                os.kill(pid, signal.SIGCONT)
            load.more()
            wait_until(lambda: len(ps.status().servers) == 2 and full(ps), 60)
            load.more()
        check(ps, load)


def count_up(trainer, parts):
    for part in trainer.iterate(parts):
        trainer.push("n", [part % 50, 50 + trainer.number], 1)
        time.sleep(0.002)


@pytest.mark.slow
def test_servers_come_and_go_while_trainers_train():
    with started(2, spare=2, shards=16) as (client, ps):
        number = 1500
        parts = client.scatter(list(range(2 * number)))
        errors = []

        def train():
            try:
                ps.run(count_up, parts)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        with contextlib.suppress(Exception):
            wait_until(lambda: ps.status().runs)
        ps.scale(4)
        wait_until(lambda: errors or (full(ps) and len({n for c in chains(ps) for n in c}) == 4))
        assert thread.is_alive() or not errors
        ps.retire(0)
        wait_until(lambda: errors or (full(ps) and not any(0 in c for c in chains(ps))))
        ps.scale(2)
        wait_until(lambda: errors or (full(ps) and len({n for c in chains(ps) for n in c}) == 2))
        thread.join(120)
        assert not errors, errors
        assert not thread.is_alive()
        with dps.Client(ps.ticket) as reader:
            assert (reader.pull("n", np.arange(50)) == 2 * number // 50).all()
            assert reader.pull("n", [50, 51]).sum() == 2 * number


@pytest.mark.thorough
def test_with_one_copy_what_is_lost_is_said_to_be_lost():
    with started(2, copies=1) as (client, ps):
        reader = ps.client()
        reader.push("n", KEYS, 3)
        os.kill(pid_of(client, ps, 1), signal.SIGKILL)
        until = time.monotonic() + 10
        seen = set()
        while time.monotonic() < until and len(seen) < 20:
            for key in KEYS[:40]:
                with contextlib.suppress(DataLostError):
                    seen.add(int(key))
                    assert reader.pull("n", [key])[0] == 3, "never zeros"
                    seen.discard(int(key))
        assert seen
        wait_until(lambda: sum(server.alive for server in ps.status().servers) == 2)
        for key in KEYS[:40]:
            if int(key) in seen:
                with pytest.raises(
                    DataLostError, match=rf"table 'n': the last copy .* with it 1 keys \({key}\); .*checkp"
                ):
                    reader.pull("n", [key])
            else:
                assert reader.pull("n", [key])[0] == 3
