"""Client: pull, push, add, assign, push_pull.

It writes to all servers, then reads all answers, in the caller's thread. All it needs is a *ticket*: the controller's
address and the session secret. It pickles as its ticket, so it travels into tasks without dragging them anywhere.

The walk of a call: `inputs.py` makes keys and rows of what came in and refuses what is wrong, before anything is sent;
`state/partition.py` groups the keys by shard; `transfers.py` cuts the call into one request for each server and run of
neighbouring shards (large ones to `dps.limits.chunk`); `delivery.py` writes them, and again where a server has failed.
A `Pending` reads the answers into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from dps.calls import Certificate, Pending, Ticket
from dps.coordination.origins import encode_key
from dps.cordon import Execution, execution
from dps.delivery import BACK_OFF, RETRIED, Courier
from dps.errors import DataLostError, InputError, UnknownTableError
from dps.inputs import as_keys, as_rows, check_out, row_shape, split_sparse
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec
from dps.state.partition import Grouping, coalesce, group, sum_repeats
from dps.transfers import Call, TableRoute
from dps.wire import frames
from dps.wire.frames import Header
from dps.wire.pool import Pool

__all__ = ["Client", "Pending", "Ticket"]

FLAGS = {PUSH: 0, ADD: frames.RULE_ADD, ASSIGN: frames.RULE_ASSIGN}
NO_ORDER = np.zeros(0, np.int32)
NO_ROWS = (0, 0)
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
SCAN = 1 << 20  # keys asked for at a time
MOST_ROWS = 1 << 31  # of data, that a push may stand for: fewer


class Change(NamedTuple):
    """A push that has been checked and grouped, ready to be sent."""

    route: TableRoute
    rule: int
    target: Grouping | tuple[int, int]  # keys by shard, or (first row, end) of a dense table
    values: np.ndarray
    answered: np.ndarray | None  # where the new values go, if they were asked for
    rows: int = -1  # of data that it stands for, in a mean over rows


@dataclasses.dataclass
class InTask:
    """A client as one execution of a Dask task has it: the origin and attempt of its ops, and the number of the next.

    `client` is how many others the task has pushed with before this one.
    """

    client: int
    origin: int = 0
    attempt: int = 0
    run: int | None = None
    number: int = 0


class Client(Courier):
    """Pull from and push to the tables of one parameter server.

    Made by :meth:`dps.ParameterServer.client`, or by unpickling one. It has no clock: it waits for nobody and holds
    nobody back. Safe to share between threads, which then take turns.

    Parameters
    ----------
    ticket : Ticket
        Which parameter server, and the right to use it.
    pool : dps.wire.pool.Pool, optional
        Where its connections come from, and go when it is closed: for processes that make one client after another.

    Attributes
    ----------
    seconds : dict
        Time spent so far: blocked in "pull" and "push", "wait" (for slower trainers), and "serialise": preparing calls.

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

    def __init__(self, ticket: Ticket, pool: Pool | None = None):
        super().__init__(ticket, pool)
        self._in_tasks: WeakKeyDictionary[Execution, InTask] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[Ticket]]:
        return Client, (self.ticket,)

    # -- verbs

    def pull(self, table: str | Mapping[str, Any], keys: Any = None, out: Any = None) -> Any:
        """Copy values of a table, or of several in one round trip.

        Parameters
        ----------
        table : str or mapping of str to keys
            A table's name; or, for several tables at once, ``{name: keys}`` (and `out` a mapping too, if given).
        keys : array_like of int, slice or None
            int64 keys of any shape, repeats allowed; a sparse vector stands for its coordinates. For dense tables also
            a slice of rows, or None for all rows.
        out : ndarray, optional
            Where to put the values: table dtype, C-contiguous, of the shape returned.

        Returns
        -------
        ndarray or dict of ndarray
            Table dtype, ``keys.shape + (dim,)``; without the last axis where dim is 1. Rows of a keyed table that
            nobody has pushed to read as their initial value.

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
        if isinstance(table, Mapping):
            outs = out or {}
            waiting = {name: self.pull_async(name, wanted, outs.get(name)) for name, wanted in table.items()}
            return {name: pending.result() for name, pending in waiting.items()}
        return self._pull(table, keys, out).result()

    def pull_certified(self, table: str, keys: Any = None) -> tuple[np.ndarray, Certificate]:
        """As :meth:`pull` of one table, with the certificate of what the values contain.

        Parameters
        ----------
        table, keys
            As in :meth:`pull`.

        Returns
        -------
        ndarray, Certificate
            The values; and for each shard that they came from, the last op of every trainer that they contain.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dtype="int64", shards=1)
        ...         client = ps.client()
        ...         client.push("w", [7], 1)
        ...         values, certificate = client.pull_certified("w", [7])
        >>> certificate.shards[0] == {client.trainer: (-1, 0)}
        True
        """
        return self._pull(table, keys, None, certified=True).result()

    def push(
        self, table: str | Mapping[str, Any], keys: Any = None, values: Any = None, rows: int | None = None
    ) -> None:
        """Hand values (gradients) to the table's optimizer on the servers.

        Returns when every server has applied its part. A key that occurs several times gets the sum of its values, in
        one step.

        Parameters
        ----------
        table : str or mapping of str to (keys, values)
            A table's name; or several tables in one round trip.
        keys : array_like of int, slice or None
            As in :meth:`pull`. A sparse vector, or a sparse matrix [rows, dim], may be given alone: of scipy, of
            the package sparse, or of torch (COO), such as the gradient of a sparse embedding.
        values : array_like
            ``keys.shape + (dim,)`` (or without the last axis where dim is 1), or one number for all.
        rows : int, optional
            For tables with ``aggregate="mean"``, by trainers: how many rows of data the values are the sum over. The
            sum of all pushes of a clock is then divided by the sum of their rows, instead of the number of trainers.
            Of two pushes of one batch to a table, one says 0. All pushes of a clock to a table say it, or none.

        Raises
        ------
        InputError
            Shapes or dtypes that do not fit; `rows` where there is no mean, or said by some pushes of a clock only.
        """
        if isinstance(table, Mapping):
            with self._lock:
                self.meter.begin(self._now())
                self._steady()
                changes = [self._prepare(name, k, v, PUSH, rows=rows) for name, (k, v) in table.items()]
                with self._as_task():
                    waiting = [self._opened(self._send(change)) for change in changes]
            for pending in waiting:
                pending.result()
        else:
            self.push_async(table, keys, values, rows).result()

    def add(self, table: str, keys: Any = None, values: Any = None) -> None:
        """Add values to rows, past the optimizer. Parameters as in :meth:`push`."""
        self._push(table, keys, values, ADD).result()

    def assign(self, table: str, keys: Any = None, values: Any = None) -> None:
        """Replace rows, past the optimizer; of a repeated key the last value counts. Parameters as in :meth:`push`."""
        self._push(table, keys, values, ASSIGN).result()

    def push_pull(self, table: str, keys: Any = None, values: Any = None, out: Any = None) -> np.ndarray:
        """Push, and return the new values of the same rows, in one round trip. Parameters as in :meth:`push`."""
        return self._push(table, keys, values, PUSH, answer=True, out=out).result()

    def pull_async(self, table: str, keys: Any = None, out: Any = None) -> Pending:
        """As :meth:`pull`, of one table, but return at once: ``.result()`` waits for the values.

        At most `dps.limits.in-flight` calls are open; one more waits for the oldest.
        """
        return self._pull(table, keys, out, keep=True)

    def push_async(self, table: str, keys: Any = None, values: Any = None, rows: int | None = None) -> Pending:
        """As :meth:`push`, of one table, but return once the request is written; ``.result()`` waits.

        The arrays may be reused as soon as this returns.
        """
        return self._push(table, keys, values, PUSH, keep=True, rows=rows)

    def push_pull_async(self, table: str, keys: Any = None, values: Any = None, out: Any = None) -> Pending:
        """As :meth:`push_pull`, but return once the request is written; ``.result()`` waits for the values."""
        return self._push(table, keys, values, PUSH, answer=True, out=out, keep=True)

    def keys(self, table: str, shard: int | None = None) -> Iterator[np.ndarray]:
        """The keys of a keyed table that have rows, some at a time; each once, those born meanwhile perhaps.

        Parameters
        ----------
        table : str
        shard : int, optional
            Of this shard only.

        Yields
        ------
        ndarray of int64
            Shard after shard, in the order of their birth.

        Raises
        ------
        UnknownTableError
            There is none, or it was restored or dropped meanwhile.
        """
        with self._lock:
            spec = self._route(table).spec
        if not spec.keyed:
            raise InputError(f"table {table!r} is dense: its keys are the rows 0 to {(spec.rows or 0) - 1}")
        for number in range(spec.shards) if shard is None else [shard]:
            start, found = 0, SCAN
            while found == SCAN:
                with self._lock:
                    self.meter.begin(self._now())
                    keys = self._scan(spec, number, start, SCAN)
                    self.meter.lap("pull", self._now())
                start, found = start + len(keys), len(keys)
                if found:
                    yield keys

    # -- inside

    def _pull(self, table: str, keys: Any, out: Any, certified: bool = False, keep: bool = False) -> Pending:
        with self._lock:
            self.meter.begin(self._now())
            self._steady()
            route = self._route(table)
            spec = route.spec
            sparse = split_sparse(table, spec, keys)
            rows = self._rows(route, keys) if sparse is None else None
            grouping, flags = None, frames.CERTIFICATE if certified else 0
            shape: tuple[int, ...]
            if rows is not None:
                shape, flags = (rows[1] - rows[0],), flags | frames.RANGE
            else:
                flat, shape = as_keys(keys if sparse is None else sparse[0], table)
                grouping = group(flat, spec.rows or 0, spec.shards, table)
            answer = self._make_out(out, shape, spec)
            values = answer.reshape(-1, spec.dim)
            call = Call(self._header(frames.PULL, flags, spec), grouping, rows or NO_ROWS, None, values)
            requests = self._start(route, call, keep)
            if not certified:
                return self._opened(Pending(self, "pull", requests, answer))
            pending = Pending(self, "pull", requests)
            pending._value = lambda: (answer, Certificate.read(pending._requests, spec))
            return self._opened(pending)

    def _push(
        self,
        table: str,
        keys: Any,
        values: Any,
        rule: int,
        answer: bool = False,
        out: Any = None,
        keep: bool = False,
        rows: int | None = None,
    ) -> Pending:
        """With `keep`, the caller may change the arrays before the push is acknowledged."""
        with self._lock:
            self.meter.begin(self._now())
            self._steady()
            change = self._prepare(table, keys, values, rule, answer, out, rows)
            with self._as_task():
                return self._opened(self._send(change, keep))

    def _as_task(self) -> contextlib.AbstractContextManager[None]:
        """Within, ops are those of the Dask task that makes them, so that they count once if Dask runs it again.

        It is looked for at each push, because tasks may share a client: one that was scattered, for instance, is
        unpickled once by each worker.
        """
        found = None if self.clock != NO_CLOCK else execution()
        return NOTHING if found is None else self._acting_in(found)

    @contextlib.contextmanager
    def _acting_in(self, found: Execution) -> Iterator[None]:
        task = self._in_tasks.get(found)
        if task is None:
            task = self._in_tasks[found] = InTask(found.clients[self.ticket.session])
            found.clients[self.ticket.session] += 1
        run = found.run
        if task.run != run:
            wish = {"task": encode_key(found.key), "run": run, "client": task.client}
            answer = self._ask_controller(Header(frames.ORIGIN), wish)
            task.origin, task.attempt, task.run = int(answer["origin"]), int(answer["attempt"]), run
        own = self.trainer, self.attempt, self._number
        self.trainer, self.attempt, self._number = task.origin, task.attempt, task.number
        try:
            yield
        finally:
            task.number = self._number
            self.trainer, self.attempt, self._number = own

    def _prepare(
        self,
        table: str,
        keys: Any,
        values: Any,
        rule: int,
        answer: bool = False,
        out: Any = None,
        rows: int | None = None,
    ) -> Change:
        """Everything that can be wrong with a push is found here, before anything of it, or of its fellows, is sent."""
        route = self._route(table)
        spec = route.spec
        if rule != PUSH and spec.optimizer.derived:
            name = type(spec.optimizer).__name__
            raise InputError(f"table {table!r}: {name} derives the values from its state; only push changes them")
        sparse = split_sparse(table, spec, keys)
        if sparse is not None:
            keys, values = sparse[0], sparse[1] if values is None else values
        if values is None:
            raise InputError(f"table {table!r}: a push takes keys and values; values are missing")
        weight = self._weight(spec, rows)
        span = self._rows(route, keys)
        target: Grouping | tuple[int, int]
        if span is not None:
            shape: tuple[int, ...] = (span[1] - span[0],)
            target, array = span, as_rows(values, shape, shape[0], spec)
        else:
            flat, shape = as_keys(keys, table)
            array = as_rows(values, shape, len(flat), spec)
            target = group(flat, spec.rows or 0, spec.shards, table)
        return Change(route, rule, target, array, self._make_out(out, shape, spec) if answer else None, weight)

    def _weight(self, spec: TableSpec, rows: int | None) -> int:
        """`rows` of a push, as they travel."""
        if rows is None:
            return -1
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)) or not 0 <= rows < MOST_ROWS:
            raise InputError(
                f"table {spec.name!r}: rows is how many rows of data a push stands for, 0 or more; not {rows!r}"
            )
        if spec.aggregate != "mean" or self.clock == NO_CLOCK:
            why = "this client has no clock" if spec.aggregate == "mean" else f"it has aggregate={spec.aggregate!r}"
            raise InputError(
                f"table {spec.name!r}: rows= weighs the pushes of trainers in a table with aggregate='mean', and {why}"
            )
        return int(rows)

    def _send(self, change: Change, keep: bool = False) -> Pending:
        """Write the requests of a prepared push."""
        route, rule, target, values, answered, weight = change
        spec = route.spec
        flags = FLAGS[rule] | (0 if answered is None else frames.ANSWER)
        rows = None if answered is None else answered.reshape(-1, spec.dim)
        if not isinstance(target, Grouping):
            header = self._header(frames.PUSH, flags | frames.RANGE, spec, weight)
            return Pending(self, "push", self._start(route, Call(header, None, target, values, rows), keep), answered)
        at_once = spec.aggregate is None or self.clock == NO_CLOCK  # else the servers sum, also repeats
        if rule == PUSH and at_once and spec.optimizer.repeats == "sum":
            merged = coalesce(target)
            if merged is not None:
                return self._push_merged(route, flags, target, merged, values, answered)
        call = Call(self._header(frames.PUSH, flags, spec, weight), target, NO_ROWS, values, rows)
        if answered is not None and len(target.keys) * (8 + route.row_bytes) > self._chunk:
            # cut into several requests, a key may be repeated in a later one: ask when all have been applied
            header = self._header(frames.PUSH, FLAGS[rule], spec)
            requests = self._start(route, call._replace(header=header, out=None), keep)
            pull = call._replace(header=self._header(frames.PULL, 0, spec), values=None)
            return Pending(self, "push", requests + self._start(route, pull, keep), answered)
        return Pending(self, "push", self._start(route, call, keep), answered)

    def _push_merged(
        self,
        route: TableRoute,
        flags: int,
        grouping: Grouping,
        merged: tuple[Grouping, np.ndarray],
        values: np.ndarray,
        answered: np.ndarray | None,
    ) -> Pending:
        """Push the sums of repeated keys; an answer is spread out to all the places that asked."""
        distinct, target = merged
        dim = route.spec.dim
        sums = np.empty((len(distinct.keys), dim), route.spec.dtype)
        sum_repeats(values, NO_ORDER if grouping.order is None else grouping.order, target, sums)
        results = None if answered is None else np.empty_like(sums)
        call = Call(self._header(frames.PUSH, flags, route.spec), distinct, NO_ROWS, sums, results)
        requests = self._start(route, call)
        if answered is None:
            return Pending(self, "push", requests)
        place = np.empty(len(target), np.int64)
        place[slice(None) if grouping.order is None else grouping.order] = target

        def spread() -> np.ndarray:
            assert results is not None
            answered.reshape(-1, dim)[:] = results[place]
            return answered

        return Pending(self, "push", requests, spread)

    def _rows(self, route: TableRoute, keys: Any) -> tuple[int, int] | None:
        """(first, end) where `keys` names a range of rows of a dense table."""
        if keys is not None and not isinstance(keys, slice):
            return None
        rows = route.spec.rows
        if rows is None:
            raise InputError(f"table {route.spec.name!r} is keyed: name the keys")
        start, stop, step = (keys or slice(None)).indices(rows)
        if step != 1:
            raise InputError(f"table {route.spec.name!r}: a slice of rows has step 1, not {step}; name the keys")
        return start, max(start, stop)

    def _scan(self, spec: TableSpec, shard: int, start: int, count: int) -> np.ndarray:
        """Up to `count` keys of a shard, behind the `start` oldest ones; asked again where the shard has moved."""
        deadline = self._now() + self._patience
        header = Header(frames.SCAN, table=spec.id, trainer=self.trainer, shard=shard, start=start, count=count)
        while True:
            try:
                self._steady()
                route = self._route(spec.name)
                if route.spec.id != spec.id:
                    raise UnknownTableError(f"table {spec.name!r} was replaced while its keys were read; begin again")
                server = next(server for server, first, end in route.runs if first <= shard < end)
                if server < 0:
                    raise DataLostError(f"table {spec.name!r}: the last copy of shard {shard} is gone; {self._remedy}")
                answer = self._channel(server).ask(header._replace(epoch=self._epoch)).result(deadline)
                return np.frombuffer(bytes(answer.body), np.int64)
            except RETRIED as error:
                if isinstance(error, DataLostError) or self._now() > deadline:
                    raise
                self._sleep(BACK_OFF[1])
                self._recover(deadline)

    def _make_out(self, out: Any, shape: tuple[int, ...], spec: TableSpec) -> np.ndarray:
        full = row_shape(shape, spec)
        if out is None:
            return np.empty(full, spec.dtype)
        check_out(out, full, spec)
        return out

    def _header(self, kind: int, flags: int, spec: TableSpec, rows: int = -1) -> Header:
        origin, attempt = (self._acting, 0) if self._acting else (self.trainer, self.attempt)
        who = (origin, 0, self.clock)
        return Header(kind, flags, 0, spec.id, self._epoch, *who, rows=rows, parties=self.parties, attempt=attempt)
