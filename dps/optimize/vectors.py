"""Operations on vectors: numpy arrays, or any others that follow numpy's protocols.

Solvers use arithmetic, also in place, ``np.where``, ``np.sign``, ``np.abs``, ``np.maximum``, ``np.zeros_like``,
``.copy()`` and the functions below, and nothing else. So they run on every class of arrays that has these.

A class whose calls are expensive, because its numbers are in other processes, may have a static or class method
``__dps_dots__(pairs) -> list of float``, which computes the dot products of all pairs in one round trip, and, if its
expressions are lazy, a method ``compute()``, which computes one where it lies and returns it. `dps.arrays` has both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

__all__ = ["Vector", "combine", "dots", "soft_threshold", "stored"]

# Vector: a numpy array of one dimension, or an object that follows numpy's protocols.
Vector: TypeAlias = Any

# Elements of large numpy arrays that are worked on together: 20 blocks of float64 fit into a core's second cache.
BLOCK = 4096


def dots(pairs: Sequence[tuple[Vector, Vector]]) -> np.ndarray:
    """The dot products of many pairs of vectors at once, as float64.

    Parameters
    ----------
    pairs : sequence of (vector, vector)
        Numpy arrays, or vectors of a class with ``__dps_dots__``, which then gets all pairs in one call.

    Returns
    -------
    ndarray of float64
        For numpy arrays of a smaller dtype, too, blocks of 4096 elements are summed in float64.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    >>> dots([(a, a), (a, b)])
    array([ 5., 11.])
    """
    together = _together(pairs)
    if together is not None:
        return np.asarray(together(pairs), np.float64)
    totals = np.zeros(len(pairs))
    if not all(isinstance(a, np.ndarray) and isinstance(b, np.ndarray) for a, b in pairs):
        return np.array([float(np.dot(a, b)) for a, b in pairs], np.float64)
    length = max((len(a) for a, _ in pairs), default=0)
    for start in range(0, length, BLOCK):
        part = slice(start, start + BLOCK)
        double = {id(v): v[part].astype(np.float64, copy=False) for pair in pairs for v in pair}
        totals += [np.dot(double[id(a)], double[id(b)]) for a, b in pairs]
    return totals


def _together(pairs: Sequence[tuple[Vector, Vector]]) -> Callable[[Sequence], Sequence[float]] | None:
    methods = (getattr(type(vector), "__dps_dots__", None) for pair in pairs for vector in pair)
    return next((method for method in methods if method is not None), None)


def combine(coefficients: Sequence[float], vectors: Sequence[Vector]) -> Vector:
    """A linear combination of vectors, as a new vector. Lazy arrays make it one expression, which is evaluated once.

    Parameters
    ----------
    coefficients : sequence of float
        A term whose coefficient is 0 is left out, whatever its vector holds.
    vectors : sequence of vectors

    Returns
    -------
    vector
        It has the dtype of the vectors.

    Examples
    --------
    >>> import numpy as np
    >>> combine([2.0, -1.0], [np.array([1.0, 2.0]), np.array([0.0, 1.0])])
    array([2., 3.])
    """
    terms = [(float(c), vector) for c, vector in zip(coefficients, vectors, strict=True) if c]
    if not terms:
        return np.zeros_like(vectors[0])
    if all(isinstance(vector, np.ndarray) for _, vector in terms):
        return _combined(terms)
    (first, vector), *rest = terms
    expression = vector.copy() if first == 1.0 and not rest else vector if first == 1.0 else first * vector
    for coefficient, vector in rest:
        expression = expression + (vector if coefficient == 1.0 else coefficient * vector)
    return stored(expression)


def _combined(terms: list[tuple[float, np.ndarray]]) -> np.ndarray:
    result = np.zeros(terms[0][1].shape, np.result_type(*(vector for _, vector in terms)))
    product = np.empty(min(BLOCK, len(result)), result.dtype)
    for start in range(0, len(result), BLOCK):
        sums = result[start : start + BLOCK]
        for coefficient, vector in terms:
            sums += np.multiply(vector[start : start + BLOCK], coefficient, out=product[: len(sums)])
    return result


def stored(expression: Vector) -> Vector:
    """The expression itself, computed now if its class is lazy, because it would keep its operands alive."""
    lazy = hasattr(type(expression), "__dps_dots__") and hasattr(expression, "compute")
    return expression.compute() if lazy else expression


def soft_threshold(vector: Vector, threshold: float | Vector) -> Vector:
    """Each element moved towards 0 by `threshold`, and no further: the proximal operator of the L1 norm."""
    return np.sign(vector) * np.maximum(np.abs(vector) - threshold, 0.0)
