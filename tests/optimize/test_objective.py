"""Losses over data on trainers: the iterates of one process, whatever fails meanwhile."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy")

import contextlib
import gc
import importlib
import os
import signal
import threading
import time

import dask
import dask.array as da
import numpy as np
import scipy.sparse as sp
from dask.distributed import Client
from oracles import mutant
from scipy.optimize import minimize
from servers import wait_until

import dps
from dps import optimize
from dps.errors import ClosedError, DPSError, InputError, InputTypeError

objective = importlib.import_module("dps.optimize.objective")

ROWS, COLUMNS, L2 = 600, 12, 0.05
RAISED: list[int] = []
DONE: dict[int, int] = {}  # batches by thread


def numbers():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS))
    return X, np.where(X @ rng.normal(size=COLUMNS) + rng.normal(size=ROWS) > 0, 1.0, -1.0)


def log_loss(batch, w):
    X, y = batch
    z = y * (X @ w)
    return float(np.logaddexp(0, -z).sum()), -(X.T @ (y / (1 + np.exp(z))))


def sparse_loss(batch, w):
    """The gradient of the columns that the batch has."""
    loss, gradient = log_loss(batch, w)
    (columns,) = np.nonzero(gradient)
    return loss, (columns, gradient[columns])


def columns_of(batch):
    """The columns in which the batch has numbers."""
    return np.unique(batch[0].indices)


def loss_of_few(batch, w):
    """The loss of a sparse batch, given the weights of the columns that it has."""
    X, y = batch
    return log_loss((X[:, columns_of(batch)], y), w)


def raising(batch, w):
    """Raises now and then, after other batches of the same portion are counted."""
    RAISED.append(0)
    if len(RAISED) % 97 == 0:
        raise OSError("a disk, say")
    return log_loss(batch, w)


def slow_in_one_thread(batch, w):
    me = threading.get_ident()
    DONE[me] = DONE.get(me, 0) + 1
    time.sleep(0.05 if me == min(DONE) else 0.002)
    return log_loss(batch, w)


def at_home(x):
    loss, gradient = log_loss(numbers(), x)
    return loss / ROWS + L2 / 2 * float(x @ x), gradient / ROWS + L2 * x


OFTEN = {"batch_size": 6, "trainers": 1, "retries": 100, "max_iter": 4}  # three batches a portion
SETTINGS = {"scale": 1 / ROWS, "l2": L2, "max_iter": 8, "tol": 0, "f_tol": 0}


@pytest.fixture(scope="module")
def cluster():
    with dps.LocalCluster(servers=1, trainers=3, processes=False, dashboard_address=None) as cluster:
        yield cluster


@pytest.fixture
def ps(cluster):
    RAISED.clear()
    DONE.clear()
    with Client(cluster) as client, dps.ParameterServer(client, servers=1) as ps:
        yield ps
        assert not ps.tables(), "its tables are dropped"


def iterates(solver, fun, **settings):
    points = []
    solver(fun, np.zeros(COLUMNS), callback=lambda r: points.append(r.x), **settings)
    return points


def expected(solver=optimize.lbfgs):
    return iterates(solver, at_home, **{name: SETTINGS[name] for name in ("max_iter", "tol", "f_tol")})


def over_trainers(ps, function, data, solver=optimize.lbfgs, **more):
    points = []
    settings = SETTINGS | {"callback": lambda r: points.append(r.x), "solver": solver} | more
    result = optimize.minimize(ps, function, data, np.zeros(COLUMNS), **settings)
    np.testing.assert_array_equal(result.x, points[-1])
    return points


def as_dask():
    X, y = numbers()
    return da.from_array(X, chunks=((250, 250, 100), -1)), da.from_array(y, chunks=((250, 250, 100),))


DATA = {
    "memory": (numbers, log_loss, {}),
    "dask": (as_dask, log_loss, {}),
    "small batches": (as_dask, log_loss, {"batch_size": 7}),
    "sparse": (lambda: (sp.csr_matrix(numbers()[0]), numbers()[1]), sparse_loss, {"batch_size": 100}),
}


@pytest.mark.parametrize("what", DATA)
def test_the_iterates_of_one_process(ps, what):
    data, function, more = DATA[what]
    np.testing.assert_allclose(over_trainers(ps, function, data(), **more), expected(), rtol=1e-9)


def test_another_solver(ps):
    solver = optimize.conjugate_gradient
    np.testing.assert_allclose(over_trainers(ps, log_loss, numbers(), solver), expected(solver), rtol=1e-9)
    result = optimize.minimize(
        ps, log_loss, numbers(), np.zeros(COLUMNS), solver=optimize.owlqn, l1=0.1, scale=1 / ROWS
    )
    alone = optimize.owlqn(lambda w: tuple(v / ROWS for v in log_loss(numbers(), w)), np.zeros(COLUMNS), l1=0.1)
    np.testing.assert_allclose(result.x, alone.x, rtol=1e-6)
    assert (result.x == 0).any()


def test_a_vector_of_penalties(ps):
    strengths = np.r_[0.0, np.full(COLUMNS - 1, L2)]
    with optimize.Objective(ps, log_loss, numbers(), COLUMNS, l2=strengths, trainers=2) as loss:
        x = np.linspace(-1, 1, COLUMNS)
        value, gradient = loss(x)
    assert value == pytest.approx(log_loss(numbers(), x)[0] + strengths @ x**2 / 2)
    np.testing.assert_allclose(gradient, log_loss(numbers(), x)[1] + strengths * x)


WIDE = 20_000


@pytest.mark.parametrize("few", [0.0, 1.0], ids=["all of x once", "a batch's elements"])
@pytest.mark.parametrize("where", ["here", "on the servers"])
def test_trainers_pull_what_their_sparse_rows_have(ps, monkeypatch, where, few):
    """The iterates are those of one process, and no trainer has seen the whole of x."""
    generator = np.random.default_rng(0)
    X = sp.random_array((200, WIDE), density=3 / WIDE, format="csr", rng=generator)
    y = np.where(X.sum(axis=1) > 0.9, 1.0, -1.0)
    monkeypatch.setattr(objective, "FEW", few)
    pulled, pull = [], dps.Trainer.pull

    def noted(trainer, *arguments):
        values = pull(trainer, *arguments)
        pulled.append(np.size(values))
        return values

    monkeypatch.setattr(dps.Trainer, "pull", noted)
    x0 = np.zeros(WIDE) if where == "here" else dps.arrays.on(ps).zeros(WIDE, capacity=40)
    settings = {"scale": 1 / 200, "l2": L2, "max_iter": 4, "tol": 0, "f_tol": 0}
    result = optimize.minimize(ps, loss_of_few, (X, y), x0, elements=columns_of, **settings)
    x = result.x if where == "here" else result.x.to_numpy()

    def alone(w):
        loss, gradient = log_loss((X, y), w)
        return loss / 200 + L2 / 2 * float(w @ w), gradient / 200 + L2 * w

    expected = optimize.lbfgs(alone, np.zeros(WIDE), max_iter=4, tol=0, f_tol=0)
    np.testing.assert_allclose(x, expected.x, rtol=1e-9, atol=1e-12)
    assert x.any()
    assert (max(pulled) == WIDE) if few == 0.0 else (max(pulled) <= X.nnz)
    del x0, result
    for table in ps.tables():
        ps.drop_table(table)


def test_trainers_that_are_run_again_count_each_batch_once(ps):
    points = over_trainers(ps, raising, as_dask(), **OFTEN)
    assert len(RAISED) > 3 * 97, "it has raised several times"
    np.testing.assert_allclose(points, expected()[: OFTEN["max_iter"]], rtol=1e-9)


@pytest.mark.thorough
def test_a_slow_trainer_does_less(ps):
    points = over_trainers(ps, slow_in_one_thread, numbers(), batch_size=10)
    np.testing.assert_allclose(points, expected(), rtol=1e-9)
    slow, *others = [DONE[thread] for thread in sorted(DONE)]
    assert slow < min(others) / 2


def killing(batch, w, pid, at):
    """Kills a process in the middle of an evaluation, once x has moved so far."""
    if np.abs(w).sum() > at:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return log_loss(batch, w)


@pytest.mark.thorough
@pytest.mark.processes
def test_a_server_and_a_trainer_that_are_killed():
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(dps.LocalCluster(servers=3, trainers=2, dashboard_address=None))
        client = stack.enter_context(Client(cluster))
        with dps.ParameterServer(client, servers=3, copies=2) as ps:
            workers = client.run(os.getpid)
            servers = {server.worker for server in ps.status().servers}
            victims = [sorted(servers)[0], min(set(workers) - servers)]
            for victim in victims:
                points = over_trainers(ps, killing, as_dask(), batch_size=25, args=(workers[victim], 0.3))
                np.testing.assert_allclose(points, expected(), rtol=1e-9)
                wait_until(lambda victim=victim: victim not in client.scheduler_info(n_workers=-1)["workers"])


def test_vectors_on_the_servers(ps):
    """The same iterates, and no vector travels to the driver: `implicit-copy` refuses all that was not asked for."""
    points, used = [], []

    def note(result):
        points.append(result.x.to_numpy())
        used.extend(count for count, _ in dps.arrays.on(ps).space.used().values())

    strengths = np.full(COLUMNS, L2)
    with dask.config.set({"dps.limits.implicit-copy": 0}):
        for l2 in (L2, strengths):
            points.clear()
            more = SETTINGS | {"l2": l2, "callback": note, "m": 3}
            result = optimize.minimize(ps, log_loss, as_dask(), COLUMNS, **more)
            alone = iterates(optimize.lbfgs, at_home, m=3, max_iter=8, tol=0, f_tol=0)
            np.testing.assert_allclose(points, alone, rtol=1e-9)
        x0, more = dps.arrays.on(ps).zeros(COLUMNS), {"solver": optimize.owlqn, "l1": 0.1, "scale": 1 / ROWS}
        sparse = optimize.minimize(ps, log_loss, numbers(), x0, **more)
    alone = optimize.minimize(ps, log_loss, numbers(), np.zeros(COLUMNS), **more)
    np.testing.assert_allclose(sparse.x.to_numpy(), alone.x, rtol=1e-6)
    # Pairs; x, gradient, direction; of a trial x and gradient; a step of a combination; x and gradient of the trainers.
    assert max(used) <= 2 * 3 + 3 + 2 + 3 + 3 + 1
    del x0, more, result, sparse
    gc.collect()
    assert [count for count, _ in dps.arrays.on(ps).space.used().values()] == [0]
    for table in ps.tables():
        ps.drop_table(table)


def test_vectors_on_the_servers_take_scipys_steps(ps):
    """The accepted points of L-BFGS-B, with the same history: trainers compute, and all vectors lie on the servers."""
    theirs, ours = [], []
    options = {"maxcor": 4, "maxiter": 7, "gtol": 0, "ftol": 0}
    minimize(at_home, np.zeros(COLUMNS), jac=True, method="L-BFGS-B", callback=theirs.append, options=options)
    x0 = dps.arrays.on(ps).zeros(COLUMNS, capacity=40)
    settings = SETTINGS | {"m": 4, "max_iter": 7, "callback": lambda result: ours.append(result.x.to_numpy())}
    optimize.minimize(ps, log_loss, as_dask(), x0, **settings)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)
    del x0
    for table in ps.tables():
        ps.drop_table(table)


# -- errors


def wrong(batch, w):
    raise ZeroDivisionError("by nothing")


ERRORS = [
    (ZeroDivisionError, "by nothing", {"loss_and_gradient": wrong}),
    (DPSError, r"gradient of shape \(2,\)", {"loss_and_gradient": lambda batch, w: (0.0, w[:2])}),
    (DPSError, "no rows", {"data": (np.zeros((0, COLUMNS)), np.zeros(0))}),
    (InputTypeError, "function of a batch", {"loss_and_gradient": 3}),
    (InputError, "scale", {"scale": 0}),
    (InputError, "l2", {"l2": -1}),
    (InputError, "tol", {"tol": -1}),
    (DPSError, "batch_size", {"batch_size": 0}),
    (InputError, "trainers", {"trainers": 0}),
]


@pytest.mark.parametrize(("error", "words", "change"), ERRORS)
def test_errors_leave_nothing_behind(ps, error, words, change):
    arguments = {"loss_and_gradient": log_loss, "data": numbers(), "x0": np.zeros(COLUMNS)} | change
    with pytest.raises(error, match=words):
        optimize.minimize(ps, **arguments)


def test_an_error_of_the_driver_ends_the_trainers(ps):
    def interrupt(result):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimize.minimize(ps, log_loss, numbers(), np.zeros(COLUMNS), callback=interrupt)
    wait_until(lambda: not ps.status().runs[0].connected)
    loss = optimize.Objective(ps, log_loss, numbers(), COLUMNS)
    with pytest.raises(ClosedError, match="with Objective"):
        loss(np.zeros(COLUMNS))
    with loss, pytest.raises(InputError, match=r"shape \(3,\)"):
        loss(np.zeros(3))
    with pytest.raises(ClosedError, match="with Objective"):
        loss(np.zeros(COLUMNS))


# -- wrong variants


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("Objective.__call__", ", plan.gradient: (None, np.zeros(self._size))", ""),
        ("evaluate", "trainer.add(plan.gradient", "type(trainer.client)(trainer.ticket).add(plan.gradient"),
        ("work", "trainer.iterate(partitions, batch_size=size)", "objective_batches(partitions, size)"),
    ],
)
def test_wrong_variants_are_noticed(monkeypatch, ps, name, old, new):
    """Without zeros between evaluations; with ops that have no stamp; with batches that a second attempt repeats."""
    owner, _, method = name.rpartition(".")
    place = getattr(objective, owner) if owner else objective
    cut = importlib.import_module("dps.engine.training.batches").iterate_partition
    monkeypatch.setattr(
        objective, "objective_batches", lambda parts, size: [b for p in parts for b in cut(p, size)], raising=False
    )
    monkeypatch.setattr(place, method, mutant(getattr(place, method), old, new))
    with contextlib.suppress(DPSError, OSError):
        points = over_trainers(ps, raising, as_dask(), **OFTEN | {"max_iter": 1})
        right = expected()[:1]
        assert len(points) != len(right) or not np.allclose(points, right, rtol=1e-9)
