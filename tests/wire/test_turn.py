"""What happens at the end of a turn of an endpoint's loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from types import SimpleNamespace

import pytest

from dps.engine.core.requests.polling import Polling
from dps.engine.wire.departures import Turn
from dps.engine.wire.sockets import peer_process


class Loop:
    """A loop whose turns the test takes."""

    def __init__(self) -> None:
        self.soon: list = []

    def call_soon(self, function) -> None:
        self.soon.append(function)

    def turn(self) -> None:
        """Call what waits, also what that asks for, because a loop does not sleep before."""
        while self.soon:
            functions, self.soon = self.soon, []
            for function in functions:
                function()


class Watched(Polling):
    """A polling that notes when it is asked to poll."""

    def watch(self, fd: int) -> bool:
        DONE.append("poll")
        return True


DONE: list[str] = []


@pytest.fixture
def turn():
    DONE.clear()
    turn = Turn(Loop(), Watched(1e-4))
    yield turn
    turn.close()


def test_polling_comes_after_all_that_waits_for_the_end(turn):
    turn.answered()
    turn.at_end(lambda: DONE.append("a"))
    turn.at_end(lambda: turn.at_end(lambda: DONE.append("c")))
    turn.at_end(lambda: DONE.append("b"))
    turn._loop.turn()
    assert DONE == ["a", "b", "c", "poll"]


def test_a_function_that_fails_harms_no_other():
    """The loop calls each by itself, and tells of the error."""
    loop, errors = asyncio.new_event_loop(), []
    loop.set_exception_handler(lambda loop, context: errors.append(str(context["exception"])))
    turn = Turn(loop, Watched(1e-4))
    DONE.clear()

    def fail() -> None:
        raise RuntimeError("broken")

    try:
        turn.answered()
        turn.at_end(fail)
        turn.at_end(lambda: DONE.append("a"))
        loop.run_until_complete(asyncio.sleep(0.01))
    finally:
        turn.close()
        loop.close()
    assert (DONE, errors) == (["a", "poll"], ["broken"])


def test_a_turn_without_an_answer_does_not_poll(turn):
    turn.at_end(lambda: DONE.append("a"))
    turn._loop.turn()
    turn.answered()
    turn._loop.turn()
    turn.at_end(lambda: DONE.append("b"))
    turn._loop.turn()
    assert DONE == ["a", "poll", "b"]


def test_a_system_without_epoll_does_not_poll(monkeypatch):
    monkeypatch.delattr("select.epoll")
    loop = Loop()
    turn = Turn(loop, Watched(1e-4))
    turn.answered()
    assert loop.soon == []


def test_it_polls_while_there_is_a_processor_for_each_party(turn, monkeypatch):
    monkeypatch.setattr(turn, "_processors", 2)
    pairs = [socket.socketpair() for _ in range(3)]
    with contextlib.ExitStack() as open_ones:
        for each in itertools.chain(*pairs):
            open_ones.enter_context(each)

        def polls() -> bool:
            DONE.clear()
            turn.answered()
            turn._loop.turn()
            return DONE == ["poll"]

        monkeypatch.setattr("dps.engine.wire.departures.peer_process", id)
        turn.watch(None, pairs[0][0])  # the controller
        turn.watch("trainer", pairs[1][0])
        assert polls()
        turn.watch("another", pairs[2][0])
        assert not polls()
        turn.forget("another")
        turn.forget("another")
        assert polls()


def test_several_connections_of_one_process_are_one_party(turn, monkeypatch):
    processes = {}
    monkeypatch.setattr("dps.engine.wire.departures.peer_process", processes.get)
    monkeypatch.setattr(turn, "_processors", 2)
    with contextlib.ExitStack() as open_ones:
        for name, process in (("a", 7), ("b", 7), ("c", 8)):
            for each in (pair := socket.socketpair()):
                open_ones.enter_context(each)
            processes[pair[0]] = process
            turn.watch(name, pair[0])
            turn.answered()
            turn._loop.turn()
    assert DONE == ["poll", "poll"]


def test_the_process_at_the_other_end_is_known():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_process(ours) == os.getpid()


def test_parties_on_other_machines_do_not_count(turn, monkeypatch):
    monkeypatch.setattr(turn, "_processors", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        far = SimpleNamespace(
            family=socket.AF_INET,
            fileno=ours.fileno,
            getsockname=lambda: ("10.1.0.1", 5),
            getpeername=lambda: ("10.1.0.2", 6),
        )
        turn.watch("far", far)
        turn.answered()
        turn._loop.turn()
        assert DONE == ["poll"]
        turn.watch("near", ours)
        turn.answered()
        assert turn._loop.soon == []


def test_a_closed_turn_polls_no_more(turn):
    turn.answered()
    turn.close()
    turn._loop.turn()
    assert DONE == []


@pytest.fixture
def real():
    """A real loop, and the two ends of a connection, of which the loop watches the first."""
    loop = asyncio.new_event_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(loop):
        ours.setblocking(False)
        yield loop, ours, theirs


def test_a_loop_that_polls_takes_a_message(real):
    loop, ours, theirs = real
    turn = Turn(loop, Polling(1e-3))
    turn.watch(None, ours)

    async def echo() -> bytes:
        turn.answered()
        theirs.send(b"x")
        return await loop.sock_recv(ours, 1)

    with contextlib.closing(turn):
        assert loop.run_until_complete(asyncio.wait_for(echo(), 10)) == b"x"


def test_a_loop_that_has_answered_polls_before_it_sleeps(real):
    loop, ours, _ = real
    waits = Polling(1e-3)  # a new one polls once at least, also on a busy machine
    turn = Turn(loop, waits)
    turn.watch(None, ours)

    async def idle() -> None:
        turn.answered()
        await asyncio.sleep(0.001)

    with contextlib.closing(turn):
        loop.run_until_complete(idle())
        assert waits.spent + waits.away > 0
