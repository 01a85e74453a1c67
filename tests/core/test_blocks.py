"""Blocks: memory of arrays that are gone is used again, memory of an array that is in use never."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
import pytest
from compiled import variant

from dps.engine.core import blocks

LARGE = 1 << 16  # of float32: the smallest array that lies in a block has half of it


@pytest.fixture(autouse=True)
def clean():
    """No idle blocks before and after a test."""
    blocks.limit_kept(0)
    blocks.limit_kept(1 << 27)
    yield
    blocks.limit_kept(0)
    blocks.limit_kept(1 << 27)


def where(array: np.ndarray) -> int:
    return array.ctypes.data


def test_memory_of_an_array_that_is_gone_is_used_again():
    first = blocks.empty((LARGE,), "float32")
    address = where(first)
    assert blocks.kept() == 0
    del first
    assert blocks.kept() == 4 * LARGE
    second = blocks.empty((LARGE // 2, 2), np.float32)
    assert where(second) == address
    assert blocks.kept() == 0


def uses_kept_apart(module, seed: int, steps: int = 300) -> bool:
    """Whether arrays that are in use keep their numbers, while others come and go; of half of them only views stay."""
    rng = np.random.default_rng(seed)
    used: dict[int, object] = {}
    for step in range(steps):
        array = module.empty((int(rng.integers(LARGE // 2, LARGE)),), "float32")
        array[:] = step
        views = [array, array[7:-9:3], array.reshape(-1, 1)[::2].T, memoryview(array), array.view(np.int32).base]
        used[step] = views[rng.integers(len(views))]
        del array, views
        if len(used) > 12:
            del used[list(used)[rng.integers(len(used))]]
        if step % 10 == 0 and not all((np.asarray(held) == number).all() for number, held in used.items()):
            return False
    return True


@pytest.mark.parametrize("seed", range(5))
def test_an_array_that_is_in_use_is_never_overwritten(seed):
    assert uses_kept_apart(blocks, seed)


MUTANTS = [
    ("return idle.pop(n)", "return idle[n]"),  # the block stays idle, and the next array takes it, too
    ("cnp.set_array_base(array, block)", "pass"),  # the block is given back while the array is in use
    ("        give_back(self.memory)", "        give_back(self.memory)\n        give_back(self.memory)"),  # twice idle
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new"), [MUTANTS[0], *(pytest.param(*row, marks=pytest.mark.slow) for row in MUTANTS[1:])]
)
def test_wrong_variants_overwrite_what_is_in_use(old, new):
    wrong = variant("blocks", "blocks.pyx", old, new)
    wrong.limit_kept(1 << 30)  # so that no memory is freed that a wrong variant still uses
    assert not all(uses_kept_apart(wrong, seed) for seed in range(3))


def test_a_block_is_at_most_a_quarter_too_large():
    first = blocks.empty((2 * LARGE,), "float32")
    address = where(first)
    del first
    much_smaller = blocks.empty((LARGE,), "float32")
    assert where(much_smaller) != address
    a_little = blocks.empty((2 * LARGE - LARGE // 4,), "float32")
    assert where(a_little) == address
    larger = blocks.empty((2 * LARGE + 1,), "float32")
    assert where(larger) != address


def test_idle_blocks_are_bounded_and_the_oldest_go_first():
    blocks.limit_kept(8 * LARGE)
    arrays = [blocks.empty((LARGE,), "float32") for _ in range(5)]
    addresses = [where(array) for array in arrays]
    while arrays:
        del arrays[0]
        assert blocks.kept() <= 8 * LARGE
    assert blocks.kept() == 8 * LARGE
    assert where(blocks.empty((LARGE,), "float32")) == addresses[-1]
    blocks.limit_kept(0)
    assert blocks.kept() == 0
    held = blocks.empty((LARGE,), "float32")
    del held
    assert blocks.kept() == 0


def test_nothing_leaks():
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(200):
            arrays = [blocks.empty((LARGE + 1000 * (number % 7),), "float64") for _ in range(3)]
            cycle = [arrays[0]]
            cycle.append(cycle)  # collected as garbage
            del arrays, cycle
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before <= blocks.kept() + 50_000
        blocks.limit_kept(0)
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()


def test_threads_do_not_share_a_block():
    wrong = []

    def use(number: int) -> None:
        for _ in range(200):
            array = blocks.empty((LARGE,), "int64")
            array[:] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert blocks.kept() <= 2 * 4 * 8 * LARGE  # a thread has the old array until it has the new one


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 0, 2), (2, 3, 4), (LARGE, 3), (1, LARGE, 1)])
def test_arrays_are_those_of_numpy(shape, dtype):
    array, expected = blocks.empty(shape, dtype), np.empty(shape, dtype)
    assert (array.shape, array.dtype, array.strides) == (expected.shape, expected.dtype, expected.strides)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    assert array.flags.owndata == (array.nbytes < 1 << 17)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3,), "int8"), ((-1,), "float32"), ((2, -LARGE), "int64"), ((1,) * 33, "int64")]
)
def test_arguments_that_are_refused(shape, dtype):
    with pytest.raises(ValueError, match="an array of a dtype of tables"):
        blocks.empty(shape, dtype)


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 31, 1 << 31, 4), (1 << 45,)])
def test_an_array_that_no_machine_holds_is_refused(shape):
    with pytest.raises((ValueError, MemoryError)):
        blocks.empty(shape, "float64")
