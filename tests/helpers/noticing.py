"""Deliberately wrong variants of plain Python: a rule of the source is broken, and some check has to fail then.

`compiled.py` has the same for the compiled core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from oracles import mutant

__all__ = ["assert_noticed"]


def assert_noticed(owner: object, name: str, old: str, new: str, *checks: Callable[[], object]) -> None:
    """Assert that one of these checks fails where a function of a class or module has `new` in place of `old`."""
    with pytest.MonkeyPatch.context() as patch:
        put_wrong(patch, owner, name, old, new)
        if any(map(fails, checks)):
            return
    pytest.fail(f"{getattr(owner, '__name__', owner)}.{name} went unnoticed with {new!r} in place of {old!r}")


def put_wrong(patch: pytest.MonkeyPatch, owner: object, name: str, old: str, new: str) -> None:
    """Let a function be wrong, in its class or module, and in the modules of dps that have imported it."""
    right, wrong = vars(owner)[name], mutant(getattr(owner, name), old, new)
    importers = [module for key, module in sys.modules.items() if key.startswith("dps.")]
    for place in {id(place): place for place in (owner, *importers) if vars(place).get(name) is right}.values():
        patch.setattr(place, name, staticmethod(wrong) if isinstance(right, staticmethod) else wrong)


def fails(check: Callable[[], object]) -> bool:
    """Whether a check fails, by whichever error: what is wrong may break anything."""
    try:
        check()
    except (Exception, pytest.fail.Exception) as error:
        if type(error) is NameError:  # of the wrong text itself, which would be noticed without any check
            raise
        return True
    return False
