"""AutoStaleness: a staleness that lowers waiting and does not hurt the loss. Pure, and time is an argument.

A larger staleness makes fast trainers wait less for delays that hit one trainer after the other (SSP, Ho et al., NIPS
2013), but gradients are then made from older parameters. The rule changes the staleness in steps of one, some seconds
apart:

* up, while trainers wait much for reasons that staleness absorbs. Staleness does not help if a trainer is slow for
  good, has more work or is dead, because the other trainers soon reach any bound;
* back, if the loss after a step up is worse than its trend before. The back-off before the next step up doubles;
* down, if trainers hardly wait, because a lower bound then costs nothing. If the rule has to go up again, that step was
  wrong, and the next step down has a back-off too.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dps.errors import InputError

if TYPE_CHECKING:
    from dps.engine.telemetry.findings import Finding

__all__ = ["AutoStaleness"]

# Shares of the trainers' time: a step up needs more waiting than the first, a step down less than the second.
MUCH_WAITING_SHARE = 0.10
NEGLIGIBLE_WAITING_SHARE = 0.02
STEP_SECONDS = 5.0  # least time between two steps
# A step down comes after this many times STEP_SECONDS with negligible waiting.
CALM_STEPS = 4
# Bounds of the back-off after a wrong step, in multiples of STEP_SECONDS.
MIN_BACKOFF_STEPS = 8
MAX_BACKOFF_STEPS = 64
# Delays of the network that last longer than this are none that staleness absorbs.
LASTING_SECONDS = 5.0
# Numbers of losses: the most that are kept, and the fewest that a judgement needs.
MAX_LOSSES = 24
MIN_LOSSES = 4
SLOPE_SHARE = 0.25  # part of the earlier slope that the loss must keep, because loss curves flatten anyway
# A loss may exceed its trend by this many standard deviations and this fraction of itself.
DEVIATIONS = 3.0
TOLERANCE = 0.005


class AutoStaleness:
    """Chooses the staleness of a run. See the module's docstring.

    Examples
    --------
    >>> automatic = AutoStaleness(maximum=3)
    >>> [automatic.update(now, 0.4, loss=1 / (1 + now), findings=[]) for now in range(0, 30, 5)]
    [0, 1, 2, 3, 3, 3]
    >>> [automatic.update(now, 0.0, loss=1 / (1 + now), findings=[]) for now in range(30, 80, 10)]
    [3, 3, 2, 2, 1]
    """

    def __init__(self, maximum: int = 16, start: int = 0, seconds: float = STEP_SECONDS):
        if not 0 <= start <= maximum:
            raise InputError(f"the automatic staleness begins between 0 and {maximum} (the most), not at {start}")
        self.maximum = maximum
        self.value = start
        self.seconds = seconds
        self._changed: float | None = None  # the time of the last step
        self._step = 0  # the last step: 1, -1, or 0 where there is none or it was wrong
        self._waited = 0.0  # the last time of more than negligible waiting
        self._losses: collections.deque[tuple[float, float]] = collections.deque(maxlen=MAX_LOSSES)  # since that step
        self._before: np.ndarray | None = None  # the losses before that step, if it was up
        self._next = {1: -math.inf, -1: -math.inf}  # step -> when it is allowed again
        self._backoff = {1: MIN_BACKOFF_STEPS, -1: MIN_BACKOFF_STEPS}

    def update(self, now: float, waiting_share: float, loss: float | None, findings: Sequence[Finding]) -> int:
        """Choose the staleness from now on. The monitor calls this about once a second.

        `waiting_share` is the part of their recent time that the trainers waited for each other.
        """
        if self._changed is None:
            self._changed = self._waited = now
        if waiting_share > NEGLIGIBLE_WAITING_SHARE:
            self._waited = now
        if loss is not None and math.isfinite(loss) and (not self._losses or self._losses[-1][1] != loss):
            self._losses.append((now, loss))
        if now - self._changed < self.seconds:
            return self.value
        calm = CALM_STEPS * self.seconds
        if self._before is not None and _worse(self._before, np.array(self._losses)):
            self._go(-1, now)
            self._back_off(1, now)
        elif (
            waiting_share > MUCH_WAITING_SHARE
            and now >= self._next[1]
            and self.value < self.maximum
            and _absorbable(findings, now)
        ):
            if self._step < 0:
                self._back_off(-1, now)
            self._go(1, now)
        elif now - max(self._waited, self._changed) >= calm and now >= self._next[-1] and self.value > 0:
            self._go(-1, now)
        return self.value

    def _go(self, step: int, now: float) -> None:
        self._before = np.array(self._losses) if step > 0 and len(self._losses) >= MIN_LOSSES else None
        self._losses.clear()
        self.value += step
        self._changed = now
        self._step = step

    def _back_off(self, step: int, now: float) -> None:
        """The last step in this direction was wrong: the next one has to wait."""
        self._next[step] = now + self._backoff[step] * self.seconds
        self._backoff[step] = min(2 * self._backoff[step], MAX_BACKOFF_STEPS)
        self._step = 0


def _absorbable(findings: Sequence[Finding], now: float) -> bool:
    """Whether staleness absorbs the delays, because no single trainer causes all of them."""
    lasting = {"permanent", "skew", "dead"}
    return not any(f.kind in lasting or (f.kind == "network" and now - f.since > LASTING_SECONDS) for f in findings)


def _worse(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the losses `after` a step exceed the trend of the losses `before`; both are rows of (time, loss)."""
    if len(after) < MIN_LOSSES:
        return False
    times, losses = before.T
    slope, level = np.polyfit(times - times[-1], losses, 1)
    scatter = float(np.std(losses - level - slope * (times - times[-1])))
    last = max(1, len(losses) // 3)
    ahead = np.minimum(
        after[:, 0] - times[-last:].mean(), times[-1] - times[0]
    )  # extrapolates by at most the known span
    expected = losses[-last:].mean() + SLOPE_SHARE * min(slope, 0.0) * ahead
    allowed = DEVIATIONS * scatter * math.sqrt(1 / len(after) + 1 / last) + TOLERANCE * abs(losses[-1])
    return float((after[:, 1] - expected).mean()) > allowed
