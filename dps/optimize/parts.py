"""The parts of consensus ADMM: x and u of each, in this process, or in Dask tasks where the parts' functions lie."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from dask.distributed import Future

from dps.optimize.minimization import Function
from dps.optimize.quasi_newton import lbfgs
from dps.optimize.vectors import Vector, combine, dots

__all__ = ["LocalParts", "Parts", "Proximal", "RemoteParts", "Squares"]

# Iterations of L-BFGS for a part, in an iteration of ADMM.
INNER_ITERATIONS = 50
# Number of results that one task adds up.
FAN_IN = 8

R = TypeVar("R")
Proximal: TypeAlias = Callable[[Vector, float], Vector]


class Squares(NamedTuple):
    """Sums over all parts, after they were told the new z."""

    apart: float  # sum of |x - z|^2
    x: float  # sum of |x|^2
    u: float  # sum of |u|^2


class Parts(Protocol):
    """What the rule of ADMM asks of the parts."""

    def total(self, x: Vector) -> tuple[float, Vector]:
        """The sum of all functions at x, and its gradient."""

    def begin(self, x: Vector) -> None:
        """Begin at x with u = 0."""

    def minimise(self, z: Vector, rho: float) -> tuple[Vector, int]:
        """Minimise each part near z - u. Returns (the mean of all x + u, evaluations)."""

    def agree(self, z: Vector) -> Squares:
        """Add x - z to each u."""

    def rescale(self, factor: float) -> None:
        """Multiply each u."""


def minimised(fun: Function, proximal: Proximal | None, x: Vector, v: Vector, rho: float, tol: float) -> tuple:
    """(the x that minimises ``fun(x) + rho / 2 |x - v|^2``, evaluations), from the x before."""
    if proximal is not None:
        return proximal(v, rho), 0

    def penalised(x: Vector) -> tuple[float, Vector]:
        value, gradient = fun(x)
        apart = combine([1.0, -1.0], [x, v])
        pull = rho / 2.0 * dots([(apart, apart)])[0]
        return float(value) + pull, combine([1.0, rho], [gradient, apart])

    found = lbfgs(penalised, x, tol=tol, f_tol=0.0, max_iter=INNER_ITERATIONS)
    return found.x, found.nfev


class LocalParts:
    """Parts in this process; their vectors may be of any class."""

    def __init__(self, funs: Sequence[Function], proximals: Sequence[Any], tol: float):
        self._funs = funs
        self._proximals = proximals
        self._tol = tol
        self._xs: list[Vector] = []
        self._us: list[Vector] = []

    def total(self, x: Vector) -> tuple[float, Vector]:
        values, gradients = zip(*(fun(x) for fun in self._funs), strict=True)
        return math.fsum(map(float, values)), combine([1.0] * len(self._funs), gradients)

    def begin(self, x: Vector) -> None:
        self._xs = [x] * len(self._funs)
        self._us = [np.zeros_like(x) for _ in self._funs]

    def minimise(self, z: Vector, rho: float) -> tuple[Vector, int]:
        evaluations = 0
        for i, (fun, proximal) in enumerate(zip(self._funs, self._proximals, strict=True)):
            v = combine([1.0, -1.0], [z, self._us[i]])
            self._xs[i], calls = minimised(fun, proximal, self._xs[i], v, rho, self._tol)
            evaluations += calls
        count = len(self._xs)
        return combine([1.0 / count] * 2 * count, [*self._xs, *self._us]), evaluations

    def agree(self, z: Vector) -> Squares:
        apart = [combine([1.0, -1.0], [x, z]) for x in self._xs]
        self._us = [combine([1.0, 1.0], pair) for pair in zip(self._us, apart, strict=True)]
        squares = dots([(each, each) for each in [*apart, *self._xs, *self._us]])
        return Squares(*squares.reshape(3, -1).sum(axis=1).tolist())

    def rescale(self, factor: float) -> None:
        self._us = [combine([factor], [u]) for u in self._us]


class RemoteParts:
    """Parts in Dask tasks. Between iterations, x and u stay on the workers.

    A task is a function of the tasks before it and of z, so Dask computes a part again whose worker is lost, with the
    same result. For this the scheduler keeps z of each iteration.
    """

    def __init__(self, funs: Sequence[Future], proximals: Sequence[Any], tol: float):
        self._funs = funs
        self._proximals = proximals
        self._tol = tol
        self._client = funs[0].client
        self._states: list[Future] = []
        # Tasks of which no result has come. The scheduler may learn that a future is released before it has read the
        # graph of the tasks that depend on it.
        self._alive: list[Future] = []

    def total(self, x: Vector) -> tuple[float, Vector]:
        place = self._held(x)
        value, gradient = self._added([self._task(evaluated, fun, place) for fun in self._funs])
        return float(value), gradient

    def begin(self, x: Vector) -> None:
        self._states = [self._held((x, np.zeros_like(x)))] * len(self._funs)

    def minimise(self, z: Vector, rho: float) -> tuple[Vector, int]:
        place, how = self._held(z), (rho, self._tol)
        found = [
            self._task(near, fun, proximal, state, place, *how)
            for fun, proximal, state in zip(self._funs, self._proximals, self._states, strict=True)
        ]
        self._alive += self._states
        self._states = [self._task(first, each) for each in found]
        total, evaluations = self._added([self._task(shown, each) for each in found])
        return total / len(self._funs), int(evaluations)

    def agree(self, z: Vector) -> Squares:
        place = self._held(z)
        self._alive += self._states
        self._states = [self._task(told, state, place) for state in self._states]
        return Squares(*map(float, self._added([self._task(squares, state, place) for state in self._states])))

    def rescale(self, factor: float) -> None:
        self._alive += self._states
        self._states = [self._task(rescaled, state, factor) for state in self._states]

    def _task(self, function: Callable, *arguments: object) -> Future:
        self._alive.append(self._client.submit(function, *arguments, pure=False))
        return self._alive[-1]

    def _held(self, value: object) -> Future:
        """A value as a task, which Dask can make again, other than data that are scattered."""
        return self._task(itself, value)

    def _added(self, terms: list[Future]) -> tuple:
        """The sums of tuples, a few in a task."""
        while len(terms) > 1:
            terms = [self._task(added, terms[n : n + FAN_IN]) for n in range(0, len(terms), FAN_IN)]
        sums: tuple = terms[0].result()
        self._alive.clear()
        return sums


# -- in Dask's tasks; a state is (x, u)


def itself(value: R) -> R:
    return value


def first(pair: tuple) -> object:
    return pair[0]


def added(terms: list[tuple]) -> tuple:
    return tuple(sum(column[1:], start=column[0]) for column in zip(*terms, strict=True))


def evaluated(fun: Function, x: np.ndarray) -> tuple[float, np.ndarray]:
    value, gradient = fun(x)
    return float(value), gradient


def near(
    fun: Function, proximal: Proximal | None, state: tuple, z: np.ndarray, rho: float, tol: float
) -> tuple[tuple, int]:
    """((the new x, u), evaluations)."""
    x, u = state
    x, evaluations = minimised(fun, proximal, x, combine([1.0, -1.0], [z, u]), rho, tol)
    return (x, u), evaluations


def shown(found: tuple[tuple, int]) -> tuple[np.ndarray, int]:
    (x, u), evaluations = found
    return x + u, evaluations


def told(state: tuple, z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x, u = state
    return x, u + (x - z)


def squares(state: tuple, z: np.ndarray) -> tuple[float, float, float]:
    x, u = state
    return tuple(dots([(x - z, x - z), (x, x), (u, u)]).tolist())


def rescaled(state: tuple, factor: float) -> tuple[np.ndarray, np.ndarray]:
    x, u = state
    return x, factor * u
