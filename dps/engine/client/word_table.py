"""WordTable: text to int64 ids that the servers keep, and back. `functions/words.py` says how words lie in the table.

A look-up is a pull of the rows of the words' keys, whose bytes are compared here. Words that have no row yet are given
to the servers' function, and then looked up again, so that ids are only ever read from the table. Nothing is kept on
this side: no table can be dropped, or restored from an older checkpoint, and still be answered from memory.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from dps.engine.core import texts
from dps.engine.functions.definition import Function
from dps.engine.functions.words import MAX_WIDTH, WordLayout, assign_words, confirm_words
from dps.engine.state.ops import TableSpec
from dps.errors import DPSError, InputError, InputTypeError, UnknownTableError, told

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Confirmed", "WordBatch", "WordTable", "counts_of"]

BATCH = 1 << 14  # words that are looked up, or given ids, by one request
MAX_PROBES = 64  # keys that a word may find taken by other words. By chance, that does not happen once
MAX_LOOKS = 32  # until all copies have the ids that were found; two, but where a primary was lost meanwhile
UNBORN, OTHER = 0, 2  # answers of `texts.match`: the word's key has no row; its row is that of another word


class Texts(list):
    """Words as a list of str and bytes, and the shape in which they were given."""

    def __init__(self, words: Iterable[Any], shape: tuple[int, ...]):
        super().__init__(words)
        self.shape = shape


class Counter(Protocol):
    """The client or trainer by which words are counted. A trainer's counts count once, because its pushes do."""

    def add(self, table: str, keys: Any, values: Any) -> None: ...


