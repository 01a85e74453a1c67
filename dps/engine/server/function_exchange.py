"""What a server and the process of its functions exchange: messages over a socket, and arrays in memory that both map.

The server writes the rows of a call into one file in memory, of which the process maps a view that cannot be written;
the process writes what it has made into another. Both files stay for the next call, because fresh pages cost more than
the copy. A file that has grown large is dropped by both sides after its call. A file travels as a descriptor with the
message that needs it first.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from types import UnionType
from typing import Any

import msgspec
import numpy as np

from dps.engine.wire.frames import code_of
from dps.engine.wire.messages import PartAnswer
from dps.engine.wire.structs import read_annotations

__all__ = [
    "ArrayPlace",
    "EffectPlaces",
    "FunctionAnswer",
    "FunctionCode",
    "FunctionRequest",
    "Pages",
    "PartRequest",
    "receive",
    "send",
]

HEAD = struct.Struct("<QQ")  # the bytes of a message, and how many descriptors come with it
MAX_DESCRIPTORS = 2
ALIGNMENT_BYTES = 64  # a line of the processor's cache
KEPT_BYTES = 1 << 27  # of a file in memory, from one call to the next
ROOM_FACTOR = 1.25  # by which a file grows beyond what is needed


class ArrayPlace(msgspec.Struct, array_like=True, frozen=True):
    """Where an array lies in a file in memory."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class PartRequest(msgspec.Struct, array_like=True):
    """The rows of one shard: a Selection, and the definition of its table where the process does not know it yet."""

    table: int
    shard: int
    keys: ArrayPlace | None
    start: int
    rows: ArrayPlace
    present: ArrayPlace | None
    spec: bytes  # msgpack of the table's description, or empty


class FunctionRequest(msgspec.Struct, array_like=True, tag=True):
    """Run a function: what a :class:`dps.engine.server.function_work.FunctionWork` is made of."""

    function: str
    call: bytes  # a FunctionCall, encoded
    changes: bool
    repeated: dict[int, bytes | None]
    parts: list[PartRequest]


class FunctionCode(msgspec.Struct, array_like=True, tag=True):
    """Take a function, before its first call."""

    function: str
    code: bytes
    path: list[str]  # the server's sys.path


class EffectPlaces(msgspec.Struct, array_like=True):
    """An Effect: of the shard with this place among the parts of the call."""

    part: int
    start: int = 0
    rows: ArrayPlace | None = None  # None: there is no effect
    keys: ArrayPlace | None = None
    deleted: ArrayPlace | None = None


class FunctionAnswer(msgspec.Struct, array_like=True):
    parts: list[PartAnswer] = []
    effects: list[EffectPlaces] = []
    error: bytes = b""  # an error of dps, encoded
    dropped: bool = False  # the files are not to be used again: they are large, or the function has kept views of one


class Pages:
    """A file in memory, as one of the two processes maps it.

    The file's `descriptor` is closed with this object.
    `writable` says whether this side writes it.
    """

    def __init__(self, descriptor: int, writable: bool):
        self.descriptor, self._writable = descriptor, writable
        self._map: mmap.mmap | None = None
        self.size = 0  # bytes that are mapped

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    @classmethod
    def fresh(cls, writable: bool) -> Pages:
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create("dps-function", os.MFD_CLOEXEC), writable)
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()), writable)

    def missing(self, arrays: Sequence[np.ndarray | None]) -> int:
        return self._grown(sum(padded_size(each.nbytes) for each in arrays if each is not None)) - self.size

    def _grown(self, nbytes: int) -> int:
        if nbytes <= self.size:
            return self.size
        return -(-int(nbytes * ROOM_FACTOR) // mmap.PAGESIZE) * mmap.PAGESIZE

    def put(self, arrays: Sequence[np.ndarray | None]) -> list[ArrayPlace | None]:
        """Copy arrays into the file, one behind the other, from its beginning; where they lie."""
        places: list[ArrayPlace | None] = []
        end = 0
        for array in arrays:
            if array is None:
                places.append(None)
                continue
            places.append(ArrayPlace(end, code_of(array.dtype), array.shape))
            end += padded_size(array.nbytes)
        if end > self.size:
            size = self._grown(end)
            os.ftruncate(self.descriptor, size)
            self._map, self.size = mmap.mmap(self.descriptor, size), size
        for array, place in zip(arrays, places, strict=True):
            if array is not None and place is not None:
                self.array(place)[...] = array
        return places

    def array(self, place: ArrayPlace) -> np.ndarray:
        """The array at a place: a view of the file. All views of it have the same base."""
        dtype, count = np.dtype(place.dtype), math.prod(place.shape)
        if not count:
            return np.empty(place.shape, dtype)
        if self._map is None or place.start + count * dtype.itemsize > self.size:  # the other side has let it grow
            self.size = os.fstat(self.descriptor).st_size
            access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
            self._map = mmap.mmap(self.descriptor, self.size, access=access)
        return np.frombuffer(self._map, dtype, count, place.start).reshape(place.shape)


def padded_size(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def send(connection: socket.socket, message: msgspec.Struct, pages: Sequence[Pages] = ()) -> None:
    body = msgspec.msgpack.encode(message)
    head = HEAD.pack(len(body), len(pages))
    if pages:
        socket.send_fds(connection, [head], [each.descriptor for each in pages])  # 16 bytes: never a part of them
    connection.sendall(body if pages else head + body)


def receive(
    connection: socket.socket, kind: type[msgspec.Struct] | UnionType, seconds: float | None = None
) -> tuple[Any, list[int]]:
    """Wait for a message, for at most so many seconds; and the descriptors of the files that came with it.

    Raises
    ------
    EOFError
        The other side has ended.
    TimeoutError
    """
    until = None if seconds is None else time.monotonic() + seconds
    descriptors: list[int] = []
    head = bytearray()
    while len(head) < HEAD.size:
        connection.settimeout(left(until))
        data, came, _, _ = socket.recv_fds(connection, HEAD.size - len(head), MAX_DESCRIPTORS)
        if not data:
            raise EOFError
        head += data
        descriptors += came
    for each in descriptors:
        os.set_inheritable(each, False)
    body = memoryview(bytearray(HEAD.unpack(head)[0]))
    place = 0
    while place < len(body):
        connection.settimeout(left(until))
        count = connection.recv_into(body[place:])
        if not count:
            raise EOFError
        place += count
    return msgspec.msgpack.decode(body, type=kind), descriptors


def left(until: float | None) -> float | None:
    if until is None:
        return None
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


read_annotations(globals())
