"""Random faults on real processes, the scheduler among them: each push that was acknowledged counts, once.

Clients outside Dask push and pull meanwhile, and keep their own account. The seed decides what happens, and is printed.
CHAOS_SEED repeats it, CHAOS_SECONDS is how long the slow tests go on (`make chaos-processes`).
"""

from __future__ import annotations

import collections

import numpy as np
import psutil
import pytest
from chaos import LONG, SECONDS, SEED, SERVERS
from copies import wait_until_copies_are_equal
from counting_clients import CountingClients, push_round, sums
from scheduler_chaos import SchedulerChaos
from servers import PATIENCE, wait_until
from shell import Shell
from survivors import Survivors

import dps

CLIENTS, SHORT = 2, 10.0
# Tables -> copies of their rows. Only without faults of servers may there be one copy.
SAFE, UNSAFE = {"two": 2, "three": 3}, {"one": 1, "two": 2}


def assert_table(client, table, counts):
    """The table is the sum of all pushes that were acknowledged."""
    keys, values = sums(counts)
    pulled = client.pull(table, keys)
    wrong = np.flatnonzero(pulled != values)
    assert not len(wrong), f"{len(wrong)} of {len(keys)} keys, e.g. {keys[wrong[:5]]}: {(pulled - values)[wrong[:5]]}"
    return len(keys)


class Memory:
    """A client whose table is in this process. It does to its pushes what `push` says: each counts so often."""

    def __init__(self, often):
        self.often, self.counts, self.pushes = often, collections.Counter(), 0

    def push(self, table, keys, values):
        self.pushes += 1
        for key in keys:
            self.counts[int(key)] += values * self.often(self.pushes)

    push_async = push

    def pull(self, table, keys):
        return np.array([self.counts[int(key)] for key in keys])

    def wait(self):
        pass


@pytest.mark.parametrize("number", range(1, 4))  # of the round's pushes to a table
@pytest.mark.parametrize("often", [0, 1, 2])
def test_a_push_that_is_lost_or_counts_twice_is_noticed(often, number):
    client = Memory(lambda push: often if push == 9 + number else 1)

    def count():
        for n in range(5):
            push_round(client, 7, n, ["two"])
        assert_table(client, "two", [0] * 7 + [5])

    if often == 1:
        count()
    else:
        with pytest.raises(AssertionError, match=r"has pushed 4 times|1 of \d+ keys|4\d of \d+ keys|3\d of \d+ keys"):
            count()


def processes_in(folder):
    """The processes that were started there, and their descendants, also those whose parents have ended."""
    return [
        (process.pid, process.info["cmdline"])
        for process in psutil.process_iter(["cwd", "cmdline", "status"])
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("faulty_servers", "seconds"),
    [
        pytest.param(False, SHORT, id="schedulers-short"),
        pytest.param(True, SHORT, id="servers-too-short"),
        pytest.param(False, SECONDS, id="schedulers-long", marks=LONG),
        pytest.param(True, SECONDS, id="servers-too-long", marks=LONG),
    ],
)
def test_schedulers_are_killed_and_stopped(tmp_path, faulty_servers, seconds):
    seed = SEED + faulty_servers
    print(f"seed {seed}")
    tables = SAFE if faulty_servers else UNSAFE
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, servers=SERVERS)
        chaos = SchedulerChaos(cluster, seed, faulty_servers)
        try:
            chaos.ps = dps.ParameterServer(chaos.client, servers=SERVERS)
            for table, copies in tables.items():
                chaos.ps.table(table, dtype="int64", copies=copies)
            with CountingClients(chaos.ps.ticket, CLIENTS, list(tables)) as clients:
                chaos.run(seconds, clients.failed)
                reports = clients.end(2 * PATIENCE)
            print(f"{chaos.count} faults, {chaos.lost} schedulers killed")
            for report in reports:
                print(f"{report}: its longest round began at {report.began - chaos.began:.2f}")
            assert not [report.error for report in reports if report.error]
            for table in tables:
                rows = assert_table(chaos.ps.client(), table, [report.pushes for report in reports])
                assert len(chaos.ps.tables()[table]) == rows
                wait_until_copies_are_equal(chaos.ps, table)
            chaos.close()
            cluster.end()
        finally:
            print("\n".join(chaos.story))
            chaos.close()
        wait_until(lambda: not processes_in(tmp_path), what=f"left behind: {processes_in(tmp_path)}")