class Calls(Counter, Protocol):
    """The client by which words are looked up. It has no clock, so that a look-up never waits for trainers."""

    @property
    def rehearses(self) -> bool: ...

    def spec_of(self, table: str) -> TableSpec: ...
    def pull(self, table: str, keys: Any) -> Any: ...
    def call_for_itself(self, function: Function, table: str, keys: np.ndarray, **arguments: object) -> Any: ...
    def forget_routes(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def counts_of(name: str) -> str:
    """The table with the counts of a vocabulary."""
    return f"{name}.counts"


class Confirmed:
    """A client's knowledge of which ids of a vocabulary all copies have.

    Each lane has a number, and all copies have the ids with lower ones. A primary shows a row before its backups have
    it. If it dies then, the id goes to another word.
    """

    def __init__(self) -> None:
        self._known: tuple[int, np.ndarray] = -1, np.zeros(0, np.int64)  # the table's number, and a number a lane

    def has(self, spec: TableSpec, layout: WordLayout, ids: np.ndarray) -> bool:
        """Whether all copies have these ids; -1 is none."""
        table, numbers = self._known
        some = ids[ids >= 0]
        if spec.copies == 1 or not len(some):
            return True
        return table == spec.id and bool((some >> layout.bits < numbers[some & (layout.lanes - 1)]).all())

    def note(self, spec: TableSpec, numbers: np.ndarray) -> None:
        self._known = spec.id, numbers


class WordTable:
    """Words and their ids, on the servers; made by :meth:`dps.ParameterServer.vocabulary`.

    A word is text (str) or bytes, which count as UTF-8. Its id is a small whole number, 0 or more, that indexes an
    embedding. A word gets its id once and keeps it: through failures of servers, repeated tasks, checkpoints, moves
    of shards; of clients that race, all get the same id.

    Parameters
    ----------
    name : str
        Of the vocabulary.
    calls : Calls
        The client by which words are looked up.
    counter : Counter
        The client or trainer by which words are counted.
    assigns : bool
        Unknown words get ids.
    confirmed : Confirmed, optional
        The client's knowledge of the copies.

    Examples
    --------
    >>> import dps
    >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
    ...     with dps.ParameterServer(cluster) as ps:
    ...         words = ps.vocabulary("words", lanes=1)
    ...         words.ids(["a", "rose", "is", "a", "rose"]), words.words([1, 0]), len(words)
    (array([0, 1, 2, 0, 1]), ['rose', 'a'], 3)
    """

    def __init__(
        self, name: str, calls: Calls, counter: Counter, assigns: bool = True, confirmed: Confirmed | None = None
    ):
        self.name, self.assigns = name, assigns
        self._calls, self._counter, self._confirmed = calls, counter, confirmed or Confirmed()

    def __repr__(self) -> str:
        return f"<dps.WordTable {self.name!r}{'' if self.assigns else ', which is frozen'}>"

    def frozen(self) -> WordTable:
        """The same words, without ids for others: unknown words are -1, as for a model that is trained.

        Returns
        -------
        WordTable
        """
        return WordTable(self.name, self._calls, self._counter, False, self._confirmed)

    @contextlib.contextmanager
    def apart(self) -> Iterator[WordTable]:
        """The same words through connections of their own, which are closed at the end of the block.

        A task for Dask or Spark takes its words so, because a pickled vocabulary opens connections where it arrives,
        and nothing would close them.

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         words = ps.vocabulary("words", lanes=1)
        ...         with words.apart() as mine:
        ...             mine.ids(["a", "rose"]), words.ids(["rose"])
        (array([0, 1]), array([1]))
        """
        with copy.copy(self._calls) as calls:
            yield WordTable(self.name, calls, calls, self.assigns, self._confirmed)

    def ids(self, words: Iterable[object], assign: bool = True) -> np.ndarray:
        """The id of each word; words that have none yet get one.

        Parameters
        ----------
        words : array_like of str or bytes
            A list, a numpy array of any shape, a column of pandas or pyarrow. Of categories, each is looked up once.
        assign : bool
            Give ids to unknown words; without it, and of :meth:`frozen` ones, an unknown word is -1.

        Returns
        -------
        ndarray of int64
            Of the same shape.

        Raises
        ------
        InputTypeError
            Values that are no text: numbers, missing values.
        InputError
            A word of more bytes than the vocabulary takes; then no word of the call gets an id.
        UnknownTableError, ServerGoneError, RequestTimeoutError

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         words = ps.vocabulary("words", lanes=1)
        ...         words.ids(["b", "a"]), words.ids(["a", "c"], assign=False)
        (array([0, 1]), array([ 1, -1]))
        """
        if (codes := _categories(words)) is not None:
            return self.ids(codes[1], assign)[codes[0]]
        given = _texts(words)
        layout = WordLayout.of(self._calls.spec_of(self.name))
        assigns = assign and self.assigns and not self._calls.rehearses
        found = np.empty(len(given), np.int64)
        starts = range(0, len(given), BATCH)
        # All batches are made before the first is looked up, because each checks its words.
        batches = [WordBatch(self, layout, given[start : start + BATCH], start) for start in starts]
        for start, batch in zip(starts, batches, strict=True):
            self._look_up(batch, found[start : start + BATCH], assigns)
        return found.reshape(given.shape)

    def count(self, words: Iterable[object]) -> np.ndarray:
        """As :meth:`ids`, and add one to the count of a word each time that it occurs.

        A trainer's counts count once, also if its task is run again, as its pushes do. Unknown words of a frozen
        vocabulary are not counted.

        Raises
        ------
        InputError
            The vocabulary was made without ``counts=True``; and as :meth:`ids`.
        """
        self._check_counted()
        ids = self.ids(words)
        known = ids[ids >= 0]
        self._counter.add(counts_of(self.name), known, np.ones(len(known), np.int64))
        return ids

    def counts(self, ids: npt.ArrayLike) -> np.ndarray:
        """How often each id's word was counted, int64.

        Raises
        ------
        InputError
            The vocabulary was made without ``counts=True``.
        """
        self._check_counted()
        counts: np.ndarray = self._calls.pull(counts_of(self.name), _ids(ids))
        return counts

    def words(self, ids: npt.ArrayLike, as_bytes: bool = False) -> list[Any]:
        """The word of each id.

        Parameters
        ----------
        ids : array_like of int
            Of any shape; the words come flat.
        as_bytes : bool
            Bytes in place of str, for words that are no UTF-8.

        Returns
        -------
        list of str or bytes
            None for an id that no word has.

        Raises
        ------
        InputTypeError
            Ids that are no whole numbers.
        InputError
            A word that is no UTF-8, without `as_bytes`.

        Examples
        --------
        >>> import dps
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         words = ps.vocabulary("words")
        ...         words.words(words.ids(["is", "a", b"rose"])), words.words([-1, 123456])
        (['is', 'a', 'rose'], [None, None])
        """
        flat = _ids(ids).reshape(-1)
        layout = WordLayout.of(self._calls.spec_of(self.name))
        found: list[Any] = []
        for start in range(0, len(flat), BATCH):
            rows = self._calls.pull(self.name, layout.keys_of_ids(flat[start : start + BATCH]))
            found += self._split(rows, as_bytes)
        return found

    def items(self, as_bytes: bool = False) -> Iterator[tuple[int, Any]]:
        """Each id and its word, lane after lane; what gets an id meanwhile may or may not be there.

        Parameters
        ----------
        as_bytes : bool
            As in :meth:`words`.
        """
        self._next_numbers()  # because a pull by keys finds a table that was restored, and a pull of a range does not
        layout = WordLayout.of(self._calls.spec_of(self.name))
        for lane in range(layout.lanes):
            keys, rows = self._calls.pull(self.name, layout.range_of_ids(lane))
            numbers = keys - layout.range_of_ids(lane).start
            yield from zip((numbers << layout.bits | lane).tolist(), self._split(rows, as_bytes), strict=True)

    def __len__(self) -> int:
        """How many words have ids."""
        return int(self._next_numbers().sum())

    @property
    def size(self) -> int:
        """The largest id that a word has, and one: the rows of an embedding that is indexed by ids."""
        numbers = self._next_numbers()
        lanes = np.arange(len(numbers))
        return int(np.max(((numbers - 1) * len(numbers) + lanes + 1)[numbers > 0], initial=0))

    def _look_up(self, batch: WordBatch, ids: np.ndarray, assigns: bool) -> None:
        """Fill in ids that all copies have: ids that these have just confirmed are looked up once more, because they
        may be other ones by then."""
        for _ in range(MAX_LOOKS):
            batch.look_up(ids, assigns)
            spec = self._calls.spec_of(self.name)  # behind the look, which may have found that it was restored
            layout = WordLayout.of(spec)
            if self._confirmed.has(spec, layout, ids) or self._calls.rehearses:
                return
            try:
                counters = layout.counters(np.arange(layout.lanes))
                self._confirmed.note(spec, self._calls.call_for_itself(confirm_words, self.name, counters))
            except UnknownTableError:  # it was restored; the next look says if it is gone
                self._calls.forget_routes()
        raise DPSError(
            f"vocabulary {self.name!r}: its copies were replaced {MAX_LOOKS} times during a look-up; try again"
        )

    def _next_numbers(self) -> np.ndarray:
        layout = WordLayout.of(self._calls.spec_of(self.name))
        numbers: np.ndarray = self._calls.pull(self.name, layout.counters(np.arange(layout.lanes)))[:, 0]
        return numbers

    def _split(self, rows: np.ndarray, as_bytes: bool) -> list[Any]:
        try:
            return texts.split(rows, not as_bytes)
        except UnicodeDecodeError as error:
            raise InputError(
                f"vocabulary {self.name!r} has a word that is no UTF-8 ({error}): ask as_bytes=True"
            ) from None

    def _check_counted(self) -> None:
        try:
            self._calls.spec_of(counts_of(self.name))
        except UnknownTableError:
            raise InputError(
                f"vocabulary {self.name!r} does not count its words: make it with ps.vocabulary(..., counts=True)"
            ) from None

    # -- for a batch

    def pull(self, keys: np.ndarray) -> np.ndarray:
        """The rows of keys."""
        rows: np.ndarray = self._calls.pull(self.name, keys)
        return rows

    def assign(self, keys: np.ndarray, **proposed: np.ndarray) -> None:
        """Have the servers give ids to words; what is `proposed` are the arguments of their function."""
        try:
            self._calls.call_for_itself(assign_words, self.name, keys, **proposed)
        except UnknownTableError:  # the table was restored since it was looked at; the next look says if it is gone
            self._calls.forget_routes()


class WordBatch:
    """Some words on their way to ids."""

    def __init__(self, table: WordTable, layout: WordLayout, words: list[Any], first: int):
        self._table, self._layout = table, layout
        try:
            self._texts = texts.join(words)
        except TypeError as error:
            place = next(i for i, word in enumerate(words) if not isinstance(word, (str, bytes)))
            raise InputTypeError(
                f"vocabulary {table.name!r}: word {first + place} is no text but a {error}: leave it out, or make it "
                "text, str(value)"
            ) from None
        except UnicodeEncodeError as error:
            raise InputError(f"vocabulary {table.name!r}: a word is no text that UTF-8 can write: {error}") from None
        lengths = np.diff(self._texts[1])
        if len(lengths) and lengths.max() > layout.width:
            place = int(lengths.argmax())
            raise InputError(
                f"vocabulary {table.name!r}: word {first + place} has {lengths[place]} bytes, and words have at most "
                f"{layout.width}: cut it, or make a vocabulary with a larger width=, up to {MAX_WIDTH}"
            )

    def look_up(self, ids: np.ndarray, assigns: bool) -> None:
        """Fill in the ids of all words; -1 of those that have none, where none are assigned."""
        ids[:] = -1
        left, probes = np.arange(len(ids)), np.zeros(len(ids), np.int64)
        for _ in range(2 * MAX_PROBES):  # a word goes to its next probe, or is given an id there and found
            keys = self._keys(left, probes)
            found = np.empty(len(left), np.uint8)
            texts.match(self._table.pull(keys), *self._texts, left, ids, found)
            new = found == UNBORN
            if assigns and new.any():
                self._assign(left[new], keys[new])
            stays = (found == OTHER) | (new & assigns)
            left, probes = left[stays], probes[stays] + (found[stays] == OTHER)
            if not len(left):
                return
        raise DPSError(
            f"vocabulary {self._table.name!r}: {len(left)} words found {MAX_PROBES} keys taken by other words, or "
            "their rows were deleted meanwhile; is the table cleared or pushed to by hand?"
        )

    def _keys(self, which: np.ndarray, probes: np.ndarray) -> np.ndarray:
        keys = np.empty(len(which), np.int64)
        for probe in range(int(probes.max(initial=0)) + 1):
            there = np.flatnonzero(probes == probe)
            out = np.empty(len(there), np.int64)
            texts.keys_of(*self._texts, which[there], self._layout.bits, probe, out)
            keys[there] = out
        return keys

    def _assign(self, which: np.ndarray, keys: np.ndarray) -> None:
        """Propose the first word of each key."""
        at, first = np.unique(keys, return_index=True)
        rows = np.empty((len(at), self._layout.dim), np.int64)
        texts.pack(*self._texts, which[first], rows)
        lanes = np.unique(self._layout.lanes_of(at))
        named = np.concatenate([at, self._layout.counters(lanes)])
        self._table.assign(named, at=at, turns=which[first], words=rows)


def _ids(ids: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(ids)
    if array.dtype.kind not in "iu" and array.size:
        raise InputTypeError(f"ids are whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def _categories(words: Any) -> tuple[np.ndarray, pd.Index] | None:
    """(codes, categories) of a column of pandas that has some."""
    if not hasattr(getattr(words, "dtype", None), "categories"):
        return None
    column = words.array if hasattr(words, "array") else words
    codes = np.asarray(column.codes)
    if len(codes) and codes.min() < 0:
        raise InputTypeError(f"{np.count_nonzero(codes < 0)} of {len(codes)} words are missing: leave them out")
    return codes, column.categories


def _texts(words: Any) -> Texts:
    if isinstance(words, (str, bytes)):
        raise InputTypeError(f"give a list or array of words, not {told(words)} alone")
    if isinstance(words, np.ndarray):
        return Texts(words.ravel().tolist(), words.shape)
    if hasattr(words, "__dask_graph__"):
        raise InputTypeError(f"words are a Dask collection, a {type(words).__name__}: map its partitions")
    listed = words.to_pylist() if "pyarrow" in sys.modules and hasattr(words, "to_pylist") else list(words)
    return Texts(listed, (len(listed),))
