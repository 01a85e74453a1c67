"""Topic models by collapsed Gibbs sampling, on the trainers (Griffiths and Steyvers 2004).

Each token (a word of a document) has a topic. A table on the servers counts how many tokens of each word have each
topic. In a pass, a trainer draws a new topic for each of its tokens, given the topics of the other tokens of the
document, which it knows, and the counts as they were at the beginning of the pass; from the latter it takes the token
itself away. Counts that are delayed by a pass are those of AD-LDA (Newman et al. 2009) and WarpLDA (Chen et al. 2016).
The new topics are counted in a second table, by additions of whole numbers, and in the next pass the two change places.
So the counts that trainers read add up to the number of tokens, always. `tokens.pyx` draws, and says why counts
that stay the same in a pass make exact draws fast.

A draw depends on the seed, the pass, the number of the token in the data, and on counts that are fixed in the pass.
Thus the result is the same to the last digit for any number of trainers, of servers and of batches. A trainer that is
run again draws what it drew before: the topics of its tokens are on the servers, too, as they were after even and
after odd passes, four of them in an int64.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse

import dps
from dps.kernels import draw_topics
from dps.models.topics.documents import corpus_of
from dps.models.topics.plan import Learned, TopicPlan, TwoTables
from dps.models.topics.variational import Perplexities
from dps.models.types import Features

__all__ = ["ASSIGNMENT_COLUMNS", "MOST_TOPICS", "Settling", "learn_by_sampling", "sampled", "uniforms"]

DOCUMENTS = 2048  # in a step of a trainer
ASSIGNMENT_COLUMNS = 64  # int64 in a row of the table of assignments
PACKED = 4 * ASSIGNMENT_COLUMNS  # topics in it
MOST_TOPICS = 1 << 16  # a topic's number fits 16 bits
GOLDEN, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniforms(numbers: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Random numbers in [0, 1), float64, one for each of some int64: the same ones in each call (splitmix64).

    Examples
    --------
    >>> uniforms(np.array([7, 8, 7]), seed=0, stream=1).round(3).tolist()
    [0.456, 0.186, 0.456]
    """
    with np.errstate(over="ignore"):
        start = _mixed(np.array([seed], np.uint64) * GOLDEN + np.uint64(stream))
        return (_mixed(numbers.astype(np.uint64) * GOLDEN + start) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def sampled(
    X: scipy.sparse.csr_matrix, topics: np.ndarray, counts: np.ndarray, totals: np.ndarray, random: np.ndarray,
    alpha: float, eta: float, words: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Draw a new topic for each token of some documents, one after the other.

    A token's topic is k with probability proportional to
    ``(topics k of the document + alpha) * (counts[word, k] + eta) / (totals[k] + words * eta)``, where the token itself
    is taken away from all three (Griffiths and Steyvers 2004, equation 5).

    Parameters
    ----------
    X : csr_matrix [documents, some words]
        Whole numbers.
    topics : ndarray [tokens]
        The topic of each token, in the order of X's data, each repeated as often as it says.
    counts : ndarray of int64 [some words, topics]
    totals : ndarray of int64 [topics]
    random : ndarray [tokens]
        Numbers in [0, 1).
    alpha, eta : float
        The priors.
    words : int
        How many words there are in all.

    Returns
    -------
    topics : ndarray of uint16 [tokens]
    made : ndarray of int64 [some words, topics]
        How many tokens of each word have each topic now.
    """
    return draw_topics(X.indptr, X.indices, X.data, topics, counts, totals, random, alpha=alpha, eta=eta, words=words)


def learn_by_sampling(trainer: dps.Trainer, partitions: list[Features], plan: TopicPlan) -> Learned:
    """The training function of ``learning_method="gibbs"``. Before the first pass, each token gets a random topic."""
    corpus = corpus_of(trainer, partitions, plan.words, plan.batch_size or DOCUMENTS, whole=True)
    tables, judge = TwoTables(trainer, plan), Perplexities(trainer, corpus, plan)
    assignments, settling = Assignments(trainer, plan), Settling(plan)
    passes, ended = plan.passes, False
    for X, ids in trainer.iterate([corpus.batches], 1 + plan.passes):
        number, place = divmod(trainer.clock, corpus.steps)
        tables.number = number
        if not place:
            if judge.end(number - 1, tables.read, 1.0):
                passes, ended = number - 1, True
                break
            tables.begin(number)
        if not X.nnz:
            continue
        first = corpus.first_token[int(ids[0])]
        tokens = first + np.arange(int(X.data.sum(dtype=np.float64)))
        random = uniforms(tokens, plan.seed, number)
        keys, local = dps.localize(X)
        if number:
            counts, totals = tables.pull(keys)
            before = assignments.get(first, len(tokens), number - 1)
            settling.note(number, local, before, counts, totals)
            alpha, eta = plan.inference.alpha, plan.eta
            topics, made = sampled(local, before, counts, totals, random, alpha, eta, plan.words)
        else:
            topics = (random * plan.topics).astype(np.uint16)
            cells = np.repeat(local.indices.astype(np.int64), local.data.astype(np.int64)) * plan.topics + topics
            made = np.bincount(cells, minlength=len(keys) * plan.topics).reshape(len(keys), plan.topics)
        assignments.put(first, topics, number)
        tables.add(keys, made)
    if ended:
        return Learned(passes, passes, 1.0, judge.curve(), (1 + passes) % 2)
    judge.end(passes, (1 + passes) % 2, 1.0)
    falls = settling.fall(trainer)
    return Learned(passes, passes, 1.0, judge.curve(), (1 + passes) % 2, falls)


class Settling:
    """How much likelier the words of all tokens, given their topics, still became in the last fifth of the passes.

    A trainer that is run again has no sums of passes that were made before; the means are then of the others' tokens.
    """

    def __init__(self, plan: TopicPlan):
        self._plan, last = plan, plan.passes
        self._places = {max(1, last - max(1, last // 5)): 0, last: 1}  # by the pass that reads what it is about
        self._sums = np.zeros((2, 2))  # of logarithms, and of tokens

    def note(
        self, number: int, X: scipy.sparse.csr_matrix, topics: np.ndarray, counts: np.ndarray, totals: np.ndarray
    ) -> None:
        """Add some documents, with the topics of their tokens and all counts before a pass."""
        place = self._places.get(number)
        if place is None:
            return
        words, eta = np.repeat(X.indices, X.data.astype(np.int64)), self._plan.eta
        shares = (counts[words, topics] + eta) / (totals[topics] + self._plan.words * eta)
        self._sums[place] += np.log(shares).sum(), len(words)

    def fall(self, trainer: dps.Trainer) -> float:
        """The part by which exp(-mean logarithm) fell; infinite after a single pass. All trainers call it."""
        (early, before), (late, after) = np.asarray(trainer.allreduce(self._sums.ravel())).reshape(2, 2).tolist()
        return 1.0 - math.exp(early / before - late / after) if before and after else math.inf


class Assignments:
    """The topics of a trainer's tokens after the last pass: in memory, and on the servers for a trainer run again."""

    def __init__(self, trainer: dps.Trainer, plan: TopicPlan):
        assert plan.assignments is not None
        self._trainer, self._tables = trainer, plan.assignments
        self._known: dict[int, tuple[int, np.ndarray]] = {}  # by the number of the first token: pass, topics

    def get(self, first: int, count: int, number: int) -> np.ndarray:
        """The topics of `count` tokens from number `first` on, after a pass."""
        known, topics = self._known.get(first, (-1, None))
        if topics is not None and known == number:
            return topics
        rows = self._trainer.pull(self._tables[number % 2], self._keys(first, count))
        return rows.reshape(-1).view(np.uint16)[:count]

    def put(self, first: int, topics: np.ndarray, number: int) -> None:
        """Keep the topics that a pass has drawn."""
        self._known[first] = number, topics
        keys = self._keys(first, len(topics))
        packed = np.zeros((len(keys), PACKED), np.uint16)
        packed.reshape(-1)[: len(topics)] = topics
        self._trainer.assign_async(self._tables[number % 2], keys, packed.view(np.int64))

    def _keys(self, first: int, count: int) -> np.ndarray:
        """Rows of a batch: from its first token on, fewer than it has tokens, so no other batch has them."""
        return first + np.arange(-(-count // PACKED))
