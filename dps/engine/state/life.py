"""What a table asks of the life of its rows: when they are born, when they go, and how many bytes they may take. Pure.

``docs/design/rows.md`` is the design. A :class:`RowLife` is a part of the table's definition; the rules that choose the
rows that go are in `forgetting.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from dps.engine.core.shards.pending import LARGEST_SKETCHED, LARGEST_THRESHOLD
from dps.engine.core.shards.records import RECORD_BYTES
from dps.engine.state.own_ranks import EvictByFunction, evict_of
from dps.engine.state.recipes import Description, Recipe, converted, flag, from_dict, is_number, number
from dps.errors import InputError, InputTypeError

__all__ = ["EVICT", "FLAG_BYTES", "MAX_GONE", "NEVER", "AdmitByCount", "ExpireSmall", "ExpireUnused", "Expiry"]
__all__ += ["RowLife", "bytes_of", "bytes_within", "life_of", "record_columns", "rows_within", "seconds_of"]

SPILL = "spill"
EVICT = ("lru", "lfu", "norm", "refuse", SPILL)
NEVER = "never"  # the admission of a table whose set of rows is frozen
SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
SECONDS |= {"ms": 0.001, "d": 86400.0, "day": 86400.0, "w": 604800.0, "week": 604800.0}
BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
BYTES |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
SLOT_BYTES = 12 / 0.72  # of the index for a row: a slot, at the load of an index that has its size from the beginning
FLAG_BYTES = 6  # of a row: whether it is vacant, and its share of what is kept of rows that may go
MIN_SHARD_ROWS = 64  # of a shard: a smaller budget could not tell cold rows from others
WAITING_BYTES = {False: 6.0, True: 2.5}  # of a key that waits for its row, by whether it is counted approximately
MAX_WAITING = 1 << 24  # in a shard, because the counters of a shard travel to a new copy in one frame
GONE_BYTES = 9  # of a key that went and is remembered: the key, and why it went
MAX_GONE = 1 << 22  # in a shard, because they travel to a new copy in one frame


def _measured(value: object, label: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    """A number, or a text of a number and a unit, as a number of the smallest unit."""
    if is_number(value) and value > 0:
        return float(value)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value) if isinstance(value, str) else None
    unit = found.group(2).lower() if found else ""
    if found is None or (unit not in units and unit.removesuffix("s") not in units):
        raise InputError(f"{label} is {value!r} but must be a positive number, or a text such as {example}")
    return float(found.group(1)) * (units[unit] if unit in units else units[unit.removesuffix("s")])


def seconds_of(value: object, label: str) -> float:
    """Seconds, from a number or a text.

    >>> seconds_of("7 days", "after"), seconds_of("500 ms", "age")
    (604800.0, 0.5)
    """
    return _measured(value, label, SECONDS, "'7 days' or '12 h'")


def _seconds(value: object, label: str, default: object) -> float | None:
    return None if value is None else seconds_of(value, label)


def bytes_of(value: object, label: str) -> int:
    """Bytes, from a number or a text.

    >>> bytes_of("1 GiB", "max_bytes"), bytes_of(1e6, "max_bytes")
    (1073741824, 1000000)
    """
    return int(_measured(value, label, BYTES, "'1 GiB' or '500 MB'"))


def _used_by(value: object, label: str, default: object) -> str:
    if value not in ("push", "use"):
        raise InputError(f"{label} is {value!r} but must be 'push' or 'use'")
    return str(value)


@dataclasses.dataclass(frozen=True, repr=False)
class Expiry(Recipe):
    """Base of what ``expire=`` of :meth:`dps.ParameterServer.table` takes: which rows go by themselves."""

    after: float | str | None = converted(None, _seconds)

    @property
    def seconds(self) -> float | None:
        """How long a row stays after its last use; None: the rule counts clocks."""
        assert not isinstance(self.after, str)  # it was converted
        return self.after


@dataclasses.dataclass(frozen=True, repr=False)
class ExpireUnused(Expiry):
    """Rows go that were not used for a time, or for so many clocks of a run.

    A row never goes before its time. It goes within about a sixteenth of the time after that, because servers look at
    all rows bit by bit. A row that goes is as if it had never been: its next push begins from the initial value, with
    the optimizer's state of a new row.

    Parameters
    ----------
    after : str or float, optional
        ``"7 days"``, ``"12 h"``, or seconds.
    clocks : int, optional
        In place of `after`: iterations of the trainers, at least 1.
    by : {"push", "use"}
        Whether a pull of a row counts as its use, too. For all rules of the table, then; pulls by functions on servers
        and of ranges of keys do not count. A primary looks at its notes of pulls sixteen times in the time after which
        rows go; when it dies, its notes are lost, so a row may go early that was pulled only since then.

    Raises
    ------
    InputError
        Neither `after` nor `clocks` is given, or both are, or one of them is not positive.

    Examples
    --------
    >>> import dps
    >>> dps.ExpireUnused("7 days")
    ExpireUnused(after=604800.0)
    >>> dps.ExpireUnused(clocks=1000)
    ExpireUnused(clocks=1000)
    """

    clocks: int = number(0, least=0, whole=True)
    by: str = converted("push", _used_by)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.after is None) == (self.clocks == 0):
            raise InputError("ExpireUnused takes a time, such as '7 days', or clocks=, and one of them only")


@dataclasses.dataclass(frozen=True, repr=False)
class ExpireSmall(Expiry):
    """Rows go whose values are small, and that were not used for a time: the rows that an L1 penalty has made zero.

    Parameters
    ----------
    after : str or float
        How long a row stays all the same after its last use, ``"1 day"`` by default. The state of the optimizer goes
        with the row, so a row that is pushed to often should stay, although its values are small at the moment.
    norm : float
        The largest Euclidean norm of the values of a row that goes; 0 for rows whose values are all zero.

    Examples
    --------
    >>> import dps
    >>> dps.ExpireSmall("12 h", norm=1e-6)
    ExpireSmall(after=43200.0, norm=1e-06)
    """

    after: float | str | None = converted("1 day", _seconds)
    norm: float = number(0.0, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.after is None:
            raise InputError("ExpireSmall: after is None but must be a time, such as '1 day'")


def _refused_as(value: object, label: str, default: object) -> str:
    if value not in ("initial", "drop"):
        raise InputError(f"{label} is {value!r} but must be 'initial' or 'drop'")
    return str(value)


@dataclasses.dataclass(frozen=True, repr=False)
class AdmitByCount(Recipe):
    """A row of a keyed table is born at the n-th push of its key; the pushes before that change nothing.

    Most keys of a stream come once or twice, and a model learns nothing of them. With this rule, which ``admit=`` of
    :meth:`dps.ParameterServer.table` takes, such a key costs some bytes of a counter instead of a row. Counters are in
    all copies of the table and in its checkpoints. `push` and `add` count; `assign` and functions on the servers make
    rows whatever the count. A row that was deleted, or that went by itself, has to be admitted again.

    Parameters
    ----------
    n : int
        From 2 to 255; if `approximate`, to 15.
    approximate : bool
        Count in 2.5 bytes for each of `waiting` keys, and take some keys for others: of keys that came once, 3.7 % get
        a row at n = 2, 0.4 % at n = 3, and fewer than 0.01 % at n = 5 (10 %, 1.7 % and 0.03 % when `waiting` keys have
        been counted). Otherwise a key takes 6 bytes while it waits, and its count is exact.
    refused : {"initial", "drop"}
        What a pull gives for a key without a row: the row's initial value; or zeros, so that the key adds nothing to a
        sum of rows. ``pull(..., born=True)`` tells such keys apart.
    waiting : int
        How many keys wait for their rows at most, in all shards together. Where there are more, all counts are halved,
        bit by bit, and keys whose count was 1 are forgotten; so a key is admitted that comes n times within about as
        many other keys.

    Raises
    ------
    InputError
        A number is not within its limits.

    Examples
    --------
    >>> import dps
    >>> dps.AdmitByCount(3)
    AdmitByCount(n=3)
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         w = ps.table("w", admit=dps.AdmitByCount(2))
    ...         w.push([7, 8], 1.0)
    ...         w.push([7], 1.0)
    ...         w.pull([7, 8], born=True)
    (array([1., 0.], dtype=float32), array([ True, False]))
    """

    n: int = number(least=2, most=LARGEST_THRESHOLD, whole=True)
    approximate: bool = flag(False)
    refused: str = converted("initial", _refused_as)
    waiting: int = number(1 << 22, least=1, whole=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.approximate and self.n > LARGEST_SKETCHED:
            raise InputError(
                f"AdmitByCount: n is {self.n}, and approximate counts go to {LARGEST_SKETCHED}: leave approximate= out"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the counters may take."""
        return int(self.waiting * WAITING_BYTES[self.approximate])


