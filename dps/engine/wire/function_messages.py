"""Messages about functions that run on servers: what a CALL says beside its rows, and what answers it. Pure."""

from __future__ import annotations

import msgspec

from dps.engine.wire.frames import padded
from dps.errors import ProtocolError

__all__ = ["ALONE", "PREPARES", "READS", "FunctionCall", "PartAnswer", "decode_parts", "encode_parts"]

PADDING = b"\xc1"  # a byte that msgpack never uses as the beginning of a value
READS, PREPARES, ALONE = 0, 1, 2  # it changes nothing; its effect waits for COMMIT; it counts at once


class FunctionCall(msgspec.Struct, array_like=True):
    """What a CALL says beside its rows. In the frame it stands behind the keys, padded."""

    function: str  # its number: see `Function.id`
    seed: int
    time: float
    start: int  # rows start to stop - 1 of a dense table, with RANGE
    stop: int
    arguments: bytes  # made by `values.encode_values`
    mode: int  # READS, PREPARES or ALONE; the last field, because it never ends with the byte of the padding

    def encode(self) -> bytes:
        text = msgspec.msgpack.encode(self)
        return text.ljust(padded(len(text)), PADDING)

    @classmethod
    def decode(cls, body: memoryview) -> FunctionCall:
        text = bytes(body).rstrip(PADDING)
        try:
            return msgspec.msgpack.decode(text, type=cls)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(f"a call of a function that cannot be read: {error}") from None


class PartAnswer(msgspec.Struct, array_like=True):
    """What a function returned on one shard."""

    shard: int
    value: bytes  # made by `values.encode_values`
    done: bool  # its effect counts already: there is nothing to commit


def encode_parts(parts: list[PartAnswer]) -> bytes:
    """The body of the answer to a CALL."""
    text = msgspec.msgpack.encode(parts)
    return text.ljust(padded(len(text)), PADDING)


def decode_parts(body: bytes | bytearray) -> list[PartAnswer]:
    """What :func:`encode_parts` encoded."""
    try:
        return msgspec.msgpack.decode(bytes(body).rstrip(PADDING), type=list[PartAnswer])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"the answer to a call of a function cannot be read: {error}") from None
