"""Journaling: the journal of one parameter server, as the scheduler's loop sees it. `recorder.py` has what it does.

Drivers get their answers when what they asked for is committed. Beside that, a task finds out which servers have died
while the journal waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.recorder import Recorder
from dps.engine.controller.runs import Runs
from dps.engine.controller.session_record import RecordContent
from dps.engine.coordination.journal import Ballot, Journal
from dps.engine.wire.protocols import EndpointCaller
from dps.errors import ServerGoneError

__all__ = ["FIRST_TERM", "SessionJournal"]

# Term of the controller with which a parameter server begins; each one that takes over has a higher one.
FIRST_TERM = 1
# Pause between two looks whether servers that have not confirmed a record are dead. It is shorter than a lease, because
# a death counts for certain only within the lease of the dead server.
PROBE_SECONDS = 0.25
# Longest time that a machine may take to refuse a connection.
REFUSAL_SECONDS = 2.0


class SessionJournal:
    """Commits the decisions of one session.

    Parameters
    ----------
    now : callable
        Seconds, on the clock of the endpoint.
    in_endpoint : callable
        Runs a function in the endpoint's thread.
    recovering : bool
        Whether the journal of another controller is to be taken over.
    """

    def __init__(
        self,
        membership: Membership,
        runs: Runs,
        content: RecordContent,
        now: Callable[[], float],
        ballot: Ballot,
        in_endpoint: EndpointCaller,
        recovering: bool,
    ):
        self._membership, self._content, self._in_endpoint = membership, content, in_endpoint
        self.recorder = recorder = Recorder(
            membership.session,
            content.encoded,
            membership.holders.send,
            membership.holders.hosts,
            now,
            ballot,
            content.committed,
            recovering,
        )
        membership.holders.recorder, runs.origins.on_few, runs.decide = recorder, recorder.refresh, recorder.decide
        runs.on_epoch = recorder.refresh
        runs.grace = config.scheduler_grace()
        self._probing: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """The servers are up: write the first record. It is committed when this returns."""
        await self.wait_for(self.recorder.begin)
        self.watch()

    async def take_over(self, journal: Journal) -> None:
        """Write the record of another controller again, and go on from there. It is committed when this returns."""
        await self.wait_for(partial(self.recorder.take, journal))
        self.watch()

    def watch(self) -> None:
        """Find out from now on which servers are dead."""
        self._probing = asyncio.ensure_future(self._find_dead())

    def stop(self) -> None:
        if self._probing is not None:
            self._probing.cancel()

    async def committed(self) -> None:
        """Return when all that was decided before is committed."""
        await self.wait_for(self.recorder.decide)

    async def set_origins_aside(self, count: int) -> None:
        """Have a record set so many origins aside, because a run is about to take them at once."""
        await self._in_endpoint(self._content.need_origins, count)
        await self.committed()

    async def force(self) -> None:
        """Have the servers that are up keep the journal alone, where it waits for others, until it waits no more."""
        until = asyncio.get_running_loop().time() + config.seconds("request")
        while await self._in_endpoint(self.recorder.force):
            if asyncio.get_running_loop().time() > until:
                raise ServerGoneError(
                    f"parameter server {self._membership.session!r} does not go on by force: its servers have not "
                    f"confirmed what was decided within {config.limit('request')}; see `dask ps status`"
                )
            await asyncio.sleep(PROBE_SECONDS)

    async def wait_for(self, deciding: Callable[[Callable[[], object]], None]) -> None:
        """Call a function of the recorder in the endpoint's thread, and return when its effect takes place."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        await self._in_endpoint(deciding, partial(loop.call_soon_threadsafe, done.set))
        patience = config.seconds("request")
        try:
            await asyncio.wait_for(done.wait(), patience)
        except TimeoutError as error:
            raise ServerGoneError(
                f"parameter server {self._membership.session!r}: what was decided has no effect yet, because too few "
                f"servers have confirmed it within {config.limit('request', patience)}. It takes effect when they do; "
                f"see their logs"
            ) from error

    async def _find_dead(self) -> None:
        """Tell the journal which servers are dead while it waits for them; until the end.

        A connection that breaks is no proof, because a server outlives its worker's connections, and may follow another
        controller. Its endpoint listens for as long as the server lives: where its machine refuses a connection to it,
        the server is dead.
        """
        asking: dict[int, asyncio.Future[None]] = {}
        try:
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                asking = {number: task for number, task in asking.items() if not task.done()}
                suspects = await self._in_endpoint(self._membership.holders.suspects)
                for number in suspects.keys() - asking.keys():
                    asking[number] = asyncio.ensure_future(self._ask(number, suspects[number]))
        finally:
            for task in asking.values():
                task.cancel()

    async def _ask(self, number: int, address: tuple[str, int]) -> None:
        """Ask a machine whether a server is dead: by itself, because one that vanished does not answer for long."""
        if await refuses(address):
            await self._in_endpoint(self._membership.holders.died, number)


async def refuses(address: tuple[str, int]) -> bool:
    """Whether a machine answers that nothing listens at that address."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*address), REFUSAL_SECONDS)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
