"""The plain way of a call whose caller waits: prepared, sent and answered in one compiled step.

It is for arrays that fit as they are (`call.pyx`), and for connections that are there and free
(`exchange.pyx`). Any other call is declined before anything is sent, and goes over `requests.py` and `session.py`.
There a call goes on, too, that was sent and has not got all its answers: under its own numbers, so it counts once
however it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dps import config
from dps.engine.client.inputs import of_named_columns
from dps.engine.client.requests import Run, TableRoute
from dps.engine.client.session import RETRIED, ClientSession
from dps.engine.client.table import name_of
from dps.engine.client.ticket import Pending, SentCall
from dps.engine.client.verbs import Keys, T
from dps.engine.core.requests.exchange import DECLINED, OPEN, Exchange, Wires
from dps.engine.core.requests.part import Part, parts_of
from dps.engine.core.requests.terms import Terms
from dps.engine.state.ops import ADD, NO_CLOCK, TableSpec
from dps.engine.wire.channel import Channel, Request
from dps.errors import RequestTimeoutError

__all__ = ["DECLINED", "PlainCalls"]

Asked = tuple[Wires, Terms, object, object, object]  # a call: its keys, values and out behind how it is made


class PlainTable:
    """A table as the plain way knows it, for as long as its route lasts.

    `check` is called with the spec before each push, and may raise.
    """

    def __init__(
        self,
        route: TableRoute,
        channels: list[Channel] | None,
        session: ClientSession,
        check_aggregate: Callable[[TableSpec], None] | None,
    ):
        self.route, self.terms, self._session = route, session.terms(route).of_primaries, session
        self.trial = route.trial
        self.wires = None if channels is None else Wires(channels)  # to primaries
        self._to_copies: Wires | None = None
        self.check = None if route.spec.aggregate is None else check_aggregate
        self.gate = None if route.spec.staleness is None else session.gate
        self.holds = route.spec.wire.holds and session.own.clock != NO_CLOCK

    def reading(self) -> tuple[Wires | None, Terms]:
        """Over which connections a pull goes now, and by which terms; None where one of these is not there yet."""
        if not self._session.reads_copies(self.route):
            return self.to_primaries(), self.terms.pull
        self._to_copies = self._opened(self._to_copies, self.route.read_runs)
        return self._to_copies, self.terms.of_copies.pull

    def to_primaries(self) -> Wires | None:
        """The connections to the primaries; None where one of these is not there yet."""
        if self.route.reads_copies:  # else the connections were there when the table was found
            self.wires = self._opened(self.wires, self.route.runs)
        return self.wires

    def _opened(self, wires: Wires | None, runs: list[Run]) -> Wires | None:
        """These connections or, where they are closed, those that were made since."""
        if wires is None or any(channel.closed for channel in wires.channels):
            channels = self._session.connections(self.route, runs)
            wires = None if channels is None else Wires(channels)
        return wires

    def is_closed(self) -> bool:
        """Whether its caller has to wait for other trainers before it reads the table."""
        return self.gate is not None and not self.gate.is_open(self.route.spec)


def beside(table: PlainTable, keys: Keys, values: object) -> object:
    """Values given by the names of columns as whole rows; all others as they are."""
    if isinstance(values, Mapping) and isinstance(keys, np.ndarray):
        return of_named_columns(values, keys.shape, keys.size, table.route.spec)
    return values


class PlainCalls:
    """The plain calls of one session. Each method returns DECLINED where the call is not plain.

    They are called under the session's lock.

    `check_aggregate` is called with the spec of a table that aggregates before each push to it, and may raise.
    """

    def __init__(self, session: ClientSession, check_aggregate: Callable[[TableSpec], None] | None = None):
        self._session, self._check_aggregate = session, check_aggregate
        self._exchange = Exchange(session.polling, session.now, session.meter, self._idle)
        self._tables: dict[str, PlainTable] = {}
        # When a server was last found to keep the caller waiting: when the call began, the server's channel, the bytes
        # of a message that were to come; and until when it may go on so.
        self._moving: tuple[float, Channel, int] | None = None
        self._until = 0.0

    def pull(self, name: str, keys: Keys, out: object) -> object:
        table = self._known(name)
        if table is None or (table.gate is not None and table.is_closed()):
            return DECLINED
        wires, terms = table.reading()
        made: Any = DECLINED if wires is None else self._make([table], [(wires, terms, keys, None, out)])
        return made if made is DECLINED else made[0]

    def push(self, name: str, keys: Keys, values: object, rule: int, answered: bool, out: object) -> object:
        """The new values or, where they are not `answered`, None."""
        table = self._known(name)
        terms = None if table is None else self._terms(table, rule, answered)
        wires = None if table is None else table.to_primaries()
        if table is None or terms is None or wires is None:
            return DECLINED
        made = self._make([table], [(wires, terms, keys, beside(table, keys, values), out)])
        return made if made is DECLINED else made[0]

    def pull_several(self, wanted: Mapping[T, Keys], outs: Mapping[object, object]) -> object:
        tables: list[PlainTable] = []
        asked: list[Asked] = []
        for each, keys in wanted.items():
            table = self._known(name_of(each))
            if table is None or (table.gate is not None and table.is_closed()):
                return DECLINED
            wires, terms = table.reading()
            if wires is None:
                return DECLINED
            tables.append(table)
            asked.append((wires, terms, keys, None, outs.get(each)))
        made = self._make(tables, asked)
        return made if made is DECLINED else dict(zip(wanted, made, strict=True))

    def push_several(
        self, changes: Mapping[T, tuple[Keys, object]], rule: int, answered: bool, outs: Mapping[object, object]
    ) -> object:
        tables: list[PlainTable] = []
        asked: list[Asked] = []
        for each, (keys, values) in changes.items():
            table = self._known(name_of(each))
            terms = None if table is None else self._terms(table, rule, answered)
            wires = None if table is None else table.to_primaries()
            if table is None or terms is None or wires is None:
                return DECLINED
            tables.append(table)
            asked.append((wires, terms, keys, beside(table, keys, values), outs.get(each)))
        made = self._make(tables, asked)
        if made is DECLINED:
            return DECLINED
        return dict(zip(changes, made, strict=True)) if answered else None

    def _terms(self, table: PlainTable, rule: int, answered: bool) -> Terms | None:
        """The terms of a push, once it was checked; None where the table does not take it, or its answer waits."""
        if answered and table.is_closed():
            return None
        if table.holds and rule != ADD and not answered:  # rows of pushes may be held back
            return None
        if table.check is not None:
            table.check(table.route.spec)
        return table.terms.changes.get((rule, answered))

    def _known(self, name: str) -> PlainTable | None:
        """The table by the present route. Raises where Dask has cancelled the caller's task."""
        session = self._session
        if session.cancelled is not None and session.cancelled():
            session.check()
        table = self._tables.get(name)
        if table is None or table.route is not session.settled.get(name):
            return self._renew(name)
        if table.trial is not None:
            table.trial.called()
        return table

    def _renew(self, name: str) -> PlainTable | None:
        session = self._session
        route = session.settled.get(name)
        channels = None if route is None else session.connections(route, route.runs)
        if route is None or (channels is None and not route.reads_copies):
            return None
        if route.spec.bytes_width:  # because bytes are made of rows beside a call
            return None
        if route.spec.cache.nbytes and session.cached is not None:  # so are rows that the process keeps
            return None
        if route.spec.wire.merge and session.merged is not None:  # pushes that wait leave before any other call
            return None
        table = self._tables[name] = PlainTable(route, channels, session, self._check_aggregate)
        return table

    def _make(self, tables: list[PlainTable], asked: list[Asked]) -> Any:
        """Make a call to each of these tables: a list of their results, or DECLINED."""
        exchange = self._exchange
        try:
            answer = exchange.make(asked, self._session.acting)
        except (ConnectionError, *RETRIED) as error:
            asked[exchange.at][0].channels[exchange.current].fail(error)
            return self._go_on(tables, asked)
        except BaseException as error:  # what was on its way may or may not have arrived, and is not sent again
            for at, _, run, *_ in exchange.open:
                asked[at][0].channels[run].fail(error)
            raise
        return self._go_on(tables, asked) if answer is OPEN else answer

    def _go_on(self, tables: list[PlainTable], asked: list[Asked]) -> list[np.ndarray | None]:
        """Let the parts of calls that are not done go on over the channels, and wait for them."""
        session, exchange = self._session, self._exchange
        calls, arrived = exchange.give_away(), []
        parts: list[list[Part]] = [parts_of(call) for call in calls]
        requests: list[list[Request]] = [[] for _ in calls]
        for at, n, run, number, received in exchange.open:
            if number:
                channel = asked[at][0].channels[run]
                requests[at].append(Request.carrying(parts[at][n], channel))
                channel.adopt(requests[at][-1], number)
                arrived.append((channel, received))
        for channel, received in arrived:  # now, because a server that serves two legs may answer the second one first
            channel.feed(received)
        # Unsent parts come last, because a channel may read while it writes, and has to have those bytes by then.
        for at, n, _, number, _ in exchange.open:
            if not number:
                route = tables[at].route
                requests[at].append(session.dispatch(route, parts[at][n], route.runs_by(calls[at].terms.form)))
        session.meter.begin(exchange.began)
        pending = []
        for call, sent in zip(calls, requests, strict=True):
            session.meter.counted(not call.terms.pushes, call.asked)
            opened = session.opened(SentCall(session, "push" if call.terms.pushes else "pull", sent))
            pending.append(Pending((opened,), call.finish))
        return [each.result() for each in pending]

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
