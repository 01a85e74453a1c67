"""FunctionProcess: the process of a server in which functions of users run, each under a time limit.

A function of a user may keep the interpreter's lock for as long as it likes (`sum(range(10**9))`), use up the memory,
or end its process. So it runs in a process of its own, beside which the server goes on to serve and to send heartbeats.
The process is started with the first function and stays. It runs one function after the other; one that has run for too
long is ended with its process, for good, and the next function gets a new one. Functions of dps itself do none of that,
so they run in a thread of the server (`function_thread.py`), where they see the rows without a copy.

Another thread of the server waits for the process: it copies the rows of a call into memory that both have
(`function_exchange.py`), and what the function has made out of it. The process (`function_child.py`) dies with its
server.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from dps import config
from dps.engine.core.blocks import empty
from dps.engine.functions.rows import Effect
from dps.engine.server import function_boot
from dps.engine.server.beside_thread import Outcome
from dps.engine.server.function_exchange import (
    ArrayPlace,
    EffectPlaces,
    FunctionAnswer,
    FunctionCode,
    FunctionRequest,
    Pages,
    PartRequest,
    receive,
    send,
)
from dps.engine.server.function_thread import FunctionThread, Submitting, too_slow
from dps.engine.server.function_work import FunctionWork, Made, ToldError
from dps.engine.server.replicas import Replica
from dps.engine.state.ops import TableSpec
from dps.engine.wire.frames import decode_error
from dps.engine.wire.messages import PartAnswer
from dps.errors import DPSError, FunctionError

__all__ = ["FunctionProcess", "FunctionRunner"]

END_SECONDS = 5.0  # that the system may take to end a process
EXIT_SECONDS = 1.0  # that a process may take to end by itself, once it has closed its connection


class FunctionRunner:
    """Runs functions of dps in a thread of the server, and functions of users in a process of the server's own."""

    def __init__(self, endpoint: Submitting, name: str):
        self._thread, self._process = FunctionThread(endpoint, name), FunctionProcess(endpoint, f"{name}-process")

    def run(self, work: FunctionWork[Replica], seconds: float, done: Callable[[Outcome], None]) -> None:
        (self._process if work.code else self._thread).run(work, seconds, done)

    def close(self) -> None:
        self._process.close()
        self._thread.close()


class FunctionProcess:
    """The process of one server, started with the first function."""

    def __init__(self, endpoint: Submitting, name: str):
        self._waiting = FunctionThread(endpoint, name)
        self._start_seconds = config.seconds("start")
        self._memory = config.nbytes("function-memory")
        self._running: RunningProcess | None = None
        self._closed = False
        self._lock = threading.Lock()

    def run(self, work: FunctionWork[Replica], seconds: float, done: Callable[[Outcome], None]) -> None:
        most = 2 * self._start_seconds + 2 * seconds + 2 * END_SECONDS  # the limits of `_carry_out` end it earlier
        self._waiting.run(functools.partial(self._carry_out, work, seconds), most, done)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
        if running is not None:
            running.end()
        self._waiting.close()

    def _carry_out(self, work: FunctionWork[Replica], seconds: float) -> list[PartAnswer]:
        """Have the process run a function, in the thread that waits for it."""
        running = self._started()
        try:
            running.give_code(work, self._start_seconds)
            return running.run(work, seconds)
        except ToldError:
            raise
        except TimeoutError:
            self._end(running)
            raise too_slow(seconds) from None
        except (EOFError, ConnectionError):
            raise ended_early(self._end(running, EXIT_SECONDS)) from None
        except BaseException:  # a part of a message may have been sent
            self._end(running)
            raise

    def _started(self) -> RunningProcess:
        """The process; a new one where there is none, or where it has ended meanwhile."""
        running = self._running
        if running is not None and running.alive:
            return running
        if running is not None:
            self._end(running)
        running = RunningProcess(self._memory)
        try:
            running.wait_until_ready(self._start_seconds)
        except (EOFError, TimeoutError, ConnectionError):
            status = running.end(EXIT_SECONDS)
            raise DPSError(
                f"the process for functions of users did not start within {config.limit('start', self._start_seconds)} "
                f"({of_status(status)}); see the log of the server"
            ) from None
        except BaseException:
            running.end()
            raise
        with self._lock:
            if not self._closed:
                self._running = running
                return running
        running.end()
        raise DPSError("the server is being closed")

    def _end(self, running: RunningProcess, patience: float = 0.0) -> int | None:
        with self._lock:
            if self._running is running:
                self._running = None
        return running.end(patience)


