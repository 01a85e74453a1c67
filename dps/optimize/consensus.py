"""Consensus ADMM (Boyd, Parikh, Chu, Peleato and Eckstein 2011, section 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from dask.distributed import Future
from scipy.optimize import OptimizeResult

from dps.errors import InputTypeError
from dps.optimize.minimization import Callback, Function, Minimization, positive
from dps.optimize.orthants import penalty_of, weights_of_l1
from dps.optimize.parts import LocalParts, Parts, Proximal, RemoteParts, Squares
from dps.optimize.vectors import Vector, combine, dots, soft_threshold, stored

__all__ = ["admm"]

# Tolerance of L-BFGS for a part, as a fraction of tol.
INNER_TOL = 0.1
# Norm of each element below which tolerances are absolute.
FLOOR = 0.01
# Ratio of the residuals above which rho changes, and the factor by which it does (section 3.4.1).
BALANCE = 10.0
FACTOR = 2.0


def admm(
    funs: Sequence[Function | Future],
    x0: Vector,
    *,
    l1: float | Vector = 0.0,
    rho: float = 1.0,
    adapt: bool = True,
    proximals: Sequence[Proximal | Future] | None = None,
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
        ``fun(x) -> (loss, gradient)`` of each part; smooth and convex. Each gradient is a new array. If they are
        futures of Dask, each part is minimised in a task where its function lies, and x is an array of numpy.
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
        closed form. By default :func:`lbfgs` does it, from the part's x before. Futures of Dask where `funs` are.
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
    futures = [fun for fun in funs if isinstance(fun, Future)]
    functions = [fun for fun in funs if callable(fun)]
    if not funs or len(funs) not in (len(futures), len(functions)):
        raise InputTypeError(
            "funs is a list of one or more functions of x that return (loss, gradient), or of their futures"
        )
    if proximals is not None and len(proximals) != len(funs):
        raise InputTypeError(f"there are {len(funs)} funs and {len(proximals)} proximals: each fun needs its own")
    inner = [None] * len(funs) if proximals is None else list(proximals), INNER_TOL * tol
    parts: Parts = RemoteParts(futures, *inner) if futures else LocalParts(functions, *inner)
    task = Minimization(parts.total, x0, tol, 0.0, max_iter, callback, watched="the larger residual, of its scale,")
    weights, rho = weights_of_l1(l1, task.x), positive("rho", rho)
    task.begin()
    task.value += penalty_of(task.x, weights)
    parts.begin(task.x)
    residuals = Residuals(math.inf, math.inf, 1.0, 1.0)
    while not task.nit or not task.ended(residuals.larger()):
        mean, evaluations = parts.minimise(task.x, rho)
        z = stored(soft_threshold(mean, weights * (1.0 / (rho * len(funs)))))
        residuals = residuals_of(parts.agree(z), z, task.x, rho, len(funs))
        value, gradient = task.evaluate(z)
        task.nfev += evaluations
        task.advance(z, value + penalty_of(z, weights), gradient)
        factor = residuals.factor() if adapt else 1.0
        if factor != 1.0:
            rho *= factor
            parts.rescale(1.0 / factor)
    result = task.result()
    result.update(primal_residual=residuals.primal, dual_residual=residuals.dual, rho=rho)
    return result


class Residuals(NamedTuple):
    """How far the parts are from agreement, and z from rest; and the norms with which these are compared (3.3.1)."""

    primal: float
    dual: float
    primal_scale: float
    dual_scale: float

    def larger(self) -> float:
        """The larger residual, as a fraction of its scale."""
        return max(self.primal / self.primal_scale, self.dual / self.dual_scale)

    def factor(self) -> float:
        """By which to change rho: 1 unless one residual is much larger than the other."""
        if self.primal > BALANCE * self.dual:
            return FACTOR
        return 1.0 / FACTOR if self.dual > BALANCE * self.primal else 1.0


def residuals_of(squares: Squares, z: Vector, before: Vector, rho: float, count: int) -> Residuals:
    """The residuals, given the sums of squares of `count` parts, and z of this iteration and the one before."""
    moved = combine([1.0, -1.0], [z, before])
    change, size = dots([(moved, moved), (z, z)]).tolist()
    floor = FLOOR * math.sqrt(count * z.shape[0])
    primal_scale = floor + max(math.sqrt(count * size), math.sqrt(squares.x))
    dual_scale = floor + rho * math.sqrt(squares.u)
    return Residuals(math.sqrt(squares.apart), rho * math.sqrt(count * change), primal_scale, dual_scale)
