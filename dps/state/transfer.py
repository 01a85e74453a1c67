"""A copy of a shard, made piece by piece while the shard goes on changing.

A `Dump` begins with all that is not rows, then gives the rows in the order of their birth, as they are at that moment.
From its beginning on every op of the shard must reach the `Joining` side too, in one order with the pieces. That side
carries an op out on the rows it has; for the others it does nothing: they will come later, with that op in them.
The last piece brings the two into step, and from then on ops are carried out whole.

Two things need no rows: open sums are complete from the beginning (an op that is summed up touches no row), and the
ledger comes with the last piece. It cannot be kept on the way, since an answer is computed from rows that may not be
there yet.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from dps.errors import ProtocolError
from dps.state.ledger import Ledger
from dps.state.ops import Op, TableSpec
from dps.state.shard import DenseShard, KeyedShard

__all__ = ["Dump", "Joining", "digest", "same"]

LOOKS = 8  # at the keys born while a dump was being made; at the last look all of them go into one piece

Piece = tuple[dict[str, Any], list[np.ndarray]]  # values for JSON, and arrays


class Dump:
    """A shard from now on, as pieces.

    The arrays are views of rows that the next op may change or move: send or copy them before.

    Parameters
    ----------
    shard : DenseShard or KeyedShard
        What to copy.

    Examples
    --------
    >>> from dps.state.ops import ADD
    >>> shard = KeyedShard(TableSpec("w", shards=1), 0)
    >>> op = Op(ADD, np.array([7, 8]), 0, np.ones((2, 1), np.float32), 0, 1)
    >>> _ = shard.apply(op)
    >>> dump, joining = Dump(shard), Joining(shard.spec, 0)
    >>> joining.begin(*dump.head())
    >>> while (piece := dump.piece(most=8)) is not None:
    ...     joining.add(*piece)
    ...     _ = shard.apply(op), joining.apply(op)
    >>> same(shard, joining.finish()) is None
    True
    """

    def __init__(self, shard: DenseShard | KeyedShard):
        self.shard = shard
        self._version = shard.version
        self._given = 0  # rows
        self._keys = shard.index.keys() if isinstance(shard, KeyedShard) else None
        self._looks = 0
        self._done = False

    def head(self) -> Piece:
        """All that is neither rows nor ledger: to be taken before the shard changes again."""
        shard = self.shard
        assert shard.version == self._version, "the shard has changed since the dump was begun"
        meta = {"clock": shard.clock, "version": shard.version, "rows": len(shard), "sums": None}
        if shard.sums is None:
            return meta, []
        return {**meta, "sums": [shard.sums.clock, shard.sums.parties, shard.sums.rows]}, shard.sums.to_arrays()

    def piece(self, most: int) -> Piece | None:
        """The next rows, about `most` bytes of them; None when the piece before was the last.

        Rows that are born while the dump is made come at the end, and the last piece may be larger for that.
        """
        if self._done:
            return None
        shard, first, end = self.shard, self._given, len(self.shard)
        count = max(1, most // (8 + shard.width * shard.rows.itemsize))
        arrays = []
        if self._keys is not None:
            assert isinstance(shard, KeyedShard)
            if first == len(self._keys) < end:
                self._keys = shard.index.keys()
                self._looks += 1
                count = count if self._looks < LOOKS else end
            end = min(end, first + count)
            arrays = [self._keys[first:end]]
            end = first + len(arrays[0])
        else:
            end = min(end, first + count)
        arrays.append(shard.rows[first:end])
        self._given, self._done = end, end == len(shard)
        meta: dict[str, Any] = {"first": first, "last": self._done}
        if self._done:
            ledger = shard.ledger.to_arrays()
            meta["ledger"] = list(ledger)
            arrays += ledger.values()
        return meta, arrays


class _KeyedSoFar(KeyedShard):
    """Some rows of a shard: ops give birth to no others, those will come."""

    def _change(self, op: Op) -> None:
        super()._change(self._part(op))

    def _part(self, op: Op) -> Op:
        """The op on the rows that are here."""
        assert op.keys is not None
        index = np.empty(len(op.keys), np.int64)
        if not self.index.find(op.keys, index):
            return op
        known = index >= 0
        return op._replace(keys=op.keys[known], values=op.values[known])


class Joining:
    """A shard that is being made of the pieces of a :class:`Dump` and of the ops since. See there for an example.

    Parameters
    ----------
    spec : TableSpec
        The table.
    number : int
        Which of its shards.
    """

    def __init__(self, spec: TableSpec, number: int):
        self.spec, self.number = spec, number
        # A dense one has all its rows: what ops make of those to come does not matter, pieces replace them whole.
        self._shard = _KeyedSoFar(spec, number) if spec.keyed else DenseShard(spec, number)
        self._where = f"the dump of shard {number} of table {spec.name!r}"
        self._rows = 0  # that have come
        self._complete = False

    def __len__(self) -> int:
        return len(self._shard) if self._complete else self._rows

    @property
    def nbytes(self) -> int:
        """What it takes in memory by now."""
        return self._shard.nbytes

    @property
    def version(self) -> int:
        """How many changes of the shard are in."""
        return self._shard.version

    def begin(self, meta: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Take what :meth:`Dump.head` gave."""
        self._shard.restore(meta["clock"], meta["version"], Ledger())
        if meta["sums"] is not None:
            clock, parties, rows = meta["sums"]
            self._shard.sums = self._shard.new_sums(clock)
            self._shard.sums.parties = parties
            self._shard.sums.rows = rows
            self._shard.sums.load(arrays)

    def add(self, meta: dict[str, Any], arrays: list[np.ndarray]) -> None:
        """Take what :meth:`Dump.piece` gave."""
        shard, first = self._shard, meta["first"]
        rows = arrays[1] if isinstance(shard, KeyedShard) else arrays[0]
        if self._complete or first != self._rows:
            raise ProtocolError(f"{self._where} goes on at row {first}, and {len(self)} rows are here")
        if isinstance(shard, KeyedShard):
            shard.load(arrays[0], rows)
        else:
            shard.load(shard.low + first, rows)
        self._rows += len(rows)
        if self.spec.keyed and len(shard) != self._rows:
            raise ProtocolError(f"{self._where} holds a key twice")
        if meta["last"]:
            names = meta["ledger"]
            shard.ledger = Ledger.from_arrays(dict(zip(names, arrays[-len(names) :], strict=True)))
            if isinstance(shard, _KeyedSoFar):  # an ordinary one from now on
                shard.__class__ = KeyedShard  # type: ignore[assignment]
            self._complete = True

    def apply(self, op: Op) -> bool:
        """Carry out an op of the shard, as far as its rows are here."""
        return self._shard.apply(op if self._complete else op._replace(origin=0, answer=False))

    def finish(self) -> DenseShard | KeyedShard:
        """The shard, once the last piece is here: from then on an ordinary one."""
        if not self._complete:
            raise ProtocolError(f"{self._where} has ended before its last piece; {len(self)} rows are here")
        return self._shard


