"""The plain way of a call: prepared, sent and answered in compiled steps, where nothing is unusual.

`core/call.pyx` prepares a call, and `core/exchange.pyx` makes one whose caller waits. This file decides what is plain,
and hands over to the general way (`requests.py`, `session.py`) what turns out not to be. A call is declined before
anything is sent. A call that was sent and has not got all its answers becomes an ordinary call on its way, under its
own numbers, so it counts once however it ends.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dps import config
from dps.client.changes import FLAGS
from dps.client.requests import Call, Leg, TableRoute
from dps.client.session import RETRIED, ClientSession
from dps.client.table import Keys, Table, TableLike
from dps.client.ticket import Pending, SentCall
from dps.core import call as core
from dps.core.call import LAST_NUMBER
from dps.core.exchange import BUSY, DECLINED, OPEN, Exchange, Wires
from dps.core.form import Form
from dps.errors import RequestTimeoutError
from dps.state.ops import ADD, ASSIGN, NO_CLOCK, PUSH, TableSpec
from dps.state.partition import Grouping, shard_bits
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header

__all__ = ["DECLINED", "PlainCalls"]


class PlainTable:
    """A table as the plain way knows it, for as long as its route lasts.

    Attributes
    ----------
    pull : Terms
    changes : dict
        The terms of the changes that the table takes, by rule and whether new values come back.
    check : callable or None
        Given the spec before each push; may raise.
    """

    def __init__(
        self,
        route: TableRoute,
        channels: list[Channel],
        session: ClientSession,
        check_aggregate: Callable[[TableSpec], None] | None,
    ):
        spec = self.spec = route.spec
        runs = [(first, end) for _, first, end in route.runs]
        kind, bits = np.dtype(spec.dtype).num, 0 if spec.rows else shard_bits(spec.shards)
        form = Form(spec.id, kind, spec.dim, spec.rows or 0, spec.shards, bits, spec.finite, runs)
        self.route, self.wires = route, Wires(channels)
        self.check = None if spec.aggregate is None else check_aggregate
        at_once = spec.aggregate is None or session.own.clock == NO_CLOCK  # else the servers sum, also repeats
        sums = at_once and spec.optimizer.repeats == "sum"
        common = form, session.epoch, session.chunk
        self.pull = core.Terms(*common, frames.PULL, 0, False, True, False)
        self.changes = {
            (rule, answered): core.Terms(
                *common, frames.PUSH, FLAGS[rule] | (frames.ANSWER if answered else 0), True, answered, merges
            )
            for rule, merges in ((PUSH, sums), (ADD, False), (ASSIGN, False))
            for answered in (False, True)
            if rule == PUSH or not spec.optimizer.derived
        }


class Posted:
    """A call on its way, as the general way has it: made when a request has to be sent again."""

    def __init__(self, call: core.Call):
        self._call = call

    @functools.cached_property
    def whole(self) -> Call:
        """The call, with copies of all that was sent."""
        call, grouping = self._call, self._call.grouping
        grouped = None if grouping is None else Grouping(*grouping, False)
        return Call(Header(**call.fields), grouped, call.span, call.pushed, call.places)

    def leg(self, n: int) -> Leg:
        """One leg of the call."""
        return Leg(self.whole, *self._call.parts[n][1:])

    def request(self, n: int, channel: Channel) -> Request:
        """The request of a leg, for its channel."""
        part, terms = core.Part(self._call, n), self._call.terms
        request = Request(channel, part if terms.answered else None, part.size, terms.kind, part)
        request.leg = functools.partial(self.leg, n)
        return request


class PlainCalls:
    """The plain calls of one session. Each method returns DECLINED where the call has to go the general way.

    They are called under the session's lock.

    Parameters
    ----------
    session : ClientSession
        Its connections.
    check_aggregate : callable or None
        Given the spec of a table that aggregates, before each push to it; may raise.
    """

    def __init__(self, session: ClientSession, check_aggregate: Callable[[TableSpec], None] | None = None):
        self._session, self._check_aggregate = session, check_aggregate
        self._exchange = Exchange(session.polling, session.now, session.meter, self._idle)
        self._tables: dict[str, PlainTable] = {}
        # When a server was last found to keep the caller waiting: when the call began, the server's channel, the bytes
        # of a message that were to come; and until when it may go on so.
        self._moving: tuple[float, Channel, int] | None = None
        self._until = 0.0

    def pull(self, name: str, keys: Keys, out: object) -> Any:
        """The values."""
        table = self._known(name)
        if table is None:
            return DECLINED
        return self._make(table, table.pull, keys, None, out)

    def push(self, name: str, keys: Keys, values: object, rule: int, answered: bool, out: object) -> Any:
        """The new values or, where they are not `answered`, None."""
        table = self._known(name)
        if table is None:
            return DECLINED
        if table.check is not None:
            table.check(table.spec)
        terms = table.changes.get((rule, answered))
        return DECLINED if terms is None else self._make(table, terms, keys, values, out)

    def pull_async(self, wanted: Mapping[Any, Keys], outs: Mapping[Any, object], keep: bool) -> Any:
        """For each table, by its name or handle, a pull on its way. With `keep`, the caller may change the keys."""
        prepared = []
        self._session.meter.begin(self._session.now())
        for each, keys in wanted.items():
            table = self._open(each)
            if table is None:
                return DECLINED
            prepared.append((each, table, core.Call.of(table.pull, self._session.acting, keys, None, outs.get(each))))
        return self._post(prepared, keep)

    def push_async(
        self,
        changes: Mapping[Any, tuple[Keys, object]],
        rule: int,
        answered: bool,
        outs: Mapping[Any, object],
        keep: bool,
    ) -> Any:
        """For each table, by its name or handle, a push on its way; each takes a number."""
        prepared = []
        self._session.meter.begin(self._session.now())
        for each, (keys, values) in changes.items():
            table = self._open(each)
            terms = None if table is None else table.changes.get((rule, answered))
            if table is None or terms is None:
                return DECLINED
            if table.check is not None:
                table.check(table.spec)
            prepared.append((each, table, core.Call.of(terms, self._session.acting, keys, values, outs.get(each))))
        return self._post(prepared, keep)

    def _open(self, each: TableLike) -> PlainTable | None:
        """A table whose connections are open, but for answers that may be on their way."""
        table = self._known(each.name if isinstance(each, Table) else each)
        return None if table is None or any(channel.closed for channel in table.wires.channels) else table

    def _known(self, name: str) -> PlainTable | None:
        """The table by the present route. Raises where Dask has cancelled the caller's task."""
        session = self._session
        if session.cancelled is not None and session.cancelled():
            session.check()
        table = self._tables.get(name)
        return self._renew(name) if table is None or table.route is not session.settled.get(name) else table

    def _renew(self, name: str) -> PlainTable | None:
        """The table by the present route, if all its connections are there."""
        session = self._session
        route = session.settled.get(name)
        channels = None if route is None else session.connections(route)
        if route is None or channels is None:
            return None
        table = self._tables[name] = PlainTable(route, channels, session, self._check_aggregate)
        return table

    # -- a call whose caller waits

    def _make(self, table: PlainTable, terms: core.Terms, keys: Keys, values: object, out: object) -> Any:
        """Make a call: its result, or DECLINED."""
        exchange = self._exchange
        try:
            answer = exchange.make(table.wires, terms, self._session.acting, keys, values, out)
        except (ConnectionError, *RETRIED) as error:
            table.wires.channels[exchange.current].fail(error)
            return self._go_on(table)
        except BaseException as error:  # what was on its way may or may not have arrived, and is not sent again
            for _, run, *_ in exchange.open:
                table.wires.channels[run].fail(error)
            raise
        if answer is OPEN:
            return self._go_on(table)
        return self._make_behind(table, terms, keys, values, out) if answer is BUSY else answer

    def _make_behind(self, table: PlainTable, terms: core.Terms, keys: Keys, values: object, out: object) -> Any:
        """Make a call over connections on which answers are on their way, or which are not sockets or encrypted."""
        if any(channel.closed for channel in table.wires.channels):
            return DECLINED
        self._session.meter.begin(self._session.now())
        call = core.Call.of(terms, self._session.acting, keys, values, out)
        pending = self._post([("", table, call)], False)
        return pending if pending is DECLINED else pending[""].result()

    def _go_on(self, table: PlainTable) -> Any:
        """Let the legs of a call that are not done go on in the general way, and wait for them."""
        session, exchange = self._session, self._exchange
        call = exchange.give_away()
        posted, requests, arrived = Posted(call), [], []
        for n, run, number, received in exchange.open:
            channel = table.wires.channels[run]
            if not number:
                requests.append(session.dispatch(table.route.runs[run][0], posted.leg(n)))
                continue
            requests.append(posted.request(n, channel))
            channel.adopt(requests[-1], number)
            arrived.append((channel, received))
        for channel, received in arrived:  # now, because a server that serves two legs may answer the second one first
            channel.feed(received)
        session.meter.begin(exchange.began)
        session.meter.counted(not call.terms.pushes, call.asked)
        sent = session.opened(SentCall(session, "push" if call.terms.pushes else "pull", requests))
        return Pending((sent,), call.finish).result()

    def _idle(self, channel: Channel, left: int) -> None:
        """A server has moved no byte of a message for a while, with `left` bytes to come."""
        session = self._session
        now, moving = session.now(), (self._exchange.began, channel, left)
        if moving != self._moving:
            self._moving, self._until = moving, now + session.patience
        elif now > self._until:
            raise RequestTimeoutError(
                f"{channel.what} has moved no bytes for {config.limit('request', session.patience)}: "
                f"it is busy, hangs, or is cut off; see its log"
            )
        if channel.idle is not None:
            channel.idle()

    # -- a call whose requests leave now, and whose answers are read later

    def _post(self, prepared: list[tuple[Any, PlainTable, core.Call | None]], keep: bool) -> Any:
        """Write the requests of prepared calls; DECLINED, and nothing is sent, if one could not be prepared."""
        session = self._session
        if session.acting.number + len(prepared) > LAST_NUMBER or any(call is None for _, _, call in prepared):
            return DECLINED
        pending = {}
        for each, table, call in prepared:
            assert call is not None
            pushes, posted, requests = call.terms.pushes, Posted(call), []
            if pushes:
                call.take_number(session.acting)
            session.meter.counted(not pushes, call.asked)
            for n, (run, *_) in enumerate(call.parts):
                request = posted.request(n, table.wires.channels[run])
                with contextlib.suppress(*RETRIED):  # it is in the request
                    request.channel.post(request)
                requests.append(request)
            if keep and not all(request.done and request.error is None for request in requests):
                call.own()
            sent = session.opened(SentCall(session, "push" if pushes else "pull", requests))
            pending[each] = Pending((sent,), call.finish)
        return pending
