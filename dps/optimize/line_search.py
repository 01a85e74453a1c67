"""Steps along a direction that satisfy the strong Wolfe conditions (Moré and Thuente 1994).

:class:`WolfeSearch` is pure arithmetic: it is given values and slopes, and says where to evaluate next. Its rules are
those of MINPACK-2's dcsrch and dcstep, which scipy's L-BFGS-B uses, so that solvers make the steps that scipy makes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dps.optimize.minimization import Minimization
from dps.optimize.vectors import Vector, combine, dots

__all__ = ["Trial", "WolfeSearch", "search"]

# Fraction of the fall promised by the first slope that a step must give.
SUFFICIENT = 1e-3
# Relative width of the interval below which the search ends.
WIDTH = 0.1
# Number of evaluations of a search.
MAX_EVALUATIONS = 20
# Longest step.
LONGEST = 1e10


class Point(NamedTuple):
    """A step with the value and the slope there."""

    step: float
    value: float
    slope: float

    def tilted(self, by: float) -> Point:
        """The point of the function from which a line of slope `by` is subtracted."""
        return Point(self.step, self.value - self.step * by, self.slope - by)


class WolfeSearch:
    """Finds a step at which the value has fallen enough, and the slope is at most `curvature` times the first one.

    Parameters
    ----------
    value, slope : float
        At step 0; the slope is negative.
    step : float
        The first to try.
    curvature : float
        Between the fraction of the fall that is wanted, 0.001, and 1.
    """

    def __init__(self, value: float, slope: float, step: float, curvature: float = 0.9):
        self.step, self.done = step, False
        self._begin = Point(0.0, value, slope)
        self._best = self._other = self._begin
        self._curvature, self._wanted = curvature, SUFFICIENT * slope
        self._bracketed, self._stage = False, 1
        self._width = self._width_before = math.inf
        self._low, self._high = 0.0, 5.0 * step
        self._wall = math.inf  # the least step at which the value is not finite

    def tell(self, value: float, slope: float) -> None:
        """Take value and slope at `step`; then either the search is done, or `step` is the next to try."""
        here, enough = Point(self.step, value, slope), self._begin.value + self.step * self._wanted
        if self._stage == 1 and value <= enough and slope >= 0:
            self._stage = 2
        low, high = self._low, self._high
        stuck = self._bracketed and (not low < here.step < high or high - low <= WIDTH * high)
        at_end = here.step == LONGEST and value <= enough and slope <= self._wanted
        if stuck or at_end or (value <= enough and abs(slope) <= self._curvature * -self._begin.slope):
            self.done = True
            return
        tilt = self._wanted if self._stage == 1 and value <= self._best.value and value > enough else 0.0
        best, other, here = (point.tilted(tilt) for point in (self._best, self._other, here))
        best, other, step, self._bracketed = _next(best, other, here, self._bracketed, (low, high))
        self._best, self._other = best.tilted(-tilt), other.tilted(-tilt)
        self._narrow(step)

    def shorten(self) -> None:
        """The value at `step` is not finite: `step` becomes half-way to the best one."""
        self._wall = self.step
        self.step = (self._best.step + self._wall) / 2.0

    def _narrow(self, step: float) -> None:
        """The interval of the next step, and a bisection if it has not become smaller by a third."""
        best, other = self._best.step, self._other.step
        if self._bracketed:
            if abs(other - best) >= 0.66 * self._width_before:
                step = best + 0.5 * (other - best)
            self._width_before, self._width = self._width, abs(other - best)
            self._low, self._high = min(best, other), max(best, other)
        else:
            self._low, self._high = step + 1.1 * (step - best), step + 4.0 * (step - best)
        step = min(max(step, 0.0), LONGEST)
        if self._bracketed and (not self._low < step < self._high or self._high - self._low <= WIDTH * self._high):
            step = best
        self.step = step if step < self._wall else (best + self._wall) / 2.0


def _next(
    best: Point, other: Point, here: Point, bracketed: bool, limits: tuple[float, float]
) -> tuple[Point, Point, float, bool]:
    """dcstep: (best point, other end of the interval, next step, whether a minimum is between these)."""
    turned = here.slope * best.slope < 0
    if here.value > best.value:  # there is a minimum between: the cubic's, or half-way to the quadratic's
        cubic, quadratic = _cubic(best, here), _quadratic(best, here)
        closer = abs(cubic - best.step) < abs(quadratic - best.step)
        return best, here, cubic if closer else cubic + (quadratic - cubic) / 2.0, True
    if turned:  # there is one, too: whichever is farther from here
        cubic, secant = _cubic(here, best), _secant(best, here)
        return here, best, cubic if abs(cubic - here.step) > abs(secant - here.step) else secant, True
    if abs(here.slope) < abs(best.slope):  # the slope becomes smaller: the cubic may have no minimum there
        cubic, secant = _cubic_beyond(best, here, limits), _secant(best, here)
        nearer = abs(cubic - here.step) < abs(secant - here.step)
        if bracketed:
            step, bound = cubic if nearer else secant, here.step + 0.66 * (other.step - here.step)
            return here, other, min(bound, step) if here.step > best.step else max(bound, step), True
        return here, other, min(max(secant if nearer else cubic, limits[0]), limits[1]), False
    if bracketed:
        return here, other, _cubic(here, other), True
    return here, other, limits[1] if here.step > best.step else limits[0], False


def _gamma(a: Point, b: Point, *, real: bool = True) -> tuple[float, float]:
    """(theta, gamma) of the cubic through values and slopes of two points; without a minimum, gamma is 0."""
    theta = 3.0 * (a.value - b.value) / (b.step - a.step) + a.slope + b.slope
    scale = max(abs(theta), abs(a.slope), abs(b.slope))
    square = (theta / scale) ** 2 - (a.slope / scale) * (b.slope / scale)
    gamma = scale * math.sqrt(max(0.0, square))
    return theta, -gamma if b.step < a.step else gamma


def _cubic(a: Point, b: Point) -> float:
    """The minimum of the cubic between a and b, as a step from a."""
    theta, gamma = _gamma(a, b)
    ratio = ((gamma - a.slope) + theta) / (((gamma - a.slope) + gamma) + b.slope)
    return a.step + ratio * (b.step - a.step)


def _cubic_beyond(best: Point, here: Point, limits: tuple[float, float]) -> float:
    """The minimum of the cubic beyond here, or the limit on that side if it has none there."""
    theta, gamma = _gamma(here, best)
    ratio = ((gamma - here.slope) + theta) / ((gamma + (best.slope - here.slope)) + gamma)
    if ratio < 0.0 and gamma != 0.0:
        return here.step + ratio * (best.step - here.step)
    return limits[1] if here.step > best.step else limits[0]


def _quadratic(a: Point, b: Point) -> float:
    """The minimum of the parabola through both values and the slope of a."""
    return a.step + a.slope / ((a.value - b.value) / (b.step - a.step) + a.slope) / 2.0 * (b.step - a.step)


def _secant(a: Point, b: Point) -> float:
    """Where the line through both slopes is 0."""
    return b.step + b.slope / (b.slope - a.slope) * (a.step - b.step)


class Trial(NamedTuple):
    """A step along a direction, and what was found there."""

    step: float
    x: Vector
    value: float
    gradient: Vector
    slope: float  # along the direction
    norm: float  # norm of the gradient


def search(task: Minimization, direction: Vector, slope: float, step: float, curvature: float = 0.9) -> Trial | None:
    """A step from the task's point that satisfies the strong Wolfe conditions; None if MAX_EVALUATIONS find none."""
    wolfe = WolfeSearch(task.value, slope, step, curvature)
    for _ in range(MAX_EVALUATIONS):
        x = combine([1.0, wolfe.step], [task.x, direction])
        value, gradient = task.evaluate(x)
        if not math.isfinite(value):
            wolfe.shorten()
            continue
        along, square = dots([(gradient, direction), (gradient, gradient)]).tolist()
        wolfe.tell(value, along)
        if wolfe.done:
            return Trial(wolfe.step, x, value, gradient, along, math.sqrt(square)) if value <= task.value else None
    return None
