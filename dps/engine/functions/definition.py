"""`@dps.function`: a function whose part runs on each shard, and whose results are merged in the caller.

A function travels to the servers over Dask's control plane, once, as cloudpickle; its number there is the hash of these
bytes. A call names that number, and carries arguments only (`wire/values.py`). Functions of dps itself are known by
their names, because each server has them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import cloudpickle
import numpy as np

from dps.engine.functions.rows import Rows
from dps.engine.state.dtypes import HALVES
from dps.engine.state.ops import TableSpec
from dps.errors import DPSError, InputError, InputTypeError, UnknownFunctionError, told

__all__ = ["Function", "function", "opened"]

Part = Callable[..., Any]
# Prefix of the modules whose functions each server has.
OWN = "dps."


class Function:
    """A function that runs on the shards of a table; made by :func:`dps.function`.

    Parameters
    ----------
    part : callable
        ``part(rows, **arguments)``, with the :class:`~dps.functions.Rows` of one shard.
    changes : bool
        It may change rows.
    dtypes : sequence of str, optional
        The dtypes of tables that it takes; None: all.
    dim : int, optional
        The dim of tables that it takes; None: any.
    slots : int, optional
        How many columns of the optimizer's state it expects; None: any number.

    Examples
    --------
    >>> import dps
    >>> @dps.function(changes=True)
    ... def halve(rows):
    ...     rows.values /= 2
    >>> halve
    <dps.functions.Function 'halve', which changes rows>
    """

    def __init__(
        self,
        part: Part,
        changes: bool = False,
        dtypes: Sequence[str] | None = None,
        dim: int | None = None,
        slots: int | None = None,
    ):
        if not callable(part):
            raise InputTypeError(
                f"a function is made of a callable with rows as its first argument, not of {told(part)}"
            )
        self.part, self.changes = part, changes
        self.dtypes = (
            None if dtypes is None else tuple(each if each in HALVES else np.dtype(each).name for each in dtypes)
        )
        self.dim, self.slots = dim, slots
        self._merge: Callable[..., object] | None = None
        self._merged_names: list[str] = []  # arguments of the call that it takes
        functools.update_wrapper(self, part, updated=())

    def __repr__(self) -> str:
        return f"<dps.functions.Function {self.name!r}, which {'changes' if self.changes else 'reads'} rows>"

    def __call__(self, rows: Rows, **arguments: object) -> Any:
        """Run the part here, on rows that the caller has: for tests."""
        return self.part(rows, **arguments)

    @property
    def name(self) -> str:
        """The name of its part."""
        return getattr(self.part, "__qualname__", type(self.part).__name__)

    @functools.cached_property
    def code(self) -> bytes:
        """The part as cloudpickle; empty for a function of dps itself."""
        return b"" if self._is_own else cloudpickle.dumps((self.part, self.changes))

    @functools.cached_property
    def id(self) -> str:
        """Under which the servers know it: the hash of its code; of a function of dps, its module and name."""
        if self._is_own:
            return f"{self.part.__module__}:{self.name}"
        return hashlib.sha256(self.code).hexdigest()

    @property
    def _is_own(self) -> bool:
        module = getattr(self.part, "__module__", None) or ""
        return module.startswith(OWN) and getattr(sys.modules.get(module), self.name, None) is self

    def merge(self, merge: Callable[..., object]) -> Callable[..., Any]:
        """Decorate ``merge(parts)``, which makes the result out of what the parts returned.

        `parts` has the values in the order of the shards; shards without a row of the call are left out. Arguments of
        the call that `merge` names as parameters are passed on. Without it, the result is the list of the parts.
        """
        self._merge = merge
        self._merged_names = list(inspect.signature(merge).parameters)[1:]
        return merge

    def merged(self, parts: list[object], arguments: Mapping[str, object]) -> Any:
        """The result of a call."""
        if self._merge is None:
            return parts
        return self._merge(parts, **{name: arguments[name] for name in self._merged_names if name in arguments})

    def check(self, spec: TableSpec) -> None:
        """Raise InputError if the function does not take this table."""
        if self.dtypes is not None and spec.dtype not in self.dtypes:
            raise self._refusal(spec, f"it takes {', '.join(self.dtypes)}, and the table is {spec.dtype}")
        if self.dim is not None and spec.dim != self.dim:
            raise self._refusal(spec, f"it takes rows of dim {self.dim}, and the table's have {spec.dim}")
        state = spec.optimizer.init(spec.dim)
        if self.slots is not None and state != self.slots:
            optimizer = type(spec.optimizer).__name__
            raise self._refusal(
                spec,
                f"it takes rows with {self.slots} columns of state, and those of {optimizer} have {state}",
            )

    def _refusal(self, spec: TableSpec, why: str) -> InputError:
        return InputError(f"function {self.name!r} on table {spec.name!r}: {why}")

    def __getstate__(self) -> dict[str, object]:
        # With its number: the same function, pickled in another process, may have other bytes.
        return {**self.__dict__, "id": self.id, "code": self.code}


@overload
def function(part: Part, /) -> Function: ...
@overload
def function(
    *, changes: bool = ..., dtypes: Sequence[str] | None = ..., dim: int | None = ..., slots: int | None = ...
) -> Callable[[Part], Function]: ...
def function(
    part: Part | None = None,
    /,
    *,
    changes: bool = False,
    dtypes: Sequence[str] | None = None,
    dim: int | None = None,
    slots: int | None = None,
) -> Function | Callable[[Part], Function]:
    """Make a function that runs on the servers, where the rows are.

    The decorated function is the *part*: it is called once for each shard, with that shard's
    :class:`~dps.functions.Rows` and the arguments of the call, and returns a plain value or an array. It runs in a
    process of the server's own, under a time limit (``dps.timeouts.function``). If it fails on one shard, all rows of
    all shards stay as they were.

    Parameters
    ----------
    part : callable
        ``part(rows, **arguments)``.
    changes : bool
        It may change `rows.values` and `rows.state`. Its effect counts exactly once, as that of a push does, and goes
        to all copies.
    dtypes, dim, slots
        What it takes: tables of these dtypes, of that dim, with so many columns of optimizer state. By default any.

    Returns
    -------
    Function
        To be passed to ``ps.call``, ``client.call`` and ``trainer.call``.

    Examples
    --------
    >>> import dps
    >>> @dps.function
    ... def norm(rows):
    ...     return float((rows.values ** 2).sum())
    >>> @norm.merge
    ... def _(parts):
    ...     return sum(parts) ** 0.5
    >>> @dps.function(changes=True)
    ... def decay(rows, factor):
    ...     rows.values *= factor
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         w = ps.table("w", rows=4)
    ...         w[:] = [3.0, 0.0, 0.0, 4.0]
    ...         before = ps.call(norm, w)
    ...         _ = ps.call(decay, w, keys=[3], factor=0.0)
    ...         before, ps.call(norm, w)
    (5.0, 3.0)
    """
    if part is not None:
        return Function(part, changes, dtypes, dim, slots)
    return functools.partial(Function, changes=changes, dtypes=dtypes, dim=dim, slots=slots)


def opened(identity: str, code: bytes) -> tuple[Part, bool]:
    """The part of a function, and whether it changes rows. To be called on servers only.

    Raises
    ------
    DPSError
        The code cannot be unpickled, because it needs a module that is not installed there, say.
    UnknownFunctionError
        dps has no function of that name.
    """
    if code:
        try:
            return cloudpickle.loads(code)
        except Exception as error:
            raise DPSError(
                f"a function cannot be opened on the servers: {type(error).__name__}: {error}; is the module that it "
                f"needs installed there?"
            ) from error
    module, _, name = identity.partition(":")
    made = None
    if module.startswith(OWN) and name:
        try:
            made = getattr(importlib.import_module(module), name, None)
        except ImportError:
            made = None
    if not isinstance(made, Function):
        raise UnknownFunctionError(f"no server knows the function {identity[:80]!r}: call ps.register(function) first")
    return made.part, made.changes
