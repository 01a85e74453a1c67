"""ServerStore: arrays on the servers of a parameter server, through its client."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dps.arrays.evaluation import Operands, PreparedPlan, evaluated, evaluated_keyed
from dps.arrays.layout import KeyedLayout, PoolLayout
from dps.arrays.programs import Program
from dps.arrays.reductions import Partial
from dps.errors import InputError
from dps.functions import Function, Remembered, Rows, function
from dps.functions.library import combine

__all__ = ["ArrayClient", "ServerStore", "delete_zeros", "read_keyed", "read_program", "run_keyed", "run_program"]


# Number of keys whose elements one call replaces.
KEYS_A_CALL = 1 << 18


class ArrayClient(Protocol):
    """What is used of a client or trainer."""

    def call(
        self, function: Function, table: str, /, keys: npt.ArrayLike | slice | None = None, **arguments: object
    ) -> Any: ...
    def pull(self, table: str, keys: npt.ArrayLike | slice | None = None) -> np.ndarray: ...
    def assign(
        self, table: str, keys: npt.ArrayLike | slice | None = None, values: npt.ArrayLike | None = None
    ) -> None: ...


@function
def read_program(rows: Rows, layout: list[int], plan: Remembered, operands: list[Any]) -> list[Partial]:
    """Reductions of a program, which writes nothing."""
    return evaluated(rows, PoolLayout(*layout), plan.made(PreparedPlan.of), Operands(*operands))


@function(changes=True)
def run_program(rows: Rows, layout: list[int], plan: Remembered, operands: list[Any]) -> list[Partial]:
    """A program with outputs."""
    return evaluated(rows, PoolLayout(*layout), plan.made(PreparedPlan.of), Operands(*operands))


@function
def read_keyed(rows: Rows, plan: Remembered, operands: list[Any]) -> list[Partial]:
    """Reductions of a program on sparse vectors."""
    return evaluated_keyed(rows, plan.made(PreparedPlan.of), Operands(*operands))


@function(changes=True)
def run_keyed(rows: Rows, plan: Remembered, operands: list[Any]) -> list[Partial]:
    """A program on sparse vectors with outputs."""
    return evaluated_keyed(rows, plan.made(PreparedPlan.of), Operands(*operands))


@function(changes=True)
def delete_zeros(rows: Rows, columns: list[int]) -> int:
    return rows.delete(~(rows.before[:, columns] != 0).any(axis=1))


delete_zeros.merge(sum)


def touched(rows: Rows, layout: list[int], plan: Remembered, operands: list[object]) -> int:
    """Bytes that a program reads and writes on one shard, which are a small part of the pool's."""
    begin, end = PoolLayout(*layout).extent(rows.shard)
    return (end - begin) * plan.made(PreparedPlan.of).nbytes


read_program.part.touched = run_program.part.touched = touched  # type: ignore[attr-defined]


class ServerStore:
    """A parameter server, as arrays see it.

    Parameters
    ----------
    client : callable
        Gives the client through which calls go.
    shards : int
        Parts into which a vector is cut.
    table : callable, optional
        Makes tables, as :meth:`dps.ParameterServer.table`; a trainer makes none.
    register : callable, optional
        Brings functions to the servers, as :meth:`dps.ParameterServer.register`.
    origin : str, optional
        By which vectors that arrive in a process one by one are known to go together.
    """

    def __init__(
        self,
        client: Callable[[], ArrayClient],
        shards: int,
        table: Callable[..., object] | None = None,
        register: Callable[[Function], object] | None = None,
        origin: str | None = None,
    ):
        self.client = client
        self.shards = shards
        self._table = table
        self._register = register
        self.origin = secrets.token_hex(8) if origin is None else origin

    def __reduce__(self) -> tuple[Callable[..., ServerStore], tuple[object, int, str]]:
        return store_over, (self.client(), self.shards, self.origin)

    def make(self, layout: PoolLayout | KeyedLayout, dtype: np.dtype) -> str:
        """Make the table of a pool; its name is its own, because other programs may use the same parameter server."""
        if self._table is None:
            raise InputError("a trainer makes no vectors of its own: make them where the parameter server was started")
        name = f"{layout.title} {dtype} ({secrets.token_hex(4)})"
        self._table(name, dtype=dtype.name, fixed_shards=True, **layout.table)
        return name

    def run(self, table: str, layout: PoolLayout | KeyedLayout, program: Program) -> list[list[Partial]]:
        """Run a program on all servers that have a part of the pool."""
        plan, *operands = program
        arguments: dict[str, Any] = {"plan": plan.remembered, "operands": operands}
        if isinstance(layout, KeyedLayout):
            chosen = run_keyed if program.outputs else read_keyed
        else:
            chosen = run_program if program.outputs else read_program
            arguments["layout"] = list(layout)
        found: list[list[Partial]] = self.client().call(chosen, table, **arguments)
        return found

    def map(self, table: str, function: Function, **arguments: Any) -> None:
        """Run a function on all servers that have a part of the pool; they get it before, if they do not have it."""
        if self._register is not None:
            self._register(function)
        self.client().call(function, table, **arguments)

    def pull(self, table: str, keys: np.ndarray | slice) -> np.ndarray:
        """The values of rows."""
        values: np.ndarray = self.client().pull(table, keys)
        return values.reshape(-1)

    def assign(self, table: str, keys: np.ndarray | slice, values: np.ndarray) -> None:
        """Replace the values of rows."""
        self.client().assign(table, keys, values)

    def pull_column(self, table: str, column: int, keys: np.ndarray) -> np.ndarray:
        """The elements of a sparse vector at these keys."""
        values: np.ndarray = self.client().pull(table, keys)
        return values if values.ndim == 1 else np.ascontiguousarray(values[:, column])

    def assign_column(self, table: str, column: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Replace the elements of a sparse vector at these keys, which are sorted and distinct."""
        for start in range(0, len(keys), KEYS_A_CALL):
            some = slice(start, start + KEYS_A_CALL)
            self.client().call(
                combine, table, keys=keys[some], name="assign", at=keys[some], values=values[some], column=column
            )

    def delete_zeros(self, table: str, columns: list[int]) -> int:
        """Delete the rows with zeros in all these columns; how many."""
        deleted: int = self.client().call(delete_zeros, table, columns=columns)
        return deleted


def store_over(client: ArrayClient, shards: int, origin: str) -> ServerStore:
    """A store over one client, in a process that makes no tables."""
    return ServerStore(lambda: client, shards, origin=origin)
