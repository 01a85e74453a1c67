"""Space: the arrays of one parameter server, and what computes them: expressions in, one program for each round trip.

Operands that lie in one pool are computed on the servers. Those of another pool (of another dtype) are brought into the
widest one first, through the client: rows hold elements of any dtype that is no wider.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Self, TypeVar, cast

import numpy as np

from dps.arrays.expressions import MAX_DEPTH, Block, Node, leaves
from dps.arrays.layout import KeyedLayout, PoolLayout
from dps.arrays.pools import PoolBlock, VectorPool, table_dtype
from dps.arrays.programs import Wish, compiled
from dps.arrays.reductions import REDUCTIONS, Partial
from dps.arrays.store import ArrayStore
from dps.errors import InputError
from dps.functions import Function

__all__ = ["CAPACITY", "Space"]

# Number of vectors of a pool, unless the caller says otherwise.
CAPACITY = 32

SPACES: weakref.WeakValueDictionary[tuple[str, str], Space] = weakref.WeakValueDictionary()
ABROAD = threading.Lock()
SpaceKind = TypeVar("SpaceKind", bound="Space")


class Space:
    """The pools of a parameter server.

    Parameters
    ----------
    store : ArrayStore
    relatives : dict, optional
        The spaces of other kinds of arrays of the same parameter server, by their class.
    """

    kind = "dense"  # kind of its arrays
    capacity = CAPACITY

    def __init__(self, store: ArrayStore, relatives: dict[type[Space], Space] | None = None):
        self.store = store
        self._pools: dict[tuple[int, np.dtype], VectorPool] = {}
        self._borrowed: dict[str, VectorPool] = {}
        self._relatives = {type(self): self} if relatives is None else relatives
        self._lock = threading.Lock()

    def pool(self, size: int, dtype: np.dtype, capacity: int | None = None, height: int = 1) -> VectorPool:
        """The pool for vectors of that length and dtype; made at first use, large enough for some of so many rows."""
        if size < 1:
            raise InputError(f"a vector on the servers has at least one element, not {size}")
        key = (size, table_dtype(dtype))
        with self._lock:
            pool = self._pools.get(key)
            if pool is None:
                room = max(self.capacity, 4 * height) if capacity is None else capacity
                pool = self._pools[key] = VectorPool(self.store, self.layout(size, room), key[1])
        if capacity is not None and capacity > pool.layout.capacity:
            raise InputError(
                f"the pool of {pool.layout.title} {pool.dtype} has a capacity of {pool.layout.capacity} already: give "
                f"capacity={capacity} to the first vector of this length"
            )
        return pool

    def of_kind(self, kind: type[SpaceKind]) -> SpaceKind:
        """The space of other arrays of the same parameter server."""
        with self._lock:
            space = self._relatives.get(kind)
            if space is None:
                space = self._relatives[kind] = kind(self.store, self._relatives)
            return cast(SpaceKind, space)

    def layout(self, size: int, capacity: int) -> PoolLayout | KeyedLayout:
        """Where the vectors of a pool lie."""
        return PoolLayout(size, min(self.store.shards, size), capacity)

    @classmethod
    def abroad(cls, store: ArrayStore) -> Self:
        """The space of vectors that were pickled elsewhere: one for all that belong together."""
        with ABROAD:
            space = SPACES.get((cls.kind, store.origin))
            if space is None:
                space = SPACES[cls.kind, store.origin] = cls(store)
            return cast(Self, space)

    def borrowed(self, table: str, layout: PoolLayout | KeyedLayout, dtype: np.dtype) -> VectorPool:
        """A pool that another process has made."""
        with self._lock:
            if table not in self._borrowed:
                self._borrowed[table] = VectorPool(self.store, layout, dtype, table)
            return self._borrowed[table]

    def used(self) -> dict[str, tuple[int, int]]:
        """Of each pool, by the name of its table: how many vectors are in use, and its capacity."""
        return {pool.table: (pool.used, pool.layout.capacity) for pool in self._pools.values()}

    # -- computing

    def store_nodes(self, nodes: Sequence[Node]) -> None:
        """Let nodes have blocks, in one round trip for those of one length."""
        lazy = [node for node in dict.fromkeys(nodes) if node.block is None]
        for size in dict.fromkeys(node.shape[-1] for node in lazy):
            self._compute([node for node in lazy if node.shape[-1] == size], [])

    def reduce(self, wishes: Sequence[Wish]) -> list[Partial]:
        """Reductions over nodes of one length, in one round trip."""
        return self._compute([], wishes)

    def replace(self, old: Node, new: Node) -> None:
        """Compute a node into the block of another one, which keeps its elements elsewhere where they are needed."""
        block = old.block
        assert block is not None
        pool = block.pool
        outputs: list[tuple[Node, Block]] = [(new, block)]
        kept: PoolBlock | None = None
        if old.needed_beside(new):
            kept = pool.allocate(_height(old), block.first)
            outputs.append((old, kept))
        found = list(leaves([new]))
        if not self._fits(found, pool):
            if kept is not None:
                self.write(kept, self.read(old))
            self.put(new, block)
        else:
            self._run(pool, outputs, [], found)
        new.put(block)
        old.block = kept

    def put(self, node: Node, block: Block) -> None:
        """Compute a node into a block that no other node's elements are in."""
        found = list(leaves([node]))
        if not self._fits(found, block.pool):  # computed where its operands fit
            self.store_nodes([node])
            self.write(block, self.read(node))
        else:
            self._run(block.pool, [(node, block)], [], found)

    def map(
        self, function: Function, nodes: Sequence[Node], result: Node, index: bool, arguments: dict[str, object]
    ) -> None:
        """Let a node have the elements that a function of `mapping` makes of others."""
        self.store_nodes(nodes)
        pool = self._pool_for([result], [result], list(nodes))
        block = pool.allocate()
        brought = [node.block if _pool_of(node) is pool else self._brought(node, pool) for node in nodes]
        self.store.map(
            pool.table,
            function,
            layout=list(pool.layout) if isinstance(pool.layout, PoolLayout) else None,
            inputs=[[each.first, node.dtype.str] for each, node in zip(brought, nodes, strict=True)],  # type: ignore[union-attr]
            output=[block.first, result.dtype.str],
            index=index,
            arguments=arguments,
        )
        result.put(block)

    def settled(self, node: Node) -> Node:
        """The node, stored if its expression has become deep."""
        if node.depth > MAX_DEPTH:
            self.store_nodes([node])
        return node

    def _compute(self, nodes: Sequence[Node], wishes: Sequence[Wish]) -> list[Partial]:
        roots = [*nodes, *(node for wish in wishes for node in wish.operands)]
        found = list(leaves(roots))
        pool = self._pool_for(roots, nodes, found)
        outputs = [(node, pool.allocate(_height(node))) for node in nodes]
        outputs += self._kept(pool, roots, nodes)
        parts = self._run(pool, outputs, wishes, found)
        for node, block in outputs:
            node.put(block)
        for wish in wishes:
            for node in wish.operands:
                node.used = True
        return parts

    def _run(
        self, pool: VectorPool, outputs: Sequence[tuple[Node, Block]], wishes: Sequence[Wish], found: list[Node]
    ) -> list[Partial]:
        elsewhere = [node for node in found if _pool_of(node) is not pool]
        places = [node.block for node in elsewhere]
        try:
            for node in elsewhere:
                node.block = self._brought(node, pool)
            program = compiled(outputs, wishes)
            parts = [part for part in self.store.run(pool.table, pool.layout, program) if part]
        finally:
            for node, block in zip(elsewhere, places, strict=True):
                node.block = block
        return self._joined(parts, wishes)

    def _joined(self, parts: list[list[Partial]], wishes: Sequence[Wish]) -> list[Partial]:
        return [
            REDUCTIONS[wish.kind].join([part[place] for part in parts], wish.parameter)
            for place, wish in enumerate(wishes)
        ]

    def _fits(self, found: Sequence[Node], pool: VectorPool) -> bool:
        return all(leaf.dtype.itemsize <= pool.dtype.itemsize for leaf in found)

    def _pool_for(self, roots: Sequence[Node], outputs: Sequence[Node], found: list[Node]) -> VectorPool:
        """The pool where nodes are computed: as wide as the widest operand and output, with the most operands."""
        size = roots[0].shape[-1]
        there: dict[VectorPool, int] = {}
        for leaf in found:
            pool = _pool_of(leaf)
            there[pool] = there.get(pool, 0) + _height(leaf)
        widest = max([pool.dtype.itemsize for pool in there] + [node.dtype.itemsize for node in outputs], default=0)
        fitting = {pool: count for pool, count in there.items() if pool.dtype.itemsize >= widest}
        if fitting:
            return max(fitting, key=lambda pool: (any(pool.dtype == node.dtype for node in outputs), fitting[pool]))
        wide = [node.dtype for node in (outputs or roots) if node.dtype.itemsize >= widest]
        return self.pool(size, wide[0] if wide else roots[0].dtype)

    def _kept(self, pool: VectorPool, roots: Sequence[Node], nodes: Sequence[Node]) -> list[tuple[Node, PoolBlock]]:
        """Blocks for subexpressions that were computed before, so that they are not computed a third time.

        Where the pool is full or too narrow for them, they are computed again.
        """
        kept: list[tuple[Node, PoolBlock]] = []
        stack, seen = list(roots), {id(node) for node in nodes}
        while stack:
            node = stack.pop()
            if node.block is not None or (id(node) in seen and node not in nodes):
                continue
            seen.add(id(node))
            if node.used and node not in nodes and self._keeps(node, pool):
                block = pool.spare(_height(node))
                if block is not None:
                    kept.append((node, block))
                continue
            stack.extend(each for each in node.operands if isinstance(each, Node))
        return kept

    def _keeps(self, node: Node, pool: VectorPool) -> bool:
        return pool.holds(node.dtype)

    # -- data

    def _brought(self, node: Node, pool: VectorPool) -> PoolBlock:
        block = pool.allocate(_height(node))
        self.write(block, self.read(node))
        return block

    def read(self, node: Node, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The elements of a node with a block; of a vector, those of a range."""
        pool, first = _pool_of(node), node.block.first  # type: ignore[union-attr]
        stop = node.shape[-1] if stop is None else stop
        out = np.empty((_height(node), max(stop - start, 0)), node.dtype)
        for number, values in enumerate(out):
            if pool.dtype.itemsize == node.dtype.itemsize:
                for key, element, count in pool.layout.runs(first + number, start, stop):
                    found = pool.store.pull(pool.table, slice(key, key + count))
                    values[element - start : element - start + count] = found.view(node.dtype)
            else:
                self._read_narrow(pool, first, _height(node), number, values, start, stop)
        return out[0] if len(node.shape) == 1 else out

    def _read_narrow(
        self, pool: VectorPool, first: int, height: int, number: int, values: np.ndarray, start: int, stop: int
    ) -> None:
        """Elements that are narrower than the pool's rows, and so lie several in a row of the table."""
        layout = pool.layout
        for shard in range(layout.shards):
            low, high = layout.extent(shard)
            if max(low, start) >= min(high, stop):
                continue
            key = (shard * layout.capacity + first) * layout.part
            rows = pool.store.pull(pool.table, slice(key, key + height * layout.part))
            there = layout.view(rows, 0, height, values.dtype, high - low)[number]
            values[max(low, start) - start : min(high, stop) - start] = there[
                max(low, start) - low : min(high, stop) - low
            ]

    def write(self, block: Block, values: np.ndarray) -> None:
        """Put elements into a block: those of a vector, or of the rows of a matrix."""
        pool: VectorPool = block.pool
        layout = pool.layout
        height = 0 if values.ndim == 1 else len(values)
        for shard in range(layout.shards):
            begin, end = layout.extent(shard)
            if begin == end:
                continue
            memory = np.zeros(((height or 1) * layout.part, 1), pool.dtype)
            layout.view(memory[:, 0], 0, height, values.dtype, end - begin)[...] = values[..., begin:end]
            key = (shard * layout.capacity + block.first) * layout.part
            pool.store.assign(pool.table, slice(key, key + len(memory)), memory[:, 0])


def _pool_of(node: Node) -> VectorPool:
    assert node.block is not None
    pool: VectorPool = node.block.pool
    return pool


def _height(node: Node) -> int:
    """How many vectors of a pool hold its elements."""
    return 1 if len(node.shape) == 1 else node.shape[0]
