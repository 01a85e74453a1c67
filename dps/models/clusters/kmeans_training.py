"""The trainers' part of k-means: Lloyd's algorithm over all rows, and mini-batches.

Tables
------
``centers`` has a row for each cluster: the sum of its rows, the sum of their weights, and how far the center moved. The
center is the sum over the weight; as long as the weight is 0, it is the row of ``starts``. Mini-batch k-means (Sculley,
"Web-scale k-means clustering", WWW 2010) moves a center to the mean of all rows that were ever assigned to it, so a
trainer pushes sums and weights, in whatever order; with staleness 0 the servers add up those of a clock, and all
trainers see the same centers. For Lloyd's algorithm, trainers add to ``sums``, and the first trainer
moves the centers. ``before`` has the centers after the pass before, to see how far a pass moved them.

A trainer that is run again gets the answers of collective calls as they were the first time, and servers take its ops
for repeats. Hence each decision follows from collective calls, and the first trainer writes a row that depends on
nothing but that row itself and on what stays as it is until all rows are written.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

import dps
from dps.models.clusters.centers import centers_of, dense_rows, nearest, sums_by_cluster
from dps.models.clusters.seeding import place_of
from dps.models.inputs.features import Piece
from dps.models.types import Block

__all__ = ["ClusterPlan", "ClusterReport", "lloyd", "minibatch"]

CANDIDATE_BYTES = 8 << 20  # of the rows that all trainers together offer for neglected centers


@dataclasses.dataclass
class ClusterPlan:
    clusters: int
    features: int
    max_iter: int
    least_shift: float  # training ends after a pass with no larger sum of squared moves
    centers: str
    sums: str
    starts: str
    before: str
    batch_size: int | None  # None: all rows
    seed: int
    reassignment_ratio: float


class ClusterReport(NamedTuple):
    inertia: float  # of its rows
    passes: int
    sizes: np.ndarray  # weight of the rows nearest to each center


class Batch(NamedTuple):
    block: Block
    weights: np.ndarray | None


def lloyd(trainer: dps.Trainer, pieces: Sequence[Piece], plan: ClusterPlan) -> ClusterReport:
    """The training function of Lloyd's algorithm, which needs staleness 0: an iteration is one clock."""
    starts = trainer.pull(plan.starts).reshape(plan.clusters, plan.features)
    batches, passes = cut(pieces, None), 0
    for _ in trainer.iterate([[range(sum(piece.block.shape[0] for piece in pieces))]], plan.max_iter):
        passes = trainer.clock + 1
        if lloyd_step(trainer, batches, plan, starts) <= plan.least_shift:
            break
    return report(trainer, batches, plan, starts, passes)


def lloyd_step(trainer: dps.Trainer, batches: Sequence[Batch], plan: ClusterPlan, starts: np.ndarray) -> float:
    """One iteration; the sum of the centers' squared moves, the same for all trainers."""
    centers = centers_of(trainer.pull(plan.centers), starts)
    sums, inertia, weight = np.zeros((plan.clusters, plan.features + 1)), 0.0, 0.0
    far: list[Far] = []
    for block, weights in batches:
        labels, distances = nearest(block, centers)
        sums += sums_by_cluster(block, labels, weights, plan.clusters)
        inertia += float(distances.sum() if weights is None else distances @ weights)
        weight += len(labels) if weights is None else float(weights.sum())
        far.append(Far(block, weights, labels, distances))
    present = np.flatnonzero(sums[:, -1])
    trainer.add(plan.sums, present, sums[present])
    if weight:
        trainer.log(inertia=inertia / weight)
    empty = np.flatnonzero(trainer.allreduce(sums[:, -1]) == 0)
    spare = farthest(trainer, far, len(empty), plan.features) if len(empty) else np.zeros((0, plan.features + 3))
    shift = np.zeros(1)
    if trainer.number == 0:
        shift[0] = move(trainer, plan, centers, empty, spare)
    return float(trainer.broadcast(shift)[0])


