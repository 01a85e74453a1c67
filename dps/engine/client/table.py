"""Table: the handle of a table, which pulls and pushes without naming the table each time.

A handle holds the table's definition, and a way to the client through which its calls go. It is not a client: wherever
a table's name is accepted, in another process too, the handle stands for the name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, overload

import numpy as np

from dps.engine.client.ticket import Pending
from dps.engine.client.verbs import Keys, MergingVerbs, TableLike, Values, Verbs
from dps.engine.functions.definition import Function
from dps.engine.state.columns import ColumnLayout
from dps.engine.state.names import table_name
from dps.engine.state.ops import TableSpec, html_renderers
from dps.errors import InputError

__all__ = ["Table", "name_of", "place_of", "through"]

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Verbs)


def on_handle(verb: Callable[Concatenate[V, str, P], R], owner: str = "_client") -> Callable[Concatenate[Table, P], R]:
    """The verb as a method of a handle: the same without the table, with its types and documentation.

    `owner` is the attribute of the handle that gives what has the verb.
    """
    name = verb.__name__

    def method(table: Table, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(getattr(table, owner)(), name)(table.spec.name, *args, **kwargs)
        return result

    signature = inspect.signature(verb)
    kept = [each for each in signature.parameters.values() if each.name != "table"]
    method.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    method.__name__, method.__qualname__, method.__doc__ = name, f"Table.{name}", handle_doc(verb)
    return method


def handle_doc(verb: Callable[..., object]) -> str:
    """The documentation of a verb without the table, and without the examples, which are those of a client."""
    doc = inspect.cleandoc(verb.__doc__ or "")
    doc = re.sub(r"^table : .*\n(?:    .*\n)*", "", doc + "\n", flags=re.M)
    doc = re.sub(r",? or dict of \w+|\s+Of\s+several\s+tables,[^.]*\.", "", doc)
    doc = re.sub(r"^Parameters\n-+\n(?=\n|\Z)\n?", "", doc, flags=re.M)
    return re.sub(r"\n*^Examples\n-+\n(?:.*\n)*", "\n", doc, flags=re.M).strip()


class Table:
    """A table of a parameter server, as :meth:`dps.ParameterServer.table` returns it.

    Its methods are those of :class:`dps.Client`, without the table, and a trainer's handle has its `increment` and
    `merge_max`, too. It stands for the table wherever a name is accepted, and it pickles: in a Dask task,
    ``trainer.pull(w, keys)`` and ``trainer.table(w)`` use the trainer's own connections, and ``w.pull(keys)`` makes a
    client without a clock.

    ``w[keys]`` pulls (of a keyed table ``w[a:b]`` is a pair: keys and values), ``w[keys] = values`` assigns, and
    ``len(w)`` is the number of rows: of a dense table all of them; of a keyed table those that exist, for which it
    reads all keys (8 bytes each).

    Parameters
    ----------
    spec : TableSpec
        The table's definition.
    session : str
        The name of its parameter server.
    client : callable
        Gives the client through which calls go.
    trainer : callable, optional
        Gives the trainer that merges values until its next tick.

    Examples
    --------
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     w = ps.table("w", optimizer=dps.SGD(0.5))
    ...     w.push([5, 7], [1.0, 2.0])
    ...     w[7] = 4
    ...     w
    ...     w[[5, 6, 7]]
    ...     len(w), ps.client().pull(w, [7])
    <dps.Table 'w' of 'dps': any key, dim 1, float32, SGD>
    array([-0.5,  0. ,  4. ], dtype=float32)
    (2, array([4.], dtype=float32))
    >>> cluster.close()
    """

    __iter__ = None  # else Python would pull w[0], w[1], ... without an end
    __contains__ = None

    def __init__(
        self,
        spec: TableSpec,
        session: str,
        client: Callable[[], Verbs],
        trainer: Callable[[], MergingVerbs] | None = None,
    ):
        self.spec, self.session, self._client = spec, session, client
        self._trainer = trainer or without_trainer

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Values in a row."""
        return self.spec.dim

    @property
    def columns(self) -> ColumnLayout:
        """Where the columns lie of a table made with ``columns=``; see :meth:`dps.Client.columns`."""
        return self.spec.columns

    def __repr__(self) -> str:
        spec, optimizer = self.spec, self.spec.optimizer.kind
        rows = f"any key, dim {spec.dim}" if spec.rows is None else f"{spec.rows} rows of dim {spec.dim}"
        return f"<dps.Table {spec.name!r} of {self.session!r}: {rows}, {spec.dtype}, {optimizer}>"

    def _repr_html_(self) -> str | None:
        return html_renderers[-1](self.spec) if html_renderers else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        return (self.spec, self.session) == (other.spec, other.session)

    def __hash__(self) -> int:
        return hash((self.name, self.session))

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[object, TableSpec]]:
        return through, (self._client(), self.spec)

    def __bool__(self) -> bool:
        return True  # also of a table without rows: `if w` is no question to the servers

    def __len__(self) -> int:
        if self.spec.rows is not None:
            return self.spec.rows
        return sum(len(keys) for keys in self.keys())

    @overload
    def __getitem__(self, keys: slice) -> Any: ...
    @overload
    def __getitem__(self, keys: Keys) -> np.ndarray: ...
    def __getitem__(self, keys: Keys) -> object:
        return self._client().pull(self.name, keys, None)

    def __setitem__(self, keys: Keys, values: Values) -> None:
        self._client().assign(self.name, keys, values)

    pull = on_handle(Verbs.pull)
    pull_async = on_handle(Verbs.pull_async)
    pull_certified = on_handle(Verbs.pull_certified)
    pull_certified_async = on_handle(Verbs.pull_certified_async)
    push = on_handle(Verbs.push)
    push_async = on_handle(Verbs.push_async)
    add = on_handle(Verbs.add)
    add_async = on_handle(Verbs.add_async)
    assign = on_handle(Verbs.assign)
    assign_async = on_handle(Verbs.assign_async)
    clear = on_handle(Verbs.clear)
    clear_async = on_handle(Verbs.clear_async)
    push_pull = on_handle(Verbs.push_pull)
    push_pull_async = on_handle(Verbs.push_pull_async)
    keys = on_handle(Verbs.keys)
    keys_async = on_handle(Verbs.keys_async)
    increment = on_handle(MergingVerbs.increment, "_trainer")
    merge_max = on_handle(MergingVerbs.merge_max, "_trainer")
    merge_min = on_handle(MergingVerbs.merge_min, "_trainer")

    def delete(self, keys: Keys) -> None:
        self._client().delete(self.name, keys)

    def delete_async(self, keys: Keys) -> Pending[None]:
        return self._client().delete_async(self.name, keys)

    def call(self, function: Function, /, keys: Keys = None, **arguments: object) -> Any:
        return self._client().call(function, self.name, keys=keys, **arguments)

    def call_async(self, function: Function, /, keys: Keys = None, **arguments: object) -> Pending[Any]:
        return self._client().call_async(function, self.name, keys=keys, **arguments)

    # All rows of a table are deleted by `clear` only, so a handle's `delete` has to name keys; and `call` has the
    # function before the table.
    delete.__doc__, delete_async.__doc__ = handle_doc(Verbs.delete), handle_doc(Verbs.delete_async)
    call.__doc__, call_async.__doc__ = handle_doc(Verbs.call), handle_doc(Verbs.call_async)


def without_trainer() -> MergingVerbs:
    """Refuse a verb that waits for a tick, because a handle that is no trainer's has no ticks."""
    raise InputError(
        "increment, merge_max and merge_min merge values until the trainer's next tick, and this handle is not a "
        "trainer's: use trainer.table(w), or add"
    )


def name_of(table: TableLike) -> str:
    return table.name if isinstance(table, Table) else table_name(table)


class TableKeys(NamedTuple):
    """What a call means: a table, keys of it and, of a sparse vector, which has one in its table, the column."""

    table: str
    keys: Keys
    column: int | None = None


def place_of(table: TableLike, keys: Keys) -> TableKeys:
    """Where the rows are; also those of a vector on the servers, which is a part of a table."""
    if hasattr(table, "__dps_rows__"):
        return TableKeys(*table.__dps_rows__(keys))
    return TableKeys(name_of(table), keys)


def through(client: Any, spec: TableSpec) -> Table:
    return Table(spec, client.ticket.session, lambda: client)
