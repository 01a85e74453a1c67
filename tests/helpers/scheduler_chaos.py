"""Random faults on real processes, with the Dask scheduler among the victims.

A scheduler is killed and another one started at its address, or it is stopped and goes on later, or it is killed while
it is stopped. Servers are killed and stopped while there is a scheduler, while there is none, and while it stands
still. One server at a time, because of three that keep the journal two must be there to take over, and tables have two
copies at least. The seed decides.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from chaos import SERVERS, is_whole
from servers import PATIENCE, wait_until
from survivors import Survivors

import dps

__all__ = ["SchedulerChaos"]

# Seconds without a scheduler, or with one that stands still: within a lease, about one, more than two.
AWAY_SECONDS = (0.0, 0.3, 1.5, 2.5, 5.0)
# Seconds for which a server stands still: within a lease, and longer than the silence that a controller allows.
STILL_SECONDS = (0.05, 0.5, 2.2, 4.0)
CLOSE_SECONDS = 5.0
FAULTS = ("replaced", "replaced", "replaced", "twice", "stopped", "stopped", "killed_while_stopped", "in_vain")
OF_SERVERS = ("server_killed", "server_stopped")


def keepers(dask_scheduler: Any, name: str) -> tuple[set[int], bool]:
    """The servers that keep the journal, and whether the last record is committed, and settled."""
    session = dask_scheduler.plugins["dps-controller"].sessions[name]
    recorder = session.membership.holders.recorder
    committed = recorder.journal.committed
    is_settled = committed is not None and committed.settled and recorder.journal.proposed is None
    return set(recorder.keepers), is_settled


class SchedulerChaos:
    """Faults of one cluster, one after another, each when all is whole again.

    Parameters
    ----------
    cluster : Survivors
        With a worker for each server.
    seed : int
    faulty_servers : bool
        Whether servers are killed and stopped, too: then no table may have one copy.

    Attributes
    ----------
    client, ps : Client, ParameterServer
        Of the scheduler that is there.
    story : list of str
        What happened, with the seconds since the beginning.
    """

    def __init__(self, cluster: Survivors, seed: int, faulty_servers: bool):
        self.cluster, self.random, self.faulty_servers = cluster, random.Random(seed), faulty_servers
        self.began, self.story, self.count = time.monotonic(), [], 0
        self.choices = [*FAULTS, *(OF_SERVERS if faulty_servers else ())]
        self.lost = 0  # schedulers that were killed
        self.starting = True  # whether there is one that was not killed
        self.client = cluster.client(SERVERS)
        self.ps: dps.ParameterServer

    def note(self, text: str) -> None:
        self.story.append(f"{time.monotonic() - self.began:.2f} {text}")

    def run(self, seconds: float, over: Callable[[], bool]) -> None:
        """Faults for so many seconds, one at least; or until it is `over`."""
        until = time.monotonic() + seconds
        while (time.monotonic() < until or not self.count) and not over():
            time.sleep(self.random.uniform(0.0, 1.0))
            self.wait_until_whole()
            fault = self.random.choice(self.choices)
            self.note(fault)
            getattr(self, fault)()
            self.count += 1
        self.wait_until_whole()

    def is_whole(self) -> bool:
        for name in self.cluster.replace_ended():
            self.note(f"{name} had no server, and has ended with its scheduler")
        if not is_whole(self.ps):
            return False
        numbers = {server.number for server in self.ps.connection.describe().servers if server.alive}
        keeping, is_settled = self.client.run_on_scheduler(keepers, name=self.ps.name)
        return is_settled and keeping <= numbers

    def wait_until_whole(self) -> None:
        wait_until(self.is_whole, 1.5 * PATIENCE, what=f"not whole again after {self.story[-3:]}")
        self.note("whole")

    def attach(self) -> None:
        self.client = self.cluster.client()
        controller, self.ps = self.ps.ticket.controller, dps.ParameterServer.attach(self.client)
        self.note("attached")
        assert self.ps.ticket.controller == controller, f"another process has taken the controller's port {controller}"

    def close(self) -> None:
        """Let go of the scheduler, which may be dead, or stand still."""
        with contextlib.suppress(TimeoutError, OSError):
            self.client.close(CLOSE_SECONDS)

    # -- faults of the scheduler

    def replaced(self) -> None:
        """It is killed, and the next one starts at once, or later."""
        with self.faulty_server():
            self._kill_scheduler()
            self._away()
            self._start_perhaps()
        self._take_over()

    def twice(self) -> None:
        """The next one is killed, too, while it takes over."""
        with self.faulty_server():
            self._kill_scheduler()
            self._away()
            self._start_scheduler()
            time.sleep(self.random.uniform(0.5, 8.0))
            self._kill_scheduler()
            self._away()
            self._start_perhaps()
        self._take_over()

    def stopped(self) -> None:
        """It stands still, and goes on."""
        with self.cluster.stopped("scheduler"), self.faulty_server():
            self._away()

    def killed_while_stopped(self) -> None:
        """It stands still, and is killed before it goes on."""
        with self.cluster.stopped("scheduler"), self.faulty_server():
            self._away()
            self._kill_scheduler(stands_still=True)
            self._start_perhaps()
        self._take_over()

    def in_vain(self) -> None:
        """Another one is started while it stands still: the port is taken. The first one goes on."""
        with self.cluster.stopped("scheduler"), self.faulty_server():
            other = self.cluster.start_at_the_address("in-vain")
            assert other.wait(PATIENCE) != 0, "two schedulers listen at one address"

    def _kill_scheduler(self, stands_still: bool = False) -> None:
        if not stands_still:
            self.close()
        self.cluster.kill_scheduler()
        if stands_still:
            self.close()
        self.lost += 1
        self.starting = False
        self.note("the scheduler is killed")

    def _start_scheduler(self) -> None:
        self.cluster.start_scheduler()
        self.starting = True
        self.note("the next scheduler is started")

    def _start_perhaps(self) -> None:
        """Start the next scheduler while a faulty server is stopped, or before it is killed; or not yet."""
        if self.random.random() < 0.5:
            self._start_scheduler()
            time.sleep(self.random.choice((0.0, 3.0, 6.0)))

    def _take_over(self) -> None:
        if not self.starting:
            self._start_scheduler()
        self.attach()

    def _away(self) -> None:
        seconds = self.random.choice(AWAY_SECONDS)
        self.note(f"{seconds} s")
        time.sleep(seconds)

    # -- faults of servers

    @contextlib.contextmanager
    def faulty_server(self) -> Iterator[None]:
        """A server is killed before the block, or behind it; it is stopped; one is killed and another one stopped.

        One that is stopped besides goes on behind the block, because two of three servers are needed for a takeover.
        """
        kinds = ("none", "killed_before", "killed_behind", "stopped", "both") if self.faulty_servers else ("none",)
        kind = self.random.choice(kinds)
        if kind in ("killed_before", "both"):
            self.server_killed()
            time.sleep(self.random.choice((0.0, 0.0, 0.5)))
        if kind in ("stopped", "both"):
            victim = self.random.choice(self.serving())
            self.note(f"{victim} is stopped")
            with self.cluster.stopped(victim):
                yield
            self.note(f"{victim} goes on")
        else:
            yield
        if kind == "killed_behind":
            self.server_killed()

    def serving(self) -> list[str]:
        """The first workers that were not killed: a younger one may have no server yet."""
        return self.cluster.alive()[: SERVERS - 1]

    def server_killed(self) -> None:
        """One server is killed; a worker for another one is started, at once or not before all else goes on."""
        victim = self.random.choice(self.cluster.alive())
        self.cluster.kill_server(victim)
        self.note(f"{victim} is killed")
        time.sleep(self.random.choice((0.0, 1.0)))
        self.cluster.start_servers(1)

    def server_stopped(self) -> None:
        victim, seconds = self.random.choice(self.cluster.alive()), self.random.choice(STILL_SECONDS)
        self.note(f"{victim} is stopped for {seconds} s")
        with self.cluster.stopped(victim):
            time.sleep(seconds)
