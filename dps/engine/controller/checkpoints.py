"""Checkpointer: carries out what `checkpoint_procedures.py` says, on the scheduler's loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from dps.engine.controller.actors import ServerActors
from dps.engine.controller.checkpoint_procedures import CheckpointProcedures
from dps.engine.controller.failover import Membership
from dps.engine.controller.runs import Runs
from dps.engine.telemetry.snapshot import CheckpointStatus, LastCheckpoint
from dps.engine.wire.messages import (
    CheckpointOptions,
    CheckpointSchedule,
    RestoreAnswer,
    RestoreRequest,
    SavedRun,
)

__all__ = ["Checkpointer"]


class Checkpointer:
    """Takes and restores checkpoints of one parameter server; one at a time.

    Parameters
    ----------
    runs, membership, actors
        The clocks; which server holds which shard; the servers' actors.
    in_endpoint : callable
        Runs a function in the endpoint's thread, which owns the runs and the membership.
    """

    def __init__(
        self, runs: Runs, membership: Membership, actors: ServerActors, in_endpoint: Callable[..., Awaitable[Any]]
    ):
        self._busy = asyncio.Lock()
        self._executor = actors.executor
        self._procedures = CheckpointProcedures(
            runs,
            membership,
            actors.up,
            actors.tables,
            actors.changing,
            self._busy,
            clock=time.monotonic,
            wall_clock=time.time,
            session=secrets.token_hex(8),
        )
        self._scheduled: asyncio.Future | None = None

    def describe(self) -> CheckpointStatus:
        """The last checkpoint, and the error of the last scheduled attempt, if that failed."""
        return CheckpointStatus(self._procedures.last, self._procedures.error)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being taken or restored."""
        return self._busy.locked()

    async def take(self, options: CheckpointOptions) -> LastCheckpoint:
        """Take one checkpoint; it is committed when this returns."""
        return await self._executor.run(self._procedures.take(options))

    def schedule(self, schedule: CheckpointSchedule | None) -> None:
        """Take checkpoints at intervals, in place of an earlier schedule; None: no more."""
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._scheduled = None
        if schedule is not None:
            self._scheduled = asyncio.ensure_future(self._executor.run(self._procedures.repeat(schedule)))

    def stop(self) -> None:
        """The parameter server is being closed."""
        self._procedures.closed = True
        self.schedule(None)

    async def restore(self, request: RestoreRequest) -> RestoreAnswer:
        """Restore tables from a checkpoint, in the place of tables of the same names."""
        return await self._executor.run(self._procedures.restore(request))

    @property
    def restored(self) -> SavedRun | None:
        """The state of the restored run, as long as no other run has resumed it."""
        return self._procedures.restored

    def resumed(self) -> None:
        """A run has begun: the restored run cannot be resumed any more."""
        self._procedures.restored = None

    def resumable(self, trainers: int) -> SavedRun:
        """The state of the restored run, for a run of so many trainers that resumes it."""
        return self._procedures.resumable(trainers)
