"""What the settings of estimators may be: declared once for each setting, and checked before any server starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from dps.errors import InputError, told

__all__ = ["Number", "OfKind", "OneOf", "Rules", "SettingRule", "Whole", "is_number", "is_whole", "refuse_other"]


class SettingRule(Protocol):
    """What a setting may be."""

    def allows(self, value: object) -> bool:
        """Whether the setting may have this value."""

    def text(self) -> str:
        """What the setting is, for the message that refuses another value."""


@dataclass(frozen=True)
class Whole:
    """A whole number, `least` or more; or one of the values of `other`."""

    least: int = 1
    other: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        return is_whole(value, self.least) or is_one_of(value, self.other)

    def text(self) -> str:
        return f"a whole number, {self.least} or more" + alternatives(self.other)


@dataclass(frozen=True)
class Number:
    """A finite number, from `least` to `most`, without the ends if `inside`; or one of the values of `other`.

    Examples
    --------
    >>> Number().allows(0.5), Number().allows(math.inf), Number(inside=True).allows(0.0), Number(most=1.0).allows(2)
    (True, False, False, False)
    >>> Number(inside=True).text(), Number(most=1.0).text()
    ('a finite number, above 0', 'a finite number, from 0 to 1')
    """

    least: float = 0.0
    most: float = math.inf
    inside: bool = False
    other: tuple[object, ...] = ()

    def allows(self, value: object) -> bool:
        return (is_number(value) and self._holds(float(value))) or is_one_of(value, self.other)  # type: ignore[arg-type]

    def _holds(self, value: float) -> bool:
        return self.least < value < self.most if self.inside else self.least <= value <= self.most

    def text(self) -> str:
        if self.most < math.inf:
            bounds = (
                f"between {self.least:g} and {self.most:g}" if self.inside else f"from {self.least:g} to {self.most:g}"
            )
        else:
            bounds = f"above {self.least:g}" if self.inside else f"{self.least:g} or more"
        return f"a finite number, {bounds}{alternatives(self.other)}"


class OneOf:
    def __init__(self, *values: object):
        self.values = values

    def allows(self, value: object) -> bool:
        return is_one_of(value, self.values)

    def text(self) -> str:
        return repr(self.values[0]) if len(self.values) == 1 else f"one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class OfKind:
    """None, or an object of one of some classes, for which `what` is the message's word."""

    kinds: tuple[type, ...]
    what: str

    def allows(self, value: object) -> bool:
        return value is None or isinstance(value, self.kinds)

    def text(self) -> str:
        return f"{self.what}, or None"


Rules: TypeAlias = Mapping[str, SettingRule]  # by the names of settings


def is_whole(value: object, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value)


def is_one_of(value: object, values: tuple[object, ...]) -> bool:
    """Whether this is one of some values. An array, which has no single answer to ==, is none of them."""
    plain = isinstance(value, (str, int, float, np.generic))
    return any(value is each or (plain and value == each) for each in values)


def alternatives(values: tuple[object, ...]) -> str:
    return "".join(f", or {value!r}" for value in values)


def refuse_other(name: str, value: object, rule: SettingRule) -> None:
    if not rule.allows(value):
        raise InputError(f"{name} is {rule.text()}; not {told(value)}")
