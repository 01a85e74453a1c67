"""The simulator: its network keeps what TCP promises and nothing more, and the same seed gives the same world."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from oracles import mutant
from peers import ViewSink

import dps
from dps.engine.simulation.channel import SimChannel
from dps.engine.simulation.endpoint import SimEndpoint
from dps.engine.simulation.network import END, End, Network, Pipe, SimWire
from dps.engine.simulation.world import Crashed, Party, World
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.errors import (
    AccessDeniedError,
    DPSError,
    InputError,
    MovedError,
    ProtocolError,
    RequestTimeoutError,
    ServerGoneError,
    StoppedError,
    TrainerLostError,
)
from dps.testing import Faults, Simulation, StuckError

KEYS = np.arange(20)
NAME, SECRET = "s", "11" * 32


# ---- time and tasks


def test_events_come_in_the_order_of_time_and_then_of_their_making():
    world, seen = World(0), []
    for number, when in enumerate([0.3, 0.1, 0.1, 0.2, 0.3]):
        world.at(when, None, lambda n=number: seen.append((n, world.now)))
    for _ in range(5):
        world.step()
    assert seen == [(1, 0.1), (2, 0.1), (3, 0.2), (0, 0.3), (4, 0.3)]
    with pytest.raises(StuckError, match="nothing can happen"):
        world.step()


def test_tasks_sleep_in_their_own_time():
    world, seen = World(0), []
    fast, slow = Party(world, "fast", rate=1.5), Party(world, "slow", rate=0.5)

    def work(party):
        for _ in range(3):
            began = party.now()
            party.sleep(0.3)
            assert party.now() - began == pytest.approx(0.3)
            seen.append((party.name, round(world.now, 9)))

    tasks = [fast.spawn(work, fast), slow.spawn(work, slow)]
    Party(world, "driver").sleep(10)
    assert sorted(seen) == [("fast", 0.2), ("fast", 0.4), ("fast", 0.6), ("slow", 0.6), ("slow", 1.2), ("slow", 1.8)]
    assert all(task.done and task.error is None for task in tasks)


def test_a_cancelled_timer_does_nothing_and_a_stopped_party_nothing_yet():
    world, seen = World(0), []
    party, driver = Party(world, "party"), Party(world, "driver")
    party.later(0.1, seen.append, "cancelled").cancel()
    party.later(0.2, lambda: seen.append(("timer", world.now)))
    party.stop()
    party.stop()
    driver.sleep(1)
    party.go_on()
    driver.sleep(1)
    assert seen == []
    party.go_on()
    driver.sleep(1)
    assert seen == [("timer", 2.0)]


def test_a_crash_ends_tasks_where_they_stand():
    world, seen = World(0), []
    party, driver = Party(world, "party"), Party(world, "driver")

    def work():
        try:
            party.sleep(1)
            seen.append("slept")
        finally:
            seen.append("finally")
            party.sleep(1)  # what a dead party does in its last moments has no effect
            seen.append("slept again")

    working, unborn = party.spawn(work), []
    driver.sleep(0.5)
    unborn.append(party.spawn(seen.append, "born"))
    party.later(0, seen.append, "timer")
    party.crash()
    driver.sleep(5)
    assert seen == ["finally"]
    assert working.done
    assert isinstance(working.error, Crashed)
    assert unborn[0].done


# ---- connections


class Ear(End):
    """Takes what arrives, and notes when; perhaps only when told to."""

    def __init__(self, host, lazy=False):
        super().__init__(host)
        self.lazy, self.heard, self.drains = lazy, [], 0

    def arrived(self):
        while self.inward.inbox and not self.lazy:
            message = self.take()
            self.heard.append((message, self.host.world.now))
            if message is END:
                self.finish()
                return

    def drained(self):
        self.drains += 1

    @property
    def messages(self):
        return [message for message, _ in self.heard]


def wired(seed=0, latency=(0.001, 0.01), window=1 << 18):
    world = World(seed)
    network = Network(world, latency, window)
    a, b, driver = (Party(world, name) for name in ("a", "b", "driver"))
    caller, called = Ear(a), Ear(b)
    return world, network, driver, SimWire(network, caller, called), caller, called


def converse(data) -> None:
    """Everything that may happen to one connection; what is heard is always a prefix of what was said, in order."""
    _world, network, driver, wire, caller, called = wired(
        data.draw(st.integers(0, 99)), window=data.draw(st.sampled_from([8, 99]))
    )
    sent, ends, parted = defaultdict(list), (caller, called), []
    gentle = ["say", "say", "wait", "part", "one-way", "heal", "stop", "go on", "lag"]
    acts = st.sampled_from(gentle if data.draw(st.booleans()) else [*gentle, "snap", "bye"])
    snapped, left = False, []
    for number in range(data.draw(st.integers(1, 30))):
        act, side = data.draw(acts), data.draw(st.integers(0, 1))
        end = ends[side]
        if act == "say" and not end.over and not end.outward.broken:
            for part in range(3):
                end.outward.write((number, part), data.draw(st.integers(1, 6)))
                sent[side].append((number, part))
        elif act == "wait":
            driver.sleep(0.05)
        elif act in ("part", "one-way"):
            made = network.part([end.host.name], [ends[1 - side].host.name], one_way=act == "one-way")
            parted.append((made, [ends[1 - side]] if act == "one-way" else ends))
        elif act == "heal" and parted:
            network.heal(parted.pop()[0])
        elif act == "stop":
            end.host.stop()
        elif act == "go on" and end.host.stops:
            end.host.go_on()
        elif act == "lag":
            wire.delay(0.2)
        elif act == "snap" and not snapped:
            snapped = True
            wire.snap(data.draw(st.sampled_from([(0.0, 0.0), (0.0, 0.3), (None, 0.1), (None, None)])))
        elif act == "bye":
            left.append(side)
            end.hang_up()
    driver.sleep(0)  # a party that goes on just now takes the messages in its sockets
    for made, deaf in parted:
        before = [len(end.heard) for end in deaf]
        driver.sleep(0.5)
        assert before == [len(end.heard) for end in deaf], "something came through a partition"
        network.heal(made)
    for end in ends:
        while end.host.stops:
            count = len(end.heard)
            driver.sleep(0.1)
            assert len(end.heard) == count, "a stopped party has heard something"
            end.host.go_on()
    driver.sleep(5)
    for side, end in enumerate(ends):
        heard = [message for message in ends[1 - side].messages if message is not END]
        assert heard == sent[side][: len(heard)]
        assert END not in ends[1 - side].messages[:-1]
        if not snapped and left in ([], [side]):  # all messages before a normal close arrive
            assert heard == sent[side]
            assert end.over is bool(left)
            assert end.outward.unsent == 0


def test_a_connection_is_in_order_exactly_once_until_it_breaks():
    settings(max_examples=300)(given(data=st.data())(converse))()


HUNT = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
MUTANTS = [
    (Pipe, "_arrive", "self._flying.popleft()", "self._flying.pop()"),
    (Pipe, "_arrive", "self._flying.popleft()", "self._flying[0]"),
    (Pipe, "_arrive", "if target.runs:", "if True:"),
    (Pipe, "_arrive", "self._late += 1", "self._flying.popleft()"),
    (Pipe, "_arrive", "network.parted(self._source, target)", "False"),
    (Pipe, "heal", "range(late)", "range(late - 1)"),
    (Pipe, "took", "self._outstanding -= nbytes", "pass"),
    (Pipe, "_room", "self.unsent -= nbytes", "pass"),
    (Pipe, "cut", "self._flying.pop()", "self._flying.popleft()"),
    (Party, "go_on", "if end.filled", "if False"),
    (Network, "part", "(there, here)", "(here, there)"),
]


@pytest.mark.parametrize(("owner", "name", "old", "new"), MUTANTS)
def test_a_broken_network_is_caught(monkeypatch, owner, name, old, new):
    monkeypatch.setattr(owner, name, mutant(getattr(owner, name), old, new))
    with pytest.raises((AssertionError, IndexError, RecursionError)):
        HUNT(given(data=st.data())(converse))()


@pytest.mark.parametrize("silent", [False, True])
def test_a_crashed_party_answers_no_message(silent):
    _world, network, driver, _wire, caller, called = wired()
    caller.outward.write("before", 1)
    driver.sleep(1)
    network.crash(called.host, silent)
    driver.sleep(1)
    assert called.messages == ["before"]
    assert caller.over is not silent
    late = Ear(caller.host)
    SimWire(network, late, Ear(called.host))
    late.outward.write("knock", 1)
    driver.sleep(1)
    assert late.over is not silent


def test_what_the_receiver_does_not_take_fills_the_window():
    _world, _network, driver, _wire, caller, called = wired(window=100)
    called.lazy = True
    for number in range(10):
        caller.outward.write(number, 30)
    driver.sleep(1)
    assert len(called.inward.inbox) == 3
    assert caller.outward.unsent == 7 * 30
    assert not caller.drains
    called.take()
    driver.sleep(1)
    assert len(called.inward.inbox) == 3
    assert caller.outward.unsent == 6 * 30
    called.lazy = False
    called.arrived()
    driver.sleep(1)
    assert called.messages == list(range(1, 10))
    assert caller.outward.unsent == 0
    assert caller.drains == 1


# ---- endpoints, links and channels


class Place:
    """An endpoint with a few handlers, a client's channel and a link to it."""

    def __init__(self, window=1 << 18, latency=(0.001, 0.001)):
        self.world = World(3)
        self.network = Network(self.world, latency, window)
        self.server, self.host = Party(self.world, "server"), Party(self.world, "client")
        self.ended, self.held = [], []
        handlers = {64: self.echo, 65: self.fail, 66: self.hold, 67: self.big, 68: self.move, 69: self.bug}
        self.endpoint = SimEndpoint(self.network, self.server, handlers, self.ended.append)
        self.endpoint.secrets[NAME] = SECRET

    def channel(self, secret=SECRET):
        ticket = dps.Ticket(NAME, self.endpoint.address, secret)
        return SimChannel(self.network, self.host, self.endpoint.address, ticket, "the server", ServerGoneError)

    def echo(self, connection, header, body):
        self.view = body
        connection.reply(Header(frames.OK, request=header.request), bytes(body))

    def fail(self, connection, header, body):
        raise InputError("no")

    def move(self, connection, header, body):
        raise MovedError("away")

    def bug(self, connection, header, body):
        raise ZeroDivisionError("a bug")

    def hold(self, connection, header, body):
        self.held.append(connection.hold(body))
        connection.reply(Header(frames.OK, request=header.request))

    def big(self, connection, header, body):
        out = connection.outgoing(64 + 8 * header.count)
        out[64:].view(np.int64)[:] = np.arange(header.count)
        out[:64] = np.frombuffer(
            frames.encode_header(Header(frames.OK, request=header.request, body=8 * header.count)), np.uint8
        )
        for start in range(0, len(out), 1000):
            connection.write(memoryview(out)[start : start + 1000])

    def soon(self):
        return self.host.now() + 10


