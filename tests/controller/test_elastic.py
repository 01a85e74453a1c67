"""Runs whose trainers come and go, and runs with several callers: the controller's rules, without sockets."""

from __future__ import annotations

import math

import pytest
from noticing import assert_noticed
from run_peers import Peer, state_of

from dps.engine.controller import runs as real_runs
from dps.engine.controller.run import Run
from dps.engine.controller.runs import Runs
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import InputError, LimitError, ProtocolError, StoppedError


class Caller(Peer):
    def say(self, verb, kind, **fields):
        return frames.decode_json(self.answer(self.send(verb, Header(kind), frames.encode_json(fields)))[1])

    def reserve(self, run, name, count=1):
        return self.say("reserve", frames.RESERVE, run=run, name=name, count=count)["first"]

    def peek(self, run, trainer):
        return self.say("peek", frames.PEEK, run=run, trainer=trainer)

    def come(self, run, trainer, incarnation, joins=1):
        return self.say("join", frames.JOIN, run=run, trainer=trainer, incarnation=incarnation, joins=joins)


@pytest.fixture
def runs():
    made = []  # it asks for the time when it is made, too
    runs = Runs("s", lambda: made[0].time if made else 0.0)
    runs.time = 0.0
    made.append(runs)
    return runs


@pytest.fixture
def elastic(runs):
    return runs.start(3, None, elastic=True)


def test_they_come_when_they_come(runs, elastic):
    first = Caller(runs)
    assert first.come(elastic, 2, 100) | {"origin": 3, "attempt": 0, "clock": 0} == first.come(elastic, 2, 100, joins=2)
    assert first.answer(first.tick(1)) is not None  # nobody waits for those that have never come
    first.answer(first.leave())
    assert state_of(runs, elastic).left == [2]
    assert not runs.runs[elastic].over
    again = Caller(runs)
    assert again.come(elastic, 2, 101) | {"attempt": 1, "clock": 1} == again.come(elastic, 2, 101, joins=2)


def test_who_is_lost_is_not_missed(runs, elastic):
    peer, other = Caller(runs), Caller(runs)
    peer.come(elastic, 0, 100)
    other.come(elastic, 1, 101)
    peer.end()
    runs.time = 10 * runs.rejoin
    runs.check_timeouts()
    assert state_of(runs, elastic).stopped is None
    assert other.answer(other.tick(1)) is not None
    other.end()
    assert not runs.runs[elastic].active


def test_who_fails_stops_nobody(runs, elastic):
    peer, other = Caller(runs), Caller(runs)
    peer.come(elastic, 0, 100)
    other.come(elastic, 1, 101)
    peer.answer(peer.leave("an error"))
    assert peer.peek(elastic, 0) == {"incarnation": 100, "state": "lost", "stopped": None}
    assert other.answer(other.tick(1)) is not None
    assert Caller(runs).come(elastic, 0, 102)["attempt"] == 1


def test_the_earlier_attempt_is_fenced_and_sees_what_becomes_of_the_later(runs, elastic):
    slow, twin = Caller(runs), Caller(runs)
    slow.come(elastic, 0, 100)
    twin.come(elastic, 0, 105)
    with pytest.raises(StoppedError, match="joined again"):
        slow.answer(slow.leave())
    with pytest.raises(StoppedError, match="attempt 100 of trainer 0 was replaced by attempt 105"):
        Caller(runs).come(elastic, 0, 100, joins=2)
    assert slow.peek(elastic, 0) == {"incarnation": 105, "state": "joined", "stopped": None}
    twin.answer(twin.leave())
    assert slow.peek(elastic, 0)["state"] == "left"
    with pytest.raises(StoppedError, match="replaced"):  # also when the later one has ended well
        Caller(runs).come(elastic, 0, 100, joins=2)
    assert slow.peek(elastic, 2) == {"incarnation": None, "state": "expected", "stopped": None}


def test_one_attempt_comes_once(runs, elastic):
    peer = Caller(runs)
    peer.come(elastic, 0, 100)
    peer.answer(peer.leave())
    with pytest.raises(InputError, match=r"two partitions computed by one task"):
        Caller(runs).come(elastic, 0, 100)
    assert Caller(runs).come(elastic, 0, 100, joins=2)["attempt"] == 0  # its LEAVE was not answered: it says it again


def test_they_cannot_meet(runs, elastic):
    peer = Caller(runs)
    peer.come(elastic, 0, 100)
    with pytest.raises(InputError, match="come and go"):
        peer.answer(peer.collect(0, 0, 1))


