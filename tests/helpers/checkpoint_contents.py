"""Tables with random content, and their checkpoints as a server writes them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import dps
from dps.engine.checkpoints.store import write_shard

KEYED = dps.TableSpec("clicks/2026", dim=2, optimizer=dps.Adagrad(0.1), shards=2, id=3)


DENSE = dps.TableSpec("b", rows=7, dim=3, dtype="float64", shards=2, id=4)


def width(spec):
    return spec.dim + spec.slots


def content_of(spec, seed=0, rows=9):
    """For each shard of a table: key -> row."""
    rng = np.random.default_rng(seed)
    if spec.rows is not None:
        cuts = [spec.rows * shard // spec.shards for shard in range(spec.shards + 1)]
        keys = [range(low, high) for low, high in pairwise(cuts)]
    else:
        keys = [rng.choice(10**6, rows, replace=False).tolist() for _ in range(spec.shards)]
    return [{key: rng.normal(size=width(spec)).astype(spec.dtype) for key in part} for part in keys]


def as_pieces(spec, rows: dict, size=4, *, by_key=None):
    keys = list(rows)
    for low in range(0, len(keys), size):
        some = keys[low : low + size]
        values = np.array([rows[key] for key in some], spec.dtype).reshape(len(some), width(spec))
        yield (np.array(some, np.int64) if by_key or spec.keyed else some[0]), values


def save(store, spec, content, *, clock=None, parent=None, write=write_shard):
    """A checkpoint of one table."""
    writer = store.begin([spec], clock=clock, parent=parent)
    increment = writer.increment(spec.name)
    return writer.commit(
        [
            write(
                store.url, writer.name, spec, shard, len(rows), as_pieces(spec, rows, by_key=increment),
                increment=increment, ledger={"last": np.arange(shard)}, storage_options=store.storage_options,
            )
            for shard, rows in enumerate(content)
        ]
    )  # fmt: skip
