"""For tests of graph algorithms: edges, plain programs of these, and trainers that fail in the middle of a run."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np

import dps
from dps.graph import labels

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


class Interruption(RuntimeError):
    """The failure of a trainer's first attempt."""


@contextlib.contextmanager
def interrupted(monkeypatch, call: str, clock: int, when: str = "before"):
    """The last trainer's first attempt fails at this call of a method of the trainer, at this clock. It has to."""
    method, failed = getattr(dps.Trainer, call), []

    def fails(trainer, *args, **kwargs):
        now = not failed and trainer.number == trainer.trainers - 1 and trainer.clock == clock
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
    assert failed, f"the trainer never came to {call} at clock {clock}"
