"""The journal of decisions: two controllers never decide differently, and none forgets what had an effect."""

from __future__ import annotations

import inspect
import itertools
import types

import pytest
from journals import Controller, World

from dps.engine.coordination import journal
from dps.engine.coordination.journal import Acceptor, Ballot, Journal, Record, majority, may_recover, may_write

SEEDS = 1000


def variant(*changes: tuple[str, str]) -> types.ModuleType:
    """The module with texts replaced."""
    source = inspect.getsource(journal)
    for old, new in changes:
        assert old in source, f"the journal no longer contains {old!r}"
        source = source.replace(old, new)
    made = types.ModuleType("dps.engine.coordination.journal")
    exec(compile(source, "journal", "exec"), vars(made))
    return made


def check(module=journal, world=World, controller=Controller, seeds=SEEDS) -> None:
    for first in range(0, seeds, SEEDS):
        worlds = [world(seed, module, controller).run() for seed in range(first, first + SEEDS)]
        assert sum(len(world.acts) for world in worlds) > 3 * SEEDS, "the schedules decide"
        assert sum(world.recoveries for world in worlds) > SEEDS / 4, "controllers take over"
        assert sum(world.served for world in worlds) > SEEDS / 4, "primaries serve without a controller"


def test_controllers_agree_whatever_is_lost_late_repeated_or_dead():
    check()


@pytest.mark.slow
def test_many_schedules():
    check(seeds=50 * SEEDS)


WRONG = {
    "one holder is enough to take over": [
        ("return len(holders.intersection(agreed)) >= majority(holders)", "return True")
    ],
    "one holder is enough to write": [
        ("return len(holders.difference(written, dead)) < majority(holders)", "return True")
    ],
    "holders forget whom they follow": [("        self.followed = ballot\n", "")],
    "holders take records of lower ballots": [
        ("if not self.follow(record.ballot, bound=False):", "if self.follow(record.ballot, bound=False) is None:")
    ],
    "the ballot is not raised": [("newest._replace(ballot=self.ballot)", "newest")],
    "a decision takes the number of the last one": [("committed.number + 1", "committed.number")],
    "the highest number counts, not the highest ballot": [
        ("key=lambda record: record[:2]", "key=lambda record: record[1]")
    ],
    "a write asks the new holders": [("may_write(record.before,", "may_write(record.holders,")],
    "only the new holders count": [(" and may_recover(self.before, servers)", "")],
    "only the old holders count": [("may_recover(self.holders, servers) and ", "")],
    "one that has granted takes a later placement": [
        ("(not record.settled or self._epoch_of(record.content) > granted)", "not record.settled")
    ],
    "a holder grants what it knows to be over": [
        (" and (self.record is None or self._epoch_of(self.record.content) <= epoch)", "")
    ],
    "one holder is enough to go on": [("newest is not None and newest.has_majorities(grants)", "newest is not None")],
    "a bound holder grants": [("return not bound and (self.record", "return (self.record")],
    "a bound server follows another controller": [(" or (bound and ballot != self.followed)", "")],
}


class Hasty(Controller):
    """It acts first, and writes the journal after the fact."""

    def send(self, record):
        self.world.act(record)
        super().send(record)


class Fickle(World):
    """Servers forget what they have granted when they follow a new controller."""

    def at_server(self, kind, controller, number, what):
        if kind == "follow":
            self.servers[number].granted.clear()
        super().at_server(kind, controller, number, what)


class Careless(World):
    """The death of a server counts though it has granted."""

    def may_bind(self, server):
        return True


class AnyDeath(World):
    """Any death counts, also of a server that may have followed another controller."""

    def knows_its_end(self, number, controller):
        return True


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_journal_is_caught(name):
    with pytest.raises(AssertionError):
        check(variant(*WRONG[name]), seeds=10 * SEEDS)


def test_a_journal_after_the_fact_is_caught():
    with pytest.raises(AssertionError):
        check(controller=Hasty)


def check_change_of_holders(module=journal) -> None:
    """One schedule of 15,000 found it: the holders that have granted hand the journal to a server that has not."""
    ballot, five, other = Ballot(1, "a"), frozenset(range(5)), frozenset({3})
    record = Record(ballot, 0, five, five, b"0")
    holders = {n: module.Acceptor(int) for n in range(3)}
    assert all(holder.write(record) and holder.may_grant(0, bound=False) for holder in holders.values())
    assert module.may_go_on({n: holder.record for n, holder in holders.items()})
    change = record._replace(number=1, holders=other)
    assert all(holder.must_wait(change, granted=0) for holder in holders.values())
    assert not any(holder.must_wait(record._replace(number=1), granted=0) for holder in holders.values())


def test_holders_that_have_granted_do_not_change():
    check_change_of_holders()
    with pytest.raises(AssertionError):
        check_change_of_holders(variant(("(not record.settled or ", "(")))


def test_deaths_of_servers_that_were_not_bound_do_not_count():
    with pytest.raises(AssertionError):
        check(world=AnyDeath)


@pytest.mark.parametrize("world", [Fickle, Careless])
def test_a_grant_that_does_not_hold_is_caught(world):
    with pytest.raises(AssertionError):
        check(world=world, seeds=10 * SEEDS)


@pytest.mark.parametrize("count", range(1, 6))
def test_what_takes_over_meets_what_was_written(count):
    """By enumeration: any two sets that may take over have a common server, and a set that may write meets all of them,
    but for those with a server that died bound.
    """
    holders = frozenset(range(count))
    sets = [frozenset(s) for n in range(count + 1) for s in itertools.combinations(range(count), n)]
    takers = [each for each in sets if may_recover(holders, each)]
    assert takers
    assert all(one & other for one in takers for other in takers)
    for dead, written in itertools.product(sets, sets):
        meets = all(taker & (written - dead) for taker in takers if not taker & dead)
        assert may_write(holders, written - dead, dead) == meets
    fewest = min(len(each) for each in sets if may_write(holders, each, ()))
    assert fewest + majority(holders) == count + 1


def test_one_server_and_two():
    """What is possible without a third: a controller decides while one of two is silent, and both must be there when
    another controller takes over; unless the first one had settled that there is one holder.
    """
    old, new = Ballot(1, "a"), Ballot(2, "b")
    both, one = frozenset({0, 1}), frozenset({1})
    holders = {n: Acceptor(len) for n in both}
    author = Journal(old, Record(old, 0, both, both, b"first"))
    assert holders[1].write(author.proposed)
    assert author.written(1, author.proposed), "server 0 is silent"
    for content in (b"0 is out", b"settled"):
        assert holders[1].write(author.propose(content, one))
        assert author.written(1, author.proposed)
    heir = Journal(new)
    assert holders[0].follow(new, bound=False)
    assert heir.agreed(0, holders[0].record) is None, "server 0 alone may be out of date"
    assert holders[1].follow(new, bound=False)
    record = heir.agreed(1, holders[1].record)
    assert (record.content, record.ballot) == (b"settled", new)
    assert not holders[1].write(author.propose(b"too late", one))


def test_a_controller_that_was_refused_decides_nothing():
    author = Journal(Ballot(1, "a"), Record(Ballot(1, "a"), 0, frozenset({0}), frozenset({0}), b""))
    author.refused()
    assert not author.written(0, author.proposed)
    assert author.committed is None
