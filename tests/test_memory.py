"""The bound on large bodies: never passed, nobody waits for ever, first come first served."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import mutant

from dps.wire.memory import Buffer, Incoming

LIMIT = 100
HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])


class Dumb:
    """A connection that only counts."""

    def __init__(self, incoming_of):
        self.spare = self.lent = 0
        self.busy = False
        self.wish: int | None = None
        self._incoming_of = incoming_of

    def announce(self, nbytes: int) -> bool:
        self.wish = nbytes
        if self._incoming_of().admit(self, nbytes):
            self.granted()
        return self.busy

    def granted(self) -> None:
        assert self.wish is not None
        self.busy, self.spare, self.wish = True, max(self.spare, self.wish), None

    def drop(self) -> None:
        assert not self.busy
        self.spare = 0

    def finish(self, keep: bool) -> None:
        """The body is complete; the role keeps it for a while, or not."""
        self.busy = False
        if keep:
            self.lent, self.spare = self.lent + self.spare, 0


moves = st.tuples(
    st.sampled_from(["announce", "finish", "keep", "release", "go"]), st.integers(0, 5), st.integers(1, LIMIT)
)


def play(script) -> None:
    holders: list[Dumb] = []
    incoming = Incoming(LIMIT, holders)
    holders += [Dumb(lambda: incoming) for _ in range(6)]
    line: deque[Dumb] = deque()

    def settle() -> None:
        waited = list(line)
        incoming.move_up()
        while line and line[0].wish is None:
            line.popleft()
        assert not any(holder.wish is None for holder in line), f"overtaken: {waited}"
        assert sum(holder.spare + holder.lent for holder in holders) <= LIMIT
        assert incoming.contended == bool(line)

    for what, place, nbytes in script:
        if not holders:
            break
        holder = holders[place % len(holders)]
        if what == "announce" and not holder.busy and holder.wish is None:
            overtakes = line and nbytes > holder.spare
            if not holder.announce(nbytes):
                line.append(holder)
            else:
                assert not overtakes
        elif what in ("finish", "keep") and holder.busy:
            holder.finish(what == "keep")
            if incoming.contended:
                holder.drop()
        elif what == "release":
            holder.lent = 0
        elif what == "go":
            holders.remove(holder)
            if holder in line:
                line.remove(holder)
        settle()
    for _ in range(20):  # all that is under way comes to its end, and so does all that waits
        for holder in holders:
            holder.lent = 0
            if holder.busy:
                holder.finish(False)
        settle()
    assert not line


@given(st.lists(moves, max_size=60))
def test_any_course_of_events(script) -> None:
    play(script)


def test_a_buffer_that_is_large_enough_is_used_at_once() -> None:
    holders: list[Dumb] = []
    incoming = Incoming(LIMIT, holders)
    one, two, three = (Dumb(lambda: incoming) for _ in range(3))
    holders += [one, two, three]
    assert one.announce(60)
    assert not two.announce(50)
    one.finish(False)
    assert one.announce(60), "nothing new is needed for it"
    assert not three.announce(1), "no overtaking"
    one.finish(False)
    incoming.move_up()
    assert (one.spare, two.busy, three.busy) == (0, True, True)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("admit", "not self._line and", ""),
        ("_fits", " + nbytes", ""),
        ("_fits", "other.drop()", "pass"),
        ("_held", " + holder.lent", ""),
        ("move_up", "self._line.popleft()", "self._line.pop()"),
        ("move_up", "if there and not", "if not"),
    ],
)
def test_a_broken_variant_is_caught(monkeypatch, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(Incoming, name, mutant(getattr(Incoming, name), old, new))
    with pytest.raises((AssertionError, IndexError)):
        HUNT(given(st.lists(moves, min_size=5, max_size=60))(play))()


def test_a_buffer_grows_to_what_is_asked_and_not_beyond() -> None:
    buffer = Buffer(10)
    for nbytes in (5, 100, 30, 100):
        before = len(buffer)
        buffer.take(nbytes)
        assert len(buffer) == max(before, nbytes)