def test_a_channel_asks_and_is_answered():
    place = Place()
    channel = place.channel()
    assert channel.ask(Header(64), b"12345678").result(place.soon()).body == b"12345678"
    with pytest.raises(InputError, match="no"):
        channel.ask(Header(65)).result(place.soon())
    assert channel.ask(Header(64)).answer(place.soon()).kind == frames.OK
    first, second = channel.ask(Header(64), b"first..."), channel.ask(Header(64), b"second..")
    assert (second.result(place.soon()).body, first.result(place.soon()).body) == (b"second..", b"first...")
    assert channel.ask(Header(66), b"heldheld").result(place.soon()).done
    (body, release), gone = place.held[0], place.view
    assert bytes(gone) == b"\xa5" * 8, "a body may be looked at after its handler"
    assert bytes(body) == b"heldheld"
    release()
    assert bytes(body) == b"\xa5" * 8
    with pytest.raises(MovedError, match="away"):
        channel.ask(Header(68)).result(place.soon())
    with pytest.raises(ServerGoneError, match="closed the connection"):
        channel.ask(Header(64)).result(place.soon())
    place.host.sleep(1)
    assert channel.closed
    assert len(place.ended) == 1
    assert not place.endpoint.connections


@pytest.mark.parametrize("window", [64, 1000, 1 << 18])
def test_large_answers_pass_small_windows(window):
    place = Place(window)
    channel = place.channel()
    outs = [np.zeros(count, np.int64) for count in (5000, 1, 777)]
    requests = [
        channel.send(Header(67, count=len(out)), (), ViewSink(memoryview(out).cast("B")), out.nbytes) for out in outs
    ]
    for request, out in zip(requests, outs, strict=True):
        request.result(place.soon())
        np.testing.assert_array_equal(out, np.arange(len(out)))
    body = bytes(1 << 16)
    assert channel.ask(Header(64), body).result(place.soon()).body == body


