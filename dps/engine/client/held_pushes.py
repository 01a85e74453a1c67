"""HeldPushes: a trainer's pushes to tables that have part of their rows held back (`Wire.keep`, `Wire.least`).

`residual_rows.py` says which rows travel. This file gives what travels the numbers of ops, so that each change counts
at most once, also if the trainer is run again. docs/design/training.md, "Pushes that are held back", has the proof.

* A push takes as many numbers as it would take if all of its rows travelled, and a row travels under the number of its
  place in the push. So numbers, and the number of each row, do not depend on values.
* What goes with the tick comes last in its clock. What `flush` sends has numbers of its own, always as many.
* An attempt that repeats an earlier one holds nothing back: it does not know which rows that one has sent, and servers
  take what it sends for repeats only if it sends them at the same clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dps import config
from dps.engine.client.cached_tables import send_changes
from dps.engine.client.inputs import flat_keys, flat_rows
from dps.engine.client.requests import Prepared, TableRoute, prepared_push, same_rows
from dps.engine.client.residual_rows import ResidualRows, distinct_rows
from dps.engine.client.ticket import SentCall
from dps.engine.state.ops import ASSIGN, DELETE, PUSH, TableSpec
from dps.errors import InputError, UnknownTableError

if TYPE_CHECKING:
    from dps.engine.client.client import Client

__all__ = ["HeldPushes"]

FLUSH_NUMBERS = 1 << 16  # a flush takes so many numbers of ops, because numbers may not depend on what it sends
Change = tuple[TableRoute, Any, Any, Any, int | None]  # the table, its name, keys, values, and a column of the table


class WholePush(NamedTuple):
    """What a push brings to a table: each key once."""

    route: TableRoute
    keys: np.ndarray
    values: np.ndarray


class HeldPushes:
    """The pushes of one trainer, and what it has held back of them.

    Attributes
    ----------
    tables : dict of str to ResidualRows
        What is held back, by table; none until a push to such a table is made.
    """

    def __init__(self, client: Client):
        self._client, self._session = client, client.session
        self._nbytes = config.nbytes("held")
        self.tables: dict[str, ResidualRows] = {}

    def __len__(self) -> int:
        return sum(map(len, self.tables.values()))

    def push(self, changes: Sequence[Change], rule: int, goes_at_once: bool) -> list[SentCall] | None:
        """A change of rows of some tables, as far as it travels; None where it `goes_at_once`, or none is held back and
        none waits until it is summed.

        What is held back of rows that are assigned or deleted is dropped, because it was pushed before that.
        """
        sent = self._push_held(changes, rule, goes_at_once)
        if sent is None and self._session.merged is not None:
            sent = self._session.merged.push(changes, rule, goes_at_once)
        return sent

    def _push_held(self, changes: Sequence[Change], rule: int, goes_at_once: bool) -> list[SentCall] | None:
        holds = [each for each in changes if each[0].spec.wire.holds]
        if not holds or self._session.acting is not self._session.own:
            return None
        if rule in (ASSIGN, DELETE):
            self._forget(holds, rule)
        if rule != PUSH or goes_at_once:
            return None
        whole = []
        for route, _, keys, values, _ in holds:  # all of them, before any of it is sent
            whole.append(WholePush(route, *distinct_rows(*flat_rows(route.spec, keys, values))))
        others = {each.spec.name: (keys, values) for each, _, keys, values, _ in changes if not each.spec.wire.holds}
        sent = list(self._client.push_async(others).calls) if others else []
        for each in whole:
            sent += self._push(each)
        return sent

    def send(self, everything: bool = False) -> list[tuple[str, np.ndarray]]:
        """Send what was held back for long enough, or all of it; the tables and keys of that.

        It is for the end of a clock: no push follows, because its number would depend on what was sent.
        """
        session, sent = self._session, []
        with session.lock:
            for name, held in list(self.tables.items()):
                clock = session.own.clock
                keys, rows = held.take(clock) if everything else held.take(clock - held.wire.hold, held.room // 2)
                if len(keys):
                    route = self._route(name, held)
                    if route is not None:
                        session.meter.begin(session.now())
                        self._send(WholePush(route, keys, rows), np.ones(len(keys), np.bool_))
                        sent.append((name, keys))
        return sent

    def flush(self) -> None:
        """Send all that is held back now, within a clock."""
        own = self._session.own
        with self._session.lock:
            if self._session.merged is not None:
                self._session.merged.send_all_alone()
            first = own.number
            self.send(everything=True)
            if own.number - first > FLUSH_NUMBERS:
                raise InputError(
                    f"a flush of rows that were held back takes {own.number - first} requests, and may take "
                    f"{FLUSH_NUMBERS}: raise dps.limits.chunk, or lower dps.limits.held"
                )
            own.number = first + FLUSH_NUMBERS

    # -- inside

    def _push(self, whole: WholePush) -> list[SentCall]:
        """One table's part of a push."""
        route, keys, values = whole
        if self._client.replays:  # it was acknowledged, and only takes its numbers
            return self._send(whole, np.zeros(len(keys), np.bool_))
        if self._session.own.attempt:
            return self._send(whole, np.ones(len(keys), np.bool_))
        travels, sums = self._held(route.spec).push(keys, values, self._session.own.clock)
        return self._send(WholePush(route, keys, sums), travels)

    def _send(self, whole: WholePush, travels: np.ndarray) -> list[SentCall]:
        """Send some of the rows of a push, each under the number that its place has."""
        session, own = self._session, self._session.own
        route, keys, values = whole
        terms, first, sent = session.terms(route), own.number, list[SentCall]()
        # As a call of all these rows would be cut.
        agreed = terms.changes[PUSH, False]
        block = max(1, min(agreed.keys, agreed.most // (values.itemsize * values.shape[1] + 8)))
        made: list[tuple[int, np.ndarray, np.ndarray, Prepared]] = []
        starts = range(0, len(keys), block)
        for n, start in enumerate(starts):
            chosen = start + np.flatnonzero(travels[start : start + block])
            if len(chosen):
                some, rows = keys[chosen], values[chosen]
                given = rows if route.spec.dim > 1 else rows[:, 0]
                made.append((n, some, given, prepared_push(route, terms, own, some, given, PUSH)))
        for n, some, given, prepared in made:
            own.number = first + n
            sent += send_changes(session, [(route, some, given)], [prepared], PUSH, False)
            assert own.number == first + n + 1, "a part of a push travels as one op"
        own.number = first + len(starts)
        return sent

    def _held(self, spec: TableSpec) -> ResidualRows:
        held = self.tables.get(spec.name)
        if held is None or not same_rows(spec, held.spec):
            held = self.tables[spec.name] = ResidualRows(spec, self._nbytes)
        return held

    def _route(self, name: str, held: ResidualRows) -> TableRoute | None:
        """The route of a table; None if the table is gone, and with it what was held back."""
        try:
            route = self._session.ready(name)
        except UnknownTableError:
            route = None
        if route is None or not same_rows(route.spec, held.spec):
            del self.tables[name]
            return None
        return route

    def _forget(self, changes: Sequence[Change], rule: int) -> None:
        for route, _, keys, values, _ in changes:
            held, spec = self.tables.get(route.spec.name), route.spec
            if held is None:
                continue
            if rule == ASSIGN:
                held.forget(flat_rows(spec, keys, values)[0])
            elif keys is not None:
                held.forget(flat_keys(spec, keys)[0])
            elif values is not None:  # all rows
                held.forget(None)
