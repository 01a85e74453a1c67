"""A trainer's side of re-assigned work: portions of batches, its own or another's, one after the other.

`dps.Trainer.iterate` comes here where the run was begun with ``reassign=True``. Who gets which portion is decided by
the controller (`coordination/leases.py`). Inside a portion the trainer makes its ops in the portion's name: so they
count once, should another trainer run it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import numpy as np
from distributed import Worker, get_worker
from distributed.utils_comm import gather_from_workers

from dps import config
from dps.errors import DataLostError, DPSError, InputError, RequestTimeoutError
from dps.training.batches import Batches, iterate_partition, rows

if TYPE_CHECKING:
    from dps.training.trainer import Trainer

__all__ = ["Portions", "Stock"]

logger = logging.getLogger(__name__)

LOOK = 0.05  # seconds between two questions whether a portion is still wanted
CROWD = 1000  # trainers; of more, each asks more rarely
POLL = 0.2
TRIES = 5  # to fetch a partition that nobody else may be there for


class Stock:
    """All partitions of a run, as its trainers may fetch them: keys of Dask, whose futures the driver holds.

    (No tuple or dataclass: Dask looks into those for tasks that are waited for.)
    """

    def __init__(self, keys: Sequence[Sequence[Any]], shares: Sequence[Sequence[int]], paired: bool):
        self.keys = [list(row) for row in keys]
        self.shares = [list(share) for share in shares]
        self.paired = paired  # a partition is a tuple

    def fetch(self, partition: int, check: Callable[[], None]) -> Any:
        """Get a partition to this worker, within ``dps.timeouts.fetch``; in a task. `check` may raise, to stop it."""
        worker, keys = get_worker(), self.keys[partition]
        loop: Any = worker.loop
        patience = config.seconds("fetch")
        until = time.monotonic() + patience
        waiting = asyncio.run_coroutine_threadsafe(_gather(worker, keys), loop.asyncio_loop)
        try:
            while not wait([waiting], POLL).done:
                check()
                if time.monotonic() > until:
                    raise RequestTimeoutError(
                        f"partition {partition} was not here within {config.limit('fetch', patience)}: the workers "
                        f"that have it are busy or gone, or it is large; raise the setting, or make partitions smaller"
                    )
            found = waiting.result()
        finally:
            waiting.cancel()
        return tuple(found[key] for key in keys) if self.paired else found[keys[0]]


async def _gather(worker: Worker, keys: list[Any]) -> dict[Any, Any]:
    """The values of keys, from here or from whichever workers have them; they are not kept on this one."""
    found = {key: worker.data[key] for key in keys if key in worker.data}
    while missing := [key for key in keys if key not in found]:
        holders = await worker.scheduler.who_has(keys=missing)
        data, *_ = await gather_from_workers(holders, rpc=worker.rpc, who=worker.address)
        found |= data
        if not data:  # its worker has just ended: it is being computed again
            await asyncio.sleep(POLL)
    return found


class Portions:
    """What makes a trainer go through portions.

    Parameters
    ----------
    trainer : Trainer
    shares : sequence of sequences of int
        The partitions of each trainer.
    own : sequence
        This trainer's partitions themselves.
    fetch : callable
        Given the number of another's partition, gets it here, or raises.
    """

    def __init__(
        self, trainer: Trainer, shares: Sequence[Sequence[int]], own: Sequence[Any], fetch: Callable[[int], Any]
    ):
        self.trainer, self.own, self._fetch = trainer, dict(zip(shares[trainer.number], own, strict=True)), fetch
        self._prepare: Callable[[Any], Any] | None = None
        self._plan = Batches(())
        self._batches: dict[int, list] = {}  # of own partitions,
        self._foreign: OrderedDict[int, list] = OrderedDict()  # and of others'; that not used for longest comes first
        self._without: set[int] = set()  # partitions that could not be fetched,
        self._failures: Counter[int] = Counter()  # and how often
        self._looked = 0.0
        self._pause = LOOK * max(1.0, trainer.trainers / CROWD)

    def iterate(
        self,
        partitions: Sequence[Any],
        epochs: int,
        batch_size: int | None,
        shuffle: int | None,
        prepare: Callable[[Any], Any] | None,
    ) -> Iterator[Any]:
        """As :meth:`dps.Trainer.iterate`."""
        trainer, plan = self.trainer, Batches((), epochs, batch_size, shuffle)
        self.outside("iterate")
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
        trainer._planned = trainer.clock + plan.epochs
        skipped = min(max(0, trainer._reached - trainer.clock), plan.epochs)
        if skipped:
            trainer._move(trainer.clock + skipped)
        how = {"epochs": plan.epochs, "batch_size": plan.batch_size, "shuffle": plan.seed}
        declared = [[number, len(batches)] for number, batches in self._batches.items()]
        for _ in range(plan.epochs - skipped):
            yield from self._epoch({"declare": declared, "how": how})
            trainer.tick()

    def outside(self, what: str) -> None:
        """Refuse what cannot be done in the middle of a portion."""
        if self.trainer._acting:
            raise InputError(
                f"{what} within the loop over trainer.iterate: with reassign=True trainers do different numbers of "
                f"batches, and the clock ticks by itself after each epoch; call it before or after the loop"
            )

    # -- inside

    def _epoch(self, wish: dict[str, Any]) -> Iterator[Any]:
        trainer, epoch = self.trainer, self.trainer.clock
        patience = trainer._now() + trainer._clock_patience
        while True:
            offer = {"have": list(self._foreign), "without": list(self._without)}
            told = trainer._lease({"epoch": epoch, **wish, "next": offer})
            wish, given = {}, told["portion"]
            if given is None:
                late, missing = trainer._now() > patience, told["missing"]
                pause = None if missing is None else self._once_more(late, *missing)
                if told["again"] is None or (late and missing is None):
                    return
                with trainer._waiting():
                    trainer._sleep(pause or told["again"])
                continue
            patience = trainer._now() + trainer._clock_patience
            self._looked = trainer._now()
            number, partition, first, end, count = given
            batches = self._of(partition, wish)
            if batches is None:
                continue
            if len(batches) != count:
                raise InputError(
                    f"trainer {trainer.number} cuts partition {partition} into {len(batches)} batches, and the "
                    f"trainer whose it is into {count}: with reassign=True all of them must call iterate alike"
                )
            chosen = self._order(partition, len(batches))[first:end]
            began = trainer._now()
            with self._acting_for(number):
                for at, index in enumerate(chosen):
                    if not self._wanted(epoch, number, at):
                        break  # another has done it
                    yield batches[index]
                    trainer.meter.rows += rows(batches[index])
                else:
                    wish["done"] = [number, 0.0]
                trainer.wait()
            if "done" in wish:
                wish["done"][1] = (trainer._now() - began) / len(chosen)

    @contextlib.contextmanager
    def _acting_for(self, portion: int) -> Iterator[None]:
        """Within, the trainer's ops are those of a portion: numbered from 0, whoever runs it, and counted once."""
        trainer = self.trainer
        own, trainer._number = trainer._number, 0
        trainer._acting = trainer._first_portion + portion
        try:
            yield
        finally:
            trainer._acting, trainer._number = 0, own

    def _order(self, partition: int, count: int) -> list[int]:
        """A partition's batches in the order of this epoch, for every trainer the same."""
        if self._plan.seed is None:
            return list(range(count))
        place = (self._plan.seed, self.trainer.clock, partition)
        return np.random.default_rng(place).permutation(count).tolist()

    def _wanted(self, epoch: int, number: int, at: int) -> bool:
        now = self.trainer._now()
        if now - self._looked < self._pause:
            return True
        self._looked = now
        return self.trainer._lease({"epoch": epoch, "at": [number, at]})["wanted"]

    def _once_more(self, late: bool, why: str, stuck: bool, alone: bool) -> float | None:
        """What is left could not be fetched: where its owner will not do it, try again after so many seconds."""
        again = {n for n in self._without if self._failures[n] < TRIES} if stuck else set()
        if late or (alone and not again):
            raise DataLostError(f"{why}: have their workers gone?")
        self._without -= again
        return POLL * 2.0 ** max(self._failures[n] for n in again) if again else None

    def _of(self, partition: int, wish: dict[str, Any]) -> list | None:
        """The batches of a partition; another's is fetched, if it can be."""
        if partition in self._batches:
            return self._batches[partition]
        if partition not in self._foreign:
            while len(self._foreign) >= max(1, len(self.own)):  # before there is one more
                self._foreign.popitem(last=False)
            try:
                with self.trainer._waiting() as began:
                    found = self._fetch(partition)
            except Exception as error:
                self.trainer._check()
                if isinstance(error, DPSError) and not isinstance(error, RequestTimeoutError):
                    raise
                logger.warning("trainer %d does without partition %d: %r", self.trainer.number, partition, error)
                self._without.add(partition)
                self._failures[partition] += 1
                return None
            wish["fetched"] = self.trainer._now() - began
            self._foreign[partition] = self._cut(found)
        self._foreign.move_to_end(partition)
        return self._foreign[partition]

    def _cut(self, partition: Any) -> list:
        return iterate_partition(
            partition if self._prepare is None else self._prepare(partition), self._plan.batch_size
        )
