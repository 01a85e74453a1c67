"""Origin numbers: the numbers of parties that make ops, which a controller gives out in ascending order.

Each trainer, each leased portion, each client and each Dask task that pushes has an *origin* of its own, because the
ledgers of the shards know the last op of each. A controller that takes over must give none of them again. So the record
of the journal sets a block of numbers aside (`session_record.py`), and numbers beyond it wait for the next record.
"""

from __future__ import annotations

from collections.abc import Callable

from dps.errors import LimitError

__all__ = ["OriginNumbers"]

MAX_ORIGINS = (1 << 32) - 1  # the largest value that the field of a frame can hold
FEW_ORIGINS = 2048  # origins that are left when more are set aside


class OriginNumbers:
    """The origins of the parameter server `session`: how many were `given` out, and the `last` that may be.

    `on_few` is called when few are left.

    Examples
    --------
    >>> numbers = OriginNumbers("dps")
    >>> numbers.allot(3), numbers.allot(1)
    (1, 4)
    """

    def __init__(self, session: str):
        self._session = session
        self.given, self.last = 0, MAX_ORIGINS
        self.on_few: Callable[[], object] = lambda: None

    def allot(self, count: int) -> int:
        """The first of `count` new origins in a row."""
        if self.given + count > MAX_ORIGINS:
            raise LimitError(f"parameter server {self._session!r} has handed out all {MAX_ORIGINS} origins; start anew")
        if self.given + count > self.last:
            self.on_few()
            raise LimitError(
                f"parameter server {self._session!r} has no {count} origins at hand: {self.last - self.given} are "
                f"left, and its servers have not confirmed the record that sets more aside; try again"
            )
        self.given += count
        if self.given + FEW_ORIGINS > self.last:
            self.on_few()
        return self.given - count + 1
