"""Reports: what trainers and servers tell the controller about their work, in ticks and beats that they send anyway.

A trainer's report is the difference to its report before; a server's counts since the server began. Both are JSON. What
is read here came over the network: every field is checked, so that whoever adds it up need not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dps.coordination.history import COLUMNS
from dps.coordination.hosts import Load
from dps.errors import InputError, ProtocolError
from dps.names import check_name
from dps.wire import frames

__all__ = ["COLUMNS", "MOST_METRIC", "MOST_METRICS", "ServerReport", "TrainerReport", "quantile"]

TIMES = 9  # the first of COLUMNS, in "t"; the rest, in "n", are counts
MOST_METRICS, MOST_METRIC = 32, 1e100  # metrics in a report; size of a value
MOST_SERVERS, MOST_TABLES, MOST_SHARDS, MOST_BUCKET = 4096, 64, 1 << 12, 63
MOST_CORES = 1 << 16
MOST = 1e18  # of any time or count: their sums stay finite, and exact enough


class TrainerReport(NamedTuple):
    """What a trainer has done since its report before.

    Parameters
    ----------
    number : int
        Of the report, from 1, within one attempt at the trainer. One that is sent twice has the same.
    row : sequence of float
        In the order of `COLUMNS`; times in seconds.
    servers : mapping of int to (float, float)
        Server -> requests answered, seconds spent blocked waiting for it.
    metrics : mapping of str to (int, float, float or None)
        Name -> how many finite values, their sum, the last value (None if that was not finite).
    load : Load, optional
        Of the machine that it runs on, as it was read last.

    Examples
    --------
    >>> report = TrainerReport(1, [float(n) for n in range(17)], {0: (3.0, 0.25)}, {"loss": (2, 1.5, 0.5)})
    >>> TrainerReport.decode(report.encode()) == report
    True
    >>> TrainerReport.decode(b'{"r": 1, "t": [1, -2]}')
    Traceback (most recent call last):
    dps.errors.ProtocolError: a trainer's report: t has 2 numbers, not 9
    """

    number: int
    row: Sequence[float]
    servers: Mapping[int, tuple[float, float]]
    metrics: Mapping[str, tuple[int, float, float | None]]
    load: Load | None = None

    def asdict(self) -> dict[str, Any]:
        """As it travels."""
        row = [_short(x) for x in self.row]
        about: dict[str, Any] = {"r": self.number, "t": row[:TIMES], "n": row[TIMES:]}
        about["s"] = {str(n): [_short(requests), _short(seconds)] for n, (requests, seconds) in self.servers.items()}
        about |= {"m": {name: list(metric) for name, metric in self.metrics.items()}}
        return about if self.load is None else about | {"h": list(self.load)}

    def encode(self) -> bytes:
        """The body of a frame."""
        return frames.encode_json(self.asdict())

    @classmethod
    def decode(cls, body: Any) -> TrainerReport:
        """From the body of a frame.

        Raises
        ------
        ProtocolError
            Names what is wrong with it.
        """
        return cls.read(frames.decode_json(body))

    @classmethod
    def read(cls, value: Any) -> TrainerReport:
        """As :meth:`decode`, of JSON that has been read already."""
        what = "a trainer's report"
        about = _mapping(value, what, 16)
        number = about.get("r")
        if type(number) is not int or not 1 <= number < 1 << 53:
            raise ProtocolError(f"{what}: r is its number, 1 or more, not {number!r:.100}")
        row = _row(about.get("t"), TIMES, f"{what}: t") + _row(about.get("n"), len(COLUMNS) - TIMES, f"{what}: n")
        servers: dict[int, tuple[float, float]] = {}
        for name, pair in _mapping(about.get("s", {}), f"{what}: s", MOST_SERVERS).items():
            requests, seconds = _row(pair, 2, f"{what}: server {name!r:.100}")
            servers[_whole(name, f"{what}: a server", 1 << 32)] = requests, seconds
        metrics = {}
        for name, metric in _mapping(about.get("m", {}), f"{what}: m", MOST_METRICS).items():
            metrics[_named(name, what)] = _metric(metric, f"{what}: metric {name!r:.100}")
        return cls(number, row, servers, metrics, _load(about.get("h"), f"{what}: h"))


class ServerReport:
    """What a server has done since it began: a plain dict, here only written and checked.

    Examples
    --------
    >>> pulls = {"pull": [2, 20, 1600, 0.001], "push": [0, 0, 0, 0.0], "rows": 10, "bytes": 800, "shards": {0: 20}}
    >>> about = {"cpu": 1.5, "busy": 1.0, "starved": 0.5, "memory": 1 << 20, "lag": 0.01, "connections": 2}
    >>> about |= {"unconfirmed": [0, 0, 0.0], "queue": [9, 3, 1, 640, 0]}
    >>> ServerReport.decode(ServerReport.encode({**about, "tables": {3: pulls}}))["tables"][3]["shards"]
    {0: 20.0}
    """

    @staticmethod
    def encode(report: Mapping[str, Any]) -> bytes:
        """The body of a frame."""
        return frames.encode_json(report)

    @staticmethod
    def decode(body: Any) -> dict[str, Any]:
        """From the body of a frame, with numbers as numbers: of tables, shards and buckets (of times) too.

        Raises
        ------
        ProtocolError
            Names what is wrong with it.
        """
        what = "a server's report"
        about = _mapping(frames.decode_json(body), what, 32)
        report: dict[str, Any] = {
            name: _number(about.get(name), f"{what}: {name}")
            for name in ("cpu", "busy", "starved", "memory", "lag", "connections")
        }
        report["host"] = _load(about.get("host"), f"{what}: host")
        report["unconfirmed"] = _row(about.get("unconfirmed"), 3, f"{what}: unconfirmed")
        report["queue"] = _row(about.get("queue"), 5, f"{what}: queue")
        tables = report["tables"] = {}
        for name, told in _mapping(about.get("tables", {}), f"{what}: tables", MOST_TABLES).items():
            where = f"{what}: table {name!r:.100}"
            told = _mapping(told, where, 32)
            table: dict[str, Any] = {verb: _row(told.get(verb), 4, f"{where}: {verb}") for verb in ("pull", "push")}
            table |= {kind: _number(told.get(kind), f"{where}: {kind}") for kind in ("rows", "bytes")}
            for kind, most in (("pull_ms", MOST_BUCKET), ("push_ms", MOST_BUCKET), ("shards", MOST_SHARDS - 1)):
                table[kind] = _counts(told.get(kind, {}), f"{where}: {kind}", most)
            tables[_whole(name, f"{what}: a table", 1 << 32)] = table
        return report


def quantile(histogram: Mapping[int, float], q: float) -> float:
    """The time, in seconds, below which a share `q` of the times in a histogram lies; 0 if there are none.

    Bucket b counts times from 2^b to 2^(b + 1) microseconds; they are taken to be spread evenly over it, by ratio.

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
    """To a billionth, and whole numbers without a point: fewer bytes."""
    return int(number) if number == int(number) else round(number, 9)


