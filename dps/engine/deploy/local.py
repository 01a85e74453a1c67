"""A Dask cluster on this machine with workers for servers and workers for trainers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Collection
from typing import Any, TypeAlias, cast

import dask
from dask.utils import parse_bytes, parse_timedelta
from distributed import Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.deploy import Adaptive
from distributed.system import MEMORY_LIMIT
from distributed.utils import NoOpAwaitable

from dps.engine.controller.plugin import Controller
from dps.engine.daskapi.cordon import RESOURCE
from dps.engine.deploy.interrupts import ignoring_interrupts
from dps.engine.deploy.main_guard import check_main_guard
from dps.engine.deploy.server_workers import too_few_are_free, workers_in_use
from dps.engine.wire.once import Once
from dps.errors import DPSError, InputError, InputTypeError

__all__ = ["LocalCluster"]

# Result of a call; on an asynchronous cluster an awaitable of it.
Synced: TypeAlias = Any
# Longest time that a nanny takes to close, and the time limit for closing parameter servers.
CLOSE_SECONDS = 5.0
# Pause between two looks at which workers still have servers.
POLL_SECONDS = 0.1


class LateMessages(logging.Filter):
    """Drops Dask's INFO messages about closed connections for `CLOSE_SECONDS` after a cluster has closed.

    Dask restores its log level as soon as a cluster is closed, and a client's last message may still be on its way.
    """

    def __init__(self) -> None:
        super().__init__()
        self._until = -math.inf  # seconds of the monotonic clock

    def expect(self) -> None:
        """A cluster closes now: drop messages for a while."""
        logging.getLogger("distributed.batched").addFilter(self)  # a second call changes nothing
        self._until = time.monotonic() + CLOSE_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or time.monotonic() > self._until


late_messages = LateMessages()


class LocalCluster(SpecCluster):
    """A Dask cluster on this machine: some workers for servers, the others for trainers and all other tasks.

    The workers of servers are named ``server-0``, ``server-1``, ... and have the Dask resource ``dps``; those of
    trainers are named ``trainer-0``, ... . ``cluster.scale(4)`` and ``cluster.adapt(minimum=1, maximum=4)`` add and
    remove workers for trainers and leave the servers alone, so ``scale(0)`` keeps the parameters.
    ``cluster.scale_servers(3)`` adds and removes workers for servers.

    A script that starts worker processes must do so under ``if __name__ == "__main__":``, because each worker process
    imports the script.

    Parameters
    ----------
    servers : int, default 1
        Number of workers for servers. With 0, servers share workers with ordinary tasks.
    trainers : int, default 2
        Number of workers for trainers and ordinary tasks.
    threads_per_trainer : int, default 1
        Number of tasks that a trainer's worker runs at once.
    processes : bool, default True
        Whether workers are processes. Otherwise they are threads of this process: these start quickly and are good for
        tests, but they share one GIL.
    security : Security or True, optional
        Encrypt all connections, also those of the data plane. True makes a certificate for this cluster (needs the
        package cryptography).
    dashboard_address : str or None, default ":0"
        Where Dask's dashboard listens; any free port by default. None: no dashboard.
    memory_limit : str, int or float, optional
        For each trainer's worker, as in :class:`distributed.Worker`; by default an equal share of the memory. Servers
        have no limit, because Dask would pause their workers, and cannot spill tables to disk.
    host, protocol : str, optional
        The address to listen at, and the protocol ("tcp", "tls", "inproc"). By default the loopback address, and the
        protocol that fits `processes` and `security`.
    scheduler_port : int, default 0
        The scheduler's port; any free port by default.
    silence_logs : int or False, default logging.WARN
        The level of log messages that are shown.
    asynchronous : bool, default False
        For use inside a running event loop: ``async with LocalCluster(asynchronous=True) as cluster``.
    name : str, optional
        The name of the cluster.
    **worker_kwargs : Any
        For each worker, as in :class:`distributed.Nanny`, or :class:`distributed.Worker` without processes.

    Raises
    ------
    UnguardedMainError
        The program starts worker processes outside of ``if __name__ == "__main__":``.

    Notes
    -----
    While a parameter server runs, Dask counts the workers of servers as paused: ``client.wait_for_workers(n)`` counts
    trainers only. All workers are up when the constructor returns, so no program needs to wait for them.

    Ctrl-C and a notebook's *Interrupt* reach only the program. Its worker processes ignore SIGINT, so a run can be
    interrupted and the parameters stay.

    Worker processes get one thread each for BLAS and OpenMP (Dask's own default), unless Dask's configuration says
    otherwise (``distributed.nanny.pre-spawn-environ``).

    Examples
    --------
    >>> from dps import LocalCluster
    >>> with LocalCluster(servers=1, trainers=2, processes=False, dashboard_address=None) as cluster:
    ...     sorted(cluster.workers)
    ...     cluster.scale(0)
    ...     sorted(cluster.worker_spec)
    ['server-0', 'trainer-0', 'trainer-1']
    ['server-0']
    """

    def __init__(
        self,
        servers: int = 1,
        trainers: int = 2,
        threads_per_trainer: int = 1,
        processes: bool = True,
        security: Security | bool | None = None,
        dashboard_address: str | None = ":0",
        *,
        memory_limit: str | float | None = None,
        host: str | None = None,
        protocol: str | None = None,
        scheduler_port: int = 0,
        silence_logs: int | bool = logging.WARN,
        asynchronous: bool = False,
        name: str | None = None,
        **worker_kwargs: Any,
    ):
        _check_counts(servers=(servers, 0), trainers=(trainers, 0), threads_per_trainer=(threads_per_trainer, 1))
        security = _security(security)
        protocol = _protocol(protocol, host, processes, scheduler_port, security)
        if host is None and protocol != "inproc://":
            host = "127.0.0.1"
        common = {"host": host, "protocol": protocol, "security": security}
        # Without a dashboard Dask still serves HTTP; without an address it takes port 8787, or warns that it cannot.
        dashboard = {"dashboard": dashboard_address is not None, "dashboard_address": dashboard_address or ":0"}
        scheduler = {"cls": Scheduler, "options": {**common, **dashboard, "port": scheduler_port}}
        options = {**common, "silence_logs": silence_logs, "dashboard": False, **worker_kwargs}
        if processes:
            check_main_guard()
            options |= ignoring_interrupts(options)
        if memory_limit is None:  # threads have none: Dask would compare each with the whole process
            memory_limit = MEMORY_LIMIT // max(1, trainers) if processes else 0
        kind = Nanny if processes else Worker
        server = {**options, "nthreads": 1, "resources": {RESOURCE: 1}, "memory_limit": 0}
        trainer = {"cls": kind, "options": {**options, "nthreads": threads_per_trainer, "memory_limit": memory_limit}}
        self.processes = processes
        self._closing = Once("closing the cluster")
        servers_by_name = {f"server-{n}": {"cls": kind, "options": server} for n in range(servers)}
        self.server_names = frozenset(servers_by_name)
        self._server_spec = {"cls": kind, "options": server}
        super().__init__(
            workers={**servers_by_name, **{f"trainer-{n}": trainer for n in range(trainers)}},
            scheduler=scheduler,
            worker=trainer,
            asynchronous=asynchronous,
            security=security,
            silence_logs=silence_logs,
            name=name,
        )

    def __repr__(self) -> str:
        address = getattr(self.scheduler, "address", "not running")
        trainers = len(self.worker_spec.keys() - self.server_names)
        servers = len(self.worker_spec) - trainers
        return (
            f"{type(self).__name__}({address!r}, servers={servers}, trainers={trainers}, status={self.status.name!r})"
        )

    def close(self, timeout: float | None = None) -> Synced:
        """End the workers and the scheduler. If several threads call this, the first one does it and the others wait.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the end.
        """
        if self.asynchronous:
            return super().close(timeout)
        return self._closing(super().close, timeout)

    async def _close(self) -> None:
        """Close parameter servers first, because otherwise each would report the loss of its servers, one by one."""
        late_messages.expect()
        controller = getattr(self.scheduler, "plugins", {}).get(Controller.name)
        if controller is not None and self.status.name == "running":
            with contextlib.suppress(DPSError, TimeoutError, RuntimeError):  # else their workers end them
                await asyncio.wait_for(controller.sessions.close_all(), CLOSE_SECONDS)
        await super()._close()
        late_messages.expect()

    def scale(self, n: int = 0, memory: str | int | None = None, cores: int | None = None) -> Synced:
        """Change the number of workers for trainers to `n`, or to more if memory and cores need it. Servers stay.

        Parameters
        ----------
        n : int
            The number of workers.
        memory, cores : optional
            The least memory and the least number of cores of all these workers together.
        """
        if self.status.name in ("closing", "closed", "failed"):  # SpecCluster closes by scaling to 0
            return super().scale(0)
        if memory is not None:
            n = max(n, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            n = max(n, math.ceil(cores / self._threads_per_worker()))
        if self.asynchronous:
            self._set_trainers(n)
            return NoOpAwaitable()

        async def in_loop() -> None:  # because the loop may be iterating over the specifications at this moment
            self._set_trainers(n)

        return self.sync(in_loop)

    scale_up = scale  # the old name, which SpecCluster has as well

    def scale_servers(self, n: int, timeout: float = 600) -> Synced:
        """Change the number of workers for servers to `n`. Workers for trainers stay.

        The parameter server starts and closes the servers on them. To grow, add workers, then call ``ps.scale(more)``.
        To shrink, call ``ps.scale(fewer)``, then remove workers: this waits for workers that still have a server.
        ``ps.adapt(..., cluster=cluster)`` does both as the load asks for it.

        Parameters
        ----------
        n : int
            The number of workers.
        timeout : float
            Seconds to wait until enough workers have no server.

        Raises
        ------
        DPSError
            Too many workers still have servers. Those that were free have gone.

        Examples
        --------
        >>> with dps.LocalCluster(servers=1, trainers=1, processes=False) as cluster:
        ...     cluster.scale_servers(2)
        ...     sorted(cluster.worker_spec)
        ['server-0', 'server-1', 'trainer-0']
        """
        _check_counts(n=(n, 0))
        return self.sync(self._scale_servers, n, timeout)

    async def _scale_servers(self, n: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.status.name == "running":
            # Dask's lock, because workers end under it: so none ends long after it was seen to have no server.
            async with self._lock:
                surplus = len(self.server_names) - n
                if surplus > 0:
                    free = sorted(self.server_names - await workers_in_use(self), key=_number, reverse=True)
                    self._set_servers(self.server_names.difference(free[:surplus]))
                    surplus -= len(free)
                elif surplus < 0:
                    unused = (name for k in itertools.count() if (name := f"server-{k}") not in self.worker_spec)
                    self._set_servers(self.server_names.union(itertools.islice(unused, -surplus)))
            if surplus <= 0:
                return
            if time.monotonic() > until:
                raise too_few_are_free(surplus, n, timeout)
            await asyncio.sleep(POLL_SECONDS)

    def _set_servers(self, names: frozenset[str]) -> None:
        for name in self.server_names - names:
            self.worker_spec.pop(name, None)
        self.worker_spec.update(dict.fromkeys(names - self.server_names, self._server_spec))
        self.server_names = names
        assert self.loop is not None
        self.loop.add_callback(self._correct_state)

    def _set_trainers(self, n: int) -> None:
        trainers = [name for name in self.worker_spec if name not in self.server_names]
        started = {worker["name"] for worker in self.scheduler_info["workers"].values()}
        trainers.sort(key=started.__contains__, reverse=True)  # those not yet up are removed first, then the newest
        for name in trainers[max(0, n) :]:
            del self.worker_spec[name]
        for _ in range(n - len(trainers)):
            self.worker_spec.update(self.new_worker_spec())
        assert self.loop is not None
        self.loop.add_callback(self._correct_state)

    async def scale_down(self, workers: Collection[str]) -> None:
        """Close the workers of these names, except servers."""
        await super().scale_down([name for name in workers if name not in self.server_names])

    def adapt(self, *args: Any, **kwargs: Any) -> Adaptive:
        """Scale the number of trainers with the load, between ``minimum=`` and ``maximum=``. Servers stay.

        Parameters
        ----------
        *args, **kwargs : Any
            As in `distributed.SpecCluster.adapt`. A policy given as ``Adaptive=`` gets all workers, also servers.
        """
        if not args:
            kwargs.setdefault("Adaptive", AdaptiveTrainers)
        return super().adapt(*args, **kwargs)

    def _update_worker_status(self, op: str, msg: object) -> None:
        """Dask gives up a worker that its nanny does not restart in time; start another one in its place."""
        super()._update_worker_status(op, msg)
        if op == "remove":
            patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            asyncio.get_running_loop().call_later(patience + CLOSE_SECONDS, self._fill_up)

    def _fill_up(self) -> None:
        if self.status.name == "running":
            self._correct_state()

    def _new_worker_name(self, worker_number: int) -> str:
        return f"trainer-{worker_number}"


class AdaptiveTrainers(Adaptive):
    """Dask's policy of scaling, applied to a cluster as if it had no servers."""

    cluster: LocalCluster

    @property
    def plan(self) -> set:
        return self.cluster.plan - self.cluster.server_names

    @property
    def requested(self) -> set:
        return self.cluster.requested - self.cluster.server_names

    @property
    def observed(self) -> set:
        return self.cluster.observed - self.cluster.server_names

    async def target(self) -> int:
        return self._without_servers().adaptive_target(self.target_duration)

    async def workers_to_close(self, target: int) -> list[str]:
        options = {"key": self.worker_key, "attribute": "name", **self._workers_to_close_kwargs}
        return self._without_servers().workers_to_close(target=target, **options)

    def _without_servers(self) -> WithoutServers:
        assert self.cluster.scheduler is not None, "the cluster is up"
        return WithoutServers(self.cluster.scheduler, self.cluster.server_names)


class WithoutServers:
    """A scheduler whose advice on scaling leaves out the workers of servers.

    Dask's own advice counts all workers: with three idle servers it would not ask for the two trainers that are needed,
    because three workers exist.
    """

    def __init__(self, scheduler: Scheduler, server_names: Collection[object]):
        self._scheduler = scheduler
        self.workers = {address: ws for address, ws in scheduler.workers.items() if ws.name not in server_names}

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)

    def adaptive_target(self, target_duration: float | None) -> int:
        return Scheduler.adaptive_target(cast(Scheduler, self), target_duration)

    def workers_to_close(self, **options: Any) -> list[str]:
        return Scheduler.workers_to_close(cast(Scheduler, self), **options)


def _number(name: str) -> int:
    """The number in the name of a worker for servers."""
    return int(name.rpartition("-")[2])


def _check_counts(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputTypeError(f"{name} is a whole number, not {value!r}")
        if value < least:
            raise InputError(f"{name} is at least {least}, not {value}")


def _security(security: Security | bool | None) -> Security:
    if security is True:
        return Security.temporary()
    if not security:
        return Security()  # from Dask's configuration
    if not isinstance(security, Security):
        raise InputTypeError(f"security is True or a distributed.Security, not {security!r}")
    return security


def _protocol(protocol: str | None, host: str | None, processes: bool, port: int, security: Security) -> str:
    """The protocol that distributed.LocalCluster would choose, with "://" at its end."""
    if protocol is not None:
        return protocol if protocol.endswith("://") else protocol + "://"
    if host and "://" in host:
        return host.split("://")[0] + "://"
    if security.require_encryption:
        return "tls://"
    return "tcp://" if processes or port or host else "inproc://"
