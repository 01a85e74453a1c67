"""Reads of tables that have a staleness of their own: when a trainer waits and goes on; and what its pulls hold."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
from noticing import assert_noticed
from servers import wait_until

import dps
from dps.engine.client import reads
from dps.engine.client.client import Client
from dps.engine.client.functions import FunctionCaller
from dps.engine.client.plain import PlainCalls, PlainTable
from dps.engine.client.reads import readable
from dps.engine.client.ticket import Ticket
from dps.engine.controller import run_records
from dps.engine.controller.interrupted_runs import InterruptedRuns
from dps.engine.controller.run_records import recorded
from dps.engine.controller.runs import Runs
from dps.engine.state.ops import TableSpec
from dps.engine.training.participant import Participant
from dps.engine.training.read_gate import ReadGate
from dps.engine.wire import frames
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.journal_messages import RecordedRun
from dps.errors import ClockTimeoutError, InputError, StoppedError, UnknownTableError

NAME, SECRET = "dps", "ab" * 32
GRACE_SECONDS = 20.0  # for which trainers wait for another controller
VERBS = {frames.JOIN: "join", frames.TICK: "tick", frames.LEAVE: "leave", frames.COLLECT: "collect"}
VERBS |= {frames.AWAIT: "await_lowest"}


class Controller:
    """Runs behind an endpoint, without Dask or servers; it keeps the clocks that reads have awaited.

    With `port` and `records`, it takes over from the controller that listened there and kept these records of runs.
    """

    def __init__(self, port: int = 0, records: Iterable[RecordedRun] = ()):
        self.runs, self.awaited = Runs(NAME), []
        self.runs.grace = GRACE_SECONDS
        InterruptedRuns(self.runs).resume(0, records)
        handlers = {kind: self._to(kind, verb) for kind, verb in VERBS.items()}
        self.endpoint = Endpoint("test", "127.0.0.1", handlers, self.runs.disconnected, port=port)
        self.endpoint.secrets[NAME] = SECRET
        self.ticket = Ticket(NAME, (self.endpoint.host, self.endpoint.port), SECRET)

    def _to(self, kind: int, verb: str):
        def handle(connection, header, body) -> None:
            if kind == frames.AWAIT:
                self.awaited.append(header.clock)
            getattr(self.runs, verb)(connection, header, body)

        return handle

    def call(self, function, *args):
        return self.endpoint.call(function, *args)


class Cast:
    """Trainers of one run, which read a table; in place of servers, `spec` says how it is defined now."""

    def __init__(self, trainers: int, staleness: float | None, own: int | None, elastic: bool = False):
        self.controller = Controller()
        self.spec = TableSpec("w", staleness=own)
        self.routes_asked = 0
        args = (trainers, staleness, (), None, (), elastic)
        self.run = self.controller.call(self.controller.runs.start, *args)
        self.trainers = [dps.Trainer.join(self.controller.ticket, self.run, n) for n in range(trainers)]
        for trainer in self.trainers:
            session = trainer.client.session
            session.ready = lambda name: SimpleNamespace(spec=self.spec)
            session.forget_routes = self._forget

    def _forget(self) -> None:
        self.routes_asked += 1

    def read(self, number: int = 0) -> None:
        session = self.trainers[number].client.session
        with session.lock:
            assert readable(session, "w").spec is self.spec

    def reading(self, number: int = 0) -> Reading:
        """A read in a thread; it waits when this returns."""
        asked = len(self.controller.awaited)
        reading = Reading(lambda: self.read(number))
        wait_until(lambda: len(self.controller.awaited) > asked or not reading.is_alive())
        return reading

    def take_over(self) -> None:
        """The controller dies, and another one takes its place."""
        before = self.controller
        records = before.call(lambda: [recorded(run) for run in before.runs.runs.values()])
        before.endpoint.stop()
        self.controller = Controller(before.endpoint.port, records)
        assert self.controller.endpoint.port == before.endpoint.port

    @property
    def parked(self) -> dict:
        return self.controller.call(lambda: dict(self.controller.runs.runs[self.run].ticking))

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        self.controller.endpoint.stop()


class Reading(threading.Thread):
    def __init__(self, read):
        super().__init__(daemon=True)
        self._read, self.error = read, None
        self.start()

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:
            self.error = error

    def goes_on(self) -> Exception | None:
        self.join(5.0)
        assert not self.is_alive(), "it waits on"
        return self.error


@contextlib.contextmanager
def cast(trainers: int = 2, staleness: float | None = None, own: int | None = 0, elastic: bool = False):
    made = Cast(trainers, staleness, own, elastic)
    try:
        yield made
    finally:
        made.close()


def tables_that_ask_for_nothing_cost_nothing() -> None:
    with cast(own=None) as players:
        for _ in range(3):
            players.trainers[0].tick()
            players.read()
        assert players.controller.awaited == []


def a_table_looser_than_its_run_costs_nothing() -> None:
    with cast(staleness=1, own=3) as players:
        players.trainers[0].tick()
        players.read()
        assert players.controller.awaited == []


def what_the_tick_has_told_suffices() -> None:
    with cast(staleness=4, own=1) as players:
        for number in (1, 0, 0):
            players.trainers[number].tick()
        players.read()
        assert players.controller.awaited == [], "at clock 2, and the other is known to be at 1"


def it_waits_for_the_slowest_and_asks_once() -> None:
    with cast(own=1) as players:
        ahead, behind = players.trainers
        for _ in range(3):
            ahead.tick()
        reading = players.reading()
        behind.tick()
        time.sleep(0.05)
        assert reading.is_alive(), "clock 2 is awaited, and the other is at 1"
        behind.tick()
        assert reading.goes_on() is None
        assert players.controller.awaited == [2]
        players.read()
        assert players.controller.awaited == [2], "what it knows now suffices for all of the clock"


def the_slowest_never_waits() -> None:
    with cast() as players:
        players.trainers[0].tick()
        players.read(1)


def one_alone_never_waits() -> None:
    with cast(trainers=1) as players:
        players.trainers[0].tick()
        players.read()
        assert players.controller.awaited == []


def a_change_lets_it_look_again() -> None:
    with cast() as players:
        players.trainers[0].tick()
        reading = players.reading()
        before = players.routes_asked
        players.spec = TableSpec("w", staleness=1)
        players.controller.call(players.controller.runs.renew_tables)
        assert reading.goes_on() is None
        assert players.routes_asked == before + 1


def a_change_is_told_once_at_the_next_tick() -> None:
    with cast(staleness=9) as players:
        trainer = players.trainers[1]
        trainer.tick()
        before = players.routes_asked
        players.controller.call(players.controller.runs.renew_tables)
        trainer.tick()
        assert players.routes_asked == before + 1
        trainer.tick()
        assert players.routes_asked == before + 1


def one_in_a_meeting_does_not_count() -> None:
    with cast() as players:
        ahead, behind = players.trainers
        ahead.tick()
        meeting = Reading(behind.barrier)
        wait_until(lambda: players.controller.call(lambda: players.controller.runs.runs[players.run].meeting))
        players.read()
        ahead.leave()
        assert meeting.goes_on() is None


def one_that_leaves_does_not_count() -> None:
    with cast() as players:
        players.trainers[0].tick()
        reading = players.reading()
        players.trainers[1].leave()
        assert reading.goes_on() is None


def the_end_of_the_run_reaches_it() -> None:
    with cast() as players:
        players.trainers[0].tick()
        reading = players.reading()
        players.controller.call(players.controller.runs.stop, players.run, StoppedError("enough"))
        assert "enough" in str(reading.goes_on())


def a_wait_has_a_limit() -> None:
    with cast() as players:
        players.trainers[0].tick()
        players.controller.runs.patience = 0.05
        reading = players.reading()
        time.sleep(0.1)
        players.controller.call(players.controller.runs.check_timeouts)
        error = reading.goes_on()
        assert isinstance(error, ClockTimeoutError)
        for part in ("table 'w' has staleness 0: trainer 0 has waited", "come to clock 1", "slowest is at 0"):
            assert part in str(error)


def a_broken_connection_is_made_anew_and_asked_again() -> None:
    with cast() as players:
        players.trainers[0].tick()
        reading = players.reading()
        parked = players.parked[0]
        before = players.routes_asked
        players.controller.call(parked.connection.transport.abort)
        wait_until(lambda: players.controller.awaited == [1, 1])
        assert players.routes_asked == before + 1, "a change may have been missed meanwhile"
        players.trainers[1].tick()
        assert reading.goes_on() is None


def another_controller_is_asked_again() -> None:
    with cast() as players:
        ahead, behind = players.trainers
        ahead.tick()
        reading = players.reading()
        before = players.routes_asked
        players.take_over()
        wait_until(lambda: players.controller.awaited or not reading.is_alive())
        assert players.controller.awaited == [1]
        assert players.routes_asked == before + 1
        time.sleep(0.05)
        assert reading.is_alive(), "the other trainer is at 0, and has not come back"
        behind.tick()
        assert reading.goes_on() is None
        assert players.controller.awaited == [1]
        ahead.tick()
        reading = players.reading()
        assert reading.is_alive()
        behind.tick()
        assert reading.goes_on() is None


def trainers_that_come_and_go_do_not_wait() -> None:
    with cast(elastic=True) as players:
        players.trainers[0].tick()
        assert players.reading().goes_on() is None
        assert players.controller.awaited == []


RULES = [
    tables_that_ask_for_nothing_cost_nothing,
    a_table_looser_than_its_run_costs_nothing,
    what_the_tick_has_told_suffices,
    it_waits_for_the_slowest_and_asks_once,
    the_slowest_never_waits,
    one_alone_never_waits,
    a_change_lets_it_look_again,
    a_change_is_told_once_at_the_next_tick,
    one_in_a_meeting_does_not_count,
    one_that_leaves_does_not_count,
    the_end_of_the_run_reaches_it,
    a_wait_has_a_limit,
    a_broken_connection_is_made_anew_and_asked_again,
    another_controller_is_asked_again,
    trainers_that_come_and_go_do_not_wait,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_of_the_gate_holds(rule) -> None:
    rule()


WRONG = {
    "its own clock is awaited": (ReadGate, "wait", "session.own.clock - bound", "session.own.clock",
                                 it_waits_for_the_slowest_and_asks_once),
    "parked reads are left": (Runs, "renew_tables", "self.release(run, run.clock.recall_reads())", "pass",
                              a_change_lets_it_look_again),
    "told again and again": (Runs, "release", "known, record.renewals = record.renewals, self._renewals",
                             "known = record.renewals", a_change_is_told_once_at_the_next_tick),
    "not told": (Participant, "_go_on", "if answer.renewed:", "if False:", a_change_is_told_once_at_the_next_tick),
    "routes are kept": (Participant, "_join", "self.session.forget_routes()", "pass",
                        a_broken_connection_is_made_anew_and_asked_again),
    "another controller is not asked": (Participant, "_await_lowest", "self._again(ask)", "ask()",
                                        another_controller_is_asked_again),
    "a missing trainer is not waited for": (run_records, "restored", "run.wait_for_return(",
                                            "run.clock.leave(1, now); run.wait_for_return(",
                                            another_controller_is_asked_again),
    "elastic runs wait": (Participant, "_enter", "None if joined.elastic else ", "",
                          trainers_that_come_and_go_do_not_wait),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_gate_is_caught(name) -> None:
    assert_noticed(*WRONG[name])


# ---- with servers

CLOCKS = 12


def training(ps: dps.ParameterServer, clocks: int):
    """A training function that processes of workers are sent by value.

    It counts its clocks in row `number` of both tables. Trainer 0 reads all counts in each way at each clock, and
    returns for each read (way, clock, the counts).
    """

    @dps.function
    def counts_of(rows):
        return rows.values.ravel()

    ps.register(counts_of)

    def train(trainer, partitions):
        me, seen, keys = trainer.number, [], np.arange(trainer.trainers)
        nothing = np.zeros(len(keys), np.float32)
        ways = {
            "pull": lambda: trainer.pull("tight", keys),
            "handle": lambda: trainer.table("tight").pull(keys),
            "client": lambda: trainer.client.pull("tight", keys),
            "async": lambda: trainer.pull_async("tight", keys).result(),
            "several": lambda: trainer.pull({"loose": keys, "tight": keys})["tight"],
            "certified": lambda: trainer.client.pull_certified("tight", keys)[0],
            "answer": lambda: trainer.push_pull("tight", keys, nothing),
            "answers": lambda: trainer.push_pull({"tight": (keys, nothing)})["tight"],
            "function": lambda: trainer.call(counts_of, "tight", keys),
            "function that is sent": lambda: trainer.client.call_async(counts_of, "tight", keys).result(),
            "slice": lambda: trainer.pull("tight", slice(None)),
        }
        for clock in range(clocks):
            time.sleep(0.1 * (me == 1))
            way = list(ways)[clock % len(ways)]  # another one is the first of each clock, which waits
            chosen = [way, *ways] if me == 0 else []
            seen += [(each, clock, np.asarray(ways[each]()).ravel().tolist()) for each in chosen]
            for table in ("tight", "loose"):
                trainer.push(table, [me], [1.0])
            trainer.tick()
        return seen

    return train


def check_reads(staleness: float, own: int, processes: bool) -> None:
    cluster = dps.LocalCluster(servers=1, trainers=2, processes=processes, dashboard_address=None)
    with cluster, dps.ParameterServer(cluster) as ps:
        ps.table("tight", rows=2, staleness=own, shards=1)
        ps.table("loose", rows=2)
        check_counts(ps.run(training(ps, CLOCKS), np.zeros(2), staleness=staleness)[0], 0, min(staleness, own))
        ps.set_staleness(own + 1, table="tight")
        assert ps.status().events[-1][1] == f"table 'tight': staleness {own + 1}, before {own}"
        assert ps.status().tables["tight"].staleness == own + 1
        check_counts(ps.run(training(ps, 3), np.zeros(2), staleness=staleness)[0], CLOCKS, min(staleness, own + 1))
        ps.set_staleness(math.inf, table="tight")
        assert ps.status().tables["tight"].staleness is None


def check_counts(seen: list[tuple[str, int, list[float]]], before: int, bound: float) -> None:
    """What each read has seen of both trainers' pushes, behind so many of an earlier run."""
    for way, clock, counts in seen:
        assert counts[0] == before + clock, f"{way} at clock {clock}: its own pushes are {counts[0]}"
        least = before + clock - bound
        assert counts[1] >= least, f"{way} at clock {clock}: {counts[1]}, at least {least} were promised"


