"""The plain way of a call: one compiled step from the caller's arrays to the answer, where nothing is unusual.

It is for a pull or a push of one table whose caller waits for the answer. `core/exchange.pyx` does the work. This file
decides what is plain, stamps the call, and hands over to the general way (`requests.py`, `session.py`) what turns out
not to be. A call is declined before anything is sent. A call that was sent and has not got all its answers becomes an
ordinary call on its way, under its own numbers, so it counts once however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dps import config
from dps.client.changes import FLAGS, NO_ROWS
from dps.client.requests import Call, Leg, TableRoute, sink_for
from dps.client.session import LAST_NUMBER, RETRIED, ClientSession
from dps.client.table import Keys
from dps.client.ticket import Pending, SentCall
from dps.core.exchange import DECLINED, DONE, Exchange
from dps.core.form import Form
from dps.errors import RequestTimeoutError
from dps.state.ops import NO_CLOCK, PUSH, TableSpec
from dps.state.partition import group, shard_bits
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header
from dps.wire.sockets import SPIN_SECONDS

__all__ = ["PlainCalls"]


class PlainTable:
    """A table as the plain way knows it, for as long as its route and its connections last."""

    def __init__(self, route: TableRoute, channels: list[Channel]):
        spec = route.spec
        runs = [(first, end) for _, first, end in route.runs]
        kind, bits = np.dtype(spec.dtype).num, 0 if spec.rows else shard_bits(spec.shards)
        self.form = Form(spec.id, kind, spec.dim, spec.rows or 0, spec.shards, bits, spec.finite, runs)
        self.route, self.channels = route, channels
        self.streams = [channel.stream for channel in channels]
        self.traffics = [channel.traffic for channel in channels]

    @property
    def is_free(self) -> bool:
        """Whether all its connections may be used for a plain call."""
        return all(channel.is_plain for channel in self.channels)

    def acknowledge(self, run: int, number: int) -> bool:
        """An earlier request to the server of that run was answered without a body; False if there was none."""
        return self.channels[run].acknowledged(number)


class PlainCall(NamedTuple):
    """What is to be done with the rows of some keys."""

    verb: str
    kind: int  # of its frames
    flags: int
    number: int = 0  # of the op
    distinct: bool = False  # the keys may not repeat
    answered: bool = True  # values come back


PULL = PlainCall("pull", frames.PULL, 0)


class PlainCalls:
    """The plain calls of one session. Each method returns None where the call has to go the general way.

    Parameters
    ----------
    session : ClientSession
        Its connections; its lock is held during a call.
    check_aggregate : callable or None
        Given the spec of a table that aggregates, before each push to it; may raise.
    """

    def __init__(self, session: ClientSession, check_aggregate: Callable[[TableSpec], None] | None = None):
        self.session, self._check_aggregate = session, check_aggregate
        self._exchange = Exchange(round(SPIN_SECONDS * 1e9))
        self._tables: dict[str, PlainTable] = {}
        self._current: PlainTable  # of the call that is being made
        self._left = -1  # bytes of a message that were to come when a server was last found to keep the caller waiting,
        self._until = 0.0  # and until when it may go on so

    def pull(self, table: str, keys: Keys, out: object) -> tuple[np.ndarray | None] | None:
        """The values, in a tuple."""
        with self.session.lock:
            known = self._ready(table)
            return None if known is None else self._make(known, PULL, keys, None, out)

    def push(
        self, table: str, keys: Keys, values: object, rule: int, answered: bool, out: object
    ) -> tuple[np.ndarray | None] | None:
        """The new values or, where they are not `answered`, None, in a tuple."""
        session = self.session
        with session.lock:
            known = self._ready(table)
            origin = session.acting
            if known is None or not isinstance(values, np.ndarray) or origin.number >= LAST_NUMBER:
                return None
            spec = known.route.spec
            if spec.aggregate is not None and self._check_aggregate is not None:
                self._check_aggregate(spec)
            if rule != PUSH and spec.optimizer.derived:
                return None
            at_once = spec.aggregate is None or session.own.clock == NO_CLOCK  # else the servers sum, also repeats
            distinct = rule == PUSH and at_once and spec.optimizer.repeats == "sum"
            flags = FLAGS[rule] | (frames.ANSWER if answered else 0)
            call = PlainCall("push", frames.PUSH, flags, origin.number, distinct, answered)
            origin.number += 1  # before anything is sent, because an op that may have arrived keeps its number
            outcome = self._make(known, call, keys, values, out)
            if outcome is None:
                origin.number -= 1
            return outcome

    def _ready(self, name: str) -> PlainTable | None:
        """The table, if its connections are open and free."""
        session = self.session
        route = session.known_route(name)
        if route is None:
            return None
        table = self._tables.get(name)
        if table is None or table.route is not route or not table.is_free:
            channels = session.connections(route)
            if channels is None:
                return None
            table = self._tables[name] = PlainTable(route, channels)
        return table if table.is_free else None

    def _make(
        self, table: PlainTable, call: PlainCall, keys: Keys, values: np.ndarray | None, out: object
    ) -> tuple[np.ndarray | None] | None:
        """Make a call: its result in a tuple, or None if it was declined."""
        session, exchange = self.session, self._exchange
        began, flags, rows = session.now(), call.flags, NO_ROWS
        if keys is None or isinstance(keys, slice):
            if table.route.spec.rows is None:
                return None
            first, stop, step = (keys or slice(None)).indices(table.route.spec.rows)
            if step != 1:
                return None
            keys, rows, flags = None, (first, max(first, stop)), flags | frames.RANGE
        elif not isinstance(keys, np.ndarray):
            return None
        if out is not None and not isinstance(out, np.ndarray):
            return None
        origin = session.acting
        stamp = (session.epoch, origin.id, call.number, origin.clock, origin.parties, origin.attempt)
        failure: BaseException | None = None
        self._current, self._left = table, -1
        try:
            outcome = exchange.call(
                table.form,
                table.streams,
                table.traffics,
                call.kind,
                flags,
                stamp,
                keys,
                *rows,
                values,
                out,
                call.answered,
                call.distinct,
                session.chunk,
                table.acknowledge,
                self._idle,
            )
        except (ConnectionError, *RETRIED) as error:
            outcome, failure = None, error
        except BaseException as error:  # what was on its way may or may not have arrived, and is not sent again
            for run in {run for run, *_ in exchange.open}:
                table.channels[run].fail(error)
            raise
        finally:
            for channel in table.channels:
                if channel.closed:  # by another thread, which left the socket to this one
                    channel.close()
        if outcome == DECLINED:
            return None
        if outcome != DONE:
            header = Header(call.kind, flags, 0, table.route.spec.id, stamp[0], stamp[1], stamp[2], stamp[3])
            header = header._replace(parties=stamp[4], attempt=stamp[5])
            self._hand_over(table, call, header, keys, rows, values, began, failure)
            return (exchange.result,)
        now = session.now()
        count = rows[1] - rows[0] if keys is None else keys.size
        session.meter.exchanged(call.verb, count, began, now, min(exchange.seconds_waited, now - began))
        return (exchange.result,)

    def _idle(self, run: int, left: int) -> None:
        """A server has moved no byte of a message for a while, with `left` bytes to come."""
        session, channel = self.session, self._current.channels[run]
        now = session.now()
        if left != self._left:
            self._left, self._until = left, now + session.patience
        elif now > self._until:
            raise RequestTimeoutError(
                f"{channel.what} has moved no bytes for {config.limit('request', session.patience)}: "
                f"it is busy, hangs, or is cut off; see its log"
            )
        if channel.idle is not None:
            channel.idle()

    def _hand_over(
        self,
        table: PlainTable,
        call: PlainCall,
        header: Header,
        keys: np.ndarray | None,
        rows: tuple[int, int],
        values: np.ndarray | None,
        began: float,
        failure: BaseException | None,
    ) -> None:
        """Let the legs that are not done go on in the general way, and wait for them."""
        session, spec, result = self.session, table.route.spec, self._exchange.result
        grouping = None if keys is None else group(keys.reshape(-1), spec.rows or 0, spec.shards, spec.name)
        out = None if result is None else result.reshape(-1, spec.dim)
        pushed = None if values is None else values.reshape(-1, spec.dim)
        whole = Call(header, grouping, rows, pushed, out)
        order = None if grouping is None else grouping.order
        if failure is not None:
            table.channels[self._exchange.current].fail(failure)
        requests, arrived = [], []
        for run, number, first, end, a, b, received in self._exchange.open:
            leg, channel = Leg(whole, first, end, a, b), table.channels[run]
            if not number:
                requests.append(session.dispatch(table.route.runs[run][0], leg))
                continue
            sink = None if out is None else sink_for(out, order, a, b)
            request = Request(channel, sink, 0 if sink is None else (b - a) * table.route.row_bytes, call.kind)
            request.leg = leg
            channel.adopt(request, number)
            arrived.append((channel, received))
            requests.append(request)
        for channel, received in arrived:  # now, because a server that serves two legs may answer the second one first
            channel.feed(received)
        session.meter.begin(began)
        session.meter.counted(values is None, rows[1] - rows[0] if keys is None else keys.size)
        sent = session.opened(SentCall(session, call.verb, requests))
        Pending((sent,), lambda: None).result()
