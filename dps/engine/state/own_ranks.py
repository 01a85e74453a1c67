"""A function of the user that says which rows of a full table go first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType

import numpy as np

from dps.engine.state.recipes import Recipe
from dps.engine.state.user_code import UserCode, code_of_function, last_lines, opened, packed
from dps.errors import FunctionError

__all__ = ["EvictByFunction", "evict_of"]


@functools.lru_cache(maxsize=64)
def _opened(code: UserCode, what: str) -> Callable[..., object]:
    """A function of the user; opened once in a process, because each shard asks for it."""
    found: Callable[..., object] = opened(code, what)
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class EvictByFunction(Recipe):
    """Rows for which a function of the user returns the lowest numbers go first; made by :func:`evict_of`.

    Attributes
    ----------
    function_name : str
    code : str
        A hash of what it does. Two functions with the same one are the same, wherever they were defined.
    sha256, pickled : str
        The hash of the pickled function, and the pickled function in base64.
    """

    function_name: str = dataclasses.field(compare=False)
    code: str
    sha256: str = dataclasses.field(compare=False)
    pickled: str = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return f"<function {self.function_name}>"

    def __call__(self, values: np.ndarray, uses: np.ndarray, idle: np.ndarray) -> np.ndarray:
        """A number for each row, float64[m].

        Raises FunctionError if the function cannot be opened here, has failed, or has returned no number for each row.
        """
        what = f"evict function {self.function_name}"
        function = _opened(UserCode(self.sha256, self.pickled), what)
        try:
            found = np.asarray(function(values, uses, idle))
        except Exception as error:
            raise FunctionError(f"{what} failed: {last_lines(error)}") from None
        if found.shape != uses.shape or found.dtype.kind not in "iufb" or np.isnan(found).any():
            raise FunctionError(
                f"{what} returned {found.dtype} of shape {found.shape} for {len(uses)} rows, and has to return a "
                f"number for each, none of them NaN, as an array of shape {uses.shape}"
            )
        return found.astype(np.float64)


def evict_of(given: object) -> object:
    """A function of rows as the policy that a table keeps; any other value as it is."""
    if isinstance(given, EvictByFunction) or not callable(given):
        return given
    name = getattr(given, "__qualname__", type(given).__qualname__)
    module = given.__module__ if isinstance(given, FunctionType) else None
    code = packed(given, module, f"evict function {name}")
    return EvictByFunction(name, code_of_function(given), *code)