@pytest.mark.parametrize(("staleness", "own"), [(math.inf, 0), (3, 1)])
def test_each_way_of_reading_is_as_fresh_as_its_table_asks(staleness, own) -> None:
    check_reads(staleness, own, processes=False)


def test_trainers_in_processes_of_their_own() -> None:
    check_reads(math.inf, 0, processes=True)


WAYS = {
    "one table": (PlainTable, "is_closed", "self.gate is not None and not", "False and"),
    "several tables": (PlainCalls, "pull_several", "table is None or (table.gate is not None and table.is_closed())",
                       "table is None"),
    "answers": (PlainCalls, "_terms", "answered and table.is_closed()", "False"),
    "the general way": (reads, "readable", "session.gate.wait(table)", "pass"),
    "general answers": (Client, "_push", "readable(session, name) if answered", "session.ready(name) if answered"),
    "functions": (FunctionCaller, "_begin", "readable(session, table)", "session.ready(table)"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", WAYS)
def test_a_way_of_reading_past_the_gate_is_caught(name) -> None:
    assert_noticed(*WAYS[name], lambda: check_reads(math.inf, 0, processes=False))


def test_what_is_no_staleness_of_a_table() -> None:
    for wrong in (-1, 0.5, "auto", True, math.nan):
        with pytest.raises(InputError, match=r"table 'w': staleness is a whole number from 0 to"):
            TableSpec("w", staleness=wrong)
    assert TableSpec("w", staleness=math.inf) == TableSpec("w")
    assert "staleness" not in TableSpec("w").to_dict(), "checkpoints of earlier versions are read and written as ever"
    assert TableSpec.from_dict(TableSpec("w", staleness=0).to_dict()).staleness == 0
    cluster = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with cluster, dps.ParameterServer(cluster) as ps:
        ps.table("w")
        with pytest.raises(InputError, match="table 'w': only a run's staleness is set automatically"):
            ps.set_staleness("auto", table="w")
        with pytest.raises(UnknownTableError, match="has no table 'v'; it has 'w'"):
            ps.set_staleness(1, table="v")
