"""The messages of runs: what trainers and the controller tell each other beside ticks and collectives.

A message travels as JSON with the names of its fields, in the body of the frame of the same kind;
`controller/runs.py` and `controller/work_leases.py` say what each is for. `bodies.py` makes bytes of them, and checks
them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

__all__ = [
    "Join",
    "Joined",
    "LeasableBatches",
    "LeaseAnswer",
    "LeaseRequest",
    "Leave",
    "OriginAnswer",
    "OriginRequest",
    "PartitionsAtHand",
    "Peek",
    "Reserve",
    "Reserved",
    "TimeSpent",
    "TrainerStanding",
]


class Join(msgspec.Struct):
    """JOIN: a trainer joins its run, or joins again on a new connection."""

    run: int
    trainer: int
    incarnation: int | None  # None: the next one, by the controller's count
    where: str = ""  # for messages: host, worker or process
    joins: int = 0  # how often this incarnation has joined before


class Joined(msgspec.Struct, omit_defaults=True):
    """The answer to JOIN: what the controller knows of the trainer."""

    clock: int  # to go on at
    staleness: float | None  # None: no bound
    trainers: int
    origin: int
    attempt: int
    incarnation: int
    portions: int = 0  # the origin of portion 0; 0: work is not leased
    warm_start: int = 0  # the clock at which all trainers but the first begin


class TimeSpent(msgspec.Struct):
    """Where the time of a trainer went, in seconds."""

    compute: float
    pull: float
    push: float
    wait: float
    serialise: float


class Leave(msgspec.Struct):
    """LEAVE: a trainer is done, or has failed."""

    seconds: TimeSpent
    failed: str | None = None  # its error
    report: Any = None  # its last one: see `telemetry/reports.py`


class Reserve(msgspec.Struct):
    """RESERVE: a caller of an open run takes numbers of trainers, the same ones again under the same name."""

    run: int
    name: str
    count: int


class Reserved(msgspec.Struct):
    """The answer to RESERVE: the first number."""

    first: int


class Peek(msgspec.Struct):
    """PEEK: how a trainer stands, asked by another party."""

    run: int
    trainer: int


class TrainerStanding(msgspec.Struct):
    """The answer to PEEK."""

    incarnation: int | None  # None: it has not joined yet
    state: str  # joined, lost, left or expected
    stopped: str | None  # why the run was stopped


class OriginRequest(msgspec.Struct):
    """ORIGIN: a client in a Dask task asks under which number its ops count."""

    task: Any  # its key: see `encode_key` of `coordination/origins.py`
    run: int  # of the task: which execution of it
    client: int  # how many clients the task had before this one


class OriginAnswer(msgspec.Struct):
    """Under which number the ops of a client in a Dask task count, and which execution of the task it is."""

    origin: int
    attempt: int


class LeasableBatches(NamedTuple):
    """Batches `first` to `end - 1` of a partition that has `batches` batches: the values of a portion."""

    number: int
    partition: int
    first: int
    end: int
    batches: int


class PartitionsAtHand(msgspec.Struct):
    """Which partitions of others a trainer has, and which it could not fetch."""

    have: list[int]
    without: list[int]


class LeaseRequest(msgspec.Struct, omit_defaults=True):
    """LEASE: news of a trainer's portions, and what it asks. The controller handles the fields in this order."""

    epoch: int
    declare: list[tuple[int, int]] | None = None  # (partition, batches): it begins, and holds no portion
    how: dict[str, int | None] | None = None  # epochs, batch_size and shuffle, which all trainers must have alike
    fetched: float | None = None  # seconds for a partition
    done: tuple[int, float] | None = None  # a portion, and seconds a batch
    at: tuple[int, int] | None = None  # a portion, and batches completed: is it to go on with it?
    next: PartitionsAtHand | None = None  # it asks for a portion
    report: Any = None  # as with a tick


class LeaseAnswer(msgspec.Struct, omit_defaults=True):
    """What a trainer is to work on next; each field is the reply to one field of the request."""

    wanted: bool | None = None  # to `at`: whether the trainer is to go on with the portion
    portion: LeasableBatches | None = None  # to `next`
    again: float | None = None  # seconds after which to ask again; without a portion, None: the epoch is over for it
    missing: tuple[str, bool, bool] | None = None  # why it may not go on: a `Missing` of `coordination/leases.py`
