"""A worker whose scheduler is lost: how to tell, and how its process joins another scheduler with another worker.

Dask's worker closes when the connection to its scheduler breaks; "Worker reconnection is not supported". While the
teardown of a plugin waits, its process goes on. `server/hold.py` uses that.

What this file uses of Dask beside public names: `Worker.batched_stream.comm`, which is the connection to the scheduler,
`Worker.periodic_callbacks`, and that `Worker.close` awaits plugins before it closes listeners and before `finished()`
returns. `tests/daskapi/test_scheduler_death.py` fails when a release of distributed changes one of these.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from distributed import Worker, WorkerPlugin
from distributed.comm import get_address_host

__all__ = ["is_cut_off", "join_scheduler", "scheduler_id", "step_aside"]


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


async def join_scheduler(worker: Worker, plugin: WorkerPlugin, seconds: float) -> Worker:
    """Join the scheduler at the address of the worker's scheduler with another `Worker` like it, in this process.

    It has the same name, threads, resources, memory limit, nanny and security, and the same port if that is free. It
    has none of the preloads and executors of the old one, nor its tasks. `plugin` is added before it is registered.

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
    }
    return await Worker(worker.scheduler.address, **options)
