"""MergedPushes: a trainer's pushes to tables with `Wire(merge=True)`, which the trainers of its process send as one.

A push takes its numbers, and waits in the trainer until its clock ends. Then the trainers of the process meet
(`push_meetings.py`), and one of them sends, to each server, the sum by key of all parts, with the stamp of each part;
where other processes of its machine have trainers of the run, together with theirs (`machine_meeting.py`).
Servers take such a sum whole or not at all, shard by shard. docs/design/training.md, "One message for a process", has
the proof that each push counts once. Three rules here are part of it:

* What is not sent as a part of a sum, or perhaps not, is sent as it would have been without `merge`: each push by
  itself, under its own numbers. So it does not matter how often either is tried.
* A sum is never sent a second time, and leaves only when all earlier ops of its trainers are acknowledged. Any other op
  of a trainer on the table sends the pushes that wait before, because ops of an origin reach a shard by their numbers.
* An attempt that repeats an earlier one puts nothing into sums.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dps import config
from dps.engine.client.cached_tables import REFUSALS, send_changes
from dps.engine.client.inputs import flat_rows
from dps.engine.client.machine_meeting import MachineMeeting
from dps.engine.client.push_meetings import Brought, KeptPush, PushMeeting, Round, RunMeetings
from dps.engine.client.requests import MOST_BYTES, MOST_PUSHED_KEYS, Prepared, TableRoute, prepared_push
from dps.engine.client.row_cache import OpenChange, PushOutcome
from dps.engine.client.sum_choice import SumChoice
from dps.engine.client.ticket import SentCall
from dps.engine.client.verbs import Keys
from dps.engine.core.shards.rows import all_finite
from dps.engine.state.ops import PUSH, TableSpec
from dps.engine.state.partition import group
from dps.engine.wire import frames
from dps.engine.wire.channel import Request
from dps.engine.wire.frames import Header
from dps.engine.wire.table_sums import Sums, TableSum, sum_by_key
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
    """A sum on its way, and its outcome as far as it is known."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
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
        self._meetings: RunMeetings | None = None
        self.meets = False
        self.kept: dict[str, list[KeptPush]] = {}

    def push(self, changes: Sequence[Change], rule: int, goes_at_once: bool) -> list[SentCall] | None:
        """A change of rows of some tables, of which pushes to tables that merge wait; None where none waits.

        Where the change `goes_at_once`, or is no push by the table's own rule, pushes that wait are sent before.
        """
        session, client = self._session, self._client
        merging = [each for each in changes if self._merges(each[0].spec)]
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
            rows = flat_rows(route.spec, keys, values) if self._merges(route.spec) else ()
            made.append((route, keys, values, prepared, rows))
        sent = []
        for route, keys, values, prepared, rows in made:  # in this order, by which another attempt takes its numbers
            if rows:
                self._keep(route.spec.name, keys, prepared, *rows)
            else:
                sent += send_changes(session, [(route, keys, values)], [prepared], PUSH, True)
        return sent

    def _merges(self, spec: TableSpec) -> bool:
        """Whether pushes to a table wait: not where it was measured that sums do not pay."""
        is_off = self._meetings is not None and self._meetings.choice.is_off
        return spec.wire.merge and not (spec.wire.measured and is_off and not self.kept.get(spec.name))

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
        meetings, session = self._meetings, self._session
        if meetings is None:
            return
        session.wait()  # because a sum may overtake what was sent over another connection
        brought = Brought(session.own.id, session.own.attempt, {table: list(kept) for table, kept in self.kept.items()})
        sent = self._go_round(meetings, meetings.trainers.bring(self, session.own.clock, brought))
        for table in sent & self.kept.keys():
            session.meter.counted(False, sum(len(each.keys) for each in self.kept.pop(table)))
        self.send_all_alone()

    def leave(self) -> None:
        """The trainer makes no more calls, so no other waits for it."""
        if self._meetings is not None:
            self._meetings.trainers.leave(self)
            self._meetings.machine.leave(self)

    # -- inside

    def _join(self) -> None:
        """Let the other trainers of the process wait for this one from now on."""
        if self._meetings is None:
            ticket, run = self._session.ticket, self._standing.run
            self._meetings = self._session.environment.caches.pushes.of_run(
                (ticket.controller, ticket.secret, run),
                lambda: RunMeetings(PushMeeting(), MachineMeeting(ticket, run), SumChoice()),
            )
            self._meetings.trainers.join(self)
            self._meetings.machine.enter(self)
            self.meets = True

    def _keep(self, table: str, given: Keys, prepared: Prepared, keys: np.ndarray, values: np.ndarray) -> None:
        """Let a push wait, which takes its numbers now."""
        session, own = self._session, self._session.own
        own.check_numbers(sum(call.numbers for call in prepared.calls))
        first = own.number
        session.skip([prepared])
        if own.number == first:  # it names no rows
            return
        self._join()
        is_range = given is None or isinstance(given, slice)
        keys = keys if is_range else keys.copy()  # the caller may change its own later
        named = given if is_range else keys
        kept = self.kept.setdefault(table, [])
        kept.append(KeptPush(named, keys, values.copy(), first, own.number))
        if sum(each.keys.nbytes + each.values.nbytes for each in kept) > self._nbytes:
            self.send_alone(table)

    def _go_round(self, meetings: RunMeetings, joined: Round[Brought]) -> frozenset[str]:
        """Lead a round or wait for its leader; the tables whose sums the servers have taken, as far as is known."""
        session, began, meeting = self._session, self._session.now(), meetings.trainers
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
            sent = frozenset(self._send_sums(meetings, joined))
        finally:
            meeting.settle(joined, sent)
        return sent

    def _send_sums(self, meetings: RunMeetings, joined: Round[Brought]) -> set[str]:
        """Send the sums of a round, with those of other processes perhaps; the tables whose sums servers have taken."""
        session, outcomes = self._session, dict[str, PushOutcome]()
        changes = dict[str, OpenChange]()
        with session.lock:
            session.meter.begin(session.now())
            try:
                sums = dict(self._sums(joined, self._is_summed(meetings.choice, joined)))
                # A process that has chosen not to sum brings nothing, so no other one waits for it.
                is_off = not sums and meetings.choice.is_off
                beyond = None if is_off else self._together(meetings.machine, joined, sums, changes)
                if beyond is None:
                    several = {table: each for table, each in sums.items() if _pushes(joined, table) > 1}
                    self._begin_changes(several, changes)
                    beyond = dict.fromkeys(changes, PushOutcome.REFUSED) | self._send(joined.clock, several)
                outcomes = beyond
            finally:
                for table, change in changes.items():
                    known = outcomes.get(table, PushOutcome.DOUBTFUL)
                    # A trainer that waits no more sends its own pushes, and the cache would step the rows twice.
                    change.outcome = functools.partial(_told, PushOutcome.DOUBTFUL if joined.is_left else known)
                session.meter.lap("push", session.now())
        return {table for table, each in outcomes.items() if each is PushOutcome.ACKNOWLEDGED and table in sums}

    def _is_summed(self, choice: SumChoice, joined: Round[Brought]) -> bool:
        """Whether pushes to the tables are summed in this round for which that is measured."""
        if joined.late:
            return False
        chosen = choice.chosen
        is_summed = choice.ended(joined.clock, self._session.now())
        if choice.chosen != chosen:
            for table in {table for each in joined.brought.values() for table in each.pushes}:
                with contextlib.suppress(DPSError):  # whatever it is, the push to the table has it, too
                    if self._session.ready(table).spec.wire.measured:
                        self._session.meter.chose(table, choice.chosen, choice.found())
        return is_summed

    def _sums(self, joined: Round[Brought], measured_too: bool) -> Iterator[tuple[str, TableSum]]:
        """The sums of the trainers of this process, by table, of those that are as the tables are now; `measured_too`:
        also for tables for which it is measured whether to sum."""
        for table in dict.fromkeys(itertools.chain.from_iterable(b.pushes for b in joined.brought.values())):
            parts = [(each, each.pushes[table]) for each in joined.brought.values() if table in each.pushes]
            pushes = [push for _, several in parts for push in several]
            try:
                spec = self._session.ready(table).spec
            except DPSError:  # each trainer sends its own pushes, and has the error
                continue
            if (measured_too or not spec.wire.measured) and all(_fits(spec, each.values) for each in pushes):
                stamps = [(b.origin, b.attempt, several[0].first, several[-1].end - 1) for b, several in parts]
                keys, rows = sum_by_key([each.keys for each in pushes], [each.values for each in pushes])
                yield table, TableSum(np.array(stamps, np.int64), keys, rows)

    def _together(
        self, machine: MachineMeeting, joined: Round[Brought], sums: Sums, changes: dict[str, OpenChange]
    ) -> dict[str, PushOutcome] | None:
        """Put the sums together with those of other processes of the machine; None where nothing has been sent.

        With a staleness no process waits for another. Nothing was sent either where all trainers are in this process.
        """
        session = self._session
        if joined.late or self._standing.staleness or len(joined.brought) >= session.own.parties:
            return None
        begin = functools.partial(self._begin_changes, sums, changes)
        send = functools.partial(self._send, joined.clock)
        return machine.bring(joined.clock, sums, begin, send, session.check, session.environment)

    def _begin_changes(self, sums: Sums, changes: dict[str, OpenChange]) -> None:
        """The rows of this process are about to change. Those of others do so as by pushes of trainers elsewhere."""
        cached = self._session.cached
        for table, (_, keys, rows) in sums.items():
            if cached is not None and table not in changes:
                route = self._session.ready(table)
                change = cached.begin_change(route, keys, rows if route.spec.dim > 1 else rows[:, 0], PUSH)
                if change is not None:
                    changes[table] = change

    def _send(self, clock: int, sums: Sums) -> dict[str, PushOutcome]:
        """Send sums to the servers, and wait for what becomes of them."""
        session, sent = self._session, {table: SentSum() for table in sums}
        for table, made in sent.items():
            self._send_sum(made, table, clock, sums[table])
        deadline = session.now() + min(session.patience, ANSWER_SECONDS)
        for made in sent.values():
            made.await_outcome(deadline)
        return {table: made.outcome for table, made in sent.items()}

    def _send_sum(self, made: SentSum, table: str, clock: int, summed: TableSum) -> None:
        """Send the sum of pushes to a table; where all of it cannot be sent, its outcome is in doubt."""
        session = self._session
        try:
            route = session.ready(table)
            if not _fits(route.spec, summed.rows) or (route.spec.finite and not all_finite(summed.rows)):
                return
            frames_of_sum = list(self._frames(route, clock, summed))
            if any(each.server < 0 for each in frames_of_sum):
                return
            for each in frames_of_sum:  # a frame that has left may count, also where a later one cannot leave
                made.requests.append(session.channel(each.server).send(each.header, each.body))
            made.outcome = PushOutcome.OPEN
            session.meter.prepared("push", session.now())
        except DPSError:  # each trainer sends its own pushes
            return

    def _frames(self, route: TableRoute, clock: int, summed: TableSum) -> Iterator[SumFrame]:
        """The frames of a sum. A shard is in one frame, because its ledger takes a sum once; where its rows are too
        many for one, or it has no server, the server is -1.

        Rows of a dense table that are neighbours travel without their keys.
        """
        session, spec, stamps = self._session, route.spec, summed.stamps
        named, starts, order, _ = group(summed.keys, spec.shard_map, spec.name)
        rows = summed.rows if order is None else summed.rows[order]
        origin, attempt, _, number = stamps[0].tolist()
        row_bytes = rows.itemsize * spec.dim
        most, room = min(session.chunk, MOST_BYTES) // (8 + row_bytes), session.frame_limit // 2 // (8 + row_bytes)
        for server, first, end in route.runs:
            for low, high in _pieces(starts[first : end + 1], min(most, MOST_PUSHED_KEYS)):
                a, b = int(starts[first + low]), int(starts[first + high])
                values = np.ascontiguousarray(rows[a:b])
                body: Buffers = values, bytes(-values.nbytes & 7), stamps.tobytes()
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
                    body=sum(memoryview(each).nbytes for each in body),
                )
                yield SumFrame(server if b - a <= room else -1, header, body)


def _told(outcome: PushOutcome) -> PushOutcome:
    return outcome


def _pushes(joined: Round[Brought], table: str) -> int:
    """How many pushes to a table there are in a round; of one alone there is no sum."""
    return sum(len(each.pushes.get(table, ())) for each in joined.brought.values())


def _fits(spec: TableSpec, rows: np.ndarray) -> bool:
    """Whether rows can be added to those of the table as it is now."""
    return rows.shape[1:] == (spec.dim,) and rows.dtype == spec.dtype


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
