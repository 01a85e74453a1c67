"""The inner loops over rows: gather, scatter, sums. All release the GIL and are cached on disk."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["accumulate", "all_finite", "gather", "gather_range", "mark", "scatter", "take"]


@njit(nogil=True, cache=True)
def gather(rows, index, out):
    """out[i] = the values (first columns) of rows[index[i]]; zeros where index[i] < 0."""
    dim = out.shape[1]
    if dim == 1:
        for i in range(index.shape[0]):
            r = index[i]
            out[i, 0] = rows[np.uint64(r), 0] if r >= 0 else 0
    else:
        for i in range(index.shape[0]):
            r = index[i]
            if r >= 0:
                for c in range(dim):
                    out[i, c] = rows[np.uint64(r), c]
            else:
                for c in range(dim):
                    out[i, c] = 0


@njit(nogil=True, cache=True)
def gather_range(rows, start, out):
    """out[i] = the values of rows[start + i]."""
    for i in range(out.shape[0]):
        for c in range(out.shape[1]):
            out[i, c] = rows[start + i, c]


@njit(nogil=True, cache=True)
def take(source, order, start, out):
    """out[j] = source[order[start + j]]: rows of a caller's array into the order they travel in."""
    if out.shape[1] == 1:
        for j in range(out.shape[0]):
            out[j, 0] = source[np.uint64(order[start + j]), 0]
    else:
        for j in range(out.shape[0]):
            i = np.uint64(order[start + j])
            for c in range(out.shape[1]):
                out[j, c] = source[i, c]


@njit(nogil=True, cache=True)
def scatter(source, order, start, out):
    """out[order[start + j]] = source[j]: rows that arrived, into the places the caller asked for."""
    if out.shape[1] == 1:
        for j in range(source.shape[0]):
            out[np.uint64(order[start + j]), 0] = source[j, 0]
    else:
        for j in range(source.shape[0]):
            i = np.uint64(order[start + j])
            for c in range(out.shape[1]):
                out[i, c] = source[j, c]


@njit(nogil=True, cache=True)
def accumulate(sums, index, start, updates):
    """sums[index[i]] += updates[i] (`index` of length 0: start + i)."""
    listed = index.shape[0] > 0
    for i in range(updates.shape[0]):
        r = index[i] if listed else start + i
        for c in range(updates.shape[1]):
            sums[r, c] += updates[i, c]


@njit(nogil=True, cache=True)
def mark(touched, index, start, count):
    """touched[index[i]] = True (`index` of length 0: start + i)."""
    listed = index.shape[0] > 0
    for i in range(count):
        touched[index[i] if listed else start + i] = True


@njit(nogil=True, cache=True)
def all_finite(values):
    """Whether no value is NaN or infinite (`values` flat)."""
    bad = 0
    for i in range(values.shape[0]):
        v = values[i]
        bad += (v - v) != 0
    return bad == 0
