"""Optimizers: each kernel against its equations written out for one number at a time, and against broken kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from compiled import variant
from hypothesis import given, settings
from hypothesis import strategies as st

import dps
from dps.engine.state.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Add,
    Assign,
    Momentum,
    Optimizer,
    RMSprop,
    optimizer_from_dict,
)
from dps.engine.state.schedules import Exponential, Fixed, InverseTime, Step
from dps.errors import InputError, InputTypeError

OPTIMIZERS = [
    Add(),
    Assign(),
    SGD(0.1),
    SGD(Exponential(0.1, factor=0.5), l1=0.2, l2=0.3),
    Momentum(0.1),
    Momentum(InverseTime(0.1, decay=0.5), momentum=0.5, nesterov=True),
    Adagrad(0.1),
    Adagrad(0.2, eps=1e-3, initial_accumulator=0.1, l1=0.3, l2=0.4),
    RMSprop(0.01),
    RMSprop(Step(0.1, every=2), rho=0.5, eps=0.1),
    Adam(),
    Adam(0.1, beta1=0.5, beta2=0.75, eps=1e-2),
    AdamW(0.1, weight_decay=0.2),
    FTRL(),
    FTRL(alpha=0.5, beta=0.3, l1=0.7, l2=0.2),
    FTRL(alpha=0.5, beta=0.0),
]
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)


# ---- the oracle: one column of one row, plain Python floats ---------------------------------------------------------


def soft(w: float, limit: float) -> float:
    return math.copysign(max(abs(w) - limit, 0.0), w)


def one_step(o: Optimizer, w: float, state: list[float], g: float, lr: float, steps: int) -> float:
    """The new value of one column; changes `state` in place. `steps`: the steps of this row, this one included."""
    match o:
        case Add():
            return w + g
        case Assign():
            return g
        case SGD():
            return soft(w - lr * g, lr * o.l1) / (1 + lr * o.l2)
        case Momentum():
            state[0] = o.momentum * state[0] + g
            return w - lr * (g + o.momentum * state[0] if o.nesterov else state[0])
        case Adagrad():
            state[0] += g**2
            rate = lr / (math.sqrt(state[0]) + o.eps)
            return soft(w - rate * g, rate * o.l1) / (1 + rate * o.l2)
        case RMSprop():
            state[0] = o.rho * state[0] + (1 - o.rho) * g**2
            return w - lr * g / (math.sqrt(state[0]) + o.eps)
        case Adam():
            if isinstance(o, AdamW):
                w -= lr * o.weight_decay * w
            state[0] = o.beta1 * state[0] + (1 - o.beta1) * g
            state[1] = o.beta2 * state[1] + (1 - o.beta2) * g**2
            m_hat = state[0] / (1 - o.beta1**steps)
            v_hat = state[1] / (1 - o.beta2**steps)
            return w - lr * m_hat / (math.sqrt(v_hat) + o.eps)
        case FTRL():
            return ftrl_of_the_paper(o, w, state, g)
    raise AssertionError(o)


def ftrl_of_the_paper(o: FTRL, w: float, state: list[float], g: float) -> float:
    """McMahan et al. 2013, Algorithm 1, lines 7-10, and then line 5 for the weight that the next pull reads."""
    z, n = state
    sigma = (math.sqrt(n + g**2) - math.sqrt(n)) / o.alpha
    z = z + g - sigma * w
    n = n + g**2
    state[:] = z, n
    if n == 0:
        return w  # ours: no gradient yet, so the initial value stands
    if abs(z) <= o.l1:
        return 0.0
    sign = 1 if z > 0 else -1
    return -(1 / ((o.beta + math.sqrt(n)) / o.alpha + o.l2)) * (z - sign * o.l1)


Push = tuple[list[int], np.ndarray, int]  # rows, updates, clock


def oracle(optimizer: Optimizer, values: np.ndarray, pushes: Iterable[Push]) -> tuple[np.ndarray, np.ndarray]:
    """Values after the pushes, and the state as [row, state, column]."""
    values = values.astype(np.float64).tolist()
    dim = len(values[0])
    states = [[[optimizer.slot_start] * optimizer.states for _ in range(dim)] for _ in values]
    steps = [0] * len(values)
    for rows, updates, clock in pushes:
        lr = optimizer.lr(clock) if hasattr(optimizer, "lr") else math.nan
        for row, update in zip(rows, updates.astype(np.float64).tolist(), strict=True):
            steps[row] += 1
            for j, g in enumerate(update):
                values[row][j] = one_step(optimizer, values[row][j], states[row][j], g, lr, steps[row])
    state = np.array(states).reshape(len(values), dim, optimizer.states).swapaxes(1, 2)
    return np.array(values), state


def born(optimizer: Optimizer, values: np.ndarray) -> np.ndarray:
    """rows as a shard holds them: values, then fresh state."""
    n, dim = values.shape
    slots = np.full((n, optimizer.init(dim)), optimizer.slot_start)
    return np.hstack([values, slots]).astype(values.dtype)


def compare(
    optimizer: Optimizer, values: np.ndarray, pushes: list[Push], kernel: Callable[..., None], tolerance: float
) -> np.ndarray:
    rows = born(optimizer, values)
    for index, updates, clock in pushes:
        kernel(rows, np.array(index, dtype=np.int64), 0, updates, optimizer.numbers(clock))
    n, dim = values.shape
    expected, state = oracle(optimizer, values, pushes)
    np.testing.assert_allclose(rows[:, :dim], expected, rtol=tolerance, atol=tolerance)
    kept = rows[:, dim : dim + optimizer.states * dim].reshape(n, optimizer.states, dim)
    np.testing.assert_allclose(kept, state, rtol=tolerance, atol=tolerance)
    return rows


@st.composite
def histories(draw: st.DrawFn) -> tuple[np.ndarray, list[Push]]:
    """Some rows, and pushes to some of them, repeats included."""
    n, dim = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 9]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    zeros = draw(st.sampled_from([0.0, 0.5]))

    def numbers(rows: int) -> np.ndarray:
        return np.where(rng.random((rows, dim)) < zeros, 0, rng.uniform(-3, 3, (rows, dim)).round(3))

    indices = draw(st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=6), max_size=8))
    return numbers(n), [(index, numbers(len(index)), int(rng.integers(0, 5))) for index in indices]


def in_dtype(dtype: str, values: np.ndarray, pushes: list[Push]) -> tuple[np.ndarray, list[Push]]:
    return values.astype(dtype), [(index, updates.astype(dtype), clock) for index, updates, clock in pushes]


@EVERY
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
@settings(deadline=None, max_examples=40)
@given(history=histories())
def test_kernels_follow_their_equations(optimizer: Optimizer, dtype: str, tolerance: float, history) -> None:
    values, pushes = in_dtype(dtype, *history)
    rows = compare(optimizer, values, pushes, optimizer.kernel, tolerance)
    assert rows.dtype == dtype
    if isinstance(optimizer, Adam):
        pushed = [row for index, _, _ in pushes for row in index]
        counts = np.bincount(np.array(pushed, dtype=np.int64), minlength=len(rows))
        np.testing.assert_array_equal(rows[:, -1], counts)


# ---- broken kernels must not pass -----------------------------------------------------------------------------------

WRONG = [  # optimizer, text of dps/engine/core/shards/steps_of.h, the wrong text
    (Add(), "w[j] += g[j]", "w[j] = g[j]"),
    (Assign(), "w[j] = g[j]", "w[j] += g[j]"),
    (SGD(0.1), "w[j] -= lr * g[j];", "w[j] += lr * g[j];"),
    (
        SGD(0.1, l1=0.2, l2=0.3),
        "l1 = (TYPE)push.numbers[1], l2 = (TYPE)push.numbers[2]",
        "l1 = (TYPE)push.numbers[2], l2 = (TYPE)push.numbers[1]",
    ),
    (SGD(0.1, l1=0.2), "l1 > 0 || l2 > 0", "l2 > 0"),
    (SGD(0.1, l2=0.2), "l1 > 0 || l2 > 0", "l1 > 0"),
    (Momentum(0.1, nesterov=True), "push.numbers[2] > 0", "push.numbers[2] == 0"),
    (Momentum(0.1), "push.numbers[2] > 0", "push.numbers[2] == 0"),
    (Momentum(0.1), "v[j] + g[j]", "v[j] + (1 - keep) * g[j]"),
    (Adagrad(0.1), "n[j] = n[j] + g[j] * g[j]", "n[j] = g[j] * g[j]"),
    (Adagrad(0.1), "eps = (TYPE)push.numbers[1]", "eps = (TYPE)push.numbers[2]"),
    (Adagrad(0.1, l1=0.3), "lr / (ROOT(n[j]) + eps), l1", "lr, l1"),
    (RMSprop(0.1), "rest * g[j] * g[j]", "g[j] * g[j]"),
    (RMSprop(0.1, eps=0.1), "ROOT(n[j]) + eps", "ROOT(n[j] + eps)"),
    (Adam(0.1), "(1.0 - dps_power(push.numbers[1], (uint64_t)steps))", "1.0"),
    (Adam(0.1), "sqrt(1.0 - dps_power(push.numbers[2], (uint64_t)steps))", "1.0"),
    (Adam(0.1), "v[dim] += 1", "v[dim] += 2"),
    (Adam(0.1), "steps != known", "known == 0"),
    (Adam(0.1, eps=0.1), "ROOT(v[j]) * scale + eps", "(ROOT(v[j]) + eps) * scale"),
    (AdamW(0.1, weight_decay=0.2), "1.0 - lr * push.numbers[4]", "1.0 - push.numbers[4]"),
    (AdamW(0.1, weight_decay=0.2), "keep * w[j]", "w[j]"),
    (FTRL(l1=0.5), "+ g[j] - (root", "+ g[j] + (root"),
    (FTRL(l1=0.5), "(OF_TYPE(clip)(slope, l1) - slope)", "(slope - OF_TYPE(clip)(slope, l1))"),
    (FTRL(l1=0.5), "(OF_TYPE(clip)(slope, l1) - slope)", "-slope"),
    (FTRL(l1=0.5), "OF_TYPE(clip)(slope, l1)", "l1"),
    (FTRL(l2=0.5), " + l2);", ");"),
    (FTRL(), "(beta + root) * per_alpha", "beta + root * per_alpha"),
    (FTRL(), "total == 0 ? w[j] : solved", "solved"),
]


def fixed_history() -> tuple[np.ndarray, list[Push]]:
    rng = np.random.default_rng(1)
    pushes = []
    for clock in range(6):
        updates = rng.uniform(-1, 1, (3, 4))
        updates[:, 3] = 0  # one column never sees a gradient
        pushes.append(([0, int(clock > 2), 2], updates, clock))
    return rng.uniform(-1, 1, (3, 4)), pushes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("optimizer", "old", "new"), [WRONG[0], *(pytest.param(*w, marks=pytest.mark.slow) for w in WRONG[1:])]
)
def test_a_broken_kernel_is_caught(optimizer: Optimizer, old: str, new: str) -> None:
    compare(optimizer, *fixed_history(), optimizer.kernel, 1e-12)
    wrong = getattr(variant("optimizers", "steps_of.h", old, new), optimizer.kernel.__name__)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(optimizer, *fixed_history(), wrong, 1e-12)


# ---- bits -----------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 5, 64])
def test_ranges_indices_and_any_order_give_the_same_bits(optimizer: Optimizer, dtype: str, dim: int) -> None:
    rng = np.random.default_rng(2)
    start, m = 3, 20
    values = rng.normal(size=(start + m + 2, dim)).astype(dtype)
    whole, keyed, shuffled, single = (born(optimizer, values) for _ in range(4))
    none = np.empty(0, dtype=np.int64)
    index = np.arange(start, start + m)
    for clock in range(4):
        updates = rng.normal(size=(m, dim)).astype(dtype)
        numbers = optimizer.numbers(clock)
        optimizer.kernel(whole, none, start, updates, numbers)
        optimizer.kernel(keyed, index, 0, updates, numbers)
        order = rng.permutation(m)
        optimizer.kernel(shuffled, index[order], 0, np.ascontiguousarray(updates[order]), numbers)
        for i in range(m):
            optimizer.kernel(single, none, start + i, updates[i : i + 1], numbers)
    assert whole.tobytes() == keyed.tobytes() == shuffled.tobytes() == single.tobytes()
    outside = [*range(start), *range(start + m, len(values))]
    assert whole[outside].tobytes() == born(optimizer, values)[outside].tobytes()


def test_float32_is_computed_in_float32() -> None:
    rng = np.random.default_rng(3)
    w, n, g = (rng.normal(size=(50, 7)).astype(np.float32) for _ in range(3))
    n = n * n
    rows = np.hstack([w, n])
    Adagrad(0.1).step(rows, g)
    lr, eps = np.float32(0.1), np.float32(1e-10)
    np.testing.assert_array_equal(rows, np.hstack([w - lr * g / (np.sqrt(n + g * g) + eps), n + g * g]))


@pytest.mark.parametrize("optimizer", [Add(), Assign()], ids=repr)
def test_int64_is_exact(optimizer: Optimizer) -> None:
    rows = np.array([[2**62 + 1, -5], [7, 2**53]])
    updates = np.array([[2**61 + 3, -(2**62)], [-7, 1]])
    expected = rows + updates if isinstance(optimizer, Add) else updates.copy()
    optimizer.step(rows, updates)
    np.testing.assert_array_equal(rows, expected)
    assert "int64" in optimizer.dtypes


def test_an_empty_push_does_nothing() -> None:
    rows = np.ones((2, 4))
    for optimizer in OPTIMIZERS:
        optimizer.kernel(rows, np.empty(0, np.int64), 0, np.empty((0, 1)), optimizer.numbers(0))
    np.testing.assert_array_equal(rows, 1)


# ---- what the core refuses ------------------------------------------------------------------------------------------


@EVERY
def test_rows_that_do_not_exist_are_refused_and_nothing_changes(optimizer: Optimizer) -> None:
    rows, none, numbers = born(optimizer, np.ones((5, 3))), np.empty(0, np.int64), optimizer.numbers(0)
    updates, before = np.ones((40, 3)), rows.copy()
    for place, row in [(0, -1), (39, 5), (17, 2**62), (8, -(2**63)), (39, 2**63 - 1)]:
        index = np.arange(40) % 5
        index[place] = row
        with pytest.raises(ValueError, match=rf"row {row} \(number {place} of the index\), and there are 5 rows"):
            optimizer.kernel(rows, index, 0, updates, numbers)
    for start in (-1, 3, 2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=rf"rows {start} to -?\d+, and there are 5 rows"):
            optimizer.kernel(rows, none, start, updates[:3], numbers)
    with pytest.raises(ValueError, match="an index of 4 rows, and 3 rows are meant"):
        optimizer.kernel(rows, np.zeros(4, np.int64), 0, updates[:3], numbers)
    assert rows.tobytes() == before.tobytes()


@EVERY
def test_arrays_that_do_not_fit_are_refused(optimizer: Optimizer) -> None:
    rows, none, numbers = born(optimizer, np.ones((5, 3))), np.empty(0, np.int64), optimizer.numbers(0)
    with pytest.raises(ValueError, match="wide enough"):
        optimizer.kernel(rows, none, 0, np.ones((2, 3 + rows.shape[1])), numbers)
    with pytest.raises(ValueError, match="two-dimensional"):
        optimizer.kernel(rows, none, 0, np.ones(3), numbers)
    with pytest.raises(TypeError, match="array of float64 wanted, and this is float32"):
        optimizer.kernel(rows, none, 0, np.ones((2, 3), np.float32), numbers)
    with pytest.raises(TypeError, match="contiguous"):
        optimizer.kernel(rows, none, 0, np.ones((4, 3))[::2], numbers)
    with pytest.raises(TypeError, match="this is int8"):
        optimizer.kernel(rows.astype(np.int8), none, 0, np.ones((2, 3)), numbers)
    if len(numbers):
        with pytest.raises(ValueError, match=r"2 numbers, and the optimizer has [345]"):
            optimizer.kernel(rows, none, 0, np.ones((2, 3)), numbers[:2])
        with pytest.raises(TypeError, match="int64"):
            optimizer.kernel(np.ones((5, 9), np.int64), none, 0, np.ones((2, 1), np.int64), numbers)


def test_an_optimizer_of_a_user_may_have_a_kernel_in_python() -> None:
    class Halve(Add):
        @staticmethod
        def kernel(rows, index, start, updates, numbers) -> None:
            rows[index] = (rows[index] + updates) / 2

    rows = np.ones((3, 1))
    Halve().step(rows, np.array([[3.0]]), np.array([1]))
    assert rows.tolist() == [[1], [2], [1]]


# ---- what users rely on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [SGD(0.1, l1=0.5), Adagrad(0.1, l1=0.5), FTRL(1.0, l1=5)], ids=repr)
def test_l1_makes_weights_exactly_zero(optimizer: Optimizer) -> None:
    rng = np.random.default_rng(4)
    rows = born(optimizer, rng.normal(size=(1, 8)).astype(np.float32))
    target = np.array([[1, 1, 1, 1, 0, 0, 0, 0]], dtype=np.float32)
    for _ in range(300):
        gradient = rows[:, :8] - target + rng.uniform(-0.1, 0.1, (1, 8))
        optimizer.step(rows, gradient.astype(np.float32))
    assert np.all(rows[0, :4] > 0.2)
    assert np.all(rows[0, 4:8] == 0)
    assert not np.any(np.signbit(rows[0, 4:8]))


def test_ftrl_keeps_an_initial_value_until_a_column_sees_a_gradient() -> None:
    rows = born(FTRL(), np.array([[0.5, -0.5]]))
    FTRL().step(rows, np.array([[0.0, 1.0]]))
    assert rows[0, 0] == 0.5
    assert rows[0, 1] != -0.5


@EVERY
def test_nan_is_never_hidden(optimizer: Optimizer) -> None:
    rows = born(optimizer, np.ones((1, 2)))
    optimizer.step(rows, np.array([[np.nan, 1.0]]))
    assert np.isnan(rows[0, 0])
    assert not np.isnan(rows[0, 1])


def test_adam_corrects_a_late_row_like_an_early_one() -> None:
    rows = born(Adam(0.1), np.zeros((2, 1)))
    for _ in range(1000):
        Adam(0.1).step(rows, np.array([[1.0]]), np.array([0]))
    early = born(Adam(0.1), np.zeros((1, 1)))
    Adam(0.1).step(early, np.array([[5.0]]))
    Adam(0.1).step(rows, np.array([[5.0]]), np.array([1]))
    assert rows[1].tobytes() == early[0].tobytes()


def test_adams_count_may_stop_in_float32() -> None:
    rows = np.array([[0, 0.1, 0.01, 2**24]], dtype=np.float32)
    Adam(0.1).step(rows, np.array([[0.1]], dtype=np.float32))
    np.testing.assert_allclose(rows[0, 0], -0.1 * 0.1 / math.sqrt(0.999 * 0.01 + 0.001 * 0.01), rtol=1e-6)
    assert rows[0, 3] == 2**24


@EVERY
def test_repeats_tells_the_truth(optimizer: Optimizer) -> None:
    """any: one by one in any order is the sum in one step. sum: it is not. last: the last one counts."""
    updates = np.array([[1.0], [-3.0], [0.5]])
    index = np.zeros(3, np.int64)
    forth, back, summed = (born(optimizer, np.full((1, 1), 2.0)) for _ in range(3))
    optimizer.step(forth, updates, index)
    optimizer.step(back, updates[::-1].copy(), index)
    optimizer.step(summed, updates.sum(axis=0, keepdims=True))
    if optimizer.repeats == "any":
        np.testing.assert_allclose(forth, summed, rtol=1e-12)
        np.testing.assert_allclose(back, summed, rtol=1e-12)
    elif optimizer.repeats == "last":
        assert forth[0, 0] == 0.5
    else:
        assert optimizer.repeats == "sum"
        assert not np.allclose(forth, summed)


def test_numbers_follow_the_clock() -> None:
    assert SGD(Step(1.0, every=2, factor=0.5), l1=3).numbers(5).tolist() == [0.25, 3, 0]
    assert Momentum(0.1, nesterov=True).numbers(0).tolist() == [0.1, 0.9, 1.0]
    assert Add().numbers(0).dtype == np.float64


@EVERY
@pytest.mark.parametrize("dim", [1, 10])
def test_slots(optimizer: Optimizer, dim: int) -> None:
    counts = {Momentum: dim, Adagrad: dim, RMSprop: dim, Adam: 2 * dim + 1, AdamW: 2 * dim + 1, FTRL: 2 * dim}
    assert optimizer.init(dim) == counts.get(type(optimizer), 0)


@EVERY
def test_dicts_survive_json(optimizer: Optimizer) -> None:
    assert optimizer_from_dict(json.loads(json.dumps(optimizer.to_dict()))) == optimizer
    assert hash(optimizer) is not None


def test_numbers_of_any_kind_describe_the_same_optimizer() -> None:
    assert Adam(1, beta1=np.float64(0.5)).to_dict() == Adam(Fixed(1.0), beta1=0.5).to_dict()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(0), "lr is 0 but must be a finite number above 0"),
        (lambda: SGD(math.nan), "lr is nan"),
        (lambda: SGD(0.1, l1=-1), "SGD: l1 is -1 but must be a finite number at least 0 .the default is 0.0"),
        (lambda: Momentum(0.1, momentum=1), "momentum is 1 but must be a finite number at least 0 and below 1"),
        (lambda: Adagrad(0.1, eps=0), "eps is 0"),
        (lambda: Adagrad(0.1, initial_accumulator=-0.1), "initial_accumulator is -0.1"),
        (lambda: RMSprop(0.1, rho=1.5), "rho is 1.5"),
        (lambda: Adam(beta1=-0.1), "Adam: beta1 is -0.1"),
        (lambda: Adam(beta2=1), "beta2 is 1"),
        (lambda: AdamW(weight_decay=math.inf), "AdamW: weight_decay is inf"),
        (lambda: FTRL(alpha=0), "alpha is 0"),
        (lambda: optimizer_from_dict({"name": "Adamax"}), "no optimizer called 'Adamax'; dps knows Adagrad, Adam, "),
        (lambda: optimizer_from_dict({"name": "SGD", "momentum": 1}), "SGD takes lr, l1, l2; unknown: .'momentum'"),
        (lambda: optimizer_from_dict({"name": "Add", "lr": 1}), "Add takes no parameters; unknown: .'lr'"),
    ],
)
def test_wrong_values_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD("fast"), "lr is 'fast' but must be a number above 0 or a schedule"),
        (lambda: Adam(beta1=None), "beta1 is None"),
        (lambda: FTRL(l1=True), "l1 is True"),
        (lambda: Momentum(0.1, nesterov="no"), "nesterov is 'no' but must be True or False"),
    ],
)
def test_wrong_kinds_are_named(make: Callable[[], object], words: str) -> None:
    with pytest.raises(InputTypeError, match=words):
        make()


def test_agrees_with_torch_where_every_row_is_pushed_to() -> None:
    torch = pytest.importorskip("torch")
    pairs = [
        (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Momentum(0.1), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (Momentum(0.1, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        (
            Adagrad(0.1, initial_accumulator=0.2),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.2),
        ),
        (RMSprop(0.1), lambda p: torch.optim.RMSprop(p, lr=0.1)),
        (Adam(), lambda p: torch.optim.Adam(p)),
        (AdamW(0.1, weight_decay=0.2), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2)),
    ]
    rng = np.random.default_rng(5)
    for optimizer, make in pairs:
        values = rng.normal(size=(6, 5))
        rows = born(optimizer, values)
        theirs = torch.tensor(values.copy(), requires_grad=True)
        stepper = make([theirs])
        for _ in range(20):
            g = rng.normal(size=values.shape)
            optimizer.step(rows, g)
            theirs.grad = torch.tensor(g)
            stepper.step()
        np.testing.assert_allclose(
            rows[:, :5], theirs.detach().numpy(), rtol=1e-11, atol=1e-12, err_msg=repr(optimizer)
        )


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (dps.Adagrad(0.1), "Adagrad(lr=0.1)"),
        (dps.Adam(), "Adam()"),
        (dps.Adam(0.001), "Adam()"),
        (dps.FTRL(alpha=0.5, l1=1.0), "FTRL(alpha=0.5, l1=1.0)"),
        (dps.SGD(dps.Cosine(0.3, clocks=40)), "SGD(lr=Cosine(lr=0.3, clocks=40))"),
        (dps.Add(), "Add()"),
        (dps.Normal(0.1, seed=7), "Normal(scale=0.1, seed=7)"),
        (dps.BlockPartition(8), "BlockPartition(bits=8)"),
    ],
)
def test_the_repr_is_a_call_that_makes_it_without_what_goes_without_saying(made, text):
    assert repr(made) == text
    assert eval(text, vars(dps)) == made


@pytest.mark.parametrize("made", OPTIMIZERS, ids=repr)
def test_each_repr_makes_an_equal_one(made):
    assert eval(repr(made), vars(dps)) == made
