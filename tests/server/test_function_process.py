"""Functions of users in the process of a server: what they cannot do to it, and that all else is as in a thread."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import process_functions as mine
import psutil
import pytest
from servers import Servers, wait_until

import dps
from dps.engine.client.client import Client
from dps.engine.server.function_process import FunctionRunner, RunningProcess
from dps.engine.server.function_thread import FunctionThread
from dps.engine.state.ops import TableSpec
from dps.errors import DPSError, FunctionError, FunctionTimeoutError
from dps.functions import library

ROWS = 40
KEYS = np.arange(ROWS)


def function(part, changes: bool = True) -> dps.Function:
    return dps.function(changes=changes)(part)


class Functions:
    """Servers whose functions run in processes, and a client."""

    def __init__(self, servers: Servers, client: Client):
        self.servers, self.client = servers, client

    def call(self, part, table: str = "w", keys=None, changes: bool = True, **arguments):
        made = function(part, changes)
        for endpoint, role in self.servers.alive():
            endpoint.call(role.functions.add, made.id, made.code)
        return self.client.call(made, table, keys, **arguments)

    def process(self) -> int:
        """The only process of functions that there is."""
        (one,) = set(self.call(mine.who, changes=False))
        return one


@contextlib.contextmanager
def servers_of(runner, count: int = 1, **settings):
    values = {f"dps.{name.replace('__', '.')}": value for name, value in settings.items()}
    with dask.config.set(values), Servers(count, runner) as servers, servers.client() as client:
        servers.table(TableSpec("w", rows=ROWS, shards=4, dtype="float64"))
        client.push("w", KEYS, 2.0)
        yield Functions(servers, client)


@pytest.fixture
def functions():
    with servers_of(FunctionRunner) as made:
        yield made


def unchanged(functions: Functions) -> None:
    assert (functions.client.pull("w", KEYS) == 2).all()


def test_they_run_in_one_process_of_the_server_that_stays(functions) -> None:
    first = functions.process()
    assert psutil.Process(first).ppid() == os.getpid()
    assert functions.process() == first
    assert functions.call(mine.starts_a_thread, changes=False) == [[20.0]] * 4
    assert functions.client.call(library.sum, "w") == 80, "one of dps, in the server"


@pytest.mark.thorough
def test_a_call_of_c_that_keeps_the_lock_is_ended_and_the_server_serves_meanwhile() -> None:
    with servers_of(FunctionRunner, timeouts__function="1s") as functions, ThreadPoolExecutor(1) as pool:
        first = functions.process()
        call = pool.submit(functions.call, mine.holds_the_lock)
        wait_until(lambda: functions.servers.servers[0].functions.holds)
        with functions.servers.client() as other:
            for _ in range(20):
                assert (other.pull("w", KEYS) == 2).all()
            assert not call.done(), "the server has answered while the function ran"
        with pytest.raises(FunctionTimeoutError, match=r"'holds_the_lock'.*within 1 s \(dps.timeouts.function\)"):
            call.result(60)
        wait_until(lambda: not psutil.pid_exists(first), what="it goes on")
        unchanged(functions)
        assert functions.process() != first


@pytest.mark.thorough
def test_five_that_never_end_and_a_good_one() -> None:
    with servers_of(FunctionRunner, timeouts__function="200ms") as functions:
        for _ in range(5):
            with pytest.raises(FunctionTimeoutError):
                functions.call(mine.never_ends)
        unchanged(functions)
        for endpoint, role in functions.servers.alive():  # a busy machine may need longer for a good one
            endpoint.call(setattr, role.functions, "_seconds", 60.0)
        assert sum(functions.call(mine.add_one)) == ROWS


def test_one_that_eats_memory_gets_an_error_and_its_process_goes_on() -> None:
    with dask.config.set({"dps.limits.function-memory": "256 MiB"}), servers_of(FunctionRunner) as functions:
        first = functions.process()
        with pytest.raises(FunctionError, match=r"out of memory.*268435456 bytes \(dps.limits.function-memory\): let"):
            functions.call(mine.eats)
        unchanged(functions)
        assert functions.process() == first
        assert sum(functions.call(mine.add_one)) == ROWS


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGKILL, "SIGKILL; the system kills"), (signal.SIGSEGV, "SIGSEGV")]
)
def test_a_process_that_is_killed_in_a_call(functions, tmp_path, number, word) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(functions.call, mine.waits, directory=str(tmp_path))
        wait_until(lambda: list(tmp_path.glob("*.began")))
        os.kill(int(next(tmp_path.glob("*.began")).stem), number)
        with pytest.raises(FunctionError, match=f"has ended, and no row was changed: it was killed by {word}"):
            call.result(60)
    unchanged(functions)
    assert sum(functions.call(mine.add_one)) == ROWS
    assert (functions.client.pull("w", KEYS) == 3).all()


def test_a_process_that_is_killed_between_calls_and_functions_that_end_it(functions) -> None:
    first = functions.process()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    assert functions.process() != first
    with pytest.raises(FunctionError, match="SystemExit: 3"):
        functions.call(mine.exits)
    with pytest.raises(FunctionError, match="its exit status is 3; see the log"):
        functions.call(mine.leaves)
    unchanged(functions)


def test_what_a_function_prints_is_in_the_log_of_the_server(functions, capfd) -> None:
    functions.call(mine.prints, changes=False)
    assert sorted(capfd.readouterr().out.splitlines()) == [f"said by a function {shard}" for shard in range(4)]


def test_views_that_a_function_keeps_stay_as_they_were(functions) -> None:
    functions.call(mine.keeps, keys=slice(0, 10), changes=False)
    functions.call(mine.add_one)
    assert functions.call(mine.kept_values, changes=False)[0] == [[[2.0]] * 10]


def test_it_goes_with_its_server(tmp_path) -> None:
    """Also where the server is killed while the process is in the middle of a long call of C."""
    with servers_of(FunctionRunner) as functions:
        first = functions.process()
    wait_until(lambda: not psutil.pid_exists(first))
    program = (
        "import os, time\n"
        "from dps.engine.server.function_process import RunningProcess\n"
        "running = RunningProcess(0)\n"
        "running.wait_until_ready(60)\n"
        "print(running._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        os.kill(child, signal.SIGSTOP)  # it reads no end of its connection now
        server.kill()
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def test_a_process_that_cannot_start_is_an_error(monkeypatch) -> None:
    def not_ready(self, seconds: float) -> None:
        raise EOFError

    monkeypatch.setattr(RunningProcess, "wait_until_ready", not_ready)
    with servers_of(FunctionRunner) as functions:
        with pytest.raises(DPSError, match="did not start within 60 s"):
            functions.call(mine.add_one)
        unchanged(functions)


CALLS = [
    (mine.draws, True, {"scale": 2.5}),
    (mine.changes_state, True, {}),
    (mine.replaces, True, {}),
    (mine.add_one, True, {}),
    (mine.deletes, True, {}),
    (mine.changes_nothing, True, {}),
    (mine.reads, False, {"numbers": np.arange(5, dtype="int32")}),
    (mine.fails, True, {}),
]


def all_of_it(functions: Functions, spec: TableSpec) -> list[str]:
    """What the functions return, or say, and the rows after each."""
    functions.servers.table(spec)
    client = functions.client
    client.push("t", KEYS, np.sin(np.arange(ROWS * 3.0)).reshape(ROWS, 3))
    found = []
    for keys in (None, [1, 2, 39, 77] if spec.keyed else [1, 2, 39]):
        for part, changes, arguments in CALLS:
            try:
                found.append(functions.call(part, "t", keys, changes, **arguments))
            except DPSError as error:
                found.append(f"{type(error).__name__} {error}")
            found.append(client.pull("t", KEYS))
            found.append(client.call(library.sum, "t"))
    np.set_printoptions(threshold=10**6)
    return [repr(each) for each in found]


@pytest.mark.parametrize("keyed", [False, True])
def test_the_same_bits_as_in_a_thread(keyed, monkeypatch) -> None:
    fields = {"dim": 3, "shards": 4, "dtype": "float64", "optimizer": dps.Adagrad(0.1), "init": dps.Normal(1.0, seed=3)}
    spec = TableSpec("t", **fields) if keyed else TableSpec("t", rows=ROWS, **fields)
    monkeypatch.setattr("dps.engine.client.functions.time.time", lambda: 1000.0)
    monkeypatch.setattr("dps.engine.client.functions.FunctionCaller._seed", lambda self, origin, number: 5 + number)
    with servers_of(FunctionThread, 2) as functions:
        expected = all_of_it(functions, spec)
    with servers_of(FunctionRunner, 2) as functions:
        assert all_of_it(functions, spec) == expected
