"""Frames: a header of 64 bytes, then a body of raw little-endian arrays. Pure: bytes in, numbers out.

Every body is a whole number of 8-byte words, so frames that arrive together stay aligned, and arrays are read in place.
No endpoint unpickles anything; texts are JSON. `rights.py` says which role may send which kind with which flags. This
table says which fields a kind uses, and what its body holds; `headers.py` has the fields of kinds that are not about
rows:

======== ============================================ ==================================================
kind     header                                       body
======== ============================================ ==================================================
PULL     table, epoch, clock, shard, shards, count    counts int64[shards], keys int64[count]
PUSH     the same and trainer, attempt, number,       the same, then values [count, dim]
         parties; flags: RULE_ADD or RULE_ASSIGN;
         RULE_DELETE has no values, and with rows
         of 1 it is for all rows of all `shards`;
         ANSWER asks for the new values; rows:
         of data (0 or more): a weighted mean's. With
         more than 0 it is for all `shards`, also
         those that have none of its keys. REPLAYED:
         it was acknowledged to an earlier attempt,
         so a shard that does not know it is not to
         apply it
...RANGE flags has RANGE: rows start..start+count-1   (PULL) nothing; (PUSH) values [count, dim]
...      flags of a PULL has CERTIFICATE              answer: values, then JSON (`server/tables.py`)
...      or BORN                                      answer: [count, dim + 1]; the last: the row is there
...      or CHANGED, and the sender has the rows      counts and keys, then fingerprints int64[count] of the
                                                      rows; answer: see `wire/changed_rows.py`, with only
                                                      those rows that have other fingerprints
...      flags of a PUSH has MERGED: it is the sum of  behind the values int64[n, 4]: each origin, its
         the pushes of several origins, and counts    attempt, the first and the last number of its
         for all of them or none                      pushes; the first one is that of the header
...      flags of a PULL or PUSH has LIST: start is   nothing in place of counts and keys; or with ~start
         the number of a list of keys                 counts and packed keys (`core/packed_keys.h`), which are
                                                      kept (`core/requests/key_lists.pyx`)
...      flags of a PULL or PUSH has NARROW           the values (of a PULL those of the answer) travel as the
                                                      table's `wire` says (`state/wire_format.py`)
...      flags of a PULL has SHARED                   as without. The answer may be several frames: each OK
                                                      with SHARED has no body, and says that a piece of
                                                      `start` bytes is in the memory that both ends share;
                                                      then, unless all has come so, one without SHARED has
                                                      the rest
SUM      clock; count: bytes of a description         see `wire/table_sums.py`; answer: JSON, the
                                                      tables whose sums servers have taken, or null
                                                      where nothing was sent
SHARE    number: of a file of the client; clock: the  nothing
         mark of the memory that it is
CALL     as PULL and trainer, attempt, number,        counts and keys as PULL (with RANGE: nothing),
         parties; with RANGE all rows of the shards;  then `FunctionCall` (`wire/messages.py`);
         REPLAYED as PUSH                             answer: what the parts returned
COMMIT   table, shard, shards, trainer, attempt,      nothing
ABORT    clock, number of a CALL; what it has made
         on these shards counts, or is dropped
SCAN     see `Scan` in `wire/headers.py`; with        int64[2]: least and greatest key; answer: see
         ANSWER also values                           `ScanAnswer`, keys int64[count], then values
GONE     see `Gone` in `wire/headers.py`               nothing; answer: see `GoneAnswer`, keys
                                                      int64[count], then int8[count]: why they went
REPL...  as PUSH; with CONTROL an op without rows:    versions int64[shards], then as PUSH
         see `CloseSums`, `RetireOrigins`; with
         RULE_ROWS values are [count, dim + slots];
         with rows of 2 they end an open clock. With
         MORE three items stand behind the values:
         keys of rows that go before, a result, and
         bool[count]: keys that are without a row
         yet; of a merged push a fourth: the stamps
DUMP     see `DumpPiece`                              JSON, arrays
VERS...  see `Versions`                               int64[count, 2]: shards, and the fences of the
                                                      sender's replicas; answer: versions int64[count]
JOIN...  see `controller/runs.py`                     JSON
LEASE    see `controller/work_leases.py`              JSON
ORIGIN   see `controller/runs.py`                     JSON
AWAIT    see `Await`                                  nothing; answer: see `TickAnswer`
RING     see `RingPiece`; with CONTROL the sender     numbers of an array
         gives the round up
RING_... see `RingPiece`                              nothing; answer: see `PieceAnswer`, bytes of a
                                                      result
FETCH... see `PartitionRequest`                       nothing; answer: see `PieceAnswer`, bytes of a
                                                      pickle (`training/partition_peer.py`)
SERVE... see `controller/failover.py`                 JSON
RECORD.. see `wire/journal_messages.py`               JSON
GRANT    see `server/grants.py`                       JSON
OK       request; count; see `TickAnswer`             the values, or JSON, or nothing
ERROR    request                                      JSON {"type", "message"}
======== ============================================ ==================================================
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dps.errors import DPSError, LimitError, ProtocolError, by_name

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = [
    "HEADER_SIZE",
    "Header",
    "byte_views",
    "decode_error",
    "decode_header",
    "encode_error",
    "encode_header",
    "pack_array",
    "pack_arrays",
    "pack_item",
    "padded",
    "unpack_arrays",
    "unpack_items",
]

# First bytes of each frame: "DP".
MAGIC = 0x5044
VERSION = 4

# kinds
GREETING = 1
HELLO = 2
WELCOME = 3
PULL = 16
PUSH = 17
STATUS = 18
REPLICATE = 19
DUMP = 20
SCAN = 21
CALL = 22
COMMIT = 23
ABORT = 24
GONE = 25
VERSIONS = 26
SHARE = 27
SUM = 28
ROUTE = 32
JOIN = 33
TICK = 34
LEAVE = 35
COLLECT = 36
RESERVE = 37
PEEK = 38
LEASE = 39
ORIGIN = 40
RING = 41
RING_RESULT = 42
AWAIT = 43
FETCH_PARTITION = 44
SERVE = 48
BEAT = 49
PLACE = 50
CAUGHT_UP = 51
STEPPED_DOWN = 52
SUSPECT = 53
FAILED = 54
RECORD = 55
RECORDED = 56
GRANT = 57
OK = 64
ERROR = 65

# flags
RANGE = 1
RULE_ADD = 2
RULE_ASSIGN = 4
ANSWER = 8
CERTIFICATE = 16
CONTROL = 32
RULE_ROWS = 64
REPLAYED = 128
RULE_DELETE = RULE_ADD | RULE_ASSIGN
# Flag of REPLICATE: something stands behind the values.
MORE = CERTIFICATE
# Flag of PUSH: stamps of several origins stand behind the values.
MERGED = CERTIFICATE
# Flag of PULL.
BORN = ANSWER
# Flag of PULL: only rows are wanted that differ from those of the sender, whose fingerprints it names.
CHANGED = REPLAYED
# Flag of PULL and its answers: pieces of the answer may be, and are, in the memory that both ends share.
SHARED = RULE_ASSIGN
# Flags of PULL and PUSH: values travel as the table's `wire` says; the keys are a list of the connection.
NARROW = CONTROL
LIST = RULE_ROWS

_HEADER = struct.Struct("<HBBIIIIIqHHiqIHHQ")
HEADER_SIZE = _HEADER.size
assert HEADER_SIZE == 64
_JSON = json.JSONEncoder(separators=(",", ":"))  # json.dumps would make one for each call


class Header(NamedTuple):
    """The fields of a frame, all unsigned but `clock`, `rows` and `start`."""

    kind: int
    flags: int = 0
    request: int = 0  # the answer carries the same number
    table: int = 0
    epoch: int = 0  # epoch of the newest placement that the sender knows
    trainer: int = 0  # the origin, which made the op
    number: int = 0  # number of the op, within (origin, clock)
    clock: int = -1
    shard: int = 0  # first shard
    shards: int = 0  # how many, from there on
    rows: int = -1  # rows of data that a push stands for, its weight in a mean; -1: the push has no weight
    start: int = 0  # first row, with RANGE
    count: int = 0  # type: ignore[assignment]  # keys or rows
    parties: int = 0  # how many trainers the run has
    attempt: int = 0  # which attempt of the trainer: a later one fences off the earlier ones
    body: int = 0  # bytes that follow, a multiple of 8


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to whole words."""
    return (nbytes + 7) & ~7


