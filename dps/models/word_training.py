"""The trainers' part of word2vec: batches of text, their rows, and steps on these."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import dps
from dps import kernels
from dps.models.word_data import batches_of

__all__ = ["WordPlan", "train_words"]

STEP_WORDS = 256  # places of a step: a batch makes many small steps on the rows that it has pulled
POOL = 64  # negatives that the pairs of a step share


@dataclasses.dataclass(frozen=True)
class WordPlan:
    """What all trainers know."""

    inside: str  # the table of the words' vectors
    outside: str  # the table of the vectors by which words are predicted
    cbow: bool
    window: int
    negative: int
    alpha: float
    min_alpha: float
    epochs: int
    batch_words: int
    seed: int
    noise: dps.sampling.AliasTable  # what negatives are drawn from
    keep: np.ndarray | None  # the probability with which a place of each word is kept


def train_words(trainer: dps.Trainer, partitions: Sequence[Any], plan: WordPlan, words: list[str]) -> list[float]:
    """The training function: the mean loss of a pair in each epoch."""
    batches = batches_of(partitions, words, plan.batch_words)
    clocks = plan.epochs * max(1, int(trainer.allreduce(len(batches), "max")))
    first, losses = trainer.clock, []
    epochs = trainer.epochs(plan.epochs, batches, shuffle="batches", seed=plan.seed)
    for epoch in epochs:
        for batch in epoch:
            done = (trainer.clock - first) / clocks
            rate = max(plan.min_alpha, plan.alpha - (plan.alpha - plan.min_alpha) * done)
            loss, pairs = train_batch(trainer, batch, plan, rate)
            if pairs:
                epoch.mean(loss / pairs, pairs)
        losses.append(epoch.loss)
    return losses


def train_batch(trainer: dps.Trainer, batch: np.ndarray, plan: WordPlan, rate: float) -> tuple[float, int]:
    """The steps of a batch, on rows that are pulled once; the sum of the losses, and the number of pairs."""
    rng = dps.sampling.generator(trainer, plan.seed)
    words, sentences = batch
    if plan.keep is not None:
        kept = rng.random(len(words)) < plan.keep[words]
        words, sentences = words[kept], sentences[kept]
    reach = rng.integers(1, plan.window + 1, len(words))
    pools = dps.sampling.negatives(plan.noise, (-(-len(words) // STEP_WORDS), POOL), rng)
    with trainer.rows({plan.inside: words, plan.outside: np.concatenate([words, pools.reshape(-1)])}) as rows:
        targets, negatives = np.split(rows[1].codes, [len(words)])
        return kernels.word_steps(
            rows[0].values, rows[1].values, rows[0].codes, targets, sentences, reach, negatives.reshape(pools.shape),
            negative=plan.negative, rate=rate, step=STEP_WORDS, trainers=trainer.trainers, cbow=plan.cbow,
        )  # fmt: skip