class RunningProcess:
    """A process that runs functions, as its server has it. A function may take `memory` bytes."""

    def __init__(self, memory: int):
        self._socket, theirs = socket.socketpair()
        with theirs:
            given = json.dumps([sys.path, theirs.fileno(), os.getpid(), memory])
            program = [sys.executable, str(pathlib.Path(function_boot.__file__)), given]
            self._process = subprocess.Popen(
                program, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._opened: set[str] = set()  # functions that it has
        self._specs: dict[int, TableSpec] = {}  # tables that it knows
        self._pages: tuple[Pages, Pages] | None = None  # that the server writes, and that the process writes

    def __del__(self) -> None:
        self._socket.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, seconds: float) -> None:
        receive(self._socket, FunctionAnswer, seconds)

    def end(self, patience: float = 0.0) -> int | None:
        """Kill it and what it has started, unless it ends by itself in so many seconds; its status."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        return self._process.returncode

    def give_code(self, work: FunctionWork[Replica], seconds: float) -> None:
        """Give it a function before its first call, whose time begins when the modules that it needs are there."""
        if work.call.function in self._opened:
            return
        self._socket.settimeout(seconds)
        send(self._socket, FunctionCode(work.call.function, work.code, sys.path))
        answer, _ = receive(self._socket, FunctionAnswer, seconds)
        if answer.error:
            raise ToldError(decode_error(answer.error))
        self._opened.add(work.call.function)

    def run(self, work: FunctionWork[Replica], seconds: float) -> list[PartAnswer]:
        """Have it run a function: what that returned. Its effects are in the work then.

        Raises TimeoutError, EOFError or ConnectionError if it took too long, or the process has ended.
        Raises ToldError if the function has failed.
        """
        fresh = self._pages is None
        given, made = self._pages = self._pages or (Pages.fresh(writable=True), Pages.fresh(writable=False))
        request = self._request(work, given)
        until = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        send(self._socket, request, (given, made) if fresh else ())
        answer, _ = receive(self._socket, FunctionAnswer, until - time.monotonic())
        self._specs.update((replica.spec.id, replica.spec) for replica in work.replicas)
        if answer.dropped:
            self._pages = None
        if answer.error:
            raise ToldError(decode_error(answer.error))
        work.effects = [
            Made(work.replicas[each.part], effect_at(made, each), answer.parts[each.part].value)
            for each in answer.effects
        ]
        return answer.parts

    def _request(self, work: FunctionWork[Replica], given: Pages) -> FunctionRequest:
        """A call as a message. Its rows are copied into the file."""
        arrays = [part for each in work.selections for part in (each.keys, each.rows, each.present)]
        places = iter(given.put(arrays))
        parts = []
        for replica, selection in zip(work.replicas, work.selections, strict=True):
            spec, keys, rows, present = replica.spec, next(places), next(places), next(places)
            assert rows is not None
            known = self._specs.get(spec.id) is spec
            described = b"" if known else msgspec.msgpack.encode(spec.to_dict())
            parts.append(PartRequest(spec.id, replica.number, keys, selection.start, rows, present, described))
        return FunctionRequest(work.call.function, work.call.encode(), work.changes, work.repeated, parts)


def effect_at(made: Pages, lies: EffectPlaces) -> Effect | None:
    """An effect out of the file, in memory of the server's own."""

    def copied(place: ArrayPlace | None) -> np.ndarray | None:
        return None if place is None else made.array(place).copy()

    if lies.rows is None:
        return None
    rows = empty(tuple(lies.rows.shape), lies.rows.dtype)
    rows[...] = made.array(lies.rows)
    return Effect(copied(lies.keys), lies.start, rows, copied(lies.deleted))


def of_status(status: int | None) -> str:
    if status is None:
        return "it does not end"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"it was killed by {signal.Signals(-status).name}"
    return f"its exit status is {status}"


def ended_early(status: int | None) -> DPSError:
    killed = status == -signal.SIGKILL
    return FunctionError(
        f"the process in which it ran has ended, and no row was changed: {of_status(status)}"
        + (
            "; the system kills the process of functions first where it is out of memory: let the function work on "
            "fewer rows at once, or lower dps.limits.function-memory on the servers, so that it gets an error instead"
            if killed
            else "; see the log of the server"
        )
    )
