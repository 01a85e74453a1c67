"""The end of a run under cuts of one direction: it waits for placement as pushes do, and says what is true."""

from __future__ import annotations

import dask
import numpy as np
import pytest

from dps.errors import RequestTimeoutError, StoppedError
from dps.testing import Simulation

KEYS = np.arange(100)


def push_ones(trainer, partitions):
    """Ten clocks of a trainer, each of which adds one to each row."""
    for _ in trainer.iterate(partitions, epochs=10):
        trainer.push("sums", KEYS, np.ones(len(KEYS), np.int64))
        trainer.push("plain", KEYS, np.ones(len(KEYS), np.int64))


class Crowd:
    """Clients without a clock that go on pushing to the tables of a run until they are told that it is over."""

    def __init__(self, sim: Simulation, clients: int = 2):
        self.sim, self.over = sim, False
        self.tasks = [sim.submit(self.push) for _ in range(clients)]

    def push(self, client) -> int:
        pushes = 0
        while not self.over:
            client.push("plain", KEYS, np.ones(len(KEYS), np.int64))
            pushes += 1
            self.sim.parties["driver"].world.current().party.sleep(0.02)
        return pushes

    def end(self) -> int:
        self.over = True
        return sum(self.sim.gather(self.tasks))


def simulation(seed: int = 0, copies: int = 1) -> Simulation:
    """Two servers and two trainers, and a table that sums pushes beside one that does not."""
    sim = Simulation(seed, servers=2, trainers=2, copies=copies)
    sim.table("sums", dtype="int64", aggregate="sum", shards=8)
    sim.table("plain", dtype="int64", shards=4)
    return sim


def ending(act):
    """A training function; when all of its pushes are acknowledged, trainer 0 calls `act`."""

    def train(trainer, partitions):
        for _ in trainer.iterate(partitions, epochs=3):
            for table in ("sums", "plain"):
                trainer.push(table, KEYS, np.ones(len(KEYS), np.int64))
        trainer.barrier()
        if trainer.number == 0:
            act()
        return trainer.number

    return train


@pytest.mark.parametrize("seed", range(3))
def test_the_end_of_a_run_does_not_wait_for_a_server_that_was_replaced(seed):
    with Simulation(seed, servers=5, trainers=3, copies=2) as sim:
        sim.table("sums", dtype="int64", aggregate="sum", shards=16)
        sim.table("plain", dtype="int64", shards=32)
        crowd = Crowd(sim)

        def train(trainer, partitions):
            push_ones(trainer, partitions)
            trainer.barrier()
            if trainer.number == 0:  # all work is done
                others = ["controller", *(f"server-{n}" for n in range(1, 5))]
                sim.part(["server-0"], others, seconds=20.0, one_way=True)

        sim.run(train, [1, 2, 3])
        assert sim.client().pull("sums", KEYS).tolist() == [30] * len(KEYS)
        pushes = crowd.end()
        assert sim.client().pull("plain", KEYS).tolist() == [30 + pushes] * len(KEYS)
        sim.rest()


def test_sums_that_no_server_could_close_are_closed_later_and_the_error_says_so():
    with dask.config.set({"dps.timeouts.request": "4 s"}), simulation() as sim:
        train = ending(lambda: sim.part(["controller"], ["server-0"], seconds=20.0, one_way=True))
        told = (
            r"all pushes of the run are acknowledged and none is lost, but 4 shards of 'sums' have not added .* within "
            r"4 s \(dps.timeouts.request\): server 0 is out of reach, and no other server can take its place \(4\)\. "
            r"The controller goes on"
        )
        with pytest.raises(RequestTimeoutError, match=told):
            sim.run(train, [1, 2])
        assert set(sim.client().pull("sums", KEYS).tolist()) == {4, 6}  # of half of the rows the last clock is missing
        sim.sleep(25.0)
        assert sim.client().pull("sums", KEYS).tolist() == [6] * len(KEYS)
        assert not sim._controller.ends.late


def test_a_run_begins_when_the_sums_of_the_one_before_are_closed():
    with dask.config.set({"dps.timeouts.request": "4 s"}), simulation() as sim:
        with pytest.raises(RequestTimeoutError):
            sim.run(ending(lambda: sim.part(["controller"], ["server-0"], seconds=6.0, one_way=True)), [1, 2])
        sim.run(ending(lambda: None), [1, 2])
        assert sim.client().pull("sums", KEYS).tolist() == [12] * len(KEYS)


def test_a_run_whose_sums_are_closed_has_its_results_although_not_all_servers_know_its_end():
    with dask.config.set({"dps.timeouts.request": "4 s"}), Simulation(0, servers=2, trainers=2) as sim:
        sim.table("plain", dtype="int64", shards=4)
        sim.table("sums", dtype="int64", aggregate="sum", shards=1)
        ((away,),) = [place.chain for place in sim._controller.membership.places["sums"]]
        cut = [f"server-{1 - away}"]
        train = ending(lambda: sim.part(cut, ["controller"], seconds=20.0, one_way=True))
        assert sim.run(train, [1, 2]) == [0, 1]
        ends, events = sim._controller.ends, [text for _, text in sim._controller.membership.news()]
        (event,) = [text for text in events if "a run or task is over" in text]
        assert "all its pushes are acknowledged; 2 shards do not know it yet: server" in event
        assert sim.client().pull("sums", KEYS).tolist() == [6] * len(KEYS)
        assert ends.late
        sim.sleep(25.0)
        assert not ends.late
        assert event not in [text for _, text in sim._controller.membership.news()]
        (last,) = [role for role in sim._controller.servers.values() if role.party.name in cut]
        ledgers = [replica.shard.ledger for replica in last.role.tables[1].replicas.values()]
        for ledger in ledgers:
            with pytest.raises(StoppedError):
                ledger.check(1, 0)


def test_the_end_of_a_run_waits_for_no_table_that_was_dropped():
    with dask.config.set({"dps.timeouts.request": "30 s"}), simulation() as sim:
        controller = sim._controller

        def act():
            sim.part(["server-0"], ["controller"], seconds=20.0, one_way=True)
            for table in ("sums", "plain"):
                sim.parties["controller"].later(5.0, lambda table=table: controller.membership.drop_table(table))

        began = sim.now
        sim.run(ending(act), [1, 2])
        assert sim.now - began < 15.0
        assert not controller.ends.late


def test_a_failed_run_leaves_no_sums_behind():
    def fail(trainer, partitions):
        trainer.push("sums", KEYS, np.ones(len(KEYS), np.int64))
        raise ValueError("mine")

    with simulation() as sim:
        with pytest.raises(ValueError, match="mine"):
            sim.run(fail, [1, 2])
        sim.run(ending(lambda: None), [1, 2])
        assert sim.client().pull("sums", KEYS).tolist() == [6] * len(KEYS)
