"""A decision has an effect only if each later controller finds it, whatever is lost, late, repeated or dead."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from noticing import assert_noticed

from dps.engine.controller.recorder import Recorder
from dps.engine.controller.server_record import MAX_ANSWERED, ServerRecord
from dps.engine.controller.session_record import bound
from dps.engine.coordination.journal import MAX_HOLDERS, Ballot, Journal, Record, choose_holders
from dps.engine.server.holder import RecordHolder
from dps.engine.wire.journal_messages import KeptRecord

SCHEDULES = 250
STEPS = 250


class Decider:
    """A controller on virtual time: what it has decided, and which decisions had an effect."""

    def __init__(self, world: JournalWorld, term: int, known: tuple[int, ...] = ()):
        self.world, self.decided, self.noted = world, [*known], []
        self.ballot = Ballot(term, f"{world.rng.randrange(1000):03}")
        self.recorder = Recorder(
            "s", self.content, self.send, self.hosts, lambda: world.now, self.ballot, self.noted.append
        )

    def content(self) -> bytes:
        return json.dumps(self.decided).encode()

    def hosts(self) -> dict[int, str]:
        """The servers that it takes for up: it may be wrong about some."""
        return {n: f"host-{n % 3}" for n in self.world.up}

    def send(self, server, record):
        message = KeptRecord(record.ballot, record.number, [*record.holders], [*record.before], record.content)
        self.world.bag.append((self, server, message))

    def decide(self):
        self.world.decisions += 1
        number = self.world.decisions
        self.decided.append(number)
        self.recorder.decide(lambda: self.world.effect(self, number))


class JournalWorld:
    """Servers, and one controller after another, perhaps two at a time."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.now, self.decisions = 0.0, 0
        self.bag: list[tuple] = []
        self.effects: list[int] = []
        self.found: list[tuple[Decider, set[int]]] = []  # controllers that took over, with what they found
        self.holders = {n: RecordHolder(n) for n in range(self.rng.randint(1, 6))}
        self.up = set(self.holders)
        self.controllers = [Decider(self, 1)]
        self.began = False
        self.controllers[0].recorder.begin(self.begin)

    def begin(self):
        self.began = True

    def effect(self, controller: Decider, number: int) -> None:
        assert number in json.loads(controller.noted[-1]), "the effect of a decision that no record names"
        self.effects.append(number)
        for later, found in self.found:
            if later.ballot > controller.ballot:
                assert number in found, f"{later.ballot} has not found decision {number}"

    def run(self) -> JournalWorld:
        lossy = self.rng.choice([0.0, 0.1, 0.4])
        rare = self.rng.choice([0.0, 0.02, 0.1])
        for _ in range(STEPS):
            self.now += 0.1
            controller = self.rng.choice(self.controllers)
            chance = self.rng.random()
            if self.began and chance < 0.2:
                controller.decide()
            elif chance < 0.3:
                controller.recorder.tick()
            elif chance < 0.3 + rare:
                self.happen()
            elif self.bag:
                self.deliver(self.rng.randrange(len(self.bag)), lossy)
        return self

    def happen(self):
        """A server is taken for lost or comes back, is added, or another controller takes over."""
        which = self.rng.random()
        if which < 0.4:
            number = self.rng.choice(sorted(self.holders))
            self.up.symmetric_difference_update({number})
        elif which < 0.5 and len(self.holders) < 8:
            number = len(self.holders)
            self.holders[number] = RecordHolder(number)
            self.up.add(number)
        elif self.began:
            self.take_over()

    def take_over(self):
        """Another controller asks servers to follow it, and goes on from what it finds."""
        term = 1 + max(holder.followed.term for holder in self.holders.values())
        made = Decider(self, term)
        journal = Journal(made.ballot)
        for number in self.rng.sample(sorted(self.holders), len(self.holders)):
            holder = self.holders[number]
            if self.rng.random() < 0.8 and holder.follow(made.ballot, bound=False):
                record = holder.record
                journal.agreed(number, record and Record.made(*msgspec.structs.astuple(record)))
                if journal.proposed is not None:
                    break
        if journal.proposed is None:
            return
        made.decided = json.loads(journal.proposed.content)
        missed = set(self.effects) - set(made.decided)
        assert not missed, f"{made.ballot} has not found decisions {missed}"
        self.found.append((made, set(made.decided)))
        self.controllers.append(made)
        made.recorder.take(journal, lambda: None)

    def deliver(self, which: int, lossy: float) -> None:
        controller, server, message = self.bag[which]
        if self.rng.random() > lossy / 2:  # else it comes again
            self.bag.pop(which)
        if self.rng.random() < lossy:
            return
        if isinstance(message, KeptRecord):
            self.bag.append((controller, server, self.holders[server].keep(message, 0.0)))
        else:
            controller.recorder.recorded(message)

    def quiet(self) -> None:
        """Nothing is lost any more, and the last controller has all servers."""
        self.up = set(self.holders)
        last = max(self.controllers, key=lambda each: each.ballot)
        last.decide()
        for _ in range(60):
            self.now += 1.0
            last.recorder.tick()
            while self.bag:
                self.deliver(0, 0.0)
        if not last.recorder.fenced:
            assert self.decisions in self.effects, "a decision is lost, or waits for ever"
            record = last.recorder.journal.committed
            assert record.settled
            assert record.holders == choose_holders(last.hosts(), record.holders)
            assert not last.recorder.unwritten


