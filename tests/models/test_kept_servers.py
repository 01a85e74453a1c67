"""Servers that a fit has started, kept for the next fit in the same place."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from dask.distributed import Client
from servers import wait_until
from sklearn.model_selection import GridSearchCV

import dps
from dps.engine.controller.plugin import Controller
from dps.errors import ClosedError, InputError
from dps.models import LogisticRegression, kept_servers

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
LONG = {"dps.timeouts.reuse": "600 s"}


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        yield client
        kept_servers.close_kept()


@pytest.fixture
def started(monkeypatch):
    """The parameter servers that are started, in order."""
    made, start = [], dps.ParameterServer.__init__

    def counted(self, *args, **kwargs):
        start(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(dps.ParameterServer, "__init__", counted)
    return made


def model(client, **options):
    return LogisticRegression(client=client, epochs=1, progress=False, **options)


def sessions(cluster) -> list[str]:
    """The parameter servers of a cluster, by name."""
    controller = cluster.scheduler.plugins.get(Controller.name)
    return [] if controller is None else list(controller.sessions)


@pytest.mark.quick(1)
@pytest.mark.parametrize("place", ["client", "cluster", "address"])
def test_a_search_with_nine_fits_starts_servers_once(place, client, started, cluster):
    where = {"client": client, "cluster": cluster, "address": cluster.scheduler_address}[place]
    with dask.config.set(LONG):
        search = GridSearchCV(model(where), {"learning_rate": [0.1, 0.2, 0.5, 1.0]}, cv=2, refit=True).fit(X, Y)
    assert len(search.cv_results_["params"]) * 2 + 1 == 9
    assert len(started) == 1
    assert sessions(cluster) == [started[0].name]
    assert list(started[0].tables()) == [], "each fit has dropped what it has made"
    kept_servers.close_kept()
    assert sessions(cluster) == []


def test_without_the_time_each_fit_has_servers_of_its_own(client, started, cluster):
    with dask.config.set({"dps.timeouts.reuse": "0 s"}):
        for _ in range(2):
            model(client).fit(X, Y)
    assert len(started) == 2
    assert sessions(cluster) == []


def test_another_number_of_servers_and_another_place_get_their_own(client, started, cluster):
    with dask.config.set(LONG), Client(cluster, set_as_default=False) as another:
        places = (client, 1), (client, 2), (another, 1), (cluster, 1), (cluster.scheduler_address, 1)
        for which, servers in 2 * places:
            model(which, servers=servers).fit(X, Y)
        assert len(started) == 5
        assert len(sessions(cluster)) == 5
        kept_servers.close_kept()


def test_they_end_when_the_time_is_over(client, started, cluster):
    with dask.config.set({"dps.timeouts.reuse": "100 ms"}):
        model(client).fit(X, Y)
    wait_until(lambda: not sessions(cluster))
    wait_until(lambda: started[0].closed)
    assert not kept_servers._kept


def test_they_end_when_the_client_is_closed(started, cluster):
    with dask.config.set(LONG), Client(cluster, set_as_default=False) as client:
        model(client).fit(X, Y)
        assert len(sessions(cluster)) == 1
    wait_until(lambda: not sessions(cluster))
    assert not kept_servers._kept


def test_a_fit_that_fails_keeps_none(client, started, cluster):
    with dask.config.set(LONG):
        with pytest.raises(InputError, match="NaN"):
            model(client).fit(np.where(X > 1, np.nan, X), Y)
        assert sessions(cluster) == []
        model(client).fit(X, Y)
        assert len(started) == 2


def test_servers_that_were_closed_meanwhile_are_not_used(client, started, cluster):
    with dask.config.set(LONG):
        model(client).fit(X, Y)
        dps.ParameterServer.attach(client, started[0].name).close()
        model(client).fit(X, Y)
    assert len(started) == 2
    with pytest.raises(ClosedError):
        started[0].tables()


def test_threads_that_fit_at_once_share_nothing_and_leave_one(client, started, cluster):
    begun, inside = threading.Barrier(2), []

    def fit(n):
        with kept_servers.kept_servers(client, 1) as ps:
            ps.table(f"t{n}")
            begun.wait(60)
            inside.append(sorted(ps.tables()))

    with dask.config.set(LONG), ThreadPoolExecutor(2) as threads:
        list(threads.map(fit, range(2)))
    assert sorted(inside) == [["t0"], ["t1"]]
    assert len(started) == 2
    wait_until(lambda: len(sessions(cluster)) == 1)


@pytest.mark.parametrize("place", ["client", "cluster", "address"])
def test_the_cluster_may_be_closed_before(place, started):
    with (
        dask.config.set(LONG),
        dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        where = {"client": client, "cluster": cluster, "address": cluster.scheduler_address}[place]
        model(where).fit(X, Y)
    wait_until(lambda: not kept_servers._kept)
    wait_until(lambda: started[0].closed)
