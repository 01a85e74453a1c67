"""Snapshot: the state of one parameter server as typed, frozen values. Pages, metrics, terminals and drivers show it.

`Monitor` alone makes a `Status`. It is encoded once, where it leaves the scheduler, and decoded once in the driver, so
all readers see the same fields, the same words for states, and the same order: runs newest first, the time of a trainer
in the order of `TimeSplit`. Times called `when`, `began` or `time` are seconds since 1970; all other times are seconds.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from dps.engine.telemetry.rebalance_report import RebalancingStatus
from dps.engine.wire.structs import read_annotations

__all__ = [
    "NEARLY_FULL",
    "PARTS",
    "AdaptStatus",
    "CheckpointStatus",
    "Curve",
    "HeldRows",
    "HostStatus",
    "HotKey",
    "HotShare",
    "LastCheckpoint",
    "PortionsStatus",
    "RunPhase",
    "RunStatus",
    "ServerAnswer",
    "ServerPhase",
    "ServerStatus",
    "ShardMove",
    "Status",
    "Straggler",
    "TableStatus",
    "TableTraffic",
    "Throughput",
    "TimeSplit",
    "TrainerPhase",
    "TrainerStatus",
    "TrainerStrip",
    "Turnover",
]


class RunPhase(enum.StrEnum):
    """Whether a run goes on, and how it ended."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class TrainerPhase(enum.StrEnum):
    """What a trainer does."""

    RUNNING = "running"
    WAITING = "waiting"  # in a tick or a collective, for other trainers
    LOST = "lost"  # its connection broke, and it is not back
    LEFT = "left"  # it has ended its part of the run
    EXPECTED = "expected"  # it has not joined yet


class ServerPhase(enum.StrEnum):
    """Whether a server serves."""

    UP = "up"
    LEAVING = "leaving"  # it serves, and its shards move to other servers
    GONE = "gone"  # it is starting, silent, or lost


class TimeSplit(msgspec.Struct, frozen=True, gc=False):
    """Where a trainer's time goes: seconds, or shares from 0 to 1. All pictures have the order of the fields."""

    compute: float = 0.0
    pull: float = 0.0
    wait: float = 0.0  # for other trainers
    push: float = 0.0
    serialise: float = 0.0  # requests and answers to bytes and back

    @property
    def total(self) -> float:
        return self.compute + self.pull + self.wait + self.push + self.serialise


PARTS: tuple[str, ...] = TimeSplit.__struct_fields__


class TrainerStatus(msgspec.Struct, frozen=True, gc=False):
    """One trainer of a run. Rates and shares are of the last 10 s; None if no report of this trainer is kept."""

    number: int
    state: TrainerPhase
    clock: int  # iterations completed
    planned: int = 0  # iterations that it will complete; 0: unknown
    where: str = ""  # its worker
    attempts: int = 0  # times that it was begun
    age: float | None = None  # seconds since its last sign of life
    host: str | None = None  # its machine
    split: TimeSplit | None = None  # shares of its time
    rate: float | None = None  # clocks per second
    keys_rate: float | None = None  # keys pulled and pushed per second
    bytes_rate: float | None = None  # bytes received and sent per second
    rows_rate: float | None = None  # rows of data per second
    step: float | None = None  # seconds of work for a clock, waits not counted
    cpu: float | None = None  # share of its own work in which its thread ran
    starved: float | None = None  # share of its time in which its thread waited for a processor
    spent: TimeSplit | None = None  # seconds in the whole run, once it has left


class TrainerStrip(msgspec.Struct, frozen=True):
    """The recent reports of one trainer, as columns."""

    trainer: int
    time: list[float]  # when each report ended
    seconds: list[float]  # how long each one lasted
    compute: list[float]  # shares of that time, as in `TimeSplit`
    pull: list[float]
    wait: list[float]
    push: list[float]
    serialise: list[float]

    def part(self, name: str) -> list[float]:
        values: list[float] = getattr(self, name)
        return values


