"""Training functions for the tests with Spark, in a module that its Python workers are quick to import."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
from distributed import Client

from dps.engine.training import spark_tasks


class Mine(Exception):
    """An error with more to it than a text."""

    def __init__(self, number, place):
        super().__init__(number, place)
        self.number, self.place = number, place


class Stubborn(Exception):
    """One that cannot be unpickled."""

    def __init__(self, number, place):
        super().__init__(f"stubborn {number} {place}")


def rows_of(partition):
    return partition if isinstance(partition, list) else partition["id"].tolist()


def count(trainer, partitions, table):
    """Each number once into its row, a push and a tick for each; and what there is to be seen of the process."""
    for partition in partitions:
        for number in rows_of(partition):
            trainer.push(table, [number], 1)
            trainer.tick()
    return {
        "pid": os.getpid(),
        "clients": len(list(Client._instances)),
        "rows": [rows_of(partition) for partition in partitions],
        "trainer": trainer.number,
        "attempt": trainer.attempt,
    }


def count_slowly(trainer, partitions, table, signal):
    """Each number once, modulo 100; slowly, until there is a file of that name. Gives the clock to go on at."""
    first = None
    for number in trainer.iterate(partitions, batch_size=1):
        first = trainer.clock if first is None else first
        trainer.push(table, [number[0] % 100], 1)
        if not Path(signal).exists():
            time.sleep(0.02)
    return first


def read_ids(number, batches):
    """For `read_with`: a partition's number and ids."""
    return number, [each for batch in batches for each in batch["id"].to_pylist()]


def total(number, numbers):
    """For `read_with`, of an RDD."""
    return number, sum(numbers)


def given(trainer, partitions):
    return partitions


def kept(trainer, partitions):
    """How many connections this process has to spare, and has in use."""
    return os.getpid(), len(spark_tasks.pool), list(trainer.client.session._channels)


def fail(trainer, partitions, error):
    """One raises; the others would go on for ever."""
    if trainer.number == 1:
        raise error(1, "here")
    while True:
        trainer.tick()
        time.sleep(0.01)


def fail_beside_a_deaf_one(trainer, partitions):
    """One raises; the other one computes for ever, and never looks."""
    if trainer.number == 1:
        raise ValueError("mine")
    time.sleep(600)


def unpicklable(trainer, partitions):
    return threading.Lock()


def count_each(trainer, numbers, table):
    for number in numbers:
        trainer.push(table, [number], 1)
        yield number


def count_frames(trainer, frames, table):
    for frame in frames:
        for number in frame["id"].tolist():
            trainer.push(table, [number], 1)
        yield frame[["id"]]


def silent(trainer, numbers, table):
    for number in numbers:
        trainer.push(table, [number], 1)


def meet(trainer, numbers):
    trainer.barrier()
    return numbers


def first_time(folder, name):
    """Whether this is the first call with these arguments."""
    try:
        (Path(folder) / str(name)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def count_and_fail(trainer, partitions, table, folder, most):
    """As `count`, in a process that raises now and then, at most so often for each trainer."""
    draw = random.Random(trainer.number * 1000 + trainer.attempt)
    for partition in partitions:
        for number in rows_of(partition):
            trainer.push(table, [number], 1)
            if trainer.attempt < most and draw.random() < 0.1:
                first_time(folder, f"raised-{trainer.number}-{trainer.attempt}")
                raise ValueError("now and then")
            trainer.tick()
    return trainer.attempt


def each_and_fail(trainer, numbers, table, folder):
    """The first two attempts of each partition raise somewhere, the later the attempt the further on."""
    for place, number in enumerate(numbers):
        trainer.push(table, [number], 1)
        if trainer.attempt < 2 and place == 3 * (trainer.attempt + 1):
            first_time(folder, f"raised-{trainer.number}-{trainer.attempt}")
            raise ValueError("now and then")
        yield number


def push_and_fail(trainer, numbers, table, folder):
    """As `each_and_fail`, without results."""
    for _ in each_and_fail(trainer, numbers, table, folder):
        pass


def push_frames(trainer, frames, table):
    for frame in frames:
        trainer.push(table, frame["id"].to_numpy(), 1)
        yield frame


def count_and_die(trainer, partitions, table, folder):
    """One executor, JVM and all, is killed in the middle."""
    for partition in partitions:
        for place, number in enumerate(rows_of(partition)):
            trainer.push(table, [number], 1)
            if trainer.number == 0 and place == 10 and first_time(folder, "killed"):
                kill_executor()
            trainer.tick()
    return trainer.attempt


def count_slowly_on(trainer, partitions, table):
    """As `count`, slow at the first attempt: there is time for an accident."""
    for partition in partitions:
        for number in rows_of(partition):
            trainer.push(table, [number], 1)
            time.sleep(0 if trainer.attempt else 0.2)
            trainer.tick()
    return trainer.attempt


def each_and_die(trainer, numbers, table, folder):
    for place, number in enumerate(numbers):
        trainer.push(table, [number], 1)
        if trainer.number == 1 and place == 10 and first_time(folder, "killed-each"):
            kill_executor()
        yield number


def kill_executor():
    """SIGKILL to the JVM that this Python worker works for."""
    import psutil

    for parent in psutil.Process().parents():
        if "java" in parent.name():
            parent.send_signal(signal.SIGKILL)
            time.sleep(60)  # until the end of this process, which Spark's daemon sees to


def each_with_a_slow_twin(trainer, numbers, table, folder):
    """The first attempt at the last partition stands still in the middle, until there has been another one."""
    for place, number in enumerate(numbers):
        trainer.push(table, [number], 1)
        if trainer.number == 3 and place == 10 and first_time(folder, "slow"):
            until = time.monotonic() + 100
            while not (Path(folder) / "twin").exists() and time.monotonic() < until:
                time.sleep(0.1)
            (Path(folder) / "went-on").touch()
        if trainer.number == 3 and trainer.attempt:
            (Path(folder) / "twin").touch()
            while not (Path(folder) / "went-on").exists():  # the first one pushes on while we are at work
                time.sleep(0.1)
        yield number


def log_loss(batch, w):
    """Logistic loss and its gradient over records (features, label of -1 or 1), or over arrays of both."""
    X, y = batch if isinstance(batch, tuple) else (np.array([x for x, _ in batch]), np.array([y for _, y in batch]))
    z = y * (X @ w)
    return float(np.logaddexp(0, -z).sum()), -(X.T @ (y / (1 + np.exp(z))))


def embed(trainer, partitions, table):
    """Whole partitions as batches: rows of a table and a layer of torch, both stepped by means over the trainers."""
    import torch

    import dps.torch

    torch.set_num_threads(1)
    rows, line = dps.torch.Embedding(trainer, table, 3), torch.nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        line.weight.fill_(1.0 if trainer.number == 0 else 100.0)
    dps.torch.broadcast_parameters(line, trainer)
    descent = torch.optim.SGD(line.parameters(), lr=0.5)
    for users, targets in trainer.iterate(partitions, epochs=5):
        descent.zero_grad()
        (line(rows(users))[:, 0] - torch.from_numpy(targets)).square().mean().backward()
        dps.torch.push_gradients(rows)
        dps.torch.allreduce_gradients(line, trainer)
        descent.step()
    return line.weight.detach().numpy()
