"""Schedulers of a simulation, one after another, and the processes of servers, which outlive them.

A scheduler that is started later than the first takes over: its controller is made when enough servers have come back.
`SimScheduler` is to it what `controller/takeover.py` and the verb *returned* are to Dask's scheduler, and `SimHold` is
to the process of a server what `server/hold.py` is. In between runs the real code.
"""

from __future__ import annotations

from collections.abc import Callable

from dps.engine.controller.takeover_procedures import Attempt, take_over
from dps.engine.coordination.journal import Ballot
from dps.engine.simulation.executor import SimExecutor
from dps.engine.simulation.network import Network
from dps.engine.simulation.roles import SimController
from dps.engine.simulation.server import SESSION, SimServer
from dps.engine.simulation.world import Party, Task
from dps.engine.wire.journal_messages import ReturnedServer, SessionRecord

__all__ = ["SimHold", "SimScheduler", "SimSchedulers"]

LOOK_SECONDS = 0.25  # between two looks of a server's process for another scheduler
MAX_JOIN_SECONDS = 1.0  # until a process has joined a scheduler, and between two of its reports
MAX_NOTICE_SECONDS = 0.02  # until a scheduler notices that a worker has ended


class SimScheduler:
    """A scheduler, with its controller if there is one. `make` makes a controller that takes over, given its ballot."""

    def __init__(self, party: Party, controller: SimController | None, make: Callable[[Ballot], SimController]):
        self.party, self.controller, self._make = party, controller, make
        self._reports: dict[int, ReturnedServer] = {}
        self._task: Task | None = None

    @property
    def taking_over(self) -> bool:
        """Whether its controller is about to take over, or to try again."""
        return self._task is not None and not self._task.done

    def returned(self, report: ReturnedServer) -> str:
        """A server has joined this scheduler; the answer is "refused" where the server is to end."""
        controller = self.controller
        if controller is None or controller.recovering:
            self._reports[report.number] = report
            if not self.taking_over:
                self._task = self.party.spawn(self._take_over)
            return "waits"
        if report.number not in controller.membership.servers:
            return "refused"
        self.party.spawn(controller.take_up_late, report)
        return "known"

    def remove_worker(self, worker: str) -> None:
        """A worker has ended, or has left this scheduler."""
        if self.controller is not None:
            self.controller.membership.remove_worker(worker)

    def _take_over(self) -> None:
        executor = SimExecutor(self.party, lambda calls: [], list, lambda: None)
        new_name = lambda: f"{self.party.world.random.getrandbits(32):08x}"  # noqa: E731
        executor.run(take_over(SESSION, self._reports, self._begin, self._abandon, self.party.now, new_name))

    def _begin(self, record: SessionRecord, secrets: tuple[str, str], ballot: Ballot) -> SimController:
        self.controller = self._make(ballot)
        return self.controller

    def _abandon(self, attempt: Attempt) -> None:
        assert self.controller is attempt
        self.controller.abandon()
        self.controller = None


class SimHold:
    """The process of one server: it joins the newest scheduler when it has lost its own, and reports its server."""

    def __init__(self, server: SimServer, joined: SimScheduler, schedulers: SimSchedulers):
        self._server, self._joined, self._schedulers = server, joined, schedulers
        self.cut = False  # its connection to the scheduler has broken
        server.party.later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        server, newest, network = self._server, self._schedulers.newest, self._schedulers.network
        world, pause = server.party.world, LOOK_SECONDS
        parted = network.parted(server.party, newest.party) or network.parted(newest.party, server.party)
        if newest is not self._joined and (self.cut or self._joined.party.dead) and not parted:
            world.at(world.now, self._joined.party, self._joined.remove_worker, server.party.name)
            self._joined, self.cut = newest, False
            server.scheduler, server.claimed = newest.party, False
        if not server.claimed and not parted:
            delay = world.random.uniform(0.0, MAX_NOTICE_SECONDS)
            world.at(world.now + delay, newest.party, self._report, newest, server.returned())
            pause = world.random.uniform(LOOK_SECONDS, MAX_JOIN_SECONDS)
        server.party.later(pause, self._look)

    def _report(self, scheduler: SimScheduler, report: ReturnedServer) -> None:
        """In the scheduler's process: take the report, and answer."""
        server, world = self._server, self._server.party.world
        there = server.scheduler is scheduler.party and not server.party.dead
        if there and scheduler.returned(report) == "refused":
            world.note("%s is refused", server.party)
            world.at(world.now, server.party, self._schedulers.network.crash, server.party)


class SimSchedulers:
    """All schedulers of a simulation, in the order in which they were started.

    `hire` makes the party of a server, given its number.
    """

    def __init__(self, network: Network, party: Party, hire: Callable[[int], Party], servers: int):
        self.network, self._hire = network, hire
        self.processes: dict[int, SimServer] = {}
        self._holds: dict[int, SimHold] = {}
        first = SimController(network, party, hire, servers, self.processes)
        self.current = first  # the controller that decides, as far as the simulation knows
        self._all = [SimScheduler(party, first, self._make_on(party))]
        self.address = first.endpoint.address

    @property
    def newest(self) -> SimScheduler:
        """The scheduler that was started last."""
        return self._all[-1]

    def hold(self) -> None:
        """Have the processes of all servers look for another scheduler; those that are started later, too."""
        for number, server in self.processes.items():
            if number not in self._holds and not server.party.dead:
                self._holds[number] = SimHold(server, self._of(server), self)

    def start(self, hire: Callable[[str], Party]) -> Party:
        """Start another scheduler, at the address of the first; `hire` makes its party, given the name."""
        self.hold()
        party = hire(f"controller-{1 + len(self._all)}")
        self.network.world.note("%s is started", party)
        self._all.append(SimScheduler(party, None, self._make_on(party)))
        return party

    def cut(self, number: int) -> None:
        """The connection of a server's worker to its scheduler breaks."""
        self.hold()
        if number in self._holds:
            self._holds[number].cut = True

    def remove_worker(self, party: Party, seconds: float) -> None:
        """The process of a server has ended, which its scheduler notices after `seconds`."""
        server = next((server for server in self.processes.values() if server.party is party), None)
        scheduler = self.newest if server is None else self._of(server)
        world = self.network.world
        world.at(world.now + seconds, scheduler.party, scheduler.remove_worker, party.name)

    def controllers(self) -> list[SimController]:
        """Those that are not given up, also where a later one has taken over."""
        return [each.controller for each in self._all if each.controller is not None]

    def look(self) -> None:
        """See which controller decides: the newest one that has taken over."""
        if len(self._all) > 1:
            self.hold()
        for scheduler in self._all:
            if scheduler.controller is not None and not scheduler.controller.recovering:
                self.current = scheduler.controller

    def _of(self, server: SimServer) -> SimScheduler:
        return next(each for each in self._all if each.party is server.scheduler)

    def _make_on(self, party: Party) -> Callable[[Ballot], SimController]:
        def make(ballot: Ballot) -> SimController:
            address = self.address if party is self.newest.party else None  # an older one is out of reach there
            return SimController(self.network, party, self._hire, 0, self.processes, ballot, address)

        return make
