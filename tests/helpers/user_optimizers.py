"""For tests: optimizers as users write them, and what they should make of pushes, in numpy and in one process."""

from __future__ import annotations

import dataclasses

import numpy as np

import dps
from dps.engine.state.ops import TableSpec


class SignSGD(dps.Optimizer):
    """Without state."""

    lr: float = 0.1

    def update(self, values, state, gradients, clock):
        values -= self.lr / (1 + max(clock, 0)) * np.sign(gradients)


class Averaged(dps.Optimizer):
    """A step along the mean of a row's gradients: their sum and their number are its state."""

    lr: float = 0.5
    slot_start = 2.0

    def init(self, dim):
        return dim + 1

    def update(self, values, state, gradients, clock):
        state[:, :-1] += gradients
        state[:, -1] += 1
        values -= self.lr * state[:, :-1] / state[:, -1:]


class Clipped(dps.Adagrad):
    """dps's own, with gradients that are clipped before."""

    limit: float = 1.0
    names: dict = dataclasses.field(default_factory=dict, hash=False)

    def update(self, values, state, gradients, clock):
        super().update(values, state, np.clip(gradients, -self.limit, self.limit), clock)


class Latest(SignSGD):
    """The last of a key's values counts."""

    repeats = "last"


class Picky(SignSGD):
    """Raises where a gradient is 13, after it has changed what it was given."""

    def update(self, values, state, gradients, clock):
        values += 1
        if (gradients == 13).any():
            raise ArithmeticError("thirteen is out of the question")
        super().update(values, state, gradients, clock)


class Oracle:
    """The rows of a table with an optimizer of the user, by key; each push is one call of `update` on all its keys."""

    def __init__(self, spec: TableSpec, optimizer: dps.Optimizer):
        self.spec, self.optimizer = spec, optimizer
        self.rows: dict[int, np.ndarray] = {}

    def push(self, keys: np.ndarray, gradients: np.ndarray, clock: int = 0) -> None:
        spec = self.spec
        distinct, inverse = np.unique(keys, return_inverse=True)
        merged = np.zeros((len(distinct), spec.dim), spec.dtype)
        if self.optimizer.repeats == "last":
            merged[inverse] = gradients
        else:
            np.add.at(merged, inverse, gradients.astype(spec.dtype))
        new = np.full(spec.dim + spec.slots, self.optimizer.slot_start, spec.dtype)
        new[: spec.dim] = 0
        rows = np.array([self.rows.get(int(key), new) for key in distinct])
        values, state = rows[:, : spec.dim].copy(), rows[:, spec.dim :].copy()
        self.optimizer.update(values, state, merged, clock)
        for key, row in zip(distinct.tolist(), np.concatenate([values, state], axis=1), strict=True):
            self.rows[key] = row

    def values(self, keys: np.ndarray) -> np.ndarray:
        nothing = np.zeros(self.spec.dim, self.spec.dtype)
        return np.array([self.rows[int(key)][: self.spec.dim] if int(key) in self.rows else nothing for key in keys])
