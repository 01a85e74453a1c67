"""The plain way of a tick against the general one: the same frames, bounds and errors; and each reason to decline."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import random
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from compiled import variant
from servers import wait_until

import dps
from dps.engine.client.session import ClientSession
from dps.engine.client.ticket import Ticket
from dps.engine.controller.runs import Runs
from dps.engine.core.requests.exchange import Stream
from dps.engine.core.requests.polling import Polling
from dps.engine.core.requests.tick import DECLINED, DONE, OPEN, PlainTicks
from dps.engine.training import participant
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.frames import Header, encode_header
from dps.errors import ClockTimeoutError, ControllerGoneError, DPSError, LimitError, StoppedError

NAME, SECRET = "dps", "ab" * 32
VERBS = {frames.JOIN: "join", frames.TICK: "tick", frames.LEAVE: "leave", frames.COLLECT: "collect"}


class Controller:
    """Runs behind an endpoint, without Dask; it keeps the headers of all ticks. `instead` handles the next tick."""

    def __init__(self):
        self.runs, self.ticks, self.instead = Runs(NAME), [], None
        handlers = {kind: self._to(verb) for kind, verb in VERBS.items()}
        self.endpoint = Endpoint("test", "127.0.0.1", handlers, self.runs.disconnected)
        self.endpoint.secrets[NAME] = SECRET
        self.ticket = Ticket(NAME, (self.endpoint.host, self.endpoint.port), SECRET)

    def _to(self, verb: str):
        def handle(connection, header, body) -> None:
            if verb == "tick":
                self.ticks.append(header)
                instead, self.instead = self.instead, None
                if instead is not None:
                    instead(connection, header)
                    return
            getattr(self.runs, verb)(connection, header, body)

        return handle

    def start(self, trainers: int = 1, staleness: float | None = 0) -> int:
        return self.endpoint.call(self.runs.start, trainers, staleness)

    def trainer(self, run: int, number: int = 0) -> dps.Trainer:
        return dps.Trainer.join(self.ticket, run, number)


@pytest.fixture
def controller():
    made = Controller()
    yield made
    made.endpoint.stop()


class Watched:
    """The outcomes of the ticks that came to the plain way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type = PlainTicks):
        self.outcomes = outcomes = []

        class WatchedTick(kind):  # type: ignore[misc, valid-type]
            def pass_clock(self, *args):
                outcomes.append("broken")
                outcomes[-1] = super().pass_clock(*args)
                return outcomes[-1]

        monkeypatch.setattr(participant, "PlainTicks", WatchedTick)


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


@pytest.fixture
def trainer(controller, watched):
    with contextlib.closing(controller.trainer(controller.start())) as made:
        made.client.session.meter._due = math.inf  # no report
        yield made


def story(controller: Controller, seed: int) -> list:
    """What some trainers say and hear while they tick at random, and leave; without their reports."""
    draw = random.Random(seed)
    count, staleness = draw.choice([1, 2, 3]), draw.choice([0, 1, 2, 5])
    run, heard = controller.start(count, staleness), []
    trainers = {n: controller.trainer(run, n) for n in range(count)}
    for trainer in trainers.values():
        trainer.client.session.meter._due = math.inf
    for _ in range(60):
        if draw.random() < 0.05:
            staleness = draw.choice([0, 1, 3])
            controller.endpoint.call(controller.runs.set_staleness, staleness, run)
        if len(trainers) > 1 and draw.random() < 0.02:
            trainers.pop(draw.choice(sorted(trainers))).leave()
        clocks = {n: trainer.clock for n, trainer in trainers.items()}
        free = [n for n in clocks if clocks[n] + 1 - min({**clocks, n: clocks[n] + 1}.values()) <= staleness]
        together = [draw.choice(free)] if free else [n for n in clocks if clocks[n] == min(clocks.values())]
        for n in together:
            trainers[n]._participant.planned = draw.choice([0, 0, 7, 1 << 31])
        ticking = [threading.Thread(target=trainers[n].tick) for n in together]
        for thread in ticking:
            thread.start()
        for thread in ticking:
            thread.join(30)
        heard += [(t.clock, t.staleness, t.client.session.own.parties) for t in trainers.values()]
    for trainer in trainers.values():
        trainer.leave()
    said = [header._replace(request=0) for header in controller.ticks]
    return [sorted(said), heard]


