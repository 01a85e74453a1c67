"""Keys in fewer than 8 bytes: what arrives is what was sent, in the bytes that numpy says; nothing else is taken."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variant
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packing import size_of, unpacked

from dps.engine.core import packed_keys

LEAST, GREATEST = -(2**63), 2**63 - 1
COUNTS = st.sampled_from([0, 1, 2, 3, 7, 255, 256, 257, 511, 512, 513, 700])


@st.composite
def many_keys(draw: st.DrawFn) -> np.ndarray:
    """Keys of a number of bits around some other key, sorted or not, of which a few lie elsewhere."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    count, bits = draw(COUNTS), draw(st.integers(0, 64))
    keys = rng.integers(0, 1 << 64, count, np.uint64) >> np.uint64(64 - bits) if bits else np.zeros(count, np.uint64)
    keys += np.uint64(draw(st.sampled_from([0, 1, 1 << 24, 1 << 63, (1 << 63) - 5, (1 << 64) - 1])))
    keys = keys.view(np.int64)
    order = draw(st.sampled_from(["as drawn", "ascending", "unique", "descending"]))
    keys = keys if order == "as drawn" else np.unique(keys) if order == "unique" else np.sort(keys)
    keys = keys[::-1].copy() if order == "descending" else keys
    for place in draw(st.lists(st.integers(0, 699), max_size=2)):
        if place < len(keys):
            keys[place] = draw(st.sampled_from([LEAST, -1, 0, GREATEST]))
    return keys


def packed(keys: np.ndarray, core=packed_keys) -> np.ndarray:
    out = np.full(core.packed_bytes(keys) + 1, 77, np.uint8)
    core.pack(keys, out[:-1])
    assert out[-1] == 77, "written behind the end"
    return out[:-1]


def check(keys: np.ndarray, core=packed_keys) -> None:
    made, back = packed(keys, core), np.zeros_like(keys)
    assert len(made) == size_of(keys)
    core.unpack(made, back)
    np.testing.assert_array_equal(back, keys)
    np.testing.assert_array_equal(unpacked(made.tobytes(), len(keys)), keys)


@settings(max_examples=300)
@given(many_keys())
@example(np.array([LEAST, GREATEST, LEAST]))
@example(np.array([GREATEST, LEAST]))
@example(np.arange(LEAST, LEAST + 600))
@example(np.arange(600)[::-1].copy())
def test_what_is_unpacked_is_what_was_packed(keys: np.ndarray) -> None:
    check(keys)


@settings(max_examples=300)
@given(data=st.data())
def test_other_bytes_are_refused_or_are_keys(data: st.DataObject) -> None:
    """Also where sums overflow: nothing is read or written outside, and a wrong length or form is an error."""
    keys = data.draw(many_keys())
    given_bytes = bytearray(packed(keys).tobytes())
    for _ in range(data.draw(st.integers(0, 3))):
        if given_bytes:
            at = data.draw(st.sampled_from([0, len(given_bytes) - 1]) | st.integers(0, len(given_bytes) - 1))
            given_bytes[at] = data.draw(st.integers(0, 255))
    given_bytes = given_bytes[: len(given_bytes) - data.draw(st.sampled_from([0, 0, 1, 8, 16]))]
    given_bytes += bytes(data.draw(st.sampled_from([0, 0, 1, 8])))
    count = max(0, len(keys) + data.draw(st.sampled_from([0, 0, -1, 1, 256])))
    out, body = np.full(count + 1, 77), np.frombuffer(bytes(given_bytes), np.uint8)
    if is_right(bytes(given_bytes), count):
        packed_keys.unpack(body, out[:-1])
        np.testing.assert_array_equal(out[:-1], unpacked(bytes(given_bytes), count))
    else:
        with pytest.raises(ValueError, match=rf"{len(body)} bytes are not {count} packed keys"):
            packed_keys.unpack(body, out[:-1])
        assert (out == 77).all()
    assert out[-1] == 77


def is_right(body: bytes, count: int) -> bool:
    """Whether the forms are those of so many keys in so many bytes."""
    at = 0
    for begin in range(0, count, 256):
        if at >= len(body):
            return False
        n, form = min(256, count - begin), body[at]
        if form not in (8, *range(8), *range(16, 24)):
            return False
        at += 1 + (8 * n if form == 8 else 8 + (form & 15) * (n - (form >= 16)))
    return -(-at // 8) * 8 == len(body)


@pytest.mark.parametrize(
    ("bits", "count", "ascending", "hashed"),
    [
        (24, 1_000, 3.1, 3.1),
        (24, 30_000, 2.1, 3.1),
        (30, 30_000, 3.1, 4.1),
        (40, 30_000, 4.1, 5.1),
        (64, 30_000, 7.1, 8.1),
    ],
)
def test_hashed_features_take_few_bytes(bits: int, count: int, ascending: float, hashed: float) -> None:
    """Batches of features, as np.unique returns them, and in the order of another hash, as dps.localize does."""
    keys = np.random.default_rng(0).integers(LEAST, GREATEST, count) >> (64 - bits)
    assert packed_keys.packed_bytes(np.unique(keys)) <= ascending * count
    assert packed_keys.packed_bytes(keys) <= hashed * count


WRONG = [
    ("const int64_t n = count - a < DPS_BLOCK ? count - a : DPS_BLOCK", "const int64_t n = DPS_BLOCK"),
    ("(71 - __builtin_clzll(number)) >> 3", "(70 - __builtin_clzll(number)) >> 3"),
    ("dps_width_of((uint64_t)greatest - (uint64_t)least)", "dps_width_of((uint64_t)greatest)"),
    ("bits |= (uint64_t)keys[i] - (uint64_t)keys[i - 1]", "bits = (uint64_t)keys[i] - (uint64_t)keys[i - 1]"),
    ("least = keys[i] < least ?", "least = (uint64_t)keys[i] < (uint64_t)least ?"),
    ("numbers[i] >>= 32", "numbers[i] >>= 16"),
    ("shift += 16", "shift = 16"),
    ("(uint64_t)part << shift", "(uint64_t)(int16_t)part << shift"),
    ("base += numbers[i]", "base = (uint32_t)(base + numbers[i])"),
    ("whole_words(used) == nbytes", "whole_words(used) <= nbytes"),
    ("whole_words(used) == nbytes", "used == nbytes"),
    ("return form == 8 ? 8 * count : -1", "return 8 * count"),
    ("if (form & ~(15 | DPS_DIFFERENCES))", "if (0)"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_variant_is_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = variant("packed_keys", "packed_keys.pxd" if "whole_words" in old else "packed_keys.h", old, new)
    if "const int64_t n" in old:  # which would write outside: only the size is looked at
        assert core.packed_bytes(np.arange(3)) != size_of(np.arange(3))
        return
    monkeypatch.setattr(f"{__name__}.packed_keys", core)

    @settings(max_examples=300, database=None, derandomize=True)
    @given(many_keys())
    def check_keys(keys: np.ndarray) -> None:
        check(keys, core)

    def check_all() -> None:
        check(np.array([LEAST, GREATEST, LEAST]), core)
        check_keys()
        test_other_bytes_are_refused_or_are_keys()

    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception, BaseExceptionGroup)):
        check_all()
