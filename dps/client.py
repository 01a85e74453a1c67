"""Client: pull, push, add, assign, push_pull.

It writes to all servers, then reads all answers, in the caller's thread. All it needs is a *ticket*: the controller's
address and the session secret. It pickles as its ticket, so it travels into tasks without dragging them anywhere.

The walk of a call: `inputs.py` makes keys and rows of what came in and refuses what is wrong, before anything is sent;
`state/partition.py` groups the keys by shard; `transfers.py` makes one frame for each server and run of neighbouring
shards (large ones are cut to `dps.limits.chunk`); `wire/channel.py` writes them. A `Pending` reads the answers into
place.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dps import config
from dps.calls import Pending, Ticket
from dps.dask_side import connecting_tls
from dps.errors import ClosedError, ControllerGoneError, DPSError, InputError, ServerGoneError, UnknownTableError
from dps.inputs import as_keys, as_rows, check_out, row_shape, split_sparse
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec
from dps.state.partition import Grouping, coalesce, group, sum_repeats
from dps.transfers import TableRoute, key_requests, range_requests
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header

__all__ = ["Client", "Pending", "Ticket"]

FLAGS = {PUSH: 0, ADD: frames.RULE_ADD, ASSIGN: frames.RULE_ASSIGN}
NO_ORDER = np.zeros(0, np.int32)


class Change(NamedTuple):
    """A push that has been checked and grouped, ready to be sent."""

    route: TableRoute
    rule: int
    target: Grouping | tuple[int, int]  # keys by shard, or (first row, end) of a dense table
    values: np.ndarray
    answered: np.ndarray | None  # where the new values go, if they were asked for


class Client:
    """Pull from and push to the tables of one parameter server.

    Made by :meth:`dps.ParameterServer.client`, or by unpickling one. It has no clock: it waits for nobody and holds
    nobody back. Safe to share between threads, which then take turns.

    Parameters
    ----------
    ticket : Ticket
        Which parameter server, and the right to use it.

    Attributes
    ----------
    seconds : dict
        Time spent so far: "pull", "push", and "wait" (for slower trainers).

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

    clock = NO_CLOCK
    trainer = 0
    parties = 1

    def __init__(self, ticket: Ticket):
        self.ticket = ticket
        self.seconds = {"pull": 0.0, "push": 0.0, "wait": 0.0}
        self._lock = threading.RLock()
        self._closed = False
        self._tls: Any = None
        self._controller_channel: Channel | None = None
        self._channels: dict[int, Channel] = {}
        self._servers: list[tuple[str, int]] = []
        self._tables: dict[str, TableRoute] = {}
        self._open: collections.deque[Pending] = collections.deque()  # asynchronous calls on their way
        self._failed: list[Pending] = []  # a push among them that failed
        self._most_open = config.count("limits.in-flight")
        self._chunk = config.nbytes("chunk")
        self._patience = config.seconds("request")
        self._number = 0

    def __reduce__(self) -> tuple[type, tuple[Ticket]]:
        return Client, (self.ticket,)

    def __repr__(self) -> str:
        return f"<dps.Client of {self.ticket.session!r}{' (closed)' if self._closed else ''}>"

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_channels"):
            self.close()

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
        return self.pull_async(table, keys, out).result()

    def push(self, table: str | Mapping[str, Any], keys: Any = None, values: Any = None) -> None:
        """Hand values (gradients) to the table's optimizer on the servers.

        Returns when every server has applied its part. A key that occurs several times gets the sum of its values, in
        one step.

        Parameters
        ----------
        table : str or mapping of str to (keys, values)
            A table's name; or several tables in one round trip.
        keys : array_like of int, slice or None
            As in :meth:`pull`. A sparse vector, or a sparse matrix [rows, dim], may be given alone.
        values : array_like
            ``keys.shape + (dim,)`` (or without the last axis where dim is 1), or one number for all.
        """
        if isinstance(table, Mapping):
            with self._lock:
                began = time.perf_counter()
                changes = [self._prepare(name, keys, values, PUSH) for name, (keys, values) in table.items()]
                waiting = [self._opened(self._send(change), began) for change in changes]
            for pending in waiting:
                pending.result()
        else:
            self.push_async(table, keys, values).result()

    def add(self, table: str, keys: Any = None, values: Any = None) -> None:
        """Add values to rows, past the optimizer. Parameters as in :meth:`push`."""
        self._push(table, keys, values, ADD).result()

    def assign(self, table: str, keys: Any = None, values: Any = None) -> None:
        """Replace rows, past the optimizer; of a repeated key the last value counts. Parameters as in :meth:`push`."""
        self._push(table, keys, values, ASSIGN).result()

    def push_pull(self, table: str, keys: Any = None, values: Any = None, out: Any = None) -> np.ndarray:
        """Push, and return the new values of the same rows, in one round trip. Parameters as in :meth:`push`."""
        return self.push_pull_async(table, keys, values, out).result()

    def pull_async(self, table: str, keys: Any = None, out: Any = None) -> Pending:
        """As :meth:`pull`, of one table, but return at once: ``.result()`` waits for the values.

        At most `dps.limits.in-flight` calls are open; one more waits for the oldest.
        """
        began = time.perf_counter()
        with self._lock:
            route = self._route(table)
            spec = route.spec
            sparse = split_sparse(table, spec, keys)
            rows = self._rows(route, keys) if sparse is None else None
            shape: tuple[int, ...]
            if rows is not None:
                shape = (rows[1] - rows[0],)
            else:
                flat, shape = as_keys(keys if sparse is None else sparse[0], table)
            answer = self._make_out(out, shape, spec)
            if rows is not None:
                requests = self._by_range(route, frames.PULL, 0, rows, out=answer)
            else:
                grouping = group(flat, spec.rows or 0, spec.shards, table)
                requests = self._by_keys(route, frames.PULL, 0, grouping, out=answer)
            return self._opened(Pending(self, "pull", requests, answer), began)

    def push_async(self, table: str, keys: Any = None, values: Any = None) -> Pending:
        """As :meth:`push`, of one table, but return once the request is written; ``.result()`` waits.

        The arrays may be reused as soon as this returns.
        """
        return self._push(table, keys, values, PUSH)

    def push_pull_async(self, table: str, keys: Any = None, values: Any = None, out: Any = None) -> Pending:
        """As :meth:`push_pull`, but return once the request is written; ``.result()`` waits for the values."""
        return self._push(table, keys, values, PUSH, answer=True, out=out)

    def wait(self) -> None:
        """Wait for all asynchronous calls; raise the error of a push whose result nobody has asked for."""
        if not self._open and not self._failed:
            return
        began = time.perf_counter()
        with self._lock:
            while self._open:
                self._finish(self._open.popleft())
            failed, self._failed = self._failed, []
        self.seconds["push"] += time.perf_counter() - began
        for pending in failed:
            if not pending._seen:
                pending.result()

    # -- inside

    def _push(self, table: str, keys: Any, values: Any, rule: int, answer: bool = False, out: Any = None) -> Pending:
        began = time.perf_counter()
        with self._lock:
            return self._opened(self._send(self._prepare(table, keys, values, rule, answer, out)), began)

    def _prepare(self, table: str, keys: Any, values: Any, rule: int, answer: bool = False, out: Any = None) -> Change:
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
        rows = self._rows(route, keys)
        target: Grouping | tuple[int, int]
        if rows is not None:
            shape: tuple[int, ...] = (rows[1] - rows[0],)
            target, array = rows, as_rows(values, shape, shape[0], spec)
        else:
            flat, shape = as_keys(keys, table)
            array = as_rows(values, shape, len(flat), spec)
            target = group(flat, spec.rows or 0, spec.shards, table)
        return Change(route, rule, target, array, self._make_out(out, shape, spec) if answer else None)

    def _send(self, change: Change) -> Pending:
        """Write the requests of a prepared push."""
        route, rule, target, values, answered = change
        spec = route.spec
        flags = FLAGS[rule] | (0 if answered is None else frames.ANSWER)
        self._number += 1
        if not isinstance(target, Grouping):
            requests = self._by_range(route, frames.PUSH, flags, target, values, answered)
            return Pending(self, "push", requests, answered)
        at_once = spec.aggregate is None or self.clock == NO_CLOCK  # else the servers sum, also repeats
        if rule == PUSH and at_once and spec.optimizer.repeats == "sum":
            merged = coalesce(target)
            if merged is not None:
                return self._push_merged(route, flags, target, merged, values, answered)
        if answered is not None and len(target.keys) * (8 + route.row_bytes) > self._chunk:
            # cut into several requests, a key may be repeated in a later one: ask when all have been applied
            requests = self._by_keys(route, frames.PUSH, FLAGS[rule], target, values)
            requests += self._by_keys(route, frames.PULL, 0, target, out=answered)
        else:
            requests = self._by_keys(route, frames.PUSH, flags, target, values, answered)
        return Pending(self, "push", requests, answered)

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
        if answered is None:
            return Pending(self, "push", self._by_keys(route, frames.PUSH, flags, distinct, sums))
        results = np.empty_like(sums)
        place = np.empty(len(target), np.int64)
        place[slice(None) if grouping.order is None else grouping.order] = target

        def spread() -> np.ndarray:
            answered.reshape(-1, dim)[:] = results[place]
            return answered

        return Pending(self, "push", self._by_keys(route, frames.PUSH, flags, distinct, sums, results), spread)

    def _opened(self, pending: Pending, began: float) -> Pending:
        """Account for a call that is on its way; make room if there are too many."""
        self.seconds[pending._verb] += time.perf_counter() - began
        self._open.append(pending)
        while self._open and (self._open[0].done or len(self._open) > self._most_open):
            self._finish(self._open.popleft())
        return pending

    def _finish(self, pending: Pending) -> None:
        """Wait until all servers have answered; keep an error of a push that nobody may ever ask for."""
        deadline = time.monotonic() + self._patience
        for request in pending._requests:
            if not request.done:
                request.channel.read_until(request, deadline)
            if request.error is not None and pending._verb == "push" and len(self._failed) < self._most_open:
                self._failed.append(pending)

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

    def _make_out(self, out: Any, shape: tuple[int, ...], spec: TableSpec) -> np.ndarray:
        full = row_shape(shape, spec)
        if out is None:
            return np.empty(full, spec.dtype)
        check_out(out, full, spec)
        return out

    def _header(self, kind: int, flags: int, spec: TableSpec) -> Header:
        number = self._number & 0xFFFFFFFF
        return Header(kind, flags, 0, spec.id, 0, self.trainer, number, self.clock, parties=self.parties)

    def _by_keys(
        self, route: TableRoute, kind: int, flags: int, grouping: Grouping, values: Any = None, out: Any = None
    ) -> list[Request]:
        """Write the requests for these keys; `values` and `out` of any shape, or None."""
        rows = None if out is None else out.reshape(-1, route.spec.dim)
        header = self._header(kind, flags, route.spec)
        return key_requests(route, header, grouping, values, rows, self._chunk, self._channel)

    def _by_range(
        self, route: TableRoute, kind: int, flags: int, rows: tuple[int, int], values: Any = None, out: Any = None
    ) -> list[Request]:
        """The same for a range of rows of a dense table."""
        answer = None if out is None else out.reshape(-1, route.spec.dim)
        header = self._header(kind, flags | frames.RANGE, route.spec)
        return range_requests(route, header, rows, values, answer, self._chunk, self._channel)

    # -- connections

    def _route(self, table: str) -> TableRoute:
        route = self._tables.get(table)
        if route is None or self._closed:
            self._refresh()
            route = self._tables.get(table)
            if route is None:
                known = ", ".join(map(repr, sorted(self._tables))) or "none"
                raise UnknownTableError(
                    f"parameter server {self.ticket.session!r} has no table {table!r}; it has {known}"
                )
        return route

    def forget_routes(self) -> None:
        """Ask the controller again, at the next call, what tables there are."""
        self._tables.clear()

    def _refresh(self) -> None:
        """Ask the controller who the servers are and what tables there are."""
        answer = self._ask_controller(Header(frames.ROUTE))
        self._servers = [(host, port) for host, port in answer["servers"]]
        self._tables = {
            t["spec"]["name"]: TableRoute(TableSpec.from_dict(t["spec"]), t["owners"]) for t in answer["tables"]
        }

    def _ask_controller(self, header: Header, value: Any = None, timeout: float | None = None) -> Any:
        """A request to the controller with a JSON body, answered by one."""
        deadline = time.monotonic() + (self._patience if timeout is None else timeout)
        body = b"" if value is None else frames.encode_json(value)
        with self._lock:
            answer = self._controller().ask(header, body).result(deadline)
        return frames.decode_json(answer.body) if answer.body else None

    def _controller(self) -> Channel:
        if self._closed:
            raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
        if self._controller_channel is None or self._controller_channel.closed:
            what = f"the controller of parameter server {self.ticket.session!r}"
            self._controller_channel = self._connect(self.ticket.controller, what, ControllerGoneError)
        return self._controller_channel

    def _channel(self, server: int) -> Channel:
        channel = self._channels.get(server)
        if channel is None or channel.closed:
            if self._closed:
                raise ClosedError(f"this client of parameter server {self.ticket.session!r} was closed; make a new one")
            host, port = self._servers[server]
            what = f"server {server} of parameter server {self.ticket.session!r} at {host}:{port}"
            channel = self._channels[server] = self._connect((host, port), what)
        return channel

    def _connect(self, address: tuple[str, int], what: str, gone: type[DPSError] = ServerGoneError) -> Channel:
        if self._tls is None:
            self._tls = connecting_tls(self.ticket.security)
        channel = Channel(address, self.ticket.session, self.ticket.secret, what, gone, self._tls)
        channel.idle = self._idle
        return channel

    def _idle(self) -> None:
        """Called now and then while waiting for an answer."""

    def close(self) -> None:
        """Close all connections. Anything not waited for is lost."""
        self._closed = True
        for channel in (self._controller_channel, *self._channels.values()):
            if channel is not None:
                channel.close()
        self._channels.clear()
        self._open.clear()