@contextlib.contextmanager
def general_way():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientSession, "plain_controller", lambda session: None)
        yield


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_say_and_hear_the_same(watched, seed: int) -> None:
    stories = []
    for way in (contextlib.nullcontext, general_way):
        made = Controller()
        with way():
            stories.append(story(made, seed))
        made.endpoint.stop()
    assert stories[0] == stories[1]
    assert watched.outcomes.count(DONE) > 20


# ---- reasons to decline


def test_a_plain_tick_is_one_step(trainer, watched) -> None:
    assert [trainer.tick() for _ in range(3)] == [1, 2, 3]
    assert watched.outcomes == [DONE] * 3


def test_a_report_goes_the_general_way(controller, watched) -> None:
    with contextlib.closing(controller.trainer(controller.start())) as trainer:
        meter = trainer.client.session.meter
        wait_until(lambda: meter.due(trainer.client.session.now()))
        trainer.tick()
        assert watched.outcomes == []
        assert controller.ticks[-1].body
        trainer.tick()
        assert watched.outcomes == [DONE]


def test_without_a_bound_no_answer_is_awaited(controller, watched) -> None:
    run = controller.start(1, None)
    with contextlib.closing(controller.trainer(run)) as trainer:
        assert (trainer.tick(), watched.outcomes) == (1, [])
        controller.endpoint.call(controller.runs.set_staleness, 3, run)
        trainer.tick()  # its answer says so, and is read by the next one, which still goes the general way
        wait_until(lambda: len(controller.ticks) == 2)
        assert (trainer.tick(), trainer.staleness, watched.outcomes) == (3, 3, [])
        trainer.tick()
        assert watched.outcomes == [DONE]


@pytest.mark.parametrize("state", ["encrypted", "half read", "a large answer is owed"])
def test_a_connection_that_is_not_free_declines(trainer, watched, state: str) -> None:
    channel = trainer.client.session.controller()
    name, busy = {
        "encrypted": ("_encrypted", True),
        "half read": ("_reader", SimpleNamespace(between_frames=False)),
        "a large answer is owed": ("_sinks", 1),
    }[state]
    free = getattr(channel, name)
    setattr(channel, name, busy)
    channel.stream.touched = True  # as what made it busy has said
    assert trainer.client.session.plain_controller() is None
    setattr(channel, name, free)
    assert trainer.client.session.plain_controller() is channel


def test_a_plan_that_does_not_fit_gets_the_general_error(trainer, watched) -> None:
    trainer._participant.planned = 1 << 32
    with pytest.raises(LimitError, match="does not fit its place in a frame"):
        trainer.tick()
    assert watched.outcomes == [DECLINED]


def test_a_peer_that_takes_nothing_is_left_to_the_general_way() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                near.send(bytes(4096))
        assert PlainTicks(Polling(0.0)).pass_clock(Stream(near.fileno()), 1, 0) == DECLINED


# ---- what may come after the tick was sent


def test_an_answer_that_is_late(controller, trainer, watched) -> None:
    go_on = threading.Event()
    controller.instead = lambda connection, header: (go_on.wait(30), controller.runs.tick(connection, header, b""))
    threading.Timer(0.6, go_on.set).start()
    assert (trainer.tick(), trainer.tick()) == (1, 2)
    assert watched.outcomes == [OPEN, DONE]
    assert [tick.clock for tick in controller.ticks] == [1, 2]


