"""Random schedules with tables of which trainers keep rows: pulls see what is promised, also of deletions."""

from __future__ import annotations

import pytest
from split_schedules import check_kept
from verdicts import assert_caught, problems

from dps.engine.client.cached_tables import CachedTables
from dps.engine.client.refreshed_rows import RefreshedRows
from dps.engine.client.stamped_rows import StampedRows
from dps.engine.server import changed_pulls
from dps.engine.server.changed_pulls import ChangedPulls

SCHEDULES = 160


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(4))
def test_pulls_past_kept_rows_see_what_is_promised(part: int) -> None:
    assert not problems(check_kept, SCHEDULES, part, parts=4)


WRONG = {
    "a row answers after its deletion": [
        (CachedTables, "begin_change", "return cache.change(self, None if", "return None if True else (None if")
    ],
    "functions change no rows": [(CachedTables, "changing_all", "cache.change(self, None)", "None")],
    "clears forget nothing": [(StampedRows, "remove", "self._index = KeyIndex(self._index.salt)", "pass")],
    "what others have changed counts as unchanged": [
        (changed_pulls, "changed_since", "!= prints[a:b]", "!= fingerprints(rows, spec.salt)")
    ],
    "rows that have changed go to other keys": [
        (RefreshedRows, "values", "own = places[part.places]", "own = places[np.sort(part.places)]")
    ],
    "rows that have changed stay as they were": [(RefreshedRows, "values", "= fresh", "= rows[own[changed]]")],
    "rows are compared before the sums of earlier clocks are closed": [
        (ChangedPulls, "_answer", "self._close_before(part.replica, header.clock)", "pass")
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_changes_of_kept_rows_are_caught(monkeypatch, name):
    assert_caught(monkeypatch, WRONG[name], check_kept, range(600))
