"""The bound on large bodies: never passed, nobody waits for ever, first come first served."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.wire.memory import Buffer, GrowingBody, Incoming

LIMIT = 100
HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])


class Dumb:
    """A connection that only counts."""

    def __init__(self, incoming_of, origin: str = "here"):
        self.origin = origin
        self.spare = self.lent = 0
        self.busy = False
        self.wanted: int | None = None
        self.size = 0
        self._incoming_of = incoming_of

    def announce(self, size: int, first: int | None = None) -> bool:
        """A body of that size; its buffer is to be `first` at first."""
        self.size = size
        return self.ask(size if first is None else min(first, size))

    def ask(self, nbytes: int) -> bool:
        self.wanted = nbytes
        if self._incoming_of().admit(self, self.size, nbytes):
            self.granted()
        return self.wanted is None

    def granted(self) -> None:
        assert self.wanted is not None
        self.busy, self.spare, self.wanted = True, max(self.spare, self.wanted), None

    def drop(self) -> None:
        assert not self.busy
        self.spare = 0

    def finish(self, keep: bool) -> None:
        """The body is complete; the role keeps it for a while, or not."""
        self.busy = False
        self._incoming_of().done(self)
        if keep:
            self.lent, self.spare = self.lent + self.spare, 0


kinds = st.sampled_from(["announce", "grow", "grow", "finish", "keep", "release", "go"])
moves = st.tuples(kinds, st.integers(0, 5), st.integers(1, LIMIT), st.integers(1, 30))
scripts = st.tuples(st.sampled_from([40, 70, LIMIT]), st.lists(moves, min_size=5, max_size=60))


def play(case) -> None:
    largest, script = case
    holders: list[Dumb] = []
    incoming = Incoming(LIMIT, largest, holders)
    holders += [Dumb(lambda: incoming, origin) for origin in "aaaabc"]
    assert incoming.share == max(LIMIT // 2, largest)
    begun: list[Dumb] = []  # whose bodies are under way or wait, the first come first

    def settle() -> None:
        incoming.move_up()
        waiting = [holder for holder in begun if holder.wanted is not None]
        assert sum(holder.spare + holder.lent for holder in holders) <= LIMIT
        for origin in "abc":
            assert sum(h.spare + h.lent for h in holders if h.origin == origin) <= incoming.share
        assert incoming.contended == bool(waiting)
        if begun and not any(holder.lent for holder in holders):
            first = next((holder for holder in begun if holder.busy), begun[0])
            assert first.wanted is None, "the first of those under way waits for no other"

    def end(holder: Dumb, keep: bool) -> None:
        holder.finish(keep)
        begun.remove(holder)
        if incoming.contended:
            holder.drop()

    for what, place, size, nbytes in script:
        if not holders:
            break
        holder = holders[place % len(holders)]
        if what == "announce" and not holder.busy and holder.wanted is None:
            begun.append(holder)
            size = min(size, largest)
            waiting = [other for other in begun if other.wanted is not None and other.origin == holder.origin]
            overtakes = waiting and min(size, nbytes) > holder.spare
            assert not (holder.announce(size, nbytes) and overtakes)
        elif what == "grow" and holder.busy and holder.wanted is None:
            holder.ask(min(holder.size, 2 * holder.spare))
        elif what in ("finish", "keep") and holder.busy and holder.wanted is None and holder.spare >= holder.size:
            end(holder, what == "keep")
        elif what == "release":
            holder.lent = 0
        elif what == "go":
            holders.remove(holder)
            incoming.done(holder)
            if holder in begun:
                begun.remove(holder)
        settle()
    for _ in range(100):  # all that is under way comes to its end, and so does all that waits
        for holder in holders:
            holder.lent = 0
            if holder.busy and holder.wanted is None:
                if holder.spare < holder.size:
                    holder.ask(min(holder.size, 2 * holder.spare))
                else:
                    end(holder, False)
        settle()
    assert not begun


@given(scripts)
def test_any_course_of_events(case) -> None:
    play(case)


def test_a_buffer_that_is_large_enough_is_used_at_once() -> None:
    holders: list[Dumb] = []
    incoming = Incoming(LIMIT, LIMIT, holders)
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


def test_giants_that_trickle_leave_room() -> None:
    """A thousand announce all that there is a quarter of, and send next to nothing: others come and go."""
    holders: list[Dumb] = []
    incoming = Incoming(4_000_000, 1_000_000, holders)
    giants = [Dumb(lambda: incoming) for _ in range(1000)]
    honest = Dumb(lambda: incoming, "there")
    holders += [*giants, honest]
    assert all(giant.announce(1_000_000, 250) for giant in giants)
    for size in (64_000, 1_000_000, 500_000) * 5:
        assert honest.announce(size, 250)
        while honest.spare < size:
            assert honest.ask(min(size, 4 * honest.spare))
        honest.finish(False)
        honest.drop()
    assert not incoming.contended


def several(origins: str, largest: int) -> tuple[Incoming, list[Dumb]]:
    """A holder of each origin, in a memory of `LIMIT` bytes."""
    holders: list[Dumb] = []
    incoming = Incoming(LIMIT, largest, holders)
    holders += [Dumb(lambda: incoming, origin) for origin in origins]
    return incoming, holders


def stalls() -> None:
    """One origin sends fast on many connections and stalls: it holds its share, and others come and go."""
    incoming, holders = several("ffffhh", 25)
    fast, honest = holders[:4], holders[4:]
    assert [one.announce(size) for one, size in zip(fast, (22, 22, 22, 5), strict=True)] == [True, True, False, False]
    for _ in range(3):
        assert honest[0].announce(25)
        assert honest[1].announce(25)
        for one in honest:
            one.finish(False)
            incoming.move_up()
    assert [one.busy for one in fast] == [True, True, False, False]
    fast[0].finish(False)
    incoming.move_up()
    assert [one.busy for one in fast] == [False, True, True, True], "the next of its origin"


def queue() -> None:
    """What waits for the limit of all holds up every origin behind it, but no body that is under way."""
    incoming, (one, two, other, third, last) = several("aabcd", 50)
    assert one.announce(40)
    assert not two.announce(50), "it waits for the share"
    assert other.announce(45)
    assert third.announce(12, 6)
    one.finish(False)
    one.drop()
    incoming.move_up()
    assert not two.busy, "and now for the limit"
    assert not last.announce(1), "no overtaking"
    assert third.ask(12), "which it may need the memory of"
    other.finish(False)
    incoming.move_up()
    assert two.busy
    assert last.busy


def lends() -> None:
    """What a role has kept of earlier bodies counts, for its origin and for all; a later body has a size of its own."""
    incoming, (one, two, other, third) = several("aabc", 50)
    assert one.announce(10)
    one.finish(False)
    assert one.announce(50, 10)
    assert other.announce(50)
    assert not third.announce(50, 5), "the first might need all that is left"
    assert one.ask(50)
    one.finish(True)
    incoming.move_up()
    assert not third.busy, "it is lent"
    assert not two.announce(5)
    one.lent = 0
    incoming.move_up()
    assert third.busy
    assert two.busy


RULES = [stalls, queue, lends]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule(rule) -> None:
    rule()


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("admit", "next(self._next_in_line(), None) is not holder", "False"),
        ("_fits", "other.drop()", "pass"),
        ("_safe", "other.spare + other.lent", "other.spare"),
        ("_safe", "held += buffer", "pass"),
        ("_safe", "max(0, self._bodies[body] - buffer)", "0"),
        ("_safe", "reversed(under_way)", "under_way"),
        ("_safe", "held + max(self._bodies.values())", "held"),
        ("_next_in_line", "full.add(holder.origin)", "break"),
        ("_next_in_line", "full.add(holder.origin)", "pass"),
        ("_next_in_line", "self.share", "self.limit"),
        ("_next_in_line", "other.origin == holder.origin", "True"),
        ("_next_in_line", "not body.busy", "0"),
        ("_next_in_line", "break", "pass"),
        ("done", "self._bodies.pop(holder, None)", "pass"),
    ],
)
def test_a_broken_variant_is_caught(monkeypatch, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(Incoming, name, mutant(getattr(Incoming, name), old, new))

    def hunt() -> None:
        for rule in RULES:
            rule()
        HUNT(given(scripts)(play))()

    with pytest.raises((AssertionError, IndexError, KeyError)):
        hunt()


def test_a_buffer_grows_to_what_is_asked_and_not_beyond() -> None:
    buffer = Buffer(10)
    for nbytes in (5, 100, 30, 100):
        before = len(buffer)
        buffer.take(nbytes)
        assert len(buffer) == max(before, nbytes)


# ---- a body whose buffer grows --------------------------------------------------------------------------------------


def check_growing(seed: int) -> None:
    """A body in chunks arrives whole, in a buffer of at most four times what has arrived, and asks when it is full."""
    draw = random.Random(seed)
    content = draw.randbytes(draw.randint(1, 3000))
    asked: list[int] = []

    def full() -> None:
        asked.append(body.filled)
        assert len(body.buffer()) == 0
        if draw.random() < 0.5:  # else the memory comes later
            body.grow(min(len(content), 4 * body.filled))

    body = GrowingBody(Buffer(0), b"header", len(content), min(len(content), 16), full)
    while body.filled < len(content):
        if not len(body.buffer()):
            assert asked[-1] == body.filled
            body.grow(min(len(content), 4 * body.filled))
        view = body.buffer()
        assert body.filled + len(view) <= max(16, 4 * body.filled, len(content) * (body.filled * 4 >= len(content)))
        n, at = draw.randint(1, len(view)), body.filled
        view[:n] = content[at : at + n]
        body.advance(n)
    assert bytes(body.body()) == content
    assert bytes(body.frame) == b"header" + content
    assert asked == sorted(set(asked)), "asked once for each size"
    assert len(content) not in asked, "a complete body needs no more"
    assert bool(asked) == (len(content) > 16)


def test_a_growing_body_arrives_whole() -> None:
    for seed in range(200):
        check_growing(seed)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("advance", "< self.size", "<= self.size"),
        ("advance", "self._full()", "pass"),
        ("grow", "self._first + nbytes, self._first + self.filled", "self._first + nbytes, self._first"),
        ("grow", "self._first + nbytes, self._first + self.filled", "self._first + nbytes, self.filled"),
        ("buffer", "self.filled :", "0 :"),
    ],
)
def test_a_wrong_growing_body_is_caught(monkeypatch, name: str, old: str, new: str) -> None:
    monkeypatch.setattr(GrowingBody, name, mutant(getattr(GrowingBody, name), old, new))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        test_a_growing_body_arrives_whole()
