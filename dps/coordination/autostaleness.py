"""AutoStaleness: a staleness that lowers waiting and does not hurt the loss. Pure, and time is an argument.

What it knows: the larger the staleness, the less the fast wait for delays that go round (SSP, Ho et al., NIPS 2013),
and the older the parameters that gradients are made from. It goes in steps of one, some seconds apart:

* up, while trainers wait much, for reasons that staleness absorbs. It absorbs nothing of a trainer that is slow for
  good, has more to do, or is dead: these are ahead of any bound in no time;
* back, if after a step up the loss is worse than its trend before. The next try is put off, twice as long each time;
* down, if hardly anybody waits: the bound costs nothing then. If that was wrong, and it goes up again, the next try is
  put off too.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dps.errors import InputError

if TYPE_CHECKING:
    from dps.coordination.findings import Finding

__all__ = ["AutoStaleness"]

MUCH, NEGLIGIBLE = 0.10, 0.02  # of the trainers' time
STEP = 5.0  # seconds between two steps
CALM = 4  # so many of these with negligible waiting, before a step down
PUT_OFF = 8, 64  # of these after a step that was wrong, the first time and at most
LASTS = 5.0  # seconds: a slow network that lasts longer does not go round
TREND, FEW = 24, 4  # values of the loss that are kept, and that are needed to judge
FLATTENS = 0.25  # of the slope before: loss curves flatten, which is not worse
SURE, TOLERANCE = 3.0, 0.005  # standard deviations and part of the loss by which it may be above its trend


class AutoStaleness:
    """Says which staleness to use.

    Parameters
    ----------
    most : int
        The largest.
    start : int
        The first.
    seconds : float
        Between two steps.

    Examples
    --------
    >>> automatic = AutoStaleness(most=3)
    >>> [automatic.look(now, 0.4, loss=1 / (1 + now), findings=[]) for now in range(0, 30, 5)]
    [0, 1, 2, 3, 3, 3]
    >>> [automatic.look(now, 0.0, loss=1 / (1 + now), findings=[]) for now in range(30, 80, 10)]
    [3, 3, 2, 2, 1]
    """

    def __init__(self, most: int = 16, start: int = 0, seconds: float = STEP):
        if not 0 <= start <= most:
            raise InputError(f"the automatic staleness begins between 0 and {most} (the most), not at {start}")
        self.most, self.value, self.seconds = most, start, seconds
        self._changed: float | None = None  # when the value did
        self._step = 0  # the last one
        self._waited = 0.0  # when there was last more than negligible waiting
        self._losses: collections.deque[tuple[float, float]] = collections.deque(maxlen=TREND)  # since the last step
        self._before: np.ndarray | None = None  # ... and before it, if that was up
        self._next = {1: -math.inf, -1: -math.inf}  # when a step up, or down, is allowed again
        self._put_off = {1: PUT_OFF[0], -1: PUT_OFF[0]}

    def look(self, now: float, waiting_share: float, loss: float | None, findings: Sequence[Finding]) -> int:
        """The staleness from now on. To be called every second or so.

        Parameters
        ----------
        now : float
        waiting_share : float
            Part of the trainers' time that they wait for each other, lately.
        loss : float or None
            The last known.
        findings : sequence of Finding
            Who is slow.
        """
        if self._changed is None:
            self._changed = self._waited = now
        if waiting_share > NEGLIGIBLE:
            self._waited = now
        if loss is not None and math.isfinite(loss) and (not self._losses or self._losses[-1][1] != loss):
            self._losses.append((now, loss))
        if now - self._changed < self.seconds:
            return self.value
        calm = CALM * self.seconds
        if self._before is not None and _worse(self._before, np.array(self._losses)):
            self._go(-1, now)
            self._wait(1, now)
        elif waiting_share > MUCH and now >= self._next[1] and self.value < self.most and _go_round(findings, now):
            if self._step < 0:
                self._wait(-1, now)
            self._go(1, now)
        elif now - max(self._waited, self._changed) >= calm and now >= self._next[-1] and self.value > 0:
            self._go(-1, now)
        return self.value

    def _go(self, step: int, now: float) -> None:
        self._before = np.array(self._losses) if step > 0 and len(self._losses) >= FEW else None
        self._losses.clear()
        self.value, self._changed, self._step = self.value + step, now, step

    def _wait(self, step: int, now: float) -> None:
        """Such a step was wrong: not again so soon."""
        self._next[step] = now + self._put_off[step] * self.seconds
        self._put_off[step] = min(2 * self._put_off[step], PUT_OFF[1])
        self._step = 0


def _go_round(findings: Sequence[Finding], now: float) -> bool:
    """Whether the delays hit now this one, now that one."""
    lasting = {"permanent", "skew", "dead"}
    return not any(f.kind in lasting or (f.kind == "network" and now - f.since > LASTS) for f in findings)


def _worse(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the losses `after` are above the trend of those `before`; both are (time, loss)."""
    if len(after) < FEW:
        return False
    times, losses = before.T
    slope, level = np.polyfit(times - times[-1], losses, 1)
    scatter = float(np.std(losses - level - slope * (times - times[-1])))
    last = max(1, len(losses) // 3)
    ahead = np.minimum(after[:, 0] - times[-last:].mean(), times[-1] - times[0])  # no further than it is known
    expected = losses[-last:].mean() + FLATTENS * min(slope, 0.0) * ahead
    allowed = SURE * scatter * math.sqrt(1 / len(after) + 1 / last) + TOLERANCE * abs(losses[-1])
    return float((after[:, 1] - expected).mean()) > allowed
