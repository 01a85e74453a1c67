"""Participant: a client that has joined a run, and what it tells and asks the controller.

A connection to the controller that breaks is made anew and joins anew; then what was asked is asked again. So whatever
a participant says may come twice, and each of these may: a tick counts once, for it names its clock; a report has a
number; a collective call has its place in the program; a portion is given again to who holds it. What is kept until it
is answered is little: a tick whose answer is still to be read (`_ticked`), a report that may not have arrived
(`_report`), and what it takes to join again (`_wish`), with a count by which the controller knows the newest of its
connections.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from dps import config
from dps.client import Client, Ticket
from dps.errors import ClockTimeoutError, ControllerGoneError, StoppedError
from dps.reports import TrainerReport
from dps.transfers import TableRoute
from dps.wire import frames
from dps.wire.channel import Channel, Request
from dps.wire.frames import Header
from dps.wire.pool import Pool

__all__ = ["Participant"]

T = TypeVar("T")
GRACE = 10.0  # seconds beyond the controller's own time-out before a trainer stops believing in an answer


class Participant(Client):
    """A trainer as the controller knows it; its parameters and attributes are those of :class:`dps.Trainer`."""

    _has_left = False
    _portions: Any = None  # where batches come from, with reassign=True (`portions.py`)

    def __init__(
        self,
        ticket: Ticket,
        run: int,
        trainer: int,
        incarnation: int | None = 0,
        where: str = "",
        cancelled: Callable[[], bool] | None = None,
        pool: Pool | None = None,
        partition_numbers: Sequence[int] = (),
    ):
        super().__init__(ticket, pool)
        self.run, self.number, self.partition_numbers = run, trainer, list(partition_numbers)
        about = {"run": run, "trainer": trainer, "incarnation": incarnation, "where": where}
        self._wish: dict[str, Any] = {**about, "joins": 0}
        self._cancelled = cancelled
        self._ticked: Request | None = None  # a tick whose answer is still to be read
        self._report: TrainerReport | None = None  # goes with all that is sent until something is answered
        self._calls = self._planned = 0  # collectives called at this clock; iterations there are to be
        self._clock_patience = config.seconds("clock") + GRACE
        self.clock = self._reached = 0  # the latter by an attempt before this one
        try:
            with self._lock:
                connected = super()._controller
                answer = self._insist(lambda: self._join(connected()), known=True)  # it has just sent us here
            self.trainer, self.attempt = int(answer["origin"]), int(answer["attempt"])
            self._wish["incarnation"] = int(answer["incarnation"])
            self.staleness = math.inf if answer["staleness"] is None else float(answer["staleness"])
            self.trainers = self.parties = int(answer["trainers"])
            self.meter.start(self.trainers, self._now())
            self._reached = int(answer["clock"])
            self._first_portion = int(answer.get("portions", 0))  # its origin
            if self._reached:
                self._pass(self._reached)
        except BaseException:
            self.close()
            raise

    def leave(self, failed: str | None = None) -> None:
        """Leave the run: the others no longer wait for this trainer; with `failed`, they are stopped."""
        if failed is None:
            self.wait()
            waited, self._ticked = self._ticked, None
            come = waited is None or self._has_come(waited)
            if not come or self._report is not None:  # before the last one, or that would be taken for a late one
                self._pass(self.clock)
        now = self._now()
        told = {"failed": failed, "seconds": self.meter.split(now), "report": self.meter.take(now).asdict()}
        self._ask_controller(Header(frames.LEAVE), told)
        self._has_left = True
        self.close()

    def _close(self) -> None:
        """Close all connections. A trainer that has not left is lost to the others."""
        if not self._has_left and self._controller_channel is not None:
            self._controller_channel.close()  # it is ours alone, and its end tells
        super()._close()

    # -- the clock, and others at it

    def _pass(self, clock: int) -> None:
        """Tell the controller of a clock (and report, now and then), and wait until one may go on from there."""
        header = Header(frames.TICK, clock=clock, count=self._planned)
        with self._lock:
            began = self._now()
            deadline = began + self._clock_patience
            self.meter.begin(began)
            self.meter.clocks = clock - self._reached

            def ask() -> None:
                waited, self._ticked = self._ticked, None
                if waited is not None:
                    self._told(waited.answer(deadline))
                if self._report is None and self.meter.due(began):
                    self._report = self.meter.take(began)
                controller, body = self._controller(), b"" if self._report is None else self._report.encode()
                if math.isinf(self.staleness):  # nobody is held back: the answer is read at the next tick
                    self._ticked = controller.ask(header, body)
                else:
                    self._told(controller.exchange(header, deadline, body))

            try:
                self._again(ask)
            finally:
                self.meter.lap("wait", self._now())

    def _told(self, answer: Header) -> None:
        """What the answer to a tick says; the report that went with it has arrived."""
        self._report = None
        self.parties = max(1, answer.parties)
        if answer.start:
            self.staleness = math.inf if answer.start == frames.NO_BOUND else answer.start - 1.0

    def _lease(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Ask the controller about portions (`dps/portions.py`). A report goes along when one is due."""
        self._check()
        with self._lock, self._waiting() as began:
            if self._report is None and self.meter.due(began):
                self._report = self.meter.take(began)
            if self._report is not None:  # perhaps it went with a tick already: then it is a repeat
                wish = {**wish, "report": self._report.asdict()}
            body, deadline = frames.encode_json(wish), began + self._patience
            header = Header(frames.LEASE)
            answer = self._again(lambda: self._controller().ask(header, body).result(deadline).body)
            self._report = None
            return frames.decode_json(answer)

    def _bring(self, about: dict[str, Any], raw: bytes) -> bytes | bytearray:
        if self._portions is not None:
            self._portions.outside(about["op"])
        self._check()
        self.wait()
        text = frames.encode_json(about)
        body = text + raw.ljust(frames.padded(len(raw)), b"\0")
        header = Header(frames.COLLECT, clock=self.clock, number=self._calls, count=len(text))
        self._calls += 1
        try:
            with self._lock, self._waiting() as began:
                deadline = began + self._clock_patience
                return self._again(lambda: self._controller().ask(header, body).result(deadline).body)
        except ClockTimeoutError:
            self._calls -= 1  # who asks again is at the same place
            raise

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[float]:
        """Within, the trainer waits for others; since when."""
        began = self._now()
        self.meter.begin(began)
        try:
            yield began
        finally:
            self.meter.lap("wait", self._now())

    def _move(self, clock: int) -> None:
        """To the next place in the program: ops and collective calls are counted from 0 again."""
        self.clock, self._number, self._calls = clock, 0, 0

    # -- the connection to the controller

    def _again(self, ask: Callable[[], T]) -> T:
        """`ask()`, and again where the connection broke: a trainer may say everything twice."""

        def afresh() -> T:
            try:
                return ask()
            except ControllerGoneError:
                self._ticked = None  # a later tick says more
                raise

        return self._insist(afresh)

    def _has_come(self, request: Request) -> bool:
        """Whether the answer came before the connection broke."""
        try:
            self._told(request.answer(self._now() + self._clock_patience))  # a bound may hold it back by now
            return True
        except ControllerGoneError:
            return False

    def _controller(self) -> Channel:
        before = self._controller_channel
        channel = super()._controller()
        if channel is not before:
            self._join(channel)
        return channel

    def _join(self, channel: Channel) -> dict[str, Any]:
        self._wish["joins"] += 1
        try:
            deadline = self._now() + self._patience
            return frames.decode_json(
                channel.ask(Header(frames.JOIN), frames.encode_json(self._wish)).result(deadline).body
            )
        except BaseException:
            channel.close()
            raise

    # -- told to stop

    def _check(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise StoppedError(f"trainer {self.number} of run {self.run} was told to stop at clock {self.clock}")

    _idle = _check

    def _route(self, table: str) -> TableRoute:
        self._check()
        return super()._route(table)