def test_a_wait_that_is_too_long_names_the_limit(controller, watched) -> None:
    with contextlib.closing(controller.trainer(controller.start(2))) as trainer:
        controller.runs.patience = 0.4
        sweeps = threading.Event()

        def sweep() -> None:
            while not sweeps.wait(0.1):
                controller.endpoint.call(controller.runs.check_timeouts)

        sweeper = threading.Thread(target=sweep)
        sweeper.start()
        try:
            with pytest.raises(ClockTimeoutError, match="trainer 0 has waited 0 s at clock 1"):
                trainer.tick()
        finally:
            sweeps.set()
            sweeper.join()
        assert (watched.outcomes, trainer.clock) == ([OPEN], 0)


def test_an_error_is_the_callers(controller, trainer, watched) -> None:
    controller.endpoint.call(controller.runs.stop, trainer.run, StoppedError("because"))
    with pytest.raises(StoppedError, match="because"):
        trainer.tick()
    assert watched.outcomes == [OPEN]


def in_pieces(sizes: list[int], before: bytes = b""):
    def answer(connection, header) -> None:
        whole = before + encode_header(Header(frames.OK, request=header.request, parties=5, start=9))
        for size in [*sizes, len(whole)]:
            connection.write(whole[:size])
            whole = whole[size:]
            time.sleep(0.02)

    return answer


@pytest.mark.parametrize("sizes", [[], [1], [63], [8, 8, 40]])
def test_an_answer_that_comes_in_pieces(controller, trainer, watched, sizes: list[int]) -> None:
    controller.instead = in_pieces(sizes)
    trainer.tick()
    assert (watched.outcomes, trainer.staleness, trainer.client.session.own.parties) == ([DONE], 8, 5)


def test_an_answer_to_an_earlier_request_comes_first(controller, trainer, watched) -> None:
    channel = trainer.client.session.controller()
    earlier = []
    controller.instead = lambda connection, header: earlier.append((connection, header))
    request = channel.ask(Header(frames.TICK, clock=0))
    wait_until(lambda: earlier)

    def answer_both(connection, header) -> None:
        for asked in (earlier[0][1], header):
            connection.reply(Header(frames.OK, request=asked.request, parties=3, start=2))

    controller.instead = answer_both
    assert (trainer.tick(), trainer.staleness) == (1, 1)
    assert watched.outcomes == [OPEN]
    assert request.done
    assert request.error is None


@pytest.mark.parametrize("how", ["answer to another", "kind", "magic", "body"])
def test_what_is_no_answer_is_not_taken_for_one(controller, trainer, watched, how: str) -> None:
    def answer(connection, header) -> None:
        head = Header(frames.OK, request=header.request, start=7)
        if how == "answer to another":
            head = head._replace(request=header.request + 5)
        elif how == "kind":
            head = head._replace(kind=frames.WELCOME)
        elif how == "body":
            head = head._replace(body=8)
        data = bytearray(encode_header(head))
        if how == "magic":
            data[0] ^= 1
        connection.write(bytes(data) + bytes(head.body))

    controller.instead = answer
    with contextlib.suppress(DPSError):
        trainer.tick()
    assert watched.outcomes[0] == OPEN
    assert trainer.staleness == (6 if how in ("kind", "body") else 0)  # of these the general way takes no notice


@pytest.mark.parametrize("arrives", [True, False])
def test_a_connection_that_breaks_is_made_anew_and_the_tick_counts_once(
    controller, trainer, watched, arrives: bool
) -> None:
    def break_it(connection, header) -> None:
        if arrives:
            controller.runs.tick(connection, header, b"")
        connection.transport.abort()

    trainer.tick()
    controller.instead = break_it
    assert (trainer.tick(), trainer.tick()) == (2, 3)
    assert "broken" in watched.outcomes or DONE in watched.outcomes
    assert controller.endpoint.call(controller.runs.known(trainer.run).clock.clock_of, 0) == 3
    assert trainer._participant._join_request.joins == 2


