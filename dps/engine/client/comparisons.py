"""Comparisons: whether the rows of a table that are here and too old are compared, or pulled as they are. Pure.

A comparison takes a fingerprint of 8 bytes and a bit for each row, and spares the rows that have not changed. Where
nearly all rows change between two pulls, for instance because all trainers push to all rows in each clock, it costs
more than it spares. So a process counts, for `WINDOW` rows at a time, which of the rows that it compared had changed.
If the comparisons of a window have cost more bytes than they spared, the next 8 pulls go without, then a window is
tried again. Each window in a row that does not pay has a pause twice as long behind it, up to 64 pulls, so that tries
cost little; a window that pays ends that.
"""

from __future__ import annotations

import threading

__all__ = ["Comparisons"]

WINDOW = 1024  # By so many rows, or more, a decision is made, because of fewer a share is mostly chance.
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 64  # Pulls that go without, so that tries cost an eighth at first, and 2 % later.
COST = 8 + 1 / 8  # bytes for each row that is compared


class Comparisons:
    """The decisions for one table. Any thread may use it.

    Parameters
    ----------
    row_bytes : int

    Examples
    --------
    >>> comparisons = Comparisons(row_bytes=64)
    >>> comparisons.note(compared=2000, changed=1700)
    >>> comparisons.begin()
    True
    >>> comparisons.note(compared=2000, changed=1990)
    >>> [comparisons.begin() for _ in range(9)]
    [False, False, False, False, False, False, False, False, True]
    """

    def __init__(self, row_bytes: int):
        self._row_bytes = row_bytes
        self._lock = threading.Lock()
        self._compared = self._changed = 0  # rows, in the present window
        self._pause = SHORTEST_PAUSE  # pulls that go without, if the present window does not pay
        self._left = 0  # pulls yet that go without

    def begin(self) -> bool:
        """Whether the next pull compares rows."""
        with self._lock:
            if not self._left:
                return True
            self._left -= 1
            return False

    def note(self, compared: int, changed: int) -> None:
        """A pull has compared rows, of which some had changed."""
        with self._lock:
            self._compared += compared
            self._changed += changed
            if self._compared < WINDOW:
                return
            spared, cost = (self._compared - self._changed) * self._row_bytes, self._compared * COST
            self._compared = self._changed = 0
            if spared >= cost:
                self._pause = SHORTEST_PAUSE
            else:
                self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
