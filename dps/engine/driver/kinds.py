"""Which kind of Dask collection a value is."""

from __future__ import annotations

from typing import Literal, TypeAlias

from dask.base import is_dask_collection
from dask.delayed import Delayed

from dps.engine.training.types import Data

__all__ = ["Kind", "kind_of"]

Kind: TypeAlias = Literal["array", "bag", "delayed", "frame"]

MODULES: dict[str, Kind] = {"dask.bag": "bag", "dask.array": "array", "dask.dataframe": "frame"}
MODULES["dask_expr._collection"] = "frame"  # in Dask of 2024


def kind_of(data: Data) -> Kind | None:
    """The kind of a collection; a list of delayed values is "delayed", and what is no collection of Dask is None.

    >>> import dask.array, dask.delayed
    >>> kind_of(dask.array.ones(3)), kind_of([dask.delayed(1)]), kind_of(np.ones(3))
    ('array', 'delayed', None)
    """
    several = isinstance(data, list) and all(isinstance(part, Delayed) for part in data)
    if isinstance(data, Delayed) or several:
        return "delayed"
    if is_dask_collection(data):
        for base in type(data).__mro__:
            if kind := MODULES.get(".".join(base.__module__.split(".")[:2])):
                return kind
    return None
