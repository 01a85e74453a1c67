"""The rows of each epoch: all or a random part of them, in the order of the partitions or shuffled, cut into batches.

Which rows an epoch has, and in which order, follows from (seed, number of the trainer, number of the epoch) alone. So
a trainer that is run again goes through the same batches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from dps.engine.training.batches import TakenRows, counted_rows, iterate_partition, taker
from dps.engine.training.types import Batch, Partition
from dps.errors import InputError

__all__ = ["EpochRows"]

SHUFFLES = (None, "rows", "batches")


class EpochRows:
    """The batches of each epoch of a trainer.

    Parameters
    ----------
    partitions : sequence
        The trainer's partitions.
    batch_size : int, optional
        Rows in a batch; None: those of a whole partition.
    shuffle : {None, "rows", "batches"}
        What gets another order in each epoch: nothing, the batches, or the rows of each partition and the batches.
    fraction : float
        Which part of each partition's rows an epoch has, chosen at random; at least one row of a partition with rows.
    seed : int
    number : int
        Of the trainer.

    Examples
    --------
    >>> rows = EpochRows([np.arange(6), np.arange(6, 8)], 2, "rows", 1.0, seed=0, number=0)
    >>> from dps.engine.training.batches import made
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
            self._takers = [taker(partition) for partition in partitions]
            iterate_partition([], batch_size)  # refuses a size that is none
            self._size = batch_size
        else:
            self._cut = [batch for partition in partitions for batch in iterate_partition(partition, batch_size)]

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
        """How many of the rows of a partition an epoch has."""
        return min(count, max(1, round(self._fraction * count)))


def checked_shuffle(shuffle: object) -> str | None:
    """`shuffle`, if it is one that there is."""
    if (isinstance(shuffle, str) or shuffle is None) and shuffle in SHUFFLES:
        return shuffle
    raise InputError(f"shuffle is 'rows', 'batches' or None, not {shuffle!r}; a seed goes into seed=")


def checked_fraction(fraction: object) -> float:
    """`fraction`, if it is above 0 and not above 1."""
    try:
        part = float(fraction)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        part = math.nan
    if not 0.0 < part <= 1.0:
        raise InputError(f"fraction is a part of the rows, above 0 and up to 1, not {fraction!r}")
    return part


def checked_seed(seed: object) -> int:
    """`seed`, if it is an integer that is not negative."""
    try:
        number = operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"seed is an integer, 0 or more, not {seed!r}")
    return number
