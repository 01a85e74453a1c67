"""What a primary is granted while there is no controller: no placement that it does not know takes effect meanwhile."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import random
from types import SimpleNamespace

import dask
import pytest
from noticing import assert_noticed
from oracles import mutant

from dps import config
from dps.engine.coordination.journal import Ballot, Record, may_write
from dps.engine.server.grants import Grants
from dps.engine.server.heartbeat import HEARTBEAT_SECONDS, Heartbeat
from dps.engine.server.holder import RecordHolder
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.journal_messages import Granted, KeptRecord, SessionRecord
from dps.engine.wire.messages import encode
from dps.errors import ClosedError, ProtocolError

SCHEDULES = 100
STEPS = 400
LEASE = config.seconds("lease")


class LateLink:
    """A connection between two servers, on which frames arrive in order; `ends` are the two sides' functions."""

    def __init__(self, world, target, on_up, on_frame, on_end):
        self.world, self.target, self.open, self.party = world, target, False, None
        self._on_frame, self._on_end, self._last = on_frame, on_end, {}
        self._deliver("up", self._come_up, on_up)

    def _deliver(self, way, function, *args):
        """After a delay, and not before what has gone the same way."""
        self._last[way] = max(self._last.get(way, 0.0), self.world.now + self.world.rng.choice((0.001, 0.01, 0.4, 1.5)))
        self.world.later(self._last[way] - self.world.now, function, *args)

    def _come_up(self, on_up):
        if self.world.rng.random() < 0.8:
            self.open = True
            on_up(self)
        else:
            self._on_end(self)

    def send(self, header, buffers):
        if self.open:
            self._deliver("there", self._arrive, header, b"".join(buffers))

    def _arrive(self, header, body):
        if self.open:
            self.target.answer(SimpleNamespace(reply=self._reply), header, memoryview(body))

    def _reply(self, header, body):
        self._deliver("back", self._return, header, bytes(body))

    def _return(self, header, body):
        if self.open:
            self._on_frame(self, header, memoryview(body))

    def close(self):
        was_open, self.open = self.open, False
        if was_open:
            self._on_end(self)


class AloneServers:
    """Servers, and a controller that hands them placements through a journal; not all of them hear of it."""

    def __init__(self, seed):
        self.rng, self.now, self.queue, self.order = random.Random(seed), 100.0, [], itertools.count()
        self.count = self.rng.randint(1, 5)
        self.alone, self.epochs = [False] * self.count, [0] * self.count
        self.holders = [RecordHolder(n) for n in range(self.count)]
        self.grants = [
            Grants(self.endpoint(), "s", "secret", each, lambda n=n: self.alone[n])
            for n, each in enumerate(self.holders)
        ]
        self.everyone = frozenset(range(self.count))
        self.ballot, self.committed, self.proposed, self.served = Ballot(1, "a"), 0, None, 0
        self.written: set[int] = set()
        self.record(0)
        for n in self.everyone:
            assert self.holders[n].keep(self.kept(), self.now).kept
        self.proposed = None

    def endpoint(self):
        def connect(address, session, secret, on_up, on_frame, on_end):
            return LateLink(self, self.grants[address], on_up, on_frame, on_end)

        return SimpleNamespace(now=lambda: self.now, connect=connect, later=self.later)

    def later(self, seconds, function, *args):
        heapq.heappush(self.queue, (self.now + seconds, next(self.order), function, args))

    def record(self, number):
        known = {"name": "s", "fingerprint": "", "controller": ("", 0), "copies": 1, "epoch": number, "wanted": 1}
        known |= {"next_server": 1, "next_origin": 0, "addresses": {}, "tables": [], "runs": [], "functions": []}
        content = SessionRecord(**known, remedy="", schedule=None, adapt=None).encode()
        self.proposed = Record(self.ballot, number, self.everyone, self.everyone, content)
        self.written.clear()

    def kept(self):
        record = self.proposed
        return KeptRecord(record.ballot, record.number, sorted(self.everyone), sorted(self.everyone), record.content)

    def run(self):
        for _ in range(STEPS):
            self.rng.choice([self.wait, self.wait, self.ask, self.ask, self.change, self.decide, self.write])()
            for n, grant in enumerate(self.grants):
                if self.now <= grant.until:
                    self.served += 1
                    assert self.committed <= self.epochs[n], f"{n} goes on with {self.epochs[n]} after {self.committed}"
        return self.served

    def wait(self):
        until = self.now + self.rng.choice((0.0, 0.1, 0.5, 1.0))
        while self.queue and self.queue[0][0] <= until:
            self.now, _, function, args = heapq.heappop(self.queue)
            function(*args)
        self.now = until

    def ask(self):
        number = self.rng.randrange(self.count)
        if self.alone[number]:
            self.grants[number].ask(self.epochs[number], {n: n for n in self.everyone})
        else:
            self.grants[number].give_back()

    def change(self):
        """A server hears of the controller, or no more; one that hears of it learns the placement at some time."""
        number = self.rng.randrange(self.count)
        self.alone[number] = self.rng.random() < 0.7
        if not self.alone[number] and self.rng.random() < 0.5:
            self.epochs[number] = self.committed

    def decide(self):
        if self.proposed is None:
            self.record(self.committed + 1)

    def write(self):
        """A record reaches a server, sooner or later also one that is alone."""
        number = self.rng.randrange(self.count)
        if self.proposed is not None:
            answer = self.holders[number].keep(self.kept(), self.now)
            assert (answer is None) == (self.holders[number].waiting is not None)
            if answer is not None:
                self.written.add(number)
            if may_write(self.everyone, self.written, ()):
                self.committed, self.proposed = self.proposed.number, None


