"""Crew: the workers on which a simulation's trainers run, and what Dask and `ps.run` do for them: begin, begin again.

A trainer is a task of a party of its own. When that party crashes, or is thought to have, another attempt at the same
trainer is begun in a new one, of the same name; the one before may live on, as a zombie. The result and the error that
count are those of the attempt begun last. An AssertionError counts whoever raises it: what a zombie sees must hold as
well.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from dps.calls import Ticket
from dps.errors import DPSError, StoppedError
from dps.testing.channel import SimTrainer
from dps.testing.network import Network
from dps.testing.world import Party
from dps.training.portions import Portions

__all__ = ["Crew", "Job"]


class Job:
    """One `run`: what its trainers do, and what became of them."""

    def __init__(self, function: Callable[..., Any], data: Sequence[Any], shares: list[list[int]], reassign: bool):
        self.function, self.data, self.shares, self.reassign = function, data, shares, reassign
        self.number = 0
        self.attempts = [0] * len(shares)  # the number of the last one, of each trainer
        self.results: list[Any] = [None] * len(shares)
        self.left = set(range(len(shares)))  # trainers whose function has not returned
        self.errors: list[Exception] = []  # those of trainers, in the order of time

    def error(self) -> Exception | None:
        """What is to be raised: the first error that is not merely that others have failed."""
        return next((e for e in self.errors if not isinstance(e, StoppedError)), next(iter(self.errors), None))


class Crew:
    """Trainers `names` of one simulation. `party` makes a party; `compute` as in `Simulation`."""

    def __init__(
        self, network: Network, party: Callable[[str], Party], ticket: Ticket, names: list[str], compute: float
    ):
        self._network, self._party, self._ticket, self._compute = network, party, ticket, compute
        self.names = names
        self.job: Job | None = None  # the one that is going on
        self._parties: dict[str, Party] = {}  # the last one of each name
        self._trainers: list[SimTrainer] = []  # kept, so that none is closed by the garbage collector at any moment

    def begin(self, job: Job) -> None:
        """All of its trainers."""
        self.job = job
        for number in range(len(job.shares)):
            self._begin(job, number, 0)

    def at_work(self) -> list[Party]:
        """The parties whose trainers have not returned, and are alive."""
        left = [] if self.job is None else [self._parties[self.names[n]] for n in sorted(self.job.left)]
        return [party for party in left if not party.dead]

    def lost(self, party: Party, restart: float | None) -> None:
        """A party has crashed: if it was at work, its trainer is begun again after so long (None: never)."""
        job = self.job
        if job is None or self._parties.get(party.name) is not party:
            return
        number = self.names.index(party.name)
        if number in job.left:
            if restart is None:
                job.left.discard(number)
            else:
                self._begin_again(job, number, restart)

    def run_twice(self, draw: random.Random) -> None:
        """A trainer that is at work is run once more, as if it were lost."""
        if self.job is not None and (parties := self.at_work()):
            name = draw.choice(parties).name
            self._network.world.note("%s is run a second time", name)
            self._begin_again(self.job, self.names.index(name), 0.0)

    def _begin(self, job: Job, number: int, attempt: int) -> None:
        """One attempt at being a trainer, as a task of a new party."""
        if self.job is job:
            party = self._parties[self.names[number]] = self._party(self.names[number])
            party.spawn(self._train, party, job, number, attempt)

    def _begin_again(self, job: Job, number: int, delay: float) -> None:
        job.attempts[number] += 1
        world = self._network.world
        world.at(world.now + delay, None, self._begin, job, number, job.attempts[number])

    def _train(self, host: Party, job: Job, number: int, attempt: int) -> None:
        """As the task of `ps.run`: join, call the user's function, leave."""
        trainer, result, failure = None, None, None
        try:
            trainer = SimTrainer(self._network, host, self._ticket, job.number, number, attempt, self._compute)
            self._trainers.append(trainer)
            parts = [job.data[n] for n in job.shares[number]]
            if job.reassign:
                trainer._portions = Portions(trainer, job.shares, parts, lambda n: trainer.fetch(job.data[n]))
            result = job.function(trainer, parts)
            trainer.leave()
        except Exception as error:
            failure = error
            if trainer is not None and attempt == job.attempts[number]:
                with contextlib.suppress(DPSError):  # the run is over: what counts is the trainer's own error
                    trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
        finally:
            if trainer is not None:
                trainer.close()
        if isinstance(failure, AssertionError) or attempt == job.attempts[number]:  # else it was run again
            if failure is not None:
                job.errors.append(failure)
            job.results[number] = result
            job.left.discard(number)
