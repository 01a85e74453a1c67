"""Consensus ADMM (Boyd, Parikh, Chu, Peleato and Eckstein 2011, section 7)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import OptimizeResult

from dps.errors import InputTypeError
from dps.optimize.minimization import Callback, Function, Minimization, positive
from dps.optimize.orthants import penalty_of, weights_of_l1
from dps.optimize.quasi_newton import lbfgs
from dps.optimize.vectors import Vector, combine, dots, soft_threshold, stored

__all__ = ["admm"]

INNER_ITERATIONS = 50  # of L-BFGS for a part, in an iteration,
INNER_TOL = 0.1  # and its tolerance, as a fraction of tol
FLOOR = 0.01  # norm of each element, below which tolerances are absolute
BALANCE, FACTOR = 10.0, 2.0  # ratio of the residuals above which rho is changed, and by how much (section 3.4.1)

Proximal = Callable[[Vector, float], Vector]


def admm(
    funs: Sequence[Function],
    x0: Vector,
    *,
    l1: float | Vector = 0.0,
    rho: float = 1.0,
    adapt: bool = True,
    proximals: Sequence[Proximal] | None = None,
    tol: float = 1e-4,
    max_iter: int = 100,
    callback: Callback | None = None,
) -> OptimizeResult:
    """Minimise a sum of functions plus an L1 penalty; each function is minimised by itself, and all agree in the end.

    Each part i has its own x_i. An iteration minimises ``f_i(x_i) + rho / 2 |x_i - z + u_i|^2`` for each of them,
    takes z from the mean of all ``x_i + u_i``, and adds ``x_i - z`` to u_i.

    Parameters
    ----------
    funs : sequence of callables
        ``fun(x) -> (loss, gradient)`` of each part; smooth and convex. Each gradient is a new array.
    x0 : vector
        Where to begin.
    l1 : float or vector
        The strength of the L1 penalty on z.
    rho : float
        The strength of the pull towards agreement.
    adapt : bool
        Double or halve rho when one residual is more than ten times the other.
    proximals : sequence of callables, optional
        ``proximal(v, rho)`` of each part returns the x that minimises ``fun(x) + rho / 2 |x - v|^2``, where that has a
        closed form. By default :func:`lbfgs` does it, from the part's x before.
    tol : float
        End when the parts agree, and z rests, by this relative tolerance.
    max_iter, callback
        As for :func:`lbfgs`.

    Returns
    -------
    scipy.optimize.OptimizeResult
        As of :func:`lbfgs`: `x` is z, `fun` the sum at z with its penalty, `jac` the sum of the gradients; `nfev`
        counts evaluations of this sum and those of the parts. `primal_residual`, `dual_residual`, `rho`: the last.

    Examples
    --------
    >>> import numpy as np
    >>> def near(centre):
    ...     return lambda x: (float(((x - centre) ** 2).sum()) / 2, x - centre)
    >>> result = admm([near(np.array([1.0, 0.0])), near(np.array([3.0, 0.2]))], np.zeros(2), l1=0.5)
    >>> np.round(result.x, 2) + 0.0
    array([1.75, 0.  ])
    """
    if not funs or not all(callable(fun) for fun in funs):
        raise InputTypeError("funs is a list of one or more functions of x that return (loss, gradient)")
    if proximals is not None and len(proximals) != len(funs):
        raise InputTypeError(f"there are {len(funs)} funs and {len(proximals)} proximals: each fun needs its own")
    task = Minimization(_sum_of(funs), x0, tol, 0.0, max_iter, callback, watched="the larger residual, of its scale,")
    weights = weights_of_l1(l1, task.x)
    task.begin()
    task.value += penalty_of(task.x, weights)
    parts = _Parts(funs, proximals, task.x, positive("rho", rho), tol)
    residuals = math.inf, math.inf
    while not task.nit or not task.ended(parts.larger_residual(task.x, *residuals)):
        parts.minimise(task.x)
        z = stored(soft_threshold(parts.mean(), weights * (1.0 / (parts.rho * len(funs)))))
        residuals = parts.agree(z, task.x)
        value, gradient = task.evaluate(z)
        task.nfev += parts.evaluations
        task.advance(z, value + penalty_of(z, weights), gradient)
        if adapt:
            parts.balance(*residuals)
    result = task.result()
    result.update(primal_residual=residuals[0], dual_residual=residuals[1], rho=parts.rho)
    return result


def _sum_of(funs: Sequence[Function]) -> Function:
    def total(x: Vector) -> tuple[float, Vector]:
        values, gradients = zip(*(fun(x) for fun in funs), strict=True)
        return math.fsum(map(float, values)), combine([1.0] * len(funs), gradients)

    return total


class _Parts:
    """The x and u of each part, and rho."""

    def __init__(
        self, funs: Sequence[Function], proximals: Sequence[Proximal] | None, x: Vector, rho: float, tol: float
    ):
        self.rho, self.evaluations = rho, 0  # of the last iteration
        self._funs, self._proximals, self._tol = funs, proximals, tol
        self._xs = [x] * len(funs)
        self._us = [np.zeros_like(x) for _ in funs]

    def minimise(self, z: Vector) -> None:
        """Minimise each part near z - u."""
        self.evaluations = 0
        for i, u in enumerate(self._us):
            v = combine([1.0, -1.0], [z, u])
            if self._proximals is not None:
                self._xs[i] = self._proximals[i](v, self.rho)
                continue
            found = lbfgs(
                self._near(i, v), self._xs[i], tol=INNER_TOL * self._tol, f_tol=0.0, max_iter=INNER_ITERATIONS
            )
            self._xs[i] = found.x
            self.evaluations += found.nfev

    def _near(self, part: int, v: Vector) -> Function:
        def penalised(x: Vector) -> tuple[float, Vector]:
            value, gradient = self._funs[part](x)
            apart = combine([1.0, -1.0], [x, v])
            pull = self.rho / 2.0 * dots([(apart, apart)])[0]
            return float(value) + pull, combine([1.0, self.rho], [gradient, apart])

        return penalised

    def mean(self) -> Vector:
        """The mean of all x + u."""
        return combine([1.0 / len(self._xs)] * 2 * len(self._xs), [*self._xs, *self._us])

    def agree(self, z: Vector, before: Vector) -> tuple[float, float]:
        """Add x - z to each u. Returns (primal residual, dual residual)."""
        apart = [combine([1.0, -1.0], [x, z]) for x in self._xs]
        self._us = [combine([1.0, 1.0], pair) for pair in zip(self._us, apart, strict=True)]
        moved = combine([1.0, -1.0], [z, before])
        *squares, change = dots([(each, each) for each in [*apart, moved]]).tolist()
        return math.sqrt(sum(squares)), self.rho * math.sqrt(len(self._xs) * change)

    def larger_residual(self, z: Vector, primal: float, dual: float) -> float:
        """The larger residual, as a fraction of the norms that it is compared with (section 3.3.1)."""
        squares = dots([(each, each) for each in [z, *self._xs, *self._us]])
        count = len(self._xs)
        floor = FLOOR * math.sqrt(count * z.shape[0])
        scale = max(math.sqrt(count * squares[0]), math.sqrt(sum(squares[1 : count + 1])))
        return max(primal / (floor + scale), dual / (floor + self.rho * math.sqrt(sum(squares[count + 1 :]))))

    def balance(self, primal: float, dual: float) -> None:
        """Change rho if one residual is much larger than the other."""
        factor = FACTOR if primal > BALANCE * dual else 1.0 / FACTOR if dual > BALANCE * primal else 1.0
        if factor != 1.0:
            self.rho *= factor
            self._us = [combine([1.0 / factor], [u]) for u in self._us]
