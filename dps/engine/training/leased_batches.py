"""A trainer's side of re-assigned work: portions of batches, its own or another's, one after the other.

`dps.Trainer.iterate` comes here where the run was begun with ``reassign=True``. The controller decides
which trainer gets which portion (`coordination/leases.py`). Inside a portion the trainer makes its ops in the portion's
name: so they count once, should another trainer run it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import Protocol

import numpy as np
from distributed import Worker, get_worker
from distributed.utils_comm import gather_from_workers
from tornado.platform.asyncio import BaseAsyncIOLoop

from dps import config
from dps.engine.client.origin import Origin
from dps.engine.training.batches import Batches, iterate_partition, rows
from dps.engine.training.participant import Participant
from dps.engine.training.types import Batch, Key, Partition
from dps.engine.wire.messages import LeaseRequest, PartitionsAtHand
from dps.errors import ClockTimeoutError, DataLostError, DPSError, InputError, RequestTimeoutError, ServerGoneError

__all__ = ["FetchablePartitions", "LeasedBatches", "PartitionSource"]

logger = logging.getLogger(__name__)

ASK_SECONDS = 0.05  # between two questions whether a portion is still wanted
CROWD_TRAINERS = 1000  # of more, each asks more rarely
POLL_SECONDS = 0.2  # between two looks for a partition that is fetched
MAX_TRIES = 5  # to fetch a partition that no other trainer may be able to work on


class PartitionSource(Protocol):
    """Where a trainer gets partitions of others: `FetchablePartitions` on Dask, a `PartitionPeer` on Spark."""

    # Where other trainers fetch this trainer's own partitions, "host:port"; None: not from itself.
    @property
    def address(self) -> str | None: ...

    def fetch(self, partition: int, peer: str | None, check: Callable[[], None]) -> Partition:
        """Get a partition here, within ``dps.timeouts.fetch``, or raise. `peer` is the address of the trainer that has
        it, where trainers have such addresses; `check` is called now and then, and may raise, to stop it."""
        ...


class FetchablePartitions:
    """All partitions of a run, as its trainers may fetch them: keys of Dask, whose futures the driver holds.

    (No tuple or dataclass: Dask looks into those for tasks that are waited for.)
    """

    address = None

    def __init__(self, keys: Sequence[Sequence[Key]], shares: Sequence[Sequence[int]], paired: bool):
        self.keys = [list(row) for row in keys]
        self.shares = [list(share) for share in shares]
        self.paired = paired  # a partition is a tuple

    def fetch(self, partition: int, peer: str | None, check: Callable[[], None]) -> Partition:
        """Get a partition to this worker, within ``dps.timeouts.fetch``; in a task. `check` may raise, to stop it."""
        worker, keys = get_worker(), self.keys[partition]
        loop, patience = worker.loop, config.seconds("fetch")
        assert isinstance(loop, BaseAsyncIOLoop)
        until = time.monotonic() + patience
        waiting = asyncio.run_coroutine_threadsafe(_gather(worker, keys), loop.asyncio_loop)
        try:
            while not wait([waiting], POLL_SECONDS).done:
                check()
                if time.monotonic() > until:
                    raise RequestTimeoutError(
                        f"partition {partition} was not here within {config.limit('fetch', patience)}: the workers "
                        f"that have it are busy or gone, or it is large; raise the setting, or make partitions smaller"
                    )
            partition_parts = waiting.result()
        finally:
            waiting.cancel()
        return tuple(partition_parts[key] for key in keys) if self.paired else partition_parts[keys[0]]


async def _gather(worker: Worker, keys: list[Key]) -> dict[Key, Partition]:
    """The values of keys, from here or from whichever workers have them; they are not kept on this one."""
    values = {key: worker.data[key] for key in keys if key in worker.data}
    while missing := [key for key in keys if key not in values]:
        holders = await worker.scheduler.who_has(keys=missing)
        data, *_ = await gather_from_workers(holders, rpc=worker.rpc, who=worker.address)
        values |= data
        if not data:  # its worker has just ended: it is being computed again
            await asyncio.sleep(POLL_SECONDS)
    return values


class LeasedBatches:
    """The batches of a trainer whose work is leased in portions.

    `shares` has the partitions of each trainer.
    `source` gets other trainers' partitions here.
    """

    def __init__(
        self,
        participant: Participant,
        shares: Sequence[Sequence[int]],
        own: Sequence[Partition],
        source: PartitionSource,
    ):
        self.participant, self._source = participant, source
        self.own = dict(zip(shares[participant.number], own, strict=True))
        self._session, self._in_portion = participant.session, False
        self._prepare: Callable[[Partition], Partition] | None = None
        self._plan = Batches(())
        self._how: dict[str, int | None] = {}  # how all trainers go through the epochs
        self._batches: dict[int, list] = {}  # of own partitions,
        self._foreign: OrderedDict[int, list] = OrderedDict()  # and of others'; that not used for longest comes first
        self._without: set[int] = set()  # partitions that could not be fetched,
        self._failures: Counter[int] = Counter()  # and how often
        self._asked = 0.0  # when the controller was asked last whether a portion is still wanted
        self._pause = ASK_SECONDS * max(1.0, participant.trainers / CROWD_TRAINERS)

    def iterate(
        self,
        tick: Callable[[], int],
        end_portion: Callable[[bool], None],
        partitions: Sequence[Partition],
        epochs: int,
        batch_size: int | None,
        shuffle: int | None,
        prepare: Callable[[Partition], Partition] | None,
    ) -> Iterator[Batch]:
        """As :meth:`dps.Trainer.iterate`; `tick` is called after each epoch.

        `end_portion` is called at the end of each portion, whose ops are still in its name, and told whether the
        trainer has done all of it.
        """
        participant, plan = self.participant, Batches((), epochs, batch_size, shuffle)
        self.check_outside("iterate")
        own = list(self.own.values())
        if len(partitions) != len(own) or any(a is not b for a, b in zip(partitions, own, strict=True)):
            raise InputError(
                "with reassign=True trainer.iterate takes the partitions that the function was given, as they are, for "
                "other trainers work on them too: what is to be done to each goes into iterate(..., prepare=function)"
            )
        if (plan.batch_size, prepare) != (self._plan.batch_size, self._prepare):
            self._batches.clear()
            self._foreign.clear()
        self._plan, self._prepare = plan, prepare
        for number, partition in self.own.items():
            if number not in self._batches:
                self._batches[number] = self._cut(partition)
        participant.planned = participant.clock + plan.epochs
        skipped = min(max(0, participant.reached - participant.clock), plan.epochs)
        if skipped:
            participant.move(participant.clock + skipped)
        self._how = {"epochs": plan.epochs, "batch_size": plan.batch_size, "shuffle": plan.seed}
        for _ in range(plan.epochs - skipped):
            yield from self._epoch(end_portion)
            tick()

    def check_outside(self, what: str) -> None:
        """Refuse what cannot be done in the middle of a portion."""
        if self._in_portion:
            raise InputError(
                f"{what} within the loop over trainer.iterate: with reassign=True trainers do different numbers of "
                f"batches, and the clock ticks by itself after each epoch; call it before or after the loop"
            )

    # -- inside

    def _declaration(self) -> LeaseRequest:
        """The first question of an epoch, which tells how many batches this trainer's partitions have."""
        declared = [(number, len(batches)) for number, batches in self._batches.items()]
        return LeaseRequest(self.participant.clock, declared, self._how, peer=self._source.address)

    def _epoch(self, end_portion: Callable[[bool], None]) -> Iterator[Batch]:
        """The batches of one epoch."""
        participant, session = self.participant, self._session
        epoch, request = participant.clock, self._declaration()
        patience = session.now() + participant.clock_patience
        while True:
            request.next = PartitionsAtHand(list(self._foreign), list(self._without))
            answer = participant.lease(request)
            request, given = LeaseRequest(epoch), answer.portion
            if answer.declare:
                request = self._declaration()
                continue
            if given is None:
                late, missing = session.now() > patience, answer.missing
                pause = None if missing is None else self._once_more(late, *missing)
                if answer.again is None or (late and missing is None):
                    return
                with participant.waiting():
                    session.sleep(pause or answer.again)
                continue
            patience = session.now() + participant.clock_patience
            self._asked = session.now()
            number, partition, first, end, count = given
            batches = self._of(partition, answer.peer, request)
            if batches is None:
                continue
            if len(batches) != count:
                raise InputError(
                    f"trainer {participant.number} cuts partition {partition} into {len(batches)} batches, and the "
                    f"trainer whose it is into {count}: with reassign=True all of them must call iterate alike"
                )
            chosen = self._order(partition, len(batches))[first:end]
            began = session.now()
            done = False
            with self._acting_for(number):
                try:
                    for at, index in enumerate(chosen):
                        if not self._wanted(epoch, number, at):
                            break  # another has done it
                        yield batches[index]
                        session.meter.rows += rows(batches[index])
                    else:
                        done = True
                finally:
                    end_portion(done)
                session.wait()
            if done:
                request.done = number, (session.now() - began) / len(chosen)

    @contextlib.contextmanager
    def _acting_for(self, portion: int) -> Iterator[None]:
        """Within the block, ops are the portion's: numbered from 0, whichever trainer makes them, and counted once."""
        own = self._session.own
        self._in_portion = True
        try:
            with self._session.acting_as(
                Origin(self.participant.first_portion + portion, 0, own.clock, 0, own.parties)
            ):
                yield
        finally:
            self._in_portion = False

    def _order(self, partition: int, count: int) -> list[int]:
        """A partition's batches in the order of this epoch, for every trainer the same."""
        if self._plan.seed is None:
            return list(range(count))
        place = (self._plan.seed, self.participant.clock, partition)
        return np.random.default_rng(place).permutation(count).tolist()

    def _wanted(self, epoch: int, number: int, at: int) -> bool:
        now = self._session.now()
        if now - self._asked < self._pause:
            return True
        self._asked = now
        return bool(self.participant.lease(LeaseRequest(epoch, at=(number, at))).wanted)

    def _once_more(self, late: bool, why: str, stuck: bool, alone: bool) -> float | None:
        """What is left could not be fetched: where its owner will not do it, try again after so many seconds."""
        again = {n for n in self._without if self._failures[n] < MAX_TRIES} if stuck else set()
        if late and not self._without:
            raise ClockTimeoutError(f"{why}; raise dps.timeouts.clock if they take longer, or see whether they hang")
        if late or (alone and not again):
            raise DataLostError(f"{why}: have their workers gone?")
        self._without -= again
        return POLL_SECONDS * 2.0 ** max(self._failures[n] for n in again) if again else None

    def _of(self, partition: int, peer: str | None, request: LeaseRequest) -> list | None:
        """The batches of a partition; another's is fetched, if it can be. `request` gets the seconds that it took."""
        if partition in self._batches:
            return self._batches[partition]
        if partition not in self._foreign:
            while len(self._foreign) >= max(1, len(self.own)):  # before there is one more
                self._foreign.popitem(last=False)
            try:
                with self.participant.waiting() as began:
                    content = self._source.fetch(partition, peer, self.participant.check)
            except Exception as error:
                self.participant.check()
                if isinstance(error, DPSError) and not isinstance(error, (RequestTimeoutError, ServerGoneError)):
                    raise
                logger.warning("trainer %d does without partition %d: %r", self.participant.number, partition, error)
                self._without.add(partition)
                self._failures[partition] += 1
                return None
            request.fetched = self._session.now() - began
            self._foreign[partition] = self._cut(content)
        self._foreign.move_to_end(partition)
        return self._foreign[partition]

    def _cut(self, partition: Partition) -> list:
        return iterate_partition(
            partition if self._prepare is None else self._prepare(partition), self._plan.batch_size
        )
