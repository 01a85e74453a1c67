"""RowsUnderWay: rows that a trainer has asked the servers for, until they are here and in the cache of its process.

The rows are taken once, by whichever comes first: the pull that has asked for them, a later pull that waits for them,
or the next push (`cached_tables.py`). All of that happens under the session's lock.
"""

from __future__ import annotations

import numpy as np

from dps.engine.client.refreshed_rows import RefreshedRows
from dps.engine.client.row_cache import OpenPull, RowCache
from dps.engine.client.ticket import SentCall

__all__ = ["RowsUnderWay"]


class RowsUnderWay:
    """Rows of one table.

    `pull` says which ones, and what they will contain.
    `sent` are the requests for them.
    """

    __slots__ = ("_cache", "_rows", "_values", "pull", "sent")

    def __init__(self, cache: RowCache, pull: OpenPull, rows: RefreshedRows, sent: SentCall):
        self._cache, self._rows, self.pull, self.sent = cache, rows, pull, sent
        self._values: np.ndarray | None = None

    @property
    def is_here(self) -> bool:
        """Whether all servers have answered with rows, as far as answers have been read."""
        return self.sent.done and not any(request.error is not None for request in self.sent.requests)

    def take(self) -> np.ndarray:
        """The rows, once all servers have answered; they go to the cache, too."""
        if self._values is None:
            values = self._rows.values(self.sent.requests)
            self._cache.keep(self.pull, values)
            self._cache.comparisons.note(self._rows.compared, self._rows.changed)
            self._values = values
        return self._values

    def give_up(self) -> None:
        """The servers have not answered in time, or with an error."""
        self._cache.give_up(self.pull)
