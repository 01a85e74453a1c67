"""The workers' side of `ps.map`: a partition and handles of tables, in a task of Dask's.

Such a task only reads, so it needs no trainer and no run: Dask may compute it as often as it likes, at once or again
after a failure, and nothing counts twice. To keep it so, the handles refuse everything that would change a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dps.engine.client.client import Client
from dps.engine.client.table import Table, through
from dps.engine.client.ticket import Ticket
from dps.engine.client.verbs import Keys, TableLike
from dps.engine.functions.definition import Function as ServerFunction
from dps.engine.training.types import Function, Options, Partition, Result
from dps.errors import InputError, InputTypeError

__all__ = ["ReadingBagStage", "ReadingBlockStage", "ReadingStage"]

READS = {"pull", "pull_async", "pull_certified", "pull_certified_async", "keys", "keys_async"}
CHANGES = {
    f"{verb}{way}" for verb in ("push", "add", "assign", "delete", "clear", "push_pull") for way in ("", "_async")
}


class ReadingClient:
    """A client for the handles of a Dask task. It reads only, because Dask may run the task several times."""

    def __init__(self, client: Client):
        self.ticket, self._client = client.ticket, client

    def __getattr__(self, verb: str) -> Any:
        if verb in READS:
            return getattr(self._client, verb)
        if verb in CHANGES:
            raise InputTypeError(
                f"{verb} changes a table, and the function of ps.map only reads, because Dask may compute a partition "
                f"several times: dps.map_partitions_with_ps counts each push once"
            )
        raise AttributeError(verb)

    def call(self, function: ServerFunction, table: TableLike, /, keys: Keys = None, **arguments: object) -> Any:
        check_reads(function)
        return self._client.call(function, table, keys=keys, **arguments)

    def call_async(self, function: ServerFunction, table: TableLike, /, keys: Keys = None, **arguments: object) -> Any:
        check_reads(function)
        return self._client.call_async(function, table, keys=keys, **arguments)


def check_reads(function: ServerFunction) -> None:
    if function.changes:
        raise InputTypeError(
            f"{function!r}: in ps.map there are functions that read only, because Dask may compute "
            f"a partition several times"
        )


class ReadingStage:
    """The function of `ps.map`, called with a partition; of several collections, with one of each.

    Parameters
    ----------
    token : str
        Tells the tasks of this stage from those of all others: the tables change, so two stages are never the same.
    function : callable
        The user's: ``function(partition, *tables, *args, **kwargs)``.
    several : bool
        The partition is a tuple.
    """

    def __init__(
        self, ticket: Ticket, tables: tuple[str, ...], token: str, function: Function, several: bool, args: tuple,
        kwargs: Options,
    ):  # fmt: skip
        self.ticket, self.tables, self.token = ticket, tables, token
        self.function, self.several, self.args, self.kwargs = function, several, args, kwargs
        self.__name__ = getattr(function, "__name__", type(function).__name__)  # Dask names its tasks by it

    def __dask_tokenize__(self) -> tuple[str, str]:
        return type(self).__name__, self.token

    def __call__(self, *parts: Partition) -> Result:
        with Client(self.ticket) as client:
            reading = ReadingClient(client)
            handles = [through(reading, client.table(name).spec) for name in self.tables]
            return self.compute(parts, handles)

    def compute(self, parts: tuple[Partition, ...], handles: list[Table]) -> Result:
        return self.function(parts if self.several else parts[0], *handles, *self.args, **self.kwargs)


class ReadingBagStage(ReadingStage):
    """The same for partitions of bags, which are iterables."""

    def compute(self, parts: tuple[Partition, ...], handles: list[Table]) -> list[Result]:
        result = super().compute(tuple(map(list, parts)), handles)
        if not hasattr(result, "__iter__"):
            raise InputTypeError(
                f"ps.map: of a bag's partition {self.__name__} returns an iterable, not a {type(result).__name__}"
            )
        return list(result)  # a generator runs here, as long as there is a client


class ReadingBlockStage(ReadingStage):
    """The same for blocks of arrays: the result has a row for each row of the block.

    `shape` is that of a row of the result; None while it is to be found out.
    """

    shape: tuple[int, ...] | None = None

    def compute(self, parts: tuple[Partition, ...], handles: list[Table]) -> Result:
        result = super().compute(parts, handles)
        result = result if hasattr(result, "shape") else np.asarray(result)
        rows, shape = parts[0].shape[0], self.shape
        if result.shape[:1] != (rows,) or (shape is not None and result.shape[1:] != shape):
            wanted = "(rows, ...)" if shape is None else str((rows, *shape))
            raise InputError(
                f"ps.map: {self.__name__} has returned shape {result.shape} for a block of {rows} rows, and {wanted} "
                f"was wanted: one row for each, as meta= says"
            )
        return result