def _number(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MOST:  # also false of NaN
        raise ProtocolError(f"{what} is a number from 0 to {MOST:g}, not {value!r:.100}")
    return float(value)


def _row(value: Any, length: int, what: str) -> list[float]:
    if type(value) is not list:
        raise ProtocolError(f"{what} is a list of {length} numbers, not {value!r:.100}")
    if len(value) != length:
        raise ProtocolError(f"{what} has {len(value)} numbers, not {length}")
    return [_number(x, what) for x in value]


def _mapping(value: Any, what: str, most: int) -> dict[str, Any]:
    if type(value) is not dict:
        raise ProtocolError(f"{what} is an object, not {value!r:.100}")
    if len(value) > most:
        raise ProtocolError(f"{what} has {len(value)} entries; at most {most} are taken")
    return value


def _whole(name: str, what: str, most: int) -> int:
    """A number that is a key of a JSON object, and so a text."""
    if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= most):
        raise ProtocolError(f"{what} is a whole number from 0 to {most}, not {name!r:.100}")
    return int(name)


def _counts(value: Any, what: str, most: int) -> dict[int, float]:
    return {_whole(n, what, most): _number(x, what) for n, x in _mapping(value, what, most + 1).items()}


def _named(name: str, what: str) -> str:
    try:
        return check_name("metric", name)
    except InputError as error:
        raise ProtocolError(f"{what}: {error}") from None


def _host(name: Any, what: str) -> str:
    try:
        return check_name("machine", name)
    except InputError as error:
        raise ProtocolError(f"{what}: {error}") from None


def _load(value: Any, what: str) -> Load | None:
    """The load of a machine; None where there is none."""
    if value is None:
        return None
    if type(value) is not list or len(value) != len(Load._fields):
        raise ProtocolError(f"{what} is [{', '.join(Load._fields)}], not {value!r:.100}")
    cores, tasks, busy, stolen = (_number(x, what) for x in value[1:])
    if type(value[1]) is not int or not 1 <= cores <= MOST_CORES or max(busy, stolen) > 1:
        raise ProtocolError(f"{what}: {cores:g} cores, {busy:g} of them busy and {stolen:g} stolen, cannot be")
    return Load(_host(value[0], what), int(cores), tasks, busy, stolen)


def _metric(value: Any, what: str) -> tuple[int, float, float | None]:
    if type(value) is not list or len(value) != 3:
        raise ProtocolError(f"{what} is [count, sum, last], not {value!r:.100}")
    count, total, last = value
    if type(count) is not int or not 0 <= count <= MOST:
        raise ProtocolError(f"{what}: its count is a whole number, 0 or more, not {count!r:.100}")
    for name, x in (("sum", total), ("last value", 0.0 if last is None else last)):
        if type(x) not in (int, float) or not abs(x) <= MOST_METRIC * max(1, count) * (1 + 1e-9):
            raise ProtocolError(f"{what}: its {name} is a finite number, not {x!r:.100}")
    return count, float(total), None if last is None else float(last)
