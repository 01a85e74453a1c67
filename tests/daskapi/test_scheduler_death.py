"""What Dask does when its scheduler dies, as far as `docs/design/scheduler.md` rests on it. Each test fails when a
release of distributed does it in another way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from distributed import Client, Nanny, Scheduler, SchedulerPlugin, Worker, WorkerPlugin, wait
from distributed.core import Status, rpc
from distributed.protocol.pickle import dumps
from servers import PATIENCE, wait_until
from shell import Shell

from dps.engine.daskapi.lost_scheduler import HELD, JOINING_SECONDS, held_names, may_be_joined

QUIET = {"dashboard_address": ":0", "host": "127.0.0.1"}


class Counter:
    """A stateful actor."""

    def __init__(self):
        self.count = 0

    def add(self) -> int:
        self.count += 1
        return self.count


COUNTERS: dict[str, Counter] = {}  # the actors of this process, which outlive each Worker


def new_counter() -> Counter:
    return COUNTERS.setdefault("only", Counter())


@pytest.fixture(autouse=True)
def no_counters():
    COUNTERS.clear()
    yield
    COUNTERS.clear()


class Hold(WorkerPlugin):
    """Holds the closing of its worker until `free` is set, and notes the worker's state."""

    name = "test-hold"

    def __init__(self):
        self.entered, self.free = asyncio.Event(), asyncio.Event()
        self.status: Status | None = None
        self.cut_off: bool | None = None

    async def teardown(self, worker: Worker) -> None:
        self.status, self.cut_off = worker.status, worker.batched_stream.comm.closed()
        self.entered.set()
        await self.free.wait()


async def within(awaitable):
    return await asyncio.wait_for(awaitable, PATIENCE)


async def actor_call(worker: Worker, key: str, method: str) -> int:
    """Call an actor through its worker, as the scheduler does, without a client."""
    async with rpc(worker.address) as remote:
        answer = await remote.actor_execute(actor=key, function=method, args=[], kwargs={})
        return answer["result"]


def cut(scheduler: Scheduler) -> None:
    """Break the connections of all workers, as the kernel does when the scheduler's process is killed."""
    for stream in scheduler.stream_comms.values():
        stream.comm.abort()


def test_an_actor_outlives_its_worker_and_joins_the_next_scheduler():
    """`Worker.close` awaits the teardown of plugins before it closes its listener and before `finished()`; an actor
    may be made by a function, which returns an object that there was before; a process may have two Workers.
    """

    async def main():
        hold = Hold()
        async with Scheduler(port=0, **QUIET) as first, Scheduler(port=0, **QUIET) as second:
            worker = await Worker(first.address, name="server", resources={"dps": 1}, plugins=[hold], **QUIET)
            try:
                async with Client(first.address, asynchronous=True, set_as_default=False) as client:
                    await within(client.submit(new_counter, actor=True, key="old"))
                    counter = worker.state.actors["old"]
                    cut(first)
                    await within(hold.entered.wait())
                    assert (hold.status, hold.cut_off) == (Status.closing, True)
                    assert await actor_call(worker, "old", "add") == 1, "the worker answers while it is held"
                for callback in worker.periodic_callbacks.values():
                    callback.stop()
                held = {"names": ["one", "other"], "until": time.time() + PATIENCE}
                port, told = worker.port, {"startup_information": {HELD: lambda _: held}}
                for listener in worker.listeners:
                    listener.stop()  # releases the port, for a worker whose port is fixed
                async with (
                    Worker(second.address, name="server", port=port, resources={"dps": 1}, **told, **QUIET) as again,
                    Client(second.address, asynchronous=True, set_as_default=False) as client,
                ):
                    await within(client.submit(new_counter, actor=True, key="new", resources={"dps": 1}))
                    assert again.state.actors["new"] is counter
                    assert held_names(second) == {"one", "other"}
                    second.workers[again.address].extra[HELD]["until"] = time.time()
                    assert not held_names(second), "they have waited for long enough"
                    assert await actor_call(again, "new", "add") == 2
                    assert os.path.isdir(worker.local_directory), "rows in files are there"
                    assert not hold.free.is_set()
                    finished = asyncio.ensure_future(worker.finished())
                    await asyncio.sleep(0)
                    assert not finished.done(), "dask worker ends when finished() returns"
                    hold.free.set()
                    await within(finished)
            finally:
                hold.free.set()
                await worker.close()

    asyncio.run(main())


def test_a_scheduler_knows_whether_its_port_was_asked_for_and_how_old_it_is():
    async def main():
        async with Scheduler(port=0, **QUIET) as any_port:
            assert not may_be_joined(any_port)
            port = any_port.port
        async with Scheduler(port=port, **QUIET) as scheduler:
            assert may_be_joined(scheduler)
            scheduler.time_started -= JOINING_SECONDS
            assert not may_be_joined(scheduler)
        async with Scheduler(protocol="inproc", dashboard_address=":0") as local:
            assert not may_be_joined(local)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["remove_worker", "close"])