def check():
    worlds = [JournalWorld(seed).run() for seed in range(SCHEDULES)]
    for world in worlds:
        if world.began:
            world.quiet()
    assert sum(len(world.effects) for world in worlds) > 10 * SCHEDULES
    assert sum(len(world.found) for world in worlds) > SCHEDULES / 2


def test_what_had_an_effect_is_found():
    check()


@pytest.mark.parametrize(
    "wrong",
    [
        ("decide", "self._waiting.append(effect)", "effect()"),
        ("_go_on", "self._due, self._waiting, self._changed = self._waiting, [], False", "self._due = self._waiting"),
        ("_committed", "self._written.clear()", "pass"),
        ("recorded", "not answer.kept", "False"),
        ("recorded", "answer.number == journal.proposed.number", "True"),
        ("_go_on", "last.settled and ", ""),
        ("_next_holders", "if last.settled else last.holders", "if False else last.holders"),
        ("tick", "self._now() - self._sent_at >= AGAIN_SECONDS", "False"),
        ("_go_on", " and content == last.content", ""),
    ],
    ids=[
        "the effect comes first",
        "effects again and again",
        "an answer counts for all records",
        "a refusal is ignored",
        "an answer to an earlier record counts",
        "a change of holders is not settled",
        "holders stay",
        "nothing is sent again",
        "nothing is recorded",
    ],
)
def test_a_wrong_recorder_is_noticed(wrong):
    assert_noticed(Recorder, *wrong, check)


def check_force() -> None:
    """Two of three servers vanish at once: nothing has an effect any more, until it is forced."""
    world = JournalWorld(0)
    world.holders, world.up = {n: RecordHolder(n) for n in range(3)}, {0, 1, 2}
    world.controllers, world.bag = [controller := Decider(world, 1)], []
    controller.recorder.begin(world.begin)
    first = controller.recorder.journal.proposed
    assert controller.recorder.force()
    assert controller.recorder.journal.proposed is first, "it is on its way to those that are up"
    while world.bag:
        world.deliver(0, 0.0)
    assert world.began
    before = controller.recorder.journal.committed
    assert not controller.recorder.force()
    assert controller.recorder.journal.committed is before, "nothing waits"
    controller.decide()
    world.up = {0}

    def deliver_to_0():
        for _ in range(10):
            world.now += 1.0
            controller.recorder.tick()
            world.bag = [each for each in world.bag if not isinstance(each[2], KeptRecord) or each[1] == 0]
            while world.bag:
                world.deliver(0, 0.0)

    deliver_to_0()
    assert not world.effects, "one of three is no majority"
    assert not controller.recorder.may_renew({0: 0.0}, 1.0)
    assert controller.recorder.force()
    assert len(world.bag) == 1, "it is sent at once, to one server"
    deliver_to_0()
    assert world.effects == [1]
    assert controller.recorder.may_renew({0: 0.0}, 1.0)
    assert controller.recorder.keepers == {0}
    kept = Record.made(*msgspec.structs.astuple(world.holders[0].record))
    assert Journal(Ballot(2, "another")).agreed(0, kept), "another controller needs the others no more"
    controller.decide()
    deliver_to_0()
    assert world.effects == [1, 2]
    controller.recorder.died(0)
    assert controller.recorder.may_renew({}, 1.0), "a server that is dead follows no other controller"


