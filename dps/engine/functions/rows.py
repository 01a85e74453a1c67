"""Rows: what the part of a function sees of one shard. Pure.

A reading function sees the shard's memory itself, through views that cannot be written. A changing function gets a
copy at its first use of `values` or `state`, or fresh memory by `replace`; the server puts these in place of the
shard's rows when the function has succeeded on all shards. So whatever a function does before it fails leaves no trace.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dps.engine.core.blocks import empty
from dps.engine.state.ops import Selected, TableSpec
from dps.engine.state.partition import distinct, group
from dps.errors import InputError, NotFiniteError

__all__ = ["Effect", "Rows", "lent"]


class Effect(NamedTuple):
    """Whole rows that a function has made for one shard."""

    keys: np.ndarray | None
    start: int
    rows: np.ndarray  # [m, dim + slots]
    deleted: np.ndarray | None = None  # keys of rows that go


class Writable:
    """Memory that a function may write, and that is taken away from it when the function has ended."""

    def __init__(self, rows: np.ndarray):
        self._rows = rows
        self.array: np.ndarray | None = rows
        self._kept: Callable[[], np.ndarray | None] = lambda: None  # what is left of views, once `array` is gone
        if rows.size:
            self.array, self._kept = lent(rows)

    def take_away(self) -> np.ndarray:
        """The memory; a copy, if the function has kept a view of it."""
        self.array = None
        return self._rows.copy() if self._kept() is not None else self._rows


def lent(rows: np.ndarray, writable: bool = True) -> tuple[np.ndarray, weakref.ref[np.ndarray]]:
    """An array over the same memory, and a reference to what all views that are made of it keep alive.

    The views of an array of numpy have its base for their base, and not the array. So the base is an array over a
    memoryview, which has none.
    """
    known = rows.dtype.kind != "V"  # else a memoryview has no name for its numbers: it is bfloat16
    memory = memoryview(rows if known else rows.view(np.uint8))
    base = np.asarray(memory if writable else memory.toreadonly())
    return base if known else base.view(rows.dtype), weakref.ref(base)


class Rows:
    """The rows of one shard, as the part of a function sees them.

    Attributes
    ----------
    spec : TableSpec
        The table.
    shard : int
        The shard's number.
    start : int
        Of a dense table: the number of the first row.
    time : float
        Seconds since the epoch, the same on all shards and in each repetition of the call.
    """

    def __init__(
        self, spec: TableSpec, shard: int, selection: Selected, changes: bool = False, seed: int = 0, time: float = 0.0
    ):
        self.spec = spec
        self.shard = shard
        self.start = selection.start
        self.time = time
        self._selection = selection
        self._changes = changes
        self._seed = seed
        self._copy: Writable | None = None  # [m, dim + slots]
        self._replaced: list[tuple[int, Writable]] = []
        self._deleted: np.ndarray | None = None  # bool[m]
        self._put: tuple[np.ndarray, np.ndarray] | None = None  # keys and rows, which the call may not have named

    def __len__(self) -> int:
        return len(self._selection.rows)

    def __repr__(self) -> str:
        return f"<dps.functions.Rows: {len(self)} rows of shard {self.shard} of table {self.spec.name!r}>"

    @functools.cached_property
    def keys(self) -> np.ndarray:
        """The keys of the rows, int64[m]; of a dense table their numbers."""
        keys = self._selection.keys
        return np.arange(self.start, self.start + len(self)) if keys is None else keys

    @functools.cached_property
    def present(self) -> np.ndarray:
        """Whether the table has the row, bool[m]; one that it has not reads as its initial value."""
        present = self._selection.present
        return np.ones(len(self), np.bool_) if present is None else present

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """Random numbers: the same in each repetition of the call, others on each shard."""
        return np.random.default_rng([self._seed, self.shard])

    @property
    def before(self) -> np.ndarray:
        """The values before the function, [m, dim], read-only and without a copy."""
        return _read_only(self._selection.rows[:, : self.spec.dim])

    @property
    def state_before(self) -> np.ndarray:
        """The optimizer's state before the function, [m, slots], read-only."""
        return _read_only(self.spec.state_of(self._selection.rows))

    @property
    def values(self) -> np.ndarray:
        """The values, [m, dim]. A changing function may change them."""
        return self._written()[:, : self.spec.dim] if self._changes else self.before

    @values.setter
    def values(self, values: np.ndarray) -> None:
        self._assign(self.values, values, "values")

    @property
    def state(self) -> np.ndarray:
        """The optimizer's state, [m, slots]. A changing function may change it."""
        return self.spec.state_of(self._written()) if self._changes else self.state_before

    @state.setter
    def state(self, state: np.ndarray) -> None:
        self._assign(self.state, state, "state")

    def replace(self, start: int, stop: int) -> np.ndarray:
        """Fresh memory [stop - start, dim] that takes the place of the values of rows start to stop - 1 at the end.

        The numbers count the rows seen here from 0. What is not written holds garbage. It costs no copy of the rows.
        """
        if not self._changes:
            raise InputError("a reading function changes no rows: declare it with @dps.function(changes=True)")
        if not 0 <= start <= stop <= len(self):
            raise InputError(f"rows {start} to {stop - 1} of {len(self)}")
        dim, slots = self.spec.dim, self.spec.slots
        fresh = empty((stop - start, dim + slots), self._selection.rows.dtype)
        if slots:
            fresh[:, dim:] = self._selection.rows[start:stop, dim:]
        self._replaced.append((start, Writable(fresh)))
        return self._replaced[-1][1].array[:, :dim]  # type: ignore[index]

    def delete(self, which: np.ndarray) -> int:
        """Delete rows: those of a mask bool[m]. How many there are.

        They go when the function has succeeded on all shards, whatever else it does to them. Rows of a dense table get
        their initial values and state.
        """
        if not self._changes:
            raise InputError("a reading function deletes no rows: declare it with @dps.function(changes=True)")
        mask = np.asarray(which)
        if mask.dtype != np.bool_ or mask.shape != (len(self),):
            raise InputError(
                f"rows are deleted by a mask, bool[{len(self)}]; the function gave {mask.dtype} {mask.shape}"
            )
        mask = mask & self.present
        self._deleted = mask if self._deleted is None else self._deleted | mask
        return int(np.count_nonzero(mask))

    def put(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Make rows of this shard, or replace them, also such that the call did not name.

        They count together with all else that the function does, or not at all. So a function can keep an index of what
        it changes. Of a key that was named as well, the row given here counts. A call puts rows once.

        Parameters
        ----------
        keys : ndarray of int64 [n]
            Of a keyed table, each once, and each with its place on this shard (`shard`).
        values : ndarray [n, dim]

        Raises
        ------
        InputError
            A dense table, a table whose rows have more than their values (optimizer state, or the records of
            ``expire=`` and ``max_bytes=``), repeated keys, keys of another shard, values of another shape.
        """
        if not self._changes:
            raise InputError("a reading function puts no rows: declare it with @dps.function(changes=True)")
        spec = self.spec
        if not spec.keyed or spec.slots:
            raise InputError(
                f"table {spec.name!r}: a function puts rows into keyed tables whose rows are values only, and these "
                + (f"have {spec.slots} columns of state or records" if spec.keyed else "rows are dense")
            )
        if self._put is not None:
            raise InputError(f"a function puts rows once; {len(self._put[0])} rows were put before")
        placed = np.array(keys, np.int64)
        rows = np.array(values, spec.dtype, order="C")
        if placed.ndim != 1 or rows.shape != (len(placed), spec.dim):
            raise InputError(f"{placed.shape} keys with values {rows.shape}, and the rows have dim {spec.dim}")
        if len(distinct(placed)) != len(placed):
            raise InputError(f"{len(placed)} rows are put, and only {len(distinct(placed))} keys differ")
        starts = group(placed, spec.shard_map, spec.name).starts
        if starts[self.shard + 1] - starts[self.shard] != len(placed):
            raise InputError(
                f"{len(placed)} rows are put on shard {self.shard} of table {spec.name!r}, and only "
                f"{starts[self.shard + 1] - starts[self.shard]} of their keys lie there: give the table a partition="
            )
        self._put = placed, rows

    def effect(self) -> Effect | None:
        """What the function has done; None: nothing. To be called once, when it has ended.

        Raises
        ------
        NotFiniteError
            NaN or infinity in a table that refuses them.
        InputError
            The values were changed, and not the state from which they follow.
        """
        made = self._effect_on_named()
        if self._put is None:
            return made
        keys, rows = self._put
        self._check_finite(rows)
        if made is None:
            return Effect(keys, 0, rows)
        assert made.keys is not None  # because the table is keyed
        stays = ~np.isin(made.keys, keys)
        gone = None if made.deleted is None else made.deleted[~np.isin(made.deleted, keys)]
        return Effect(np.concatenate([made.keys[stays], keys]), 0, np.concatenate([made.rows[stays], rows]), gone)

    def _effect_on_named(self) -> Effect | None:
        made = self._made()
        if made is None and self._deleted is None:
            return None
        which, rows = made or (slice(0, 0), self._selection.rows[:0])
        if self._deleted is not None:  # the rows that stay, by their numbers
            numbers = np.arange(len(self))[which]
            stays = ~self._deleted[numbers]
            which, rows = numbers[stays], rows[stays]
        self._check_finite(rows)
        if self.spec.optimizer.derived:
            self._check_derived(self._selection.rows[which], rows)
        if isinstance(which, slice):
            keys = self._selection.keys
            return Effect(None if keys is None else keys[which], self.start + which.start, rows)
        gone = None if self._deleted is None or not self._deleted.any() else self.keys[self._deleted]
        return Effect(self.keys[which], 0, rows, gone)

    def _check_finite(self, rows: np.ndarray) -> None:
        values = rows[:, : self.spec.dim]
        if self.spec.finite and not self.spec.is_whole and not np.isfinite(values).all():
            raise NotFiniteError(f"table {self.spec.name!r} refuses NaN and infinity, and the function made some")

    def _check_derived(self, old: np.ndarray, new: np.ndarray) -> None:
        """Refuse new values beside an old state from which the optimizer would derive the old values again."""
        state_of, dim = self.spec.state_of, self.spec.dim
        if np.array_equal(state_of(old), state_of(new)) and not np.array_equal(old[:, :dim], new[:, :dim]):
            raise InputError(
                f"table {self.spec.name!r}: {type(self.spec.optimizer).__name__} derives the values from its state, so "
                f"the next push would undo the change; change `rows.state`, too"
            )

    def _made(self) -> tuple[slice | np.ndarray, np.ndarray] | None:
        dim, replaced = self.spec.dim, [(first, memory.take_away()) for first, memory in self._replaced]
        if self._copy is not None:
            rows = self._copy.take_away()
            for first, fresh in replaced:
                rows[first : first + len(fresh), :dim] = fresh[:, :dim]
            return slice(0, len(rows)), rows
        if not replaced:
            return None
        if len(replaced) == 1:
            first, fresh = replaced[0]
            return slice(first, first + len(fresh)), fresh
        numbers = np.concatenate([np.arange(first, first + len(fresh)) for first, fresh in replaced])
        return numbers, np.concatenate([fresh for _, fresh in replaced])

    def _written(self) -> np.ndarray:
        if self._copy is None:
            rows = empty(self._selection.rows.shape, self._selection.rows.dtype)
            rows[...] = self._selection.rows
            self._copy = Writable(rows)
        assert self._copy.array is not None
        return self._copy.array

    def _assign(self, place: np.ndarray, given: np.ndarray, what: str) -> None:
        if isinstance(given, np.ndarray) and given.__array_interface__ == place.__array_interface__:
            return  # because `rows.values *= 2` assigns the array to itself
        if not self._changes:
            raise InputError("a reading function changes no rows: declare it with @dps.function(changes=True)")
        shape = np.shape(given)
        if shape not in ((), place.shape):
            raise InputError(f"the {what} of {len(self)} rows have shape {place.shape}; the function gave {shape}")
        place[...] = given


def _read_only(view: np.ndarray) -> np.ndarray:
    view.flags.writeable = False
    return view
