"""The journal of a simulated controller, as `controller/journaling.py` has it with asyncio."""

from __future__ import annotations

from collections.abc import Callable

from dps import config
from dps.engine.controller.failover import Membership
from dps.engine.controller.recorder import Recorder
from dps.engine.controller.runs import Runs
from dps.engine.controller.session_record import RecordContent
from dps.engine.coordination.journal import Ballot
from dps.engine.simulation.network import Network
from dps.engine.simulation.world import Party
from dps.errors import ServerGoneError

__all__ = ["SimJournal"]

POLL_SECONDS = 0.01  # between two checks whether a decision is committed
PROBE_SECONDS = 0.25  # between two looks whether servers that have not confirmed a record are dead


class SimJournal:
    """Commits the decisions of one controller on virtual time; parameters as of `SessionJournal`."""

    def __init__(
        self,
        network: Network,
        party: Party,
        membership: Membership,
        runs: Runs,
        content: RecordContent,
        ballot: Ballot,
        recovering: bool,
    ):
        self._network, self._party, self._membership, self.content = network, party, membership, content
        self.recorder = recorder = Recorder(
            membership.session,
            content.encoded,
            membership.holders.send,
            membership.holders.hosts,
            party.now,
            ballot,
            self._committed,
            recovering,
        )
        membership.holders.recorder, runs.origins.on_few, runs.on_epoch = recorder, recorder.refresh, recorder.refresh
        self._find_dead()

    def wait_for(self, deciding: Callable[[Callable[[], object]], None]) -> None:
        """Call a function of the recorder, and return when its effect takes place."""
        done: list[bool] = []
        deciding(lambda: done.append(True))
        until = self._party.now() + config.seconds("request")
        while not done:
            if self._party.now() > until:
                raise ServerGoneError("what was decided has no effect yet")
            self._party.sleep(POLL_SECONDS)

    def _committed(self, content: bytes) -> None:
        assert self.recorder.journal is not None
        assert self.recorder.journal.committed is not None
        for observer in self._network.observers:
            observer.record_committed(self.recorder.journal.committed)
        self.content.committed(content)

    def _find_dead(self) -> None:
        """Tell the journal which servers are dead while it waits for them: their machines refuse connections."""
        for number, address in self._membership.holders.suspects().items():
            if self._network.refuses(self._party, address):
                self._membership.holders.died(number)
        self._party.later(PROBE_SECONDS, self._find_dead)
