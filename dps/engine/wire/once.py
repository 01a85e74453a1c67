"""Once: where several threads may close an object at a time, one of them closes it, and the others wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dps.errors import RequestTimeoutError

__all__ = ["Once"]

# Longest time that a thread waits for another one to finish.
LIMIT_SECONDS = 60.0


class Once:
    """Calls a function once, however many threads ask for it.

    One thread calls it. The others wait until it returns, because their next step (to end the loop, to start another
    object of the same name) relies on that. Where the function fails, its error is raised in the thread that called it,
    and the next thread tries again. A call from within the function itself, or from a signal handler or destructor that
    interrupts it, returns at once, because a thread that waits for itself would never end.

    `what` says what the function does, for the error message: "closing the cluster".
    Raises RequestTimeoutError if another thread has not finished within a minute.

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

    def __call__(self, function: Callable[..., object], *args: object) -> None:
        if not self._lock.acquire(timeout=LIMIT_SECONDS):
            raise RequestTimeoutError(
                f"{self._what} has taken another thread more than {LIMIT_SECONDS:g} s, and goes on"
            )
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
