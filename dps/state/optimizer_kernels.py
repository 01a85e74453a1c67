"""The steps of the optimizers, compiled: ``kernel(rows, index, start, updates, numbers)``, in place.

rows : [capacity, dim + slots], C-contiguous; values in the first dim columns, the optimizer's state in the rest
index : int64[m], the row of each update, none negative; of length 0: rows start, start + 1, ... start + m - 1
updates : [m, dim], C-contiguous, in the dtype of rows
numbers : float64, the optimizer's parameters in the order of its fields, the schedule evaluated

Three things keep the kernels fast and the replicas of a shard bit-identical. Row and column numbers are unsigned:
numba tests signed ones for negative values, and that test keeps the loops over columns from vectorising, which costs a
factor of 4 (as does, for FTRL, ``rows[r, j]`` instead of a view of the row). Parameters are cast once to the table's
dtype, and no bare 1 or 0.5 stands inside the loops, so that float32 stays float32. There is no fastmath and no function
of the C library, only exactly rounded operations in the written order.
"""

from __future__ import annotations

import numba
import numpy as np

from dps.state.portable import power

__all__ = ["adagrad", "adam", "add", "assign", "ftrl", "momentum", "rmsprop", "sgd"]

Array = np.ndarray
_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


@_jit
def _row(index: Array, start: int, i: int) -> np.uint64:
    return np.uint64(index[i]) if len(index) > 0 else np.uint64(start + i)


@_jit
def _clip(x: float, limit: float) -> float:
    return min(max(x, -limit), limit)


@_jit
def _proximal(w: float, rate: float, l1: float, l2: float, one: float) -> float:
    """argmin over x of (x - w)^2 / 2 + rate l1 |x| + rate l2 x^2 / 2."""
    return (w - _clip(w, rate * l1)) / (one + rate * l2)


@_jit
def add(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """w <- w + g."""
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            row[j] += update[j]


@_jit
def assign(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """w <- g."""
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            row[j] = update[j]


@_jit
def sgd(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.SGD`."""
    cast = rows.dtype.type
    lr, l1, l2, one = cast(numbers[0]), cast(numbers[1]), cast(numbers[2]), cast(1)
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            row[j] -= lr * update[j]
        if l1 > 0 or l2 > 0:
            for j in range(dim):
                row[j] = _proximal(row[j], lr, l1, l2, one)


@_jit
def momentum(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.Momentum`."""
    cast = rows.dtype.type
    lr, keep, nesterov = cast(numbers[0]), cast(numbers[1]), numbers[2] > 0
    from_gradient = cast(1) if nesterov else cast(0)
    from_velocity = keep if nesterov else cast(1)
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            g = update[j]
            velocity = keep * row[dim + j] + g
            row[dim + j] = velocity
            row[j] -= lr * (from_gradient * g + from_velocity * velocity)


@_jit
def adagrad(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.Adagrad`."""
    cast = rows.dtype.type
    lr, eps, l1, l2, one = cast(numbers[0]), cast(numbers[1]), cast(numbers[3]), cast(numbers[4]), cast(1)
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            g = update[j]
            total = row[dim + j] + g * g
            row[dim + j] = total
            row[j] -= lr * g / (np.sqrt(total) + eps)
        if l1 > 0 or l2 > 0:
            for j in range(dim):
                rate = lr / (np.sqrt(row[dim + j]) + eps)
                row[j] = _proximal(row[j], rate, l1, l2, one)


@_jit
def rmsprop(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.RMSprop`."""
    cast = rows.dtype.type
    lr, rho, rest, eps = cast(numbers[0]), cast(numbers[1]), cast(1.0 - numbers[1]), cast(numbers[2])
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            g = update[j]
            mean = rho * row[dim + j] + rest * g * g
            row[dim + j] = mean
            row[j] -= lr * g / (np.sqrt(mean) + eps)


@_jit
def adam(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.Adam`, :class:`dps.AdamW`."""
    cast = rows.dtype.type
    lr, beta1, beta2, eps = numbers[0], cast(numbers[1]), cast(numbers[2]), cast(numbers[3])
    rest1, rest2 = cast(1.0 - numbers[1]), cast(1.0 - numbers[2])
    keep = cast(1.0 - lr * numbers[4]) if len(numbers) > 4 else cast(1)  # AdamW's weight decay
    dim = np.uint64(updates.shape[1])
    last = dim + dim + dim  # columns: values, first moments, second moments, the row's steps
    known, size, scale = 0, cast(0), cast(0)  # the number of steps for which size and scale were computed
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        row[last] += cast(1)  # in float32 it stays at 2^24; the bias correction is 1 long before
        steps = int(row[last])
        if steps != known:
            known = steps
            size = cast(lr / (1.0 - power(numbers[1], steps)))
            scale = cast(1.0 / np.sqrt(1.0 - power(numbers[2], steps)))
        for j in range(dim):
            g = update[j]
            first = beta1 * row[dim + j] + rest1 * g
            row[dim + j] = first
            second = beta2 * row[dim + dim + j] + rest2 * g * g
            row[dim + dim + j] = second
            row[j] = keep * row[j] - size * first / (np.sqrt(second) * scale + eps)


@_jit
def ftrl(rows: Array, index: Array, start: int, updates: Array, numbers: Array) -> None:
    """:class:`dps.FTRL`."""
    cast = rows.dtype.type
    per_alpha, beta, l1, l2 = cast(1.0 / numbers[0]), cast(numbers[1]), cast(numbers[2]), cast(numbers[3])
    dim = np.uint64(updates.shape[1])
    for i in range(len(updates)):
        row, update = rows[_row(index, start, i)], updates[i]
        for j in range(dim):
            g, w = update[j], row[j]
            n = row[dim + dim + j]
            total = n + g * g
            root = np.sqrt(total)
            z = row[dim + j] + g - (root - np.sqrt(n)) * per_alpha * w
            row[dim + j] = z
            row[dim + dim + j] = total
            solved = (_clip(z, l1) - z) / ((beta + root) * per_alpha + l2)
            row[j] = w if total == 0 else solved  # no gradient yet: the initial value stands
