"""A function of the user that says which rows of a full table go first."""

from __future__ import annotations

import dataclasses

import numpy as np

from dps.engine.state.user_functions import UserFunction

__all__ = ["EvictByFunction", "evict_of"]


@dataclasses.dataclass(frozen=True, repr=False)
class EvictByFunction(UserFunction):
    """Rows for which a function of the user returns the lowest numbers go first; made by :func:`evict_of`."""

    WHAT, RETURNS = "evict function", "a number for each, none of them NaN"
    EACH, KINDS = "rows", "iufb"

    def __repr__(self) -> str:
        return f"<function {self.function_name}>"

    def __call__(self, values: np.ndarray, uses: np.ndarray, idle: np.ndarray) -> np.ndarray:
        """A number for each row, float64[m]."""
        return self.numbers(uses.shape, values, uses, idle).astype(np.float64)


def evict_of(given: object) -> object:
    """A function of rows as the policy that a table keeps; any other value as it is."""
    return given if isinstance(given, EvictByFunction) or not callable(given) else EvictByFunction.made(given)
