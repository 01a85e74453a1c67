"""The rules of plain calls, each by itself: what is asked before one is made, and what becomes of one that breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from noticing import assert_noticed

from dps.engine.client.plain import PlainCalls, PlainTable
from dps.engine.core.requests.exchange import DECLINED, OPEN
from dps.engine.state.wire_format import Wire
from dps.errors import RequestTimeoutError, ServerGoneError, StoppedError


class Channel:
    """A connection: it counts what is asked of it."""

    what = "server 1"

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.asked = 0

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def idle(self) -> None:
        self.asked += 1


def table_of(route: object, channels: list[Channel], check: Any = None) -> Any:
    changes = {(0, False): "terms of a push"}
    terms = SimpleNamespace(changes=changes, pull="terms of a pull")
    wires = SimpleNamespace(channels=channels)
    return SimpleNamespace(route=route, wires=wires, terms=terms, check=check, holds=False, trial=None)


class Stage:
    """Plain calls of a session with one table on two servers; `make` stands for what the exchange does."""

    def __init__(self) -> None:
        self.now, self.channels = 0.0, [Channel(), Channel()]
        self.route = SimpleNamespace(spec="spec", runs=[], reads_copies=False)
        self.checked: list[str] = []
        self.went_on: list[object] = []
        self.stopped = False
        self.calls = PlainCalls.__new__(PlainCalls)
        self.calls._session = SimpleNamespace(
            now=lambda: self.now,
            patience=10.0,
            settled={"w": self.route},
            cancelled=lambda: self.stopped,
            check=self.stop,
            acting=None,
            connections=lambda route, runs: list(self.channels),
            terms=lambda route: None,
        )
        self.calls._exchange = SimpleNamespace(began=1.0, at=0, current=1, open=[], make=lambda asked, acting: ["made"])
        self.calls._moving, self.calls._until = None, 0.0
        self.table = table_of(self.route, self.channels, self.checked.append)
        self.asked: Any = [(self.table.wires,)]
        self.calls._tables = {"w": self.table}
        self.calls._go_on = self.go_on
        self.calls._check_aggregate = None
        self.calls._renew = lambda name: "renewed"

    def stop(self) -> None:
        raise StoppedError("Dask has cancelled the task")

    def go_on(self, tables: list[object], asked: object) -> list[str]:
        self.went_on += tables
        return ["went on"]

    def raises(self, error: BaseException) -> None:
        def make(asked: object, acting: object) -> None:
            raise error

        self.calls._exchange.make = make


# ---- the rules


def checks_before_a_push(stage: Stage) -> None:
    """A table that aggregates has its check asked before each push, and it may refuse."""
    assert stage.calls._terms(stage.table, 0, False) == "terms of a push"
    assert stage.checked == ["spec"]
    assert stage.calls._terms(stage.table, 5, False) is None


def cancelled_tasks_stop(stage: Stage) -> None:
    """A task that Dask has cancelled makes no more calls."""
    assert stage.calls._known("w") is stage.table
    stage.stopped = True
    with pytest.raises(StoppedError):
        stage.calls._known("w")


def the_present_route_counts(stage: Stage) -> None:
    """A table is made anew as soon as its route has changed, or is not settled."""
    stage.calls._session.settled = {"w": SimpleNamespace(spec="spec")}
    assert stage.calls._known("w") == "renewed"
    stage.calls._session.settled = {}
    assert stage.calls._known("w") == "renewed"


def without_connections_none_is_plain(stage: Stage) -> None:
    """A table of which a connection is missing is not called in the plain way."""
    del stage.calls._renew
    stage.calls._session.connections = lambda route, runs: None
    assert stage.calls._renew("w") is None
    stage.calls._session.settled = {}
    assert stage.calls._renew("w") is None


def a_broken_connection_is_closed(stage: Stage) -> None:
    """The connection on which a call broke is in the middle of a message, so it fails; the rest goes on."""
    for error in (ConnectionError("broke"), ServerGoneError("gone")):
        stage.raises(error)
        assert stage.calls._make([stage.table], stage.asked) == ["went on"]
        assert stage.channels[1].errors == [error]
        stage.channels[1].errors.clear()
    assert not stage.channels[0].errors
    assert stage.went_on == [stage.table] * 2


def an_interrupted_call_is_not_sent_again(stage: Stage) -> None:
    """What was on its way when a signal came may have arrived: its connections fail, and the caller gets the signal."""
    stage.raises(KeyboardInterrupt())
    stage.calls._exchange.open = [(0, 0, 0, 7, b""), (0, 1, 1, 8, b"")]
    with pytest.raises(KeyboardInterrupt):
        stage.calls._make([stage.table], stage.asked)
    assert all(channel.errors for channel in stage.channels)
    assert not stage.went_on


def what_is_open_goes_on(stage: Stage) -> None:
    """A call with unanswered legs goes on over the channels; one that is made or declined does not."""
    for outcome, result in ((OPEN, ["went on"]), (DECLINED, DECLINED), (["made"], ["made"])):
        stage.calls._exchange.make = lambda asked, acting, outcome=outcome: outcome
        assert stage.calls._make([stage.table], stage.asked) == result
    assert stage.went_on == [stage.table]


def idle(stage: Stage, left: int = 100) -> None:
    stage.calls._idle(stage.channels[1], left)


def patience_has_an_end(stage: Stage) -> None:
    """A server that moves no byte for the whole patience ends the call."""
    idle(stage)
    stage.now = 10.0
    idle(stage)
    stage.now = 10.1
    with pytest.raises(RequestTimeoutError, match=r"server 1 has moved no bytes for 10 s \(dps\.timeouts\.request\)"):
        idle(stage)


def progress_counts(stage: Stage) -> None:
    """As long as bytes move, or another call has begun, the patience begins anew."""
    for step, left in enumerate((100, 60, 20)):
        stage.now = 8.0 * step
        idle(stage, left)
    stage.now, stage.calls._exchange.began = 30.0, 29.0
    idle(stage, 20)
    stage.now = 40.0
    idle(stage, 20)


def the_caller_is_asked(stage: Stage) -> None:
    """The channel is asked at each pause, because it looks for another server and for the end of the task."""
    idle(stage)
    idle(stage)
    assert [channel.asked for channel in stage.channels] == [0, 2]
    stage.channels[1].idle = None  # type: ignore[method-assign]
    idle(stage)


def only_aggregating_tables_are_checked(stage: Stage) -> None:
    """The check is for tables with aggregate=."""
    session = SimpleNamespace(terms=lambda route: SimpleNamespace(of_primaries=None))
    for aggregate, check in ((None, None), ("sum", print)):
        spec = SimpleNamespace(aggregate=aggregate, staleness=None, wire=Wire())
        route = SimpleNamespace(spec=spec, trial=None)
        assert PlainTable(route, [], session, print).check is check  # type: ignore[arg-type]


RULES = [
    checks_before_a_push,
    cancelled_tasks_stop,
    the_present_route_counts,
    without_connections_none_is_plain,
    a_broken_connection_is_closed,
    an_interrupted_call_is_not_sent_again,
    what_is_open_goes_on,
    patience_has_an_end,
    progress_counts,
    the_caller_is_asked,
    only_aggregating_tables_are_checked,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_plain_calls_holds(rule) -> None:
    rule(Stage())


WRONG = {
    "no check": (PlainCalls, "_terms", "table.check(table.route.spec)", "pass", checks_before_a_push),
    "cancelled tasks go on": (PlainCalls, "_known", "session.cancelled()", "False", cancelled_tasks_stop),
    "an old route": (PlainCalls, "_known", "is not session.settled.get(name)", "is None", the_present_route_counts),
    "no connections": (PlainCalls, "_renew", "channels is None and not route.reads_copies", "False",
                       without_connections_none_is_plain),
    "a broken connection stays": (PlainCalls, "_make", "exchange.current].fail(error)", "exchange.current]",
                                  a_broken_connection_is_closed),
    "another connection fails": (PlainCalls, "_make", "[exchange.current]", "[0]", a_broken_connection_is_closed),
    "lost servers raise": (PlainCalls, "_make", "(ConnectionError, *RETRIED)", "ZeroDivisionError",
                           a_broken_connection_is_closed),
    "interrupted calls stay open": (PlainCalls, "_make", "[0].channels[run].fail(error)", "[0]",
                                    an_interrupted_call_is_not_sent_again),
    "open calls are lost": (PlainCalls, "_make", "if answer is OPEN else", "if False else", what_is_open_goes_on),
    "declined calls go on": (PlainCalls, "_make", "answer is OPEN", "answer is DECLINED", what_is_open_goes_on),
    "no end": (PlainCalls, "_idle", "if moving != self._moving:", "if True:", patience_has_an_end),
    "the end is too early": (PlainCalls, "_idle", "now > self._until", "now >= self._until", patience_has_an_end),
    "bytes do not count": (PlainCalls, "_idle", "channel, left)", "channel, 0)", progress_counts),
    "calls do not count": (PlainCalls, "_idle", "(self._exchange.began, ", "(0.0, ", progress_counts),
    "the caller is not asked": (PlainCalls, "_idle", "channel.idle()", "pass", the_caller_is_asked),
    "all tables are checked": (PlainTable, "__init__", "None if route.spec.aggregate is None else ", "",
                               only_aggregating_tables_are_checked),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_of_plain_calls_is_caught(name) -> None:
    *wrong, rule = WRONG[name]
    assert_noticed(*wrong, lambda: rule(Stage()))
