"""Frames and the session secret: everything that can be said of bytes without a socket; and the errors that travel."""

from __future__ import annotations

import json
import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dps import errors
from dps.engine.wire import frames, handshake
from dps.engine.wire.frames import HEADER_SIZE, MAGIC, Header, decode_header, encode_header, padded
from dps.errors import AccessDeniedError, DPSError, LimitError, ProtocolError, by_name

LIMIT = 1 << 30
i64 = st.integers(-(2**63), 2**63 - 1)
SIGNED = {"clock": i64, "start": i64, "rows": st.integers(-(2**31), 2**31 - 1)}
BITS = {"kind": 8, "flags": 8, "shard": 16, "shards": 16, "parties": 16, "attempt": 16}  # others are of 32 bits
FIELDS = {
    name: SIGNED.get(name, st.integers(0, 2 ** BITS.get(name, 32) - 1)) for name in Header._fields if name != "body"
}


# ---- headers --------------------------------------------------------------------------------------------------------


@given(fields=st.fixed_dictionaries(FIELDS), words=st.integers(0, LIMIT // 8), offset=st.integers(0, 99))
def test_headers_come_back(fields: dict, words: int, offset: int) -> None:
    header = Header(**fields, body=8 * words)
    packed = encode_header(header)
    assert len(packed) == HEADER_SIZE == 64
    for buffer in (bytes(offset) + packed, memoryview(bytearray(bytes(offset) + packed + b"more"))):
        assert decode_header(buffer, offset, LIMIT) == header


def test_the_layout_is_fixed() -> None:
    """Processes of different versions must at least be able to say hello."""
    header = Header(*range(1, 16), body=8)
    assert encode_header(header).hex() == (
        "44500102030000000400000005000000060000000700000008000000000000000900"
        "0a000b0000000c000000000000000d0000000e000f000800000000000000"
    )
    assert frames.VERSION == 4
    assert encode_header(Header(0)).startswith(b"DP")
    kinds = {name: value for name, value in vars(frames).items() if name.isupper() and isinstance(value, int)}
    named = [kinds[k] for k in ("GREETING", "HELLO", "WELCOME", "PULL", "PUSH", "STATUS", "OK", "ERROR")]
    assert named == [1, 2, 3, 16, 17, 18, 64, 65]
    assert [kinds[k] for k in ("REPLICATE", "DUMP")] == [19, 20]
    assert [kinds[k] for k in ("SERVE", "BEAT", "PLACE", "CAUGHT_UP", "STEPPED_DOWN", "SUSPECT")] == [*range(48, 54)]
    flags = ("RANGE", "RULE_ADD", "RULE_ASSIGN", "ANSWER", "CERTIFICATE", "CONTROL")
    assert [kinds[flag] for flag in flags] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    "fields",
    [
        *({"kind": 256}, {"kind": -1}, {"request": 2**32}, {"count": -1}, {"clock": 2**63}, {"start": -(2**63) - 1}),
        *({"attempt": 2**16}, {"parties": 2**16}, {"shards": 2**16}, {"rows": 2**31}),
    ],
)
def test_a_number_that_does_not_fit_is_named(fields: dict) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(LimitError, match=f"does not fit its place in a frame: .*{name}={value}"):
        encode_header(Header(**{"kind": 1, **fields}))


@pytest.mark.parametrize("body", [1, 7, 9, 4096 + 8, 2**32, 2**63, 2**64 - 8, 2**64 - 1])
def test_a_body_of_a_wrong_size_is_refused(body: int) -> None:
    with pytest.raises(ProtocolError, match=f"a body of {body} bytes; at most 4096, in whole words"):
        decode_header(encode_header(Header(1, body=body)), 0, 4096)
    assert decode_header(encode_header(Header(1, body=4096)), 0, 4096).body == 4096


@given(
    raw=st.tuples(st.binary(min_size=56, max_size=56), st.integers(0, 2 * LIMIT)).map(
        lambda v: v[0] + v[1].to_bytes(8, "little")
    ),
    ours=st.booleans(),
)
def test_any_bytes_are_a_header_or_refused(raw: bytes, ours: bool) -> None:
    raw = struct.pack("<H", MAGIC) + raw[2:] if ours else raw
    begin, body = struct.unpack("<H54xQ", raw)
    if begin == MAGIC and body <= LIMIT and body % 8 == 0:
        assert encode_header(decode_header(raw, 0, LIMIT)) == raw
    else:
        with pytest.raises(ProtocolError, match="0x5044" if begin != MAGIC else f"{body} bytes"):
            decode_header(raw, 0, LIMIT)


@given(n=st.integers(0, 2**40))
def test_padding(n: int) -> None:
    assert padded(n) % 8 == 0
    assert 0 <= padded(n) - n < 8


# ---- texts ----------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=json_values)
def test_json_comes_back_in_whole_words(value) -> None:
    body = frames.encode_json(value)
    assert len(body) % 8 == 0
    assert frames.decode_json(memoryview(body)) == value


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1,]", b"\xff" * 8, b"nonsense", b"\0" * 8, b"[" * 100_000, b"9" * 5_000, b'"\\ud800'],
    ids=lambda body: repr(body[:10]),
)  # fmt: skip
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON"):
        frames.decode_json(body)


