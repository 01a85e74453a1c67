"""Logistic regression by FTRL-Proximal, with a step after each row of a sparse batch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dps.errors import InputError
from dps.kernels.arrays import as_array, as_csr, mean_loss, per_row, weights_of_rows
from dps.kernels.loops import ftrl as loops

__all__ = ["ftrl_steps", "ftrl_weights"]


def ftrl_weights(sums: npt.ArrayLike, alpha: float, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0) -> np.ndarray:
    """Compute weights from the sums z and n of FTRL-Proximal.

    w = 0 where \\|z\\| <= l1, elsewhere w = -(z - sign(z) l1) / ((beta + sqrt(n)) / alpha + l2): McMahan et al., "Ad
    click prediction: a view from the trenches", 2013, Algorithm 1.

    Parameters
    ----------
    sums
        ``[k, 2 m]``: the z of m outputs, and then their n, the sum of the squares of gradients.
    alpha, beta, l1, l2
        As of :class:`dps.FTRL`.

    Returns
    -------
    float32 array, ``[k]`` for one output or ``[k, m]``

    Examples
    --------
    >>> ftrl_weights([[3.0, 9.0], [0.5, 4.0]], alpha=1.0, l1=1.0)
    array([-0.5,  0. ], dtype=float32)
    """
    sums = two_dimensional(sums)
    check_rule(alpha, beta, l1, l2)
    m = sums.shape[1] // 2
    z, n = sums[:, :m], sums[:, m:]
    shrunk = np.maximum(np.abs(z) - np.float32(l1), 0)
    speed = (np.float32(beta) + np.sqrt(n)) / np.float32(alpha) + np.float32(l2)
    w = np.zeros_like(z)
    np.divide(-np.copysign(shrunk, z), speed, out=w, where=shrunk > 0)  # speed may be 0 where no gradient has come
    return w[:, 0] if m == 1 else w


def two_dimensional(sums: npt.ArrayLike) -> np.ndarray:
    """Rows [z | n] as float32."""
    array = as_array(sums, np.float32)
    if array.ndim != 2 or array.shape[1] < 2 or array.shape[1] % 2:
        raise InputError(f"sums of shape {array.shape}: [k, 2 m] wanted, z and n of m outputs")
    check_squares(array)
    return array


def check_squares(sums: np.ndarray) -> None:
    """Refuse an n that is no sum of squares."""
    n = sums[:, sums.shape[1] // 2 :]
    if n.size and not n.min() >= 0:  # also for NaN
        raise InputError(f"n is a sum of squares, 0 or more, and the least is {n.min():g}: rows are [z | n]")


def check_rule(alpha: float, beta: float, l1: float, l2: float) -> None:
    """Refuse numbers of which FTRL makes no weights."""
    if not 0 < alpha < np.inf:
        raise InputError(f"alpha is a number above 0, not {alpha!r}")
    for name, value in (("beta", beta), ("l1", l1), ("l2", l2)):
        if not 0 <= value < np.inf:
            raise InputError(f"{name} is a number, 0 or more, not {value!r}")


def ftrl_steps(
    indptr: npt.ArrayLike,
    indices: npt.ArrayLike,
    data: npt.ArrayLike | None,
    sums: npt.ArrayLike,
    intercept: npt.ArrayLike,
    y: npt.ArrayLike,
    weights: npt.ArrayLike | None = None,
    *,
    alpha: float,
    beta: float = 1.0,
    l1: float = 0.0,
    l2: float = 0.0,
    fit_intercept: bool = True,
    trainers: int = 1,
) -> tuple[float, np.ndarray, np.ndarray]:
    """Make a step of logistic regression by FTRL-Proximal after each row of a batch.

    z <- z + g - (sqrt(n + g^2) - sqrt(n)) / alpha w; n <- n + g^2: McMahan et al., "Ad click prediction: a view from
    the trenches", 2013, Algorithm 1. The result is what the sums have gained. Gains of several trainers can be added,
    in any order, so a table without an optimizer holds the sums.

    Parameters
    ----------
    indptr, indices, data
        The batch; `data` may be ``None``: all ones. Non-zeros of a row with the same index make a step each.
    sums
        ``[k, 2 m]``: z and n of the features, as of :func:`ftrl_weights`. They stay as they are.
    intercept
        ``[2 m]`` or ``[1, 2 m]``: z and n of the intercept, which has no penalty.
    y
        Labels ``[n]``: 0 and 1 for one output, else numbers of classes, from 0 to m - 1.
    weights
        Of the rows; a gradient is multiplied by its row's.
    alpha, beta, l1, l2
        As of :class:`dps.FTRL`.
    fit_intercept
        Whether the intercept makes steps, too.
    trainers
        How many make steps from the same sums at the same time. For more than one, n gains
        (trainers - 1) max(0, G^2 - sum g^2) besides, where G is the sum of a feature's gradients g, so that all of them
        together do not overshoot where they agree. This estimates what AdaptiveRevision measures (McMahan and Streeter,
        "Delay-tolerant algorithms for asynchronous distributed online learning", 2014, Algorithm 3).

    Returns
    -------
    loss : float
        Mean log loss of the rows, each before its step.
    gains : float32 array, of the shape of `sums`
    intercept_gains : float32 array, of the shape of `intercept`

    Examples
    --------
    >>> loss, gains, level = ftrl_steps([0, 1, 2], [0, 0], None, [[0.0, 0.0]], [0.0, 0.0], [1, 1], alpha=1.0)
    >>> loss < 0.6931, gains.round(3), level.round(3)
    (True, array([[-0.874,  0.365]], dtype=float32), array([-0.874,  0.365], dtype=float32))
    """
    sums = two_dimensional(sums)
    level = as_array(intercept, np.float32)
    if level.size != sums.shape[1]:
        raise InputError(f"an intercept of shape {level.shape}: z and n, {sums.shape[1]} numbers, wanted")
    if not trainers >= 1:
        raise InputError(f"trainers is 1 or more, not {trainers!r}")
    check_rule(alpha, beta, l1, l2)
    check_squares(level.reshape(1, -1))
    ends, places, values = as_csr(indptr, indices, data, len(sums))
    n = len(ends) - 1
    if values is not None:
        values = as_array(values, np.float32)
    labels, sample = per_row(y, n, np.int64, "y"), weights_of_rows(weights, n)
    gains, level_gains = np.zeros_like(sums), np.zeros_like(level)
    loss = loops.ftrl_steps(
        ends, places, values, sums, level.reshape(1, -1), labels, sample,
        (alpha, beta, l1, l2), trainers - 1, not fit_intercept, gains, level_gains.reshape(1, -1),
    )  # fmt: skip
    return mean_loss(loss, n, sample), gains, level_gains
