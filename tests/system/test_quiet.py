"""What a user sees on the error output: a wrong call is one error for its caller, and an end is no trouble at all."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import dask.array as da
import numpy as np
import pytest
from distributed.protocol.pickle import dumps

import dps
from dps.engine.daskapi.failed_tasks import PACKAGE, FailuresToldElsewhere
from dps.engine.daskapi.refusals import as_value, value
from dps.engine.deploy import local
from dps.errors import InputError, NameInUseError, UnknownTableError
from dps.models import LogisticRegression

LIMIT = 120  # seconds, for a broken product on a busy machine


def program(tmp_path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(text))
    return [sys.executable, str(path)]


# ---- refusals are values --------------------------------------------------------------------------------------------


def test_a_refusal_comes_back_as_it_was_raised():
    async def handler(comm=None, name=""):
        error = NameInUseError(f"{name!r} is taken")
        error.remedy = ["another"]
        error.add_note("a note")
        raise error

    answer = asyncio.run(as_value(handler)(None, name="w"))
    with pytest.raises(NameInUseError, match="'w' is taken") as caught:
        value(answer)
    assert caught.value.remedy == ["another"]
    assert caught.value.__notes__ == ["a note"]


def test_what_is_no_refusal_goes_through():
    async def works(comm=None):
        return {"name": "w"}

    async def fails(comm=None):
        raise ZeroDivisionError

    assert value(asyncio.run(as_value(works)())) == {"name": "w"}
    with pytest.raises(ZeroDivisionError):
        asyncio.run(as_value(fails)())
    assert all(value(plain) is plain for plain in (None, "text", [1], {"servers": []}))
    with pytest.raises(InputError):
        value({"dps-refused": dumps(InputError("no"))})


def test_wrong_calls_leave_no_traceback_in_the_log(caplog):
    """Each is raised at its caller, and nothing else is said; a mistake in our own code is logged as ever."""
    caplog.set_level(logging.INFO)
    made = dps.LocalCluster(servers=1, trainers=1, processes=False, dashboard_address=None)
    with made as cluster, dps.ParameterServer(cluster) as ps:
        ps.table("w")
        with pytest.raises(NameInUseError, match="has a table 'w' already"):
            ps.table("w")
        with pytest.raises(UnknownTableError, match="has no table 'v'"):
            ps.drop_table("v")
        with pytest.raises(InputError, match=r"has no server 7: \[0\]"):
            ps.retire(7)
        assert "Exception while handling op" not in caplog.text
        with pytest.raises(TypeError):
            ps.connection.call("add_table")
        assert "Exception while handling op dps_call" in caplog.text


def test_a_message_that_meets_a_closed_cluster_is_no_news(caplog, monkeypatch):
    with dps.LocalCluster(servers=0, trainers=1, processes=False, dashboard_address=None):
        pass
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("distributed.batched")
    logger.info("Batched Comm Closed, late")
    logger.warning("something else")
    monkeypatch.setattr(local.late_messages, "_until", time.monotonic() - 1)
    logger.info("Batched Comm Closed, in mid-run")
    messages = [record.getMessage() for record in caplog.records if record.name == logger.name]
    assert messages == ["something else", "Batched Comm Closed, in mid-run"]


# ---- programs, as they are run --------------------------------------------------------------------------------------

SETUP = """
    import dask.bag as db
    import dps
    from distributed import Client

    def start():
        cluster = dps.LocalCluster(servers=2, trainers=1, processes=False, dashboard_address=None)
        ps = dps.ParameterServer(cluster, servers=2)
        ps.table("w")
        ps.client().push("w", [1], 1)
        return cluster, ps
