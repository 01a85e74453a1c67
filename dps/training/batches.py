"""Partitions cut into batches: pure, no clock and no client.

What a trainer gets from Dask or Spark is a *partition*: a tuple of row-aligned arrays, a data frame, a list of items.
Here it becomes a list of batches, once; every epoch then hands out the same objects, in another order if asked to.
That they stay the same objects is what lets :func:`dps.localize` work out each batch only once.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dps.errors import InputError

__all__ = ["Batches", "iterate_partition", "row_count", "rows"]


def _kind(value: Any) -> str:
    """numpy, scipy, sparse, pandas; "" for anything that has no rows."""
    if isinstance(value, np.ndarray):
        return "numpy" if value.ndim else ""
    scipy_sparse, sparse, pandas = (sys.modules.get(name) for name in ("scipy.sparse", "sparse", "pandas"))
    if scipy_sparse is not None and scipy_sparse.issparse(value):
        return "scipy"
    if sparse is not None and isinstance(value, sparse.SparseArray):
        return "sparse" if value.ndim else ""
    if pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return "pandas"
    return ""


def _is_aligned(partition: Any) -> bool:
    """Whether a tuple or list means row-aligned arrays: at least one, and nothing but arrays (or None: no weights)."""
    arrays = [part for part in partition if part is not None]
    return bool(arrays) and all(map(_kind, arrays)) and (isinstance(partition, tuple) or len(arrays) > 1)


def row_count(partition: Any) -> int | None:
    """Rows of a partition: items of a list, common length of a tuple of arrays; None for what cannot be cut.

    Raises
    ------
    InputError
        The arrays of a tuple have different numbers of rows.

    Examples
    --------
    >>> row_count((np.zeros((3, 2)), np.zeros(3)))
    3
    """
    if _kind(partition):
        return int(partition.shape[0])
    if not isinstance(partition, (tuple, list)):
        return None
    if not _is_aligned(partition):
        return len(partition) if isinstance(partition, list) else None
    rows = [part.shape[0] for part in partition if part is not None]
    if len(set(rows)) > 1:
        raise InputError(
            f"the arrays of a partition have {', '.join(map(str, rows))} rows; they must all have the same number"
            " (were they cut at different places? dask: X.chunks, y.chunks)"
        )
    return int(rows[0])


def rows(batch: Any) -> int:
    """Rows of a batch; 0 where that means nothing."""
    try:
        return row_count(batch) or 0
    except InputError:  # an item of a list, which may be anything
        return 0


def _checked_size(batch_size: int | None) -> int | None:
    if batch_size is None:
        return None
    try:
        size = operator.index(batch_size)
    except TypeError:
        size = 0
    if size < 1 or isinstance(batch_size, bool):
        raise InputError(f"batch_size is a number of rows, 1 or more, or None (whole partitions); not {batch_size!r}")
    return size


def _csr_rows(csr: Any, start: int, stop: int) -> Any:
    """Rows of a CSR matrix as views of its data and indices; scipy's own slice copies them."""
    a, b = int(csr.indptr[start]), int(csr.indptr[stop])
    rows = type(csr)((stop - start, csr.shape[1]), dtype=csr.dtype)
    rows.data, rows.indices = csr.data[a:b], csr.indices[a:b]
    rows.indptr = csr.indptr[start : stop + 1] - csr.indptr[start]
    return rows


def _slicer(value: Any) -> Callable[[int, int], Any]:
    """A function (start, stop) -> those rows."""
    kind = _kind(value)
    if value is None:
        return lambda start, stop: None
    if kind == "scipy":
        csr = value if value.ndim == 2 and value.format == "csr" else value.tocsr()
        return lambda start, stop: _csr_rows(csr, start, stop)
    if kind == "pandas" and hasattr(value, "iloc"):
        return lambda start, stop: value.iloc[start:stop]
    if kind == "sparse" and not hasattr(value, "__getitem__"):  # sparse.DOK slices badly
        value = value.asformat("coo")
    return lambda start, stop: value[start:stop]


