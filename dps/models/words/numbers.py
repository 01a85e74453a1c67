"""Sentences as numbers: one array of words and the lengths of sentences, instead of lists of text."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from dps.errors import InputTypeError

__all__ = ["NumberedText", "batches_of_numbers", "joined", "numbered"]


class NumberedText:
    """Sentences, each word of which is its place in a list of words.

    It is no tuple, because Dask would look for tasks among its words.

    Attributes
    ----------
    words : list of str
        Distinct.
    numbers : ndarray of int32
        The places of the words of all sentences, one after the other.
    lengths : ndarray of int32
        Words of each sentence.
    """

    __slots__ = ("lengths", "numbers", "words")

    def __init__(self, words: list[str], numbers: np.ndarray, lengths: np.ndarray):
        self.words, self.numbers, self.lengths = words, numbers, lengths

    def counts(self) -> Counter[str]:
        counts = np.bincount(self.numbers, minlength=len(self.words))
        return Counter(dict(zip(self.words, counts.tolist(), strict=True)))

    def by(self, order: Mapping[str, int]) -> np.ndarray:
        """The numbers that `order` gives to the words of all sentences; -1 for words that it does not have."""
        places = np.array([order.get(word, -1) for word in self.words], np.int32)
        return places[self.numbers]


def numbered(sentences: Iterable, where: str = "", first: int = 0) -> NumberedText:
    """Sentences as numbers; they are checked.

    Examples
    --------
    >>> text = numbered([["a", "b"], ["b"]])
    >>> text.words, text.numbers.tolist(), text.lengths.tolist()
    (['a', 'b'], [0, 1, 1], [2, 1])
    """
    flat, lengths = joined(sentences, where, first)
    places: defaultdict[str, int] = defaultdict(itertools.count().__next__)
    numbers = np.fromiter(map(places.__getitem__, flat), np.int32, len(flat))
    return NumberedText(list(places), numbers, lengths)


def joined(sentences: Iterable, where: str = "", first: int = 0) -> tuple[list[str], np.ndarray]:
    """The words of all sentences in one list, and the length of each sentence; they are checked.

    Types are compared as sets, because a look at each word would take longer than all else that is done with it.

    Messages give the number of a sentence, from `first` on, and `where` behind it.
    """
    made = list(sentences)
    if all(issubclass(kind, (list, tuple, np.ndarray)) for kind in set(map(type, made))):
        flat = list(itertools.chain.from_iterable(made))
        if all(issubclass(kind, str) for kind in set(map(type, flat))):
            return flat, np.fromiter(map(len, made), np.int32, len(made))
    for number, sentence in enumerate(made, first):
        check_words(sentence, f"sentence {number}{where}")
    raise AssertionError("a sentence is wrong, and none was found")


def batches_of_numbers(numbers: np.ndarray, lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Words as batches of at most `size`: int32 [2, places], their numbers and their sentences.

    Sentences stay whole, but for those of more than `size` words. Numbers below 0 are left out.

    Examples
    --------
    >>> numbers, lengths = np.array([0, 1, -1, 1, 0]), np.array([3, 1, 1])
    >>> [batch.tolist() for batch in batches_of_numbers(numbers, lengths, 3)]
    [[[0, 1, 1], [0, 0, 1]], [[0], [2]]]
    """
    known = numbers >= 0
    left = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[known])
    left = left[left > 0]
    parts = -(-left // size)  # of each sentence
    pieces = np.full(parts.sum(), size)
    pieces[np.cumsum(parts) - 1] = left - (parts - 1) * size
    places = np.stack([numbers[known], np.repeat(np.arange(len(pieces)), pieces)], dtype=np.int32, casting="unsafe")
    ends = np.cumsum(pieces)
    made, begin = [], 0
    while begin < places.shape[1]:
        end = int(ends[np.searchsorted(ends, begin + size, "right") - 1])
        made.append(np.ascontiguousarray(places[:, begin:end]))
        begin = end
    return made


def check_words(sentence: object, what: str) -> None:
    if isinstance(sentence, (str, bytes)):
        raise InputTypeError(f"{what}: a sentence is a list of words, and {sentence!r:.40} is text: call its split()")
    if not isinstance(sentence, (list, tuple, np.ndarray)):
        raise InputTypeError(f"{what}: a sentence is a list of words, not a {type(sentence).__name__}")
    wrong = [word for word in sentence if not isinstance(word, str)]
    if wrong:
        raise InputTypeError(f"{what}: words are str, and {wrong[0]!r:.40} is a {type(wrong[0]).__name__}")
