"""Golden cases: the hash of keys, batches grouped by shard, the index, the ledger."""

from __future__ import annotations

from functools import partial

import numpy as np
import streams
from merging import coalesce
from oracles import crafted

from dps.engine.core.shard_map import ShardMap
from dps.engine.core.shards.index import KeyIndex
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.partition import group, hash_keys
from dps.errors import KeyRangeError, StoppedError

NOT_GROUPED = np.array([-1])
BATCHES = ("none", "one", "same", "unsorted", "by hash", "by shard", "ascending", "repeated")
SHARDS = (1, 2, 4, 64, 4096)


def hashed(keys: np.ndarray) -> np.ndarray:
    out = np.empty(len(keys), np.uint64)
    hash_keys(keys, out)
    return out


def hashes(name: str) -> dict[str, np.ndarray]:
    keys = streams.keys(name, 4000)
    return {"edges": hashed(np.array(streams.KEYS_AT_THE_EDGE)), "any": hashed(keys)}


def batch(kind: str, rows: int, shards: int) -> np.ndarray:
    """A batch of that kind: keys of a keyed table, or row numbers of a dense one of `rows` rows."""
    keys = streams.integers("rows", 300, 0, rows) if rows else streams.keys("batch", 300)
    if kind in ("by hash", "by shard", "ascending"):
        keys = np.unique(keys) if rows or kind == "ascending" else keys[np.argsort(hashed(keys), kind="stable")]
    if kind == "by shard":
        grouped = group(keys, ShardMap(rows, shards))
        parts = np.split(grouped.keys, grouped.starts[1:-1])
        keys = np.concatenate([part[::-1] for part in parts])
    few = {"none": keys[:0], "one": keys[:1], "same": np.repeat(keys[:1], 50)}
    return few[kind] if kind in few else streams.repeated("repeats", keys, 700) if kind == "repeated" else keys


def grouping_case(kind: str, rows: int) -> dict[str, np.ndarray]:
    """A batch cut by shard, for several numbers of shards; its repeats; and the places in the caller's order."""
    made = {}
    for shards in SHARDS[:-1] if rows else SHARDS:
        grouped = group(batch(kind, rows, shards), ShardMap(rows, shards))
        merged = coalesce(grouped)
        parts = [grouped.keys, grouped.starts, NOT_GROUPED if grouped.order is None else grouped.order]
        parts.append(np.array([grouped.distinct, merged is not None]))
        if merged is not None:
            parts += [merged[0].keys, merged[0].starts, merged[1], np.array([merged[0].distinct])]
        made[f"{shards} shards"] = np.concatenate([np.append(len(part), part) for part in parts]).astype(np.int64)
    return made


def refused(name: str) -> dict[str, np.ndarray]:
    """Which batches a dense table refuses: a key outside in each place, and at each edge."""
    results = []
    for wrong in (-1, 100, -(2**63), 2**63 - 1, 0, 99):
        for place in range(9):
            keys = streams.integers(name, 9, 0, 100)
            keys[place] = wrong
            try:
                results.append(group(keys, ShardMap(100, 3)).starts[1])
            except KeyRangeError:
                results.append(-1)
    return {"results": np.array(results)}


