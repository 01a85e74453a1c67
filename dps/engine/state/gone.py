"""The keys of rows that went lately, and why: for readers that keep elsewhere what a table forgets. Pure.

Each key that goes by itself gets the next number of its shard. All copies apply the same ops, so all of them give it
the same number, and a reader that knows the number behind the last key it has read goes on at any copy. A shard keeps
the keys with the highest numbers, as many as the table asks for; a reader that comes too late sees a gap of numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dps.engine.state.ops import EVICTED, EXPIRED

__all__ = ["REASONS", "GoneKeys", "GonePiece"]

REASONS = {EVICTED: "evicted", EXPIRED: "expired"}


class GonePiece(NamedTuple):
    """Some keys that went, in the order in which they did."""

    first: int  # number of the first key, or of the next one that goes
    keys: np.ndarray  # int64[m]
    whys: np.ndarray  # int8[m]: EVICTED or EXPIRED


class GoneKeys:
    """The last keys that went from a shard.

    Parameters
    ----------
    most : int
        How many are kept.

    Attributes
    ----------
    count : int
        How many keys went since the table was made: the number of the next one.

    Examples
    --------
    >>> gone = GoneKeys(3)
    >>> gone.note(np.array([7, 8]), EVICTED)
    >>> gone.note(np.array([9, 7]), EXPIRED)
    >>> gone.piece(0, 100)
    GonePiece(first=1, keys=array([8, 9, 7]), whys=array([-2, -3, -3], dtype=int8))
    >>> gone.piece(3, 100).keys
    array([7])
    """

    def __init__(self, most: int):
        self.count = 0
        self._keys, self._whys = np.zeros(most, np.int64), np.zeros(most, np.int8)

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._whys.nbytes

    def note(self, keys: np.ndarray, why: int) -> None:
        """These keys go, in this order."""
        kept = keys[-len(self._keys) :]
        places = np.arange(self.count + len(keys) - len(kept), self.count + len(keys)) % len(self._keys)
        self._keys[places], self._whys[places] = kept, why
        self.count += len(keys)

    def piece(self, number: int, most: int, stop: int | None = None) -> GonePiece:
        """At most so many keys from that number on, and before `stop`; the first ones that are kept, if it is older."""
        stop = self.count if stop is None else min(stop, self.count)
        first = min(max(number, self.count - len(self._keys), 0), stop)
        places = np.arange(first, min(first + most, stop)) % len(self._keys)
        return GonePiece(first, self._keys[places], self._whys[places])

    def to_arrays(self) -> list[np.ndarray]:
        """All keys that are kept, and why they went; for :meth:`load`."""
        kept = self.piece(0, len(self._keys))
        return [kept.keys, kept.whys]

    def load(self, arrays: list[np.ndarray], count: int) -> None:
        """Go on where another replica is, after `count` keys."""
        keys, whys = arrays
        self.count = count
        places = np.arange(count - len(keys), count) % len(self._keys)
        self._keys[places], self._whys[places] = keys, whys
