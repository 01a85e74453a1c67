"""Edges for tests of graph algorithms, and trainers that fail in the middle of these."""

from __future__ import annotations

import contextlib

import numpy as np

import dps

# (call of the trainer, clock): the trainer fails before this call, or right after it
INTERRUPTIONS = [
    ("allreduce", 0),
    ("push", 0),
    ("allreduce", 1),
    ("allreduce", 4),
    ("push", 4),
    ("push", 4, "after"),
    ("tick", 4),
    ("tick", 4, "after"),
]


def random_edges(count: int, vertices: int, seed: int = 0) -> np.ndarray:
    """Edges whose sources are drawn by Zipf's law, so that a few vertices have many, and some have none."""
    rng = np.random.default_rng(seed)
    source = np.minimum(rng.zipf(1.7, count), vertices) - 1
    return np.column_stack([source, rng.integers(0, vertices, count)]).astype(np.int64)


class Interruption(RuntimeError):
    """The failure of a trainer's first attempt."""


@contextlib.contextmanager
def interrupted(monkeypatch, call: str, clock: int, when: str = "before"):
    """The last trainer's first attempt fails at this call of a method of the trainer, at this clock. It has to."""
    method, failed = getattr(dps.Trainer, call), []

    def fails(trainer, *args, **kwargs):
        now = not failed and trainer.number == trainer.trainers - 1 and trainer.clock == clock
        if now and when == "before":
            failed.append(call)
            raise Interruption(call)
        result = method(trainer, *args, **kwargs)
        if now:
            failed.append(call)
            raise Interruption(call)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(dps.Trainer, call, fails)
        yield
    assert failed, f"the trainer never came to {call} at clock {clock}"
