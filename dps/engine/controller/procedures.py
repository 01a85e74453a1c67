"""Procedures: what the controller does in several steps, as generators without Dask, asyncio, disks or a clock. Pure.

A checkpoint, a restore, the start of a server and the making of a table each take several steps, and most steps wait:
for a server's answer, for a disk, for a lock, for time to pass. A procedure waits for nothing itself. It yields an
*instruction*. An executor carries the instruction out, and resumes the procedure with the event that this led to: the
instruction's result is the value of the `yield`, and its failure is raised there.

There are two executors: `executor.py` carries instructions out with asyncio and Dask; `dps.testing` does it on virtual
time, with servers that crash, answers that are lost and disks that fail. So what is tested there is what runs.

What an executor guarantees, and what procedures rely on:

* Each instruction leads to exactly one event. So a procedure needs no state beside its local variables.
* Nothing else of the procedure runs between an instruction and its event. Other procedures and the endpoint's thread
  do run, so what was read before an instruction may be out of date after it.
* A cancellation is an event, too: it is raised at the `yield`. What must not stay half done is in a `finally` clause,
  as one `Uninterrupted` instruction, because a second cancellation may come while the first is being dealt with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from dps.errors import CheckpointError

__all__ = [
    "TIMEOUT_SETTINGS",
    "Acquire",
    "Ask",
    "CallServers",
    "Commit",
    "InEndpoint",
    "InThread",
    "Instruction",
    "Lock",
    "Procedure",
    "ServerCall",
    "Sleep",
    "TellServers",
    "Together",
    "Uninterrupted",
    "holding",
    "raised",
]

Result = TypeVar("Result")

# Method of a server's actor -> the setting in dps.timeouts that bounds a call; "request" for the others. A server that
# does not settle in time is asked again, because by then another server may have its shards.
TIMEOUT_SETTINGS = {
    "status": "connect",
    "create_table": "start",
    "close": "stop",
    "end_with_worker": "connect",
    "load": "checkpoint",
    "settle": "silence",
}


class Lock(Protocol):
    """A lock as far as procedures need it: an `asyncio.Lock`, or one on virtual time."""

    def locked(self) -> bool: ...

    def release(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Sleep:
    seconds: float


@dataclasses.dataclass(frozen=True)
class InEndpoint:
    """Run a function in the endpoint's thread, which owns the membership and the runs; its result."""

    function: Callable[..., object]
    args: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class InThread:
    """Run a function that waits for disks or networks, or computes for long, beside the loop; its result."""

    function: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ServerCall:
    """One call of a server's actor: the server's number, a method of the actor, and its arguments."""

    server: int
    method: str
    args: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class CallServers:
    """Make these calls at once; when all have ended, the list of their answers, each an answer or an exception."""

    calls: tuple[ServerCall, ...]


@dataclasses.dataclass(frozen=True)
class TellServers:
    """Call all servers that can answer; their answers by number. Failures are logged."""

    method: str
    args: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class Acquire:
    """Wait until the lock is free, and take it. (A procedure releases it by itself, because that takes no time.)"""

    lock: Lock


@dataclasses.dataclass(frozen=True)
class Ask:
    """Call a function of a collaborator that may wait, such as one that deals with Dask; its result."""

    function: Callable[..., Any]
    args: tuple[object, ...] = ()


@dataclasses.dataclass(frozen=True)
class Commit:
    """Wait until a record of the journal has all that was decided, because what follows cannot be undone.

    ServerGoneError if too few servers confirm it in time. Without a journal there is nothing to wait for.
    """


@dataclasses.dataclass(frozen=True)
class Together:
    """Carry out these procedures at once, until all have ended or one has failed; then its error."""

    procedures: tuple[Procedure[object], ...]


@dataclasses.dataclass(frozen=True)
class Uninterrupted:
    """Carry out a procedure to its end, even if the party that waits for it is cancelled meanwhile; its result."""

    procedure: Procedure[object]


Instruction = (
    Sleep | InEndpoint | InThread | CallServers | TellServers | Acquire | Ask | Commit | Together | Uninterrupted
)
Procedure = Generator[Instruction, Any, Result]


def holding(locks: Sequence[Lock], procedure: Procedure[Result]) -> Procedure[Result]:
    """The procedure, while it holds these locks."""
    taken = []
    try:
        for lock in locks:
            yield Acquire(lock)
            taken.append(lock)
        return (yield from procedure)
    finally:
        for lock in reversed(taken):
            lock.release()


def raised(results: list[Result]) -> list[Result]:
    """The results, if none of them is an error; a damaged checkpoint is raised before any other error."""
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: not isinstance(error, CheckpointError)):
        raise error
    return results
