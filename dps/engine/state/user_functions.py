"""A function of the user in a table's definition: its name, its code by value, and a check of what it returns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import FunctionType
from typing import ClassVar, Self

import numpy as np

from dps.engine.state.recipes import Recipe
from dps.engine.state.user_code import UserCode, code_of_function, last_lines, opened, packed
from dps.errors import FunctionError

__all__ = ["UserFunction"]


@functools.lru_cache(maxsize=128)
def _opened(code: UserCode, what: str) -> Callable[..., object]:
    """A function of the user; opened once in a process, because each client and each shard asks for it."""
    found: Callable[..., object] = opened(code, what)
    return found


@dataclasses.dataclass(frozen=True, repr=False)
class UserFunction(Recipe):
    """Base of the functions that return a number for each of some rows or keys.

    Attributes
    ----------
    function_name : str
    code : str
        A hash of what it does. Two functions with the same one are the same, wherever they were defined.
    sha256, pickled : str
        The hash of the pickled function, and the pickled function in base64.
    """

    # The words of errors: what the function is, what it has to return, for what; and the kinds of numpy's types.
    WHAT: ClassVar[str]
    RETURNS: ClassVar[str]
    EACH: ClassVar[str]
    KINDS: ClassVar[str]
    function_name: str = dataclasses.field(compare=False)
    code: str
    sha256: str = dataclasses.field(compare=False)
    pickled: str = dataclasses.field(compare=False)

    @classmethod
    def made(cls, function: Callable[..., object]) -> Self:
        """A function as a table keeps it."""
        name = getattr(function, "__qualname__", type(function).__qualname__)
        module = function.__module__ if isinstance(function, FunctionType) else None
        code = packed(function, module, f"{cls.WHAT} {name}")  # first, because its error says what cannot be pickled
        return cls(name, code_of_function(function), *code)

    def numbers(self, shape: tuple[int, ...], *arguments: np.ndarray) -> np.ndarray:
        """What the function returns of its arguments, an array of this shape.

        Raises FunctionError if the function cannot be opened here, has failed, or has returned something else.
        """
        what = f"{self.WHAT} {self.function_name}"
        function = _opened(UserCode(self.sha256, self.pickled), what)
        try:
            found = np.asarray(function(*arguments))
        except Exception as error:
            raise FunctionError(f"{what} failed: {last_lines(error)}") from None
        kind = found.dtype.kind
        if found.shape != shape or kind not in self.KINDS or (kind == "f" and np.isnan(found).any()):
            raise FunctionError(
                f"{what} returned {found.dtype} of shape {found.shape} for {shape[0]} {self.EACH}, and has to return "
                f"{self.RETURNS}, as an array of shape {shape}"
            )
        return found
