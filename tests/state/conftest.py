"""The tests of the state move rows into free ones as soon as half of them are free, however few there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dps.engine.state import deletion


@pytest.fixture(autouse=True, scope="module")
def small_shards_are_compacted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deletion, "COMPACT_AT_ROWS", 1)
        yield
