"""One test for many files: it tells every file that breaks a rule, and costs the set-up of one test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

__all__ = ["each"]


def each(items: Iterable[Item]) -> Callable[[Callable[[Item], None]], Callable[[], None]]:
    """Make a test of a rule: the rule is called with each item, and fails by an AssertionError."""

    def decorate(rule: Callable[[Item], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for item in items:
                try:
                    rule(item)
                except AssertionError as error:
                    broken.append(f"{item}: {error}")
            assert not broken, "\n".join(broken)

        # Not functools.wraps, because pytest would take the rule's parameter for a fixture.
        test.__name__, test.__doc__ = rule.__name__, rule.__doc__
        return test

    return decorate
