"""ParameterServer: the user's handle. Start one, make tables, run training, ask how it is, close it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from distributed import get_client

from dps import config
from dps.display import PATIENCE, Status, Tables, dashboard_link, held, held_text, parameter_server_html
from dps.errors import (
    ClosedError,
    DPSError,
    InputError,
    NameInUseError,
)
from dps.names import check_name
from dps.scaling import Scaling, check_servers
from dps.state.initializers import Initializer, Zeros
from dps.state.ops import TableSpec, wants_finite
from dps.state.optimizers import Add, Optimizer
from dps.training import spark
from dps.training.columns import chosen, in_memory, scattered
from dps.training.open_run import OpenRun, checked_bound
from dps.training.run import check, launch, start

__all__ = ["ParameterServer"]


class ParameterServer(Scaling):
    """Parameter shards on dedicated workers of a Dask cluster.

    Parameters
    ----------
    client : distributed.Client or cluster
        The Dask cluster to live in. Servers go to workers that were started with ``--resources dps=1``; ordinary tasks
        are kept off these. Where no worker carries the resource, servers share ordinary workers.
    servers : int
        How many. A server that is lost is replaced as soon as there is a worker for it.
    copies : int
        How many servers hold each row of a table, unless the table says otherwise.
    name : str
        Parameter servers of different names in one cluster do not see each other.
    timeout : float, optional
        Seconds to wait for enough workers; ``dps.timeouts.start`` by default.

    Raises
    ------
    TooFewWorkersError
        Fewer suitable workers than servers.
    NameInUseError
        One of that name is there already: :meth:`attach` to it, or use :meth:`get_or_start`.

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

    def __init__(
        self,
        client: Any = None,
        servers: int = 1,
        *,
        copies: int = 1,
        name: str = "dps",
        timeout: float | None = None,
    ):
        check_name("parameter server", name)
        check_servers("servers", servers)
        if isinstance(copies, bool) or not isinstance(copies, int) or not 1 <= copies <= servers:
            raise InputError(f"copies is a whole number from 1 to the number of servers, {servers}, not {copies!r}")
        self._prepare(client, name)
        self.copies = copies
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
        check_name("parameter server", name)
        self = cls.__new__(cls)
        self._take_up(client, name)
        return self

    def _take_up(self, client: Any, name: str) -> None:
        self._prepare(client, name)
        try:
            self._attach(self._call("describe"))
            self._attached = True
        except BaseException:
            self._let_go()
            raise

    @classmethod
    def get_or_start(
        cls,
        client: Any = None,
        servers: int = 1,
        *,
        copies: int = 1,
        name: str = "dps",
        timeout: float | None = None,
    ) -> ParameterServer:
        """Attach to the parameter server of that name, or start it where there is none: for cells that run again.

        Parameters
        ----------
        client, servers, copies, name, timeout
            As for :class:`ParameterServer`. `servers` counts for a new one only, because the number of servers of a
            running one may have changed since (:meth:`scale`, :meth:`adapt`).

        Returns
        -------
        ParameterServer
            A started one is closed at the end of a ``with`` block; one that was there already is only detached.

        Raises
        ------
        NameInUseError
            The one that is there was started with another number of `copies`.
        TooFewWorkersError
            Fewer suitable workers than servers.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     ps = dps.ParameterServer.get_or_start(cluster)
        ...     ps.table("w", exist_ok=True).name
        ...     again = dps.ParameterServer.get_or_start(cluster)  # the cell runs a second time
        ...     again.table("w", exist_ok=True).id == ps.tables["w"].id
        ...     again.detach()
        ...     ps.close()
        'w'
        True
        """
        try:
            self = cls.attach(client, name)
        except ClosedError:
            try:
                return cls(client, servers, copies=copies, name=name, timeout=timeout)
            except NameInUseError:  # another process has started it since
                self = cls.attach(client, name)
        if self.copies != copies:
            there = self.copies
            self.detach()
            raise NameInUseError(
                f"parameter server {name!r} runs with copies={there}, not {copies}: ask for copies={there}, close it "
                "first, or take another name"
            )
        return self

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
        finite: bool | None = None,
        shards: int | None = None,
        copies: int | None = None,
        ack: str = "copies",
        exist_ok: bool = False,
    ) -> TableSpec:
        """Make a table.

        Parameters
        ----------
        name : str
            Unique in this parameter server; 1 to 200 printable characters.
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
        finite : bool, optional
            Refuse NaN and infinity, because one such value poisons its row for good. By default True for tables with an
            optimizer other than ``dps.Add()`` and ``dps.Assign()``, and False for those two. An int64 table is never
            checked: it cannot hold such values.
        shards : int, optional
            Slices; a power of two for keyed tables. By default ``dps.shards-per-server`` for each server that there is,
            or may come (:meth:`adapt` with a maximum).
        copies : int, optional
            How many servers hold each row: with R copies, R - 1 servers may die and nothing acknowledged is lost. By
            default what the parameter server was started with.
        ack : {"copies", "memory"}
            When a push is acknowledged: when all copies have it; or when one has, which is faster, and loses what the
            others had not yet got (milliseconds' worth) should that one die.
        exist_ok : bool
            Where there is a table of that name, return it with its rows as they are, provided that it was asked for in
            the same words; otherwise the error says what differs. A cell of a notebook can then run again.

        Returns
        -------
        TableSpec
            What was made.

        Raises
        ------
        NameInUseError
            There is a table of that name; with `exist_ok`, there is one that differs.
        InputError
            A value that a table cannot have.
        """
        # The default of `shards` follows the number of servers, which may change; that of `finite` may differ between
        # versions, and a table that a checkpoint has brought back keeps what it was made with.
        free = [name for name, value in (("shards", shards), ("finite", finite)) if value is None]
        optimizer = Add() if optimizer is None else optimizer
        finite = wants_finite(optimizer) if finite is None else finite
        if shards is None:
            wanted = self._most_servers() * config.count("shards-per-server")
            shards = 1 << (wanted - 1).bit_length() if rows is None else min(wanted, max(int(rows), 1))
        spec = TableSpec(name, rows, dim, dtype, optimizer, init or Zeros(), aggregate, finite, shards)
        spec = dataclasses.replace(spec, copies=self.copies if copies is None else copies, ack=ack)
        made = self._call("add_table", spec=json.dumps(spec.to_dict()), exist_ok=exist_ok, free=free)
        return TableSpec.from_dict({**json.loads(made["spec"]), "id": made["id"]})

    def drop(self, table: str) -> None:
        """Forget a table and its rows."""
        self._call("drop_table", table=check_name("table", table))
        if self._client is not None:
            self._client.forget_routes()  # another of that name may follow

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables there are."""
        tables = json.loads(self._call("describe")["tables"])
        return Tables((name, TableSpec.from_dict(table["spec"])) for name, table in tables.items())

    # -- work

    def run(
        self,
        function: Callable[..., Any],
        data: Any,
        *,
        staleness: float | str = 0,
        trainers: int | None = None,
        retries: int = 0,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        progress: bool | None = None,
        resume: bool = False,
        within: OpenRun | None = None,
        reassign: bool = False,
        by: str = "trainer",
        columns: Any = None,
    ) -> list[Any]:
        """Train: call ``function(trainer, partitions)`` on as many trainers as there are free threads, all at once.

        Parameters
        ----------
        function : callable
            Given a :class:`dps.Trainer` and the list of its partitions; runs in a Dask task where they lie.
        data : dask collection, list of futures or delayed values, RDD or DataFrame of Spark's, or data in memory
            A bag, array (row blocks) or dataframe; data that is persisted already is used where it lies. A tuple such
            as ``(X, y)`` gives partitions that are tuples. Of Spark's data, a partition is a list of records, or a
            pandas DataFrame, and the trainers are the tasks of one barrier stage. Data in memory (arrays, sparse
            matrices, pandas frames, lists, dicts of columns, tuples of these) is cut by rows into a partition for each
            trainer: as many as asked for, or as there are threads outside the servers. It is sent to the workers, to
            two of them each partition, so that the run survives the loss of one.
        staleness : int, math.inf or "auto"
            How many iterations the fastest trainer may lead the slowest: 0 is bulk-synchronous (BSP), s is
            stale-synchronous (SSP), ``math.inf`` is asynchronous. "auto" begins with 1, gives more while trainers wait
            for transient stragglers, and takes back what makes the loss worse (``trainer.log(loss=...)``).
            :attr:`staleness` changes it while the run goes on.
        trainers : int, optional
            Fewer than there are free threads (with Spark: slots).
        retries : int
            How often the function of a trainer may raise and be run again, as it is anyway when its worker dies. It is
            called from its beginning; :meth:`dps.Trainer.iterate` goes on where the clock stands. Spark runs all of
            them again when one has raised.
        args, kwargs
            More arguments for `function`.
        progress : bool, optional
            Show a progress bar; by default in terminals and notebooks.
        resume : bool
            Go on with the run that :meth:`restore` has brought back, where the checkpoint has it: with as many
            trainers, each at its clock and with its partitions. `function` and `data` are to be what they were. As in a
            trainer that is run again, :meth:`dps.Trainer.iterate` passes over what is done.
        within : OpenRun, optional
            Be one of several callers of a run that :meth:`open_run` has made, whose staleness counts.
        reassign : bool
            Lease the batches of each epoch to the trainers in portions, so that a slow one gets fewer of them. The
            clock, and with it the staleness, counts epochs; each batch counts once in each, whoever works on it. For
            Dask data, functions that go through it with :meth:`dps.Trainer.iterate`, and pushes that depend on the
            batch alone in which keys they name, and how many they are. See *Work re-assignment* in the documentation.
        columns : str, or list of names and of lists of names, optional
            Of a DataFrame of Dask, Spark or pandas, or a dict of columns: each partition is a tuple of numpy arrays,
            the same for all of them. A name gives an array [rows], a list of names within the list an array [rows,
            names]: ``columns=(["a", "b"], "y")``. One name alone gives an array instead of a tuple.
        by : {"trainer", "partition"}
            How results are listed. With "partition" the function returns a list with one result for each of its
            partitions, and the list that comes back has one for each partition of the data, in their order, whichever
            trainer had them.

        Returns
        -------
        list
            What `function` returned, by trainer; or the results of all partitions, by partition. Which partitions a
            trainer had is ``trainer.partition_numbers`` in the function: the same ones whenever the same data lies on
            the same workers and as many threads are free. (Data that is not persisted is computed anew for each run,
            perhaps elsewhere.)

        Raises
        ------
        InputError, InputTypeError
            Data that cannot be cut into partitions, or that has not these columns.
        Exception
            The first error of a trainer, with its own traceback; the others are stopped within seconds.
        TooFewWorkersError
            No free threads, or not all trainers could start.
        TrainerLostError
            A trainer was lost with its worker, and could not be run again within ``dps.timeouts.rejoin``, or not with
            its data.
        """
        check(staleness, trainers, retries, resume, within, reassign, by)
        about = self._call("describe")
        serving = {server["worker"] for server in about["servers"]}
        restored = json.loads(about["restored"])
        if columns is not None:
            data = chosen(self.dask_client, data, columns)
        options: dict[str, Any] = {
            "staleness": staleness,
            "trainers": trainers,
            "retries": retries,
            "args": args,
            "kwargs": kwargs or {},
            "progress": progress,
            "resume": resume,
            "restored": restored,
            "within": within,
            "by": by,
        }
        try:
            if spark.is_spark(data):
                if reassign:
                    raise InputError(
                        "reassign=True is for Dask data: trainers cannot fetch each other's Spark partitions"
                    )
                results = spark.launch(self.ticket, self._call, function, data, **options)
            else:
                options["reassign"] = reassign
                if in_memory(data):
                    data = scattered(self.dask_client, data, serving, trainers, restored if resume else None)
                results = launch(self.dask_client, self.ticket, self._call, function, data, **options)
        except BaseException:
            if within is None:
                with contextlib.suppress(DPSError):  # the run's own error counts
                    self._call("settle", keep=False)
            raise
        if within is None:
            self._call("settle", keep=True)
        return results

    def open_run(self, trainers: int, staleness: float | str = 0) -> OpenRun:
        """Begin a run for several callers: Dask tasks, Spark's tasks and plain processes, on one clock.

        Parameters
        ----------
        trainers : int
            How many trainers it has, of all callers together. All are waited for.
        staleness : int or math.inf
            As in :meth:`run`.

        Returns
        -------
        OpenRun
            For ``ps.run(..., within=run)``, which may be called from several threads, and ``run.trainer(name)``. At
            the end of a ``with`` block, or with ``run.close()``, the run ends.
        """
        check(staleness, trainers, 0, False, None)
        number = start(self._call, staleness, trainers=trainers)
        return OpenRun(self.ticket, number, trainers, staleness, self._call)

    @property
    def staleness(self) -> float | None:
        """The staleness bound of the run that goes on (or was the last); None before the first.

        While it is set automatically (``"auto"``), the bound that holds at the moment; ``"auto"`` of a run in
        :meth:`status` says whether it is.

        Set it while a run goes on, from another thread or another notebook (:meth:`attach`): a number, ``math.inf``
        or "auto", as in :meth:`run`. Trainers learn of it at their next tick; the change is among the events of
        :meth:`status`.

        Examples
        --------
        >>> import threading, time
        >>> import dask.bag as db
        >>> def train(trainer, partitions):
        ...     while trainer.staleness == 0:
        ...         trainer.tick()
        ...     return trainer.staleness
        >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         def later():
        ...             while ps.staleness is None:
        ...                 time.sleep(0.01)
        ...             ps.staleness = 4
        ...         thread = threading.Thread(target=later)
        ...         thread.start()
        ...         ps.run(train, db.from_sequence(range(2)), staleness=0)
        ...         thread.join()
        [4.0, 4.0]
        """
        runs = json.loads(self._call("snapshot"))["runs"]
        going = [run for run in runs if run["state"] == "running"] or runs
        return (math.inf if going[0]["staleness"] is None else going[0]["staleness"]) if going else None

    @staleness.setter
    def staleness(self, value: float | str) -> None:
        self._call("set_staleness", staleness=checked_bound(value))

    @property
    def dashboard_link(self) -> str | None:
        """The page of dps in Dask's dashboard, as a browser reaches it; None where the scheduler has no dashboard.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, processes=False, dashboard_address=":0") as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.dashboard_link.endswith("/dps")
        True
        """
        return dashboard_link(self.dask_client)

    def status(self) -> dict[str, Any]:
        """Servers (address, rows, bytes, requests), tables, runs (clocks, who waits) and stragglers, as plain values.

        Notebooks, IPython and rich show them as tables.
        """
        return Status.of(json.loads(self._call("status")))

    # -- the end

    def detach(self) -> None:
        """Let go of the servers without stopping them: :meth:`attach` takes them up again, here or elsewhere."""
        self._closing(self._let_go)

    def close(self) -> None:
        """Stop the servers, whoever started them; their rows are gone.

        Several threads may do so: one closes, and the others return when it has.
        """
        self._closing(self._close)

    def _close(self) -> None:
        try:
            with contextlib.suppress(OSError, ClosedError):
                self._call("close_session")
        finally:
            self._let_go()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return _handed_over, (self.name,)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *exc: object) -> None:
        (self.detach if self._attached else self.close)()

    def __repr__(self) -> str:
        if self.closed:
            return f"<dps.ParameterServer {self.name!r} (closed)>"
        try:
            about = self._call("describe", callback_timeout=PATIENCE)
        except DPSError as error:
            return f"<dps.ParameterServer {self.name!r} ({type(error).__name__})>"
        count = sum(server["alive"] for server in about["servers"])
        plural = "" if count == 1 else "s"
        said = f"{count} server{plural} in {self._scheduler_address()}"
        with contextlib.suppress(DPSError):  # the servers do not answer, and the controller does
            said += f", {held_text(held(json.loads(self._call('status', callback_timeout=PATIENCE))))}"
        return f"<dps.ParameterServer {self.name!r}: {said}>"

    def _repr_html_(self) -> str:
        return parameter_server_html(self)


def _handed_over(name: str) -> ParameterServer:
    """What a pickled one becomes: see :class:`HandedOver`."""
    self = HandedOver.__new__(HandedOver)
    self.name = name
    return self


class HandedOver(ParameterServer):
    """A handle that came by pickle, in the arguments of a Dask task for instance: an attached one.

    It attaches when it is first used and not before, because Dask unpickles arguments on the worker's event loop, which
    may not wait. In a worker it uses the worker's own client; elsewhere Dask's current one.
    """

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "name" not in self.__dict__ or "closed" in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        try:
            client = get_client()
        except ValueError as error:
            raise InputError(
                f"parameter server {self.name!r} was pickled, and there is no Dask client to attach with here: make "
                f"one, or pass ps.client(), which needs none"
            ) from error
        self._take_up(client, self.name)
        return getattr(self, attribute)
