"""The trainers of a simulation, and what Dask and `ps.run` do for them: start them, and start lost ones again.

A trainer is a task of a party of its own. When that party crashes, or seems to, another attempt at the same trainer
starts in a new party of the same name, and the earlier attempt may live on as a zombie. The result and the error of the
attempt that started last count. An AssertionError of any attempt counts, because what a zombie reads must hold as well.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from dps.engine.client.row_cache import CacheShelf
from dps.engine.client.ticket import Ticket
from dps.engine.simulation.channel import SimProcess, SimTrainer
from dps.engine.simulation.network import Network
from dps.engine.simulation.world import Party
from dps.errors import DPSError, StoppedError

__all__ = ["SimJob", "SimTrainers"]

T = TypeVar("T")


class SimJob(Generic[T]):
    """One call of `Simulation.run`: the function and data of its trainers, and their results.

    So many trainers, `threads`, are in one process as far as they share the caches of it, and so many processes,
    `processes`, are on one machine. A trainer that is started again is in a new process, or in that of others.
    """

    def __init__(
        self,
        function: Callable[..., T],
        data: Sequence[object],
        shares: list[list[int]],
        reassign: bool,
        args: tuple,
        kwargs: dict[str, object],
        threads: int,
        processes: int,
    ):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.data = data
        self.shares = shares
        self.reassign, self.threads, self.processes = reassign, threads, processes
        shelves = [CacheShelf() for _ in shares]
        self.caches = [shelves[number // threads] for number in range(len(shares))]  # by trainer
        self.parties: dict[CacheShelf, Party] = {}  # of processes with several trainers, once they need one
        self.number = 0
        self.attempts = [0] * len(shares)  # by trainer: the number of its last attempt
        self.results: list[T | None] = [None] * len(shares)
        self.left = set(range(len(shares)))  # trainers whose function has not returned
        self.errors: list[Exception] = []  # of trainers, in the order of time

    def error(self) -> Exception | None:
        """The error to raise: the first that does not merely say that other trainers have failed."""
        return next((e for e in self.errors if not isinstance(e, StoppedError)), next(iter(self.errors), None))


class SimTrainers:
    """The trainers of one simulation, and how slow the parties of each are. `party` makes a party; `compute` as in
    `Simulation`."""

    def __init__(
        self,
        network: Network,
        party: Callable[[str, float], Party],
        ticket: Ticket,
        slow: Mapping[str, float],
        compute: float,
    ):
        self._network, self._slow = network, slow
        self._party = party
        self._ticket = ticket
        self._compute = compute
        self.names = list(slow)
        self.job: SimJob | None = None  # the current one
        self._parties: dict[str, Party] = {}  # name -> its last party
        self._trainers: list[SimTrainer] = []  # kept, because the garbage collector would close them at any moment

    def begin(self, job: SimJob) -> None:
        """Start all trainers of a job."""
        self.job = job
        for number in range(len(job.shares)):
            self._begin(job, number, 0)

    def at_work(self) -> list[Party]:
        """The parties that are alive and whose trainers have not returned."""
        left = [] if self.job is None else [self._parties[self.names[n]] for n in sorted(self.job.left)]
        return [party for party in left if not party.dead]

    def lost(self, party: Party, restart: float | None) -> None:
        """A party has crashed: if it was at work, start its trainer again after `restart` seconds (None: never)."""
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
        """Start a trainer that is at work once more, as if it were lost."""
        if self.job is not None and (parties := self.at_work()):
            name = draw.choice(parties).name
            self._network.world.note("%s is run a second time", name)
            self._begin_again(self.job, self.names.index(name), 0.0)

    def _begin(self, job: SimJob, number: int, attempt: int) -> None:
        """Start one attempt at a trainer, as a task of a new party."""
        if self.job is job:
            name = self.names[number]
            party = self._parties[name] = self._party(name, self._slow[name])
            party.spawn(self._train, party, job, number, attempt)

    def _begin_again(self, job: SimJob, number: int, delay: float) -> None:
        job.attempts[number] += 1
        draw = random.Random(f"process of trainer {number}, attempt {job.attempts[number]}")
        job.caches[number] = draw.choice([CacheShelf(), *(job.caches if job.threads > 1 else [])])
        world = self._network.world
        world.at(world.now + delay, None, self._begin, job, number, job.attempts[number])

    def _process(self, host: Party, job: SimJob, number: int) -> SimProcess:
        """The process of a trainer. That of several trainers outlives each, because a thread's end ends no process."""
        shelf, machine = job.caches[number], number // (job.threads * job.processes)

        def party() -> Party:
            if shelf not in job.parties:
                job.parties[shelf] = self._party(f"process-{number}", 1.0)
            return job.parties[shelf]

        return SimProcess(
            None if job.processes == 1 else f"machine-{machine}", party if job.threads > 1 else lambda: host
        )

    def _train(self, host: Party, job: SimJob, number: int, attempt: int) -> None:
        """What a task of `ps.run` does: join, call the user's function, leave."""
        trainer, result, failure = None, None, None
        try:
            trainer = SimTrainer(
                self._network,
                host,
                self._ticket,
                job.number,
                number,
                attempt,
                self._compute,
                leased=(job.data, job.shares) if job.reassign else None,
                caches=job.caches[number],
                process=self._process(host, job, number),
            )
            trainer.partition_numbers = list(job.shares[number])
            self._trainers.append(trainer)
            parts = [job.data[n] for n in job.shares[number]]
            result = job.function(trainer, parts, *job.args, **job.kwargs)
            trainer.leave()
        except Exception as error:
            failure = error
            if trainer is not None and attempt == job.attempts[number]:
                with contextlib.suppress(DPSError):  # if the run is over, the trainer's own error counts
                    trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
        finally:
            if trainer is not None:
                trainer.close()
        if isinstance(failure, AssertionError) or attempt == job.attempts[number]:  # else a later attempt counts
            if failure is not None:
                job.errors.append(failure)
            job.results[number] = result
            job.left.discard(number)
