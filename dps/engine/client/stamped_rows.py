"""StampedRows: rows by key in memory of a fixed size, and a *stamp* for each, which tells the oldest ones. Pure."""

from __future__ import annotations

import numpy as np

from dps.engine.core.shards.index import KeyIndex, keys_of

__all__ = ["NEVER", "StampedRows"]

NEVER = np.iinfo(np.int64).max  # the stamp of a place that has no row, so that it counts as the newest


class StampedRows:
    """Rows in *places* 0, 1, 2, ... below `room`. Its user sees to it that no more are put.

    Parameters
    ----------
    room, dim : int
    dtype : numpy dtype
    salt : int
        Of the hashes.

    Attributes
    ----------
    rows : ndarray
        [room, dim].
    stamps : ndarray of int64
        [room].

    Examples
    --------
    >>> kept = StampedRows(room=4, dim=1, dtype=np.dtype("float32"), salt=0)
    >>> kept.put(np.array([7, 8]), np.float32([[1], [2]]), np.array([5, 6]))
    array([0, 1])
    >>> kept.remove(np.array([7, 9]))
    >>> kept.find(np.array([7, 8])), len(kept), kept.used, kept.keys_at(np.array([1]))
    (array([-1,  1]), 1, array([9223372036854775807,                   6]), array([8]))
    """

    def __init__(self, room: int, dim: int, dtype: np.dtype, salt: int):
        self._index = KeyIndex(salt)
        # The system provides the memory of these arrays page by page, as rows come.
        self.rows, self.stamps = np.empty((room, dim), dtype), np.empty(room, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def used(self) -> np.ndarray:
        """The stamps of all places that have or had a row; a view."""
        return self.stamps[: self._index.end]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The places of rows; -1 for those that are not there."""
        places = np.empty(len(keys), np.int64)
        self._index.find(keys, places)
        return places

    def put(self, keys: np.ndarray, rows: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Put rows in the place of those of the same keys, or into free places; where they are."""
        places = np.empty(len(keys), np.int64)
        self._index.insert(keys, places)
        self.rows[places], self.stamps[places] = rows, stamps
        return places

    def keys_at(self, places: np.ndarray) -> np.ndarray:
        """The keys of rows, for which the whole index is read."""
        return keys_of(self._index.tables, self._index.end)[places]

    def remove(self, keys: np.ndarray | None) -> None:
        """Let the rows of these keys go; None: all rows."""
        if keys is None:
            self.used[:] = NEVER  # because places that have no row yet may be looked at before they have one again
            self._index = KeyIndex(self._index.salt)
        elif len(self._index):
            places = self.find(keys)
            self.stamps[places[places >= 0]] = NEVER
            self._index.remove(keys)
