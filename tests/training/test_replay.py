"""A trainer that is run again and, while it is replayed, pushes other rows than before: nothing is applied."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import mutant

import dps
from dps.engine.client.requests import TableTerms
from dps.engine.client.session import ClientSession
from dps.engine.server.functions import FunctionCalls
from dps.engine.training.participant import Participant
from dps.testing import Simulation

KEYS = np.arange(40)  # in all shards
CLOCKS, DIES = 6, 3


def run(change: str, aggregate: str | None = None) -> np.ndarray:
    """What a table of counts has after a run. The first attempt changes key 0 only, and is lost at clock `DIES`.

    The second one finds other rows in the table, so it changes others in the clocks that it repeats.
    """
    with Simulation(0, servers=3, trainers=1, copies=2, compute=0.05) as sim:
        sim.table("counts", dtype="int64", aggregate=aggregate)

        def train(trainer, partitions):
            for clock in range(CLOCKS):
                keys = KEYS[:1] if trainer.attempt == 0 or clock >= DIES else KEYS[1:]
                if trainer.attempt == 0 and clock == DIES:
                    sim.crash("trainer-0")
                getattr(trainer, change)("counts", keys, np.ones(len(keys), int))
                trainer.push_async("counts", 100 + keys, np.ones(len(keys), int))
                trainer.tick()

        sim.run(train, [None])
        return sim.client().pull("counts", [*KEYS, *(100 + KEYS)]).reshape(2, -1)


CHANGES = [
    ("push", None),
    ("push", "sum"),
    ("push_async", "sum"),
    ("add", None),
    ("increment", None),
]


@pytest.mark.parametrize(("change", "aggregate"), CHANGES)
def test_each_clock_counts_once(change, aggregate):
    counts = run(change, aggregate)
    np.testing.assert_array_equal(counts, [[CLOCKS] + [0] * (len(KEYS) - 1)] * 2)


def test_a_replay_that_sends_its_pushes_is_noticed(monkeypatch):
    wrong = mutant(Participant.move, "own.attempt > 0 and clock < self.reached", "False")
    monkeypatch.setattr(Participant, "move", wrong)
    assert (run("push")[:, 1:] > 0).any()


@dps.function(changes=True)
def count(rows, by):
    """Add to rows; the sum of what they were."""
    before = int(rows.values.sum())
    rows.values[:] += by
    return before


@count.merge
def _(parts):
    return sum(parts)


def answered(verb: str, servers: int = 3) -> tuple[np.ndarray, list[list[int]]]:
    """As `run`, with changes that are answered: the counts, and the answers of both attempts."""
    answers: list[list[int]] = [[], []]
    with Simulation(0, servers=servers, trainers=1, copies=2 if servers > 1 else 1, compute=0.05) as sim:
        sim.table("counts", dtype="int64")
        sim.register(count)

        def train(trainer, partitions):
            for clock in range(CLOCKS):
                keys = KEYS[:1] if trainer.attempt == 0 or clock >= DIES else KEYS[: 1 if clock == 0 else 40]
                if trainer.attempt == 0 and clock == DIES:
                    sim.crash("trainer-0")
                if verb == "call":
                    told = trainer.call(count, "counts", keys, by=1)
                elif verb == "push_pull":
                    told = trainer.push_pull("counts", keys, np.ones(len(keys), int))[0]
                else:
                    told = trainer.push_pull_async("counts", keys, np.ones(len(keys), int)).result()[0]
                answers[trainer.attempt].append(int(told))
                trainer.tick()

        sim.run(train, [None])
        return sim.client().pull("counts", KEYS).ravel(), answers


VERBS = ["push_pull", "push_pull_async", "call"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("servers", [1, 3])
def test_what_is_answered_counts_once(verb, servers):
    """The answer of the same keys is the one that was kept, where the call was one server's."""
    counts, (first, second) = answered(verb, servers)
    np.testing.assert_array_equal(counts, [CLOCKS] + [0] * (len(KEYS) - 1))
    start = 0 if verb == "call" else 1
    assert first[:DIES] == [*range(start, start + DIES)]
    assert second[DIES:] == [*range(start + DIES, start + CLOCKS)]
    if verb != "call" or servers == 1:
        assert second[0] == first[0]


def test_answered_replays_that_are_applied_are_noticed(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(TableTerms, "__init__", mutant(TableTerms.__init__, "(0, frames.REPLAYED)", "(0, 0)"))
        assert answered("push_pull")[0][1:].any()
    wrong = mutant(FunctionCalls._repeated, "header.flags & frames.REPLAYED", "False")
    monkeypatch.setattr(FunctionCalls, "_repeated", wrong)
    assert answered("call")[0][1:].any()


def numbers_of_ticks(sim) -> list[int]:
    """The number of the next op of a trainer at each of its ticks; it is run again from clock `DIES`."""
    numbers = []

    def train(trainer, partitions):
        for clock in range(CLOCKS):
            if trainer.attempt == 0 and clock == DIES:
                sim.crash("trainer-0")
            trainer.push("counts", [clock], 1)
            trainer.push_async({"counts": ([1, 2], 1), "others": ([3], 1)})
            numbers.append(trainer.client.session.own.number)
            trainer.tick()

    sim.run(train, [None])
    return numbers


def test_ops_keep_their_numbers(monkeypatch):
    """A call of a function behind a push that was left out finds its answer by its number."""
    for right in (True, False):
        if not right:
            monkeypatch.setattr(
                ClientSession, "skip", mutant(ClientSession.skip, "call.take_number", "(lambda _: None)")
            )
        with Simulation(0, servers=2, trainers=1, copies=2, compute=0.05) as sim:
            sim.table("counts")
            sim.table("others")
            assert (set(numbers_of_ticks(sim)) == {3}) is right
