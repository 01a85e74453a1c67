"""What servers have the nanny of their worker do: stop its memory monitor, and go on after the loss of a scheduler.

A nanny ends its worker when the worker's process takes 95 % of its memory limit, because it takes that for a leak. A
server holds rows on purpose. Where `dps.memory` bounds it within the limit, and no ordinary task runs beside it, it
refuses rows in time by itself, and an end by the nanny would only lose them. So the server has its nanny stop the
callback `memory_monitor`, for as long as the nanny lives. To set `memory_terminate_fraction` to False later would not
do: it counts as 0 then, and the nanny kills each worker that it starts.

A worker that closes tells its nanny to start no other one. When its process has joined another scheduler at the same
address (`server/hold.py`), the nanny takes that back, and restarts the worker's process again if it dies.

What this file uses of Dask beside public names: the handler ``run`` of nannies, the entry ``memory_monitor`` of their
periodic callbacks, and their `status`. Where one of them fails, a warning says so, and the nanny does as it always did.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed.protocol.pickle import dumps

from dps.engine.daskapi.cordon import RESOURCE

if TYPE_CHECKING:
    from distributed import Nanny, Worker

__all__ = ["is_bounded", "resume_nanny", "stop_memory_monitor"]

logger = logging.getLogger(__name__)


def is_bounded(worker: Worker, budget: int, limit: int) -> bool:
    """Whether a server's budget bounds the memory of its worker's process, which has this limit (both in bytes).

    A `budget` of 0 is none. A worker without the resource dps may run tasks, whose memory no budget of a server bounds.
    """
    return 0 < budget <= limit and worker.state.total_resources.get(RESOURCE, 0) > 0


async def stop_memory_monitor(worker: Worker, seconds: float) -> None:
    """Have the nanny of a worker stop its memory monitor; at most `seconds` pass. Nothing where there is no nanny."""

    def stop(dask_worker: Nanny) -> None:  # an inner function travels by value, so the nanny need not import dps
        monitor = dask_worker.periodic_callbacks.get("memory_monitor")
        if monitor is not None:  # a worker without a memory limit has none
            monitor.stop()

    if error := await _failure_to_run(worker, stop, seconds):
        logger.warning(
            "the nanny may end this server at 95 %% of its memory limit, because it did not stop its memory monitor "
            "(%s: %s); start the worker with --memory-limit 0",
            type(error).__name__,
            error,
        )


async def resume_nanny(worker: Worker, seconds: float) -> None:
    """Have the nanny of a worker watch over its process again, after the worker told it that it closes.

    At most `seconds` pass. Nothing where there is no nanny.
    """

    def resume(dask_worker: Nanny) -> None:
        if dask_worker.status.name == "closing_gracefully":
            dask_worker.status = type(dask_worker.status)["running"]

    if error := await _failure_to_run(worker, resume, seconds):
        logger.warning(
            "the nanny will not restart this worker if its process dies, because it was told that the worker closes "
            "and did not take that back (%s: %s); another worker with the resource dps replaces it then",
            type(error).__name__,
            error,
        )


async def _failure_to_run(worker: Worker, function: Callable[[Nanny], None], seconds: float) -> Exception | None:
    """Run a function in the process of a worker's nanny; why it failed, or None if it did not, or there is no nanny."""
    if worker.nanny is None:
        return None
    try:
        async with worker.rpc(str(worker.nanny)) as nanny:  # it is an address, and Dask's annotation says otherwise
            answer = await asyncio.wait_for(nanny.run(function=dumps(function)), seconds)
        if answer["status"] != "OK":
            raise answer["exception"]
    except Exception as error:
        return error
    return None