def test_a_server_that_stands_still_is_waited_for_and_one_that_is_gone_is_not():
    place = Place(window=1000)
    channel = place.channel()
    place.server.stop()
    waiting = channel.ask(Header(64), b"12345678")
    with pytest.raises(RequestTimeoutError, match="not answered"):
        waiting.result(place.host.now() + 0.5)
    assert place.world.now == pytest.approx(0.5, abs=0.1)
    assert channel.closed
    place.server.go_on()
    channel = place.channel()
    place.server.stop()
    began = place.world.now
    channel.ask(Header(64), bytes(600))
    with pytest.raises(RequestTimeoutError, match="taken no bytes for 60"):
        channel.ask(Header(64), bytes(600))
    assert place.world.now - began == pytest.approx(60, abs=1)
    place.network.crash(place.server)
    with pytest.raises(ServerGoneError, match="cannot be reached"):
        place.channel()


def test_strangers_are_refused_and_bugs_are_loud():
    place = Place()
    with pytest.raises(AccessDeniedError, match="no proof"):
        place.channel(secret="22" * 32)
    channel = place.channel()
    with pytest.raises(ProtocolError, match="no handler for frames of kind 99"):
        channel.ask(Header(99)).result(place.soon())
    with pytest.raises(ZeroDivisionError):
        place.channel().ask(Header(69)).result(place.soon())


