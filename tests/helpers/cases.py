"""Which cases of a test come first: `make test` runs the first ones of those with the mark `quick`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

__all__ = ["varied"]


def varied(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """All combinations of choices, ordered so that the first few hold each choice, and soon each pair of choices.

    Most errors show with one choice or with two of them together, so the first cases find nearly what all find.
    """
    lists = [list(each) for each in choices]
    left = list(itertools.product(*(range(len(each)) for each in lists)))
    ordered: list[tuple[int, ...]] = []
    seen: set[tuple[tuple[int, int], ...]] = set()
    while left:
        best = max(left, key=lambda case: _news(case, seen))  # the first of those that are alike
        left.remove(best)
        ordered.append(best)
        seen.update(_parts(best, 1), _parts(best, 2))
    return [tuple(each[n] for each, n in zip(lists, case, strict=True)) for case in ordered]


def _parts(case: tuple[int, ...], size: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(case), size))


def _news(case: tuple[int, ...], seen: set[tuple[tuple[int, int], ...]]) -> tuple[int, int]:
    return len(_parts(case, 1) - seen), len(_parts(case, 2) - seen)
