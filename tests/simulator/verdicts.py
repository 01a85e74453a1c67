"""Verdicts: what a check of random schedules says, in the right source and in wrong variants of it.

A check takes a seed, and raises if something is wrong in the schedule of that seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeAlias

import pytest
from fault_schedules import problem_of
from oracles import mutant

__all__ = ["assert_caught", "problems"]

FIRST_SEED = int(os.environ.get("SIMULATE_SEED", "0"))
Check: TypeAlias = Callable[[int], str]
Patch: TypeAlias = tuple[object, str, str, str]  # a class or module, its function, a snippet, what replaces it


def problems(check: Check, schedules: int, part: int, parts: int) -> list[str]:
    """What is wrong in one of `parts` equal parts of so many schedules."""
    size = schedules // parts
    first = FIRST_SEED + part * size
    verdicts = (problem_of(seed, check) for seed in range(first, first + size))
    return [f"schedule {seed}: {problem}" for seed, problem in verdicts if problem is not None]


def assert_caught(
    monkeypatch: pytest.MonkeyPatch, patches: Iterable[Patch], check: Check, seeds: Iterable[int]
) -> None:
    """Assert that a wrong variant of the source fails in one of these schedules, which the right source passes."""
    for owner, method, old, new in patches:
        wrong = mutant(getattr(owner, method), old, new)
        static = isinstance(owner.__dict__.get(method), staticmethod)
        monkeypatch.setattr(owner, method, staticmethod(wrong) if static else wrong)
    seed = next((seed for seed in seeds if problem_of(seed, check)[1] is not None), None)
    assert seed is not None, "no schedule shows the error"
    monkeypatch.undo()
    assert problem_of(seed, check) == (seed, None), "it is wrong anyway"
