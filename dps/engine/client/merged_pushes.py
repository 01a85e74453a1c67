"""MergedPushes: a trainer's pushes to tables with `Wire(merge=True)`, which the trainers of its process send as one.

A push takes its numbers, and waits in the trainer until its clock ends. Then the trainers of the process meet
(`push_meetings.py`), and one of them sends, to each server, the sum by key of all parts, with the stamp of each part.
Servers take such a sum whole or not at all, shard by shard. docs/design/training.md, "One message for a process", has
the proof that each push counts once. Three rules here are part of it:

* What is not sent as a part of a sum, or perhaps not, is sent as it would have been without `merge`: each push by
  itself, under its own numbers. So it does not matter how often either is tried.
* A sum is never sent a second time, and leaves only when all earlier ops of its trainers are acknowledged. Any other op
  of a trainer on the table sends the pushes that wait before, because ops of an origin reach a shard by their numbers.
* An attempt that repeats an earlier one puts nothing into sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dps import config
from dps.engine.client.cached_tables import REFUSALS, send_changes
from dps.engine.client.inputs import flat_rows
from dps.engine.client.push_meetings import Brought, KeptPush, PushMeeting, Round
from dps.engine.client.requests import MOST_BYTES, MOST_PUSHED_KEYS, Prepared, TableRoute, prepared_push
from dps.engine.client.row_cache import OpenChange, PushOutcome
from dps.engine.client.ticket import SentCall
from dps.engine.client.verbs import Keys
from dps.engine.core.shards.rows import all_finite
from dps.engine.state.ops import PUSH, TableSpec
from dps.engine.state.partition import group
from dps.engine.wire import frames
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.errors import DPSError, StoppedError

if TYPE_CHECKING:
    from dps.engine.client.client import Client

__all__ = ["MergedPushes"]

# The trainers of a process wait so long for each other at the end of a clock. With staleness 0 no trainer goes on
# before the last one has come, so this costs time only where a trainer does not tick at all.
STRAGGLER_SECONDS = 0.25
# The sender of a sum waits so long for servers, which is longer than a failover takes; then each trainer sends its own
# pushes.
ANSWER_SECONDS = 5.0
LEADER_SECONDS = 1.0  # The others wait so much longer, because the outcome has to reach them.
CHECK_SECONDS = 0.25  # between two looks at whether the trainer was told to stop
Change = tuple[TableRoute, Any, Any, Any, int | None]  # the table, its name, keys, values, and a column of the table
Buffers = tuple[np.ndarray | bytes, ...]


class PushStanding(Protocol):
    """The run of a trainer, its staleness, and its rule for tables with ``aggregate=``."""

    run: int
    staleness: float

    def check_aggregate(self, spec: TableSpec) -> None:
        """Raise InputError where trainers may not push to a table with ``aggregate=``."""


class SumFrame(NamedTuple):
    """A frame with a part of a sum, and the server to which it goes."""

    server: int
    header: Header
    body: Buffers


class SentSum:
    """A sum on its way, what it changes of the rows that the process keeps, and its outcome as far as it is known."""

    def __init__(self, requests: list[Request]):
        self.requests = requests
        self.change: OpenChange | None = None
        self.outcome = PushOutcome.DOUBTFUL  # until all of it has left

    def await_outcome(self, deadline: float) -> None:
        """Wait until servers have answered all of it, where all of it has left."""
        if self.outcome is not PushOutcome.OPEN:
            return
        for request in self.requests:
            try:
                request.result(deadline)
            except DPSError:
                pass  # it is in the request
        errors = [request.error for request in self.requests if request.error is not None or not request.done]
        if not errors:
            self.outcome = PushOutcome.ACKNOWLEDGED
        elif all(isinstance(error, (StoppedError, *REFUSALS)) for error in errors):
            self.outcome = PushOutcome.REFUSED  # it is not sent again
        else:
            self.outcome = PushOutcome.DOUBTFUL

    def tell(self) -> None:
        """Tell the cache what has become of the change."""
        if self.change is not None:
            known = PushOutcome.DOUBTFUL if self.outcome is PushOutcome.OPEN else self.outcome
            self.change.outcome = lambda: known


class MergedPushes:
    """The pushes of one trainer that wait until its process sums them.

    Attributes
    ----------
    kept : dict of str to list of KeptPush
        By table.
    meets : bool
        The trainer meets the others of its process at the end of each clock, because it uses a table that merges.
    """

    def __init__(self, client: Client, standing: PushStanding):
        self._client, self._session, self._standing = client, client.session, standing
        self._nbytes = config.nbytes("held")
        self._meeting: PushMeeting | None = None
        self.meets = False
        self.kept: dict[str, list[KeptPush]] = {}

    def push(self, changes: Sequence[Change], rule: int, goes_at_once: bool) -> list[SentCall] | None:
        """A change of rows of some tables, of which pushes to tables that merge wait; None where none waits.

        Where the change `goes_at_once`, or is no push by the table's own rule, pushes that wait are sent before.
        """
        session, client = self._session, self._client
        merging = [each for each in changes if each[0].spec.wire.merge]
        if not merging or session.acting is not session.own:
            return None
        if rule != PUSH or goes_at_once or client.replays or client.rehearses or session.own.attempt:
            for route, *_ in merging:
                self.send_alone(route.spec.name)
            return None
        made = []
        for route, _, keys, values, _ in changes:  # all of them, before any of it is sent
            if route.spec.aggregate is not None:
                self._standing.check_aggregate(route.spec)
            prepared = prepared_push(route, session.terms(route), session.own, keys, values, PUSH)
            rows = flat_rows(route.spec, keys, values) if route.spec.wire.merge else ()
            made.append((route, keys, values, prepared, rows))
        sent = []
        for route, keys, values, prepared, rows in made:  # in this order, by which another attempt takes its numbers
            if route.spec.wire.merge:
                self._keep(route.spec.name, keys, prepared, *rows)
            else:
                sent += send_changes(session, [(route, keys, values)], [prepared], PUSH, True)
        return sent

    def show(self, table: str) -> None:
        """Before a read: send the pushes to a table that wait.

        Where rows of the table are kept here, the pushes are also acknowledged, because a trainer that was replaced
        meanwhile must not step rows for which its successor has pushed.
        """
        if not self._session.own.attempt:
            self._join()  # because a push may follow, and the others may come to the end of their clocks before that
        sent = self.send_alone(table)
        if sent and self._session.ready(table).spec.cache.nbytes:
            for call in sent:
                call.seen = True
                self._session.result(call, None)

    def send_alone(self, table: str) -> list[SentCall]:
        """Send the pushes to a table that wait, each by itself."""
        session, own = self._session, self._session.own
        with session.lock:
            pushes, number, sent = self.kept.pop(table, ()), own.number, list[SentCall]()
            try:
                for named, _, values, first, end in pushes:
                    route = session.ready(table)
                    own.number = first
                    given = values if route.spec.dim > 1 else values[:, 0]
                    prepared = prepared_push(route, session.terms(route), own, named, given, PUSH)
                    sent += send_changes(session, [(route, named, given)], [prepared], PUSH, False)
                    assert own.number == end, "a push takes the same numbers each time it is prepared"
            finally:
                own.number = number
        return sent

    def send_all_alone(self) -> None:
        """Send all pushes that wait, each by itself."""
        for table in list(self.kept):
            self.send_alone(table)

    def end_clock(self) -> None:
        """The clock ends: send what waits, together with what the other trainers of the process have brought.

        On return, each push that waited is acknowledged, or is on its way under its own numbers.
        """
        meeting, session = self._meeting, self._session
        if meeting is None:
            return
        session.wait()  # because a sum may overtake what was sent over another connection
        brought = Brought(session.own.id, session.own.attempt, {table: list(kept) for table, kept in self.kept.items()})
        sent = self._go_round(meeting, meeting.bring(self, session.own.clock, brought))
        for table in sent & self.kept.keys():
            session.meter.counted(False, sum(len(each.keys) for each in self.kept.pop(table)))
        self.send_all_alone()

    def leave(self) -> None:
        """The trainer makes no more calls, so no other waits for it."""
        if self._meeting is not None:
            self._meeting.leave(self)

    # -- inside

    def _join(self) -> PushMeeting:
        """The meeting of the trainers of the process, which waits for this one from now on."""
        if self._meeting is None:
            ticket = self._session.ticket
            run = ticket.controller, ticket.secret, self._standing.run
            self._meeting = self._session.environment.caches.pushes.of_run(run)
            self._meeting.join(self)
            self.meets = True
        return self._meeting

    def _keep(self, table: str, given: Keys, prepared: Prepared, keys: np.ndarray, values: np.ndarray) -> None:
        """Let a push wait, which takes its numbers now."""
        session, own = self._session, self._session.own
        own.check_numbers(sum(call.numbers for call in prepared.calls))
        first = own.number
        session.skip([prepared])
        if own.number == first:  # it names no rows
            return
        self._join()
        keys = keys.copy()
        named = given if given is None or isinstance(given, slice) else keys
        kept = self.kept.setdefault(table, [])
        kept.append(KeptPush(named, keys, values.copy(), first, own.number))
        if sum(each.keys.nbytes + each.values.nbytes for each in kept) > self._nbytes:
            self.send_alone(table)

    def _go_round(self, meeting: PushMeeting, joined: Round) -> frozenset[str]:
        """Lead a round or wait for its leader; the tables whose sums the servers have taken, as far as is known."""
        session, began = self._session, self._session.now()
        patience = STRAGGLER_SECONDS if self._standing.staleness == 0 else 0.0
        limit = patience + ANSWER_SECONDS + LEADER_SECONDS
        with meeting.changed:
            while joined.sent is None:
                waited = session.now() - began
                if meeting.leads(joined, late=waited >= patience):
                    break
                if waited >= limit:
                    joined.is_left = True
                    return frozenset()
                session.check()
                until = patience if waited < patience else limit
                session.environment.await_change(meeting.changed, min(until - waited, CHECK_SECONDS))
            else:
                return joined.sent
        sent = frozenset[str]()
        try:
            sent = frozenset(self._send_sums(joined))
        finally:
            meeting.settle(joined, sent)
        return sent

    def _send_sums(self, joined: Round) -> set[str]:
        """Send the sums of a round; the tables whose sums servers have taken."""
        session, sums, done = self._session, dict[str, SentSum](), set[str]()
        with session.lock:
            session.meter.begin(session.now())
            try:
                for table in dict.fromkeys(itertools.chain.from_iterable(b.pushes for b in joined.brought.values())):
                    parts = [each for each in joined.brought.values() if table in each.pushes]
                    if sum(len(each.pushes[table]) for each in parts) > 1:  # else there is nothing to sum
                        sums[table] = SentSum([])
                        self._send_sum(sums[table], table, joined.clock, parts)
                deadline = session.now() + min(session.patience, ANSWER_SECONDS)
                for table, each in sums.items():
                    each.await_outcome(deadline)
                    if each.outcome is PushOutcome.ACKNOWLEDGED:
                        done.add(table)
            finally:
                for each in sums.values():
                    # A trainer that waits no more sends its own pushes, and the cache would step the rows twice.
                    each.outcome = PushOutcome.DOUBTFUL if joined.is_left else each.outcome
                    each.tell()
                session.meter.lap("push", session.now())
        return done

    def _send_sum(self, made: SentSum, table: str, clock: int, parts: Sequence[Brought]) -> None:
        """Send the sum of pushes to a table; where all of it cannot be sent, its outcome is in doubt."""
        session, cached = self._session, self._session.cached
        pushes = [push for each in parts for push in each.pushes[table]]
        try:
            route = session.ready(table)
            spec = route.spec
            if any(each.values.shape[1:] != (spec.dim,) or each.values.dtype != spec.dtype for each in pushes):
                return
            keys, rows = sums_by_key([each.keys for each in pushes], [each.values for each in pushes])
            frames_of_sum = list(self._frames(route, clock, parts, keys, rows))
            if any(each.server < 0 for each in frames_of_sum) or (spec.finite and not all_finite(rows)):
                return
            if cached is not None:
                made.change = cached.begin_change(route, keys, rows if spec.dim > 1 else rows[:, 0], PUSH)
            for each in frames_of_sum:  # a frame that has left may count, also where a later one cannot leave
                made.requests.append(session.channel(each.server).send(each.header, each.body))
            made.outcome = PushOutcome.OPEN
            session.meter.prepared("push", session.now())
        except DPSError:  # each trainer sends its own pushes
            return

    def _frames(
        self, route: TableRoute, clock: int, parts: Sequence[Brought], keys: np.ndarray, rows: np.ndarray
    ) -> Iterator[SumFrame]:
        """The frames of a sum. A shard is in one frame, because its ledger takes a sum once; where its rows are too
        many for one, or it has no server, the server is -1.

        Rows of a dense table that are neighbours travel without their keys.
        """
        session, spec = self._session, route.spec
        numbered = [(each, each.pushes[spec.name]) for each in parts]
        stamps = np.array([(b.origin, b.attempt, p[0].first, p[-1].end - 1) for b, p in numbered], np.int64)
        named, starts, order, _ = group(keys, spec.shard_map, spec.name)
        rows = rows if order is None else rows[order]
        origin, attempt, _, number = stamps[0].tolist()
        row_bytes = rows.itemsize * spec.dim
        most, room = min(session.chunk, MOST_BYTES) // (8 + row_bytes), session.frame_limit // 2 // (8 + row_bytes)
        for server, first, end in route.runs:
            for low, high in _pieces(starts[first : end + 1], min(most, MOST_PUSHED_KEYS)):
                a, b = int(starts[first + low]), int(starts[first + high])
                values = rows[a:b].tobytes()
                body: Buffers = values, bytes(-len(values) & 7), stamps.tobytes()
                is_range = not spec.keyed and int(named[b - 1] - named[a]) == b - 1 - a  # they ascend
                if not is_range:
                    counts = np.diff(starts[first + low : first + high + 1]).astype(np.int64)
                    body = counts.tobytes(), named[a:b].tobytes(), *body
                header = Header(
                    frames.PUSH,
                    frames.MERGED | (frames.RANGE if is_range else 0),
                    table=spec.id,
                    epoch=session.epoch,
                    trainer=origin,
                    number=number,
                    clock=clock,
                    shard=first + low,
                    shards=high - low,
                    start=int(named[a]) if is_range else 0,
                    count=b - a,
                    parties=session.own.parties,
                    attempt=attempt,
                    body=sum(map(len, body)),
                )
                yield SumFrame(server if b - a <= room else -1, header, body)


def sums_by_key(keys: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The keys of several pushes, each once, in ascending order, and the sums of their rows.

    >>> sums_by_key([np.array([7, 5, 7]), np.array([5])], [np.float32([[1], [2], [3]]), np.float32([[10]])])
    (array([5, 7]), array([[12.],
           [ 4.]], dtype=float32))
    """
    named, rows = np.concatenate(keys), np.concatenate(values)
    order = np.argsort(named, kind="stable")
    named = named[order]
    first = np.flatnonzero(np.append(True, named[1:] != named[:-1]))
    return named[first], np.add.reduceat(rows[order], first, axis=0, dtype=rows.dtype)


def _pieces(starts: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """The shards of a run, cut into neighbours whose keys are `most` together, or one shard with more.

    Empty shards at the beginning of a piece are left out.

    >>> list(_pieces(np.array([0, 0, 3, 5, 5, 14, 15]), 8)), list(_pieces(np.array([2, 2]), 8))
    ([(1, 4), (4, 5), (5, 6)], [])
    """
    low, shards = 0, len(starts) - 1
    while low < shards:
        high = low + 1
        while high < shards and starts[high + 1] - starts[low] <= most:
            high += 1
        while low < high and starts[low + 1] == starts[low]:
            low += 1
        if low < high:
            yield low, high
        low = high
