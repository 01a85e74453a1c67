"""RowCache: rows of one table that the trainers of a process keep, so that they need not pull these rows again. Pure.

Theory of operation
-------------------
The promise of a run (`coordination/clock.py`) is that a pull by a trainer at clock c sees every push that any trainer
made before its clock c - s, and that a trainer sees all of its own pushes. A row from the cache has to keep it, too.

**Pushes of other processes.** A row has a *level*: a clock that all other trainers had reached before the row was
pulled. So the row has all of their pushes before this clock. A trainer at clock c may use it if the level is c - s or
more, and pulls it again otherwise. It may also have grown too old (*until*), where the table bounds that in seconds.

**Pushes of the trainers of this process.** All of these go through the cache, whose rows have all of them, at any
level:

1. A push to a row that is in the cache *changes* the row here before it is sent: it is added, or stepped by SGD. Where
   only the servers can tell what becomes of the row, because its optimizer has a state, the row goes.
2. A pull and a push that are on their way at the same time may come to a server in either order, so the rows of such a
   pull are not kept if the push names them, too. Only where a trainer pulls behind its own push it is known that the
   rows have it, because the server takes what comes over one connection in order.
3. A push that failed may or may not have been applied, and may be sent again later. So its rows go, and no rows of its
   keys are kept until it has been acknowledged. Of one that was refused for good the rows go, too.

So each row contains, beside the pushes before its level, every acknowledged push of this process. Therefore the level
that one trainer's pull has given to a row holds for the other trainers of the process, too: all pushes that they may
miss are those of trainers elsewhere, and these are among the others of each of them.

**A lost history.** The rows belong to one number of the table and to one *epoch* of the servers' placement: a table
that was restored, split or merged has another number, and when a server has died the epoch is another one. Then all
rows go, and rows that were pulled before are not kept. The pushes on their way stay known, because they are sent again.
A trainer that knows of the old table only gets no rows from here.

**Rows that are too old, and yet are here.** A row may be too old only because no trainer has asked whether it has
changed. :meth:`RowCache.read` hands such rows out as well, marked as *aged*: `refreshed_rows.py` asks the servers
which of them differ. Each counts as a row that was pulled when the servers were asked, whether its numbers came from
there or from here. So rules 1 to 3 hold for it as for any pull: where a push has changed it since it was handed out, it
is not kept, and the row that is here stays with its old level.

**Rows that are on their way.** A row that one pull has asked for need not be asked for by the next one
(:meth:`RowCache.join`), where its level is high enough for that one, too, and no push of the process has spoilt it up
to then. Such a row has all pushes that the process made before the second pull: it is as if that pull had been sent
with the first one. What is pushed later concerns both pulls alike. Only the first one keeps the row.

**Memory.** Rows lie in one array with room for as many as the budget allows. Where it is full, rows go by the rules of
`eviction.py`.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dps.engine.client.comparisons import Comparisons
from dps.engine.client.eviction import Coming, Eviction
from dps.engine.client.push_meetings import PushMeetings
from dps.engine.client.stamped_rows import StampedRows
from dps.engine.core.shards.rows import gather
from dps.engine.state.ops import TableSpec

__all__ = ["CacheShelf", "JoinedRows", "OpenChange", "OpenPull", "PushOutcome", "RowCache"]
__all__ += ["History", "Step", "in_doubt"]

ROW_BYTES = 45  # of a row beside its values: its key in the index, its level, its age, its last use
MOST_FAILED = 64  # pushes that failed, whose keys are remembered one by one; with more of them, no row is kept

History = tuple[int, int]  # the number of the table, and the epoch of the placement
Step = Callable[[np.ndarray, np.ndarray, np.ndarray], None]  # changes rows[places] by some values


class PushOutcome(enum.Enum):
    """What is known of a push that was sent."""

    OPEN = enum.auto()
    ACKNOWLEDGED = enum.auto()
    REFUSED = enum.auto()  # for good: no part of it is sent again
    DOUBTFUL = enum.auto()  # a part has failed, and may be sent again, or be applied yet


class OpenPull:
    """Rows that were asked for: the `keys`, and which of them are not to be kept (`spoilt`)."""

    __slots__ = ("__weakref__", "_order", "history", "keys", "level", "spoilt", "until")

    def __init__(self, keys: np.ndarray, level: float, until: float, history: History):
        self.keys, self.level, self.until, self.history = keys, level, until, history
        self.spoilt = np.zeros(len(keys), np.bool_)
        self._order: np.ndarray | None = None  # the order that sorts the keys; made at the first look-up

    def serves(self, level: float, now: float, history: History) -> bool:
        """Whether the rows will have all pushes before clock `level`, and are those that a reader may have."""
        return self.history == history and self.level >= level and self.until >= now

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Where the pull has these keys; -1 for those that it has not asked for."""
        if self._order is None:
            self._order = np.argsort(self.keys, kind="stable")
        at = np.searchsorted(self.keys, keys, sorter=self._order)
        at = self._order[np.minimum(at, len(self.keys) - 1)]
        return np.where(self.keys[at] == keys, at, -1)

    def spoil(self, keys: np.ndarray | None) -> None:
        """Some of the keys are changed meanwhile; None: perhaps all."""
        if keys is None:
            self.spoilt[:] = True
        else:
            self.spoilt |= np.isin(self.keys, keys)


