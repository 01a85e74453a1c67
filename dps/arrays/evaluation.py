"""Evaluate a program on one shard: chunk after chunk of elements, so that what is between input and output stays in the
processor's cache, and memory is passed once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from dps.arrays.layout import PoolLayout
from dps.arrays.operations import OPERATIONS, UFUNCS
from dps.arrays.programs import Program
from dps.arrays.reductions import REDUCTIONS
from dps.core.chunks import loop_number, run_steps

__all__ = ["KeyedRows", "ShardRows", "evaluated", "evaluated_keyed"]

CHUNK_BYTES = 1 << 17  # of one register: some of them fit the L2 cache, and numpy's overhead for a call is small
FUSED_WIDTH = 1 << 10  # elements of a chunk without the interpreter: all that is needed for it fits the first cache
FAILING = {"power", "float_power", "ldexp", "gcd", "lcm", "left_shift", "right_shift"}  # may raise errors in a loop
MOST_SLOTS, MOST_STEPS = 64, 128  # that a program may have without the interpreter
Step = Callable[[list[Any], int], None]


class ShardRows(Protocol):
    """What is used of ``dps.functions.Rows``."""

    shard: int

    @property
    def before(self) -> np.ndarray:
        """The values before the call, [rows, 1], read-only."""

    def replace(self, start: int, stop: int) -> np.ndarray:
        """Memory for rows, to be filled."""


class KeyedRows(Protocol):
    """What is used of the rows of a keyed table."""

    @property
    def keys(self) -> np.ndarray:
        """The keys of the rows."""

    @property
    def before(self) -> np.ndarray:
        """The values before the call, [rows, columns], read-only."""

    @property
    def values(self) -> np.ndarray:
        """The values, to be changed."""


class Elements(NamedTuple):
    """Which elements a shard has.

    Attributes
    ----------
    length : int
        How many.
    begin : int
        The number of the first one.
    size : int
        Elements of the whole vector.
    keys : ndarray, optional
        Their keys; without these, they are numbered one after the other.
    """

    length: int
    begin: int
    size: int
    keys: np.ndarray | None = None

    def numbers(self, start: int, count: int) -> np.ndarray:
        """The numbers, or keys, of so many elements."""
        return np.arange(start, start + count) if self.keys is None else self.keys[start : start + count]


def evaluated(rows: ShardRows, layout: PoolLayout, program: Program) -> list[Any]:
    """Write the program's outputs on a shard, and return its reductions' partial results.

    Returns
    -------
    list
        Empty for a shard without elements.
    """
    begin, end = layout.extent(rows.shard)
    length = end - begin
    if not length:
        return []
    values = rows.before[:, 0]
    inputs = [layout.view(values, first, height, np.dtype(dtype), length) for first, height, dtype in program.inputs]
    blocks = [(first, height, np.dtype(dtype)) for first, height, dtype in program.outputs]
    outputs = layout.fresh(rows.replace, blocks, length)
    return _carried_out(program, inputs, outputs, Elements(length, begin, layout.size))


def evaluated_keyed(rows: KeyedRows, program: Program) -> list[Any]:
    """Write the program's outputs into columns of a keyed table's shard.

    Returns
    -------
    list
        How many rows the shard has, and the reductions' partial results; empty for a shard without rows.
    """
    before = rows.before
    length = len(before)
    if not length:
        return []
    inputs = [np.ascontiguousarray(before[:, column], dtype) for column, _, dtype in program.inputs]
    outputs = [np.empty(length, dtype) for _, _, dtype in program.outputs]
    partials = _carried_out(program, inputs, outputs, Elements(length, 0, length, rows.keys))
    if outputs:
        values = rows.values
        for (column, _, _), output in zip(program.outputs, outputs, strict=True):
            values[:, column] = output
    return [length, *partials]


def _carried_out(
    program: Program, inputs: list[np.ndarray], outputs: list[np.ndarray], elements: Elements
) -> list[Any]:
    """Fill the outputs, and return the partial results."""
    length, begin = elements.length, elements.begin
    constants = [np.asarray(value, dtype) for value, dtype in program.constants]
    found = fused(program, inputs, constants, outputs, length)
    if found is not None:
        return found
    width = _width(program, length)
    registers = [np.empty((height, width) if height else width, dtype) for height, dtype in program.registers]
    moving, place = len(inputs), len(inputs) + len(constants)
    steps = [_step(elements, *step) for step in program.steps]
    reductions = [(REDUCTIONS[kind], slots, parameter) for kind, slots, parameter in program.reductions]
    partials: list[list[Any]] = [[] for _ in reductions]
    slots: list[Any] = [*inputs, *constants, *outputs, *registers]
    with np.errstate(all="ignore"):
        for start in range(0, length, width):
            stop = min(start + width, length)
            if width < length:
                slots[:moving] = [each[..., start:stop] for each in inputs]
                slots[place : place + len(outputs)] = [each[..., start:stop] for each in outputs]
                if stop - start < width:
                    slots[place + len(outputs) :] = [each[..., : stop - start] for each in registers]
            for step in steps:
                step(slots, begin + start)
            for found, (reduction, operands, parameter) in zip(partials, reductions, strict=True):
                found.append(reduction.of([slots[each] for each in operands], begin + start, parameter))
        return [
            reduction.join(found, parameter)
            for found, (reduction, _, parameter) in zip(partials, reductions, strict=True)
        ]


def fused(
    program: Program, inputs: list[np.ndarray], constants: list[np.ndarray], outputs: list[np.ndarray], length: int
) -> list[Any] | None:
    """Evaluate a program of ufuncs on vectors, and sums of floats, without the interpreter; None: it has more."""
    arrays = [*inputs, *constants, *outputs]
    kinds = [array.dtype for array in arrays] + [np.dtype(dtype) for _, dtype in program.registers]
    if not program.steps or any(array.ndim > 1 for array in arrays) or any(rows for rows, _ in program.registers):
        return None
    steps: list[tuple[np.ufunc, int, list[int]]] = []
    sums, scratch = [], len(kinds)
    for op, result, operands, _ in program.steps:
        types = "".join(kinds[each].char for each in [*operands, result])
        op = "positive" if op == "cast" and types[0] == types[1] else op  # which copies
        loop = loop_of_ufunc(op, types)
        if loop < 0:
            return None
        steps.append((UFUNCS[op], loop, [*operands, result]))
    for kind, slots, _ in program.reductions:
        dtype = kinds[slots[0]]
        if kind not in ("sum", "dot") or dtype.char not in "fd":
            return None
        if kind == "dot":
            steps.append((np.multiply, loop_of_ufunc("multiply", 3 * dtype.char), [*slots, len(kinds)]))
            kinds.append(dtype)
        sums.append((len(kinds) - 1 if kind == "dot" else slots[0], dtype.char == "d"))
    if len(kinds) > MOST_SLOTS or len(steps) + len(sums) > MOST_STEPS:
        return None
    registers = [np.empty(FUSED_WIDTH, dtype) for dtype in kinds[scratch - len(program.registers) :]]
    found: list[Any] = run_steps(arrays, registers, steps, sums, length, FUSED_WIDTH)
    return found


@lru_cache(maxsize=1024)
def loop_of_ufunc(op: str, types: str) -> int:
    """The number of the loop of a ufunc for these dtypes, operands and result; -1: it has to be called by numpy."""
    return loop_number(UFUNCS[op], types.encode()) if op in UFUNCS and op not in FAILING else -1


def _width(program: Program, length: int) -> int:
    """Elements of a chunk; all of them where chunks save nothing."""
    alone = len(program.steps) + len(program.reductions) == 1 and not program.registers
    if alone and not (program.reductions and program.reductions[0][0] == "moments"):
        return length
    typed = [*program.inputs, *program.outputs, *program.registers]
    widest = max([np.dtype(each[-1]).itemsize for each in typed], default=8)
    highest = max([each[-2] for each in typed], default=0) or 1
    return min(max(CHUNK_BYTES // (widest * highest), 1 << 10), length)


def _step(elements: Elements, op: str, result: int, operands: list[int], extra: int) -> Step:
    """A step as a function of the slots and the number of the chunk's first element."""
    if op == "index":
        return lambda slots, start: np.copyto(slots[result], elements.numbers(start, slots[result].shape[-1]))
    if op == "uniform":
        return lambda slots, start: _uniform(slots[result], start, elements.size, extra)
    compute = OPERATIONS[op]
    if len(operands) == 1:
        (only,) = operands
        return lambda slots, start: compute(slots[only], out=slots[result])
    if len(operands) == 2:
        first, second = operands
        return lambda slots, start: compute(slots[first], slots[second], out=slots[result])
    return lambda slots, start: compute(*[slots[each] for each in operands], out=slots[result])


def _uniform(out: np.ndarray, start: int, size: int, seed: int) -> None:
    """Numbers in [0, 1): those that Philox gives for the seed, so they depend neither on chunks nor on shards."""
    for row in out if out.ndim == 2 else [out]:
        bits = np.random.Philox(key=seed)
        bits.advance(start // 4)  # each block of the generator has four numbers
        skipped = start % 4
        row[:] = np.random.Generator(bits).random(len(row) + skipped)[skipped:]
        start += size  # the numbers of a matrix go on in its next row
