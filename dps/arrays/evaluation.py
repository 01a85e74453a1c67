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
from dps.arrays.programs import ProgramPlan
from dps.arrays.reductions import REDUCTIONS, Partial
from dps.kernels.loops.chunks import loop_number, run_steps

__all__ = ["KeyedRows", "Operands", "PreparedPlan", "ShardRows", "evaluated", "evaluated_keyed"]

# Size of one register: several of them fit the L2 cache, and numpy's overhead for a call stays small.
CHUNK_BYTES = 1 << 17
# Elements of a chunk without the interpreter: what it needs fits the first cache.
FUSED_WIDTH = 1 << 10
# Operations that may raise errors in a loop.
FAILING = {"power", "float_power", "ldexp", "gcd", "lcm", "left_shift", "right_shift"}
# Limits of a program without the interpreter.
MOST_SLOTS = 64
MOST_STEPS = 128
Step = Callable[[list[Any], int], object]


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
    def keys(self) -> np.ndarray: ...

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
        return np.arange(start, start + count) if self.keys is None else self.keys[start : start + count]


class Fused(NamedTuple):
    """A plan that is carried out without the interpreter: see ``dps.kernels.loops.chunks.run_steps``."""

    registers: list[np.dtype]
    steps: list[tuple[np.ufunc, int, list[int]]]
    sums: list[tuple[int, bool]]


class PreparedPlan:
    """A plan whose operations are looked up, to be carried out many times."""

    def __init__(self, plan: ProgramPlan):
        self.plan = plan
        self.inputs = [(height, np.dtype(dtype)) for height, dtype in plan.inputs]
        self.outputs = [(height, np.dtype(dtype)) for height, dtype in plan.outputs]
        self.constants = [np.dtype(dtype) for _, dtype in plan.constants]
        self.fused = fused(plan)

    @classmethod
    def of(cls, content: bytes) -> PreparedPlan:
        return cls(ProgramPlan.of(content))

    @property
    def nbytes(self) -> int:
        """Bytes that it reads and writes for each element."""
        return sum((height or 1) * dtype.itemsize for height, dtype in (*self.inputs, *self.outputs))


class Operands(NamedTuple):
    """What a plan is carried out with: see :class:`dps.arrays.programs.Program`."""

    inputs: list[int]
    outputs: list[int]
    constants: list[Any]


def evaluated(rows: ShardRows, layout: PoolLayout, prepared: PreparedPlan, operands: Operands) -> list[Partial]:
    """Write the program's outputs on a shard, and return its reductions' partial results: none without elements."""
    begin, end = layout.extent(rows.shard)
    length = end - begin
    if not length:
        return []
    values = rows.before[:, 0]
    inputs = [
        layout.view(values, first, *typed, length)
        for first, typed in zip(operands.inputs, prepared.inputs, strict=True)
    ]
    blocks = [(first, *typed) for first, typed in zip(operands.outputs, prepared.outputs, strict=True)]
    outputs = layout.fresh(rows.replace, blocks, length)
    return _carried_out(prepared, inputs, operands.constants, outputs, Elements(length, begin, layout.size))


def evaluated_keyed(rows: KeyedRows, prepared: PreparedPlan, operands: Operands) -> list[Partial]:
    """Write the program's outputs into columns of a keyed table's shard.

    Returns how many rows the shard has, and the reductions' partial results; nothing for a shard without rows.
    """
    before = rows.before
    length = len(before)
    if not length:
        return []
    inputs = [
        np.ascontiguousarray(before[:, column], dtype)
        for column, (_, dtype) in zip(operands.inputs, prepared.inputs, strict=True)
    ]
    outputs = [np.empty(length, dtype) for _, dtype in prepared.outputs]
    elements = Elements(length, 0, length, rows.keys)
    partials = _carried_out(prepared, inputs, operands.constants, outputs, elements)
    if outputs:
        values = rows.values
        for column, output in zip(operands.outputs, outputs, strict=True):
            values[:, column] = output
    return [length, *partials]


def _carried_out(
    prepared: PreparedPlan,
    inputs: list[np.ndarray],
    numbers: list[Any],
    outputs: list[np.ndarray],
    elements: Elements,
) -> list[Partial]:
    length = elements.length
    begin = elements.begin
    plan = prepared.plan
    constants = [np.asarray(value, dtype) for value, dtype in zip(numbers, prepared.constants, strict=True)]
    if prepared.fused is not None:
        kinds, made, sums = prepared.fused
        scratch = [np.empty(FUSED_WIDTH, dtype) for dtype in kinds]
        totals: list[Partial] = run_steps([*inputs, *constants, *outputs], scratch, made, sums, length, FUSED_WIDTH)
        return totals
    width = _width(plan, length)
    registers = [np.empty((height, width) if height else width, dtype) for height, dtype in plan.registers]
    moving, place = len(inputs), len(inputs) + len(constants)
    steps = [_step(elements, *step) for step in plan.steps]
    reductions = [(REDUCTIONS[kind], slots, parameter) for kind, slots, parameter in plan.reductions]
    partials: list[list[Partial]] = [[] for _ in reductions]
    slots: list[object] = [*inputs, *constants, *outputs, *registers]
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


def fused(plan: ProgramPlan) -> Fused | None:
    """A plan of ufuncs on vectors, and sums of floats, as steps without the interpreter; None: it has more."""
    typed = [*plan.inputs, *plan.constants, *plan.outputs, *plan.registers]
    if not plan.steps or any(rows for rows, _ in typed):
        return None
    kinds = [np.dtype(dtype) for _, dtype in typed]
    steps: list[tuple[np.ufunc, int, list[int]]] = []
    sums, scratch = [], len(kinds)
    for op, result, operands, _ in plan.steps:
        types = "".join(kinds[each].char for each in [*operands, result])
        op = "positive" if op == "cast" and types[0] == types[1] else op  # because "positive" copies
        loop = loop_of_ufunc(op, types)
        if loop < 0:
            return None
        steps.append((UFUNCS[op], loop, [*operands, result]))
    for kind, slots, _ in plan.reductions:
        dtype = kinds[slots[0]]
        if kind not in ("sum", "dot") or dtype.char not in "fd":
            return None
        if kind == "dot":
            steps.append((np.multiply, loop_of_ufunc("multiply", 3 * dtype.char), [*slots, len(kinds)]))
            kinds.append(dtype)
        sums.append((len(kinds) - 1 if kind == "dot" else slots[0], dtype.char == "d"))
    if len(kinds) > MOST_SLOTS or len(steps) + len(sums) > MOST_STEPS:
        return None
    return Fused(kinds[scratch - len(plan.registers) :], steps, sums)


@lru_cache(maxsize=1024)
def loop_of_ufunc(op: str, types: str) -> int:
    """The number of the loop of a ufunc for these dtypes, operands and result; -1: it has to be called by numpy."""
    return loop_number(UFUNCS[op], types.encode()) if op in UFUNCS and op not in FAILING else -1


def _width(plan: ProgramPlan, length: int) -> int:
    """Elements of a chunk; all of them where chunks save nothing."""
    alone = len(plan.steps) + len(plan.reductions) == 1 and not plan.registers
    if alone and not (plan.reductions and plan.reductions[0][0] == "moments"):
        return length
    typed = [*plan.inputs, *plan.outputs, *plan.registers]
    widest = max([np.dtype(dtype).itemsize for _, dtype in typed], default=8)
    highest = max([height for height, _ in typed], default=0) or 1
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
