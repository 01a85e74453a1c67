"""What the controller knows of one server."""

from __future__ import annotations

from dps.engine.telemetry.snapshot import ServerPhase
from dps.engine.wire.protocols import RoleConnection

__all__ = ["ServerRecord"]


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
        self.unfit_until = 0.0  # it was out of step, and joins no chain before

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
