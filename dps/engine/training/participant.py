"""Participant: what a trainer tells and asks the controller about its run.

A connection to the controller that breaks is made anew, and the participant joins anew on it; then it asks again what
it had asked. So whatever a participant says may come twice, and each of these may: a tick counts once, because it names
its clock; a report has a number; a collective call has its place in the program; a portion is given again to the
trainer that holds it. What a participant keeps until it is answered is little: a tick whose answer is still to be read
(`_tick`), a report that may not have arrived (`_report`), and what it takes to join again (`_join_request`), with a
count by which the controller knows the newest of its connections.

Where the parameter server outlives its scheduler, a participant waits for the next controller. But in a run without a
bound a tick waits for no other trainer, so it does not wait for a controller either (`_once`): the trainer goes on
*alone*, looks for a controller at some of its ticks, and tells it of its clock when it joins again. Where a trainer
ticks rarely, its ticks wait all the same, because it would look too rarely, and count as lost.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

from dps import config
from dps.engine.client.cached_tables import CachedTables
from dps.engine.client.client import Client
from dps.engine.client.environment import Environment
from dps.engine.client.held_pushes import HeldPushes
from dps.engine.client.merged_pushes import MergedPushes
from dps.engine.client.session import ClientSession
from dps.engine.client.ticket import Ticket
from dps.engine.coordination.clock import tightest
from dps.engine.core.requests.polling import Polling
from dps.engine.core.requests.tick import DONE, OPEN, PlainTicks
from dps.engine.state.ops import TableSpec
from dps.engine.telemetry.reports import TrainerReport
from dps.engine.training.allreduce import RingAllreduce, RingPeer
from dps.engine.training.read_gate import ReadGate
from dps.engine.training.types import Json
from dps.engine.wire import frames
from dps.engine.wire.channel import Channel, Request
from dps.engine.wire.frames import Header
from dps.engine.wire.headers import Await, Collect, Tick, TickAnswer
from dps.engine.wire.messages import Join, Joined, LeaseAnswer, LeaseRequest, Leave, TimeSpent, decode, encode
from dps.errors import (
    AccessDeniedError,
    ClockTimeoutError,
    ControllerGoneError,
    DPSError,
    InputError,
    RequestTimeoutError,
    StoppedError,
)

__all__ = ["Participant"]

T = TypeVar("T")
GRACE_SECONDS = 10.0  # beyond the controller's own time-out, before a trainer stops believing in an answer
LOOK_SECONDS = 1.0  # between two looks for a controller, of a trainer that goes on alone: at least,
LOOK_SHARE = 4.0  # and so many times what a look may take
# How long a look waits for a greeting, because what listens there may stand still: twice as long after each in vain.
GREETING_SECONDS, LONGEST_GREETING_SECONDS = 0.25, 10.0
RARE_SECONDS = 5.0  # between two ticks: then the trainer does not go on alone


class Participant:
    """A trainer as the controller knows it. It joins the run when it is made.

    Parameters
    ----------
    number : int
        Which of its trainers this is: 0, 1, ...
    incarnation : int, optional
        Which attempt at it; a later one fences off earlier ones. None: the next one, by the controller's count.
    where : str
        For messages: host, worker or process.
    cancelled : callable, optional
        Asked now and then whether to stop.

    Attributes
    ----------
    client : Client
        What the trainer pulls and pushes with.
    reached : int
        The clock that an attempt before this one has reached.
    planned : int
        The clock at which the trainer means to be done; 0: not known.
    read_clock : float
        A clock that it may take for that of the others where it reads a table that has a staleness of its own: the
        others have reached it, or wait in a meeting.
    others_clock : float
        A clock that all other trainers had reached when this one began its iteration: what they pushed before it is on
        the servers. Infinite where no other trainer is left.
    trainers : int
        How many the run began with.
    first_portion : int
        The origin of portion 0 of leased work.
    warm_start : int
        The clock at which all trainers but the first begin.
    clock_patience : float
        Seconds that a trainer waits for the others.
    """

    def __init__(
        self,
        ticket: Ticket,
        run: int,
        number: int,
        incarnation: int | None = 0,
        where: str = "",
        cancelled: Callable[[], bool] | None = None,
        environment: Environment | None = None,
        leased: bool = False,
    ):
        self.run, self.number, self.leased = run, number, leased
        self._join_request = Join(run, number, incarnation, where)
        self._cancelled = cancelled
        self._tick: Request | None = None  # whose answer is still to be read
        self._plain = PlainTicks(Polling(config.polling()))
        self._report: TrainerReport | None = None  # goes with all that is sent until something is answered
        self._collectives = 0  # called at this clock
        self._ticked = -math.inf  # when it ticked last, without a bound
        self._alone_since: float | None = None  # since when it has ticked without a controller,
        self._looked = -math.inf  # when it looked for one last,
        self._greeting = GREETING_SECONDS  # and how long the next look may take
        self._left = False
        self._peer: RingPeer | None = None
        self._ring: RingAllreduce | None = None
        self._joined: Joined | None = None  # the answer to the last JOIN
        self.reached = self.planned = self.first_portion = self.warm_start = 0
        self.staleness, self.trainers = math.inf, 1
        self.others_clock = self.read_clock = 0.0
        self.clock_patience = config.seconds("clock") + GRACE_SECONDS
        self.session = ClientSession(ticket, environment, self.check, self._join, cancelled)
        self.session.hangs_up = True  # because the end of this connection tells that the trainer is lost
        self.session.own.clock = 0
        self.client = Client(ticket, session=self.session, check_aggregate=self.check_aggregate)
        try:
            self._enter()
        except BaseException:
            self.close()
            raise

    def _enter(self) -> None:
        """Join for the first time, and take up what the controller knows of this trainer."""
        session = self.session
        with session.lock:
            session.insist(session.controller, known=True)  # there is one, because it has just begun the run
        joined, own = self._joined, session.own
        assert joined is not None, "the session joins on each connection to the controller"
        own.id, own.attempt = joined.origin, joined.attempt
        self._join_request.incarnation, self._join_request.attempt = joined.incarnation, joined.attempt
        session.grace = joined.grace
        self.staleness = math.inf if joined.staleness is None else joined.staleness
        self.trainers = own.parties = joined.trainers
        self.others_clock = self.read_clock = 0 if joined.trainers > 1 else math.inf
        session.gate = None if joined.elastic else ReadGate(self, self._await_lowest)
        if not self.leased:  # because a portion may be another trainer's, whose repeats are no changes
            self.client.held = HeldPushes(self.client)
            session.merged = MergedPushes(self.client, self)
            session.cached = CachedTables(session, self, (session.ticket.controller, session.ticket.secret, self.run))
        session.meter.start(self.trainers, session.now())
        self.reached = joined.clock
        self.first_portion = joined.portions
        self.warm_start = joined.warm_start
        self.move(self.warm_start if self.number else 0)
        if self.reached:
            self._insist_on_clock(self.reached)
        if self.number and self.warm_start:
            self._await_first()

    def _await_first(self) -> None:
        """Wait until trainer 0 has come to the clock of the warm start, also without a bound on the staleness."""
        while self._tick is not None:
            tick, self._tick = self._tick, None
            with self.waiting() as began:
                if not self._has_arrived(tick, began + self.clock_patience):
                    self._insist_on_clock(self.reached)

    @property
    def clock(self) -> int:
        return self.session.own.clock

    def bound_of(self, spec: TableSpec) -> float:
        """How stale its reads of a table may be: as stale as the run, or the table, allows."""
        return self.staleness if self.session.gate is None else tightest(self.staleness, spec.staleness)

    @property
    def incarnation(self) -> int:
        """Which attempt at the trainer this is, by the controller's count."""
        assert self._join_request.incarnation is not None, "the controller has given it one"
        return self._join_request.incarnation

    def leave(self, failed: str | None = None) -> None:
        """Leave the run: the others no longer wait for this trainer; with `failed`, they are stopped."""
        session = self.session
        if failed is None:
            if session.merged is not None:
                session.merged.send_all_alone()  # because no clock ends that the others could end with it
            session.wait()
            tick, self._tick = self._tick, None
            arrived = tick is None or self._has_arrived(tick, session.now() + self.clock_patience)
            if not arrived or self._report is not None:  # before the last report, or that would be taken for a late one
                self._insist_on_clock(self.clock)
        now = session.now()
        leave = Leave(TimeSpent(**session.meter.split(now)), failed, session.meter.take(now).asdict())
        session.ask_controller(Header(frames.LEAVE), encode(leave))
        self._left, session.hangs_up = True, False
        self.close()

    def close(self) -> None:
        """Close all connections. A trainer that has not left is lost to the others."""
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()
        if self.session.cached is not None:
            self.session.cached.close()
        if self.session.merged is not None:
            self.session.merged.leave()
        self.session.close()

    # -- the clock, and others at it

    def pass_clock(self, clock: int) -> None:
        """Tell the controller of a clock (and report, now and then); wait until the trainer may go on from there."""
        session, meter = self.session, self.session.meter
        with session.lock:
            began = session.now()
            meter.begin(began)
            meter.clocks = clock - self.reached
            try:
                if not self._pass_plainly(clock, began):
                    self._pass_generally(clock, functools.partial(self._tell_clock, clock, began))
            finally:
                meter.lap("wait", session.now())

    def _insist_on_clock(self, clock: int) -> None:
        """Tell a controller of a clock, also where the staleness allows to go on without one."""
        with self.session.lock, self.waiting() as began:
            self.session.meter.clocks = clock - self.reached
            self._again(functools.partial(self._tell_clock, clock, began))

    def _pass_plainly(self, clock: int, began: float) -> bool:
        """Pass a clock in one compiled step; False where that has to go the general way."""
        controller, tick = self.session.plain_controller(), self._plain
        unread = self._tick is not None or self._report is not None
        if controller is None or unread or self.session.meter.due(began) or math.isinf(self.staleness):
            return False
        try:
            outcome = tick.pass_clock(controller.stream, clock, self.planned)
            if outcome == OPEN:
                request = Request(controller, None, 0, frames.TICK)
                controller.adopt(request, tick.number)
                controller.feed(tick.received)
        except BaseException as error:  # Ctrl-C, too: the answer may be on its way
            controller.fail(error)
            if isinstance(error, ConnectionError):
                return False  # a tick may be said twice
            raise
        if outcome == DONE:
            self._go_on(TickAnswer.of_fields(tick.parties, tick.start))
        elif outcome == OPEN:
            return self._has_arrived(request, began + self.clock_patience)
        return outcome == DONE

    def _tell_clock(self, clock: int, began: float) -> None:
        """Tick, with a report where one is due; without a bound the answer is read at the next tick."""
        session = self.session
        deadline = session.now() + self.clock_patience  # anew, because another controller may have come meanwhile
        tick, self._tick = self._tick, None
        if tick is not None:
            self._take_answer(tick.answer(deadline))
        if self._report is None and session.meter.due(began):
            self._report = session.meter.take(began)
        body = b"" if self._report is None else self._report.encode()
        request = session.controller().ask(Tick(clock, self.planned).header(), body)
        if math.isinf(self.staleness):  # no trainer is held back
            self._tick = request
        else:
            self._take_answer(request.answer(deadline))

    def _pass_generally(self, clock: int, tell: Callable[[], object]) -> None:
        """Pass a clock, again where the connection breaks; without a bound, also without a controller."""
        now = self.session.now()
        ticked, self._ticked = self._ticked, now
        if math.isinf(self.staleness) and self.session.grace and now - ticked < RARE_SECONDS:
            self._once(tell, now)
        else:
            self._again(tell)

    def _once(self, tell: Callable[[], object], now: float) -> None:
        """`tell()` a controller; without one, do nothing for as long as the grace, because a later tick says more."""
        if self._alone_since is not None and now - self._looked < max(LOOK_SECONDS, LOOK_SHARE * self._greeting):
            return
        try:
            if self._alone_since is not None:
                self._look_for_controller()
            tell()
        except (ControllerGoneError, AccessDeniedError) as error:
            self._tick, self._looked = None, now
            if self._alone_since is None:
                self._alone_since = now
            elif now - self._alone_since > self.session.grace:
                raise self._without_scheduler("worked", error) from error

    def _look_for_controller(self) -> None:
        began = self.session.now()
        try:
            self.session.controller(self._greeting)
        except (ControllerGoneError, RequestTimeoutError) as error:
            if self.session.now() - began >= self._greeting:  # it was not refused
                self._greeting = min(2 * self._greeting, LONGEST_GREETING_SECONDS)
            raise ControllerGoneError(str(error)) from error

    def _take_answer(self, answer: Header) -> None:
        """What the answer to a tick says; the report that went with it has arrived."""
        self._report = None
        self._go_on(TickAnswer.of(answer))

    def _go_on(self, answer: TickAnswer) -> None:
        """Note how many trainers count, where the last of them is, and how far they may be apart."""
        self.session.own.parties = max(1, answer.trainers)
        self.others_clock = self.read_clock = answer.lowest if answer.trainers > 1 else math.inf
        if answer.staleness is not None:
            self.staleness = answer.staleness
        if answer.renewed:
            self.session.forget_routes()  # because they say how stale reads of a table may be

    def _await_lowest(self, clock: int) -> None:
        """Wait until all other trainers have reached a clock, or the staleness of a table has changed."""
        session = self.session

        def ask() -> None:
            deadline = session.now() + self.clock_patience  # anew, because another controller may have come meanwhile
            tick, self._tick = self._tick, None
            if tick is not None:
                self._take_answer(tick.answer(deadline))
                if self.read_clock >= clock:
                    return
            answer = TickAnswer.of(session.controller().ask(Await(clock).header()).answer(deadline))
            self._go_on(answer)
            if not answer.renewed:  # an answer does not say clocks beyond 2^31
                self.read_clock = max(self.read_clock, clock)

        with session.lock, self.waiting():
            self._again(ask)

    def lease(self, request: LeaseRequest) -> LeaseAnswer:
        """Ask the controller about portions (`controller/work_leases.py`). A report goes along when one is due."""
        self.check()
        session = self.session
        with session.lock, self.waiting() as began:
            if self._report is None and session.meter.due(began):
                self._report = session.meter.take(began)
            if self._report is not None:  # it may have gone with a tick already: then it is a repeat
                request.report = self._report.asdict()
            body, header = encode(request), Header(frames.LEASE)
            answer = self._again(lambda: self._answered(header, body, session.patience))
            self._report = None
            return decode(LeaseAnswer, answer)

    def meet(self, call: Json, raw: bytes) -> bytes:
        """Bring bytes to a collective call of all trainers; its answer."""
        self.check()
        session = self.session
        if session.merged is not None:
            session.merged.send_all_alone()  # because the others may rely on them after the meeting
        session.wait()
        text = frames.encode_json(call)
        body = text + raw.ljust(frames.padded(len(raw)), b"\0")
        header = Collect(self.clock, self._collectives, len(text)).header()
        self._collectives += 1
        try:
            with session.lock, self.waiting():
                answer = bytes(self._again(lambda: self._answered(header, body, self.clock_patience)))
            self.read_clock = self.others_clock  # because those that were in the meeting count again
            return answer
        except ClockTimeoutError:
            self._collectives -= 1  # a trainer that calls again is at the same place of its program
            raise

    def ring(self) -> RingAllreduce:
        """The allreduce of large arrays, with the connections that it needs, which the first call makes."""
        if self._peer is None:
            self._peer = RingPeer(self.session.ticket, self.session.environment, self.check)
            self._ring = RingAllreduce(self.number, self._peer, self.meet, self.clock_patience)
        assert self._ring is not None
        return self._ring

    @contextlib.contextmanager
    def waiting(self) -> Iterator[float]:
        """Within the block the trainer waits for others; gives the time at which that began."""
        session = self.session
        began = session.now()
        session.meter.begin(began)
        try:
            yield began
        finally:
            session.meter.lap("wait", session.now())

    def move(self, clock: int) -> None:
        """Go to the next place in the program: ops and collective calls are counted from 0 again."""
        own = self.session.own
        own.clock, own.number, self._collectives = clock, 0, 0
        self.client.replays = own.attempt > 0 and clock < self.reached

    # -- the connection to the controller

    def _answered(self, header: Header, body: bytes, patience: float) -> bytes | bytearray | memoryview:
        """The body of the controller's answer to a request, for which the trainer waits for so many seconds."""
        channel = self.session.controller()
        return channel.ask(header, body).result(self.session.now() + patience).body

    def _again(self, ask: Callable[[], T]) -> T:
        """`ask()`, and again where the connection broke: a trainer may say everything twice.

        If the parameter server outlives its scheduler, the trainer waits for the next one.
        """

        def afresh() -> T:
            try:
                return ask()
            except ControllerGoneError:
                self._tick = None  # a later tick says more
                raise

        try:
            return self.session.insist(afresh)
        except (ControllerGoneError, AccessDeniedError) as error:
            if not self.session.grace:
                raise
            raise self._without_scheduler("waited", error) from error

    def _without_scheduler(self, did: str, error: DPSError) -> ControllerGoneError:
        return ControllerGoneError(
            f"trainer {self.number} of run {self.run} has {did} {self.session.grace:g} s (dps.scheduler.grace), to "
            f"clock {self.clock}, without another scheduler in place of the one that is gone: start one at its address "
            f"within that time; a parameter server that was taken over goes on with the run by ps.resume_run "
            f"({error})"
        )

    def _has_arrived(self, tick: Request, deadline: float) -> bool:
        """Whether the answer to a tick came before the connection broke."""
        try:
            # The bound may have changed since, and hold the trainer back.
            self._take_answer(tick.answer(deadline))
            return True
        except ControllerGoneError:
            return False

    def _join(self, channel: Channel) -> None:
        self.session.forget_routes()  # while there was no connection, the staleness of a table may have changed
        self._join_request.joins += 1
        self._join_request.clock = max(self.clock, self.reached)
        try:
            deadline = self.session.now() + self.session.patience
            request = channel.ask(Header(frames.JOIN), encode(self._join_request))
            self._joined = decode(Joined, request.result(deadline).body)
        except BaseException:
            channel.close()
            raise
        self._alone_since, self._looked, self._greeting = None, -math.inf, GREETING_SECONDS

    # -- what a trainer may not do

    def check(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise StoppedError(f"trainer {self.number} of run {self.run} was told to stop at clock {self.clock}")

    def check_aggregate(self, spec: TableSpec) -> None:
        """Refuse a push to a table that sums up the pushes of a clock, where trainers are not at the same clock."""
        table = f"table {spec.name!r} collects a clock's pushes"
        if self.warm_start:
            raise InputError(
                f"{table} (aggregate={spec.aggregate!r}), one of each trainer: with warm_start= there are clocks at "
                "which one trainer pushes alone"
            )
        if self.leased:
            raise InputError(
                f"{table}, one of each trainer (aggregate={spec.aggregate!r}): with reassign=True trainers push as "
                f"often as they come to it"
            )
        if self.staleness != 0:
            raise InputError(
                f"{table} (aggregate={spec.aggregate!r}), which needs staleness 0; this run has {self.staleness:g}"
            )
