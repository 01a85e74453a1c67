"""History: what the trainers of a run have reported, lately and in the whole run. Pure; numpy; bounded memory.

Two views are kept of each trainer's reports. A report is the sums over the iterations since the one before:

* **lately**: the last 64 reports one by one (of more than 512 trainers fewer, to 16: they report more rarely), as
  running totals. The sum over the last k of them is one subtraction, so that windows of any length over a thousand
  trainers cost a fraction of a millisecond. So it is for each server, of which as many are known as there is room for;
* **the whole run**: at most `capacity` rows. When these are full, neighbours are added up in pairs, and from then on a
  row covers twice as many reports as before. So a run of any length has between capacity / 2 and capacity rows of the
  same resolution, and their sum is the total of the run, exactly.

Time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dps.errors import InputError

__all__ = ["COLUMNS", "History"]

COLUMNS = (
    *("clocks", "total", "compute", "pull", "wait", "push", "serialise"),  # iterations; seconds
    *("cpu", "starved"),  # seconds that the thread ran, and that it was ready to run but had no processor
    *("pulls", "pushes", "keys_pulled", "keys_pushed", "bytes_in", "bytes_out", "rows", "again"),
)

LATELY = 64, 16  # reports of each trainer: at most, and at least,
REPORTS = 1 << 15  # but no more than these of all,
PAIRS = 1 << 22  # and these times servers


class History:
    """The reports of one run.

    Parameters
    ----------
    trainers : int
    capacity : int
        Rows kept of each trainer for the whole run.

    Attributes
    ----------
    lately : int
        Reports kept of each trainer one by one.

    Examples
    --------
    >>> history = History(trainers=2)
    >>> history.begin(0, now=0.0)
    >>> row = dict.fromkeys(COLUMNS, 0.0) | {"clocks": 5.0, "total": 0.25, "compute": 0.2, "pull": 0.05}
    >>> for n in range(1, 9):
    ...     history.report(0, 0.25 * n, list(row.values()), clock=5 * n, servers={0: (10, 0.05)})
    >>> [float(history.newest(history.within(s, now=2.0))[0, 0]) for s in (0.3, 1.0, 60.0)]  # clocks of trainer 0
    [10.0, 20.0, 40.0]
    >>> history.totals()[:, COLUMNS.index("compute")].round(6).tolist()
    [1.6, 0.0]
    """

    def __init__(self, trainers: int, capacity: int = 256):
        if trainers < 1 or capacity < 2:
            raise InputError(f"a history is of 1 trainer and 2 rows or more, not of {trainers} and {capacity}")
        width, lately = len(COLUMNS), max(LATELY[1], min(LATELY[0], REPORTS // trainers))
        self.trainers, self.capacity = trainers, capacity - capacity % 2
        self.lately = lately
        capacity = self.capacity
        self.began = np.full(trainers, np.nan)  # when it joined, the last time
        self.ended = np.full(trainers, np.nan)  # its last report
        self._totals = np.zeros((trainers, width))
        self._counts = np.zeros(trainers, np.int64)  # reports, of all attempts
        self._first = np.zeros(trainers, np.int64)  # ... before the present attempt
        # lately: at [n % lately] what there was before report n, and when report n ended
        self._before = np.zeros((trainers, lately, width))
        self._ends = np.full((trainers, lately), -np.inf)
        self._clocks = np.zeros((trainers, lately), np.int64)
        self._places: dict[int, int] = {}  # server -> its place in the next two
        self._most = max(1, PAIRS // (trainers * lately))  # servers there
        self._full = 0  # while they are all taken: reports that come before one looks again who can make way
        self._blocked = np.zeros((trainers, 0, 2))
        self._blocked_before = np.zeros((trainers, lately, 0, 2))
        # the whole run
        self._rows = np.zeros((trainers, capacity, width))
        self._row_ends = np.zeros((trainers, capacity))
        self._row_clocks = np.zeros((trainers, capacity), np.int64)
        self._used = [0] * trainers
        self._room = [0] * trainers  # reports that still go into the last row
        self._stride = [1] * trainers  # reports a row

    # -- what happens

    def begin(self, trainer: int, now: float) -> None:
        """`trainer` joins, for the first time or again: what it was before says nothing about what it is now."""
        self.began[trainer] = now
        self._first[trainer] = self._counts[trainer]

    def report(
        self,
        trainer: int,
        now: float,
        row: Sequence[float],
        clock: int,
        servers: Mapping[int, tuple[float, float]],
    ) -> None:
        """Add one report: `row` as in COLUMNS, and for each server the requests and the seconds blocked."""
        if not servers.keys() <= self._places.keys():
            self._full = max(0, self._full - 1)
            if not self._full:
                self._make_places(servers)
            servers = {server: told for server, told in servers.items() if server in self._places}
        place, sums = self._counts[trainer] % self.lately, np.array(row, float)
        self._before[trainer, place] = self._totals[trainer]
        self._ends[trainer, place] = now
        self._clocks[trainer, place] = clock
        self._blocked_before[trainer, place] = self._blocked[trainer]
        if servers:
            self._blocked[trainer, [self._places[server] for server in servers]] += list(servers.values())
        self._totals[trainer] += sums
        self._counts[trainer] += 1
        self.ended[trainer] = now
        self._keep(trainer, now, sums, clock)

    def _keep(self, trainer: int, now: float, row: np.ndarray, clock: int) -> None:
        """Into the rows of the whole run."""
        if not self._room[trainer]:
            if self._used[trainer] == self.capacity:
                self._halve(trainer)
            self._used[trainer] += 1
            self._room[trainer] = self._stride[trainer]
        last = self._used[trainer] - 1
        self._rows[trainer, last] += row
        self._row_ends[trainer, last] = now
        self._row_clocks[trainer, last] = clock
        self._room[trainer] -= 1

    def _halve(self, trainer: int) -> None:
        half = self.capacity // 2
        rows = self._rows[trainer]
        rows[:half] = rows[::2] + rows[1::2]
        rows[half:] = 0
        for about in (self._row_ends[trainer], self._row_clocks[trainer]):
            about[:half] = about[1::2].copy()
        self._used[trainer] = half
        self._stride[trainer] *= 2

    def _make_places(self, servers: Mapping[int, tuple[float, float]]) -> None:
        """Room for these too; those of whom nobody has spoken lately make way."""
        told = np.any(self._blocked[:, None] != self._blocked_before, axis=(0, 1, 3))
        kept = {number: place for number, place in self._places.items() if told[place] or number in servers}
        new = [number for number in servers if number not in kept]
        if len(kept) + len(new) > self._most:
            self._full, new = self.trainers, new[: max(0, self._most - len(kept))]
        places, more = list(kept.values()), ((0, len(new)), (0, 0))
        self._blocked = np.pad(self._blocked[:, places], ((0, 0), *more))
        self._blocked_before = np.pad(self._blocked_before[:, :, places], ((0, 0), (0, 0), *more))
        self._places = {number: n for n, number in enumerate([*kept, *new])}

    # -- what is known

    def totals(self) -> np.ndarray:
        """Sums of the whole run: [trainers, len(COLUMNS)]."""
        return self._totals.copy()

    def within(self, seconds: float | np.ndarray, now: float) -> np.ndarray:
        """How many reports of each trainer's present attempt ended in the last `seconds` (its own), of `lately`."""
        inside = np.count_nonzero(self._ends > now - np.reshape(seconds, (-1, 1)), axis=1)
        return np.minimum(inside, self._counts - self._first)

    def reports(self) -> np.ndarray:
        """How many reports of each trainer's present attempt there are."""
        return self._counts - self._first

    def newest(self, counts: np.ndarray) -> np.ndarray:
        """Sums of the newest `counts` reports of each trainer: [trainers, len(COLUMNS)]."""
        return np.where(counts[:, None] > 0, self._totals - self._before[self._places_of(counts)], 0.0)

    def blocked(self, counts: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The servers, and of the newest `counts` reports the requests and seconds at each: [trainers, servers, 2]."""
        found = self._blocked - self._blocked_before[self._places_of(counts)]
        return list(self._places), np.where(counts[:, None, None] > 0, found, 0.0)

    def _places_of(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(self.trainers), (self._counts - counts) % self.lately

    def strip(self, trainer: int, count: int = LATELY[0]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the last `count` reports (of `lately` at most): when each ended, the clock then, its row."""
        total = int(self._counts[trainer])
        places = np.arange(total - min(count, total, self.lately), total) % self.lately
        sums = np.concatenate([self._before[trainer, places], self._totals[None, trainer]])
        return self._ends[trainer, places], self._clocks[trainer, places], np.diff(sums, axis=0)

    def rows(self, trainer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the whole run: when each row ended, the clock then, the rows."""
        used = slice(self._used[trainer])
        return tuple(x[trainer, used].copy() for x in (self._row_ends, self._row_clocks, self._rows))  # type: ignore
