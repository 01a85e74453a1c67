"""Trainers of some processes of a machine that sum their pushes, while a server and then a trainers' process dies."""

from __future__ import annotations

import os
import re
import signal
import time

import numpy as np
import pytest
from distributed import Client
from kills import killed_at, pids_of
from servers import wait_until

import dps

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
TRAINERS, CLOCKS, DIES = 4, 60, 30
KEYS = np.arange(300)


def counted(trainer, partitions, dies):
    """Count in two tables at each clock. The process of trainer 1 is killed in the middle of one, once."""
    for clock in trainer.iterate(range(CLOCKS)):
        time.sleep(0.01)
        keys = KEYS[50 * trainer.number : 50 * trainer.number + 150]
        trainer.push("n", keys, 1)
        if dies and (trainer.number, trainer.attempt, clock) == (1, 0, DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.push({"n": (keys[:10], 1), "sums": (keys, np.full(len(keys), 2))})
    return trainer.attempt, os.getpid()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dies", ["a server", "a process of trainers"])
def test_each_push_of_a_sum_counts_once(dies, threads):
    trainers = TRAINERS // threads + 1  # one more process, in which a trainer that was lost goes on
    with (
        dps.LocalCluster(servers=3, trainers=trainers, threads_per_trainer=threads, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2) as ps,
    ):
        ps.table("n", dtype="int64", copies=2, wire=dps.Wire(merge=True))
        ps.table("sums", dtype="int64", copies=2, wire=dps.Wire(merge=True), aggregate="sum")
        kills = {}
        if dies == "a server":
            kills = {DIES: pids_of(ps)[0][0]}
        with killed_at(ps, kills):
            told = ps.run(counted, range(TRAINERS), staleness=0, args=(dies != "a server",), progress=False)
        assert (len({pid for _, pid in told}) < TRAINERS) == (threads > 1), "some trainers share a process"
        assert any(attempt for attempt, _ in told) == (dies != "a server")
        expected, summed = np.zeros((2, len(KEYS)), np.int64)
        for number in range(TRAINERS):
            expected[50 * number : 50 * number + 150] += CLOCKS
            expected[50 * number : 50 * number + 10] += CLOCKS
            summed[50 * number : 50 * number + 150] += 2 * CLOCKS
        assert ps.client().pull("n", KEYS).tolist() == expected.tolist()
        assert ps.client().pull("sums", KEYS).tolist() == summed.tolist()


def pushed_densely(trainer, partitions, clocks):
    for _ in trainer.iterate(range(clocks)):
        trainer.push("dense", None, np.ones((500, 4)))


@pytest.mark.parametrize("measured", [False, True])
def test_processes_of_a_machine_send_one_message(measured):
    clocks = 500 if measured else CLOCKS
    with (
        dps.LocalCluster(servers=1, trainers=TRAINERS, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("dense", rows=500, dim=4, wire=dps.Wire(merge=True, measured=measured))
        ps.run(pushed_densely, range(TRAINERS), staleness=0, args=(clocks,), progress=False)
        assert (ps.client().pull("dense") == TRAINERS * clocks).all()
        alone = TRAINERS * clocks * 500 * 16
        wait_until(lambda: ps.status().tables["dense"].traffic.pushed >= alone / TRAINERS)
        if measured:
            events = [text for _, text in ps.status().events if "rows of table 'dense' travel" in text]
            pattern = r"travel (as sums of a process|push by push), because trainer \d has measured: .* ms a clock"
            assert events
            assert all(re.search(pattern, text) for text in events)
        else:  # a quarter, where no process kept the others waiting for too long
            time.sleep(1.5)  # for the server's last report
            assert ps.status().tables["dense"].traffic.pushed < 0.6 * alone
