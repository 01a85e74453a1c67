"""Reports: what trainers and servers tell the controller about their work, on ticks and heartbeats they send anyway.

A trainer's report holds the differences to its report before; a server's report holds counts since the server began.
Both are JSON. Reports come over the network, so every field is checked here, and the code that adds reports up need
not check again. The types in this file say which fields there are, and their bounds; msgspec refuses all else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, NamedTuple, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from dps.engine.state.names import check_name
from dps.engine.telemetry.history import COLUMNS
from dps.engine.telemetry.hosts import HostLoad
from dps.engine.wire import frames
from dps.engine.wire.structs import read_annotations
from dps.errors import InputError, ProtocolError

__all__ = [
    "COLUMNS",
    "MAX_HOT_KEYS",
    "MAX_METRICS",
    "MAX_METRIC_VALUE",
    "HotCounts",
    "ReceivedReport",
    "ServerReport",
    "TableCounts",
    "TrainerReport",
    "WireReport",
    "quantile",
]

# Number of the first columns, which travel in the field "t"; the others are counts and travel in "n".
TIME_COLUMNS = 9
# Limits of a report: the number of metrics, and the absolute value of each.
MAX_METRICS = 32
MAX_METRIC_VALUE = 1e100
MAX_SERVERS = 4096
MAX_TABLES = 64
MAX_SHARDS = 1 << 12
MAX_HOT_KEYS = 16  # of a table
MAX_WAYS = 8  # in which rows of a table may travel
MAX_BUCKET = 63
MAX_CORES = 1 << 16
MAX_NUMBER = 1e18  # largest time or count: keeps the sums of many reports finite, and exact enough


T = TypeVar("T")
Amount = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Meta(ge=0, le=1)]
Four = Annotated[list[Amount], Meta(min_length=4, max_length=4)]
Counts = dict[Annotated[int, Meta(ge=0, le=MAX_SHARDS - 1)], Amount]
# Counts of times by their bucket, as `quantile` reads them.
Times = dict[Annotated[int, Meta(ge=0, le=MAX_BUCKET)], Amount]
Key = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# Number of a server or table.
Number = Annotated[int, Meta(ge=0, le=1 << 32)]
# host, cores, tasks, busy, stolen: as in `HostLoad`
Load = tuple[str, Annotated[int, Meta(ge=1, le=MAX_CORES)], Amount, Share, Share]
# Value of a metric: the count, the sum, and the last value.
Metric = tuple[Annotated[int, Meta(ge=0, le=10**18)], float, float | None]

# How the rows of a table travel as a trainer has found: what it has chosen, and what it has measured of each way.
Way = Annotated[str, Meta(max_length=100)]
WireReport = tuple[Way, Annotated[dict[Way, Way], Meta(max_length=MAX_WAYS)]]


class TrainerFields(msgspec.Struct, frozen=True):
    """A trainer's report as it travels, with names of one letter."""

    r: Annotated[int, Meta(ge=1, lt=1 << 53)]
    t: Annotated[list[Amount], Meta(min_length=TIME_COLUMNS, max_length=TIME_COLUMNS)]
    n: Annotated[list[Amount], Meta(min_length=len(COLUMNS) - TIME_COLUMNS, max_length=len(COLUMNS) - TIME_COLUMNS)]
    s: Annotated[dict[Number, tuple[Amount, Amount]], Meta(max_length=MAX_SERVERS)] = {}
    m: Annotated[dict[str, Metric], Meta(max_length=MAX_METRICS)] = {}
    h: Load | None = None
    w: Annotated[dict[str, WireReport], Meta(max_length=MAX_TABLES)] = {}


class HotCounts(TypedDict):
    """The hottest keys of a table on one server: of a sample of the accesses, which fades, as `SpaceSaving` counts."""

    accesses: Amount  # weight of the sample
    keys: Annotated[list[tuple[Key, Amount, Amount]], Meta(max_length=MAX_HOT_KEYS)]  # with its count and its error
    more: tuple[Amount, Amount, Amount]  # the keys that follow: how many, their counts, their errors


class TableCounts(TypedDict):
    """What a server has counted of one table since it began."""

    pull: Four  # requests, keys, bytes, seconds of service
    push: Four
    pull_ms: Annotated[Times, Meta(max_length=MAX_BUCKET + 1)]  # times of service
    push_ms: Annotated[Times, Meta(max_length=MAX_BUCKET + 1)]
    rows: Amount
    bytes: Amount
    shards: Annotated[Counts, Meta(max_length=MAX_SHARDS)]  # shard -> keys
    hot: HotCounts
    turnover: NotRequired[Annotated[list[Amount], Meta(min_length=11, max_length=11)]]  # in the order of `Turnover`
    as_backup: NotRequired[Amount]  # of the pulls, those that the server answered as a backup; left out: none
    traffic: NotRequired[Four]  # in the order of `TableTraffic`


class ServerCounts(TypedDict):
    """What a server has counted since it began, and the state of its process."""

    cpu: Amount  # seconds of its process
    busy: Amount  # seconds that its serving thread was at work
    polled: Amount  # seconds of processor time that it polled, which is no work
    starved: Amount  # seconds that this thread waited for a processor
    memory: Amount  # bytes
    lag: Amount  # seconds
    connections: Amount
    unconfirmed: Annotated[list[Amount], Meta(min_length=3, max_length=3)]  # ops, bytes, seconds of the oldest
    tables: Annotated[dict[Number, TableCounts], Meta(max_length=MAX_TABLES)]
    budget: NotRequired[Annotated[list[Amount], Meta(min_length=2, max_length=2)]]  # of dps.memory: taken, in all


class ServerFields(ServerCounts):
    """A server's report as it travels."""

    host: NotRequired[Load | None]


