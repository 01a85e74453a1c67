"""The verbs: what users ask of tables. Each has its signature, types and documentation here, and nowhere else.

:class:`dps.Client` carries them out; a trainer has them by inheritance and passes them on; a handle has them
without the table (`table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt

from dps.engine.client.ticket import Certificate, Pending
from dps.engine.functions.definition import Function

__all__ = ["Born", "Certified", "Changes", "Keys", "MergingVerbs", "Outs", "Pulls", "T", "TableLike", "Values", "Verbs"]
__all__ += ["implements"]


class Sparse(Protocol):
    """A sparse vector or matrix of scipy or of the package sparse."""

    @property
    def nnz(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class TableHandle(Protocol):
    """A table's handle, :class:`dps.Table`."""

    @property
    def name(self) -> str: ...


TableLike: TypeAlias = "str | TableHandle"
Keys: TypeAlias = "npt.ArrayLike | slice | Sparse | None"
Values: TypeAlias = "npt.ArrayLike | Sparse | Mapping[str, npt.ArrayLike | Sparse] | None"
T = TypeVar("T", bound="TableLike")
Pulls: TypeAlias = "Mapping[T, Keys]"
Changes: TypeAlias = "Mapping[T, tuple[Keys, Values]]"
Outs: TypeAlias = "Mapping[T, np.ndarray] | None"
Certified: TypeAlias = tuple[np.ndarray, Certificate]
Born: TypeAlias = tuple[np.ndarray, np.ndarray]

F = TypeVar("F", bound=Callable[..., object])


