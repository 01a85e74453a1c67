"""The leak fixtures find what is left behind, and wait for what is on its way out."""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import leaks
import pytest
from distributed import Client, LocalCluster
from servers import PATIENCE, wait_until

import dps
from dps.engine.wire.link import Link

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def before():
    return leaks.snapshot()


def leaks_since(before, **options):
    return leaks.wait_for_leaks(before, patience=0.05, **options)


def test_nothing(before):
    assert leaks_since(before) == []


@pytest.mark.thorough
def test_an_event_loop_that_is_not_closed_is_named(before):
    loop = asyncio.new_event_loop()
    pair = [line for line in leaks_since(before) if line.startswith("descriptor socket:")]
    loop.close()
    assert len(pair) == 2
    assert all("EventLoop" in line for line in pair)
    assert leaks_since(before) == []


@pytest.mark.parametrize("dashboard", [None, ":0"], ids=["without dashboard", "with dashboard"])
def test_what_a_task_had_goes_with_its_closed_cluster(dashboard):
    """Dask's caches keep workers and schedulers, and these a task that was not released when they were closed."""
    held = socket.socketpair()
    before = leaks.snapshot()
    with LocalCluster(n_workers=1, processes=False, dashboard_address=dashboard) as cluster, Client(cluster) as client:
        if dashboard:
            link = client.dashboard_link
            urllib.request.urlopen(link, timeout=60).read()
        client.submit(len, [1], pure=False).result()
        (worker,) = cluster.workers.values()
        worker.kept_by_a_task, cluster.scheduler.kept_by_stealing = ([each.dup() for each in held] for _ in range(2))
        del worker
    del cluster, client
    assert leaks.wait_for_leaks(before, patience=PATIENCE) == []
    for each in held:
        each.close()


@pytest.mark.parametrize("daemon", [False, True])
def test_thread(before, daemon):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="dps-forgotten", daemon=daemon)
    thread.start()
    assert leaks_since(before) == ["thread 'dps-forgotten'" + " (daemon)" * daemon]
    stop.set()
    thread.join()
    assert leaks_since(before) == []


def test_sockets(before):
    with socket.create_server(("127.0.0.1", 0)) as server:
        (line,) = leaks_since(before)
        assert str(server.getsockname()[1]) in line
        assert "LISTEN" in line
        with socket.create_connection(server.getsockname()):
            assert sum("ESTABLISHED" in line for line in leaks_since(before)) == 1
    assert leaks_since(before) == []


@pytest.mark.thorough
def test_file_and_event_loop(before):
    with open(__file__):
        assert leaks_since(before) == [f"descriptor {__file__}"]
    loop = asyncio.new_event_loop()
    assert any("eventpoll" in line for line in leaks_since(before))
    loop.close()
    assert leaks_since(before) == []


def test_process(before):
    process = subprocess.Popen(SLEEP)
    (line,) = leaks_since(before)
    assert line.startswith(f"process {process.pid}: ")
    process.kill()
    process.wait()
    assert leaks_since(before) == []


def test_process_whose_parent_died(before):
    starts_one = f"import subprocess; print(subprocess.Popen({SLEEP}, stdout=subprocess.DEVNULL).pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", starts_one]))
    assert leaks_since(before) == []
    (line,) = leaks_since(before, orphans=True)
    assert line.startswith(f"process {pid}: ")
    os.kill(pid, 9)
    assert leaks.wait_for_leaks(before, orphans=True) == []


def test_patience(before):
    thread = threading.Thread(target=time.sleep, args=(0.3,))
    thread.start()
    assert leaks.wait_for_leaks(before) == []


def test_is_cheap():
    def once():
        start = time.thread_time()
        assert leaks.wait_for_leaks(leaks.snapshot()) == []
        return time.thread_time() - start

    assert min(once() for _ in range(20)) < 0.002 + 0.010 * bool(leaks._children())


@pytest.mark.processes
@pytest.mark.parametrize("processes", [False, True])
def test_a_closed_cluster_leaves_nothing(before, processes):
    with LocalCluster(n_workers=1, processes=processes, dashboard_address=None) as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3
    assert leaks.wait_for_leaks(before) == []


@pytest.mark.thorough
@pytest.mark.processes
def test_a_running_cluster_comes_and_goes_but_ours_does_not_hide_behind_it():
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        before = leaks.snapshot()
        cluster.scale(2)
        client.wait_for_workers(2, timeout=PATIENCE)
        client.run(os.getpid)
        assert client.submit(sum, [1, 2], pure=False).result() == 3
        assert leaks_since(before) == []

        stop = threading.Event()
        threads = [threading.Thread(target=stop.wait, name=name, daemon=True) for name in ("dps-x", "mine")]
        for thread in threads:
            thread.start()
        process = subprocess.Popen(SLEEP)
        with socket.create_server(("127.0.0.1", 0)):
            assert [line.split()[0] for line in leaks_since(before)] == ["thread", "thread", "process", "socket"]
        stop.set()
        for thread in threads:
            thread.join()
        process.kill()
        process.wait()


@pytest.mark.thorough
@pytest.mark.processes
def test_a_link_that_is_made_again_is_no_leak_but_a_connection_of_a_client_is():
    options = {"servers": 1, "trainers": 1, "processes": False, "dashboard_address": None}
    with dps.LocalCluster(**options) as cluster, Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("weights", dim=1)
        before = leaks.snapshot()
        (link,) = [x for x in gc.get_objects() if type(x) is Link and x.open]
        link._task.get_loop().call_soon_threadsafe(link.close)
        wait_until(lambda: any(type(x) is Link and x.open and x is not link for x in gc.get_objects()))
        assert leaks._files() - before.files  # it is another socket
        assert leaks_since(before) == []
        host, port = ps.ticket.controller
        with socket.create_connection((host, port)):
            assert any("ESTABLISHED" in line for line in leaks_since(before))


def test_the_fixtures_fail_a_leaking_test_and_its_module(pytester, monkeypatch):
    """Run the real conftest on deliberate leaks: the test is named, its module not again, and leaks_ok lets pass."""
    here = pathlib.Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", str(here / "helpers"))
    pytester.makeconftest(here.joinpath("conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = leaks_ok(reason): x")
    pytester.makepyfile(
        test_one="""
        import socket, pytest, leaks
        leaks.wait_for_leaks.__kwdefaults__["patience"] = 0.05
        kept = []
        def test_leak(): kept.append(socket.create_server(("127.0.0.1", 0)))
        def test_clean(): pass
        @pytest.mark.leaks_ok("on purpose")
        def test_allowed(): kept.append(socket.create_server(("127.0.0.1", 0)))
        """,
        test_two="""
        import socket, pytest
        @pytest.fixture(scope="module")
        def wide():
            with socket.create_server(("127.0.0.1", 0)) as s: yield s
        def test_uses_it(wide): pass
        """,
        test_three="""
        import socket, pytest, leaks
        leaks.wait_for_leaks.__kwdefaults__["patience"] = 0.05
        kept = []
        @pytest.fixture(scope="module")
        def wide():
            kept.append(socket.create_server(("127.0.0.1", 0)))
        def test_uses_it(wide): pass
        """,
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.fnmatch_lines(["*this test left behind:*", "*this module left behind:*"])
