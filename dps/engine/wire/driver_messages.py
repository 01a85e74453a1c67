"""The messages of drivers: what they ask of the controller over Dask's control plane, and what it answers. Pure.

A message travels as MessagePack, as the `Status` of `telemetry/snapshot.py` does. `controller/verbs.py` decodes and
checks requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "AdaptRule",
    "CheckpointOptions",
    "CheckpointSchedule",
    "DescribedServer",
    "DescribedTable",
    "Description",
    "RestoreAnswer",
    "RestoreRequest",
    "SavedRun",
]


class AdaptRule(msgspec.Struct, frozen=True):
    """How the number of servers follows the load."""

    minimum: int = 1
    maximum: int | None = None  # None: as many as there are workers
    interval: float = 2.0  # seconds between two samples
    memory: int | None = None  # bytes that a server may use; None: what Dask allows its worker
    wait_count: int = 30  # samples in a row that find too many servers, until one leaves
    busy: float = 0.7  # share of its time that a server may be at work


class CheckpointOptions(msgspec.Struct, frozen=True):
    """Where a checkpoint goes, and how many are kept there."""

    url: str
    keep: int = 3
    incremental: bool = False
    storage_options: dict[str, Any] = msgspec.field(default_factory=dict)  # what fsspec takes


class CheckpointSchedule(msgspec.Struct, frozen=True):
    """When checkpoints are taken: every so many seconds, or clocks."""

    options: CheckpointOptions
    seconds: float | None = None
    clocks: int | None = None


class RestoreRequest(msgspec.Struct, frozen=True):
    """Which tables are to be restored, and from where."""

    url: str
    checkpoint: str | None = None  # its name; None: the newest that can be read
    tables: list[str] | None = None  # None: all
    storage_options: dict[str, Any] = msgspec.field(default_factory=dict)


class RestoreAnswer(msgspec.Struct, frozen=True):
    """What was restored."""

    name: str  # of the checkpoint
    clock: int | None
    tables: list[str]
    passed: dict[str, str]  # newer checkpoints that cannot be read, each with the reason


class SavedRun(msgspec.Struct, frozen=True):
    """What a checkpoint knows of its run, so that another run may resume it."""

    trainers: int
    staleness: float | None  # None: no bound
    clock: int  # of the checkpoint
    origin: int  # of its first trainer
    # Checkpoints of earlier versions lack the rest.
    reassign: bool = False  # work was leased to trainers
    origins: list[list[int]] = []  # [first, how many] of those of all its ops
    partitions: list[list[int]] = []  # of each trainer
    warm_start: int = 0


class DescribedServer(msgspec.Struct, frozen=True):
    """A server, as a driver needs it."""

    number: int
    worker: str  # the address of its Dask worker
    alive: bool


class DescribedTable(msgspec.Struct, frozen=True):
    """A table, as a driver needs it."""

    spec: dict[str, Any]  # see `TableSpec.to_dict`
    chains: list[tuple[int, ...]]  # the servers of each shard, the primary first
    joiners: list[int | None]  # the server to which each shard moves


class Description(msgspec.Struct, frozen=True):
    """A parameter server, for a driver that starts it or attaches to it."""

    name: str
    secret: str
    copies: int  # of a row, in tables that do not say how many
    adapt: AdaptRule | None  # None: the number of servers stays
    controller: tuple[str, int]  # where its endpoint listens
    servers: list[DescribedServer]
    tables: dict[str, DescribedTable]
    restored: SavedRun | None  # the run that may be resumed
