"""Compile: several results and reductions together become one short program of plain values, which travels. Pure.

A program is a list of steps on *slots*: the elements of input blocks, constants, the memory of outputs, and registers,
which hold what is needed in between for one chunk of elements. A subexpression that occurs twice is computed once.
Inputs, outputs and registers have the dtypes that numpy's own loops take, so a step never converts anything.

All but the numbers of the vectors and the constants is the program's *plan*. Programs of one plan follow each other in
every loop of a solver, so a plan is made once here, travels once, and is prepared once on each server.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dps.arrays.expressions import Block, Node, Operand
from dps.arrays.operations import UFUNCS
from dps.functions import Remembered

T = TypeVar("T")

__all__ = ["Program", "ProgramPlan", "Wish", "compiled"]

# Number of plans that a process keeps; then it forgets them, because they are quickly made again.
MAX_PLANS = 512


class Wish(NamedTuple):
    """A reduction that is asked for: its name in ``REDUCTIONS``, its operands, its parameter."""

    kind: str
    operands: tuple[Node, ...]
    parameter: int | None = None


@dataclasses.dataclass(frozen=True)
class ProgramPlan:
    """What servers compute, as plain values. The lists have, item by item:

    Attributes
    ----------
    inputs, outputs : list of [rows, dtype]
        Blocks: 0 rows for a vector, else those of a matrix.
    constants : list of [axes, dtype]
    registers : list of [rows, dtype]
    steps : list of [operation, slot of the result, slots of the operands, extra]
        Slots count inputs, constants, outputs and registers, in this order.
    reductions : list of [kind, slots, parameter]
    """

    inputs: list[list[Any]]
    constants: list[list[Any]]
    outputs: list[list[Any]]
    registers: list[list[Any]]
    steps: list[list[Any]]
    reductions: list[list[Any]]

    @functools.cached_property
    def remembered(self) -> Remembered:
        lists = [self.inputs, self.constants, self.outputs, self.registers, self.steps, self.reductions]
        return Remembered(msgspec.msgpack.encode(lists))

    @classmethod
    def of(cls, content: bytes) -> ProgramPlan:
        return cls(*msgspec.msgpack.decode(content))


class Program(NamedTuple):
    """A plan, and what it is carried out with.

    `inputs` and `outputs` have the number of the first vector of each block in the pool.
    """

    plan: ProgramPlan
    inputs: list[int]
    outputs: list[int]
    constants: list[Any]


class _Step(NamedTuple):
    op: str
    dtype: str
    rows: int
    operands: tuple[int, ...]
    extra: int


class _Values:
    """The values of a program, each with a number; equal ones have the same."""

    def __init__(self) -> None:
        self.inputs: list[tuple[int, int, str]] = []  # first vector, rows, dtype
        self.constants: list[Any] = []
        self.types: list[tuple[int, str]] = []  # types of the constants: axes, dtype
        self.steps: list[_Step] = []
        self.kinds: list[tuple[str, int]] = []  # a value is an "input", "constant" or "step"; its place there
        self._known: dict[object, int] = {}  # a description of a value -> its number
        self._nodes: dict[int, int] = {}  # id of a node -> the value's number

    def number(self, root: Node) -> int:
        """The value of a node, after those of its operands. Without recursion, because expressions may be deep."""
        stack: list[Node] = [root]
        while stack:
            node = stack[-1]
            if id(node) in self._nodes:
                stack.pop()
                continue
            if node.block is None:
                open_ = [each for each in node.operands if isinstance(each, Node) and id(each) not in self._nodes]
                if open_:
                    stack.extend(open_)
                    continue
            self._nodes[id(node)] = self._of(node)
            stack.pop()
        return self._nodes[id(root)]

    def _of(self, node: Node) -> int:
        rows = 0 if len(node.shape) == 1 else node.shape[0]
        dtype = node.dtype.str  # several times as fast as its name
        if node.block is not None:
            return self._new("input", (node.block.first, rows, dtype), self.inputs)
        operands = tuple(self._operand(each) for each in node.operands)
        step = _Step(node.op, dtype, rows, operands, node.extra)
        return self._new("step", step, self.steps)

    def _operand(self, operand: Operand) -> int:
        if isinstance(operand, Node):
            return self._nodes[id(operand)]
        value, dtype = operand.value, operand.dtype.str
        key = (value.tobytes(), value.shape, dtype)  # not the number itself, because 0.0 == -0.0
        known = len(self.constants)
        number = self._new("constant", value if value.ndim else value.item(), self.constants, key)
        if len(self.constants) > known:
            self.types.append((value.ndim, dtype))
        return number

    def _new(self, kind: str, item: T, items: list[T], key: object = None) -> int:
        key = (kind, item if key is None else key)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.kinds)
            self.kinds.append((kind, len(items)))
            items.append(item)
        return number


_PLANS: dict[object, ProgramPlan] = {}


def compiled(outputs: Sequence[tuple[Node, Block]], wishes: Sequence[Wish]) -> Program:
    """The program that computes nodes into blocks, and reductions."""
    values = _Values()
    results = [values.number(node) for node, _ in outputs]
    reduced = [[values.number(node) for node in wish.operands] for wish in wishes]
    written = [(0 if len(node.shape) == 1 else node.shape[0], node.dtype.str) for node, _ in outputs]
    key = (
        tuple([kind for kind, _ in values.kinds]),
        tuple([item[1:] for item in values.inputs]),
        tuple(values.types),
        tuple(values.steps),
        tuple(results),
        tuple(written),
        tuple([(wish.kind, *numbers, wish.parameter) for wish, numbers in zip(wishes, reduced, strict=True)]),
    )
    plan = _PLANS.get(key)
    if plan is None:
        plan = _plan(values, results, reduced, written, wishes)
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        _PLANS[key] = plan
    firsts = [first for first, _, _ in values.inputs]
    return Program(plan, firsts, [block.first for _, block in outputs], values.constants)


def _plan(
    values: _Values,
    results: list[int],
    reduced: list[list[int]],
    written: list[tuple[int, str]],
    wishes: Sequence[Wish],
) -> ProgramPlan:
    lasting = {number for numbers in reduced for number in numbers}
    slots, registers, steps = _placed(values, results, lasting)
    for place, number in enumerate(results):
        slot = len(values.inputs) + len(values.constants) + place
        if slots[number] != slot:  # an input, or a result that another output has already
            steps.append(["cast", slot, [slots[number]], 0])
    return ProgramPlan(
        [list(item[1:]) for item in values.inputs],
        [list(each) for each in values.types],
        [list(each) for each in written],
        registers,
        steps,
        [
            [wish.kind, [slots[number] for number in numbers], wish.parameter]
            for wish, numbers in zip(wishes, reduced, strict=True)
        ],
    )


def _placed(
    values: _Values, results: list[int], lasting: set[int]
) -> tuple[list[int], list[list[object]], list[list[object]]]:
    """The slot of each value; the registers; the steps. A register is free again after its value's last use."""
    constants_at = len(values.inputs)
    outputs_at = constants_at + len(values.constants)
    registers_at = outputs_at + len(results)
    slots = [-1] * len(values.kinds)
    last: dict[int, int] = {}  # value -> the last step that uses it
    for place, step in enumerate(values.steps):
        last.update(dict.fromkeys(step.operands, place))
    output_of = {number: outputs_at + place for place, number in reversed(list(enumerate(results)))}
    registers: list[list[object]] = []
    free: dict[tuple[int, str], list[int]] = {}
    steps: list[list[object]] = []
    for number, (kind, place) in enumerate(values.kinds):
        if kind != "step":
            slots[number] = place if kind == "input" else constants_at + place
            continue
        step = values.steps[place]
        done = [
            each
            for each in dict.fromkeys(step.operands)
            if slots[each] >= registers_at and last[each] == place and each not in lasting
        ]
        early = step.op in UFUNCS  # a ufunc may write over its operand, because each element is read before
        if early:
            _release(done, slots, registers, registers_at, free)
        if number in output_of:
            slots[number] = output_of[number]
        else:
            waiting = free.setdefault((step.rows, step.dtype), [])
            if not waiting:
                registers.append([step.rows, step.dtype])
                waiting.append(registers_at + len(registers) - 1)
            slots[number] = waiting.pop()
        if not early:
            _release(done, slots, registers, registers_at, free)
        steps.append([step.op, slots[number], [slots[each] for each in step.operands], step.extra])
    return slots, registers, steps


def _release(
    numbers: list[int], slots: list[int], registers: list[Any], first: int, free: dict[tuple[int, str], list[int]]
) -> None:
    for each in numbers:
        rows, dtype = registers[slots[each] - first]
        free.setdefault((rows, dtype), []).append(slots[each])
