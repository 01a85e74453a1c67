"""A worker whose scheduler is lost: how to tell, how its process joins another one, and how that one knows of it.

Dask's worker closes when the connection to its scheduler breaks; "Worker reconnection is not supported". While the
teardown of a plugin waits, its process goes on. `server/hold.py` uses that.

A scheduler has to know whether servers may come back to it, because a program that asks for a parameter server then has
to wait. The worker with which a process joins says whose servers are in it. Processes whose connection has broken look
for a scheduler once a second, so after its first seconds they have joined. (Where a machine vanishes, no connection
breaks for 30 s: these come later.) A scheduler at a port that was chosen for it follows none.

What this file uses of Dask beside public names: `Worker.batched_stream.comm`, which is the connection to the scheduler,
`Worker.periodic_callbacks`, that `Worker.close` awaits plugins before it closes listeners and before `finished()`
returns, `Scheduler.time_started` and `Scheduler._start_address`. `tests/daskapi/test_scheduler_death.py` fails when a
release of distributed changes one of these.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.comm import get_address_host

from dps.engine.daskapi.protocols import DaskScheduler

__all__ = ["held_names", "is_cut_off", "join_scheduler", "may_be_joined", "scheduler_id", "step_aside"]

# Under this name a worker tells its scheduler which parameter servers the servers in its process belong to, and until
# when these wait for a controller, in seconds since 1970.
HELD = "dps-held"
# Time in which processes that wait for a scheduler have joined the one that was started.
JOINING_SECONDS = 8.0


def is_cut_off(worker: Worker) -> bool:
    """Whether the connection of a worker to its scheduler is broken, and not: was never there, or is still open."""
    stream = getattr(worker.batched_stream, "comm", None)
    return stream is not None and stream.closed()


def step_aside(worker: Worker) -> None:
    """Stop what a closing worker still does: heartbeats, its memory monitor, and its listener, which frees the port.

    `Worker.stop` would delete the directory of the worker, too, in which servers have rows in files.
    """
    for callback in worker.periodic_callbacks.values():
        callback.stop()
    for listener in worker.listeners:
        listener.stop()


async def scheduler_id(worker: Worker, seconds: float) -> str | None:
    """The id of the scheduler at the address of the worker's scheduler; None if none answers within so many seconds.

    A scheduler that is started again has another id.
    """
    try:
        answer = await asyncio.wait_for(worker.scheduler.identity(), seconds)
    except (OSError, TimeoutError):
        return None
    return str(answer["id"])


def held_names(scheduler: DaskScheduler) -> set[str]:
    """The parameter servers of which workers have brought servers that may still wait."""
    return {name for worker in scheduler.workers.values() for name in brought_names(worker.extra)}


def brought_names(about: Mapping[str, Any]) -> Collection[str]:
    """The parameter servers of which one worker has brought servers that may still wait.

    `about` is what the worker has told the scheduler of itself.
    """
    brought = about.get(HELD)
    return brought["names"] if brought is not None and brought["until"] > time.time() else ()


def may_be_joined(scheduler: DaskScheduler) -> bool:
    """Whether processes may still join that wait for a scheduler at its address."""
    addresses: Sequence[str] = getattr(scheduler, "_start_address", ())  # the port is 0 where any one would do
    asked_for = any(re.search(r":0*[1-9]\d*$", address) for address in addresses)
    return asked_for and 0 <= time.time() - scheduler.time_started < JOINING_SECONDS


async def join_scheduler(
    worker: Worker, plugin: WorkerPlugin, names: Collection[str], waits: float, seconds: float
) -> Worker:
    """Join the scheduler at the address of the worker's scheduler with another `Worker` like it, in this process.

    It has the same name, threads, resources, memory limit, nanny and security, and the same port if that is free. It
    has none of the preloads and executors of the old one, nor its tasks. `plugin` is added before it is registered.
    `names` are the parameter servers of which the process has servers, which wait for so many seconds.

    Raises OSError, RuntimeError or TimeoutError if it has not joined within so many seconds.
    """
    address = worker.address
    options: dict[str, Any] = {
        "name": worker.name,
        "nthreads": worker.state.nthreads,
        "resources": dict(worker.state.total_resources),
        "memory_limit": worker.memory_manager.memory_limit or 0,
        "security": worker.security,
        "nanny": worker.nanny,
        "host": get_address_host(address),
        "port": [worker.port, 0],
        "protocol": address.partition("://")[0],
        "contact_address": worker.contact_address if worker.contact_address != address else None,
        "local_directory": os.path.dirname(worker.local_directory),
        "death_timeout": seconds,
        "preload": [],
        "plugins": (plugin,),
        "startup_information": {HELD: lambda _: {"names": sorted(names), "until": time.time() + waits}},
    }
    return await Worker(worker.scheduler.address, **options)
