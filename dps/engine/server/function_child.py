"""What runs in a process of functions: it takes calls from its server, one after the other, and answers them.

It ends with its server: at the end of the connection, and by a signal of the system where it is in the middle of a
function then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import weakref
from typing import NamedTuple

import msgspec
import numpy as np

from dps.engine.functions.definition import Part, opened
from dps.engine.server.function_exchange import (
    KEPT_BYTES,
    EffectPlaces,
    FunctionAnswer,
    FunctionCode,
    FunctionRequest,
    Pages,
    PartRequest,
    receive,
    send,
)
from dps.engine.server.function_thread import keep_memory
from dps.engine.server.function_work import FunctionWork, failure
from dps.engine.state.ops import Selected, Selection, TableSpec
from dps.engine.wire.frames import encode_error
from dps.engine.wire.messages import FunctionCall
from dps.errors import DPSError, FunctionError

__all__ = ["FunctionChild", "serve"]

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl
FIRST_VICTIM = "1000"  # of the system, where it is out of memory: this process, and not the server


class ShardOfCall(NamedTuple):
    spec: TableSpec
    number: int


class FunctionChild:
    """The functions and tables that the process knows, and the memory that it shares with its server.

    A function may take `memory` bytes, beside the rows that it is given and one copy of them; 0: any number.
    """

    def __init__(self, memory: int):
        self._memory = memory
        self._functions: dict[str, Part] = {}
        self._specs: dict[int, TableSpec] = {}
        self._given: Pages | None = None
        self._made: Pages | None = None
        self._lent: list[weakref.ref[np.ndarray]] = []  # the bases of all views of rows
        self._base = own_size()  # bytes of addresses that the process takes without a call

    def take(self, request: FunctionCode) -> FunctionAnswer:
        """Take a function; of modules that it needs, the memory is not its own."""
        before = own_size()
        sys.path += [each for each in request.path if each not in sys.path]
        try:
            self._functions[request.function] = opened(request.function, request.code)[0]
        except BaseException as error:
            return FunctionAnswer(error=encode_error(failure(error, request.function[:8])))
        self._base += own_size() - before
        return FunctionAnswer()

    def answer(self, request: FunctionRequest, descriptors: list[int]) -> FunctionAnswer:
        if descriptors:
            self._given, self._made = Pages(descriptors[0], writable=False), Pages(descriptors[1], writable=True)
        answer = self._answer(request)
        answer.dropped = self._take_back()
        return answer

    def _answer(self, request: FunctionRequest) -> FunctionAnswer:
        part = self._functions[request.function]
        name = getattr(part, "__qualname__", "?")
        try:
            return self._run(part, request)
        except MemoryError as error:
            told: DPSError = FunctionError(
                f"function {name!r} failed on a server, and no row was changed: out of memory: {error}; beside its "
                f"rows and a copy of them it may take {self._memory} bytes (dps.limits.function-memory): let it work "
                f"on fewer rows at once, or raise the setting on the servers"
            )
        except BaseException as error:  # SystemExit, too: it ends the function
            told = failure(error, name)
        finally:
            limit_addresses(0)
        return FunctionAnswer(error=encode_error(told))

    def _run(self, part: Part, request: FunctionRequest) -> FunctionAnswer:
        given, made = self._given, self._made
        assert given is not None
        assert made is not None
        for each in request.parts:
            if each.spec:
                self._specs[each.table] = TableSpec.from_dict(msgspec.msgpack.decode(each.spec)).opened()
        selections: list[Selected] = [self._selection(given, each) for each in request.parts]
        room = self._base + given.size + made.size + sum(each.rows.nbytes for each in selections) + self._memory
        shards = [ShardOfCall(self._specs[each.table], each.shard) for each in request.parts]
        places = {shard.number: place for place, shard in enumerate(shards)}
        call = FunctionCall.decode(memoryview(request.call))
        work = FunctionWork(part, call, shards, selections, request.changes, request.repeated)
        limit_addresses(room if self._memory else 0)
        try:
            parts = work()
            effects = [(places[each.replica.number], each.effect) for each in work.effects]
        finally:
            work.release()
            work.effects.clear()
        arrays = [part for _, effect in effects if effect for part in (effect.rows, effect.keys, effect.deleted)]
        limit_addresses(room + made.missing(arrays) if self._memory else 0)
        lie = iter(made.put(arrays))
        return FunctionAnswer(
            parts=parts,
            effects=[
                EffectPlaces(place, effect.start, next(lie), next(lie), next(lie)) if effect else EffectPlaces(place)
                for place, effect in effects
            ],
        )

    def _selection(self, given: Pages, part: PartRequest) -> Selection:
        """The rows of one part: a view of the file, and copies of keys and marks, which the function may write."""
        keys = None if part.keys is None else given.array(part.keys).copy()
        present = None if part.present is None else given.array(part.present).copy()
        rows = given.array(part.rows)
        if rows.base is not None:
            self._lent.append(weakref.ref(rows.base))
        return Selection(keys, part.start, rows, True, present)

    def _take_back(self) -> bool:
        """Whether the files are not to be used again."""
        lent, self._lent = self._lent, []
        files = [each for each in (self._given, self._made) if each is not None]
        drop = any(base() is not None for base in lent) or any(each.size > KEPT_BYTES for each in files)
        if drop:
            self._given = self._made = None
        return drop


def own_size() -> int:
    """Bytes of addresses that this process has; 0 where the system does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return 0


def limit_addresses(nbytes: int) -> None:
    """Have the system refuse this process more addresses; 0: as many as it may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = hard if nbytes == 0 else nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends, whatever it is doing then (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        leave()


def leave() -> None:
    """End this process, and the threads that functions have started, which may go on for ever."""
    os.kill(os.getpid(), signal.SIGKILL)


def serve(descriptor: int, parent: int, memory: int) -> None:
    """Answer the calls that come over a socket, until its other end is closed."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(FIRST_VICTIM)
    keep_memory()
    connection = socket.socket(fileno=descriptor)
    child = FunctionChild(memory if own_size() else 0)
    with contextlib.suppress(EOFError, ConnectionError):
        send(connection, FunctionAnswer())  # it is ready
        while True:
            request, descriptors = receive(connection, FunctionRequest | FunctionCode)
            answer = child.take(request) if type(request) is FunctionCode else child.answer(request, descriptors)
            for stream in (sys.stdout, sys.stderr):  # what a function prints is to be in the server's log at once
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            send(connection, answer)
    leave()