def _parts(shard: DenseShard | KeyedShard) -> dict[str, Any]:
    """All that copies of a shard have in common, as plain values and arrays."""
    sums = shard.sums
    parts: dict[str, Any] = {"spec": shard.spec, "number": shard.number, "version": shard.version}
    parts |= {
        "clock": shard.clock,
        "open clock": sums and (sums.clock, sums.parties, sums.rows),
        "row count": len(shard),
    }
    parts |= {f"ledger's {name}": array for name, array in shard.ledger.to_arrays().items()}
    parts |= {f"sums {i}": array for i, array in enumerate(sums.to_arrays() if sums else ())}
    if isinstance(shard, KeyedShard):
        parts["keys"] = shard.index.keys()
    parts["rows"] = shard.rows[: len(shard)]
    return parts


def same(a: DenseShard | KeyedShard, b: DenseShard | KeyedShard) -> str | None:
    """The first difference between two copies of a shard, in words; None if they are equal, bit for bit."""
    left, right = _parts(a), _parts(b)
    for name in left | right:
        one, other = left.get(name), right.get(name)
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            if one.shape != other.shape:
                return f"{name}: shapes {one.shape} and {other.shape}"
            if one.tobytes() != other.tobytes():
                differ = one.reshape(len(one), -1).view(np.uint8) != other.reshape(len(one), -1).view(np.uint8)
                i = int(np.argmax(differ.any(axis=1)))
                return f"{name}, number {i}: {one[i]} and {other[i]}"
        elif one is other:
            continue
        elif isinstance(one, np.ndarray) or isinstance(other, np.ndarray) or one != other:
            return f"{name}: {one} and {other}"
    return None


def digest(shard: DenseShard | KeyedShard) -> str:
    """16 hexadecimal digits that are the same for equal copies, on any machine."""
    whole = hashlib.blake2b(digest_size=8)
    for name, part in _parts(shard).items():
        value = np.ascontiguousarray(part).reshape(-1).view(np.uint8) if isinstance(part, np.ndarray) else repr(part)
        whole.update(name.encode())
        whole.update(value if isinstance(value, np.ndarray) else value.encode())
    return whole.hexdigest()
