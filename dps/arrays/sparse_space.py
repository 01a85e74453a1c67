"""SparseSpace: the sparse vectors of one parameter server, and what computes them.

A pool is a keyed table with a column for each vector. A program runs on all rows that there are, and reductions take
the zeros at all other keys into account (`implicit.py`). A column holds numbers of the table's dtype only, so what is
computed in another dtype is moved to a table of that one through the client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dps.arrays.expressions import MAX_DEPTH, Block, Node, converted, leaves
from dps.arrays.implicit import ITEMS, check_background, check_reduction, implicit_partial
from dps.arrays.layout import EVERY_KEY, KeyedLayout
from dps.arrays.mapping import check_zeros
from dps.arrays.pools import VectorPool, table_dtype
from dps.arrays.programs import Wish
from dps.arrays.reductions import REDUCTIONS, Partial
from dps.arrays.space import Space
from dps.errors import InputError, InputTypeError
from dps.functions import Function

__all__ = ["SparseSpace", "check_dtype"]

# Sorted keys, and their values.
Items = tuple[np.ndarray, np.ndarray]


class SparseSpace(Space):
    """The pools of a parameter server's sparse vectors."""

    kind = "sparse"
    capacity = 8  # vectors of a pool, unless the caller says otherwise, because a row has room for all of them

    def layout(self, size: int, capacity: int) -> KeyedLayout:
        if size > EVERY_KEY:
            raise InputError(f"a sparse vector has {EVERY_KEY} elements at most, one for each int64")
        return KeyedLayout(size, capacity)

    def store_nodes(self, nodes: Sequence[Node]) -> None:
        """Let nodes have blocks: those whose dtype is that of their operands' table in one round trip."""
        there: dict[VectorPool, list[Node]] = {}
        for node in dict.fromkeys(nodes):
            if node.block is not None:
                continue
            check_stored(node)
            pool = self._pool_for([node], [node], list(leaves([node])))
            if pool.dtype == node.dtype:
                there.setdefault(pool, []).append(node)
            else:
                self._move(node)
        for together in there.values():
            self._compute(together, [])

    def reduce(self, wishes: Sequence[Wish]) -> list[Partial]:
        for wish in wishes:
            check_reduction(wish.kind)
        return super().reduce(wishes)

    def replace(self, old: Node, new: Node) -> None:
        check_stored(new)
        super().replace(old, new)

    def put(self, node: Node, block: Block) -> None:
        found = list(leaves([node]))
        if self._fits(found, block.pool):
            self._run(block.pool, [(node, block)], [], found)
        else:
            self.write(block, self.read(node))

    def map(
        self, function: Function, nodes: Sequence[Node], result: Node, index: bool, arguments: dict[str, object]
    ) -> None:
        """Let a node have the elements that a function of `mapping` makes of others, at the keys that there are."""
        self.store_nodes(nodes)
        common = _common([_pool_of(node) for node in nodes])
        if result.dtype != common:
            raise InputTypeError(
                f"the function makes {result.dtype} of sparse vectors that lie with {common}: use dtype= for a result "
                f"of {common}, and astype for another one"
            )
        if not index:  # else what becomes of a zero may depend on its key
            check_zeros(function.part, [node.dtype for node in nodes], arguments)
        super().map(function, nodes, result, index, arguments)

    def settled(self, node: Node) -> Node:
        """The node, stored if its expression has become deep; one that cannot be stored goes on to grow."""
        if node.depth > MAX_DEPTH:
            try:
                self.store_nodes([node])
            except (InputError, InputTypeError):
                return node
        return node

    # -- data

    def read(self, node: Node, start: int = 0, stop: int | None = None) -> Any:
        """The keys, sorted, and the values of the elements that are not zero."""
        index = Node(node.shape, np.dtype(np.int64), "index")
        ((keys, values),) = self.reduce([Wish("items", (index, node))])
        order = np.argsort(keys)
        return keys[order], values[order]

    def write(self, block: Block, values: np.ndarray | Items) -> None:
        """Put elements into a block: an array of all of them, or the keys and values of those that are not zero."""
        pool: VectorPool = block.pool
        if isinstance(values, np.ndarray):
            keys = np.flatnonzero(values)
            values = values[keys]
        else:
            keys, values = values
        with np.errstate(invalid="ignore"):  # because a float does not hold all whole numbers
            held = values.astype(pool.dtype)
            exact = values.dtype.kind not in "iu" or np.array_equal(held.astype(values.dtype), values)
        if not exact:
            raise InputError(f"whole numbers would lose digits in a table of {pool.dtype}: use v.astype(np.float64)")
        zero = Node((pool.layout.size,), pool.dtype, "cast", [converted(0, pool.dtype)])
        self._run(pool, [(zero, block)], [], [])
        self.store.assign_column(pool.table, block.first, keys, held)

    def _move(self, node: Node) -> None:
        block = self.pool(node.shape[-1], node.dtype).allocate()
        self.write(block, self.read(node))
        node.put(block)

    # -- which pool, and which results

    def _fits(self, found: Sequence[Node], pool: VectorPool) -> bool:
        return not found or _common([_pool_of(leaf) for leaf in found]) == pool.dtype

    def _keeps(self, node: Node, pool: VectorPool) -> bool:
        if node.dtype != pool.dtype:
            return False
        try:
            check_background(node)
        except InputError:
            return False
        return True

    def _pool_for(self, roots: Sequence[Node], outputs: Sequence[Node], found: list[Node]) -> VectorPool:
        """The pool where nodes are computed: of the dtype that the tables of all operands have in common."""
        pools = [_pool_of(leaf) for leaf in found]
        dtype = _common(pools) if pools else table_dtype(roots[0].dtype)
        fitting = [pool for pool in pools if pool.dtype == dtype]
        return max(fitting, key=fitting.count) if fitting else self.pool(roots[0].shape[-1], dtype)

    def _joined(self, parts: list[list[Partial]], wishes: Sequence[Wish]) -> list[Partial]:
        rows = sum(part[0] for part in parts)
        results = []
        for place, wish in enumerate(wishes, 1):
            partials = [part[place] for part in parts]
            absent = wish.operands[0].shape[-1] - rows
            implicit = implicit_partial(wish, absent) if absent else None
            if implicit is not None:
                partials.append(implicit)
            results.append(REDUCTIONS[wish.kind].join(partials, wish.parameter) if partials else _nothing(wish))
        return results


def check_dtype(dtype: np.dtype) -> None:
    if dtype != table_dtype(dtype):
        raise InputTypeError(
            f"a sparse vector of {dtype} is not stored on the servers, but those of float32, float64 and int64 are: "
            f"use astype"
        )


def check_stored(node: Node) -> None:
    check_dtype(node.dtype)
    check_background(node)


def _nothing(wish: Wish) -> Partial:
    """The result of a reduction to which no element contributes."""
    if wish.kind in ITEMS:
        return [np.zeros(0, np.int64), np.zeros(0, wish.operands[1].dtype)]
    return 0


def _pool_of(node: Node) -> VectorPool:
    assert node.block is not None
    pool: VectorPool = node.block.pool
    return pool


def _common(pools: Sequence[VectorPool]) -> np.dtype:
    return np.result_type(*[pool.dtype for pool in pools])
