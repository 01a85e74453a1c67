"""The compiled steps of word2vec beside the same steps in numpy; finite differences; wrong variants; bad arguments."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import word_steps
from compiled import variant

from dps import kernels
from dps.errors import InputError
from dps.kernels.loops import words as loops

CASES = [  # places, step, pool, dim, words, widest window
    (700, 256, 64, 20, 60, 5),
    (300, 64, 5, 16, 8, 3),  # each row comes many times, and each negative, too
    (90, 7, 16, 1, 300, 9),
    (1, 256, 64, 4, 2, 5),  # no pair at all
]


def text(case, seed=0):
    """The arguments of `word_steps`; the rows of words are numbered apart from those of targets."""
    places, step, pool, dim, rows, window = case
    rng = np.random.default_rng((seed, places))
    inside, outside = (rng.normal(size=(n, dim)).astype(np.float32) / dim**0.5 for n in (rows, rows + 3))
    words, targets = rng.integers(0, rows, places), rng.integers(0, rows + 3, places)
    sentences, reach = np.sort(rng.integers(0, 1 + places // 9, places)), rng.integers(0, window + 1, places)
    pools = rng.integers(0, rows + 3, (-(-places // step), pool))
    return inside, outside, words, targets, sentences, reach, pools


def differs(made, case, cbow, trainers=40):
    """Whether a module changes rows, or says a loss, beyond rounding other than numpy does."""
    arguments = text(case)
    inside, outside = (rows.copy() for rows in arguments[:2])
    options = {"negative": 5, "rate": 0.05, "step": case[1], "trainers": trainers, "cbow": cbow}
    exact = [rows.astype(float) for rows in (inside, outside)]
    expected = word_steps.steps(*exact, *arguments[2:], **options)
    loss, count = made.word_steps(inside, outside, *arguments[2:], *options.values())
    return (
        count != expected[1]
        or loss != pytest.approx(expected[0], rel=1e-5)
        or any(abs(found - rows).max() > 3e-6 for found, rows in zip((inside, outside), exact, strict=True))
    )


@pytest.mark.parametrize("cbow", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_numpy(case, cbow):
    assert not differs(loops, case, cbow)


WRONG = [
    ("w->nh[q] + w->nv[t]) / 4 + residual", "w->nh[q] + w->nv[t]) / 4"),  # rows overshoot
    ("i + w->reach[i] : w->places - 1", "i + w->reach[i] - 1 : w->places - 1"),
    ("|| w->sentences[j] != w->sentences[i]", ""),
    ("1.0f - gone : 0.0f", "1.0f : 0.0f"),  # several trainers add up the ways of a row that each has gone to its end
    ("trainers * (1.0f - left[i])", "trainers"),
    ("#define DPS_FARTHEST 2.0f", "#define DPS_FARTHEST 1.0f"),
    ("weights += weight;", ""),
    ("w->negative / (float)w->pool", "w->negative / (float)w->lanes"),
    ("weight * w->keep[o + c]", "weight"),
    ("log(product);\n            product = 1;", "log(product);"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("old", "new"), WRONG)
def test_wrong_variants_are_caught(old, new):
    made = variant("words", "words.h", old, new)
    assert any(differs(made, case, cbow) for case in CASES for cbow in (False, True))


def test_large_scores_have_exact_losses():
    """Beyond where a float32 exp underflows, and where a product of terms would overflow."""
    for scale in (1.0, 30.0, 1e3, 1e6):
        inside, outside = np.full((2, 1), scale, np.float32), np.array([[1.0], [-1.0]], np.float32)
        rest = [0, 1] * 300, [0, 1] * 300, [0] * 600, [1] * 600, [[1]] * 3
        expected = word_steps.steps(
            inside.astype(float), outside.astype(float), *map(np.array, rest), negative=1, rate=0.0
        )
        assert kernels.word_steps(inside, outside, *rest, negative=1, rate=0.0) == pytest.approx(expected, rel=1e-5)


def test_threads_work_side_by_side():
    arguments = [text(CASES[0]) for _ in range(4)]
    threads = [threading.Thread(target=kernels.word_steps, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in arguments[1:]:
        np.testing.assert_array_equal(each[0], arguments[0][0])


def test_gradients_of_numpy_are_finite_differences():
    rng = np.random.default_rng(0)
    h, v = rng.normal(size=(4, 3)), rng.normal(size=(6, 3))
    rest = np.array([0, 0, 1, 3]), np.array([1, 2, 2, 5]), np.array([0, 2, 4, 4]), 5
    made = word_steps.gradients(h, v, *rest)
    for rows, gradient in ((h, made.queries), (v, made.targets)):
        for place in np.ndindex(rows.shape):
            old, losses = rows[place], []
            for move in (1e-5, -1e-5):
                rows[place] = old + move
                losses.append(word_steps.gradients(h, v, *rest).loss)
            rows[place] = old
            assert gradient[place] == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_bad_arguments_change_nothing():
    names = ("inside", "outside", "words", "targets", "sentences", "reach", "pools")
    good = dict(zip(names, text(CASES[1]), strict=True))
    before = {name: array.copy() for name, array in good.items()}
    far = np.full_like(good["words"], 99)
    for change, message in [
        ({"inside": good["inside"].astype(float)}, "inside is changed in place"),
        ({"outside": good["outside"][:, ::2]}, "outside is changed in place"),
        ({"outside": good["outside"][:, :3].copy()}, "dim"),
        ({"words": far}, "words from 99 to 99, and there are 8 rows"),
        ({"targets": far}, "targets from 99"),
        ({"pools": good["pools"] - 50}, "negatives from -"),
        ({"pools": good["pools"][:-1]}, "one row for each of 5 steps"),
        ({"pools": good["pools"][:, :0]}, "one row for each of 5 steps"),
        ({"reach": -good["reach"]}, "reach of -3"),
        ({"reach": good["reach"][1:]}, "reach of shape"),
        ({"step": 0}, "1 or more"),
    ]:
        with pytest.raises(InputError, match=message):
            kernels.word_steps(**{"step": 64, **good, **change})
    for name, array in good.items():
        np.testing.assert_array_equal(array, before[name])
