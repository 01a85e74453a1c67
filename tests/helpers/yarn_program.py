"""A training function that containers import: it travels as a file of theirs."""

from __future__ import annotations

import time

import numpy as np

import dps


def count(trainer, partitions, pause):
    """Count the keys of all partitions, one batch of ten a clock."""
    for keys in trainer.iterate(partitions, batch_size=10):
        trainer.push("counts", keys, np.ones(len(keys), "int64"))
        time.sleep(pause)
    return trainer.origin


def where_am_i():
    """The application in one of whose containers this is called."""
    with dps.YarnCluster.from_current() as cluster:
        return cluster.app_id
