"""Messages about functions: padded as bodies of frames are, whatever they end with."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import mutant

from dps.engine.wire import messages
from dps.engine.wire.messages import (
    ALONE,
    PADDING,
    PREPARES,
    READS,
    FunctionCall,
    PartAnswer,
    decode_parts,
    encode_parts,
)
from dps.errors import ProtocolError

ENDINGS = st.binary(max_size=20).flatmap(lambda head: st.integers(0, 9).map(lambda n: head + n * PADDING))
WHOLE = st.integers(-(2**63), 2**63 - 1)
CALLS = st.builds(
    FunctionCall,
    function=st.text(max_size=70),
    seed=st.integers(0, 2**62 - 1),
    time=st.floats(allow_nan=False),
    start=WHOLE,
    stop=WHOLE,
    arguments=ENDINGS,
    mode=st.sampled_from([READS, PREPARES, ALONE]),
)
PARTS = st.lists(st.builds(PartAnswer, shard=st.integers(0, 4095), value=ENDINGS, done=st.booleans()), max_size=4)


@settings(max_examples=50, deadline=None)
@given(CALLS)
def test_a_call_comes_back(call) -> None:
    body = call.encode()
    assert len(body) % 8 == 0, "a body of a frame is a multiple of 8 bytes"
    assert FunctionCall.decode(memoryview(body)) == call


@settings(max_examples=50, deadline=None)
@given(PARTS)
def test_answers_come_back(parts) -> None:
    body = encode_parts(parts)
    assert len(body) % 8 == 0
    assert decode_parts(body) == parts


def test_arguments_and_values_may_end_with_the_byte_of_the_padding() -> None:
    for count in range(17):
        ending = b"x" + count * PADDING
        for mode in (READS, PREPARES, ALONE):
            call = FunctionCall("f", 1, 2.0, 0, 9, ending, mode)
            assert FunctionCall.decode(memoryview(call.encode())).arguments == ending
        for done in (False, True):
            assert len(encode_parts([PartAnswer(3, ending, done)])) % 8 == 0
            assert decode_parts(encode_parts([PartAnswer(3, ending, done)])) == [PartAnswer(3, ending, done)]


def decoded(decode, body: bytes) -> None:
    """It is a message, or a ProtocolError."""
    try:
        decode(memoryview(body))
    except ProtocolError:
        pass


DECODERS = {"call": FunctionCall.decode, "parts": decode_parts}


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
@pytest.mark.parametrize(
    "body", [b"", PADDING * 8, b"\x91" * 100_000, b"\x97\xa1\xff", b"\x97" + b"\x91" * 100_000, b"\x93\x01\xc4\x01"]
)
def test_what_is_no_message_is_an_error(decode, body) -> None:
    with pytest.raises(ProtocolError):
        decode(memoryview(body))


def test_what_stands_behind_the_last_field_is_no_other_error() -> None:
    """A later version may send more fields."""
    body = FunctionCall("f", 1, 2.0, 0, 9, b"", READS).encode().rstrip(PADDING)
    assert FunctionCall.decode(memoryview(b"\x98" + body[1:] + b"\x05")).function == "f"
    decoded(FunctionCall.decode, b"\x98" + body[1:] + b"\x91" * 100_000)


@settings(max_examples=50, deadline=None)
@given(CALLS, PARTS, st.randoms(use_true_random=False))
def test_damaged_messages_are_never_another_error(call, parts, draw: random.Random) -> None:
    for decode, body in ((FunctionCall.decode, call.encode()), (decode_parts, encode_parts(parts))):
        data = bytearray(body)
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        decoded(decode, bytes(data))


WRONG = [
    ("text.ljust(padded(len(text)), PADDING)", "text.ljust(padded(len(text)), b'\\0')"),
    ("text.ljust(padded(len(text)), PADDING)", "text"),
]


@pytest.mark.parametrize(("old", "new"), WRONG)
def test_a_wrong_padding_is_caught(old, new, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "encode_parts", mutant(messages.encode_parts, old, new))
    with pytest.raises((AssertionError, ProtocolError)):
        test_arguments_and_values_may_end_with_the_byte_of_the_padding()
