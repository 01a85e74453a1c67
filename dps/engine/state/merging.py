"""Merging: one shard of a table that is cut into fewer shards, made from the shards that it has now. Pure.

Neighbouring shards become one, the reverse of :mod:`dps.engine.state.resharding`. They lie on one server. Their rows
come piece by piece, and those again that have changed since (:mod:`dps.engine.state.precopy`).

The ledgers of the shards may differ in what an origin did last: an op names rows of some shards only, and one that was
on its way when the shards stopped has reached some of them. So the merged ledger keeps the last op of each part
(`ledger.pyx`), and a server applies an op that comes again to the rows of those parts that lack it: see
`server/late_parts.py`.

The version is the sum of the versions, so it is equal on all servers where all parts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from dps.engine.state.ledger_parts import joined_ledger
from dps.engine.state.ops import TableSpec
from dps.engine.state.precopy import Assembly, Readers
from dps.engine.state.recipes import Description
from dps.engine.state.shard import DenseShard, KeyedShard
from dps.engine.state.transfer import head_of

__all__ = ["Merger"]


class Merger:
    """Neighbouring shards, in their order, on their way to become one shard of the table that `spec` defines.

    Examples
    --------
    >>> import numpy as np
    >>> from dps.engine.state.ops import ADD, Op
    >>> from dps.engine.state.shard import make_shard
    >>> table = TableSpec("w", rows=6, shards=2)
    >>> shards = [make_shard(table, n) for n in range(2)]
    >>> _ = shards[1].apply(Op(ADD, None, 3, np.ones((3, 1), np.float32), 0, 1))
    >>> merger = Merger(shards, TableSpec("w", rows=6, shards=1))
    >>> while merger.step(max_bytes=8):
    ...     pass
    >>> merger.finish()[0].rows.ravel().tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """

    def __init__(self, shards: Sequence[DenseShard | KeyedShard], spec: TableSpec):
        self._shards = shards
        self._edges = shards[0].spec.shard_map.edges[shards[0].number : shards[-1].number + 2]
        self._number = spec.shard_map.edges.index(self._edges[0])
        self._whole = Assembly(spec, self._number, sum(map(len, shards)))
        self.readers = Readers(shards)

    def step(self, max_bytes: int) -> bool:
        """Take the next rows, about `max_bytes` bytes of them; False when all rows are there as they are now."""
        piece = self.readers.piece(max_bytes)
        if piece is not None:
            self._whole.put(piece)
        return piece is not None

    def finish(self) -> dict[int, DenseShard | KeyedShard]:
        """The merged shard, by its number; no shard must have changed since `step` returned False."""
        assert self.readers.is_current, "rows have changed since they were read"
        heads = [head_of(shard)[0] for shard in self._shards]
        failure = next((head["failure"] for head in heads if head["failure"] is not None), None)
        head: Description = {"clock": max(each["clock"] for each in heads), "failure": failure}
        head["version"] = sum(each["version"] for each in heads)
        if "lead" in heads[0]:
            head["lead"] = max(each["lead"] for each in heads)  # [clock, origin]
        head["gone"] = [sum(each["gone"][n] for each in heads) for n in (0, 1)]
        ledger = joined_ledger([shard.ledger for shard in self._shards], self._edges)
        return {self._number: self._whole.finish({**head, "waiting": 0, "remembered": 0, "sums": None}, [], ledger)}

    def close(self) -> None:
        """Let the rows of the shards move again."""
        self.readers.close()