def test_a_controller_goes_on_by_force_without_servers_that_are_gone(caplog):
    check_force()
    assert "goes on by force, without servers [1, 2]" in caplog.text


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (Recorder, "force", " or journal.proposed is None", ""),
        (Recorder, "force", "if holders and gone:", "if holders:"),
        (Recorder, "may_renew", "self.journal.dead", "()"),
        (Recorder, "force", "self._send_all()", "pass"),
        (Recorder, "force", "self._written.clear()", "pass"),
        (Journal, "force", "self.proposed.number + 1", "self.proposed.number"),
        (Journal, "force", "holders, holders, self", "holders, self.proposed.before, self"),
    ],
    ids=[
        "nothing waits",
        "nobody is gone",
        "the dead may renew",
        "it is not sent",
        "counted as sent",
        "the number of before",
        "the old holders count",
    ],
)
def test_a_wrong_force_of_a_journal_is_noticed(owner, name, old, new):
    assert_noticed(owner, name, old, new, check_force)


def test_leases_are_renewed_while_no_other_controller_can_have_been_made():
    world = JournalWorld(0)
    world.bag.clear()
    world.up = set(range(3))
    world.holders = {n: RecordHolder(n) for n in world.up}
    decider = Decider(world, 1)
    recorder = decider.recorder
    assert recorder.may_renew({}, 2.5), "there is nothing yet that another controller could take over"
    recorder.begin(lambda: None)
    for heard, expected in (({}, False), ({0: 1.0}, False), ({0: 1.0, 2: 2.5}, True), ({0: 1.0, 2: 2.6}, False)):
        assert recorder.may_renew(heard, 2.5) is expected
    answer = world.holders[0].keep(world.bag[0][2], 0.0)
    world.holders[1].follow(Ballot(2, "another"), bound=False)
    recorder.recorded(answer)
    recorder.recorded(world.holders[1].keep(world.bag[1][2], 0.0))
    assert recorder.fenced
    assert not recorder.may_renew({0: 0.0, 1: 0.0, 2: 0.0}, 2.5)
    assert recorder.unwritten == set()


def test_only_an_answer_that_the_server_knows_says_that_it_followed():
    server = ServerRecord(0, "worker", "key")
    for number in range(1, 4):
        server.answer(number, 0, float(number), True)
    assert server.confirmed_at < 0
    server.answer(4, 2, 10.0, True)
    assert server.confirmed_at == 2.0, "heartbeat 4 says so, whenever it is read"
    for number in range(5, 5 + 2 * MAX_ANSWERED):
        server.answer(number, 2, float(number), True)
    assert len(server.answered) == MAX_ANSWERED
    server.answer(1000, 999, 2000.0, True)
    assert server.answered.keys() == {1000}


def test_a_lease_is_known_to_last_from_the_answer_that_its_heartbeat_names():
    server = ServerRecord(0, "worker", "key")
    server.answer(1, 0, 1.0, True)
    server.answer(2, 1, 2.0, True)  # it was sent after 1.0, perhaps long before 2.0
    assert server.bound_at < 0, "nothing is known of when heartbeat 1 was sent"
    server.answer(3, 2, 3.0, False)
    assert server.bound_at == 1.0
    server.answer(4, 3, 4.0, True)
    assert server.bound_at == 1.0, "answer 3 has renewed no lease"
    server.answer(5, 4, 5.0, True)
    assert server.bound_at == 3.0


def test_holders_are_on_different_machines_and_stay():
    rng = random.Random(0)
    present: frozenset[int] = frozenset()
    for _ in range(300):
        hosts = {n: rng.choice("abcdefg"[: rng.randint(1, 7)]) for n in rng.sample(range(12), rng.randint(1, 12))}
        chosen = choose_holders(hosts, present)
        assert len(chosen) == min(MAX_HOLDERS, len(hosts))
        machines = {hosts[n] for n in chosen}
        assert len(machines) == min(len(set(hosts.values())), MAX_HOLDERS)
        assert choose_holders(hosts, chosen) == chosen, "no change without a reason"
        present = chosen


def test_numbers_that_are_set_aside_are_never_used_up_before_they_are_committed():
    assert all(used + 32 <= bound(used, 64) < used + 32 + 64 for used in range(1000))
