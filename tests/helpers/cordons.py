"""A scheduler plugin that has only the cordon, and an actor to put behind it."""

from __future__ import annotations

from distributed import get_worker
from distributed.diagnostics.plugin import SchedulerPlugin
from servers import wait_until

from dps.engine.daskapi.cordon import Cordon


class Plugin(SchedulerPlugin):
    """What the controller does with a cordon, and no more."""

    name = "test-cordon"

    async def start(self, scheduler):
        self.cordon = Cordon()
        self.cordon.attach(scheduler)

    def add_worker(self, scheduler, worker):
        self.cordon.add_worker(worker)

    def valid_workers_downscaling(self, scheduler, workers):
        return self.cordon.valid_workers_downscaling(workers)


class Shard:
    """An actor."""

    def __init__(self, number=0):
        self.number = number

    def where(self):
        return get_worker().name, self.number


def cordoned(dask_scheduler):
    return dask_scheduler.plugins["test-cordon"].cordon.workers()


def admit(keys, dask_scheduler):
    return dask_scheduler.plugins["test-cordon"].cordon.admit(keys)


def actor(client, address, number=0):
    """An actor at `address`, let through as the controller does it."""
    future = client.submit(Shard, number, actor=True, workers=[address], resources={"dps": 1}, pure=False)

    def admitted():
        client.run_on_scheduler(admit, [future.key])
        return future.status != "pending"

    wait_until(admitted)
    return future
