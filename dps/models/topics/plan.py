"""What the trainers of a topic model share: the settings, and two tables of which one is read while one is filled."""

from __future__ import annotations

import dataclasses

import numpy as np

import dps
from dps.models.topics.dirichlet import Inference

__all__ = ["Learned", "TopicPlan", "TwoTables"]


@dataclasses.dataclass(frozen=True)
class TopicPlan:
    """The settings of a training that each trainer gets."""

    tables: tuple[str, str]  # [words, topics]: where the first pass begins, and the other one
    totals: str  # a row for each of these tables: the sums of its columns
    history: str  # a row for each evaluation: the perplexity
    topics: int
    words: int
    eta: float
    inference: Inference
    passes: int
    batch_size: int | None  # documents in a step of a trainer; None: as many as are good for the method
    decay: float  # kappa of the learning rate
    offset: float  # tau 0
    first: int  # number of the first update, from 1
    total: float | None  # number of documents that the data stand for; None: as many as there are
    evaluate_every: int  # passes
    perp_tol: float
    seed: int  # of Gibbs sampling
    assignments: tuple[str, str] | None = None  # tables of Gibbs sampling: topics of tokens after even and odd passes


@dataclasses.dataclass
class Learned:
    """What a trainer returns. It is the same for all of them."""

    passes: int
    updates: int
    scale: float  # lambda = eta + scale * the table
    perplexities: list[float]
    table: int = 0  # which of the two tables has the result
    fall: float = 0.0  # Gibbs sampling: of the perplexity of words given their topics, in the last fifth of the passes


class TwoTables:
    """Two tables with the same words: trainers read one in a pass, and add to the other one, which begins at zero.

    So all batches of a pass see the same numbers, whichever trainer comes first, and also a trainer that is run again.
    """

    def __init__(self, trainer: dps.Trainer, plan: TopicPlan):
        self._trainer, self._plan = trainer, plan
        self.number = 0  # of the pass

    @property
    def read(self) -> int:
        return self.number % 2

    def begin(self, number: int) -> None:
        """Begin a pass: wait until all trainers have ended the one before, and empty the table that it had read."""
        self.number = number
        if not number:
            return
        self._trainer.barrier()  # because pushes of the pass before may be on their way
        if self._trainer.number == 0:
            filled = 1 - self.read
            self._trainer.clear(self._plan.tables[filled])
            self._trainer.delete(self._plan.totals, [filled])  # a row of a dense table becomes 0
        self._trainer.barrier()

    def pull(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows of words, the sums over all words) of the table that is read."""
        plan = self._plan
        table = plan.tables[self.read]
        rows = self._trainer.pull({table: words, plan.totals: [self.read]})
        return rows[table].reshape(len(words), plan.topics), rows[plan.totals].reshape(plan.topics)

    def add(self, words: np.ndarray, rows: np.ndarray) -> None:
        plan, filled = self._plan, 1 - self.read
        self._trainer.push({plan.tables[filled]: (words, rows), plan.totals: ([filled], rows.sum(axis=0)[None])})
