"""Servers that `dps.memory` bounds have their nanny stop its memory monitor; others leave it alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster
from servers import wait_until

import dps
from dps.engine.daskapi.nanny import is_bounded, stop_memory_monitor

QUIET = {"dashboard_address": ":0", "host": "127.0.0.1"}


@pytest.mark.parametrize(
    ("resources", "budget", "expected"),
    [
        ({"dps": 1.0}, 50, True),
        ({"dps": 1.0}, 100, True),
        ({"dps": 1.0}, 101, False),  # beyond the limit of the worker it bounds nothing
        ({"dps": 1.0}, 0, False),
        ({"dps": 0.0}, 50, False),  # tasks run beside the server
        ({}, 50, False),
    ],
)
def test_which_servers_are_bounded(resources, budget, expected):
    assert is_bounded(SimpleNamespace(state=SimpleNamespace(total_resources=resources)), budget, 100) is expected


@pytest.mark.processes
@pytest.mark.thorough
def test_a_server_with_a_budget_stops_the_monitor_of_its_nanny():
    """And its worker lives on where the monitor would end it: at 95 % of a limit that it has passed."""
    options = {"nthreads": 1, "resources": {"dps": 1}, "memory_limit": "10 GiB"} | QUIET
    with (
        dask.config.set({"dps.memory": 0.5}),
        SpecCluster(
            workers={"server-0": {"cls": Nanny, "options": options}}, scheduler={"cls": Scheduler, "options": QUIET}
        ) as cluster,
        Client(cluster) as client,
    ):
        nanny = cluster.workers["server-0"]
        monitor, process = nanny.periodic_callbacks["memory_monitor"], nanny.pid
        assert monitor.is_running()
        with dps.ParameterServer(client, servers=1) as ps:
            wait_until(lambda: not monitor.is_running())
            nanny.memory_manager.memory_limit = 1
            ps.table("w")
            ps.client().push("w", [1, 2], 1.0)
            assert (nanny.pid, ps.status().servers[0].number) == (process, 0)


def nobody(address):
    raise AssertionError("no nanny is asked")


def test_a_worker_without_a_nanny_asks_nobody():
    asyncio.run(stop_memory_monitor(SimpleNamespace(nanny=None, rpc=nobody), 1.0))


class Deaf:
    """A nanny that never answers, answers with an error, or has gone."""

    def __init__(self, how):
        self.how = how

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exc):
        pass

    async def run(self, function):
        if self.how == "silent":
            await asyncio.sleep(3600)
        if self.how == "gone":
            raise OSError("no such address")
        return {"status": "error", "exception": AttributeError("periodic_callbacks")}


@pytest.mark.parametrize("how", ["silent", "gone", "error"])
def test_a_nanny_that_does_not_do_it_costs_a_warning_only(how, caplog):
    worker = SimpleNamespace(nanny="tcp://127.0.0.1:1", rpc=lambda address: Deaf(how))
    asyncio.run(stop_memory_monitor(worker, 0.01))
    assert "--memory-limit 0" in caplog.text