def iterate_partition(partition: Any, batch_size: int | None = None) -> list:
    """Cut a partition into batches of `batch_size` rows; the last one may be smaller.

    Parameters
    ----------
    partition
        - a tuple of row-aligned arrays such as ``(X, y)`` (or a list of two or more; ``None`` in it stays ``None``):
          batches are tuples of row slices;
        - a numpy array, scipy.sparse matrix (CSR rows share memory with it; other formats are converted to CSR once),
          :mod:`sparse` array, pandas DataFrame, Series or Index: row slices;
        - a list (a partition of a Dask bag): batches are lists of items;
        - anything else: one batch, as it is.
    batch_size
        Rows in a batch. ``None``: the whole partition is one batch, except that of a list each item is one.

    Returns
    -------
    list
        The batches; none for a partition without rows.

    Examples
    --------
    >>> [y.tolist() for X, y in iterate_partition((np.zeros((5, 2)), np.arange(5)), 2)]
    [[0, 1], [2, 3], [4]]
    >>> iterate_partition(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    >>> iterate_partition({"not": "rows"}, 2)
    [{'not': 'rows'}]
    """
    size = _checked_size(batch_size)
    rows = row_count(partition)
    if rows is None:
        return [partition]
    if rows == 0:
        return []
    aligned = isinstance(partition, (tuple, list)) and _is_aligned(partition)
    if isinstance(partition, list) and not aligned:
        return list(partition) if size is None else [partition[i : i + size] for i in range(0, rows, size)]
    if size is None:
        return [tuple(partition) if aligned else partition]
    bounds = [(start, min(start + size, rows)) for start in range(0, rows, size)]
    if not aligned:
        cut = _slicer(partition)
        return [cut(start, stop) for start, stop in bounds]
    cuts = [_slicer(part) for part in partition]
    return [tuple(cut(start, stop) for cut in cuts) for start, stop in bounds]


class Batches(Sequence):
    """The batches of a trainer, in the order it goes through them: all of `partitions`, `epochs` times over.

    The partitions are cut once, when the length or a batch is first asked for, and the same batch objects come back
    in every epoch.

    Parameters
    ----------
    partitions
        The trainer's partitions; see :func:`iterate_partition` for what one may be.
    epochs
        How often to go through all of them.
    batch_size
        Rows in a batch; ``None``: whole partitions (of a list: each item).
    shuffle
        A seed: every epoch has its own order of batches, the same for the same (seed, epoch). ``True`` is seed 0;
        ``None`` or ``False``: the order of the partitions. Rows do not move from batch to batch.

    Examples
    --------
    >>> batches = Batches([np.arange(3), np.arange(3, 5)], epochs=2, batch_size=2)
    >>> len(batches)
    6
    >>> [(epoch, index, batch.tolist()) for epoch, index, batch in batches][2:4]
    [(0, 2, [3, 4]), (1, 0, [0, 1])]
    >>> [index for epoch, index, batch in batches.iterate(start=4)]
    [1, 2]
    """

    def __init__(
        self, partitions: Sequence, epochs: int = 1, batch_size: int | None = None, shuffle: int | bool | None = None
    ) -> None:
        if isinstance(epochs, bool) or not isinstance(epochs, (int, np.integer)) or epochs < 0:
            raise InputError(f"epochs is a number, 0 or more; not {epochs!r}")
        if not isinstance(shuffle, (int, np.integer, type(None))) or int(shuffle or 0) < 0:
            raise InputError(f"shuffle is a seed (0 or more), True, False or None; not {shuffle!r}")
        self.epochs = int(epochs)
        self.batch_size = _checked_size(batch_size)
        self.seed = None if shuffle is None or shuffle is False else 0 if shuffle is True else int(shuffle)
        self._partitions: Sequence | None = partitions
        self._cut: list = []
        self._rows: list[int] = []

    @property
    def batches(self) -> list:
        """The batches of one epoch, in the order of the partitions."""
        if self._partitions is not None:
            self._cut = [b for partition in self._partitions for b in iterate_partition(partition, self.batch_size)]
            self._partitions = None
        return self._cut

    def rows(self, index: int) -> int:
        """How many rows a batch of an epoch has; 0 for what has none that could be counted."""
        if len(self._rows) != len(self.batches):
            self._rows = [rows(batch) for batch in self.batches]
        return self._rows[index]

    def order(self, epoch: int) -> np.ndarray:
        """Numbers of the batches in the order of that epoch."""
        count = len(self.batches)
        if self.seed is None:
            return np.arange(count)
        return np.random.default_rng((self.seed, epoch)).permutation(count)

    def __len__(self) -> int:
        return self.epochs * len(self.batches)

    def __getitem__(self, position: Any) -> Any:
        """(epoch, index, batch) at a position, counted over all epochs; `index` names the batch within an epoch."""
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        place = position + len(self) if position < 0 else position
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} batches; {position} is outside")
        epoch, step = divmod(place, len(self.batches))
        index = int(self.order(epoch)[step])
        return epoch, index, self.batches[index]

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[tuple[int, int, Any]]:
        """(epoch, index, batch) from position `start` on, as a trainer that resumes at a clock needs it.

        The batches up to there are skipped without work; a start behind the end yields nothing.
        """
        if start < 0:
            raise InputError(f"start is a position, 0 or more; not {start}")
        count = len(self.batches)
        first, skip = divmod(start, count) if count else (self.epochs, 0)
        for epoch in range(first, self.epochs):
            for index in self.order(epoch)[skip:].tolist():
                yield epoch, index, self.batches[index]
            skip = 0