class ReceivedReport(ServerCounts):
    """A server's report that was checked."""

    host: HostLoad | None


class TrainerReport(NamedTuple):
    """What a trainer has done since its report before.

    Parameters
    ----------
    number : int
        Number of the report within one attempt at the trainer, from 1. A report that is sent again keeps its number.
    row : sequence of float
        In the order of `COLUMNS`; times in seconds.
    servers : mapping of int to (float, float)
        Server -> requests answered, seconds that the trainer was blocked waiting for it.
    metrics : mapping of str to (int, float, float or None)
        Name -> number of finite values, their sum, the last value (None if that was not finite).
    load : HostLoad, optional
        The load of the trainer's machine, as it was read last.
    wires : mapping of str to (str, mapping of str to (float, float))
        Table -> how its rows travel from now on, and what was found of each way: bytes a row, milliseconds a call.

    Examples
    --------
    >>> report = TrainerReport(1, [float(n) for n in range(17)], {0: (3.0, 0.25)}, {"loss": (2, 1.5, 0.5)})
    >>> TrainerReport.decode(report.encode()) == report
    True
    >>> TrainerReport.decode(b'{"r": 0}')
    Traceback (most recent call last):
    dps.errors.ProtocolError: a trainer's report: Expected `int` >= 1 - at `$.r`
    """

    number: int
    row: Sequence[float]
    servers: Mapping[int, tuple[float, float]]
    metrics: Mapping[str, tuple[int, float, float | None]]
    load: HostLoad | None = None
    wires: Mapping[str, WireReport] = MappingProxyType({})

    def asdict(self) -> dict[str, object]:
        """The report as plain values for JSON, with names of one letter."""
        row = [_short(x) for x in self.row]
        fields: dict[str, object] = {"r": self.number, "t": row[:TIME_COLUMNS], "n": row[TIME_COLUMNS:]}
        fields["s"] = {str(n): [_short(requests), _short(seconds)] for n, (requests, seconds) in self.servers.items()}
        fields |= {"m": {name: list(metric) for name, metric in self.metrics.items()}}
        fields |= {} if self.load is None else {"h": list(self.load)}
        return fields | {"w": dict(itertools.islice(self.wires.items(), MAX_TABLES))} if self.wires else fields

    def encode(self) -> bytes:
        return frames.encode_json(self.asdict())

    @classmethod
    def decode(cls, body: bytes | memoryview) -> TrainerReport:
        return cls.read(_json(body, "a trainer's report"))

    @classmethod
    def read(cls, value: object) -> TrainerReport:
        """Check JSON that has been parsed already; otherwise as :meth:`decode`."""
        what = "a trainer's report"
        fields = _checked(value, TrainerFields, what)
        for name, metric in fields.m.items():
            _check_name("metric", name, what)
            _check_metric(metric, f"{what}: metric {name!r:.100}")
        for table, (label, found) in fields.w.items():
            _check_name("table", table, what)
            for name in (label, *found):
                _check_name("wire", name, what)
        return cls(fields.r, fields.t + fields.n, fields.s, fields.m, _load(fields.h, what), fields.w)


class ServerReport:
    """Counts and times of a server's work since it began: a plain dict, which this class writes and checks."""

    @staticmethod
    def encode(report: Mapping[str, object]) -> bytes:
        return frames.encode_json(report)

    @staticmethod
    def decode(body: bytes | memoryview) -> ReceivedReport:
        """Read the body of a frame. Keys that are numbers (of tables, shards and buckets of times) become int again.

        Raises ProtocolError, which names what is wrong with it.
        """
        what = "a server's report"
        fields = _checked(_json(body, what), ServerFields, what)
        return ReceivedReport(**{**fields, "host": _load(fields.get("host"), what)})


def quantile(histogram: Mapping[int, float], q: float) -> float:
    """The time, in seconds, below which a share `q` of the times in a histogram lies; 0 if the histogram is empty.

    Bucket b counts times from 2^b to 2^(b + 1) microseconds. The logarithms of its times are taken to be spread evenly.

    Examples
    --------
    >>> quantile({3: 98, 10: 2}, 0.5) < 16e-6, 1024e-6 < quantile({3: 98, 10: 2}, 0.99) < 2048e-6
    (True, True)
    """
    left = q * sum(histogram.values())
    seconds = 0.0
    for bucket, count in sorted(histogram.items()):
        if count > 0:
            seconds = 2.0 ** (bucket + min(left / count, 1.0)) * 1e-6
            left -= count
            if left <= 0:
                break
    return seconds


def _short(number: float) -> float:
    """Round to a billionth, and make whole numbers int, because that takes fewer bytes in JSON."""
    return int(number) if number == int(number) else round(number, 9)


def _json(body: bytes | memoryview, what: str) -> object:
    try:
        value: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} is no JSON: {error}") from None
    return value


def _checked(value: object, schema: type[T], what: str) -> T:
    try:
        return msgspec.convert(value, schema, str_keys=True)  # because keys of JSON objects are text
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"{what}: {error}") from None


def _check_name(kind: str, name: str, what: str) -> None:
    try:
        check_name(kind, name)
    except InputError as error:
        raise ProtocolError(f"{what}: {error}") from None


def _load(load: Load | None, what: str) -> HostLoad | None:
    if load is None:
        return None
    _check_name("machine", load[0], what)
    return HostLoad(*load)


def _check_metric(metric: Metric, what: str) -> None:
    count, total, last = metric
    for name, x in (("sum", total), ("last value", 0.0 if last is None else last)):
        if not abs(x) <= MAX_METRIC_VALUE * max(1, count) * (1 + 1e-9):  # also of NaN
            raise ProtocolError(f"{what}: its {name} is a finite number, not {x!r:.100}")


read_annotations(globals())
