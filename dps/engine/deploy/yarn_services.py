"""The programs in YARN's containers: ``python -m dps.engine.deploy.yarn_services scheduler``, ``worker`` or ``server``.

The scheduler publishes its address and its certificate in the application's key-value store. The store belongs to
skein, and is open only to users who may control the application.

YARN does not restart a container that ends with exit code 0. So a container ends with 0 when YARN ends it, or when the
scheduler retires it or closes itself. A worker or a server that lost its scheduler, or could not start, ends with 1,
and YARN starts a new container, as often as the service may restart.

If the scheduler is not in a container, ``watch`` runs beside the application master. Then the application lives as long
as the scheduler answers, even while it has no other container, and ends if the scheduler's process is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from distributed import Nanny, Scheduler, Security, Worker
from distributed.comm import connect
from distributed.utils import import_term

from dps import config
from dps.engine.daskapi.cordon import RESOURCE, is_dps
from dps.engine.deploy.local import WithoutServers
from dps.errors import DPSError

if TYPE_CHECKING:
    import skein

__all__ = ["TrainersScheduler", "find_scheduler", "publish"]

# Keys of the application's key-value store.
ADDRESS = "dask.scheduler"
DASHBOARD = "dask.dashboard"
SECURITY = "dps.security"
# Pause between two reads of the key-value store.
POLL_SECONDS = 0.1
ROLES = ("scheduler", "worker", "client")
CREDENTIALS = ("tls_ca_file", *(f"tls_{role}_{part}" for role in ROLES for part in ("cert", "key")))


class TrainersScheduler(Scheduler):
    """A scheduler whose advice on scaling, how many workers and which may go, leaves out servers."""

    def _trainers(self) -> WithoutServers:
        return WithoutServers(self, {ws.name for ws in self.workers.values() if is_dps(ws)})

    def adaptive_target(self, target_duration: float | None = None) -> int:
        return self._trainers().adaptive_target(target_duration)

    def workers_to_close(self, **options: object) -> list[str]:  # type: ignore[override]
        return self._trainers().workers_to_close(**options)


def publish(app: skein.ApplicationClient, scheduler: Scheduler, security: Security) -> None:
    """Write the scheduler's address and certificate to the application's key-value store."""
    if security.require_encryption:
        credentials = {name: getattr(security, name) for name in CREDENTIALS}
        app.kv[SECURITY] = json.dumps(credentials).encode()
    dashboard = scheduler.services.get("dashboard")
    if dashboard is not None:
        host = scheduler.address.split("://")[1].rpartition(":")[0]
        app.kv[DASHBOARD] = f"http://{host}:{dashboard.port}".encode()
    app.kv[ADDRESS] = scheduler.address.encode()  # last, because the other containers wait for it


def find_scheduler(app: skein.ApplicationClient, seconds: float) -> tuple[str, Security]:
    """The address of the application's scheduler and how to connect to it. Waits for it for up to `seconds`."""
    until = time.monotonic() + seconds
    while (address := app.kv.get(ADDRESS)) is None:
        if time.monotonic() > until:
            containers = ", ".join(f"{c.id} is {c.state}" for c in app.get_containers()) or "none"
            raise DPSError(
                f"application {app.id} had no scheduler after {seconds:g} s (dps.timeouts.yarn); its containers: "
                f"{containers}. REQUESTED ones wait for a node with so much memory, so many vcores and that label"
            )
        time.sleep(POLL_SECONDS)
    credentials = app.kv.get(SECURITY)
    if credentials is None:
        return address.decode(), Security()  # from Dask's configuration
    return address.decode(), Security(require_encryption=True, **json.loads(credentials))


