"""Runs that trainers may join while they go on: the controller's rules, without sockets."""

from __future__ import annotations

import pytest
from oracles import mutant
from run_peers import Peer, state_of

from dps.engine.controller.run import Run
from dps.engine.controller.runs import Runs
from dps.engine.telemetry.snapshot import RunPhase, TrainerPhase
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import LeaseAnswer, LeaseRequest, PartitionsAtHand, decode, encode
from dps.errors import InputError, StoppedError, TrainerLostError

LEFT, LOST = TrainerPhase.LEFT, TrainerPhase.LOST


class Member(Peer):
    """A trainer of a leased run."""

    def ask(self, epoch, declare=None, done=None):
        """Ask for a portion, after news; the portion, or None where there is none."""
        how = None if declare is None else {"epochs": 3}
        request = LeaseRequest(epoch, declare=declare, how=how, done=done, next=PartitionsAtHand([], []))
        return decode(LeaseAnswer, self.answer(self.send("lease", Header(frames.LEASE), encode(request)))[1]).portion

    def work_through(self, epoch, declare):
        """Do all portions of an epoch that it can get; how many these were."""
        portion, count = self.ask(epoch, declare), 0
        while portion is not None:
            count += 1
            portion = self.ask(epoch, done=(portion.number, 0.0))
        return count


def growing(kind=Runs):
    """A run of trainers 0 and 1, each with a partition, and two vacant seats; staleness 1."""
    made = []
    runs = kind("s", lambda: made[0].time if made else 0.0)
    runs.time, runs.noted = 0.0, []
    runs.note = lambda text, stands: runs.noted.append(text)
    made.append(runs)
    run = runs.start(4, 1, partitions=[[0], [1], [], []], reassign=True, vacant=2)
    return runs, run


def two(runs, run):
    peers = Member(runs), Member(runs)
    for n, peer in enumerate(peers):
        assert peer.join(run, n, 10)["trainers"] == 2
    return peers


def late(runs, seconds=1.0):
    """The timer runs when lost trainers have been away for too long."""
    runs.time += runs.rejoin + seconds
    runs.check_timeouts()


def test_a_trainer_that_comes_begins_at_the_clock_of_the_slowest_and_finds_work():
    runs, run = growing()
    first, second = two(runs, run)
    assert len(state_of(runs, run).trainers) == 2, "vacant seats are not shown"
    for peer, n in ((first, 0), (second, 1)):
        peer.ask(0, [(n, 2)])
    assert first.ask(0, done=(0, 0.0)) is not None
    for peer, clock in ((first, 1), (second, 1), (first, 2)):
        assert peer.answer(peer.tick(clock)) is not None
    third = Member(runs)
    joined = third.join(run, 2, 10)
    assert (joined["clock"], joined["trainers"], joined["attempt"]) == (1, 3, 0)
    assert third.ask(1, []).partition in (0, 1)
    assert first.answer(first.tick(3)) is None, "the one that has come counts: it is at clock 1, and the staleness is 1"
    assert [trainer.clock for trainer in state_of(runs, run).trainers] == [3, 1, 1]


def test_a_trainer_that_is_lost_for_too_long_is_not_missed():
    runs, run = growing()
    first, second = two(runs, run)
    second.ask(0, [(1, 2)])
    first.ask(0, [(0, 2)])
    second.end()
    late(runs, -2.0)
    assert state_of(runs, run).in_state(LOST) == [1], "it may come back for so long"
    late(runs)
    assert state_of(runs, run).in_state(LEFT) == [1]
    assert runs.noted == [f"run {run}: trainer 1 (on here) is gone, at clock 0; the others do its work"]
    assert first.work_through(0, [(0, 2)]) == 4, "also the portions of the one that is gone"
    assert first.answer(first.tick(1)) is not None
    zombie = Member(runs)
    with pytest.raises(StoppedError, match=r"trainer 1 of run 1 was given up, .* and the others do its work"):
        zombie.join(run, 1, 10)
    assert zombie.join(run, 1, 11)["clock"] == 1, "another attempt is welcome, where the slowest trainer is"
    for peer in (first, zombie):
        peer.answer(peer.leave())
    assert state_of(runs, run).state is RunPhase.FINISHED
    with pytest.raises(StoppedError, match="is over: all its work was done before this trainer came"):
        Member(runs).join(run, 3, 10)


@pytest.mark.parametrize("declared", [False, True])
def test_a_trainer_that_is_needed_ends_the_run(declared):
    """Its batches are not known yet, or nobody else is left in its epoch."""
    runs, run = growing()
    first, second = two(runs, run)
    first.ask(0, [(0, 0)])
    if declared:
        second.ask(0, [(1, 1)])
        assert first.ask(0) is None, "its own partition is empty, and the second has the only portion"
        assert first.answer(first.tick(1)) is not None
    second.end()
    assert not runs.give_up(run, 1)
    late(runs)
    stopped = runs.runs[run].stopped
    assert isinstance(stopped, TrainerLostError)
    assert "trainer 1 of run 1 (on here) vanished at clock 0" in str(stopped)


