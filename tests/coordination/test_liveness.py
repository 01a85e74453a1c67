"""A server without heartbeats is silent, unless the controller itself was stopped meanwhile."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dps.engine.coordination.liveness import Liveness

PATIENCE, INTERVAL = 2.5, 0.1


def check(liveness: Liveness, start: float, end: float, beats: dict[int, float] | None = None) -> list[int]:
    """Check at every interval; each server in `beats` sends a heartbeat every so many seconds. The last answer."""
    silent, tick = [], round(start / INTERVAL)
    while tick * INTERVAL <= end:
        now = tick * INTERVAL
        for server, every in (beats or {}).items():
            if tick % max(1, round(every / INTERVAL)) == 0:
                liveness.heartbeat(server, now)
        silent = liveness.silent(now)
        tick += 1
    return silent


def test_a_server_without_heartbeats_is_silent_after_the_patience_and_not_before():
    liveness = Liveness(PATIENCE, INTERVAL)
    liveness.heartbeat(1, 0.0)
    assert check(liveness, 0.0, PATIENCE, {2: 0.3}) == []
    assert check(liveness, PATIENCE + INTERVAL, PATIENCE + 2 * INTERVAL, {2: 0.3}) == [1]
    liveness.heartbeat(1, 2.8)
    assert liveness.silent(2.8) == [], "it is back"


def test_no_server_is_silent_because_the_controller_was_stopped():
    """Its process was stopped for a minute: heartbeats are unread, or were never sent because no answer came."""
    liveness = Liveness(PATIENCE, INTERVAL)
    assert check(liveness, 0.0, 1.0, {1: 0.3, 2: 0.3}) == []
    assert liveness.silent(61.0) == []
    assert check(liveness, 61.1, 63.0, {1: 0.3}) == [], "two seconds later still not"
    assert check(liveness, 63.1, 64.5, {1: 0.3}) == [2], "but then"


def test_checks_that_are_always_late_still_find_a_silent_server():
    liveness, now = Liveness(PATIENCE, INTERVAL), 0.0
    liveness.heartbeat(1, now)
    late = 3 * INTERVAL
    while liveness.silent(now) == []:
        now += late
        assert now < 20 * PATIENCE
    assert now > PATIENCE


def test_a_forgotten_server_is_not_watched():
    liveness = Liveness(PATIENCE, INTERVAL)
    liveness.heartbeat(1, 0.0)
    liveness.forget(1)
    liveness.forget(7)
    assert check(liveness, 0.0, 10.0) == []


def test_heartbeats_do_not_go_back_in_time():
    liveness = Liveness(PATIENCE, INTERVAL)
    liveness.heartbeat(1, 5.0)
    liveness.heartbeat(1, 1.0)  # read late
    liveness.silent(5.0)
    assert check(liveness, 5.1, 5.0 + PATIENCE) == []


@given(
    st.lists(st.tuples(st.floats(0, 1), st.sampled_from(["check", "beat 1", "beat 2"])), max_size=60),
    st.floats(0.05, 1.0),
)
def test_against_a_count_of_the_time_awake(events, interval):
    """A silent server has sent no heartbeat for `patience` seconds, less the seconds that checks were late."""
    liveness, now, heartbeats, checked = Liveness(1.5, interval), 0.0, {}, None
    for wait, event in events:
        now += wait
        if event == "check":
            late = 0.0 if checked is None else max(0.0, now - checked - 2 * interval)
            checked = now
            heartbeats = {n: min(now, at + late) for n, at in heartbeats.items()} if late else heartbeats
            assert liveness.silent(now) == [n for n, at in heartbeats.items() if now - at > 1.5]
        else:
            server = int(event[-1])
            heartbeats[server] = now
            liveness.heartbeat(server, now)
            assert server not in liveness.silent(now) if checked == now else True
    if checked is not None:
        assert not set(liveness.silent(checked)) - set(heartbeats)