def move(trainer: dps.Trainer, plan: ClusterPlan, centers: np.ndarray, empty: np.ndarray, spare: np.ndarray) -> float:
    """Move the centers to the means of their rows, empty clusters to rows far from their centers, as sklearn does."""
    sums, rows = trainer.pull(plan.sums), trainer.pull(plan.centers)
    for cluster, row in zip(empty, spare, strict=False):
        weight, owner = row[1], int(row[2])
        moved = np.append(row[3:] * weight, weight)
        sums[cluster] = moved
        sums[owner] -= moved
    full = sums[:, -1] > 0
    rows[full, :-1] = sums[full]
    rows[:, -1] = ((centers_of(rows, centers) - centers) ** 2).sum(axis=1)
    rows[~full, -1] = 0.0
    trainer.assign(plan.centers, slice(None), rows)
    trainer.assign(plan.sums, slice(None), np.zeros_like(sums))  # after the centers, which are made of them
    # The table has the moves as they were first written; an attempt that repeats this sees centers moved already.
    return float(trainer.pull(plan.centers)[:, -1].sum())


class Far(NamedTuple):
    block: Block
    weights: np.ndarray | None
    labels: np.ndarray
    distances: np.ndarray


def farthest(trainer: dps.Trainer, far: Sequence[Far], count: int, features: int) -> np.ndarray:
    """The `count` rows of all trainers that are farthest from their centers, or fewer, the farthest first.

    As float64 [rows, 3 + features]: squared distance, weight, label, row. A row that is a center is not among them.
    """
    found = [np.zeros((0, features + 3))]
    for block, weights, labels, distances in far:
        most = distances if weights is None else np.where(weights > 0, distances, 0.0)
        chosen = np.argsort(-most, kind="stable")[:count]
        chosen = chosen[most[chosen] > 0]
        weight = np.ones(len(chosen)) if weights is None else weights[chosen]
        found.append(np.column_stack([distances[chosen], weight, labels[chosen], dense_rows(block[chosen])]))
    mine = np.concatenate(found)
    mine = mine[np.argsort(-mine[:, 0], kind="stable")[:count]]
    together = gathered(trainer, mine)
    return together[np.argsort(-together[:, 0], kind="stable")[:count]]


def gathered(trainer: dps.Trainer, rows: np.ndarray) -> np.ndarray:
    """The rows of all trainers, on each of them."""
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    notes = trainer.allgather(file.getvalue())
    return np.concatenate([np.load(io.BytesIO(note), allow_pickle=False) for note in notes])


# -- mini-batches


def minibatch(trainer: dps.Trainer, pieces: Sequence[Piece], plan: ClusterPlan) -> ClusterReport:
    """The training function of mini-batch k-means: a batch is one clock, and so is the end of each pass.

    All trainers end a pass at the same clock, those with fewer batches after clocks without one.
    """
    starts = trainer.pull(plan.starts).reshape(plan.clusters, plan.features)
    batches, passes, place = cut(pieces, plan.batch_size), 0, place_of(trainer)
    steps = int(trainer.allreduce(len(batches), "max"))
    sizes = [batch.block.shape[0] for batch in batches] + [0] * (steps - len(batches) + 1)
    for _ in trainer.iterate([list(map(range, sizes))], plan.max_iter):
        done, step = divmod(trainer.clock, steps + 1)
        if step < len(batches):
            order = np.random.default_rng((plan.seed, place, done)).permutation(len(batches))
            learn(trainer, batches[order[step]], plan, starts)
        elif step == steps:
            passes = done + 1
            if ends(trainer, batches, plan, starts, passes):
                break
    return report(trainer, batches, plan, starts, passes)


def learn(trainer: dps.Trainer, batch: Batch, plan: ClusterPlan, starts: np.ndarray) -> None:
    """One step: assign the batch's rows to their nearest centers, and add their sums and weights there."""
    labels, distances = nearest(batch.block, centers_of(trainer.pull(plan.centers), starts))
    sums = sums_by_cluster(batch.block, labels, batch.weights, plan.clusters)
    present = np.flatnonzero(sums[:, -1])
    trainer.push(plan.centers, present, np.column_stack([sums[present], np.zeros(len(present))]))
    if len(present):
        trainer.log(inertia=np.average(distances, weights=batch.weights))


