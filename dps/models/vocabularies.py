"""The setting `vocabulary` of estimators: where its words come from, in training and in prediction."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import numpy as np

import dps
from dps.errors import InputError
from dps.models.inputs.encoding import Layout
from dps.models.settings import OfKind
from dps.models.types import ClusterLike
from dps.models.where import Address, serving

__all__ = ["VOCABULARY", "KnownWords", "VocabularyLike", "check_vocabulary", "known_words", "name_of", "words_at"]

VOCABULARY = OfKind((str, dps.WordTable), "a vocabulary (ps.vocabulary), or the name of one")
VocabularyLike: TypeAlias = "dps.WordTable | str | None"


class KnownWords:
    """The words of a vocabulary that a model can have learnt: those with ids below `bound`.

    All other words are unknown (-1), because the vocabulary may have grown by other models since.
    """

    def __init__(self, words: dps.WordTable, bound: int):
        self._words, self._bound = words, bound

    @property
    def name(self) -> str:
        return self._words.name

    @contextlib.contextmanager
    def apart(self) -> Iterator[KnownWords]:
        """The same words through connections of their own; see :meth:`dps.WordTable.apart`."""
        with self._words.apart() as own:
            yield KnownWords(own, self._bound)

    def ids(self, words: Iterable[object]) -> np.ndarray:
        ids = self._words.ids(words, assign=False)
        return np.where(ids < self._bound, ids, -1)


def name_of(vocabulary: VocabularyLike) -> str | None:
    return vocabulary.name if isinstance(vocabulary, dps.WordTable) else vocabulary


def check_vocabulary(vocabulary: VocabularyLike, client: ClusterLike) -> None:
    """Refuse the name of a vocabulary where no parameter server is named that may have it."""
    if isinstance(vocabulary, str) and not isinstance(client, (dps.ParameterServer, Address)):
        raise InputError(
            f"vocabulary {vocabulary!r} is a name, and client is no dps.ParameterServer, which alone has vocabularies: "
            f"set client=ps, or vocabulary=ps.vocabulary({vocabulary!r})"
        )


def words_at(ps: dps.ParameterServer, vocabulary: VocabularyLike) -> dps.WordTable | None:
    """The words that number features in training; those that have no ids yet get some."""
    return ps.client().vocabulary(vocabulary) if isinstance(vocabulary, str) else vocabulary


@contextlib.contextmanager
def known_words(vocabulary: VocabularyLike, client: ClusterLike, layout: Layout) -> Iterator[KnownWords | None]:
    """The words by which a fitted model predicts; None if it was fitted without, or if they are not at hand.

    A model that was loaded may do without them, because its X may be a matrix.
    """
    bound = 1 << layout.bits
    if layout.vocabulary is None or vocabulary is None:
        yield None
    elif isinstance(vocabulary, dps.WordTable):
        yield KnownWords(vocabulary, bound)
    elif isinstance(client, (dps.ParameterServer, Address)):
        with serving(client, None, 1) as (ps, _):
            yield KnownWords(ps.client().vocabulary(vocabulary), bound)
    else:
        yield None
