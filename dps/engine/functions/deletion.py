"""Functions that delete the rows for which a predicate holds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dps.engine.functions.definition import Function
from dps.engine.functions.rows import Rows
from dps.errors import InputError, InputTypeError

__all__ = ["deleting"]


class Deletion:
    """A part that deletes the rows for which a predicate holds; how many."""

    def __init__(self, predicate: Callable[..., object]):
        self.predicate = predicate
        self.__module__ = getattr(predicate, "__module__", None) or ""  # so that the function is not one of dps itself
        self.__qualname__ = f"deleting {getattr(predicate, '__qualname__', type(predicate).__name__)}"

    def __call__(self, rows: Rows, **arguments: object) -> int:
        which = np.asarray(self.predicate(rows, **arguments))
        if which.dtype != np.bool_ or which.shape != (len(rows),):
            raise InputError(
                f"the predicate says for each of {len(rows)} rows whether it goes, as an array of bool; it gave "
                f"{which.dtype} {which.shape}"
            )
        return rows.delete(which)


def deleting(predicate: Callable[..., object]) -> Function:
    """A function that deletes the rows for which ``predicate(rows, **arguments)`` holds; it returns how many.

    Parameters
    ----------
    predicate : callable
        Given the :class:`~dps.functions.Rows` of one shard, returns bool[m]. It is called on the servers.

    Returns
    -------
    Function
        To be registered and called as any other.

    Raises
    ------
    InputTypeError
        The predicate is a :class:`Function`, or no function at all.

    Examples
    --------
    >>> import dps
    >>> from dps.functions import deleting
    >>> cold = deleting(lambda rows, least: rows.values[:, 0] < least)
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         counts = ps.table("counts", dtype="int64")
    ...         counts.push([1, 2, 3], [5, 1, 7])
    ...         ps.call(cold, counts, least=3), len(counts)
    (1, 2)
    """
    if isinstance(predicate, Function) or not callable(predicate):
        raise InputTypeError(
            f"a predicate is a plain function of rows, not {predicate!r:.100}; ps.call runs a dps.Function, also one "
            "of dps.functions.deleting"
        )
    function = Function(Deletion(predicate), changes=True)
    function.merge(sum)
    return function
