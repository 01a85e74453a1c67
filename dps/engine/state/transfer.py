"""A copy of a shard, made piece by piece while the shard goes on changing.

A `Dump` begins with everything but the rows, then gives the rows in the order of their numbers, as they are at that
moment. From its beginning on every op of the shard must reach the `Joining` side too, in one order with the pieces.
That side carries an op out on the rows that it has received; it ignores the other rows of the op, because they will
come later with that op in them. After the last piece the two sides are equal, and ops are carried out whole.

A dump pins its shard: keys that are new get rows behind all others, and deleted ones stay in the index, with vacant
rows (`shard.py`). A piece has those too, because an op may name their keys again: the joining side then knows that
the row is not one that is still to come.

A shard with rows in a file gives those first, in rounds, before it is pinned: docs/design/rows.md, "Spill".

Three things do not come with the rows. Open sums, and the counts of keys that wait for their rows, are complete from
the beginning, because an op that is summed or only counted touches no row. The ledger comes with the last piece: the
joining side cannot keep it on the way, because it would compute the answers that a ledger keeps from rows that it may
not have yet.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dps.engine.core.shards.growing import filling_rows
from dps.engine.core.shards.index import keys_of
from dps.engine.core.shards.ledger import Ledger
from dps.engine.state.ages import ages_to_dict, restore_ages
from dps.engine.state.deletion import vacate
from dps.engine.state.disk_rows import Reader
from dps.engine.state.ops import PUSH, Op, TableSpec
from dps.engine.state.recipes import Description
from dps.engine.state.shard import NO_INDEX, DenseShard, KeyedShard
from dps.engine.state.spill import attach_file
from dps.errors import FunctionError, ProtocolError

__all__ = [
    "MIN_LISTED_ROWS",
    "Dump",
    "Joining",
    "Listing",
    "dense_so_far",
    "digest",
    "first_difference",
    "head_of",
    "take_head",
]

# How often a dump asks for the keys created since it began. After the last time all of them go into one piece, because
# else a dump would not end while pushes create keys all the time.
MAX_KEY_LISTINGS = 8
# A shard with fewer rows lists its keys within 1 ms, so no thread is worth it.
MIN_LISTED_ROWS = 1 << 16
FEW_SPILLED = 1 << 12  # rows that have gone to the file since the last round over it: the last round gives them
MAX_ROUNDS = 8

Piece = tuple[Description, list[np.ndarray]]  # values for JSON, and arrays


class Listing(NamedTuple):
    """The keys of a keyed shard, in the order of its rows, and the numbers of these, where some rows are free."""

    keys: np.ndarray
    numbers: np.ndarray | None


def head_of(shard: DenseShard | KeyedShard) -> Piece:
    """Everything of a shard but its rows and its ledger, for :func:`take_head`."""
    count = len(shard.index) if isinstance(shard, KeyedShard) else len(shard)
    meta: Description = {"clock": shard.clock, "version": shard.version, "rows": count, "sums": None}
    if shard.record_at:
        meta["ages"] = ages_to_dict(shard)
    if shard.lead is not None:
        meta["lead"] = [shard.lead.clock, shard.lead.origin]
    meta["gone"] = [shard.evicted, shard.expired]
    gone = [] if shard.gone is None else shard.gone.to_arrays()
    meta["remembered"] = len(gone)
    if shard.admission is not None:
        meta["come"] = [shard.admission.admitted, shard.admission.dropped]
    meta["failure"] = None if shard.failure is None else str(shard.failure)
    waiting = [] if shard.admission is None else shard.admission.to_arrays()
    meta["waiting"] = len(waiting)
    if shard.sums is None:
        return meta, waiting + gone
    sums = shard.sums.clock, shard.sums.parties, shard.sums.rows
    return {**meta, "sums": list(sums)}, waiting + gone + shard.sums.to_arrays()


def take_head(shard: DenseShard | KeyedShard, meta: Description, arrays: list[np.ndarray], ledger: Ledger) -> None:
    """Let a shard have what :func:`head_of` gave, and a ledger. Its rows stay."""
    shard.restore(meta["clock"], meta["version"], ledger)
    if "ages" in meta:
        restore_ages(shard, meta["ages"])
    if shard.lead is not None:
        shard.lead.clock, shard.lead.origin = meta["lead"]
    shard.evicted, shard.expired = meta["gone"]
    if meta["failure"] is not None:
        shard.failure = FunctionError(meta["failure"])
    waiting, arrays = arrays[: meta["waiting"]], arrays[meta["waiting"] :]
    if shard.admission is not None:
        shard.admission.load(waiting)
        shard.admission.admitted, shard.admission.dropped = meta["come"]
    gone, arrays = arrays[: meta["remembered"]], arrays[meta["remembered"] :]
    if shard.gone is not None:
        shard.gone.load(gone, sum(meta["gone"]))
    if meta["sums"] is not None:
        clock, parties, rows = meta["sums"]
        shard.sums = shard.new_sums(clock)
        shard.sums.parties = parties
        shard.sums.rows = rows
        shard.sums.load(arrays)


class Dump:
    """The sending side: a shard as pieces.

    The keys of its rows come from a scan of the whole index. Of a large shard that takes tens of milliseconds, so
    :meth:`lists` hands the scan out, for another thread; a piece without a listing makes one itself.

    The arrays are views of rows that the next op may change or move: send or copy them before.

    Examples
    --------
    >>> from dps.engine.state.ops import ADD
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> op = Op(ADD, np.array([7, 8]), 0, np.ones((2, 1), np.float32), 0, 1)
    >>> _ = shard.apply(op)
    >>> dump, joining = Dump(shard), Joining(shard.spec, 0)
    >>> joining.begin(*dump.head())
    >>> while (piece := dump.piece(max_bytes=8)) is not None:
    ...     joining.add(*piece)
    ...     _ = shard.apply(op), joining.apply(op)
    >>> first_difference(shard, joining.finish()) is None
    True
    """

    def __init__(self, shard: DenseShard | KeyedShard):
        self.shard = shard
        self._version = shard.version
        self._given = 0  # rows in memory that pieces have given
        self._listed = Listing(NO_INDEX, None)
        self._key_listings = 0
        self._done = self._pins = False
        self._file: Reader | None = None  # of the rows in a file, which pieces give first
        self._rounds = 0  # over these
        if isinstance(shard, KeyedShard) and shard.spill is not None:
            self._file = shard.spill.reader(frozen=False)
        else:
            self._pin()

    def _pin(self) -> None:
        """Begin with the rows in memory."""
        self._pins = True
        self.shard.pin()
        # Free rows come before all that are new, and stay free while the shard is pinned.
        self._free = self.shard.index.free_rows if isinstance(self.shard, KeyedShard) else NO_INDEX

    def head(self) -> Piece:
        """Everything but rows and ledger. To be called before the shard changes again."""
        assert self.shard.version == self._version, "the shard has changed since the dump was begun"
        return head_of(self.shard)

    def piece(self, max_bytes: int) -> Piece | None:
        """The next rows, about `max_bytes` bytes of them; None when the piece before was the last.

        Rows that are created during the dump come at the end; the last piece may be larger because of them.
        """
        if self._done:
            self.close()
            return None
        shard, first = self.shard, self._given
        count = max(1, max_bytes // (8 + shard.width * shard.rows.itemsize))
        spilled = self._spilled_piece(count)
        if spilled is not None:
            return {"first": 0, "last": False, "spilled": True}, list(spilled)
        if not isinstance(shard, KeyedShard):
            end = min(len(shard), first + count)
            arrays, self._done = [shard.rows[first:end]], end == len(shard)
        else:
            if self._needs_keys:
                self.take(self._scan()())
                count = count if self._key_listings <= MAX_KEY_LISTINGS else len(shard.index)
            keys, numbers = self._listed
            end = min(len(keys), first + count)
            which = slice(first, end) if numbers is None else numbers[first:end]
            arrays, self._done = [keys[first:end], shard.rows[which]], end == len(shard.index)
            if shard.vacancies:
                assert shard.vacant is not None
                arrays.append(shard.vacant[which])
        self._given = end
        meta: Description = {"first": first, "last": self._done, "vacant": shard.vacancies > 0}
        if self._done:
            ledger = shard.ledger.to_arrays()
            meta["ledger"] = list(ledger)
            arrays += ledger.values()
        return meta, arrays

    def _spilled_piece(self, count: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The next rows in the file; None when all of them were given, and the shard is pinned."""
        while self._file is not None:
            piece = self._file.piece(count)
            if piece is not None:
                return piece
            left = self._file.renew()
            self._rounds += 1
            if not left and self._pins:
                self._file.close()
                self._file = None
            elif not self._pins and (left < FEW_SPILLED or self._rounds > MAX_ROUNDS):
                self._pin()  # from here on, no row goes to the file
        return None

    def close(self) -> None:
        """The shard may move its rows again, because the dump has ended or is given up."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._pins:
            self._pins = False
            self.shard.unpin()

    @property
    def is_given(self) -> bool:
        """Whether pieces have given all rows."""
        return self._done

    # -- the keys of rows

    def lists(self) -> Callable[[], Listing] | None:
        """The scan for the keys of the next rows, which any thread may do; its result goes to :meth:`take`.

        None, if no keys are needed now, if there are few, or if there were so many scans that the next one has to see
        the shard as it is when its piece is made.
        """
        few = self.shard.end < MIN_LISTED_ROWS
        if few or not self._needs_keys or self._key_listings >= MAX_KEY_LISTINGS:
            return None
        return self._scan()

    def take(self, listing: Listing) -> None:
        """Go on with the keys that a scan has found."""
        self._listed = listing
        self._key_listings += 1

    @property
    def _needs_keys(self) -> bool:
        """Whether rows are to be given whose keys are not listed."""
        shard = self.shard
        if self._file is not None:
            return False
        return isinstance(shard, KeyedShard) and self._given == len(self._listed.keys) < len(shard.index)

    def _scan(self) -> Callable[[], Listing]:
        assert isinstance(self.shard, KeyedShard)
        tables, end, free = self.shard.index.tables, self.shard.end, self._free

        def scan() -> Listing:
            keys = keys_of(tables, end)
            return Listing(np.delete(keys, free), np.delete(np.arange(end), free)) if len(free) else Listing(keys, None)

        return scan


def dense_so_far(spec: TableSpec, number: int) -> DenseShard:
    """A dense shard without initial rows, because the pieces of a dump replace them all."""
    assert spec.rows is not None
    low, high = spec.shard_map.edges[number : number + 2]
    return DenseShard(spec, number, filling_rows(high - low, spec.dim + spec.slots, spec.dtype))


class _KeyedSoFar(KeyedShard):
    """Some rows of a shard. Ops do not change the others, because the pieces of a dump will bring them: those that are
    not here yet, and those in the file, which an op brings to memory where they come from."""

    def step_rows(self, op: Op) -> None:
        super().step_rows(self._part(op))

    def _part(self, op: Op) -> Op:
        """The op, restricted to the rows that are here."""
        assert op.keys is not None  # a deletion is not a step
        index = np.empty(len(op.keys), np.int64)
        if not self.index.find(op.keys, index):
            return op
        known = index >= 0
        return op._replace(keys=op.keys[known], values=op.values[known])


class Joining:
    """The receiving side: a shard made of the pieces of a :class:`Dump` and of the ops since its beginning.

    `directory` is where the shard may have a file of rows.
    """

    def __init__(self, spec: TableSpec, number: int, directory: str | None = None):
        self.spec, self.number = spec, number
        # A dense shard has all its rows from the beginning. Ops may change those that are still to come, because a
        # piece replaces them whole.
        self._shard = _KeyedSoFar(spec, number) if spec.keyed else dense_so_far(spec, number)
        self._pins = not spec.life.spills
        if self._pins:
            self._shard.pin()
        elif isinstance(self._shard, KeyedShard):
            attach_file(self._shard, directory)
        self._where = f"the dump of shard {number} of table {spec.name!r}"
        self._rows = 0  # rows that have come
        self._complete = False

    def __len__(self) -> int:
        return len(self._shard) if self._complete else self._rows

    @property
    def nbytes(self) -> int:
        return self._shard.nbytes

    @property
    def version(self) -> int:
        return self._shard.version

    @property
    def so_far(self) -> DenseShard | KeyedShard | None:
        """The rows that have come, for the compiled step, which keeps the rule of :meth:`apply`.

        None after the last piece, because ops go into the ledger from then on; and of a shard with rows in a file,
        which ops may bring to memory.
        """
        return None if self._complete or self.spec.life.spills else self._shard

    def begin(self, meta: Description, arrays: list[np.ndarray]) -> None:
        """Begin with the values and arrays of :meth:`Dump.head`."""
        if isinstance(self._shard, KeyedShard):
            self._shard.expect(meta["rows"])
        take_head(self._shard, meta, arrays, Ledger())

    def add(self, meta: Description, arrays: list[np.ndarray]) -> None:
        """Add the values and arrays of :meth:`Dump.piece`."""
        shard, first = self._shard, meta["first"]
        if isinstance(shard, KeyedShard) and shard.spill is not None and not self._pins:
            if meta.get("spilled"):  # if an op changes one of these rows, it comes again, because it is in memory then
                shard.spill.put(arrays[0], arrays[1])
                return
            self._pins = True
            shard.pin()
        rows = arrays[1] if isinstance(shard, KeyedShard) else arrays[0]
        if self._complete or first != self._rows:
            raise ProtocolError(f"{self._where} goes on at row {first}, and {len(self)} rows are here")
        if isinstance(shard, KeyedShard):
            shard.load(arrays[0], rows)
            if meta.get("vacant"):
                vacate(shard, arrays[0][arrays[2] != 0])
        else:
            shard.load(shard.low + first, rows)
        self._rows += len(rows)
        if isinstance(shard, KeyedShard) and shard.spill is None and len(shard.index) != self._rows:
            raise ProtocolError(f"{self._where} holds a key twice")
        if meta["last"]:
            names = meta["ledger"]
            shard.ledger = Ledger.from_arrays(dict(zip(names, arrays[-len(names) :], strict=True)))
            if isinstance(shard, _KeyedSoFar):  # all rows are here, so ops may create rows from now on
                shard.__class__ = KeyedShard  # type: ignore[assignment]
            shard.unpin()
            self._complete = True

    def apply(self, op: Op) -> bool:
        """Carry out an op of the shard on those of its rows that are here."""
        if self._shard.lead is not None and op.rule == PUSH:  # here, because the origin is taken off the op below
            self._shard.lead.note(op.clock, op.origin)
        return self._shard.apply(op if self._complete else op._replace(origin=0, answer=False))

    def close_file(self) -> None:
        """The server ends."""
        self._shard.close_file()

    def finish(self) -> DenseShard | KeyedShard:
        """The complete shard; ProtocolError if the last piece has not come."""
        if not self._complete:
            raise ProtocolError(f"{self._where} has ended before its last piece; {len(self)} rows are here")
        return self._shard


def _parts(shard: DenseShard | KeyedShard) -> dict[str, object]:
    """Everything that must be equal in all replicas of a shard, as plain values and arrays."""
    sums = shard.sums
    parts: dict[str, object] = {"spec": shard.spec, "number": shard.number, "version": shard.version}
    parts |= {"ages": ages_to_dict(shard) if shard.record_at else None}
    parts |= {"evicted": shard.evicted, "expired": shard.expired} if shard.spec.life.asks else {}
    parts |= {} if shard.admission is None else shard.admission.stored()
    parts |= {f"gone {i}": array for i, array in enumerate(shard.gone.to_arrays() if shard.gone else ())}
    parts |= {
        "clock": shard.clock,
        "lead": shard.lead and (shard.lead.clock, shard.lead.origin),
        "open clock": sums and (sums.clock, sums.parties, sums.rows),
        "row count": len(shard),
    }
    parts |= {f"ledger's {name}": array for name, array in shard.ledger.to_arrays().items()}
    parts |= {f"sums {i}": array for i, array in enumerate(sums.to_arrays() if sums else ())}
    if not isinstance(shard, KeyedShard):
        return parts | {"rows": shard.rows}
    keys, rows = shard.keys(), shard.all_rows()
    if shard.spilled and shard.spill is not None:
        reader = shard.spill.reader(frozen=False)
        while (piece := reader.piece(MIN_LISTED_ROWS)) is not None:
            keys, rows = np.concatenate([keys, piece[0]]), np.concatenate([rows, piece[1]])
        reader.close()
    order = np.argsort(keys)  # because replicas may free rows at different times, and reuse others then
    return parts | {"keys": keys[order], "rows": rows[order]}


def first_difference(a: DenseShard | KeyedShard, b: DenseShard | KeyedShard) -> str | None:
    """The first difference between two replicas of a shard, as text; None if they are equal, bit for bit."""
    parts_a, parts_b = _parts(a), _parts(b)
    for name in parts_a | parts_b:
        left, right = parts_a.get(name), parts_b.get(name)
        if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
            if left.shape != right.shape:
                return f"{name}: shapes {left.shape} and {right.shape}"
            if left.tobytes() != right.tobytes():
                differ = left.reshape(len(left), -1).view(np.uint8) != right.reshape(len(left), -1).view(np.uint8)
                i = int(np.argmax(differ.any(axis=1)))
                return f"{name}, number {i}: {left[i]} and {right[i]}"
        elif left is right:
            continue
        elif isinstance(left, np.ndarray) or isinstance(right, np.ndarray) or left != right:
            return f"{name}: {left} and {right}"
    return None


def digest(shard: DenseShard | KeyedShard) -> str:
    """A hash of 16 hexadecimal digits, the same for equal replicas on any machine."""
    sums = hashlib.blake2b(digest_size=8)
    for name, part in _parts(shard).items():
        value = np.ascontiguousarray(part).reshape(-1).view(np.uint8) if isinstance(part, np.ndarray) else repr(part)
        sums.update(name.encode())
        sums.update(value if isinstance(value, np.ndarray) else value.encode())
    return sums.hexdigest()