def test_the_end_is_said(runs, elastic):
    peer = Caller(runs)
    peer.come(elastic, 0, 100)
    assert runs.retire() == []
    assert runs.end(elastic)
    with pytest.raises(StoppedError, match=f"run {elastic} was closed"):
        peer.answer(peer.tick(1))
    with pytest.raises(StoppedError, match="was closed"):
        Caller(runs).come(elastic, 1, 101)
    assert runs.retire() == [[1, 3]]
    assert runs.failed() == 0  # that was no failure
    assert runs.end(elastic)
    assert not runs.end(4711)  # forgotten long ago


def test_others_are_not_disturbed(runs, elastic):
    Caller(runs).come(elastic, 0, 100)
    assert runs.only_active() is None  # a checkpoint follows no elastic run
    number = runs.start(1, 0, collecting=["sums"])  # which would wait for the end of any other
    Caller(runs).come(number, 0, 0)
    assert runs.only_active() is runs.runs[number]
    assert runs.start(1, None, elastic=True)
    with pytest.raises(InputError, match="is going on"):
        runs.start(1, 0, collecting=["sums"])
    assert not runs.end(elastic)  # the sums of the other one's clock stay open
    for other in range(20):  # runs that have ended are forgotten, elastic ones that have not are kept
        runs.stop(runs.start(1, 0), StoppedError(str(other)))
    assert elastic + 2 in runs.runs


def test_there_are_not_too_many(runs, monkeypatch):
    monkeypatch.setattr(real_runs, "MAX_ELASTIC_RUNS", 3)
    numbers = [runs.start(1, None, elastic=True) for _ in range(3)]
    with pytest.raises(LimitError, match="3 elastic runs"):
        runs.start(1, None, elastic=True)
    runs.end(numbers[0])
    assert runs.start(1, None, elastic=True)


def test_numbers_are_reserved_by_name(runs):
    run, peer = runs.start(4, 1), Caller(runs)
    assert peer.reserve(run, "spark", 2) == 0
    assert peer.reserve(run, "dask") == 2
    assert peer.reserve(run, "spark", 2) == 0
    with pytest.raises(
        InputError, match=r"2 trainers under the name 'more' .* of which are reserved: 2 for 'spark', 1 f"
    ):
        peer.reserve(run, "more", 2)
    with pytest.raises(InputError, match="do not fit"):
        peer.reserve(run, "spark", 1)
    with pytest.raises(InputError, match="do not fit"):
        peer.reserve(run, "none", 0)
    assert peer.reserve(run, "last") == 3
    runs.stop(run, StoppedError("enough"))
    with pytest.raises(StoppedError, match="enough"):
        peer.reserve(run, "spark", 2)
    assert peer.peek(run, 0)["stopped"] == "enough"


@pytest.mark.parametrize(("verb", "kind"), [("reserve", frames.RESERVE), ("peek", frames.PEEK)])
@pytest.mark.parametrize("wish", [[], None, {}, {"run": 1}, {"run": "x", "trainer": 0, "name": "n", "count": math.inf}])
def test_what_cannot_be_read_is_refused(runs, elastic, verb, kind, wish):
    peer = Caller(runs)
    with pytest.raises(ProtocolError, match=f"a {verb.capitalize()} that cannot be read"):
        peer.answer(peer.send(verb, Header(kind), frames.encode_json(wish)))
    with pytest.raises(InputError, match="no run number 77"):
        peer.say(verb, kind, run=77, trainer=0, name="n", count=1)


def test_attempts_by_the_controllers_count(runs):
    run = runs.start(1, 0)
    first, second = Caller(runs), Caller(runs)
    assert first.come(run, 0, None)["incarnation"] == 0
    told = second.come(run, 0, None)
    assert (told["incarnation"], told["attempt"]) == (1, 1)
    with pytest.raises(StoppedError):
        first.answer(first.tick(1))
    assert Caller(runs).come(run, 0, told["incarnation"], joins=2)["attempt"] == 1  # its connection broke


def check_older_connection():
    """A JOIN over a connection that broke may come after that over the next one, and takes nothing away from it."""
    runs = Runs("s", lambda: 0.0)
    run = runs.start(1, 0)
    newer = Caller(runs)
    newer.come(run, 0, 100, joins=2)
    with pytest.raises(StoppedError, match="over this connection count no more"):
        Caller(runs).come(run, 0, 100, joins=1)
    newer.send("tick", Header(frames.TICK, clock=1))
    assert state_of(runs, run).clocks == [1]


def test_an_older_connection_joins_too_late():
    check_older_connection()


def test_an_older_connection_that_joins_is_noticed():
    assert_noticed(Run, "check_may_join", "request.joins < record.joins", "False", check_older_connection)