def ends(trainer: dps.Trainer, batches: Sequence[Batch], plan: ClusterPlan, starts: np.ndarray, passes: int) -> bool:
    """The end of a pass: give neglected centers other rows; whether training ends here, the same for all trainers."""
    trainer.barrier()  # because all trainers have added their rows then
    counts = np.zeros(plan.clusters)
    if trainer.number == 0:
        counts = trainer.pull(plan.centers)[:, plan.features].copy()
    counts = trainer.broadcast(counts)
    neglected = np.flatnonzero((counts < plan.reassignment_ratio * counts.max()) | (counts == 0))
    moved = False
    if len(neglected) and passes < plan.max_iter:
        moved = reassign(trainer, batches, plan, starts, passes, neglected, counts)
    shift = np.zeros(1)
    if trainer.number == 0:
        shift[0] = note_moves(trainer, plan, starts)
    return not moved and float(trainer.broadcast(shift)[0]) <= plan.least_shift


def reassign(
    trainer: dps.Trainer,
    batches: Sequence[Batch],
    plan: ClusterPlan,
    starts: np.ndarray,
    passes: int,
    neglected: np.ndarray,
    counts: np.ndarray,
) -> bool:
    """Put neglected centers onto random rows that are far from all centers; whether there are such rows.

    Their weight becomes the least of the other centers, as in scikit-learn. Each trainer offers rows of one batch.
    """
    rng = np.random.default_rng((plan.seed, place_of(trainer), passes, 1))
    rows = np.zeros((0, plan.features), np.float32)
    most = min(len(neglected), max(1, CANDIDATE_BYTES // (4 * plan.features * trainer.trainers)))
    if batches:
        block, weights = batches[int(rng.integers(len(batches)))]
        _, chances = nearest(block, centers_of(trainer.pull(plan.centers), starts))
        chances = chances if weights is None else chances * weights
        chosen = np.flatnonzero(chances)
        if len(chosen):
            share = chances[chosen] / chances[chosen].sum()
            rows = dense_rows(block[rng.choice(chosen, min(most, len(chosen)), replace=False, p=share)])
    offered = gathered(trainer, rows)
    order = np.random.default_rng((plan.seed, passes, 2)).permutation(len(offered))[: len(neglected)]
    if trainer.number == 0 and len(order):
        others = counts[np.setdiff1d(np.arange(plan.clusters), neglected)]
        weight = np.full((len(order), 1), others.min())
        values = np.hstack([offered[order] * weight, weight, np.zeros_like(weight)])
        trainer.assign(plan.centers, neglected[: len(order)], values)
    return bool(len(order))


def note_moves(trainer: dps.Trainer, plan: ClusterPlan, starts: np.ndarray) -> float:
    """The sum of the centers' squared moves in a pass; keep the centers for the pass after."""
    centers = centers_of(trainer.pull(plan.centers), starts)
    moves = ((centers - trainer.pull(plan.before)[:, :-1]) ** 2).sum(axis=1)
    trainer.assign(plan.before, slice(None), np.column_stack([centers, moves]))
    return float(trainer.pull(plan.before)[:, -1].sum())  # as they were first written, if this is a repetition


# -- both


def cut(pieces: Sequence[Piece], size: int | None) -> list[Batch]:
    """Batches of so many rows; None: each piece is one."""
    batches = []
    for block, _, _, weights, _ in pieces:
        rows = block.shape[0]
        for first in range(0, rows, size or max(1, rows)):
            part = slice(first, first + (size or rows))
            batches.append(Batch(block[part], None if weights is None else weights[part]))
    return batches


def report(
    trainer: dps.Trainer, batches: Sequence[Batch], plan: ClusterPlan, starts: np.ndarray, passes: int
) -> ClusterReport:
    """The inertia of this trainer's rows with the final centers, which no trainer changes any more."""
    centers = centers_of(trainer.pull(plan.centers), starts)
    inertia, counts = 0.0, np.zeros(plan.clusters)
    for block, weights in batches:
        labels, distances = nearest(block, centers)
        inertia += float(distances.sum() if weights is None else distances @ weights)
        counts += np.bincount(labels, weights, plan.clusters)
    return ClusterReport(inertia, passes, counts)
