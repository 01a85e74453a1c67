"""Schedules: learning rates as functions of the clock, so that all shards and all replicas agree on them.

The clock is the number of iterations that the pushing trainer has completed, as stamped on its push: 0, 1, 2, ... A
negative clock counts as clock 0.

The lag of a push is the number of clocks by which it is behind the latest push to its shard. :class:`StalenessAware`
is a function of it, too. All copies of a shard agree on it, because it follows from the pushes that they carry out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field

from dps.engine.core.portable import power, sine
from dps.engine.state.recipes import Recipe, from_dict, is_number, number
from dps.errors import InputError, InputTypeError

__all__ = [
    "RATE",
    "Cosine",
    "Exponential",
    "Fixed",
    "InverseSqrt",
    "InverseTime",
    "Schedule",
    "StalenessAware",
    "Step",
    "Warmup",
    "as_schedule",
    "schedule_from_dict",
]


class Schedule(Recipe):
    """Base of the schedules: ``schedule(clock)`` is the learning rate at that clock.

    Examples
    --------
    >>> Step(0.8, every=10, factor=0.5)(25)
    0.2
    """

    def __call__(self, clock: int, lag: int = 0) -> float:
        return self._at(max(int(clock), 0))

    def _at(self, clock: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define _at(clock)")


def schedule_from_dict(description: Mapping[str, object]) -> Schedule:
    return from_dict(Schedule, description)


def as_schedule(
    value: Schedule | Mapping[str, object] | float, label: str = "lr", default: object = MISSING
) -> Schedule:
    """A schedule from a schedule (unchanged), a number (:class:`Fixed`), or a dict (:func:`schedule_from_dict`)."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return schedule_from_dict(value)
    if is_number(value):
        return Fixed(value)
    usual = "" if default is MISSING else f" (the default is {default!r})"
    raise InputTypeError(f"{label} is {value!r} but must be a number above 0 or a schedule{usual}")


def as_inner_schedule(value: Schedule | Mapping[str, object] | float, label: str, default: object) -> Schedule:
    """The same for a schedule inside another one, which is a function of the clock alone."""
    schedule = as_schedule(value, label, default)
    if isinstance(schedule, StalenessAware):
        raise InputError(
            f"{label} is {schedule!r}, whose rate depends on the push as well: it goes around other schedules and not "
            "into them, such as StalenessAware(Warmup(0.1, clocks=5))"
        )
    return schedule


# Metadata of a field that holds a schedule, or a number that becomes one; and of a schedule's own field.
RATE, INNER_RATE = {"convert": as_schedule}, {"convert": as_inner_schedule}


@dataclass(frozen=True, repr=False)
class Fixed(Schedule):
    """The rate is always `lr`."""

    lr: float = number(above=0)

    def __repr__(self) -> str:
        return repr(self.lr)  # which is how a fixed rate is given

    def _at(self, clock: int) -> float:
        return self.lr


@dataclass(frozen=True, repr=False)
class InverseTime(Schedule):
    """``lr / (1 + decay * clock)``, the classic decay of stochastic approximation (Robbins and Monro, 1951).

    Parameters
    ----------
    lr : float
        The rate at clock 0.
    decay : float
        0 or more.

    Examples
    --------
    >>> InverseTime(1.0, decay=0.5)(2)
    0.5
    """

    lr: float = number(above=0)
    decay: float = number(least=0)

    def _at(self, clock: int) -> float:
        return self.lr / (1 + self.decay * clock)


@dataclass(frozen=True, repr=False)
class InverseSqrt(Schedule):
    """``lr / sqrt(1 + decay * clock)``, the decay in the proof that bounded staleness converges (Ho et al., 2013).

    Parameters
    ----------
    lr : float
        The rate at clock 0.
    decay : float
        0 or more.

    Examples
    --------
    >>> InverseSqrt(1.0)(3)
    0.5
    """

    lr: float = number(above=0)
    decay: float = number(1.0, least=0)

    def _at(self, clock: int) -> float:
        return self.lr / math.sqrt(1 + self.decay * clock)


@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    """``lr * factor ** clock``.

    Parameters
    ----------
    lr : float
        The rate at clock 0.
    factor : float
        Above 0, at most 1.

    Examples
    --------
    >>> Exponential(1.0, factor=0.5)(3)
    0.125
    """

    lr: float = number(above=0)
    factor: float = number(above=0, most=1)

    def _at(self, clock: int) -> float:
        return self.lr * power(self.factor, clock)


