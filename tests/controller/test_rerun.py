"""Trainers that die, are run again, are run twice: the rules against random lives, then tasks, then real processes."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import random
import re
import signal
import threading
import types
from collections import Counter
from functools import partial

import dask
import dask.array as da
import msgspec
import numpy as np
import pytest
from background import in_thread
from distributed import Client, get_worker
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant
from run_peers import Peer, state_of
from servers import wait_until

import dps
from dps.engine.client.ticket import Ticket
from dps.engine.controller import run as real_run
from dps.engine.controller import runs as real_runs
from dps.engine.controller.runs import Runs
from dps.engine.coordination import meetings as real_gather
from dps.engine.coordination.clock import Clock
from dps.engine.training.tasks import TrainerJob, train
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import ControllerGoneError, InputError, ProtocolError, StoppedError, TrainerLostError

# -- the rules, without sockets: connections that only write down what they are told


REFUSED = (StoppedError, ProtocolError)  # a connection that counts no more; one that has said LEAVE


class Attempt:
    """One attempt at a trainer: goes through the program as `Trainer` does, one request at a time."""

    def __init__(self, world, number, incarnation):
        self.world, self.number, self.incarnation = world, number, incarnation
        self.at, self.clock, self.calls = 0, 0, 0
        self.heard = []  # the answers of its meetings
        self.asked = None  # what has to be sent again over another connection
        self.connect()
        self.reached = self.told["clock"]
        if self.reached:
            self.ask("tick", self.reached)
        else:
            self.world.works(self)

    def connect(self):
        self.peer = Peer(self.world.runs)
        self.told = self.peer.join(1, self.number, self.incarnation)
        assert self.told["origin"] == 1 + self.number
        assert self.told["attempt"] == self.world.begun[self.number] - 1
        assert self.told["clock"] == self.world.completed[self.number]
        if self.asked is not None:
            self.ask(*self.asked)

    def ask(self, verb, *args):
        self.asked, self.request = (verb, *args), getattr(self.peer, verb)(*args)

    def step(self):
        """Go on if it may; whether it did."""
        if self.asked is None:
            self.say()
            return True
        answer = self.peer.answer(self.request)
        if answer is None:
            return False
        (verb, *args), self.asked = self.asked, None
        if verb == "leave":
            self.world.over.add(self.number)
            return True
        if verb == "collect":
            self.heard.append(int.from_bytes(answer[1][:8], "little"))
        elif args[0] > self.reached:
            self.clock, self.calls = args[0], 0
        self.world.works(self)
        return True

    def say(self):
        if self.at == len(self.world.program):
            self.ask("leave")
            return
        op, self.at = self.world.program[self.at], self.at + 1
        if op == "meet":
            self.calls += 1
            self.ask("collect", self.clock, self.calls - 1, self.world.part(self.number, self.at))
        elif self.clock < self.reached:  # replayed
            self.clock, self.calls = self.clock + 1, 0
        else:
            self.world.completed[self.number] = self.clock + 1
            self.ask("tick", self.clock + 1)


class World:
    """A run of some trainers with one program; anything may happen to them."""

    def __init__(self, dice, make=Runs):
        self.dice, self.now = dice, 0.0
        self.trainers, self.staleness = dice.randint(1, 4), dice.choice([0, 1, 2, math.inf])
        self.program = dice.choices(["tick", "meet"], weights=[3, 1], k=dice.randint(1, 14))
        self.runs = make("s", lambda: self.now)
        assert self.runs.start(self.trainers, None if math.isinf(self.staleness) else self.staleness) == 1
        self.completed = [0] * self.trainers  # clocks, as the trainers have told
        self.over = set()  # those that have left
        self.incarnation, self.begun = 0, [0] * self.trainers
        self.attempts = {}  # those that count
        self.zombies = []  # those that do not

    def part(self, number, at):
        return (at + 1) * 10**number

    def works(self, attempt):
        """It may compute at its clock: then it must see what all others did before clock - s. (The promise.)"""
        clock = max(attempt.clock, attempt.reached)
        behind = [n for n, done in enumerate(self.completed) if n not in self.over and done < clock - self.staleness]
        assert not behind, f"trainer {attempt.number} works at {clock}, trainers {behind} are at {self.completed}"

    @contextlib.contextmanager
    def fenced(self, attempt):
        """The connection that `attempt` has now is told, if it waits, that it counts no more."""
        peer, request = attempt.peer, attempt.asked and attempt.request
        waits = request and peer.answer(request) is None
        yield
        for late in (lambda: peer.tick(99), lambda: peer.leave("late"), peer.leave, lambda: peer.collect(0, 0, 99)):
            with pytest.raises(REFUSED):
                peer.answer(late())
        if waits:
            with pytest.raises(StoppedError, match="joined again"):
                peer.answer(request)

    def begin(self, number):
        self.incarnation += 1
        self.begun[number] += 1
        old = self.attempts.get(number)
        with contextlib.nullcontext() if old is None else self.fenced(old):
            self.attempts[number] = Attempt(self, number, self.incarnation)
        self.over.discard(number)
        if old is not None:
            self.zombies.append(old)

    def die(self, number):
        """Its process ends."""
        self.attempts.pop(number).peer.end()

    def reconnect(self, number):
        """The connection of one at work breaks."""
        attempt = self.attempts[number]
        peer = attempt.peer
        if self.dice.random() < 0.5:
            peer.end()  # the controller notices before, or
            attempt.connect()
        else:
            with self.fenced(attempt):
                attempt.connect()  # after
            peer.end()

    def haunt(self, zombie):
        """Whatever a replaced attempt says is refused, and changes nothing."""
        before = msgspec.json.encode(state_of(self.runs, 1))
        peer = zombie.peer
        for late in (
            *(lambda: peer.tick(99), lambda: peer.leave("a zombie"), lambda: peer.leave()),
            *(lambda: peer.collect(99, 0, 99), lambda: peer.collect(0, 0, 99)),
        ):
            with pytest.raises(REFUSED):
                peer.answer(late())
        with pytest.raises(StoppedError):
            Peer(self.runs).join(1, zombie.number, zombie.incarnation)
        if self.dice.random() < 0.5:
            peer.end()
            self.zombies.remove(zombie)
        assert msgspec.json.encode(state_of(self.runs, 1)) == before

    def live(self, steps):
        for _ in range(steps):
            self.now += 0.1
            number, fate = self.dice.randrange(self.trainers), self.dice.random()
            there = number in self.attempts
            if not there or fate < 0.03:
                self.begin(number)
            elif fate < 0.06:
                self.die(number)
            elif fate < 0.09 and number not in self.over:
                self.reconnect(number)
            elif fate < 0.12 and self.zombies:
                self.haunt(self.dice.choice(self.zombies))
            elif number not in self.over:
                self.attempts[number].step()
            self.runs.check_timeouts()

    def finish(self):
        """Nobody dies any more: all come to the end, and have heard the same."""
        for number in set(range(self.trainers)) - self.attempts.keys():
            self.begin(number)
        going = True
        while going:
            going = False
            for number, attempt in self.attempts.items():
                if number not in self.over:
                    going |= attempt.step()
        described = state_of(self.runs, 1)
        assert self.over == set(range(self.trainers)), described
        assert described.stopped is None
        assert described.clocks == [self.program.count("tick")] * self.trainers
        expected = [
            sum(self.part(n, at + 1) for n in range(self.trainers))
            for at, op in enumerate(self.program)
            if op == "meet"
        ]
        assert [attempt.heard for attempt in self.attempts.values()] == [expected] * self.trainers


def live(dice, make=Runs):
    world = World(dice, make)
    world.live(dice.randint(0, 120))
    world.finish()


@pytest.mark.thorough
@given(st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_random_lives(dice):
    live(dice)


@pytest.mark.slow
def test_many_random_lives():
    for seed in range(20_000):
        live(random.Random(seed))


def with_(module, old, new):
    """The module `module`, with another text."""
    source = pathlib.Path(module.__file__).read_text()
    assert source.count(old) == 1, old
    wrong = types.ModuleType("wrong")
    exec(compile(source.replace(old, new), module.__file__, "exec"), wrong.__dict__)
    return wrong


WRONG = {
    "older connections count": (real_runs, "if run.records[trainer].connection is not connection:", "if False:"),
    "the end of any connection counts": (real_runs, "if run.records[trainer].connection is connection:", "if True:"),
    "who waited is forgotten": (
        real_runs,
        "            waiting.fail(run.replaced(trainer))\n",
        "            pass\n",
    ),
    "whoever waits is answered over the new connection": (
        real_runs,
        "for waiting in run.withdraw(trainer):",
        "for waiting in ():",
    ),
    "one lost in a meeting does not count": (
        real_runs,
        "        for trainer in meeting.places:\n",
        "        for trainer in meeting.places.keys() - run.lost.keys():\n",
    ),
    "every join is an attempt": (real_runs, "(not again)", "1"),
    "meetings are not repeated": (real_runs, "if met is not None:  #", "if False:  #"),
    "a repeat is the last meeting": (
        real_gather,
        "met = self._met[trainer].get(place)",
        "met = self._kept[-1] if self._kept else None",
    ),
}


SEEN = 2136  # the first life that shows "one lost in a meeting does not count"; one of the first four shows each other


@pytest.mark.parametrize("wrong", WRONG)
def test_every_wrong_rule_is_caught(wrong, monkeypatch):
    module, old, new = WRONG[wrong]
    changed = with_(module, old, new)
    make = getattr(changed, "Runs", Runs)
    if module is real_gather:
        monkeypatch.setattr(real_run, "Meetings", changed.Meetings)

    def many_lives():
        for seed in (SEEN, *range(3000)):
            live(random.Random(seed), make)

    with pytest.raises((AssertionError, dps.DPSError, KeyError, pytest.fail.Exception)):
        many_lives()


def test_runs_tell_time_by_their_own_clock_and_hand_out_origins():
    now = [100.0]
    runs = Runs("s", lambda: now[0])
    assert runs.origins.allot(1) == 1
    assert runs.start(3, 0) == 1
    assert runs.origins.allot(5) == 5
    assert runs.start(2, None) == 2
    told = [Peer(runs).join(1, n, 7) for n in range(3)]
    assert [t["origin"] for t in told] == [2, 3, 4]
    assert [Peer(runs).join(2, n, 8)["origin"] for n in range(2)] == [10, 11]
    with pytest.raises(dps.errors.LimitError, match="handed out all"):
        runs.origins.allot(1 << 32)


def test_a_lost_trainer_that_is_not_back_in_time_ends_the_run():
    now = [100.0]
    with dask.config.set({"dps.timeouts.rejoin": "20 s"}):
        runs = Runs("s", lambda: now[0])
    runs.start(2, 0)
    peers = [Peer(runs), Peer(runs)]
    for n, peer in enumerate(peers):
        peer.join(1, n, 1)
    waits = peers[0].tick(1)
    peers[1].end()
    for later in (0, 20):
        now[0] = 100.0 + later
        runs.check_timeouts()
        assert peers[0].answer(waits) is None
    assert "trainer 1 is at clock 0, last heard of 20 s ago and lost its connection" in runs.runs[1].clock.explain(
        0, 120
    )
    now[0] = 120.1
    runs.check_timeouts()
    with pytest.raises(TrainerLostError, match=r"trainer 1 .* vanished at clock 0 and was not back within 20 s"):
        peers[0].answer(waits)
    with pytest.raises(TrainerLostError):
        Peer(runs).join(1, 1, 2)


def test_a_run_on_spark_waits_as_long_as_spark_does():
    """The limit of one run can be longer than `dps.timeouts.rejoin`, never shorter; the error names what set it."""
    now = [0.0]
    with dask.config.set({"dps.timeouts.rejoin": "20 s"}):
        runs = Runs("s", lambda: now[0])
    for _ in range(3):
        runs.start(1, 0)
    runs.set_rejoin(2, 600, "Spark's setting")
    runs.set_rejoin(2, 30, "another")
    runs.set_rejoin(3, 5, "too short")
    for number in (1, 2, 3):
        peer = Peer(runs)
        peer.join(number, 0, 1)
        peer.end()
    with pytest.raises(InputError, match="no run number 9"):
        runs.set_rejoin(9, 600, "")

    def stopped(at):
        now[0] = at
        runs.check_timeouts()
        return [runs.runs[number].stopped for number in (1, 2, 3)]

    assert stopped(19) == [None, None, None]
    first, second, third = stopped(21)
    assert second is None
    for error in (first, third):
        assert "not back within 20 s (dps.timeouts.rejoin)" in str(error)
    assert stopped(599)[1] is None
    assert "not back within 600 s (Spark's setting)" in str(stopped(601)[1])


def test_one_lost_in_a_meeting_is_told_what_came_of_it_and_counts_meanwhile():
    runs = Runs("s", lambda: 0.0)
    runs.start(3, 0)
    peers = [Peer(runs) for _ in range(3)]
    for n, peer in enumerate(peers):
        peer.join(1, n, 1)
    peers[0].collect(0, 0, 1)
    peers[0].end()
    first = [peers[n].collect(0, 0, 10**n) for n in (1, 2)]
    sums = [peers[n + 1].answer(request)[1] for n, request in enumerate(first)]
    assert sums == [np.int64(111).tobytes()] * 2
    ticks = [peers[n].tick(1) for n in (1, 2)]
    assert [peers[n + 1].answer(request) for n, request in enumerate(ticks)] == [None, None], "0 is at clock 0"
    again = Peer(runs)
    assert again.join(1, 0, 2)["clock"] == 0
    assert again.answer(again.collect(0, 0, 5))[1] == np.int64(111).tobytes()
    assert again.answer(again.tick(1)) is not None
    assert None not in [peers[n + 1].answer(request) for n, request in enumerate(ticks)]


def test_a_request_that_comes_while_an_earlier_one_waits_takes_its_place():
    """The earlier one is answered too, with an error: nothing waits for ever."""
    runs = Runs("s", lambda: 0.0)
    runs.start(2, 0)
    peers = [Peer(runs) for _ in range(2)]
    for n, peer in enumerate(peers):
        peer.join(1, n, 1)
    first, second = peers[0].tick(1), peers[0].tick(2)
    with pytest.raises(InputError, match=r"trainer 0 asked again \(clock 2\) before its request of clock 1"):
        peers[0].answer(first)
    assert state_of(runs, 1).clocks == [2, 0]
    assert peers[1].answer(peers[1].tick(1)) is not None
    assert peers[0].answer(second) is None, "trainer 0 is at clock 2, and trainer 1 at 1"
    assert state_of(runs, 1).waiting == [0]
    peers[1].tick(2)
    assert peers[0].answer(second) is not None
    met, again = peers[0].collect(2, 0, 1), peers[0].collect(2, 0, 2)
    with pytest.raises(InputError, match="asked again"):
        peers[0].answer(met)
    assert peers[1].answer(peers[1].collect(2, 0, 40))[1] == np.int64(42).tobytes()
    assert peers[0].answer(again)[1] == np.int64(42).tobytes()


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (Runs, "tick", "park(run.ticking, trainer, ", "run.ticking.setdefault(trainer, "),
        (Runs, "collect", "park(run.meeting, trainer, ", "run.meeting.setdefault(trainer, "),
        (real_runs, "park", "earlier.fail(", "("),
        (real_runs, "park", "earlier is not None and earlier.header.request != request.header.request", "False"),
        (Clock, "tick", "self._end_wait(trainer)", "pass"),
        (Clock, "_settle", "and clock == self._clocks[trainer]", ""),
        (Clock, "tick", "self._uncount(self._clocks[trainer])", "pass"),
    ],
)
def test_a_wrong_place_of_a_request_is_caught(owner, name, old, new, monkeypatch):
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test_a_request_that_comes_while_an_earlier_one_waits_takes_its_place()


@pytest.mark.parametrize("wish", [b"[]", b"1", b"{}", b'{"run": 1, "trainer": 1e999, "incarnation": 1}', b"null"])
def test_frames_that_make_no_sense(wish):
    runs = Runs("s", lambda: 0.0)
    runs.start(1, 0)
    peer = Peer(runs)
    with pytest.raises(ProtocolError, match="a Join that cannot be read"):
        peer.answer(peer.send("join", Header(frames.JOIN), wish))
    peer.join(1, 0, 1)
    with pytest.raises(ProtocolError, match="a Leave that cannot be read"):
        peer.answer(peer.send("leave", Header(frames.LEAVE), wish))
    with pytest.raises(InputError):
        peer.answer(peer.collect(-1, 0, 1))
    peer.leave()
    assert state_of(runs, 1).left == [0]


# -- tasks, with workers that are threads of this process

GO = threading.Event()  # for tasks in this process: they find this very module
NOTES = []  # what they have done


@pytest.fixture
def client():
    GO.clear()
    NOTES.clear()
    with (
        dps.LocalCluster(servers=1, trainers=3, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client
        GO.set()


@pytest.fixture
def ps(client):
    with dps.ParameterServer(client) as ps:
        ps.table("n", dtype="int64")
        yield ps


class OwnError(Exception):
    """A user's."""