class Straggler(msgspec.Struct, frozen=True):
    """A trainer, server or machine that slows a run down, with the reason and the remedy."""

    kind: str  # kind as in `dps.engine.telemetry.findings.KINDS`
    trainer: int | None = None  # the party: one of trainer, server and host
    server: int | None = None
    host: str | None = None
    factor: float | None = None  # how many times slower than the median of the others
    since: float = 0.0  # when it began, in seconds since 1970
    until: float | None = None  # when it ended; None: it still holds
    share: float | None = None  # part of its time that is lost; of a server, part of the trainers' time
    why: str = ""
    remedy: str = ""
    run: int = 0


class Curve(msgspec.Struct, frozen=True):
    """A metric that trainers log, over time and clock."""

    time: list[float] = msgspec.field(default_factory=list)  # seconds since 1970
    clock: list[float] = msgspec.field(default_factory=list)  # the mean of all trainers' clocks
    value: list[float] = msgspec.field(default_factory=list)  # the mean of all trainers' values


class PortionsStatus(msgspec.Struct, frozen=True):
    """The portions of work that are leased to trainers."""

    left: int  # in the earliest epoch under way; the other counts are of the whole run
    done: int
    twice: int  # done by two trainers
    moved: int  # done by another trainer than the one to which the data was given


class RunStatus(msgspec.Struct, frozen=True):
    """One run and its trainers. Of a run with very many trainers no reports are kept, and what follows from them is
    empty."""

    run: int  # its number
    state: RunPhase
    staleness: float | None  # clocks that a trainer which begins one may be ahead of the slowest; None: no bound
    auto: bool  # the staleness is set automatically
    began: float  # seconds since 1970
    seconds: float  # time that it has lasted
    stopped: str | None  # why its trainers were stopped, by an error or because it was closed
    stopped_by: str | None  # the name of that error's class
    trainers: list[TrainerStatus]
    elastic: bool = False  # trainers come and go
    minimum: int = 0  # clock of the slowest trainer that has not left
    totals: TimeSplit | None = None  # seconds of all trainers in the whole run
    stragglers: list[Straggler] = msgspec.field(default_factory=list)  # what matters most comes first
    reassign: bool | str = False  # whether trainers help each other; "auto": not before one of them is slow
    portions: PortionsStatus | None = None  # where `reassign` is or was something else than False
    metrics: dict[str, Curve] = msgspec.field(default_factory=dict)
    logged: dict[str, list[float | None]] = msgspec.field(default_factory=dict)  # last value of each trainer
    strips: list[TrainerStrip] = msgspec.field(default_factory=list)  # strip charts of some trainers

    @property
    def error(self) -> str | None:
        """Why it failed."""
        return self.stopped if self.state is RunPhase.FAILED else None

    @property
    def joined(self) -> int:
        """How many of its trainers have ever joined."""
        return sum(trainer.state is not TrainerPhase.EXPECTED for trainer in self.trainers)

    @property
    def clocks(self) -> list[int]:
        """The clock of each trainer."""
        return [trainer.clock for trainer in self.trainers]

    @property
    def attempts(self) -> list[int]:
        """How often each trainer was begun."""
        return [trainer.attempts for trainer in self.trainers]

    @property
    def maximum(self) -> int:
        """The clock of the fastest trainer."""
        return max((trainer.clock for trainer in self.trainers), default=0)

    @property
    def planned(self) -> int:
        """The largest number of clocks that a trainer will complete, as far as is known; 0: unknown."""
        return max((trainer.planned for trainer in self.trainers), default=0)

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.state is not RunPhase.RUNNING

    def in_state(self, *states: TrainerPhase) -> list[int]:
        """The numbers of the trainers in one of these states."""
        return [trainer.number for trainer in self.trainers if trainer.state in states]

    @property
    def connected(self) -> list[int]:
        """The numbers of the trainers that run or wait."""
        return self.in_state(TrainerPhase.RUNNING, TrainerPhase.WAITING)

    @property
    def waiting(self) -> list[int]:
        """The numbers of the trainers that wait for others."""
        return self.in_state(TrainerPhase.WAITING)

    @property
    def lost(self) -> list[int]:
        """The numbers of the trainers whose connection broke."""
        return self.in_state(TrainerPhase.LOST)

    @property
    def left(self) -> list[int]:
        """The numbers of the trainers that have ended their part."""
        return self.in_state(TrainerPhase.LEFT)

    def __repr__(self) -> str:
        clocks = f"clocks {self.minimum} to {self.maximum}" if self.trainers else "no trainers"
        return f"<RunStatus {self.run}: {self.state}, trainers: {len(self.trainers)}, {clocks}>"


