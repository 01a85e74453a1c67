"""Functions that change shapes, products of matrices, and results that arrays of numpy take: as on numpy."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from keyed_store import KeyedStore
from memory_store import MemoryStore

from dps.arrays import ArrayNamespace, Space
from dps.arrays.array import made, uploaded
from dps.arrays.sparse_space import SparseSpace
from dps.arrays.sparse_vector import from_items
from dps.errors import InputError, InputTypeError, LimitError, PoolFullError

RNG = np.random.default_rng(0)
VECTOR, MATRIX, SQUARE = RNG.normal(size=10), RNG.normal(size=(4, 10)), RNG.normal(size=(10, 10))


@pytest.fixture
def put():
    space = Space(MemoryStore(3))
    return lambda values: made(space, uploaded(space, np.asarray(values)))


CALLS = {
    "reshape": lambda v, m, s: np.reshape(v, (1, -1)),
    "reshape back": lambda v, m, s: v.reshape(1, 10).reshape(-1),
    "reshape to the same": lambda v, m, s: m.reshape((-1, 10)),
    "reshape to a matrix": lambda v, m, s: np.reshape(v, (2, 5)),
    "reshape to a column": lambda v, m, s: v.reshape(-1, 1) * 2,
    "reshape to a vector": lambda v, m, s: m.reshape(-1),
    "expand a vector's last": lambda v, m, s: np.expand_dims(v, 1),
    "concatenate vectors": lambda v, m, s: np.concatenate([v, v, [1.0]]),
    "concatenate columns": lambda v, m, s: np.concatenate([m, MATRIX], axis=1),
    "squeeze": lambda v, m, s: v[None, :].squeeze(),
    "squeeze an axis": lambda v, m, s: np.squeeze(v.reshape(1, -1), axis=0),
    "squeeze nothing": lambda v, m, s: np.squeeze(m),
    "expand": lambda v, m, s: np.expand_dims(v, 0) + m,
    "expand a vector's last but one": lambda v, m, s: np.expand_dims(v, -2),
    "at least": lambda v, m, s: np.atleast_2d(v) - np.atleast_1d(v),
    "stack": lambda v, m, s: np.stack([v, v * 2, m[1]]),
    "vstack": lambda v, m, s: np.vstack([v, m, v > 0]),
    "vstack here and there": lambda v, m, s: np.vstack([v, np.arange(10)]),
    "unstack": lambda v, m, s: np.unstack(m)[2],
    "broadcast to": lambda v, m, s: np.broadcast_to(v, (3, 10)),
    "broadcast": lambda v, m, s: np.broadcast_arrays(v, m)[0] * 2,
    "transpose": lambda v, m, s: np.transpose(m),
    "transpose nothing": lambda v, m, s: np.transpose(m, (0, 1)),
    "swap": lambda v, m, s: np.swapaxes(m, 0, -1),
    "move": lambda v, m, s: np.moveaxis(v, 0, -1),
    "move nothing": lambda v, m, s: np.moveaxis(m, (), ()) + np.moveaxis(v, [], []),
    "move both": lambda v, m, s: np.moveaxis(m, (0, 1), (1, 0)),
    "move both back": lambda v, m, s: np.moveaxis(m, (0, 1), (0, 1)),
    "mean over no axis": lambda v, m, s: np.mean(m, axis=()) + np.mean(v > 0, axis=()),
    "variance over no axis": lambda v, m, s: np.var(m, axis=()) + np.std(v, axis=(), keepdims=True),
    "sums over no axis": lambda v, m, s: [np.sum(m > 0, axis=()), np.prod(m > 0, axis=(), keepdims=True)],
    "extremes over no axis": lambda v, m, s: [m.min(axis=()), np.max(m, axis=())],
    "truth over no axis": lambda v, m, s: [np.any(m, axis=()), (m > 0).all(axis=()), np.count_nonzero(m, axis=()) > 0],
    "norm over no axis": lambda v, m, s: np.linalg.vector_norm(m, axis=(), ord=3),
    "index of a transpose": lambda v, m, s: m.T[:, -1],
    "outer": lambda v, m, s: np.outer([1.0, 2, 3], v),
    "outer of vectors": lambda v, m, s: np.outer(v, v),
    "tensordot": lambda v, m, s: np.tensordot(m, m, 2),
    "tensordot of vectors": lambda v, m, s: np.tensordot(v, v, 1),
    "matmul": lambda v, m, s: m @ s,
    "matmul with numpy": lambda v, m, s: m @ SQUARE,
    "matmul of a vector": lambda v, m, s: v @ s,
    "matmul of a vector with numpy": lambda v, m, s: v @ SQUARE,
    "matmul of a transpose": lambda v, m, s: s.T @ m.T,
    "matmul of transposes": lambda v, m, s: m.T @ MATRIX[:, :3],
    "matmul by rows": lambda v, m, s: s.T @ v,
    "one element": lambda v, m, s: v * v[:1] + m,
    "round": lambda v, m, s: np.round(v * 100, 1) + np.around(v),
    "round to hundreds": lambda v, m, s: (v * 1e4).round(-2),
    "round whole numbers": lambda v, m, s: np.round((v * 100).astype("i8")),
    "fix": lambda v, m, s: np.fix(v * 3),
    "average": lambda v, m, s: np.average(v, weights=abs(v)),
    "average by rows": lambda v, m, s: np.average(m, axis=1, weights=abs(m)),
    "average of all": lambda v, m, s: np.average(m),
    "polyval": lambda v, m, s: np.polyval([3.0, 2, 1], v),
    "amax": lambda v, m, s: np.amax(m, axis=1) - np.amin(v),
    "isreal": lambda v, m, s: np.isreal(v) | np.iscomplex(v),
    "imag": lambda v, m, s: v.imag + np.imag(v) + v.conjugate(),
    "matrix norm": lambda v, m, s: np.linalg.matrix_norm(m),
    "norms of columns": lambda v, m, s: [np.linalg.norm(m, k, axis=0) for k in (None, 1, 3, np.inf, -np.inf, 0)],
    "norm of columns": lambda v, m, s: np.linalg.norm(m, axis=0, keepdims=True),
    "norm of all": lambda v, m, s: np.linalg.vector_norm(m, ord=3),
    "count by column": lambda v, m, s: np.count_nonzero(m > 0, axis=0),
    "argmax by column": lambda v, m, s: np.argmax(m, axis=0),
    "argmin of all": lambda v, m, s: m.argmin(),
    "places in a matrix": lambda v, m, s: np.nonzero(m > 0),
    "flat places in a matrix": lambda v, m, s: np.flatnonzero(m > 0),
    "mean over both axes": lambda v, m, s: m.mean(axis=(0, 1)),
    "variance of columns": lambda v, m, s: m.var(axis=0, keepdims=True),
    "spread of columns": lambda v, m, s: np.ptp(m, axis=0, keepdims=True),
    "upper triangle": lambda v, m, s: np.triu(m, 1),
    "lower triangle": lambda v, m, s: np.tril(s, -2),
    "diagonal": lambda v, m, s: np.diagonal(m, 3),
    "diagonal below": lambda v, m, s: np.diag(m, -2),
    "trace": lambda v, m, s: np.trace(m, 1) + np.linalg.trace(s, offset=-11),
    "take": lambda v, m, s: np.take(v, [3, 1]),
    "take rows": lambda v, m, s: np.take(m, np.array([2, 0, 2]), axis=0),
    "concatenate": lambda v, m, s: np.concatenate([m, s]),
    "tensordot over columns": lambda v, m, s: np.tensordot(m, s, axes=(1, 1)),
    "tensordot over rows": lambda v, m, s: np.tensordot(s, m, axes=([0], [1])),
    "item": lambda v, m, s: v.item(3) + v[:1].item(),
    "nonzero": lambda v, m, s: (v > 0).nonzero()[0],
    "last axis by ellipsis": lambda v, m, s: v[..., 2:5],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_give_what_they_give_on_numpy(put, call):
    expected = call(VECTOR, MATRIX, SQUARE)
    found = call(put(VECTOR), put(MATRIX), put(SQUARE))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12, atol=1e-12)
    assert np.asarray(found).dtype == np.asarray(expected).dtype


def test_arrays_of_numpy_take_results(put):
    out, v = np.zeros(10), put(VECTOR)
    assert np.add(v, 1, out=out) is out
    np.testing.assert_array_equal(out, VECTOR + 1)
    out -= v
    np.testing.assert_allclose(out, 1)
    with pytest.raises(TypeError, match="Cannot cast"):
        np.add(v, 1, out=np.zeros(10, "i8"))
    with dask.config.set({"dps.limits.implicit-copy": "1 B"}), pytest.raises(LimitError):
        out += v


def test_elements_at_a_mask_take_as_many(put):
    v, expected = put(VECTOR), VECTOR.copy()
    v[v > 0] *= 3
    expected[expected > 0] *= 3
    np.testing.assert_array_equal(v.to_numpy(), expected)
    v[v > 100] = np.zeros(0)
    np.testing.assert_array_equal(v.to_numpy(), expected)
    with pytest.raises(InputError, match="could not broadcast"):
        v[v > 0] = np.ones(3)
    m, expected = put(MATRIX), MATRIX.copy()
    m[m < 0] = 0
    expected[expected < 0] = 0
    np.testing.assert_array_equal(m.to_numpy(), expected)
    v.fill(2)
    assert v.tolist() == [2.0] * 10


@pytest.mark.parametrize(
    "call",
    [
        lambda v, m: m @ put_square(m),
        lambda v, m: v.reshape(2, 5),
        lambda v, m: np.concatenate([v, v]),
    ],
)
def test_what_goes_by_way_of_the_driver_is_limited(put, call):
    with dask.config.set({"dps.limits.implicit-copy": "79 B"}), pytest.raises(LimitError, match="to_numpy"):
        call(put(VECTOR), put(MATRIX))


def put_square(array):
    return made(array.space, uploaded(array.space, SQUARE))


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda v, m: np.stack([v, v], axis=1), "axis=0"),
        (lambda v, m: np.tensordot(m, m, ([0, 1], [1, 0])), "sums over"),
        (lambda v, m: np.take(m, [1], axis=1), "takes elements"),
        (lambda v, m: np.diag(v), "takes a matrix"),
        (lambda v, m: np.unstack(v), "rows of a matrix"),
    ],
)
def test_what_would_move_elements_is_refused(put, call, remedy):
    with pytest.raises(InputTypeError, match=remedy):
        call(put(VECTOR), put(MATRIX))


def test_wrong_shapes_are_refused(put):
    for call in (
        lambda v: v.reshape(3, 3),
        lambda v: v.reshape(-1, -1),
        lambda v: v.reshape(2, 5, 1),
        lambda v: np.squeeze(v, 0),
        lambda v: np.broadcast_to(v, (3, 11)),
        lambda v: np.vstack([v, np.ones(11)]),
    ):
        with pytest.raises(InputError):
            call(put(VECTOR))


def test_an_axis_that_there_is_not_is_refused_as_numpy_does(put):
    for call in (lambda m: np.moveaxis(m, 0, 2), lambda m: np.swapaxes(m, 0, 2), lambda m: np.moveaxis(m, (0, 1), 0)):
        messages = []
        for matrix in (MATRIX, put(MATRIX)):
            with pytest.raises(ValueError, match=r"axis|number of elements") as caught:
                call(matrix)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_the_standard_has_a_list_of_broadcast_arrays_and_numpy_a_tuple(put):
    xp = put(VECTOR).__array_namespace__()
    assert isinstance(xp.broadcast_arrays(put(VECTOR), put(MATRIX)), list)
    assert isinstance(np.broadcast_arrays(put(VECTOR), put(MATRIX)), tuple)


def test_more_taken_off_than_there_are_rows_leaves_no_variance(put):
    with np.errstate(all="ignore"), pytest.warns(RuntimeWarning, match="Degrees of freedom"):
        np.testing.assert_array_equal(put(MATRIX).var(axis=0, ddof=5).to_numpy(), MATRIX.var(axis=0, ddof=5))


def test_a_namespace_is_that_of_its_space():
    space, other = Space(MemoryStore(2)), Space(MemoryStore(2))
    assert ArrayNamespace(space) == ArrayNamespace(space)
    assert len({ArrayNamespace(space), ArrayNamespace(space), ArrayNamespace(other)}) == 2
    xp = ArrayNamespace(space)
    info = xp.__array_namespace_info__()
    assert (info.default_device(), info.devices()) == ("servers", [xp.zeros(2).device])
    assert set(info.dtypes(kind="real floating")) == {"float32", "float64"}
    assert not info.dtypes(kind="complex floating")
    assert {each.name for each in info.default_dtypes().values()} == {"float64", "int64"}
    assert all(info.dtypes()[name] == getattr(xp, name) for name in info.dtypes())
    assert info.dtypes(kind="bool") == info.dtypes(kind=("bool",)) == {"bool": np.dtype(bool)}
    assert (xp.arange(2.5).dtype, xp.arange(0, 2.5).tolist()) == (np.float64, [0.0, 1.0, 2.0])
    assert xp.broadcast_to(xp.asarray(3.0), ()) == 3.0
    assert info.capabilities()["max dimensions"] == 2
    assert xp.full((), 3.0) == 3.0
    assert xp.broadcast_to(xp.ones(3), (2, 3)).tolist() == [[1, 1, 1]] * 2


@pytest.mark.thorough
def test_vectors_that_a_cycle_of_references_keeps_return_when_they_are_needed():
    space = Space(MemoryStore(2))
    xp = ArrayNamespace(space)
    xp.zeros(10, capacity=4)

    class Kept:
        pass

    for _ in range(6):
        kept = Kept()
        kept.itself, kept.vector = kept, xp.ones(10)
    vectors = [xp.ones(10) for _ in range(3)]
    with pytest.raises(PoolFullError, match="4 of 4"):
        xp.ones(10)
    assert len(vectors) == 3


def test_sparse_vectors_make_no_matrices():
    v = from_items(SparseSpace(KeyedStore(2)), [1, 3], [1.0, 2.0], 10)
    for call in (
        lambda: np.expand_dims(v, 0),
        lambda: np.stack([v, v]),
        lambda: np.broadcast_to(v, (2, 10)),
        lambda: np.outer([1, 2], v),
    ):
        with pytest.raises(InputError, match="sparse arrays on the servers have one axis, not 2"):
            call()
    assert np.round(v * 1.26, 1).tolist() == [0, 1.3, 0, 2.5, 0, 0, 0, 0, 0, 0]
    assert v.reshape(-1).tolist() == v.tolist()
