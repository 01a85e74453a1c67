"""A server's process outlives its scheduler, for the time of grace, with its rows and its endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time

import dask
import numpy as np
import pytest
from distributed import Client, Scheduler, Worker
from noticing import assert_noticed
from servers import PATIENCE, wait_until
from shell import Shell
from survivors import Survivors

import dps
from dps import config
from dps.engine.daskapi.lost_scheduler import held_names
from dps.engine.server import hold
from dps.engine.server.hold import HoldPlugin

QUIET = {"dashboard_address": ":0", "host": "127.0.0.1"}
KEYS = np.arange(1000)


class FakeServer:
    """What the plugin knows of a server."""

    session, checkpoint = "dps", "checkpoint '7' in /there"

    def __init__(self, number=0):
        self.number = number
        self.released, self.claimed, self.closed = False, True, False
        self.awaits_restart = False

    def returned(self, worker):
        return b"what it keeps"

    def close(self):
        self.closed = True


@contextlib.asynccontextmanager
async def cut_off(monkeypatch, grace=PATIENCE, server=None, known=True, released=None):
    """A worker with a server whose connection breaks; where its scheduler is not `known`, it is taken for a new one.

    Its process also has a server that the controller has `released`, if one is given.
    """
    monkeypatch.setattr(hold, "LOOK_SECONDS", 0.1)
    plugin = HoldPlugin(grace)
    for each in (FakeServer() if server is None else server, released):
        if each is not None:
            plugin.add(each)
    async with Scheduler(port=0, **QUIET) as scheduler:
        worker = await Worker(
            scheduler.address, name="server", nthreads=1, resources={"dps": 1}, plugins=[plugin], **QUIET
        )
        try:
            assert plugin._scheduler == scheduler.id
            if not known:
                plugin._scheduler = "Scheduler-that-died"
            if released is not None:
                released.released = True
            for stream in list(scheduler.stream_comms.values()):
                stream.comm.abort()
            yield scheduler, worker, plugin
        finally:
            for each in plugin.servers:
                each.closed = True
            for each in sorted(Worker._instances, key=lambda each: each.status.name != "running"):
                if each.name == "server":  # first the one that runs, because the one that is held waits for it
                    await asyncio.wait_for(each.close(), PATIENCE)


async def until(condition):
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + PATIENCE
        await asyncio.sleep(0.01)


def test_the_process_joins_the_next_scheduler_with_another_worker_like_the_first(monkeypatch):
    async def main():
        async with cut_off(monkeypatch, known=False) as (scheduler, worker, plugin):
            await until(lambda: scheduler.workers and worker.status.name == "closing")
            (state,) = scheduler.workers.values()
            assert (state.address, state.name, state.nthreads) == (worker.address, "server", 1)
            assert state.resources == {"dps": 1}
            assert os.path.isdir(worker.local_directory), "rows in files are there"
            assert state.local_directory != worker.local_directory
            assert plugin.servers[0].claimed is False
            plugin.servers[0].claimed = True
            again = next(w for w in Worker._instances if w.name == "server" and w.status.name == "running")
            assert again.plugins["dps-hold"] is plugin
            assert plugin._scheduler == scheduler.id
            await asyncio.sleep(0.3)
            assert worker.status.name == "closing", "dask worker ends when it has closed"
            await again.close()  # it is told to: nothing is held, and the process may end
            await asyncio.wait_for(worker.finished(), PATIENCE)
            assert not plugin.servers[0].closed

    asyncio.run(main())


def test_a_scheduler_that_lives_has_removed_the_worker_on_purpose(monkeypatch, caplog):
    async def main():
        async with cut_off(monkeypatch) as (scheduler, worker, _):
            await asyncio.wait_for(worker.finished(), PATIENCE)
            assert not scheduler.workers
            assert "the scheduler lives and has removed this worker" in caplog.text

    asyncio.run(main())


def test_a_server_that_no_controller_takes_up_is_closed_and_its_worker_stays(monkeypatch, caplog):
    async def main():
        async with cut_off(monkeypatch, 2.0, known=False) as (scheduler, worker, plugin):
            await until(lambda: plugin.servers[0].closed)
            await until(lambda: scheduler.workers)
            assert worker.status.name == "closing"
            assert "2 s (dps.scheduler.grace); restore checkpoint '7' in /there" in caplog.text

    asyncio.run(main())


@pytest.mark.parametrize("answer", ["waits", "refused"])
def test_the_servers_are_reported_to_the_controller_which_may_refuse_them(monkeypatch, answer):
    async def main():
        calls = []

        async def dps_call(verb, name, fields):
            calls.append((verb, name, fields))
            return answer

        async with cut_off(monkeypatch, known=False) as (scheduler, _, plugin):
            scheduler.handlers["dps_call"] = dps_call
            await until(lambda: len(calls) >= (1 if answer == "refused" else 3))
            assert calls[0] == ("returned", "dps", {"report": b"what it keeps"})
            assert held_names(scheduler) == {"dps"}
            await until(lambda: plugin.servers[0].closed == (answer == "refused"))
            assert scheduler.workers, "the worker stays"

    asyncio.run(main())


def test_the_hold_ends_when_the_servers_have_ended(monkeypatch):
    async def main():
        async with cut_off(monkeypatch, known=False) as (_, worker, plugin):
            plugin.servers[0].closed = True
            await asyncio.wait_for(worker.finished(), PATIENCE)

    asyncio.run(main())


@pytest.mark.parametrize("how", ["released", "closed", "without grace"])
def test_nothing_is_held_that_is_not_to_be_held(monkeypatch, how, caplog):
    async def main():
        server = FakeServer()
        server.released, server.closed = how == "released", how == "closed"
        async with cut_off(monkeypatch, 0.0 if how == "without grace" else PATIENCE, server, known=False) as (
            scheduler,
            worker,
            _,
        ):
            await asyncio.wait_for(worker.finished(), PATIENCE)
            assert not scheduler.workers
            assert "has lost its scheduler" not in caplog.text

    asyncio.run(main())


def check_released() -> None:
    """A process that is held for one server does not keep another one that its controller has released."""

    async def main():
        held, released = FakeServer(0), FakeServer(1)
        with pytest.MonkeyPatch.context() as patch:
            async with cut_off(patch, server=held, known=False, released=released) as (scheduler, _, plugin):
                await until(lambda: scheduler.workers and not held.claimed)
                assert released.closed
                assert not held.closed
                assert [each.number for each in plugin.servers if not each.closed] == [0]

    asyncio.run(main())


def check_second_end() -> None:
    """A scheduler that ends before its controller has taken the servers over has not removed their worker on purpose:
    it could not say what its end means for them."""

    async def main():
        server = FakeServer()
        server.claimed = False
        with pytest.MonkeyPatch.context() as patch:
            async with cut_off(patch, server=server) as (_, worker, _):
                await until(lambda: worker.status.name == "closing")
                with pytest.raises(TimeoutError):  # it waits for another scheduler
                    await asyncio.wait_for(worker.finished(), 2.0)
                assert not server.closed

    asyncio.run(main())


def test_a_released_server_does_not_stay_in_a_process_that_is_held_for_another():
    check_released()


def test_servers_outlive_a_second_end_before_they_are_taken_over():
    check_second_end()


@pytest.mark.parametrize(
    ("name", "old", "new", "check"),
    [
        ("_hold", "server.released and not server.closed", "False", check_released),
        ("_hold", "if server.released and not server.closed", "if not server.closed", check_released),
        ("teardown", "server.awaits_restart or not server.claimed", "server.awaits_restart", check_second_end),
    ],
)
def test_a_wrong_hold_is_noticed(name, old, new, check):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_hold.PATIENCE", 3.0)
        assert_noticed(HoldPlugin, name, old, new, check)


def plugins_of(client: Client) -> set[str]:
    return {name for names in client.run(lambda dask_worker: list(dask_worker.plugins)).values() for name in names}


@pytest.mark.parametrize(("grace", "expected"), [("0 s", False), ("10 m", True)])
def test_servers_have_their_worker_held_if_the_setting_says_so(grace, expected):
    with (
        dask.config.set({"dps.scheduler.grace": grace}),
        dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1),
    ):
        wait_until(lambda: (HoldPlugin.name in plugins_of(client)) == expected)


def held(client: Client) -> list[tuple[str, int, list]]:
    """Of each worker what must be the same after the loss of a scheduler."""

    def held_by(dask_worker):  # an inner function, because processes of workers cannot import this file
        import os

        servers = []
        for server in dask_worker.plugins["dps-hold"].servers:
            tables = server.role.tables.items()
            rows = {number: sum(len(each.shard) for each in table.replicas.values()) for number, table in tables}
            servers.append((server.session, server.number, server.endpoint.port, id(server.role), rows))
        return dask_worker.name, os.getpid(), servers

    return sorted(client.run(held_by).values())


@pytest.mark.processes
@pytest.mark.parametrize("nanny", ["--no-nanny", pytest.param("--nanny", marks=pytest.mark.thorough)])
def test_servers_outlive_two_schedulers_and_answer_meanwhile(tmp_path, nanny):
    """Processes, rows and endpoints are the same ones; pulls and pushes go on, also when all leases are over.

    The servers end with the third scheduler, which ends on purpose.
    """
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, nanny)
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=2)
            ps.table("one", dtype="int64")
            ps.table("two", dtype="int64", copies=2)
            client, pushes = ps.client(), 0

            def push_and_pull(times=1):
                nonlocal pushes
                for _ in range(times):
                    pushes += 1
                    client.push("one", KEYS, 1)
                    client.push("two", KEYS, 1)
                    assert (client.pull("one", KEYS) == pushes).all()
                    assert (client.pull("two", KEYS) == pushes).all()

            push_and_pull()
            before = held(dask_client)
            assert [name for name, _, _ in before] == ["server-0", "server-1"]
            for _ in range(2):
                cluster.kill_scheduler()
                push_and_pull(5)
                for name, _, _ in before:
                    wait_until(lambda name=name: "has lost its scheduler" in shell.log(name))
                time.sleep(config.seconds("lease"))
                push_and_pull(5)
                cluster.start_scheduler()
                with cluster.client() as other:
                    again = dps.ParameterServer.attach(other)
                    assert held(other) == before
                    push_and_pull(5)
                    assert (again.client().pull("two", KEYS) == pushes).all()
                    assert [server.number for server in again.status().servers] == [0, 1]
                    again.table(f"made-{pushes}", copies=2)
                    again.client().push(f"made-{pushes}", KEYS, 1.0)
                    again.drop_table(f"made-{pushes}")
            assert cluster.alive() == ["server-0", "server-1"]
            client.close()
            if nanny == "--no-nanny":
                cluster.end()
                assert [shell.log(name).count("has lost its scheduler") for name, _, _ in before] == [2, 2]
            if nanny == "--nanny":  # it restarts its worker again, as before
                os.kill(before[0][1], signal.SIGKILL)
                with cluster.client() as other:
                    wait_until(lambda: len({*other.run(os.getpid, on_error="ignore").values()} - {before[0][1]}) == 2)


@pytest.mark.processes
@pytest.mark.thorough  # because the test above ends a scheduler on purpose, too
@pytest.mark.parametrize("nanny", ["--no-nanny", "--nanny"])
def test_servers_end_with_a_scheduler_that_ends_on_purpose(tmp_path, nanny):
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, nanny)
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=2)
            ps.table("one", dtype="int64")
            cluster.end()
            assert "has lost its scheduler" not in shell.log("server-0")


@pytest.mark.processes
@pytest.mark.parametrize("nanny", ["--no-nanny", pytest.param("--nanny", marks=pytest.mark.thorough)])
def test_servers_outlive_a_planned_restart_of_their_scheduler(tmp_path, nanny):
    """By `dask ps hold`, which counts once: the next scheduler ends them."""
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, nanny)
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=2)
            ps.table("one", dtype="int64", copies=2)
            client = ps.client()
            client.push("one", KEYS, 1)
            assert shell.dask("ps", "hold", "--scheduler", cluster.address).stdout.endswith(
                "wait for the next scheduler\n"
            )
            assert "servers wait for another scheduler" in ps.status().news[-1][1]
        cluster.end_scheduler()
        for name in ("server-0", "server-1"):
            wait_until(lambda name=name: "has lost its scheduler" in shell.log(name))
        client.push("one", KEYS, 1)
        cluster.start_scheduler()
        with cluster.client() as other:
            again = dps.ParameterServer.attach(other)
            client.push("one", KEYS, 1)
            assert (again.client().pull("one", KEYS) == 3).all()
            assert len(cluster.alive()) == 2
        client.close()
        cluster.end()


@pytest.mark.processes
def test_a_takeover_by_force_goes_on_with_the_server_that_is_left(tmp_path):
    """Scheduler and one of two servers are killed: the other one alone must not go on, unless a person says so."""
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, "--no-nanny")
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=2)
            ps.table("two", dtype="int64", copies=2, shards=4)
            client = ps.client()
            client.push("two", KEYS, 1)
            client.close()
        cluster.kill_scheduler()
        cluster.kill_server("server-1")
        cluster.start_scheduler()
        with cluster.client() as other:
            wait_until(lambda: "has joined the scheduler" in shell.log("server-0"))
            time.sleep(2 * config.seconds("lease"))
            assert cluster.alive() == ["server-0"]
            done = shell.dask("ps", "takeover", "--force", "--scheduler", cluster.address)
            assert "is up" in done.stdout
            assert "is taken over by force, with servers [0] only" in shell.log("scheduler")
            again = dps.ParameterServer.attach(other)
            assert (again.client().pull("two", KEYS) == 1).all()
            again.client().push("two", KEYS, 1)
            assert (again.client().pull("two", KEYS) == 2).all()
            made = again.table("made")
            made.push(KEYS, 1.0)
            assert (made[KEYS] == 1).all()
        cluster.end()


@pytest.mark.processes
@pytest.mark.thorough
def test_a_server_that_stood_still_is_taken_up_later_than_the_others(tmp_path):
    """Its shards fail over meanwhile. It is the same process in the end, and has replicas again."""
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, "--no-nanny", servers=3)
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=3)
            ps.table("two", dtype="int64", copies=2)
            client = ps.client()
            client.push("two", KEYS, 1)
            with cluster.stopped("server-1"):
                cluster.kill_scheduler()
                for name in ("server-0", "server-2"):
                    wait_until(lambda name=name: "has lost its scheduler" in shell.log(name))
                cluster.start_scheduler()
                with Client(cluster.address, timeout=PATIENCE, set_as_default=False) as other:
                    again = dps.ParameterServer.attach(other)
                    pusher = again.client()
                    pusher.push("two", KEYS, 1)
                    assert (pusher.pull("two", KEYS) == 2).all()
                    cluster.wake("server-1")
                    wait_until(lambda: "has joined the scheduler" in shell.log("server-1"))
                    wait_until(lambda: len(held(other)) == 3)
                    wait_until(lambda: all(sum(rows.values()) for _, _, ((*_, rows),) in held(other)))
                    pusher.push("two", KEYS, 1)
                    assert (pusher.pull("two", KEYS) == 3).all()
                    assert len(cluster.alive()) == 3
            client.close()


@pytest.mark.processes
@pytest.mark.thorough
def test_a_controller_whose_port_was_taken_says_so_and_new_clients_find_it(tmp_path):
    with Shell(tmp_path) as shell:
        cluster = Survivors(shell, servers=1)
        with cluster.client() as dask_client:
            ps = dps.ParameterServer(dask_client, servers=1)
            ps.table("one", dtype="int64")
            ps.client().push("one", KEYS, 1)
            address = ps.ticket.controller
        cluster.kill_scheduler()
        with socket.create_server(address):
            cluster.start_scheduler()
            with cluster.client() as other:
                again = dps.ParameterServer.attach(other)
                assert again.ticket.controller != address
                assert (again.client().pull("one", KEYS) == 1).all()
                assert f"and not at port {address[1]} as before" in shell.log("scheduler")
