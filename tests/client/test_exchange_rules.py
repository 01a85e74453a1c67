"""Rules of a call over sockets in one step, each by itself: its servers are the other ends of sockets."""

from __future__ import annotations

import socket
import time
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from compiled import variants
from test_plain import test_a_large_request_waits_for_rows_that_are_owed, use

from dps.engine.client import plain, requests
from dps.engine.client.origin import Origin
from dps.engine.core.requests import call as call_module
from dps.engine.core.requests import part as part_module
from dps.engine.core.requests.form import Form
from dps.engine.core.requests.meter import CallMeter
from dps.engine.core.requests.polling import Polling
from dps.engine.core.shard_map import ShardMap
from dps.engine.wire import channel, frames
from dps.engine.wire.frames import HEADER_SIZE, Header, encode_header, padded
from dps.errors import RequestTimeoutError

FLOAT32 = np.dtype("float32")
LARGE = 17_001  # rows of an answer that is not read together with its header, and has padding


class Stage:
    """A dense table of so many rows, one shard on each of some servers, whose channels are no more than sockets."""

    def __init__(self, rows: int, servers: int = 1, most: int = 1 << 22):
        self.pairs = [socket.socketpair() for _ in range(servers)]
        self.peers = [SimpleNamespace(stream=channel.Stream(ours.fileno()), is_plain=True) for ours, _ in self.pairs]
        for peer in self.peers:
            peer.traffic, peer.acknowledged = channel.Traffic(), lambda number: False
        self.wires, self.origin = plain.Wires(self.peers), Origin(2, number=5)
        self.meter, self.now = CallMeter(0.0), time.monotonic
        self.idle = lambda channel, left: None
        self.exchange = plain.Exchange(
            Polling(0.0), lambda: self.now(), self.meter, lambda channel, left: self.idle(channel, left)
        )
        form = Form(7, FLOAT32.num, 1, ShardMap(rows, servers), False, [(n, n + 1) for n in range(servers)])
        terms = requests.Terms
        self.pulls = terms(form, 1, most, frames.PULL, 0, False, True, False)
        self.pushes = terms(form, 1, most, frames.PUSH, 0, True, False, False)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()

    def send(self, values: np.ndarray | None = None, number: int = 1, server: int = 0, most: int | None = None) -> None:
        """A server answers a request with rows, or acknowledges it; so many bytes of that arrive."""
        rows = b"" if values is None else values.astype(FLOAT32).tobytes()
        rows = rows.ljust(padded(len(rows)), b"\0")
        answer = encode_header(
            Header(frames.OK, request=number, count=0 if values is None else len(values), body=len(rows))
        )
        self.pairs[server][1].sendall((answer + rows)[:most])

    def pull(self, keys: np.ndarray | None = None) -> tuple[Any, ...]:
        return self.wires, self.pulls, keys, None, None

    def push(self, values: np.ndarray) -> tuple[Any, ...]:
        return self.wires, self.pushes, None, values, None

    def make(self, *asked: tuple[Any, ...]) -> Any:
        return self.exchange.make([*asked], self.origin)

    def results(self, *asked: tuple[Any, ...]) -> list[Any]:
        """What calls give that are over with this."""
        made = self.make(*asked)
        assert isinstance(made, list), "legs of them are left"
        return made


# ---- the rules


def numbers_of_requests_go_round() -> None:
    """No request has the number 0, which stands for none."""
    stream = channel.Stream(0)
    stream.number = 0xFFFFFFFE
    assert [stream.take() for _ in range(4)] == [0xFFFFFFFE, 0xFFFFFFFF, 1, 2]


def each_push_takes_a_number() -> None:
    """Pushes are numbered in their order, pulls are not; and where one call is declined, none is numbered."""
    ones = np.ones(2, np.float32)
    with Stage(2) as stage:
        for number in (1, 2):
            stage.send(number=number)
        assert stage.make(stage.push(ones), stage.push(ones)) == [None, None]
        assert [call_number(stage) for _ in range(2)] == [5, 6]
        stage.send(ones, number=3)
        stage.make(stage.pull())
        assert stage.make(stage.push(ones), stage.push(np.ones(3, np.float32))) is plain.DECLINED
        assert stage.origin.number == 7