def test_a_worker_that_is_told_to_close_is_still_connected(how):
    """By this a plugin tells a lost scheduler from one that removes its worker.

    (At the end of a scheduler, a worker with a nanny is cut off before its plugins hear of it. So the controller has to
    say what end it is: see the next test.)
    """

    async def main():
        hold = Hold()
        hold.free.set()
        async with (
            Scheduler(port=0, **QUIET) as scheduler,
            Worker(scheduler.address, plugins=[hold], **QUIET) as worker,
        ):
            if how == "close":
                await worker.close()
            else:
                await scheduler.remove_worker(worker.address, stimulus_id="test")
            await within(hold.entered.wait())
            assert hold.cut_off is False
            await within(worker.finished())

    asyncio.run(main())


def test_plugins_hear_of_a_planned_end_before_workers_do():
    """`before_close` is where the controller tells the servers that no other scheduler will come."""

    async def main():
        noted = []

        class Plugin(SchedulerPlugin):
            name = "test-end"

            async def before_close(self):
                await asyncio.sleep(0.05)
                noted.append(worker.status)

        async with Scheduler(port=0, **QUIET) as scheduler, Worker(scheduler.address, **QUIET) as worker:
            await scheduler.register_scheduler_plugin(Plugin(), idempotent=True)
            await scheduler.close()
            await within(worker.finished())
        assert noted == [Status.running]

    asyncio.run(main())


def wake(dask_worker: Nanny, address: str) -> str:
    """In the nanny's process: go on as before the worker told it that the end has come, with another scheduler."""
    dask_worker.status = Status.running
    dask_worker.scheduler_addr = address
    dask_worker.scheduler = dask_worker.rpc(address)
    dask_worker.process.worker_kwargs["scheduler_ip"] = address  # or its next worker looks for the old scheduler
    dask_worker.periodic_callbacks["memory_monitor"].stop()
    return dask_worker.status.name


@pytest.mark.processes
def test_a_nanny_that_was_told_of_the_end_can_be_told_to_go_on():
    """A worker that closes tells its nanny to start no other (`close_gracefully`). The nanny's handler `run` takes that
    back, names another scheduler, and stops the monitor that would kill a worker of servers at 95 % of its limit.
    """

    async def main():
        async with (
            Scheduler(port=0, **QUIET) as first,
            Scheduler(port=0, **QUIET) as second,
            Nanny(first.address, nthreads=1, memory_limit="10 GiB", **QUIET) as nanny,
            rpc(nanny.address) as remote,
        ):
            process = nanny.pid
            await remote.close_gracefully(reason="test")
            assert nanny.status == Status.closing_gracefully
            answer = await remote.run(function=dumps(wake), kwargs=dumps({"address": second.address}))
            assert answer["result"] == "running"
            assert not nanny.periodic_callbacks["memory_monitor"].is_running()
            os.kill(process, signal.SIGKILL)
            while not second.workers:
                await asyncio.sleep(0.05)
            assert [each.nanny for each in second.workers.values()] == [nanny.address]

    asyncio.run(within(main()))


PRELOAD = '''
"""Joins the next scheduler at the same address, with the same actor."""
import asyncio
from distributed import Worker, WorkerPlugin
from distributed.comm import connect

ACTORS = {}

class Count:
    number = 0
    def add(self):
        self.number += 1
        return self.number

def count():
    return ACTORS.setdefault("only", Count())

class Hold(WorkerPlugin):
    name = "test-hold"
    async def teardown(self, worker):
        for callback in worker.periodic_callbacks.values():
            callback.stop()
        if ACTORS and worker.batched_stream.comm.closed():
            for _ in range(600):
                await asyncio.sleep(0.1)
                try:
                    await (await connect(worker.scheduler.address, timeout=1)).close()
                except OSError:
                    continue
                again = await Worker(worker.scheduler.address, name=worker.name, nthreads=1, dashboard=False)
                return await again.finished()

async def dask_setup(worker):
    await worker.plugin_add(Hold())
'''


@pytest.mark.processes
@pytest.mark.parametrize("nanny", ["--no-nanny", pytest.param("--nanny", marks=pytest.mark.thorough)])
def test_a_process_of_dask_worker_survives_its_scheduler(tmp_path, nanny):
    """With real processes: the scheduler is killed, another one starts at its address, the actor has its state."""

    (tmp_path / "survivor.py").write_text(PRELOAD)
    with Shell(tmp_path) as shell:
        address = shell.scheduler()
        preload = {"PYTHONPATH": str(tmp_path)}
        worker = shell.worker("survivor", nanny, "--preload", "survivor", **preload)
        with Client(address, set_as_default=True) as client:
            client.wait_for_workers(1, timeout=PATIENCE)
            process = client.submit(os.getpid, pure=False).result()
            client.submit(lambda: __import__("survivor").count().add(), pure=False).result()
        shell.processes["scheduler"].kill()
        shell.processes["scheduler"].wait()
        shell.start("scheduler", "scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2])
        with Client(address, timeout=PATIENCE, set_as_default=True) as client:
            client.wait_for_workers(1, timeout=PATIENCE)
            assert client.submit(os.getpid, pure=False).result() == process
            future = client.submit(lambda: __import__("survivor").count(), actor=True, key="again")
            wait(future, timeout=PATIENCE)
            (number,) = client.run(lambda dask_worker: dask_worker.state.actors["again"].add()).values()
            assert number == 2
        assert worker.poll() is None
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: worker.poll() is not None, PATIENCE)