@dataclasses.dataclass(frozen=True)
class RowLife:
    """What a table asks of its rows.

    Parameters
    ----------
    expire : tuple of Expiry
        Rules by which rows go; each of them alone suffices.
    max_bytes : int
        Bytes that one copy of the table may take; 0: no limit.
    evict : str or EvictByFunction
        What happens when they are full: one of EVICT, or the rows go for which the function gives the lowest numbers.
    admit : AdmitByCount, NEVER or None
        When a push makes a row that is not there: at once (None), by count, or not at all.
    remember : int
        How many keys of rows that went by themselves the servers keep, for readers of them.
    """

    expire: tuple[Expiry, ...] = ()
    max_bytes: int = 0
    evict: str | EvictByFunction = "lru"
    admit: AdmitByCount | str | None = None
    remember: int = 0

    def __post_init__(self) -> None:
        if any(not isinstance(rule, Expiry) for rule in self.expire):
            raise InputTypeError(
                f"expire is a rule such as dps.ExpireUnused('7 days'), or a list of rules, not {self.expire!r}"
            )
        if self.evict not in EVICT and not isinstance(self.evict, EvictByFunction):
            known = ", ".join(map(repr, EVICT))
            raise InputError(f"evict is one of {known}, or a function of rows, not {self.evict!r}")
        if self.spills and self.counts_pulls:
            raise InputError(
                "ExpireUnused(by='use') and evict='spill' do not go together, because a row that goes to a file loses "
                "the note of its pulls; take by='push'"
            )
        if not (self.admit is None or self.admit == NEVER or isinstance(self.admit, AdmitByCount)):
            raise InputTypeError(f"admit is a rule such as dps.AdmitByCount(3), or 'never', not {self.admit!r}")
        if not isinstance(self.remember, int) or isinstance(self.remember, bool) or self.remember < 0:
            raise InputError(f"remember is {self.remember!r} but must be True, or a whole number of keys, 0 or more")
        if self.remember and not (self.expire or (self.max_bytes and self.evict not in ("refuse", SPILL))):
            raise InputError(
                f"remember={self.remember} keeps keys of rows that go by themselves, and no rows go here: add expire=, "
                "or max_bytes= with an evict= other than 'refuse' and 'spill'"
            )

    @property
    def asks(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.expire or self.max_bytes or self.admit)

    @property
    def counts(self) -> AdmitByCount | None:
        """The rule by which pushes are counted; None where they are not."""
        return self.admit if isinstance(self.admit, AdmitByCount) else None

    @property
    def reads_zeros(self) -> bool:
        """Whether a key without a row reads as zeros, whatever the initial value of rows is."""
        return self.counts is not None and self.counts.refused == "drop"

    @property
    def bytes_of_rows(self) -> int:
        """What `max_bytes` leaves for rows beside :attr:`bytes_aside`; 0: no limit, or nothing is left."""
        return max(0, self.max_bytes - self.bytes_aside)

    @property
    def bytes_aside(self) -> int:
        """Bytes of keys without rows: of counters of those that wait, and of those that went and are remembered."""
        return (self.counts.nbytes if self.counts is not None else 0) + GONE_BYTES * self.remember

    @property
    def counts_pulls(self) -> bool:
        """Whether a pull of a row is a use of it."""
        return any(isinstance(rule, ExpireUnused) and rule.by == "use" for rule in self.expire)

    @property
    def spills(self) -> bool:
        """Whether rows go to a file when the budget is full."""
        return self.max_bytes > 0 and self.evict == SPILL

    @property
    def evicts(self) -> bool:
        """Whether rows go for good when the budget is full."""
        return self.max_bytes > 0 and self.evict not in ("refuse", SPILL)

    @property
    def notes_pulls(self) -> bool:
        """Whether a primary notes which rows were pulled."""
        return self.counts_pulls or self.spills

    @property
    def has_records(self) -> bool:
        """Whether rows have records: where the decision which rows go needs them."""
        return bool(self.expire) or (self.max_bytes > 0 and self.evict not in ("norm", "refuse"))

    def to_dict(self) -> Description:
        """What it asks as plain values, for JSON."""
        admit = self.admit.to_dict() if isinstance(self.admit, AdmitByCount) else self.admit
        evict = self.evict.to_dict() if isinstance(self.evict, EvictByFunction) else self.evict
        plain = {"expire": [rule.to_dict() for rule in self.expire], "max_bytes": self.max_bytes, "evict": evict}
        plain |= {"remember": self.remember} if self.remember else {}
        return plain if admit is None else {**plain, "admit": admit}

    @classmethod
    def from_dict(cls, fields: Description) -> RowLife:
        """What :meth:`to_dict` described."""
        evict, admit = _made(EvictByFunction, fields["evict"]), _made(AdmitByCount, fields.get("admit"))
        expire = tuple(from_dict(Expiry, rule) for rule in fields["expire"])
        return cls(**{**fields, "expire": expire, "admit": admit, "evict": evict})