def call_number(stage: Stage) -> int:
    """The number of the op in the next push that has arrived."""
    return frames.decode_header(stage.pairs[0][1].recv(HEADER_SIZE + 8), 0, 1000).number


def what_has_arrived_goes_on() -> None:
    """Where an answer comes to a stop, its bytes are passed on with the leg that waits for it."""
    for most in (40, HEADER_SIZE + 4):
        with Stage(2) as stage:
            stage.send(np.array([3, 4]), most=most)
            assert stage.make(stage.pull()) is plain.OPEN
            ((at, leg, run, number, received),) = stage.exchange.open
            assert (at, leg, run, number, len(received)) == (0, 0, 0, 1, most)


def chunks_are_sent_one_after_the_other() -> None:
    """A call in several chunks is sent at once, and each chunk is a request of its own."""
    with Stage(10, most=16) as stage:
        assert stage.make(stage.push(np.ones(10, np.float32))) is plain.OPEN
        assert [(leg, number) for _, leg, _, number, _ in stage.exchange.open] == [(0, 1), (1, 2), (2, 3)]


def an_error_is_left_whole() -> None:
    """An error is no answer to any chunk: its bytes go to the first one, once, and the others read none of its text."""
    text = b'{"error": "moved", "message": "elsewhere"}'
    error = encode_header(Header(frames.ERROR, request=1, body=len(text))) + text
    with Stage(10, most=16) as stage:
        stage.pairs[0][1].sendall(error)
        assert stage.make(stage.push(np.ones(10, np.float32))) is plain.OPEN
        received = [bytes(each) for *_, each in stage.exchange.open]
        assert received == [error[: len(received[0])], b"", b""]
        stage.pairs[0][0].setblocking(False)
        assert received[0] + stage.pairs[0][0].recv(1000) == error


def what_is_not_sent_goes_on() -> None:
    """A chunk waits while the rows of the one before are owed; it is left without the number of a request."""
    with Stage(10_000, most=1 << 14) as stage:
        assert stage.make(stage.pull()) is plain.OPEN
        assert [(leg, number) for _, leg, _, number, _ in stage.exchange.open] == [(0, 1), (1, 0), (2, 0)]


def calls_that_go_on_have_their_memory() -> None:
    """A call that goes on over the channels is not prepared anew for the next one."""
    with Stage(2) as stage, Stage(2) as other:
        assert stage.make(stage.pull()) is plain.OPEN
        (given,) = stage.exchange.give_away()
        other.send(np.array([1, 2]))
        stage.make(other.pull())
        assert stage.exchange.calls[0] is not given


def arrays_are_let_go() -> None:
    """A call that is over keeps nothing of its caller's alive."""
    keys, values = np.array([1, 0]), np.ones(2, np.float32)
    with Stage(2) as stage:
        stage.send(np.array([8, 9]))
        stage.send(number=2)
        (answer,) = stage.results(stage.pull(keys))
        assert answer.tolist() == [8, 9]
        stage.make((stage.wires, stage.pushes, keys, values, None))
        gone = [weakref.ref(array) for array in (keys, values, answer)]
        del keys, values, answer
        assert all(each() is None for each in gone)


def a_socket_is_closed_behind_its_last_call() -> None:
    """Two calls in one step use a socket twice; it is closed once, when both are over."""
    calls: list[int] = []
    with Stage(2) as stage:
        stream = stage.peers[0].stream
        stage.send(np.array([1, 2]))
        stream.close_after(lambda: calls.append(stream.calls))
        assert stage.make(stage.pull(), stage.pull()) is plain.OPEN
    assert calls == [0]


def answers_end_where_the_next_ones_begin() -> None:
    """Rows that end within a word have zeros behind them, also those that are read straight into their places."""
    with Stage(LARGE) as stage:
        for number in (1, 2):
            stage.send(np.arange(LARGE) + number, number)
        one, two = stage.results(stage.pull(), stage.pull())
        assert (one == np.arange(LARGE) + 1).all()
        assert (two == np.arange(LARGE) + 2).all()


