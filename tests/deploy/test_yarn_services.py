"""What containers run, without YARN: how they find each other, what they end with, which workers scaling is about."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from types import SimpleNamespace

import dask
import pytest
from distributed import Nanny, Security, Worker
from distributed.core import rpc

skein = pytest.importorskip("skein")

from dps.engine.deploy.yarn_services import (  # noqa: E402
    TrainersScheduler,
    find_scheduler,
    outlive,
    publish,
    serve,
    with_close_reason,
)
from dps.errors import DPSError  # noqa: E402
from dps.yarn import YarnCluster  # noqa: E402

SECONDS = 60  # a limit for what hangs


class Application(SimpleNamespace):
    """The part of skein's client that containers use."""

    def __init__(self) -> None:
        container = SimpleNamespace(id="dask.scheduler_0", state="REQUESTED")
        super().__init__(id="application_1", kv={}, get_containers=lambda: [container])


def in_loop(story):
    async def limited():
        async with asyncio.timeout(SECONDS):
            await story()

    asyncio.run(limited())


def new_scheduler(**options) -> TrainersScheduler:
    return TrainersScheduler(host="127.0.0.1", port=0, dashboard_address=":0", **options)


async def ask(address: str, security: Security) -> str:
    async with rpc(address, connection_args=security.get_connection_args("client")) as scheduler:
        return (await scheduler.identity())["address"]


@pytest.mark.parametrize(
    "encrypt", [False, pytest.param(True, marks=pytest.mark.tls)], ids=["in the clear", "encrypted"]
)
def test_a_scheduler_is_found_with_its_certificate(encrypt):
    async def story():
        security = Security.temporary() if encrypt else Security()
        options = {"protocol": "tls://"} if encrypt else {}
        async with new_scheduler(security=security, **options) as scheduler:
            app = Application()
            publish(app, scheduler, security)
            assert all(isinstance(value, bytes) for value in app.kv.values())
            address, security_found = find_scheduler(app, 0)
            assert address == scheduler.address
            assert app.kv["dask.dashboard"].startswith(b"http://127.0.0.1:")
            assert await ask(address, security_found) == address
            if encrypt:
                with (
                    dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
                    pytest.raises(OSError, match="identity"),
                ):
                    await ask(address, Security.temporary())

    in_loop(story)


def test_a_scheduler_that_never_comes_is_not_waited_for_for_ever():
    with pytest.raises(
        DPSError, match=r"application_1 had no scheduler after 0\.2 s .* dask\.scheduler_0 is REQUESTED"
    ):
        find_scheduler(Application(), 0.2)


@pytest.mark.thorough
def test_the_application_outlives_a_connection_but_not_its_scheduler():
    async def connection(scheduler):
        while not scheduler._comms:
            await asyncio.sleep(0.01)
        return next(iter(scheduler._comms))

    async def story():
        async with new_scheduler() as scheduler:
            watch = asyncio.create_task(outlive(scheduler.address, Security()))
            (await connection(scheduler)).abort()
            while scheduler._comms:
                await asyncio.sleep(0.01)
            await connection(scheduler)
            assert not watch.done()
            await scheduler.close()
            await watch

    with dask.config.set({"dps.timeouts.connect": "1s"}):
        in_loop(story)


@contextlib.asynccontextmanager
async def cluster(kind, **options):
    options |= {"host": "127.0.0.1", "dashboard": False}
    async with new_scheduler() as scheduler, with_close_reason(kind)(scheduler.address, **options) as process:
        yield scheduler, process


async def retire(scheduler):
    await scheduler.retire_workers(list(scheduler.workers), close_workers=True, remove=True)


async def close(scheduler):
    await scheduler.close()


async def lose(scheduler):
    for comm in scheduler.stream_comms.values():
        comm.abort()


@pytest.mark.quick(2)
@pytest.mark.processes
@pytest.mark.parametrize("kind", [Worker, Nanny])
@pytest.mark.parametrize(("how", "meant"), [(retire, True), (close, True), (lose, False)])
def test_who_was_told_to_go_and_who_lost_the_scheduler(kind, how, meant):
    async def story():
        async with cluster(kind, nthreads=1, memory_limit=0) as (scheduler, process):
            await how(scheduler)
            await process.finished()
            assert process.close_reason.startswith("scheduler-") == meant, process.close_reason

    in_loop(story)


def test_told_to_end_by_yarn():
    async def story():
        async with new_scheduler() as scheduler:
            worker = Worker(scheduler.address, host="127.0.0.1", dashboard=False, nthreads=1, memory_limit=0)
            up = asyncio.Event()
            service = asyncio.create_task(serve(worker, up.set))
            await up.wait()
            assert len(scheduler.workers) == 1
            os.kill(os.getpid(), signal.SIGTERM)
            assert await service
            assert worker.status.name == "closed"
            assert not scheduler.workers  # it has said so

    in_loop(story)


def test_an_application_in_the_queue_is_killed_when_its_user_loses_patience():
    """skein's driver, as far as it gets: the application is accepted, and does not run."""
    killed = []

    def report(app_id):
        if not killed:
            os.kill(os.getpid(), signal.SIGINT)
        state = "KILLED" if killed else "ACCEPTED"
        return SimpleNamespace(state=state, final_status="UNDEFINED", diagnostics="")

    def connect(app_id, **options):
        raise skein.ApplicationNotRunningError(app_id)

    driver = SimpleNamespace(
        submit=lambda spec: "application_1", application_report=report, kill_application=killed.append, connect=connect
    )
    with pytest.raises(KeyboardInterrupt):
        YarnCluster("venv:///opt/dps", skein_client=driver)
    assert set(killed) == {"application_1"}


def test_advice_on_scaling_is_about_trainers():
    async def story():
        async with new_scheduler() as scheduler:
            options = {"host": "127.0.0.1", "dashboard": False, "nthreads": 1, "memory_limit": 0}
            servers = [Worker(scheduler.address, name=f"s{n}", resources={"dps": 1}, **options) for n in range(3)]
            trainers = [Worker(scheduler.address, name=f"t{n}", **options) for n in range(2)]
            async with contextlib.AsyncExitStack() as stack:
                for worker in [*servers, *trainers]:
                    await stack.enter_async_context(worker)
                async with rpc(scheduler.address) as asked:  # as an adaptive cluster does, from outside
                    assert await asked.adaptive_target() == 0
                    assert set(await asked.workers_to_close(n=1, attribute="name")) < {"t0", "t1"}
                    assert set(await asked.workers_to_close(n=5, attribute="name")) == {"t0", "t1"}

    in_loop(story)
