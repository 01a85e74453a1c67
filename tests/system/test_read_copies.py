"""Pulls that copies answer, in clusters: the promise of each pull, the share of backups, servers that are killed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from copies import wait_until_copies_are_equal
from kills import killed_at, pids_of
from servers import wait_until

import dps
from dps.errors import InputError

TRAINERS, CLOCKS = 3, 40


def count(trainer: dps.Trainer, parts: object, clocks: int, staleness: int) -> int:
    """Each trainer counts its clocks in a row of its own, and looks at the rows of all: how often a pull was late."""
    late, own = 0, trainer.number
    for _ in trainer.iterate(range(clocks)):
        for asynchronous in (False, True):
            rows = trainer.pull("n", np.arange(TRAINERS))
            late += int((rows < 2 * (trainer.clock - staleness)).any())
            late += int(rows[own] < 2 * trainer.clock + asynchronous)
            if asynchronous:
                trainer.push_async("n", [own], 1)
            else:
                trainer.push("n", [own], 1)
        late += int(trainer.pull("n", [own])[0] < 2 * trainer.clock + 2)  # behind the push that is on its way
        rows, certificate = trainer.pull_certified("n", np.arange(TRAINERS))
        late += int((rows < 2 * (trainer.clock - staleness)).any()) + (not certificate.shards)
    return late


def test_a_run_reads_from_copies_and_the_status_tells_the_share() -> None:
    with (
        dps.LocalCluster(servers=3, trainers=TRAINERS, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=3) as ps,
    ):
        ps.table("n", dtype="int64", shards=2, reads="copies")
        assert ps.run(count, range(TRAINERS), staleness=1, args=(CLOCKS, 1), progress=False) == [0] * TRAINERS
        assert ps.client().pull("n", np.arange(TRAINERS)).tolist() == [2 * CLOCKS] * TRAINERS
        share = wait_until(lambda: ps.status().tables["n"].backup_share)
        assert 0.1 < share < 0.9, "of three trainers, two read from backups, but for pulls behind a push"
        assert ps.tables()["n"].spec.reads == "copies"
        ps.table("plain", dtype="int64")
        assert ps.status().tables["plain"].backup_share is None
        with pytest.raises(InputError, match="needs copies=2"):
            ps.table("one", copies=1, reads="copies")
        ps.split("n")
        assert ps.run(count, range(TRAINERS), staleness=0, args=(4, 0), progress=False) is not None


@pytest.mark.processes
def test_pulls_keep_their_promise_while_a_backup_and_a_primary_are_killed() -> None:
    with (
        dps.LocalCluster(servers=3, trainers=TRAINERS, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=3, copies=3) as ps,
    ):
        ps.table("n", dtype="int64", shards=1, reads="copies")
        servers, _ = pids_of(ps)
        first, second, _ = ps.status().tables["n"].chains[0]
        pids: dict[int, Any] = {10: servers[second], 25: servers[first]}
        with killed_at(ps, pids):
            late = ps.run(count, range(TRAINERS), staleness=1, args=(400, 1), progress=False)
        assert late == [0] * TRAINERS
        assert ps.client().pull("n", np.arange(TRAINERS)).tolist() == [800] * TRAINERS
        wait_until_copies_are_equal(ps, "n")
        assert wait_until(lambda: ps.status().tables["n"].backup_share)
