"""Solvers that keep vectors on the servers, and solvers that convert them: told apart by counting."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from memory_store import MemoryStore
from outside_code import SIZE, VERSIONS, Ridge, operator

import dps.optimize
from dps.arrays import ArrayNamespace, PSArray, Space

PAGE = Path(__file__).parents[2] / "docs" / "arrays.md"
BEGIN, END = "<!-- solvers -->\n", "<!-- end of solvers -->\n"
ITERATIONS = 5


def conjugate_gradients(p):
    x = np.zeros_like(p.right)
    r = p.right - p.matvec(x)
    d, rs = r.copy(), r @ r
    for _ in range(ITERATIONS):
        Ad = p.matvec(d)
        alpha = rs / (d @ Ad)
        x, r = x + alpha * d, r - alpha * Ad
        new = r @ r
        d, rs = r + (new / rs) * d, new
    return x


def of_dps(name):
    return lambda p: getattr(dps.optimize, name)(p.both, p.start, tol=0, max_iter=ITERATIONS).x


def of_scipy(method, gradient=lambda p: p.gradient, **more):
    def run(p):
        from scipy.optimize import minimize

        options = {"maxiter": ITERATIONS}
        further = {name: make(p) for name, make in more.items()}
        return minimize(p.value, p.start, jac=gradient(p), method=method, options=options, **further).x

    return run


def krylov(name):
    def run(p):
        import scipy.sparse.linalg

        return getattr(scipy.sparse.linalg, name)(operator(p), p.right, rtol=0, maxiter=ITERATIONS)[0]

    return run


SOLVERS = {
    "`dps.optimize.lbfgs`": of_dps("lbfgs"),
    "`dps.optimize.conjugate_gradient`": of_dps("conjugate_gradient"),
    "`dps.optimize.gradient_descent`": of_dps("gradient_descent"),
    "`dps.optimize.linear_conjugate_gradient`": lambda p: (
        dps.optimize.linear_conjugate_gradient(p.matvec, p.right, tol=0, max_iter=ITERATIONS).x
    ),
    "conjugate gradients as above": conjugate_gradients,
    "`scipy.sparse.linalg.cg`": krylov("cg"),
    "`scipy.sparse.linalg.bicgstab`": krylov("bicgstab"),
    '`scipy.optimize.minimize(method="CG")`': of_scipy("CG"),
    '`scipy.optimize.minimize(method="Newton-CG")`': of_scipy("Newton-CG", hessp=lambda p: lambda x, v: p.matvec(v)),
    '`scipy.optimize.minimize(method="L-BFGS-B")`, `gradient.to_numpy()`': of_scipy(
        "L-BFGS-B", gradient=lambda p: lambda x: np.asarray(p.gradient(x))
    ),
}


def counted(run, monkeypatch) -> tuple[int, int, int]:
    """Vectors of the servers that became numpy's, vectors of numpy that went to the servers, and all round trips."""
    store = MemoryStore(2)
    xp = ArrayNamespace(Space(store))
    xp.zeros(SIZE, capacity=200)
    problem = Ridge(xp.asarray)
    counts = {"brought": 0, "sent": 0}
    read, write = PSArray.__array__, Space.write

    def __array__(self, *arguments, **options):
        counts["brought"] += self.shape == (SIZE,)
        return read(self, *arguments, **options)

    def sent(self, block, values):
        counts["sent"] += np.shape(values) == (SIZE,)
        return write(self, block, values)

    monkeypatch.setattr(PSArray, "__array__", __array__)
    monkeypatch.setattr(Space, "write", sent)
    store.trips = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(problem)
    trips = store.trips
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(np.asarray(found), run(Ridge(np.asarray)), rtol=1e-5, atol=1e-8)
    return counts["brought"], counts["sent"], trips


def line(name: str, counts: tuple[int, int, int]) -> str:
    stays = "converts to numpy" if counts[0] + counts[1] else "keeps vectors on the servers"
    return f"| {name} | {stays} | {' | '.join(str(each) for each in counts)} |\n"


def rows(table: str) -> list[list[str]]:
    return [line.split(" | ") for line in table.splitlines()]


def test_the_table_of_solvers_is_what_they_do(monkeypatch):
    scipy = pytest.importorskip("scipy")
    lines = "".join(line(name, counted(run, monkeypatch)) for name, run in SOLVERS.items())
    head = "| solver, five iterations | vectors | brought to the driver | sent | round trips |\n"
    table = head + "| --- | --- | --- | --- | --- |\n" + lines
    text = PAGE.read_text()
    there = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    exact = None if scipy.__version__ == VERSIONS["scipy"] else 2  # another scipy may evaluate more or less often
    assert [row[:exact] for row in rows(there)] == [row[:exact] for row in rows(table)], f"put this there:\n{table}"


def test_counting_tells_a_solver_that_converts(monkeypatch):
    assert counted(lambda p: p.start + 1, monkeypatch) == (0, 0, 0)
    assert counted(lambda p: np.asarray(p.start) + 1, monkeypatch)[:2] == (1, 0)
    assert counted(lambda p: p.start + np.ones(SIZE), monkeypatch)[:2] == (0, 1)
