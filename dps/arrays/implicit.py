"""What an expression of sparse vectors has at the keys that their table does not have. Pure.

There all sparse vectors are zero, so the expression is the same number at each of these keys: its *background*. Where
that is zero, the expression can be stored as a sparse vector. A reduction takes it as often as there are such keys.
"""

from __future__ import annotations

import numpy as np

from dps.arrays.expressions import Literal, Node
from dps.arrays.layout import EVERY_KEY
from dps.arrays.operations import OPERATIONS
from dps.arrays.programs import Wish
from dps.arrays.reductions import REDUCTIONS, Partial, plain
from dps.errors import InputError, InputTypeError

__all__ = ["ITEMS", "background", "check_background", "check_reduction", "implicit_partial"]

# Reductions to which it makes no difference how often a number is taken.
ONCE = {"min", "max", "any", "all"}
# Reductions whose result is multiplied by the number of equal elements.
OFTEN = {"sum", "dot", "count"}
# Reductions to the elements that exist.
ITEMS = {"items", "top items", "rows"}
# Reductions that depend on the number of zeros.
COUNTED = OFTEN | {"prod", "moments"}


def background(root: Node) -> np.ndarray:
    """The element at each key that the table does not have, [1]. The sign of a zero is lost, as it is in the table."""
    made: dict[int, np.ndarray] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        missing = [each for each in node.operands if isinstance(each, Node) and id(each) not in made]
        if node.block is None and missing:
            stack.extend(missing)
            continue
        made[id(node)] = np.zeros(1, node.dtype) if node.block is not None else _computed(node, made)
        stack.pop()
    return made[id(root)]


def _computed(node: Node, made: dict[int, np.ndarray]) -> np.ndarray:
    if node.op not in OPERATIONS:
        made_of = "random numbers" if node.op == "uniform" else "the numbers of elements"
        raise InputTypeError(
            f"a sparse vector is not made of {made_of}: make it with dps.arrays.on(ps).from_items(keys, values)"
        )
    out = np.empty(1, node.dtype)
    operands = [each.value.reshape(-1) if isinstance(each, Literal) else made[id(each)] for each in node.operands]
    with np.errstate(all="ignore"):
        OPERATIONS[node.op](*operands, out=out)
        return np.add(out, 0, out=out) if node.dtype.kind == "f" else out


def check_background(node: Node) -> None:
    """Raise InputError if an expression has another number than zero at keys that there are not."""
    number = background(node)[0]
    if number != 0 or number != number:
        raise InputError(
            f"this would make {number} of each zero of a sparse vector, also at all keys that it does not have: limit "
            f"it to elements that are there, as in np.where(v != 0, np.exp(v), 0), or use a dense vector"
        )


def implicit_partial(wish: Wish, count: int) -> Partial:
    """The partial result of a reduction over so many keys that the table does not have; None: nothing comes of them.

    Raises InputError if the result depends on how many keys there are, and the vector has no size.
    """
    if wish.kind in ITEMS:
        if wish.kind != "rows":
            check_background(wish.operands[-1])
        return None
    numbers = [background(node) for node in wish.operands]
    if wish.kind in ONCE:
        return REDUCTIONS[wish.kind].of(numbers, 0, 0)
    number = plain(numbers[0][0])
    if wish.kind in OFTEN:
        once = REDUCTIONS[wish.kind].of(numbers, 0, 0)
        if not once:
            return None
        _check_size(count)
        return once * count
    if wish.kind == "prod":
        if number not in (0, 1):
            _check_size(count)
        return pow(number, count, 2**64) if isinstance(number, int) else float(np.power(number, float(count)))
    _check_size(count)
    return [count, float(number), 0.0]  # moments


def check_reduction(kind: str) -> None:
    """Raise InputTypeError for what sparse vectors are not asked for."""
    if kind not in ONCE | COUNTED | ITEMS:
        raise InputTypeError(
            f"a sparse vector has no {kind}: its elements are v.items(), the largest are v.top_k(n), and v.to_numpy() "
            f"has all of them"
        )


def _check_size(count: int) -> None:
    if count > EVERY_KEY // 2:
        raise InputError(
            "the result depends on how many zeros there are, and a sparse vector without a size has no number of them: "
            "dps.arrays.on(ps).zeros(n, sparse=True) makes vectors with a size"
        )