def encode_header(header: Header, request: int | None = None) -> bytes:
    """The 64 bytes of a header; with another request number, if given."""
    try:
        if request is None:
            return _HEADER.pack(MAGIC, *header)
        return _HEADER.pack(MAGIC, *header[:2], request, *header[3:])
    except struct.error as error:
        raise LimitError(f"a number does not fit its place in a frame: {header} ({error})") from None


def decode_header(buffer: Buffer, offset: int, limit: int) -> Header:
    """The header at `offset`.

    Raises ProtocolError for wrong magic, or a body that is not whole words or longer than `limit` bytes.
    """
    fields = _HEADER.unpack_from(buffer, offset)
    if fields[0] != MAGIC:
        raise ProtocolError(f"not a frame of dps: it begins with 0x{fields[0]:04x}, not 0x{MAGIC:04x}")
    nbytes = fields[-1]
    if nbytes > limit or nbytes & 7:
        raise ProtocolError(f"a frame announces a body of {nbytes} bytes; at most {limit}, in whole words, are taken")
    return Header._make(fields[1:])


def encode_json(value: object) -> bytes:
    """JSON, padded with blanks to whole words."""
    text = _JSON.encode(value).encode()
    return text.ljust(padded(len(text)))


def decode_json(body: Buffer) -> Any:
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame's text is no JSON: {error}") from None


