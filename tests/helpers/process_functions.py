"""Functions for tests of the process in which servers run them. It imports little, because the process imports it."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
import time

import numpy as np

kept: list[np.ndarray] = []


def who(rows):
    return os.getpid()


def add_one(rows):
    rows.values += 1
    return len(rows)


def holds_the_lock(rows):
    rows.values += 1
    return sum(range(3 * 10**8))


def never_ends(rows):
    rows.values += 1
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # no exception ends that


def eats(rows):
    rows.values += 1
    return float(np.ones(1 << 28).sum())


def leaves(rows):
    rows.values += 1
    os._exit(3)


def exits(rows):
    sys.exit(3)


def waits(rows, directory):
    rows.values += 1
    place, until = pathlib.Path(directory), time.monotonic() + 60
    (place / f"{os.getpid()}.began").touch()
    while not (place / "go_on").exists() and time.monotonic() < until:
        time.sleep(0.01)


def prints(rows):
    print("said by a function", rows.shard)


def keeps(rows):
    kept.append(rows.before)


def kept_values(rows):
    return [each.tolist() for each in kept]


def starts_a_thread(rows):
    found = []
    thread = threading.Thread(target=lambda: found.append(float(rows.values.sum())))
    thread.start()
    thread.join()
    return found


# -- what is compared, bit by bit, with the same in a thread


def draws(rows, scale):
    rows.values[:] = rows.rng.normal(size=rows.values.shape) * scale
    return [rows.time, rows.shard, rows.start, rows.rng.integers(1 << 30, size=3)]


def changes_state(rows):
    rows.values = np.tanh(rows.values) + rows.before.mean()
    rows.state = rows.state_before * 2 + 1
    return {"sum": np.float64(rows.state.sum()), "keys": rows.keys, "present": rows.present}


def replaces(rows):
    half = len(rows) // 2
    rows.replace(0, half)[:] = np.exp(rows.before[:half] / 10)
    rows.replace(half, len(rows))[:] = 7
    return b"done"


def deletes(rows):
    rows.values *= 3
    return rows.delete(rows.keys % 3 == 0)


def reads(rows, numbers):
    return [np.einsum("ij,ij->", rows.values, rows.values), numbers * 2, rows.spec.name, rows.spec.dim, repr(rows)]


def changes_nothing(rows):
    return len(rows)


def fails(rows):
    rows.values += 1
    if rows.shard % 2:
        raise KeyError(f"shard {rows.shard}")
