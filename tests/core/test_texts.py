"""Words as bytes, keys and rows: the loops of dps.engine.core.texts beside plain Python."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from compiled import variant
from hypothesis import example, given
from hypothesis import strategies as st
from noticing import fails

from dps.engine.core import texts
from dps.engine.core.grouping import mix
from dps.engine.functions.words import WordLayout

TEXTS = st.lists(st.one_of(st.text(max_size=6), st.binary(max_size=12)), max_size=20)


def as_bytes(word: str | bytes) -> bytes:
    return word.encode() if isinstance(word, str) else word


def utf8(words: list) -> list:
    """Without lone surrogates."""
    return [word for word in words if isinstance(word, bytes) or word.encode("utf-8", "ignore").decode() == word]


@example(["a", "a\0", "b"])
@given(TEXTS)
def test_texts_are_joined_packed_matched_and_split(words) -> None:
    words = utf8(words)
    octets, ends = texts.join(words)
    plain = list(map(as_bytes, words))
    assert [octets[a:b].tobytes() for a, b in itertools.pairwise(ends)] == plain
    which = np.arange(len(words))[::-1].copy()
    rows = np.full((len(words), 3), -1)
    too_long = texts.pack(octets, ends, which, rows)
    assert too_long == next((n for n in which if len(plain[n]) > 16), -1)
    if too_long >= 0 or not words:
        return
    assert rows[:, 1:].tobytes() == b"".join(word.ljust(16, b"\0") for word in plain[::-1])
    rows[:, 0] += np.arange(1, len(words) + 1) << 8  # ids 0, 1, ...
    assert texts.split(rows, False) == plain[::-1]
    ids, found = np.full(len(words), -1), np.empty(len(words), np.uint8)
    texts.match(rows, octets, ends, which, ids, found)
    assert ids.tolist() == which.tolist(), "in the reverse order"
    assert (found == 1).all()
    texts.match(np.roll(rows, 1, axis=0).copy(), octets, ends, which, ids, found)
    assert (
        found.tolist()
        == [1 if one == other else 2 for one, other in zip(plain, plain[1:] + plain[:1], strict=True)][::-1]
    )
    texts.match(np.zeros_like(rows), octets, ends, which, ids, found)
    assert not found.any()


def plain_hash(word: bytes, seed: int) -> int:
    h = mix(seed + len(word))
    for start in range(0, len(word), 8):
        h = mix(h ^ int.from_bytes(word[start : start + 8], "little"))
    return h


@given(TEXTS, st.integers(0, 10), st.integers(0, 3))
def test_keys_are_lanes_and_hashes(words, bits, probe) -> None:
    words = utf8(words)
    keys = np.empty(len(words), np.int64)
    texts.keys_of(*texts.join(words), np.arange(len(words)), bits, probe, keys)
    for word, key in zip(map(as_bytes, words), keys.tolist(), strict=True):
        high = plain_hash(word, 0) >> (64 - bits) << (64 - bits)
        low = plain_hash(word, probe) & ((1 << (63 - bits)) - 1)
        assert key == (high | low) - (1 << 63)
    layout = WordLayout(bits, 2)
    assert layout.lanes_of(keys).tolist() == [plain_hash(as_bytes(word), 0) >> (64 - bits) for word in words]


def test_what_lies_outside_is_refused() -> None:
    octets, ends = texts.join(["ab", "c"])
    keys, rows = np.empty(1, np.int64), np.ones((1, 2), np.int64)
    for which in ([2], [-1]):
        with pytest.raises(ValueError, match="of 2"):
            texts.keys_of(octets, ends, np.array(which), 2, 0, keys)
    with pytest.raises(ValueError, match="and there are 2 bytes"):
        texts.pack(octets[:2], ends, np.array([1]), rows)
    with pytest.raises(ValueError, match="33 bits"):
        texts.keys_of(octets, ends, np.array([0]), 33, 0, keys)
    with pytest.raises(ValueError, match="room for 1 ids of 2 texts"):
        texts.match(rows, octets, ends, np.array([0]), np.empty(1, np.int64), np.empty(1, np.uint8))
    with pytest.raises(ValueError, match="of a word, whose length has 8 bits"):
        texts.pack(octets, ends, np.array([0]), np.empty((1, 40), np.int64))
    with pytest.raises(ValueError, match="a word of 9 bytes in a row that has 8"):
        texts.split(np.array([[1 << 8 | 9, 0]]), False)
    with pytest.raises(TypeError, match=r"^int$"):
        texts.join(["a", 1])


WRONG = [
    ("memcmp(row + 1, text + end[chosen[i]], length) == 0", "True"),
    ("length == (row[0] & ((1 << LENGTH_BITS) - 1))", "True"),
    ("(row[0] >> LENGTH_BITS) - 1", "row[0] >> LENGTH_BITS"),
    ("memset(row + 1, 0, room)", "pass"),
    ("first | (h & low)", "h"),
    ("last, probe)", "last, 0)"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_what_is_wrong_is_noticed(old, new) -> None:
    wrong = variant("texts", "texts.pyx", old, new)
    names = ("join", "keys_of", "pack", "match", "split")
    with mock.patch.multiple(texts, **{name: getattr(wrong, name) for name in names}):
        assert fails(test_texts_are_joined_packed_matched_and_split) or fails(test_keys_are_lanes_and_hashes)
