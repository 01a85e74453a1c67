"""Consensus ADMM whose parts are minimised in Dask tasks: the iterates of one process, also when a worker is lost."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("scipy")

import numpy as np
from dask.distributed import Client, LocalCluster
from oracles import mutant

from dps import optimize
from dps.errors import InputTypeError
from dps.optimize import parts

COUNT = 10  # parts: more than one task adds up


def numbers():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 8))
    return X, X @ np.where(np.arange(8) % 2, 0.0, rng.normal(size=8)) + 0.3 * rng.normal(size=300)


def squares(part, w):
    X, y = part
    error = X @ w - y
    return float(error @ error) / 2 / len(y), X.T @ error / len(y)


def closed_form(part, v, rho):
    X, y = part
    return np.linalg.solve(X.T @ X / len(y) + rho * np.eye(8), X.T @ y / len(y) + rho * v)


def pieces():
    X, y = numbers()
    return [(X[n::COUNT], y[n::COUNT]) for n in range(COUNT)]


@pytest.fixture(scope="module")
def client():
    with LocalCluster(n_workers=2, processes=False, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client


def iterates(funs, **settings):
    points = []
    settings = {"l1": 0.4, "rho": 0.01, "max_iter": 12} | settings  # rho is changed, because it begins too small
    result = optimize.admm(funs, np.zeros(8), callback=lambda r: points.append(r.x), **settings)
    return points, result


@pytest.mark.quick(1)
@pytest.mark.parametrize("closed", [False, True])
def test_the_iterates_of_one_process(client, closed):
    here = [partial(squares, piece) for piece in pieces()]
    held = client.scatter(pieces(), hash=False)  # or the release of the same keys, by the test before, comes later
    there = client.map(partial, [squares] * COUNT, held)
    near, far = {}, {}
    if closed:
        near = {"proximals": [partial(closed_form, piece) for piece in pieces()]}
        far = {"proximals": client.map(partial, [closed_form] * COUNT, held)}
    points, result = iterates(here, **near)
    others, other = iterates(there, **far)
    np.testing.assert_allclose(others, points, rtol=1e-9, atol=1e-12)
    assert (other.nit, other.nfev, other.rho) == (result.nit, result.nfev, result.rho)
    assert other.rho != 0.01
    for name in ("fun", "primal_residual", "dual_residual"):
        assert other[name] == pytest.approx(result[name], rel=1e-6)


@pytest.mark.thorough
def test_a_worker_that_is_lost():
    """What it held is computed again, from what the scheduler knows: the functions, x and u of its parts."""
    expected, _ = iterates([partial(squares, piece) for piece in pieces()])
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        funs = client.map(partial, [squares] * COUNT, client.map(pieces().__getitem__, range(COUNT)))
        points = []

        def lose(result):
            points.append(result.x)
            if len(points) == 4:
                cluster.scale(1)
                client.sync(cluster.workers[max(cluster.workers)].close, executor_wait=False)

        optimize.admm(funs, np.zeros(8), l1=0.4, rho=0.01, max_iter=12, callback=lose)
    np.testing.assert_allclose(points, expected, rtol=1e-9, atol=1e-12)


def wrong_value(part, w):
    raise ZeroDivisionError("by nothing")


def test_errors(client):
    with pytest.raises(ZeroDivisionError, match="by nothing"):
        optimize.admm(client.map(partial, [wrong_value], [1]), np.zeros(8))
    mixed = [partial(squares, pieces()[0]), *client.map(partial, [squares], pieces()[:1])]
    with pytest.raises(InputTypeError, match="or of their futures"):
        optimize.admm(mixed, np.zeros(8))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("told", "u + (x - z)", "u + x"),
        ("shown", "x + u", "x"),
        ("RemoteParts.rescale", "factor)", "1.0)"),
        ("RemoteParts._added", "range(0, len(terms), FAN_IN)", "range(0, FAN_IN, FAN_IN)"),
    ],
)
def test_wrong_variants_are_noticed(monkeypatch, client, name, old, new):
    owner, _, method = name.rpartition(".")
    place = getattr(parts, owner) if owner else parts
    monkeypatch.setattr(place, method, mutant(getattr(place, method), old, new))
    points, _ = iterates([partial(squares, piece) for piece in pieces()])
    others, _ = iterates(client.map(partial, [squares] * COUNT, pieces()))
    assert len(points) != len(others) or not np.allclose(points, others, rtol=1e-9)
