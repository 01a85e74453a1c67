"""Kernels: compiled inner loops over rows (gather, scatter, sum). All release the GIL and are cached on disk."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["accumulate", "all_finite", "count_wanted", "flag", "follow", "gather", "gather_range"]
__all__ += ["mark", "save", "scatter", "take", "take_wanted"]


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
    """out[j] = source[order[start + j]]: rows of a caller's array, in the order in which they travel."""
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
    """out[order[start + j]] = source[j]: rows that have arrived, in the order of the caller's keys."""
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
def flag(flags, index, start, count, bits):
    """flags[index[i]] |= bits (`index` of length 0: start + i)."""
    listed = index.shape[0] > 0
    for i in range(count):
        r = np.uint64(index[i]) if listed else np.uint64(start + i)
        flags[r] |= np.uint8(bits)


@njit(nogil=True, cache=True)
def save(rows, index, start, count, first, end, existing, place, saved, used):
    """Copy those rows index[i] (of length 0: start + i) that have no place yet to saved[used], ...; the new `used`.

    place[r] becomes 1 + the number of the copy of row r. Rows from `existing` on are new: they get -1, and no copy.
    Rows outside first .. end - 1 are left out.
    """
    listed = index.shape[0] > 0
    for i in range(count):
        r = index[i] if listed else start + i
        if first <= r < end and place[np.uint64(r)] == 0:
            if r >= existing:
                place[np.uint64(r)] = -1
            else:
                row, copy = rows[np.uint64(r)], saved[np.uint64(used)]
                for c in range(row.shape[0]):
                    copy[c] = row[c]
                used += 1
                place[np.uint64(r)] = used
    return used


@njit(nogil=True, cache=True)
def follow(index, start, count, place, used, which, where):
    """Find the saved copies of rows index[i] (of length 0: start + i): each i in `which`, its copy's number in `where`.

    Rows whose place is -1 get a copy: number `used`, `used` + 1, ... Returns how many rows have a copy, and the new
    `used`.
    """
    listed = index.shape[0] > 0
    copies = 0
    for i in range(count):
        r = np.uint64(index[i]) if listed else np.uint64(start + i)
        at = place[r]
        if at != 0:
            if at < 0:
                used += 1
                at = place[r] = used
            which[copies], where[copies] = i, at - 1
            copies += 1
    return copies, used


@njit(nogil=True, cache=True)
def count_wanted(place, flags, bits, end):
    """How many of the rows 0 .. end - 1 :func:`take_wanted` would copy."""
    count = 0
    for r in range(end):
        count += int(place[r] >= 0 and (flags.shape[0] == 0 or flags[r] & bits != 0))
    return count


@njit(nogil=True, cache=True)
def take_wanted(rows, first, end, place, saved, flags, bits, out, which):
    """Copy rows first .. end - 1, or their saved copies, to out[0], ..., until `out` is full.

    Left out are rows whose place is -1, and rows without any of the `bits` in their flags (`flags` of length 0: none of
    these). The numbers of the copied rows go to `which`. Returns how many rows were copied, and the row to go on with.
    """
    taken = 0
    for r in range(first, end):
        if taken == out.shape[0]:
            return taken, r
        at = place[np.uint64(r)]
        if at >= 0 and (flags.shape[0] == 0 or flags[np.uint64(r)] & bits != 0):
            row, copy = rows[np.uint64(r)] if at == 0 else saved[np.uint64(at - 1)], out[np.uint64(taken)]
            for c in range(copy.shape[0]):
                copy[c] = row[c]
            which[np.uint64(taken)] = r
            taken += 1
    return taken, end


@njit(nogil=True, cache=True)
def all_finite(values):
    """Whether no value is NaN or infinite (`values` flat)."""
    bad = False  # a bool, because the loop vectorises with it; with a counter it is a fifth slower
    for i in range(values.shape[0]):
        v = values[i]
        bad |= (v - v) != 0
    return not bad
