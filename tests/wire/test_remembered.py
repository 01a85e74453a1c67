"""What servers remember: content that came once is found by its hash, within limits, and a wrong hash is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.wire import remembered, values
from dps.engine.wire.remembered import KEY_BYTES, Memory, Remembered
from dps.engine.wire.values import decode_values, encode_values
from dps.errors import ProtocolError, UnknownFunctionError

WHAT = "the arguments"


def whole(value: Remembered) -> bytes:
    return value.key + value.content


def check_travels(memory: Memory) -> None:
    """Content comes back, the second time by its key alone, as the same object."""
    value = Remembered(b"plan")
    with pytest.raises(UnknownFunctionError, match="send the content"):
        memory.take(value.key)
    first = memory.take(whole(value))
    assert first.content == b"plan"
    assert memory.take(value.key) is first
    assert memory.take(whole(value)) is first


def check_refuses(memory: Memory) -> None:
    for data in (b"", b"short", Remembered(b"a").key):
        with pytest.raises(UnknownFunctionError):
            memory.take(data)
    with pytest.raises(ProtocolError, match="hash"):
        memory.take(Remembered(b"a").key + b"b")
    assert len(memory) == 0


def check_limits(memory: Memory) -> None:
    """The content that was used last stays."""
    contents = [Remembered(bytes([n]) * 5) for n in range(4)]
    for value in contents[:3]:
        memory.take(whole(value))
    memory.take(contents[0].key)
    memory.take(whole(contents[3]))
    assert len(memory) == 3
    with pytest.raises(UnknownFunctionError):
        memory.take(contents[1].key)
    for value in (contents[0], contents[2], contents[3]):
        memory.take(value.key)
    memory.take(whole(Remembered(b"x" * 25)))
    assert len(memory) == 2  # the last one of five bytes, and this one
    memory.take(whole(Remembered(b"x" * 31)))  # more than may be kept: it is used, and others stay
    assert memory.take(Remembered(b"x" * 25).key).content == b"x" * 25


CHECKS = [check_travels, check_refuses, check_limits]


@pytest.mark.parametrize("check", CHECKS)
def test_memory(check) -> None:
    check(Memory(3, 30))


MUTANTS = [
    ("take", "if value.key != key:", "if False:"),
    ("take", "self._keep(value)", "pass"),
    ("take", "self._known.move_to_end(key)", "pass"),
    ("_keep", "len(self._known) > self._values", "False"),
    ("_keep", "or self._used > self._nbytes", ""),
    ("_keep", "self._used -= len(oldest.content)", "pass"),
    ("_keep", "popitem(last=False)", "popitem()"),
    ("_keep", "len(value.content) > self._nbytes or", ""),
]


@pytest.mark.parametrize(("name", "old", "new"), MUTANTS)
def test_wrong_variants_are_noticed(name, old, new, monkeypatch) -> None:
    monkeypatch.setattr(Memory, name, mutant(getattr(Memory, name), old, new))
    for check in CHECKS:
        try:
            check(Memory(3, 30))
        except (Exception, pytest.fail.Exception):
            return
    pytest.fail("no check has noticed it")


def test_what_is_made_of_it_is_made_once() -> None:
    calls = []
    value = Remembered(b"12")
    for _ in range(3):
        assert value.made(lambda content: calls.append(content) or int(content)) == 12
    assert calls == [b"12"]


@given(st.binary(min_size=1, max_size=200))
def test_it_travels_among_arguments(content) -> None:
    value = Remembered(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values, "MEMORY", Memory())
        with pytest.raises(UnknownFunctionError):
            decode_values(encode_values({"plan": value}, WHAT, {value.key}))
        long = encode_values({"plan": value, "n": [1]}, WHAT)
        assert decode_values(long)["plan"].content == content
        short = encode_values({"plan": value, "n": [1]}, WHAT, {value.key})
        assert decode_values(short)["plan"].content == content
        assert len(long) - len(short) >= len(content)


def test_keys_have_a_fixed_length() -> None:
    assert len(Remembered(b"").key) == KEY_BYTES == len(remembered.Remembered(b"x" * 100).key)
