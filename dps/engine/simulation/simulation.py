"""Simulation: a cluster in one thread, on virtual time."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from dps.engine.client.ticket import Ticket
from dps.engine.controller.autoscaling_procedures import AutoscalingProcedures
from dps.engine.controller.procedures import Procedure
from dps.engine.coordination.autoscaling import AutoscalingRule
from dps.engine.functions.definition import Function
from dps.engine.simulation.channel import SimClient
from dps.engine.simulation.disk import SimDisk
from dps.engine.simulation.executor import Cancelled
from dps.engine.simulation.faults import Faults, Mischief, drawn_merge, drawn_split
from dps.engine.simulation.network import Network
from dps.engine.simulation.observers import Observer
from dps.engine.simulation.roles import SimController
from dps.engine.simulation.schedulers import SimSchedulers
from dps.engine.simulation.server import SECRET, SESSION
from dps.engine.simulation.trainers import SimJob, SimTrainers
from dps.engine.simulation.world import Party, StuckError, Task, World
from dps.engine.state.caching import Cache, cache_of
from dps.engine.state.columns import Column, parts_of_table
from dps.engine.state.initializers import Initializer
from dps.engine.state.life import AdmitByCount, Expiry, life_of
from dps.engine.state.ops import TableSpec, usual_shards, wants_finite
from dps.engine.state.optimizers import Optimizer
from dps.engine.state.partitioning import Partition, partition_of
from dps.engine.state.wire_format import Wire, wire_of
from dps.engine.telemetry.monitor import run_status
from dps.engine.telemetry.rebalance_report import RebalanceReport
from dps.engine.training.data import share
from dps.engine.wire.messages import CheckpointOptions, CheckpointSchedule, RestoreRequest
from dps.errors import DPSError, InputError, StoppedError

__all__ = ["Simulation"]

T = TypeVar("T")

MAX_DASK_NOTICE_SECONDS = 0.02  # until Dask's scheduler notices that a worker process has ended


class Simulation:
    """A whole parameter server in this thread: servers, controller and trainers on virtual time, with faults.

    The real code of servers, controller and trainers runs. Greenlets replace threads, simulated connections replace
    sockets, and virtual time replaces real time; there is no Dask. Every random choice is drawn from `seed`: the same
    seed gives the same events, the same trace and the same results, so a seed repeats a failure. A simulation needs
    `greenlet` (``pip install dps[testing]``).

    Parameters
    ----------
    seed : int
        Of every random choice.
    servers, trainers : int
        The number of servers and of trainers.
    copies : int
        The replicas of each shard of a table, unless the table says otherwise.
    faults : Faults, optional
        What goes wrong during runs. By default nothing goes wrong.
    compute : float
        Virtual seconds of a trainer's iteration, on the average; otherwise only messages take time.
    timeout : float
        Virtual seconds after which a run is given up.
    dump : (int, float)
        How a server receives the rows of a shard that it joins: bytes in a frame, bytes a second.
    journal : bool
        Whether the controller has its decisions kept by the servers, so that another scheduler may take over
        (:meth:`start_scheduler`), as where ``dps.scheduler.grace`` is not 0. With it, most of the servers that keep the
        journal may not lose power at once.
    observers : sequence
        Objects with the methods of `dps.engine.simulation.observers.Observer`. The simulation calls them for each new
        table, each answer and each new primary.

    Attributes
    ----------
    parties : dict
        Name -> party: ``"controller"``, ``"server-0"``, ..., ``"trainer-0"``, ..., ``"driver"``.

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
        journal: bool = False,
        observers: Sequence[Observer] = (),
    ):
        if servers < 1 or trainers < 1:
            raise InputError(f"a simulation has at least one server and one trainer, not {servers} and {trainers}")
        self.faults, self._timeout, self._copies = faults or Faults(), timeout, copies
        self._world = World(seed)
        self._network = Network(self._world, self.faults.latency, self.faults.window, observers, self.faults.rate)
        self._network.repeats, self._network.keep_alive = self.faults.repeats, self.faults.keep_alive
        self._network.dump_piece, self._network.dump_rate = dump
        self._network.journal = journal
        self.parties: dict[str, Party] = {}
        hire = lambda number: self._party(f"server-{number}")  # noqa: E731
        self._schedulers = SimSchedulers(self._network, self._party("controller"), hire, servers)
        self._disk: SimDisk | None = None
        self._autoscaling: AutoscalingProcedures | None = None
        slow = {f"trainer-{n}": self._slowness() for n in range(trainers)}
        self._ticket = Ticket(SESSION, self._controller.endpoint.address, SECRET)
        self._actors = SimTrainers(self._network, self._party, self._ticket, slow, compute)
        self._clients: list[SimClient] = []  # kept, because the garbage collector would close them at any moment
        self._submitted: list[Task] = []
        acts: dict[str, Callable[[random.Random], None]]
        acts = {"crashes": self._crash_one, "twins": self._actors.run_twice, "moves": self._change_servers}
        acts |= {"disks": self._break_disk, "answers": self._lose_answers, "rebalances": self._change_loads}
        acts |= {"splits": self._split_one, "merges": self._merge_one}
        self._mischief = Mischief(self._network, self.faults, acts, lambda: self._controller.fragile())
        self._party("driver")
        while not self._controller.ready:
            self._world.step()
        self._controller.begin()

    # -- as ParameterServer

    def register(self, function: Function) -> Function:
        """Bring a function to all servers; see :meth:`dps.ParameterServer.register`."""
        self._controller.add_function(function.id, function.code)
        return function

    def table(
        self,
        name: str,
        dim: int | None = None,
        *,
        rows: int | None = None,
        dtype: str = "float32",
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        columns: Mapping[str, Column] | None = None,
        aggregate: str | None = None,
        finite: bool | None = None,
        shards: int | None = None,
        copies: int | None = None,
        ack: str = "copies",
        partition: Partition | None = None,
        expire: Expiry | Sequence[Expiry] | None = None,
        max_bytes: int | str | None = None,
        evict: str | None = None,
        admit: AdmitByCount | str | None = None,
        remember: int = 0,
        fixed_shards: bool = False,
        staleness: int | None = None,
        wire: Wire | str | None = None,
        cache: Cache | str | int | None = None,
        reads: str = "primary",
        exist_ok: bool = False,
    ) -> TableSpec:
        """Make a table; parameters as of :meth:`dps.ParameterServer.table`."""
        if shards is None:
            shards = usual_shards(len(self._controller.servers), rows)
        dim, optimizer, init = parts_of_table(name, dim, optimizer, init, columns)
        finite = wants_finite(optimizer) if finite is None else finite
        copies = copies or self._copies
        spec = TableSpec(name, rows, dim, dtype, optimizer, init, aggregate, finite, shards, copies, ack)
        life, wired = life_of(expire, max_bytes, evict, admit, remember), wire_of(wire)
        spec = dataclasses.replace(spec, life=life, fixed_shards=fixed_shards, staleness=staleness, wire=wired)
        spec = dataclasses.replace(spec, partition=partition_of(partition), cache=cache_of(cache), reads=reads)
        return self._controller.create_table(spec, exist_ok)

    def split(self, table: str, shards: int | None = None, *, shard: int | None = None) -> TableSpec:
        """Cut a table into more shards; see :meth:`dps.ParameterServer.split`."""
        return self._controller.split(table, shards, shard)

    def merge(self, table: str, shards: int | None = None, *, shard: int | None = None) -> TableSpec:
        """Cut a table into fewer shards; see :meth:`dps.ParameterServer.merge`."""
        return self._controller.merge(table, shards, shard)

    def rebalance(self, seconds: float = 60.0) -> RebalanceReport:
        """Even the load out; see :meth:`dps.ParameterServer.rebalance`."""
        return self._controller.executor.run(self._controller.rebalancing.rebalance(seconds))

    def follow_load(self) -> None:
        """From now on, shards follow the load by themselves, as with the setting ``dps.rebalancing``."""
        self._controller.rebalances = True
        self._controller.party.spawn(self._controller.executor.run, self._controller.rebalancing.follow())

    def change_loads(self, seed: int) -> None:
        """Draw the loads of all shards anew."""
        self._controller.work.change(seed)

    def client(self) -> SimClient:
        """A client without a clock, at the driver. Its calls advance virtual time."""
        client = SimClient(self._network, self.parties["driver"], self._ticket)
        self._clients.append(client)
        return client

    def run(
        self,
        function: Callable[..., T],
        data: Sequence[object],
        *,
        staleness: float = 0,
        args: tuple = (),
        kwargs: dict[str, object] | None = None,
        reassign: bool = False,
        resume: bool = False,
        warm_start: int = 0,
        threads: int = 1,
        processes: int = 1,
    ) -> list[T | None]:
        """Train as :meth:`dps.ParameterServer.run` does, until all trainers have returned.

        Parameters
        ----------
        function : callable
            Called as ``function(trainer, partitions)`` in a greenlet of each trainer.
        data : sequence
            The partitions themselves. The trainers get equal shares of them.
        staleness : int or math.inf
        args, kwargs
            More arguments for `function`.
        reassign : bool
        resume : bool
            Go on at the clock of the checkpoint that was restored.
        warm_start : int
            The clock of trainer 0 at which the others begin.
        threads : int
            How many trainers of a process share the rows that it keeps (``cache=``).
        processes : int
            How many processes of a machine put their sums of pushes together (``Wire(merge=True)``).

        Returns
        -------
        list
            What `function` returned, by trainer; None for a trainer that was lost for good.

        Raises
        ------
        Exception
            The first error of a trainer.
        StuckError
            The run was not over after `timeout` virtual seconds.
        """
        shares = share([[]] * len(data), self._actors.names[: len(data)])
        job = SimJob(function, data, shares, reassign, args, kwargs or {}, threads, processes)
        bound = None if math.isinf(staleness) else int(staleness)
        job.number = self._controller.start_run(shares, bound, reassign, resume, warm_start)
        self._actors.begin(job)
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
            self._actors.job = None
        if (error := job.error()) is not None:
            with contextlib.suppress(DPSError):  # the run's own error counts
                self._controller.settle(keep=False)
            raise error
        self._controller.settle(keep=True)
        return job.results

    def submit(self, function: Callable[..., T], *args: object) -> Task[T]:
        """Call ``function(client, *args)`` in a new party, with a client without a clock; `gather` waits for it."""
        party = self._party(f"client-{len(self._submitted)}")

        def call() -> T:
            with SimClient(self._network, party, self._ticket) as client:
                self._clients.append(client)
                return function(client, *args)

        task = party.spawn(call)
        self._submitted.append(task)
        return task

    def gather(self, tasks: Iterable[Task[T]]) -> list[T | None]:
        """Wait for tasks and return their results, None for a party that crashed; or raise their first error."""
        until, tasks = self._world.now + self._timeout, list(tasks)
        while (left := [task.party.name for task in tasks if not task.done]) and self._world.now <= until:
            self._world.step()
        if left:
            raise StuckError(f"{', '.join(left)} were not done after {self._timeout:g} virtual seconds")
        for error in (task.error for task in tasks if isinstance(task.error, Exception)):
            raise error
        return [task.value for task in tasks]

    # -- checkpoints

    @property
    def disk(self) -> SimDisk:
        """The disk with the store of checkpoints."""
        if self._disk is None:
            self._disk = SimDisk()
        return self._disk

    def checkpoint(self, *, incremental: bool = False, keep: int = 1000) -> dict[str, object]:
        """Take a checkpoint now; its description, as :meth:`dps.ParameterServer.checkpoint`."""
        options = CheckpointOptions(self.disk.url, keep, incremental)
        return msgspec.to_builtins(self._controller.executor.run(self._controller.checkpoints.take(options)))

    def schedule_checkpoints(
        self,
        *,
        seconds: float | None = None,
        clocks: int | None = None,
        incremental: bool = False,
        keep: int = 1000,
    ) -> Callable[[], None]:
        """Take checkpoints at intervals, until the function that this returns is called."""
        schedule = CheckpointSchedule(CheckpointOptions(self.disk.url, keep, incremental), seconds, clocks)
        repeat, ended = self._controller.checkpoints.repeat(schedule), threading.Event()
        task = self._controller.party.spawn(self._repeat, repeat, ended.is_set)

        def end() -> None:
            ended.set()
            self.gather([task])

        return end

    def _repeat(self, repeat: Procedure[None], ended: Callable[[], bool]) -> None:
        with contextlib.suppress(Cancelled):
            self._controller.executor.run(repeat, ended)

    def restore(
        self, name: str | None = None, tables: list[str] | None = None, shards: dict[str, int] | None = None
    ) -> dict[str, object]:
        """Restore tables from a checkpoint, as :meth:`dps.ParameterServer.restore`."""
        procedure = self._controller.checkpoints.restore(
            RestoreRequest(self.disk.url, name, tables, shards=shards or {})
        )
        return msgspec.to_builtins(self._controller.executor.run(procedure))

    def observe(self, observer: Observer) -> None:
        """Call the methods of one more observer from now on."""
        self._network.observers.append(observer)

    # -- time and faults

    @property
    def _controller(self) -> SimController:
        """The controller that decides."""
        self._schedulers.look()
        return self._schedulers.current

    def start_scheduler(self) -> str:
        """Start another scheduler at the address of the first one; the name of its party.

        Servers come back to it when they have lost theirs, and its controller takes over. That needs a `journal`. Runs
        do not outlive their controller.
        """
        if not self._network.journal:
            raise InputError("without a journal no scheduler can take over: give Simulation journal=True")
        return self._schedulers.start(self._party).name

    @property
    def now(self) -> float:
        """Virtual seconds since the simulation began."""
        return self._world.now

    @property
    def steps(self) -> int:
        """The number of events so far."""
        return self._world.steps

    @property
    def trace(self) -> list[str]:
        """The last (at least 100,000) lines of the trace: the time, and a frame or a fault."""
        return self._world.trace

    @property
    def hit(self) -> set[str]:
        """Names of the parties that a fault has hit."""
        return self._mischief.hit

    def digest(self) -> str:
        """A hash of the whole trace: equal for two simulations if all their events were equal."""
        return self._world.digest()

    def sleep(self, seconds: float) -> None:
        """Let so many virtual seconds pass."""
        self.parties["driver"].sleep(seconds)

    def crash(self, party: str, at: float = 0.0, *, silent: bool = False) -> None:
        """End a party in `at` seconds; silent: as when its machine loses power, so that no connection is closed.

        `Faults.restart` seconds later a trainer is started again, as another attempt, and a server is replaced. A party
        of `submit` is not replaced.
        """
        self._at(at, lambda: self._crash(self._find(party), silent))

    def stop(self, party: str, seconds: float, at: float = 0.0) -> None:
        """Stop a party in `at` seconds, for `seconds`. Its connections stay open, and fill."""

        def stop() -> None:
            stopped = self._find(party)
            self._world.note("%s stops for %.6f s", stopped, seconds)
            self._mischief.hit.add(stopped.name)
            stopped.stop()
            self._at(seconds, stopped.go_on)

        self._at(at, stop)

    def part(
        self, some: Iterable[str], others: Iterable[str], seconds: float, at: float = 0.0, *, one_way: bool = False
    ) -> None:
        """Part two groups of parties in `at` seconds, for `seconds`: no message arrives, and no connection breaks.

        `one_way`: only messages from `some` to `others` are held up.
        """
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
        """Break all connections between two parties in `at` seconds.

        The two parties notice it after `notice` seconds; None: after the keep-alive time.
        """

        def snap() -> None:
            for wire in list(self._network.wires):
                names = [pipe.sender.host.name for pipe in wire.pipes]
                if sorted(names) == sorted((some, other)):
                    self._world.note("%s breaks, noticed after %s", wire, notice)
                    wire.snap(notice if names[0] == some else notice[::-1])

        self._at(at, snap)

    def scale(self, servers: int) -> None:
        """Change the number of servers, as :meth:`dps.ParameterServer.scale`; shards move as virtual time passes."""
        self._world.note("scale to %d servers", servers)
        controller = self._controller
        if self._autoscaling is not None:  # a user's number replaces it
            self._autoscaling.rule = None
        staying = sum(not server.leaving for server in controller.membership.servers.values())
        controller.workers.free += max(0, servers - staying)  # Dask finds the workers
        controller.change(controller.procedures.scale(servers))

    def retire(self, party: str) -> None:
        """Empty a server, then close it. Another server takes its place."""
        self._world.note("%s is to go", party)
        number = int(party.removeprefix("server-"))
        self._controller.workers.free += 1
        self._controller.party.spawn(self._controller.executor.run, self._controller.procedures.retire(number))

    def adapt(
        self,
        load: Callable[[float], tuple[float, float]],
        *,
        minimum: int = 1,
        maximum: float = math.inf,
        wait_count: int = 3,
        interval: float = 1.0,
        memory: float = math.inf,
    ) -> Callable[[], None]:
        """Let the number of servers follow a load, until the function that this returns is called.

        ``load(now)`` is how much all servers work together (in servers), and the bytes that they hold together.
        """
        controller = self._controller
        autoscaling = self._autoscaling = controller.autoscaling(load)
        rule = autoscaling.rule = AutoscalingRule(minimum, maximum, wait_count)
        autoscaling.memory = memory
        self._controller.party.spawn(controller.executor.run, autoscaling.follow(rule, interval))

        def end() -> None:
            autoscaling.rule = None

        return end

    def rest(self, timeout: float = 300.0) -> None:
        """Let time pass until faults are over and each shard has all its replicas; then assert that these are equal.

        Raises
        ------
        StuckError
            The cluster has not come to rest after `timeout` virtual seconds.
        AssertionError
            Replicas differ, or a server was given up although no fault had hit it.
        """
        until = self.now + timeout
        while (why := self._restless()) is not None:
            if self.now > until:
                raise StuckError(f"no rest within {timeout:g} virtual seconds: {why}")
            self.sleep(0.1)
        self._controller.compare()
        for _, text in self._controller.membership.events:
            party = text.partition(" on ")[2].removesuffix(" is silent")
            assert not text.endswith(" is silent") or party in self._mischief.hit, f"{text}, and no fault had hit it"

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
        if self._disk is not None:
            self._disk.close()

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def _at(self, seconds: float, function: Callable[[], object]) -> None:
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

    def _turn(self, until: float, job: SimJob) -> None:
        if self._world.now > until:
            run = self._controller.runs.known(job.number)
            state = run_status(run, self._controller.runs.now(), run.began, brief=True)
            raise StuckError(f"the run was not over after {self._timeout:g} virtual seconds: {state}")
        self._world.step()

    # -- faults of parties

    def _crash_one(self, draw: random.Random) -> None:
        """Crash a random trainer at work, or server whose shards have other replicas, if `Faults.restart` allows it."""
        if self.faults.restart is not None:
            clients = [task.party for task in self._submitted if not task.done]
            party = self._mischief.choose(self._actors.at_work() + self._controller.expendable() + clients)
            if party is not None:
                self._crash(party, draw.random() < 0.25)

    def _crash(self, party: Party, silent: bool) -> None:
        if party.dead:
            return
        self._world.note("%s crashes%s", party, " silently" if silent else "")
        self._mischief.hit.add(party.name)
        self._network.crash(party, silent)
        if party.name.startswith("server-"):
            notice = self.faults.keep_alive if silent else self._world.random.uniform(0, MAX_DASK_NOTICE_SECONDS)
            self._schedulers.remove_worker(party, notice)
            if self.faults.restart is not None:
                self._at(self.faults.restart, self._controller.workers.add)
        elif not party.name.startswith("controller"):
            self._actors.lost(party, self.faults.restart)

    def _change_servers(self, draw: random.Random) -> None:
        """Add a server, remove one, or replace one."""
        controller = self._controller
        number = draw.choice([n for n, s in controller.membership.servers.items() if not s.leaving])
        change = draw.choice((self.scale, self.scale, self.retire))
        try:
            if change == self.retire:
                self.retire(f"server-{number}")
            else:
                self.scale(controller.procedures.wanted + draw.choice((-1, 1)))
        except InputError:
            pass  # the tables' copies need all servers

    def _split_one(self, draw: random.Random) -> None:
        """Cut a table into twice or four times as many shards, or one shard in two."""
        self._try_to(self._controller.split, drawn_split(draw, self._controller.membership.specs.values()))

    def _merge_one(self, draw: random.Random) -> None:
        """Cut a table into half or a quarter of its shards, or merge one with the next."""
        self._try_to(self._controller.merge, drawn_merge(draw, self._controller.membership.specs.values()))

    def _change_loads(self, draw: random.Random) -> None:
        """Change the loads of shards, and even them out."""
        self.change_loads(draw.getrandbits(32))
        self._try_to(self.rebalance, ())

    def _try_to(self, change: Callable[..., object], how: tuple[object, ...] | None) -> None:
        """Change something in a party of its own, unless there is nothing to change."""
        if how is not None:
            self._controller.party.spawn(self._try, change, *how)

    @staticmethod
    def _try(change: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(DPSError):  # servers come and go, and a table may have other shards by now
            change(*args)

    def _break_disk(self, draw: random.Random) -> None:
        """Let every write to the store of checkpoints fail for a while."""
        seconds = self._mischief.fault_seconds()
        self._world.note("the disk breaks for %.6f s", seconds)
        self.disk.broken = True
        self._at(seconds, self.disk.repair)

    def _lose_answers(self, draw: random.Random) -> None:
        """Lose half of the answers of servers to the controller's calls for a while."""
        seconds = self._mischief.fault_seconds()
        self._world.note("answers of servers are lost for %.6f s", seconds)
        self._controller.lost_answers = 0.5
        self._at(seconds, self._keep_answers)

    def _keep_answers(self) -> None:
        self._controller.lost_answers = 0.0