def large_answers_go_to_their_places() -> None:
    """Each server's rows go to where their keys stand, in an order of any kind."""
    keys = np.random.default_rng(3).permutation(2 * LARGE)
    with Stage(2 * LARGE, servers=2) as stage:
        for server in (0, 1):
            stage.send(keys[keys // LARGE == server], server=server)
        (answer,) = stage.results(stage.pull(keys))
        assert (answer == keys).all()


def acknowledgements_come_before_answers() -> None:
    """Acknowledgements of earlier pushes that have arrived together with an answer are read before it, and counted."""
    numbers: list[int] = []
    with Stage(2) as stage:
        stage.peers[0].acknowledged = lambda number: numbers.append(number) or True
        stage.peers[0].stream.number = 3
        for number in (1, 2):
            stage.send(number=number)
        stage.send(np.array([5, 6]), number=3)
        (answer,) = stage.results(stage.pull())
        assert (answer.tolist(), numbers) == ([5, 6], [1, 2])
        traffic = stage.peers[0].traffic
        assert (traffic.sent, traffic.received, traffic.answers) == (HEADER_SIZE, 3 * HEADER_SIZE + 8, 3)


def an_interrupted_request_is_known_as_sent() -> None:
    """Where a signal comes in the middle of a request, its leg has a number, so that its connection is closed."""
    with Stage(1 << 20) as stage:

        def interrupt(channel: object, left: int) -> None:
            raise KeyboardInterrupt

        stage.idle = interrupt
        with pytest.raises(KeyboardInterrupt):
            stage.make(stage.push(np.ones(1 << 20, np.float32)))
        assert [(run, number) for _, _, run, number, _ in stage.exchange.open] == [(0, 1)]
        assert (stage.exchange.at, stage.exchange.current) == (0, 0)


def a_wait_counts_for_the_server_that_is_waited_for() -> None:
    """A server whose answer is there already has not let anything wait."""
    with Stage(4, servers=2) as stage:
        stage.send(np.array([3, 4]), server=1)
        assert stage.make(stage.pull()) is plain.OPEN
        assert [run for _, _, run, _, _ in stage.exchange.open] == [0]
        first, second = (peer.traffic.blocked for peer in stage.peers)
        assert second == 0 < first


def time_counts_once() -> None:
    """The time of several calls in one step is counted once."""
    with Stage(2) as stage:
        for number in (1, 2):
            stage.send(np.array([1, 2]), number)
        times = [100.0, 107.0]
        stage.now = lambda: times.pop(0)
        stage.results(stage.pull(), stage.pull())
        assert sum(stage.meter.seconds.values()) == 7
        assert (stage.meter.pulls, stage.meter.keys_pulled) == (2, 4)


def a_large_request_is_announced_once_before_it_is_written() -> None:
    """What the peer has got by then is all that was small, so none of it can be passed by what comes later."""
    small, large = np.ones(100, np.float32), np.ones(10_000, np.float32)
    with Stage(10_000) as stage:
        arrived = []
        stage.peers[0].stream.on_large = lambda: arrived.append(bytes_at(stage.pairs[0][1]))
        for number, rows in enumerate((small, small, large, small, large), 1):
            stage.send(number=number)
            pushed = (stage.wires, stage.pushes, slice(0, len(rows)), rows, None)
            assert stage.results(pushed) == [None]
        assert arrived == [2 * (HEADER_SIZE + 400)]


def bytes_at(end: socket.socket) -> int:
    """How many bytes have arrived at an end of a socket, which takes them."""
    try:
        return len(end.recv(1 << 20, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


RULES = [
    numbers_of_requests_go_round,
    each_push_takes_a_number,
    what_has_arrived_goes_on,
    chunks_are_sent_one_after_the_other,
    an_error_is_left_whole,
    what_is_not_sent_goes_on,
    calls_that_go_on_have_their_memory,
    arrays_are_let_go,
    a_socket_is_closed_behind_its_last_call,
    answers_end_where_the_next_ones_begin,
    large_answers_go_to_their_places,
    acknowledgements_come_before_answers,
    an_interrupted_request_is_known_as_sent,
    a_wait_counts_for_the_server_that_is_waited_for,
    time_counts_once,
    a_large_request_is_announced_once_before_it_is_written,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_an_exchange_holds(rule) -> None:
    rule()


SENT = """            leg[n].state = SENT
            self._write(call, &leg[n], stream.fd, wires)
"""
WRITTEN = """            self._write(call, &leg[n], stream.fd, wires)
            leg[n].state = SENT
"""
WRONG = {  # text of exchange.pyx, the wrong text, and the rule that breaks
    "a number is 0": ("1 if number == 0xFFFFFFFF else number + 1", "number + 1", numbers_of_requests_go_round),
    "numbered before all are prepared": ("numbers += call.numbers", "call.take_number(origin)",
                                         each_push_takes_a_number),
    "pulls are numbered": ("if call.terms.pushes:\n                numbers", "if True:\n                numbers",
                           each_push_takes_a_number),
    "what has arrived is lost": ("leg.run, inbox[:got]))", 'leg.run, b""))', what_has_arrived_goes_on),
    "the next chunk reads on": ("and not self._is_left(leg[n].run)", "", an_error_is_left_whole),
    "every chunk gets what has arrived": ("arrived.pop((n, leg.run)", "arrived.get((n, leg.run)",
                                          an_error_is_left_whole),
    "what is not sent is lost": ("if leg.state != ANSWERED:", "if leg.state == SENT:", what_is_not_sent_goes_on),
    "chunks share a number": ("leg[n].number = stream.take()", "leg[n].number = 1",
                              chunks_are_sent_one_after_the_other),
    "given away and kept": ("self._kept = self._kept[len(self.calls) :]", "pass", calls_that_go_on_have_their_memory),
    "arrays are kept": ("            call.forget()", "            pass", arrays_are_let_go),
    "closed while in use": ("if self.calls == 0 and self._close", "if self._close",
                            a_socket_is_closed_behind_its_last_call),
    "padding stays": ("return self._receive(fd, <char *> &nothing, -(leg.b - leg.a) * row & 7, traffic, wires)",
                      "return 0", answers_end_where_the_next_ones_begin),
    "from the beginning": ("call.put(rows, a, n, leg", "call.put(rows, a - leg.a, n, leg",
                           large_answers_go_to_their_places),
    "in the order of the shards": ("if call.order == NULL or call.target != NULL:", "if True:",
                                   large_answers_go_to_their_places),
    "the first stays in the way": ("memmove(inbox, inbox + HEADER, got)", "pass", acknowledgements_come_before_answers),
    "acknowledgements do not count": ("                    traffic.answers += 1\n", "",
                                      acknowledgements_come_before_answers),
    "sent when it is written": (SENT, WRITTEN, an_interrupted_request_is_known_as_sent),
    "waits add up": ("        self._counted = self.waited\n", "", a_wait_counts_for_the_server_that_is_waited_for),
    "each call takes all the time": ("began, waited = now, 0.0", "waited = 0.0", time_counts_once),
    "announced when it is written": ("                (<Stream> wires.streams[leg.run]).announce(size)\n", "",
                                     a_large_request_is_announced_once_before_it_is_written),
    "small ones are announced": ("if nbytes > SMALL and", "if",
                                 a_large_request_is_announced_once_before_it_is_written),
    "announced again": ("on_large, self.on_large = self.on_large, None", "on_large = self.on_large",
                        a_large_request_is_announced_once_before_it_is_written),
    "written while rows are owed": ("if self._ahead > AHEAD:", "if False:",
                                    test_a_large_request_waits_for_rows_that_are_owed),
}  # fmt: skip
FIRST = "given away and kept", "sent when it is written"


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [each if each in FIRST else pytest.param(each, marks=pytest.mark.slow) for each in WRONG]
)
def test_a_wrong_variant_of_an_exchange_is_caught(monkeypatch, name) -> None:
    old, new, rule = WRONG[name]
    use(monkeypatch, call_module, part_module, *variants(["exchange"], "exchange.pyx", old, new))
    with pytest.raises((AssertionError, RequestTimeoutError)):
        rule()
