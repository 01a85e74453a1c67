"""Partitions cut into batches, and the batches of each epoch: pure, no clock and no client.

What a trainer gets from Dask or Spark is a *partition*: a tuple of row-aligned arrays, a data frame, a list of items.
Here it becomes a list of batches, once; every epoch then hands out the same objects, in another order if asked to.
That they stay the same objects is what lets :func:`dps.localize` work out each batch only once.

Where epochs have other rows (`EpochRows`), which rows these are, and their order, follows from (seed, number of the
trainer, number of the epoch) alone. So a trainer that is run again goes through the same batches.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.training.types import Batch, Partition
from dps.errors import InputError

__all__ = ["Batches", "EpochRows", "iterate_partition", "made", "row_count", "rows", "taker"]

SHUFFLES = (None, "rows", "batches")


def _rows_alone(value: Partition) -> int | None:
    """Rows of one array, table or list; None for what has no rows.

    Arrays are recognised by their `shape`, so that torch, jax or polars need not be imported for it.
    """
    if isinstance(value, (list, range)):
        return len(value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not isinstance(value, type):
        known = bool(shape) and isinstance(shape[0], (int, np.integer)) and not _is_sparse_tensor(value)
        return int(shape[0]) if known and (hasattr(value, "__getitem__") or _is_scipy(value)) else None
    if callable(getattr(value, "slice", None)) and hasattr(value, "__len__"):  # a column of Arrow has no shape
        return len(value)
    return None


def _is_scipy(value: Partition) -> bool:
    scipy_sparse = sys.modules.get("scipy.sparse")
    return scipy_sparse is not None and bool(scipy_sparse.issparse(value))


def _is_sparse_tensor(value: Partition) -> bool:
    """Whether it is a tensor of torch in a layout without rows that could be sliced."""
    return str(getattr(value, "layout", "")).startswith("torch.sparse")


def _is_array(value: Partition) -> bool:
    return hasattr(value, "shape") and _rows_alone(value) is not None


def _tuple_if_aligned(partition: Partition) -> Partition:
    """A tuple of a list of row-aligned arrays, which means the same: at least two, beside None (no weights)."""
    arrays = [part for part in partition if part is not None] if isinstance(partition, list) else []
    return tuple(partition) if len(arrays) > 1 and all(map(_is_array, arrays)) else partition


class _Part(NamedTuple):
    """An array, table or list within a partition."""

    name: str
    value: Partition
    rows: int | None

    def __str__(self) -> str:
        kind = type(self.value).__name__
        if _is_sparse_tensor(self.value):
            kind = "sparse tensor"
        return f"{self.name} ({kind}) has {'no' if self.rows is None else self.rows} rows"


def _parts(value: Partition, name: str = "") -> list[_Part]:
    """What of a partition is to be cut at the same rows; tuples and dicts may be nested."""
    if value is None and name:
        return []
    if isinstance(value, (tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [part for key, each in items for part in _parts(each, f"{name}[{key!r}]")]
    return [_Part(name or "it", value, _rows_alone(value))]


def row_count(partition: Partition) -> int | None:
    """Rows of a partition: items of a list, common length of a tuple or dict of arrays; None for what cannot be cut.

    Raises InputError if the parts of a tuple or dict have different numbers of rows.
    """
    parts = _parts(_tuple_if_aligned(partition))
    counts = [part.rows for part in parts]
    if not counts or None in counts:
        return None
    if len(set(counts)) > 1:
        raise InputError(
            f"the parts of a partition of type {type(partition).__name__} have {', '.join(map(str, counts))} rows; they"
            " must all have the same number to be cut together (were they cut at different places? dask: X.chunks,"
            f" y.chunks). {_remedy(parts)}"
        )
    return counts[0]


def _remedy(parts: list[_Part]) -> str:
    return (
        f"Of the partition, {'; '.join(map(str, parts)) or 'nothing is left'}. Make arrays, lists or data frames of one"
        " length of it, in a tuple or a dict (trainer.iterate(..., prepare=function) does so to each partition), or"
        " leave out batch_size: then a whole partition is one batch"
    )


def counted_rows(partition: Partition, purpose: str) -> int:
    """Rows of a partition that `purpose` has to count.

    Raises InputError if it has no rows, or its parts have different numbers of rows.
    """
    count = row_count(partition)
    if count is None:
        raise InputError(
            f"{purpose}: a partition of type {type(partition).__name__} cannot be cut into rows. "
            + _remedy(_parts(partition))
        )
    return count


def rows(batch: Batch) -> int:
    """Rows of a batch; 0 where that means nothing."""
    if isinstance(batch, TakenRows):
        return len(batch.numbers)
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


def _csr_rows(csr: Batch, chosen: slice) -> Batch:
    """Rows of a CSR matrix as views of its data and indices; scipy's own slice copies them."""
    a, b = int(csr.indptr[chosen.start]), int(csr.indptr[chosen.stop])
    rows = type(csr)((chosen.stop - chosen.start, csr.shape[1]), dtype=csr.dtype)
    rows.data, rows.indices = csr.data[a:b], csr.indices[a:b]
    rows.indptr = csr.indptr[chosen.start : chosen.stop + 1] - csr.indptr[chosen.start]
    return rows


