"""Server: the Dask actor that holds shards. What it does is `serving.py`; here it is given a worker and a thread.

It lives on a dedicated Dask worker and opens an endpoint of its own (`wire/endpoint.py`). Its methods are the control
plane, called by the controller through Dask; they run on the worker's actor thread and hand every change of state to
the endpoint's thread. pull, push and what the servers say among themselves arrive at the endpoint.
"""

from __future__ import annotations

import atexit
import dataclasses
import gc
import json
import multiprocessing
import threading
import time
from typing import Any

from distributed import get_worker

from dps import config
from dps.checkpoint import Store
from dps.copies import Waiter
from dps.dask_side import host_of, linking_tls, listening_tls
from dps.errors import MovedError
from dps.host import host_load, starved
from dps.meters import Meters, process_usage
from dps.once import Once
from dps.restore import Origins, SavedShard, fill
from dps.saving import Saver
from dps.serving import Serving
from dps.state.ops import TableSpec
from dps.state.warm import warm
from dps.wire.endpoint import Endpoint
from dps.wire.session import of_servers

__all__ = ["Server"]

LOOK = 0.25  # seconds between two looks whether the worker is still there


class Server:
    """Holds shards of the tables of one parameter server, and answers pulls and pushes.

    Parameters
    ----------
    session : str
        Name of the parameter server.
    number : int
        Which of its servers this is.
    secrets : (str, str)
        What clients have to know, and what servers have to.
    controller : (str, int)
        Where the controller listens.
    """

    def __init__(self, session: str, number: int, secrets: tuple[str, str], controller: tuple[str, int]):
        worker = get_worker()
        self._closing = Once(f"closing server {number}")
        if multiprocessing.parent_process() is not None:
            # A process that ends takes all that numba has compiled apart, object by object. That is most of its end,
            # and on a busy machine longer than the 4 s for which its nanny waits.
            atexit.register(gc.freeze)
        for spec in (TableSpec("warm"), TableSpec("warm", rows=4)):
            warm(spec)
        name, host = f"server-{session}-{number}", host_of(worker.address)
        self.endpoint = Endpoint(name, host, {}, tls=listening_tls(worker), connecting=linking_tls(worker))
        meters = Meters(time.perf_counter, process_usage, self.endpoint.waiting, starved, host_load)
        self.serving = Serving(self.endpoint, session, number, secrets[1], (controller[0], controller[1]), meters)
        self.saver = Saver(self.serving, self.endpoint)
        self.endpoint.call(self._begin, session, secrets, worker)

    def _begin(self, session: str, secrets: tuple[str, str], worker: Any) -> None:
        self.endpoint.handlers.update(self.serving.handlers)
        self.endpoint.secrets.update(zip((session, of_servers(session)), secrets, strict=True))
        self.serving.start()
        self._end_with(worker)

    def _end_with(self, worker: Any) -> None:
        """Stop when the worker has closed: where it is no process of its own, our thread would go on without it."""
        if worker.status.name in ("closed", "failed"):
            self.saver.end(None)
            self.serving.stop()
            self.endpoint.loop.stop()
        else:
            self.endpoint.later(LOOK, self._end_with, worker)

    def create_table(self, spec: dict[str, Any], shards: list[int]) -> None:
        """Make a new table with initial copies of these shards; it is served when the placement says so."""
        table = TableSpec.from_dict(spec)
        warm(table)
        self.endpoint.call(self.serving.create, table, list(shards))

    def drop_table(self, table: int) -> None:
        """Forget a table and its rows."""
        self.endpoint.call(self.serving.drop, table)

    def settle(self, keep: bool | None, over: list[list[int]]) -> str:
        """A run has ended: see :meth:`dps.serving.Serving.settle`. The shards that were settled, as JSON."""
        done = threading.Event()

        def settle() -> tuple[list[tuple[int, int]], Waiter]:
            shards, waiter = self.serving.settle(keep, over)
            waiter.then(done.set)
            return shards, waiter

        shards, waiter = self.endpoint.call(settle)
        if not done.wait(config.seconds("request")) or waiter.error is not None:
            why = waiter.error or f"it was not confirmed within {config.limit('request')}"
            raise MovedError(f"server {self.serving.number}: a run's end has not reached all copies: {why}")
        return json.dumps(shards)

    def cut(self, tables: list[int], clock: int | None, parent: str | None, track: bool) -> str:
        """Begin a checkpoint: see :class:`dps.saving.Saver`. The shards that are cut, as JSON."""
        return json.dumps(self.endpoint.call(self.saver.cut, tables, clock, parent, track))

    def complete(self) -> None:
        """The cut is complete."""
        self.endpoint.call(self.saver.complete)

    def save(self, url: str, name: str, storage_options: dict[str, Any]) -> None:
        """Begin to write it."""
        self.saver.save(url, name, storage_options)

    def saved(self) -> str:
        """The files, as JSON; null before they are all written."""
        files = self.saver.saved()
        return json.dumps(None if files is None else [dataclasses.asdict(file) for file in files])

    def end_cut(self, name: str | None) -> None:
        """The checkpoint was committed, or given up: then nothing more is written."""
        self.endpoint.call(self.saver.end, name)
        self.saver.rest()

    def load(
        self,
        table: int,
        url: str,
        name: str,
        shards: list[int],
        origins: tuple[Any, ...],
        storage_options: dict[str, Any],
    ) -> None:
        """Fill copies of a new table, not served yet, from a checkpoint."""
        copies = self.serving.tables[table].copies
        store = Store(url, storage_options=storage_options)
        chain = store.chain(name)
        for number in shards:
            fill(copies[number].shard, SavedShard(store, chain, copies[number].spec.name, number), Origins(*origins))

    def status(self) -> str:
        """Tables, rows and bytes, as JSON."""
        return json.dumps(self.endpoint.call(self.serving.describe))

    def close(self) -> None:
        """Stop serving; the endpoint's thread ends."""
        self._closing(self._close)

    def _close(self) -> None:
        self.saver.close()
        self.endpoint.call(self.serving.stop)
        self.endpoint.stop()
