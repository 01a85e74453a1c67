"""For tests of graph algorithms: edges, plain programs of these, and trainers that fail in the middle of a run."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter

import numpy as np

import dps
from dps.graph import labels
from dps.graph.exchange import owners

# (call of the trainer, clock): the trainer fails before this call, or right after it
INTERRUPTIONS = [
    ("allreduce", 0),
    ("push", 0),
    ("allreduce", 1),
    ("allreduce", 4),
    ("push", 4),
    ("push", 4, "after"),
    ("tick", 4),
    ("tick", 4, "after"),
]


def random_edges(count: int, vertices: int, seed: int = 0) -> np.ndarray:
    """Edges whose sources are drawn by Zipf's law, so that a few vertices have many, and some have none."""
    rng = np.random.default_rng(seed)
    source = np.minimum(rng.zipf(1.7, count), vertices) - 1
    return np.column_stack([source, rng.integers(0, vertices, count)]).astype(np.int64)


def communities(edges, max_iter=100, seed=0) -> dict[int, int]:
    """Label propagation vertex by vertex; hashes are those of dps."""
    vertices = sorted({int(vertex) for vertex in np.ravel(edges)})
    near = {vertex: [] for vertex in vertices}
    for a, b in np.array(edges).tolist():
        if a != b:
            near[a].append(b)
            near[b].append(a)
    salt = int(labels.mixed(np.array([2 * seed]))[0])
    label = {vertex: vertex for vertex in vertices}

    def rank(name: int) -> int:
        return int(labels.mixed(np.array([(name % 2**64) ^ salt], np.uint64))[0])

    for iteration in range(max_iter):
        wanted = dict(label)
        for vertex in vertices:
            counts = Counter(label[other] for other in near[vertex])
            best = [name for name, count in counts.items() if count == max(counts.values())]
            if best and label[vertex] not in best:
                wanted[vertex] = min(best, key=rank)
        if wanted == label:
            break
        may = labels.drawn(np.array(vertices), seed, iteration)
        label = {vertex: wanted[vertex] if now else label[vertex] for vertex, now in zip(vertices, may, strict=True)}
    return label


def core_numbers(edges) -> dict[int, int]:
    """The core number of each vertex: vertices with the fewest neighbours go first."""
    near = {int(vertex): set() for vertex in np.ravel(edges)}
    for a, b in np.array(edges).tolist():
        if a != b:
            near[a].add(b)
            near[b].add(a)
    numbers, most = {}, 0
    while near:
        vertex = min(near, key=lambda vertex: len(near[vertex]))
        most = numbers[vertex] = max(most, len(near[vertex]))
        for other in near.pop(vertex):
            near[other].remove(vertex)
    return numbers


def plain_walks(edges, length, per_vertex, p=1, q=1, weights=None, directed=False, seed=0, trainers=1, block=1 << 14):
    """The walks of node2vec by sampling with rejection: a block of walks goes on by a step, walk after walk."""
    vertices = np.unique(edges)
    vertices = vertices[np.lexsort((vertices, owners(vertices, trainers)))].tolist()
    near = {vertex: [] for vertex in vertices}
    weights = np.ones(len(edges)) if weights is None else weights
    for (a, b), weight in zip(np.array(edges).tolist(), weights, strict=True):
        for source, target in [(a, b)] if directed else [(a, b), (b, a)]:
            near[source] += [(vertices.index(target), weight, target)] if weight > 0 else []
    near = {vertex: sorted(choices) for vertex, choices in near.items()}
    walks = [[vertex] for _ in range(per_vertex) for vertex in vertices]
    for first, step in itertools.product(range(0, len(walks), block), range(1, length)):
        if step == 1:
            rng = np.random.default_rng((seed, first // block))
        waiting = [walk for walk in walks[first : first + block] if len(walk) == step and near[walk[-1]]]
        while waiting:
            places = rng.integers(0, [len(near[walk[-1]]) for walk in waiting])
            drawn = [near[walk[-1]][place] for walk, place in zip(waiting, places, strict=True)]
            levels = rng.random(len(waiting)) * [max(weight for _, weight, _ in near[walk[-1]]) for walk in waiting]
            light = levels < [weight for _, weight, _ in drawn]
            biased = step > 1 and (p, q) != (1, 1)
            levels = iter(rng.random(light.sum()) * max(1 / p, 1, 1 / q) if biased else ())
            for walk, (_, _, target) in itertools.compress(zip(waiting, drawn, strict=True), light):
                joined = biased and any(target == vertex for _, _, vertex in near[walk[-2]])
                if not biased or next(levels) < (1 / p if target == walk[-2] else 1 if joined else 1 / q):
                    walk.append(target)
            waiting = [walk for walk in waiting if len(walk) == step]
    return [tuple(walk) for walk in walks]


class Interruption(RuntimeError):
    """The failure of a trainer's first attempt."""


@contextlib.contextmanager
def interrupted(monkeypatch, call: str, clock: int, when: str = "before", skipped: int = 0):
    """The last trainer's first attempt fails at this call of a method of the trainer, at this clock. It has to.

    So many such calls are `skipped`.
    """
    method, failed = getattr(dps.Trainer, call), []
    left = [skipped]

    def fails(trainer, *args, **kwargs):
        now = not failed and trainer.number == trainer.trainers - 1 and trainer.clock == clock
        if now and left[0]:
            left[0] -= 1
            now = False
        if now and when == "before":
            failed.append(call)
            raise Interruption(call)
        result = method(trainer, *args, **kwargs)
        if now:
            failed.append(call)
            raise Interruption(call)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(dps.Trainer, call, fails)
        yield
    assert failed, f"the trainer never came to {call} at clock {clock}, with {skipped} such calls before"


@contextlib.contextmanager
def counted(monkeypatch, calls):
    """Counts of these calls of the last trainer: call -> how often it was made."""
    counts = dict.fromkeys(calls, 0)

    def counting(call):
        method = getattr(dps.Trainer, call)

        def counts_it(trainer, *args, **kwargs):
            counts[call] += trainer.number == trainer.trainers - 1
            return method(trainer, *args, **kwargs)

        return counts_it

    with monkeypatch.context() as patch:
        for call in calls:
            patch.setattr(dps.Trainer, call, counting(call))
        yield counts
