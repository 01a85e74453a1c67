"""The sketch of pending keys against a dumb one; its error, its memory; and wrong variants, which must not pass."""

from __future__ import annotations

import numpy as np
import pytest
from compiled import variant
from oracles import mix
from test_pending import changed, contents, count, estimate

from dps.engine.core.shards import pending as module
from dps.engine.core.shards.pending import PendingSketch
from dps.errors import InputError


class Oracle:
    """The same sketch, counter by counter."""

    def __init__(self, keys: int):
        self.lines = [[0] * 128 for _ in range(max(keys * 5 // 128 - 1, 1))]
        self.hand: int | None = None

    def counters(self, key: int) -> tuple[list[int], list[int]]:
        """The line of a key, and where in it the key's four counters are."""
        hashed = mix(mix(key))
        return self.lines[(hashed >> 32) * len(self.lines) >> 32], [32 * n + (hashed >> 5 * n) % 32 for n in range(4)]

    def estimate(self, key: int) -> int:
        line, at = self.counters(key)
        return min(line[a] for a in at)

    def count(self, keys: list[int], threshold: int) -> list[int]:
        answers = []
        for key in keys:
            line, at = self.counters(key)
            raised = min(self.estimate(key) + 1, 15)
            for a in at:
                line[a] = max(line[a], raised)
            answers.append(int(raised >= threshold))
        self.halve(16 + len(keys))
        return answers

    def halve(self, steps: int) -> None:
        counters = 128 * len(self.lines)
        for _ in range(steps):
            if self.hand is None and sum(n > 0 for line in self.lines for n in line) <= counters * 56 // 100:
                return
            hand = self.hand or 0
            self.lines[hand] = [n // 2 for n in self.lines[hand]]
            self.hand = hand + 1 if hand + 1 < len(self.lines) else None


def check(seed: int, made_for: int) -> None:
    """Some calls, known keys and new ones; a fresh object takes over now and then."""
    rng, oracle, sketch = np.random.default_rng(seed), Oracle(made_for), module.PendingSketch(made_for)
    other = module.PendingSketch(made_for)  # is given the same calls, and is never reloaded
    for _ in range(30):
        size, span = rng.choice([0, 1, 40, 200, made_for]), rng.choice([made_for // 9, made_for, 10**9])
        keys, threshold = rng.integers(-span, span + 1, size), int(rng.choice([2, 3, 5, 15]))
        expected = oracle.count(keys.tolist(), threshold)
        assert count(sketch, keys, threshold) == expected
        assert count(other, keys, threshold) == expected
        some = np.concatenate([keys, rng.integers(-span, span + 1, 50)])
        assert estimate(sketch, some) == [oracle.estimate(key) for key in some.tolist()]
        if rng.random() < 0.3:
            dumped, sketch = sketch.to_arrays(), module.PendingSketch(made_for)
            count(sketch, range(made_for), 2)  # has counters of its own
            sketch.load(dumped)
        assert contents(sketch) == contents(other)
    state, lines = sketch.to_arrays()
    assert state.tolist() == [made_for, len(lines) if oracle.hand is None else oracle.hand]
    assert np.stack([lines & 15, lines >> 4], axis=2).reshape(len(lines), 128).tolist() == oracle.lines


def check_all(seeds: int) -> None:
    for seed in range(seeds):
        check(seed, [1, 200, 2_000, 6_000][seed % 4])


def test_any_sequence() -> None:
    check_all(12)


WRONG = {
    "all counters of a key grow": ("pending_sketch.h", "if (dps_counter(line, at[part]) == least)", "if (1)"),
    "counters run over into others": ("pending_sketch.h", "if (least == DPS_LARGEST)", "if (0)"),
    "halving moves bits into others": ("pending_sketch.h", "0x7777777777777777", "0xFFFFFFFFFFFFFFFF"),
    "a restored sketch halves anew": ("pending.pyx", "self._sketch.hand = number[1]", "self._sketch.hand = 0"),
    "filled counters are not counted anew": ("pending.pyx", "self._sketch.filled = dps_filled_of(", "dps_filled_of("),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(WRONG)])
def test_a_wrong_variant_is_caught(name: str, monkeypatch) -> None:
    monkeypatch.setattr(module, "PendingSketch", variant("pending", *WRONG[name]).PendingSketch)
    with pytest.raises(AssertionError):
        check_all(12)


# ---- what the docstring states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "most", "most_when_full"), [(2, 0.039, 0.104), (3, 0.004, 0.018), (5, 0.000_1, 0.000_5)]
)
def test_the_share_of_keys_that_are_admitted_too_soon(threshold: int, most: float, most_when_full: float) -> None:
    """Half of the keys come once, a quarter twice, and so on; none after its row is born."""
    rng, size = np.random.default_rng(3), 200_000
    pushes = np.minimum(rng.geometric(0.5, size), threshold)
    order = rng.permutation(np.repeat(np.arange(size), pushes))
    keys, sketch = rng.integers(-(2**63), 2**63 - 1, size), PendingSketch(size)
    born = np.concatenate([count(sketch, keys[part], threshold) for part in np.array_split(order, 100)])
    state, lines = sketch.to_arrays()
    assert state[1] == len(lines), "nothing was halved"
    assert 0 < born[pushes[order] == 1].mean() <= most
    fresh = np.array(estimate(sketch, rng.integers(-(2**63), 2**63 - 1, size)))
    assert 0.5 * most_when_full < (fresh >= threshold - 1).mean() <= most_when_full
    assert abs(len(sketch) - size) < 0.01 * size


@pytest.mark.parametrize("size", [1_000, 10_000, 1_000_000])
def test_memory_and_when_it_begins_to_halve(size: int) -> None:
    sketch = PendingSketch(size)
    count(sketch, np.arange(size), 2)
    state, lines = sketch.to_arrays()
    nbytes = sketch.nbytes
    assert lines.nbytes < nbytes <= 2.5 * size
    if size > 1_000:  # of few keys, chance decides how many counters they have
        assert state[1] == len(lines)
        assert abs(len(sketch) - size) < 0.02 * size
    count(sketch, np.arange(size, size + size // 10), 2)
    assert (sketch.nbytes, len(sketch.to_arrays()[1])) == (nbytes, len(lines))
    assert len(sketch) < 0.5 * size, "keys that came once are gone when a line is halved"


def test_forgetting_does_nothing() -> None:
    sketch = PendingSketch(1_000)
    count(sketch, [1, 2, 2], 2)
    sketch.forget(np.array([1, 2, 3]))
    assert estimate(sketch, [1, 2, 3]) == [1, 2, 0]


def test_dumps_that_do_not_fit_are_refused() -> None:
    sketch = PendingSketch(1_000)
    count(sketch, range(300), 2)
    before, arrays = contents(sketch), sketch.to_arrays()
    state, lines = arrays
    wrong = [
        [],
        [state],
        [1, 2],
        [state[:1], lines],
        [state, lines[:-1]],
        [state, lines.ravel()],
        PendingSketch(999).to_arrays(),
        *[changed(arrays, 0, 1, hand) for hand in (-1, len(lines) + 1)],
    ]
    for dump in wrong:
        with pytest.raises(InputError, match="dump"):
            sketch.load(dump)
    with pytest.raises(TypeError, match="contiguous array of uint8"):
        sketch.load([state, lines.astype(np.int8)])
    assert contents(sketch) == before
