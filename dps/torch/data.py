"""Batches of a trainer's partitions as tensors, for ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dps import Batches

__all__ = ["PartitionDataset", "tensors"]


def tensors(batch: Any) -> Any:
    """A batch with its arrays of numbers as tensors, which share their memory where that may be written to.

    Examples
    --------
    >>> tensors((np.array([1.0, 2.0]), {"user": [1, 2], "name": np.array(["a", "b"])}))
    (tensor([1., 2.], dtype=torch.float64), {'user': [1, 2], 'name': array(['a', 'b'], dtype='<U1')})
    """
    if isinstance(batch, dict):
        return {name: tensors(each) for name, each in batch.items()}
    if isinstance(batch, tuple):
        return tuple(tensors(each) for each in batch)
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        native = batch.astype(batch.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(np.require(native, None, ["C", "A", "W"]))
    return batch


class PartitionDataset(IterableDataset):
    """The batches of a trainer's partitions, as tensors.

    For ``DataLoader(PartitionDataset(partitions, batch_size=64), batch_size=None)``, or to be iterated itself. The
    loop has to call ``trainer.tick()`` after each batch; ``trainer.iterate`` does without, and skips after a restart
    what it had done.

    Parameters
    ----------
    partitions : sequence
        What the training function was given: arrays, tuples ``(X, y)``, dicts of columns, lists of items.
    batch_size : int, optional
        Rows in a batch; whole partitions by default.
    shuffle : int, optional
        Seed by which the order of the batches is shuffled, anew each time that the dataset is gone through. The n-th
        time has the same order on each attempt at a trainer. In the processes of a DataLoader with `num_workers`, each
        time has the order of the first.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> partitions = [(np.arange(3), np.ones(3)), (np.arange(3, 5), np.zeros(2))]
    >>> for x, y in DataLoader(PartitionDataset(partitions, batch_size=2), batch_size=None):
    ...     print(x, y)
    tensor([0, 1]) tensor([1., 1.], dtype=torch.float64)
    tensor([2]) tensor([1.], dtype=torch.float64)
    tensor([3, 4]) tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, partitions: Sequence[object], batch_size: int | None = None, shuffle: int | None = None):
        super().__init__()
        self._batches = Batches(partitions, 1, batch_size, shuffle)
        self._times = 0

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[object]:
        worker = get_worker_info()
        order = self._batches.order(self._times)
        self._times += 1
        if worker is not None:  # each process of a DataLoader has its share of the batches
            order = order[worker.id :: worker.num_workers]
        for index in order.tolist():
            yield tensors(self._batches.batch(index))