@dataclass(frozen=True, repr=False)
class Step(Schedule):
    """``lr * factor ** (clock // every)``: the rate is cut by `factor` every so many clocks.

    Parameters
    ----------
    lr : float
        The rate at clock 0.
    every : int
        Clocks between two cuts.
    factor : float
        Above 0, at most 1.

    Examples
    --------
    >>> [Step(1.0, every=2, factor=0.5)(clock) for clock in range(5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """

    lr: float = number(above=0)
    every: int = number(least=1, whole=True)
    factor: float = number(0.1, above=0, most=1)

    def _at(self, clock: int) -> float:
        return self.lr * power(self.factor, clock // self.every)


@dataclass(frozen=True, repr=False)
class Cosine(Schedule):
    """From `lr` down to `floor` over `clocks` along half a cosine, then `floor` (Loshchilov and Hutter, 2017).

    Parameters
    ----------
    lr : float
        The rate at clock 0.
    clocks : int
        How many clocks the rate falls.
    floor : float
        The rate at the end, and from then on.

    Examples
    --------
    >>> schedule = Cosine(1.0, clocks=10, floor=0.1)
    >>> schedule(0), round(schedule(5), 12), round(schedule(10), 12), round(schedule(99), 12)
    (1.0, 0.55, 0.1, 0.1)
    """

    lr: float = number(above=0)
    clocks: int = number(least=1, whole=True)
    floor: float = number(0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor > self.lr:
            raise InputError(f"Cosine: floor is {self.floor} but must be at most lr, which is {self.lr}")

    def _at(self, clock: int) -> float:
        if clock >= self.clocks:
            return self.floor
        half = sine(math.pi / 2 * (clock / self.clocks))  # (1 + cos x) / 2 = 1 - sin(x / 2) ** 2
        return self.lr - (self.lr - self.floor) * half * half


@dataclass(frozen=True, repr=False)
class Warmup(Schedule):
    """A straight climb over `clocks` to the first rate of `schedule`, then `schedule` from its own clock 0.

    Parameters
    ----------
    schedule : schedule or float
        The rates after the climb.
    clocks : int
        How many clocks the climb takes.

    Examples
    --------
    >>> [Warmup(1.0, clocks=3)(clock) for clock in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    schedule: Schedule | float = field(metadata=INNER_RATE)
    clocks: int = number(least=1, whole=True)

    def _at(self, clock: int) -> float:
        schedule = as_schedule(self.schedule)
        if clock < self.clocks:
            return schedule(0) * ((clock + 1) / (self.clocks + 1))
        return schedule(clock - self.clocks)


@dataclass(frozen=True, repr=False)
class StalenessAware(Schedule):
    """``schedule(clock) / max(1, lag)``: a push that lags behind takes a smaller step.

    This is the rule of Zhang, Gupta, Lian and Liu, "Staleness-aware Async-SGD for Distributed Deep Learning" (IJCAI
    2016, Equation 3): the learning rate is divided by the staleness of the gradient, and is not changed where that is
    0. So a push that lags 1 clock behind still takes a full step, and where all trainers are at one clock, as with
    staleness 0, rows get the same bits as with `schedule` alone. The paper counts the updates between the pull and the
    push of a gradient. dps counts clocks: the *lag* of a push is the latest clock of a push to the same shard, by a
    trainer whose run has not ended, minus the clock of this push. A push without a clock does not lag.

    In a run of staleness s no push lags by more than s clocks, so this changes nothing before s = 2. With infinite
    staleness the lag of a trainer that is always slower grows without bound, and its pushes count less and less,
    although the rows that it has pulled are fresh: prefer a finite staleness.

    It goes around other schedules, not into them. A table with ``aggregate=`` has one step for all pushes of a clock,
    which never lags. An optimizer of the user cannot have it, because `update` gets the clock alone.

    Parameters
    ----------
    schedule : schedule or float
        The rate of a push that does not lag.

    Examples
    --------
    >>> [StalenessAware(0.6)(clock=7, lag=lag) for lag in range(4)]
    [0.6, 0.6, 0.3, 0.19999999999999998]
    """

    schedule: Schedule | float = field(metadata=INNER_RATE)

    def __call__(self, clock: int, lag: int = 0) -> float:
        return as_schedule(self.schedule)(clock) / max(1, lag)