NEARLY_FULL = 0.85  # `full` of a turnover from which on the coldest rows are collected, and an event and a log warn


class Turnover(msgspec.Struct, frozen=True, gc=False):
    """The rows of a table that came and went since it was made; rates are differences of two of them."""

    full: float = 0.0  # share of its rows that the fullest shard has, of those for which max_bytes= is room
    evicted: int = 0  # rows that went, because the budget was full
    expired: int = 0  # rows that went, because they were not used
    refused: int = 0  # requests that the budget had no room for
    admitted: int = 0  # rows that were born after they had waited
    dropped: int = 0  # values that were pushed to keys without a row, and changed nothing
    waiting: int = 0  # keys that wait for their rows now
    spilled: int = 0  # rows that are in files of servers now
    brought: int = 0  # rows that have come back from there
    spill_bytes: int = 0  # of these files
    written: int = 0  # rows that were written to them, with those that were moved in them

    @classmethod
    def together(cls, parts: Sequence[Turnover]) -> Turnover | None:
        """That of a table, from those of its servers; None where no server tells any."""
        if not parts:
            return None
        full, *columns = zip(*map(msgspec.structs.astuple, parts), strict=True)
        return cls(max(full), *map(sum, columns))


class HeldRows(msgspec.Struct, frozen=True):
    """What one server holds of a table."""

    rows: int  # rows of the shards of which it is the primary
    bytes: int  # size of all its replicas
    shards: list[int] = msgspec.field(default_factory=list)  # shards of which it is the primary
    copies: list[int] = msgspec.field(default_factory=list)  # shards of which it is a backup
    kept: int = 0  # of the bytes, those in which no row is now: deleted rows have left them, or they wait for new rows
    turnover: Turnover | None = None  # of the shards of which it is the primary; None: the table's rows stay


class ShardMove(msgspec.Struct, frozen=True):
    """A shard on its way to another server."""

    table: str
    shard: int
    to: int  # the number of that server
    bytes: int  # sent so far
    of: int  # bytes in all


class ServerStatus(msgspec.Struct, frozen=True):
    """One server. Rates and shares are of the last seconds."""

    number: int
    worker: str  # the address of its Dask worker
    state: ServerPhase
    address: tuple[str, int] | None = None  # where it listens
    key: str = ""  # key of its actor, in Dask
    host: str | None = None  # its machine
    cpu: float = 0.0  # processors that its process uses
    busy: float = 0.0  # share of its time that the serving thread is at work
    polled: float = 0.0  # share of its time that this thread polls, see the setting `dps.server-polling`
    starved: float = 0.0  # share of its time that this thread waits for a processor
    memory: int = 0  # bytes
    lag: float = 0.0  # how late its event loop was at worst
    connections: int = 0
    requests_rate: float = 0.0  # per second
    keys_rate: float = 0.0  # per second
    bytes_rate: float = 0.0  # per second
    p50: float = 0.0  # seconds for a request: the median
    p99: float = 0.0  # seconds for a request: the 99th percentile
    unconfirmed: int = 0  # ops that the backups have not confirmed
    behind: float = 0.0  # seconds since the oldest of them was sent
    rows: int = 0  # rows of the shards of which it is the primary
    bytes: int = 0  # size of all its replicas
    taken: int = 0  # bytes that its tables take, as its budget counts them
    budget: int = 0  # bytes that its tables may take, see the setting `dps.memory`; 0: there is no limit
    shards: int = 0  # number of shards of which it is the primary
    copies: int = 0  # number of shards of which it is a backup
    # What the server itself answered to :meth:`dps.ParameterServer.status`; None if it did not answer.
    tables: dict[str, HeldRows] | None = None
    requests: int | None = None  # since it began
    moves: list[ShardMove] = msgspec.field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return self.state is not ServerPhase.GONE

    @property
    def full(self) -> float:
        """Share of its budget that its tables take; 0 without one."""
        return self.taken / self.budget if self.budget else 0.0


