"""k-means and similar rows while servers' processes are killed: the results of undisturbed servers."""

from __future__ import annotations

import pytest

pytest.importorskip("sklearn")

import contextlib
import os
import signal

import numpy as np
from distributed import Client
from servers import wait_until

import dps
from dps.models.clusters.clustering import Beginning, begun_at, trained
from dps.models.clusters.kmeans import KMeans
from dps.models.clusters.similarity import Similarity
from dps.models.inputs.encoding import Layout
from dps.models.inputs.features import Piece, Survey

pytestmark = pytest.mark.processes
CLUSTERS, FEATURES = 5, 4
LAYOUT = Layout(FEATURES, 0)
SURVEY = Survey(np.zeros(0), np.zeros(0), LAYOUT, True, 400)
ROWS = np.random.default_rng(0).integers(-50, 50, (400, FEATURES)).astype(np.float32)  # whole: sums in any order


@pytest.fixture
def ps():
    with (
        dps.LocalCluster(servers=2, trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):
        yield ps


@pytest.fixture
def pieces(ps):
    parts = [Piece(part, np.zeros(len(part)), LAYOUT) for part in (ROWS[::2], ROWS[1::2])]
    return ps.dask_client.scatter(parts, hash=False)


def pid_of_first_server(ps):
    (address,) = [server.worker for server in ps.status().servers if server.number == 0]
    return ps.dask_client.run(os.getpid, workers=[address])[address]


class Killing:
    """A trainer that kills a process after so many pulls."""

    def __init__(self, trainer, pid, pulls):
        self._trainer, self._pid, self._pulls = trainer, pid, pulls

    def __getattr__(self, name):
        return getattr(self._trainer, name)

    def pull(self, *args):
        self._pulls -= 1
        if not self._pulls:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        return self._trainer.pull(*args)


def killing(trainer, pieces, plan, function, pid, pulls):
    return function(Killing(trainer, pid, pulls if trainer.number == 1 else -1), pieces, plan)


class Parts:
    """Pieces whose training kills a server."""

    def __init__(self, ps, pieces, pid=0, pulls=-1):
        self.ps, self.pieces, self.pid, self.pulls = ps, pieces, pid, pulls

    def train(self, plan, function, **how):
        return self.run(plan(lambda: [SURVEY]), function, **how)

    def run(self, plan, function, *, staleness, progress):
        return self.ps.run(killing, self.pieces, args=(plan, function, self.pid, self.pulls), staleness=staleness)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [None, 40], ids=["lloyd", "minibatches"])
def test_the_centers_are_those_of_undisturbed_servers(ps, pieces, size):
    starts = ROWS[:CLUSTERS].astype(float)
    starts[3] = 1e4  # without a row, so that it is moved elsewhere
    begun = Beginning(starts, SURVEY, 1.0)
    plan = KMeans(n_clusters=CLUSTERS, tol=0.0, batch_size=size, random_state=0)._plan(begun, 1, 6)
    expected = trained(ps, Parts(ps, pieces), plan, begun, 0, False)
    made = trained(ps, Parts(ps, pieces, pid_of_first_server(ps), 7), plan, begun, 0, False)
    np.testing.assert_array_equal(made.centers, expected.centers)
    assert made.inertia == expected.inertia
    wait_until(lambda: min(server.number for server in ps.status().servers if server.alive) >= 1)


@pytest.mark.thorough
def test_the_centers_from_which_it_begins_are_those_of_undisturbed_servers(ps, pieces):
    """A server is killed before the third of the pulls of drawn rows, of which k-means|| makes six or more."""
    expected = begun_at(ps, Parts(ps, pieces), CLUSTERS, "k-means++", 7)
    made = begun_at(ps, Parts(ps, pieces, pid_of_first_server(ps), 3), CLUSTERS, "k-means++", 7)
    np.testing.assert_array_equal(made.starts, expected.starts)
    assert made.variance == expected.variance
    wait_until(lambda: min(server.number for server in ps.status().servers if server.alive) >= 1)


@pytest.mark.thorough
def test_the_neighbours_are_those_of_undisturbed_servers():
    rows = np.random.default_rng(0).normal(size=(400, FEATURES))
    with (
        dps.LocalCluster(servers=2, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=2, copies=2) as ps,
    ):
        model = Similarity(n_neighbors=3, client=ps).fit(rows)
        expected = model.kneighbors()
        os.kill(pid_of_first_server(ps), signal.SIGKILL)
        for found, right in zip(model.kneighbors(), expected, strict=True):
            np.testing.assert_array_equal(found, right)
        model.close()