def fails_twice(trainer, parts, style):
    """Trainer 1 raises at clocks 3 and 5, when run first and second. Each adds 1 to its row in each clock."""
    assert trainer.clock == 0
    trainer.push("n", [100 + trainer.number], 1)
    heard = [int(trainer.allreduce(trainer.number + 1))]
    for epoch in range(3):
        steps = trainer.iterate(range(3)) if style == "iterate" else range(3)
        for _ in steps:
            NOTES.append((trainer.number, trainer.attempt, trainer.clock))
            if (trainer.number, trainer.attempt, trainer.clock) in ((1, 0, 3), (1, 1, 5)):
                raise OwnError(trainer.attempt)
            trainer.push("n", [trainer.number], 1)
            if style == "by hand":
                trainer.tick()
        heard.append(int(trainer.allreduce(10**epoch * (trainer.number + 1))))
        trainer.barrier()
    return heard, trainer.attempt, trainer.clock


@pytest.mark.parametrize("style", ["iterate", "by hand"])
@pytest.mark.parametrize("staleness", [0, 1, math.inf])
def test_a_function_that_raises_is_run_again_from_its_clock(client, ps, staleness, style):
    data = client.scatter([0, 1, 2], broadcast=True)
    results = ps.run(fails_twice, data, staleness=staleness, retries=2, args=(style,))
    assert results == [([6, 6, 60, 600], 2 if n == 1 else 0, 9) for n in range(3)]
    done = Counter((number, clock) for number, _, clock in NOTES)
    again = {3: 1, 5: 1} if style == "iterate" else {0: 2, 1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    assert all(count == 1 + (number == 1) * again.get(clock, 0) for (number, clock), count in done.items())
    assert set(done) == {(n, clock) for n in range(3) for clock in range(9)}
    assert ps.client().pull("n", [0, 1, 2, 100, 101, 102]).tolist() == [9, 9, 9, 1, 1, 1]


@dps.function(changes=True)
def one_more(rows):
    rows.values += 1


def changing(trainer, parts, v):
    """Trainer 1 raises in the middle of clocks 2 and 4. All call functions, delete, and change a vector in place."""
    own = [trainer.number, 10 + trainer.number]
    while trainer.clock < 6:
        trainer.push("n", own, 10)
        trainer.call(one_more, "n", own)
        if trainer.clock == 3:
            trainer.delete("n", own[:1])
        trainer.add(v, own[:1], 1.0)
        if trainer.number == 1:
            v[5:] *= 2.0
        if (trainer.number, trainer.attempt, trainer.clock) in ((1, 0, 2), (1, 1, 4)):
            raise OwnError(trainer.attempt)
        trainer.call(one_more, "n", own)
        trainer.tick()


@pytest.mark.leaks_ok("the clients of tasks end with the tasks' records at Dask")
@pytest.mark.parametrize("staleness", [0, 2])
def test_calls_deletions_and_vectors_of_a_trainer_that_is_run_again_count_once(client, ps, staleness):
    ps.register(one_more)
    v = dps.arrays.on(ps).ones(8)
    data = client.scatter([0, 1, 2], broadcast=True)
    ps.run(changing, data, staleness=staleness, retries=2, args=(v,))
    assert ps.client().pull("n", [0, 1, 2, 10, 11, 12]).tolist() == [25] * 3 + [72] * 3
    assert v.tolist() == [7.0] * 3 + [1.0] * 2 + [64.0] * 3


def test_a_function_that_raises_too_often(client, ps):
    data = client.scatter([0, 1, 2], broadcast=True)
    with pytest.raises(OwnError, match="1"):
        ps.run(fails_twice, data, retries=1, args=("iterate",))
    (run,) = ps.status().runs
    assert run.connected == []
    assert run.attempts == [1, 2, 1]


@pytest.mark.parametrize("retries", [-1, 1.0, True, None])
def test_no_such_retries(client, ps, retries):
    with pytest.raises(InputError, match="retries is 0 or more"):
        ps.run(fails_twice, client.scatter([0]), retries=retries)


def waits_for_go(trainer, parts):
    """Trainer 1 stays at clock 4, in its first attempt, until it may go on."""
    for clock in trainer.iterate(range(8)):
        NOTES.append((trainer.number, trainer.attempt, clock, get_worker().address))
        if (trainer.number, trainer.attempt, clock) == (1, 0, 4):
            GO.wait(30)
        trainer.push("n", [10 * trainer.number + clock], 1)
    return trainer.attempt


def at_work(number):
    """The worker of that trainer, when it stands where it waits."""
    wait_until(lambda: any(note[:3] == (number, 0, 4) for note in NOTES))
    return next(note[3] for note in NOTES if note[:3] == (number, 0, 4))


@pytest.mark.thorough
def test_a_zombie_changes_nothing(client, ps):
    """Its worker is gone for Dask, but its thread goes on: another attempt takes over on a free thread."""
    ended = in_thread(ps.run, waits_for_go, da.arange(2, chunks=1).persist(), trainers=2)
    worker = at_work(1)
    client.retire_workers([worker])
    wait_until(lambda: ps.status().runs[0].attempts == [1, 2])
    assert ended() == [0, 1]
    GO.set()  # the zombie's push is of an older attempt, or a repeat
    assert [note[2] for note in NOTES if note[:2] == (1, 1)] == [4, 5, 6, 7]
    wait_until(lambda: not any(client.processing().values()))
    keys = [10 * n + clock for n in range(2) for clock in range(8)]
    assert ps.client().pull("n", keys).tolist() == [1] * 16


@pytest.mark.thorough
def test_no_thread_is_free_for_one_that_lost_its_worker(client, caplog):
    times = {"dps.timeouts.rejoin": "1 s", "dps.timeouts.stop": "1 s"}
    with dask.config.set(times), dps.ParameterServer(client) as ps:
        ps.table("n", dtype="int64")
        ended = in_thread(ps.run, waits_for_go, da.arange(3, chunks=1).persist())
        client.retire_workers([at_work(1)])
        lost = r"trainer 1 lost its worker .* for 1 s \(dps.timeouts.rejoin\) no thread was free to run it again: of 3 "
        with pytest.raises(TrainerLostError, match=lost):
            ended()
        assert "no thread for it: of 3 workers with 3 threads, 1 worker with 1 thread is for servers" in caplog.text
        assert re.search(r"2 threads have tasks \(dps-train-dps-\w+, dps-train-dps-\w+\), 0 threads are", caplog.text)
        GO.set()
        wait_until(lambda: not any(run.connected for run in ps.status().runs))


def breaks_connections(trainer, parts):
    """The connection to the controller breaks, at any moment; the function does not notice."""
    sums = []
    for clock in trainer.iterate(range(6)):
        trainer.push("n", [trainer.number], 1)
        if clock % 3 == trainer.number:
            trainer.client.session._controller_channel._socket._sock.shutdown(2)
        sums.append(int(trainer.allreduce(clock)))
        if clock % 2 == trainer.number % 2:
            trainer.client.session._controller_channel._socket._sock.shutdown(2)
    trainer.client.session._controller_channel._socket._sock.shutdown(2)
    return sums, trainer.attempt


@pytest.mark.parametrize("staleness", [0, 2, math.inf])
def test_a_broken_connection_is_made_anew(client, ps, staleness):
    data = client.scatter([0, 1, 2], broadcast=True)
    assert ps.run(breaks_connections, data, staleness=staleness) == [([0, 3, 6, 9, 12, 15], 0)] * 3
    (run,) = ps.status().runs
    assert (run.left, run.lost, run.clocks) == ([0, 1, 2], [], [6, 6, 6])
    assert ps.client().pull("n", [0, 1, 2]).tolist() == [6] * 3


def test_a_controller_that_is_gone_is_not_asked_for_ever(client, ps):
    run = ps.connection.call("start_run", trainers=1, staleness=0)
    with dps.Trainer.join(ps.ticket, run, 0) as trainer:
        trainer.client.session.ticket = Ticket(ps.name, ("127.0.0.1", 1), ps.ticket.secret)
        trainer.client.session._controller_channel.close()
        trainer.client.session._insisting = 0.5
        with pytest.raises(ControllerGoneError, match="cannot be reached"):
            trainer.tick()


# -- real processes, which are killed


def counted(trainer, parts, folder, disturb):
    """Two pushes of 1 in each clock, to keys of that (trainer, clock); before each of them something may happen."""
    notes = pathlib.Path(folder, str(trainer.number))
    for _ in trainer.iterate(parts, batch_size=1):
        with notes.open("a") as file:
            print(trainer.attempt, trainer.clock, get_worker().address, file=file)
        for step in (0, 1):
            disturb(trainer, step)
            trainer.push("n", [1000 * trainer.number + trainer.clock, 10**6 + step], 1)
    return trainer.attempt


def killed(trainer, step, moment):
    """Trainer 1 kills its process, once."""
    if (trainer.number, trainer.attempt, trainer.clock, step) == (1, 0, 37, moment):
        os.kill(os.getpid(), signal.SIGKILL)


def held(trainer, step, folder):
    """The first attempt stays between two pushes until the second one is at work in the same clock."""
    there = pathlib.Path(folder, f"second of {trainer.number}")
    if trainer.attempt:
        there.touch()
    elif (trainer.clock, step) == (37, 1):
        wait_until(there.exists)


def notes_of(folder, number):
    """What that trainer noted: (attempt, clock, worker) of each iteration begun, by all attempts."""
    lines = pathlib.Path(folder, str(number)).read_text().splitlines()
    return [(int(attempt), int(clock), worker) for attempt, clock, worker in map(str.split, lines)]


def assert_counted(ps, trainers, clocks):
    keys = np.add.outer(1000 * np.arange(trainers), np.arange(clocks))
    assert (ps.client().pull("n", keys) == 2).all()
    assert ps.client().pull("n", [10**6, 10**6 + 1]).tolist() == [trainers * clocks] * 2
    assert ps.status().servers[0].tables["n"].rows == trainers * clocks + 2


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize(
    "moment",
    [pytest.param(0, id="before its pushes", marks=pytest.mark.slow), pytest.param(1, id="between its pushes")],
)
@pytest.mark.parametrize("workers", [2, 3], ids=["restarted worker", "spare worker"])
def test_a_killed_trainer_comes_back_at_its_clock(tmp_path, workers, moment):
    with (
        dps.LocalCluster(trainers=workers, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n", dtype="int64")
        data = client.persist(da.arange(160, chunks=80))
        results = ps.run(counted, data, trainers=2, staleness=1, args=(str(tmp_path), partial(killed, moment=moment)))
        assert results == [0, 1]
        (run,) = ps.status().runs
        assert (run.clocks, run.attempts, run.left) == ([80, 80], [1, 2], [0, 1])
        first, second = ([note for note in notes_of(tmp_path, 1) if note[0] == n] for n in (0, 1))
        assert [clock for _, clock, _ in first] == list(range(38))
        assert [clock for _, clock, _ in second] == list(range(37, 80)), "one iteration is done twice, no more"
        assert first[0][2] != second[0][2]
        assert len(notes_of(tmp_path, 0)) == 80
        assert_counted(ps, 2, 80)


def dies_always(trainer, parts):
    trainer.tick()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.thorough
@pytest.mark.processes
def test_trainers_that_are_lost_for_good():
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        dps.LocalCluster(trainers=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        with pytest.raises(TrainerLostError, match=r"trainer 0 has lost its worker 2 times.* out of memory, or crash"):
            ps.run(dies_always, client.persist(da.arange(1)))
        wait_until(lambda: len(client.nthreads()) == 3)
        with pytest.raises(TrainerLostError, match=r"1 of the 1 partitions of trainer 0 were lost.*were scattered"):
            ps.run(dies_always, client.scatter([0]))
        wait_until(lambda: len(client.nthreads()) == 3)
        cluster.scheduler.allowed_failures = 0  # Dask gives up before we do
        with pytest.raises(TrainerLostError, match=r"trainer 0 was lost: .*|trainer 0 has lost its worker"):
            ps.run(dies_always, client.persist(da.arange(1)))


@pytest.mark.slow
@pytest.mark.processes
def test_every_trainer_run_twice_at_once(tmp_path):
    """As Dask would if it took a worker for dead that is not: two tasks for each trainer, one after the other begun."""
    with (
        dps.LocalCluster(trainers=4, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client) as ps,
    ):
        ps.table("n", dtype="int64")
        run = ps.connection.call("start_run", trainers=2, staleness=1)
        args = (str(tmp_path), partial(held, folder=str(tmp_path)))
        job = TrainerJob(ps.ticket, run, counted, args, {}, 0)
        threads = {"driver": client.id, "trainers": None, "most": 4, "holding": [], "seconds": 60}
        free = iter(worker for worker, _ in ps.connection.call("take_threads", **threads)["seats"])

        def begin():
            workers = [next(free) for _ in range(2)]
            return [
                client.submit(train, job, n, [n], [np.arange(80)], workers=[workers[n]], pure=False) for n in range(2)
            ]

        first = begin()
        wait_until(lambda: ps.status().runs[0].clocks == [37, 37])
        second = begin()
        assert client.gather(second) == [1, 1]
        for stopped in client.gather(first):  # the controller tells it, or a server, whichever it asks first
            assert "has joined again" in stopped.reason or "has taken its place" in stopped.reason
        for n in range(2):
            notes = [(attempt, clock) for attempt, clock, _ in notes_of(tmp_path, n)]
            assert sorted(notes) == [(0, clock) for clock in range(38)] + [(1, clock) for clock in range(37, 80)]
        assert_counted(ps, 2, 80)
