"""Names for what training takes from its user, or from the controller, and passes on."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

from dask.typing import Key

__all__ = ["Batch", "Columns", "Control", "Data", "Function", "Json", "Key", "Options", "Partition", "Result"]

# The user's data may be of any type that can be cut into partitions and rows; `batches.py` and `data.py` say which.
Data: TypeAlias = Any  # a collection of Dask's or Spark's, futures, or arrays in memory
Partition: TypeAlias = Any  # an array, a frame, a list, a dict of columns, or a tuple of these
Batch: TypeAlias = Any  # rows of a partition
Result: TypeAlias = Any  # what the user's function returns
Function: TypeAlias = Callable[..., Result]  # the user's: function(trainer, partitions, *args, **options)
Options: TypeAlias = dict[str, Any]  # keyword arguments for it
Columns: TypeAlias = Hashable | Sequence[Hashable | list[Hashable]]  # the name of a column, or names and lists of names
Json: TypeAlias = dict[str, Any]  # an object in JSON, to the controller or from it


class Control(Protocol):
    """Asks the controller, over Dask's control plane: `DriverConnection.call`."""

    def __call__(self, verb: str, *, callback_timeout: float | None = None, **fields: object) -> Any:
        """The controller's answer about this parameter server; `callback_timeout` in seconds."""
