"""A generator that draws the same numbers when a trainer is run again."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dps.errors import InputError

__all__ = ["generator"]


class Clocked(Protocol):
    """What is needed of a trainer: its number, and the iterations that it has completed."""

    @property
    def number(self) -> int: ...

    @property
    def clock(self) -> int: ...


def generator(trainer: Clocked, seed: int = 0) -> np.random.Generator:
    """The generator of a trainer's iteration: seeded by `seed`, the trainer's number and its clock.

    A trainer that fails runs again from the beginning, and skips the batches that are complete. A generator that is
    made once, before the loop, would then be behind, and the trainer would draw other numbers for the same batch. So
    make one in each iteration. The numbers do not depend on the run: give each run, or each use of the same iteration,
    its own `seed`; or use the generator's own ``spawn``.

    Parameters
    ----------
    trainer : dps.Trainer
        With its `number` and `clock`. In a run with ``reassign=True`` the clock counts epochs, and any trainer can get
        a batch, so draws are not the same again.
    seed : int
        0 or more.

    Returns
    -------
    numpy.random.Generator

    Raises
    ------
    InputError
        A seed that is not a whole number, 0 or more.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> trainer = SimpleNamespace(number=1, clock=7)
    >>> first, again = (dps.sampling.generator(trainer, seed=3).random(2) for _ in range(2))
    >>> bool((first == again).all())
    True

    In a training function:

    >>> def train(trainer, partitions, table):
    ...     for words in trainer.iterate(partitions, batch_size=1000):
    ...         rng = dps.sampling.generator(trainer)
    ...         pool = dps.sampling.negatives(table, (len(words), 5), rng, avoid=words[:, None])
    """
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool) or seed < 0:
        raise InputError(f"seed is a whole number, 0 or more, not {seed!r}")
    return np.random.default_rng((int(seed), trainer.number, trainer.clock))