def _made(kind: type[Recipe], described: object) -> Any:
    """The recipe that was described as plain values; any other value as it is."""
    if not isinstance(described, dict):
        return described
    return kind(**{name: value for name, value in described.items() if name != "name"})


def life_of(expire: object, max_bytes: object, evict: object, admit: object = None, remember: object = 0) -> RowLife:
    """What ``expire=``, ``max_bytes=``, ``evict=``, ``admit=`` and ``remember=`` of a table ask."""
    rules = () if expire is None else tuple(expire) if isinstance(expire, (list, tuple)) else (expire,)
    if max_bytes is None and evict is not None:
        raise InputError(f"evict={evict!r} says what happens when max_bytes= is full, and there is no max_bytes=")
    most = 0 if max_bytes is None else bytes_of(max_bytes, "max_bytes")
    policy = "lru" if evict is None else evict_of(evict)
    return RowLife(rules, most, policy, admit, remember)  # type: ignore[arg-type]


def rows_within(max_bytes: int, shards: int, row_bytes: int) -> int:
    """The rows that each of so many shards may have, so that all together take at most `max_bytes`.

    `row_bytes` are the bytes of a row with its state and its record.

    >>> rows_within(1 << 30, 16, 24) * 16
    23008752
    """
    return int(max_bytes / shards / (row_bytes + SLOT_BYTES + FLAG_BYTES))


def bytes_within(rows: int, shards: int, row_bytes: int) -> int:
    """The least `max_bytes` by which :func:`rows_within` gives so many rows."""
    return math.ceil(rows * shards * (row_bytes + SLOT_BYTES + FLAG_BYTES)) + 1


def record_columns(itemsize: int) -> int:
    """Columns of a record, in a table whose values have so many bytes."""
    return RECORD_BYTES // itemsize
