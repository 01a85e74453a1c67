"""Initial values of rows: functions of (seed, key, column), and of nothing else.

So a row that has had no push needs no memory, any division into shards gives the same model, and a server that comes
back, or another process, gives the same numbers again. The function must never change: stored models hold only the rows
that had a push, and rely on it for all others (``tests/state/test_initializers.py`` pins values bit for bit).

Every initializer is a seed and three numbers (kind, a, b), so that one set of loops
(:mod:`dps.engine.core.shards.initializers`) serves all of them:

    stream = mix(mix(seed + G) ^ key)                  where mix and G are those of splitmix64 (Steele et al., 2014)
    hash n = mix(stream + (n + 1) G)                   column j owns the hashes 2 j and 2 j + 1
    u, v   = their top 53 bits as numbers in [0, 1)

uniform: ``a + (b - a) u``. Normal: ``a + b sqrt(-2 log(u')) sin(pi (v' - 1/2))`` with u' in (0, 1] and v' in (0, 1),
the transform of Box and Muller (1958) with the angle taken from half the circle, which suffices for one number of
the pair. Values are computed in float64 and rounded once to the table's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dps.engine.state.dtypes import DTYPES, REALS, WHOLE, range_of
from dps.engine.state.recipes import Recipe, from_dict, number
from dps.errors import InputError

__all__ = [
    "Constant",
    "Initializer",
    "Normal",
    "Uniform",
    "Xavier",
    "Zeros",
    "initializer_from_dict",
]

ZEROS, CONSTANT, UNIFORM, NORMAL = 0.0, 1.0, 2.0, 3.0
LAST_SEED = 2**64 - 1


class Initializer(Recipe):
    """Base of the initializers.

    Two tables with the same initializer and seed begin with the same numbers: give each its own seed, above all
    when their rows are multiplied with each other (matrix factorisation).

    Attributes
    ----------
    seed : int
        0 .. 2**64 - 1; 0 where nothing is random.
    dtypes : tuple of str
        The dtypes of tables that the initial values suit.
    """

    seed: int = 0

    def numbers(self) -> np.ndarray:
        """float64[3]: kind (0 zeros, 1 constant, 2 uniform, 3 normal), a, b."""
        return np.array(self._numbers(), dtype=np.float64)

    def _numbers(self) -> tuple[float, float, float]:
        raise NotImplementedError(f"{type(self).__name__} must define _numbers()")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of tables that the initial values suit."""
        return REALS

    @property
    def is_zero(self) -> bool:
        """Whether all initial values are 0, so that fresh memory holds them already."""
        return self._numbers()[0] == ZEROS


def initializer_from_dict(description: Mapping[str, object]) -> Initializer:
    return from_dict(Initializer, description)


@dataclass(frozen=True, repr=False)
class Zeros(Initializer):
    """All zero.

    Examples
    --------
    >>> Zeros().is_zero
    True
    """

    def _numbers(self) -> tuple[float, float, float]:
        return ZEROS, 0.0, 0.0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of tables that the initial values suit."""
        return DTYPES


@dataclass(frozen=True, repr=False)
class Constant(Initializer):
    """All `value`; on tables of whole numbers one that the dtype holds, up to 2**53.

    Parameters
    ----------
    value : float
        The initial value of every row, in all columns.

    Examples
    --------
    >>> Constant(0.5).numbers()
    array([1. , 0.5, 0. ])
    """

    value: float = number()

    def _numbers(self) -> tuple[float, float, float]:
        return (CONSTANT if self.value else ZEROS), self.value, 0.0

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of tables that the initial values suit."""
        if not self.value.is_integer() or abs(self.value) > 2**53:  # what lies beyond, float64 does not hold exactly
            return REALS
        limits = {dtype: range_of(dtype) for dtype in WHOLE}
        return (*REALS, *(dtype for dtype, (least, most) in limits.items() if least <= self.value <= most))


@dataclass(frozen=True, repr=False)
class Uniform(Initializer):
    """Evenly spread over [low, high).

    Parameters
    ----------
    low, high : float
        The bounds of the values.
    seed : int
        0 .. 2**64 - 1.

    Examples
    --------
    >>> Uniform(-1, 1, seed=7).numbers()
    array([ 2., -1.,  1.])
    """

    low: float = number()
    high: float = number()
    seed: int = number(0, least=0, most=LAST_SEED, whole=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise InputError(f"Uniform: low is {self.low} but must be below high, which is {self.high}")

    def _numbers(self) -> tuple[float, float, float]:
        return UNIFORM, self.low, self.high


@dataclass(frozen=True, repr=False)
class Normal(Initializer):
    """Normally distributed around `mean` with standard deviation `scale`.

    Parameters
    ----------
    scale : float
        Standard deviation.
    mean : float
        Mean of the values.
    seed : int
        0 .. 2**64 - 1.

    Examples
    --------
    >>> Normal(0.01, seed=7)
    Normal(scale=0.01, seed=7)
    """

    scale: float = number(above=0)
    mean: float = number(0.0)
    seed: int = number(0, least=0, most=LAST_SEED, whole=True)

    def _numbers(self) -> tuple[float, float, float]:
        return NORMAL, self.mean, self.scale


@dataclass(frozen=True, repr=False)
class Xavier(Initializer):
    """Uniform within ``gain * sqrt(6 / (fan_in + fan_out))`` of 0 (Glorot and Bengio, 2010).

    Parameters
    ----------
    fan_in, fan_out : int
        Numbers of inputs and outputs of the layer.
    seed : int
        0 .. 2**64 - 1.
    gain : float
        A factor of the bound.

    Examples
    --------
    >>> Xavier(fan_in=2, fan_out=4).numbers()
    array([ 2., -1.,  1.])
    """

    fan_in: int = number(least=1, whole=True)
    fan_out: int = number(least=1, whole=True)
    seed: int = number(0, least=0, most=LAST_SEED, whole=True)
    gain: float = number(1.0, above=0)

    def _numbers(self) -> tuple[float, float, float]:
        limit = self.gain * math.sqrt(6 / (self.fan_in + self.fan_out))
        return UNIFORM, -limit, limit
