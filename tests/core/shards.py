"""What the cases of tables share: ops on a shard, and everything that it then holds."""

from __future__ import annotations

import numpy as np
import streams

from dps.engine.state.initializers import Constant, Initializer, Uniform
from dps.engine.state.ops import PUSH, Op, TableSpec
from dps.engine.state.shard import DenseShard, KeyedShard, make_shard
from dps.engine.state.transfer import Dump

DIMS = (1, 2, 3, 8, 16, 17, 64)
SOME_DIMS = (1, 3, 17, 64)  # for options: a loop over columns with a rest, without one, and nothing but a rest
FLOATS = ("float32", "float64")
ROWS, SHARDS = 82, 2  # of a dense table: 41 rows in each shard
PIECE_BYTES = 4096


def init_of(dtype: str) -> Initializer:
    """An initializer that suits the dtype, and that is not zero."""
    return Uniform(-1, 1, seed=11) if dtype in FLOATS else Constant(3)


def table(dtype: str, dim: int, *, keyed: bool, **options) -> TableSpec:
    """A table of two shards."""
    options = {"init": init_of(dtype), **options}
    return TableSpec("t", None if keyed else ROWS, dim, dtype, shards=SHARDS, **options)


def pool(shard: DenseShard | KeyedShard) -> np.ndarray:
    """The keys that the cases name: every row of a dense shard, 60 keys of a keyed one."""
    return streams.keys("pool", 60) if isinstance(shard, KeyedShard) else np.arange(shard.low, shard.high)


def op(shard: DenseShard | KeyedShard, name: str, keys: np.ndarray | tuple[int, int], **fields) -> Op:
    """A push (or what `fields` say) of the values of that name to these keys, or to (start, end) of a dense shard."""
    start, count = (keys[0], keys[1] - keys[0]) if isinstance(keys, tuple) else (0, len(keys))
    fields = {"rule": PUSH, "clock": 0, "parties": 1, **fields}
    make = streams.specials if "special" in name else streams.values
    values = make(name, (count, shard.spec.dim), shard.spec.dtype)
    return Op(keys=None if isinstance(keys, tuple) else keys, start=start, values=values, **fields)


def contents(shard: DenseShard | KeyedShard) -> dict[str, np.ndarray]:
    """Everything that another server gets of the shard: clocks, open sums, keys and rows in the order of creation."""
    dump = Dump(shard)
    meta, sums = dump.head()
    numbers = [meta["clock"], meta["version"], meta["rows"], *(meta["sums"] or [])]
    found = {"numbers": np.array(numbers, np.int64)}
    found |= {f"sums {i}": array.copy() for i, array in enumerate(sums)}
    pieces = []
    while (piece := dump.piece(PIECE_BYTES)) is not None:
        pieces.append([array.copy() for array in piece[1]])
    if isinstance(shard, KeyedShard):
        found["keys"] = np.concatenate([piece[0] for piece in pieces])
    found["rows"] = np.concatenate([piece[int(shard.spec.keyed)] for piece in pieces])
    return found


def new_shard(dtype: str, dim: int, *, keyed: bool, **options) -> DenseShard | KeyedShard:
    """The second shard of a table, so that its rows and hashes do not begin at 0."""
    return make_shard(table(dtype, dim, keyed=keyed, **options), 1)
