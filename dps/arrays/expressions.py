"""Nodes: what a vector or matrix is computed from. Pure.

A node says how elements follow from those of other nodes. Once its elements lie on the servers it has a block, and
forgets what it was computed from. Nodes are shared: a subexpression that two vectors use is one node.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dps.arrays.operations import checked, loop_of
from dps.errors import InputError

if TYPE_CHECKING:
    from dps.arrays.pools import VectorPool

__all__ = ["Block", "Literal", "Node", "Operand", "applied", "check_widths", "converted", "leaves", "shape_of"]

Shape = tuple[int, ...]
# Depth of an expression: a deeper operand is stored first, so that programs stay short.
MAX_DEPTH = 64


class Block(Protocol):
    """Rows of a pool that hold the elements of a node."""

    @property
    def pool(self) -> VectorPool: ...

    @property
    def first(self) -> int: ...


class Literal:
    """A number, or a small array of the caller's, in the dtype in which an operation takes it."""

    __slots__ = ("dtype", "value")

    def __init__(self, value: np.ndarray, dtype: np.dtype):
        self.value, self.dtype = value, dtype


class Node:
    """Elements: an operation on operands, or a block on the servers.

    Parameters
    ----------
    shape : tuple of int
        (n,) or (rows, n).
    dtype : dtype
    op : str
        A name of ``OPERATIONS``, ``"index"`` (the number of the element), or ``"uniform"``.
    operands : sequence of Node or Literal
    extra : int
        The seed of random numbers.
    """

    __slots__ = (
        "__weakref__",
        "block",
        "depth",
        "dtype",
        "extra",
        "holders",
        "op",
        "operands",
        "parents",
        "shape",
        "used",
    )

    def __init__(self, shape: Shape, dtype: np.dtype, op: str = "", operands: Sequence[Operand] = (), extra: int = 0):
        self.shape = shape
        self.dtype = dtype
        self.op = op
        self.operands = tuple(operands)
        self.extra = extra
        self.block: Block | None = None
        self.used = False  # in a program before, as the operand of a reduction
        self.parents: weakref.WeakSet[Node] | None = None  # what is computed from it
        self.holders: list[weakref.ref[object]] = []  # arrays whose elements these are
        self.depth = 0
        for each in self.operands:
            if isinstance(each, Node):
                self.depth = max(self.depth, each.depth + 1)
                each.add_parent(self)

    def add_parent(self, node: Node) -> None:
        """Let an expression be known that needs these elements."""
        if self.parents is None:
            self.parents = weakref.WeakSet()
        self.parents.add(node)

    def add_holder(self, array: object) -> None:
        """Let an array be known whose elements these are."""
        self.holders = [holder for holder in self.holders if holder() is not None] if self.holders else []
        self.holders.append(weakref.ref(array))

    def needed_beside(self, new: Node | None = None) -> bool:
        """Whether an array needs these elements when their holder has taken those of `new`.

        It is another holder, or it is not computed yet, and not only on the way to `new`.
        """
        if sum(holder() is not None for holder in self.holders) > 1:
            return True
        stack, seen = [self], {id(new)}
        while stack:
            for parent in stack.pop().parents or ():
                if parent.block is None and id(parent) not in seen:
                    if any(holder() is not None for holder in parent.holders):
                        return True
                    seen.add(id(parent))
                    stack.append(parent)
        return False

    def put(self, block: Block) -> None:
        self.block = block
        self.op = ""
        self.operands = ()
        self.depth = 0


Operand = Node | Literal


def leaves(roots: Sequence[Node]) -> Iterator[Node]:
    """All nodes with a block from which these are computed, each once."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.block is not None:
            yield node
        else:
            stack.extend(each for each in node.operands if isinstance(each, Node))


def shape_of(shapes: Sequence[Shape]) -> Shape:
    """The common shape of operands by numpy's rule; a matrix goes with a vector as long as its rows."""
    if shapes and all(shape == shapes[0] for shape in shapes) and shapes[0]:
        return shapes[0]
    widths = {shape[-1] for shape in shapes if shape and shape[-1] != 1} or {1}
    heights = {shape[0] for shape in shapes if len(shape) == 2 and shape[0] != 1}
    if len(widths) > 1 or len(heights) > 1:
        listed = " ".join(str(shape).replace(" ", "") for shape in shapes)
        raise InputError(f"operands could not be broadcast together with shapes {listed}")
    two = any(len(shape) == 2 for shape in shapes)
    return ((heights or {1}).pop(), widths.pop()) if two else (widths.pop(),)


def applied(name: str, operands: Sequence[Node | np.ndarray | bool | int | float]) -> Node:
    """The result of a ufunc; a number of Python takes its partner's dtype, as in numpy."""
    kinds = tuple(_kind(each) for each in operands)
    loop = loop_of(name, kinds)
    shape = shape_of([each.shape for each in operands if isinstance(each, Node)])
    check_widths([each for each in operands if isinstance(each, Node)])
    taken = [converted(each, dtype) for each, dtype in zip(operands, loop, strict=False)]
    for each in operands:
        if isinstance(each, np.ndarray) and each.ndim:
            shape = shape_of([shape, each.shape])
    return Node(shape, loop[-1], name, taken)


def check_widths(nodes: Sequence[Node]) -> None:
    if len({node.shape[-1] for node in nodes}) > 1:
        raise InputError("a vector of one element lies elsewhere than the elements of others: use vector[0]")


def converted(operand: Node | np.ndarray | bool | int | float, dtype: np.dtype) -> Operand:
    if isinstance(operand, Node):
        return operand if operand.dtype == dtype else Node(operand.shape, checked(dtype, "astype"), "cast", [operand])
    return Literal(
        np.asarray(operand).astype(dtype) if isinstance(operand, float) else np.asarray(operand, dtype), dtype
    )


def _kind(operand: Node | np.ndarray | bool | int | float) -> np.dtype | type:
    if isinstance(operand, (Node, np.ndarray, np.generic)):
        return operand.dtype
    return np.dtype(np.bool_) if isinstance(operand, bool) else type(operand)
