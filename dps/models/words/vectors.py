"""Words and their vectors: similar words, and the file format of word2vec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import numpy as np

from dps.errors import InputError, UnknownWordError
from dps.models.rows import HomeTable, RowTable

if TYPE_CHECKING:
    from typing_extensions import TypeIs

__all__ = ["WordVectors"]

Word: TypeAlias = "str | int"  # a word, or a vertex of a graph
Query: TypeAlias = "Word | np.ndarray | Iterable[Word | np.ndarray]"


class WordVectors:
    """Words and their vectors, with the names of gensim's KeyedVectors.

    Parameters
    ----------
    words : sequence of str
        Distinct words; or whole numbers, the vertices of a graph.
    vectors : ndarray [words, dim], or RowTable
        Where they are: in this process, or on the servers.

    Attributes
    ----------
    index_to_key : list of str
        The words; those of a trained model by how often they occur.
    key_to_index : dict of str to int

    Examples
    --------
    >>> import numpy as np, dps
    >>> wv = dps.models.WordVectors(["north", "south", "up"], np.array([[1, 0], [1, 1], [0, 1]]))
    >>> wv.most_similar("north", topn=1)[0][0], round(wv.similarity("south", "up"), 3)
    ('south', 0.707)
    >>> wv["up"].tolist(), "down" in wv
    ([0.0, 1.0], False)
    """

    def __init__(self, words: Sequence[Word], vectors: np.ndarray | RowTable):
        self.index_to_key = list(words)
        self.key_to_index = {word: number for number, word in enumerate(self.index_to_key)}
        if len(self.key_to_index) < len(self.index_to_key):
            raise InputError(f"{len(self.index_to_key)} words, of which {len(self.key_to_index)} are distinct")
        if isinstance(vectors, np.ndarray):
            if vectors.ndim != 2 or len(vectors) != len(self):
                raise InputError(f"vectors of shape {vectors.shape} for {len(self)} words: one row for each is wanted")
            vectors = HomeTable(np.arange(len(self)), np.ascontiguousarray(vectors, np.float32))
        self._table = vectors

    def __len__(self) -> int:
        return len(self.index_to_key)

    def __repr__(self) -> str:
        return f"<WordVectors of {len(self):,} words>"

    def __contains__(self, word: object) -> bool:
        return word in self.key_to_index

    def __getitem__(self, words: Word | Sequence[Word]) -> np.ndarray:
        """The vector of a word, or the vectors ``[words, dim]`` of several."""
        if is_word(words):
            return self._rows([words])[0]
        return self._rows(list(words))

    @property
    def vectors(self) -> np.ndarray:
        """All vectors in the order of `index_to_key`, float32 ``[words, dim]``; from the servers, they are a copy."""
        return self._table.find(np.arange(len(self)))[0]

    @property
    def vector_size(self) -> int:
        """The length of a vector."""
        return self._table.find(np.arange(min(1, len(self))))[0].shape[1]

    def similarity(self, one: Word, other: Word) -> float:
        """The cosine of the vectors of two words."""
        a, b = unit(self._rows([one, other]))
        return float(a @ b)

    def most_similar(self, positive: Query = (), negative: Query = (), topn: int = 10) -> list[tuple[Word, float]]:
        """The words nearest to a mean of words, by cosine; without these words.

        Parameters
        ----------
        positive, negative : str, vector, or sequence of these
            Their unit vectors are added and subtracted: ``most_similar(["king", "woman"], ["man"])``.
        topn : int
            How many words.

        Returns
        -------
        list of (word, cosine)
            The nearest first.

        Raises
        ------
        UnknownWordError
            A word without a vector; it is a KeyError.
        InputError
            No word is given, or `topn` is no positive number.
        """
        if isinstance(topn, bool) or not isinstance(topn, (int, np.integer)) or topn < 1:
            raise InputError(f"topn is how many words, 1 or more; not {topn!r}")
        plus, minus = listed(positive), listed(negative)
        if not plus and not minus:
            raise InputError("most_similar needs a word: positive and negative are empty")
        known = [each for each in (*plus, *minus) if is_word(each)]
        rows = iter(self._rows(known))
        each = unit(np.stack([next(rows) if is_word(word) else np.asarray(word) for word in (*plus, *minus)]))
        signs = np.repeat([1.0, -1.0], [len(plus), len(minus)])
        mean = (signs @ each / len(each)).astype(np.float32)
        skip = {self.key_to_index[word] for word in known}
        keys, scores = self._table.nearest(queries=mean[None], k=int(topn) + len(skip), cosine=True)
        found = [
            (int(key), float(score)) for key, score in zip(keys[0], scores[0], strict=True) if int(key) not in skip
        ]
        return [(self.index_to_key[key], score) for key, score in found[:topn]]

    # -- files

    def save_word2vec_format(self, path: str | Path, binary: bool = False) -> None:
        """Write the format of the program word2vec, byte for byte as gensim does.

        Parameters
        ----------
        path : str or Path
        binary : bool
            Vectors as float32 of little endian; else as text.
        """
        vectors = self.vectors
        with open(path, "wb") as file:
            file.write(f"{len(self)} {vectors.shape[1]}\n".encode())
            for word, row in zip(self.index_to_key, vectors, strict=True):
                if binary:
                    file.write(str(word).encode() + b" " + row.astype("<f4").tobytes())
                else:
                    file.write(f"{word} {' '.join(map(str, row))}\n".encode())

    @classmethod
    def load_word2vec_format(cls, path: str | Path, binary: bool = False) -> WordVectors:
        """Read a file of :meth:`save_word2vec_format`, of gensim, or of the program word2vec.

        Raises
        ------
        InputError
            The file has another format, or ends early.
        """
        with open(path, "rb") as file:
            head = file.readline().split()
            if len(head) != 2 or not all(part.isdigit() for part in head):
                raise InputError(f"{path}: the first line has the numbers of words and of values, not {head[:4]}")
            count, dim = map(int, head)
            read = binary_row if binary else text_row
            rows = [read(file, dim, f"{path}: word {number + 1} of {count}") for number in range(count)]
        values = np.stack([row for _, row in rows]) if rows else np.zeros((0, dim), np.float32)
        return cls([word for word, _ in rows], values)

    def _rows(self, words: Sequence[Word]) -> np.ndarray:
        missing = [word for word in words if word not in self.key_to_index]
        if missing:
            raise UnknownWordError(
                f"{missing[0]!r} has no vector: it is not among the {len(self):,} words; it did not occur in the text, "
                f"or fewer times than min_count"
            )
        return self._table.find(np.array([self.key_to_index[word] for word in words], np.int64))[0]


def is_word(thing: object) -> TypeIs[Word]:
    """Whether it is one word, and neither a vector nor several words."""
    return isinstance(thing, (str, int, np.integer))


def listed(query: Query) -> list[Word | np.ndarray]:
    return [query] if is_word(query) or (isinstance(query, np.ndarray) and query.ndim == 1) else list(query)


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows divided by their norms; rows of zeros stay as they are."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def text_row(file: BinaryIO, dim: int, what: str) -> tuple[str, np.ndarray]:
    """A word and its vector from a line of text."""
    parts = file.readline().decode().rstrip("\n").rstrip(" ").split(" ")
    if len(parts) != dim + 1:
        raise InputError(f"{what}: {len(parts) - 1} values, and the first line says {dim}")
    try:
        return parts[0], np.array(parts[1:], np.float32)
    except ValueError as error:
        raise InputError(f"{what}: {error}; binary files are read with binary=True") from error


def binary_row(file: BinaryIO, dim: int, what: str) -> tuple[str, np.ndarray]:
    """A word and its vector from bytes."""
    word = bytearray()
    while (byte := file.read(1)) != b" ":
        if not byte:
            raise InputError(f"{what}: the file ends early")
        if byte != b"\n":  # the program word2vec ends each vector with one
            word += byte
    raw = file.read(4 * dim)
    if len(raw) < 4 * dim:
        raise InputError(f"{what}: the file ends early")
    return word.decode(), np.frombuffer(raw, "<f4").astype(np.float32)
