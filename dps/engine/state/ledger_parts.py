"""The ledgers of shards that are put together, and of those into which a shard is divided. Pure.

Shards may differ in what an origin did last: an op names rows of some shards only, and one that was on its way when
shards were put together has reached some of them. So the ledger of the whole tells the last op in each *part*, which is
one of those shards, where these differ; `core/shards/ledger.pyx` says what it does with that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dps.engine.core.shards.ledger import MAX_ORIGINS, Ledger

__all__ = ["certificates", "divided_ledger", "joined_ledger", "last_clocks"]

NEVER = (-(1 << 62), 0)  # the clock and number of the last op where there was none: they sort before those of every op


def last_clocks(ledger: Ledger, origins: Sequence[Sequence[int]]) -> dict[int, int]:
    """The clock of the last op of each origin in these ranges, [first, how many], that the ledger knows.

    Examples
    --------
    >>> ledger = Ledger()
    >>> for origin in (3, 7, 8, 9):
    ...     ledger.note(origin, 0, 10 * origin, 0)
    >>> last_clocks(ledger, [[3, 1], [8, 5]])
    {3: 30, 8: 80, 9: 90}
    """
    known, clocks, _ = ledger.certificate().T
    found: dict[int, int] = {}
    for first, count in origins:
        place = slice(*np.searchsorted(known, [first, first + count]))
        found |= dict(zip(known[place].tolist(), clocks[place].tolist(), strict=True))
    return found


def joined_ledger(ledgers: Sequence[Ledger]) -> Ledger:
    """The ledger of a shard that is made of others, in their order: each of them is a part, or has parts itself.

    Examples
    --------
    >>> one, other = Ledger(), Ledger()
    >>> one.note(7, 0, 3, 1), other.note(7, 0, 3, 2)
    (None, None)
    >>> whole = joined_ledger([one, other])
    >>> whole.lacking(7, 3, 2), whole.lacking(7, 3, 1)
    (array([ True, False]), None)
    """
    kept = [ledger.to_arrays(answers=False) for ledger in ledgers]
    grain = max(_parts_of(each) for each in kept)
    origins = np.unique(np.concatenate([each["last"][:, 0] for each in kept]))
    lasts = np.concatenate([_last_of_parts(each, origins, grain) for each in kept])
    attempts, newer = np.zeros(len(origins), np.int64), np.full(len(origins), MAX_ORIGINS, np.int64)
    for each in kept:
        places, count = np.searchsorted(origins, each["last"][:, 0]), len(each["last"])
        attempts[places] = np.maximum(attempts[places], each["last"][:, 1])
        newer[places] = np.minimum(newer[places], np.arange(count)[::-1])  # how many origins of a ledger are newer
    order = np.lexsort((origins, -newer))
    whole = Ledger.from_arrays({**kept[0], **_arrays(origins, attempts, lasts, order)})
    for each in kept:
        for first, end in each["retired"].tolist():
            whole.retire(first, end - first)
    beyond = max(0, len(whole) - whole.origins)  # the oldest go, as those of a ledger do that knows too many
    for origin in whole.to_arrays(answers=False)["last"][:beyond, 0].tolist():
        whole.retire(origin, 1)
    return whole


def divided_ledger(ledger: Ledger, part: int, times: int) -> Ledger:
    """The ledger of one of `times` shards into which a shard is divided: what its range of parts has seen."""
    kept = ledger.to_arrays(answers=False)
    grain = _parts_of(kept)
    if grain == 1:
        return Ledger.from_arrays(kept)
    first, end = part * grain // times, max((part + 1) * grain // times, part * grain // times + 1)
    origins, attempts = kept["last"][:, :2].T
    ascending = np.argsort(origins)
    lasts = _last_of_parts(kept, origins[ascending], grain)[first:end]
    order = np.argsort(ascending)  # the oldest first, as in the ledger
    known = (lasts != NEVER).any(axis=(0, 2))
    return Ledger.from_arrays({**kept, **_arrays(origins[ascending], attempts[ascending], lasts, order[known[order]])})


def certificates(ledger: Ledger) -> list[list[list[int]]]:
    """For each part of a shard, mostly one, the last op of every origin: [origin, clock, number], by origin.

    >>> ledger = Ledger()
    >>> ledger.note(7, 0, 3, 1)
    >>> certificates(ledger), certificates(joined_ledger([ledger, Ledger()]))
    ([[[7, 3, 1]]], [[[7, 3, 1]], []])
    """
    whole = ledger.certificate()
    kept = ledger.to_arrays(answers=False)
    if "apart" not in kept:
        return [whole.tolist()]
    lasts = _last_of_parts(kept, whole[:, 0], _parts_of(kept))
    return [
        [[origin, *last] for origin, last in zip(whole[:, 0].tolist(), part.tolist(), strict=True) if last != [*NEVER]]
        for part in lasts
    ]


def _parts_of(kept: dict[str, np.ndarray]) -> int:
    """How many parts a ledger tells apart."""
    return int(kept["apart"][:, 1].max()) + 1 if "apart" in kept else 1


def _last_of_parts(kept: dict[str, np.ndarray], origins: np.ndarray, grain: int) -> np.ndarray:
    """Clock and number of the last op of each origin, ascending, in each of `grain` parts, a multiple of those that the
    ledger tells apart: int64[grain, origins, 2]."""
    found = np.empty((grain, len(origins), 2), np.int64)
    found[:] = NEVER
    found[:, np.searchsorted(origins, kept["last"][:, 0])] = kept["last"][:, 2:]
    times = grain // _parts_of(kept)
    if "apart" in kept:
        places = np.searchsorted(origins, kept["apart"][:, 0])
        for n in range(times):
            found[kept["apart"][:, 1] * times + n, places] = kept["apart"][:, 2:]
    return found


def _arrays(origins: np.ndarray, attempts: np.ndarray, lasts: np.ndarray, order: np.ndarray) -> dict[str, np.ndarray]:
    """The last ops of a ledger as arrays, of the origins in `order`; and those of its parts, where they differ."""
    clocks, numbers = lasts[:, :, 0], lasts[:, :, 1]
    latest = clocks.max(axis=0)
    last = np.where(clocks == latest, numbers, NEVER[0]).max(axis=0)
    differ = ((clocks != latest) | (numbers != last)).any(axis=0)
    differ &= np.isin(np.arange(len(origins)), order)
    rows = np.column_stack([origins, attempts, latest, last])[order]
    parts, count = len(lasts), int(differ.sum())
    named = np.repeat(origins[differ], parts), np.tile(np.arange(parts), count)
    return {"last": rows, "apart": np.column_stack([*named, lasts[:, differ].swapaxes(0, 1).reshape(-1, 2)])}
