"""Series: numbers over time in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Series"]


class Series:
    """Columns that grow; when they are full every second point goes, and from then on only every second one is taken.

    Parameters
    ----------
    columns : sequence of str
        The first one is the time.
    most : int
        Points that are kept, at most.

    Examples
    --------
    >>> series = Series(("time", "value"), most=4)
    >>> for n in range(8):
    ...     series.append(n, n * n)
    >>> series.columns()
    {'time': [0, 2, 4, 6], 'value': [0, 4, 16, 36]}
    """

    def __init__(self, columns: Sequence[str], most: int):
        self.names, self.most = tuple(columns), most
        self._points: list[tuple[float, ...]] = []
        self._stride, self._count = 1, 0

    def append(self, *point: float) -> None:
        """One more point, if it is its turn."""
        number, self._count = self._count, self._count + 1
        if number % self._stride == 0 and len(self._points) == self.most:
            self._points = self._points[::2]
            self._stride *= 2
        if number % self._stride == 0:
            self._points.append(point)

    def last(self) -> tuple[float, ...]:
        """The last point that was kept; empty before the first."""
        return self._points[-1] if self._points else ()

    def columns(self, most: int | None = None) -> dict[str, list[float]]:
        """All of it, by column; thinned to `most` points."""
        every = 1 if most is None else max(1, -(-len(self._points) // most))
        points = self._points[::every]
        return {name: [point[i] for point in points] for i, name in enumerate(self.names)}