class Verbs:
    """Pull, push and their kin, with the table as the first argument.

    `_calls` carries the verbs out: a client, or what stands before it in a loop.
    """

    _calls: Any

    @overload
    def pull(self, table: TableLike, keys: Keys = ..., out: np.ndarray | None = ...) -> np.ndarray: ...
    @overload
    def pull(self, table: Pulls[T], keys: None = ..., out: Outs[T] = ...) -> dict[T, np.ndarray]: ...
    @overload
    def pull(self, table: TableLike, keys: Keys = ..., *, born: Literal[True]) -> Born: ...
    @overload
    def pull(self, table: Pulls[T], keys: None = ..., *, born: Literal[True]) -> dict[T, Born]: ...
    def pull(
        self,
        table: TableLike | Pulls[T],
        keys: Keys = None,
        out: np.ndarray | Outs[T] = None,
        born: bool = False,
    ) -> object:
        """Copy values of rows.

        Parameters
        ----------
        table : str, Table, or mapping of these to keys
            A table's name or handle; or, for several tables in one round trip, ``{table: keys}`` (and `out` a mapping
            too, if given).
        keys : array_like of int, slice or None
            int64 keys of any shape, repeats allowed; a sparse vector stands for its coordinates. For dense tables also
            a slice of rows, or None for all rows. For keyed tables also a slice ``slice(a, b)`` of keys: all rows that
            there are with keys from a to b - 1; ``slice(None)`` is all rows of the table. Its ends are keys, so -3 is
            the key -3.
        out : ndarray, optional
            Where to put the values: table dtype, C-contiguous, of the shape returned; not for a slice of keys.
        born : bool
            Tell also which of the rows there are: not for a slice of keys, nor with `out`.

        Returns
        -------
        ndarray, tuple or dict
            Table dtype, ``keys.shape + (dim,)``; without the last axis where dim is 1. Rows of a keyed table to
            which no op has come read as their initial value. For a slice of keys a pair: the keys, int64 and ascending,
            and their values. With `born` a pair: the values, and a bool for each key, which is True where the table has
            the row. Of several tables, a dict with the keys of the mapping.

        Notes
        -----
        A slice of keys is read in pieces, while other clients go on. Each row that is there during the whole call is
        given once. A row that is made or deleted meanwhile may or may not be given. Each row is whole, with its values
        at some moment of the call; those of two rows may be of different moments.

        Raises
        ------
        UnknownTableError, KeyRangeError, InputError, ServerGoneError, RequestTimeoutError

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dim=2)
        ...         client = ps.client()
        ...         client.push("w", [7], [[1.0, 2.0]])
        ...         client.pull("w", [7, 8])
        array([[1., 2.],
               [0., 0.]], dtype=float32)

        All rows with keys below 100:

        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w")
        ...         client = ps.client()
        ...         client.push("w", [7, 300, -5], [1.0, 2.0, 3.0])
        ...         keys, values = client.pull("w", slice(None, 100))
        ...         keys, values
        (array([-5,  7]), array([3., 1.], dtype=float32))
        """
        return self._calls.pull(table, keys, out, born) if born else self._calls.pull(table, keys, out)

    @overload
    def pull_async(self, table: TableLike, keys: Keys = ..., out: np.ndarray | None = ...) -> Pending[np.ndarray]: ...
    @overload
    def pull_async(self, table: Pulls[T], keys: None = ..., out: Outs[T] = ...) -> Pending[dict[T, np.ndarray]]: ...
    @overload
    def pull_async(self, table: TableLike, keys: Keys = ..., *, born: Literal[True]) -> Pending[Born]: ...
    @overload
    def pull_async(self, table: Pulls[T], keys: None = ..., *, born: Literal[True]) -> Pending[dict[T, Born]]: ...
    def pull_async(
        self, table: TableLike | Pulls[T], keys: Keys = None, out: np.ndarray | Outs[T] = None, born: bool = False
    ) -> Pending[object]:
        """As :meth:`pull`, but return at once: ``.result()`` waits for the values.

        At most `dps.limits.in-flight` calls are open; one more waits for the oldest.
        """
        return self._calls.pull_async(table, keys, out, born)

    @overload
    def pull_certified(self, table: TableLike, keys: Keys = ...) -> Certified: ...
    @overload
    def pull_certified(self, table: Pulls[T], keys: None = ...) -> dict[T, Certified]: ...
    def pull_certified(self, table: TableLike | Pulls[T], keys: Keys = None) -> object:
        """As :meth:`pull`, with the certificate of what the values contain.

        Parameters
        ----------
        table : str, Table, or mapping of these to keys
            As in :meth:`pull`.
        keys : array_like of int, slice or None
            As in :meth:`pull`, but no slice of keys.

        Returns
        -------
        ndarray, Certificate
            The values; and for each shard that they came from, the last op of every trainer that they contain. Of
            several tables, a dict of such pairs.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dtype="int64", shards=1)
        ...         client = ps.client()
        ...         client.push("w", [7], 1)
        ...         values, certificate = client.pull_certified("w", [7])
        >>> certificate.shards[0] == {client.origin: (-1, 0)}
        True
        """
        return self._calls.pull_certified(table, keys)

    @overload
    def pull_certified_async(self, table: TableLike, keys: Keys = ...) -> Pending[Certified]: ...
    @overload
    def pull_certified_async(self, table: Pulls[T], keys: None = ...) -> Pending[dict[T, Certified]]: ...
    def pull_certified_async(self, table: TableLike | Pulls[T], keys: Keys = None) -> Pending[object]:
        """As :meth:`pull_certified`, but return at once; ``.result()`` waits for the values and the certificate."""
        return self._calls.pull_certified_async(table, keys)

    def push(
        self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None, rows: int | None = None
    ) -> None:
        """Hand values (gradients) to the table's optimizer on the servers.

        Returns when every server has applied its part. A key that occurs several times gets the sum of its values, in
        one step.

        Parameters
        ----------
        table : str, Table, or mapping of these to (keys, values)
            A table's name or handle; or several tables in one round trip. What is wrong with one of several tables is
            found before anything is sent.
        keys : array_like of int, slice or None
            As in :meth:`pull`, but no slice of keys. A sparse vector, or a sparse matrix [rows, dim], may be given
            alone: of scipy, of the package sparse, or of torch (COO), such as the gradient of a sparse embedding.
        values : array_like
            ``keys.shape + (dim,)`` (or without the last axis where dim is 1), or one number for all. For a table with
            ``columns=`` also a dict with such values for each of its columns, by name.
        rows : int, optional
            For tables with ``aggregate="mean"``, by trainers: how many rows of data the values are the sum over. The
            sum of all pushes of a clock is then divided by the sum of their rows, instead of the number of trainers.
            Of two pushes of one batch to a table, one says 0. All pushes of a clock to a table say it, or none.

        Raises
        ------
        InputError
            Shapes or dtypes that do not fit; `rows` where there is no mean, or said by some pushes of a clock only.
        """
        self._calls.push(table, keys, values, rows)

    def push_async(
        self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None, rows: int | None = None
    ) -> Pending[None]:
        """As :meth:`push`, but return once the request is written; ``.result()`` waits.

        The arrays may be reused as soon as this returns.
        """
        return self._calls.push_async(table, keys, values, rows)

    def add(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Add values to rows, past the optimizer. Parameters as in :meth:`push`."""
        self._calls.add(table, keys, values)

    def add_async(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`add`, but return once the request is written; ``.result()`` waits."""
        return self._calls.add_async(table, keys, values)

    def assign(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Replace rows, past the optimizer; of a repeated key the last value counts. Parameters as in :meth:`push`."""
        self._calls.assign(table, keys, values)

    def assign_async(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`assign`, but return once the request is written; ``.result()`` waits."""
        return self._calls.assign_async(table, keys, values)

    def delete(self, table: TableLike | Pulls[T], keys: Keys = None) -> None:
        """Delete rows: they read as their initial values again, and a push makes them anew, with fresh state.

        A deletion counts once and at its trainer's clock, as a push does, and is in all copies of the rows when this
        returns. Of a keyed table the rows are gone: :meth:`keys`, checkpoints and exports do not have them, and the
        servers use their memory for other rows. The rows of a dense table stay, with their initial values and state.
        Keys without a row are passed over.

        In a table with ``aggregate=`` a deletion comes behind the sums of earlier clocks. What trainers push at the
        clock of the deletion itself is stepped when the clock ends, and makes the rows anew.

        Parameters
        ----------
        table : str, Table, or mapping of these to keys
            A table's name or handle; or several tables in one round trip.
        keys : array_like of int or slice
            As in :meth:`pull`; :meth:`clear` deletes all rows.

        Raises
        ------
        UnknownTableError, KeyRangeError, InputError, ServerGoneError, RequestTimeoutError

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         w = ps.table("w", init=dps.Constant(0.5))
        ...         w.add([5, 7], [1.0, 2.0])
        ...         w.delete([7, 8])
        ...         w.pull([5, 7]), len(w)
        (array([1.5, 0.5], dtype=float32), 1)
        """
        self._calls.delete(table, keys)

    def delete_async(self, table: TableLike | Pulls[T], keys: Keys = None) -> Pending[None]:
        """As :meth:`delete`, but return once the request is written; ``.result()`` waits."""
        return self._calls.delete_async(table, keys)

    def clear(self, table: TableLike | Mapping[T, None]) -> None:
        """Delete all rows of a table, as :meth:`delete` does: each shard's at once, and one shard after another.

        Parameters
        ----------
        table : str, Table, or mapping of these to None
            A table's name or handle; or several tables in one round trip, ``{table: None}``.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         w = ps.table("w")
        ...         w.push(range(100), 1.0)
        ...         w.clear()
        ...         len(w)
        0
        """
        self._calls.clear(table)

    def clear_async(self, table: TableLike | Mapping[T, None]) -> Pending[None]:
        """As :meth:`clear`, but return once the request is written; ``.result()`` waits."""
        return self._calls.clear_async(table)

    @overload
    def push_pull(
        self, table: TableLike, keys: Keys = ..., values: Values = ..., out: np.ndarray | None = ...
    ) -> np.ndarray: ...
    @overload
    def push_pull(
        self, table: Changes[T], keys: None = ..., values: None = ..., out: Outs[T] = ...
    ) -> dict[T, np.ndarray]: ...
    def push_pull(
        self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None, out: np.ndarray | Outs[T] = None
    ) -> object:
        """Push, and return the new values of the same rows, in one round trip.

        Parameters as in :meth:`push`; `out`, and what is returned, as in :meth:`pull`.
        """
        return self._calls.push_pull(table, keys, values, out)

    @overload
    def push_pull_async(
        self, table: TableLike, keys: Keys = ..., values: Values = ..., out: np.ndarray | None = ...
    ) -> Pending[np.ndarray]: ...
    @overload
    def push_pull_async(
        self, table: Changes[T], keys: None = ..., values: None = ..., out: Outs[T] = ...
    ) -> Pending[dict[T, np.ndarray]]: ...
    def push_pull_async(
        self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None, out: np.ndarray | Outs[T] = None
    ) -> Pending[object]:
        """As :meth:`push_pull`, but return once the request is written; ``.result()`` waits for the values."""
        return self._calls.push_pull_async(table, keys, values, out)

    def call(self, function: Function, table: TableLike | Pulls[T], /, keys: Keys = None, **arguments: object) -> Any:
        """Run a function on rows of a table, on the servers that have them.

        The effect of a function that changes rows counts once, as a push does, also where the task of its trainer is
        run again.

        Parameters
        ----------
        function : Function
            Made by :func:`dps.function`. A function that is not of dps itself has to be registered:
            :meth:`dps.ParameterServer.register`.
        table : str, Table, or mapping of these to keys
            A table's name or handle; or several tables, ``{table: keys}``. What a function does to one of several
            tables counts before it is called for the next one.
        keys : array_like of int, slice or None
            The rows, as in :meth:`pull`; a key counts once. None: all rows; of a keyed table those that there are.
        **arguments
            For the function: plain values and arrays of numpy.

        Returns
        -------
        object
            What its `merge` makes of the results of the parts; without one, the list of these. Of several tables, a
            dict with the keys of the mapping.

        Raises
        ------
        FunctionError, FunctionTimeoutError
            The function has failed, or was too slow. No row has changed.
        UnknownFunctionError
            It is not registered.

        Examples
        --------
        >>> import dps.functions.library as library
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", rows=4)
        ...         client = ps.client()
        ...         client.push("w", [0, 2], [3.0, 4.0])
        ...         client.call(library.nrm2, "w"), client.call(library.nnz, "w", keys=[0, 1])
        (5.0, 1)
        """
        return self._calls.call(function, table, keys, **arguments)

    def call_async(
        self, function: Function, table: TableLike | Pulls[T], /, keys: Keys = None, **arguments: object
    ) -> Pending[Any]:
        """As :meth:`call`, but return once the requests are written; ``.result()`` waits for the merged results.

        A function that changes rows has ended when this returns, and its errors are raised here, because servers hold
        its rows until all parts of the call have succeeded.
        """
        return self._calls.call_async(function, table, keys, **arguments)

    @overload
    def keys(self, table: TableLike, shard: int | None = ...) -> Iterator[np.ndarray]: ...
    @overload
    def keys(self, table: Mapping[T, int | None], shard: None = ...) -> dict[T, Iterator[np.ndarray]]: ...
    def keys(self, table: TableLike | Mapping[T, int | None], shard: int | None = None) -> object:
        """The keys of a keyed table that have rows, some at a time.

        Each key that has a row during the whole iteration comes once. One whose row is made or deleted meanwhile may or
        may not come.

        Parameters
        ----------
        table : str, Table, or mapping of these to shards
            A table's name or handle; or several tables, ``{table: shard}``, of which None means all shards.
        shard : int, optional
            Of this shard only.

        Returns
        -------
        iterator of ndarray of int64, or dict of these
            Shard after shard, in no particular order. Of several tables, a dict with the keys of the mapping.

        Raises
        ------
        UnknownTableError
            There is none, or it was restored or dropped meanwhile.
        """
        return self._calls.keys(table, shard)

    @overload
    def keys_async(self, table: TableLike, shard: int | None = ...) -> Pending[list[np.ndarray]]: ...
    @overload
    def keys_async(self, table: Mapping[T, int | None], shard: None = ...) -> Pending[dict[T, list[np.ndarray]]]: ...
    def keys_async(self, table: TableLike | Mapping[T, int | None], shard: int | None = None) -> Pending[object]:
        """As :meth:`keys`, but ask all shards at once and return; ``.result()`` waits for the list of arrays."""
        return self._calls.keys_async(table, shard)


class MergingVerbs(Verbs):
    """The verbs of a trainer: those of a client, and those that merge values by key until the trainer's next tick."""

    def increment(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Add values to rows, as :meth:`add` does, but merge them by key here, and send them at the next tick.

        Many small additions to few keys, such as counts, become one for each key and clock. The servers have them
        before the clock advances, so other trainers see them as they see pushes of this clock. Each counts once, also
        where the trainer's task is run again. :meth:`pull` does not see them before. If more keys are kept than
        ``dps.limits.merged-keys``, they are sent before the tick.

        Parameters
        ----------
        table : str, Table, PSVector, or mapping of these to (keys, values)
        keys : array_like of int, slice or None
            As in :meth:`push`.
        values : array_like
            As in :meth:`push`.

        Examples
        --------
        >>> def train(trainer, partitions):
        ...     for words in trainer.iterate(partitions, batch_size=3):
        ...         trainer.increment("counts", words, 1)
        ...         trainer.merge_max("longest", [0], trainer.clock)
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     _ = ps.table("counts", dtype="int64"), ps.table("longest", rows=1, dtype="int64")
        ...     _ = ps.run(train, np.array([7, 8, 7, 7, 9, 7]))
        ...     ps.client().pull("counts", [7, 8, 9]), ps.client().pull("longest")
        (array([4, 1, 1]), array([1]))
        >>> cluster.close()
        """
        self._merge("add", table, keys, values)

    def merge_max(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Let rows become the maximum of what they are and of values; merged and sent as in :meth:`increment`.

        A row of a keyed table that there is not yet counts with its initial value. NaN is larger than all numbers.
        """
        self._merge("maximum", table, keys, values)

    def merge_min(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Let rows become the minimum of what they are and of values; merged and sent as in :meth:`increment`."""
        self._merge("minimum", table, keys, values)

    def _merge(self, how: str, table: TableLike | Changes[T], keys: Keys, values: Values) -> None:
        """Keep values of a table, or of several, until the next tick."""
        raise NotImplementedError


def implements(verb: F) -> Callable[[Callable[..., object]], F]:
    """Let a method have the types and the signature of a verb, and by inheritance its documentation.

    The method stays the function that it is, because a small call feels each further one.
    """

    def typed(method: Any) -> F:
        method.__wrapped__ = verb  # whose signature `inspect` shows
        typed_method: F = method
        return typed_method

    return typed
