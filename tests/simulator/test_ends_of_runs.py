"""The end of a run under cuts of one direction: it waits for placement as pushes do, and says what is true."""

from __future__ import annotations

import numpy as np
import pytest

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
