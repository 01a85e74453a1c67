"""Simulation: a cluster in one thread, on virtual time."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dps.calls import Ticket
from dps.errors import DPSError, InputError, StoppedError
from dps.state.initializers import Initializer, Zeros
from dps.state.ops import TableSpec, wants_finite
from dps.state.optimizers import Add, Optimizer
from dps.testing.channel import SimClient
from dps.testing.faults import Faults, Mischief
from dps.testing.losses import Losses
from dps.testing.network import Network
from dps.testing.roles import SECRET, SESSION, SimController
from dps.testing.trainers import Crew, Job
from dps.testing.world import Party, StuckError, Task, World
from dps.training.data import share

__all__ = ["Simulation"]

DASK_NOTICES = 0.02  # seconds in which Dask learns that a worker process has ended


class Simulation:
    """A whole parameter server in this thread: servers, controller and trainers on virtual time, with faults.

    The real code of all of them runs; what lies under it is replaced: threads by greenlets, sockets by simulated
    connections, time by numbers, Dask by nothing. All that happens is drawn from `seed`: the same seed gives the same
    events, the same trace and the same results, and a failure is repeated by repeating its seed. Needs `greenlet`
    (``pip install dps[testing]``).

    Parameters
    ----------
    seed : int
        Of all chance.
    servers, trainers : int
        How many.
    copies : int
        Of each table, unless it says otherwise.
    faults : Faults, optional
        What goes wrong while something runs; nothing by default.
    compute : float
        Virtual seconds that an iteration takes a trainer, on the average; otherwise only messages take time.
    timeout : float
        Virtual seconds after which a run is given up.
    dump : (int, float)
        What a server that is brought up to date is given: bytes in a piece, bytes a second.

    Attributes
    ----------
    parties : dict
        Name -> party: ``"controller"``, ``"server-0"``, ..., ``"trainer-0"``, ..., ``"driver"``.
    losses : Losses
        What tables with ``ack="memory"`` may have lost.

    Examples
    --------
    >>> from dps.testing import Simulation
    >>> def train(trainer, partitions):
    ...     for X in trainer.iterate(partitions, epochs=2):
    ...         trainer.push("sum", [0], X)
    ...     return trainer.clock
    >>> with Simulation(seed=1, servers=2, trainers=2) as sim:
    ...     _ = sim.table("sum")
    ...     sim.stop("trainer-0", seconds=1.0, at=0.001)
    ...     sim.run(train, [1.0, 2.0, 3.0, 4.0], staleness=1)
    ...     sim.client().pull("sum", [0])
    [4, 4]
    array([20.], dtype=float32)
    """

    def __init__(
        self,
        seed: int = 0,
        servers: int = 1,
        trainers: int = 2,
        *,
        copies: int = 1,
        faults: Faults | None = None,
        compute: float = 0.0,
        timeout: float = 3600.0,
        dump: tuple[int, float] = (1 << 20, 400e6),
    ):
        if servers < 1 or trainers < 1:
            raise InputError(f"a simulation has at least one server and one trainer, not {servers} and {trainers}")
        self.losses = Losses()
        self.faults, self._timeout = faults or Faults(), timeout
        self._world = World(seed)
        self._network = Network(self._world, self.faults.latency, self.faults.window, self.losses)
        self._network.repeats, self._network.keep_alive = self.faults.repeats, self.faults.keep_alive
        self._network.dump_piece, self._network.dump_rate = dump
        self.parties: dict[str, Party] = {}
        hire = lambda number: self._party(f"server-{number}")  # noqa: E731
        self._controller = SimController(self._network, self._party("controller"), hire, servers)
        self._copies = copies
        names = [f"trainer-{n}" for n in range(trainers)]
        slow = {name: self._slowness() for name in names}
        self._ticket = Ticket(SESSION, self._controller.endpoint.address, SECRET)
        hire_trainer = lambda name: self._party(name, slow[name])  # noqa: E731
        self._crew = Crew(self._network, hire_trainer, self._ticket, names, compute)
        self._clients: list[SimClient] = []  # kept, so that none is closed by the garbage collector at any moment
        self._others: list[Task] = []  # that were submitted
        acts = {"crashes": self._crash_one, "twins": self._crew.run_twice, "moves": self._change_servers}
        self._mischief = Mischief(self._network, self.faults, acts, self._controller.fragile)
        self._party("driver")
        while not self._controller.ready:
            self._world.step()

    # -- as ParameterServer

    def table(
        self,
        name: str,
        dim: int = 1,
        *,
        rows: int | None = None,
        dtype: Any = "float32",
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        aggregate: str | None = None,
        finite: bool | None = None,
        shards: int | None = None,
        copies: int | None = None,
        ack: str = "copies",
    ) -> TableSpec:
        """Make a table; parameters as of :meth:`dps.ParameterServer.table`."""
        if shards is None:
            wanted = len(self._controller.servers)
            shards = 1 << (wanted - 1).bit_length() if rows is None else min(wanted, rows)
        optimizer = Add() if optimizer is None else optimizer
        finite = wants_finite(optimizer) if finite is None else finite
        made = (optimizer, init or Zeros(), aggregate, finite, shards)
        spec = TableSpec(name, rows, dim, dtype, *made, copies=copies or self._copies, ack=ack)
        return self._controller.create_table(spec)

    def client(self) -> SimClient:
        """A client without a clock, at the driver. Its calls move virtual time on."""
        client = SimClient(self._network, self.parties["driver"], self._ticket)
        self._clients.append(client)
        return client

    def run(
        self,
        function: Callable[..., Any],
        data: Sequence[Any],
        *,
        staleness: float = 0,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        reassign: bool = False,
    ) -> list[Any]:
        """Train, as :meth:`dps.ParameterServer.run` does.

        Parameters
        ----------
        function : callable
            Called as ``function(trainer, partitions)`` in a greenlet of each trainer.
        data : sequence
            The partitions themselves: they are shared out evenly.
        staleness : int or math.inf
        args, kwargs
            More arguments for `function`.
        reassign : bool

        Returns
        -------
        list
            What `function` returned, by trainer.

        Raises
        ------
        Exception
            The first error of a trainer.
        StuckError
            Not over after `timeout` virtual seconds.
        """
        shares = share([[]] * len(data), self._crew.names[: len(data)])
        job = Job(lambda trainer, parts: function(trainer, parts, *args, **kwargs or {}), data, shares, reassign)
        job.number = self._controller.start_run(shares, None if math.isinf(staleness) else int(staleness), reassign)
        self._crew.begin(job)
        self._mischief.begin()
        until = self._world.now + self._timeout
        try:
            while job.left and not job.errors:
                self._turn(until, job)
            if job.errors:
                self._controller.runs.stop(job.number, StoppedError(f"the run was stopped: {job.errors[0]!r}"[:500]))
            while job.left:
                self._turn(until, job)
        finally:
            self._mischief.end()
            self._crew.job = None
        if (error := job.error()) is not None:
            with contextlib.suppress(DPSError):  # the run's own error counts
                self._controller.settle(keep=False)
            raise error
        self._controller.settle(keep=True)
        return job.results

    def submit(self, function: Callable[..., Any], *args: Any) -> Task:
        """Call ``function(client, *args)`` in a party of its own, with a client without a clock; `gather` waits."""
        party = self._party(f"client-{len(self._others)}")

        def call() -> Any:
            with SimClient(self._network, party, self._ticket) as client:
                self._clients.append(client)
                return function(client, *args)

        self._others.append(party.spawn(call))
        return self._others[-1]

    def gather(self, tasks: Iterable[Task]) -> list[Any]:
        """What tasks have returned, when all are done; None where the party has crashed. Raises their first error."""
        until, tasks = self._world.now + self._timeout, list(tasks)
        while (left := [task.party.name for task in tasks if not task.done]) and self._world.now <= until:
            self._world.step()
        if left:
            raise StuckError(f"{', '.join(left)} were not done after {self._timeout:g} virtual seconds")
        for error in (task.error for task in tasks if isinstance(task.error, Exception)):
            raise error
        return [task.value for task in tasks]

    # -- time and faults

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._world.now

    @property
    def steps(self) -> int:
        """Events so far."""
        return self._world.steps

    @property
    def trace(self) -> list[str]:
        """The last (at least 100,000) lines of what has happened: time, frame or fault."""
        return self._world.trace

    def digest(self) -> str:
        """A hash of the whole trace: equal where all that happened was."""
        return self._world.digest()

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.parties["driver"].sleep(seconds)

    def crash(self, party: str, at: float = 0.0, *, silent: bool = False) -> None:
        """In `at` seconds a party ends; silent: as when its machine does, so that nobody is told.

        `Faults.restart` seconds later a trainer is begun anew, as another attempt, and a server is replaced. A party
        of `submit` is not.
        """
        self._at(at, lambda: self._crash(self._find(party), silent))

    def stop(self, party: str, seconds: float, at: float = 0.0) -> None:
        """In `at` seconds a party stands still, for so long: its connections stay, and fill."""

        def stop() -> None:
            there = self._find(party)
            self._world.note("%s stops for %.6f s", there, seconds)
            self._mischief.hit.add(there.name)
            there.stop()
            self._at(seconds, there.go_on)

        self._at(at, stop)

    def part(
        self, some: Iterable[str], others: Iterable[str], seconds: float, at: float = 0.0, *, one_way: bool = False
    ) -> None:
        """In `at` seconds nothing gets from one group of parties to the other, or back, for so long; nobody is told."""
        here, there = list(some), list(others)

        def part() -> None:
            self._world.note("%s parted from %s for %.6f s", here, there, seconds)
            self._mischief.hit.update(here, there)
            made = self._network.part(here, there, one_way)
            self._at(seconds, lambda: self._network.heal(made))

        self._at(at, part)

    def snap(
        self, some: str, other: str, at: float = 0.0, *, notice: tuple[float | None, float | None] = (0.0, 0.0)
    ) -> None:
        """In `at` seconds all connections of two parties break; each learns of it after `notice` (None: keep-alive)."""

        def snap() -> None:
            for wire in list(self._network.wires):
                names = [pipe.sender.host.name for pipe in wire.pipes]
                if sorted(names) == sorted((some, other)):
                    self._world.note("%s breaks, noticed after %s", wire, notice)
                    wire.snap(notice if names[0] == some else notice[::-1])

        self._at(at, snap)

    def scale(self, servers: int) -> None:
        """Have that many servers, as :meth:`dps.ParameterServer.scale`; shards move while virtual time passes."""
        self._world.note("scale to %d servers", servers)
        self._controller.scale(servers)

    def retire(self, party: str) -> None:
        """Empty a server, then close it; another one takes its place."""
        self._world.note("%s is to go", party)
        number = int(party.removeprefix("server-"))
        self.parties["controller"].spawn(self._controller.retire, number)

    def rest(self, timeout: float = 300.0) -> None:
        """Let time pass until troubles are over and each shard has its copies again; then see whether they are equal.

        Raises
        ------
        StuckError
            Not after `timeout` virtual seconds.
        AssertionError
            Copies differ, or a server was given up that nothing had befallen.
        """
        until = self.now + timeout
        while (why := self._restless()) is not None:
            if self.now > until:
                raise StuckError(f"no rest within {timeout:g} virtual seconds: {why}")
            self.sleep(0.1)
        self._controller.compare()
        for _, text in self._controller.fleet.events:
            party = text.partition(" on ")[2].removesuffix(" is silent")
            assert not text.endswith(" is silent") or party in self._mischief.hit, (
                f"{text}, and nothing had befallen it"
            )

    def _restless(self) -> str | None:
        if self._network.partitions:
            return f"partitions {self._network.partitions}"
        stopped = [party.name for party in self._world.parties if party.stops and not party.dead]
        return f"{', '.join(stopped)} stand still" if stopped else self._controller.restless()

    def close(self) -> None:
        """End all parties."""
        self._mischief.end()
        for party in self._world.parties:
            if not party.dead:
                self._network.crash(party, silent=True)

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _at(self, seconds: float, function: Callable[[], Any]) -> None:
        self._world.at(self._world.now + seconds, None, function)

    def _party(self, name: str, slowness: float | None = None) -> Party:
        drift = self._world.random.uniform(-self.faults.drift, self.faults.drift)
        slow = self._slowness() if slowness is None else slowness
        party = self.parties[name] = Party(self._world, name, 1.0 + drift, slow)
        return party

    def _slowness(self) -> float:
        return self.faults.slowness if self._world.random.random() < self.faults.slow else 1.0

    def _find(self, name: str) -> Party:
        if name not in self.parties:
            raise InputError(f"there is no party {name!r}; there are {', '.join(self.parties)}")
        return self.parties[name]

    def _turn(self, until: float, job: Job) -> None:
        if self._world.now > until:
            about = self._controller.runs.describe(job.number)
            raise StuckError(f"the run was not over after {self._timeout:g} virtual seconds: {about}")
        self._world.step()

    # -- what befalls parties

    def _crash_one(self, draw: random.Random) -> None:
        """By chance: trainers at work, and servers whose shards have other copies, if they come back."""
        if self.faults.restart is not None:
            others = [task.party for task in self._others if not task.done]
            mortals = self._crew.at_work() + self._controller.expendable() + others
            party = self._mischief.choose(mortals)
            if party is not None:
                self._crash(party, draw.random() < 0.25)

    def _crash(self, party: Party, silent: bool) -> None:
        if party.dead:
            return
        self._world.note("%s crashes%s", party, " silently" if silent else "")
        self._mischief.hit.add(party.name)
        self._network.crash(party, silent)
        if party.name.startswith("server-"):
            notice = self.faults.keep_alive if silent else self._world.random.uniform(0, DASK_NOTICES)
            self._world.at(
                self._world.now + notice, self.parties["controller"], self._controller.fleet.worker_gone, party.name
            )
            if self.faults.restart is not None:
                self._at(self.faults.restart, self._controller.spare)
        else:
            self._crew.lost(party, self.faults.restart)

    def _change_servers(self, draw: random.Random) -> None:
        """More servers, or fewer, or another one for one that goes."""
        controller = self._controller
        number = draw.choice([n for n, s in controller.fleet.servers.items() if not s.leaving])
        change = draw.choice((self.scale, self.scale, self.retire))
        try:
            change(f"server-{number}") if change == self.retire else self.scale(
                controller.wanted + draw.choice((-1, 1))
            )
        except InputError:
            pass  # the copies need these servers
