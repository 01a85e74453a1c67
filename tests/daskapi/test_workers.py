"""What the scheduler says of its workers is not lost to other questions of the same client."""

from __future__ import annotations

import dask
import pytest
from distributed import Client, LocalCluster

from dps.engine.daskapi.workers import workers_of


@pytest.fixture
def client():
    with (
        dask.config.set({"distributed.client.scheduler-info-interval": "1 ms"}),
        LocalCluster(
            n_workers=2, threads_per_worker=3, processes=False, resources={"a": 1}, dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


def test_workers_are_there_though_dask_asks_for_none_of_them(client):
    there = set(client.nthreads())
    for _ in range(300):
        workers = workers_of(client)
        assert set(workers) == there
    assert all(worker["nthreads"] == 3 and worker["resources"] == {"a": 1} for worker in workers.values())


def test_in_a_task(client):
    def names() -> set[str]:
        from distributed import get_client

        return set(workers_of(get_client()))

    assert client.submit(names).result() == set(client.nthreads())
