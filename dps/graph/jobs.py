"""The tables and the run of a graph algorithm: made, used, and dropped but for the result."""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np

from dps import Assign
from dps.errors import InputError
from dps.graph.edges import EdgeSource
from dps.graph.exchange import BLOCK
from dps.graph.results import VertexValues

if TYPE_CHECKING:
    import dps

__all__ = ["GraphJob", "checked_count", "checked_number"]

T = TypeVar("T")


def checked_count(name: str, value: object, least: int = 1) -> int:
    """`value`, if it is a whole number from `least` on."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value.__index__() < least:
        raise InputError(f"{name} is a whole number, {least} or more; not {value!r}")
    return int(value)


def checked_number(name: str, value: object, among: str, within: Callable[[float], bool]) -> float:
    """`value`, if it is a number for which `within` holds; `among` names these numbers in messages."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real) or not within(float(value)):
        raise InputError(f"{name} is {among}; not {value!r}")
    return float(value)


class GraphJob:
    """The tables of one call of an algorithm, under names of their own. A context manager, which drops them."""

    def __init__(self, ps: dps.ParameterServer, algorithm: str):
        self._ps, self._name = ps, f"{algorithm}-{uuid.uuid4().hex[:8]}"
        self._tables: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for table in self._tables:
            self._ps.drop_table(table)

    def table(self, what: str, dtype: str, dim: int = 1, aggregate: str | None = None) -> str:
        """Make a keyed table in which a push replaces rows; its name."""
        name = f"{self._name}-{what}"
        self._ps.table(name, dim, dtype=dtype, optimizer=Assign(), aggregate=aggregate)
        self._tables.append(name)
        return name

    def counts(self, what: str) -> str:
        """Make a keyed int64 table in which pushes add up; its name."""
        name = f"{self._name}-{what}"
        self._ps.table(name, dtype="int64")
        self._tables.append(name)
        return name

    def keep(self, name: str) -> None:
        self._tables.remove(name)

    def mailbox(self) -> str:
        return self.table("mailbox", "int64", BLOCK)

    def run(
        self, function: Callable[..., T], edges: EdgeSource, args: tuple, trainers: int | None, retries: int
    ) -> list[T]:
        """Call ``function(trainer, partitions, *args)`` on the trainers, bulk-synchronously."""
        return self._ps.run(
            function, edges.data, columns=edges.columns, args=args, trainers=trainers, retries=retries, progress=False
        )

    def result(self, table: str, iterations: int, converged: bool) -> VertexValues:
        values = VertexValues(self._ps, self._ps.tables()[table], iterations, converged)
        self.keep(table)
        return values
