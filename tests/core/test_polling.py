"""How long a wait polls before it sleeps."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from types import ModuleType

import dask
import pytest
from compiled import FILES, variant
from hypothesis import given
from hypothesis import strategies as st

from dps import config
from dps.engine.core.requests import polling
from dps.engine.core.requests.polling import Polling
from dps.errors import InputError

LIMIT = 107  # nanoseconds: not a multiple of eight
TYPICAL = [10, 10, 300, 1000, 1000, 1000, 1000, 150, 150, 150, 150, 150, 150]


def rule(now: int, waited: int) -> int:
    """How long the next wait polls."""
    if waited > 2 * LIMIT:
        return now // 2 if now // 2 >= LIMIT // 8 else 0
    return now if now == LIMIT else min(LIMIT, max(LIMIT // 8, 2 * now))


def check(module: ModuleType, waits: list[int]) -> None:
    """Compare with the rule after each of some waits."""
    found, expected = module.Polling(LIMIT * 1e-9), LIMIT
    for waited in waits:
        found.waited((waited + 0.5) * 1e-9)
        expected = rule(expected, waited)
        assert round(found.now * 1e9) == expected
    assert found.spent == 0


def test_long_waits_end_polling_and_short_ones_bring_it_back() -> None:
    check(polling, TYPICAL)


@given(st.lists(st.integers(0, 500), max_size=50))
def test_polling_follows_the_rule(waits: list[int]) -> None:
    check(polling, waits)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 * polling->most", "9 * polling->most"),
        pytest.param("? 0 : polling->now / 2", "? least : polling->now / 2", marks=pytest.mark.slow),
        pytest.param("more < polling->most ? more : polling->most", "more", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_rule_is_caught(old: str, new: str) -> None:
    wrong = variant("polling", "polling.h", old, new)
    with pytest.raises(AssertionError):
        check(wrong, TYPICAL)


def test_a_watch_polls_until_a_file_is_ready() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(select.epoll()) as files:
        files.register(ours, select.EPOLLIN)
        waits = Polling(500e-6)
        assert not waits.watch(files.fileno())
        assert waits.spent + waits.away >= 200e-6  # for the whole time, or until another program had the core
        theirs.send(b"x")
        assert Polling(500e-6).watch(files.fileno())


def slow_yields(old: str, new: str) -> ModuleType:
    """The module where each yield takes a millisecond, as if another program had the core; with a wrong rule."""
    text = FILES["polling.h"].read_text()
    loop = text[text.index("sched_yield();") : text.index("return found;")]
    assert old in loop
    return variant("polling", "polling.h", loop, loop.replace("sched_yield();", "poll(0, 0, 1);").replace(old, new))


def rests(module: ModuleType) -> None:
    """A yield of more than 0.2 ms that brings nothing ends polling, for 256 waits."""
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(select.epoll()) as files:
        files.register(ours, select.EPOLLIN)
        waits = module.Polling(0.5e-3)
        assert not waits.watch(files.fileno())
        assert (waits.now, waits.spent) == (0, 0)
        assert waits.away >= 1e-3
        for _ in range(256):
            assert waits.now == 0
            waits.waited(1e-6)
        waits.waited(1e-6)
        assert waits.now > 0


@pytest.mark.thorough
def test_where_another_program_wants_the_core_waits_sleep() -> None:
    rests(slow_yields("DPS_STOLEN", "DPS_STOLEN"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("> DPS_STOLEN", "> 50 * DPS_STOLEN"),
        pytest.param("polling->rest = DPS_REST", "polling->rest = 0", marks=pytest.mark.slow),
        pytest.param("> DPS_AWAY", "> 5000 * DPS_AWAY", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_rest_is_caught(old: str, new: str) -> None:
    wrong = slow_yields(old, new)
    with pytest.raises(AssertionError):
        rests(wrong)


def test_a_watch_adapts_to_waits_that_end_after_its_polling() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(select.epoll()) as files:
        files.register(ours, select.EPOLLIN)
        waits = Polling(100e-6)
        for _ in range(8):
            waits.watch(files.fileno())
            time.sleep(1e-3)  # in this time the owner sleeps on its files
        assert waits.now == 0


def test_no_polling_stays_none() -> None:
    none = Polling(0.0)
    for waited in (0.0, 1e-6, 1.0):
        none.waited(waited)
        assert none.now == 0


def test_the_setting_has_a_bound() -> None:
    with dask.config.set({"dps.polling": "2 ms"}), pytest.raises(InputError, match=r"dps\.polling is 0\.002 s"):
        config.polling()
    with dask.config.set({"dps.polling": "0 s"}):
        assert config.polling() == 0
