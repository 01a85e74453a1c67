"""Executor: carries out procedures of the controller on virtual time, as `controller/executor.py` does it with Dask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
    ServerCall,
    Sleep,
    TellServers,
    Together,
    Uninterrupted,
)
from dps.engine.simulation.world import Crashed, Party
from dps.errors import CheckpointError, DPSError

__all__ = ["Cancelled", "SimExecutor", "SimLock"]

Result = TypeVar("Result")
LOCK_POLL_SECONDS = 0.01  # between two checks whether a lock is free
MAX_DISK_SECONDS = 0.02  # that the store takes for one operation


class Cancelled(BaseException):
    """Ends a procedure, as `asyncio.CancelledError` ends one in production."""


class SimLock:
    """A lock on virtual time."""

    def __init__(self) -> None:
        self._locked = False

    def locked(self) -> bool:
        """Whether a procedure holds it."""
        return self._locked

    def take(self) -> None:
        """Take the lock, which must be free."""
        assert not self._locked
        self._locked = True

    def release(self) -> None:
        """Free the lock."""
        assert self._locked
        self._locked = False


class SimExecutor:
    """Runs procedures in the tasks of the controller's party.

    Parameters
    ----------
    party : Party
        The controller's.
    call : callable
        Makes calls of servers; returns a list of their answers, each an answer or an exception.
    up : callable
        The numbers of the servers that can be called.
    commit : callable
        Returns when what was decided is committed.
    """

    def __init__(
        self,
        party: Party,
        call: Callable[[list[ServerCall]], list[object]],
        up: Callable[[], list[int]],
        commit: Callable[[], None],
    ):
        self._party, self._call, self._up, self._commit = party, call, up, commit

    def run(self, procedure: Procedure[Result], cancelled: Callable[[], bool] = lambda: False) -> Result:
        """Carry out a procedure; returns its result, or raises its error.

        Once `cancelled()` is true, `Cancelled` is raised where the procedure waits.
        """
        result: object = None
        failure: BaseException | None = None
        told = False
        while True:
            try:
                instruction = procedure.send(result) if failure is None else procedure.throw(failure)
            except StopIteration as end:
                return end.value
            try:
                result, failure = self._carry_out(instruction), None
            except Exception as error:
                result, failure = None, error
            except Crashed:  # the controller's process has ended: no step follows
                with contextlib.suppress(RuntimeError):
                    procedure.close()
                raise
            if cancelled() and not told:
                if isinstance(instruction, Acquire) and failure is None:
                    instruction.lock.release()
                result, failure, told = None, Cancelled(), True

    def _together(self, procedures: Sequence[Procedure[object]]) -> list[object]:
        tasks = [self._party.spawn(self.run, procedure) for procedure in procedures]
        while not all(task.done for task in tasks):
            self._party.sleep(LOCK_POLL_SECONDS)
        for error in (task.error for task in tasks if task.error is not None):
            raise error
        return [task.value for task in tasks]

    def _carry_out(self, instruction: Instruction) -> object:
        match instruction:
            case Sleep(seconds):
                self._party.sleep(seconds)
            case InEndpoint(function, args):
                return function(*args)
            case InThread(function, args, kwargs):
                self._party.sleep(self._party.world.random.uniform(0.0, MAX_DISK_SECONDS))
                try:
                    return function(*args, **kwargs)
                except DPSError:
                    raise
                except Exception as error:
                    raise CheckpointError(f"{type(error).__name__}: {error!s:.500}") from error
            case CallServers(calls):
                return self._call(list(calls))
            case TellServers(method, args):
                up = self._up()
                answers = self._call([ServerCall(number, method, args) for number in up])
                return {n: a for n, a in zip(up, answers, strict=True) if not isinstance(a, BaseException)}
            case Acquire(lock):
                assert isinstance(lock, SimLock)
                while lock.locked():
                    self._party.sleep(LOCK_POLL_SECONDS)
                lock.take()
            case Ask(function, args):
                return function(*args)
            case Commit():
                self._commit()
            case Together(procedures):
                return self._together(procedures)
            case Uninterrupted(procedure):
                return self.run(procedure)
        return None
