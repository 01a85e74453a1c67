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


def joined_ledger(ledgers: Sequence[Ledger], edges: Sequence[int]) -> Ledger:
    """The ledger of a shard that is made of others, in their order: each of them is a part, or has parts itself.

    `edges` are the first place of each of them, and the end.

    Examples
    --------
    >>> one, other = Ledger(), Ledger()
    >>> one.note(7, 0, 3, 1), other.note(7, 0, 3, 2)
    (None, None)
    >>> whole = joined_ledger([one, other], [0, 1024, 2048])
    >>> whole.lacking(7, 3, 2), whole.lacking(7, 3, 1), whole.edges.tolist()
    (array([ True, False]), None, [0, 1024, 2048])
    """
    kept = [ledger.to_arrays(answers=False) for ledger in ledgers]
    origins = np.unique(np.concatenate([each["last"][:, 0] for each in kept]))
    lasts = np.concatenate([_last_of_parts(each, origins) for each in kept])
    attempts, newer = np.zeros(len(origins), np.int64), np.full(len(origins), MAX_ORIGINS, np.int64)
    for each in kept:
        places, count = np.searchsorted(origins, each["last"][:, 0]), len(each["last"])
        attempts[places] = np.maximum(attempts[places], each["last"][:, 1])
        newer[places] = np.minimum(newer[places], np.arange(count)[::-1])  # how many origins of a ledger are newer
    order = np.lexsort((origins, -newer))
    firsts = [each["edges"][:-1] if "edges" in each else edges[n : n + 1] for n, each in enumerate(kept)]
    parts = np.concatenate([*firsts, edges[-1:]]).astype(np.int64)
    whole = Ledger.from_arrays({**kept[0], **_arrays(origins, attempts, lasts, order, parts)})
    for each in kept:
        for first, end in each["retired"].tolist():
            whole.retire(first, end - first)
    beyond = max(0, len(whole) - whole.origins)  # the oldest go, as those of a ledger do that knows too many
    for origin in whole.to_arrays(answers=False)["last"][:beyond, 0].tolist():
        whole.retire(origin, 1)
    return whole


def divided_ledger(ledger: Ledger, first: int, end: int) -> Ledger:
    """The ledger of that part of a shard whose places are `first` to `end` - 1: what its parts have seen there."""
    kept = ledger.to_arrays(answers=False)
    if "edges" not in kept:
        return Ledger.from_arrays(kept)
    edges = kept["edges"]
    here = (edges[:-1] < end) & (edges[1:] > first)
    origins, attempts = kept["last"][:, :2].T
    ascending = np.argsort(origins)
    lasts = _last_of_parts(kept, origins[ascending])[here]
    order = np.argsort(ascending)  # the oldest first, as in the ledger
    known = (lasts != NEVER).any(axis=(0, 2))
    parts = np.append(np.maximum(edges[:-1][here], first), end)
    apart = _arrays(origins[ascending], attempts[ascending], lasts, order[known[order]], parts)
    return Ledger.from_arrays({**kept, **apart})


def certificates(ledger: Ledger, first: int) -> list[tuple[int, list[list[int]]]]:
    """For each part of a shard, mostly one, its first place and the last op of every origin: [origin, clock, number].

    `first` is the first place of the shard.

    >>> ledger = Ledger()
    >>> ledger.note(7, 0, 3, 1)
    >>> certificates(ledger, 0), certificates(joined_ledger([ledger, Ledger()], [0, 1024, 2048]), 0)
    ([(0, [[7, 3, 1]])], [(0, [[7, 3, 1]]), (1024, [])])
    """
    whole = ledger.certificate()
    kept = ledger.to_arrays(answers=False)
    if "apart" not in kept:
        return [(first, whole.tolist())]
    lasts = _last_of_parts(kept, whole[:, 0])
    return [
        (
            edge,
            [
                [origin, *last]
                for origin, last in zip(whole[:, 0].tolist(), part.tolist(), strict=True)
                if last != [*NEVER]
            ],
        )
        for edge, part in zip(kept["edges"].tolist(), lasts, strict=False)
    ]


def _last_of_parts(kept: dict[str, np.ndarray], origins: np.ndarray) -> np.ndarray:
    """Clock and number of the last op of each origin, ascending, in each part that the ledger tells apart:
    int64[parts, origins, 2]."""
    found = np.empty((len(kept["edges"]) - 1 if "edges" in kept else 1, len(origins), 2), np.int64)
    found[:] = NEVER
    found[:, np.searchsorted(origins, kept["last"][:, 0])] = kept["last"][:, 2:]
    if "edges" in kept:
        found[kept["apart"][:, 1], np.searchsorted(origins, kept["apart"][:, 0])] = kept["apart"][:, 2:]
    return found


def _arrays(
    origins: np.ndarray, attempts: np.ndarray, lasts: np.ndarray, order: np.ndarray, edges: np.ndarray
) -> dict[str, np.ndarray]:
    """The last ops of a ledger as arrays, of the origins in `order`; and those of its parts, where they differ."""
    clocks, numbers = lasts[:, :, 0], lasts[:, :, 1]
    latest = clocks.max(axis=0)
    last = np.where(clocks == latest, numbers, NEVER[0]).max(axis=0)
    differ = ((clocks != latest) | (numbers != last)).any(axis=0)
    differ &= np.isin(np.arange(len(origins)), order)
    rows = np.column_stack([origins, attempts, latest, last])[order]
    parts, count = len(lasts), int(differ.sum())
    named = np.repeat(origins[differ], parts), np.tile(np.arange(parts), count)
    apart = np.column_stack([*named, lasts[:, differ].swapaxes(0, 1).reshape(-1, 2)])
    return {"last": rows, "apart": apart, "edges": edges}