class ServerAnswer(msgspec.Struct, frozen=True):
    """What a server answers when it is asked for its state."""

    server: int  # its number
    epoch: int  # epoch of the placement that it has
    requests: int  # since it began
    tables: dict[str, HeldRows]
    connections: int
    unconfirmed: int  # ops that the backups have not confirmed
    moves: list[ShardMove]


class HotKey(msgspec.Struct, frozen=True):
    """A key that is pulled and pushed more often than others, as a sample of the last seconds has it."""

    key: int
    rate: float  # accesses per second, at least
    share: float  # of the accesses of its table, at least
    error: float = 0.0  # the share is at most this much larger


class HotShare(msgspec.Struct, frozen=True):
    """The share of a table's accesses that its hottest keys have together: the larger, the more skewed is the load."""

    keys: int  # how many of the hottest keys
    share: float  # at least
    error: float = 0.0  # the share is at most this much larger


class TableTraffic(msgspec.Struct, frozen=True):
    """Bytes between clients and servers for one table, since its servers began, but for those of servers that are gone.

    A request and its answer have a header of 64 bytes each. An answer without values is an acknowledgement: its header
    is all that it has.
    """

    keys: int = 0  # to servers: which rows are meant
    pushed: int = 0  # to servers: values
    pulled: int = 0  # to clients: values
    headers: int = 0  # to servers; and as many to clients

    @property
    def sent(self) -> int:
        """All bytes to servers."""
        return self.keys + self.pushed + self.headers

    @property
    def received(self) -> int:
        """All bytes from servers."""
        return self.pulled + self.headers


class TableStatus(msgspec.Struct, frozen=True):
    """One table. Rates are of the last seconds."""

    name: str
    id: int
    keys: int | None  # number of keys of a dense table, 0 to keys - 1; None: any int64 is a key
    dim: int  # values in a row
    dtype: str
    optimizer: str  # text of the optimizer as Python writes it
    copies: int  # servers that hold each row
    chains: list[list[int]]  # the servers of each shard, the primary first
    joiners: list[int | None]  # the server to which each shard moves
    rows: int = 0
    bytes: int = 0  # on all servers, copies included
    requests_rate: float = 0.0  # per second
    keys_rate: float = 0.0  # per second
    bytes_rate: float = 0.0  # per second
    p50: float = 0.0  # seconds for a request: the median
    p99: float = 0.0  # seconds for a request: the 99th percentile
    load: list[float] = msgspec.field(default_factory=list)  # keys per second of each shard
    hot_keys: list[HotKey] = msgspec.field(default_factory=list)  # at most 16, the hottest first
    hot_shares: list[HotShare] = msgspec.field(default_factory=list)  # of the 1, 8 and 64 hottest keys
    turnover: Turnover | None = None  # of a table with admit=, expire= or max_bytes=
    staleness: int | None = None  # of trainers' reads, where it may be less than their run allows
    traffic: TableTraffic = TableTraffic()
    backup_share: float | None = None  # of all requests to read, those that backups have answered; None: none may

    @property
    def shards(self) -> int:
        """The number of its shards."""
        return len(self.chains)

    @property
    def owners(self) -> list[int | None]:
        """The primary of each shard; None if the last replica is lost."""
        return [chain[0] if chain else None for chain in self.chains]

    @property
    def lost(self) -> int:
        """Shards of which the last replica is lost."""
        return sum(not chain for chain in self.chains)


class HostStatus(msgspec.Struct, frozen=True):
    """How loaded a machine is, as a mean over the last 3 s, and what runs on it."""

    host: str
    cores: int
    tasks: float  # threads of all programs that run or are ready to run
    busy: float  # share of its processors' time that is in use
    stolen: float = 0.0  # share that a hypervisor gives to other machines
    overloaded: bool = False  # it slows what runs on it
    servers: list[int] = msgspec.field(default_factory=list)
    trainers: int = 0