"""


@pytest.mark.processes
def test_programs_that_end_one_way_or_the_other_say_nothing(tmp_path):
    """A `with` block; the cluster closed first; and what is never closed at all."""
    text = (
        SETUP
        + """
    if __name__ == "__main__":
        cluster, ps = start()
        with cluster, ps:
            try:
                ps.table("w")
            except dps.DPSError as error:
                print(type(error).__name__)
        cluster, ps = start()
        cluster.close()
        ps.close()
        cluster, ps = start()
        print("ends")
    """
    )
    done = subprocess.run(program(tmp_path, text), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "NameInUseError\nends\n")


@pytest.mark.thorough
@pytest.mark.processes
def test_ctrl_c_in_a_run_leaves_one_traceback_and_the_workers_to_the_program(tmp_path):
    """The whole process group gets it, as in a terminal. The parameters are there afterwards."""
    text = """
    import time
    import dask.bag as db
    import dps

    def train(trainer, partitions):
        trainer.push("w", [1], 1)
        print("running", flush=True)
        while True:
            trainer.tick()
            time.sleep(0.01)

    if __name__ == "__main__":
        with dps.LocalCluster(servers=1, trainers=1, dashboard_address=None) as cluster:
            with dps.ParameterServer(cluster) as ps:
                ps.table("w")
                try:
                    ps.run(train, db.from_sequence([1], npartitions=1), progress=False)
                finally:
                    print(ps.client().pull("w", [1]).tolist(), flush=True)
    """
    started = subprocess.Popen(
        program(tmp_path, text), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert started.stdout.readline() == "running\n"
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=LIMIT)
    finally:
        started.kill()
    busy = ("still alive after", "is overloaded")  # what a busy machine adds
    lines = [line for line in err.splitlines() if not any(words in line for words in busy)]
    assert out == "[1.0]\n"
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "KeyboardInterrupt"
    assert started.returncode == -signal.SIGINT


# ---- failed tasks ---------------------------------------------------------------------------------------------------

GAPS = np.ones((100, 3), np.float32)
GAPS[3] = np.nan
LABELS = np.arange(100) % 2
BLOCKS = da.from_array(GAPS, chunks=(50, 3)), da.from_array(LABELS, chunks=50)


def fails(*args):
    raise ArithmeticError("thirteen is out of the question")


def fitted(ps, *data):
    LogisticRegression(client=ps, progress=False).fit(*data)


CALLS = {
    "run": (lambda ps: ps.run(fails, [1], progress=False), ArithmeticError, False),
    "retries": (lambda ps: ps.run(fails, [1], progress=False, retries=1), ArithmeticError, False),
    "fit": (lambda ps: fitted(ps, GAPS, LABELS), InputError, False),
    "fit of blocks": (lambda ps: fitted(ps, *BLOCKS), InputError, False),
    "task of the user": (lambda ps: ps.dask_client.submit(fails, 1).result(), ArithmeticError, True),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_that_the_driver_raises_is_not_logged_by_the_worker_before(caplog, name):
    call, error, logged = CALLS[name]
    shape = {"servers": 1, "trainers": 1, "processes": False, "dashboard_address": None, "silence_logs": False}
    with dps.LocalCluster(**shape) as cluster, dps.ParameterServer(cluster) as ps:
        caplog.set_level(logging.WARNING, "distributed.worker")
        with pytest.raises(error):
            call(ps)
        states = {task.state for task in cluster.scheduler.tasks.values() if task.exception is not None}
        assert states <= {"erred"}, "Dask's own view of the task is as it was"
    told = [record.getMessage() for record in caplog.records if record.name == "distributed.worker"]
    assert any(text.startswith("Compute Failed") for text in told) == logged
    again = [record for record in caplog.records if "run again if any retry is left" in record.getMessage()]
    assert bool(again) == (name == "retries"), "of these the driver may never hear"


@pytest.mark.parametrize(
    ("message", "file", "kept"),
    [
        ("Compute Failed\nKey: %s\nTraceback: %r\n", f"{PACKAGE}/models/partitions.py", False),
        ("Compute Failed\nKey: %s\nTraceback: %r\n", "/home/me/train.py", True),
        ("Compute Failed\nKey: %s\nTraceback: %r\n", f"{PACKAGE}/training/lazy_tasks.py", True),
        ("Compute Failed\nKey: %s\nTraceback: %r\n", f"{PACKAGE}/training/lazy_reads.py", True),
        ("Something else %s %r", f"{PACKAGE}/models/partitions.py", True),
    ],
)
def test_which_failures_of_tasks_are_told_elsewhere(message, file, kept):
    trace = f'  File "{file}", line 7, in f\n    g()\n  File "{PACKAGE}/errors.py", line 8, in g\n'
    record = logging.LogRecord("distributed.worker", logging.ERROR, "worker.py", 1, message, ("key", trace), None)
    assert FailuresToldElsewhere().filter(record) is kept
    assert FailuresToldElsewhere().filter(logging.LogRecord("x", 30, "", 1, "Compute Failed", None, None))
