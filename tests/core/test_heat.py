"""The hottest keys: the sketch against an exact counter, the sample against what it was drawn from."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

from dps.engine.core.shards import heat

COUNTERS = 128
HALF = 0.5**0.25  # what is left after a quarter of the half-life


def check_bounds(sketch: heat.SpaceSaving, true: dict[int, float]) -> None:
    """What space-saving guarantees, against the true weights."""
    told = sketch.hottest(COUNTERS)
    total = sum(true.values())
    room = 1e-9 * (1.0 + total)
    assert sketch.total == pytest.approx(total)
    assert len(told) == len(sketch) == min(COUNTERS, len(true)) or len(told) == COUNTERS
    assert [count for _, count, _ in told] == sorted((count for _, count, _ in told), reverse=True)
    assert sum(count for _, count, _ in told) == pytest.approx(total)
    for key, count, error in told:
        assert count - error - room <= true[key] <= count + room
        assert error <= total / COUNTERS + room
    least = min((count for _, count, _ in told), default=0.0) if len(told) == COUNTERS else 0.0
    left = max((true[key] for key in true.keys() - {key for key, _, _ in told}), default=0.0)
    assert left <= min(least, total / COUNTERS) + room
    for first, end in ((0, 16), (16, 64), (100, 200), (200, 100)):
        some = told[first:end]
        wanted = len(some), sum(count for _, count, _ in some), sum(error for *_, error in some)
        assert sketch.rest(first, end) == pytest.approx(wanted)


def count_all(module: ModuleType, steps: list[tuple[int, float]]) -> tuple[heat.SpaceSaving, dict[int, float]]:
    """A sketch of these keys with their weights, and the exact weights; a weight of 0 lets all of them fade."""
    sketch, true = module.SpaceSaving(), dict[int, float]()
    for key, weight in steps:
        if weight:
            sketch.add(key, weight)
            true[key] = true.get(key, 0.0) + weight
        else:
            sketch.scale(HALF)
            true = {key: HALF * each for key, each in true.items()}
            if sum(true.values()) < 0.5:
                true.clear()
    return sketch, true


def streams() -> list[list[tuple[int, float]]]:
    """Keys of many kinds: frequent ones, all alike, few, in turns; weights of one and others; some fade in between."""
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 100_001)
    zipf = rng.choice(ranks, 20_000, p=ranks**-1.05 / (ranks**-1.05).sum())
    keys = [zipf, rng.integers(-(1 << 62), 1 << 62, 5_000), rng.integers(0, 400, 20_000), np.arange(3_000) % 50]
    keys += [np.arange(3_000) % 129]
    made = []
    for each in keys:
        weights = rng.choice([1.0, 1.0, 7.0], len(each))
        weights[rng.random(len(each)) < 0.001] = 0.0
        made += [list(zip(each.tolist(), weights.tolist(), strict=True))]
    made += [made[2] + 8 * [(0, 0.0)]]
    return made


def check_sketch(module: ModuleType) -> None:
    for stream in streams():
        check_bounds(*count_all(module, stream))


def test_the_sketch_keeps_its_guarantee() -> None:
    check_sketch(heat)


@given(st.lists(st.tuples(st.integers(-200, 200), st.sampled_from([0.0, 1.0, 1.0, 2.5, 40.0])), max_size=2_000))
@settings(max_examples=60, deadline=None)
def test_the_sketch_keeps_its_guarantee_for_any_keys(steps: list[tuple[int, float]]) -> None:
    check_bounds(*count_all(heat, steps))


def test_the_eight_hottest_keys_are_found() -> None:
    stream = streams()[0]
    sketch, true = count_all(heat, stream)
    first = sorted(true, key=true.__getitem__, reverse=True)[:8]
    assert all(true[key] > sum(true.values()) / COUNTERS for key in first)
    assert {key for key, _, _ in sketch.hottest(8)} == set(first)


# -- the sample

ACCESSES = 60_000


def sampled(module: ModuleType, stride: int) -> heat.KeyHeat:
    """The heat of keys of which one of `stride` is sampled, for that many accesses."""
    made = module.KeyHeat()
    made.age(0.0, 1.0)
    made.add(None, 0, stride * ACCESSES)
    made.age(1.0, ACCESSES)
    made.sketch.scale(0.0)
    assert (made.stride, len(made.sketch)) == (stride, 0)
    return made


def check_sample(module: ModuleType) -> None:
    """Weights are unbiased, of all keys and of each; also where requests repeat themselves."""
    rng = np.random.default_rng(1)
    skewed = rng.choice(100, ACCESSES, p=np.arange(1, 101) / 5050)
    repeated = np.arange(ACCESSES) % 100 + 5
    for stride, size, keys in [
        (1, 7, skewed),
        (7, 1, skewed),
        (50, 100, repeated),
        (100, 100, repeated),
        (9, 10**4, skewed),
    ]:
        made, true = sampled(module, stride), Counter(keys.tolist())
        for first in range(0, ACCESSES, size):
            if size == 100:  # rows of a range
                made.add(None, 5, size)
            else:
                made.add(keys[first : first + size], 0, len(keys[first : first + size]))
        assert made.stride == stride
        # the distances are spread evenly from 1 to 2 strides, so the deviation of each is a stride / sqrt(3) at most
        assert abs(made.sketch.total - ACCESSES) <= 6 * np.sqrt(ACCESSES * stride / 3) + stride
        told = made.sketch.hottest(COUNTERS)
        for key, count, error in told:
            assert error == 0
            assert abs(count - true[key]) <= 6 * np.sqrt(true[key] * stride) + stride, key
        if stride == 1:
            assert {key: count for key, count, _ in told} == true


def test_the_sample_is_unbiased() -> None:
    check_sample(heat)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=300), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_how_keys_are_divided_into_requests_does_not_matter(sizes: list[int], stride: int) -> None:
    keys = np.arange(sum(sizes)) ** 2 % 97
    whole, parts = sampled(heat, stride), sampled(heat, stride)
    whole.add(keys, 0, len(keys))
    for n, first in zip(sizes, np.cumsum(sizes) - sizes, strict=True):
        parts.add(keys[first : first + n], 0, n)
    assert whole.sketch.hottest(COUNTERS) == parts.sketch.hottest(COUNTERS)


def samples(made: heat.KeyHeat, accesses: int) -> int:
    """How many of so many accesses, one after the other, are sampled."""
    taken = 0
    for key in range(accesses):
        total = made.sketch.total
        made.add(None, key, 1)
        taken += made.sketch.total > total
    return taken


def check_pace(module: ModuleType) -> None:
    """However much is accessed, about as many samples are taken as were asked for."""
    made = module.KeyHeat()
    made.add(None, 0, 1_280_000)  # before the first report, strides are doubled after 10,000 samples
    assert made.stride == 128
    assert made.age(10.0, 1_000.0) == 1_280_000
    assert made.age(12.0, 1_000.0) == 1_280_000
    assert made.stride == 640
    total = made.sketch.total
    made.add(None, 0, 640_000)
    assert abs((made.sketch.total - total) / 640 - 1_000) < 6 * np.sqrt(1_000 / 3)
    assert made.age(13.0, 1_000.0) == 640_000
    assert made.stride == 640
    assert made.age(14.0, 1_000.0) == 0
    assert samples(made, 1_000) == 1_000, "few accesses are sampled all, from the first one on"
    made.age(15.0, 1_000.0)
    assert 1_000 <= samples(made, 32_000) <= 1_000 + 5 * 500 + 200, "half as many again for each time they are doubled"
    assert made.stride == 32
    assert made.age(15.0, 1_000.0) == 32_000, "no time has passed"
    assert made.stride == 32


def test_the_stride_follows_the_traffic() -> None:
    check_pace(heat)


def check_fading(module: ModuleType) -> None:
    """What was hot is forgotten: half of it in ten seconds, all of it after many."""
    made = module.KeyHeat()
    made.age(5.0, 1e6)
    made.add(np.full(800, 7), 0, 800)
    made.age(15.0, 1e6)
    made.add(np.full(500, 8), 0, 500)
    assert made.sketch.hottest(8) == [(8, 500.0, 0.0), (7, 400.0, 0.0)]
    made.age(15.0, 1e6)
    assert made.sketch.total == 900.0
    made.age(25.0, 1e6)
    assert made.sketch.hottest(1) == [(8, 250.0, 0.0)]
    made.age(1_000.0, 1e6)
    assert (len(made.sketch), made.sketch.total) == (0, 0.0)


def test_counts_halve_every_ten_seconds() -> None:
    check_fading(heat)


# -- what must not pass


def test_what_does_not_fit_is_refused() -> None:
    made = heat.KeyHeat()
    with pytest.raises(ValueError, match="5 accesses of 4 keys"):
        made.add(np.arange(4), 0, 5)
    with pytest.raises(TypeError):
        made.add(np.arange(4, dtype=np.int32), 0, 4)
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a weight of"):
            made.sketch.add(1, weight)
        with pytest.raises(ValueError, match="cannot fade"):
            made.sketch.scale(weight)
    assert len(made.sketch) == 0


def check(module: ModuleType) -> None:
    check_sketch(module)
    check_sample(module)
    check_pace(module)
    check_fading(module)


WRONG = [
    ("self._errors[least] = key, self._counts[least]\n", "self._errors[least] = key, 0.0\n"),
    ("key, self._counts[least]\n", "key, self._counts[least]\n        self._counts[least] = 0.0\n"),
    ("self._counts[n] += weight", "self._counts[n] += 1.0"),
    ("self._counts[least] += weight", "self._counts[least] += 1.0"),
    ("if self._counts[n] < self._counts[least]:", "if self._counts[n] > self._counts[least]:"),
    ("self._errors[n] *= factor", "pass"),
    ("self.total *= factor", "pass"),
    ("self._errors[place - 1]\n", "self._errors[place]\n"),
    ("self._gap = at - count + 1", "self._gap = 1"),
    ("self._weight = <double> self.stride", "self._weight = 1.0"),
    ("return 1 + <int64_t> (((self._random", "return self.stride + 0 * <int64_t> (((self._random"),
    ("(2 * self.stride - 1)", "(2 * self.stride)"),
    ("start + at if keys == NULL", "at if keys == NULL"),
    ("            self.stride *= 2", "            break"),
    ("-seconds / half_life", "-seconds"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [*WRONG[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in WRONG[2:])]
)
def test_a_wrong_variant_is_caught(old: str, new: str) -> None:
    with pytest.raises(AssertionError):
        check(variant("heat", "heat.pyx", old, new))
