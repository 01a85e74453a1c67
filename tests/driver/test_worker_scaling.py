"""A cluster is told how many workers for servers there should be; and clusters of this machine start and end them."""

from __future__ import annotations

import threading
import time

import pytest
from distributed import Client
from servers import PATIENCE, wait_until

import dps
from dps.engine.driver.worker_scaling import ServerWorkers
from dps.engine.telemetry.snapshot import AdaptStatus
from dps.errors import ClosedError, DPSError, InputTypeError


class ToldCluster:
    """A cluster that remembers what it was told, or cannot do it."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.fails = False

    def scale_servers(self, n: int, timeout: float) -> None:
        assert timeout == 0
        self.told.append(n)
        if self.fails:
            raise OSError("no machine is left")


def status(workers: int | None, wanted: int | None) -> AdaptStatus:
    about = {"why": "because", "text": "adapt: because", "workers": workers, "workers_wanted": wanted}
    return AdaptStatus(servers=1, minimum=1, maximum=3, **about)


@pytest.fixture
def cluster():
    return ToldCluster()


def followed(cluster, *answers):
    """Let a cluster follow these answers of the controller, of which an error is raised; the last one is the end."""
    left = list(answers)

    def ask():
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    workers = ServerWorkers()
    workers.follow(cluster, ask, 0.001)
    wait_until(lambda: not left)
    workers.close()


def test_only_a_difference_is_told(cluster):
    followed(cluster, status(None, None), status(1, 1), status(1, 2), status(1, 2), status(2, 2), status(2, 1), None)
    assert cluster.told == [2, 2, 1]


def test_a_handle_that_is_closed_while_the_controller_answers_tells_nothing_more(cluster, caplog):
    for last in (status(1, 2), ClosedError("closed")):
        asked, answer = threading.Event(), threading.Event()

        def ask(asked=asked, answer=answer, last=last):
            asked.set()
            answer.wait(PATIENCE)
            if isinstance(last, Exception):
                raise last
            return last

        workers = ServerWorkers()
        workers.follow(cluster, ask, 0.001)
        asked.wait(PATIENCE)
        threading.Timer(0.05, answer.set).start()
        workers.close()
    assert not cluster.told
    assert not caplog.records


def test_what_fails_is_said_once_and_tried_again(cluster, caplog):
    cluster.fails = True
    followed(cluster, status(1, 2), status(1, 2), dps.DPSError("gone"), dps.DPSError("gone"), status(1, 2), None)
    assert cluster.told == [2, 2, 2]
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == ["OSError: no machine is left", "DPSError: gone", "OSError: no machine is left"]


def names(cluster):
    return sorted(name for name in cluster.workers if name.startswith("server"))


@pytest.mark.thorough
def test_workers_of_a_local_cluster_that_have_servers_stay():
    with (
        dps.LocalCluster(servers=3, trainers=1, processes=False, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=1) as ps,
    ):
        with pytest.raises(InputTypeError, match=r"cluster=3 has no method scale_servers\(n, timeout\)"):
            ps.adapt(cluster=3)
        assert ps.status().adapt is None, "what is refused changes nothing"
        (server,) = ps.status().servers
        used = client.scheduler_info()["workers"][server.worker]["name"]
        cluster.scale_servers(1)
        wait_until(lambda: names(cluster) == [used])
        with pytest.raises(DPSError, match=r"1 workers that are to go .* after 0.2 s: .* ps.scale\(0\)"):
            cluster.scale_servers(0, timeout=0.2)
        cluster.scale_servers(2)
        wait_until(lambda: len(names(cluster)) == 2)
        cluster.scale(2)  # of trainers
        wait_until(lambda: len(cluster.workers) == 4)
        ps.scale(2)
        wait_until(lambda: ps.servers() == 2)
        ps.adapt(1, 3, interval="50 ms", wait_count=2, cluster=cluster)
        wait_until(lambda: len(names(cluster)) == 1, PATIENCE)
        with dps.ParameterServer(client, servers=1, name="other"):
            cluster.scale_servers(2)
            wait_until(lambda: len(names(cluster)) == 2)
            with dps.ParameterServer(client, servers=1, name="third"):  # on the worker that is used least
                time.sleep(0.5)  # some looks
                wait_until(lambda: ps.status().adapt.workers_wanted == 2)
                assert len(names(cluster)) == 2
            wait_until(lambda: len(names(cluster)) == 1, PATIENCE)
        ps.adapt(2, 3, interval="50 ms", wait_count=2)
        wait_until(lambda: "no worker is free for another" in ps.status().adapt.why)
        assert len(names(cluster)) == 1, "no cluster was named"
