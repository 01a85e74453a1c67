"""PageRank while the processes of a server and of a trainer are killed: the ranks are those of an undisturbed run."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import numpy as np
from distributed import Client
from graphs import random_edges
from kills import killed_at, pids_of

import dps
import dps.graph

pytestmark = pytest.mark.processes
ITERATIONS = 300


def test_ranks_do_not_tell_that_a_server_and_a_trainer_were_lost():
    ring = np.column_stack([np.arange(400), np.roll(np.arange(400), -1)])  # ranks spread slowly
    edges = np.concatenate([ring, random_edges(40, 400)])
    with (
        dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):

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
