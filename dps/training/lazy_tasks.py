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
from collections.abc import Callable
from typing import Any

from distributed import get_worker

from dps import config
from dps.calls import Pending
from dps.client import NO_ROWS, Change, Client, Ticket
from dps.errors import DPSError, InputTypeError, StoppedError
from dps.state.partition import Grouping
from dps.training.trainer import Trainer
from dps.transfers import Call
from dps.wire import frames
from dps.wire.frames import Header

__all__ = ["BagStage", "BlockStage", "Rehearsal", "Stage"]

LOOK = 0.05, 0.5  # seconds between two questions after a successor: the first, the longest


class Stage:
    """The function of a lazy stage, called with a partition and its number.

    Parameters
    ----------
    ticket : Ticket
    run : int
        The elastic run, which has a trainer for each partition.
    token : str
        Tells the tasks of this stage from those of all others.
    function : callable
        The user's: ``function(trainer, partition, *args, **kwargs)``.
    args, kwargs
        More arguments for it.
    """

    def __init__(
        self, ticket: Ticket, run: int, token: str, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ):
        self.ticket, self.run, self.token = ticket, run, token
        self.function, self.args, self.kwargs = function, args, kwargs
        self.__name__ = getattr(function, "__name__", type(function).__name__)  # Dask names its tasks by it

    def __dask_tokenize__(self) -> tuple[str, str]:
        return type(self).__name__, self.token

    def __call__(self, partition: Any, number: int) -> Any:
        while True:
            trainer = Trainer(self.ticket, self.run, number, None, _where(), partition_numbers=[number])
            try:
                result = self.compute(trainer, partition)
                trainer.leave()
                return result
            except Exception as error:
                if self._was_replaced(trainer):
                    continue
                with contextlib.suppress(DPSError):  # the run is over, or the controller is gone: `error` says more
                    trainer.leave(failed=f"{type(error).__name__}: {error}"[:1000])
                raise
            finally:
                trainer.close()

    def compute(self, trainer: Trainer, partition: Any) -> Any:
        """The new partition."""
        return self.function(trainer, partition, *self.args, **self.kwargs)

    def _was_replaced(self, trainer: Trainer) -> bool:
        """Whether a later attempt at the partition has joined the run. If so, it has ended by now."""
        began, pause = time.monotonic(), LOOK[0]
        mine, limit = trainer._wish["incarnation"], config.seconds("clock")
        with Client(self.ticket) as client:
            while True:
                try:
                    told = client._ask_controller(Header(frames.PEEK), {"run": self.run, "trainer": trainer.number})
                except DPSError:  # the run was forgotten, or the controller is gone
                    return False
                if told["stopped"] is not None or told["incarnation"] == mine:
                    return False
                if told["state"] != "joined":
                    return True
                if time.monotonic() - began > limit:
                    raise StoppedError(
                        f"partition {trainer.number} is computed twice at once, and attempt {mine} has waited for "
                        f"attempt {told['incarnation']} for {config.limit('clock', limit)}: cancel one of the two "
                        f"computations, or allow more"
                    )
                time.sleep(pause)
                pause = min(2 * pause, LOOK[1])


class BagStage(Stage):
    """The same for partitions of a bag, which are iterables; Dask zips them with a bag of their numbers."""

    def __call__(self, partition: Any, number: Any) -> list[Any]:
        (index,) = number
        return list(super().__call__(list(partition), index))  # a list, because another attempt reads it again

    def compute(self, trainer: Trainer, partition: Any) -> list[Any]:
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

    def __call__(self, block: Any, block_info: Any = None) -> Any:
        about = block_info[0]
        number = 0
        for place, count in zip(about["chunk-location"], about["num-chunks"], strict=True):
            number = number * count + place
        return super().__call__(block, number)


class Rehearsal(Trainer):
    """A trainer that is in no run, and whose pushes are checked and dropped: to see what a function returns.

    Parameters
    ----------
    ticket : Ticket
    trainers : int
        How many there will be.
    """

    def __init__(self, ticket: Ticket, trainers: int):
        Client.__init__(self, ticket)
        self.number, self.attempt, self.trainers, self.parties = 0, 0, trainers, 1
        self.partition_numbers, self.staleness = [0], math.inf
        self.clock = self._reached = self._planned = self._calls = 0
        self._cancelled, self._has_left = None, True

    _controller = Client._controller  # without joining

    def _pass(self, clock: int) -> None:
        pass

    def _send(self, change: Change, keep: bool = False) -> Pending:
        """Nothing of a push; what a push_pull asks for is pulled."""
        if change.answered is None:
            return Pending(self, "push", [])
        spec, target = change.route.spec, change.target
        values = change.answered.reshape(-1, spec.dim)
        if isinstance(target, Grouping):
            call = Call(self._header(frames.PULL, 0, spec), target, NO_ROWS, None, values)
        else:
            call = Call(self._header(frames.PULL, frames.RANGE, spec), None, target, None, values)
        return Pending(self, "pull", self._start(change.route, call), change.answered)


def _where() -> str:
    """Where a trainer is, for messages."""
    try:
        return str(get_worker().address)
    except ValueError:  # not in a worker's task
        return f"{socket.gethostname()}, process {os.getpid()}"
