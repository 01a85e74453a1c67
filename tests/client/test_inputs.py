"""Whatever holds integers may be keys, whatever holds numbers may be values; the rest is refused by name and number."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dps.engine.client.inputs import as_keys, as_rows, check_out, row_shape, split_sparse
from dps.engine.state.ops import TableSpec
from dps.errors import InputError, InputTypeError, NotFiniteError

BIG = 2**63
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">i8", ">u8"]
arrays = st.sampled_from(INTEGERS).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3)))


def readonly(array) -> np.ndarray:
    array = np.array(array)
    array.flags.writeable = False
    return array


def unaligned(array) -> np.ndarray:
    """The same numbers at an odd address, as arrays may be that Dask has sent."""
    array = np.asarray(array)
    moved = np.frombuffer(bytearray(array.nbytes + 1), array.dtype, array.size, 1).reshape(array.shape)
    moved[...] = array
    return moved


# ---- keys -----------------------------------------------------------------------------------------------------------


def check_keys(given_keys, expected: np.ndarray) -> np.ndarray:
    keys, shape = as_keys(given_keys, "w")
    assert keys.dtype == np.int64
    assert keys.ndim == 1
    assert keys.flags.c_contiguous
    assert keys.flags.aligned
    assert shape == expected.shape
    wrapped = [int(k) - 2**64 if int(k) >= BIG else int(k) for k in expected.ravel().tolist()]
    assert keys.tolist() == wrapped
    return keys


@given(
    array=arrays,
    how=st.sampled_from(["as is", "reversed", "transposed", "every other", "read-only", "unaligned", "list"]),
)
def test_any_array_of_integers_is_keys(array: np.ndarray, how: str) -> None:
    if how == "reversed":
        array = array[::-1] if array.ndim else array
    elif how == "transposed":
        array = array.T
    elif how == "every other":
        array = array[..., ::2] if array.ndim else array
    elif how == "read-only":
        array = readonly(array)
    elif how == "unaligned":
        array = unaligned(array)
    before = array.copy()
    check_keys(array.tolist() if how == "list" else array, before)
    np.testing.assert_array_equal(array, before)


def test_keys_that_need_no_copy_are_not_copied() -> None:
    keys = np.arange(6)
    assert as_keys(keys, "w")[0] is keys or np.shares_memory(as_keys(keys, "w")[0], keys)
    assert np.shares_memory(as_keys(keys.reshape(2, 3), "w")[0], keys)
    assert np.shares_memory(as_keys(keys.view(np.uint64), "w")[0], keys)
    readable = keys.view()
    readable.flags.writeable = False
    assert np.shares_memory(as_keys(readable, "w")[0], keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (5, np.array(5)),
        (np.int32(-5), np.array(-5)),
        (np.uint64(2**64 - 1), np.array(-1)),
        ([], np.zeros(0)),
        ((), np.zeros(0)),
        ([[]], np.zeros((1, 0))),
        (np.zeros((0, 3)), np.zeros((0, 3))),
        ((3, -1), np.array([3, -1])),
        ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
        (range(4), np.arange(4)),
        ([2**63 - 1, -(2**63)], np.array([2**63 - 1, -(2**63)])),
        ([2**63, 2**64 - 1], np.array([2**63, 2**64 - 1], np.uint64)),
        ([2**63, 0], np.array([2**63, 0], np.uint64)),  # floats to numpy, as are the next three
        ([2**64 - 1, -1], np.array([-1, -1])),
        ([[2**63 + 1, 3], [4, 2**53 + 1]], np.array([[2**63 + 1, 3], [4, 2**53 + 1]], np.uint64)),
        ((np.uint64(2**63), np.int64(-2)), np.array([2**63, 2**64 - 2], np.uint64)),
        (pd.Series([7, 8, 7], index=[3, 2, 1]), np.array([7, 8, 7])),
        (pd.Series([2**64 - 1], dtype="uint64"), np.array([-1])),
        (pd.Series([7, 8], dtype="Int64"), np.array([7, 8])),
        (pd.Index([4, 5]), np.array([4, 5])),
        (pd.RangeIndex(3), np.arange(3)),
        (pd.DataFrame({"a": [1, 2], "b": [3, 4]}), np.array([[1, 3], [2, 4]])),
        (pd.array([1, 2]), np.array([1, 2])),
    ],
    ids=repr,
)
def test_what_else_is_keys(keys, expected: np.ndarray) -> None:
    check_keys(keys, expected)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (1.0, "table 'w': keys are integers, not float64"),
        ([1, 2.5], "not float64"),
        ([2**63, 2.5], "not float64"),
        (np.ones(3, np.float32), "not float32"),
        ([True, False], "keys are integers, not a mask; np.flatnonzero makes row numbers of it"),
        (pd.Series([True]), "not a mask"),
        ("key", "texts become keys by dps.hash_strings"),
        (["a", "b"], r"not <U1; texts become keys by dps\.hash_strings"),
        (np.array([b"a"]), "texts become keys"),
        (pd.Series(["a", None]), "texts become keys"),
        ([2**64], "not object"),
        ([None], "not object"),
        ({1, 2}, "not object"),
        ([1 + 2j], "not complex128"),
        (np.array(["2024-01-01"], "M8[D]"), r"not datetime64\[D\]"),
        (pd.Series([1, None], dtype="Int64"), "not float64"),
        (da.arange(4), "keys are a Dask collection; compute it, or pull inside a task"),
    ],
    ids=lambda v: repr(v)[:40],
)
def test_what_is_no_key(keys, words: str) -> None:
    with pytest.raises(InputTypeError, match=words):
        as_keys(keys, "w")


# ---- values ---------------------------------------------------------------------------------------------------------

KINDS = ["float32", "float64", "int64"]
FITS = {  # which dtypes lose nothing that matters
    "float32": ["f2", "f4", "f8", "i1", "i8", "u8", "?", ">f4", "g"],
    "float64": ["f2", "f4", "f8", "i8", "u8", "?", ">f8", "g"],
    "int64": ["i1", "i4", "i8", "u1", "u4", "?", ">i8"],
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("shape", [(), (4,), (0,), (2, 3), (2, 0), (1, 1, 5)])
def test_any_array_of_numbers_is_values(dtype: str, dim: int, shape: tuple[int, ...]) -> None:
    spec, count = TableSpec("w", dim=dim, dtype=dtype), int(np.prod(shape))
    full = row_shape(shape, spec)
    assert full == (shape if dim == 1 else (*shape, dim))
    numbers = np.arange(count * dim) % 2
    for kind in FITS[dtype]:
        for values in (numbers.astype(kind).reshape(full), numbers.astype(kind).reshape(count, dim)):
            for variant in (values, readonly(values), unaligned(values), values.copy(order="F"), values.tolist()):
                if isinstance(variant, list) and dtype == "int64" and not count:
                    continue  # an empty list is of floats
                rows = as_rows(variant, shape, count, spec)
                assert rows.dtype == dtype
                assert rows.shape == (count, dim)
                assert rows.flags.c_contiguous
                assert rows.flags.aligned
                np.testing.assert_array_equal(rows.ravel(), numbers)
    for number in (2, np.array(2), np.int8(2), True):
        np.testing.assert_array_equal(as_rows(number, shape, count, spec), np.full((count, dim), int(number)))


def test_nothing_for_no_keys() -> None:
    """A batch without a key: whatever is empty will do."""
    for dtype in KINDS:
        for dim in (1, 4):
            for values in ([], np.zeros(0), np.zeros((0, 4)), [[]], pd.Series([], dtype=object)):
                assert as_rows(values, (0,), 0, TableSpec("w", dim=dim, dtype=dtype)).shape == (0, dim)


def test_values_that_need_no_copy_are_not_copied() -> None:
    for dim, shape in ((1, (6,)), (3, (2, 3)), (3, (1, 2, 3))):
        values = np.arange(6, dtype=np.float32).reshape(shape)
        rows = as_rows(values, shape if dim == 1 else shape[:-1], 6 // dim, TableSpec("w", dim=dim))
        assert np.shares_memory(rows, values)


def test_frames_and_sparse_things_are_values() -> None:
    expected, spec = np.array([[1.0, 0, 2], [0, 3, 0]]), TableSpec("w", dim=3)
    for values in (
        pd.DataFrame(expected),
        sp.csr_array(expected),
        sp.coo_matrix(expected),
        sparse.COO(expected),
        da.from_array(expected),
    ):
        np.testing.assert_array_equal(as_rows(values, (2,), 2, spec), expected)
    for values in (pd.Series([1, 2]), pd.Series([1.0, 2], dtype="Float64"), pd.Index([1, 2]), (1, 2)):
        np.testing.assert_array_equal(as_rows(values, (2,), 2, TableSpec("w")), [[1], [2]])


@pytest.mark.parametrize(
    ("dtype", "values", "words"),
    [
        ("int64", [1.5, 2], "table 'w' holds int64; values of float64 would lose numbers: convert them"),
        ("int64", np.array([1, 2**63], np.uint64), "values of uint64 would lose numbers"),
        ("float32", [1j, 2], "values of complex128 would lose numbers"),
        ("float32", ["1", "2"], "values of <U1 would lose numbers"),
        ("float64", [None, 1], "values of object would lose numbers"),
        ("float64", np.array([1, 2], "m8[s]"), "values of timedelta64"),
    ],
)
def test_a_dtype_that_would_lose_numbers(dtype: str, values, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_rows(values, (2,), 2, TableSpec("w", dtype=dtype))


@pytest.mark.parametrize(
    ("dim", "shape", "values", "words"),
    [
        (1, (3,), (2,), r"3 keys of dim 1 take values of shape \(3,\) or \(3, 1\), not \(2,\)"),
        (1, (3,), (3, 2), r"not \(3, 2\)"),
        (4, (3,), (3,), r"3 keys of dim 4 take values of shape \(3, 4\), not \(3,\)"),
        (4, (3,), (4, 3), r"not \(4, 3\)"),
        (4, (3,), (12,), r"not \(12,\)"),
        (4, (2, 3), (2, 3), r"6 keys of dim 4 take values of shape \(2, 3, 4\) or \(6, 4\), not \(2, 3\)"),
        (1, (), (2,), r"1 keys of dim 1 take values of shape \(\) or \(1, 1\), not \(2,\)"),
        (4, (0,), (1, 4), r"0 keys of dim 4 take values of shape \(0, 4\), not \(1, 4\)"),
    ],
)
def test_a_wrong_shape_names_the_numbers(dim: int, shape, values, words: str) -> None:
    with pytest.raises(InputError, match="table 'w': .*" + words):
        as_rows(np.ones(values), shape, int(np.prod(shape)), TableSpec("w", dim=dim))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nan_is_refused_where_the_table_says_so(bad: float, dtype: str) -> None:
    values = np.ones((5, 3), dtype)
    values[3, 1] = bad
    as_rows(values, (5,), 5, TableSpec("w", dim=3, dtype=dtype))
    for given_values in (values, readonly(values), np.asfortranarray(values), values.astype(np.float64)):
        with pytest.raises(
            NotFiniteError, match="table 'w' refuses NaN and infinity; row 3 of the values is"
        ) as caught:
            as_rows(given_values, (5,), 5, TableSpec("w", dim=3, dtype=dtype, finite=True))
        assert str(bad) in str(caught.value)
    with pytest.raises(NotFiniteError):
        as_rows(bad, (5,), 5, TableSpec("w", dim=3, dtype=dtype, finite=True))
    as_rows(np.ones((5, 3)), (5,), 5, TableSpec("w", dim=3, dtype=dtype, finite=True))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_what_becomes_infinite_on_the_way_is_refused_too() -> None:
    with pytest.raises(NotFiniteError, match="row 1 of the values"):
        as_rows([1.0, 1e300], (2,), 2, TableSpec("w", finite=True))


# ---- out ------------------------------------------------------------------------------------------------------------


def test_out() -> None:
    spec = TableSpec("w", dim=3)
    good = np.empty((4, 3), np.float32)
    check_out(good, (4, 3), spec)
    for out, words in [
        (np.empty((4, 3)), r"out must be float32\(4, 3\), not float64\(4, 3\)"),
        (np.empty((3, 4), np.float32), r"not float32\(3, 4\)"),
        (np.empty((4, 6), np.float32)[:, ::2], r"contiguous, aligned and writeable, not float32\(4, 3\)"),
        (np.empty((3, 4), np.float32).T, "contiguous, aligned and writeable"),
        (readonly(good), "contiguous, aligned and writeable"),
        (unaligned(good), "contiguous, aligned and writeable"),
    ]:
        with pytest.raises(InputError, match="table 'w': out must be .*" + words.removeprefix("out must be ")):
            check_out(out, (4, 3), spec)
    with pytest.raises(InputTypeError, match="table 'w': out is a numpy array, not list"):
        check_out([[0.0]], (1, 1), spec)


# ---- sparse ---------------------------------------------------------------------------------------------------------

vectors = hnp.arrays(np.float32, st.integers(1, 30), elements=st.sampled_from([0, 0, 0, 1.5, -2, 3]))
MATRICES = [sp.csr_array, sp.coo_array, sp.csc_array, sp.csr_matrix, sp.coo_matrix, sp.csc_matrix, sparse.COO]
MATRICES += [sparse.GCXS, sp.lil_array, sp.dok_array, functools.partial(sp.bsr_array, blocksize=(1, 1))]


def dense(pair, shape: tuple[int, ...]) -> np.ndarray:
    keys, values = pair
    assert keys.dtype == np.int64
    out = np.zeros(shape, values.dtype)
    np.add.at(out, keys, values)
    return out


@given(vector=vectors, make=st.sampled_from(MATRICES), upright=st.booleans())
def test_a_sparse_vector_is_its_stored_elements(vector: np.ndarray, make, upright: bool) -> None:
    spec = TableSpec("w")
    matrix = vector[:, None] if upright else vector[None]
    keys, values = split_sparse("w", spec, make(matrix))
    np.testing.assert_array_equal(dense((keys, values), vector.shape), vector)
    assert len(keys) == len(np.unique(keys)) == np.count_nonzero(vector)
    as_keys(keys, "w")
    as_rows(values, keys.shape, len(keys), spec)


@given(vector=vectors)
def test_vectors_with_one_axis(vector: np.ndarray) -> None:
    for made in (sparse.COO(vector), sparse.GCXS(vector), sp.coo_array(vector), sp.csr_array(vector)):
        split = split_sparse("w", TableSpec("w"), made)
        np.testing.assert_array_equal(dense(split, vector.shape), vector)


@given(matrix=hnp.arrays(np.float64, st.tuples(st.integers(1, 8), st.just(3)), elements=st.sampled_from([0, 0, 1, -2])))
def test_a_sparse_matrix_is_its_rows(matrix: np.ndarray) -> None:
    for make in MATRICES:
        keys, rows = split_sparse("w", TableSpec("w", dim=3), make(matrix))
        np.testing.assert_array_equal(dense((keys, rows), matrix.shape), matrix)
        assert keys.tolist() == np.flatnonzero(matrix.any(axis=1)).tolist()
        assert rows.shape == (len(keys), 3)


def test_elements_stored_twice_add_up_and_zeros_stay() -> None:
    twice = sp.coo_array(([1.0, 2.0, 4.0], ([5, 5, 0], [0, 0, 0])), shape=(9, 1))
    keys, _ = split_sparse("w", TableSpec("w"), twice)
    assert dict(zip(*np.unique(keys, return_counts=True), strict=True)) == {0: 1, 5: 2}
    matrix = sp.coo_array(([1.0, 2.0, 4.0, 0.0], ([5, 5, 0, 7], [2, 2, 0, 1])), shape=(9, 3))
    keys, rows = split_sparse("w", TableSpec("w", dim=3), matrix)
    assert keys.tolist() == [0, 5, 7]
    assert rows.tolist() == [[4, 0, 0], [0, 0, 3], [0, 0, 0]]


def test_the_zeros_of_a_block_are_stored() -> None:
    """scipy chooses larger blocks where most of their elements are not zero."""
    keys, rows = split_sparse("w", TableSpec("w", dim=3), sp.bsr_array(np.eye(6)[:4, :3], blocksize=(2, 3)))
    assert keys.tolist() == [0, 1, 2, 3]
    assert rows.tolist() == np.eye(6)[:4, :3].tolist()


def test_what_is_not_sparse_passes_by() -> None:
    for keys in ([1, 2], np.eye(3), pd.Series([1]), None, slice(3), 7, da.ones(3)):
        assert split_sparse("w", TableSpec("w"), keys) is None


@pytest.mark.parametrize(
    ("dim", "shape"), [(1, (4, 5)), (3, (4, 5)), (3, (5, 1)), (1, (2, 1, 3)), (3, (2, 2, 3))], ids=str
)
def test_a_sparse_object_of_a_wrong_shape_is_named(dim: int, shape: tuple[int, ...]) -> None:
    words = rf"table 'w' of dim {dim}: a sparse object of shape \({', '.join(map(str, shape))}\) is n"
    with pytest.raises(InputError, match=words):
        split_sparse("w", TableSpec("w", dim=dim), sparse.COO(np.ones(shape)))


# ---- tensors of torch -----------------------------------------------------------------------------------------------


class StandIn:
    """What is used of a tensor of torch, with the errors that torch gives."""

    def __init__(self, values, layout="torch.strided", indices=None, shape=None, grad=False, device="cpu", dtype=None):
        self._values, self._indices, self.layout = np.asarray(values), indices, layout
        self.shape = self._values.shape if shape is None else shape
        self.requires_grad, self.device = grad, SimpleNamespace(type=device)
        self.is_sparse = layout == "torch.sparse_coo"
        self.dtype = f"torch.{dtype or self._values.dtype}"

    def __array__(self, dtype=None, copy=None):
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self.layout != "torch.strided" or self.device.type != "cpu":
            raise TypeError(f"can't convert {self.layout} layout tensor to numpy. Use Tensor.to_dense() first.")
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self._values

    def coalesce(self):
        return self

    def indices(self):
        return StandIn(self._indices)

    def values(self):
        return StandIn(self._values)

    def to_dense(self):
        dense = np.zeros(self.shape, self._values.dtype)
        dense[tuple(np.asarray(self._indices))] = self._values
        return StandIn(dense)


def tensors_of(package):
    """(dense, coo, csr) makers; of a stand-in, or of torch itself."""
    if package == "torch":
        torch = pytest.importorskip("torch")

        def coo(indices, values, shape, **how):
            return torch.sparse_coo_tensor(torch.tensor(indices), torch.tensor(values), shape, **how)

        def dense(values, dtype=None, **how):
            return torch.tensor(values, dtype=getattr(torch, dtype or "float32"), **how)

        return dense, coo, lambda: torch.eye(3).to_sparse_csr()

    def coo(indices, values, shape, requires_grad=False):
        return StandIn(np.array(values), "torch.sparse_coo", np.array(indices), shape, requires_grad)

    def dense(values, dtype="float32", requires_grad=False):
        known = "float32" if dtype == "bfloat16" else dtype
        return StandIn(np.array(values, known), dtype=dtype, grad=requires_grad)

    return dense, coo, lambda: StandIn(np.eye(3), "torch.sparse_csr")


@pytest.mark.parametrize("package", ["stand-in", "torch"])
def test_tensors(package):
    dense, coo, _ = tensors_of(package)
    wide, narrow = TableSpec("w", dim=2), TableSpec("n")
    check_keys(dense([[3, 1]], "int64"), np.array([[3, 1]]))
    np.testing.assert_array_equal(as_rows(dense([[1.0, 2.0]]), (1,), 1, wide), [[1, 2]])
    keys, rows = split_sparse("w", wide, coo([[7, 9]], [[1.0, 2.0], [3.0, 4.0]], (10, 2)))  # of a sparse embedding
    assert (keys.tolist(), rows.tolist()) == ([7, 9], [[1, 2], [3, 4]])
    keys, rows = split_sparse("w", wide, coo([[1, 5], [0, 1]], [1.0, 2.0], (10, 2)))
    assert (keys.tolist(), rows.tolist()) == ([1, 5], [[1, 0], [0, 2]])
    for indices, values, shape in ([[4, 6]], [1.0, 2.0], (8,)), ([[4, 6]], [[1.0], [2.0]], (8, 1)):
        keys, rows = split_sparse("n", narrow, coo(indices, values, shape))
        assert (keys.tolist(), rows.tolist()) == ([4, 6], [1, 2])
    values = as_rows(coo([[0, 1], [1, 0]], [5.0, 6.0], (2, 2)), (2,), 2, wide)
    np.testing.assert_array_equal(values, [[0, 5], [6, 0]])
    with pytest.raises(InputError, match=r"of dim 2: a sparse object of shape \(8, 3\) is no vector"):
        split_sparse("w", wide, coo([[4]], [[1.0, 2.0, 3.0]], (8, 3)))


@pytest.mark.parametrize("package", ["stand-in", "torch"])
def test_tensors_that_numpy_cannot_read(package):
    """They gave torch's own errors, of numpy() and layouts, or that keys are integers."""
    dense, coo, csr = tensors_of(package)
    spec = TableSpec("w", dim=3)
    grad = r"table 'w': the {} are a tensor that requires gradients: push its gradient, tensor\.grad, or .*detach\(\)"
    with pytest.raises(InputTypeError, match=grad.format("values")):
        as_rows(dense([[1.0, 2.0, 3.0]], requires_grad=True), (1,), 1, spec)
    with pytest.raises(InputTypeError, match=grad.format("keys")):
        as_keys(dense([1.0], requires_grad=True), "w")
    with pytest.raises(InputTypeError, match=grad.format("keys")):
        split_sparse("w", spec, coo([[4]], [[1.0, 2.0, 3.0]], (8, 3), requires_grad=True))
    for call in (lambda: as_rows(csr(), (3,), 3, spec), lambda: as_keys(csr(), "w")):
        with pytest.raises(InputTypeError, match=r"of layout torch\.sparse_csr: pass tensor\.to_sparse_coo\(\) or"):
            call()
    with pytest.raises(InputTypeError, match=r"of torch\.bfloat16, which numpy does not have: pass tensor\.float\(\)"):
        as_rows(dense([[1.0, 2.0, 3.0]], dtype="bfloat16"), (1,), 1, spec)


def test_a_tensor_on_another_device():
    for call in (lambda t: as_keys(t, "w"), lambda t: as_rows(t, (1,), 1, TableSpec("w"))):
        with pytest.raises(InputTypeError, match=r"are a tensor on device .*cuda.*: pass tensor\.cpu\(\)"):
            call(StandIn([1], device="cuda"))
