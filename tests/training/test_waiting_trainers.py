"""Trainers whose processes live wait for another controller, and go on where they were."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time

import dask
import pytest
from noticing import assert_noticed
from servers import PATIENCE, wait_until

import dps
from dps.engine.client.session import ClientSession
from dps.engine.client.ticket import Ticket
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.run_records import recorded
from dps.engine.controller.runs import Runs
from dps.engine.training.participant import GREETING_SECONDS, LOOK_SECONDS, Participant
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Endpoint
from dps.errors import ControllerGoneError

NAME, SECRET = "dps", "ab" * 32
SECONDS = 5.0  # that trainers need when all goes well, with much to spare
VERBS = {frames.JOIN: "join", frames.TICK: "tick", frames.LEAVE: "leave"}


class LoneController:
    """Runs behind an endpoint, which may listen where another one did; `known` once it has the parameter server."""

    def __init__(self, grace: float, port: int = 0, known: bool = True):
        self.runs = Runs(NAME)
        self.runs.grace = grace
        handlers = {kind: self._to(verb) for kind, verb in VERBS.items()}
        self.endpoint = Endpoint("test", "127.0.0.1", handlers, self.runs.disconnected, port=port)
        if known:
            self.know()

    def know(self) -> None:
        self.endpoint.call(self.endpoint.secrets.__setitem__, NAME, SECRET)

    def _to(self, verb: str):
        return lambda *frame: getattr(self.runs, verb)(*frame)

    @property
    def ticket(self) -> Ticket:
        return Ticket(NAME, (self.endpoint.host, self.endpoint.port), SECRET)


def go_on(staleness):
    """Two trainers outlive their controller: one waits in a tick for the other, which is at work."""
    with dask.config.set({"dps.timeouts.connect": "0.1 s"}):
        first = LoneController(grace=PATIENCE)
        run = first.endpoint.call(first.runs.start, 2, None if math.isinf(staleness) else staleness)
        ahead, behind = (dps.Trainer.join(first.ticket, run, n, incarnation=4) for n in range(2))
        with contextlib.closing(ahead), contextlib.closing(behind):
            paused = threading.Event()
            threads = [ticking(ahead, None), ticking(behind, paused)]
            wait_until(lambda: (ahead.clock, behind.clock) >= (1, 1))
            record = first.endpoint.call(lambda: recorded(first.runs.runs[run]))
            first.endpoint.stop()
            paused.set()
            time.sleep(0.5)  # longer than a client without a run insists
            second = LoneController(PATIENCE, first.endpoint.port, known=False)
            try:
                assert second.ticket == first.ticket
                second.endpoint.call(InterruptedRuns(second.runs).resume, 50, [record])
                time.sleep(0.2)  # meanwhile it does not know the parameter server
                second.know()
                for thread in threads:
                    thread.join(SECONDS)
                assert (ahead.clock, behind.clock) == (3, 3)
                runs = second.runs.runs[run]
                assert [runs.record(n).attempt for n in range(2)] == [0, 0]
                ahead.leave()
                behind.leave()
                assert runs.over
            finally:
                second.endpoint.stop()


def ticking(trainer: dps.Trainer, paused: threading.Event | None) -> threading.Thread:
    """A thread in which a trainer ticks three times, the second time when it may."""

    def tick() -> None:
        with contextlib.suppress(dps.DPSError):
            trainer.tick()
            if paused is not None:
                paused.wait(PATIENCE)
            while trainer.clock < 3:
                trainer.tick()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_they_go_on_with_another_controller(staleness):
    go_on(staleness)


@pytest.mark.parametrize(
    "wrong",
    [
        (ClientSession, "insist", "max(self._insisting, self.grace)", "self._insisting"),
        (ClientSession, "insist", "(AccessDeniedError, ControllerGoneError)", "ControllerGoneError"),
        (Participant, "_enter", "session.grace = joined.grace", "pass"),
    ],
    ids=["they give up", "a stranger's refusal counts", "they are not told"],
)
def test_a_trainer_that_does_not_wait_is_noticed(wrong):
    assert_noticed(*wrong, lambda: go_on(0))


@contextlib.contextmanager
def trainer_ahead(controller: LoneController, staleness: float = 1, ticks: int = 1, **options: object):
    """A trainer that has ticked, of a run whose other trainer is at clock 0."""
    bound = None if math.isinf(staleness) else staleness
    run = controller.endpoint.call(controller.runs.start, 2, bound)
    participant = Participant(controller.ticket, run, 0, incarnation=4, **options)
    other = dps.Trainer.join(controller.ticket, run, 1, incarnation=4)
    with contextlib.closing(other), contextlib.closing(dps.Trainer(participant)) as trainer:
        for _ in range(ticks):
            trainer.tick()
        yield trainer


def ticks_alone(staleness: float, allowed: int) -> None:
    """Without a bound ticks go on without a controller; with one, or then, the next tick tells another controller."""
    with dask.config.set({"dps.timeouts.connect": "0.1 s"}):
        first = LoneController(grace=PATIENCE)
        with trainer_ahead(first, staleness) as trainer:
            run = trainer.run
            record = first.endpoint.call(lambda: recorded(first.runs.runs[run]))
            first.endpoint.stop()
            for _ in range(allowed - 1):
                trainer.tick()
            assert trainer.clock == allowed
            waits = threading.Thread(target=trainer.tick, daemon=True)
            if not math.isinf(staleness):
                waits.start()
                time.sleep(0.3)
                assert waits.is_alive()
                assert trainer.clock == allowed
            second = LoneController(PATIENCE, first.endpoint.port)
            try:
                second.endpoint.call(InterruptedRuns(second.runs).resume, 50, [record])
                clock = second.runs.runs[run].clock
                if math.isinf(staleness):
                    session = trainer.client.session
                    session.insist(session.controller)  # as another question does
                    wait_until(lambda: clock.clock_of(0) == allowed, SECONDS)
                    trainer.tick()
                wait_until(lambda: clock.clock_of(0) == allowed + 1, SECONDS)
            finally:
                second.runs.close(dps.errors.StoppedError("the end of the test"))
                second.endpoint.stop()
            if waits.ident is not None:
                waits.join(PATIENCE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("staleness", "allowed"), [(1, 1), (math.inf, 100)])
def test_ticks_without_a_bound_do_not_wait(staleness, allowed):
    ticks_alone(staleness, allowed)


def alone_for_the_grace() -> None:
    with dask.config.set({"dps.timeouts.connect": "0.1 s"}):
        controller = LoneController(grace=0.2)
        with trainer_ahead(controller, math.inf) as trainer:
            controller.endpoint.stop()
            trainer.tick()
            time.sleep(LOOK_SECONDS + 0.1)
            with pytest.raises(ControllerGoneError, match=r"worked 0\.2 s \(dps\.scheduler\.grace\)"):
                trainer.tick()


def test_a_trainer_goes_on_alone_for_the_grace_only():
    alone_for_the_grace()


def waits_where_ticks_are_rare() -> None:
    with dask.config.set({"dps.timeouts.connect": "0.1 s"}), pytest.MonkeyPatch.context() as patch:
        patch.setattr("dps.engine.training.participant.RARE_SECONDS", 0.1)
        controller = LoneController(grace=0.2)
        with trainer_ahead(controller, math.inf) as trainer:
            controller.endpoint.stop()
            time.sleep(0.2)
            with pytest.raises(ControllerGoneError, match=r"waited 0\.2 s"):
                trainer.tick()


def test_a_trainer_that_ticks_rarely_waits():
    waits_where_ticks_are_rare()


def looks_longer() -> None:
    """What listens there does not greet: each look waits twice as long."""
    with dask.config.set({"dps.timeouts.connect": "5 s"}):
        controller = LoneController(grace=PATIENCE)
        with trainer_ahead(controller, math.inf) as trainer:
            controller.endpoint.stop()
            trainer.tick()
            took = []
            with socket.create_server((controller.endpoint.host, controller.endpoint.port)):
                for _ in range(2):
                    trainer._participant._looked = -math.inf
                    began = time.monotonic()
                    trainer.tick()
                    took.append(time.monotonic() - began)
            assert took[0] >= GREETING_SECONDS
            assert took[1] >= 2 * GREETING_SECONDS


def test_looks_in_vain_take_longer_each_time():
    looks_longer()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        (("_pass_generally", "math.isinf(self.staleness) and", "False and"), alone_for_the_grace),
        (("_pass_generally", "now - ticked < RARE_SECONDS", "True"), waits_where_ticks_are_rare),
        (("_once", 'raise self._without_scheduler("worked", error) from error', "pass"), alone_for_the_grace),
        (("_look_for_controller", "2 * self._greeting", "self._greeting"), looks_longer),
        (("_join", "self._alone_since, self._looked, self._greeting =", "_ ="), lambda: ticks_alone(math.inf, 3)),
    ],
    ids=["not at all", "rarely", "for ever", "no longer", "it does not know that it is back"],
)
def test_a_wrong_way_to_go_on_alone_is_noticed(wrong, check):
    assert_noticed(Participant, *wrong, check)


def test_the_error_says_for_how_long_they_waited_and_what_to_do():
    with dask.config.set({"dps.timeouts.connect": "0.1 s"}):
        controller = LoneController(grace=0.4)
        with trainer_ahead(controller) as trainer:
            controller.endpoint.stop()
            with pytest.raises(
                ControllerGoneError, match=r"waited 0\.4 s \(dps\.scheduler\.grace\), to clock 1, .*ps\.resume_run"
            ):
                trainer.tick()


def test_a_trainer_that_is_told_to_stop_does_not_wait():
    stop = []
    controller = LoneController(grace=PATIENCE)
    with trainer_ahead(controller, cancelled=lambda: bool(stop)) as trainer:
        controller.endpoint.stop()
        threading.Timer(0.2, stop.append, [True]).start()
        with pytest.raises(dps.errors.StoppedError, match="was told to stop at clock 1"):
            trainer.tick()
