"""FunctionThread: a thread of a server in which functions of dps run, one after the other, each under a time limit.

(Functions of users run in a process, and a thread as this one waits for it: `function_process.py`.)

A function that is too slow gets an exception between two of its Python instructions. If it does not end then either,
because it is in the middle of a long call of C, it is *abandoned*: its thread is left to itself, what it computes is
dropped, and the next function gets a new thread. There is a limit on such threads, because each may use a core.
"""

from __future__ import annotations

import collections
import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from dps.engine.server.beside_thread import Outcome
from dps.engine.server.function_work import FunctionWork
from dps.engine.server.replicas import Replica
from dps.errors import DPSError, FunctionTimeoutError, LimitError, ServerGoneError

__all__ = ["FunctionThread", "Runner", "TimeIsOver"]

GRACE_SECONDS = 1.0  # after the exception, until a function is abandoned
KEPT_BYTES = 1 << 28  # of freed memory
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MAX_MMAP_THRESHOLD_BYTES = 1 << 25  # glibc takes no more
MAX_ABANDONED = 4  # functions; then the server takes no more


class Runner(Protocol):
    def run(self, work: FunctionWork[Replica], seconds: float, done: Callable[[Outcome], None]) -> None:
        """Have `work` called, for at most so many seconds; `done` is called with its outcome in the endpoint's thread.

        To be called in the endpoint's thread.
        """

    def close(self) -> None:
        """End the thread. Outcomes are dropped from now on."""


class TimerHandle(Protocol):
    """A call that the loop will make later, and that can be cancelled until then."""

    def cancel(self) -> object: ...


class Submitting(Protocol):
    """What a thread needs of its endpoint: see :class:`dps.engine.wire.endpoint.Endpoint`."""

    def submit(self, function: Callable[..., object], *args: object) -> object: ...
    def later(self, seconds: float, function: Callable[..., object], *args: object) -> TimerHandle: ...


class TimeIsOver(BaseException):
    """Raised in a function that runs for too long. No Exception, so that the function does not catch it by accident."""


class Job:
    def __init__(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]):
        self.work, self.seconds, self.done = work, seconds, done
        self.timer: TimerHandle
        self.over = False  # its outcome was passed on, or is dropped
        self._interrupted = False
        self._thread: int | None = None  # in which it runs
        self._lock = threading.Lock()

    def begin(self) -> None:
        """From now on an exception may arrive in the thread that calls this; at once if the time is over already."""
        with self._lock:
            self._thread = threading.get_ident()
            if self._interrupted:
                raise TimeIsOver

    def end(self) -> None:
        """From now on none is raised; one may still be on its way: see :func:`_take_late_exception`."""
        with self._lock:
            self._thread = None

    def interrupt(self) -> None:
        """Raise TimeIsOver in its thread, once, unless the work has ended."""
        with self._lock:
            again, self._interrupted = self._interrupted, True
            if self._thread is not None and not again:
                _raise_in(self._thread, TimeIsOver)


class FunctionThread:
    """The thread of one server, made with the first function."""

    def __init__(self, endpoint: Submitting, name: str):
        self._endpoint, self._name = endpoint, name
        self._waiting: collections.deque[Job] = collections.deque()
        self._running: Job | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._abandoned: list[threading.Thread] = []
        self._closed = False

    def run(self, work: Callable[[], object], seconds: float, done: Callable[[Outcome], None]) -> None:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= MAX_ABANDONED:
            done(Outcome(None, too_many(len(self._abandoned))))
            return
        self._waiting.append(Job(work, seconds, done))
        self._next()

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        self._jobs.put(None)
        job, self._running = self._running, None
        if job is not None:
            job.over = True
            job.timer.cancel()
            job.interrupt()

    def _next(self) -> None:
        if self._running is not None or not self._waiting or self._closed:
            return
        if self._thread is None:
            keep_memory()
            self._thread = threading.Thread(target=self._work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        job = self._running = self._waiting.popleft()
        job.timer = self._endpoint.later(job.seconds, self._expire, job)
        self._jobs.put(job)

    def _work(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            outcome = _outcome(job)
            try:
                self._endpoint.submit(self._finish, job, outcome)
            except ServerGoneError:  # the endpoint has been closed
                return
            del job, outcome  # so that the thread keeps no rows while it waits

    def _finish(self, job: Job, outcome: Outcome) -> None:
        job.timer.cancel()
        if job.over:
            return
        job.over, self._running = True, None
        try:
            job.done(outcome)
        finally:
            self._next()

    def _expire(self, job: Job) -> None:
        """The time is over: interrupt the function, and give it a moment to end."""
        job.interrupt()
        job.timer = self._endpoint.later(GRACE_SECONDS, self._abandon, job)

    def _abandon(self, job: Job) -> None:
        if job.over:
            return
        assert self._thread is not None
        job.over, self._running = True, None
        self._abandoned.append(self._thread)
        self._jobs.put(None)  # the thread ends with its function, if that ever ends
        self._jobs, self._thread = queue.SimpleQueue(), None
        try:
            job.done(Outcome(None, too_slow(job.seconds), abandoned=True))
        finally:
            self._next()


def too_slow(seconds: float) -> DPSError:
    return FunctionTimeoutError(
        f"it has not ended within {seconds:g} s (dps.timeouts.function): let it do less at once, or raise the setting "
        f"on the servers"
    )


def too_many(count: int) -> DPSError:
    return LimitError(
        f"{count} functions on this server never ended, each of them in a thread of its own; it takes no more: replace "
        f"the server with ps.retire, and mend the functions"
    )


def _outcome(job: Job) -> Outcome:
    try:
        outcome = _carried_out(job)
        _take_late_exception()
    except TimeIsOver:
        outcome = Outcome(None, too_slow(job.seconds))
    return outcome


def _carried_out(job: Job) -> Outcome:
    try:
        job.begin()
        return Outcome(job.work(), None)
    except TimeIsOver:
        raise
    except BaseException as error:
        return Outcome(None, error)
    finally:
        job.end()


def _take_late_exception() -> None:
    """Run instructions between which an exception that is on its way arrives.

    It cannot be taken back: Python would go on to look for it, in all threads and for good, and a function that is
    being traced would never begin (PyThreadState_SetAsyncExc with NULL in Python 3.11 leaves its flag set).
    """
    for _ in range(100):
        pass


def keep_memory() -> None:
    """Have the C library keep memory that functions have freed, for their next temporaries, up to KEPT_BYTES.

    Dask's nanny tells it to give everything back at once (``MALLOC_TRIM_THRESHOLD_``), which is right for tasks. But
    numpy makes and frees an array in each line, and fresh pages cost several times what the line computes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt  # of glibc
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread, between two of its instructions."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