def check(seeds=range(SCHEDULES)):
    served = [AloneServers(seed).run() for seed in seeds]
    assert sum(each > 0 for each in served) > len(seeds) / 3, "servers go on"


def test_nobody_goes_on_with_a_placement_that_is_over():
    check()


WRONG = {
    "a grant counts from its answer": (
        Grants,
        "_on_frame",
        "self._take(answer, sent)",
        "self._take(answer, self._endpoint.now())",
    ),
    "an answer that was on its way counts": (Grants, "give_back", "self._sent.clear()", "pass"),
    "what was given back counts": (Grants, "give_back", "self.until = -math.inf", "pass"),
    "the longest grant counts for all": (Grants, "_take", "if until >= end}", "if until >= 0}"),
    "a holder forgets what it has granted": (
        *(RecordHolder, "grant"),
        *("self._granted[asked.server] = asked.epoch, until", "pass"),
    ),
    "a record is written before grants are over": (
        *(RecordHolder, "_earliest_granted"),
        *("if now <= grant[1]", "if now <= grant[1] - 1.0"),
    ),
}


SEEN = 380, 131, 28, 4, 1, 0  # each error shows in one of these schedules


@pytest.mark.parametrize("name", sorted(WRONG))
def test_wrong_grants_are_caught(name, monkeypatch):
    kind, method, old, new = WRONG[name]
    monkeypatch.setattr(kind, method, mutant(getattr(kind, method), old, new))
    with pytest.raises(AssertionError):
        check([*SEEN, *range(30 * SCHEDULES)])


def test_a_server_without_a_journal_goes_on_by_nothing():
    endpoint = SimpleNamespace(now=lambda: 5.0)
    alone = Grants(endpoint, "s", "secret", RecordHolder(3), lambda: True)
    alone.ask(0, {3: ("here", 1)})
    assert alone.until == -math.inf
    alone._on_frame(None, Header(64, request=7), memoryview(b""))  # an answer to nothing
    assert alone.until == -math.inf


class RefusedLink:
    """A connection to a server that refuses, until it is told to grant."""

    open = True

    def __init__(self):
        self.sent, self.timers, self.grants = [], [], False

    def connect(self, address, session, secret, on_up, on_frame, on_end):
        self.on_frame = on_frame
        on_up(self)
        return self

    def later(self, seconds, function, *args):
        self.timers.append((seconds, function, args))

    def send(self, header, buffers):
        self.sent.append(header.request)

    def answer(self):
        body = encode(Granted(1, self.grants, None))
        self.on_frame(self, Header(frames.OK, request=self.sent[-1]), memoryview(body))

    def wait(self):
        """The seconds until it was asked again."""
        ((seconds, function, args),) = self.timers
        self.timers.clear()
        function(*args)
        return seconds

    def close(self):
        self.open = False


@pytest.fixture
def refused():
    """A link to a server that has refused once, and the grants of the one that has asked."""
    link = RefusedLink()
    grants = Grants(
        SimpleNamespace(now=lambda: 5.0, connect=link.connect, later=link.later),
        *("s", "secret", RecordHolder(0), lambda: True),
    )
    grants.ask(0, {0: "here", 1: "there"})
    link.answer()
    return link, grants


def test_a_server_that_refuses_is_asked_again_before_the_next_heartbeat(refused):
    link, _ = refused
    pauses = []
    while link.timers:
        pauses.append(link.wait())
        link.answer()
    assert len(link.sent) == len(pauses) + 1 > 4
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.01
    assert sum(pauses) < HEARTBEAT_SECONDS


def test_a_server_that_grants_is_asked_no_more(refused):
    link, _ = refused
    link.grants = True
    link.wait()
    link.answer()
    assert not link.timers


