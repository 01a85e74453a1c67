"""Processes die in the middle of large pulls through shared memory: nothing of the memory is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from distributed import Client
from kills import killed_at, pids_of
from memories import files, memories
from servers import wait_until

import dps

if not hasattr(os, "memfd_create"):
    pytest.skip("the system has no such memory", allow_module_level=True)
pytestmark = pytest.mark.processes

ROWS, DIM = 1 << 18, 16  # 16 MB


@contextlib.contextmanager
def started(servers: int, trainers: int) -> Iterator[dps.ParameterServer]:
    with (
        dps.LocalCluster(servers=servers, trainers=trainers, dashboard_address=None) as cluster,
        Client(cluster) as client,
        dps.ParameterServer(client, servers=servers) as ps,
    ):
        yield ps


def expected() -> np.ndarray:
    return np.random.default_rng(0).random((ROWS, DIM), np.float32)


@pytest.mark.parametrize("wire", [None, "bfloat16", "int8"])
def test_trainers_pull_what_a_socket_brings(wire: str | None) -> None:
    """Narrow rows travel to trainers only, which have a clock; 40,000 of them have more than a megabyte."""
    travel: Any = None if wire is None else dps.Wire(wire, None)

    def pull(trainer: dps.Trainer, data: object) -> tuple[int, int]:
        named = [slice(0, ROWS), np.random.default_rng(1).permutation(ROWS)]
        parts = [trainer.pull("w", slice(n, n + 8000)) for n in range(0, ROWS, 8000)]
        rows = np.concatenate(parts)
        before = memories().total()
        for _ in range(3):
            for keys in named:
                np.testing.assert_array_equal(trainer.pull("w", keys), rows[keys])
        return before, memories().total()

    with started(1, 1) as ps:
        ps.table("w", rows=ROWS, dim=DIM, wire=travel)
        ps.client().assign("w", slice(0, ROWS), expected())
        assert ps.run(pull, [0], trainers=1, progress=False) == [(0, 1)]


def test_a_server_dies_amid_large_pulls() -> None:
    before = memories()
    with started(2, 1) as ps:
        ps.table("w", rows=ROWS, dim=DIM, copies=2)
        rows = expected()
        with ps.client() as reader:
            reader.assign("w", slice(0, ROWS), rows)
            for _ in range(3):
                reader.pull("w", slice(0, ROWS))
            assert (memories() - before).total() == 2
            pids, _ = pids_of(ps)
            assert [memories(pid).total() for pid in pids] == [1, 1]
            timer = threading.Timer(0.3, os.kill, (pids[0], signal.SIGKILL))
            timer.start()
            until, out = time.monotonic() + 1.0, np.empty((ROWS, DIM), np.float32)
            while time.monotonic() < until or timer.is_alive():
                out[:] = -1
                np.testing.assert_array_equal(reader.pull("w", slice(0, ROWS), out=out), rows)
            np.testing.assert_array_equal(reader.pull("w", slice(0, ROWS)), rows)
            assert (memories() - before).total() <= 2
            assert files() == 0
        wait_until(lambda: not memories(pids[1]))
    assert not memories() - before


def test_a_trainer_dies_amid_large_pulls() -> None:
    def pull(trainer: dps.Trainer, data: object) -> bool:
        out = np.empty((ROWS, DIM), np.float32)
        until = time.monotonic() + 2.0
        same = True
        while time.monotonic() < until:
            trainer.pull("w", slice(0, ROWS), out=out)
            same = same and bool((out == out[0]).all())
            trainer.tick()
        return same

    with started(1, 2) as ps:
        ps.table("w", rows=ROWS, dim=DIM)
        ps.client().assign("w", slice(0, ROWS), np.ones((ROWS, DIM), np.float32))
        (server,), (victim, _) = pids_of(ps)
        with killed_at(ps, {5: victim}):
            assert ps.run(pull, [0, 1], trainers=2, staleness=np.inf, progress=False) == [True, True]
        wait_until(lambda: memories(server).total() <= 2)
        assert files(server) == 0
