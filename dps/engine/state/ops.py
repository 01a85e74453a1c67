"""TableSpec, the definition of a table, and Op, one change to a shard. Both travel between the parties."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dps.engine.core.shard_map import ShardMap
from dps.engine.core.shards.index import keys_of
from dps.engine.core.shards.initializers import RowStart
from dps.engine.core.shards.rows import all_finite
from dps.engine.state.caching import Cache
from dps.engine.state.columns import ColumnLayout, ColumnOptimizers, row_start
from dps.engine.state.custom import Custom, custom
from dps.engine.state.dtypes import DTYPES, MOST_FLOAT16, WHOLE, dtype_of, is_half, range_of
from dps.engine.state.initializers import Initializer, Zeros, initializer_from_dict
from dps.engine.state.life import (
    MAX_GONE,
    MAX_WAITING,
    MIN_SHARD_ROWS,
    RowLife,
    bytes_within,
    record_columns,
    rows_within,
)
from dps.engine.state.names import check_name
from dps.engine.state.optimizers import SGD, Add, Assign, Optimizer, optimizer_from_dict
from dps.engine.state.partitioning import HashPartition, Partition, partition_from_dict, partition_of
from dps.engine.state.recipes import Description
from dps.engine.state.wire_format import Wire
from dps.errors import InputError, InputTypeError, MissingPackageError

__all__ = ["ADD", "AGE", "ASSIGN", "CLOSE", "CLOSING", "DELETE", "DROP", "EVICTED", "EXPIRED", "FAILED", "KEEP"]
__all__ += ["NO_CLOCK", "OLDER", "PUSH", "RETIRE", "ROWS", "Op", "Selected", "Selection", "TableSpec", "WholeShard"]
__all__ += ["html_renderers", "usual_shards", "wants_finite"]

# Functions that show a TableSpec in a notebook; the last one is used. dps.engine.dashboard.notebook registers one here,
# because this package is pure: it may import neither the dashboard nor Dask, not even when a method is called.
html_renderers: list[Callable[[TableSpec], str]] = []

PUSH, ADD, ASSIGN = 0, 1, 2  # the rule of an op on rows: the table's optimizer, plain addition, or replacement
ROWS = 3  # the rule of an op that replaces whole rows, state included: the effect of a function on the servers
DELETE = 4  # the rule of an op by which rows go
# The rule of an op without rows: it closes the sums of a clock, retires origins, or says how old rows become.
CLOSE, RETIRE, AGE = 5, 6, 7
# What a CLOSE does: it steps with the sums of clocks before its own (OLDER), steps with all sums (KEEP), or drops them,
# because the run has failed (DROP) or because the user's optimizer has failed on the primary (FAILED).
OLDER, KEEP, DROP, FAILED = 0, 1, 2, 3
CLOSING = 2  # the `rows` of a SteppedOp; those of any other ROWS are 1 or less
EVICTED, EXPIRED = -2, -3  # the `rows` of a DELETE by which a primary forgets rows: why they go
NO_CLOCK = -1  # the clock of a client without a clock

MAX_DIM = 1 << 16
MAX_ROWS = 1 << 40
MAX_COPIES = 8
MAX_STALENESS = 1 << 30


class Op(NamedTuple):
    """One change to one shard, as client, primary and backups see it.

    The fields have the names that they have in an op that gives values to rows. CLOSE, RETIRE, AGE, DELETE, and the
    ROWS that end a clock have other numbers to say in the same fields: `op_views.py` has a class for each of these.
    """

    rule: int  # PUSH, ADD, ASSIGN, ROWS, DELETE, CLOSE, RETIRE or AGE
    keys: np.ndarray | None  # int64[m]; None: the rows start .. start + m - 1 of a dense shard
    start: int  # global row number, if keys is None
    values: np.ndarray  # table dtype [m, dim]; for ROWS [m, dim + slots]
    clock: int  # of the trainer, or NO_CLOCK
    parties: int  # trainers in the run: aggregate="mean" divides by it
    origin: int = 0  # the maker of the op; 0: no origin, so the op is not checked for repeats
    attempt: int = 0  # which execution of the origin
    number: int = 0  # of the op among those of its clock: (clock, number) is its seq
    answer: bool = False  # keep the new values in the ledger, because the client may ask for them again
    rows: int = -1  # of data for which a push stands: aggregate="mean" divides by their sum; -1: the push does not say
    after: np.ndarray | None = None  # [m, dim + slots], the rows after a step that has been prepared
    deleted: np.ndarray | None = None  # int64[k], ROWS of a function: keys of rows that go before
    result: np.ndarray | None = None  # [k, 1], ROWS of a function: what it returned, which the ledger keeps
    unborn: np.ndarray | None = None  # bool[m]: keys without a row, which the shard counts: see `admission.py`
    # int64[n, 4], of a push that is the sum of the pushes of several origins: each origin, its attempt, and the first
    # and the last number of its pushes. The first of them is that of the op.
    stamps: np.ndarray | None = None


class Selection(NamedTuple):
    """Rows of one shard that a function is to see."""

    keys: np.ndarray | None  # int64[m]; None: the rows of a dense shard from `start` on
    start: int  # row number in the table of the first of them; 0 where there are keys
    rows: np.ndarray  # [m, dim + slots]: a view of the shard's memory, or a copy
    is_view: bool
    present: np.ndarray | None  # bool[m]: the shard has the row; None: all of them

    @property
    def memory(self) -> np.ndarray | None:
        return self.rows if self.is_view else None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def over(self, memory: np.ndarray) -> Selection:
        return self._replace(rows=memory)


class WholeShard:
    """A :class:`Selection` of all rows of a keyed shard. Any thread may use it while the shard does not change.

    The keys are listed at the first use, because that takes long, and so are rows, where some are vacant.

    Parameters
    ----------
    tables : tuple of ndarray
        Of the shard's index.
    memory : ndarray
        The rows up to the last one.
    occupied : ndarray of bool, optional
        Which of them are not vacant.
    """

    start, present = 0, None

    def __init__(self, tables: tuple[np.ndarray, ...], memory: np.ndarray, occupied: np.ndarray | None):
        self._tables, self.memory, self._occupied = tables, memory, occupied

    @functools.cached_property
    def keys(self) -> np.ndarray:
        keys = keys_of(self._tables, len(self.memory))
        return keys if self._occupied is None else keys[self._occupied]

    @functools.cached_property
    def rows(self) -> np.ndarray:
        return self.memory if self._occupied is None else self.memory[self._occupied]

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def over(self, memory: np.ndarray) -> WholeShard:
        return WholeShard(self._tables, memory, self._occupied)


Selected: TypeAlias = Selection | WholeShard


def wants_finite(optimizer: Optimizer) -> bool:
    """Whether a table with this optimizer refuses NaN and infinity by default.

    An optimizer steps from the values of a row, so NaN or infinity would stay in the row and its state for good. In
    tables of counts and of plain values they may have a meaning, such as a missing value.

    >>> import dps
    >>> wants_finite(dps.SGD(0.1)), wants_finite(dps.Add()), wants_finite(dps.Assign())
    (True, False, False)
    """
    if isinstance(optimizer, ColumnOptimizers):
        return any(map(wants_finite, optimizer.optimizers))
    return not isinstance(optimizer, (Add, Assign))


def usual_shards(wanted: int, rows: int | None) -> int:
    """The shards of a table whose maker asks for no number: about `wanted`, as its rows allow; None: a keyed table.

    >>> usual_shards(6, None), usual_shards(6, 100), usual_shards(6, 2)
    (8, 6, 2)
    """
    return 1 << (wanted - 1).bit_length() if rows is None else min(wanted, max(int(rows), 1))


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The definition of a table. Made by :meth:`dps.ParameterServer.table`; all parties have the same value.

    Parameters
    ----------
    name : str
        Unique in its parameter server; 1 to 200 printable characters.
    rows : int or None
        Number of rows of a dense table; None for a keyed one (any int64 key).
    dim : int
        Values in a row.
    dtype : str
        ``"float32"``, ``"float64"``, ``"int64"``, ``"int32"``, ``"int16"``, ``"uint8"``, ``"float16"`` or
        ``"bfloat16"``.
    optimizer : Optimizer
        What a push does to the rows.
    init : Initializer
        The value of a row before its first push.
    aggregate : {None, "sum", "mean"}
        None applies each push as it comes; "sum" and "mean" (staleness 0 only) collect the pushes of a clock and step
        the optimizer once.
    finite : bool
        Refuse NaN and infinity.
    shards : int
        Slices of the table; of a keyed table a power of two, unless one of them was split alone.
    copies : int
        How many servers hold each row.
    ack : {"copies", "memory"}
        When a push is acknowledged: when all copies have it, or when the primary has.
    id : int
        Number of the table in its parameter server, given by the controller.
    partition : Partition
        Which keys of a keyed table lie together on one shard.
    life : RowLife
        When rows of a keyed table go by themselves, and how many bytes they may take.
    bytes_width : int
        Clients see each row as bytes of this width, by ``dtype="S32"`` say; 0: as numbers. Then `dtype` is uint8, `dim`
        the width, and the optimizer Assign.
    fixed_shards : bool
        It is not split, because a program lays rows out by its shards.
    edges : tuple of int
        Where shards begin that are not equal, because one of them was split alone, and the end: rows of a dense table;
        of a keyed one slots, which are the first 12 bits of hashes. Empty: all shards are equal.
    staleness : int or None
        How stale a trainer's reads of this table may be, where that is less than its run allows; None, or math.inf: as
        its run allows.
    wire : Wire
        In which numbers rows travel between trainers and servers.
    cache : Cache
        How many rows the trainers of a process keep, and for how long.
    reads : {"primary", "copies"}
        Which copies answer pulls.
    salt : int
        Mixed into the hashes by which servers look keys up, given by the controller: another one for each table, so
        that keys in the order in which one table is scanned have no order in another.

    Examples
    --------
    >>> spec = TableSpec("w", dim=4)
    >>> spec.keyed, TableSpec.from_dict(spec.to_dict()) == spec
    (True, True)
    """

    name: str
    rows: int | None = None
    dim: int = 1
    dtype: str = "float32"
    optimizer: Optimizer = Add()
    init: Initializer = Zeros()
    aggregate: str | None = None
    finite: bool = False
    shards: int = 4
    copies: int = 1
    ack: str = "copies"
    id: int = 0
    partition: Partition = HashPartition()
    life: RowLife = RowLife()
    bytes_width: int = 0
    fixed_shards: bool = False
    edges: tuple[int, ...] = ()
    staleness: int | None = None
    wire: Wire = Wire()
    cache: Cache = Cache()
    reads: str = "primary"
    salt: int = dataclasses.field(default=0, repr=False)

    def __post_init__(self):
        where = f"table {check_name('table', self.name)!r}"
        if not isinstance(self.optimizer, Optimizer):
            raise InputTypeError(
                f"{where}: optimizer must be a dps.Optimizer, such as dps.Adagrad(0.1), not {self.optimizer!r}"
            )
        if not isinstance(self.init, Initializer):
            raise InputTypeError(f"{where}: init must be one of dps's, such as dps.Normal(0.01), not {self.init!r}")
        self._take_width(where)
        object.__setattr__(self, "dtype", _dtype_name(self.dtype, where))
        _whole(self, "dim", 1, MAX_DIM, where)
        object.__setattr__(self, "optimizer", custom(self.optimizer, self.dim))
        if self.rows is not None:
            _whole(self, "rows", 1, MAX_ROWS, where)
        _whole(self, "shards", 1, 1 << 12, where)
        if self.keyed and not self.edges and self.shards & (self.shards - 1):
            raise InputError(f"{where}: a keyed table has a power of two of shards, not {self.shards}")
        object.__setattr__(self, "partition", partition_of(self.partition))
        if not isinstance(self.partition, Partition):
            raise InputTypeError(
                f"{where}: partition is one of dps's, such as dps.BlockPartition(20), or a function of keys, not "
                f"{self.partition!r}"
            )
        if self.rows is not None and not isinstance(self.partition, HashPartition):
            raise InputError(
                f"{where}: partition={self.partition!r} places the keys of a keyed table, and this one has rows=; rows "
                "of a dense table lie in order, cut into equal ranges"
            )
        if self.rows is not None and self.shards > self.rows:
            raise InputError(f"{where}: {self.shards} shards for {self.rows} rows; ask for at most {self.rows}")
        self._take_edges()
        _whole(self, "copies", 1, MAX_COPIES, where)
        if self.ack not in ("copies", "memory"):
            raise InputError(f"{where}: ack is 'copies' or 'memory', not {self.ack!r}")
        if self.aggregate not in (None, "sum", "mean"):
            raise InputError(f"{where}: aggregate is None, 'sum' or 'mean', not {self.aggregate!r}")
        if self.dtype not in self.optimizer.dtypes:
            known = ", ".join(self.optimizer.dtypes)
            raise InputError(f"{where}: {self.optimizer.kind} works on {known}, not {self.dtype}")
        if self.dtype not in self.init.dtypes:
            held = "" if self.dtype == "int64" else f" from {' to '.join(map(str, range_of(self.dtype)))}"
            raise InputError(
                f"{where}: an {self.dtype} table starts from Zeros or a whole Constant{held}, not {self.init!r}"
            )
        if self.dtype == "float16" and np.abs(self.init.numbers()[..., 1:]).max() > MOST_FLOAT16:
            raise InputError(
                f"{where}: float16 reaches {MOST_FLOAT16}, and rows start from {self.init!r}: use bfloat16"
            )
        if self.is_whole and self.aggregate == "mean":
            raise InputError(f"{where}: a mean of {self.dtype} pushes would be cut to whole numbers; use float64")
        object.__setattr__(self, "staleness", None if self.staleness == math.inf else self.staleness)
        if self.staleness is not None:
            _whole(self, "staleness", 0, MAX_STALENESS, where)
        if not isinstance(self.wire, Wire):
            raise InputTypeError(f"{where}: wire is a dps.Wire, such as dps.Wire(pull='bfloat16'), not {self.wire!r}")
        if self.wire.codecs != (0, 0) and self.dtype != "float32":
            raise InputError(
                f"{where}: rows of float32 can travel by {self.wire!r}, and this table has {self.dtype}: leave out "
                "pull= and push=, or pass wire='lists'"
            )
        if "int8" in (self.wire.pull, self.wire.push) and self.dim <= 4:
            raise InputError(f"{where}: int8 saves nothing of a row of {self.dim} beside bfloat16; use that")
        self._check_held(where)
        self._check_merged(where)
        self._check_reads(where)
        self.row_start()  # raises where the columns of the optimizer and the initializer are not the same
        if self.life.asks:
            self._check_life(where)

    def _check_reads(self, where: str) -> None:
        """Refuse a cache of what is no row of numbers, and pulls from backups where only the primary may answer."""
        if not isinstance(self.cache, Cache):
            raise InputTypeError(f"{where}: cache is a dps.Cache, such as dps.Cache('64 MiB'), not {self.cache!r}")
        if self.cache.nbytes and self.bytes_width:
            raise InputError(f"{where} holds bytes of width {self.bytes_width}, and cache= keeps rows of numbers")
        if self.reads not in ("primary", "copies"):
            raise InputError(f"{where}: reads is 'primary' or 'copies', not {self.reads!r}")
        if self.reads == "primary":
            return
        if self.copies == 1:
            raise InputError(f"{where}: reads='copies' needs copies=2 or more")
        if self.ack != "copies":
            raise InputError(f"{where}: reads='copies' needs ack='copies': else copies may lack acknowledged pushes")
        if self.aggregate is not None:
            raise InputError(f"{where}: pulls of a table with aggregate= close clocks, so its primaries answer them")
        if self.life.asks:
            raise InputError(
                f"{where}: reads='copies' does not go with expire=, max_bytes=, admit= and remember=, because the "
                "primaries decide which rows there are, also by their pulls"
            )

    def _check_held(self, where: str) -> None:
        """Refuse a wire that holds rows back where sums of pushes do not stand for these pushes."""
        if not self.wire.holds:
            return
        held, why = f"{where}: {self.wire!r} holds back rows of pushes, and sends their sums later", ""
        if self.dtype != "float32":
            why = f"this table has {self.dtype}, and not float32"
        elif self.aggregate is not None:
            why = f"with aggregate={self.aggregate!r} servers wait for what each trainer pushes in a clock"
        elif self.optimizer.repeats == "last":
            why = f"of several pushes to a row of {self.optimizer.kind}, the last one counts"
        if why:
            raise InputError(f"{held}; {why}: leave out keep= and least=")

    def _check_merged(self, where: str) -> None:
        """Refuse a wire that merges pushes where their sum does not change rows as they do."""
        if not self.wire.merge:
            return
        merged, optimizer, why = f"{where}: {self.wire!r} sums the pushes of a process", self.optimizer, ""
        if self.wire.holds:
            why = "keep= and least= choose among the rows of each push"
        elif self.wire.push is not None or self.wire.lists:
            why = "their sum travels with its keys, as it is: leave out push= and lists="
        elif self.wire.measured and self.wire.pull is not None:
            why = "measured=True compares either numbers or sums: leave out pull="
        elif self.life.counts is not None:
            why = "admit= counts the pushes that name a key, and a sum names it once"
        elif self.dtype not in ("float32", "float64", "int64", "int32"):
            why = f"sums of {self.dtype} would be rounded before they are added"
        elif self.aggregate is None and not (type(optimizer) in (Add, SGD) and not optimizer.uses_lag):
            why = f"a step of {optimizer.kind} for a sum is not the steps for its parts"
        elif self.aggregate is None and optimizer.repeats == "sum":
            why = "penalties of SGD hold for each push"
        if why:
            raise InputError(f"{merged}; {why}: leave out merge=True")

    def _take_edges(self) -> None:
        """Check the edges; those of equal shards are none, so that a table has one definition."""
        edges = tuple(map(int, self.edges))
        can_be_equal = not self.keyed or not self.shards & (self.shards - 1)
        if edges and can_be_equal and edges == ShardMap(self.rows or 0, self.shards).edges:
            edges = ()
        object.__setattr__(self, "edges", edges)
        try:
            _ = ShardMap(self.rows or 0, self.shards, None, edges) if edges else None
        except ValueError as error:
            raise InputError(f"table {self.name!r}: {error}") from error

    def _take_width(self, where: str) -> None:
        """Make of a dtype of bytes what it stands for."""
        try:
            dtype = dtype_of(self.dtype)
        except (TypeError, MissingPackageError):  # which `_dtype_name` explains
            return
        if dtype.kind != "S":
            return
        width = dtype.itemsize
        if not 1 <= width <= MAX_DIM:
            raise InputError(f"{where}: bytes have a fixed width of 1 to {MAX_DIM}, such as dtype='S32', not {width}")
        if self.dim != 1 or not isinstance(self.optimizer, (Add, Assign)) or self.init != Zeros() or self.aggregate:
            raise InputError(f"{where}: rows of bytes are assigned: leave out dim=, optimizer=, init= and aggregate=")
        made = {"bytes_width": width, "dtype": "uint8", "dim": width, "optimizer": Assign()}
        for field, value in made.items():
            object.__setattr__(self, field, value)

    def _check_life(self, where: str) -> None:
        life = self.life
        if not self.keyed:
            raise InputError(f"{where}: rows of a dense table stay; expire=, max_bytes=, admit= are for keyed ones")
        counts = life.counts
        if counts is not None and counts.waiting > MAX_WAITING * self.shards:
            raise InputError(
                f"{where}: {self.shards} shards count {MAX_WAITING * self.shards} waiting keys at most, not "
                f"{counts.waiting}; ask for fewer, or for more shards"
            )
        if life.remember > MAX_GONE * self.shards:
            raise InputError(
                f"{where}: {self.shards} shards remember {MAX_GONE * self.shards} keys that went at most, not "
                f"{life.remember}; ask for fewer, or for more shards"
            )
        if life.max_bytes and self.most_rows < MIN_SHARD_ROWS:
            row_bytes = (self.dim + self.slots) * self.itemsize
            least = bytes_within(MIN_SHARD_ROWS, self.shards, row_bytes) + life.bytes_aside
            raise InputError(
                f"{where}: max_bytes={life.max_bytes} is room for {self.most_rows} rows in each of {self.shards} shards"
                f"; ask for {least} bytes or more, or for fewer shards"
            )

    @property
    def keyed(self) -> bool:
        """Whether any int64 is a key."""
        return self.rows is None

    @functools.cached_property
    def shard_map(self) -> ShardMap:
        """The map by which clients, servers and checkpoints find the shard of a key, or of a row."""
        return ShardMap(self.rows or 0, self.shards, self.partition.cells(), self.edges)

    @property
    def state_columns(self) -> int:
        """Columns of the optimizer's state, which follow the `dim` values of a row.

        Beside halves the state is float32, and takes two columns a number.
        """
        return self.optimizer.init(self.dim) * (2 if is_half(self.dtype) else 1)

    def state_of(self, rows: np.ndarray) -> np.ndarray:
        """The optimizer's state of rows [m, dim + slots]: a view [m, numbers of state], of float32 beside halves.

        >>> import dps
        >>> spec = TableSpec("w", dtype="float16", optimizer=dps.Momentum(0.1))
        >>> spec.state_of(np.zeros((2, spec.dim + spec.slots), np.float16)).dtype
        dtype('float32')
        """
        state = rows[:, self.dim : self.dim + self.state_columns]
        return state.view(np.float32) if is_half(self.dtype) else state

    def are_finite(self, rows: np.ndarray) -> bool:
        """Whether neither the values of rows [m, dim + slots] nor their state has NaN or infinity."""
        parts = rows[:, : self.dim], self.state_of(rows)
        return self.is_whole or all(all_finite(np.ascontiguousarray(part)) for part in parts)

    @property
    def slots(self) -> int:
        """Columns of a row beside its values: those of the optimizer's state, then those of the row's record."""
        return self.state_columns + (record_columns(self.itemsize) if self.life.has_records else 0)

    @property
    def most_rows(self) -> int:
        """The rows that a shard may have; 0: as many as there are keys."""
        if not self.life.max_bytes:
            return 0
        return rows_within(self.life.bytes_of_rows, self.shards, (self.dim + self.slots) * self.itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers, of which none is NaN or infinite."""
        return self.dtype in WHOLE

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize

    @functools.cached_property
    def columns(self) -> ColumnLayout:
        """Where the columns lie of a table that was made with ``columns=``; of any other table it is empty."""
        optimizer = self.optimizer
        names, dims = (optimizer.names, optimizer.dims) if isinstance(optimizer, ColumnOptimizers) else ((), ())
        return ColumnLayout(names, dims, self.name)

    def row_start(self) -> RowStart:
        """What a new row holds."""
        return row_start(self.dim, self.optimizer, self.init, self.slots - self.state_columns, is_half(self.dtype))

    def absent_start(self) -> RowStart:
        """What a key without a row reads as."""
        return row_start(self.dim, Add(), Zeros()) if self.life.reads_zeros else self.row_start()

    def opened(self) -> TableSpec:
        """The same with an optimizer that can step, also if it is one of the user: see ``Custom.open``."""
        if not isinstance(self.optimizer, Custom):
            return self
        return dataclasses.replace(self, optimizer=self.optimizer.open())

    def __setstate__(self, fields: Description) -> None:
        self.__dict__.update(fields)
        dtype_of(self.dtype)  # because this process may not know bfloat16 yet

    def _repr_html_(self) -> str | None:
        return html_renderers[-1](self) if html_renderers else None

    def to_dict(self) -> Description:
        """The definition as plain values, for JSON."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        recipes = {"optimizer": self.optimizer, "init": self.init, "partition": self.partition}
        plain = {**fields, **{name: recipe.to_dict() for name, recipe in recipes.items()}}
        del plain["life"]
        for name in ("bytes_width", "fixed_shards", "edges", "salt"):
            if not plain[name]:
                del plain[name]  # so that tables without it are described as ever
        if self.staleness is None:
            del plain["staleness"]
        if self.reads == "primary":
            del plain["reads"]
        plain.pop("wire") if not self.wire.asks else plain.update(wire=self.wire.to_dict())
        plain.pop("cache") if not self.cache.nbytes else plain.update(cache=self.cache.to_dict())
        return {**plain, "life": self.life.to_dict()} if self.life.asks else plain

    @classmethod
    def from_dict(cls, fields: Description) -> TableSpec:
        """The table that :meth:`to_dict` described."""
        optimizer, init = optimizer_from_dict(fields["optimizer"]), initializer_from_dict(fields["init"])
        given = {**fields, "optimizer": optimizer, "init": init}
        if "partition" in fields:  # checkpoints of earlier versions have none
            given["partition"] = partition_from_dict(fields["partition"])
        if "life" in fields:
            given["life"] = RowLife.from_dict(fields["life"])
        if "wire" in fields:
            given["wire"] = Wire.from_dict(fields["wire"])
        if "cache" in fields:
            given["cache"] = Cache.from_dict(fields["cache"])
        return cls(**given)


def _dtype_name(dtype: npt.DTypeLike, where: str) -> str:
    known = f"a table holds {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    try:
        name = dtype_of(dtype).name
    except TypeError as error:
        raise InputTypeError(f"{where}: {dtype!r} is not a dtype of numpy; {known}") from error
    except MissingPackageError as error:
        raise MissingPackageError(f"{where}: {error}", name=error.name) from None
    if name not in DTYPES:
        raise InputError(f"{where}: dtype {name}; {known}")
    return name


def _whole(spec: TableSpec, field: str, least: int, most: int, where: str) -> None:
    value = getattr(spec, field)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value <= most:
        raise InputError(f"{where}: {field} is a whole number from {least} to {most}, not {value!r}")
    object.__setattr__(spec, field, int(value))
