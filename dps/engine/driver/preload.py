"""``--preload dps``, for ``dask scheduler`` and ``dask worker``. Nothing needs it; what is done late, it does early.

The scheduler gets its plugin at once, not from the first driver that comes: workers with the resource dps are kept free
of ordinary tasks from the beginning. Told to (``--servers 2``), it also starts a parameter server as soon as there are
workers for it. A worker imports dps before it takes any work.

Dask takes `dask_setup` and `dask_teardown` from the module ``dps``; what follows the module on the command line is for
the former.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import click
from distributed import Scheduler, Worker

from dps import config
from dps.engine.controller.plugin import Controller
from dps.engine.dashboard import Surfaces
from dps.engine.server.actor import Server
from dps.engine.state.names import check_name
from dps.errors import DPSError, InputError

__all__ = ["dask_setup", "dask_teardown"]

logger = logging.getLogger("distributed.dps.preload")

# Pause until a start that failed is tried again.
RETRY_SECONDS = 5.0
# Pause between two looks whether the workers have come.
POLL_SECONDS = 0.1

# Tasks that open a parameter server, by the scheduler's id.
opening: dict[str, asyncio.Task] = {}


@click.command()
@click.option("--servers", type=click.IntRange(1, 1024), help="Start a parameter server with so many servers")
@click.option("--copies", type=click.IntRange(1), default=1, show_default=True, help="Of each row, on so many servers")
@click.option("--name", default="dps", show_default=True, help="Of the parameter server")
async def dask_setup(process: Scheduler | Worker, servers: int | None, copies: int, name: str) -> None:
    """What Dask calls with the scheduler, or with a worker."""
    if isinstance(process, Scheduler):
        check_name("parameter server", name)
        if copies > (servers or 1):
            raise InputError(f"--copies {copies} of each row need as many servers, not {servers}")
        await process.register_scheduler_plugin(Controller(Server, Surfaces()), idempotent=True)
        if servers is not None:
            opening[process.id] = asyncio.create_task(_open(process, servers, copies, name))


async def dask_teardown(process: Scheduler | Worker) -> None:
    if (task := opening.pop(process.id, None)) is not None:
        task.cancel()


async def _open(scheduler: Scheduler, servers: int, copies: int, name: str) -> None:
    """Start a parameter server once there are workers with the resource for it."""
    controller = cast(Controller, scheduler.plugins[Controller.name])
    while name not in controller.sessions:
        while len(controller.cordon.workers()) < servers:
            await asyncio.sleep(POLL_SECONDS)
        try:
            await controller.sessions.open(name, servers=servers, copies=copies, timeout=config.seconds("start"))
        except DPSError as error:
            logger.warning("parameter server %r does not start, and will be tried again: %s", name, error)
            await asyncio.sleep(RETRY_SECONDS)
    opening.pop(scheduler.id, None)
