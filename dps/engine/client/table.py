"""Table: the handle of a table, which pulls and pushes without naming the table each time.

A handle holds the table's definition, and a way to the client through which its calls go. It is not a client: wherever
a table's name is accepted, in another process too, the handle stands for the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dps.engine.client.ticket import Certificate, Pending, Ticket
from dps.engine.functions.definition import Function
from dps.engine.state.columns import ColumnLayout
from dps.engine.state.names import table_name
from dps.engine.state.ops import TableSpec, html_renderers

__all__ = [
    "Certified",
    "Changes",
    "Keys",
    "Outs",
    "Pulls",
    "T",
    "Table",
    "TableLike",
    "Values",
    "name_of",
    "place_of",
    "through",
]


class Sparse(Protocol):
    """A sparse vector or matrix of scipy or of the package sparse."""

    @property
    def nnz(self) -> int:
        """How many elements are stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one axis or two."""


TableLike: TypeAlias = "str | Table"
Keys: TypeAlias = "npt.ArrayLike | slice | Sparse | None"
Values: TypeAlias = "npt.ArrayLike | Sparse | Mapping[str, Any] | None"
T = TypeVar("T", bound="TableLike")
Pulls: TypeAlias = "Mapping[T, Keys]"
Changes: TypeAlias = "Mapping[T, tuple[Keys, Values]]"
Outs: TypeAlias = "Mapping[T, np.ndarray] | None"
Certified: TypeAlias = tuple[np.ndarray, Certificate]


class Verbs(Protocol):
    """What a handle asks of a client: the same calls, with the table."""

    ticket: Ticket

    def pull(self, table: str, keys: Keys, out: np.ndarray | None) -> np.ndarray: ...
    def pull_async(self, table: str, keys: Keys, out: np.ndarray | None) -> Pending[np.ndarray]: ...
    def pull_certified(self, table: str, keys: Keys) -> Certified: ...
    def pull_certified_async(self, table: str, keys: Keys) -> Pending[Certified]: ...
    def push(self, table: str, keys: Keys, values: Values, rows: int | None) -> None: ...
    def push_async(self, table: str, keys: Keys, values: Values, rows: int | None) -> Pending[None]: ...
    def add(self, table: str, keys: Keys, values: Values) -> None: ...
    def add_async(self, table: str, keys: Keys, values: Values) -> Pending[None]: ...
    def assign(self, table: str, keys: Keys, values: Values) -> None: ...
    def assign_async(self, table: str, keys: Keys, values: Values) -> Pending[None]: ...
    def delete(self, table: str, keys: Keys) -> None: ...
    def delete_async(self, table: str, keys: Keys) -> Pending[None]: ...
    def clear(self, table: str) -> None: ...
    def clear_async(self, table: str) -> Pending[None]: ...
    def push_pull(self, table: str, keys: Keys, values: Values, out: np.ndarray | None) -> np.ndarray: ...
    def push_pull_async(
        self, table: str, keys: Keys, values: Values, out: np.ndarray | None
    ) -> Pending[np.ndarray]: ...
    def keys(self, table: str, shard: int | None) -> Iterator[np.ndarray]: ...
    def call(self, function: Function, table: str, /, keys: Keys, **arguments: Any) -> Any: ...


class Table:
    """A table of a parameter server, as :meth:`dps.ParameterServer.table` returns it.

    Its methods are those of :class:`dps.Client`, without the table. It stands for the table wherever a name is
    accepted, and it pickles: in a Dask task, ``trainer.pull(w, keys)`` and ``trainer.table(w)`` use the trainer's own
    connections, and ``w.pull(keys)`` makes a client without a clock.

    ``w[keys]`` pulls, ``w[keys] = values`` assigns, and ``len(w)`` is the number of rows: of a dense table all of them;
    of a keyed table those that exist, for which it reads all keys (8 bytes each).

    Parameters
    ----------
    spec : TableSpec
        The table's definition.
    session : str
        The name of its parameter server.
    client : callable
        Gives the client through which calls go.

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

    def __init__(self, spec: TableSpec, session: str, client: Callable[[], Verbs]):
        self.spec, self.session, self._client = spec, session, client

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

    def __reduce__(self) -> tuple[Callable[..., Table], tuple[Verbs, TableSpec]]:
        return through, (self._client(), self.spec)

    def __bool__(self) -> bool:
        return True  # also of a table without rows: `if w` is no question to the servers

    def __len__(self) -> int:
        if self.spec.rows is not None:
            return self.spec.rows
        return sum(len(keys) for keys in self.keys())

    def __getitem__(self, keys: Keys) -> np.ndarray:
        return self._client().pull(self.name, keys, None)

    def __setitem__(self, keys: Keys, values: Values) -> None:
        self._client().assign(self.name, keys, values)

    def pull(self, keys: Keys = None, out: np.ndarray | None = None) -> np.ndarray:
        """Copy values of rows; see :meth:`dps.Client.pull`."""
        return self._client().pull(self.name, keys, out)

    def pull_async(self, keys: Keys = None, out: np.ndarray | None = None) -> Pending[np.ndarray]:
        """As :meth:`pull`, but return at once; see :meth:`dps.Client.pull_async`."""
        return self._client().pull_async(self.name, keys, out)

    def pull_certified(self, keys: Keys = None) -> Certified:
        """As :meth:`pull`, with the certificate of what the values contain; see :meth:`dps.Client.pull_certified`."""
        return self._client().pull_certified(self.name, keys)

    def pull_certified_async(self, keys: Keys = None) -> Pending[Certified]:
        """As :meth:`pull_certified`, but return at once."""
        return self._client().pull_certified_async(self.name, keys)

    def push(self, keys: Keys = None, values: Values = None, rows: int | None = None) -> None:
        """Hand values (gradients) to the table's optimizer; see :meth:`dps.Client.push`."""
        self._client().push(self.name, keys, values, rows)

    def push_async(self, keys: Keys = None, values: Values = None, rows: int | None = None) -> Pending[None]:
        """As :meth:`push`, but return once it is written; see :meth:`dps.Client.push_async`."""
        return self._client().push_async(self.name, keys, values, rows)

    def add(self, keys: Keys = None, values: Values = None) -> None:
        """Add values to rows, past the optimizer."""
        self._client().add(self.name, keys, values)

    def add_async(self, keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`add`, but return once it is written."""
        return self._client().add_async(self.name, keys, values)

    def assign(self, keys: Keys = None, values: Values = None) -> None:
        """Replace rows, past the optimizer; of a repeated key the last value counts."""
        self._client().assign(self.name, keys, values)

    def assign_async(self, keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`assign`, but return once it is written."""
        return self._client().assign_async(self.name, keys, values)

    def delete(self, keys: Keys) -> None:
        """Delete rows, which read as their initial values then; see :meth:`dps.Client.delete`."""
        self._client().delete(self.name, keys)

    def delete_async(self, keys: Keys) -> Pending[None]:
        """As :meth:`delete`, but return once it is written."""
        return self._client().delete_async(self.name, keys)

    def clear(self) -> None:
        """Delete all rows; see :meth:`dps.Client.clear`."""
        self._client().clear(self.name)

    def clear_async(self) -> Pending[None]:
        """As :meth:`clear`, but return once it is written."""
        return self._client().clear_async(self.name)

    def push_pull(self, keys: Keys = None, values: Values = None, out: np.ndarray | None = None) -> np.ndarray:
        """Push, and return the new values of the same rows; see :meth:`dps.Client.push_pull`."""
        return self._client().push_pull(self.name, keys, values, out)

    def push_pull_async(
        self, keys: Keys = None, values: Values = None, out: np.ndarray | None = None
    ) -> Pending[np.ndarray]:
        """As :meth:`push_pull`, but return once it is written."""
        return self._client().push_pull_async(self.name, keys, values, out)

    def call(self, function: Function, /, keys: Keys = None, **arguments: Any) -> Any:
        """Run a function on rows, on the servers that have them; see :meth:`dps.Client.call`."""
        return self._client().call(function, self.name, keys=keys, **arguments)

    def keys(self, shard: int | None = None) -> Iterator[np.ndarray]:
        """The keys of a keyed table that have rows, some at a time; see :meth:`dps.Client.keys`."""
        return self._client().keys(self.name, shard)


def name_of(table: TableLike) -> str:
    """The name of a table that is given by name or by handle."""
    return table.name if isinstance(table, Table) else table_name(table)


class TableKeys(NamedTuple):
    """What a call means: a table, keys of it and, of a sparse vector, which has one in its table, the column."""

    table: str
    keys: Keys
    column: int | None = None


def place_of(table: Any, keys: Keys) -> TableKeys:
    """Where the rows are; also those of a vector on the servers, which is a part of a table."""
    if hasattr(table, "__dps_rows__"):
        return TableKeys(*table.__dps_rows__(keys))
    return TableKeys(name_of(table), keys)


def through(client: Verbs, spec: TableSpec) -> Table:
    """A handle whose calls go through that client."""
    return Table(spec, client.ticket.session, lambda: client)
