"""Frames that are written in one turn of the loop leave together, in order."""

from __future__ import annotations

from dps.engine.wire.departures import FLUSH_BYTES, Coalescer


class Loop:
    """A loop, and the transport of a connection."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closing = False
        self._turn: list = []

    def call_soon(self, function) -> None:
        self._turn.append(function)

    def turn(self) -> None:
        functions, self._turn = self._turn, []
        for function in functions:
            function()

    def writelines(self, buffers) -> None:
        self.written.append(b"".join(buffers))

    def is_closing(self) -> bool:
        return self.closing


def test_what_a_turn_writes_leaves_once():
    loop = Loop()
    outbox = Coalescer(loop.call_soon, loop)
    outbox.put(2, [b"a", b"b"])
    outbox.put(1, [b"c"])
    assert (loop.written, outbox.nbytes) == ([], 3)
    loop.turn()
    assert (loop.written, outbox.nbytes) == ([b"abc"], 0)
    outbox.put(1, [b"d"])
    loop.turn()
    loop.turn()
    assert loop.written == [b"abc", b"d"]


def test_much_does_not_wait_and_nothing_is_overtaken():
    loop = Loop()
    outbox = Coalescer(loop.call_soon, loop)
    outbox.put(1, [b"a"])
    outbox.put(FLUSH_BYTES, [bytes(FLUSH_BYTES)])
    assert loop.written == [b"a" + bytes(FLUSH_BYTES)]
    outbox.put(1, [b"b"])
    outbox.flush()
    loop.turn()
    assert loop.written[1:] == [b"b"]


def test_nothing_is_written_to_who_has_gone():
    loop = Loop()
    outbox = Coalescer(loop.call_soon, loop)
    outbox.put(1, [b"a"])
    loop.closing = True
    loop.turn()
    assert (loop.written, outbox.nbytes) == ([], 0)
