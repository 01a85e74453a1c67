"""Models that trainers learn step by step on tables of the servers, so that `partial_fit` can go on with them."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self, TypeVar

import numpy.typing as npt
from sklearn.exceptions import ConvergenceWarning

import dps
from dps.errors import InputError
from dps.models.base import HeldServers, ServerModel
from dps.models.linear.weights import HomeWeights, LiveWeights
from dps.models.types import Features, Labels
from dps.models.where import aside

__all__ = ["BATCH_ROWS", "MIN_STEPS", "StepwiseModel", "default_batch"]

BATCH_ROWS = 1_000  # of the largest default batch
MIN_STEPS = 100  # of an epoch over small data, whose default batch is smaller for that
KINDS = ("compute", "pull", "push", "wait", "serialise")  # of a trainer's time

Live = TypeVar("Live", bound=LiveWeights)


def default_batch(rows: int) -> int:
    """Rows in a step of a trainer, for data of so many rows."""
    return min(BATCH_ROWS, max(1, rows // MIN_STEPS))


class StepwiseModel(ServerModel[Live | HomeWeights]):
    """What such models share: `fit`, `partial_fit`, and the end of the servers that these have started."""

    STATE: ClassVar = (*ServerModel.STATE, "_batch", "_stopped")
    _batch: int
    _stopped = False  # because the loss did not fall any more

    @abstractmethod
    def train(
        self, ps: dps.ParameterServer, data: tuple, classes: npt.ArrayLike | None, epochs: int, ours: bool
    ) -> None:
        """Make so many passes over the data, from what is learnt or from the beginning, and keep what comes of it.

        `ours`: the servers end with the fit.
        """

    def fit_anew(self, data: tuple[Features, Labels, Labels], epochs: int) -> None:
        """Train a new model. If this fails, nothing is left behind."""
        try:
            with self.serving(data[0]) as (ps, ours):
                self.train(ps, data, None, epochs, ours)
                if ours:
                    self._learnt = self.home_weights()  # because the servers end here
        except BaseException:
            self.forget()
            raise

    def learn_more(self, data: tuple[Features, Labels, Labels], classes: npt.ArrayLike | None) -> Self:
        """Make one pass over this data, from the model as it is."""
        if isinstance(self._learnt, HomeWeights):
            raise InputError(
                "this model's servers have ended; fit begins anew, or train on a dps.ParameterServer of yours"
            )
        with aside():
            if self._held is None:
                stack, tables = contextlib.ExitStack(), self._tables
                # Where `fit` has left tables, its connection goes on, because a second one would never be detached.
                found = (tables.ps, False) if tables is not None else stack.enter_context(self.servers_for(data[0]))
                self._held = HeldServers(*found, stack)
            try:
                self.train(self._held.ps, data, classes, 1, self._held.ours)
            except BaseException:
                if self._learnt is None:  # nothing is trained yet, so leave nothing behind
                    self.forget()
                raise
        return self

    def close(self) -> None:
        """Copy the model into this process and stop the servers that `partial_fit` has started."""
        if self._held is not None:
            if self._held.ours and self._learnt is not None:
                self._learnt = self._learnt.home()
            self._held.stack.close()
            self._held = None

    def home_weights(self) -> HomeWeights:
        """The fitted weights, copied into this process.

        Returns
        -------
        HomeWeights
            Its ``keys``, sorted, are features, its ``values`` their weights.
        """
        return self._fitted().home()

    def portable(self) -> HomeWeights | None:
        """What was learnt, as a pickled model has it."""
        return None if self._learnt is None else self._learnt.home()

    def begin_counting(self) -> None:
        """Set the attributes that epochs add to."""
        self.n_iter_: int = 0
        self.loss_curve_: list[float] = []
        self.seconds_: dict[str, float] = dict.fromkeys(KINDS, 0.0)

    def add_seconds(self, reports: Iterable[Mapping[str, float]]) -> None:
        """Add up the trainers' time."""
        for seconds in reports:
            for kind, spent in seconds.items():
                self.seconds_[kind] += spent

    def warn_of_falling_loss(self, epochs: int, tol: float, loss: float) -> None:
        """Warn that training has ended at the last epoch, and might have gone on."""
        warnings.warn(
            f"after {epochs} epochs the loss was still falling by more than tol={tol:g}: it was {loss:.4g}; more "
            f"epochs, or higher learning rates, make it smaller",
            ConvergenceWarning,
            stacklevel=3,
        )
