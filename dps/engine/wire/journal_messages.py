"""Messages of the journal: what a controller and the servers that keep its records tell each other.

`coordination/journal.py` has the rules. RECORD travels from the controller to a server, on the connection that the
server has made, and RECORDED answers it. `SessionRecord` is what a record says; servers read its epoch only. GRANT
travels between servers, while they hear of no controller.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dps.engine.wire.messages import AdaptRule, CheckpointSchedule, ShardPlace
from dps.engine.wire.structs import read_annotations

__all__ = [
    "GrantAsked",
    "Granted",
    "KeptRecord",
    "Recorded",
    "RecordedRun",
    "RecordedTable",
    "ReturnedServer",
    "SessionRecord",
]

# By term and name: a `Ballot` of `coordination/journal.py`.
Standing = tuple[int, str]


class KeptRecord(msgspec.Struct, frozen=True):
    """RECORD: a decision that a server is to keep; and what a server has, where a controller takes over."""

    ballot: Standing
    number: int
    holders: list[int]  # the numbers of the servers that keep it
    before: list[int]  # of those that kept the record before
    content: bytes  # a `SessionRecord`, encoded


class Recorded(msgspec.Struct, frozen=True):
    """RECORDED: whether a server keeps a record. It does not if it follows another controller."""

    server: int  # its number
    ballot: Standing
    number: int  # of the record
    kept: bool


class GrantAsked(msgspec.Struct, frozen=True):
    """GRANT: a server with the placement of that epoch asks whether it may go on without a controller."""

    server: int  # its number
    epoch: int | None  # None: it needs its grant no more


class Granted(msgspec.Struct, frozen=True):
    """The answer to GRANT."""

    server: int  # the number of the one that answers
    granted: bool
    kept: KeptRecord | None  # what it keeps, without the content


class ReturnedServer(msgspec.Struct, frozen=True):
    """What a server that has outlived its scheduler tells the next one, over Dask's control plane."""

    number: int
    worker: str  # the address of the worker with which its process has joined
    secrets: tuple[str, str]  # those that clients and servers prove
    followed: Standing  # the controller that it follows
    kept: KeptRecord | None  # the newest record that it keeps


class RecordedTable(msgspec.Struct, frozen=True):
    """A table, and where its shards are."""

    spec: dict[str, Any]  # see `TableSpec.to_dict`
    places: list[ShardPlace]
    ancestors: list[int]  # the numbers that the table had before it was split or merged


class RecordedRun(msgspec.Struct, frozen=True):
    """A run that goes on: what is decided about it. The clocks of its trainers are not: see `RecordContent`."""

    number: int
    trainers: int
    staleness: float | None  # None: no bound
    # The clock at which it began, because it resumed the run of a checkpoint. With `reassign=True`, one that all
    # trainers have reached: what was done since is done again, and counts once.
    start: int
    origin: int  # of trainer 0; those of the other trainers follow
    partitions: list[list[int]]  # of each trainer, by the driver's numbers
    elastic: bool
    warm_start: int
    portions: tuple[int, int]  # with `reassign=True`: the first origin of the portions, and how many; else (0, 0)
    rejoin: tuple[float, str] | None  # seconds for a lost trainer to be back, and the setting's name
    reserved: dict[str, tuple[int, int]]  # name of a caller -> its first trainer, how many
    attempts: dict[int, int]  # the latest attempt at each trainer, where `Run.presumed_attempt` says less
    left: list[int]  # trainers that are done; none of an elastic run, where no trainer waits for another
    vacant: int = 0  # how many of the trainers' seats, the last ones, were vacant when it began
    # Whether trainers of a run with portions help each other, because the next controller goes on with that.
    reassign: bool | str = True
    lends: bool = False  # its work is leased to trainers that fetch partitions from each other


class SessionRecord(msgspec.Struct, frozen=True):
    """Everything that a controller must know of a parameter server, beside what the servers tell it themselves."""

    name: str
    fingerprint: str  # of its secrets
    controller: tuple[str, int]  # where its endpoint listens
    copies: int  # copies of a row, in tables that do not say how many
    epoch: int  # of the placement
    wanted: int  # how many servers there are to be
    next_server: int  # lower numbers of servers may be used
    next_origin: int  # lower origins may be used
    addresses: dict[int, tuple[str, int]]  # where the servers listen, because those that come back late listen there
    tables: list[RecordedTable]
    runs: list[RecordedRun]  # those that go on
    functions: list[str]  # their numbers
    remedy: str  # for lost data, in words
    schedule: CheckpointSchedule | None
    adapt: AdaptRule | None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, content: bytes) -> SessionRecord:
        return msgspec.msgpack.decode(content, type=cls)


read_annotations(globals())