def taker(value: Partition) -> Callable[[slice | np.ndarray], Batch]:
    """A function (slice, or numbers of rows) -> those rows, of a whole partition or a part of it.

    Rows of a slice share memory with the partition where its kind allows it; those of numbers are copies, in the order
    of the numbers.

    Examples
    --------
    >>> take = taker((np.array([5.0, 6.0, 7.0]), ["a", "b", "c"]))
    >>> take(slice(1, 3)), take(np.array([2, 0]))
    ((array([6., 7.]), ['b', 'c']), (array([7., 5.]), ['c', 'a']))
    """
    if value is None:
        return lambda chosen: None
    if isinstance(value, tuple):
        takers = [taker(part) for part in value]
        return lambda chosen: tuple(take(chosen) for take in takers)
    if isinstance(value, dict):
        columns = {name: taker(part) for name, part in value.items()}
        return lambda chosen: {name: take(chosen) for name, take in columns.items()}
    if isinstance(value, (list, range)):
        return lambda chosen: value[chosen] if isinstance(chosen, slice) else [value[n] for n in chosen.tolist()]
    if hasattr(value, "iloc"):  # pandas
        return lambda chosen: value.iloc[chosen]
    if _is_scipy(value):
        csr = value if value.ndim == 2 and value.format == "csr" else value.tocsr()
        return lambda chosen: _csr_rows(csr, chosen) if isinstance(chosen, slice) else csr[chosen]
    if callable(getattr(value, "slice", None)):  # Arrow and polars
        some = value.take if callable(getattr(value, "take", None)) else value.__getitem__
        return lambda chosen: (
            value.slice(chosen.start, chosen.stop - chosen.start) if isinstance(chosen, slice) else some(chosen)
        )
    return lambda chosen: value[chosen]


class TakenRows:
    """A batch of rows that are copied when its turn comes, so that the rows of an epoch are not there twice.

    `take` is what :func:`taker` has made of a partition.
    """

    __slots__ = ("numbers", "take")

    def __init__(self, take: Callable[[np.ndarray], Batch], numbers: np.ndarray):
        self.take, self.numbers = take, numbers


def made(batch: Batch) -> Batch:
    """The batch itself; of one whose rows are still to be taken, these rows."""
    return batch.take(batch.numbers) if isinstance(batch, TakenRows) else batch


def iterate_partition(partition: Partition, batch_size: int | None = None) -> list:
    """Cut a partition into batches of `batch_size` rows; the last one may be smaller.

    Parameters
    ----------
    partition
        - a tuple of what has rows, such as ``(X, y)`` (or a list of two or more arrays; ``None`` in it stays ``None``),
          or a dict of columns; tuples and dicts may be nested: batches are tuples or dicts of row slices;
        - an array, which may be of numpy, :mod:`sparse`, torch or any other with a ``shape`` and slices; a scipy.sparse
          matrix (CSR rows share memory with it; other formats are converted to CSR once); a pandas, polars or Arrow
          table or column: row slices;
        - a list (a partition of a Dask bag): batches are lists of items;
        - anything else: one batch, as it is, without a `batch_size`.
    batch_size
        Rows in a batch. ``None``: the whole partition is one batch, except that of a list each item is one.

    Returns
    -------
    list
        The batches; none for a partition without rows.

    Raises
    ------
    InputError
        A `batch_size` is given, and the partition, or a part of it, has no rows (a scalar, a generator), or its parts
        have different numbers of rows.

    Examples
    --------
    >>> [y.tolist() for X, y in iterate_partition((np.zeros((5, 2)), np.arange(5)), 2)]
    [[0, 1], [2, 3], [4]]
    >>> iterate_partition(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    >>> iterate_partition({"user": ["a", "b", "c"], "rating": [5, 3, 4]}, 2)
    [{'user': ['a', 'b'], 'rating': [5, 3]}, {'user': ['c'], 'rating': [4]}]
    """
    size, partition = _checked_size(batch_size), _tuple_if_aligned(partition)
    if size is None:
        return _whole(partition)
    count = counted_rows(partition, f"batch_size={size}")
    take = taker(partition)
    return [take(slice(start, min(start + size, count))) for start in range(0, count, size)]


def _whole(partition: Partition) -> list:
    """The one batch of a partition that is not to be cut; of a list each item."""
    if isinstance(partition, list):
        return list(partition)
    parts = _parts(partition)
    if parts and all(_is_array(part.value) for part in parts):
        row_count(partition)  # raises where arrays differ: a mistake, however large the batches
    return [] if parts and all(part.rows == 0 for part in parts) else [partition]