# ---- errors ---------------------------------------------------------------------------------------------------------

ALL = [getattr(errors, name) for name in errors.__all__ if name != "by_name"]


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("message", ["", "table 'w' has 3 rows, not 4", "ключ \U0001f511 \ud800 \"'\n\0"])
def test_every_error_crosses_the_wire_and_pickles(kind: type, message: str) -> None:
    error = kind(message)
    for again in (frames.decode_error(frames.encode_error(error)), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == message
    assert by_name(kind.__name__) is kind


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_a_builtin_too_and_says_what_it_is_for(kind: type) -> None:
    assert issubclass(kind, DPSError)
    assert kind is DPSError or any(b.__module__ == "builtins" and b is not Exception for b in kind.__mro__[2:-3])
    assert kind.__doc__
    assert str(kind()) == kind.__name__


def test_all_errors_are_public() -> None:
    defined = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert {kind.__name__ for kind in defined} | {"by_name"} == set(errors.__all__)
    assert errors.__all__ == sorted(errors.__all__, key=lambda name: (name.islower(), name))


def test_errors_of_strangers_become_ours() -> None:
    again = frames.decode_error(frames.encode_error(ZeroDivisionError("by 0")))
    assert type(again) is DPSError
    assert str(again) == "ZeroDivisionError: by 0"
    for name in ("KeyError", "by_name", "annotations", "ErrorOfTheFuture", "__builtins__", "", "None"):
        assert by_name(name) is DPSError


def test_a_long_message_is_cut() -> None:
    assert len(frames.encode_error(DPSError("x" * 10**6))) < 5_000
    assert len(frames.encode_error(DPSError("\U0001f511" * 10**6))) < 1 << 16


@pytest.mark.parametrize("value", [[], "text", 3, None, ["type", "message"]])
def test_an_error_frame_without_an_error(value) -> None:
    with pytest.raises(ProtocolError, match="without an error"):
        frames.decode_error(frames.encode_json(value))
    assert type(frames.decode_error(json.dumps({"type": 3}).encode())) is DPSError


# ---- the session secret ---------------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=40)


@given(nonces=st.tuples(texts, texts), side=st.sampled_from(["client", "server"]))
def test_only_the_secret_proves(nonces: tuple[str, str], side: str) -> None:
    secret = handshake.new_secret()
    claim = handshake.proof(secret, side, *nonces)
    assert handshake.proves(claim, secret, side, *nonces)
    other = "server" if side == "client" else "client"
    assert not handshake.proves(claim, handshake.new_secret(), side, *nonces)
    assert not handshake.proves(claim, secret, other, *nonces), "a proof may not be echoed"
    assert not handshake.proves(claim, secret, side, nonces[0] + "x", nonces[1])
    assert nonces[0] == nonces[1] or not handshake.proves(claim, secret, side, *nonces[::-1])
    assert not handshake.proves(claim, secret, side, "|".join(nonces))
    assert secret not in claim


@given(claim=st.one_of(texts, st.none(), st.integers(), st.binary(), st.lists(texts)))
def test_any_other_claim_is_refused(claim) -> None:
    assert handshake.proves(claim, "ab" * 32, "client", "n1", "n2") is False


def test_a_proof_is_fixed() -> None:
    """Clients and servers of any version must agree."""
    assert handshake.proof("00" * 32, "client", "a", "b") == (
        "c7425a7d4001ac33165aad80edd9bf76e11e8ba36236849f3a0e220e27454f11"
    )


def test_nonces_and_secrets_are_fresh() -> None:
    assert len({handshake.new_nonce() for _ in range(1000)}) == 1000
    assert len(bytes.fromhex(handshake.new_secret())) == 32
    assert AccessDeniedError.__mro__[2] is PermissionError