class Throughput(msgspec.Struct, frozen=True):
    """The rates of all servers together over the last minutes, as columns."""

    time: list[float] = msgspec.field(default_factory=list)
    requests: list[float] = msgspec.field(default_factory=list)  # per second
    keys: list[float] = msgspec.field(default_factory=list)  # per second
    bytes: list[float] = msgspec.field(default_factory=list)  # per second
    p50: list[float] = msgspec.field(default_factory=list)  # seconds for a request, of the slowest server
    p99: list[float] = msgspec.field(default_factory=list)


class LastCheckpoint(msgspec.Struct, frozen=True):
    """The last checkpoint that was taken."""

    name: str
    url: str
    clock: int | None
    rows: int
    bytes: int
    parent: str | None
    seconds: float  # time that it took
    when: float  # seconds since 1970


class CheckpointStatus(msgspec.Struct, frozen=True):
    """The last checkpoint, and the error of the last attempt if that failed."""

    last: LastCheckpoint | None = None
    error: str | None = None


class AdaptStatus(msgspec.Struct, frozen=True):
    """The rule by which the number of servers follows the load, and its last decision."""

    servers: int  # number of servers that are up
    minimum: int
    maximum: int | None  # None: as many as there are workers
    why: str
    text: str  # all of it in one line
    interval: float | None = None  # seconds between two decisions
    wait_count: int | None = None  # decisions that must find too many servers before one leaves
    busy: float | None = None  # share of its time that a server may be at work
    memory: int | None = None  # bytes that a server may use
    workers: int | None = None  # on which servers run or could start; None: the last look has led to no decision
    workers_wanted: int | None = None  # how many of them there should be


class Status(msgspec.Struct, frozen=True):
    """The state of one parameter server at one moment.

    Examples
    --------
    >>> Status(name="dps", time=1_795_000_000.0)
    <Status of 'dps': 0 of 0 servers up, tables: 0, rows: 0, runs going on: 0>
    """

    name: str
    time: float  # seconds since 1970
    epoch: int = 0  # epoch of the placement
    wanted: int = 0  # servers that there should be
    failures: int = 0  # servers that were lost or fell silent so far
    runs: Sequence[RunStatus] = msgspec.field(default_factory=list)  # the newest first
    servers: list[ServerStatus] = msgspec.field(default_factory=list)
    tables: dict[str, TableStatus] = msgspec.field(default_factory=dict)
    hosts: list[HostStatus] = msgspec.field(default_factory=list)
    throughput: Throughput = msgspec.field(default_factory=Throughput)
    events: list[tuple[float, str]] = msgspec.field(default_factory=list)  # when, what; the newest last
    news: list[tuple[float, str]] = msgspec.field(default_factory=list)  # the events that still matter
    checkpoints: CheckpointStatus = msgspec.field(default_factory=CheckpointStatus)
    adapt: AdaptStatus | None = None
    rebalancing: RebalancingStatus | None = None

    @property
    def up(self) -> int:
        """The number of servers that serve and stay."""
        return sum(server.state is ServerPhase.UP for server in self.servers)

    @property
    def moves(self) -> int:
        """Shards on their way to another server."""
        return sum(joiner is not None for table in self.tables.values() for joiner in table.joiners)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(server.rows for server in self.servers)

    @property
    def bytes(self) -> int:
        """Bytes of these rows on all servers, copies included."""
        return sum(server.bytes for server in self.servers)

    @property
    def stragglers(self) -> list[Straggler]:
        """The parties that slow a run down."""
        return [straggler for run in self.runs for straggler in run.stragglers]

    @property
    def current_run(self) -> RunStatus | None:
        """The newest run that goes on, or the newest one if all are over; None if there was none."""
        running = (run for run in self.runs if run.state is RunPhase.RUNNING)
        return next(running, self.runs[0] if self.runs else None)

    def to_dict(self) -> dict[str, object]:
        """The same as plain values, as JSON has them.

        Examples
        --------
        >>> Status(name="dps", time=1_795_000_000.0).to_dict()["servers"]
        []
        """
        values: dict[str, object] = msgspec.to_builtins(self)
        return values

    def __repr__(self) -> str:
        going = sum(not run.over for run in self.runs)
        return (
            f"<Status of {self.name!r}: {self.up} of {self.wanted} servers up, tables: {len(self.tables)}, "
            f"rows: {self.rows:,}, runs going on: {going}>"
        )


read_annotations(globals())
