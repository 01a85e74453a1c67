"""BesideThread: the thread of a server in which dps's own long work is done, while the endpoint's loop goes on."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dps.errors import ServerGoneError

if TYPE_CHECKING:
    from dps.engine.wire.endpoint import Endpoint

__all__ = ["WORK_SECONDS", "BesideThread", "Carrier", "Outcome"]

# The time limit that `run` is told. A BesideThread does not enforce it, because dps's own work always ends.
WORK_SECONDS = 600.0


class Outcome(NamedTuple):
    """The result of work that was done beside the loop, or the error with which it ended."""

    value: Any
    error: BaseException | None
    abandoned: bool = False  # the work did not end in time, and may still read what it was given


class Carrier(Protocol):
    """Runs dps's own work beside the endpoint's loop."""

    def run(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]) -> None:
        """Have `work` called; `done` is called with its outcome in the endpoint's thread.

        RuntimeError if there are too many threads.
        """

    def close(self) -> None: ...


class BesideThread:
    """The thread of one server in which ops are prepared, one request after the other. It ends when none is left."""

    def __init__(self, endpoint: Endpoint, name: str):
        self._endpoint, self._name = endpoint, name
        self._jobs: collections.deque[tuple[Callable[[], object], Callable[[Outcome], None]]] = collections.deque()
        self._works = False
        self._lock = threading.Lock()  # guards the jobs, and whether the thread works

    def run(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]) -> None:
        with self._lock:
            if not self._works:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._works = True
            self._jobs.append((work, done))

    def close(self) -> None:
        with self._lock:
            self._jobs.clear()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._works = False
                    return
                work, done = self._jobs.popleft()
            try:
                outcome = Outcome(work(), None)
            except Exception as error:
                outcome = Outcome(None, error)
            with contextlib.suppress(ServerGoneError):  # the endpoint has been closed
                self._endpoint.submit(done, outcome)
            del work, done, outcome
