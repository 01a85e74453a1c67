"""What users see when processes die, stop answering or get wrong input: an error soon, never a hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import dask
import numpy as np
import psutil
import pytest
from distributed import Client
from servers import wait_until

import dps
import dps.engine.client.requests
from dps.errors import (
    ControllerGoneError,
    DataLostError,
    DPSError,
    InputError,
    InputTypeError,
    KeyRangeError,
    NameInUseError,
    NotFiniteError,
    RequestTimeoutError,
    ServerGoneError,
    UnknownTableError,
)

KEYS = np.arange(1000)


@pytest.fixture
def cluster():
    with dps.LocalCluster(servers=2, trainers=1, dashboard_address=None) as cluster, Client(cluster) as client:
        yield client


def pid_of_server(client, ps, number):
    address = ps.status().servers[number].worker
    return client.run(os.getpid, workers=[address])[address]


def push_for_ever(trainer, parts):
    while True:
        trainer.push("w", KEYS, 1.0)
        trainer.tick()


class Background(threading.Thread):
    """`ps.run` of trainers that never end, until something happens to them."""

    def __init__(self, ps, data, **options):
        super().__init__()
        self.ps, self.data, self.options, self.error = ps, data, options, None
        self.start()
        with dps.Client(ps.ticket) as client:
            wait_until(lambda: client.pull("w", [0]) > 3)

    def run(self):
        try:
            self.ps.run(push_for_ever, self.data, **self.options)
        except BaseException as error:
            self.error = error

    def end(self):
        self.join(60)
        assert not self.is_alive(), "hangs"
        return self.error


# -- a server's process dies


LOST = r"table 'w': the last copy of shards \d+ to \d+ is gone, and with it \d+ keys \(.*\); there is no checkpoint"


@pytest.mark.processes
def test_a_server_that_dies_with_the_only_copy(cluster):
    client = cluster
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w")
        ps.client().push("w", KEYS, 1.0)
        os.kill(pid_of_server(client, ps, 1), signal.SIGKILL)
        for use in (
            lambda: ps.client().pull("w", KEYS),
            lambda: ps.client().push("w", KEYS, 1.0),
            lambda: ps.client().push_pull("w", KEYS, 1.0),
            lambda: dps.Client(ps.ticket).pull("w", KEYS),
        ):
            with pytest.raises(DataLostError, match=LOST):
                use()
        wait_until(lambda: {0, 2} == {s.number for s in ps.status().servers if s.alive})  # another, new number
        with pytest.raises(DataLostError, match=LOST):  # and never zeros, although there is a server again
            ps.client().pull("w", KEYS)
        lost = ps.status().tables["w"].chains.count([])
        assert 0 < lost < ps.tables()["w"].spec.shards
        ps.table("v")
        ps.client().push("v", KEYS, 1.0)
        assert (ps.client().pull("v", KEYS) == 1).all()
        with pytest.raises(DataLostError, match=LOST):
            ps.run(push_for_ever, client.scatter([1]))
        ps.drop_table("w")
        ps.table("w")
        assert (ps.client().pull("w", KEYS) == 0).all()


@pytest.mark.processes
@pytest.mark.parametrize("aggregate", [None, "sum"])
def test_a_server_that_dies_in_a_run(cluster, aggregate):
    client = cluster
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w", aggregate=aggregate)
        run = Background(ps, client.scatter([1]))
        os.kill(pid_of_server(client, ps, 0), signal.SIGKILL)
        with pytest.raises(DataLostError, match=LOST):
            raise run.end()
        assert [run.connected for run in ps.status().runs] == [[]]


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = [psutil.Process(thread.id) for thread in psutil.Process(pid).threads()]
        wait_until(lambda: all(thread.status() == psutil.STATUS_STOPPED for thread in threads))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.thorough
@pytest.mark.processes
def test_a_server_that_does_not_answer(cluster):
    client = cluster
    limits = {"dps.timeouts.request": "0.5 s", "dps.timeouts.connect": "0.5 s"}

    def reaches(hasty, keys):
        with contextlib.suppress(RequestTimeoutError):
            return (hasty.pull("w", keys) == 1).all()

    with dask.config.set({"dps.timeouts.stop": "0.5 s"}), dps.ParameterServer(client, servers=2) as ps:
        ps.table("w")
        ps.client().push("w", KEYS, 1.0)
        pid = pid_of_server(client, ps, 1)
        with dask.config.set(limits), dps.Client(ps.ticket) as known, dps.Client(ps.ticket) as unknown:
            wait_until(lambda: reaches(known, KEYS))
            wait_until(lambda: reaches(unknown, []))
            with stopped(pid):
                with pytest.raises(RequestTimeoutError, match=r"server 1 of parameter server 'dps' at .* not answered"):
                    known.pull("w", KEYS)
                with pytest.raises(RequestTimeoutError, match=r"server 1 of parameter server 'dps' at .* not greeted"):
                    unknown.pull("w", KEYS)
                with pytest.raises(RequestTimeoutError):
                    known.pull("w", KEYS)
                zero, one = ps.status().servers
                assert zero.tables is not None
                assert one.tables is None
        assert (ps.client().pull("w", KEYS) == 1).all()
        ps.client().push("w", KEYS, 1.0)
        assert (ps.client().pull("w", KEYS) == 2).all()
        wait_until(lambda: ps.status().servers[1].tables is not None)
        with stopped(pid):
            ps.close()
    with dps.ParameterServer(client, servers=2) as ps:
        ps.table("w")
        assert (ps.client().pull("w", KEYS) == 0).all()


# -- the scheduler's process dies


@contextlib.contextmanager
def by_shell(folder, scheduler=("-m", "dask"), server=("-m", "dask")):
    """A cluster as one types it: dask scheduler, dask worker --resources dps=1, dask worker."""
    file = str(folder / "scheduler.json")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    options = ["--scheduler-file", file, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    options += ["--local-directory", str(folder), "--host", "127.0.0.1"]
    commands = [
        [*scheduler, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", file],
        [*server, "worker", *options, "--resources", "dps=1", "--name", "server"],
        ["-m", "dask", "worker", *options, "--name", "trainer"],
    ]
    processes = []
    try:
        for command in commands:
            with open(folder / "log", "a") as log:
                process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, env=environment)
            processes.append(process)
        wait_until(lambda: os.path.exists(file))
        with Client(scheduler_file=file) as client:
            wait_until(lambda: len(client.scheduler_info()["workers"]) == 2)
            yield client, *processes
        client._loop_runner.stop()  # Dask leaves its thread running when a client has given up by itself
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


@pytest.mark.thorough
@pytest.mark.processes
def test_a_scheduler_that_dies(tmp_path, monkeypatch):
    """And none follows within the grace: servers end, and so does what waits, with an error."""
    monkeypatch.setenv("DASK_DPS__SCHEDULER__GRACE", "2 s")
    limits = {"distributed.comm.timeouts.connect": "2 s", "dps.timeouts.connect": "2 s", "dps.timeouts.stop": "2 s"}
    with dask.config.set(limits), by_shell(tmp_path) as (client, scheduler, server, _):
        ps = dps.ParameterServer(client)
        ps.table("w")
        run = Background(ps, client.scatter([1]))
        other = ps.connection.call("start_run", trainers=2, staleness=0)
        trainer, errors = dps.Trainer.join(ps.ticket, other, 0), []

        def wait_alone():
            try:
                trainer.tick()
            except DPSError as error:
                errors.append(error)

        waiting = threading.Thread(target=wait_alone)
        waiting.start()
        wait_until(lambda: ps.status().runs[0].waiting == [0])
        scheduler.kill()
        waiting.join(30)
        assert [type(error) for error in errors] == [ControllerGoneError]
        assert "has waited 2 s (dps.scheduler.grace)" in str(errors[0])
        assert "controller of parameter server 'dps'" in str(errors[0])
        trainer.close()
        with pytest.raises(ControllerGoneError):
            raise run.end()
        with pytest.raises(ControllerGoneError, match="the controller of parameter server 'dps' cannot be reached at"):
            dps.Client(ps.ticket).pull("w", KEYS)
        with pytest.raises(ControllerGoneError, match="scheduler"):
            ps.table("v")
        ps.close()
        server.wait(30)


WITHOUT = "import sys; sys.modules['dps'] = None; from dask.__main__ import main; main()"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_scheduler_without_dps(tmp_path):
    words = r"the scheduler cannot import dps .*: install it there"
    with by_shell(tmp_path, scheduler=("-c", WITHOUT)) as (client, *_), pytest.raises(DPSError, match=words):
        dps.ParameterServer(client)


@pytest.mark.processes
@pytest.mark.slow
def test_a_worker_without_dps(tmp_path):
    words = r"worker tcp://.* was lost while server 0 .*; see its log\. Is dps installed there"
    with by_shell(tmp_path, server=("-c", WITHOUT)) as (client, *_), pytest.raises(ServerGoneError, match=words):
        dps.ParameterServer(client)


# -- wrong input: nothing of it is applied, on none of the servers


@pytest.fixture(scope="module")
def served():
    with (
        dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None) as cluster,
        dps.ParameterServer(cluster, servers=2) as ps,
    ):
        ps.table("keyed", dim=2, finite=True)
        ps.table("dense", rows=100, optimizer=dps.Adagrad(0.1))
        ps.table("whole", dtype="int64")
        client = ps.client()
        client.push("keyed", KEYS, np.ones((1000, 2)))
        client.push("dense", None, np.arange(100))
        client.push("whole", KEYS, KEYS)
        yield ps


def everything(ps):
    client = ps.client()
    rows = [client.pull("keyed", KEYS), client.pull("dense"), client.pull("whole", KEYS)]
    counts = [{name: t.rows for name, t in server.tables.items()} for server in ps.status().servers]
    return [array.tobytes() for array in rows], counts


NAN = np.ones((1000, 2))
NAN[777, 1] = np.nan
WHERE_IT_STEPS = [dps.SGD(0.1), dps.Momentum(0.1), dps.Adagrad(0.1), dps.RMSprop(0.1), dps.Adam(0.1), dps.AdamW(0.1)]
WHERE_IT_STEPS += [dps.FTRL()]
INFINITE = np.full(100, np.float32(1))
INFINITE[99] = -np.inf


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda c: c.push("keyed", KEYS, np.ones((999, 2))), InputError, r"'keyed'.*\(1000, 2\), not \(999, 2\)"),
        (lambda c: c.push("keyed", KEYS, np.ones(1000)), InputError, r"\(1000, 2\), not \(1000,\)"),
        (lambda c: c.push("keyed", KEYS, np.ones((2, 1000))), InputError, r"not \(2, 1000\)"),
        (lambda c: c.push("dense", None, np.ones(99)), InputError, "'dense'.*not"),
        (lambda c: c.push("dense", slice(0, 10, 2), np.ones(5)), InputError, "step 1"),
        (lambda c: c.push("keyed", slice(0, 10), 1.0), InputError, "'keyed' is keyed: name the keys"),
        (lambda c: c.push("keyed", KEYS, np.ones((1000, 2), complex)), InputError, "complex128 would lose"),
        (lambda c: c.push("keyed", KEYS, np.full((1000, 2), "1")), InputError, "'keyed' holds float32"),
        (lambda c: c.push("whole", KEYS, np.full(1000, 1.5)), InputError, "'whole' holds int64; values of float64"),
        (lambda c: c.push("keyed", KEYS + 0.5, np.ones((1000, 2))), InputTypeError, "integers, not float64"),
        (lambda c: c.push("keyed", ["a"], np.ones((1, 2))), InputTypeError, "dps.hash_strings"),
        (lambda c: c.push("whole", KEYS > 3, 1), InputTypeError, "not a mask"),
        (lambda c: c.push("keyed", KEYS), InputError, "values are missing"),
        (lambda c: c.push("keyed", KEYS, NAN), NotFiniteError, "row 777 .*nan"),
        (lambda c: c.add("keyed", KEYS, NAN), NotFiniteError, "'keyed' refuses NaN"),
        (lambda c: c.assign("keyed", KEYS, NAN), NotFiniteError, "'keyed' refuses NaN"),
        (lambda c: c.push_pull("dense", None, INFINITE), NotFiniteError, "row 99 .*inf"),
        (lambda c: c.push("dense", [0, 99, 100], 1.0), KeyRangeError, "'dense'"),
        (lambda c: c.push("dense", [0, 99, -1], 1.0), KeyRangeError, "'dense'"),
        (lambda c: c.pull("dense", [0, 100]), KeyRangeError, "'dense'"),
        (lambda c: c.push_pull("dense", [0, 1 << 62], 1.0), KeyRangeError, "'dense'"),
        (lambda c: c.push("nowhere", KEYS, 1.0), UnknownTableError, "no table 'nowhere'; it has 'dense', 'keyed', 'wh"),
        (lambda c: c.pull({"dense": None, "nowhere": KEYS}), UnknownTableError, "'nowhere'"),
        (lambda c: c.push({"dense": (None, np.ones(100)), "nowhere": (KEYS, 1.0)}), UnknownTableError, "'nowhere'"),
        (lambda c: c.push({"dense": (None, np.ones(100)), "keyed": (KEYS, NAN)}), NotFiniteError, "'keyed'"),
        (lambda c: c.pull("dense", out=np.zeros(99, np.float32)), InputError, "out must be"),
        (lambda c: c.pull("dense", out=np.zeros(100)), InputError, "out must be float32"),
        (lambda c: c.push_pull("dense", None, np.ones(100), out=np.zeros(7, np.float32)), InputError, "out must be"),
        (lambda c: c.pull("dense", out=[0] * 100), InputTypeError, "numpy array, not list"),
    ],
)
def test_wrong_input_changes_nothing(served, call, error, words):
    with dps.Client(served.ticket) as client:
        before = everything(served)
        with pytest.raises(error, match=words):
            call(client)
        assert everything(served) == before
        assert client.pull("dense", [0]).shape == (1,)  # it goes on


def test_a_table_with_an_optimizer_refuses_nan_unless_told_otherwise(served):
    made = {"sums": {}, "values": {"optimizer": dps.Assign()}, "counts": {"dtype": "int64"}}
    made |= {f"steps {n}": {"optimizer": optimizer} for n, optimizer in enumerate(WHERE_IT_STEPS)}
    for name, options in made.items():
        assert served.table(name, dim=2, **options).spec.finite == name.startswith("steps"), name
        assert not served.table(f"{name}, open", dim=2, finite=False, **options).spec.finite
        assert served.table(f"{name}, strict", dim=2, finite=True, **options).spec.finite
    with dps.Client(served.ticket) as client:
        for name in [name for name in made if "steps" in name]:
            with pytest.raises(NotFiniteError, match=rf"{name!r} refuses NaN .*row 777"):
                client.push(name, KEYS, NAN)
            client.push(f"{name}, open", KEYS, NAN)
            assert np.isnan(client.pull(f"{name}, open", 777)).any()
        client.push({"sums": (KEYS, NAN), "values": (KEYS, NAN)})
        assert np.isnan([client.pull("sums", 777), client.pull("values", 777)]).sum() == 2
        for name in ("counts", "counts, strict"):  # never checked: their dtype has no such values
            client.push(name, KEYS, np.ones((1000, 2), np.int64))
    for name in made:
        for also in ("", ", open", ", strict"):
            served.drop_table(f"{name}{also}")


def test_a_server_refuses_nan_from_a_client_that_does_not_look(served, monkeypatch):
    served.table("learns", dim=2, optimizer=dps.SGD(0.1))
    with dps.Client(served.ticket) as client:
        monkeypatch.setattr("dps.engine.client.inputs.all_finite", lambda values: True)
        form = dps.engine.client.requests.Form
        monkeypatch.setattr("dps.engine.client.requests.Form", lambda *fields: form(*fields[:4], False, *fields[5:]))
        with pytest.raises(NotFiniteError, match="a push to table 'learns' holds NaN or infinity"):
            client.push("learns", [7], [[np.nan, 1.0]])
        assert client.pull("learns", [7]).tolist() == [[0, 0]]
    served.drop_table("learns")


def test_a_table_made_before_the_default_may_exist(served):
    """`finite` left to its default accepts what is there: a checkpoint of an earlier version brings it back."""
    old = served.table("old", optimizer=dps.SGD(0.1), finite=False)
    assert served.table("old", optimizer=dps.SGD(0.1), exist_ok=True) == old
    with pytest.raises(NameInUseError, match="finite is False, not True"):
        served.table("old", optimizer=dps.SGD(0.1), finite=True, exist_ok=True)
    served.drop_table("old")
