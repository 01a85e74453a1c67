"""Counts of pending keys against a dict, while they grow, shrink and age; and wrong variants, which must not pass."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
from compiled import variant
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from oracles import mix, unmix

from dps.engine.core.shards import pending as module
from dps.engine.core.shards.pending import LARGEST_THRESHOLD, MAX_LIMIT, PendingKeys, PendingSketch
from dps.errors import InputError

GROUPS, BUCKETS, PAGE, FULL = 128, 32, 256, 8192  # as in pending_pages.h
HASHED = 44  # bits of a hash that tell keys apart
TAG = 2**32


def crafted(group: int, bucket: int, tag: int, rest: int = 0) -> int:
    """The key with this place; `rest` are the first 20 bits of its hash, which do not count."""
    return unmix(rest << HASHED | tag << 12 | bucket << 7 | group)


def scattered(n: int) -> int:
    return n * 2654435761 % TAG


def place(key: int) -> tuple[int, int]:
    """The group of a key, and the number of its tag in the order in which tags are aged."""
    return mix(key) % GROUPS, int(f"{mix(key) >> 12 & TAG - 1:032b}"[::-1], 2)


# Groups of up to five pages. All have the same tags, which stand in two buckets of each; then keys as they come.
CRAFTED = [crafted(g, b, scattered(n), n) for n, g, b in product(range(600), [0, 5, 127], [0, 31])]
POOL = np.array(CRAFTED + list(range(-200, 200)))
PLACES = {key: place(key) for key in POOL.tolist()}


def count(pending, keys, threshold: int) -> list[int]:
    born = np.full(len(keys), 7, np.uint8)
    pending.count(np.asarray(keys, np.int64), threshold, born)
    return born.tolist()


def estimate(pending, keys) -> list[int]:
    counts = np.full(len(keys), 7, np.uint8)
    pending.estimate(np.asarray(keys, np.int64), counts)
    return counts.tolist()


def contents(pending) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [(array.dtype.str, array.shape, array.tobytes()) for array in pending.to_arrays()]


def digest(pending) -> str:
    return hashlib.sha256(b"".join(data for _, _, data in contents(pending))).hexdigest()[:16]


class Oracle:
    """A dict of counts for each group, and where ageing goes on."""

    def __init__(self, limit: int):
        self.limit = limit
        self.groups: list[dict[int, int]] = [{} for _ in range(GROUPS)]
        self.hand: tuple[int, int] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def count(self, keys: list[int], threshold: int) -> list[int]:
        answers, born = [], set()
        for key in keys:
            counts = self.groups[PLACES[key][0]]
            pushes = counts.pop(key, 0) + 1
            if pushes >= threshold:
                born.add(key)
            if key not in born:
                counts[key] = pushes
            answers.append(int(key in born))
        self.age(16 + len(keys) // 8)
        return answers

    def age(self, steps: int) -> None:
        for _ in range(steps):
            if self.hand is None and len(self) <= self.limit:
                return
            group, first = self.hand or (0, 0)
            counts = self.groups[group]
            pages = max(-(-len(counts) // PAGE), 1)
            last = first | (TAG >> (pages - 1).bit_length()) - 1
            for key in [key for key in counts if first <= PLACES[key][1] <= last]:
                counts[key] //= 2
                if counts[key] == 0:
                    del counts[key]
            self.hand = (group, last + 1) if last + 1 < TAG else (group + 1, 0) if group + 1 < GROUPS else None


class Machine(RuleBasedStateMachine):
    """Batches of known and new keys; at any moment a fresh object takes over what the last one has dumped."""

    @initialize(limit=st.sampled_from([1, 300, 1_500, 100_000]))
    def begin(self, limit: int) -> None:
        self.oracle, self.pending = Oracle(limit), module.PendingKeys(limit)
        self.other = module.PendingKeys(limit)  # is given the same calls, and is never reloaded

    def batch(self, first: int, size: int, by: int) -> list[int]:
        return POOL[(first + by * np.arange(size)) % len(POOL)].tolist()

    # A factor of the pool's length goes round within few keys, so that they come again in a batch.
    @rule(first=st.integers(0, 4_000), size=st.integers(0, 900), by=st.sampled_from([1, 7, 100, 400, 800]))
    def count_few(self, first: int, size: int, by: int) -> None:
        self.count(self.batch(first, size, by), 3)

    @rule(
        first=st.integers(0, 4_000), size=st.sampled_from([800, 2_000, 4_000]), threshold=st.sampled_from([2, 4, 255])
    )
    def count_many(self, first: int, size: int, threshold: int) -> None:
        self.count(self.batch(first, size, 1), threshold)

    def count(self, keys: list[int], threshold: int) -> None:
        expected = self.oracle.count(keys, threshold)
        assert count(self.pending, keys, threshold) == expected
        assert count(self.other, keys, threshold) == expected

    @rule(first=st.integers(0, 4_000), size=st.sampled_from([1, 300, 2_500]))
    def forget(self, first: int, size: int) -> None:
        keys = self.batch(first, size, 1)
        for key in keys:
            self.oracle.groups[PLACES[key][0]].pop(key, None)
        self.pending.forget(np.array(keys, np.int64))
        self.other.forget(np.array(keys, np.int64))

    @rule()
    def reload(self) -> None:
        dumped = self.pending.to_arrays()
        self.pending = module.PendingKeys(77)
        count(self.pending, range(100), 9)  # is in a sweep of its own
        self.pending.load(dumped)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "oracle"):
            counts = {key: n for group in self.oracle.groups for key, n in group.items()}
            assert estimate(self.pending, POOL) == [counts.get(key, 0) for key in POOL.tolist()]
            assert len(self.pending) == len(self.oracle)
            assert self.pending.limit == self.oracle.limit
            assert contents(self.pending) == contents(self.other)


MANY = settings(max_examples=40, stateful_step_count=30, deadline=None)
HUNT = settings(MANY, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])


def test_any_sequence() -> None:
    run_state_machine_as_test(Machine, settings=MANY)


def check_bits() -> None:
    """Keys whose hashes differ in one of 44 bits are told apart, and no other bits of their hashes are looked at."""
    pending = module.PendingKeys(1_000)
    keys = [unmix(0), *(unmix(1 << bit) for bit in range(64))]
    assert count(pending, keys, 100) == [0] * len(keys)
    assert estimate(pending, keys) == [1 + 64 - HASHED] + [1] * HASHED + [1 + 64 - HASHED] * (64 - HASHED)
    assert len(pending) == 1 + HASHED


def test_44_bits_of_a_hash_tell_keys_apart() -> None:
    check_bits()


# ---- wrong variants -------------------------------------------------------------------------------------------------

WRONG = {
    "a second push in a call counts from the start": ("pending.h", "entry->count == 0 || ", ""),
    "groups are not told apart": (
        "pending_pages.h",
        "(uint32_t)hash & (DPS_GROUPS",
        "(uint32_t)(hash >> 12) & (DPS_GROUPS",
    ),
    "a birth does not reset the count": ("pending.h", "entry->count = 0; /*", "/*"),
    "small counts are forgotten": ("pending.h", "if (entry.count == 1)", "if (entry.count <= 3)"),
    "a restored hand begins anew": (
        "pending.pyx",
        "self._all, self._sweep = number[0], made, sweep",
        "self._all = number[0], made",
    ),
    "a page is aged twice": ("pending.h", "if (place >= first && place <= last)", "if (1)"),
    "what is put together is not sorted": (
        "pending_pages.h",
        "> from->entries[j - 1].tag",
        "< from->entries[j - 1].tag",
    ),
    "pages are not put together": (
        "pending_pages.h",
        "while (!done && group->pages > 1",
        "while (0 && group->pages > 1",
    ),
}


def hunt(how: settings) -> None:
    check_bits()
    run_state_machine_as_test(Machine, settings=how)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(WRONG)])
def test_a_wrong_variant_is_caught(name: str, monkeypatch) -> None:
    hunt(settings(HUNT, max_examples=3))
    monkeypatch.setattr(module, "PendingKeys", variant("pending", *WRONG[name]).PendingKeys)
    with pytest.raises(AssertionError):
        hunt(HUNT)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def filled(size: int) -> PendingKeys:
    pending = PendingKeys(MAX_LIMIT)
    for first in range(0, size, 10_000):
        count(pending, np.arange(first, min(first + 10_000, size)), 9)
    assert len(pending) == size
    return pending


@pytest.mark.parametrize("size", [10_000, 17_000, 32_800, 33_500, 100_000, 230_000, 1_000_000])
def test_bytes_of_a_key(size: int) -> None:
    bound = 6 if size >= 100_000 else 8
    pending = filled(size)
    assert 5 * size < pending.nbytes <= bound * size
    for share in (0.03, 0.06, 0.09, 0.12, 0.5):  # pages have some memory for keys that they have no more
        pending.forget(np.arange(int(share * size)))
        left = len(pending)
        assert left == size - int(share * size)
        if left >= 10_000:
            assert pending.nbytes <= (6 if left >= 100_000 else 8) * left
    empty = PendingKeys(1)
    pending.forget(np.arange(size))
    assert len(pending) == 0
    assert pending.nbytes < empty.nbytes + 128 * GROUPS


def test_what_is_pending_decides_the_bytes_of_a_dump() -> None:
    """And neither the order in which keys came, nor those that are gone."""
    rng, keys = np.random.default_rng(2), np.arange(40_000)
    one, other = PendingKeys(MAX_LIMIT), PendingKeys(MAX_LIMIT)
    count(one, keys, 9)
    count(other, np.arange(100_000, 400_000), 9)
    for batch in np.array_split(rng.permutation(keys), 7):
        count(other, batch, 9)
    other.forget(np.arange(100_000, 400_000))
    assert contents(one) == contents(other)


@pytest.mark.parametrize(("limit", "size"), [(1, 100), (5_000, 100), (60_000, 1_000)])
def test_the_limit_holds(limit: int, size: int) -> None:
    """For the worst: counts that have to be halved eight times, while all keys that come are new."""
    pending = PendingKeys(limit)
    for _ in range(254):
        count(pending, np.arange(limit), 255)
    assert estimate(pending, np.arange(limit)) == [254] * limit
    most = 0
    for first in range(limit, 12 * limit + 30_000, size):
        count(pending, np.arange(first, first + size), 255)
        most = max(most, len(pending))
    assert limit < most <= 2 * limit + 32_768 + size


def test_keys_made_for_one_page() -> None:
    keys = [crafted(3, 9, n << 13) for n in range(20_000)]
    pending = PendingKeys(MAX_LIMIT)
    count(pending, keys[:FULL], 9)
    assert estimate(pending, keys[:FULL]) == [1] * FULL
    count(pending, [*keys[:8], keys[FULL]], 9)  # the page is aged, before the last of them
    assert estimate(pending, [*keys[:9], keys[FULL]]) == [1] * 8 + [0, 1]
    count(pending, keys, 9)
    assert len(pending) <= FULL
    full = PendingKeys(MAX_LIMIT)
    twice = np.repeat(keys[:FULL], 2).tolist()
    assert count(full, [*twice, keys[FULL], keys[FULL], keys[0]], 2) == [0, 1] * FULL + [
        0,
        0,
        1,
    ]  # all of them are born
    assert len(full) == 0
    restored = PendingKeys(1)
    restored.load(pending.to_arrays())
    assert contents(restored) == contents(pending)


# ---- errors, and dumps ----------------------------------------------------------------------------------------------

KEYS, OUT = np.arange(3), np.zeros(3, np.uint8)


@pytest.mark.parametrize("pending", [PendingKeys(1_000), PendingSketch(1_000)], ids=["keys", "sketch"])
def test_wrong_calls_change_nothing(pending) -> None:
    count(pending, range(40), 3)
    before, largest = contents(pending), LARGEST_THRESHOLD if isinstance(pending, PendingKeys) else 15
    for threshold in (-1, 0, 1, largest + 1, 2**40):
        with pytest.raises(InputError, match=rf"{threshold} pushes.* 2 to {largest}"):
            pending.count(KEYS, threshold, OUT)
    for keys, out in [
        (KEYS.astype(np.int32), OUT),
        (KEYS, OUT.astype(bool)),
        (KEYS[::2], OUT[:2]),
        (KEYS[:2], OUT[::2]),
    ]:
        with pytest.raises(TypeError, match="contiguous array"):
            pending.count(keys, 2, out)
        with pytest.raises(TypeError, match="contiguous array"):
            pending.estimate(keys, out)
    for call in (lambda out: pending.count(KEYS, 2, out), lambda out: pending.estimate(KEYS, out)):
        with pytest.raises(InputError, match="3 keys, and an array of length 2"):
            call(OUT[:2])
    with pytest.raises(TypeError, match="contiguous array"):
        pending.forget(KEYS.astype(float))
    pending.count(KEYS, largest, OUT)
    assert contents(pending) != before


@pytest.mark.parametrize(("kind", "most"), [(PendingKeys, MAX_LIMIT), (PendingSketch, 2**36)])
def test_wrong_sizes(kind, most: int) -> None:
    for size in (-1, 0, most + 1):
        with pytest.raises(InputError, match=rf"{size} .*from 1 to {most}|{size} .*for 1 to {most}"):
            kind(size)


def changed(arrays: list[np.ndarray], which: int, at, value: int) -> list[np.ndarray]:
    copies = [array.copy() for array in arrays]
    copies[which][at] = value
    return copies


def test_damaged_dumps_are_refused() -> None:
    pending = PendingKeys(3_500)
    for keys in np.array_split(POOL, 40):
        count(pending, np.repeat(keys, 2), 9)
    before, arrays = contents(pending), pending.to_arrays()
    state, ends, tags, counts = arrays
    assert state[1] == 1
    page = int(np.argmax(ends[:, 0]))
    first = int(ends[:page, -1].sum())  # it has several entries in its first bucket
    wrong = [
        [],
        arrays[:3],
        [1, 2, 3, 4],
        [state[:-1], ends, tags, counts],
        [state, ends[:-1], tags, counts],
        [state, ends, tags[:-1], counts[:-1]],
        [state, ends, tags, counts[:-1]],
        [state, ends, tags[::-1].copy(), counts],
        *[changed(arrays, 0, 0, limit) for limit in (0, MAX_LIMIT + 1)],
        *[changed(arrays, 0, 1, active) for active in (-1, 2)],
        *[changed(arrays, 0, 2, group) for group in (-1, GROUPS)],
        *[changed(arrays, 0, 3, tag) for tag in (-1, TAG)],
        *[changed(arrays, 0, 4, pages) for pages in (-1, 0, state[4] + 1, 2**40)],
        *[changed(arrays, 1, (page, at), end) for at in (0, 30, 31) for end in (FULL + 1, 65_535)],
        changed(arrays, 1, (page, 31), 0),
        changed(arrays, 2, first + 1, int(tags[first])),
        *[changed(arrays, 3, 0, n) for n in (0, 255)],
    ]
    for dump in wrong:
        with pytest.raises(InputError, match="dump"):
            pending.load(dump)
    with pytest.raises(TypeError, match="contiguous array of uint32"):
        pending.load([state, ends, tags.astype(np.int64), counts])
    assert contents(pending) == before


def test_the_same_bytes_on_every_machine() -> None:
    rng = np.random.default_rng(5)
    pending, sketch = PendingKeys(20_000), PendingSketch(20_000)
    born = np.zeros(2, np.int64)
    for _ in range(60):
        keys = np.concatenate([rng.integers(0, 1_000, 500), rng.integers(-(2**63), 2**63 - 1, 1_500)])
        born += sum(count(pending, keys, 5)), sum(count(sketch, keys, 5))
    assert born.tolist() == [5594, 24476]
    assert (digest(pending), digest(sketch)) == ("b5644da992eec716", "b69f9894188ebdfd")
