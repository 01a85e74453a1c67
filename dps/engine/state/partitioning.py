"""Which keys of a keyed table lie together on one shard: ``ps.table(..., partition=)``. Pure.

A partition is a function from keys to *cells*: all keys of a cell lie on one shard. By default each key is a cell of
its own, so that keys spread evenly. A partition is a value, written out in the table's definition, and the same for
clients, servers and checkpoints; :mod:`dps.engine.core.cells` computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dps.engine.core.cells import Cells
from dps.engine.core.shard_map import SLOTS, ShardMap
from dps.engine.state.recipes import Description, Recipe, converted, from_dict, number
from dps.engine.state.user_functions import UserFunction
from dps.errors import InputError, InputTypeError

__all__ = ["BlockPartition", "FieldPartition", "FunctionPartition", "HashPartition", "Partition", "RangePartition"]
__all__ += ["partition_from_dict", "partition_of"]

MAX_BOUNDS = 4096  # of ranges: as many as a table may have shards. All clients are told the bounds
MAX_SPREAD = 1 << 12  # cells of a range of keys, from which follows which shards have none of them
INT64 = np.iinfo(np.int64)


@dataclasses.dataclass(frozen=True, repr=False)
class Partition(Recipe):
    """Base of what ``partition=`` of :meth:`dps.ParameterServer.table` takes: which keys lie on one shard."""

    def cells(self) -> Cells | None:
        """The function that computes the cells of keys; None, where each key is its own cell."""
        raise NotImplementedError

    def spread(self, first: int, last: int) -> np.ndarray | None:
        """Keys of all cells in which the keys from `first` to `last` lie; None where these are many, or not known."""
        return None

    def to_dict(self) -> Description:
        """The partition as values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in super().to_dict().items()}


@dataclasses.dataclass(frozen=True, repr=False)
class HashPartition(Partition):
    """Each key is placed by its own hash: the default.

    Keys spread evenly over the shards, however they are made.

    Examples
    --------
    >>> import dps
    >>> dps.HashPartition()
    HashPartition()
    """

    def cells(self) -> None:
        """None, because each key is its own cell."""
        return None

    def spread(self, first: int, last: int) -> np.ndarray | None:
        """All keys of the range, where they are few."""
        return steps(first, last, 0)


@dataclasses.dataclass(frozen=True, repr=False)
class BlockPartition(Partition):
    """Blocks of 2^bits consecutive keys lie together: keys with the same ``key >> bits``.

    For keys that are made as ``(group << bits) | member``: all features of a campaign, all words of a document. It is
    as even as the blocks are: a group with very many members lies on one shard.

    Parameters
    ----------
    bits : int
        The lowest bits of a key, which do not count; 1 to 63.

    Examples
    --------
    >>> import dps, numpy as np
    >>> campaigns, features = np.array([7, 7, 8]), np.array([1, 2, 1])
    >>> keys = (campaigns << 20) | features
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
    ...     w = ps.table("w", dtype="int64", partition=dps.BlockPartition(20))
    ...     w.push(keys, np.array([1, 2, 3]))
    ...     w[keys]
    array([1, 2, 3])
    """

    bits: int = number(least=1, most=63, whole=True)

    def cells(self) -> Cells:
        """What computes the numbers of blocks."""
        return Cells(shift=self.bits)

    def spread(self, first: int, last: int) -> np.ndarray | None:
        """A key of each block, where these are few."""
        return steps(first, last, self.bits)


