"""The messages of the parties, each a `msgspec.Struct`, and how they become bytes. Pure.

Four groups, by what they are about. Those of runs, of membership and of placement travel in the body of the frame of
the same kind, as JSON with the names of their fields: `encode` and `decode` make bytes of them, and check them.
`controller/runs.py`, `controller/work_leases.py` and `controller/failover.py` say what each is for. Those of functions
stand beside rows, as MessagePack. Those of drivers go over Dask's control plane as MessagePack, as the `Status` of
`telemetry/snapshot.py` does; `controller/verbs.py` decodes and checks their requests.

Each message about shards has the epoch of the newest placement that the server has adopted, because the controller
takes no notice of what a server says of an earlier placement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from dps.engine.wire import frames
from dps.engine.wire.frames import padded
from dps.engine.wire.structs import read_annotations
from dps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = [
    "ALONE",
    "PREPARES",
    "READS",
    "AdaptRule",
    "CaughtUp",
    "CheckpointOptions",
    "CheckpointSchedule",
    "DescribedServer",
    "DescribedTable",
    "Description",
    "FunctionCall",
    "InterruptedRun",
    "Join",
    "Joined",
    "LeasableBatches",
    "LeaseAnswer",
    "LeaseRequest",
    "Leave",
    "Located",
    "OriginAnswer",
    "OriginRequest",
    "PartAnswer",
    "PartitionsAtHand",
    "Peek",
    "Placement",
    "Reserve",
    "Reserved",
    "RestoreAnswer",
    "RestoreRequest",
    "Route",
    "SavedRun",
    "Serve",
    "ServerFailed",
    "ShardPlace",
    "Shards",
    "SteppedDown",
    "Suspect",
    "TimeSpent",
    "TrainerStanding",
    "decode",
    "decode_parts",
    "encode",
    "encode_parts",
]

M = TypeVar("M", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    return frames.encode_json(msgspec.to_builtins(message, str_keys=True))


def decode(kind: type[M], body: Buffer) -> M:
    """The message of that kind in the body of a frame. Raises ProtocolError, which says which field is wrong."""
    value = frames.decode_json(body)
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:  # ValueError: a name that is no Unicode
        raise ProtocolError(f"a {kind.__name__} that cannot be read: {error}; it is {value!r:.200}") from None


# ---- Runs: what trainers and the controller tell each other beside ticks and collectives


class Join(msgspec.Struct):
    """JOIN: a trainer joins its run, or joins again on a new connection."""

    run: int
    trainer: int
    incarnation: int | None  # None: the next one, by the controller's count
    where: str = ""  # for messages: host, worker or process
    joins: int = 0  # how often this incarnation has joined before
    attempt: int = -1  # the one that a controller has counted this incarnation as; -1: none has yet
    clock: int = 0  # iterations that it has completed


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
    grace: float = 0.0  # seconds for which the trainer waits for another scheduler when this one dies
    elastic: bool = False  # trainers come and go, so none waits for another, also not before it reads


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
    run: int  # number of the execution of the task
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
    report: Any = None  # report as with a tick
    peer: str | None = None  # with `declare`: where other trainers fetch its partitions, "host:port"


class LeaseAnswer(msgspec.Struct, omit_defaults=True):
    """What a trainer is to work on next; each field is the reply to one field of the request."""

    wanted: bool | None = None  # to `at`: whether the trainer is to go on with the portion
    portion: LeasableBatches | None = None  # to `next`
    again: float | None = None  # seconds after which to ask again; without a portion, None: the epoch is over for it
    missing: tuple[str, bool, bool] | None = None  # why it may not go on: a `Missing` of `coordination/leases.py`
    peer: str | None = None  # with a `portion` of another trainer: where that one lends its partitions
    declare: bool = False  # it is to ask again, with `declare`, because this controller does not know what it has said


# ---- Membership: what servers tell the controller beside heartbeats

# Place in a list; a negative one would count from the list's end.
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]


# Shards by the numbers of their tables and their own, as servers that are actors answer.
Shards: TypeAlias = list[tuple[int, int]]


class Serve(msgspec.Struct, frozen=True):
    """SERVE: a server is up, and listens there."""

    server: int  # its number
    host: str
    port: Port
    follows: tuple[int, str] = (0, "")  # the controller that it follows: see `coordination/journal.py`


class CaughtUp(msgspec.Struct, frozen=True):
    """CAUGHT_UP: a joiner has every row and op of a shard that its feeder has."""

    table: str
    shard: Index
    server: int  # the joiner's number
    epoch: int


class SteppedDown(msgspec.Struct, frozen=True):
    """STEPPED_DOWN: a primary takes no more requests, and all replicas of its shard are equal."""

    table: str
    shard: Index
    epoch: int


class FullServers(msgspec.Struct, frozen=True):
    """The answer to a BEAT, where there are any: the servers whose tables take nearly all of their ``dps.memory``."""

    servers: list[int]  # their numbers


class Suspect(msgspec.Struct, frozen=True):
    """SUSPECT: a server takes no ops of these shards, or has no replica of them."""

    server: int  # its number; it may be the sender's own
    shards: list[tuple[str, Index]]  # table and shard
    why: str
    epoch: int


class ServerFailed(msgspec.Struct, frozen=True):
    """FAILED: a server has ended itself, because a change of its replicas broke off in the middle."""

    server: int  # its number
    why: str


# ---- Placement, what is where: PLACE to servers, and the answer to ROUTE for clients

# Address of a machine: host and port.
Address: TypeAlias = tuple[str, int]


class ShardPlace(msgspec.Struct, frozen=True, array_like=True):
    """Which servers hold a shard, by their numbers."""

    chain: list[int]  # the primary first
    joiner: int | None  # server that is brought up to date, to be the last of the chain
    fences: list[int]  # epochs from which on each server in the chain, and the joiner, takes ops
    stepping_down: bool  # the primary takes no more requests


class Placement(msgspec.Struct, frozen=True):
    """PLACE: where all shards are from this epoch on."""

    epoch: int
    servers: dict[int, Address]  # by their numbers: those that are up
    tables: dict[int, list[ShardPlace]]  # by their numbers


class Located(msgspec.Struct, frozen=True):
    """A table, and the primary of each of its shards."""

    spec: dict[str, Any]  # see TableSpec.to_dict
    owners: list[int]  # -1: the last copy is gone
    ancestors: list[int] = []  # the numbers that the table had before it was split or merged
    chains: list[list[int]] = []  # of each shard the servers that answer pulls; none, if primaries alone do


class Route(msgspec.Struct, frozen=True):
    """The answer to ROUTE: where a client sends its requests."""

    epoch: int
    servers: dict[int, Address]
    tables: list[Located]
    remedy: str  # for lost data, in words


# ---- Functions that run on servers: what a CALL says beside its rows, and what answers it

PADDING = b"\xc1"  # a byte that msgpack never uses as the beginning of a value
# Modes of a call: a READS call changes nothing, the effect of a PREPARES call waits for COMMIT, and the effect of an
# ALONE call counts at once.
READS = 0
PREPARES = 1
ALONE = 2


class FunctionCall(msgspec.Struct, array_like=True):
    """What a CALL says beside its rows. In the frame it stands behind the keys, padded."""

    function: str  # its number: see `Function.id`
    seed: int
    time: float
    start: int  # rows start to stop - 1 of a dense table, with RANGE
    stop: int
    arguments: bytes  # made by `values.encode_values`
    mode: int  # READS, PREPARES or ALONE; the last field, because it never ends with the byte of the padding

    def encode(self) -> bytes:
        text = msgspec.msgpack.encode(self)
        return text.ljust(padded(len(text)), PADDING)

    @classmethod
    def decode(cls, body: memoryview) -> FunctionCall:
        text = bytes(body).rstrip(PADDING)
        try:
            return msgspec.msgpack.decode(text, type=cls)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a call of a function that cannot be read: {error}") from None


class PartAnswer(msgspec.Struct, array_like=True):
    """What a function returned on one shard."""

    shard: int
    value: bytes  # made by `values.encode_values`
    done: bool  # its effect counts already: there is nothing to commit


def encode_parts(parts: list[PartAnswer]) -> bytes:
    """The body of the answer to a CALL."""
    text = msgspec.msgpack.encode(parts)
    return text.ljust(padded(len(text)), PADDING)


def decode_parts(body: bytes | bytearray | memoryview) -> list[PartAnswer]:
    try:
        return msgspec.msgpack.decode(bytes(body).rstrip(PADDING), type=list[PartAnswer])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the answer to a call of a function cannot be read: {error}") from None


# ---- Drivers: what they ask of the controller, and what it answers


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
    shards: dict[str, int] = {}  # table -> the number of shards with which it is restored, if that is another one


class RestoreAnswer(msgspec.Struct, frozen=True):
    name: str  # name of the checkpoint
    clock: int | None
    tables: list[str]
    passed: dict[str, str]  # newer checkpoints that cannot be read, each with the reason


class SavedRun(msgspec.Struct, frozen=True):
    """What a checkpoint knows of its run, so that another run may resume it."""

    trainers: int
    staleness: float | None  # None: no bound
    clock: int  # clock of the checkpoint
    origin: int  # origin of its first trainer
    # Checkpoints of earlier versions lack the rest.
    reassign: bool = False  # work was leased to trainers
    origins: list[list[int]] = []  # [first, how many] of those of all its ops
    partitions: list[list[int]] = []  # partitions of each trainer
    warm_start: int = 0
    vacant: int = 0  # how many of its trainers' seats, the last ones, were vacant when it began


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


class InterruptedRun(msgspec.Struct, frozen=True):
    """A run whose scheduler has died, as a driver needs it to begin its trainers anew."""

    number: int
    saved: SavedRun


class Description(msgspec.Struct, frozen=True):
    """A parameter server, for a driver that starts it or attaches to it."""

    name: str
    secret: str
    copies: int  # copies of a row, in tables that do not say how many
    adapt: AdaptRule | None  # None: the number of servers stays
    controller: tuple[str, int]  # where its endpoint listens
    term: int  # of the controller: higher than those of the controllers before, which have died
    grace: float  # seconds for which servers and trainers wait for another scheduler when this one dies
    servers: list[DescribedServer]
    tables: dict[str, DescribedTable]
    restored: SavedRun | None  # the run that may be resumed


read_annotations(globals())
