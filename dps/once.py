"""Once: what may be closed from several sides at a time is closed by one thread, and the other threads wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dps.errors import RequestTimeoutError

__all__ = ["Once"]

LIMIT = 60.0  # seconds that a thread waits until another thread has closed what both want closed


class Once:
    """Sees to it that something is done once, however many threads ask for it.

    One thread does it. The others wait until it is done, because what they do next (end the loop, start another of the
    same name) relies on that. Where it fails, its error is raised in the thread that did it, and the next one tries
    again. A call out of the function itself, or out of a signal handler or destructor that interrupts it, returns at
    once, because waiting for itself would never end.

    Parameters
    ----------
    what : str
        What is done, for the message: "closing the cluster".

    Raises
    ------
    RequestTimeoutError
        Another thread has not finished within a minute.

    Examples
    --------
    >>> closing = Once("closing the door")
    >>> for _ in range(3):
    ...     closing(print, "bang")
    bang
    """

    def __init__(self, what: str):
        self._what = what
        self._lock = threading.RLock()
        self._doing = self._done = False

    def __call__(self, function: Callable[..., object], *args: Any) -> None:
        if not self._lock.acquire(timeout=LIMIT):
            raise RequestTimeoutError(f"{self._what} has taken another thread more than {LIMIT:g} s, and goes on")
        try:
            if self._doing or self._done:
                return
            self._doing = True
            try:
                function(*args)
                self._done = True
            finally:
                self._doing = False
        finally:
            self._lock.release()
