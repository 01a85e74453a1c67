"""Which files of dps a push, a tick and a failover run through, recorded in a cluster whose processes are threads."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import dask
import numpy as np

import dps
import dps.engine

__all__ = ["LEFT_OUT", "Recorder", "Seen", "files_of_fit", "walks"]

PACKAGE = str(Path(dps.engine.__file__).parent) + "/"
KEYS = np.arange(0, 1000, 7)
REPEATS = 10  # of each call: what all of them run through is not chance
TAIL_SECONDS = 0.02  # an endpoint's thread goes on for a moment after its answer was read
STOP_SECONDS = 1.0  # after its worker has closed, a server notices that within a quarter of a second

# Files (a folder ends with a slash) that walks leave out, each with its reason.
LEFT_OUT = {
    "telemetry/": "counters that ride along",
    "deploy/": "this cluster's own",
    "daskapi/cordon.py": "it hears all status messages of workers; and it tells a client whether a task calls it",
    "daskapi/failed_tasks.py": "a filter that sees all messages in a worker's log",
    "training/tasks.py": "a callback that asks Dask whether the task was cancelled",
    "wire/memory.py": "buffers of large bodies, given back when a connection ends",
    "state/recipes.py": "fields of optimizers and initializers: a part of state/ops.py TableSpec",
    "state/initializers.py": "the same",
    "state/schedules.py": "the same",
}


class Seen(NamedTuple):
    """What a recording has seen of one file."""

    functions: set[str]
    callers: set[str]  # files; "" where a thread or an event loop begins


def left_out(file: str) -> bool:
    return any(file.startswith(name) if name.endswith("/") else file == name for name in LEFT_OUT)


class Recorder:
    """Records the functions of dps that are called, in all threads that start after it."""

    def __init__(self) -> None:
        self.recording = False
        self._calls: dict[tuple[str, str, str], str] = {}  # (thread, file, function) -> the file that called it first

    @contextlib.contextmanager
    def installed(self) -> Iterator[Recorder]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield self
        finally:
            self.recording = False
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if not self.recording or event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        thread, file = threading.current_thread().name, code.co_filename.removeprefix(PACKAGE)
        call = thread, file, code.co_qualname
        if call not in self._calls and not left_out(file):
            self._calls[call] = self._caller(thread, frame)

    def _caller(self, thread: str, frame: FrameType | None) -> str:
        while frame is not None and (frame := frame.f_back) is not None:
            file = frame.f_code.co_filename.removeprefix(PACKAGE)
            # A frame that is not in the recording began before it: the thread's loop.
            if (thread, file, frame.f_code.co_qualname) in self._calls:
                return file
        return ""

    def record(
        self, call: Callable[[], Any], tail: float = TAIL_SECONDS, without: str | None = None
    ) -> dict[str, Seen]:
        """File -> what was seen of it during `call`, but not in the thread `without`."""
        self._calls = {}
        self.recording = True
        call()
        time.sleep(tail)
        self.recording = False
        seen: dict[str, Seen] = {}
        for (thread, file, function), caller in self._calls.items():
            if thread != without:
                functions, callers = seen.setdefault(file, Seen(set(), set()))
                functions.add(function)
                callers.add(caller)
        return seen


RECORDER = Recorder()
TRAINERS: dict[str, dict[str, Seen]] = {}  # what the trainer below has recorded; it is called in this process


def train(trainer: Any, partitions: Any) -> None:
    gradient = np.ones((len(KEYS), 1), "float32")
    calls = {"push": lambda: trainer.push("w", KEYS, gradient), "tick": trainer.tick}
    for call in calls.values():  # the first one also makes connections and rows
        call()
    for name, call in calls.items():
        TRAINERS[name] = common([RECORDER.record(call) for _ in range(REPEATS)])


def common(recordings: list[dict[str, Seen]]) -> dict[str, Seen]:
    """The files that are in all recordings, with the functions that are in all of them."""
    always = set.intersection(*(set(recording) for recording in recordings))
    return {
        file: Seen(
            set.intersection(*(recording[file].functions for recording in recordings)),
            set.union(*(recording[file].callers for recording in recordings)),
        )
        for file in recordings[0]
        if file in always
    }


def beyond(seen: dict[str, Seen], idle: dict[str, Seen]) -> set[str]:
    """The files of which more was seen than while the cluster was idle."""
    return {
        file for file, (functions, _) in seen.items() if functions - (idle[file].functions if file in idle else set())
    }


def walks() -> tuple[dict[str, set[str]], dict[str, dict[str, Seen]]]:
    """(the files that each walk has to name, those that it may name and what was seen of them)."""
    cluster_of: Any = {"servers": 2, "trainers": 1, "processes": False, "dashboard_address": None}
    with (
        RECORDER.installed(),
        dask.config.set({"dps.rebalancing": False}),  # which looks at servers while they fail, too
        dps.LocalCluster(**cluster_of) as cluster,
        dps.ParameterServer(cluster, servers=2, copies=2) as ps,
    ):
        ps.table("w", optimizer=dps.SGD(0.1))
        ps.run(train, [[1]], staleness=0)
        client = ps.client()

        def push() -> None:
            client.push("w", KEYS, np.ones((len(KEYS), 1), "float32"))

        idle = RECORDER.record(lambda: None, tail=STOP_SECONDS)  # heartbeats, and looks at what is silent
        ordinary = RECORDER.record(push, tail=STOP_SECONDS)  # the same, and a push
        (victim,) = (server for server in ps.status().servers if server.number == 0)
        (worker,) = (w for w in cluster.workers.values() if w.address == victim.worker)

        def fail() -> None:
            cluster.sync(worker.close, nanny=False)
            time.sleep(STOP_SECONDS)
            push()

        failover = RECORDER.record(fail, without=f"dps-server-{ps.name}-0")
    must = {name: beyond(seen, idle) for name, seen in TRAINERS.items()}
    return {**must, "failover": beyond(failover, ordinary)}, {**TRAINERS, "failover": failover}


def files_of_fit() -> set[str]:
    """The files of dps.models that a fit runs through, in the driver and in its trainer, up to the first pull."""
    import dask.array as da

    from dps import models

    root, seen, pulled = str(Path(dps.__file__).parent) + "/", set(), threading.Event()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or pulled.is_set() or not file.startswith(root):
            return
        if file.startswith(root + "models/"):
            seen.add(file.removeprefix(root))
        elif file.endswith("client/verbs.py") and frame.f_code.co_name.startswith("pull"):
            pulled.set()

    options: dict[str, Any] = {"servers": 1, "trainers": 1, "processes": False, "dashboard_address": None}
    with dps.LocalCluster(**options) as cluster, dps.ParameterServer(cluster) as ps:
        X = da.random.default_rng(0).normal(size=(1000, 5), chunks=(500, 5)).persist()
        model = models.LogisticRegression(client=ps, solver="adagrad", epochs=1, progress=False)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            model.fit(X, (X[:, 0] > 0).astype(int))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        model.forget()
    return seen