class Batches(Sequence):
    """The batches of a trainer, in the order it goes through them: all of `partitions`, `epochs` times over.

    The partitions are cut once, when the length or a batch is first asked for, and the same batch objects come back
    in every epoch.

    Parameters
    ----------
    partitions
        The trainer's partitions; see :meth:`dps.Trainer.iterate` for what one may be.
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

    def batch(self, index: int) -> Batch:
        """A batch of an epoch, by its number in the order of the partitions."""
        return made(self.batches[index])

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

    def __getitem__(self, position: int | slice) -> Batch:
        """(epoch, index, batch) at a position, counted over all epochs; `index` names the batch within an epoch."""
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        place = position + len(self) if position < 0 else position
        if not 0 <= place < len(self):
            raise IndexError(f"there are {len(self)} batches; {position} is outside")
        epoch, step = divmod(place, len(self.batches))
        index = int(self.order(epoch)[step])
        return epoch, index, self.batch(index)

    def __iter__(self) -> Iterator[tuple[int, int, Batch]]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[tuple[int, int, Batch]]:
        """(epoch, index, batch) from position `start` on, as a trainer that resumes at a clock needs it.

        The batches up to there are skipped without work; a start behind the end yields nothing.
        """
        if start < 0:
            raise InputError(f"start is a position, 0 or more; not {start}")
        count = len(self.batches)
        first, skip = divmod(start, count) if count else (self.epochs, 0)
        for epoch in range(first, self.epochs):
            for index in self.order(epoch)[skip:].tolist():
                yield epoch, index, made(self.batches[index])
            skip = 0


class EpochRows:
    """The batches of each epoch of a trainer.

    Parameters
    ----------
    batch_size : int, optional
        Rows in a batch; None: those of a whole partition.
    shuffle : {None, "rows", "batches"}
        What gets another order in each epoch: nothing, the batches, or the rows of each partition and the batches.
    fraction : float
        Which part of each partition's rows an epoch has, chosen at random; at least one row of a partition with rows.

    Examples
    --------
    >>> rows = EpochRows([np.arange(6), np.arange(6, 8)], 2, "rows", 1.0, seed=0, number=0)
    >>> len(rows), sorted(np.concatenate([made(batch) for batch in rows.batches(0)]).tolist())
    (4, [0, 1, 2, 3, 4, 5, 6, 7])
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        batch_size: int | None,
        shuffle: str | None,
        fraction: float,
        seed: int,
        number: int,
    ):
        self._shuffle, self._fraction = checked_shuffle(shuffle), checked_fraction(fraction)
        self._place = checked_seed(seed), number
        self._cut: list[Batch] | None = None  # the batches of all epochs, where all of them have the same
        if shuffle == "rows" or self._fraction < 1.0:
            purpose = "shuffle='rows'" if shuffle == "rows" else f"fraction={self._fraction:g}"
            self._counts = [counted_rows(partition, purpose) for partition in partitions]
            self._takers = [taker(_tuple_if_aligned(partition)) for partition in partitions]
            self._size = _checked_size(batch_size)
        else:
            self._cut = Batches(partitions, 1, batch_size).batches

    def __len__(self) -> int:
        """Batches of an epoch."""
        if self._cut is not None:
            return len(self._cut)
        return sum(math.ceil(self._chosen(count) / (self._size or count)) for count in self._counts if count)

    def batches(self, epoch: int) -> list[Batch]:
        """The batches of an epoch, in its order; each of them as it is, or as `TakenRows`."""
        rng = np.random.default_rng((*self._place, epoch))
        batches = self._cut if self._cut is not None else self._taken(rng)
        if self._shuffle is None or len(batches) < 2 or (self._cut is None and len(self._counts) == 1):
            return list(batches)
        return [batches[n] for n in rng.permutation(len(batches)).tolist()]

    def _taken(self, rng: np.random.Generator) -> list[Batch]:
        """Batches of rows that are taken one by one, partition after partition."""
        batches = []
        for count, take in zip(self._counts, self._takers, strict=True):
            chosen = rng.permutation(count)[: self._chosen(count)]
            if self._shuffle != "rows":
                chosen.sort()
            size = self._size or max(1, count)
            batches += [TakenRows(take, chosen[start : start + size]) for start in range(0, len(chosen), size)]
        return batches

    def _chosen(self, count: int) -> int:
        return min(count, max(1, round(self._fraction * count)))


def checked_shuffle(shuffle: object) -> str | None:
    if (isinstance(shuffle, str) or shuffle is None) and shuffle in SHUFFLES:
        return shuffle
    raise InputError(f"shuffle is 'rows', 'batches' or None, not {shuffle!r}; a seed goes into seed=")


def checked_fraction(fraction: object) -> float:
    try:
        part = float(fraction)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        part = math.nan
    if not 0.0 < part <= 1.0:
        raise InputError(f"fraction is a part of the rows, above 0 and up to 1, not {fraction!r}")
    return part


def checked_seed(seed: object) -> int:
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"seed is an integer, 0 or more, not {seed!r}")
    return number
