"""Topic models by variational inference, on the trainers: online, and with all documents in each step.

lambda [words, topics] is on the servers as ``eta + scale * table``. The online update (Hoffman, Blei and Bach 2010,
equation 8), lambda <- (1 - rho) lambda + rho (eta + D / S * statistics), changes every row, also of words that no
document of the mini-batch has. Here the decay is in `scale`, one number that follows from the clock: scale <-
(1 - rho) scale, and the table gets rho / scale * D / S * statistics added, for words of the mini-batch only. So each
update is a sum, which counts once and in any order, and its weight in the end is that of the paper. Before `scale`
becomes too small for float32, the servers multiply the table by it, and it begins at 1 again (`Discount`).

At each clock, the batches of all trainers are one mini-batch of S documents.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse

import dps
from dps.functions import library
from dps.models.topics.dirichlet import (
    bound_of_documents,
    bound_of_words,
    exp_expectations,
    log_expectations,
    topics_of_documents,
)
from dps.models.topics.documents import Corpus, corpus_of
from dps.models.topics.plan import Learned, TopicPlan, TwoTables
from dps.models.types import Features

__all__ = ["Discount", "Perplexities", "learn_in_batches", "learn_online"]

DOCUMENTS = 128  # in a step of a trainer; online, of all trainers together
FEW_DOCUMENTS = 32  # in a step of one of many trainers, whose rounds would otherwise take longer than its work
LEAST_SCALE = 1e-12  # with counts up to 1e9 the table stays below 1e21, and float32 ends at 3e38
WORDS_AT_A_TIME = 1 << 14  # rows of a pull for the bound


class Discount:
    """The factor between the table and lambda at each step of online learning.

    `rates` has rho of each step.
    `least` is the scale below which the table is multiplied by it.
    `before` and `after` have the scale before and after each step, where the table was multiplied at the beginning of
    the step.
    `brought_in` is what the table is to be multiplied by at the beginning of the step; 1: by nothing.

    Examples
    --------
    >>> discount = Discount(np.array([0.5, 0.5, 0.5]), least=0.4)
    >>> discount.before.round(6).tolist(), discount.after.round(6).tolist(), discount.brought_in.tolist()
    ([1.0, 0.5, 1.0], [0.5, 0.25, 0.5], [1.0, 1.0, 0.25])
    """

    def __init__(self, rates: np.ndarray, least: float = LEAST_SCALE):
        logs = np.concatenate([[0.0], np.cumsum(np.log1p(-rates))])  # of the scale, if it were never brought in
        base, self.brought_in = np.zeros(len(rates)), np.ones(len(rates))
        start, lowest = 0, math.log(least)
        while start < len(rates):
            end = start + 1 + int(np.argmax(logs[start + 1 :] - logs[start] < lowest))
            if not logs[end] - logs[start] < lowest:
                end = len(rates)
            base[start:end] = logs[start]
            if end < len(rates):
                self.brought_in[end] = math.exp(logs[end] - logs[start])
            start = end
        self.before, self.after = np.exp(logs[:-1] - base), np.exp(logs[1:] - base)


class Perplexities:
    """The perplexity of all documents of all trainers after passes, and whether training ends with it."""

    def __init__(self, trainer: dps.Trainer, corpus: Corpus, plan: TopicPlan):
        self._trainer, self._corpus, self._plan = trainer, corpus, plan
        self._measured = 0  # evaluations so far

    def curve(self) -> list[float]:
        """All perplexities. To be called once, at the end."""
        if not self._measured:
            return []
        self._trainer.barrier()  # because trainer 0 may not have told the last one yet
        return [float(each) for each in self._trainer.pull(self._plan.history, np.arange(self._measured))]

    def end(self, passes: int, table: int, scale: float) -> bool:
        """Whether training ends after so many passes; all trainers call it, and come to the same answer."""
        if self._plan.evaluate_every <= 0 or passes < 1 or passes % self._plan.evaluate_every:
            return False
        self._trainer.barrier()  # because pushes of the pass before may be on their way
        number = passes // self._plan.evaluate_every - 1
        last, before = self._measure(table, scale), math.inf
        if number:  # from the servers, because a trainer that is run again was not there
            before = float(self._trainer.pull(self._plan.history, [number - 1])[0])
        if self._trainer.number == 0:
            self._trainer.assign(self._plan.history, [number], [last])
        self._measured = number + 1
        return abs(last - before) < self._plan.perp_tol

    def _measure(self, table: int, scale: float) -> float:
        trainer, plan = self._trainer, self._plan
        totals = plan.eta * plan.words + scale * trainer.pull(plan.totals, [table])[0]
        score = 0.0
        for X, ids in self._corpus.batches:
            if len(ids):
                keys, local = dps.localize(X)
                logs = log_expectations(self._rows(table, keys, scale), totals)
                gamma, _ = topics_of_documents(local, np.exp(logs), plan.inference)
                score += bound_of_documents(local, gamma, logs, plan.inference.alpha)
        first, stop = (plan.words * n // trainer.trainers for n in (trainer.number, trainer.number + 1))
        for start in range(first, stop, WORDS_AT_A_TIME):
            keys = np.arange(start, min(stop, start + WORDS_AT_A_TIME))
            score += bound_of_words(self._rows(table, keys, scale), totals, plan.eta, plan.words)
        return float(np.exp(-trainer.allreduce(score) / self._corpus.tokens))

    def _rows(self, table: int, words: np.ndarray, scale: float) -> np.ndarray:
        plan = self._plan
        rows = self._trainer.pull(plan.tables[table], words).reshape(len(words), plan.topics)
        return plan.eta + scale * rows.astype(np.float64)


def learn_online(trainer: dps.Trainer, partitions: list[Features], plan: TopicPlan) -> Learned:
    """The training function of ``learning_method="online"``."""
    share = max(FEW_DOCUMENTS, -(-DOCUMENTS // trainer.trainers))
    corpus = corpus_of(trainer, partitions, plan.words, plan.batch_size or share)
    numbers = plan.first + np.arange(plan.passes * corpus.steps)
    rates = (plan.offset + numbers) ** -plan.decay
    discount, judge = Discount(rates), Perplexities(trainer, corpus, plan)
    table, total = plan.tables[0], float(corpus.documents.sum()) if plan.total is None else plan.total
    passes, ended = plan.passes, False
    for X, ids in trainer.iterate([corpus.batches], plan.passes):
        step = trainer.clock
        number, place = divmod(step, corpus.steps)
        if not place and judge.end(number, 0, discount.after[step - 1]):
            passes, ended = number, True
            break
        if discount.brought_in[step] != 1:
            bring_in(trainer, plan, float(discount.brought_in[step]))
        if not len(ids):
            continue
        keys, local = dps.localize(X)
        rows = trainer.pull({table: keys, plan.totals: [0]})
        totals = plan.eta * plan.words + discount.before[step] * rows[plan.totals].reshape(-1)
        values = plan.eta + discount.before[step] * rows[table].reshape(-1, plan.topics).astype(np.float64)
        weights = exp_expectations(values, totals)
        statistics = statistics_of(local, weights, plan)
        statistics *= rates[step] / discount.after[step] * total / corpus.documents[place]
        totals = statistics.sum(axis=0)[None]
        trainer.push({table: (keys, statistics.astype(np.float32)), plan.totals: ([0], totals)})
    scale = float(discount.after[passes * corpus.steps - 1]) if passes else 1.0
    if not ended:
        judge.end(passes, 0, scale)
    return Learned(passes, passes * corpus.steps, scale, judge.curve())


def statistics_of(local: scipy.sparse.csr_matrix, weights: np.ndarray, plan: TopicPlan) -> np.ndarray:
    """What the M-step needs of some documents, [words, topics]."""
    _, statistics = topics_of_documents(local, weights, plan.inference, True)
    assert statistics is not None
    return statistics


def bring_in(trainer: dps.Trainer, plan: TopicPlan, scale: float) -> None:
    """Multiply the table by the scale, which begins at 1 again. All trainers call it at the same clock."""
    trainer.barrier()  # because pushes of clocks before belong to the old scale
    if trainer.number == 0:
        trainer.call(library.scale, plan.tables[0], value=scale)
        trainer.call(library.scale, plan.totals, value=scale)
    trainer.barrier()


def learn_in_batches(trainer: dps.Trainer, partitions: list[Features], plan: TopicPlan) -> Learned:
    """The training function of ``learning_method="batch"``: lambda <- eta + the statistics of all documents."""
    corpus = corpus_of(trainer, partitions, plan.words, plan.batch_size or DOCUMENTS)
    tables, judge = TwoTables(trainer, plan), Perplexities(trainer, corpus, plan)
    passes, ended = plan.passes, False
    for X, ids in trainer.iterate([corpus.batches], plan.passes):
        number, place = divmod(trainer.clock, corpus.steps)
        tables.number = number
        if not place:
            if judge.end(number, tables.read, 1.0):
                passes, ended = number, True
                break
            tables.begin(number)
        if not len(ids):
            continue
        keys, local = dps.localize(X)
        rows, totals = tables.pull(keys)
        weights = exp_expectations(plan.eta + rows.astype(np.float64), plan.eta * plan.words + totals)
        statistics = statistics_of(local, weights, plan)
        tables.add(keys, statistics.astype(np.float32))
    if not ended:
        judge.end(passes, passes % 2, 1.0)
    return Learned(passes, passes, 1.0, judge.curve(), passes % 2)
