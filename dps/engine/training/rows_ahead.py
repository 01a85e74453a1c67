"""RowsAhead: the rows of a loop's batches, pulled while earlier batches are computed.

The promise of the clock, "a pull by a trainer at clock c sees every push that any trainer made before its clock c - s",
holds for the rows of a batch at the time of their use. These are the rules for pulls that are sent before their time:

* Of the others, the trainer knows a clock that all of them had reached when the pull was sent (the answer to a tick
  says it). What they pushed before that clock is on the servers, and so in the pull: `may_serve` of
  `coordination/clock.py`, with the staleness of the run or, if that is less, of a table of the batch.
* Of its own pushes, those that came after the pull are not in it. Rows with such keys are stale: :class:`StaleRows`.
* Rows of a table with ``cache=`` may be in the process, or on their way, and be too old for the batch. They count as
  stale from the beginning, so they are pulled when other batches have perhaps brought newer ones (`_survey`).

docs/design/training.md has the proof. In an iteration at clock c:

1. The rows of the batch are those of its pull, if one was sent and may serve the batch; else they are pulled now.
2. Pulls of the next batches are sent, as far as these may be served by what is known now.
3. The batch is computed. Pushes note which rows of the pulls on their way they make stale (`NotingCalls`).
4. Stale rows of the next batch are pulled again, behind the pushes on the same connections. Then the clock ticks.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.inputs import as_keys
from dps.engine.client.table import place_of
from dps.engine.client.ticket import Pending, R
from dps.engine.client.verbs import Changes, Keys, T, TableLike
from dps.engine.coordination.clock import may_serve, tightest
from dps.engine.state.ops import TableSpec
from dps.engine.state.partition import hash_keys
from dps.engine.training.pulled_rows import PulledRows, WantedRows
from dps.engine.training.types import Batch
from dps.engine.wire.bandwidth import LinkBudget
from dps.errors import InputError, InputTypeError

__all__ = ["NotingCalls", "RowsAhead", "StaleRows", "check_combination", "checked_ahead"]


# ---- The rule of the trainer's own pushes: which rows of a pull are stale. Pure


def checked_ahead(batches: object) -> int:
    try:
        count = operator.index(batches)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if count < 0 or isinstance(batches, bool):
        raise InputError(f"ahead is a number of batches, 0 or more, not {batches!r}")
    return count


class StaleRows:
    """Which rows of a pull the trainer itself has changed since.

    `keys` were pulled, each key once.
    `mask` says for each key whether its row is stale.

    Examples
    --------
    >>> rows = StaleRows(np.array([5, 9, 7]))
    >>> rows.change(np.array([9, 8, 9]))
    >>> rows.mask
    array([False,  True, False])
    """

    __slots__ = ("_hashes", "_keys", "_order", "mask")

    def __init__(self, keys: np.ndarray, mask: np.ndarray | None = None):
        self._keys = keys
        self._hashes: np.ndarray | None = None  # in ascending order; found when they are needed
        self._order: np.ndarray | None = None  # of the keys; None: they are in the order of their hashes
        self.mask = np.zeros(len(keys), np.bool_) if mask is None else mask.copy()

    def take(self) -> np.ndarray | None:
        """The mask, if some rows are stale; from now on they are not, because its caller pulls them again."""
        if not self.mask.any():
            return None
        mask, self.mask = self.mask, np.zeros(len(self.mask), np.bool_)
        return mask

    def change(self, keys: np.ndarray | None) -> None:
        """The trainer changes rows of these keys; None: perhaps of all."""
        if keys is None:
            self.mask[:] = True
        elif len(self.mask):
            mine, hashes = self._sorted(), hashes_of(keys)
            places = np.minimum(np.searchsorted(mine, hashes), len(mine) - 1)
            places = places[mine[places] == hashes]
            self.mask[places if self._order is None else self._order[places]] = True

    def _sorted(self) -> np.ndarray:
        """The hashes of the keys in ascending order. Keys of `distinct_keys` are in this order already."""
        if self._hashes is None:
            hashes = hashes_of(self._keys)
            self._order = None if bool((hashes[1:] > hashes[:-1]).all()) else np.argsort(hashes)
            self._hashes = hashes if self._order is None else hashes[self._order]
        return self._hashes


def hashes_of(keys: np.ndarray) -> np.ndarray:
    """Their hashes, each of another value: the hash is a bijection."""
    hashes = np.empty(len(keys), np.uint64)
    hash_keys(keys, hashes)
    return hashes


# ---- The pulls

Rows: TypeAlias = dict[TableLike, PulledRows]  # by table, as the user has named it
Masks: TypeAlias = Mapping[TableLike, "np.ndarray | None"]  # which of the keys of a batch; None: all
NOTED = frozenset({"push", "push_async", "add", "add_async", "assign", "assign_async", "push_pull", "push_pull_async"})


def check_combination(copies: bool, leases: bool) -> None:
    """Raise InputError where pull= does not go together with what else a loop is asked for."""
    remedy = "leave out pull=, and pull in the loop: keys, codes = dps.localize(ids); trainer.pull(table, keys)"
    if leases:
        raise InputError(f"with reassign=True the next batch may be another trainer's, so none is pulled for: {remedy}")
    if copies:
        raise InputError(
            "pull= gives each batch rows of its own, and n_fetch and n_push are for loops that keep a copy of the rows "
            f"for several batches: leave these two out; or {remedy}"
        )


class Standing(Protocol):
    """What is known of the other trainers: a participant of a run, or a rehearsal."""

    client: Client
    staleness: float

    @property
    def others_clock(self) -> float:
        """A clock that all other trainers have reached."""


class SentPull:
    """A pull of the rows of a later batch. All other trainers had reached `others_clock` before.

    The rows of `late` masks, by table, are not pulled yet: they count as stale.
    """

    def __init__(
        self,
        wanted: WantedRows,
        others_clock: float,
        client: Client,
        clocks: int,
        late: Mapping[TableLike, np.ndarray] = {},
    ):
        self.wanted, self.others_clock = wanted, others_clock
        self._pulls: list[tuple[Masks, Pending[dict[TableLike, np.ndarray]]]] = []
        self._stale: dict[TableLike, StaleRows] = {}
        self._names: dict[TableLike, str] = {}
        for table, keys in wanted.keys.items():
            place = place_of(table, keys)
            self._names[table] = place.table
            self._stale[table] = StaleRows(np.asarray(place.keys), late.get(table))
        self._pull(client, clocks, {table: ~late[table] if table in late else None for table in wanted.keys})

    def change(self, name: str | None, keys: np.ndarray | None) -> None:
        """The trainer changes rows of a table, or perhaps of all tables (None)."""
        for table, rows in self._stale.items():
            if name is None or self._names[table] == name:
                rows.change(keys)

    def pull_stale(self, client: Client) -> None:
        """Pull stale rows again, behind the pushes that were sent before."""
        masks = {table: rows.take() for table, rows in self._stale.items()}
        self._pull(client, 1, {table: mask for table, mask in masks.items() if mask is not None})  # the clock ticks yet

    def rows(self) -> Rows:
        values: dict[TableLike, np.ndarray] = {}
        for masks, pending in self._pulls:
            for table, fresh in pending.result().items():
                mask = masks[table]
                if mask is None:
                    values[table] = fresh
                    continue
                if table not in values:
                    values[table] = np.empty((len(mask), *fresh.shape[1:]), fresh.dtype)
                values[table][mask] = fresh
        return self.wanted.filled(values)

    def _pull(self, client: Client, clocks: int, masks: Masks) -> None:
        """Pull some of the rows, for use so many clocks later. Without a mask, these are all rows of the table."""
        asked = {
            table: self.wanted.asked[table] if mask is None else self.wanted.keys[table][mask]
            for table, mask in masks.items()
            if mask is None or mask.any()
        }
        if asked:
            self._pulls.append((masks, client.pull_ahead(asked, clocks)))


class BatchAhead:
    """A batch of the loop, the rows that it wants, and their pull if one was sent."""

    __slots__ = ("batch", "index", "pull", "wanted")

    def __init__(self, index: int, batch: Batch):
        self.index, self.batch = index, batch
        self.wanted: WantedRows | None = None
        self.pull: SentPull | None = None


class NotingCalls:
    """A trainer's calls within the loop: those of its client, noting which rows they change.

    `note` is called with a function that makes the call, and what the call changes: a table and keys, or a mapping.
    """

    def __init__(self, client: Client, note: Callable[..., object]):
        self._client, self._note = client, note

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._client, name)
        return functools.partial(self._note, verb) if name in NOTED else verb


class RowsAhead:
    """The rows of a loop's batches; see the module.

    `pull` gives the ids whose rows a batch needs: ``{table: ids}``.
    `ahead` is how many batches ahead of their time rows are pulled.
    The trainer's pushes go through `calls` within the loop.
    """

    def __init__(self, standing: Standing, pull: Callable[[Batch], Mapping[Any, Keys]], ahead: int):
        if not callable(pull):
            raise InputTypeError(
                f"pull is a function of a batch that returns a dict, {{table: ids}}; not {type(pull).__name__}"
            )
        self._standing, self._client = standing, standing.client
        self._pull, self._ahead = pull, checked_ahead(ahead)
        self._budget = LinkBudget(config.bandwidth())
        self._coming: deque[BatchAhead] = deque()
        self._place = self._next_op()  # behind the last op that was noted
        self.calls = NotingCalls(self._client, self._noted)

    def iterate(self, batches: Iterator[tuple[int, int, Batch]]) -> Iterator[tuple[int, Batch, Rows]]:
        """(index, batch, rows) of each batch; between two of them `finish` is called, and the clock ticks."""
        self._place = self._next_op()
        while self._look_ahead(batches):
            current = self._coming[0]
            rows = self._rows(current)
            self._coming.popleft()
            self._send()
            self._foresee()
            yield current.index, current.batch, rows
            self._place = self._next_op()  # a tick has led there

    def finish(self, send_merged: Callable[[], None]) -> None:
        """The batch is computed: send what was merged, and pull the stale rows of the next batch again."""
        self._notice_others()
        send_merged()  # whose keys were noted
        self._place = self._next_op()
        pull = self._coming[0].pull if self._coming else None
        if pull is not None:
            pull.pull_stale(self._client)

    def change(self, table: Any, keys: Keys) -> None:
        """The trainer changes rows: of a table, or of those of a mapping, {table: (keys, values)}."""
        several = isinstance(table, Mapping)
        for each, some in [(each, given[0]) for each, given in table.items()] if several else [(table, keys)]:
            place = place_of(each, some)
            flat = flat_or_all(place.table, place.keys)
            for pull in self._sent():
                pull.change(place.table, flat)

    def forget(self) -> None:
        """What was pulled before does not count any more."""
        for pull in self._sent():
            pull.change(None, None)

    # -- inside

    def _look_ahead(self, batches: Iterator[tuple[int, int, Batch]]) -> bool:
        """Take batches until the next one and those ahead of it are here; False where there is none left."""
        while len(self._coming) <= self._ahead:
            upcoming = next(batches, None)
            if upcoming is None:
                break
            self._coming.append(BatchAhead(*upcoming[1:]))
        return bool(self._coming)

    def _rows(self, current: BatchAhead) -> Rows:
        pull, clock = current.pull, self._client.session.own.clock
        if pull is not None and may_serve(pull.others_clock, clock, self._bound(pull.wanted)):
            return pull.rows()
        wanted = self._wanted(current)
        return wanted.filled(self._client.pull(wanted.asked)) if len(wanted) else {}

    def _foresee(self) -> None:
        """Tell the caches which rows the next batches want, so that these stay for longest."""
        cached, clock = self._client.session.cached, self._client.session.own.clock
        if cached is None or not cached.is_used:
            return
        named = [
            (clock + step, place_of(table, keys))
            for step, coming in enumerate(self._coming, 1)
            for table, keys in self._wanted(coming).keys.items()
        ]
        cached.expect([(at, place.table, np.asarray(place.keys)) for at, place in named])

    def _send(self) -> None:
        """Send pulls for the next batches, as far as they may serve, and as `dps.limits.bandwidth` allows."""
        standing, clock, now = self._standing, self._client.session.own.clock, self._client.session.now()
        for step, coming in enumerate(self._coming, 1):
            if self._budget.due(now) > now:  # then they are pulled when they are needed
                return
            serves = functools.partial(may_serve, standing.others_clock, clock + step)
            if coming.pull is None and serves(standing.staleness):
                wanted = self._wanted(coming)
                if len(wanted) and serves(self._bound(wanted)) and not self._aggregates(wanted):
                    late, nbytes = self._survey(wanted, step)
                    self._budget.spend(nbytes, now)
                    coming.pull = SentPull(wanted, self._level(wanted, clock + step), self._client, step, late)

    def _wanted(self, batch: BatchAhead) -> WantedRows:
        """The rows that a batch wants; its user is asked once for each batch."""
        if batch.wanted is None:
            batch.wanted = WantedRows(self._client, self._pull(batch.batch), "pull=")
        return batch.wanted

    def _aggregates(self, wanted: WantedRows) -> bool:
        """Whether one of the tables shows the pushes of a clock only when it has ended."""
        return any(spec.aggregate is not None for spec in self._specs(wanted))

    def _bound(self, wanted: WantedRows) -> float:
        """The staleness that holds for a batch: that of the run, or of a table that allows less."""
        if self._client.session.gate is None:
            return self._standing.staleness
        return tightest(self._standing.staleness, *(spec.staleness for spec in self._specs(wanted)))

    def _level(self, wanted: WantedRows, clock: int) -> float:
        """A clock that all others had reached before the rows were read that a pull for use at `clock` gives: those of
        a table with ``cache=`` may have been read earlier."""
        others = self._standing.others_clock
        return min(others, clock - self._bound(wanted)) if any(s.cache.nbytes for s in self._specs(wanted)) else others

    def _survey(self, wanted: WantedRows, step: int) -> tuple[dict[TableLike, np.ndarray], int]:
        """Which rows of a batch, that comes so many clocks later, are not pulled yet; and how many bytes the others
        take of the link: keys there, and rows back.

        Rows that the process has, or that are on their way, may be too old for the batch. They are pulled at the end of
        the batch before, because rows that are pulled later serve more batches.
        """
        late, nbytes = dict[TableLike, np.ndarray](), 0
        for (table, keys), spec in zip(wanted.keys.items(), self._specs(wanted), strict=True):
            count, cached = len(keys), self._client.session.cached
            place = place_of(table, wanted.asked[table])
            if cached is not None and place.column is None and cached.has(spec, place.keys):
                is_late, is_away = cached.survey(spec, np.asarray(place.keys), step)
                if step > 1 and is_late.any():
                    late[table] = is_late
                count = int(np.count_nonzero(is_away if step > 1 else is_away | is_late))
            nbytes += count * (8 + spec.dim * spec.itemsize)
        return late, nbytes

    def _specs(self, wanted: WantedRows) -> Iterator[TableSpec]:
        return (self._client.spec_of(place_of(table, keys).table) for table, keys in wanted.keys.items())

    def _sent(self) -> Iterator[SentPull]:
        return (coming.pull for coming in self._coming if coming.pull is not None)

    def _noted(
        self, verb: Callable[..., R], table: TableLike | Changes[T], keys: Keys = None, *rest: object, **named: object
    ) -> R:
        self._notice_others()
        self.change(table, keys)
        try:
            return verb(table, keys, *rest, **named)
        finally:
            self._place = self._next_op()

    def _next_op(self) -> tuple[int, int]:
        """The place in the program of the trainer's next op."""
        own = self._client.session.own
        return own.clock, own.number

    def _notice_others(self) -> None:
        """If ops were made that were not noted, any rows may have changed."""
        if self._next_op() != self._place:
            self.forget()
            self._place = self._next_op()


def flat_or_all(table: str, keys: Keys) -> np.ndarray | None:
    """Keys, flat; None for what may stand for any rows of a table: a slice, or a sparse vector."""
    if keys is None or isinstance(keys, slice) or hasattr(keys, "nnz") or getattr(keys, "is_sparse", False):
        return None
    return as_keys(keys, table)[0]
