"""Client: pull, push, add, assign, push_pull.

A client writes to all servers, then reads all answers, in the caller's thread. All it needs is a *ticket*: the
controller's address and the session secret. It pickles as its ticket, so that it travels into tasks without dragging
them anywhere.

A call is prepared in one compiled step, `call.pyx`: it is checked, its keys are grouped by shard, and it is cut
into one request for each server and run of neighbouring shards (large ones to `dps.limits.chunk`). Where its caller
waits and its connections are free, the same step sends it and takes its answers (`plain.py`). Else `requests.py`
prepares it, of any objects; `session.py` sends its requests, and again where a server has failed; and a `Pending` waits
for the answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, overload
from weakref import WeakKeyDictionary

import numpy as np

from dps.engine.client.environment import Environment
from dps.engine.client.functions import FunctionCaller
from dps.engine.client.inputs import as_keys, as_rows
from dps.engine.client.origin import Origin
from dps.engine.client.plain import DECLINED, PlainCalls
from dps.engine.client.requests import Prepared, TableRoute, outs_of, prepared_deletion, prepared_pull, prepared_push
from dps.engine.client.session import BACK_OFF_SECONDS, RETRIED, ClientSession
from dps.engine.client.table import (
    Certified,
    Changes,
    Keys,
    Outs,
    Pulls,
    T,
    Table,
    TableLike,
    Values,
    name_of,
    place_of,
    through,
)
from dps.engine.client.ticket import Certificate, Pending, SentCall, Ticket
from dps.engine.coordination.origins import encode_key
from dps.engine.daskapi.cordon import Execution, execution
from dps.engine.functions.definition import Function
from dps.engine.state.columns import ColumnLayout
from dps.engine.state.ops import ADD, ASSIGN, DELETE, NO_CLOCK, PUSH, TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import Scan
from dps.engine.wire.messages import OriginAnswer, OriginRequest, decode, encode
from dps.errors import DataLostError, InputError, InputTypeError, UnknownTableError

__all__ = ["Client", "Pending", "Ticket"]

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
KEYS_A_SCAN = 1 << 20
EVERY = object()  # in the place of a deletion's values: all rows go


@dataclasses.dataclass
class InTask:
    """A client as one execution of a Dask task has it: the origin of its ops there, once the controller has named it.

    `client` is how many others the task has pushed with before this one; `run` is Dask's number of the execution.
    """

    client: int
    origin: Origin = dataclasses.field(default_factory=Origin)
    run: int | None = None


class Client:
    """Pull from and push to the tables of one parameter server.

    Made by :meth:`dps.ParameterServer.client`, or by unpickling one. It has no clock: it neither waits for trainers nor
    holds them back. Safe to share between threads, which then take turns: one waits while another waits for an answer.
    :meth:`dps.ParameterServer.client` gives each thread one of its own.

    Parameters
    ----------
    ticket : Ticket
        Which parameter server, and the right to use it.
    environment : Environment, optional
        Time and connections: those of this process by default. An environment with a pool of connections is for
        a process that makes one client after another.
    session : ClientSession, optional
        The connections, where a trainer brings its own.
    check_aggregate : callable, optional
        Given the spec of a table that aggregates, before each push to it; may raise.
    rehearses : bool, optional
        Check pushes and drop them; one that is to be answered is a pull.

    Attributes
    ----------
    session : ClientSession
        Its connections and the calls on their way.

    Examples
    --------
    >>> import pickle
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     _ = ps.table("w", dtype="int64")
    ...     ps.client().push("w", [5, 7, 5], 1)
    ...     with pickle.loads(pickle.dumps(ps.client())) as elsewhere:
    ...         elsewhere.pull("w", [5, 6, 7])
    array([2, 0, 1])
    >>> cluster.close()
    """

    def __init__(
        self,
        ticket: Ticket,
        environment: Environment | None = None,
        session: ClientSession | None = None,
        check_aggregate: Callable[[TableSpec], None] | None = None,
        rehearses: bool = False,
    ):
        self.ticket = ticket
        self.session = session or ClientSession(ticket, environment)
        self._check_aggregate = check_aggregate
        self._plain = PlainCalls(self.session, check_aggregate)
        self._functions = FunctionCaller(self.session)
        self._rehearses = rehearses
        # Set while a trainer is replayed: what it pushes has been acknowledged. Not every shard could tell that it is a
        # repeat, because another attempt may push other keys, and a shard knows only the ops that it has rows of. So
        # pushes are not sent, and what is sent for its answer says that it is a repeat.
        self.replays = False
        self._in_tasks: WeakKeyDictionary[Execution, InTask] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<dps.Client of {self.ticket.session!r}{' (closed)' if self.session.closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def origin(self) -> int:
        """The number under which the servers know this client's ops; 0 before its first call."""
        return self.session.own.id

    @property
    def seconds_polled(self) -> float:
        """Seconds of processor time that calls have polled for their answers; see the setting ``dps.polling``."""
        return self.session.polling.spent

    def wait(self) -> None:
        """Wait for all asynchronous calls; raise the error of a push whose result was never asked for."""
        self.session.wait()

    def close(self) -> None:
        """Close all connections. What was not waited for is lost."""
        self.session.close()

    def forget_routes(self) -> None:
        """Ask the controller again, at the next call, what tables there are."""
        self.session.forget_routes()

    def __reduce__(self) -> tuple[type, tuple[Ticket]]:
        return Client, (self.ticket,)

    # -- verbs

    def table(self, table: TableLike) -> Table:
        """A handle of a table that there is, whose calls go through this client.

        Parameters
        ----------
        table : str or Table
            Its name, or a handle of it from elsewhere.

        Returns
        -------
        Table

        Raises
        ------
        UnknownTableError
            There is no table of that name.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", rows=3)
        ...         ps.client().table("w")
        <dps.Table 'w' of 'dps': 3 rows of dim 1, float32, Add>
        """
        if isinstance(table, Table):
            return through(self, table.spec)
        with self.session.lock:
            spec = self.session.route(table).spec
        return through(self, spec)

    def columns(self, table: TableLike) -> ColumnLayout:
        """Where the columns lie in the rows of a table that was made with ``columns=``.

        Parameters
        ----------
        table : str or Table

        Returns
        -------
        ColumnLayout
            A mapping from names to slices of a row, and :meth:`~dps.engine.state.columns.ColumnLayout.split`. Of
            other tables it is empty.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("fm", columns={"w": dps.Column(1), "v": dps.Column(2)})
        ...         client = ps.client()
        ...         client.push("fm", [7], {"w": 1.0, "v": [[2.0, 3.0]]})
        ...         rows, columns = client.pull("fm", [7, 8]), client.columns("fm")
        ...         rows[:, columns["v"]], columns.split(rows)["w"]
        (array([[2., 3.],
               [0., 0.]], dtype=float32), array([1., 0.], dtype=float32))
        """
        return self.table(table).spec.columns

    @overload
    def pull(self, table: TableLike, keys: Keys = ..., out: np.ndarray | None = ...) -> np.ndarray: ...
    @overload
    def pull(self, table: Pulls[T], keys: None = ..., out: Outs[T] = ...) -> dict[T, np.ndarray]: ...
    def pull(self, table: TableLike | Pulls[T], keys: Keys = None, out: np.ndarray | Outs[T] = None) -> object:
        """Copy values of a table, or of several in one round trip.

        Parameters
        ----------
        table : str, Table, or mapping of these to keys
            A table's name or handle; or, for several tables at once, ``{table: keys}`` (and `out` a mapping too, if
            given).
        keys : array_like of int, slice or None
            int64 keys of any shape, repeats allowed; a sparse vector stands for its coordinates. For dense tables also
            a slice of rows, or None for all rows.
        out : ndarray, optional
            Where to put the values: table dtype, C-contiguous, of the shape returned.

        Returns
        -------
        ndarray or dict of ndarray
            Table dtype, ``keys.shape + (dim,)``; without the last axis where dim is 1. Rows of a keyed table to
            which no op has come read as their initial value. Of several tables, a dict with the keys of the mapping.

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
        """
        if type(table) is str or isinstance(table, Table):
            with self.session.lock:
                values = self._plain.pull(table if isinstance(table, str) else table.name, keys, out)
        elif isinstance(table, Mapping):
            with self.session.lock:
                values = self._plain.pull_several(table, outs_of(out))
        else:
            values = DECLINED
        return self._pull(table, keys, out).result() if values is DECLINED else values

    @overload
    def pull_async(self, table: TableLike, keys: Keys = ..., out: np.ndarray | None = ...) -> Pending[np.ndarray]: ...
    @overload
    def pull_async(self, table: Pulls[T], keys: None = ..., out: Outs[T] = ...) -> Pending[dict[T, np.ndarray]]: ...
    def pull_async(
        self, table: TableLike | Pulls[T], keys: Keys = None, out: np.ndarray | Outs[T] = None
    ) -> Pending[object]:
        """As :meth:`pull`, but return at once: ``.result()`` waits for the values.

        At most `dps.limits.in-flight` calls are open; one more waits for the oldest.
        """
        return self._pull(table, keys, out, keep=True)

    @overload
    def pull_certified(self, table: TableLike, keys: Keys = ...) -> Certified: ...
    @overload
    def pull_certified(self, table: Pulls[T], keys: None = ...) -> dict[T, Certified]: ...
    def pull_certified(self, table: TableLike | Pulls[T], keys: Keys = None) -> object:
        """As :meth:`pull`, with the certificate of what the values contain.

        Parameters
        ----------
        table, keys
            As in :meth:`pull`.

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
        return self._pull(table, keys, None, certified=True).result()

    @overload
    def pull_certified_async(self, table: TableLike, keys: Keys = ...) -> Pending[Certified]: ...
    @overload
    def pull_certified_async(self, table: Pulls[T], keys: None = ...) -> Pending[dict[T, Certified]]: ...
    def pull_certified_async(self, table: TableLike | Pulls[T], keys: Keys = None) -> Pending[object]:
        """As :meth:`pull_certified`, but return at once; ``.result()`` waits for the values and the certificate."""
        return self._pull(table, keys, None, certified=True, keep=True)

    def push(
        self,
        table: TableLike | Changes[T],
        keys: Keys = None,
        values: Values = None,
        rows: int | None = None,
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
            As in :meth:`pull`. A sparse vector, or a sparse matrix [rows, dim], may be given alone: of scipy, of
            the package sparse, or of torch (COO), such as the gradient of a sparse embedding.
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
        if rows is not None or self._push_plainly(table, keys, values, PUSH) is DECLINED:
            self._push(table, keys, values, PUSH, rows=rows).result()

    def push_async(
        self,
        table: TableLike | Changes[T],
        keys: Keys = None,
        values: Values = None,
        rows: int | None = None,
    ) -> Pending[None]:
        """As :meth:`push`, but return once the request is written; ``.result()`` waits.

        The arrays may be reused as soon as this returns.
        """
        return self._push(table, keys, values, PUSH, keep=True, rows=rows)

    def add(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Add values to rows, past the optimizer. Parameters as in :meth:`push`."""
        if self._push_plainly(table, keys, values, ADD) is DECLINED:
            self._push(table, keys, values, ADD).result()

    def add_async(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`add`, but return once the request is written; ``.result()`` waits."""
        return self._push(table, keys, values, ADD, keep=True)

    def assign(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> None:
        """Replace rows, past the optimizer; of a repeated key the last value counts. Parameters as in :meth:`push`."""
        if self._push_plainly(table, keys, values, ASSIGN) is DECLINED:
            self._push(table, keys, values, ASSIGN).result()

    def assign_async(self, table: TableLike | Changes[T], keys: Keys = None, values: Values = None) -> Pending[None]:
        """As :meth:`assign`, but return once the request is written; ``.result()`` waits."""
        return self._push(table, keys, values, ASSIGN, keep=True)

    def delete(self, table: TableLike | Pulls[T], keys: Keys = None) -> None:
        """Delete rows: they read as their initial values again, and a push makes them anew, with fresh state.

        A deletion counts once and at its clock, as a push does, and is in all copies of the rows when this returns. Of
        a keyed table the rows are gone: :meth:`keys`, checkpoints and exports do not have them, and the servers use
        their memory for other rows. The rows of a dense table stay, with their initial values and state. Keys without a
        row are passed over.

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
        self.delete_async(table, keys).result()

    def delete_async(self, table: TableLike | Pulls[T], keys: Keys = None) -> Pending[None]:
        """As :meth:`delete`, but return once the request is written; ``.result()`` waits."""
        if isinstance(table, Mapping):
            named: Any = {each: (of_table, None) for each, of_table in table.items()}
            return self._push(named, None, None, DELETE, keep=True)
        return self._push(table, keys, None, DELETE, keep=True)

    def clear(self, table: TableLike) -> None:
        """Delete all rows of a table, as :meth:`delete` does: each shard's at once, and one shard after another.

        Parameters
        ----------
        table : str or Table

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
        self.clear_async(table).result()

    def clear_async(self, table: TableLike) -> Pending[None]:
        """As :meth:`clear`, but return once the request is written; ``.result()`` waits."""
        return self._push(table, None, EVERY, DELETE, keep=True)

    @overload
    def push_pull(
        self, table: TableLike, keys: Keys = ..., values: Values = ..., out: np.ndarray | None = ...
    ) -> np.ndarray: ...
    @overload
    def push_pull(
        self, table: Changes[T], keys: None = ..., values: None = ..., out: Outs[T] = ...
    ) -> dict[T, np.ndarray]: ...
    def push_pull(
        self,
        table: TableLike | Changes[T],
        keys: Keys = None,
        values: Values = None,
        out: np.ndarray | Outs[T] = None,
    ) -> object:
        """Push, and return the new values of the same rows, in one round trip.

        Parameters as in :meth:`push`; `out`, and what is returned, as in :meth:`pull`.
        """
        answer = self._push_plainly(table, keys, values, PUSH, answered=True, out=out)
        return self._push(table, keys, values, PUSH, True, out).result() if answer is DECLINED else answer

    @overload
    def push_pull_async(
        self, table: TableLike, keys: Keys = ..., values: Values = ..., out: np.ndarray | None = ...
    ) -> Pending[np.ndarray]: ...
    @overload
    def push_pull_async(
        self, table: Changes[T], keys: None = ..., values: None = ..., out: Outs[T] = ...
    ) -> Pending[dict[T, np.ndarray]]: ...
    def push_pull_async(
        self,
        table: TableLike | Changes[T],
        keys: Keys = None,
        values: Values = None,
        out: np.ndarray | Outs[T] = None,
    ) -> Pending[object]:
        """As :meth:`push_pull`, but return once the request is written; ``.result()`` waits for the values."""
        return self._push(table, keys, values, PUSH, True, out, keep=True)

    def call(self, function: Function, table: TableLike, /, keys: Keys = None, **arguments: Any) -> Any:
        """Run a function on rows of a table, on the servers that have them.

        Parameters
        ----------
        function : Function
            Made by :func:`dps.function`. A function that is not of dps itself has to be registered:
            :meth:`dps.ParameterServer.register`.
        table : str or Table
        keys : array_like of int, slice or None
            The rows, as in :meth:`pull`; a key counts once. None: all rows; of a keyed table those that there are.
        **arguments
            For the function: plain values and arrays of numpy.

        Returns
        -------
        object
            What its `merge` makes of the results of the parts; without one, the list of these.

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
        if not isinstance(function, Function):
            raise InputTypeError(f"call takes a function made by @dps.function, not {function!r}")
        session = self.session
        with session.lock:
            session.meter.begin(session.now())
            with self._as_task() if function.changes else NOTHING:
                try:
                    return self._functions.call(
                        function, name_of(table), keys, arguments, self._rehearses, self.replays
                    )
                finally:
                    session.meter.lap("push" if function.changes else "pull", session.now())

    def keys(self, table: TableLike, shard: int | None = None) -> Iterator[np.ndarray]:
        """The keys of a keyed table that have rows, some at a time; each once, those born meanwhile perhaps.

        Where rows are deleted meanwhile, others may be left out or come twice.

        Parameters
        ----------
        table : str or Table
        shard : int, optional
            Of this shard only.

        Yields
        ------
        ndarray of int64
            Shard after shard, in the order of their birth as long as no row was deleted.

        Raises
        ------
        UnknownTableError
            There is none, or it was restored or dropped meanwhile.
        """
        session = self.session
        with session.lock:
            spec = session.route(name_of(table)).spec
        if not spec.keyed:
            raise InputError(f"table {spec.name!r} is dense: its keys are the rows 0 to {(spec.rows or 0) - 1}")
        for number in range(spec.shards) if shard is None else [shard]:
            start, count = 0, KEYS_A_SCAN
            while count == KEYS_A_SCAN:
                with session.lock:
                    session.meter.begin(session.now())
                    keys = self._scan(spec, number, start, KEYS_A_SCAN)
                    session.meter.lap("pull", session.now())
                start, count = start + len(keys), len(keys)
                if count:
                    yield keys

    # -- inside

    def _pull(self, table: Any, keys: Keys, out: Any, certified: bool = False, keep: bool = False) -> Pending[Any]:
        """A pull on its way. With `keep`, the caller may change the keys before the answer is here."""
        several, session = isinstance(table, Mapping), self.session
        outs: Any = outs_of(out) if several else None
        prepared = []
        with session.lock:
            session.meter.begin(session.now())
            for each, named in table.items() if several else ((table, keys),):
                name, named, column = place_of(each, named)
                route = session.ready(name)
                terms, place = session.terms(route), outs.get(each) if several else out
                check_no_out(column, place)
                pull = prepared_pull(route, terms, session.acting, named, place, certified)
                prepared.append(of_column(pull, column))
            sent = session.send(prepared, keep)
        pending = on_their_way(sent, prepared, certified)
        return Pending.of_tables(dict(zip(table, pending, strict=True))) if several else pending[0]

    def _push(
        self,
        table: Any,
        keys: Keys,
        values: object,
        rule: int,
        answered: bool = False,
        out: Any = None,
        keep: bool = False,
        rows: int | None = None,
    ) -> Pending[Any]:
        """A push on its way. With `keep`, the caller may change the arrays before the push is acknowledged."""
        several, session = isinstance(table, Mapping), self.session
        outs: Any = outs_of(out) if several else None
        with session.lock:
            session.meter.begin(session.now())
            changes = []
            for each, (named, given) in table.items() if several else ((table, (keys, values)),):
                name, named, column = place_of(each, named)
                route = session.ready(name)
                if column is not None:
                    named, given = in_column(route, named, given, column, rule)
                changes.append((route, each, named, given, column))
            with self._as_task():
                prepared = []
                for route, each, named, given, column in changes:
                    if route.spec.aggregate is not None and self._check_aggregate is not None:
                        self._check_aggregate(route.spec)
                    terms, place = session.terms(route), outs.get(each) if several else out
                    check_no_out(column, place)
                    made = (
                        prepared_deletion(route, terms, session.acting, named, given is EVERY)
                        if rule == DELETE
                        else prepared_push(
                            route, terms, session.acting, named, given, rule, answered, place, rows, self.replays
                        )
                    )
                    prepared.append(of_column(made, column) if answered else made)
                if self._rehearses:
                    return self._rehearsed(table, keys, out, keep) if answered else Pending((), nothing)
                if self.replays and not answered:
                    session.skip(prepared)
                    return Pending((), nothing)
                sent = session.send(prepared, keep)
        if several and not answered:
            return Pending(sent, nothing)
        pending = on_their_way(sent, prepared)
        return Pending.of_tables(dict(zip(table, pending, strict=True))) if several else pending[0]

    def _rehearsed(self, table: Any, keys: Keys, out: Any, keep: bool) -> Pending[Any]:
        """What a push that is to be answered is in a rehearsal: a pull."""
        if isinstance(table, Mapping):
            table, keys = {each: named for each, (named, _) in table.items()}, None
        return self._pull(table, keys, out, keep=keep)

    def _push_plainly(
        self, table: Any, keys: Keys, values: object, rule: int, answered: bool = False, out: Any = None
    ) -> Any:
        """The result of a push whose caller waits, the plain way; DECLINED if it is not plain."""
        several = isinstance(table, Mapping)
        if self._rehearses or self.replays or not (several or type(table) is str or isinstance(table, Table)):
            return DECLINED
        session = self.session
        with session.lock:
            task = None if session.own.clock != NO_CLOCK else execution()
            with NOTHING if task is None else session.acting_as(self._origin_in(task)):
                if several:
                    return self._plain.push_several(table, rule, answered, outs_of(out))
                name = table if isinstance(table, str) else table.name
                return self._plain.push(name, keys, values, rule, answered, out)

    def _as_task(self) -> contextlib.AbstractContextManager[None]:
        """Within, ops are those of the Dask task that makes them, so that they count once if Dask runs it again.

        The task is looked for at each push, because tasks may share a client: one that was scattered, for instance, is
        unpickled once by each worker.
        """
        task = None if self.session.own.clock != NO_CLOCK else execution()
        return NOTHING if task is None else self.session.acting_as(self._origin_in(task))

    def _origin_in(self, task: Execution) -> Origin:
        """The origin of this client's ops in a task; asked of the controller once for each execution of the task."""
        known = self._in_tasks.get(task)
        if known is None:
            known = self._in_tasks[task] = InTask(task.clients[self.ticket.session])
            task.clients[self.ticket.session] += 1
        run = task.run
        if known.run != run:
            request = encode(OriginRequest(encode_key(task.key), run, known.client))
            answer = decode(OriginAnswer, self.session.ask_controller(Header(frames.ORIGIN), request).body)
            known.origin.id, known.origin.attempt, known.run = answer.origin, answer.attempt, run
        return known.origin

    def _scan(self, spec: TableSpec, shard: int, start: int, count: int) -> np.ndarray:
        """Up to `count` keys of a shard, behind the `start` oldest ones; asked again where the shard has moved."""
        session = self.session
        deadline = session.now() + session.patience
        while True:
            try:
                session.steady()
                route = session.route(spec.name)
                if route.spec.id != spec.id:
                    raise UnknownTableError(f"table {spec.name!r} was replaced while its keys were read; begin again")
                server = next(server for server, first, end in route.runs if first <= shard < end)
                if server < 0:
                    raise DataLostError(
                        f"table {spec.name!r}: the last copy of shard {shard} is gone; {session.remedy}"
                    )
                scan = Scan(spec.id, session.epoch, shard, start, count)
                answer = session.channel(server).ask(scan.header()).result(deadline)
                return np.frombuffer(bytes(answer.body), np.int64)
            except RETRIED as error:
                if isinstance(error, DataLostError) or session.now() > deadline:
                    raise
                session.sleep(BACK_OFF_SECONDS[1])
                session.recover(deadline)


def nothing() -> None:
    """The result of pushes that are not answered."""


def on_their_way(sent: list[SentCall], prepared: list[Prepared], certified: bool = False) -> list[Pending[Any]]:
    """The futures of calls that are sent."""
    if not certified:
        return [Pending((call,), each.finish) for call, each in zip(sent, prepared, strict=True)]
    return [
        Pending((call,), functools.partial(with_certificate, call, each.finish))
        for call, each in zip(sent, prepared, strict=True)
    ]


def with_certificate(call: SentCall, finish: Callable[[], np.ndarray | None]) -> Certified:
    """The result of a certified pull."""
    certificate = Certificate.read(call.requests)
    values = finish()
    assert values is not None
    return values, certificate


# ---- Columns: a sparse vector has a column of the table in which it lies beside others


def check_no_out(column: int | None, out: object) -> None:
    """Raise InputError if the values of a column are to be put into an array of the caller's."""
    if column is not None and out is not None:
        raise InputError("a pull of a sparse vector makes a new array: leave out= out")


def in_column(route: TableRoute, keys: Keys, values: Any, column: int, rule: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys, and whole rows that add values to a column, and zero to the others."""
    spec = route.spec
    if rule not in (PUSH, ADD):
        raise InputError("rows of a sparse vector are those of others, too: write v[keys] = values, and v[keys] = 0")
    flat, shape = as_keys(keys, spec.name)
    if values is None:
        raise InputError(f"table {spec.name!r}: a push takes keys and values; values are missing")
    rows = np.zeros((len(flat), spec.dim), spec.dtype)
    rows[:, column] = as_rows(values, shape, len(flat), dataclasses.replace(spec, dim=1))[:, 0]
    return flat, rows


def of_column(call: Prepared, column: int | None) -> Prepared:
    """The call, with the values of one column as its result."""
    if column is None:
        return call

    def finish() -> np.ndarray:
        rows = call.finish()
        assert rows is not None
        return np.ascontiguousarray(rows[..., column])

    return call._replace(finish=finish)
