"""ParameterServer: the user's handle. Start one, make tables, run training, ask how it is, close it."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

from distributed import Client as DaskClient
from distributed import Future

from dps import config
from dps.client import Client, Ticket
from dps.controller import Controller
from dps.errors import (
    ClosedError,
    ControllerGoneError,
    DPSError,
    InputError,
    InputTypeError,
    RequestTimeoutError,
    ServerGoneError,
)
from dps.server import Server
from dps.state.initializers import Initializer, Zeros
from dps.state.ops import TableSpec
from dps.state.optimizers import Add, Optimizer
from dps.training.run import launch

__all__ = ["ParameterServer"]


class ParameterServer:
    """Parameter shards on dedicated workers of a Dask cluster.

    Parameters
    ----------
    client : distributed.Client or cluster
        The Dask cluster to live in. Servers go to workers that were started with ``--resources dps=1``; ordinary tasks
        are kept off these. Where no worker carries the resource, servers share ordinary workers.
    servers : int
        How many.
    name : str
        Parameter servers of different names in one cluster do not see each other.
    timeout : float, optional
        Seconds to wait for enough workers; ``dps.timeouts.start`` by default.

    Raises
    ------
    TooFewWorkersError
        Fewer suitable workers than servers.
    NameInUseError
        One of that name is there already: :meth:`attach` to it.

    Examples
    --------
    >>> import dps
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     table = ps.table("w", optimizer=dps.SGD(0.5))
    ...     client = ps.client()
    ...     client.push("w", [1, 2], [1.0, -1.0])
    ...     client.pull("w", [1, 2, 3])
    array([-0.5,  0.5,  0. ], dtype=float32)
    >>> cluster.close()
    """

    def __init__(self, client: Any = None, servers: int = 1, *, name: str = "dps", timeout: float | None = None):
        _check_name(name)
        if isinstance(servers, bool) or not isinstance(servers, int) or not 1 <= servers <= 1024:
            raise InputError(f"servers is a whole number from 1 to 1024, not {servers!r}")
        self._prepare(client, name)
        try:
            self._start(servers, config.seconds("start") if timeout is None else timeout)
        except BaseException:
            self._let_go()
            raise

    @classmethod
    def attach(cls, client: Any, name: str = "dps") -> ParameterServer:
        """Take up one that is running, from any process with a Dask client: after a notebook's kernel went away, say.

        Parameters
        ----------
        client : distributed.Client or cluster
        name : str

        Returns
        -------
        ParameterServer
            At the end of a ``with`` block it only lets go (:meth:`detach`); :meth:`close` stops the servers.

        Raises
        ------
        ClosedError
            There is none of that name.
        """
        _check_name(name)
        self = cls.__new__(cls)
        self._prepare(client, name)
        try:
            self._attach(self._call("describe"))
            self._attached = True
        except BaseException:
            self._let_go()
            raise
        return self

    def _prepare(self, client: Any, name: str) -> None:
        self.name = name
        self.closed = False
        self._attached = False  # taken up, not started, by this handle: `with` then leaves the servers running
        self._own_client = client is not None and not isinstance(client, DaskClient)
        if client is None:
            self.dask_client: DaskClient = DaskClient.current()
        else:
            self.dask_client = DaskClient(client, set_as_default=False) if self._own_client else client
        if self.dask_client.asynchronous:
            raise InputTypeError("ParameterServer takes a synchronous Dask client: make it with asynchronous=False")
        self._client: Client | None = None
        self._futures: list[Future] = []
        try:
            self.dask_client.register_plugin(Controller())
        except ImportError as error:
            self._let_go()
            raise DPSError(f"the scheduler cannot import dps ({error}): install it there, in this version") from error
        except BaseException:
            self._let_go()
            raise

    def _start(self, servers: int, timeout: float) -> None:
        about = self._call("open", servers=servers, timeout=timeout)
        try:
            dedicated = {"resources": {"dps": 1}} if about["dedicated"] else {}
            for s in about["servers"]:
                args = (self.name, s["number"], about["secret"])
                pinned = {"workers": [s["worker"]], "key": s["key"], **dedicated}
                self._futures.append(self.dask_client.submit(Server, *args, actor=True, **pinned))
            self._admit(timeout)
            actors = [future.result(timeout) for future in self._futures]
            addresses = [json.loads(actor.address().result(timeout)) for actor in actors]
            self._call("serve", addresses=addresses)
        except BaseException:
            with contextlib.suppress(Exception):
                self._call("close_session")
            raise
        self._attach(about)

    def _admit(self, timeout: float) -> None:
        """Let the servers' actors, and only them, onto the cordoned workers."""
        keys = [future.key for future in self._futures]
        patience = config.seconds("start") + timeout
        until = time.monotonic() + patience
        while not all(future.done() for future in self._futures):
            self._call("admit", named=False, keys=keys)
            for server in self._call("describe")["servers"]:
                if not server["alive"]:
                    raise ServerGoneError(
                        f"worker {server['worker']} was lost while server {server['number']} started on it; see its "
                        f"log. Is dps installed there, in this version?"
                    )
            if time.monotonic() > until:
                raise RequestTimeoutError(f"the servers of {self.name!r} were not up within {patience:g} s")
            time.sleep(0.02)

    def _attach(self, about: dict[str, Any]) -> None:
        host, port = about["controller"]
        security = self.dask_client.security if self._scheduler_address().startswith("tls://") else None
        self.ticket = Ticket(self.name, (host, port), about["secret"], security)
        self.servers = len(about["servers"])

    def _call(self, verb: str, named: bool = True, **fields: Any) -> Any:
        """Ask the controller, over Dask's control plane."""
        if self.closed:
            raise ClosedError(f"parameter server {self.name!r} was closed")
        if self.dask_client.scheduler is None:
            raise ClosedError(
                f"the Dask client that parameter server {self.name!r} was started with is closed; with another one, "
                f"dps.ParameterServer.attach(client, {self.name!r}) takes it up"
            )
        if named:
            fields["name"] = self.name
        try:
            return self.dask_client.sync(getattr(self.dask_client.scheduler, f"dps_{verb}"), **fields)
        except (DPSError, KeyboardInterrupt):
            raise
        except (OSError, RuntimeError) as error:  # RuntimeError: the Dask client has given up, or was closed
            raise ControllerGoneError(f"the scheduler did not answer dps_{verb}: {error}") from error

    # -- tables

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
        finite: bool = False,
        shards: int | None = None,
    ) -> TableSpec:
        """Make a table.

        Parameters
        ----------
        name : str
            Unique in this parameter server.
        dim : int
            Values in a row.
        rows : int, optional
            Number of rows of a dense table (keys 0 to rows - 1). Without it the table is keyed: any int64 is a key, and
            a row comes to life at its first push.
        dtype : dtype
            float32, float64 or int64.
        optimizer : Optimizer, optional
            What the servers do with a push: ``dps.Add()`` by default, ``dps.SGD(0.1)``, ``dps.FTRL(...)``, ...
        init : Initializer, optional
            Values of rows before their first push; zeros by default.
        aggregate : {None, "sum", "mean"}
            For runs with staleness 0: collect the pushes of a clock, and step the optimizer once with their sum or
            mean.
        finite : bool
            Refuse NaN and infinity.
        shards : int, optional
            Slices; a power of two for keyed tables. By default ``dps.shards-per-server`` for each server.

        Returns
        -------
        TableSpec
            What was made.

        Raises
        ------
        NameInUseError, InputError
        """
        if shards is None:
            wanted = self.servers * config.count("shards-per-server")
            shards = 1 << (wanted - 1).bit_length() if rows is None else min(wanted, max(int(rows), 1))
        spec = TableSpec(name, rows, dim, dtype, optimizer or Add(), init or Zeros(), aggregate, finite, shards)
        made = self._call("add_table", spec=json.dumps(spec.to_dict()))
        return TableSpec.from_dict({**spec.to_dict(), "id": made["id"]})

    def drop(self, table: str) -> None:
        """Forget a table and its rows."""
        self._call("drop_table", table=table)
        if self._client is not None:
            self._client.forget_routes()  # another of that name may follow

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables there are."""
        tables = json.loads(self._call("describe")["tables"])
        return {name: TableSpec.from_dict(table["spec"]) for name, table in tables.items()}

    # -- work

    def client(self) -> Client:
        """A client without a clock: for the driver, a notebook, or to be shipped into Dask tasks (it pickles)."""
        if self.closed:
            raise ClosedError(f"parameter server {self.name!r} was closed")
        if self._client is None or self._client._closed:
            self._client = Client(self.ticket)
        return self._client

    def run(
        self,
        function: Callable[..., Any],
        data: Any,
        *,
        staleness: float = 0,
        trainers: int | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[Any]:
        """Train: call ``function(trainer, partitions)`` on as many trainers as there are free threads, all at once.

        Parameters
        ----------
        function : callable
            Given a :class:`dps.Trainer` and the list of its partitions; runs in a Dask task where they lie.
        data : dask collection, tuple of them, or list of futures or delayed values
            A bag, array (row blocks) or dataframe; data that is persisted already is used where it lies. A tuple such
            as ``(X, y)`` gives partitions that are tuples.
        staleness : int or math.inf
            How many iterations the fastest trainer may lead the slowest: 0 is bulk-synchronous (BSP), s is
            stale-synchronous (SSP), ``math.inf`` is asynchronous.
        trainers : int, optional
            Fewer than there are free threads.
        args, kwargs
            More arguments for `function`.
        progress : bool, optional
            Show a progress bar; by default in terminals and notebooks.

        Returns
        -------
        list
            What `function` returned, by trainer.

        Raises
        ------
        Exception
            The first error of a trainer, with its own traceback; the others are stopped within seconds.
        TooFewWorkersError
            No free threads, or not all trainers could start.
        TrainerLostError
            A trainer vanished.
        """
        serving = {server["worker"] for server in self._call("describe")["servers"]}
        try:
            results = launch(
                self.dask_client,
                self.ticket,
                self._call,
                serving,
                function,
                data,
                staleness=staleness,
                trainers=trainers,
                args=args,
                kwargs=kwargs or {},
                progress=progress,
            )
        except BaseException:
            with contextlib.suppress(DPSError):  # the run's own error counts
                self._call("settle", keep=False)
            raise
        self._call("settle", keep=True)
        return results

    def status(self) -> dict[str, Any]:
        """Servers (address, rows, bytes, requests), tables and runs (clocks, who waits), as plain values."""
        return json.loads(self._call("status"))

    # -- the end

    def detach(self) -> None:
        """Let go of the servers without stopping them: :meth:`attach` takes them up again, here or elsewhere."""
        if not self.closed:
            self._let_go()

    def close(self) -> None:
        """Stop the servers, whoever started them; their rows are gone."""
        if self.closed:
            return
        try:
            with contextlib.suppress(OSError, ClosedError):
                self._call("close_session")
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self.closed = True
        if self._client is not None:
            self._client.close()
        for future in self._futures:
            with contextlib.suppress(Exception):
                future.release()
        self._futures.clear()
        if self._own_client:
            self.dask_client.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *exc: object) -> None:
        (self.detach if self._attached else self.close)()

    def __repr__(self) -> str:
        if self.closed:
            return f"<dps.ParameterServer {self.name!r} (closed)>"
        plural = "s" if self.servers > 1 else ""
        return f"<dps.ParameterServer {self.name!r}: {self.servers} server{plural} in {self._scheduler_address()}>"

    def _scheduler_address(self) -> str:
        return str(self.dask_client.scheduler_info(n_workers=0).get("address", ""))


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise InputError(
            f"a parameter server's name is 1 to 64 letters, digits, dots, dashes or underscores, not {name!r}"
        )
