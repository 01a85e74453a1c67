"""What the controller knows of one server."""

from __future__ import annotations

import math

from dps.engine.telemetry.snapshot import ServerPhase
from dps.engine.wire.protocols import RoleConnection

__all__ = ["ServerRecord"]


# Largest number of answers to heartbeats of one server that are remembered until it has confirmed them.
MAX_ANSWERED = 64


class ServerRecord:
    def __init__(self, number: int, worker: str, key: str):
        self.number = number
        self.worker = worker
        self.key = key
        self.address: tuple[str, int] | None = None
        self.connection: RoleConnection | None = None
        self.worker_removed = False  # by Dask
        self.ready = False  # it has all tables and functions
        self.silent = False  # no heartbeat has come for `dps.timeouts.silence`
        self.failed = False  # it has ended itself, and is to be closed
        self.full = False  # its tables take nearly all of its dps.memory, as it last reported
        self.doubted = False  # no heartbeat has come since its connection broke, or since another server fell silent
        self.leaving = False  # it is to be emptied and closed
        # Calls about tables and functions, (method, arguments), that it could not take while it was out of reach.
        self.missed: list[tuple[str, tuple[object, ...]]] = []
        # Heartbeat -> when it was answered, a moment after which it was sent, whether the answer renewed the lease; the
        # last ones only.
        self.answered: dict[int, tuple[float, float, bool]] = {}
        self.bound_at = -math.inf  # the lease that it surely got last began after that
        self.confirmed_at = -math.inf  # when the last answer was sent that the server is known to have
        self.must_follow = False  # it was another controller's, so it must have followed this one before it connects
        self.connected_at = -math.inf  # when it last connected to this controller
        self.unfit_until = 0.0  # it was out of step, and joins no chain before

    def answer(self, heartbeat: int, known: int, now: float, renews: bool) -> None:
        """Note that a heartbeat is answered now, and that the server has said that it knows the answer to another.

        A heartbeat was sent after the answer that it names, so a lease that counts from the heartbeat began after that.
        """
        for number in [number for number in self.answered if number <= known]:
            answered_at, sent_after, renewed = self.answered.pop(number)
            self.confirmed_at = max(self.confirmed_at, answered_at)
            if renewed:
                self.bound_at = max(self.bound_at, sent_after)
        if len(self.answered) < MAX_ANSWERED:
            self.answered[heartbeat] = now, self.confirmed_at, renews

    @property
    def up(self) -> bool:
        return self.connection is not None and not self.silent and not self.failed

    @property
    def serves(self) -> bool:
        """Whether it can hold replicas: it is up, has all tables, and Dask has not removed its worker."""
        return self.up and self.ready and not self.worker_removed

    @property
    def takes_replicas(self) -> bool:
        """Whether shards may be placed on it: it can hold replicas, and is not to be emptied."""
        return self.serves and not self.leaving

    @property
    def phase(self) -> ServerPhase:
        if self.worker_removed or not self.up:
            return ServerPhase.GONE
        return ServerPhase.LEAVING if self.leaving else ServerPhase.UP
