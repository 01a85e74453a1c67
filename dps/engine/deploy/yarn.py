"""A Dask cluster in containers of YARN, with containers for servers and containers for trainers.

Methods and parameters that dask-yarn has too mean the same here. Like dask-yarn, this module uses skein: skein's
driver, a Java process, talks to YARN, and skein's application master starts containers and replaces lost ones.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import dask
from distributed import Security
from distributed.core import Status, rpc
from distributed.deploy import Adaptive, Cluster

from dps import config
from dps.engine.deploy.local import Synced
from dps.engine.deploy.server_workers import too_few_are_free, workers_in_use
from dps.engine.deploy.yarn_application import Application
from dps.engine.deploy.yarn_services import TrainersScheduler, find_scheduler, publish
from dps.engine.deploy.yarn_specification import SCHEDULER, SERVER, WORKER, read_specification, skein, specification
from dps.engine.wire.once import Once
from dps.errors import InputError, InputTypeError

if TYPE_CHECKING:
    from collections.abc import Collection, Generator
    from types import TracebackType

    from tornado.ioloop import IOLoop

__all__ = ["YarnCluster"]

LISTEN = ("host", "port", "dashboard_address")
# Pause between two requests for the list of containers.
POLL_SECONDS = 0.2


class YarnCluster(Cluster):
    """A Dask cluster on YARN: a scheduler, workers for trainers and other tasks, workers for servers.

    Parameters that are left out come from Dask's configuration, under ``dps.yarn``; see :func:`dps.yarn.specification`.

    Parameters
    ----------
    environment : str, optional
        The Python environment of all containers: the archive of one, or ``venv:///path``, ``conda:///path``,
        ``python:///path/to/python`` for one that every node has.
    n_workers, n_servers : int, optional
        Number of workers for trainers and other tasks, and number of workers for servers.
    host, port, dashboard_address : optional
        With ``deploy_mode="local"``: where the scheduler and its dashboard listen.
    skein_client : skein.Client, optional
        By default the cluster starts one, and closes it. Make one yourself to log in with a Kerberos keytab.
    asynchronous : bool
        For use inside a running event loop: ``async with YarnCluster(..., asynchronous=True) as cluster``.
    loop : tornado.ioloop.IOLoop, optional
        The loop to run in.
    **options : Any
        All other parameters of :func:`dps.yarn.specification`: ``worker_memory``, ``server_label``, ``queue``, ...

    Attributes
    ----------
    security : distributed.Security
        The certificate with which to connect, where the cluster encrypts.

    Notes
    -----
    Dask counts the workers of servers among its workers, as paused ones while a parameter server runs. `scale` and
    `adapt` change the number of workers for trainers; `scale_servers` that of workers for servers.

    Examples
    --------
    >>> from dps import ParameterServer, YarnCluster
    >>> with YarnCluster("env.tar.gz", n_workers=8, n_servers=2) as cluster:  # doctest: +SKIP
    ...     with ParameterServer(cluster, servers=2, copies=2) as ps:
    ...         ...
    """

    scheduler_comm: rpc

    def __init__(
        self,
        environment: str | None = None,
        n_workers: int | None = None,
        n_servers: int | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        dashboard_address: str | None = None,
        skein_client: skein.Client | None = None,
        asynchronous: bool = False,
        loop: IOLoop | None = None,
        **options: Any,
    ):
        spec = specification(environment, n_workers, n_servers, **options)
        listen = {"host": host, "port": port, "dashboard_address": dashboard_address}
        self._begin(Application(skein_client, spec), asynchronous, loop, listen, options.get("security"))

    @classmethod
    def from_specification(
        cls,
        spec: skein.ApplicationSpec | dict | str,
        skein_client: skein.Client | None = None,
        asynchronous: bool = False,
        loop: IOLoop | None = None,
    ) -> YarnCluster:
        """Start an application. Without a service ``dask.scheduler``, the scheduler runs in this process.

        Parameters
        ----------
        spec : skein.ApplicationSpec, dict or str
            A specification, or the path of its YAML or JSON file.
        skein_client, asynchronous, loop : optional
            As above.
        """
        self = cls.__new__(cls)
        self._begin(Application(skein_client, read_specification(spec)), asynchronous, loop)
        return self

    @classmethod
    def from_application_id(
        cls,
        app_id: str,
        skein_client: skein.Client | None = None,
        asynchronous: bool = False,
        loop: IOLoop | None = None,
    ) -> YarnCluster:
        """Connect to a cluster that is running. :meth:`close` then only disconnects; :meth:`shutdown` ends the cluster.

        Parameters
        ----------
        app_id : str
            Such as ``"application_1526134340424_0012"``.
        skein_client, asynchronous, loop : optional
            As above.
        """
        self = cls.__new__(cls)
        self._begin(Application(skein_client, app_id=app_id), asynchronous, loop)
        return self

    @classmethod
    def from_current(cls, asynchronous: bool = False, loop: IOLoop | None = None) -> YarnCluster:
        """Connect to the cluster in one of whose containers this process runs, as :meth:`from_application_id` does."""
        self = cls.__new__(cls)
        self._begin(Application(client=skein.ApplicationClient.from_current()), asynchronous, loop)
        return self

    def _begin(
        self,
        application: Application,
        asynchronous: bool,
        loop: IOLoop | None,
        listen: dict[str, str | int | None] | None = None,
        security: bool | None = None,
    ) -> None:
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=True)
        self.security = Security()
        self._application = application
        self._closing = Once("closing the cluster")
        self._scheduler: TrainersScheduler | None = None
        self._listen, self._encrypt = listen or {}, security
        self._end: tuple[str | None, str | None] = (None, None)  # status and diagnostics for YARN
        self._trainers: set[str] = set()  # names of the containers for trainers
        if not self.called_from_running_loop:
            self._loop_runner.start()
            try:
                self.sync(self._start)
            except BaseException as error:
                if (
                    self.status is not Status.closed
                ):  # interrupted, perhaps while the application waited in YARN's queue
                    self._application.close("KILLED", repr(error))
                self._loop_runner.stop()
                raise

    # -- up

    def __await__(self) -> Generator[object, None, YarnCluster]:
        async def begun() -> YarnCluster:
            if self.status is Status.created:
                await self._start()
            return self

        return begun().__await__()

    async def _start(self) -> None:
        self.status = Status.starting
        try:
            if self.spec is not None and SCHEDULER not in self.spec.services:
                await self._start_scheduler()
            address, self.security = await asyncio.to_thread(self._connect)
            self.name = self.app_id
            self.scheduler_comm = rpc(address, connection_args=self.security.get_connection_args("client"))
            await super()._start()
        except BaseException as error:
            self._failed(error)
            await self._close()
            raise

    async def _start_scheduler(self) -> None:
        encrypt = dask.config.get("dps.yarn.security") if self._encrypt is None else self._encrypt
        self.security = Security.temporary() if encrypt else Security()
        where = {name: dask.config.get(f"dps.yarn.{name.replace('_', '-')}") for name in LISTEN}
        where |= {name: value for name, value in self._listen.items() if value is not None}
        protocol = "tls://" if self.security.require_encryption else "tcp://"
        self._scheduler = await TrainersScheduler(protocol=protocol, security=self.security, **where)

    def _connect(self) -> tuple[str, Security]:
        """Start the application or connect to it; the address of its scheduler and how to connect to that."""
        application = self._application
        with application.explained():
            application.connect()
            self._end = ("SUCCEEDED" if application.started else None), None
            if self._scheduler is not None:
                publish(application.client, self._scheduler, self.security)
            return find_scheduler(application.client, config.seconds("yarn"))

    # -- what there is

    @property
    def spec(self) -> skein.ApplicationSpec | None:
        """The application's specification, a `skein.ApplicationSpec`."""
        return self._application.spec

    @property
    def application_client(self) -> skein.ApplicationClient:
        """The application's master, a `skein.ApplicationClient`: its key-value store, its containers, its web pages."""
        return self._application.client

    @property
    def app_id(self) -> str:
        """The application's id in YARN."""
        return str(self._application.id)

    def containers(self, *services: str) -> list[skein.model.Container]:
        """The containers that run, or that YARN has not started yet.

        Parameters
        ----------
        *services : str
            Only containers of these services: ``"dask.worker"``, ``"dps.server"``, ``"dask.scheduler"``.
        """
        return self._application.containers(*services)

    def logs(self, scheduler: bool = True, workers: bool | list[str] = True) -> Synced:
        """The last log messages of the scheduler and of workers. ``yarn logs -applicationId ...`` prints all of them.

        Parameters
        ----------
        scheduler : bool
            Whether to include the scheduler's messages.
        workers : bool or list of str
            Whether to include the messages of all workers, or the addresses of some.
        """
        return self.get_logs(cluster=False, scheduler=scheduler, workers=workers)

    @property
    def plan(self) -> set[str]:
        """The names of the workers for trainers that the cluster has asked YARN for, as YARN last listed them."""
        return self._trainers

    requested = plan

    @property
    def observed(self) -> set[str]:
        """The names of the workers for trainers that are connected to the scheduler."""
        return {name for name in super().observed if str(name).startswith(WORKER)}

    # -- scaling

    def scale(self, n: int) -> Synced:
        """Change the number of workers for trainers. Servers stay.

        Parameters
        ----------
        n : int
            The number of workers. Surplus workers that are not yet up are removed first, then those with the least
            data, after Dask has moved the data.
        """
        return self.sync(self._scale, n)

    def scale_servers(self, n: int, timeout: float = 600) -> Synced:
        """Change the number of workers for servers. Workers for trainers stay.

        The parameter server starts and closes the servers on them. To grow, add workers, then call ``ps.scale(more)``.
        To shrink, call ``ps.scale(fewer)``, then remove workers: this waits for workers that still have a server.

        Parameters
        ----------
        n : int
            The number of workers.
        timeout : float
            Seconds to wait until enough workers have no server.
        """
        return self.sync(self._scale_servers, n, timeout)

    def adapt(self, *args: Any, **kwargs: Any) -> Adaptive:
        """Scale the number of workers for trainers with the load, between ``minimum=`` and ``maximum=``. Servers stay.

        Parameters
        ----------
        *args, **kwargs : Any
            As in `distributed.deploy.Cluster.adapt`.
        """
        if not args:
            kwargs.setdefault("Adaptive", AdaptiveContainers)
        return super().adapt(*args, **kwargs)

    async def _scale(self, n: int) -> None:
        surplus = await self._grow(WORKER, n)
        if surplus > 0:
            waiting = sorted(self._trainers - self.observed)
            chosen = await self.scheduler_comm.workers_to_close(n=max(0, surplus - len(waiting)), attribute="name")
            names = [*waiting, *chosen, *sorted(self._trainers - {*waiting, *chosen})][:surplus]
            await self.scale_down(names)

    async def _grow(self, service: str, n: int) -> int:
        """Ask YARN for more containers of a service if it has fewer than `n`; the number of surplus ones."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise InputTypeError(f"the number of containers is a whole number, not {n!r}")
        if n < 0:
            raise InputError(f"the number of containers is at least 0, not {n}")
        names = await self.refresh(service)
        if len(names) < n:
            await asyncio.to_thread(self.application_client.scale, service, n)
            await self.refresh(service)
        return len(names) - n

    async def refresh(self, service: str = WORKER) -> set[str]:
        """Ask YARN for the names of the containers of a service, because YARN replaces lost ones by itself.

        :attr:`plan` then has the names of the workers for trainers.

        Parameters
        ----------
        service : str
            ``"dask.worker"``, ``"dps.server"`` or ``"dask.scheduler"``.
        """
        names = {c.id for c in await asyncio.to_thread(self.containers, service)}
        if service == WORKER:
            self._trainers = names
        return names

    async def scale_down(self, workers: Collection[str]) -> None:
        """Empty the workers of these names and end their containers. Servers stay."""
        names = [name for name in workers if str(name).startswith(WORKER)]
        self._trainers -= set(names)
        # Dask does not close the workers, because YARN replaces a container that ends by itself with an error.
        await self.scheduler_comm.retire_workers(names=names, remove=False, close_workers=False)
        await asyncio.to_thread(self._application.kill, names)

    async def _scale_servers(self, n: int, timeout: float) -> None:
        until = time.monotonic() + timeout
        while (surplus := await self._grow(SERVER, n)) > 0:
            free = sorted(await self.refresh(SERVER) - await workers_in_use(self), key=_number, reverse=True)
            await asyncio.to_thread(self._application.kill, free[:surplus])
            if len(free) >= surplus:
                return
            if time.monotonic() > until:
                raise too_few_are_free(surplus - len(free), n, timeout)
            await asyncio.sleep(POLL_SECONDS)

    # -- the end

    def shutdown(self, status: str = "SUCCEEDED", diagnostics: str | None = None) -> Synced:
        """End the application, also if another process has started it, and close this cluster object.

        Parameters
        ----------
        status : {"SUCCEEDED", "FAILED", "KILLED"}
            The final status that YARN shows.
        diagnostics : str, optional
            The reason that YARN shows.
        """
        self._end = status, diagnostics
        return self.close()

    def close(self, timeout: float | None = None) -> Synced:
        """Close this cluster object, and end the application if this object has started it.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait for the end.
        """
        if self.called_from_running_loop:
            return super().close(timeout)
        return self._closing(self._close_and_stop, timeout)

    def _close_and_stop(self, timeout: float | None) -> None:
        super().close(timeout)
        self._loop_runner.stop()

    async def _close(self) -> None:
        if self.status in (Status.closing, Status.closed):
            return
        await super()._close()
        await asyncio.to_thread(self._application.close, *self._end)
        if self._scheduler is not None:
            await self._scheduler.close()

    def _failed(self, error: BaseException | None) -> None:
        """Let the application end as FAILED, if there is an error and this object has started the application."""
        if error is not None and self._application.started:
            self._end = "FAILED", repr(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._failed(error)
        super().__exit__(kind, error, traceback)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._failed(error)
        await super().__aexit__(kind, error, traceback)


class AdaptiveContainers(Adaptive):
    """Dask's policy of scaling; it asks YARN for the containers before each decision."""

    cluster: YarnCluster

    async def target(self) -> int:
        await self.cluster.refresh()
        return await super().target()

    async def scale_down(self, workers: Collection[str]) -> None:  # type: ignore[override]  # it gets names
        await self.cluster.scale_down(workers)


def _number(container: str) -> int:
    """
    >>> _number("dps.server_12")
    12
    """
    return int(container.rpartition("_")[2])