def test_one_that_comes_does_what_a_lost_one_has_left():
    runs, run = growing()
    first, second = two(runs, run)
    first.ask(0, [(0, 0)])
    second.ask(0, [(1, 1)])
    assert first.ask(0) is None
    first.answer(first.tick(1))
    second.end()
    assert not runs.give_up(run, 1), "nobody is left in its epoch"
    third = Member(runs)
    assert third.join(run, 2, 10)["clock"] == 0
    assert runs.give_up(run, 1), "now there is one"
    assert runs.give_up(run, 1), "a driver may say it twice"
    assert third.work_through(0, []) == 1


def test_the_driver_gives_up_one_that_waits():
    runs, run = growing()
    first, second = two(runs, run)
    first.work_through(0, [(0, 2)])
    second.ask(0, [(1, 2)])
    assert first.answer(first.tick(1)) is not None
    waiting = first.tick(2)
    assert first.answer(waiting) is None
    assert runs.give_up(run, 0), "its worker is gone; the second is still in epoch 0"
    with pytest.raises(StoppedError, match="was given up"):
        first.answer(waiting)
    with pytest.raises(StoppedError, match="was given up"):
        first.answer(first.tick(3))
    first.end()
    assert state_of(runs, run).in_state(LOST) == [], "the end of its connection says nothing any more"
    assert not runs.runs[run].over


def test_a_seat_that_was_never_taken_is_given_up():
    runs, run = growing()
    two(runs, run)
    assert runs.give_up(run, 3)
    assert Member(runs).join(run, 3, 10)["clock"] == 0, "the run goes on, so it may come all the same"


def test_what_such_a_run_cannot_do():
    runs, run = growing()
    first, _ = two(runs, run)
    with pytest.raises(InputError, match="come and go: they cannot meet"):
        first.answer(first.collect(0, 0, 1))
    with pytest.raises(InputError, match="only where its work is leased: reassign=True"):
        runs.start(3, 0, partitions=[[0], [1], []], vacant=1)
    fixed = runs.start(2, 0, partitions=[[0], [1]], reassign=True)
    assert not runs.give_up(fixed, 1)


def test_a_checkpoint_knows_its_vacant_seats():
    runs, run = growing()
    saved = runs.runs[run].saved(1)
    assert (saved.trainers, saved.vacant, saved.partitions) == (4, 2, [[0], [1], [], []])


# -- wrong rules


def zombies_return(monkeypatch):
    monkeypatch.setattr(Run, "check_may_join", mutant(Run.check_may_join, "record.given_up or ", ""))


def comes_too_late(monkeypatch):
    wrong = mutant(Run.check_may_join, "self.may_grow and self.over and not again", "False")
    monkeypatch.setattr(Run, "check_may_join", wrong)


class ForgetsWhereItBegins(Runs):
    join = mutant(Runs.join, "run.ticked(trainer)", "pass")


def gives_up_any(monkeypatch):
    monkeypatch.setattr(Runs, "give_up", mutant(Runs.give_up, "not run.can_do_without(trainer)", "False"))


def never_gives_up(monkeypatch):
    wrong = mutant(Runs.check_timeouts, "self.give_up(run.number, trainer)", "False")
    monkeypatch.setattr(Runs, "check_timeouts", wrong)


def holds_the_others_back(monkeypatch):
    monkeypatch.setattr(Runs, "give_up", mutant(Runs.give_up, "self._trainer_left(run, trainer)", "pass"))


@pytest.mark.parametrize("wrong", [zombies_return, comes_too_late, never_gives_up, holds_the_others_back, gives_up_any])
def test_wrong_rules_are_caught(monkeypatch, wrong):
    def stories():
        test_a_trainer_that_is_lost_for_too_long_is_not_missed()
        test_a_trainer_that_is_needed_ends_the_run(True)

    wrong(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, StoppedError)):
        stories()


def test_relying_on_a_trainer_that_has_not_said_where_it_is_is_caught(monkeypatch):
    """A seat's old clock would pass for that of the trainer that has just taken it."""

    def story(kind):
        runs, run = growing(kind)
        first, second = two(runs, run)
        first.work_through(0, [(0, 2)])
        second.ask(0, [(1, 2)])
        first.answer(first.tick(1))
        second.work_through(0, [(1, 2)])
        second.answer(second.tick(1))
        first.ask(1, [(0, 2)])
        second.ask(1, [(1, 2)])
        third = Member(runs)
        assert third.join(run, 2, 10)["clock"] == 1
        return int(runs.runs[run].work_leases.leases._clocks[2])

    assert story(Runs) == 1
    assert story(ForgetsWhereItBegins) == 0


def test_the_seats_of_a_run():
    run = Run(1, 5, 0.0, vacant=3)
    assert (run.begun, run.seated, run.may_grow, run.over) == (2, 2, True, False)
    assert not Run(1, 5, 0.0).may_grow