def test_a_link_tells_of_its_life():
    place, events = Place(), []
    other = SimEndpoint(place.network, place.host)

    def up(link):
        events.append("up")
        link.send(Header(64, request=7, body=8), [b"1234", np.array([5, 6], np.uint16)])

    def frame(link, header, body):
        events.append((header.request, bytes(body)))

    link = other.connect(place.endpoint.address, NAME, SECRET, up, frame, lambda link: events.append("end"))
    assert not link.open
    place.host.sleep(1)
    assert link.open
    assert events == ["up", (7, b"1234\5\0\6\0")]
    link.close()
    assert events[-1] != "end", "on_end comes later, never within the call of close"
    place.host.sleep(1)
    assert events[-1] == "end"
    assert len(place.ended) == 1
    silent = other.connect(place.endpoint.address, NAME, "22" * 32, up, frame, lambda link: events.append("refused"))
    place.host.sleep(1)
    assert events[-1] == "refused"
    assert not silent.open
    place.network.part(["client"], ["server"])
    other.connect(place.endpoint.address, NAME, SECRET, up, frame, lambda link: events.append("late"))
    place.host.sleep(9)
    assert events[-1] == "refused"
    place.host.sleep(2)
    assert events[-1] == "late"


# ---- whole clusters


def train(trainer, partitions, clocks=10):
    """Each trainer adds one to each key in each iteration, and looks whether the others' pushes are there."""
    while trainer.clock < clocks:
        seen = trainer.pull("w", KEYS)
        least = max(0, trainer.clock - trainer.staleness) * trainer.trainers
        assert seen.min() >= least, f"at clock {trainer.clock}: {seen.min()} of {least} pushes"
        trainer.push("w", KEYS, 1)
        trainer.tick()
    return trainer.clock


def simulate(seed, trainers=3, staleness=1, **options):
    with Simulation(seed, servers=3, trainers=trainers, **options) as sim:
        sim.table("w", dtype="int64")
        results = sim.run(train, range(trainers), staleness=staleness)
        assert results == [10] * trainers
        np.testing.assert_array_equal(sim.client().pull("w", KEYS), 10 * trainers)
        return sim.digest(), sim.now, sim.steps


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("staleness", [0, 2, float("inf")])
def test_a_run_without_faults(copies, staleness):
    simulate(copies, staleness=staleness, copies=copies)


SCRIPT = """
import logging, sys
sys.path[:0] = ["tests/helpers", "tests/simulator"]
logging.disable()
from test_simulation import train
from dps.errors import DPSError
from dps.testing import Faults, Simulation
for seed in (5, 6, 7):
    faults = Faults.some(seed, span=0.05)
    with Simulation(seed, servers=3, trainers=3, copies=2, faults=faults) as sim:
        sim.table("w", dtype="int64")
        try:
            sim.run(train, range(3), staleness=1)
        except DPSError as error:
            print(error)
        print(sim.digest(), sim.now, sim.steps)
"""


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_world_in_every_process():
    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, text=True, capture_output=True, check=True
        ).stdout

    first, second = run("1"), run("2")
    assert first == second
    assert len({line for line in first.splitlines() if line.count(" ") == 2}) == 3, (
        "another seed, and nothing else happened"
    )


