"""Values as bytes: what travels comes back, what does not is refused by its name, and damaged bytes are an error."""

from __future__ import annotations

import datetime as dt
import decimal
import random
import uuid
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracles import mutant

from dps.engine.wire import values
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import InputError, InputTypeError, ProtocolError

WHAT = "the arguments of function 'f'"

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.byte_string_dtypes(min_len=1),
    hnp.unicode_string_dtypes(min_len=1),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary(max_size=20)
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal, of the same types, arrays also in dtype, shape and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (a.dtype.str, a.shape, a.tobytes()) == (b.dtype.str, b.shape, b.tobytes())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a


def round_trip(value: object) -> object:
    return decode_values(encode_values(value, WHAT))


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_what_travels_comes_back(value) -> None:
    assert same(round_trip(value), value)


@given(ARRAYS)
@settings(max_examples=30, deadline=None)
def test_an_array_that_comes_back_is_new_and_may_be_changed(array) -> None:
    encoded = bytearray(encode_values([array], WHAT))
    (back,) = decode_values(encoded)
    assert back.flags.writeable
    assert back.flags.c_contiguous
    encoded[:] = bytes(len(encoded))
    assert same(back, array)


def test_an_array_may_lie_anyhow_in_memory() -> None:
    whole = np.arange(24.0).reshape(4, 6)
    for array in (whole.T, whole[::-1, ::2], np.broadcast_to(1.5, (2, 3)), np.asfortranarray(whole)):
        assert np.array_equal(round_trip(array), array)


@pytest.mark.parametrize(
    ("given", "back"),
    [
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        ((1, (2.0, "x")), [1, [2.0, "x"]]),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ({1: "a", None: 2, b"k": 3}, {1: "a", None: 2, b"k": 3}),
    ],
)
def test_what_becomes_a_plain_value(given, back) -> None:
    assert same(round_trip(given), back)


def test_numbers_of_numpy_that_python_has_not_become_arrays() -> None:
    for number in (np.datetime64("2026-01-02", "D"), np.timedelta64(5, "s"), np.complex64(1 + 2j), np.longdouble(0.1)):
        back = round_trip(number)
        assert isinstance(back, np.ndarray)
        assert back.shape == ()
        assert back[()] == number


@dataclass
class Mine:
    x: int = 1


class Record(msgspec.Struct):
    x: int = 1


REFUSED = {
    "set": {1, 2},
    "frozenset": frozenset({1}),
    "datetime": dt.datetime(2026, 1, 1),
    "date": dt.date(2026, 1, 1),
    "Decimal": decimal.Decimal("0.1"),
    "UUID": uuid.UUID(int=5),
    "complex": 1j,
    "Mine": Mine(),
    "Record": Record(),
    "object": object(),
    "function": round_trip,
    "range": range(3),
    "dtype object": np.array([1, None]),
    "dtype [('a'": np.zeros(2, [("a", "f4"), ("b", "i8")]),
    "generator": (x for x in ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_travel_is_refused_by_its_name(name) -> None:
    """It is neither turned into something else nor pickled, at whatever depth it stands."""
    for value in (REFUSED[name], [1, REFUSED[name]], {"a": (REFUSED[name],)}):
        with pytest.raises(InputTypeError, match=r"the arguments of function 'f': an? .* does not travel") as caught:
            encode_values(value, WHAT)
        assert name in str(caught.value)


@pytest.mark.parametrize("key", [(1, 2), np.int64(3), frozenset()])
def test_keys_of_dicts_are_plain(key) -> None:
    with pytest.raises(InputTypeError, match="as a key of a dict"):
        encode_values({"a": [{key: 1}]}, WHAT)


def test_a_whole_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(InputError, match=r"the arguments of function 'f': .*64 bits"):
        encode_values({"a": 2**64}, WHAT)


def test_what_contains_itself_is_refused() -> None:
    loop: list = []
    loop.append(loop)
    with pytest.raises(InputError, match="nothing contains itself"):
        encode_values(loop, WHAT)


# ---- damaged bytes


def check_damaged(data: bytes) -> None:
    """They are values, perhaps others, or a ProtocolError; never another error."""
    try:
        decode_values(data)
    except ProtocolError:
        pass


def array_of(dtype: str, shape: tuple, content: bytes) -> bytes:
    """An array with this head."""
    head = msgspec.msgpack.encode((dtype, shape))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, len(head).to_bytes(2, "little") + head + content))


HEADS = [
    ("O", (1,), bytes(8)),
    ("|O8", (1,), bytes(8)),
    ("<f4", (-1,), bytes(4)),
    ("<f4", (-2, -2), bytes(16)),
    ("<f4", (2,), bytes(4)),
    ("<f4", (2**64 - 1, 0), b""),
    ("<f4", (2**62, 2**62, 0), b""),
    ("<f4", (0,) * 70, b""),
    ("<f4", (1,) * 70, bytes(4)),
    ("|V8", (1,), bytes(8)),
    ("i4,f8", (1,), bytes(12)),
    ("(1,", (1,), bytes(12)),
    ("{'a': 1}", (1,), bytes(12)),
    ("<U0", (4,), b""),
    ("<S0", (4,), b""),
    ("<U999999999", (0,), b""),
    ("<M8[x]", (1,), bytes(8)),
    ("<f3", (1,), bytes(3)),
    ("", (1,), bytes(8)),
    ("f4\0", (1,), bytes(4)),
]


@pytest.mark.parametrize(("dtype", "shape", "content"), HEADS)
def test_an_array_with_a_wrong_head_is_an_error(dtype, shape, content) -> None:
    with pytest.raises(ProtocolError):
        decode_values(array_of(dtype, shape, content))


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\x91" * 100_000, b"\xd4\x03\x00", b"\xd4\x01\x00", b"\xa1\xff", b"\xc0\xc0", b"\x81\x80\xc0"],
    ids=["nothing", "no value", "too deep", "another extension", "no head", "no text", "two values", "a dict as a key"],
)
def test_bytes_that_are_no_values_are_an_error(data) -> None:
    with pytest.raises(ProtocolError):
        decode_values(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_never_another_error(data) -> None:
    check_damaged(data)


@settings(max_examples=60, deadline=None)
@given(VALUES, st.randoms(use_true_random=False))
def test_damaged_values_are_never_another_error(value, draw: random.Random) -> None:
    data = bytearray(encode_values(value, WHAT))
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data))
        match draw.randrange(3):
            case 0:
                data[place] = draw.randrange(256)
            case 1:
                del data[place : place + draw.randint(1, 5)]
            case 2:
                data[place:place] = draw.randbytes(draw.randint(1, 5))
        if not data:
            break
    check_damaged(bytes(data))


# ---- wrong variants


def check_copies() -> None:
    assert round_trip(np.arange(3)).flags.writeable


def check_heads() -> None:
    for head in HEADS:
        test_an_array_with_a_wrong_head_is_an_error(*head)


def check_refused() -> None:
    for name in REFUSED:
        test_what_does_not_travel_is_refused_by_its_name(name)


WRONG = [
    ("_decode_other", ".copy()", "", check_copies),
    ("_decode_other", "not DTYPE.fullmatch(name)", "False", check_heads),
    ("_check", "for part in value:\n", "for part in ():\n", check_refused),
    ("_check", "elif not isinstance(value, PLAIN):", "elif False:", check_refused),
]


@pytest.mark.parametrize(("name", "old", "new", "check"), WRONG)
def test_a_wrong_variant_is_caught(name, old, new, check, monkeypatch) -> None:
    monkeypatch.setattr(values, name, mutant(getattr(values, name), old, new))
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError, TypeError)):
        check()
