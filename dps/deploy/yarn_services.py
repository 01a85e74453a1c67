"""What runs inside YARN's containers: ``python -m dps.deploy.yarn_services scheduler``, ``worker`` or ``server``.

The scheduler tells the others where it is, and with which certificate to speak to it, through the application's
key-value store, which is skein's and open to those only who may control the application.

A container that ends with 0 is not started again. So one does when it was told to end: by YARN, or by the scheduler,
which retires it or closes itself. A worker or a server that lost its scheduler, or could not start, ends with 1, and
YARN has another try, in a new container, as often as the service may restart.

Where the scheduler is not in a container, ``watch`` runs beside the application master: the application lives as long
as the scheduler answers, also while it has no other container, and no longer, should the scheduler's process be killed.
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
from typing import Any

import click
from distributed import Nanny, Scheduler, Security, Worker
from distributed.comm import connect
from distributed.utils import import_term

from dps import config
from dps.cordon import RESOURCE, is_dps
from dps.deploy.local import WithoutServers
from dps.errors import DPSError

__all__ = ["TrainersScheduler", "find_scheduler", "publish"]

ADDRESS, DASHBOARD, SECURITY = "dask.scheduler", "dask.dashboard", "dps.security"  # keys of the key-value store
POLL = 0.1  # seconds between two looks at it
ROLES = ("scheduler", "worker", "client")
CREDENTIALS = ("tls_ca_file", *(f"tls_{role}_{part}" for role in ROLES for part in ("cert", "key")))


class TrainersScheduler(Scheduler):
    """A scheduler whose advice on how many workers there should be, and which may go, leaves servers out."""

    def _trainers(self) -> WithoutServers:
        return WithoutServers(self, {ws.name for ws in self.workers.values() if is_dps(ws)})

    def adaptive_target(self, target_duration: Any = None) -> int:
        return self._trainers().adaptive_target(target_duration)

    def workers_to_close(self, **options: Any) -> list[str]:  # type: ignore[override]
        return self._trainers().workers_to_close(**options)


def publish(app: Any, scheduler: Scheduler, security: Security) -> None:
    """Tell an application where its scheduler is."""
    if security.require_encryption:
        credentials = {name: getattr(security, name) for name in CREDENTIALS}
        app.kv[SECURITY] = json.dumps(credentials).encode()
    dashboard = scheduler.services.get("dashboard")
    if dashboard is not None:
        host = scheduler.address.split("://")[1].rpartition(":")[0]
        app.kv[DASHBOARD] = f"http://{host}:{dashboard.port}".encode()
    app.kv[ADDRESS] = scheduler.address.encode()  # the last: others wait for it


def find_scheduler(app: Any, seconds: float) -> tuple[str, Security]:
    """An application's scheduler, and how to speak to it; `seconds` to wait for one."""
    until = time.monotonic() + seconds
    while (address := app.kv.get(ADDRESS)) is None:
        if time.monotonic() > until:
            containers = ", ".join(f"{c.id} is {c.state}" for c in app.get_containers()) or "none"
            raise DPSError(
                f"application {app.id} had no scheduler after {seconds:g} s (dps.timeouts.yarn); its containers: "
                f"{containers}. REQUESTED ones wait for a node with so much memory, so many vcores and that label"
            )
        time.sleep(POLL)
    credentials = app.kv.get(SECURITY)
    if credentials is None:
        return address.decode(), Security()  # what Dask's configuration says
    return address.decode(), Security(require_encryption=True, **json.loads(credentials))


def told(kind: type) -> type:
    """That class of workers or nannies, which also remembers why it was first told to close."""

    class Told(kind):
        why = ""

        async def close(self, *args: Any, **kwargs: Any) -> Any:
            self.why = self.why or kwargs.get("reason", "")
            return await super().close(*args, **kwargs)

        if issubclass(kind, Nanny):

            def close_gracefully(self, *args: Any, **kwargs: Any) -> None:
                self.why = self.why or kwargs.get("reason", "")
                super().close_gracefully(*args, **kwargs)

    Told.__name__ = kind.__name__  # which Dask shows, and names folders after
    return Told


async def serve(process: Any, when_up: Callable[[], None] = lambda: None) -> bool:
    """Run a scheduler, worker or nanny until it is closed, or we are told to end; whether it was the latter."""
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


def run_worker(kind: type, **options: Any) -> int:
    """Join the application's cluster as a worker; the exit code."""
    app = _application()
    address, security = find_scheduler(app, config.seconds("yarn"))

    async def run() -> int:
        name = os.environ["SKEIN_CONTAINER_ID"]
        # YARN clears the container's folder, and only that, when the container ends.
        common = {"name": name, "security": security, "local_directory": os.getcwd(), "dashboard": False}
        process = told(kind)(address, **{**common, **options})
        stopped = await serve(process)
        return 0 if stopped or process.why.startswith("scheduler-") else 1

    return asyncio.run(run())


def _application() -> Any:
    import skein

    return skein.ApplicationClient.from_current()


def _resources() -> Any:
    import skein

    return skein.properties.container_resources


@click.group()
def main() -> None:
    """What containers run."""


@main.command()
@click.option("--tls", is_flag=True, help="Make a certificate, and speak TLS only.")
def scheduler(tls: bool) -> None:
    """The scheduler."""
    app = _application()

    async def run() -> None:
        security = Security.temporary() if tls else Security()
        protocol = "tls://" if security.require_encryption else "tcp://"
        process = TrainersScheduler(protocol=protocol, port=0, security=security, dashboard_address=":0")
        stopped = await serve(process, lambda: publish(app, process, security))
        if not stopped:  # but closed by a client: that is the end of the application
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
    """A worker for servers. It has no nanny, since YARN is one, and no limit of memory that Dask would act upon."""
    sys.exit(run_worker(Worker, nthreads=1, memory_limit=0, resources={RESOURCE: 1}))


@main.command()
def watch() -> None:
    """Wait for the end of a scheduler that is elsewhere."""
    address, security = find_scheduler(_application(), config.seconds("yarn"))
    asyncio.run(outlive(address, security))
    sys.exit(f"the scheduler {address} is gone, and its application ends")


async def outlive(address: str, security: Security) -> None:
    """Return once a scheduler is gone."""
    while True:
        try:
            comm = await connect(address, config.seconds("connect"), **security.get_connection_args("client"))
        except OSError:
            return
        with contextlib.suppress(OSError):
            await comm.read()  # nothing comes, before the end
        comm.abort()
        await asyncio.sleep(1)


if __name__ == "__main__":
    main()
