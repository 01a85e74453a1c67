"""What happens at the end of a turn of an endpoint's loop."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dps.core.polling import Polling
from dps.wire.turn import Turn


class Loop:
    """A loop whose turns the test takes."""

    def __init__(self) -> None:
        self.soon: list = []

    def call_soon(self, function) -> None:
        self.soon.append(function)

    def turn(self) -> None:
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
    turn.at_end(lambda: DONE.append("b"))
    assert len(turn._loop.soon) == 1
    turn._loop.turn()
    assert DONE == ["a", "b", "poll"]


def test_a_turn_without_an_answer_does_not_poll(turn):
    turn.at_end(lambda: DONE.append("a"))
    turn._loop.turn()
    turn.answered()
    turn._loop.turn()
    turn.at_end(lambda: DONE.append("b"))
    turn._loop.turn()
    assert DONE == ["a", "poll", "b"]


def test_what_an_end_asks_for_comes_in_the_next_turn(turn):
    turn.at_end(lambda: turn.at_end(lambda: DONE.append("b")))
    turn._loop.turn()
    assert DONE == []
    turn._loop.turn()
    assert DONE == ["b"]


def test_a_system_without_epoll_does_not_poll(monkeypatch):
    monkeypatch.delattr("select.epoll")
    loop = Loop()
    turn = Turn(loop, Watched(1e-4))
    turn.answered()
    assert loop.soon == []


def test_a_closed_turn_polls_no_more(turn):
    turn.answered()
    turn.close()
    turn._loop.turn()
    assert DONE == []


def test_a_loop_that_polls_answers_and_sleeps():
    """On a real loop: a message ends the polling, and the loop takes it."""
    loop = asyncio.new_event_loop()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        waits = Polling(1e-3)
        turn = Turn(loop, waits)
        turn.watch(ours)

        async def echo() -> bytes:
            turn.answered()
            theirs.send(b"x")
            return await loop.sock_recv(ours, 1)

        async def idle() -> None:
            turn.answered()
            await asyncio.sleep(0.001)

        try:
            assert loop.run_until_complete(asyncio.wait_for(echo(), 10)) == b"x"
            spent = waits.spent
            for _ in range(200):  # another program may have had the core, so that some waits sleep at once
                loop.run_until_complete(idle())
                if waits.spent > spent:
                    break
            assert waits.spent > spent
        finally:
            turn.close()
            loop.close()