def test_a_server_is_not_asked_again_once_there_is_a_controller(refused):
    link, grants = refused
    grants.give_back()
    asked = list(link.sent)
    link.wait()
    assert link.sent == asked


class DyingController:
    """A server's endpoint, whose connections to the controller come up, break and are refused as the test says."""

    open = refused = False

    def __init__(self):
        self.time, self.timers, self.asked = 5.0, [], 0

    def now(self):
        return self.time

    def connect(self, address, session, secret, on_up, on_frame, on_end):
        self.on_up, self.on_frame, self.on_end = on_up, on_frame, on_end
        return self

    def later(self, seconds, function, *args):
        self.timers.append((seconds, function, args))

    def send(self, header, buffers):
        pass

    def come_up(self):
        self.open, self.refused = True, False
        self.on_up(self)

    def end(self, refused=False):
        """The connection breaks, or is refused; the seconds until the next one is made."""
        self.open, self.refused = False, refused
        self.on_end(self)
        ((seconds, function, args),) = self.timers
        self.timers.clear()
        self.time += seconds
        function(*args)
        return seconds


def lose_controller(grace):
    """The endpoint of a server that has just connected to its controller, and the server's heartbeat."""
    endpoint, nothing = DyingController(), lambda *args: b""
    with dask.config.set({"dps.scheduler.grace": grace}):
        heartbeat = Heartbeat(
            *(endpoint, "s", 0, "secret", ("here", 1), nothing, nothing, nothing, RecordHolder(0)),
            {1: SimpleNamespace(replicated=True)},
        )
    endpoint.host, endpoint.port = "here", 2
    heartbeat.grants.ask = lambda *args: setattr(endpoint, "asked", endpoint.asked + 1)
    heartbeat.connect()
    endpoint.come_up()
    return endpoint, heartbeat


def test_a_controller_that_closes_the_parameter_server_needs_no_warning(caplog):
    """It answers so between the end of the parameter server and the end of its servers. Other errors are told."""
    endpoint, _ = lose_controller("600s")
    for error in (ClosedError("parameter server 's' was closed"), ProtocolError("no such frame")):
        endpoint.on_frame(endpoint, Header(frames.ERROR), memoryview(frames.encode_error(error)))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "server 0: the controller answers with an error: no such frame"
    ]


def check_retries():
    """The kernel closes the sockets of a process that was killed one by one, and its listener perhaps as the last."""
    endpoint, heartbeat = lose_controller("600s")
    heartbeat.bound_until, endpoint.asked = endpoint.time + LEASE, 0
    pauses = [endpoint.end() for _ in range(4)]
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert sum(pauses) < 0.05, "a server that is not refused tries again soon"
    assert endpoint.asked == 0
    assert not heartbeat.is_alone(), "the controller may live"
    assert endpoint.end(refused=True) == HEARTBEAT_SECONDS, "nothing listens, so there is no hurry"
    assert endpoint.asked == 1
    assert heartbeat.is_alone()
    assert endpoint.end() == HEARTBEAT_SECONDS
    assert endpoint.end(refused=True) == HEARTBEAT_SECONDS
    assert heartbeat.is_alone()
    endpoint.come_up()
    assert endpoint.end() == 0.0
    assert not heartbeat.is_alone(), "there was another one meanwhile"


def check_broken_retries():
    """A controller that takes connections and breaks them, again and again, is left in peace."""
    endpoint, _ = lose_controller("600s")
    pauses = [endpoint.end() for _ in range(20)]
    assert sum(pause < HEARTBEAT_SECONDS for pause in pauses) < 8
    assert pauses[-10:] == [HEARTBEAT_SECONDS] * 10


def check_no_hurry_without_a_grace():
    endpoint, _ = lose_controller("0s")
    assert [endpoint.end() for _ in range(3)] == [HEARTBEAT_SECONDS] * 3


RETRIES = {"soon": check_retries, "not for ever": check_broken_retries, "never": check_no_hurry_without_a_grace}


@pytest.mark.parametrize("check", RETRIES)
def test_a_server_whose_controller_is_gone_finds_that_out(check):
    RETRIES[check]()


@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        ("_on_up", "RETRY_SECONDS if", "RETRY_SECONDS[:1] if", "soon"),
        ("_on_up", "RETRY_SECONDS if", "20 * RETRY_SECONDS if", "not for ever"),
        ("_on_up", "if self._outlives_scheduler else ()", "", "never"),
        ("_on_end", "self._retries = iter(())", "pass", "soon"),
        ("_on_end", "self._refused = link.refused", "pass", "soon"),
        ("_on_end", "self._renew_grants()", "pass", "soon"),
    ],
)
def test_wrong_retries_are_caught(name, old, new, check):
    assert_noticed(Heartbeat, name, old, new, RETRIES[check])