def index_case(salt: int, sizes: tuple[int, ...], name: str = "index") -> dict[str, np.ndarray]:
    """An index that grows under batches of these sizes, with known, new and repeated keys; looked up at each step."""
    index, keys = KeyIndex(salt), streams.keys(name, sum(sizes))
    inserted, lookups, missing, done = [], [], [], 0
    for number, size in enumerate(sizes):
        new = keys[done : done + size]
        asked = np.concatenate([new, streams.repeated(f"known {number}", keys[: done + 1], size // 2)])
        rows = np.full(len(asked), -7, np.int64)
        index.insert(asked, rows)
        inserted.append(rows)
        done += size
        asked = streams.repeated(f"asked {number}", keys, 2 * size)
        rows = np.full(len(asked), -7, np.int64)
        missing.append(index.find(asked, rows))
        lookups.append(rows)
    counts = np.array([*missing, len(index)])
    return {
        "inserted": np.concatenate(inserted),
        "found": np.concatenate(lookups),
        "missing": counts,
        "keys": index.keys(),
    }


def crowded(salt: int) -> dict[str, np.ndarray]:
    """Keys with the same home, at the end of the table as well: long probes, which begin again at its front."""
    fracs = [2**32 - 1] * 90 + [0] * 40 + [2**31] * 60 + list(range(50))
    keys = crafted(fracs)[streams.permutation("crowded", len(fracs))] ^ ~salt
    index, rows = KeyIndex(salt), np.empty(len(keys), np.int64)
    for start in range(0, len(keys), 30):
        index.insert(keys[start : start + 30], rows[start : start + 30])
    again = np.empty(len(keys), np.int64)
    index.find(keys[::-1].copy(), again)
    return {"rows": rows, "again": again, "keys": index.keys()}


def reserved(count: int) -> dict[str, np.ndarray]:
    """An index that made room before its keys came."""
    index, keys = KeyIndex(3), streams.keys("reserved", count)
    rows = np.empty(len(keys), np.int64)
    index.reserve(len(keys))
    index.insert(keys, rows)
    return {"rows": rows, "keys": index.keys()}


def note(ledger: Ledger, origin: int, attempt: int, clock: int, number: int) -> int:
    """What the ledger says of an op (0 new, 1 repeat, 2 refused), which it then notes if it is new."""
    try:
        if ledger.seen(origin, attempt, clock, number):
            return 1
    except StoppedError:
        return 2
    ledger.note(origin, attempt, clock, number)
    return 0


def as_parts(ledger: Ledger) -> dict[str, np.ndarray]:
    arrays = {name: array.reshape(len(array), -1) for name, array in ledger.to_arrays().items()}
    return {**arrays, "certificate": ledger.certificate()}


def ledger_case(origins: int, answer_bytes: int, dim: int) -> dict[str, np.ndarray]:
    """Ops of more origins than the ledger remembers, in a window of seqs, some again and some of older attempts."""
    ledger, said, answers = Ledger(answer_bytes, origins), [], []
    drawn = [streams.integers(name, 4000, 0, 2**20) for name in ("origin", "attempt", "clock", "number")]
    for step, (origin, attempt, clock, number) in enumerate(np.transpose(drawn).tolist()):
        origin = 1 + step // 40 + origin % 25
        seq = step // 200 + clock % 3, number % 4
        said.append(note(ledger, origin, int(attempt % 50 == 0), *seq))
        if said[-1] == 0 and number % 3 == 0:
            ledger.keep(origin, *seq, streams.values(f"answer {step}", (1 + step % 5, dim), "float32"))
        if step % 97 == 0:
            ledger.retire(origin - 30, step % 7)
        kept = ledger.answer(origin, *seq)
        answers.append(-1 if kept is None else len(kept))
    again = Ledger.from_arrays(ledger.to_arrays())
    said += [int(again.retired(origin)) for origin in range(130)]
    return {"said": np.array(said), "answers": np.array(answers), **as_parts(again)}


def retired_ranges(count: int) -> dict[str, np.ndarray]:
    """So many retired ranges that the lowest are merged."""
    ledger = Ledger()
    for n in range(count):
        ledger.retire(10 * n, 1 + n % 9)
    refused = [int(ledger.retired(origin)) for origin in range(200)]
    return {"refused": np.array(refused), "ranges": ledger.to_arrays()["retired"]}


CASES = {"hash": partial(hashes, "hash"), "grouping / refused": partial(refused, "refused")}
CASES |= {
    f"grouping / {kind} / {rows or 'keyed'}": partial(grouping_case, kind, rows)
    for kind in BATCHES
    for rows in (0, 100, 2**40)
}
CASES |= {
    "index / small steps": partial(index_case, 0, (1, 2, 3, 5, 20, 20, 20) * 20),
    "index / one batch": partial(index_case, 0, (60_000, 10)),
    "index / slow growth": partial(index_case, 4, (20_000, *[100] * 150)),
    "index / a salt": partial(index_case, 12, (50, 5000, 50, 20_000, 50)),
    "index / crowded": partial(crowded, 0),
    "index / crowded with a salt": partial(crowded, 6),
    "index / reserved": partial(reserved, 30_000),
    "ledger / few origins": partial(ledger_case, 16, 1 << 14, 3),
    "ledger / few answers": partial(ledger_case, 1000, 1 << 12, 64),
    "ledger / all answers": partial(ledger_case, 1000, 1 << 24, 1),
    "ledger / retired ranges": partial(retired_ranges, (1 << 16) + 40),
}

VARIANTS = {
    "hash": partial(hashes, "another"),
    "grouping / unsorted / keyed": partial(grouping_case, "repeated", 0),
    "grouping / by hash / keyed": partial(grouping_case, "by shard", 0),
    "grouping / unsorted / 100": partial(grouping_case, "unsorted", 101),
    "index / small steps": partial(index_case, 0, (1, 2, 3, 5, 20, 20, 20) * 20, "another"),
    "index / reserved": partial(reserved, 29_999),
    "ledger / few origins": partial(ledger_case, 17, 1 << 14, 3),
    "ledger / few answers": partial(ledger_case, 1000, (1 << 12) + 600, 64),
    "ledger / retired ranges": partial(retired_ranges, (1 << 16) + 39),
}
