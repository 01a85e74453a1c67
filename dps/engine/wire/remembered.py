"""Remembered: a value that travels once, because the other end keeps it and knows it again by its hash.

The steps of a program are the same in each iteration of a solver; the numbers of its vectors differ. Such a value is
encoded once. The first call has its bytes, later ones their hash, and the server finds the bytes, and what it has made
of them, in its memory. A server that does not know the hash, because it is a new one or has forgotten it, refuses the
call before anything changes, and the client sends the bytes again (`client/functions.py`).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from dps.errors import ProtocolError, UnknownFunctionError

__all__ = ["KEY_BYTES", "MEMORY", "Memory", "Remembered"]

T = TypeVar("T")
KEY_BYTES = 16
# Limits of what one process remembers: the number of values, and their size.
MAX_VALUES = 1024
MAX_BYTES = 1 << 24


class Remembered:
    """Bytes, and what is made of them.

    Attributes
    ----------
    key : bytes
        Its hash, by which it is known again.
    """

    __slots__ = ("_made", "content", "key")

    def __init__(self, content: bytes):
        self.content = content
        self.key = hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
        self._made: Any = None

    def made(self, make: Callable[[bytes], T]) -> T:
        """``make(content)``, which is called once, as long as the process remembers the content. None is not kept."""
        if self._made is None:
            self._made = make(self.content)
        made: T = self._made
        return made


class Memory:
    """What one process remembers: of the contents that came, those that were used last.

    `values` and `nbytes` are the largest number of contents, and of their bytes together.
    """

    def __init__(self, values: int = MAX_VALUES, nbytes: int = MAX_BYTES):
        self._values, self._nbytes = values, nbytes
        self._known: OrderedDict[bytes, Remembered] = OrderedDict()
        self._used = 0  # bytes
        self._lock = threading.Lock()  # because functions run in threads of their own

    def __len__(self) -> int:
        return len(self._known)

    def take(self, data: bytes) -> Remembered:
        """The value that has arrived as a key, or as a key with its content.

        Raises UnknownFunctionError if the content is not known here, or not any more.
        Raises ProtocolError if the key is not that of the content.
        """
        key, content = data[:KEY_BYTES], data[KEY_BYTES:]
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        if len(key) < KEY_BYTES or not content:
            raise UnknownFunctionError("the server does not know a part of this call by its hash: send the content too")
        value = Remembered(content)
        if value.key != key:
            raise ProtocolError("a remembered value whose hash is not that of its content")
        self._keep(value)
        return value

    def _keep(self, value: Remembered) -> None:
        with self._lock:
            if len(value.content) > self._nbytes or value.key in self._known:
                return
            self._known[value.key] = value
            self._used += len(value.content)
            while len(self._known) > self._values or self._used > self._nbytes:
                _, oldest = self._known.popitem(last=False)
                self._used -= len(oldest.content)


MEMORY = Memory()
