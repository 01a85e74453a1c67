"""Sentences from anywhere as partitions, the count of their words, and a trainer's sentences as batches of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import dask.bag
import numpy as np
from dask.base import is_dask_collection
from dask.delayed import Delayed
from dask.distributed import Future

import dps
from dps.errors import InputError
from dps.graph import RandomWalks
from dps.models.words.numbers import NumberedText, batches_of_numbers, joined, numbered
from dps.models.words.spark_sentences import without_errors

__all__ = ["Sentences", "Vocabulary", "batches_of", "count_words", "sentence_parts"]
__all__ += ["WalkText", "visited_vertices", "vocabulary_of", "walk_text"]

Sentences: TypeAlias = (
    Any  # lists of words in memory, in a Dask bag, in a list of futures or in Spark; or a path of text
)
HOME_PARTS = 64  # of sentences in memory, so that all trainers have some


class Vocabulary(NamedTuple):
    """Words and how often they occur, the most frequent first."""

    words: list[Any]  # str; of walks, vertices
    counts: np.ndarray  # int64


def sentence_parts(sentences: Sentences) -> list[Any]:
    """Partitions for `ps.run`, each a list of sentences.

    Examples
    --------
    >>> len(sentence_parts([["a", "b"], ["b"]]))
    2
    """
    if isinstance(sentences, (str, Path)):
        sentences = dask.bag.read_text(str(sentences)).map(str.split)
    if is_dask_collection(sentences) and not isinstance(sentences, Delayed):
        return list(np.ravel(np.array(sentences.to_delayed(), object)))
    if isinstance(sentences, (Delayed, Future)):
        return [sentences]
    made = list(sentences)
    if made and all(isinstance(part, (Delayed, Future)) for part in made):
        return made
    if not made:
        raise InputError("there are 0 sentences: there is nothing to learn from")
    size = -(-len(made) // HOME_PARTS)
    parts = (numbered(made[first : first + size], first=first) for first in range(0, len(made), size))
    return [dask.delayed(part, traverse=False) for part in parts]


def count_words(trainer: dps.Trainer, partitions: Sequence[Any]) -> Counter[str]:
    """The training function of the first pass: how often each word occurs."""
    counts: Counter[str] = Counter()
    for partition in without_errors(partitions):
        if isinstance(partition, NumberedText):
            counts.update(partition.counts())
        else:
            counts.update(joined(partition, " of a partition")[0])
    return counts


def vocabulary_of(counts: Sequence[Counter[str]], min_count: int, name: str = "the sentences") -> Vocabulary:
    """The words that occur at least `min_count` times; of equally frequent ones, the first in the alphabet is first.

    `name` is where the words come from, for errors.

    Examples
    --------
    >>> vocabulary_of([Counter("abca"), Counter("bb")], 2)
    Vocabulary(words=['b', 'a'], counts=array([3, 2]))
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


def batches_of(partitions: Sequence[Any], words: Sequence[str], size: int) -> list[np.ndarray]:
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
        text = partition if isinstance(partition, NumberedText) else numbered(partition, " of a partition")
        numbers.append(text.by(order))
        lengths.append(text.lengths)
    return batches_of_numbers(np.concatenate(numbers), np.concatenate(lengths), size)
