"""What arrays need of a parameter server: tables, their rows, and programs that run where the rows are."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dps.arrays.layout import KeyedLayout, PoolLayout
from dps.arrays.programs import Program
from dps.arrays.reductions import Partial
from dps.functions import Function

__all__ = ["ArrayStore"]


class ArrayStore(Protocol):
    """A parameter server, as arrays see it."""

    @property
    def shards(self) -> int:
        """Parts into which a vector is cut: one for each server."""

    @property
    def origin(self) -> str:
        """The same for all references to it, in all processes."""

    def make(self, layout: PoolLayout | KeyedLayout, dtype: np.dtype) -> str:
        """Make the table of a pool, and return its name."""

    def run(self, table: str, layout: PoolLayout | KeyedLayout, program: Program) -> list[list[Partial]]:
        """Run a program on all shards: the partial results of its reductions, shard by shard."""

    def map(self, table: str, function: Function, **arguments: object) -> None:
        """Run a function of `mapping` on all shards."""

    def pull(self, table: str, keys: np.ndarray | slice) -> np.ndarray: ...

    def assign(self, table: str, keys: np.ndarray | slice, values: np.ndarray) -> None:
        """Replace the values of rows; of a repeated row the last one counts."""

    def pull_column(self, table: str, column: int, keys: np.ndarray) -> np.ndarray:
        """The elements of a sparse vector at these keys."""

    def assign_column(self, table: str, column: int, keys: np.ndarray, values: np.ndarray) -> None:
        """Replace the elements of a sparse vector at these keys, which are sorted and distinct."""

    def delete_zeros(self, table: str, columns: list[int]) -> int:
        """Delete the rows with zeros in all these columns; how many."""
