"""The page on errors: each error that dps raises is made here, and is found below the heading of its class."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import socket
import sys
import threading
from pathlib import Path

import dask
import numpy as np
import pytest
from distributed import Client
from servers import wait_until

import dps
from dps import errors
from dps.engine.daskapi.processes import check_versions
from dps.engine.deploy import main_guard
from dps.engine.wire.channel import Channel
from dps.errors import RequestTimeoutError

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
# Clients and servers deal with these by themselves.
BETWEEN_MACHINES = {"MovedError", "LeaseError", "BehindError", "FencedError"}


@pytest.fixture(scope="module")
def cluster():
    short = {"dps.timeouts.clock": "0.3 s", "dps.timeouts.rejoin": "0.3 s"}
    shape = {"servers": 1, "trainers": 2, "processes": False, "dashboard_address": None}
    with dask.config.set(short), dps.LocalCluster(**shape) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ps(cluster):
    with Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("w")
        ps.table("d", rows=3, finite=True)
        ps.client().pull({"w": [1], "d": [1]})  # connects
        yield ps


def written(error: BaseException) -> bool:
    """Whether the section of the error's class shows a message like this one."""
    shown = re.findall(r"^(\w+Error: .*)$", SECTIONS[type(error).__name__], re.M)
    patterns = [".*".join(map(re.escape, re.split(r" ?\.\.\. ?", line))) for line in shown]
    return any(re.fullmatch(pattern, f"{type(error).__name__}: {error}", re.S) for pattern in patterns)


def test_every_error_has_a_section_and_there_are_no_others():
    public = {name for name in errors.__all__ if name.endswith("Error")} - {"DPSError"}
    assert set(SECTIONS) == public


def test_what_is_written():
    assert written(errors.ClosedError("parameter server 'dps' was closed"))
    assert not written(errors.ClosedError("something else"))


def unguarded():
    raise main_guard.refusal("first.py, line 3,")


def made(name, make):
    with pytest.raises(getattr(errors, name)) as raised:
        make()
    assert type(raised.value).__name__ == name
    assert written(raised.value), f"the page does not show: {raised.value}"


class Mine(dps.Optimizer):
    def update(self, values, state, gradients, clock):
        raise ArithmeticError


class Unknown(Mine):
    def __reduce__(self):
        return __import__, ("a_module_that_is_nowhere",)


def test_an_optimizer_that_fails(ps):
    mine = ps.table("mine", optimizer=Mine())
    made("FunctionError", lambda: mine.push([1], 1))
    Unknown.__name__ = "Mine"
    made("FunctionError", lambda: ps.table("unknown", optimizer=Unknown()))


MADE = {
    "InputError": lambda ps: ps.client().push("w", [1, 2], [1.0, 2.0, 3.0]),
    "InputTypeError": lambda ps: ps.table("v", optimizer="sgd"),
    "NotFiniteError": lambda ps: ps.client().push("d", [0], [np.nan]),
    "KeyRangeError": lambda ps: ps.client().pull("d", [9]),
    "UnknownTableError": lambda ps: ps.client().pull("nowhere", [1]),
    "UnknownColumnError": lambda ps: ps.client().columns("w")["v"],
    "NameInUseError": lambda ps: ps.table("w"),
    "TooFewWorkersError": lambda ps: dps.ParameterServer(ps.dask_client, servers=2, name="more", timeout=0.01),
    "UnguardedMainError": lambda ps: unguarded(),
    "CheckpointError": lambda ps: ps.restore("/nowhere/at/all"),
    "ClosedError": lambda ps: dps.ParameterServer.attach(ps.dask_client, "another"),
    "VersionMismatchError": lambda ps: check_versions({"this client": "1", "the scheduler tcp://a:1": "2"}),
    "AccessDeniedError": lambda ps: dps.Client(dataclasses.replace(ps.ticket, secret="ab" * 16)).pull("w", [1]),
}


@pytest.mark.parametrize("name", MADE)
def test_an_error_is_found_on_the_page(name, ps):
    made(name, lambda: MADE[name](ps))


@contextlib.contextmanager
def met(ps, trainers=2):
    """Trainers of one open run that have all joined."""
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(ps.open_run(trainers))
        yield run, [stack.enter_context(run.trainer()) for _ in range(trainers)]


def test_a_collective_that_is_too_large(ps):
    with met(ps, 1) as (_, (trainer,)):
        made("LimitError", lambda: trainer.allgather(bytes(17 << 20)))


def test_a_trainer_that_waits_for_too_long(ps):
    with met(ps) as (_, (early, _)):
        made("ClockTimeoutError", early.tick)


def test_a_trainer_that_is_lost(ps):
    seen = []
    with contextlib.suppress(errors.TrainerLostError), met(ps) as (_, (early, other)):
        other.client.session.controller().close()  # as if its machine was gone
        made("TrainerLostError", lambda: repeat(early.tick, errors.ClockTimeoutError))
        seen.append(True)
    assert seen


def test_a_run_that_is_stopped(ps):
    with met(ps, 1) as (run, (trainer,)):
        run.close()
        made("StoppedError", trainer.tick)


def repeat(call, but):
    """Call again after errors of a class that may come first."""
    for _ in range(100):
        with contextlib.suppress(but):
            return call()
    raise AssertionError(f"{but.__name__} a hundred times")


@contextlib.contextmanager
def listening(answer):
    """A port that accepts connections and sends the same bytes to each."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(answer)

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(30)
            for connection in kept:
                connection.close()


def test_a_port_of_something_else():
    web = listening(b"HTTP/1.1 400 Bad Request" + bytes(100))
    with web as address, dps.Client(dps.Ticket("dps", address, "secret")) as client:
        made("ProtocolError", lambda: client.pull("w", [1]))


def test_a_port_that_does_not_answer():
    with dask.config.set({"dps.timeouts.connect": "0.2 s"}), listening(b"") as address:
        made("RequestTimeoutError", lambda: Channel(address, "dps", "secret", "server 0", RequestTimeoutError))


def test_a_port_at_which_no_server_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    made("ServerGoneError", lambda: Channel(address, "dps", "secret", "server 0"))
    with dps.Client(dps.Ticket("dps", address, "secret")) as client:
        made("ControllerGoneError", lambda: client.pull("w", [1]))


def test_a_server_that_takes_the_last_copy_along():
    alone = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with alone as cluster, Client(cluster) as client, dps.ParameterServer(client) as ps:
        ps.table("w")
        ps.client().push("w", [1], 1.0)
        server = ps.status().servers[0].worker
        (worker,) = [worker for worker in cluster.workers.values() if worker.address == server]
        for actor in worker.state.actors.values():
            actor.close()
        cluster.sync(worker.close)
        wait_until(lambda: not ps.servers())
        with dps.Client(ps.ticket) as late:
            made("DataLostError", lambda: late.pull("w", [1]))


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.delitem(sys.modules, "dps.engine.dashboard.terminal", raising=False)

    def need():
        with errors.needing("cli"):
            importlib.import_module("rich")

    made("MissingPackageError", need)
