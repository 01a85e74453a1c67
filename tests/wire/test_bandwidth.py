"""The bytes a second of work in the background: never more in any while than the rate and a short burst allow."""

from __future__ import annotations

import math
import time

import dask
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

import dps
from dps import config
from dps.engine.wire.bandwidth import BURST_SECONDS, LinkBudget
from dps.errors import InputError
from dps.testing import Simulation

RATE, MOST = 1000.0, 500


def sent(budget, wants):
    """(time, bytes) of what leaves: each wants to leave so many seconds after the one before, and waits."""
    now, left = 0.0, []
    for pause, nbytes in wants:
        now = budget.due(now + pause)
        budget.spend(nbytes, now)
        left.append((now, nbytes))
    return left


def check_rate(left):
    """In each while from one sending to another, no more leaves than the rate, a burst and the last piece."""
    for n, (began, _) in enumerate(left):
        total = 0
        for now, nbytes in left[n:]:
            assert total <= RATE * (now - began + BURST_SECONDS) + MOST + 1e-6
            total += nbytes


wants = st.lists(st.tuples(st.floats(0, 2), st.integers(0, MOST)), max_size=60)


@given(wants)
def test_no_more_leaves_than_the_rate_allows(wanted):
    check_rate(sent(LinkBudget(RATE), wanted))
    assert sent(LinkBudget(), wanted) == [
        (pytest.approx(sum(pause for pause, _ in wanted[: n + 1])), nbytes) for n, (_, nbytes) in enumerate(wanted)
    ]


@pytest.mark.parametrize(
    ("old", "new"), [("now - BURST_SECONDS", "0"), ("+ nbytes / self.rate", ""), ("max(self._due, ", "max(0.0, ")]
)
def test_a_wrong_budget_is_caught(monkeypatch, old, new):
    monkeypatch.setattr(LinkBudget, "spend", mutant(LinkBudget.spend, old, new))
    draw = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        check_rate(sent(LinkBudget(RATE), [(3.0, 10)] + [(0.0, int(n)) for n in draw.integers(0, MOST, 40)]))


def test_the_setting():
    assert config.bandwidth() == math.inf
    with dask.config.set({"dps.limits.bandwidth": "50 MiB"}):
        assert config.bandwidth() == 50 << 20
    with dask.config.set({"dps.limits.bandwidth": 0}), pytest.raises(InputError, match="bytes a second"):
        config.bandwidth()


@pytest.mark.parametrize(("rate", "ahead"), [(None, 9), ("1 B", 1)])
def test_rows_are_pulled_ahead_as_the_budget_allows(monkeypatch, rate, ahead):
    """All batches get their rows, and those beyond the budget get them in time only."""
    pulled = []
    original = dps.Client.pull_ahead
    monkeypatch.setattr(dps.Client, "pull_ahead", lambda *args: pulled.append(args) or original(*args))

    def train(trainer, partitions):
        return [
            sorted(rows["w"].values.tolist())
            for _, rows in trainer.iterate(partitions, pull=lambda b: {"w": [b, b + 1]})
        ]

    with dask.config.set({"dps.limits.bandwidth": rate}), Simulation(0, servers=1, trainers=1) as sim:
        sim.table("w")
        sim.client().push("w", np.arange(12), np.arange(12))
        assert sim.run(train, [*range(10)]) == [[[b, b + 1] for b in range(10)]]
    assert len(pulled) == ahead


def test_a_checkpoint_is_written_as_the_budget_allows(tmp_path):
    with (
        dask.config.set({"dps.limits.bandwidth": "1 MB"}),
        dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster,
        dps.ParameterServer(cluster) as ps,
    ):
        ps.table("w", dim=64, shards=1)
        ps.client().push("w", np.arange(2000), np.ones((2000, 64), np.float32))
        began = time.monotonic()
        ps.checkpoint(tmp_path.as_uri())
        assert time.monotonic() - began > 2000 * 4 * 64 / 1e6 - BURST_SECONDS - 0.01, "half a second of bytes"
