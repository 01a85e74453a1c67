"""The trainers' part of word2vec: batches of text, their rows, and steps on these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

import dps
from dps import kernels
from dps.models.words.text import WalkText, batches_of

if TYPE_CHECKING:
    from dps.models.types import Part

__all__ = ["WordPlan", "train_walks", "train_words", "words_of_batch"]

# Places of a step. With fewer, frequent words take more steps on a text. The held-out loss of State of the Union was
# 2.67 with 256 places, 2.62 with 32, 2.55 with 16, 2.56 with 8.
STEP_WORDS = 16
# Negatives that the pairs of a step share. With 32 and with 64, the held-out loss of State of the Union is the same to
# 0.1 %; that of 1.5 million words by Zipf's law is 0.2 % higher with 32. For a short text, whose time does not matter,
# 32 are too noisy: the two clubs of the karate graph were found with a mutual information of 0.63 in place of 0.80
# (means of 16 seeds). With walks of 200,000 words on 1,000 vertices, there was no difference. A batch draws as many
# negatives as it has words, and the pools are drawn from these: with a quarter of them, the loss of words that were not
# trained on was 6 % higher.
POOL, POOL_OF_SHORT_TEXTS = 32, 64
# A place of skip-gram has about as many pairs as the window is wide, and all of a step's pairs change its rows at once.
# Steps of 16 places and pools of 32 are for windows of up to 5. With windows of 10, the default of Node2Vec, rows that
# many pairs have in common overshoot: the AUC of held-out edges, which is that of gensim's vectors in brackets, was
# 0.64 (0.85) in a graph with hubs of 285 edges, 0.71 (0.79) in one of 20 communities, and 0.84 (0.93) among the nearest
# texts of Reuters R8. With 8 places and 64 negatives it was 0.82, 0.80 and 0.92; steps of 4 or pools of 128 gave no
# more. Windows of more than 20 are stepped as those of 20, because the pools of a batch would need too much memory.
USUAL_WINDOW, WIDE_WINDOW = 5, 20
SHORT_BATCH = 5000  # words; by default, texts of less than 160,000 words have shorter batches
# The learning rate falls from batch to batch, and trainers meet behind each. With one batch of 20,000 words in an
# epoch, the vertices of a small graph were told apart less well than with batches of 2,000, also by one trainer.
BATCHES_OF_TEXT, LEAST_WORDS = 32, 1000


@dataclasses.dataclass(frozen=True)
class WordPlan:
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


def words_of_batch(most: int, text: int) -> int:
    """How many words a batch has: `most`, or less where the text has few words."""
    return min(most, max(text // BATCHES_OF_TEXT, LEAST_WORDS))


def size_of_step(batch_words: int, window: int, cbow: bool) -> tuple[int, int]:
    """How many places a step has, and how many negatives its pairs share.

    Examples
    --------
    >>> size_of_step(20_000, 5, False), size_of_step(20_000, 10, False), size_of_step(20_000, 10, True)
    ((16, 32), (8, 64), (16, 32))
    >>> size_of_step(20_000, 1000, False)
    (4, 128)
    """
    pool = POOL if batch_words >= SHORT_BATCH else POOL_OF_SHORT_TEXTS
    if cbow or window <= USUAL_WINDOW:  # a place of CBOW is one pair, however wide its window is
        return STEP_WORDS, pool
    wide = min(window, WIDE_WINDOW)
    return STEP_WORDS * USUAL_WINDOW // wide, max(pool, -(-POOL * wide // USUAL_WINDOW))


def train_words(trainer: dps.Trainer, partitions: Sequence[Part], plan: WordPlan, words: list[str]) -> list[float]:
    """The training function over sentences: the mean loss of a pair in each epoch."""
    return train(trainer, batches_of(partitions, words, plan.batch_words), plan, lambda batch: batch)


def train_walks(trainer: dps.Trainer, partitions: Sequence[object], plan: WordPlan, text: WalkText) -> list[float]:
    """The same over walks, which a trainer pulls from the servers batch by batch; the partitions are not read."""
    batches = text.batches(trainer.number, trainer.trainers, plan.batch_words)
    return train(trainer, batches, plan, lambda batch: text.read(trainer, batch))


def train(
    trainer: dps.Trainer, batches: list[np.ndarray], plan: WordPlan, read: Callable[[np.ndarray], np.ndarray]
) -> list[float]:
    """The mean loss of a pair in each epoch; `read` makes words and sentences of a batch."""
    clocks = plan.epochs * max(1, int(trainer.allreduce(len(batches), "max")))
    first, losses = trainer.clock, []
    epochs = trainer.epochs(plan.epochs, batches, shuffle="batches", seed=plan.seed)
    for epoch in epochs:
        for batch in epoch:
            done = (trainer.clock - first) / clocks
            rate = max(plan.min_alpha, plan.alpha - (plan.alpha - plan.min_alpha) * done)
            loss, pairs = train_batch(trainer, read(batch), plan, rate)
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
    step, pool = size_of_step(plan.batch_words, plan.window, plan.cbow)
    drawn = dps.sampling.negatives(plan.noise, max(pool, len(words)), rng)
    pools = rng.integers(0, len(drawn), (-(-len(words) // step), pool))
    with trainer.rows({plan.inside: words, plan.outside: np.concatenate([words, drawn])}) as (inside, outside):
        targets, negatives = np.split(outside.codes, [len(words)])
        return kernels.word_steps(
            inside.values, outside.values, inside.codes, targets, sentences, reach, negatives[pools],
            negative=plan.negative, rate=rate, step=step, trainers=trainer.trainers, cbow=plan.cbow,
        )  # fmt: skip