@pytest.mark.thorough
def test_a_thousand_trainers():
    def ticking(trainer, partitions):
        for _ in range(40):
            trainer.tick()
        return trainer.clock

    with Simulation(1, trainers=1000, compute=0.01, faults=Faults(slow=0.02, slowness=3.0)) as sim:
        assert sim.run(ticking, range(1000), staleness=3) == [40] * 1000
        assert sim.now < 10, "virtual seconds"


def test_a_trainer_that_crashes_is_begun_anew_where_it_was():
    attempts = []

    def once(trainer, partitions):
        attempts.append((trainer.number, trainer.attempt))
        return train(trainer, partitions)

    with Simulation(2, trainers=2, compute=0.01, faults=Faults(restart=0.3)) as sim:
        sim.table("w", dtype="int64")
        sim.crash("trainer-1", at=0.055)
        assert sim.run(once, range(2)) == [10, 10]
        assert attempts == [(0, 0), (1, 0), (1, 1)] or attempts == [(1, 0), (0, 0), (1, 1)]
        assert 0.3 < sim.now < 1
        np.testing.assert_array_equal(sim.client().pull("w", KEYS), 20)


def test_a_trainer_that_never_comes_back_ends_the_run():
    with Simulation(2, trainers=2, compute=0.01, faults=Faults(restart=None)) as sim:
        sim.table("w", dtype="int64")
        sim.crash("trainer-1", at=0.055)
        with pytest.raises(TrainerLostError, match="trainer 1 of run 1"):
            sim.run(train, range(2))


def test_the_users_own_error_comes_out_and_the_others_are_stopped():
    def bad(trainer, partitions):
        if trainer.number == 1:
            train(trainer, partitions, clocks=1)
            raise KeyError("mine")
        train(trainer, partitions, clocks=1000)

    with Simulation(2, trainers=3) as sim:
        sim.table("w", dtype="int64")
        with pytest.raises(KeyError, match="mine"):
            sim.run(bad, range(3))
        with pytest.raises(StoppedError, match="enough"):
            sim.run(lambda trainer, parts: (_ for _ in ()).throw(StoppedError("enough")), range(3))


def test_a_run_that_does_not_end_is_given_up():
    with Simulation(0, trainers=1, timeout=5.0) as sim, pytest.raises(StuckError, match="5 virtual seconds"):
        sim.run(lambda trainer, parts: sim.parties["trainer-0"].sleep(100), [0])


def test_stops_and_partitions_take_the_time_they_take():
    with Simulation(1, servers=1, trainers=2) as sim:
        sim.table("w", dtype="int64")
        sim.stop("server-0", seconds=1.0, at=0.001)
        sim.run(train, range(2))
        assert 1.0 < sim.now < 1.3
        began = sim.now
        sim.part(["trainer-0"], ["controller", "server-0"], seconds=2.0, at=0.001)
        sim.run(train, range(2), kwargs={"clocks": 3})
        assert 2.0 < sim.now - began < 2.3
        sim.sleep(1.0)
        sim.crash("server-9")
        with pytest.raises(InputError, match="no party 'server-9'"):
            sim.sleep(0.1)


def test_a_broken_connection_is_made_again():
    with Simulation(4, servers=2, trainers=2, copies=2, compute=0.001) as sim:
        sim.table("w", dtype="int64")
        for n in range(8):
            sim.snap(f"trainer-{n % 2}", f"server-{n // 4}", at=0.002 + n * 0.001)
        sim.run(train, range(2))
        assert sum("breaks" in line for line in sim.trace) >= 4
        np.testing.assert_array_equal(sim.client().pull("w", KEYS), 20)


@pytest.mark.parametrize("seed", range(12))
def test_small_schedules_with_any_faults_are_right_or_fail_loudly(seed):
    try:
        simulate(seed, trainers=2 + seed % 3, staleness=seed % 3, copies=1 + seed % 3, faults=Faults.some(seed, 0.05))
    except DPSError:
        pass  # connections to the controller that break again and again may end a run; wrong numbers are no DPSError


def test_faults_are_checked():
    with pytest.raises(InputError, match="breaks"):
        Faults(breaks=-1)
    with pytest.raises(InputError, match="plan"):
        Faults(plan=((-1.0, "stops"),))
    with pytest.raises(InputError, match="no such faults: rain; there are breaks"):
        Faults(plan=((1.0, "rain"),))
    with pytest.raises(InputError, match="window"):
        Faults(window=0)
    with pytest.raises(InputError, match="at least one server"):
        Simulation(servers=0)
