"""ParameterServer: the user's handle. Start one, make tables, run training, ask how it is, close it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from distributed import Client as DaskClient
from distributed import Future

from dps import config
from dps.engine.client.client import Client
from dps.engine.client.forgotten import ForgottenKeys
from dps.engine.client.table import Table, name_of
from dps.engine.client.ticket import Ticket
from dps.engine.client.verbs import Keys, TableLike
from dps.engine.client.word_table import WordTable
from dps.engine.dashboard.notebook import (
    PATIENCE_SECONDS,
    NotebookStatus,
    TablesView,
    dashboard_link,
    held_text,
    parameter_server_html,
)
from dps.engine.driver.adaptive import adapt_rule, check_servers, most_servers
from dps.engine.driver.archive import (
    export_table,
    restore,
    schedule_checkpoints,
    take_checkpoint,
    write_report,
    write_timeline,
)
from dps.engine.driver.connection import DaskLike, DeferredConnection, DriverConnection
from dps.engine.driver.mapping import mapped
from dps.engine.driver.running import train
from dps.engine.driver.vocabularies import made_vocabulary
from dps.engine.driver.worker_scaling import ScalableCluster, ServerWorkers, adapt_status, check_cluster
from dps.engine.functions.definition import Function as ServerFunction
from dps.engine.functions.deletion import deleting
from dps.engine.state.caching import Cache, cache_of
from dps.engine.state.columns import Column, parts_of_table
from dps.engine.state.initializers import Initializer
from dps.engine.state.life import AdmitByCount, Expiry, life_of
from dps.engine.state.names import check_name, table_name
from dps.engine.state.ops import TableSpec, usual_shards, wants_finite
from dps.engine.state.optimizers import Optimizer
from dps.engine.state.partitioning import Partition, partition_of
from dps.engine.state.wire_format import Wire, wire_of
from dps.engine.telemetry.rebalance_report import RebalanceReport
from dps.engine.telemetry.snapshot import Status
from dps.engine.training import data as user_data
from dps.engine.training.launch import RunOptions, checked_reassign, resuming, start
from dps.engine.training.open_run import OpenRun, checked_bound
from dps.engine.training.types import Columns, Data, Function, Json, Options, Result
from dps.errors import ClosedError, DPSError, InputError, NameInUseError, UnknownTableError

__all__ = ["ParameterServer"]

Connection = DriverConnection | DeferredConnection


class ParameterServer:
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
        A parameter server of that name is there already: :meth:`attach` to it, or use :meth:`get_or_start`.

    Examples
    --------
    >>> import dps
    >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
    >>> with dps.ParameterServer(cluster) as ps:
    ...     w = ps.table("w", optimizer=dps.SGD(0.5))
    ...     w.push([1, 2], [1.0, -1.0])
    ...     w.pull([1, 2, 3])
    array([-0.5,  0.5,  0. ], dtype=float32)
    >>> cluster.close()
    """

    def __init__(
        self,
        client: DaskLike = None,
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
        self._connection: Connection = DriverConnection(client, name)
        self._server_workers = ServerWorkers()
        self._connection.start(servers, copies, config.seconds("start") if timeout is None else timeout)

    @classmethod
    def over(cls, connection: Connection) -> ParameterServer:
        """A handle over a connection that there is.

        Parameters
        ----------
        connection : DriverConnection or DeferredConnection
        """
        self = cls.__new__(cls)
        self._connection, self._server_workers = connection, ServerWorkers()
        return self

    # -- what it is

    @property
    def connection(self) -> Connection:
        """The connection to its controller, for what has no method here."""
        return self._connection

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self._connection.name

    @property
    def ticket(self) -> Ticket:
        """What a client needs to use it."""
        return self._connection.ticket

    @property
    def copies(self) -> int:
        """How many servers hold each row of a table, unless the table says otherwise."""
        return self._connection.copies

    @property
    def closed(self) -> bool:
        """Whether this handle was closed or detached."""
        return self._connection.closed

    @property
    def dask_client(self) -> DaskClient:
        """The Dask client over which it was started or attached."""
        return self._connection.dask_client

    def client(self) -> Client:
        """A client without a clock: for the driver, a notebook, or to be shipped into Dask tasks (it pickles).

        Each thread gets one of its own, and so do :meth:`call` and the tables that :meth:`table` returns. So a long
        call in one thread keeps no other thread waiting. Asynchronous calls of one client reach each shard in the order
        in which they were made; a thread that relies on those of another thread waits for their results.

        Returns
        -------
        Client
            The same one to a thread, until it is closed.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps, ThreadPoolExecutor(1) as pool:
        ...         ps.client() is ps.client(), ps.client() is pool.submit(ps.client).result()
        (True, False)
        """
        return self._connection.client()

    @classmethod
    def attach(cls, client: DaskLike, name: str = "dps", *, force: bool = False) -> ParameterServer:
        """Take up one that is running, from any process with a Dask client: after a notebook's kernel went away, say.

        Parameters
        ----------
        client : distributed.Client or cluster
        name : str
        force : bool
            Go on although most of the servers that kept its journal are gone: after the death of its scheduler with
            those that are back, or else with those that are up, if it waits for others. Shards whose copies were all on
            the others are lost, and so is what the others alone knew. Only after you have seen to it that the other
            servers, and an old scheduler, are gone for good: if they live, they may go on by themselves, and what is
            pushed to them is lost.

        Returns
        -------
        ParameterServer
            At the end of a ``with`` block it only lets go (:meth:`detach`); :meth:`close` stops the servers.

        Raises
        ------
        ClosedError
            There is none of that name.
        """
        connection = DriverConnection(client, check_name("parameter server", name))
        connection.attach(force)
        return cls.over(connection)

    @classmethod
    def get_or_start(
        cls,
        client: DaskLike = None,
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
        ...     again.table("w", exist_ok=True) == ps.tables()["w"]
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
        if (there := self.copies) != copies:
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
        dim: int | None = None,
        *,
        rows: int | None = None,
        dtype: npt.DTypeLike = "float32",
        optimizer: Optimizer | None = None,
        init: Initializer | None = None,
        columns: Mapping[str, Column] | None = None,
        aggregate: str | None = None,
        finite: bool | None = None,
        shards: int | None = None,
        copies: int | None = None,
        ack: str = "copies",
        partition: Partition | Callable[[np.ndarray], np.ndarray] | None = None,
        expire: Expiry | Sequence[Expiry] | None = None,
        max_bytes: int | str | None = None,
        evict: str | Callable[[np.ndarray, np.ndarray, np.ndarray], npt.ArrayLike] | None = None,
        admit: AdmitByCount | str | None = None,
        remember: bool | int = False,
        fixed_shards: bool = False,
        staleness: float | None = None,
        wire: Wire | str | None = None,
        cache: Cache | str | int | None = None,
        reads: str = "primary",
        exist_ok: bool = False,
    ) -> Table:
        """Make a table.

        Parameters
        ----------
        name : str
            Unique in this parameter server; 1 to 200 printable characters.
        dim : int, optional
            Values in a row; 1 by default.
        rows : int, optional
            Number of rows of a dense table (keys 0 to rows - 1). Without it the table is keyed: any int64 is a key, and
            a row comes to life at its first push.
        dtype : dtype
            float32, float64, int64, int32, int16, uint8, float16 or bfloat16 (which needs ``ml_dtypes``). Whole numbers
            go with ``dps.Add()`` and ``dps.Assign()``; sums that the dtype cannot hold wrap around, as numpy's do.
            Numbers of 16 bits are stepped in float32, with a state of float32, and rounded once. ``"S32"``: each row
            is a value of up to 32 bytes, which is assigned, pulled and deleted.
        optimizer : Optimizer, optional
            What the servers do with a push: ``dps.Add()`` by default, ``dps.SGD(0.1)``, ``dps.FTRL(...)``, ...
        init : Initializer, optional
            Values of rows before their first push; zeros by default.
        columns : dict of Column, optional
            In place of `dim`, `optimizer` and `init`: the columns of a row by name, each a :class:`dps.Column` with its
            own dim, initializer and optimizer. A push takes a dict with values for all columns, and the handle's
            `columns` says where each lies in a row that was pulled.
        aggregate : {None, "sum", "mean"}
            For runs with staleness 0: collect the pushes of a clock, and step the optimizer once with their sum or
            mean.
        finite : bool, optional
            Refuse NaN and infinity, because one such value poisons its row for good. By default True for tables with an
            optimizer other than ``dps.Add()`` and ``dps.Assign()``, and False for those two. A table of whole
            numbers is never checked: it cannot hold such values.
        shards : int, optional
            Slices; a power of two for keyed tables. By default ``dps.shards-per-server`` for each server that there is,
            or may come (:meth:`adapt` with a maximum).
        copies : int, optional
            How many servers hold each row: with R copies, R - 1 servers may die and nothing acknowledged is lost. By
            default what the parameter server was started with.
        ack : {"copies", "memory"}
            When a push is acknowledged: when all copies have it; or when one has, which is faster, and loses what the
            others had not yet got (milliseconds' worth) should that one die.
        partition : Partition or callable, optional
            Which keys of a keyed table lie together on one shard, and so on one server: :class:`dps.BlockPartition`,
            :class:`dps.FieldPartition`, :class:`dps.RangePartition`, or ``function(keys)``, which returns a whole
            number for each int64 key: keys with the same number lie together. The function must return the same for a
            key, always. Clients and servers call it for the keys of each request, so it has to be fast; it travels with
            the table, also into checkpoints, as :class:`dps.Optimizer` of your own do. By default each key is placed by
            its own hash.
        expire : Expiry or sequence of Expiry, optional
            Which rows of a keyed table go by themselves: :class:`dps.ExpireUnused` and :class:`dps.ExpireSmall`. By
            default rows stay until they are deleted.
        max_bytes : str or int, optional
            How many bytes the rows of a keyed table may take, with their state and with the index of their keys:
            ``"1 GiB"``, or a number. The bytes are those of one copy, on all servers together; each shard has an equal
            part.
        evict : {"lru", "lfu", "norm", "refuse", "spill"} or callable, optional
            What happens when they are full. The rows go that were not used for longest (the default), that were used
            least often, or whose values have the smallest Euclidean norm; ``"refuse"`` refuses pushes of new keys. With
            ``"spill"`` no row is lost: those that were not used for longest go to files of the servers, and come back
            when they are pulled or pushed; `max_bytes` is for memory then, with 20 bytes for each key in a file. Of a
            function ``f(values, uses, idle)`` rows with the lowest numbers go: it is given the values [m, dim] of some
            rows, about how often each was used, and for how many seconds it was not. Servers call it in their loops, a
            few thousand rows at a time, so it has to be fast; where it fails, pushes of new keys are refused. A row
            that went is as if it had never been: its next push begins anew.
        admit : AdmitByCount or "never", optional
            Which pushes make a row of a keyed table that is not there: :class:`dps.AdmitByCount`. ``"never"`` freezes
            the set of rows: only `assign`, functions and a restore make rows. By default the first push does.
        remember : bool or int
            Keep the keys of rows that went by themselves, for :meth:`forgotten`: the last ones, so many in all shards
            together; True means ``dps.limits.remembered-keys``. They take 9 bytes each, also of `max_bytes`.
        fixed_shards : bool
            The table keeps its number of shards, because a program lays rows out by them: :meth:`split` refuses it.
        staleness : int or math.inf, optional
            The most that trainers' reads of this table may be stale: in a run of staleness S, a trainer at clock c sees
            every push to it that any trainer made before clock ``c - min(S, staleness)``. By default, and with
            ``math.inf``, that of the run. It only ever tightens: for a looser table, give the run the larger staleness
            and the other tables smaller ones. A trainer that is ahead of the others waits before such a read, and not
            at its tick; this holds for `pull` and its kin, `push_pull`, functions and `keys`. It does not hold for
            clients, which have no clock, for rows that a loop keeps (``n_fetch=``), and in
            :func:`dps.map_partitions_with_ps`, whose trainers never wait. :meth:`set_staleness` changes it.
        wire : Wire, "auto" or "lists", optional
            In which numbers rows of float32 travel between trainers and servers: :class:`dps.Wire`. ``"auto"``: between
            machines, each trainer measures rows as they are, with numbers for lists of keys, and in half the bytes
            (bfloat16), and goes on with what takes the least time; its choice is among the events of :meth:`status`.
            Which it is depends on measured times, so two runs need not have the same bits. Within one machine rows
            travel as they are. ``"lists"`` loses nothing: between machines, lists of keys that come again have numbers.
            By default all travels as it is.
        cache : Cache, int or str, optional
            How many bytes of rows the trainers of a process keep, and so need not pull again while the staleness of
            the run allows it: ``"64 MiB"``, or a :class:`dps.Cache`. By default none.
        reads : {"primary", "copies"}
            Which copies answer pulls: one of each shard, its primary; or all, so that pulls of a hot shard spread over
            the links of its servers. The promises are the same: a backup first asks the primary how far it has to be,
            so that a small pull takes longer, and large pulls gain where links are full. While a client has pushes to
            the table that are not acknowledged (`push_async`), its pulls go to the primaries, as do slices of keys,
            pulls with ``born=True`` and `keys`. ``"copies"`` needs ``copies=2`` or more and ``ack="copies"``, and does
            not go with `aggregate`, `expire`, `max_bytes`, `admit` and `remember`.
        exist_ok : bool
            Where there is a table of that name, return it with its rows as they are, provided that it was asked for in
            the same words; otherwise the error says what differs. A cell of a notebook can then run again, also when
            the table was split or merged meanwhile, by itself perhaps.

        Returns
        -------
        Table
            A handle: ``w.pull(keys)``, ``w.push(keys, values)``, ``w[keys]``, ... through :meth:`client`. Its ``spec``
            is the definition of the table.

        Raises
        ------
        NameInUseError
            There is a table of that name; with `exist_ok`, there is one that differs.
        InputError
            A value that a table cannot have.
        """
        # because the default of `shards` follows the number of servers, and that of `finite` the version of dps
        free = [name for name, value in (("shards", shards), ("finite", finite)) if value is None]
        dim, optimizer, init = parts_of_table(name, dim, optimizer, init, columns)
        finite = wants_finite(optimizer) if finite is None else finite
        if shards is None:
            shards = usual_shards(most_servers(self._connection.describe()) * config.count("shards-per-server"), rows)
        copies = self.copies if copies is None else copies
        kept = config.count("limits.remembered-keys") if remember is True else remember or 0
        spec = TableSpec(name, rows, dim, cast(str, dtype), optimizer, init, aggregate, finite, shards, copies, ack)
        life, bound = life_of(expire, max_bytes, evict, admit, kept), cast("int | None", staleness)
        spec = dataclasses.replace(spec, partition=partition_of(partition), life=life, staleness=bound, reads=reads)
        spec = dataclasses.replace(spec, fixed_shards=bool(fixed_shards), wire=wire_of(wire), cache=cache_of(cache))
        fields = msgspec.msgpack.encode(spec.to_dict(), enc_hook=plain)
        made = self._connection.call("add_table", spec=fields, exist_ok=exist_ok, free=free)
        return self._handle(TableSpec.from_dict(msgspec.msgpack.decode(made)))

    def _handle(self, spec: TableSpec) -> Table:
        return Table(spec, self.name, self._connection.client)

    def vocabulary(
        self,
        name: str,
        *,
        width: int | None = None,
        lanes: int | None = None,
        counts: bool = False,
        copies: int | None = None,
    ) -> WordTable:
        """The vocabulary of that name: text to int64 ids, and back. It is made, if there is none.

        Ids are small whole numbers that index an embedding, in place of hashes: of n words with l lanes, they are below
        about ``n + 4 sqrt(l n) + l``. The words lie in a table of that name, and their counts in ``name.counts``.

        Parameters
        ----------
        name : str
            Of the table, which is keyed, of int64, and not to be pushed to by hand.
        width : int, optional
            Bytes of the longest word, a multiple of 8 up to 248; 56 by default. A word takes twice so many bytes on the
            servers, and 80 bytes more.
        lanes : int, optional
            Into how many parts ids are dealt, a power of two up to 1024; 32 by default. The shards of the table have
            equal parts of them. With one lane the ids are 0, 1, 2, ... without a gap, on one shard.
        counts : bool
            Keep how often a word is seen (:meth:`dps.WordTable.count`).
        copies : int, optional
            As for :meth:`table`.

        Returns
        -------
        WordTable
            Its calls go through :meth:`client`. In a run, ``trainer.vocabulary(name)``.

        Raises
        ------
        InputError
            `width` or `lanes` that cannot be; a table of that name is no vocabulary.
        NameInUseError
            The vocabulary there is differs from what was asked for.

        Examples
        --------
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     words = ps.vocabulary("words", lanes=1, counts=True)
        ...     words.count(["a", "rose", "is", "a", "rose"]), words.counts([0, 1, 2])
        (array([0, 1, 2, 0, 1]), array([2, 2, 1]))
        >>> cluster.close()
        """
        return made_vocabulary(self, name, width, lanes, counts, copies)

    def split(self, table: TableLike, shards: int | None = None, *, shard: int | None = None) -> Table:
        """Cut a table into more shards, while training goes on.

        More servers can share the work of a table that has more shards; if one shard is hot, it is enough to divide
        that one (``shard=``). Each server divides the rows that it has, so no
        row travels; then shards move until all servers have equally many. Pulls and pushes go on while the rows are
        divided, more slowly, which takes some seconds for a gigabyte on a server. Then clients and trainers wait for
        those rows that have changed meanwhile, for tens of milliseconds mostly, and go on by themselves: each of their
        pushes counts once. They wait for all rows of a table with ``max_bytes=``. What a server holds of the table
        takes twice its memory until the split is over.

        A repeated :meth:`dps.Client.push_pull` or call of a function whose first answer was lost at that very moment is
        answered by the rows as they are then.

        Parameters
        ----------
        table : str or Table
        shards : int, optional
            2, 4, 8, ... times as many as there are, of a dense table any multiple, up to 4096, of equal size; by
            default each shard is halved. If the table has so many already, nothing happens.
        shard : int, optional
            The number of one shard that is halved alone: a range of rows of a dense table, of the 4,096 slots of hashes
            of a keyed one. The shards behind it get the next numbers.

        Returns
        -------
        Table
            The table as it is now.

        Raises
        ------
        InputError
            The number is none of these; or the table counts pushes approximately (``admit=``), remembers keys
            (``remember=``) or was made with ``fixed_shards=True``, as that of a vector is: it cannot be divided. One
            shard alone cannot be divided of tables with ``max_bytes=`` or ``admit=AdmitByCount(...)``, because each of
            their shards has an equal part of what they may take.
        LimitError
            The servers have no memory for it (``dps.memory``).
        RequestTimeoutError
            The servers failed or changed again and again within ``dps.timeouts.request``. The table is as it was.

        Examples
        --------
        >>> import dps
        >>> cluster = dps.LocalCluster(servers=2, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     w = ps.table("w", dtype="int64", shards=2)
        ...     w.push([1, 2, 3], [10, 20, 30])
        ...     ps.split(w, 8).spec.shards, w[[1, 2, 3]]
        ...     ps.split(w, shard=0).spec.edges[:4]
        (8, array([10, 20, 30]))
        (0, 256, 512, 1024)
        >>> cluster.close()
        """
        return self._cut_anew("split_table", table, shards=shards, shard=shard)

    def merge(
        self, table: TableLike, shards: int | None = None, *, shard: int | None = None, timeout: float | None = None
    ) -> Table:
        """Cut a table into fewer shards, while training goes on: the reverse of :meth:`split`.

        Fewer shards make requests of few keys cheaper. Shards move first, until those that become one lie on the same
        servers. Then each server puts rows together. Training goes on meanwhile; at the end, clients and trainers wait
        as they do for a split, and each of their pushes counts once. What a server holds of the table takes twice its
        memory until the merge is over.

        Parameters
        ----------
        table : str or Table
        shards : int, optional
            1/2, 1/4, 1/8, ... of those that there are; by default half as many. If the table has so many already,
            nothing happens.
        shard : int, optional
            The number of one shard that is merged with the next one, while the others stay as they are.
        timeout : float, optional
            Seconds that shards may take to move; 600 by default.

        Returns
        -------
        Table
            The table as it is now.

        Raises
        ------
        InputError
            The number is none of these; or the table has state that belongs to a shard as a whole (``aggregate=``,
            ``admit=``, ``expire=``, ``remember=``, and ``evict=`` by use or to files) or was made with
            ``fixed_shards=True``. Such a table is restored with fewer shards (:meth:`restore`).
        LimitError
            The servers have no memory for it (``dps.memory``).
        RequestTimeoutError
            The shards did not come together in time, or the servers failed or changed again and again within
            ``dps.timeouts.request``. The table is as it was.
        StoppedError
            Raised by a call of a function that changes rows, or of ``clear()``, not by this one: it ran while the table
            was merged, and its effect counts in some shards only.

        Examples
        --------
        >>> import dps
        >>> cluster = dps.LocalCluster(servers=2, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     w = ps.table("w", dtype="int64", shards=8)
        ...     w.push([1, 2, 3], [10, 20, 30])
        ...     ps.merge(w, 2).spec.shards, w[[1, 2, 3]]
        (2, array([10, 20, 30]))
        >>> cluster.close()
        """
        return self._cut_anew("merge_table", table, shards=shards, shard=shard, seconds=timeout)

    def _cut_anew(self, verb: str, table: TableLike, **fields: Any) -> Table:
        """Have a table cut into more shards, or fewer; its handle, and clients ask for the route again."""
        made = self._connection.call(verb, table=check_name("table", table_name(table)), **fields)
        self._connection.forget_routes()
        return self._handle(TableSpec.from_dict(msgspec.msgpack.decode(made)))

    def rebalance(self, *, timeout: float | None = None) -> RebalanceReport:
        """Even the load of the servers out now: shards move by their measured load, and a hot shard is split.

        The load is what the servers have measured since shards rest, about the last four seconds. Where one server
        works more than 1.25 times the mean, so few shards move as even that out; where one shard is too large a part of
        it, it is divided (:meth:`split`) where its parts have equal loads, and the parts move; of a table whose shards
        have to be equal, all are. Training goes on meanwhile. Tables that cannot be split, or have a budget
        (``max_bytes=``), only move. The parameter server does the same by itself, when an imbalance lasts, unless the
        setting ``dps.rebalancing`` is false; it divides nothing unasked of which a server has more than 2 GiB.

        Parameters
        ----------
        timeout : float, optional
            Seconds that it may take; ``dps.timeouts.request`` by default. Shards that still move then go on moving, and
            a split that has begun is finished.

        Returns
        -------
        RebalanceReport
            ``moves`` (table, shard, its servers before and after), ``splits`` (table, shards before and after), how
            busy each server was ``before`` and ``after``, and ``why`` nothing more was done. Printed, it is text.

        Raises
        ------
        LimitError
            The servers have no memory for the split (``dps.memory``).
        RequestTimeoutError
            The servers failed or changed again and again while a table was to be split.

        Examples
        --------
        >>> cluster = dps.LocalCluster(servers=2, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster, servers=2) as ps:
        ...     w = ps.table("w")
        ...     ps.rebalance().moves  # there is no load
        []
        >>> cluster.close()
        """
        report = self._connection.call("rebalance", seconds=timeout)
        self._connection.forget_routes()
        return msgspec.msgpack.decode(report, type=RebalanceReport)

    def drop_table(self, table: TableLike) -> None:
        """Forget a table and its rows."""
        self._connection.call("drop_table", table=check_name("table", table_name(table)))
        self._connection.forget_routes()  # because another of that name may follow

    def register(self, function: ServerFunction) -> ServerFunction:
        """Bring a function to all servers, so that clients and trainers may call it.

        Its code travels once, as cloudpickle, through Dask's scheduler, under the hash of its bytes. :meth:`call` does
        this by itself. A function that only trainers call is registered before the run.

        Parameters
        ----------
        function : Function
            Made by :func:`dps.function`.

        Returns
        -------
        Function
            The same.
        """
        self._connection.register(function.id, function.code)
        return function

    def call(self, function: ServerFunction, table: TableLike, /, keys: Keys = None, **arguments: object) -> Any:
        """Run a function on rows of a table, on the servers that have them; it is registered, if it is not.

        See :meth:`dps.Client.call`.
        """
        return self._connection.client().call(self.register(function), table, keys, **arguments)

    def delete_where(
        self, table: TableLike, predicate: Callable[..., object], /, keys: Keys = None, **arguments: object
    ) -> int:
        """Delete the rows for which a predicate holds, on the servers that have them; how many.

        Parameters
        ----------
        table : str or Table
        predicate : callable
            ``predicate(rows, **arguments)``, called on the servers with the :class:`dps.functions.Rows` of each shard;
            returns bool[m].
        keys : array_like of int, slice or None
            Only these rows.
        **arguments
            For the predicate.

        Returns
        -------
        int

        Examples
        --------
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     counts = ps.table("counts", dtype="int64")
        ...     counts.push([1, 2, 3], [5, 1, 7])
        ...     ps.delete_where(counts, lambda rows: rows.values[:, 0] < 3), len(counts)
        (1, 2)
        >>> cluster.close()
        """
        return self.call(deleting(predicate), table, keys, **arguments)

    def forgotten(self, table: TableLike, since: Sequence[int] | None = None) -> ForgottenKeys:
        """The keys of rows of a table that went by themselves, because a budget was full or nothing used them.

        An application reads them that keeps elsewhere what a table forgets. Each key that went comes at least once to
        a reader that is not too late; the servers remember as many as ``remember=`` of :meth:`table` says, and
        `missed` of the reader counts the others. All copies of a table remember the same keys, so nothing is lost when
        a server dies. Rows that a program deletes are not among them.

        Parameters
        ----------
        table : str or Table
            Made with ``remember=``.
        since : sequence of int, optional
            The `position` of an earlier reader, which may have been kept in a file. By default all that is remembered.

        Returns
        -------
        ForgottenKeys
            An iterable of batches (reason, keys), each iteration of which gives what went since the one before.

        Raises
        ------
        UnknownTableError
            There is no table of that name.
        InputError
            The table does not remember keys, or `since` is no position in it.

        Examples
        --------
        >>> import dps
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     w = ps.table("w", max_bytes="20 kB", remember=500, shards=1)
        ...     w.push(range(400), 1.0)
        ...     forgotten = ps.forgotten(w)
        ...     kept = 400 - sum(len(keys) for reason, keys in forgotten)
        ...     kept == len(w), forgotten.missed, list(forgotten)
        (True, 0, [])
        >>> cluster.close()
        """
        return self.client().forgotten(table, since)

    def tables(self) -> dict[str, Table]:
        """Handles of the tables there are, by name."""
        tables = self._connection.describe().tables
        return TablesView((name, self._handle(TableSpec.from_dict(table.spec))) for name, table in tables.items())

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """What rooms of the library keep with this handle for as long as it lives, each under its own name."""
        return {}

    # -- work

    def map(
        self,
        function: Callable[..., Result],
        data: Data,
        tables: TableLike | Sequence[TableLike],
        *,
        meta: object = None,
        args: tuple = (),
        kwargs: Options | None = None,
    ) -> Data:
        """Apply a function of partitions and tables to a Dask collection, lazily: to predict, and to evaluate a model.

        Each partition is an ordinary task. It makes a client, calls ``function(partition, *tables)`` with a handle of
        each table, and closes the client. The tables are read when Dask computes the task, as they are then. To read
        them again after more training, call this again: Dask does not compute a collection anew of which it still holds
        the result, because it was persisted or computed a moment before. The handles pull; what would change a table
        raises, because Dask may compute a partition several times
        (:func:`dps.map_partitions_with_ps` is for functions that push).

        Parameters
        ----------
        function : callable
            ``function(partition, *tables, *args, **kwargs)``. Of an array it gets a block of whole rows, and returns
            an array with as many rows. Of a frame it returns a frame or a series, of a bag (it gets a list) an
            iterable, of a delayed value anything.
        data : dask.array.Array, dask.dataframe.DataFrame or Series, dask.bag.Bag, Delayed, list of Delayed, or tuple
            Of a tuple of collections of one kind, such as (X, y), the partition is a tuple of their partitions.
        tables : str, Table, or sequence of these
            Which tables the function gets, in this order.
        meta : object, optional
            What the result looks like, as in Dask: for arrays an empty array of its width and dtype, for frames an
            empty frame or series, or a mapping of names to dtypes. By default the function is called here with a
            made-up partition of ones.
        args, kwargs
            More arguments for `function`.

        Returns
        -------
        Array, DataFrame or Series, Bag, Delayed, or list of Delayed
            As `data`, or the first of a tuple. An array has the chunks of `data` along its rows, and one chunk along
            the other axes.

        Raises
        ------
        UnknownTableError
            There is no table of that name.
        InputError, InputTypeError
            Data that is no Dask collection, or several that do not fit each other; `meta` does not fit, or cannot be
            found out. In the tasks: a result of another shape than `meta` says, and calls that change a table.

        Examples
        --------
        >>> import dask.array as da
        >>> from distributed import Client
        >>> cluster = dps.LocalCluster(servers=1, trainers=2, processes=False)
        >>> with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ...     w = ps.table("w", rows=3)
        ...     w.assign(None, [1.0, 2.0, 3.0])
        ...     X = da.from_array(np.eye(3)[[0, 2, 2, 1]], chunks=(2, 3))
        ...     predicted = ps.map(lambda X, w: X @ w.pull(), X, tables="w")
        ...     predicted.chunks, predicted.compute()
        (((2, 2),), array([1., 3., 3., 2.]))
        >>> cluster.close()
        """
        return mapped(self._connection.client(), function, data, tables, meta, args, kwargs or {})

    def trainer_threads(self) -> dict[str, int]:
        """Count the threads for trainers.

        Returns
        -------
        dict of str to int
            Address -> threads of each worker that has no server. As many partitions as there are threads give each
            trainer a partition.

        Raises
        ------
        TooFewWorkersError
            All workers are for servers.

        Examples
        --------
        >>> with dps.LocalCluster(trainers=2, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        ...     list(ps.trainer_threads().values())
        [1, 1]
        """
        servers = {server.worker for server in self._connection.describe().servers}
        return user_data.threads_outside_servers(self.dask_client, servers)

    def scatter(self, make: Callable[[int], object], count: int) -> list[Future]:
        """Send partitions to the workers that have no server, where a run does not lose them with a worker.

        Dask keeps one copy of scattered data and cannot make it again. :meth:`run` calls ``make`` again for the
        partitions that were lost, and sends them. (It does the same with data in memory.)

        Parameters
        ----------
        make : callable
            ``make(number)`` returns a partition. It is called here: now, and later for a lost one, of which it must
            return the same.
        count : int
            Partitions.

        Returns
        -------
        list of distributed.Future
            For :meth:`run` and for Dask. A partition stays on its worker as long as its future is referenced.

        Raises
        ------
        TooFewWorkersError
            All workers are for servers.

        Examples
        --------
        >>> with dps.LocalCluster(trainers=2, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        ...     parts = ps.scatter(lambda number: np.full(3, number), 2)
        ...     sorted(ps.run(lambda trainer, parts: int(sum(part.sum() for part in parts)), parts))
        [0, 3]
        """
        makers = [functools.partial(make, number) for number in range(count)]
        return user_data.send(self.dask_client, makers, self.trainer_threads())

    def map_scattered(self, function: Callable, futures: Sequence[Future], *columns: Sequence) -> list[Future]:
        """As ``client.map(function, futures, *columns, pure=False)``, and :meth:`run` does not lose the results either.

        Parameters
        ----------
        function : callable
            ``function(partition, *values)``. It is called on the workers; here for a result that was lost together with
            its partition, of which it must return the same.
        futures : sequence of distributed.Future
            From :meth:`scatter` or from this method. The results of other futures are as those of Dask.
        *columns : sequences
            More arguments, a value for each partition; no futures.

        Returns
        -------
        list of distributed.Future

        Examples
        --------
        >>> with dps.LocalCluster(trainers=2, processes=False) as cluster, dps.ParameterServer(cluster) as ps:
        ...     parts = ps.scatter(lambda number: np.full(3, number), 2)
        ...     sums = ps.map_scattered(lambda part, offset: int(part.sum()) + offset, parts, [10, 20])
        ...     sorted(ps.run(lambda trainer, sums: sums, sums))
        [[10], [23]]
        """
        return user_data.send_mapped(self.dask_client, function, futures, *columns)

    def run(
        self,
        function: Function,
        data: Data,
        *,
        staleness: float | str = 0,
        trainers: int | str | None = None,
        retries: int = 0,
        args: tuple = (),
        kwargs: Options | None = None,
        progress: bool | None = None,
        resume: bool = False,
        run: OpenRun | None = None,
        reassign: bool | str = False,
        by: str = "trainer",
        columns: Columns | None = None,
        warm_start: int = 0,
    ) -> list[Result]:
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
            trainer: as many as asked for, or as there are threads outside the servers. It is sent to the workers, and
            a partition that is lost with its worker is sent again.
        staleness : int, math.inf or "auto"
            With staleness s, a trainer begins an iteration only if it has completed at most s more than the slowest
            trainer, so their clocks, which count completed iterations, differ by s + 1 at most. 0 is bulk-synchronous
            (BSP), s is stale-synchronous (SSP), ``math.inf`` is asynchronous. "auto" begins with 1, gives more while
            trainers wait for transient stragglers, and takes back what makes the loss worse
            (``trainer.log(loss=...)``). :meth:`set_staleness` changes it while the run goes on.
        trainers : int or "all", optional
            Fewer than there are free threads (with Spark: slots). With "all", trainers come and go: a new one begins on
            each thread that becomes free while the run goes on (of a worker that has come, say), at the clock of the
            slowest, and one whose worker is gone is not missed, because others do its work. For this the work is
            leased, so say ``reassign=True``, too. See *Trainers that come and go* in the documentation.
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
        run : OpenRun, optional
            Be one of several callers of this run, which :meth:`open_run` has made; its staleness counts.
        reassign : bool or "auto"
            Lease the batches of each epoch to the trainers in portions, so that a slow one gets fewer of them. With
            "auto" each trainer keeps its own until one is found to be slow for good, or to have more to do;
            :meth:`set_reassign` changes it while the run goes on, where it was not False. The clock, and with it the
            staleness, counts epochs; each batch counts once in each, whichever trainer works on it. For data of Dask
            or Spark, functions that go through it with :meth:`dps.Trainer.iterate`, and pushes that depend on the
            batch alone in which keys they name, and how many they are. See *Work re-assignment* in the documentation.
        columns : str, or list of names and of lists of names, optional
            Of a DataFrame of Dask, Spark, pandas, polars or Arrow, a list of such frames in memory, which are its
            partitions, or a dict of columns: each partition is a tuple of numpy arrays,
            the same for all of them. A name gives an array [rows], a list of names within the list an array [rows,
            names]: ``columns=(["a", "b"], "y")``. One name alone gives an array instead of a tuple.
        by : {"trainer", "partition"}
            How results are listed. With "partition" the function returns a list with one result for each of its
            partitions, and the list that comes back has one for each partition of the data, in their order, whichever
            trainer had them.
        warm_start : int
            Trainer 0 goes through so many batches alone, and the others begin then, at this clock (*warmstarting*, Dean
            et al., 2012). They wait for at most ``dps.timeouts.clock``. Not for tables with ``aggregate``, and before
            that clock trainer 0 must not call collectives, for which the others would have to come.

        Returns
        -------
        list
            What `function` returned, by trainer (with ``trainers="all"``, of those that were not lost); or the results
            of all partitions, by partition. Which partitions a trainer had is ``trainer.partition_numbers`` in the
            function: the same ones whenever the same data lies on the same workers and as many threads are free. (Data
            that is not persisted is computed anew for each run, perhaps elsewhere.)

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
        options = RunOptions(
            staleness=staleness,
            trainers=trainers,
            retries=retries,
            args=args,
            kwargs=kwargs or {},
            progress=progress,
            resume=resume,
            run=run,
            reassign=reassign,
            by=by,
            warm_start=warm_start,
        )
        return train(self._connection, function, data, options, columns)

    def resume_run(
        self,
        function: Function,
        data: Data,
        *,
        run: int | None = None,
        retries: int = 0,
        args: tuple = (),
        kwargs: Options | None = None,
        progress: bool | None = None,
        by: str = "trainer",
        columns: Columns | None = None,
    ) -> list[Result]:
        """Go on with a run whose scheduler has died: its trainers begin again, where the servers know that they were.

        It is for parameter servers that outlive their scheduler (``dps.scheduler.grace``), and for runs whose trainers
        are Dask tasks, because these end with their scheduler. Attach to the new scheduler first (:meth:`attach`).
        Staleness, trainers and their partitions are those of the run. As in a trainer that is run again,
        :meth:`dps.Trainer.iterate` passes over what is done, and each push counts once.

        Parameters
        ----------
        function, data
            What the run was begun with, because the scheduler that died had them. Data in memory are cut as before.
        run : int, optional
            Its number, as :meth:`status` shows it; by default the only one that was interrupted.
        retries, args, kwargs, progress, by, columns
            As of :meth:`run`.

        Returns
        -------
        list
            As of :meth:`run`: of all trainers, because the results of those that had ended are lost.

        Raises
        ------
        InputError
            No run was interrupted, or several were; the run has ended, or trainers of it live; the data has another
            number of partitions than before.
        ServerGoneError
            Servers that hold shards are not back.
        Exception
            As of :meth:`run`.

        Examples
        --------
        >>> cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        >>> with dps.ParameterServer(cluster) as ps:
        ...     ps.resume_run(lambda trainer, partitions: None, [1, 2])
        Traceback (most recent call last):
        dps.errors.InputError: no single run of parameter server 'dps' was interrupted; ps.run begins one
        >>> cluster.close()
        """
        chosen = RunOptions(args=args, kwargs=kwargs or {}, retries=retries, progress=progress, by=by)
        options, restored = resuming(self._connection.call, run, chosen)
        return train(self._connection, function, data, options, columns, restored)

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
            For ``ps.run(..., run=run)``, which may be called from several threads, and ``run.trainer(name)``. At
            the end of a ``with`` block, or with ``run.close()``, the run ends.
        """
        RunOptions(staleness=staleness, trainers=trainers)  # checks them
        number = start(self._connection.call, staleness, trainers=trainers)
        return OpenRun(self.ticket, number, trainers, staleness, self._connection.call)

    def staleness(self) -> float | None:
        """The staleness bound of the run that goes on (or was the last); None before the first.

        While it is set automatically (``"auto"``), the bound that holds at the moment; ``"auto"`` of a run in
        :meth:`status` says whether it is.
        """
        run = msgspec.msgpack.decode(self._connection.call("snapshot"), type=Status).current_run
        return None if run is None else math.inf if run.staleness is None else run.staleness

    def set_staleness(self, bound: float | str, table: TableLike | None = None) -> None:
        """Change the staleness bound while a run goes on, from another thread or another notebook (:meth:`attach`).

        Trainers learn of it at their next tick; the change is among the events of :meth:`status`.

        Parameters
        ----------
        bound : int, math.inf or "auto"
            As `staleness` of :meth:`run`.
        table : str or Table, optional
            Change that of a table instead, also while no run goes on: `bound` is as `staleness` of :meth:`table`, and
            ``math.inf`` stands for that of each run. Trainers that wait before a read of a table look at once whether
            they still have to.

        Raises
        ------
        InputError
            No run goes on; a value that is no staleness; a table cannot be "auto".
        UnknownTableError
            There is no table of that name.

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
        ...             while ps.staleness() is None:
        ...                 time.sleep(0.01)
        ...             ps.set_staleness(4)
        ...         thread = threading.Thread(target=later)
        ...         thread.start()
        ...         ps.run(train, db.from_sequence(range(2)), staleness=0)
        ...         thread.join()
        [4.0, 4.0]
        """
        wanted = checked_bound(bound)
        if table is None:
            self._connection.call("set_staleness", staleness=wanted)
        elif isinstance(wanted, str):
            raise InputError(f"table {name_of(table)!r}: only a run's staleness is set automatically; pass a number")
        else:
            self._connection.call("set_table_staleness", table=name_of(table), staleness=wanted)

    def set_reassign(self, reassign: bool | str) -> None:
        """Change, while a run goes on, whether its trainers do work of slower ones; as `reassign` of :meth:`run`.

        It holds from the next portion that a trainer asks for, and is among the events of :meth:`status`.

        Parameters
        ----------
        reassign : bool or "auto"
            With False, each trainer does the rest of its own data, and others only what is left of a trainer that is
            gone.

        Raises
        ------
        InputError
            No run goes on, or it was begun with ``reassign=False``, so that its clock does not count epochs.

        Examples
        --------
        >>> import threading, time
        >>> def train(trainer, partitions):
        ...     for batch in trainer.iterate(partitions, epochs=2, batch_size=1):
        ...         trainer.push("steps", [0], 1)
        ...         time.sleep(0.1)
        >>> with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         def later():
        ...             while ps.staleness() is None:
        ...                 time.sleep(0.01)
        ...             ps.set_reassign(True)
        ...         _ = ps.table("steps", rows=1, dtype="int64")
        ...         thread = threading.Thread(target=later)
        ...         thread.start()
        ...         _ = ps.run(train, np.zeros(8), staleness=1, reassign="auto")
        ...         thread.join()
        ...         ps.status().runs[0].reassign, ps.client().pull("steps")
        (True, array([16]))
        """
        self._connection.call("set_reassign", reassign=checked_reassign(reassign))

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

    def status(self) -> NotebookStatus:
        """The state at this moment: servers, tables, runs (the newest first), stragglers, checkpoints and events.

        Returns
        -------
        Status
            Frozen values with attributes: ``ps.status().runs[0].clocks``. Notebooks, IPython and rich show them as
            tables; ``ps.status().to_dict()`` is what ``json.dumps`` takes. ``tables["w"].hot_keys`` are the keys of a
            table with the most accesses in the last seconds, and ``hot_shares`` the shares of the accesses that the 1,
            8 and 64 hottest keys have together.

        Examples
        --------
        >>> import numpy as np
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
        ...     with dps.ParameterServer(cluster) as ps, ps.client() as client:
        ...         _ = ps.table("w")
        ...         while not (hot := ps.status().tables["w"].hot_keys):  # servers report twice a second
        ...             rows = client.pull("w", [7]), client.pull("w", [1, 7, 8])
        ...         print(hot[0].key, f"{hot[0].share:.1f}")  # a report may come between the two
        7 0.5
        """
        return msgspec.msgpack.decode(self._connection.call("status"), type=NotebookStatus)

    # -- the number of servers

    def servers(self) -> int:
        """How many servers are up; :meth:`status` tells which."""
        return sum(server.alive for server in self._connection.describe().servers)

    def scale(self, servers: int) -> None:
        """Have that many servers. Shards move while training goes on; :meth:`status` shows how far they are.

        More servers come up as soon as there are workers for them. Of fewer, those with the highest numbers are emptied
        first and closed then. What :meth:`adapt` has begun ends here.
        """
        check_servers("servers", servers)
        self._server_workers.close()  # first, because it may be about to end workers
        self._connection.call("scale", servers=servers)

    def adapt(
        self,
        minimum: int | None = None,
        maximum: float | None = None,
        *,
        interval: str | float | None = None,
        wait_count: int | None = None,
        busy: float | None = None,
        memory: str | float | None = None,
        cluster: ScalableCluster | None = None,
    ) -> None:
        """Let the number of servers follow the load, as ``cluster.adapt`` does with workers; :meth:`scale` ends it.

        Another server comes, on a worker that is free for it, when rows take 60 % of the memory that the servers may
        use, at once, or when they are at work for more than `busy` of their time, after three looks. A server goes when
        the others would be loaded by half of that, after `wait_count` looks. It is one server at a time, and none while
        a server comes or goes, shards move or a checkpoint is written; there are always as many as tables have copies.
        The parameter server does this by itself, whatever becomes of the driver. :meth:`status` ("adapt") tells what it
        sees; what it does is among the events, with the reason.

        What is not given is taken from the settings ``dps.adaptive``.

        Parameters
        ----------
        minimum, maximum : int
            How many servers at least and at most; ``math.inf``: as many as there are workers for.
        interval : str or float
            Between two looks: "2 s", or seconds.
        wait_count : int
            Looks in a row that find too many servers, until one goes.
        busy : float
            Part of its time that a server may be at work.
        memory : str or float
            What one server may have in use, "4 GiB" or bytes. By default the limit that Dask has for its worker; where
            there is none, and here is none, rows do not count.
        cluster : LocalCluster, YarnCluster or object with a method scale_servers(n, timeout)
            It starts a worker where only that is missing for another server, and ends those that no parameter server
            uses, once there were some for `wait_count` looks. It does so as long as this handle is open in this
            program, as ``cluster.adapt`` does; servers follow the load after that, too. By default the workers for
            servers stay as they are.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.adapt(minimum=1, maximum=2, memory="4 GiB", cluster=cluster)
        ...         ps.status().adapt.maximum
        ...         ps.scale(2)
        ...         ps.status().adapt
        2
        """
        given: Json = {"minimum": minimum, "maximum": maximum, "interval": interval}
        rule = adapt_rule(given | {"wait-count": wait_count, "busy": busy, "memory": memory})
        check_cluster(cluster)
        self._connection.call("adapt", rule=msgspec.msgpack.encode(rule))
        self._server_workers.follow(cluster, functools.partial(adapt_status, self._connection.call), rule.interval)

    def retire(self, server: int) -> None:
        """Empty one server and close it, while training goes on; another takes its place, if there is a worker."""
        self._connection.call("retire", server=server)

    def hold(self) -> None:
        """Have the servers outlive the next planned end of their scheduler, too: before it is restarted on purpose.

        Servers outlive a scheduler that dies, for the time of the setting ``dps.scheduler.grace``, and wait for another
        one at its address. They end with a scheduler that ends on purpose (SIGTERM, ``client.shutdown()``), unless this
        was called before. It counts once, for the scheduler that is there now, and cannot be taken back. The scheduler
        tells the servers when it ends, so servers that it does not reach at that moment may end with it.

        Raises
        ------
        InputError
            The setting is 0, so servers end with their scheduler.

        Examples
        --------
        >>> import dask
        >>> with dask.config.set({"dps.scheduler.grace": "0 s"}):
        ...     cluster = dps.LocalCluster(servers=1, trainers=1, processes=False)
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.hold()
        Traceback (most recent call last):
        dps.errors.InputError: the servers of parameter server 'dps' end with their scheduler, because ...
        >>> cluster.close()
        """
        self._connection.call("hold")

    # -- files

    def checkpoint(
        self,
        url: str,
        *,
        keep: int = 3,
        incremental: bool = False,
        storage_options: Options | None = None,
    ) -> Json:
        """Write all tables, optimizer state and clocks; training goes on meanwhile.

        While a run goes on, a checkpoint is one consistent model: exactly the pushes that each trainer made before one
        clock, whatever the staleness.

        Parameters
        ----------
        url : str
            A directory that all servers reach, in any form that fsspec knows: a path, ``s3://``, ``hdfs://``, ...
        keep : int
            How many stay, this one included.
        incremental : bool
            Where a checkpoint was written to this URL before, write only the rows that have changed since.
        storage_options : dict, optional
            For fsspec.

        Returns
        -------
        dict
            Name, clock, rows, bytes and seconds of the checkpoint.

        Raises
        ------
        CheckpointError
            It could not be written; the ones before are as they were.

        Examples
        --------
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dtype="int64")
        ...         ps.client().push("w", [1, 2], [10, 20])
        ...         done = ps.checkpoint(folder.name)
        ...         ps.client().push("w", [1, 2], [1, 1])
        ...         _ = ps.restore(folder.name)
        ...         done["rows"], ps.client().pull("w", [1, 2])
        (2, array([10, 20]))
        >>> folder.cleanup()
        """
        return take_checkpoint(self._connection.call, url, keep, incremental, storage_options)

    def schedule_checkpoints(
        self,
        url: str,
        *,
        every: str | float | None = None,
        clocks: int | None = None,
        keep: int = 3,
        incremental: bool = False,
        storage_options: Options | None = None,
    ) -> None:
        """Have checkpoints taken regularly, also when this driver has gone; :meth:`stop_checkpoints` ends that.

        It replaces the schedule that there was. :meth:`~dps.ParameterServer.status` tells of the last checkpoint. None
        is taken after a run that failed, before another is begun or something is restored.

        Parameters
        ----------
        url : str
            As in :meth:`checkpoint`.
        every : str or float, optional
            A checkpoint after so long, again and again: "10 min", or seconds.
        clocks : int, optional
            A checkpoint after so many clocks, again and again. Exactly one of `every` and `clocks` is given.
        keep, incremental, storage_options
            As in :meth:`checkpoint`.

        Raises
        ------
        InputError
            Neither `every` nor `clocks`, or both; a time that is none.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         ps.schedule_checkpoints("memory://doc-regular", every="10 min")
        ...         ps.stop_checkpoints()
        """
        schedule_checkpoints(self._connection.call, url, every, clocks, keep, incremental, storage_options)

    def stop_checkpoints(self) -> None:
        """End what :meth:`schedule_checkpoints` has begun."""
        self._connection.call("schedule_checkpoints", schedule=None)

    def restore(
        self,
        url: str,
        checkpoint: str | None = None,
        *,
        tables: Sequence[TableLike] | None = None,
        storage_options: Options | None = None,
        shards: Mapping[TableLike, int] | None = None,
    ) -> Json:
        """Bring tables back as they were in a checkpoint, in the place of those of the same names.

        Any number of servers will do. No client sees a table half restored: until all are there, the old ones are.
        Calls that are on their way meanwhile reach the old table or the new one. A push that has reached the old one is
        gone with it, acknowledged or not; from the return of this on, everything goes to the new one.

        Parameters
        ----------
        url : str
            Where checkpoints were written.
        checkpoint : str, optional
            Its name; by default the newest one that is whole. Damaged ones are passed over, with a warning.
        tables : sequence of str or Table, optional
            Only these.
        storage_options : dict, optional
            For fsspec.
        shards : dict, optional
            Table -> how many shards it is to have, more or fewer than it had; by default as many as it had.

        Returns
        -------
        dict
            Name and clock of the checkpoint, and the tables; "passed": newer ones, and why they could not be used.

        Raises
        ------
        CheckpointError
            There is none, or the one named is damaged. The tables are as they were.
        InputError
            A table cannot have so many shards. One whose rows go by themselves cannot have fewer than it had.
        """
        names = None if tables is None else [table_name(table) for table in tables]
        counts = {table_name(table): count for table, count in (shards or {}).items()}
        answer = restore(self._connection.call, url, checkpoint, names, storage_options, counts)
        self._connection.forget_routes()
        return answer

    def export(self, table: TableLike, format: str = "numpy", path: str | None = None) -> Any:  # noqa: A002
        """A table's values as they are now, in another form; :func:`dps.export_checkpoint` does it with saved ones.

        Parameters
        ----------
        table : str or Table
        format : {"numpy", "pandas", "polars", "arrow", "scipy", "parquet", "dask"}
            See Returns.
        path : str
            Where Parquet goes: a URL that fsspec understands.

        Returns
        -------
        numpy
            An array [rows, dim]; of a keyed table keys and values, two arrays.
        pandas
            A DataFrame of `dim` columns with the row numbers or keys as index.
        polars, arrow
            A DataFrame of polars, or a table of Arrow, with columns "0" to str(dim - 1); of a keyed table, the column
            "key" comes first. Arrow does not copy the columns.
        scipy
            A ``coo_array`` of what is not zero, [rows, dim]; of a keyed table, [largest key + 1, dim].
        parquet
            None: the file has the columns ``key`` and ``value`` (a list of fixed length where `dim` is above 1), and is
            written a piece at a time.
        dask
            As numpy, of dask arrays that pull a shard at a time, on the workers, when they are computed.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     with dps.ParameterServer(cluster) as ps:
        ...         _ = ps.table("w", dim=2, rows=2)
        ...         ps.client().push("w", [1], [[3, 4]])
        ...         ps.export("w", "pandas")
             0    1
        0  0.0  0.0
        1  3.0  4.0
        """
        tables = self.tables()
        name = table_name(table)
        if name not in tables:
            known = ", ".join(map(repr, sorted(tables))) or "none"
            raise UnknownTableError(f"parameter server {self.name!r} has no table {name!r}; it has {known}")
        return export_table(self.ticket, tables[name].spec, format, path)

    def report(self, path: str | os.PathLike[str], run: int | None = None) -> str:
        """Write a report of a run: which trainers were slow and why, where the time went, the loss, the servers.

        It is one file of HTML with its pictures in it. Browsers open it without a network, and it can be mailed.

        Parameters
        ----------
        path : str
            Where it goes, such as ``run.html``; a file that is there is replaced.
        run : int, optional
            The run's number, as :meth:`~dps.ParameterServer.status` has it; by default the last one. It may go on.

        Returns
        -------
        str
            The path.

        Examples
        --------
        >>> import tempfile
        >>> def train(trainer, partitions):
        ...     for step, keys in enumerate(trainer.iterate(partitions, epochs=20)):
        ...         trainer.push("w", keys, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...         with dps.ParameterServer(cluster) as ps:
        ...             _ = ps.table("w", dtype="int64")
        ...             _ = ps.run(train, ps.dask_client.scatter([[1, 2], [3, 4]]))
        ...             path = ps.report(folder + "/run.html")
        ...     "Where the time went" in open(path).read()
        True
        """
        return write_report(self._connection.call, path, run)

    def timeline(self, path: str | os.PathLike[str], run: int | None = None) -> str:
        """Write a run as a trace that https://ui.perfetto.dev and Chrome's ``chrome://tracing`` show.

        Each trainer is a line of slices: compute, pull, wait, push, serialise. These are put together from what a
        trainer measures between two reports, which may be several clocks: how long each took in all is measured, the
        order within such a window is made up. Servers are curves, what happened are marks.

        Parameters
        ----------
        path : str
            Where it goes; compressed if it ends in ``.gz``. A file that is there is replaced.
        run : int, optional
            The run's number; by default the last one.

        Returns
        -------
        str
            The path.

        Examples
        --------
        >>> import json, tempfile
        >>> def train(trainer, partitions):
        ...     for keys in trainer.iterate(partitions, epochs=20):
        ...         trainer.push("w", keys, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with dps.LocalCluster(servers=1, trainers=2, processes=False) as cluster:
        ...         with dps.ParameterServer(cluster) as ps:
        ...             _ = ps.table("w", dtype="int64")
        ...             _ = ps.run(train, ps.dask_client.scatter([[1, 2], [3, 4]]))
        ...             path = ps.timeline(folder + "/run.json")
        ...     sorted({event["name"] for event in json.load(open(path))["traceEvents"] if event["ph"] == "X"})[:2]
        ['compute', 'push']
        """
        return write_timeline(self._connection.call, path, run)

    # -- the end

    def detach(self) -> None:
        """Let go of the servers without stopping them: :meth:`attach` takes them up again, here or elsewhere."""
        self._server_workers.close()
        self._connection.detach()

    def close(self) -> None:
        """Stop the servers, whichever driver started them; their rows are gone.

        Several threads may do so: one closes, and the others return when it has.
        """
        self._server_workers.close()
        self._connection.close()

    def __reduce__(self) -> tuple[Callable[[str], ParameterServer], tuple[str]]:
        return _unpickled, (self.name,)

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *exc: object) -> None:
        end = self.detach if self._connection.attached else self.close
        end()

    def __repr__(self) -> str:
        try:
            if self.closed:  # one that came by pickle attaches here
                return f"<dps.ParameterServer {self.name!r} (closed)>"
            description = self._connection.describe(PATIENCE_SECONDS)
        except DPSError as error:
            return f"<dps.ParameterServer {self.name!r} ({type(error).__name__})>"
        count = sum(server.alive for server in description.servers)
        plural = "" if count == 1 else "s"
        text = f"{count} server{plural} in {self._connection.scheduler_address()}"
        with contextlib.suppress(DPSError):  # the servers do not answer, and the controller does
            answer = self._connection.call("status", callback_timeout=PATIENCE_SECONDS)
            text += f", {held_text(msgspec.msgpack.decode(answer, type=Status))}"
        return f"<dps.ParameterServer {self.name!r}: {text}>"

    def _repr_html_(self) -> str:
        return parameter_server_html(self)


def _unpickled(name: str) -> ParameterServer:
    """What a pickled handle becomes, in the arguments of a Dask task for instance: an attached one."""
    return ParameterServer.over(DeferredConnection(name))


def plain(value: object) -> object:
    """A value of a table's fields as Python's own, because users also pass numpy's numbers and texts."""
    for kind in (float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{value!r} is no plain value")
