"""Who is silent is judged by somebody who was awake himself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dps.coordination.watch import Watch

PATIENCE, INTERVAL = 2.5, 0.1


def looks(watch: Watch, start: float, end: float, beats: dict[int, float] | None = None) -> list[int]:
    """Look every interval; those in `beats` give a sign every so many seconds. Who is silent in the end."""
    found, tick = [], round(start / INTERVAL)
    while tick * INTERVAL <= end:
        now = tick * INTERVAL
        for who, every in (beats or {}).items():
            if tick % max(1, round(every / INTERVAL)) == 0:
                watch.sign(who, now)
        found = watch.silent(now)
        tick += 1
    return found


def test_who_gives_no_sign_is_silent_after_the_patience_and_not_before():
    watch = Watch(PATIENCE, INTERVAL)
    watch.sign(1, 0.0)
    assert looks(watch, 0.0, PATIENCE, {2: 0.3}) == []
    assert looks(watch, PATIENCE + INTERVAL, PATIENCE + 2 * INTERVAL, {2: 0.3}) == [1]
    watch.sign(1, 2.8)
    assert watch.silent(2.8) == [], "it is back"


def test_nobody_is_condemned_for_the_judges_sleep():
    """Its process was stopped for a minute: signs have piled up unread, or were never sent for want of an answer."""
    watch = Watch(PATIENCE, INTERVAL)
    assert looks(watch, 0.0, 1.0, {1: 0.3, 2: 0.3}) == []
    assert watch.silent(61.0) == []
    assert looks(watch, 61.1, 63.0, {1: 0.3}) == [], "two seconds later still not"
    assert looks(watch, 63.1, 64.5, {1: 0.3}) == [2], "but then"


def test_sleep_is_not_an_excuse_for_ever():
    """Looks that are always late still find out; they only take longer."""
    watch, now = Watch(PATIENCE, INTERVAL), 0.0
    watch.sign(1, now)
    late = 3 * INTERVAL
    while watch.silent(now) == []:
        now += late
        assert now < 20 * PATIENCE
    assert now > PATIENCE


def test_who_is_forgotten_is_not_watched():
    watch = Watch(PATIENCE, INTERVAL)
    watch.sign(1, 0.0)
    watch.forget(1)
    watch.forget(7)
    assert looks(watch, 0.0, 10.0) == []


def test_signs_do_not_go_back():
    watch = Watch(PATIENCE, INTERVAL)
    watch.sign(1, 5.0)
    watch.sign(1, 1.0)  # read late
    watch.silent(5.0)
    assert looks(watch, 5.1, 5.0 + PATIENCE) == []


@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["look", "sign 1", "sign 2"])), max_size=60),
    st.floats(0.05, 1.0),
)
def test_against_a_reckoning_of_the_waking_time(events, interval):
    """Silent is, at the least, who gave no sign for `patience` of the time, less what the judge was late."""
    watch, now, signs, looked = Watch(1.5, interval), 0.0, {}, None
    for wait, what in events:
        now += wait
        if what == "look":
            late = 0.0 if looked is None else max(0.0, now - looked - 2 * interval)
            looked = now
            signs = {who: min(now, at + late) for who, at in signs.items()} if late else signs
            assert watch.silent(now) == [who for who, at in signs.items() if now - at > 1.5]
        else:
            who = int(what[-1])
            signs[who] = now
            watch.sign(who, now)
            assert who not in watch.silent(now) if looked == now else True
    if looked is not None:
        assert not set(watch.silent(looked)) - set(signs)
