"""Watch: who has been silent for too long, judged by somebody who was awake himself. Pure.

A server beats every quarter of a second. If the judge slept (its process was stopped, or starved), beats have piled up
unread; to condemn all for that would be a massacre. So looks are regular, and a look that comes late moves everybody's
last sign by as much as it is late.
"""

from __future__ import annotations

__all__ = ["Watch"]


class Watch:
    """Last signs of life.

    Parameters
    ----------
    patience : float
        Seconds of silence that are allowed.
    interval : float
        Seconds between two looks, at most.

    Examples
    --------
    >>> watch = Watch(patience=2.0, interval=0.5)
    >>> watch.sign(7, now=0.0)
    >>> [watch.silent(now / 2) for now in range(6)][-2:]
    [[], [7]]
    >>> watch.silent(60.0)  # a late look: the judge slept
    [7]
    """

    def __init__(self, patience: float, interval: float):
        self.patience, self.interval = patience, interval
        self._signs: dict[int, float] = {}
        self._looked: float | None = None

    def sign(self, who: int, now: float) -> None:
        """`who` is alive."""
        self._signs[who] = max(now, self._signs.get(who, now))

    def forget(self, who: int) -> None:
        """`who` is not watched any more."""
        self._signs.pop(who, None)

    def silent(self, now: float) -> list[int]:
        """Those without a sign for longer than the patience. To be called every `interval`."""
        late = 0.0 if self._looked is None else max(0.0, now - self._looked - 2 * self.interval)
        self._looked = now
        for who in self._signs if late else ():
            self._signs[who] = min(now, self._signs[who] + late)
        return [who for who, sign in self._signs.items() if now - sign > self.patience]
