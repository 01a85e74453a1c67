"""Ranks and walks while the processes of a server and of a trainer are killed: those of an undisturbed run."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import numpy as np
from distributed import Client
from graphs import random_edges
from kills import killed_at, killed_when, pids_of

import dps
import dps.graph
from dps.functions import library
from dps.graph.walks import BLOCK_WALKERS

pytestmark = pytest.mark.processes
ITERATIONS = 300


@pytest.fixture
def ps():
    with (
        dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):
        yield ps


@pytest.mark.thorough
def test_ranks_do_not_tell_that_a_server_and_a_trainer_were_lost(ps):
    ring = np.column_stack([np.arange(400), np.roll(np.arange(400), -1)])  # ranks spread slowly
    edges = np.concatenate([ring, random_edges(40, 400)])

    def ranks() -> np.ndarray:
        with pytest.warns(RuntimeWarning, match="not converged"):
            result = dps.graph.page_rank(ps, edges, 0.95, {399: 1.0}, tol=0.0, max_iter=ITERATIONS)
        with result:
            assert result.iterations == ITERATIONS
            return result.values

    undisturbed = ranks()
    (server, _), (trainer, _) = pids_of(ps)
    for pid in (trainer, server):
        with killed_at(ps, {20: pid}):
            np.testing.assert_allclose(ranks(), undisturbed, rtol=0, atol=1e-14)


@pytest.mark.thorough
def test_walks_do_not_tell_that_a_server_and_a_trainer_were_lost(ps):
    """Processes are killed when some walks are on the servers, and others are not."""
    edges, per_vertex, length = random_edges(3000, 1000), 120, 20
    total = len(np.unique(edges)) * per_vertex
    assert total > 5 * BLOCK_WALKERS, "each trainer moves several blocks"

    def walks() -> list[np.ndarray]:
        with dps.graph.random_walks(ps, edges, length, per_vertex, q=2.0, seed=1) as made:
            assert made.count == total
            keys = np.array_split(np.arange(total), 20)
            return [made.vertices, made.visits, *(made.table.pull(some) for some in keys)]

    def has_some_walks() -> bool:
        made = [table for name, table in ps.tables().items() if name.endswith("-walks")]
        return bool(made) and 0 < ps.call(library.size, made[0]) < 0.7 * total

    undisturbed = walks()
    (server, _), (trainer, _) = pids_of(ps)
    for pid in (trainer, server):
        with killed_when(has_some_walks, pid):
            again = walks()
        if pid == trainer:
            assert sorted(each.attempts for each in ps.status().current_run.trainers) == [1, 2]
        for ours, theirs in zip(again, undisturbed, strict=True):
            np.testing.assert_array_equal(ours, theirs)
