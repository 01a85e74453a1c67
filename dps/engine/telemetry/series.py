"""Series: numbers over time in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Series"]


class Series:
    """Columns of numbers over time that keep at most `max_points` points.

    When they are full, every second point is dropped, and from then on only every second new point is kept.

    Parameters
    ----------
    columns : sequence of str
        Names of the columns; the first one is the time.
    max_points : int
        The largest number of points kept.

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
        """The newest point that was kept; empty if there is none."""
        return self._points[-1] if self._points else ()

    def columns(self, max_points: int | None = None) -> dict[str, list[float]]:
        """The points by column, evenly thinned to at most `max_points`."""
        every = 1 if max_points is None else max(1, -(-len(self._points) // max_points))
        points = self._points[::every]
        return {name: [point[i] for point in points] for i, name in enumerate(self.names)}
