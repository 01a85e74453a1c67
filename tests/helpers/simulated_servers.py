"""A parameter server whose servers, controller and trainers are simulated, for the public `fit` of a model.

Data are cut and encoded by a Dask cluster, as for a real parameter server. Each run is one of the simulation, so a test
may kill a trainer or a server in the middle of it, or run its trainers twice, on virtual time and from a seed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from distributed import Client as DaskClient

import dps
from dps.engine.training import data as user_data
from dps.engine.training.data import Partitions, chosen, in_memory
from dps.testing import Faults, Simulation

LATENCY = (1e-4, 1e-4)


@dataclasses.dataclass(frozen=True)
class Harm:
    """What goes wrong in each run of a fit.

    Parameters
    ----------
    crash : tuple of str
        Parties that end, each once, in the first run that lasts long enough.
    at : sequence of float
        When, as shares of the longest run of an undisturbed fit.
    twice : bool
        At each of the times `at` a trainer is started once more, while its earlier attempt goes on.
    """

    crash: tuple[str, ...] = ()
    at: tuple[float, ...] = (0.5,)
    twice: bool = False

    def faults(self, seconds: float) -> Faults:
        """As the simulation wants it, for a run of so many virtual seconds."""
        plan = tuple((share * seconds, "twins") for share in self.at) if self.twice else ()
        return Faults(latency=LATENCY, plan=plan, restart=0.1 * seconds)


class SimulatedServers(dps.ParameterServer):
    """What models use of a parameter server, over a simulation.

    Parameters
    ----------
    client : distributed.Client
    trainers : int
        Of each run.
    harm : Harm
    seconds : float
        How long the longest run takes if nothing goes wrong, in virtual seconds; needed if there is harm.
    seed : int
    """

    def __init__(
        self, client: DaskClient, trainers: int, harm: Harm | None = None, seconds: float = 0.0, seed: int = 0
    ):
        self._dask, self._harm, self._seconds = client, harm or Harm(), seconds
        self._left = list(self._harm.crash)
        faults = self._harm.faults(seconds)
        self.sim = Simulation(seed, 3, trainers, copies=2, faults=faults, compute=0.05)
        self._made: dict[str, dps.Table] = {}
        self._client = self.sim.client()
        self.lengths: list[float] = []  # of the runs, in virtual seconds
        self.attempts: set[tuple[int, int, int]] = set()  # that began: run, trainer, attempt
        self.harmed: dict[str, int] = {}  # by party that ended: the number of the run

    def __enter__(self) -> SimulatedServers:
        self.sim.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.sim.__exit__(*exc)

    name = property(lambda self: "dps")
    closed = property(lambda self: False)
    copies = property(lambda self: 2)
    dask_client = property(lambda self: self._dask)

    def client(self) -> dps.Client:
        return self._client

    def table(self, name: str, *args: Any, **options: Any) -> dps.Table:
        spec = self.sim.table(name, *args, **options | {"dtype": np.dtype(options.get("dtype", "float32")).name})
        self._made[name] = dps.Table(spec, "dps", self.client)
        return self._made[name]

    def tables(self) -> dict[str, dps.Table]:
        return dict(self._made)

    def drop_table(self, table: str | dps.Table) -> None:
        del self._made[table if isinstance(table, str) else table.name]

    def register(self, function: Any) -> Any:
        return self.sim.register(function)

    def call(self, function: Any, table: Any, /, keys: Any = None, **arguments: Any) -> Any:
        return self._client.call(self.register(function), table, keys, **arguments)

    def export(self, table: dps.Table, format: str = "numpy", path: str | None = None) -> Any:  # noqa: A002
        keys = np.concatenate([[], *self._client.keys(table)]).astype(np.int64)
        return keys, self._client.pull(table, keys).reshape(len(keys), -1)

    def trainer_threads(self) -> dict[str, int]:
        return dict(self._dask.nthreads())

    def scatter(self, make: Any, count: int) -> list:
        makers = [functools.partial(make, number) for number in range(count)]
        return user_data.send(self._dask, makers, self.trainer_threads())

    def map_scattered(self, function: Any, futures: Sequence, *columns: Sequence) -> list:
        return user_data.send_mapped(self._dask, function, futures, *columns)

    def run(
        self,
        function: Any,
        data: Any,
        *,
        staleness: float = 0,
        args: tuple = (),
        kwargs: dict | None = None,
        reassign: bool = False,
        trainers: int | None = None,
        retries: int = 0,
        progress: bool | None = None,
        columns: Any = None,
    ) -> list:
        """A run of all trainers of the simulation; the simulation starts lost ones again, whatever `retries` is."""
        number = len(self.lengths)

        def noted(trainer: Any, parts: Sequence, *args: Any, **kwargs: Any) -> Any:
            if not any(run == number for run, _, _ in self.attempts):  # the first trainer of this run has begun
                for party, share in zip(list(self._left), self._harm.at, strict=False):
                    self.sim.crash(party, at=share * self._seconds)
            self.attempts.add((number, trainer.number, trainer.attempt))
            return function(trainer, parts, *args, **kwargs)

        if columns is not None:
            data = chosen(self._dask, data, columns)
        if in_memory(data):
            found = Partitions.sent(self._dask, data, set(), len(self.sim.parties))
        else:
            found = Partitions.of(self._dask, data)
        rows = [self._dask.gather(list(row)) for row in found.rows]
        parts = [tuple(row) if found.paired else row[0] for row in rows]
        began = self.sim.now
        made = self.sim.run(noted, parts, staleness=staleness, args=args, kwargs=kwargs, reassign=reassign)
        self.lengths.append(self.sim.now - began)
        self.harmed |= dict.fromkeys((party for party in self._left if party in self.sim.hit), number)
        self._left = [party for party in self._left if party not in self.sim.hit]
        return made
