"""Recipe: an immutable value with a name and a few checked numbers. Optimizers, schedules and initializers are recipes.

A subclass declares its numbers as dataclass fields with the limits beside them (:func:`number`). The checks, the error
messages, and the plain dict in which the value travels to the servers and into checkpoints follow from these fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias, TypeGuard, TypeVar

from dps.errors import InputError, InputTypeError

__all__ = ["Description", "Recipe", "converted", "flag", "from_dict", "is_number", "number"]

R = TypeVar("R", bound="Recipe")
Description: TypeAlias = dict[str, Any]  # a value of this package as plain values, for JSON


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Base of all recipes: converts and checks the fields, and turns them into a dict."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            convert = field.metadata.get("convert")
            if convert is not None:
                value = convert(getattr(self, field.name), f"{type(self).__name__}: {field.name}", field.default)
                object.__setattr__(self, field.name, value)  # the class is frozen

    def __repr__(self) -> str:
        """The call that makes the recipe, without the parameters that have their defaults."""
        shown = []
        for field in dataclasses.fields(self):
            value, usual, convert = getattr(self, field.name), field.default, field.metadata.get("convert")
            if convert is not None and usual is not dataclasses.MISSING:
                usual = convert(usual, field.name, usual)
            if usual is dataclasses.MISSING or value != usual:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def to_dict(self) -> Description:
        """The recipe as values for JSON: the name of its class under ``"name"``, and every parameter."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: value.to_dict() if isinstance(value, Recipe) else value for name, value in values.items()}
        return {"name": type(self).__name__, **plain}


def from_dict(family: type[R], description: Mapping[str, object]) -> R:
    """The recipe, of a subclass of `family`, that :meth:`Recipe.to_dict` described."""
    kinds = {kind.__name__: kind for kind in _subclasses(family) if kind.__module__.startswith("dps.")}
    params = dict(description)
    name = params.pop("name", None)
    if name not in kinds:
        known = ", ".join(sorted(kinds))
        raise InputError(f"there is no {family.__name__.lower()} called {name!r}; dps knows {known}")
    kind = kinds[name]
    fields = dataclasses.fields(kind)
    unknown = params.keys() - {field.name for field in fields}
    missing = {field.name for field in fields if field.default is dataclasses.MISSING} - params.keys()
    if unknown or missing:
        takes = ", ".join(field.name for field in fields) or "no parameters"
        raise InputError(f"{name} takes {takes}; unknown: {sorted(unknown)}, missing: {sorted(missing)}")
    return kind(**params)


def converted(default: object, convert: Callable[[Any, str, object], object]) -> Any:
    """A field whose value goes through ``convert(value, label, default)``."""
    return dataclasses.field(default=default, metadata={"convert": convert})


def number(
    default: object = dataclasses.MISSING,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    whole: bool = False,
) -> Any:
    """A field that holds a finite number within limits: ``float``, or ``int`` if `whole`."""
    limits = {"above": above, "at least": least, "below": below, "at most": most}
    words = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit))
    wanted = ("a whole number" if whole else "a finite number") + (f" {words}" if words else "")

    def convert(value: object, label: str, default: object) -> float | int:
        usual = "" if default is dataclasses.MISSING else f" (the default is {default!r})"
        text = f"{label} is {value!r} but must be {wanted}{usual}"
        if not is_number(value):
            raise InputTypeError(text)
        if not math.isfinite(value) or (whole and value != int(value)):
            raise InputError(text)
        if not (value > above and value >= least and value < below and value <= most):
            raise InputError(text)
        return int(value) if whole else float(value)

    return converted(default, convert)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a real number of Python or numpy; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def flag(default: bool) -> Any:
    """A field that is True or False."""

    def convert(value: object, label: str, default: object) -> bool:
        if value not in (True, False):
            raise InputTypeError(f"{label} is {value!r} but must be True or False (the default is {default})")
        return bool(value)

    return converted(default, convert)


def _subclasses(family: type[R]) -> list[type[R]]:
    return [kind for child in family.__subclasses__() for kind in (child, *_subclasses(child))]
