"""TableSum: the sum by key of several pushes to a table, and how such sums travel between processes of a machine. Pure.

A process sends the sums of its trainers with SUM to the process of its machine that sends for all
(`client/machine_meeting.py`). The body has the names of the tables, and of each table the stamps, keys and rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dps.engine.wire.frames import pack_arrays, unpack_arrays
from dps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Sums", "TableSum", "joined_sums", "pack_sums", "sum_by_key", "unpack_sums"]

STAMP_FIELDS = 4  # an origin, its attempt, and the first and the last number of its pushes


class TableSum(NamedTuple):
    """The sum of pushes to a table.

    `stamps` has a row for each trainer, int64[n, 4]: its origin, its attempt, the first and the last number of its
    pushes. `keys`, int64[m], ascend; `rows`, [m, dim], are the sums.
    """

    stamps: np.ndarray
    keys: np.ndarray
    rows: np.ndarray


Sums = dict[str, TableSum]  # by table


def sum_by_key(keys: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The keys of several pushes, each once, in ascending order, and the sums of their rows.

    >>> sum_by_key([np.array([7, 5, 7]), np.array([5])], [np.float32([[1], [2], [3]]), np.float32([[10]])])
    (array([5, 7]), array([[12.],
           [ 4.]], dtype=float32))
    """
    if (np.diff(keys[0]) > 0).all() and all(np.array_equal(each, keys[0]) for each in keys[1:]):  # as of a dense model
        return keys[0], functools.reduce(np.add, values)
    named, rows = np.concatenate(keys), np.concatenate(values)
    order = np.argsort(named, kind="stable")
    named = named[order]
    first = np.flatnonzero(np.append(True, named[1:] != named[:-1]))
    return named[first], np.add.reduceat(rows[order], first, axis=0, dtype=rows.dtype)


def joined_sums(parts: Iterable[Sums]) -> Sums:
    """The sums of several processes as one. A table whose rows do not match in all of them is left out.

    >>> part = {"w": TableSum(np.array([[7, 0, 0, 0]]), np.array([5]), np.float32([[1.0]]))}
    >>> other = {"w": TableSum(np.array([[8, 0, 3, 4]]), np.array([5, 6]), np.float32([[2.0], [3.0]]))}
    >>> joined = joined_sums([part, other])["w"]
    >>> joined.keys.tolist(), joined.rows.tolist(), joined.stamps.tolist()
    ([5, 6], [[3.0], [3.0]], [[7, 0, 0, 0], [8, 0, 3, 4]])
    """
    by_table: dict[str, list[TableSum]] = {}
    for part in parts:
        for table, each in part.items():
            by_table.setdefault(table, []).append(each)
    joined: Sums = {}
    for table, sums in by_table.items():
        if len({(each.rows.shape[1:], each.rows.dtype) for each in sums}) == 1:
            keys, rows = sum_by_key([each.keys for each in sums], [each.rows for each in sums])
            joined[table] = TableSum(np.concatenate([each.stamps for each in sums]), keys, rows)
    return joined


def pack_sums(sums: Sums) -> tuple[int, list[Buffer]]:
    """The body of SUM: the bytes of its description, and the buffers."""
    return pack_arrays({"tables": list(sums)}, [array for each in sums.values() for array in each])


def unpack_sums(text_bytes: int, body: memoryview) -> Sums:
    """What :func:`pack_sums` packed; the arrays are views of `body`. Raises ProtocolError for other bytes."""
    meta, arrays = unpack_arrays(text_bytes, body)
    tables = meta.get("tables") if isinstance(meta, dict) else None
    if not isinstance(tables, list) or len(arrays) != 3 * len(tables) or len(set(map(str, tables))) < len(tables):
        raise ProtocolError(f"sums of pushes of {len(arrays)} arrays for the tables {tables!r:.200}")
    sums = {str(table): TableSum(*arrays[3 * n : 3 * n + 3]) for n, table in enumerate(tables)}
    for table, (stamps, keys, rows) in sums.items():
        if (
            not (stamps.dtype == keys.dtype == np.int64)
            or (stamps.ndim, keys.ndim, rows.ndim) != (2, 1, 2)
            or stamps.shape[1] != STAMP_FIELDS
            or len(rows) != len(keys)
            or not len(stamps)
            or not len(keys)
        ):
            raise ProtocolError(
                f"a sum for table {table!r} has stamps {stamps.dtype}{list(stamps.shape)}, keys "
                f"{keys.dtype}{list(keys.shape)} and rows {rows.dtype}{list(rows.shape)}"
            )
    return sums
