"""Where k-means begins: k-means|| or random rows, drawn by the trainers over all partitions.

k-means|| (Bahmani et al., "Scalable k-means++", VLDB 2012, algorithm 2) draws, in each of a few rounds, each row with a
probability in proportion to its squared distance from the rows that were drawn before. The rows drawn lie in a table.
In the end each counts as many rows as are nearest to it, and k-means of these few weighted rows gives the centers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import dps
from dps.models.clusters.centers import dense_rows, nearest
from dps.models.inputs.features import Piece
from dps.models.inputs.notes import sendable

__all__ = ["SeedPlan", "Seeds", "drawn_rows", "place_of", "reduced", "seeds_of"]

ROUNDS = 5  # of k-means||, which section 5.3 of the paper finds to be enough
MORE_ROUNDS = 50  # at most, until there are as many candidates as clusters
OVERSAMPLING = 2  # rows drawn in a round, for each cluster
LOCAL_RUNS = 5  # of k-means of the candidates, which are few


@sendable
@dataclasses.dataclass
class SeedPlan:
    clusters: int
    features: int
    init: str  # "k-means++", "random", or "given": draw none
    seed: int
    candidates: str  # the table of drawn rows, keyed by their numbers


class Seeds(NamedTuple):
    weight: float  # of its rows
    sums: np.ndarray  # float64 [features], weighted
    squares: np.ndarray  # float64 [features], weighted
    nearest_weights: np.ndarray  # of the rows that are nearest to each candidate (k-means||)
    keys: np.ndarray  # random numbers (random rows): the rows with the least keys of all trainers are drawn
    rows: np.ndarray  # float32 [keys, features]


def seeds_of(trainer: dps.Trainer, pieces: Sequence[Piece], plan: SeedPlan) -> Seeds:
    """The training function: sums of the trainer's rows, and rows that are drawn from all trainers' rows."""
    rng = np.random.default_rng((plan.seed, place_of(trainer)))
    weight, sums, squares = 0.0, np.zeros(plan.features), np.zeros(plan.features)
    for piece in pieces:
        weights = weights_of_rows(piece)
        weight += float(weights.sum())
        sums += weights @ piece.block
        squares += weights @ (piece.block.multiply(piece.block) if hasattr(piece.block, "nnz") else piece.block**2)
    count = plan.clusters if plan.init == "random" else 1
    keys, rows = drawn_rows(pieces, count if plan.init != "given" else 0, plan.features, rng)
    counted = np.zeros(0)
    if plan.init == "k-means++":
        counted = k_means_parallel(trainer, pieces, plan, keys, rows, rng)
    return Seeds(weight, sums, squares, counted, keys, rows)


def place_of(trainer: dps.Trainer) -> int:
    """The number from which the trainer's random numbers follow: that of its first partition.

    Which trainer gets a partition depends on where the partition lies, and that is not the same in each run.
    """
    return trainer.partition_numbers[0] if trainer.partition_numbers else trainer.number


def weights_of_rows(piece: Piece) -> np.ndarray:
    return np.ones(piece.block.shape[0]) if piece.weights is None else piece.weights.astype(np.float64)


def drawn_rows(
    pieces: Sequence[Piece], count: int, features: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(keys, rows) of `count` random rows, or fewer, by exponential keys (Efraimidis and Spirakis, 2006).

    The rows with the least keys of several trainers together are a sample, by weight, of the rows of all of them.
    """
    keys, rows = [np.zeros(0)], [np.zeros((0, features), np.float32)]
    for piece in pieces:
        with np.errstate(divide="ignore"):
            times = rng.exponential(size=piece.block.shape[0]) / weights_of_rows(piece)
        chosen = np.argsort(times)[:count]
        chosen = chosen[np.isfinite(times[chosen])]
        keys.append(times[chosen])
        rows.append(dense_rows(piece.block[chosen]))
    both, together = np.concatenate(keys), np.concatenate(rows)
    least = np.argsort(both)[:count]
    return both[least], together[least]


def k_means_parallel(
    trainer: dps.Trainer,
    pieces: Sequence[Piece],
    plan: SeedPlan,
    keys: np.ndarray,
    rows: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw candidates; the weight of this trainer's rows that are nearest to each of them."""
    blocks = [piece.block for piece in pieces if piece.block.shape[0]]
    weights = np.concatenate([np.zeros(0), *map(weights_of_rows, pieces)])
    distances, owners = np.full(len(weights), np.inf), np.zeros(len(weights), np.int64)
    picks, count = first_row(trainer, keys, rows), 0
    for number in range(MORE_ROUNDS):
        new, first = published(trainer, picks, plan, count), count
        count += len(new)
        start = 0
        for block in blocks if len(new) else []:
            part = slice(start, start + block.shape[0])
            found = nearest(block, new)
            nearer = found.distances < distances[part]
            owners[part][nearer] = found.labels[nearer] + first
            distances[part][nearer] = found.distances[nearer]
            start = part.stop
        potential = float(trainer.allreduce(weights @ distances if len(weights) else 0.0))
        if potential == 0 or (number >= ROUNDS and count >= plan.clusters):
            break
        chances = OVERSAMPLING * plan.clusters * weights * distances / potential
        picks = rows_at(blocks, np.flatnonzero(rng.random(len(weights)) < chances), plan.features)
    return np.bincount(owners, weights, count)


def first_row(trainer: dps.Trainer, keys: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The row with the least key of all trainers, at the trainer that has it; no row at the others."""
    least = np.full(trainer.trainers, np.inf)
    least[trainer.number] = keys.min(initial=np.inf)
    return rows[:1] if int(trainer.allreduce(least, "min").argmin()) == trainer.number else rows[:0]


def published(trainer: dps.Trainer, picks: np.ndarray, plan: SeedPlan, count: int) -> np.ndarray:
    """Put the rows that this trainer has drawn into the table; the rows that all trainers have drawn."""
    counts = np.zeros(trainer.trainers, np.int64)
    counts[trainer.number] = len(picks)
    counts = trainer.allreduce(counts)
    first = count + int(counts[: trainer.number].sum())
    if len(picks):
        trainer.assign(plan.candidates, np.arange(first, first + len(picks)), picks)
    trainer.barrier()
    drawn = int(counts.sum())
    if not drawn:
        return np.zeros((0, plan.features))
    return trainer.pull(plan.candidates, np.arange(count, count + drawn)).reshape(drawn, plan.features)


def rows_at(blocks: Sequence, chosen: np.ndarray, features: int) -> np.ndarray:
    """Rows of several blocks, by sorted numbers that count over all of them."""
    parts, start = [np.zeros((0, features), np.float32)], 0
    for block in blocks:
        stop = start + block.shape[0]
        parts.append(dense_rows(block[chosen[(chosen >= start) & (chosen < stop)] - start]))
        start = stop
    return np.concatenate(parts)


def reduced(candidates: np.ndarray, weights: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """Centers [clusters, features] of weighted candidates, by k-means in this process.

    Where there are no more candidates than clusters, they are the centers, some of them several times.
    """
    order = np.lexsort(candidates.T)  # because their order follows from the order of the trainers
    order = order[weights[order] > 0]
    candidates, weights = candidates[order].astype(np.float64), weights[order]
    if len(candidates) <= clusters:
        return candidates[np.arange(clusters) % len(candidates)]
    from sklearn.cluster import KMeans as LocalKMeans  # here, because the other models do without its 0.15 s

    model = LocalKMeans(clusters, n_init=LOCAL_RUNS, random_state=seed)
    return model.fit(candidates, sample_weight=weights).cluster_centers_
