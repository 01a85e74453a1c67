"""What is kept over time in bounded memory: reports of trainers (`History`), other numbers (`Series`). Pure; numpy.

`History` has what the trainers of a run have reported, recently and in the whole run. A report holds sums over the
iterations since the report before. Two views are kept of each trainer's reports:

* **recent reports**: the last 64 reports one by one, as running totals. A run of more than 512 trainers keeps fewer, at
  least 16, because its trainers report more rarely. The sum over the last k reports is one subtraction, so a window of
  any length over a thousand trainers costs a fraction of a millisecond. The same is kept for each pair of trainer and
  server, for as many servers as there is room;
* **the whole run**: at most `capacity` rows. When these are full, neighbours are added up in pairs, and from then on a
  row covers twice as many reports as before. So a run of any length has between capacity / 2 and capacity rows of the
  same resolution, and their sum is exactly the total of the run.

Time is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dps.errors import InputError

__all__ = ["COLUMNS", "History", "Series"]

COLUMNS = (
    *("clocks", "total", "compute", "pull", "wait", "push", "serialise"),  # iterations; seconds
    *("cpu", "starved"),  # seconds that the thread ran; seconds that it was ready to run but had no processor
    *("pulls", "pushes", "keys_pulled", "keys_pushed", "bytes_in", "bytes_out", "rows", "again"),
)

MAX_KEPT, MIN_KEPT = 64, 16  # recent reports kept of each trainer
MAX_RECENT_REPORTS = 1 << 15  # recent reports kept of all trainers, where MIN_KEPT allows it
MAX_REPORT_SERVER_PAIRS = 1 << 22  # recent reports of all trainers, times servers: bounds the memory


class History:
    """The reports of one run.

    `capacity` is how many rows are kept of each trainer for the whole run.
    `kept` is how many recent reports are kept of each trainer.
    `began` and `ended` say when each trainer joined last, and when its last report came; NaN before that.

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
        width, kept = len(COLUMNS), max(MIN_KEPT, min(MAX_KEPT, MAX_RECENT_REPORTS // trainers))
        self.trainers, self.capacity = trainers, capacity - capacity % 2
        self.kept = kept
        capacity = self.capacity
        self.began = np.full(trainers, np.nan)
        self.ended = np.full(trainers, np.nan)
        self._totals = np.zeros((trainers, width))
        self._counts = np.zeros(trainers, np.int64)  # reports of all attempts
        self._first = np.zeros(trainers, np.int64)  # reports of the attempts before the present one
        # Recent reports. Place n % kept has the totals before report n, when report n ended, and the clock then.
        self._before = np.zeros((trainers, kept, width))
        self._ends = np.full((trainers, kept), -np.inf)
        self._clocks = np.zeros((trainers, kept), np.int64)
        self._places: dict[int, int] = {}  # server -> its place in _blocked and _blocked_before
        self._max_places = max(1, MAX_REPORT_SERVER_PAIRS // (trainers * kept))
        self._retry_in = 0  # while all places are taken: reports to wait before idle servers are looked for again
        self._blocked = np.zeros((trainers, 0, 2))  # [trainer, server place]: requests, seconds blocked
        self._blocked_before = np.zeros((trainers, kept, 0, 2))
        # The whole run.
        self._rows = np.zeros((trainers, capacity, width))
        self._row_ends = np.zeros((trainers, capacity))
        self._row_clocks = np.zeros((trainers, capacity), np.int64)
        self._used = [0] * trainers
        self._room = [0] * trainers  # reports that still go into the last row
        self._stride = [1] * trainers  # reports in a full row

    # -- events

    def begin(self, trainer: int, now: float) -> None:
        """`trainer` joins, for the first time or again.

        Its earlier reports no longer count as recent, because the new attempt may run on another machine.
        """
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
            self._retry_in = max(0, self._retry_in - 1)
            if not self._retry_in:
                self._make_places(servers)
            servers = {server: blocked for server, blocked in servers.items() if server in self._places}
        place, sums = self._counts[trainer] % self.kept, np.array(row, float)
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
        for column in (self._row_ends[trainer], self._row_clocks[trainer]):
            column[:half] = column[1::2].copy()
        self._used[trainer] = half
        self._stride[trainer] *= 2

    def _make_places(self, servers: Mapping[int, tuple[float, float]]) -> None:
        """Give these servers places; servers that no recent report mentions lose theirs."""
        mentioned = np.any(self._blocked[:, None] != self._blocked_before, axis=(0, 1, 3))
        kept = {number: place for number, place in self._places.items() if mentioned[place] or number in servers}
        new = [number for number in servers if number not in kept]
        if len(kept) + len(new) > self._max_places:
            self._retry_in, new = self.trainers, new[: max(0, self._max_places - len(kept))]
        places, more = list(kept.values()), ((0, len(new)), (0, 0))
        self._blocked = np.pad(self._blocked[:, places], ((0, 0), *more))
        self._blocked_before = np.pad(self._blocked_before[:, :, places], ((0, 0), (0, 0), *more))
        self._places = {number: n for n, number in enumerate([*kept, *new])}

    # -- queries

    def totals(self) -> np.ndarray:
        """Sums over the whole run: [trainers, len(COLUMNS)]."""
        return self._totals.copy()

    def within(self, seconds: float | np.ndarray, now: float) -> np.ndarray:
        """How many of the `kept` reports of each trainer's present attempt ended in the last `seconds`.

        `seconds` is one number, or one for each trainer.
        """
        inside = np.count_nonzero(self._ends > now - np.reshape(seconds, (-1, 1)), axis=1)
        return np.minimum(inside, self._counts - self._first)

    def reports(self) -> np.ndarray:
        """How many reports each trainer's present attempt has sent."""
        return self._counts - self._first

    def newest(self, counts: np.ndarray) -> np.ndarray:
        """Sums over the newest `counts` reports of each trainer: [trainers, len(COLUMNS)]."""
        return np.where(counts[:, None] > 0, self._totals - self._before[self._places_of(counts)], 0.0)

    def blocked(self, counts: np.ndarray) -> tuple[list[int], np.ndarray]:
        """The servers; and the requests to each and the seconds blocked for it, summed over the newest `counts`
        reports of each trainer: [trainers, servers, 2]."""
        sums = self._blocked - self._blocked_before[self._places_of(counts)]
        return list(self._places), np.where(counts[:, None, None] > 0, sums, 0.0)

    def _places_of(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(self.trainers), (self._counts - counts) % self.kept

    def strip(self, trainer: int, count: int = MAX_KEPT) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The last `count` reports, at most `kept`: when each ended, the clock then, its row."""
        total = int(self._counts[trainer])
        places = np.arange(total - min(count, total, self.kept), total) % self.kept
        sums = np.concatenate([self._before[trainer, places], self._totals[None, trainer]])
        return self._ends[trainer, places], self._clocks[trainer, places], np.diff(sums, axis=0)

    def rows(self, trainer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The whole run: when each row ended, the clock then, the rows."""
        used = slice(self._used[trainer])
        return tuple(x[trainer, used].copy() for x in (self._row_ends, self._row_clocks, self._rows))  # type: ignore


class Series:
    """Columns of numbers over time that keep at most `max_points` points.

    When they are full, every second point is dropped, and from then on only every second new point is kept.

    `columns` are names; the first one is that of the time.

    Examples
    --------
    >>> series = Series(("time", "value"), max_points=4)
    >>> for n in range(8):
    ...     series.append(n, n * n)
    >>> series.columns()
    {'time': [0, 2, 4, 6], 'value': [0, 4, 16, 36]}
    """

    def __init__(self, columns: Sequence[str], max_points: int):
        self.names, self.max_points = tuple(columns), max_points
        self._points: list[tuple[float, ...]] = []
        self._stride, self._count = 1, 0

    def append(self, *point: float) -> None:
        """Add a point, unless the series is thinned and leaves this one out."""
        number, self._count = self._count, self._count + 1
        if number % self._stride == 0 and len(self._points) == self.max_points:
            self._points = self._points[::2]
            self._stride *= 2
        if number % self._stride == 0:
            self._points.append(point)

    def last(self) -> tuple[float, ...]:
        return self._points[-1] if self._points else ()

    def columns(self, max_points: int | None = None) -> dict[str, list[float]]:
        """The points by column, evenly thinned to at most `max_points`."""
        every = 1 if max_points is None else max(1, -(-len(self._points) // max_points))
        points = self._points[::every]
        return {name: [point[i] for point in points] for i, name in enumerate(self.names)}