def with_close_reason(kind: type) -> type:
    """A subclass of a class of workers or nannies that keeps the reason of the first request to close."""

    class WithCloseReason(kind):
        close_reason = ""

        async def close(self, *args: object, **kwargs: Any) -> object:
            self.close_reason = self.close_reason or kwargs.get("reason", "")
            return await super().close(*args, **kwargs)

        if issubclass(kind, Nanny):

            def close_gracefully(self, *args: object, **kwargs: Any) -> None:
                self.close_reason = self.close_reason or kwargs.get("reason", "")
                super().close_gracefully(*args, **kwargs)

    WithCloseReason.__name__ = kind.__name__  # because Dask shows the name, and names folders after it
    return WithCloseReason


async def serve(process: Scheduler | Nanny | Worker, when_up: Callable[[], None] = lambda: None) -> bool:
    """Run a scheduler, worker or nanny until it closes or this process gets a signal to end; whether a signal came."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    waits = [asyncio.ensure_future(ended.wait())]
    try:
        async with process:
            when_up()
            waits.append(asyncio.ensure_future(process.finished()))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return ended.is_set()
    finally:
        for wait in waits:
            wait.cancel()


def run_worker(kind: type, **options: object) -> int:
    """Join the application's cluster as a worker until the end; the exit code."""
    app = _application()
    address, security = find_scheduler(app, config.seconds("yarn"))

    async def run() -> int:
        name = os.environ["SKEIN_CONTAINER_ID"]
        # The working directory, because YARN deletes only the container's own folder when the container ends.
        common = {"name": name, "security": security, "local_directory": os.getcwd(), "dashboard": False}
        process = with_close_reason(kind)(address, **{**common, **options})
        stopped = await serve(process)
        return 0 if stopped or process.close_reason.startswith("scheduler-") else 1

    return asyncio.run(run())


def _application() -> skein.ApplicationClient:
    import skein

    return skein.ApplicationClient.from_current()


def _resources() -> skein.Resources:
    import skein

    return skein.properties.container_resources


@click.group()
def main() -> None:
    """The programs in YARN's containers."""


@main.command()
@click.option("--tls", is_flag=True, help="Make a certificate, and accept TLS only.")
def scheduler(tls: bool) -> None:
    """Dask's scheduler. It writes its address to skein's key-value store for the other containers."""
    app = _application()

    async def run() -> None:
        security = Security.temporary() if tls else Security()
        protocol = "tls://" if security.require_encryption else "tcp://"
        process = TrainersScheduler(protocol=protocol, port=0, security=security, dashboard_address=":0")
        stopped = await serve(process, lambda: publish(app, process, security))
        if not stopped:  # a client has closed the scheduler, which ends the application
            app.shutdown("SUCCEEDED", "the scheduler was closed")

    asyncio.run(run())


@main.command()
@click.option("--class", "kind", default="distributed.Nanny", help="The class of workers.")
@click.option("--options", default="{}", help="More arguments for it, as JSON.")
def worker(kind: str, options: str) -> None:
    """A worker for trainers and other tasks."""
    size = _resources()
    limits = {"nthreads": size.vcores, "memory_limit": size.memory * 2**20}
    sys.exit(run_worker(import_term(kind), **{**limits, **json.loads(options)}))


@main.command()
def server() -> None:
    """A worker for servers. It has no nanny, because YARN restarts it, and no memory limit of Dask."""
    sys.exit(run_worker(Worker, nthreads=1, memory_limit=0, resources={RESOURCE: 1}))


@main.command()
def watch() -> None:
    """Wait for the end of a scheduler outside YARN."""
    address, security = find_scheduler(_application(), config.seconds("yarn"))
    asyncio.run(outlive(address, security))
    sys.exit(f"the scheduler {address} is gone, and its application ends")


async def outlive(address: str, security: Security) -> None:
    """Return when no connection to the scheduler can be made any more."""
    while True:
        try:
            comm = await connect(address, config.seconds("connect"), **security.get_connection_args("client"))
        except OSError:
            return
        with contextlib.suppress(OSError):
            await comm.read()  # the scheduler sends nothing, so this ends with the connection
        comm.abort()
        await asyncio.sleep(1)


if __name__ == "__main__":
    main()
