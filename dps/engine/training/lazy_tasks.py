"""The workers' side of lazy stages: the task of one partition, as its trainer; and a rehearsal for the driver.

Theory of operation
-------------------
A partition's origin is its trainer's in an elastic run, so it does not matter which Dask task makes its pushes: fusion
gives tasks other keys, and two branches of a graph that are computed at once hold two tasks for one partition. For that
reason the incarnation is counted by the controller, and not Dask's run id: of two attempts at a partition the one that
joins later fences off the earlier, whichever tasks they are. It also works where there is no worker (Dask's threaded
and synchronous schedulers).

Both tasks may be wanted. So an attempt that was fenced off waits until its successor has ended, and then makes another
attempt, whose pushes are repeats. A zombie (Dask has given its task to another worker) does the same, to no effect.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from typing import Any

from distributed import get_worker

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.ticket import Ticket
from dps.engine.training.allreduce import RingAllreduce
from dps.engine.training.trainer import Trainer
from dps.engine.training.types import Function, Json, Options, Partition
from dps.engine.wire import frames
from dps.engine.wire.frames import Header
from dps.engine.wire.messages import Peek, TrainerStanding, decode, encode
from dps.errors import DPSError, InputError, InputTypeError, StoppedError

__all__ = ["BagStage", "BlockStage", "Stage", "rehearsal"]

ASK_SECONDS = 0.05, 0.5  # between two questions after a successor: the first, the longest


class Stage:
    """The function of a lazy stage, called with a partition and its number.

    Parameters
    ----------
    run : int
        The elastic run, which has a trainer for each partition.
    token : str
        Tells the tasks of this stage from those of all others.
    function : callable
        The user's: ``function(trainer, partition, *args, **kwargs)``.
    """

    def __init__(self, ticket: Ticket, run: int, token: str, function: Function, args: tuple, kwargs: Options):
        self.ticket, self.run, self.token = ticket, run, token
        self.function, self.args, self.kwargs = function, args, kwargs
        self.__name__ = getattr(function, "__name__", type(function).__name__)  # Dask names its tasks by it

    def __dask_tokenize__(self) -> tuple[str, str]:
        return type(self).__name__, self.token

    def __call__(self, partition: Partition, number: int) -> Partition:
        while True:
            trainer = Trainer.join(self.ticket, self.run, number, None, _where(), partition_numbers=[number])
            incarnation = trainer.incarnation
            try:
                result = self.compute(trainer, partition)
                trainer.leave()
                return result
            except Exception as error:
                if self._was_replaced(number, incarnation):
                    continue
                with contextlib.suppress(DPSError):  # the run is over, or the controller is gone: `error` says more
                    trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
                raise
            finally:
                trainer.close()

    def compute(self, trainer: Trainer, partition: Partition) -> Partition:
        return self.function(trainer, partition, *self.args, **self.kwargs)

    def _was_replaced(self, number: int, incarnation: int) -> bool:
        """Whether a later attempt at the partition has joined the run. If so, it has ended by now."""
        began, pause = time.monotonic(), ASK_SECONDS[0]
        limit = config.seconds("clock")
        with Client(self.ticket) as client:
            while True:
                try:
                    answer = client.session.ask_controller(Header(frames.PEEK), encode(Peek(self.run, number)))
                    latest = decode(TrainerStanding, answer.body)
                except DPSError:  # the run was forgotten, or the controller is gone
                    return False
                if latest.stopped is not None or latest.incarnation == incarnation:
                    return False
                if latest.state != "joined":
                    return True
                if time.monotonic() - began > limit:
                    raise StoppedError(
                        f"partition {number} is computed twice at once, and attempt {incarnation} has waited for "
                        f"attempt {latest.incarnation} for {config.limit('clock', limit)}: cancel one of the two "
                        f"computations, or allow more"
                    )
                time.sleep(pause)
                pause = min(2 * pause, ASK_SECONDS[1])


class BagStage(Stage):
    """The same for partitions of a bag, which are iterables; Dask zips them with a bag of their numbers."""

    def __call__(self, partition: Partition, number: Any) -> list[Partition]:
        (index,) = number
        return list(super().__call__(list(partition), index))  # a list, because another attempt reads it again

    def compute(self, trainer: Trainer, partition: Partition) -> list[Partition]:
        result = super().compute(trainer, partition)
        try:
            return [] if result is None else list(result)  # a generator runs here, as long as the trainer may push
        except TypeError as error:
            if hasattr(result, "__iter__"):
                raise
            raise InputTypeError(
                f"of a bag's partition the function returns an iterable or None, not a {type(result).__name__}"
            ) from error


class BlockStage(Stage):
    """The same for blocks of an array, whose places :func:`dask.array.map_blocks` tells."""

    def __call__(self, block: Partition, block_info: Any = None) -> Partition:
        block_place = block_info[0]
        number = 0
        for place, count in zip(block_place["chunk-location"], block_place["num-chunks"], strict=True):
            number = number * count + place
        return super().__call__(block, number)


def rehearsal(ticket: Ticket, trainers: int) -> Trainer:
    """A trainer that is in no run, and whose pushes are checked and dropped: to find out what a function returns."""
    return Trainer(Rehearsal(ticket, trainers), [0])


class Rehearsal:
    """The run of a trainer that rehearses: it meets no other trainer, and its pushes are dropped."""

    run, number, incarnation = -1, 0, 0
    staleness, reached, warm_start = math.inf, 0, 0
    others_clock = math.inf

    def __init__(self, ticket: Ticket, trainers: int):
        self.trainers, self.planned = trainers, 0
        self.client = Client(ticket, rehearses=True)
        self.client.session.own.clock = 0

    def check(self) -> None:
        """It is never told to stop."""

    def pass_clock(self, clock: int) -> None:
        """No other trainer is waited for."""

    def meet(self, call: Json, raw: bytes) -> bytes | bytearray:
        raise InputError(f"{call['op']}: there are no other trainers while a function is tried out")

    def ring(self) -> RingAllreduce:
        raise InputError("allreduce: there are no other trainers while a function is tried out")

    def move(self, clock: int) -> None:
        self.client.session.own.clock = clock

    def leave(self, failed: str | None = None) -> None:
        self.close()

    def close(self) -> None:
        self.client.close()


def _where() -> str:
    """Where a trainer is, for messages."""
    try:
        return str(get_worker().address)
    except ValueError:  # not in a worker's task
        return f"{socket.gethostname()}, process {os.getpid()}"
