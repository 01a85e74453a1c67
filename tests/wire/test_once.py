"""What may be closed from several sides is closed once, and whoever else closes it waits until that is done."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from distributed import Client
from oracles import mutant
from servers import Servers, wait_until

import dps
import dps.spark
from dps.engine.client.environment import ProcessEnvironment
from dps.engine.deploy import yarn
from dps.engine.state.ops import TableSpec
from dps.engine.wire.endpoint import Endpoint
from dps.engine.wire.once import Once
from dps.engine.wire.pool import Pool
from dps.errors import RequestTimeoutError


def at_once(functions) -> list[BaseException]:
    """Call each in a thread of its own, all at the same time; what they raised."""
    ready, errors = threading.Barrier(len(functions)), []

    def run(function):
        try:
            ready.wait(60)
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert not any(thread.is_alive() for thread in threads)
    return errors


# ---- the rule -------------------------------------------------------------------------------------------------------


def one_does_it_and_the_others_wait(count: int = 10) -> None:
    once, done, seen = Once("the work"), [], []

    def work():
        time.sleep(0.05)  # the others come meanwhile
        done.append(threading.get_ident())

    def call():
        once(work)
        seen.append(list(done))

    assert at_once([call] * count) == []
    assert len(done) == 1
    assert seen == [done] * count, "each returned after it was done"


@pytest.mark.parametrize("count", [2, 10])
def test_one_thread_does_it_and_the_others_wait(count):
    one_does_it_and_the_others_wait(count)


def the_next_tries_again() -> None:
    once, tries = Once("the work"), []

    def work():
        tries.append(len(tries))
        if len(tries) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        once(work)
    once(work)
    once(work)
    assert tries == [0, 1]


def test_where_it_fails_the_next_tries_again():
    the_next_tries_again()


def out_of_itself() -> None:
    once, calls = Once("the work"), []

    def work():
        calls.append("begun")
        if len(calls) < 3:
            once(work)

    once(work)
    assert calls == ["begun"]


def test_a_call_out_of_the_work_itself_returns():
    out_of_itself()


def not_for_ever() -> None:
    once, begun, go_on = Once("closing the door"), threading.Event(), threading.Event()
    thread = threading.Thread(target=once, args=(lambda: (begun.set(), go_on.wait(30)),))
    thread.start()
    try:
        assert begun.wait(30)
        with pytest.raises(RequestTimeoutError, match=r"closing the door has taken another thread more than 0.05 s"):
            once(print)
    finally:
        go_on.set()
        thread.join(30)


def test_nothing_waits_for_ever(monkeypatch):
    monkeypatch.setattr("dps.engine.wire.once.LIMIT_SECONDS", 0.05)
    not_for_ever()


@pytest.mark.parametrize(
    ("old", "new", "scenario"),
    [
        ("if self._doing or self._done:", "if self._doing:", one_does_it_and_the_others_wait),
        ("if not self._lock.acquire(timeout=LIMIT_SECONDS)", "if self._doing: return\n    if not self._lock.acquire()",
         one_does_it_and_the_others_wait),
        ("if self._doing or self._done:", "if self._done:", out_of_itself),
        ("self._done = True", "pass", the_next_tries_again),
        ("self._doing = False", "self._done = True", the_next_tries_again),
    ],
)  # fmt: skip
def test_a_wrong_rule_is_caught(old, new, scenario, monkeypatch):
    monkeypatch.setattr(Once, "__call__", mutant(Once.__call__, old, new))
    with pytest.raises(AssertionError):
        scenario()


# ---- what is closed -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def local_cluster():
    cluster = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    yield [cluster.close], lambda: cluster.status.name == "closed"


@contextlib.contextmanager
def parameter_server():
    with dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None) as cluster:
        ps = dps.ParameterServer(cluster)  # with a Dask client of its own, which it closes
        ps.table("w")
        ps.client().push("w", [1], 1)
        yield [ps.close, ps.detach], lambda: ps.closed and ps.dask_client.status == "closed"


@contextlib.contextmanager
def attached():
    """Several handles of one parameter server: its controller is told several times."""
    made = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with made as cluster, Client(cluster) as client:
        dps.ParameterServer(client)
        handles = [dps.ParameterServer.attach(client) for _ in range(10)]
        controller = cluster.scheduler.plugins["dps-controller"]
        yield [handle.close for handle in handles], lambda: controller.sessions.endpoint is None
        with dps.ParameterServer(client) as again:
            again.table("w")
            again.client().push("w", [1], 1)


@contextlib.contextmanager
def parameter_server_and_its_cluster():
    cluster = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    ps = dps.ParameterServer(cluster)
    yield [ps.close, cluster.close], lambda: ps.closed or cluster.status.name == "closed"


class Session:
    """As much of a Spark session as an embedded parameter server looks at."""

    def __init__(self):
        self.conf, self.sparkContext = {}, SimpleNamespace(_jsc=object())


@contextlib.contextmanager
def spark(monkeypatch):
    """The application ends while its parameter server is closed: the thread that watches it closes as well."""
    clusters = []

    def local(**options):
        clusters.append(dps.LocalCluster(processes=False, **options))
        return clusters[0]

    monkeypatch.setattr("dps.spark.LocalCluster", local)
    monkeypatch.setattr("dps.spark.POLL_SECONDS", 0.001)
    session = Session()
    ps = dps.spark.start(session, servers=1)

    def stop():
        session.sparkContext._jsc = None
        ps.close()

    yield [ps.close, stop], lambda: ps.closed and clusters[0].status.name == "closed"
    wait_until(lambda: not any(thread.name == "dps-spark-watch" for thread in threading.enumerate()))


@contextlib.contextmanager
def endpoint():
    endpoint = Endpoint("closed", "127.0.0.1", {})
    yield [endpoint.stop], lambda: not endpoint._thread.is_alive()


@contextlib.contextmanager
def client():
    """It gives its connections back, each of them once."""
    pool = Pool(100, 60.0)
    with Servers(1) as servers:
        servers.table(TableSpec("w", shards=1))
        client = servers.client(ProcessEnvironment(pool))
        client.push("w", [1], 1)
        yield [client.close], lambda: not client.session._channels
        assert len({id(channel) for _, channel in pool._idle}) == len(pool._idle) <= 1
        pool.close()


class Application:
    """As much of a YARN application as the end of a cluster needs."""

    id, client, started, ended = "application_1", None, True, 0

    def close(self, status, diagnostics):
        time.sleep(0.05)
        self.ended += 1


@contextlib.contextmanager
def yarn_cluster(monkeypatch):
    async def start(self):
        self.status = yarn.Status.running

    monkeypatch.setattr(yarn.YarnCluster, "_start", start)
    cluster = yarn.YarnCluster.__new__(yarn.YarnCluster)
    application = Application()
    cluster._begin(application, False, None)
    yield [cluster.close], lambda: application.ended == 1 and cluster.status.name == "closed"


THINGS = [local_cluster, parameter_server, attached, parameter_server_and_its_cluster, endpoint, client]


@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize("thing", [*THINGS, spark, yarn_cluster], ids=lambda thing: thing.__name__)
def test_closed_by_several_threads(thing, count, monkeypatch):
    with thing() if thing in THINGS else thing(monkeypatch) as (closers, closed):
        seen = []

        def close(function):
            function()
            seen.append(closed())

        assert at_once([partial(close, closers[n % len(closers)]) for n in range(count)]) == []
        assert seen == [True] * count, "each returned when it was closed"
        for function in closers:
            function()  # once more does no harm
