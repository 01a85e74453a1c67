"""Keys in ascending order, and the place of each: the oracle is numpy's stable sort."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variant
from hypothesis import given
from hypothesis import strategies as st

from dps.engine.core import ordering as module

KEYS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60),
    st.lists(st.integers(-5, 5), max_size=60),
    st.lists(st.integers(0, 3).map(lambda n: n << 40), max_size=60),
)


def check(keys: np.ndarray) -> None:
    ordered, places = np.empty_like(keys), np.empty(len(keys), np.int32)
    module.sort_keys(keys, ordered, places)
    order = np.argsort(keys, kind="stable")
    assert ordered.tolist() == keys[order].tolist()
    assert places[order].tolist() == list(range(len(keys)))


def check_many() -> None:
    rng = np.random.default_rng(1)
    for high in (3, 5000, 2**40, 2**63 - 1):
        check(rng.integers(-high, high, 10_000))


@given(KEYS)
def test_keys_are_sorted(keys: list[int]) -> None:
    check(np.array(keys, np.int64))


def test_many_keys_are_sorted() -> None:
    check_many()


def test_arrays_that_do_not_fit_are_refused() -> None:
    keys = np.arange(3)
    with pytest.raises(ValueError, match="3 keys, and 2 and 3 places"):
        module.sort_keys(keys, np.empty(2, np.int64), np.empty(3, np.int32))
    with pytest.raises(TypeError):
        module.sort_keys(keys, np.empty(3, np.int64), np.empty(3, np.int64))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("PASSES = 6", "PASSES = 5"),
        ("<uint64_t> keys[i] ^ <uint64_t> 1 << 63", "<uint64_t> keys[i]"),
        ("places[entries[i].place] = <int32_t> i", "places[i] = <int32_t> entries[i].place"),
    ],
)
def test_a_wrong_variant_is_caught(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(module, "sort_keys", variant("ordering", "ordering.pyx", old, new).sort_keys)
    with pytest.raises(AssertionError):
        check_many()
