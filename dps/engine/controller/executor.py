"""Executor: carries out the instructions of procedures (`procedures.py`) with asyncio, Dask and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dps.engine.controller.procedures import (
    Acquire,
    Ask,
    CallServers,
    Commit,
    InEndpoint,
    Instruction,
    InThread,
    Procedure,
    Sleep,
    TellServers,
    Together,
    Uninterrupted,
)
from dps.errors import CheckpointError, DPSError

__all__ = ["Executor"]

Result = TypeVar("Result")


class Executor:
    """Runs procedures on the scheduler's loop.

    `call` calls a server's actor: its number, the method, the arguments.
    `call_all` calls all servers that can answer: the method, the arguments. Returns their answers by number.
    `commit` waits until what was decided is committed.
    """

    def __init__(
        self,
        in_endpoint: Callable[..., Awaitable[object]],
        call: Callable[..., Awaitable[object]] | None = None,
        call_all: Callable[..., Awaitable[dict[int, object]]] | None = None,
        commit: Callable[[], Awaitable[None]] | None = None,
    ):
        self._in_endpoint = in_endpoint
        self._call = call
        self._call_all = call_all
        self._commit = commit

    async def run(self, procedure: Procedure[Result]) -> Result:
        result: object = None
        failure: BaseException | None = None
        while True:
            try:
                instruction = procedure.send(result) if failure is None else procedure.throw(failure)
            except StopIteration as end:
                return end.value
            try:
                result, failure = await self._carry_out(instruction), None
            except BaseException as error:  # the procedure decides what becomes of it, cancellations included
                result, failure = None, error

    async def _carry_out(self, instruction: Instruction) -> object:
        match instruction:
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case InEndpoint(function, args):
                return await self._in_endpoint(function, *args)
            case InThread(function, args, kwargs):
                return await in_thread(function, *args, **kwargs)
            case CallServers(calls):
                assert self._call is not None
                made = (self._call(call.server, call.method, *call.args) for call in calls)
                return await asyncio.gather(*made, return_exceptions=True)
            case TellServers(method, args):
                assert self._call_all is not None
                return await self._call_all(method, *args)
            case Acquire(lock):
                assert isinstance(lock, asyncio.Lock)
                await lock.acquire()
            case Ask(function, args):
                return await function(*args)
            case Commit():
                assert self._commit is not None
                await self._commit()
            case Together(procedures):
                return await asyncio.gather(*map(self.run, procedures))
            case Uninterrupted(procedure):
                return await asyncio.shield(self.run(procedure))
        return None


async def in_thread(function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
    """Run a function that waits for disks or networks in a thread of its own, so that the scheduler's loop goes on."""
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    except DPSError:
        raise
    except Exception as error:
        raise CheckpointError(f"{type(error).__name__}: {error!s:.500}") from error
