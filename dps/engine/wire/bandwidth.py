"""LinkBudget: the bytes a second that work in the background may take of a link. Pure: time is an argument.

What no call waits for shares the link with what one waits for: shards that move, checkpoints, rows that are pulled
ahead. `dps.limits.bandwidth` bounds the first kind, for each server and each trainer, so that there is room for the
other one. The rule is a token bucket: what was not used is left for a short while, so that pieces need not come evenly.
"""

from __future__ import annotations

import math
import threading

__all__ = ["LinkBudget"]

BURST_SECONDS = 0.05  # whose bytes may leave at once, when nothing has left for so long


class LinkBudget:
    """How many bytes may leave, in the background, and when. Any thread may use it.

    Parameters
    ----------
    rate : float
        Bytes a second; infinity for any number.

    Examples
    --------
    >>> budget = LinkBudget(1000.0)
    >>> budget.spend(200, now=5.0)
    >>> round(budget.due(now=5.0), 6)  # 50 bytes of which were left over
    5.15
    >>> budget.due(now=6.0)
    6.0
    """

    def __init__(self, rate: float = math.inf):
        self.rate = rate
        self._due = -math.inf
        self._lock = threading.Lock()

    def due(self, now: float) -> float:
        """When the next bytes may leave: now, or later."""
        return max(now, self._due)

    def spend(self, nbytes: int, now: float) -> None:
        """So many bytes leave."""
        if self.rate < math.inf:
            with self._lock:
                self._due = max(self._due, now - BURST_SECONDS) + nbytes / self.rate
