"""Training functions for tests of re-assigned work on Spark, in a module that its Python workers import quickly."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from spark_programs import first_time, kill_executor

EPOCH = 1000  # a row's key in the next epoch is so much greater


def keys_of(batch):
    """The numbers in a batch: of an RDD, of a DataFrame, or of its columns."""
    return np.asarray(batch["id"] if hasattr(batch, "columns") else batch, np.int64)


def count_unevenly(trainer, partitions, table, epochs=2, seconds=0.05):
    """Count each row in each epoch; trainer 0 takes so long for a batch, and the others hardly any time."""
    done = 0
    for batch in trainer.iterate(partitions, epochs=epochs, batch_size=4):
        time.sleep(seconds if trainer.number == 0 else seconds / 20)
        trainer.push(table, keys_of(batch) + EPOCH * trainer.clock, 1)
        done += 1
    return done, trainer.clock


def count_unevenly_and_die(trainer, partitions, table, folder):
    """The same; the executor of a trainer that works on another one's partition is killed."""
    own = {int(key) for partition in partitions for key in keys_of(partition)}
    for batch in trainer.iterate(partitions, epochs=3, batch_size=4):
        time.sleep(0.05 if trainer.number == 0 else 0.002)
        keys = keys_of(batch)
        trainer.push(table, keys[:1] + EPOCH * trainer.clock, 1)
        if trainer.clock == 1 and int(keys[0]) not in own and first_time(folder, "killed"):
            kill_executor()
        trainer.push(table, keys[1:] + EPOCH * trainer.clock, 1)
    return trainer.attempt, trainer.clock


def count_until(trainer, partitions, table, signal):
    """Count each row in each of six epochs, slowly until there is a file of that name."""
    first = None
    for batch in trainer.iterate(partitions, epochs=6, batch_size=4):
        first = trainer.clock if first is None else first
        trainer.push(table, keys_of(batch) + EPOCH * trainer.clock, 1)
        if not Path(signal).exists():
            time.sleep(0.06 if trainer.number == 0 else 0.03)
    return first, trainer.clock


class Locked(list):
    """A partition that stays in its process."""

    def __reduce_ex__(self, protocol):
        raise TypeError("stays here")


def locked(number, records):
    """For `read_with`."""
    return Locked(records)
