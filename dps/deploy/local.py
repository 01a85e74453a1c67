"""A Dask cluster on this machine with workers for servers and workers for trainers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from typing import Any, cast

import dask
from dask.utils import parse_bytes, parse_timedelta
from distributed import Nanny, Scheduler, Security, SpecCluster, Worker
from distributed.deploy import Adaptive
from distributed.system import MEMORY_LIMIT
from distributed.utils import NoOpAwaitable

from dps.controller import Controller
from dps.cordon import RESOURCE
from dps.deploy.interrupts import ignoring_interrupts
from dps.errors import DPSError, InputError, InputTypeError
from dps.once import Once

__all__ = ["LocalCluster"]

CLOSING = 5.0  # seconds that a nanny takes, at most, to close; as long for the parameter servers


class LocalCluster(SpecCluster):
    """A Dask cluster on this machine: some workers for servers, the others for trainers and all other tasks.

    The workers of servers are named ``server-0``, ``server-1``, ... and carry the Dask resource ``dps``; those of
    trainers are ``trainer-0``, ... . Scaling means trainers: ``cluster.scale(4)`` and ``cluster.adapt(minimum=1,
    maximum=4)`` add and remove trainers and leave the servers alone, so that ``scale(0)`` keeps the parameters.

    A script that starts worker processes must do so under ``if __name__ == "__main__":``, as with any cluster of
    processes: each of them imports the script.

    Parameters
    ----------
    servers : int, default 1
        How many workers for servers. With 0, servers share workers with ordinary tasks.
    trainers : int, default 2
        How many workers for trainers and ordinary tasks.
    threads_per_trainer : int, default 1
        How many tasks a trainer's worker runs at once.
    processes : bool, default True
        Whether workers are processes; if not, they are threads of this process, which is quick to start and fit for
        tests, but they share one GIL.
    security : Security or True, optional
        Encrypt, data plane included. True makes a certificate for this cluster (needs the package cryptography).
    dashboard_address : str or None, default ":0"
        Where Dask's dashboard listens; any free port by default. None: no dashboard.
    memory_limit : str, int or float, optional
        For each trainer's worker, as in :class:`distributed.Worker`. By default an equal share of the memory. Servers
        have none: Dask would pause them, and can spill nothing of theirs.
    host, protocol : str, optional
        Where to listen, and how ("tcp", "tls", "inproc"); by default the loopback, and what fits the above.
    scheduler_port : int, default 0
        The scheduler's port; any free one by default.
    silence_logs : int or False, default logging.WARN
        The level of log messages that are shown.
    asynchronous : bool, default False
        For use inside a running event loop: ``async with LocalCluster(asynchronous=True) as cluster``.
    name : str, optional
        The name of the cluster.
    **worker_kwargs : Any
        For each worker, as in :class:`distributed.Nanny`, or :class:`distributed.Worker` without processes.

    Notes
    -----
    Once a parameter server runs, Dask counts its workers as paused: ``client.wait_for_workers(n)`` sees trainers only.
    Workers are up when the constructor returns, there is no need to wait for them.

    Ctrl-C, and a notebook's *Interrupt*, reach the program alone: its worker processes ignore SIGINT, so that a run can
    be interrupted and the parameters stay.

    Worker processes get one thread each for BLAS and OpenMP (Dask's own default) and for numba, unless the environment
    says otherwise (``OMP_NUM_THREADS``, ``NUMBA_NUM_THREADS``, ...).

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
        # Without a dashboard Dask still serves HTTP, and takes (or warns that it cannot take) port 8787 unless told.
        dashboard = {"dashboard": dashboard_address is not None, "dashboard_address": dashboard_address or ":0"}
        scheduler = {"cls": Scheduler, "options": {**common, **dashboard, "port": scheduler_port}}
        options = {**common, "silence_logs": silence_logs, "dashboard": False, **worker_kwargs}
        if processes:
            # Not Nanny.pre_spawn_env, which Dask writes into our own environment: numba would then refuse to compile
            # in a process where it runs more threads already.
            threads = {"NUMBA_NUM_THREADS": os.environ.get("NUMBA_NUM_THREADS", "1")}
            options["env"] = {**threads, **(options.get("env") or {})}
            options |= ignoring_interrupts(options)
        if memory_limit is None:  # without processes each would see, and be paused for, the memory of all
            memory_limit = MEMORY_LIMIT // max(1, trainers) if processes else 0
        kind = Nanny if processes else Worker
        server = {**options, "nthreads": 1, "resources": {RESOURCE: 1}, "memory_limit": 0}
        trainer = {"cls": kind, "options": {**options, "nthreads": threads_per_trainer, "memory_limit": memory_limit}}
        self.processes = processes
        self._closing = Once("closing the cluster")
        self._servers = {f"server-{n}": {"cls": kind, "options": server} for n in range(servers)}
        super().__init__(
            workers={**self._servers, **{f"trainer-{n}": trainer for n in range(trainers)}},
            scheduler=scheduler,
            worker=trainer,
            asynchronous=asynchronous,
            security=security,
            silence_logs=silence_logs,
            name=name,
        )

    def __repr__(self) -> str:
        address = getattr(self.scheduler, "address", "not running")
        trainers = len(self.worker_spec.keys() - self._servers.keys())
        servers = len(self.worker_spec) - trainers
        return (
            f"{type(self).__name__}({address!r}, servers={servers}, trainers={trainers}, status={self.status.name!r})"
        )

    def close(self, timeout: float | None = None) -> Any:
        """End the workers and the scheduler. Several threads may ask for it: one does it, and the others wait.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for that.
        """
        if self.asynchronous:
            return super().close(timeout)
        return self._closing(super().close, timeout)

    async def _close(self) -> None:
        """Parameter servers end first, because otherwise each would report the loss of its servers, one by one."""
        controller = getattr(self.scheduler, "plugins", {}).get(Controller.name)
        if controller is not None and self.status.name == "running":
            with contextlib.suppress(DPSError, TimeoutError, RuntimeError):  # then they end with their workers
                await asyncio.wait_for(controller.close_all(), CLOSING)
        await super()._close()

    def scale(self, n: int = 0, memory: str | int | None = None, cores: int | None = None) -> Any:
        """Have `n` workers for trainers, or as many as have so much memory and so many cores. Servers stay.

        Parameters
        ----------
        n : int
            How many.
        memory, cores : optional
            At least so much of all of them together.
        """
        if self.status.name in ("closing", "closed", "failed"):  # SpecCluster closes by scaling to 0
            return super().scale(0)
        if memory is not None:
            n = max(n, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            n = max(n, math.ceil(cores / self._threads_per_worker()))
        if self.asynchronous:
            self._have(n)
            return NoOpAwaitable()

        async def in_loop() -> None:  # which may be going through the specifications at this moment
            self._have(n)

        return self.sync(in_loop)

    scale_up = scale  # the old name, which SpecCluster keeps as well

    def _have(self, n: int) -> None:
        trainers = [name for name in self.worker_spec if name not in self._servers]
        started = {worker["name"] for worker in self.scheduler_info["workers"].values()}
        trainers.sort(key=started.__contains__, reverse=True)  # go first: those not yet up, then the newest
        for name in trainers[max(0, n) :]:
            del self.worker_spec[name]
        for _ in range(n - len(trainers)):
            self.worker_spec.update(self.new_worker_spec())
        assert self.loop is not None
        self.loop.add_callback(self._correct_state)

    async def scale_down(self, workers: Any) -> None:
        """Close these workers, by name; servers among them stay."""
        await super().scale_down([name for name in workers if name not in self._servers])

    def adapt(self, *args: Any, **kwargs: Any) -> Adaptive:
        """Scale the trainers with the load, between ``minimum=`` and ``maximum=`` of them. Servers stay.

        Parameters
        ----------
        *args, **kwargs : Any
            As in `distributed.SpecCluster.adapt`. A policy given as ``Adaptive=`` sees all workers, servers too.
        """
        if not args:
            kwargs.setdefault("Adaptive", AdaptiveTrainers)
        return super().adapt(*args, **kwargs)

    def _update_worker_status(self, op: str, msg: Any) -> None:
        """A worker that its nanny has not brought back in time is given up by Dask: then another takes its place."""
        super()._update_worker_status(op, msg)
        if op == "remove":
            patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            asyncio.get_running_loop().call_later(patience + CLOSING, self._fill_up)

    def _fill_up(self) -> None:
        if self.status.name == "running":
            self._correct_state()

    def _new_worker_name(self, worker_number: int) -> str:
        return f"trainer-{worker_number}"


class AdaptiveTrainers(Adaptive):
    """Dask's policy, applied to a cluster as it would be without its servers."""

    cluster: LocalCluster

    @property
    def plan(self) -> set:
        return self.cluster.plan - self.cluster._servers.keys()

    @property
    def requested(self) -> set:
        return self.cluster.requested - self.cluster._servers.keys()

    @property
    def observed(self) -> set:
        return self.cluster.observed - self.cluster._servers.keys()

    async def target(self) -> int:
        return self._without_servers().adaptive_target(self.target_duration)

    async def workers_to_close(self, target: int) -> list[str]:
        options = {"key": self.worker_key, "attribute": "name", **self._workers_to_close_kwargs}
        return self._without_servers().workers_to_close(target=target, **options)

    def _without_servers(self) -> WithoutServers:
        return WithoutServers(self.cluster.scheduler, self.cluster._servers)


class WithoutServers:
    """A scheduler that does not see some of its workers, as far as scaling is concerned.

    Dask's answers are about all workers: with three idle servers a need of two trainers would go unnoticed, since there
    are three workers.
    """

    def __init__(self, scheduler: Any, servers: Any):
        self._scheduler = scheduler
        self.workers = {address: ws for address, ws in scheduler.workers.items() if ws.name not in servers}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def adaptive_target(self, target_duration: float) -> int:
        return Scheduler.adaptive_target(cast(Scheduler, self), target_duration)

    def workers_to_close(self, **options: Any) -> list[str]:
        return Scheduler.workers_to_close(cast(Scheduler, self), **options)


def _check_counts(**counts: tuple[int, int]) -> None:
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputTypeError(f"{name} is a whole number, not {value!r}")
        if value < least:
            raise InputError(f"{name} is at least {least}, not {value}")


def _security(wish: Security | bool | None) -> Security:
    if wish is True:
        return Security.temporary()
    if not wish:
        return Security()  # what Dask's configuration says
    if not isinstance(wish, Security):
        raise InputTypeError(f"security is True or a distributed.Security, not {wish!r}")
    return wish


def _protocol(wish: str | None, host: str | None, processes: bool, port: int, security: Security) -> str:
    """As distributed.LocalCluster chooses it, ending in ://"""
    if wish is not None:
        return wish if wish.endswith("://") else wish + "://"
    if host and "://" in host:
        return host.split("://")[0] + "://"
    if security.require_encryption:
        return "tls://"
    return "tcp://" if processes or port or host else "inproc://"