@pytest.fixture
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where a shell has started the tests in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_connection(controller, trainer, watched, interruptible) -> None:
    held = []
    controller.instead = lambda connection, header: held.append((connection, header))
    threading.Timer(0.3, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        trainer.tick()
    assert (trainer.clock, trainer.client.session.plain_controller()) == (0, None)
    assert trainer.tick() == 1
    assert trainer._participant._join_request.joins == 2


def test_a_trainer_that_is_closed_during_a_tick_touches_no_other_file(controller, trainer, watched) -> None:
    held, errors = [], []
    controller.instead = lambda connection, header: held.append(header)

    def tick() -> None:
        try:
            trainer.tick()
        except DPSError as error:
            errors.append(type(error))

    thread = threading.Thread(target=tick)
    thread.start()
    wait_until(lambda: held)
    stream = trainer.client.session.controller().stream
    used = stream.calls
    trainer.close()
    pairs = [socket.socketpair() for _ in range(32)]
    numbers = {end.fileno() for pair in pairs for end in pair}
    try:
        assert not (used and stream.calls) or stream.fd not in numbers
        thread.join(20)
        assert issubclass(*errors, DPSError)
    finally:
        for end in itertools.chain(*pairs):
            end.close()


def test_a_controller_that_is_gone(controller, trainer, monkeypatch) -> None:
    trainer.tick()
    controller.endpoint.stop()
    trainer.client.session._insisting = 0.1
    with pytest.raises(ControllerGoneError):
        trainer.tick()


# ---- broken variants must not pass

CHECK = "head.magic == MAGIC and head.kind == OK and head.request == number and head.body == 0"
MUTANTS = [
    ("head.request == number and ", "number and "),
    ("head.magic == MAGIC and ", ""),
    ("head.kind == OK and ", ""),
    (" and head.body == 0", ""),
    ("self.received = (<char *> &answer)[:got]", "self.received = b''"),
    ("head.clock, head.count = clock, <uint32_t> planned", "head.clock, head.count = clock - 1, 0"),
    ("not 0 <= planned <= 0xFFFFFFFF", "False"),
    ("while written == 1 and got < HEADER", "while written == 1 and got == 0"),
]


def judge(kind: type) -> None:
    """The tests above that look at what the step itself decides."""
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch, kind)

        def run(test, *args) -> None:
            watched.outcomes.clear()
            made = Controller()
            try:
                with contextlib.closing(made.trainer(made.start())) as trainer:
                    trainer.client.session.patience = trainer._participant.clock_patience = 3.0
                    test(made, trainer, watched, *args)
            finally:
                made.endpoint.stop()

        run(lambda made, trainer, watched: test_a_plan_that_does_not_fit_gets_the_general_error(trainer, watched))
        for how in ("answer to another", "kind", "magic", "body"):
            run(test_what_is_no_answer_is_not_taken_for_one, how)
        run(test_an_answer_that_comes_in_pieces, [8, 8, 40])
        run(test_an_answer_to_an_earlier_request_comes_first)
        run(test_a_connection_that_breaks_is_made_anew_and_the_tick_counts_once, True)
        run(test_an_error_is_the_callers)
        test_both_ways_say_and_hear_the_same(watched, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [MUTANTS[0], *(pytest.param(*mutant, marks=pytest.mark.slow) for mutant in MUTANTS[1:])]
)
def test_a_broken_variant_is_caught(old: str, new: str) -> None:
    kind = variant("tick", "tick.pyx", old, new).PlainTicks
    with pytest.raises((AssertionError, pytest.fail.Exception, DPSError, OverflowError)):
        judge(kind)


@pytest.mark.thorough
def test_the_right_variant_is_not() -> None:
    judge(variant("tick", "tick.pyx", CHECK, CHECK).PlainTicks)
