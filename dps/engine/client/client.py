"""Client: what carries out the verbs (`verbs.py`): pull, push, add, assign, push_pull and their kin.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from dps.engine.client.cached_tables import changing_all, send_changes
from dps.engine.client.environment import Environment
from dps.engine.client.forgotten import ForgottenKeys
from dps.engine.client.functions import FunctionCaller
from dps.engine.client.held_pushes import HeldPushes
from dps.engine.client.inputs import as_key_range, as_keys, as_rows
from dps.engine.client.origin import Origin
from dps.engine.client.plain import DECLINED, PlainCalls
from dps.engine.client.reads import readable
from dps.engine.client.requests import (
    Prepared,
    TableRoute,
    outs_of,
    prepared_born,
    prepared_deletion,
    prepared_pull,
    prepared_push,
)
from dps.engine.client.scans import RangeScan, Scans
from dps.engine.client.session import ClientSession
from dps.engine.client.table import Table, name_of, place_of, through
from dps.engine.client.ticket import Certificate, Pending, SentCall, Ticket
from dps.engine.client.verbs import Certified, Keys, Pulls, T, TableLike, Verbs, implements
from dps.engine.client.word_table import Confirmed, WordTable
from dps.engine.coordination.origins import encode_key
from dps.engine.daskapi.cordon import Execution, execution
from dps.engine.functions.definition import Function
from dps.engine.functions.words import WordLayout
from dps.engine.state.columns import ColumnLayout
from dps.engine.state.ops import ADD, ASSIGN, DELETE, NO_CLOCK, PUSH, TableSpec
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import OriginAnswer, OriginRequest, decode, encode
from dps.errors import InputError, InputTypeError

__all__ = ["Client", "Pending", "Ticket"]

NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
EVERY = object()  # in the place of a deletion's values: all rows go


@dataclasses.dataclass
class InTask:
    """A client as one execution of a Dask task has it: the origin of its ops there, once the controller has named it.

    `client` is how many others the task has pushed with before this one; `run` is Dask's number of the execution.
    """

    client: int
    origin: Origin = dataclasses.field(default_factory=Origin)
    run: int | None = None


class Client(Verbs):
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
        self._functions, self._scans = FunctionCaller(self.session), Scans(self.session)
        self.rehearses = rehearses
        # Set while a trainer is replayed: what it pushes has been acknowledged. Not every shard could tell that it is a
        # repeat, because another attempt may push other keys, and a shard knows only the ops that it has rows of. So
        # pushes are not sent, and what is sent for its answer says that it is a repeat.
        self.replays = False
        self.held: HeldPushes | None = None  # a trainer's, because a trainer may hold rows back
        self._in_tasks: WeakKeyDictionary[Execution, InTask] = WeakKeyDictionary()
        self._confirmed: dict[str, Confirmed] = {}  # by vocabulary
        self._beside: Client | None = None  # a client without a clock, where this one has a clock

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
        if self._beside is not None:
            self._beside.close()

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
            spec = self.session.route(name_of(table)).spec
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

    def vocabulary(self, name: str) -> WordTable:
        """The words and ids of a vocabulary that there is: :meth:`dps.ParameterServer.vocabulary` makes one.

        Parameters
        ----------
        name : str

        Returns
        -------
        WordTable

        Raises
        ------
        UnknownTableError
            There is no table of that name.
        InputError
            The table of that name is no vocabulary.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ids = ps.vocabulary("words").ids(["a", "rose"])
        ...         ps.client().vocabulary("words").words(ids)
        ['a', 'rose']
        """
        WordLayout.of(self.spec_of(name))
        return WordTable(name, self._without_clock(), self, confirmed=self._confirmed.setdefault(name, Confirmed()))

    def spec_of(self, table: str) -> TableSpec:
        """The definition of a table, UnknownTableError if there is none of that name."""
        with self.session.lock:
            return self.session.ready(table).spec

    def call_for_itself(self, function: Function, table: str, keys: Keys, **arguments: object) -> object:
        """As :meth:`call`, in the name of this client and of no Dask task or trainer.

        For functions that change nothing the second time. A task that is run again calls them with what has no effect
        yet, so its calls are others than those of the attempt before, and must not be taken for these.
        """
        session = self.session
        with session.lock:
            session.meter.begin(session.now())
            try:
                return self._functions.call(function, table, keys, arguments, self.rehearses)
            finally:
                session.meter.lap("push", session.now())

    def _without_clock(self) -> Client:
        """This client, or one beside it that has no clock: it waits for no trainer, and has an origin of its own."""
        if self.session.own.clock == NO_CLOCK:
            return self
        if self._beside is None or self._beside.session.closed:
            self._beside = Client(self.ticket, self.session.environment)
            with self._beside.session.lock:  # the controller is there, so a first connection that breaks is made again
                self._beside.session.insist(self._beside.session.fetch_route, known=True)
        return self._beside

    @implements(Verbs.pull)
    def pull(self, table: object, keys: Keys = None, out: object = None, born: bool = False) -> object:
        if born:
            return self._pull(table, keys, out, born=True).result()
        if type(table) is str or isinstance(table, Table):
            with self.session.lock:
                values = self._plain.pull(table if isinstance(table, str) else table.name, keys, out)
        elif isinstance(table, Mapping):
            with self.session.lock:
                values = self._plain.pull_several(table, outs_of(out))
        else:
            values = DECLINED
        return self._pull(table, keys, out).result() if values is DECLINED else values

    @implements(Verbs.pull_async)
    def pull_async(self, table: object, keys: Keys = None, out: object = None, born: bool = False) -> object:
        return self._pull(table, keys, out, keep=True, born=born)

    def pull_ahead(self, tables: Pulls[T], clocks: int) -> Pending[dict[T, np.ndarray]]:
        """As :meth:`pull_async`, of rows for a clock that comes so many clocks after this one."""
        return self._pull(tables, None, None, keep=True, ahead=clocks)  # type: ignore[return-value]

    @implements(Verbs.pull_certified)
    def pull_certified(self, table: object, keys: Keys = None) -> object:
        return self._pull(table, keys, None, certified=True).result()

    @implements(Verbs.pull_certified_async)
    def pull_certified_async(self, table: object, keys: Keys = None) -> object:
        return self._pull(table, keys, None, certified=True, keep=True)

    @implements(Verbs.push)
    def push(self, table: object, keys: Keys = None, values: object = None, rows: int | None = None) -> None:
        if rows is not None or self._push_plainly(table, keys, values, PUSH) is DECLINED:
            self._push(table, keys, values, PUSH, rows=rows).result()

    @implements(Verbs.push_async)
    def push_async(self, table: object, keys: Keys = None, values: object = None, rows: int | None = None) -> object:
        return self._push(table, keys, values, PUSH, keep=True, rows=rows)

    @implements(Verbs.add)
    def add(self, table: object, keys: Keys = None, values: object = None) -> None:
        if self._push_plainly(table, keys, values, ADD) is DECLINED:
            self._push(table, keys, values, ADD).result()

    @implements(Verbs.add_async)
    def add_async(self, table: object, keys: Keys = None, values: object = None) -> object:
        return self._push(table, keys, values, ADD, keep=True)

    @implements(Verbs.assign)
    def assign(self, table: object, keys: Keys = None, values: object = None) -> None:
        if self._push_plainly(table, keys, values, ASSIGN) is DECLINED:
            self._push(table, keys, values, ASSIGN).result()

    @implements(Verbs.assign_async)
    def assign_async(self, table: object, keys: Keys = None, values: object = None) -> object:
        return self._push(table, keys, values, ASSIGN, keep=True)

    @implements(Verbs.delete)
    def delete(self, table: TableLike | Pulls[T], keys: Keys = None) -> None:
        self.delete_async(table, keys).result()

    @implements(Verbs.delete_async)
    def delete_async(self, table: object, keys: Keys = None) -> object:
        if isinstance(table, Mapping):
            table, keys = {each: (of_table, None) for each, of_table in table.items()}, None
        return self._push(table, keys, None, DELETE, keep=True)

    @implements(Verbs.clear)
    def clear(self, table: TableLike | Mapping[T, None]) -> None:
        self.clear_async(table).result()

    @implements(Verbs.clear_async)
    def clear_async(self, table: object) -> object:
        if isinstance(table, Mapping):
            named = [each for each, keys in table.items() if keys is not None]
            if named:
                raise InputError(
                    f"clear deletes all rows: {{table: None}}, without keys for table {name_of(named[0])!r}"
                )
            table = dict.fromkeys(table, (None, EVERY))
        return self._push(table, None, EVERY, DELETE, keep=True)

    @implements(Verbs.push_pull)
    def push_pull(self, table: object, keys: Keys = None, values: object = None, out: object = None) -> object:
        answer = self._push_plainly(table, keys, values, PUSH, answered=True, out=out)
        return self._push(table, keys, values, PUSH, True, out).result() if answer is DECLINED else answer

    @implements(Verbs.push_pull_async)
    def push_pull_async(self, table: object, keys: Keys = None, values: object = None, out: object = None) -> object:
        return self._push(table, keys, values, PUSH, True, out, keep=True)

    @implements(Verbs.call)
    def call(self, function: object, table: TableLike | Pulls[T], /, keys: Keys = None, **arguments: object) -> object:
        if isinstance(table, Mapping):
            return {each: self.call(checked(function), each, some, **arguments) for each, some in table.items()}
        function, session = checked(function), self.session
        with session.lock:
            session.meter.begin(session.now())
            with self._as_task() if function.changes else NOTHING, changing_all(session, function, name_of(table)):
                try:
                    return self._functions.call(function, name_of(table), keys, arguments, self.rehearses, self.replays)
                finally:
                    session.meter.lap("push" if function.changes else "pull", session.now())

    @implements(Verbs.call_async)
    def call_async(
        self, function: object, table: TableLike | Pulls[T], /, keys: Keys = None, **arguments: object
    ) -> object:
        if isinstance(table, Mapping):
            pending = {
                each: self.call_async(checked(function), each, some, **arguments) for each, some in table.items()
            }
            return Pending.of_tables(pending)
        function, session = checked(function), self.session
        if function.changes:
            result = self.call(function, table, keys, **arguments)
            return Pending((), lambda: result)
        with session.lock:
            session.meter.begin(session.now())
            try:
                return self._functions.send(function, name_of(table), keys, arguments)
            finally:
                session.meter.lap("pull", session.now())

    @implements(Verbs.keys)
    def keys(self, table: TableLike | Mapping[T, int | None], shard: int | None = None) -> object:
        if isinstance(table, Mapping):
            return {each: self._scans.iterate(name_of(each), some) for each, some in table.items()}
        return self._scans.iterate(name_of(table), shard, getattr(getattr(table, "spec", table), "shard_map", None))

    @implements(Verbs.keys_async)
    def keys_async(self, table: TableLike | Mapping[T, int | None], shard: int | None = None) -> object:
        if isinstance(table, Mapping):
            return Pending.of_tables({each: self._scans.send_keys(name_of(each), some) for each, some in table.items()})
        return self._scans.send_keys(name_of(table), shard)

    def forgotten(self, table: TableLike, since: Sequence[int] | None = None) -> ForgottenKeys:
        """The keys of rows of a table that went by themselves: see :meth:`dps.ParameterServer.forgotten`.

        Parameters
        ----------
        table : str or Table
            Made with ``remember=``.
        since : sequence of int, optional
            The `position` of an earlier reader.

        Returns
        -------
        ForgottenKeys

        Raises
        ------
        UnknownTableError
            There is no table of that name.
        InputError
            The table does not remember keys, or `since` is no position in it.
        """
        return ForgottenKeys(self.session, name_of(table), since)

    # -- inside

    def _pull(
        self,
        table: Any,
        keys: Keys,
        out: object,
        certified: bool = False,
        keep: bool = False,
        born: bool = False,
        ahead: int = 0,
    ) -> Pending[object]:
        """A pull on its way, for use so many clocks `ahead`. With `keep`, the caller may change the keys before the
        answer is here."""
        several, session, cached = isinstance(table, Mapping), self.session, self.session.cached
        outs: Any = outs_of(out) if several else None
        asked: list[Prepared | RangeScan | Pending[object]] = []
        with session.lock:
            session.meter.begin(session.now())
            for each, named in table.items() if several else ((table, keys),):
                name, named, column = place_of(each, named)
                route = readable(session, name)
                terms, place = session.terms(route), outs.get(each) if several else out
                check_no_out(column, place)
                if born:
                    check_whole_rows(column, name)
                    asked.append(prepared_born(route, terms, session.acting, named, place))
                elif isinstance(named, slice) and route.spec.keyed and column is None:
                    asked.append(prepared_scan(route.spec, named, place, certified))
                elif cached is not None and not certified and column is None and cached.has(route.spec, named):
                    asked.append(cached.pull(route, terms, named, place, keep, ahead))
                else:
                    asked.append(
                        of_column(prepared_pull(route, terms, session.acting, named, place, certified), column)
                    )
            prepared = [each for each in asked if isinstance(each, Prepared)]
            calls = iter(on_their_way(session.send(prepared, keep), prepared, certified))
            pending = [
                self._scans.send(each)
                if isinstance(each, RangeScan)
                else each
                if isinstance(each, Pending)
                else next(calls)
                for each in asked
            ]
        return Pending.of_tables(dict(zip(table, pending, strict=True))) if several else pending[0]

    def _push(
        self,
        table: Any,
        keys: Keys,
        values: object,
        rule: int,
        answered: bool = False,
        out: object = None,
        keep: bool = False,
        rows: int | None = None,
    ) -> Pending[object]:
        several, session = isinstance(table, Mapping), self.session
        outs: Any = outs_of(out) if several else None
        with session.lock:
            session.meter.begin(session.now())
            changes = []
            for each, (named, given) in table.items() if several else ((table, (keys, values)),):
                name, named, column = place_of(each, named)
                route = readable(session, name) if answered else session.ready(name)
                if column is not None:
                    named, given = in_column(route, named, given, column, rule)
                changes.append((route, each, named, given, column))
            if self.held is not None:
                travels = self.held.push(changes, rule, answered or rows is not None)
                if travels is not None:
                    return Pending(travels, nothing)
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
                if self.rehearses:
                    return self._rehearsed(table, keys, out, keep) if answered else Pending((), nothing)
                if self.replays and not answered:
                    session.skip(prepared)
                    return Pending((), nothing)
                named_rows = [(route, some, given) for route, _, some, given, _ in changes]
                sent = send_changes(session, named_rows, prepared, rule, keep)
        if several and not answered:
            return Pending(sent, nothing)
        pending = on_their_way(sent, prepared)
        return Pending.of_tables(dict(zip(table, pending, strict=True))) if several else pending[0]

    def _rehearsed(self, table: Any, keys: Keys, out: object, keep: bool) -> Pending[object]:
        """What a push that is to be answered is in a rehearsal: a pull."""
        if isinstance(table, Mapping):
            table, keys = {each: named for each, (named, _) in table.items()}, None
        return self._pull(table, keys, out, keep=keep)

    def _push_plainly(
        self, table: Any, keys: Keys, values: object, rule: int, answered: bool = False, out: object = None
    ) -> object:
        """The result of a push whose caller waits, the plain way; DECLINED if it is not plain."""
        several = isinstance(table, Mapping)
        if self.rehearses or self.replays or not (several or type(table) is str or isinstance(table, Table)):
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


def checked(function: object) -> Function:
    if not isinstance(function, Function):
        raise InputTypeError(f"call takes a function made by @dps.function, not {function!r}")
    return function


def nothing() -> None:
    """The result of pushes that are not answered."""


def on_their_way(sent: list[SentCall], prepared: list[Prepared], certified: bool = False) -> list[Pending[object]]:
    if not certified:
        return [Pending((call,), each.finish) for call, each in zip(sent, prepared, strict=True)]
    return [
        Pending((call,), functools.partial(with_certificate, call, each.finish))
        for call, each in zip(sent, prepared, strict=True)
    ]


def prepared_scan(spec: TableSpec, keys: slice, out: object, certified: bool) -> RangeScan:
    if out is not None:
        raise InputError(f"table {spec.name!r}: a pull of a range of keys makes new arrays: leave out= out")
    if certified:
        raise InputError(
            f"table {spec.name!r} is keyed: a certified pull names the keys, because a range comes in pieces"
        )
    return RangeScan(spec, as_key_range(keys, spec.name), True)


def with_certificate(call: SentCall, finish: Callable[[], np.ndarray | None]) -> Certified:
    certificate = Certificate.read(call.requests)
    values = finish()
    assert values is not None
    return values, certificate


# ---- Columns: a sparse vector has a column of the table in which it lies beside others


def check_no_out(column: int | None, out: object) -> None:
    if column is not None and out is not None:
        raise InputError("a pull of a sparse vector makes a new array: leave out= out")


def check_whole_rows(column: int | None, table: str) -> None:
    if column is not None:
        raise InputError(f"a sparse vector is a column of table {table!r}: pull the table with born=True")


def in_column(route: TableRoute, keys: Keys, values: object, column: int, rule: int) -> tuple[np.ndarray, np.ndarray]:
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
    if column is None:
        return call

    def finish() -> np.ndarray:
        rows = call.finish()
        assert rows is not None
        return np.ascontiguousarray(rows[..., column])

    return call._replace(finish=finish)
