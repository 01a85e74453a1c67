"""Eviction: which rows of a cache go when others need their room. Pure.

Rows go in the order of Belady's rule (IBM Systems Journal 5, 1966), as far as the coming batches are known
(:meth:`Eviction.expect`): first those that no coming batch names, and of these the ones that were not used for longest;
then those that are named, the ones of the farthest batch first. Rows that were just pulled take part, so some of them
may not be kept.

As many rows go as are needed, and what that costs is in proportion to them:

* The next ones to go stand in a *queue*: an eighth of the room, or fewer, of the rows that no coming batch names. To
  fill it takes one look at all rows, so each row is looked at 8 times while as many rows go as there is room for. A row
  that was used since, or that a batch names by now, is passed over.
* Where a coming batch named a row, and none does now, and it was not used either, the row may belong before those in
  the queue. So the queue is made anew. In a loop that uses what it has named, that does not happen.
* Only if coming batches name all other rows, all rows are put in order. Then these batches have as many keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dps.engine.client.stamped_rows import NEVER, StampedRows
from dps.engine.core.shards.index import KeyIndex

__all__ = ["Coming", "Eviction"]

NOT_DUE = np.iinfo(np.int64).max  # the clock of the next use of a row that no coming batch names
Coming = Sequence[tuple[int, np.ndarray]]  # clocks, and the keys that a batch of that clock names


class NamedKeys:
    """The keys that coming batches name, and for each the least clock of such a batch."""

    def __init__(self, batches: Iterable[tuple[int, np.ndarray]], salt: int):
        self._index = KeyIndex(salt)
        found = []
        for clock, keys in batches:
            places = np.empty(len(keys), np.int64)
            self._index.insert(keys, places)
            found.append((clock, places))
        self._due = np.full(self._index.end, NOT_DUE)
        for clock, places in found:
            self._due[places] = np.minimum(self._due[places], clock)

    @property
    def keys(self) -> np.ndarray:
        return self._index.keys()

    def due(self, keys: np.ndarray) -> np.ndarray:
        """The least clock of a batch that names each of these keys; NOT_DUE without one."""
        places = np.empty(len(keys), np.int64)
        if not self._index.find(keys, places):
            return self._due[places]
        due = np.full(len(keys), NOT_DUE)
        due[places >= 0] = self._due[places[places >= 0]]
        return due


class Queue:
    """Rows in the order in which they go, as long as they have these stamps."""

    def __init__(self, keys: np.ndarray, places: np.ndarray, stamps: np.ndarray):
        self._keys, self._places, self._stamps = keys, places, stamps
        self._next = 0

    @property
    def newest(self) -> int:
        """The largest stamp of a row that is or was here."""
        return int(self._stamps[-1]) if len(self._stamps) else -1

    def take(self, count: int, rows: StampedRows, named: NamedKeys) -> np.ndarray:
        """The keys of the next `count` rows, or of all that are left. Rows that were used since, or that are named, are
        passed over."""
        taken = [np.empty(0, np.int64)]
        while count > 0 and self._next < len(self._keys):
            some = slice(self._next, self._next + count)
            self._next = some.stop
            keys, is_as_it_was = self._keys[some], rows.stamps[self._places[some]] == self._stamps[some]
            taken.append(keys[is_as_it_was & (named.due(keys) == NOT_DUE)])
            count -= len(taken[-1])
        return np.concatenate(taken)


NOTHING = Queue(*(np.empty(0, np.int64),) * 3)


class Eviction:
    """The order in which rows go from a cache.

    Parameters
    ----------
    rows : StampedRows
        Their stamps grow with each use.
    salt : int
        Of hashes.

    Examples
    --------
    >>> rows = StampedRows(room=2, dim=1, dtype=np.dtype("float32"), salt=0)
    >>> _ = rows.put(np.array([1, 2]), np.float32([[1], [2]]), np.array([1, 2]))
    >>> eviction = Eviction(rows, salt=0)
    >>> eviction.expect("trainer", [(5, np.array([1]))])
    >>> eviction.make_room(np.array([3]), np.array([3])), rows.find(np.array([1, 2]))
    (array([ True]), array([ 0, -1]))
    """

    def __init__(self, rows: StampedRows, salt: int):
        self._rows, self._salt = rows, salt
        self._room = len(rows.stamps)
        self._coming: dict[object, Coming] = {}
        # The keys that coming batches name. They are gathered when rows have to go, because most batches need no room.
        self._named: NamedKeys | None = None
        self._known = NamedKeys((), salt)  # the keys that batches named when the queue was last used
        self._queue = NOTHING

    def expect(self, trainer: object, coming: Coming) -> None:
        """A trainer knows the keys of its coming batches; they take the place of what it knew."""
        self._coming[trainer], self._named = coming, None

    def leave(self, trainer: object) -> None:
        """A trainer has no coming batches any more."""
        self._coming.pop(trainer, None)
        self._named = None

    def make_room(self, keys: np.ndarray, stamps: np.ndarray) -> np.ndarray:
        """Let rows go until there is room for rows of these keys; which of the keys may stay, bool[m].

        The stamps are larger than all that rows have, and ascend. Rows of the keys that are here take theirs.
        """
        rows, stays = self._rows, np.ones(len(keys), np.bool_)
        if len(rows) + len(keys) <= self._room:
            return stays
        places = rows.find(keys)
        here, new = places >= 0, KeyIndex(self._salt)
        rows.stamps[places[here]] = stamps[here]
        at = np.empty(np.count_nonzero(~here), np.int64)
        new.insert(keys[~here], at)
        over = len(rows) + len(new) - self._room
        if over > 0:
            over -= self._let_oldest_go(over, int(stamps[0]))
        if over > 0:
            stamps_of = np.empty(len(new), np.int64)
            stamps_of[at] = stamps[~here]
            gone = self._last_due(new.keys(), stamps_of, over)
            rows.remove(gone)
            leaving = KeyIndex(self._salt)
            leaving.insert(gone, np.empty(len(gone), np.int64))
            leaving.find(keys, places)
            stays = places < 0
        return stays

    def _let_oldest_go(self, over: int, before: int) -> int:
        """Remove rows that no coming batch names, with stamps below `before`: so many, or all of these; how many."""
        named = self._names()
        gone = self._queue.take(over, self._rows, named)
        self._rows.remove(gone)
        left = over - len(gone)
        if left:
            self._queue = self._filled(left, before, named)
            gone = self._queue.take(left, self._rows, named)
            self._rows.remove(gone)
            left -= len(gone)
        return over - left

    def _names(self) -> NamedKeys:
        """The keys that coming batches name. The queue is dropped where a key is not named any more, because its row
        may have to go before those in the queue."""
        if self._named is None:
            self._named = NamedKeys((each for coming in self._coming.values() for each in coming), self._salt)
        if self._named is not self._known:
            places = self._rows.find(self._known.keys)
            left = (places >= 0) & (self._named.due(self._known.keys) == NOT_DUE)
            if bool((self._rows.stamps[places[left]] <= self._queue.newest).any()):
                self._queue = NOTHING
            self._known = self._named
        return self._named

    def _filled(self, least: int, before: int, named: NamedKeys) -> Queue:
        """A queue of rows that are not named: `least`, an eighth of the room, or all of these."""
        stamps = self._rows.used
        places = np.flatnonzero(stamps < before)
        keys = self._rows.keys_at(places)
        free = named.due(keys) == NOT_DUE
        keys, places = keys[free], places[free]
        count = max(least, self._room // 8)
        if count < len(places):
            first = np.argpartition(stamps[places], count - 1)[:count]
            keys, places = keys[first], places[first]
        order = np.argsort(stamps[places])
        return Queue(keys[order], places[order], stamps[places[order]])

    def _last_due(self, new: np.ndarray, stamps: np.ndarray, over: int) -> np.ndarray:
        """The keys of the rows that go first, where only rows are left that are named or were just pulled.

        The `new` keys have rows that were just pulled, and these stamps.
        """
        used = self._rows.used
        places = np.flatnonzero(used != NEVER)
        keys = np.concatenate([self._rows.keys_at(places), new])
        scores, due = np.concatenate([used[places], stamps]), self._names().due(keys)
        named = due != NOT_DUE
        scores[named] = np.max(scores) + 1 + (np.max(due[named], initial=0) - due[named])  # behind the others
        return keys[np.argpartition(scores, over - 1)[:over]]
