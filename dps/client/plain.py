"""The plain way of a call whose caller waits: prepared, sent and answered in one compiled step.

It is for arrays that fit as they are (`core/call.pyx`), and for connections that are there and free
(`core/exchange.pyx`). Any other call is declined before anything is sent, and goes over `requests.py` and `session.py`.
There a call goes on, too, that was sent and has not got all its answers: under its own numbers, so it counts once
however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dps import config
from dps.client.requests import TableRoute
from dps.client.session import RETRIED, ClientSession
from dps.client.table import Keys
from dps.client.ticket import Pending, SentCall
from dps.core.call import Terms
from dps.core.exchange import DECLINED, OPEN, Exchange, Wires
from dps.core.part import parts_of
from dps.errors import RequestTimeoutError
from dps.state.ops import TableSpec
from dps.wire.channel import Channel, Request

__all__ = ["DECLINED", "PlainCalls"]


class PlainTable:
    """A table as the plain way knows it, for as long as its route lasts.

    Attributes
    ----------
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
        self.route, self.terms, self.wires = route, session.terms(route), Wires(channels)
        self.check = None if route.spec.aggregate is None else check_aggregate


class PlainCalls:
    """The plain calls of one session. Each method returns DECLINED where the call is not plain.

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
        return DECLINED if table is None else self._make(table, table.terms.pull, keys, None, out)

    def push(self, name: str, keys: Keys, values: object, rule: int, answered: bool, out: object) -> Any:
        """The new values or, where they are not `answered`, None."""
        table = self._known(name)
        if table is None:
            return DECLINED
        if table.check is not None:
            table.check(table.route.spec)
        terms = table.terms.changes.get((rule, answered))
        return DECLINED if terms is None else self._make(table, terms, keys, values, out)

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

    def _make(self, table: PlainTable, terms: Terms, keys: Keys, values: object, out: object) -> Any:
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
        return self._go_on(table) if answer is OPEN else answer

    def _go_on(self, table: PlainTable) -> Any:
        """Let the parts of a call that are not done go on over the channels, and wait for them."""
        session, exchange = self._session, self._exchange
        call, requests, arrived = exchange.give_away(), [], []
        parts = parts_of(call)
        for n, run, number, received in exchange.open:
            if not number:
                requests.append(session.dispatch(table.route, parts[n]))
                continue
            channel = table.wires.channels[run]
            requests.append(Request.carrying(parts[n], channel))
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
