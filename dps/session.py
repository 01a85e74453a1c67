"""Session: one parameter server, as the controller has it; its parts, put together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dps.adapting import Adapter
from dps.checkpointing import Checkpointer
from dps.crew import Crew
from dps.fleet import Fleet
from dps.monitor import Monitor
from dps.runs import Runs
from dps.wire.endpoint import Endpoint
from dps.wire.session import new_secret

__all__ = ["Session"]


class Session:
    """One parameter server."""

    crew: Crew
    checkpointer: Checkpointer
    adapter: Adapter

    def __init__(self, name: str, endpoint: Endpoint, copies: int):
        self.name, self.copies = name, copies
        self.opened = asyncio.Event()  # or given up
        self.secret, self.servers_secret = new_secret(), new_secret()
        self.runs = Runs(name)
        self.fleet = Fleet(endpoint, name)
        self.monitor = Monitor(self.runs, self.fleet, self.runs.now)
        self.runs.note = lambda text, stands: self.fleet.note(text, stands=stands)
        self.fleet.reported = self.monitor.beaten
        self.last_table = 0
        self.retiring: asyncio.Task[None] | None = None  # servers are being told of tasks that have ended

    def connect(self, tell: Callable[[str], None]) -> None:
        """All parts are there: those that look at each other may begin."""
        self.fleet.told, self.monitor.wanted = tell, lambda: self.crew.wanted
        self.monitor.checkpoints = lambda: {"last": self.checkpointer.last, "error": self.checkpointer.error}

    def new_table(self) -> int:
        """A table's number, never used again."""
        self.last_table += 1
        return self.last_table

    def collecting(self) -> list[str]:
        """The tables that collect the pushes of a clock."""
        return [name for name, spec in self.fleet.specs.items() if spec["aggregate"] is not None]
