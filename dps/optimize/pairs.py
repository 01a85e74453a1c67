"""The pairs of L-BFGS, and the direction that follows from them, in the vector-free form of Chen, Wang and Zhou (2014).

The two-loop recursion is made on coefficients: the direction is a linear combination of the basis (steps, changes of
the gradient, gradient), and the recursion needs only dot products of these, a matrix of (2m + 1)^2 numbers. The
products that are new in an iteration are computed in one call, and the direction in another one.
"""

from __future__ import annotations

import numpy as np

from dps.optimize.vectors import Vector, combine, dots

__all__ = ["Pairs"]


class Pairs:
    """At most `m` pairs of steps and changes of the gradient. A new pair replaces the oldest."""

    def __init__(self, m: int):
        self._most = m
        self._steps: list[Vector] = []
        self._changes: list[Vector] = []
        self._products = np.zeros((0, 0))  # products of steps and changes with each other; 0 for two steps: not needed
        self._known = 0  # pairs of which the products are there

    def __len__(self) -> int:
        return len(self._steps)

    def make_room(self) -> None:
        """Give up the oldest pair, if there are `m`, before vectors of a new one are made."""
        if len(self) < self._most:
            return
        pairs = len(self)
        del self._steps[0], self._changes[0]
        self._products = np.delete(np.delete(self._products, [0, pairs], 0), [0, pairs], 1)
        self._known -= 1

    def add(self, step: Vector, change: Vector) -> None:
        """A new pair; the dot product of the two is positive."""
        self._steps.append(step)
        self._changes.append(change)

    def clear(self) -> None:
        self.__init__(self._most)  # type: ignore[misc]

    def direction(self, gradient: Vector) -> tuple[Vector, float]:
        """(minus the approximate inverse Hessian times the gradient, the slope along it)."""
        pairs, known = len(self), self._known
        basis = [*self._steps, *self._changes, gradient]
        old = [*range(known), *range(pairs, pairs + known)]
        products = np.zeros((2 * pairs + 1, 2 * pairs + 1))
        products[np.ix_(old, old)] = self._products
        missing = [
            (i, j)
            for j in range(len(basis))
            for i in range(j + 1)
            if j >= pairs and not (i in old and j in old)  # j < pairs: two steps
        ]
        for (i, j), product in zip(missing, dots([(basis[i], basis[j]) for i, j in missing]), strict=True):
            products[i, j] = products[j, i] = product
        self._products, self._known = products[:-1, :-1], pairs
        coefficients = two_loops(products)
        return combine(coefficients.tolist(), basis), float(coefficients @ products[-1])


def two_loops(products: np.ndarray) -> np.ndarray:
    """Coefficients of the direction in the basis (steps, changes, gradient), of which these are the dot products.

    Examples
    --------
    Without a pair, the direction is minus the gradient; with one, the step is repeated where it explains the gradient.

    >>> two_loops(np.array([[4.0]]))
    array([-1.])
    >>> s, y, g = np.eye(2)[0], 2 * np.eye(2)[0], np.array([3.0, 0.0])
    >>> basis = np.array([s, y, g])
    >>> two_loops(basis @ basis.T) @ basis
    array([-1.5,  0. ])
    """
    pairs = len(products) // 2
    coefficients, alphas = np.zeros(len(products)), np.zeros(pairs)
    coefficients[-1] = -1.0
    if not pairs:
        return coefficients
    for i in reversed(range(pairs)):
        alphas[i] = coefficients @ products[i] / products[i, pairs + i]
        coefficients[pairs + i] -= alphas[i]
    coefficients *= products[pairs - 1, 2 * pairs - 1] / products[2 * pairs - 1, 2 * pairs - 1]
    for i in range(pairs):
        beta = coefficients @ products[pairs + i] / products[i, pairs + i]
        coefficients[i] += alphas[i] - beta
    return coefficients