def encode_error(error: BaseException) -> bytes:
    name = type(error).__name__ if isinstance(error, DPSError) else "DPSError"
    message = str(error) if isinstance(error, DPSError) else f"{type(error).__name__}: {error}"
    return encode_json({"type": name, "message": message[:2000]})


def decode_error(body: Buffer) -> DPSError:
    value = decode_json(body)
    if not isinstance(value, dict):
        raise ProtocolError(f"an error frame without an error: {value!r}")
    return by_name(str(value.get("type")))(str(value.get("message")))


def pack_arrays(meta: Mapping[str, object], arrays: Sequence[np.ndarray]) -> tuple[int, list[Buffer]]:
    """A dict and arrays as the body of a frame: (bytes of its JSON, buffers)."""
    layout = {"meta": meta, "arrays": [[code_of(array.dtype), array.shape] for array in arrays]}
    description = encode_json(layout)
    pieces: list[Buffer] = [description]
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        pieces += [flat, bytes(padded(flat.nbytes) - flat.nbytes)]
    return len(description), pieces


def unpack_arrays(text_bytes: int, body: memoryview) -> tuple[dict[str, Any], list[np.ndarray]]:
    """What :func:`pack_arrays` packed; the JSON has `text_bytes`. The arrays are views of `body`."""
    layout = decode_json(body[:text_bytes])
    arrays, offset = [], text_bytes
    try:
        for code, shape in layout["arrays"]:
            dtype, count = np.dtype(code), math.prod(shape)
            arrays.append(np.frombuffer(body, dtype, count, offset).reshape(shape) if count else np.zeros(shape, dtype))
            offset += padded(dtype.itemsize * count)
        return layout["meta"], arrays
    except (TypeError, KeyError, ValueError) as error:
        raise ProtocolError(f"a piece of a dump that cannot be read: {error}") from None


def byte_views(buffers: Iterable[Buffer]) -> list[bytes | memoryview]:
    """The buffers of a message as a transport or socket takes them: flat bytes, and none that is empty.

    The reason: uvloop refuses an empty array of two dimensions, and asyncio counts what is left of a buffer by its
    `len`, which of an array is not its number of bytes.

    >>> [len(view) for view in byte_views([b"head", np.empty((3, 0)), np.zeros((2, 2)), b""])]
    [4, 32]
    """
    return [flat for flat in map(_flat, buffers) if len(flat)]


def _flat(buffer: Buffer) -> bytes | memoryview:
    if type(buffer) is bytes:  # as most are: nothing is to be made of them
        return buffer
    view = memoryview(_as_bytes(buffer) if isinstance(buffer, np.ndarray) else buffer)
    return view.cast("B") if view.nbytes else b""


def _as_bytes(array: np.ndarray) -> np.ndarray:
    """The same memory; of a dtype that is not numpy's own, as bytes, because such arrays are no buffers."""
    return array if array.dtype.isbuiltin == 1 else array.reshape(-1).view(np.uint8)


def code_of(dtype: np.dtype) -> str:
    """The name of a dtype as it travels: that of bfloat16, because numpy writes other dtypes as bytes without sense.

    >>> code_of(np.dtype("int16"))
    '<i2'
    """
    return dtype.str if dtype.isbuiltin == 1 or dtype.name != "bfloat16" else dtype.name


def pack_item(content: bytes) -> bytes:
    """Bytes with their length before them, in whole words, so that several in a row can be split again.

    >>> unpack_items(pack_item(b"one") + pack_item(b"") + pack_item(b"another"))
    [b'one', b'', b'another']
    """
    return len(content).to_bytes(8, "little") + content.ljust(padded(len(content)), b"\0")


def pack_array(array: np.ndarray | None) -> list[bytes | memoryview]:
    """The buffers of an item, as :func:`pack_item` makes it, of an array that is not copied; None is empty.

    >>> unpack_items(b"".join([*pack_array(np.arange(3, dtype=np.int8)), *pack_array(None)]))
    [b'\\x00\\x01\\x02', b'']
    """
    nbytes = 0 if array is None else array.nbytes
    pieces: list[bytes | memoryview] = [nbytes.to_bytes(8, "little")]
    if array is not None and nbytes:
        pieces.append(memoryview(_as_bytes(np.ascontiguousarray(array))).cast("B"))
    if padded(nbytes) > nbytes:
        pieces.append(bytes(padded(nbytes) - nbytes))
    return pieces


def unpack_items(body: Buffer) -> list[bytes]:
    """What :func:`pack_item` packed."""
    items, rest = [], memoryview(body)
    while rest:
        size = int.from_bytes(rest[:8], "little")
        items.append(bytes(rest[8 : 8 + size]))
        rest = rest[8 + padded(size) :]
    return items
