"""Loans: memory of a caller in which a server of the same process puts a large answer, without a socket in between.

Where a trainer and a server are threads of one process (`processes=False`, notebooks), each copy of an answer costs
both of them, because they share one interpreter. So the client lends the memory in which the rows are to be, by the
number of the request, and the server writes them there. Only a header goes through the socket.

The life of a loan. It begins before the request leaves (`lend`). The server takes it when it makes the answer
(`taken`), and takes none of another length. It ends when the client has read the answer, whichever way that came
(`ended`). A client that gives up, at a time-out, an interrupt or a broken connection, closes its channel; that ends all
loans (`close`), and waits until the server has written what it is writing. From then on nothing is written there,
because the caller may use the memory for something else. A server that finds no loan answers through the socket.

Both ends have the same object. It is found by a number that the client sends with SHARE, so that it is known to both
ends only if these are in one process.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["Loans"]

_OFFERED: weakref.WeakValueDictionary[int, Loans] = weakref.WeakValueDictionary()


class Loans:
    """The loans of one connection.

    Attributes
    ----------
    joined : bool
        The server is in this process, and takes them.

    Examples
    --------
    >>> loans, rows = Loans(mark=7), np.zeros(2)
    >>> Loans.offered(7) is loans, Loans.offered(8), loans.joined
    (True, None, True)
    >>> loans.lend(1, rows, rows)
    >>> with loans.taken(1, 16) as memory:
    ...     memory.view(np.float64)[:] = 5.0
    >>> rows, loans.ended(1), loans.ended(1)
    (array([5., 5.]), True, False)
    """

    def __init__(self, mark: int):
        self.joined = self._closed = False
        self._open: dict[int, tuple[np.ndarray, object]] = {}
        self._written: set[int] = set()
        self._writing = threading.RLock()  # because the garbage collector may close a channel in any thread
        _OFFERED[mark] = self

    @staticmethod
    def offered(mark: int) -> Loans | None:
        """Those that a client of this process has offered with that number; the server takes them from now on."""
        loans = _OFFERED.pop(mark, None)
        if loans is not None:
            loans.joined = True
        return loans

    # -- the client

    def lend(self, number: int, memory: Buffer, owner: object) -> None:
        """Lend the memory for the answer to a request; the `owner` keeps it from being freed."""
        self._open[number] = np.frombuffer(memory, np.uint8), owner
        if self._closed:
            self.close()

    def ended(self, number: int) -> bool:
        """The answer to a request has come: whether its rows are in the memory that was lent."""
        self._open.pop(number, None)
        if number in self._written:
            self._written.discard(number)
            return True
        return False

    def close(self) -> None:
        """End all loans; on return the server writes to none of them."""
        self._closed = True
        self._open.clear()
        with self._writing:
            self._open.clear()

    # -- the server

    @contextlib.contextmanager
    def taken(self, number: int, nbytes: int) -> Iterator[np.ndarray | None]:
        """The memory for an answer of so many bytes, uint8[nbytes], within the block; None where there is none."""
        with self._writing:
            memory, _ = self._open.pop(number, (None, None))
            if memory is None or memory.nbytes != nbytes:
                yield None
                return
            yield memory
            self._written.add(number)