@dataclasses.dataclass(frozen=True, repr=False)
class FieldPartition(Partition):
    """Keys with the same number in a field of bits lie together: the same ``(key >> shift) & (2^bits - 1)``.

    For keys whose group is not in the highest bits: with ``(feature << 16) | campaign``, ``FieldPartition(0, 16)``
    keeps the features of a campaign together.

    Parameters
    ----------
    shift : int
        The lowest bit of the field, 0 to 62.
    bits : int
        The width of the field, 1 to 63; it ends within the 64 bits of a key.

    Examples
    --------
    >>> import dps
    >>> dps.FieldPartition(0, 16)
    FieldPartition(shift=0, bits=16)
    """

    shift: int = number(least=0, most=62, whole=True)
    bits: int = number(least=1, most=63, whole=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift + self.bits > 64:
            last = self.shift + self.bits - 1
            raise InputError(f"FieldPartition: bits {self.shift} to {last} of a key, which has the bits 0 to 63")

    def cells(self) -> Cells:
        """What computes the numbers in the field."""
        return Cells(shift=self.shift, mask=(1 << self.bits) - 1)

    def spread(self, first: int, last: int) -> np.ndarray | None:
        """A key of each run of keys that differ below the field only, where these are few."""
        return steps(first, last, self.shift)


def _bounds(value: object, label: str, default: object) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise InputTypeError(f"{label} is {value!r} but must be a list of whole numbers that ascend")
    bounds = tuple(value)
    for each in bounds:
        if isinstance(each, bool) or not isinstance(each, (int, np.integer)):
            raise InputTypeError(f"{label} has {each!r} in it, and holds whole numbers only")
        if not INT64.min <= each <= INT64.max:
            raise InputError(f"{label} has {each} in it, which is no int64")
    if not 1 <= len(bounds) <= MAX_BOUNDS:
        raise InputError(f"{label}: {len(bounds)} bounds, and it takes 1 to {MAX_BOUNDS}")
    for n, (one, other) in enumerate(itertools.pairwise(bounds), 1):
        if other <= one:
            raise InputError(f"{label} must ascend, and number {n} is {int(other)} after {int(one)}: sort them")
    return tuple(map(int, bounds))


@dataclasses.dataclass(frozen=True, repr=False)
class RangePartition(Partition):
    """Contiguous ranges of keys lie together, and neighbouring ranges on the same shard or on neighbouring ones.

    The k bounds cut the keys into k + 1 ranges, each of which begins at its bound. Range i lies on shard ``i * shards
    // (k + 1)``, where shards are equal. So give at least as many ranges as there are shards, each with about as many
    rows or as much work: quantiles of the keys, for instance.

    Parameters
    ----------
    bounds : list of int
        Ascending int64, 1 to 4096 of them.

    Examples
    --------
    >>> import dps
    >>> dps.RangePartition([1000, 2000, 3000])  # below 1000, from 1000 on, from 2000 on, from 3000 on
    RangePartition(bounds=(1000, 2000, 3000))
    """

    bounds: tuple[int, ...] = converted(dataclasses.MISSING, _bounds)

    def cells(self) -> Cells:
        """What looks keys up; the cell of a range is the first number whose hash names the range's slot."""
        ranges = len(self.bounds) + 1
        wanted = np.arange(ranges) * SLOTS // ranges
        return Cells(bounds=np.array(self.bounds, np.int64), numbers=first_cells()[wanted])

    def spread(self, first: int, last: int) -> np.ndarray | None:
        """The first key, and all bounds behind it in the range."""
        return np.array([first, *(bound for bound in self.bounds if first < bound <= last)], np.int64)


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionPartition(UserFunction, Partition):
    """Keys for which a function of the user returns the same number lie together; made by :func:`partition_of`."""

    WHAT, RETURNS = "partition function", "a whole number for each"
    EACH, KINDS = "keys", "iu"

    def __repr__(self) -> str:
        return f"FunctionPartition({self.function_name})"

    def cells(self) -> Cells:
        """What calls the function; clients and servers do, and open it for that at the first keys."""
        return Cells(function=self)

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        """The cells of keys, int64."""
        return np.ascontiguousarray(self.numbers(keys.shape, keys).astype(np.int64, copy=False))


def partition_of(given: object) -> Any:
    """A function of keys as the partition that a table keeps; None as that by hashes; any other value as it is."""
    if given is None:
        return HashPartition()
    return given if isinstance(given, (Partition, type)) or not callable(given) else FunctionPartition.made(given)


def steps(first: int, last: int, bits: int) -> np.ndarray | None:
    """A key for each number that ``key >> bits`` has in the range; None where these are more than `MAX_SPREAD`.

    >>> steps(-3, 9, 3), steps(0, 1 << 40, 3)
    (array([-8,  0,  8]), None)
    """
    low, high = first >> bits, last >> bits
    return (low + np.arange(high - low + 1)) << bits if high - low < MAX_SPREAD else None


@functools.cache
def first_cells() -> np.ndarray:
    """For each slot the smallest number, from 0 on, that is placed in it."""
    numbers = np.arange(16 * SLOTS)
    found, first = np.unique(ShardMap(0, SLOTS).places(numbers), return_index=True)
    assert len(found) == SLOTS
    return first.astype(np.int64)


def partition_from_dict(description: Mapping[str, object]) -> Partition:
    return from_dict(Partition, description)
