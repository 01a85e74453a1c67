"""PulledRows: rows of a table as a batch needs them, each distinct row once.

A batch names ids, of any shape, some of them more than once. Its rows are pulled by their distinct keys, in the order
in which servers hold them, and *codes* say where the row of each id is. So a batch computes on a small array of its
own, and pushes one row for each key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeAlias

import numpy as np
import numpy.typing as npt

from dps.engine.client.client import Client
from dps.engine.client.inputs import as_keys, flat_keys
from dps.engine.client.table import Table
from dps.engine.client.verbs import Keys, Sparse, T, TableLike
from dps.engine.training.localize import localize
from dps.errors import InputTypeError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

__all__ = ["PulledRows", "WantedRows", "distinct_keys", "pull_rows"]

Codes: TypeAlias = "np.ndarray | csr_matrix"  # the place of each id among the distinct keys


class PulledRows:
    """The rows of a table that a batch needs.

    Parameters
    ----------
    keys : ndarray of int64
        The distinct ids of the batch.
    values : ndarray
        Their rows, as :meth:`dps.Client.pull` gives them for `keys`: ``(len(keys), dim)``, or ``(len(keys),)`` where
        dim is 1. It is a copy that belongs to its caller, who may write to it.
    codes : ndarray of int, or sparse matrix
        For each id of the batch its position in `keys`, in the shape of the ids: ``keys[codes]`` are the ids, and
        ``values[codes]`` the row of each. Where the ids were the columns of a sparse matrix, that matrix with its
        columns renumbered, so that ``codes @ values`` is its product with the rows.

    Examples
    --------
    >>> users = np.array([[7, 9], [7, 7]])
    >>> keys, codes = distinct_keys(users)
    >>> rows = PulledRows(keys, np.zeros((len(keys), 3), np.float32), codes)
    >>> bool((rows.keys[rows.codes] == users).all()), rows.values[rows.codes].shape
    (True, (2, 2, 3))
    """

    __slots__ = ("codes", "keys", "values")

    def __init__(self, keys: np.ndarray, values: np.ndarray, codes: Codes):
        self.keys, self.values, self.codes = keys, values, codes

    def __repr__(self) -> str:
        return f"<PulledRows: {len(self.keys)} keys, values {self.values.dtype}{self.values.shape}>"


def distinct_keys(ids: npt.ArrayLike | Sparse, table: str = "") -> tuple[np.ndarray, Codes]:
    """The distinct keys of ids in the order of their hashes, and for each id its position among them.

    Parameters
    ----------
    ids : array_like of int, or sparse matrix
        Of any shape. Results for an array are remembered as :func:`dps.localize` does.
    table : str
        For messages.

    Returns
    -------
    keys : ndarray of int64
    codes : ndarray of int32, or sparse matrix

    Raises
    ------
    InputTypeError
        The ids are no integers.

    Examples
    --------
    >>> keys, codes = distinct_keys([5, -2, 5])
    >>> sorted(keys.tolist()), keys[codes].tolist()
    ([-2, 5], [5, -2, 5])
    """
    if hasattr(ids, "nnz") and hasattr(ids, "shape") and not getattr(ids, "is_sparse", False):
        return localize(ids)
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        return localize(ids)
    flat, shape = as_keys(ids, table)
    return localize(flat.reshape(shape), remember=False)


class WantedRows(Generic[T]):
    """Which rows of some tables a batch needs, before they are pulled.

    `ids` has for each table the ids of the batch; None or a slice names rows of a dense table.
    `what` names, for messages, what has said which rows these are.
    `keys` has the distinct keys of each table; of a slice, or of all rows, in the order of the rows.
    `asked` has the same as a pull takes them: a slice of step 1, or None, is not cut into keys.
    Raises InputTypeError if `ids` is not a mapping, or the ids of a table are no integers.
    Raises UnknownTableError if there is no such table.
    """

    def __init__(self, client: Client, ids: Mapping[T, Keys], what: str = "rows"):
        if not isinstance(ids, Mapping):
            raise InputTypeError(f"{what} takes a dict, {{table: ids}}, not {type(ids).__name__}")
        self.keys: dict[T, np.ndarray] = {}
        self.asked: dict[T, Keys] = {}
        self._codes: dict[T, Codes] = {}
        for table, some in ids.items():
            if some is None or isinstance(some, slice):
                self.keys[table], _ = flat_keys(client.table(table).spec, some)
                self._codes[table] = np.arange(len(self.keys[table]), dtype=np.int32)
            else:
                self.keys[table], self._codes[table] = distinct_keys(some, name_in_messages(table))
            whole = some is None or (isinstance(some, slice) and some.step in (None, 1))
            self.asked[table] = some if whole else self.keys[table]

    def __len__(self) -> int:
        return len(self.keys)

    def filled(self, values: Mapping[T, np.ndarray]) -> dict[T, PulledRows]:
        return {table: PulledRows(keys, values[table], self._codes[table]) for table, keys in self.keys.items()}


def name_in_messages(table: TableLike) -> str:
    """How a message calls a table; a vector on the servers has no name."""
    return table.name if isinstance(table, Table) else table if isinstance(table, str) else repr(table)


def pull_rows(client: Client, ids: Mapping[T, Keys], what: str = "rows") -> dict[T, PulledRows]:
    """Pull the rows of ids, of several tables in one round trip. `ids` are as in :class:`WantedRows`."""
    wanted = WantedRows(client, ids, what)
    return wanted.filled(client.pull(wanted.asked)) if len(wanted) else {}
