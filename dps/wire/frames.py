"""Frames: a header of 64 bytes, then a body of raw little-endian arrays. Pure: bytes in, numbers out.

Every body is a whole number of 8-byte words, so that frames that arrive together stay aligned and arrays are read in
place. Nothing is ever unpickled; texts are JSON. Which fields a kind uses, and what its body holds:

======== ============================================ ==================================================
kind     header                                       body
======== ============================================ ==================================================
PULL     table, epoch, clock, shard, shards, count    counts int64[shards], keys int64[count]
PUSH     the same and trainer, number, parties;       the same, then values [count, dim]
         flags: RULE_ADD or RULE_ASSIGN; ANSWER
         asks for the new values
...RANGE flags has RANGE: rows start..start+count-1   (PULL) nothing; (PUSH) values [count, dim]
JOIN...  see `controller.py`                          JSON
OK       request; count                               the values, or JSON, or nothing
ERROR    request                                      JSON {"type", "message"}
======== ============================================ ==================================================
"""

from __future__ import annotations

import json
import struct
from typing import Any, NamedTuple

from dps.errors import DPSError, LimitError, ProtocolError, by_name

__all__ = ["HEADER_SIZE", "Header", "decode_error", "decode_header", "encode_error", "encode_header", "padded"]

MAGIC = 0x5044  # "DP"
VERSION = 1

# kinds
GREETING, HELLO, WELCOME = 1, 2, 3
PULL, PUSH, STATUS = 16, 17, 18
ROUTE, JOIN, TICK, LEAVE, COLLECT = 32, 33, 34, 35, 36
OK, ERROR = 64, 65

# flags
RANGE, RULE_ADD, RULE_ASSIGN, ANSWER = 1, 2, 4, 8

_HEADER = struct.Struct("<HBBIIIIIqIIqIIQ")
HEADER_SIZE = _HEADER.size
assert HEADER_SIZE == 64


class Header(NamedTuple):
    """The fields of a frame, all unsigned but `clock` and `start`."""

    kind: int
    flags: int = 0
    request: int = 0  # the answer carries the same number
    table: int = 0
    epoch: int = 0  # of the placement the sender believes in
    trainer: int = 0
    number: int = 0  # of the op, within (trainer, clock)
    clock: int = -1
    shard: int = 0  # first shard
    shards: int = 0  # how many, from there on
    start: int = 0  # first row, with RANGE
    count: int = 0  # type: ignore[assignment]  # keys or rows
    parties: int = 0  # trainers in the run
    body: int = 0  # bytes that follow, a multiple of 8


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole words.

    >>> padded(9)
    16
    """
    return (nbytes + 7) & ~7


def encode_header(header: Header, request: int | None = None) -> bytes:
    """The 64 bytes of a header; with another request number, if given."""
    try:
        if request is None:
            return _HEADER.pack(MAGIC, *header)
        return _HEADER.pack(MAGIC, *header[:2], request, *header[3:])
    except struct.error as error:
        raise LimitError(f"a number does not fit its place in a frame: {header} ({error})") from None


def decode_header(buffer: Any, offset: int, limit: int) -> Header:
    """The header at `offset`.

    Raises
    ------
    ProtocolError
        Wrong magic, or a body that is not whole words or longer than `limit` bytes.
    """
    magic, *fields = _HEADER.unpack_from(buffer, offset)
    if magic != MAGIC:
        raise ProtocolError(f"not a frame of dps: it begins with 0x{magic:04x}, not 0x{MAGIC:04x}")
    header = Header._make(fields)
    if header.body > limit or header.body & 7:
        raise ProtocolError(
            f"a frame announces a body of {header.body} bytes; at most {limit}, in whole words, are taken"
        )
    return header


def encode_json(value: Any) -> bytes:
    """JSON, padded with blanks to whole words."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return text.ljust(padded(len(text)))


def decode_json(body: Any) -> Any:
    """The value in a JSON body.

    Raises
    ------
    ProtocolError
        The body is no JSON.
    """
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's text is no JSON: {error}") from None


def encode_error(error: BaseException) -> bytes:
    """An exception as the body of an ERROR frame."""
    name = type(error).__name__ if isinstance(error, DPSError) else "DPSError"
    message = str(error) if isinstance(error, DPSError) else f"{type(error).__name__}: {error}"
    return encode_json({"type": name, "message": message[:2000]})


def decode_error(body: Any) -> DPSError:
    """The exception in the body of an ERROR frame."""
    value = decode_json(body)
    if not isinstance(value, dict):
        raise ProtocolError(f"an error frame without an error: {value!r}")
    return by_name(str(value.get("type")))(str(value.get("message")))
