"""Sentences from anywhere as partitions, the count of their words, and a trainer's sentences as batches of numbers."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Future

import dps
from dps.errors import InputError, InputTypeError
from dps.graph import RandomWalks
from dps.models.inputs.pieces import Pieces, checked
from dps.models.inputs.source import SparkParts, blocks_of, classic, lazy_parts, without_errors
from dps.models.types import Check, Part, Source
from dps.models.where import is_session
from dps.models.words.numbers import NumberedText, batches_of_numbers, numbered
from dps.spark import is_spark

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Sentences", "Text", "Vocabulary", "batches_of", "count_words", "text_of"]
__all__ += ["WalkText", "counted_words", "visited_vertices", "vocabulary_of", "walk_text"]

Sentences: TypeAlias = (
    Any  # lists of words in memory, in a Dask bag, in a list of futures or in Spark; or a path of text
)
HOME_PARTS = 64  # of sentences in memory, so that all trainers have some


class Vocabulary(NamedTuple):
    """Words and how often they occur, the most frequent first."""

    words: list[Part]  # str; of walks, vertices
    counts: np.ndarray  # int64


class Text(NamedTuple):
    """Sentences, wherever they lie."""

    parts: list[Part] | SparkParts  # each a list of sentences; in memory, they are numbers already
    check: Check
    name: str = "the sentences"

    @property
    def source(self) -> Part:
        """The data itself, if it is of Spark."""
        return self.parts.data if isinstance(self.parts, SparkParts) else self.parts

    def pieces(self, ps: dps.ParameterServer) -> Pieces:
        """The sentences as numbers, where they lie. They are read once, unless they are of Spark."""
        parts = self.parts
        if isinstance(parts, list) and isinstance(parts[0], NumberedText):
            parts = ps.scatter(parts.__getitem__, len(parts))
        return checked(ps, parts, self.check)


def text_of(sentences: Sentences) -> Text:
    """The parts of sentences. Those in memory are checked."""
    if is_spark(sentences):
        return _of_spark(sentences)
    if is_session(sentences):
        raise InputTypeError("sentences of Spark are a DataFrame or an RDD, not a SparkSession")
    if isinstance(sentences, (str, Path)):
        import dask.bag  # here, because sentences from elsewhere do without it

        sentences = dask.bag.read_text(str(sentences)).map(str.split)
    if is_dask_collection(sentences) and not isinstance(sentences, Delayed):
        return Text(blocks_of(sentences), as_numbers)
    made = [sentences] if isinstance(sentences, (Delayed, Future)) else list(sentences)
    if parts := lazy_parts(made):
        return Text(parts, as_numbers)
    if not made:
        raise InputError("there are 0 sentences: there is nothing to learn from")
    size = -(-len(made) // HOME_PARTS)
    return Text([numbered(made[n : n + size], first=n) for n in range(0, len(made), size)], as_numbers)


def as_numbers(number: int, part: Part) -> NumberedText:
    return part if isinstance(part, NumberedText) else numbered(part, " of a partition")


def _of_spark(data: Source) -> Text:
    """The sentences of a DataFrame or an RDD, if there is a first one.

    The sentences of a DataFrame are its only column of arrays of strings; without such a column, its only column of
    strings, which are split at spaces. The items of an RDD are lists of words.
    """
    if not hasattr(classic(data), "mapInArrow"):
        if data.isEmpty():
            raise InputError("the RDD has 0 items: there is nothing to learn from; give it lists of words")
        return Text(SparkParts(data, list), as_numbers, "this RDD")
    name, split = _column(data)
    quoted = name.replace("`", "``")
    chosen = data.selectExpr(f"`{quoted}` as sentence")  # because mapInArrow finds no column whose name has a dot
    if not chosen.take(1):
        raise InputError(f"column {name!r} has 0 rows: there is nothing to learn from; give it sentences")
    return Text(SparkParts(chosen, list), functools.partial(_of_arrow, name=name, split=split), f"column {name!r}")


def _column(frame: Source) -> tuple[str, bool]:
    """The name of the column of sentences, and whether they are text, which is split."""
    kinds = {field.name: field.dataType for field in frame.schema.fields}
    text = [name for name, kind in kinds.items() if _is_text(kind)]
    lists = [name for name, kind in kinds.items() if _is_text(getattr(kind, "elementType", None))]
    candidates, what = (lists, "arrays of strings") if lists else (text, "strings")
    if len(candidates) > 1:
        raise InputError(
            f"{len(candidates)} columns of {what}, {', '.join(candidates)}: select the one with the sentences, "
            f"frame.select({candidates[0]!r})"
        )
    if not candidates:
        there = ", ".join(f"{name} ({kind.simpleString()})" for name, kind in list(kinds.items())[:20])
        raise InputTypeError(
            f"sentences are a column of arrays of strings, or of strings, and the columns are {there or 'none'}; "
            f"pyspark.ml's Tokenizer makes arrays of words"
        )
    return candidates[0], not lists


def _is_text(kind: object) -> bool:
    return type(kind).__name__ in ("StringType", "VarcharType", "CharType")


def _of_arrow(number: int, batches: list[pa.RecordBatch], name: str, split: bool) -> NumberedText:
    """The sentences of a partition of a DataFrame as numbers, checked."""
    columns = [batch.column(0) for batch in batches]
    rows = sum(column.null_count for column in columns)
    if rows:
        raise InputError(
            f"partition {number}: column {name!r} has no sentence (null) in {rows} rows; fill them or drop them, "
            f"frame.dropna(subset=[{name!r}])"
        )
    words = 0 if split else sum(column.flatten().null_count for column in columns)
    if words:
        raise InputError(
            f"partition {number}: {words} words of column {name!r} are null; leave them out, "
            f"pyspark.sql.functions.array_compact({name!r})"
        )
    sentences = itertools.chain.from_iterable(column.to_pylist() for column in columns)
    return as_numbers(number, map(str.split, sentences) if split else sentences)


def count_words(trainer: dps.Trainer, partitions: Sequence[NumberedText]) -> Counter[str]:
    """The training function of the first pass: how often each word occurs."""
    counts: Counter[str] = Counter()
    for text in without_errors(partitions):
        counts.update(text.counts())
    return counts


def vocabulary_of(counts: Sequence[Counter[str]], min_count: int, name: str = "the sentences") -> Vocabulary:
    """The words that occur at least `min_count` times; of equally frequent ones, the first in the alphabet is first.

    `name` is where the words come from, for errors.
    """
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    if not total:
        raise InputError(f"there are 0 words in {name}: there is nothing to learn from")
    kept = sorted((-count, str(word)) for word, count in total.items() if count >= min_count)
    if not kept:
        raise InputError(
            f"min_count={min_count} removes all {len(total):,} words of {name}: the most frequent one occurs "
            f"{max(total.values())} times"
        )
    if len(kept) == 1:
        raise InputError(
            f"{kept[0][1]!r} is the only word that occurs min_count={min_count} times or more: vectors need two words"
        )
    return Vocabulary([word for _, word in kept], -np.array([count for count, _ in kept], np.int64))


def counted_words(words: dps.WordTable, min_count: int) -> Vocabulary:
    """The words that a vocabulary has counted at least `min_count` times, as :func:`vocabulary_of` has them."""
    named = dict(words.items())
    counts = words.counts(list(named)).tolist()
    return vocabulary_of(
        [Counter(dict(zip(named.values(), counts, strict=True)))], min_count, f"vocabulary {words.name!r}"
    )


def visited_vertices(walks: RandomWalks, min_count: int) -> Vocabulary:
    """The vertices of walks, the most visited first; of those equally often visited, the smallest."""
    order = np.lexsort((walks.vertices, -walks.visits))
    order = order[walks.visits[order] >= min_count]
    if len(order) < 2:
        raise InputError(
            f"the walks visit {len(order)} vertices min_count={min_count} times or more, and vectors need two: "
            f"lower min_count, or make more walks"
        )
    return Vocabulary(walks.vertices[order].tolist(), walks.visits[order])


class WalkText(NamedTuple):
    """Walks on the servers, as trainers read them."""

    table: str
    walks: int
    length: int
    words: np.ndarray  # for each number of a vertex the number of its word, or -1

    def batches(self, number: int, trainers: int, size: int) -> list[np.ndarray]:
        """A trainer's share: ranges of walks, each of about `size` words."""
        walks = max(1, size // self.length)
        firsts = range(number * walks, self.walks, trainers * walks)
        return [np.array([[first], [min(self.walks, first + walks)]]) for first in firsts]

    def read(self, trainer: dps.Trainer, batch: np.ndarray) -> np.ndarray:
        """A batch as :func:`batches_of` has it."""
        keys = np.arange(*batch[:, 0])
        numbers = trainer.pull(self.table, keys).reshape(len(keys), self.length)
        words = np.where(numbers >= 0, self.words[numbers], -1)
        sentences, places = np.nonzero(words >= 0)
        return np.stack([words[sentences, places], sentences])


def walk_text(walks: RandomWalks, vertices: Sequence[int]) -> WalkText:
    """Walks, of which these vertices count."""
    order = np.argsort(walks.vertices)
    places = order[np.searchsorted(walks.vertices[order], np.asarray(vertices))]
    words = np.full(len(walks.vertices), -1)
    words[places] = np.arange(len(places))
    return WalkText(walks.table.name, walks.count, walks.length, words)


def batches_of(partitions: Sequence[Part], words: Sequence[str], size: int) -> list[np.ndarray]:
    """Known words as batches of at most `size` words: int32 [2, places], their numbers and their sentences.

    Sentences stay whole, but for those of more than `size` words.

    Examples
    --------
    >>> [batch.tolist() for batch in batches_of([[["a", "b", "?"], ["b"]], [["a"]]], ["a", "b"], 3)]
    [[[0, 1, 1], [0, 0, 1]], [[0], [2]]]
    """
    order = {word: number for number, word in enumerate(words)}
    numbers, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for partition in without_errors(partitions):
        text = as_numbers(0, partition)
        numbers.append(text.by(order))
        lengths.append(text.lengths)
    return batches_of_numbers(np.concatenate(numbers), np.concatenate(lengths), size)
