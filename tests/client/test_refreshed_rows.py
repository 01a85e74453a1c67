"""Rows that are here and too old are compared, and those that have not changed do not travel: which ones, and bytes."""

from __future__ import annotations

import numpy as np
import pytest
from servers import wait_until

import dps

DIM, KEYS = 8, 1000
ALL = np.arange(KEYS)


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=2, processes=False) as started:
        yield started


def push_some(trainer, parts, clocks, every):
    """In each clock, push to some of the rows, and pull all of them."""
    read = []
    for clock in trainer.iterate(range(clocks)):
        read.append(trainer.pull("w", ALL))
        if every:
            trainer.push("w", ALL[clock::every], np.ones((len(ALL[clock::every]), DIM), np.float32))
    return read


def test_rows_that_have_not_changed_do_not_travel(cluster):
    """At staleness 0 each clock asks for all rows; a process that steps its own rows gets none of them again."""
    with dps.ParameterServer(cluster) as ps:
        ps.table("w", dim=DIM, optimizer=dps.SGD(0.1), cache="1 MB", shards=4)
        (read,) = ps.run(push_some, [0], trainers=1, args=(5, 3), progress=False)
        bits = 4 * 8 * -(-KEYS // 64)

        def traffic():
            return ps.status().tables["w"].traffic

        wait_until(lambda: traffic().pulled > KEYS * 4 * DIM)
        assert traffic().pulled <= KEYS * 4 * DIM + 2 * bits
        print(traffic())
