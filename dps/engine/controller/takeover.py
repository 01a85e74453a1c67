"""Taking over: the parameter servers whose controller, and scheduler, has died, and whose servers come to this one.

Held processes of servers join the scheduler (`server/hold.py`), and report what they keep of the journal. The steps of
a takeover are in `takeover_procedures.py`. Everything here happens on the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

from dps import config
from dps.engine.controller.procedures import Procedure
from dps.engine.controller.takeover_procedures import LOOK_SECONDS, Make, take_over
from dps.engine.wire.journal_messages import ReturnedServer

__all__ = ["Takeovers"]


class Opening(Protocol):
    """A session, as far as its beginning goes."""

    recovering: bool
    opened: asyncio.Event  # set when it is up, or given up


S = TypeVar("S", bound=Opening)


class Takeovers:
    """The parameter servers that come back to this scheduler, by name.

    `make` makes a session, to which servers can connect; `abandon` undoes that. `carry_out` runs a procedure. `held`
    returns the parameter servers of which workers have brought servers, and `may_come` whether more such workers may
    still join.
    """

    def __init__(
        self,
        make: Make,
        abandon: Callable[[Any], None],
        carry_out: Callable[[Procedure[bool]], Awaitable[bool]],
        held: Callable[[], Collection[str]],
        may_come: Callable[[], bool],
    ):
        self._make, self._abandon, self._carry_out = make, abandon, carry_out
        self._held, self._may_come = held, may_come
        self._over: set[str] = set()  # taken over by this scheduler, or given up: their names are free again
        self._reports: dict[str, dict[int, ReturnedServer]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._forced: set[str] = set()  # parameter servers to be taken over with the servers that are back
        self._clock = asyncio.get_running_loop().time

    def add(self, name: str, report: ReturnedServer) -> None:
        """A server is back, which no session knows."""
        self._reports.setdefault(name, {})[report.number] = report
        if name not in self._tasks:
            self._tasks[name] = task = asyncio.create_task(self._run(name))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def settled(self, name: str, sessions: Mapping[str, S]) -> S | None:
        """The session of that name, if there is one: no attempt that may fail, because the next one may succeed."""
        until = self._clock() + config.seconds("start")
        while self._clock() < until:
            await self.wait(name, lambda: name in sessions)
            session = sessions.get(name)
            if session is None or not session.recovering:
                return session
            await session.opened.wait()
        return sessions.get(name)

    async def force(self, name: str, there: Callable[[], bool]) -> None:
        """As `wait`; meanwhile the servers that are back are enough for a takeover, however few they are."""
        self._forced.add(name)
        try:
            await self.wait(name, there)
        finally:
            self._forced.discard(name)

    def expects(self, name: str) -> bool:
        """Whether servers of that name are back, or come back."""
        return name in self._tasks or (name in self._held() and name not in self._over)

    async def wait(self, name: str, there: Callable[[], bool]) -> None:
        """Wait until the parameter server was taken over, if its servers may come back; it is `there` then."""
        until = self._clock() + config.seconds("start")
        while not there() and (self.expects(name) or self._may_come()) and self._clock() < until:
            await asyncio.sleep(LOOK_SECONDS / 10)

    def stop(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    async def _run(self, name: str) -> None:
        reports, new_name = self._reports[name], lambda: secrets.token_hex(8)
        try:
            makes, forced = (self._make, self._abandon), lambda: name in self._forced
            await self._carry_out(take_over(name, reports, *makes, self._clock, new_name, forced))
        finally:
            self._over.add(name)
            del self._reports[name]