class JoinedRows(NamedTuple):
    """Rows that a reader gets from a pull which was sent before: at `places` of what it asks for, those `at` places of
    the pull."""

    pull: OpenPull
    places: np.ndarray
    at: np.ndarray


class OpenChange:
    """A change of rows that is on its way to the servers.

    `keys` are those of the rows; None: perhaps of all.
    `trainer` is what makes it: pulls of the same trainer behind it see it. None: it has gone.
    `outcome` tells what has become of it.
    """

    __slots__ = ("dropped", "keys", "outcome", "trainer")

    def __init__(self, trainer: object, keys: np.ndarray | None):
        self.trainer, self.keys = trainer, keys
        self.outcome: Callable[[], PushOutcome] = unsent
        self.dropped = False  # the push has failed, and its rows were removed


def unsent() -> PushOutcome:
    """The outcome of a push before it is sent."""
    return PushOutcome.OPEN


def in_doubt() -> PushOutcome:
    """The outcome of a push of which no more will be known."""
    return PushOutcome.DOUBTFUL


class RowCache:
    """Rows of one table, for all trainers of one run in this process. Any thread may use it.

    Parameters
    ----------
    spec : TableSpec
        Its `cache` says how many bytes there are.

    Attributes
    ----------
    room : int
        How many rows there may be.
    comparisons : Comparisons
        Whether rows that are too old are compared.
    replaced : set of int
        The origins of trainers of which another attempt has used the cache.

    Examples
    --------
    >>> from dps.engine.state.caching import Cache
    >>> cache = RowCache(TableSpec("w", dim=2, cache=Cache("1 kB")))
    >>> pull = cache.begin_pull("trainer", np.array([7, 8]), level=3, until=10.0, history=(0, 0))
    >>> cache.keep(pull, np.float32([[1, 2], [3, 4]]))
    >>> rows = np.zeros((2, 2), np.float32)
    >>> cache.read(np.array([8, 9]), level=3, now=9.0, history=(0, 0), rows=rows), rows[0]
    (array([False,  True]), array([3., 4.], dtype=float32))
    >>> cache.read(np.array([8, 9]), level=4, now=9.0, history=(0, 0), rows=rows)  # all pushes before clock 4
    array([ True,  True])
    """

    def __init__(self, spec: TableSpec):
        self._lock = threading.Lock()
        self._uses, self.replaced = 0, set[int]()
        self._history: History = (spec.id, 0)
        self._furnish(spec)
        self._pulls: weakref.WeakSet[OpenPull] = weakref.WeakSet()  # weak, because nothing ends a pull that is given up
        self._changes: list[OpenChange] = []

    def _furnish(self, spec: TableSpec) -> None:
        """Begin without rows, for a table of that definition."""
        row_bytes = spec.dim * np.dtype(spec.dtype).itemsize
        self.room = max(1, spec.cache.nbytes // (row_bytes + ROW_BYTES))
        self.comparisons = Comparisons(row_bytes)
        self._kept = StampedRows(self.room, spec.dim, np.dtype(spec.dtype), spec.salt)  # stamped by their last uses
        self._level, self._until = np.empty(self.room, np.float64), np.empty(self.room, np.float64)
        self._eviction = Eviction(self._kept, spec.salt)

    def __len__(self) -> int:
        return len(self._kept)

    def enter(self, spec: TableSpec, epoch: int) -> History:
        """A trainer knows of that definition of the table, and of that epoch of the placement: what it is to name."""
        with self._lock:
            if spec.id > self._history[0]:
                self._furnish(spec)
            if spec.id > self._history[0] or epoch > self._history[1]:
                self._kept.remove(None)
                self._history = max(spec.id, self._history[0]), max(epoch, self._history[1])
        return spec.id, epoch

    def read(
        self,
        keys: np.ndarray,
        level: float,
        now: float,
        history: History,
        rows: np.ndarray,
        aged: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Put the rows of the keys that are here, with all pushes before clock `level`, into rows [m, dim].

        `history` is what :meth:`enter` has said to the reader. With `aged`, rows that are here and too old are put
        there, too, and flagged in this array of bool; they count as missing.

        Returns
        -------
        ndarray of bool or None
            Which of the rows are missing; None: none of them.
        """
        with self._lock:
            self._look_at_changes()
            places = self._kept.find(keys)
            missing = (places < 0) | (history[0] != self._history[0])
            if not missing.all():
                old = ~missing & ((self._level[places] < level) | (self._until[places] < now))
                missing |= old
                used = places[~missing]
                self._kept.stamps[used] = self._stamps(len(used))
                if aged is not None:
                    aged[:] = old
                    places[missing & ~old] = -1
                else:
                    places[missing] = -1
                gather(self._kept.rows, places, rows)
        return missing if missing.any() else None

    def join(
        self, pulls: Sequence[OpenPull], keys: np.ndarray, level: float, now: float, history: History
    ) -> list[JoinedRows]:
        """The rows of these keys that earlier pulls of the reader will bring, with all pushes before clock `level`.

        >>> from dps.engine.state.caching import Cache
        >>> cache = RowCache(TableSpec("w", cache=Cache("1 kB")))
        >>> pull = cache.begin_pull("trainer", np.array([7, 8, 9]), level=3, until=10.0, history=(0, 0))
        >>> cache.change("trainer", np.array([8])).outcome = lambda: PushOutcome.ACKNOWLEDGED
        >>> [(rows.places, rows.at) for rows in cache.join([pull], np.array([9, 8, 5]), 3, 9.0, (0, 0))]
        [(array([0]), array([2]))]
        >>> cache.join([pull], np.array([9]), 4, 9.0, (0, 0))
        []
        """
        joined, left = list[JoinedRows](), np.arange(len(keys))
        with self._lock:
            self._look_at_changes()
            for pull in pulls:
                if not len(left):
                    break
                if pull in self._pulls and pull.serves(level, now, history):
                    at = pull.find(keys[left])
                    here = (at >= 0) & ~pull.spoilt[at]
                    if here.any():
                        joined.append(JoinedRows(pull, left[here], at[here]))
                        left = left[~here]
        return joined

    def survey(
        self, pulls: Sequence[OpenPull], keys: np.ndarray, level: float, now: float, history: History
    ) -> tuple[np.ndarray, np.ndarray]:
        """Two masks of the keys: their rows are here, or come by `pulls`, but are too old for `level`; their rows are
        neither here nor on their way."""
        with self._lock:
            self._look_at_changes()
            places = self._kept.find(keys)
            known = (places >= 0) & (history[0] == self._history[0])
            serves = known.copy()
            serves[known] = (self._level[places[known]] >= level) & (self._until[places[known]] >= now)
            for pull in pulls:
                if pull in self._pulls:
                    at = pull.find(keys)
                    known |= at >= 0
                    if pull.serves(level, now, history):
                        serves |= (at >= 0) & ~pull.spoilt[at]
        return known & ~serves, ~known

    def give_up(self, pull: OpenPull) -> None:
        """A pull has failed: none of its rows is kept, and no other pull gets them."""
        with self._lock:
            self._pulls.discard(pull)

    def begin_pull(self, trainer: object, keys: np.ndarray, level: float, until: float, history: History) -> OpenPull:
        """A trainer is about to ask the servers for rows: of a level, kept until then. It may change `keys` later."""
        with self._lock:
            self._look_at_changes()
            pull = OpenPull(keys.copy(), level, until, history)
            for change in self._changes:
                if change.trainer is not trainer or change.dropped:
                    pull.spoil(change.keys)
            self._pulls.add(pull)
        return pull

    def keep(self, pull: OpenPull, values: np.ndarray) -> None:
        """The rows [m, dim] of a pull are here."""
        with self._lock:
            is_open = pull in self._pulls  # else another thread has brought its rows
            self._pulls.discard(pull)
            if not is_open or pull.history != self._history:
                return
            keys, values = pull.keys[~pull.spoilt], values[~pull.spoilt]
            if not len(keys):
                return
            stamps = self._stamps(len(keys))
            stays = self._eviction.make_room(keys, stamps)
            places = self._kept.put(keys[stays], values[stays], stamps[stays])
            self._level[places], self._until[places] = pull.level, pull.until

    def change(
        self,
        trainer: object,
        keys: np.ndarray | None,
        values: np.ndarray | None = None,
        step: Step | None = None,
        history: History | None = None,
    ) -> OpenChange:
        """A trainer is about to change rows; None: perhaps all rows.

        With a `step`, the rows that are here are changed as the servers will change theirs; without, they go. They go,
        too, where the trainer knows of another definition of the table than the rows belong to.
        """
        keys = None if keys is None else keys.copy()  # the caller may change its own later
        opened = OpenChange(trainer, keys)
        with self._lock:
            self._look_at_changes()
            for pull in self._pulls:
                pull.spoil(keys)
            self._changes.append(opened)
            is_other = history is not None and history[0] != self._history[0]
            if keys is None or step is None or values is None or is_other:
                self._kept.remove(keys)
            elif len(self._kept):
                places = self._kept.find(keys)
                here = places >= 0
                if here.any():
                    step(self._kept.rows, places[here], np.ascontiguousarray(values[here]))
        return opened

    def end(self, change: OpenChange) -> None:
        """A change has come to its end, and what it has changed is not known."""
        with self._lock:
            change.dropped = False
            self._drop(change)
            self._changes = [each for each in self._changes if each is not change]

    def expect(self, trainer: object, coming: Coming) -> None:
        """A trainer knows the keys of its coming batches, by the clocks of these; they take the place of what it knew.

        >>> from dps.engine.state.caching import Cache
        >>> cache = RowCache(TableSpec("w", cache=Cache(3 * (4 + ROW_BYTES))))
        >>> cache.expect("trainer", [(5, np.array([1, 2]))])
        >>> for key in (1, 7, 2, 8, 9):
        ...     cache.keep(cache.begin_pull("trainer", np.array([key]), 4, 10.0, (0, 0)), np.float32([[key]]))
        >>> cache.read(np.array([1, 2, 7, 8, 9]), 4, 9.0, (0, 0), np.zeros((5, 1), np.float32))
        array([False, False,  True,  True, False])
        """
        with self._lock:
            self._eviction.expect(trainer, coming)

    def leave(self, trainer: object) -> None:
        """A trainer goes. What it has on its way may yet be applied, so these rows are not kept any more."""
        with self._lock:
            self._eviction.leave(trainer)
            self._look_at_changes()
            for change in self._changes:
                if change.trainer is trainer:
                    change.trainer, change.outcome = None, in_doubt
                    self._drop(change)

    def replace(self, origin: int) -> None:
        """Another attempt at a trainer uses the cache: forget all rows, and step none by pushes of the one before."""
        self.replaced.add(origin)
        self.clear()

    def clear(self) -> None:
        """Forget all rows, those on their way, too."""
        with self._lock:
            self._kept.remove(None)
            for pull in self._pulls:
                pull.spoil(None)

    # -- inside, under the lock

    def _look_at_changes(self) -> None:
        """Forget the changes that were acknowledged; and the rows of those that have failed."""
        if not self._changes:
            return
        still = []
        for change in self._changes:
            outcome = change.outcome()
            if outcome in (PushOutcome.REFUSED, PushOutcome.DOUBTFUL):
                self._drop(change)
            if outcome in (PushOutcome.OPEN, PushOutcome.DOUBTFUL):
                still.append(change)
        if sum(change.dropped for change in still) > MOST_FAILED:
            still = [change for change in still if not change.dropped]
            still.append(OpenChange(None, None))
            self._drop(still[-1])
        self._changes = still

    def _drop(self, change: OpenChange) -> None:
        """Let the rows of a change go, and those that are on their way."""
        if change.dropped:
            return
        change.dropped = True
        for pull in self._pulls:
            pull.spoil(change.keys)
        self._kept.remove(change.keys)

    def _stamps(self, count: int) -> np.ndarray:
        """The stamps of so many uses of rows, one after the other."""
        self._uses += count
        return np.arange(self._uses - count, self._uses) + 1


class CacheShelf:
    """The caches of a process, by run and name of the table. A cache goes with the last trainer that uses it.

    `pushes` has the meetings in which the trainers of the process sum their pushes.
    """

    def __init__(self) -> None:
        self.pushes = PushMeetings()
        self._lock = threading.Lock()
        self._caches: weakref.WeakValueDictionary[tuple[object, ...], RowCache] = weakref.WeakValueDictionary()

    def cache(self, run: tuple[object, ...], spec: TableSpec) -> RowCache:
        """The cache of a table for a run."""
        with self._lock:
            key = (*run, spec.name)
            cache = self._caches.get(key)
            if cache is None:
                cache = self._caches[key] = RowCache(spec)
            return cache

    def of_run(self, run: tuple[object, ...]) -> list[RowCache]:
        """The caches of all tables for a run."""
        with self._lock:
            return [cache for key, cache in self._caches.items() if key[:-1] == run]
