"""What callers may hand in as keys and values, turned into what travels: int64 keys, rows in the table's dtype.

Objects of numpy, pandas, `scipy.sparse`, `sparse` and torch are recognised by their own attributes; none of those
packages is imported for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dps.engine.core.shards.rows import all_finite
from dps.engine.state.dtypes import NARROW, REALS, is_half, narrowed, range_of
from dps.engine.state.ops import TableSpec
from dps.engine.state.scan import LEAST_KEY, MOST_KEY
from dps.errors import InputError, InputTypeError, KeyRangeError, NotFiniteError

__all__ = [
    "KeyRange",
    "as_key_range",
    "as_keys",
    "as_rows",
    "check_out",
    "check_range",
    "flat_keys",
    "flat_rows",
    "of_named_columns",
    "row_shape",
    "split_sparse",
]


def as_keys(keys: object, table: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """(int64 keys, flat and contiguous; the shape they came in)."""
    if isinstance(keys, np.ndarray) and keys.dtype == np.int64:
        array = keys
    else:
        array = _integers(keys, table)
    shape = array.shape
    return _dense(array).reshape(-1), shape


def _dense(array: np.ndarray) -> np.ndarray:
    """The same numbers, contiguous and aligned, because compiled loops need that and Dask may send any layout."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else array.copy()


def _integers(keys: object, table: str) -> np.ndarray:
    if hasattr(keys, "__dask_graph__"):
        raise InputTypeError(f"table {table!r}: keys are a Dask collection; compute it, or pull inside a task")
    _check_tensor(keys, f"table {table!r}: the keys")
    if hasattr(keys, "to_numpy"):  # pandas Series, Index
        keys = keys.to_numpy()
    array = np.asarray(keys)
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind == "f" and not hasattr(keys, "dtype"):
        array = _mixed_integers(keys, array)
    if array.dtype.kind in "iu":  # uint64 keeps its 64 bits: every one of the 2**64 keys is a key
        return array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64)
    if array.dtype.kind in "OUST":
        raise InputTypeError(
            f"table {table!r}: keys are integers, not {array.dtype}; texts become keys by dps.hash_strings"
        )
    if array.dtype.kind == "b":
        raise InputTypeError(f"table {table!r}: keys are integers, not a mask; np.flatnonzero makes row numbers of it")
    raise InputTypeError(f"table {table!r}: keys are integers, not {array.dtype}")


def _check_tensor(value: object, what: str) -> None:
    """Refuse tensors of torch that numpy cannot read, and say what makes them readable.

    A tensor that requires gradients is not detached here: where a parameter is pushed instead of its gradient, the
    table would be trained with it.
    """
    if getattr(value, "requires_grad", False):
        raise InputTypeError(
            f"{what} are a tensor that requires gradients: push its gradient, tensor.grad, or pass tensor.detach()"
        )
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise InputTypeError(f"{what} are a tensor on device {device}: pass tensor.cpu()")
    layout, dtype = (str(getattr(value, name, "")) for name in ("layout", "dtype"))
    if layout.startswith("torch.sparse") and layout != "torch.sparse_coo":
        raise InputTypeError(
            f"{what} are a tensor of layout {layout}: pass tensor.to_sparse_coo() or tensor.to_dense()"
        )
    if dtype == "torch.bfloat16":
        raise InputTypeError(f"{what} are a tensor of {dtype}, which numpy does not have: pass tensor.float()")


def _mixed_integers(keys: object, array: np.ndarray) -> np.ndarray:
    """A list whose integers lie on both sides of 2**63 as uint64: numpy makes floats of it, which are other keys."""
    objects = np.asarray(keys, dtype=object)
    if not all(isinstance(key, (int, np.integer)) for key in objects.flat):
        return array
    return np.array([int(key) % 2**64 for key in objects.flat], np.uint64).reshape(objects.shape)


class KeyRange(NamedTuple):
    """Keys of a keyed table: from `first` to `last`, both included; none where `last` is less."""

    first: int
    last: int


def as_key_range(keys: slice, table: str) -> KeyRange:
    """The keys that a slice names, of which the end is left out, as of any slice; a missing end is none.

    >>> as_key_range(slice(-5, 7), "w"), as_key_range(slice(None), "w").first == -(2**63)
    (KeyRange(first=-5, last=6), True)
    """
    if keys.step is not None and keys.step != 1:
        raise InputError(f"table {table!r}: a range of keys has step 1, not {keys.step!r}; name the keys")
    ends = []
    for end, default in ((keys.start, LEAST_KEY), (keys.stop, MOST_KEY + 1)):
        if end is not None and not isinstance(end, (int, np.integer)):
            raise InputTypeError(f"table {table!r}: a range of keys has integers as its ends, not {end!r}")
        ends.append(default if end is None else int(end))
        if not LEAST_KEY <= ends[-1] <= MOST_KEY + 1:
            raise InputError(f"table {table!r}: {end} is no end of a range of keys, which are int64; leave it out")
    return KeyRange(ends[0], ends[1] - 1) if ends[0] <= MOST_KEY else KeyRange(0, -1)


def row_shape(shape: tuple[int, ...], spec: TableSpec | RowForm) -> tuple[int, ...]:
    """Shape of the values of keys of that shape: a table of dim 1 has no axis for it."""
    return shape if spec.dim == 1 else (*shape, spec.dim)


class RowForm(NamedTuple):
    """What values have to be: those of the rows of a table, or of one of its columns."""

    where: str  # for messages
    dim: int
    dtype: str
    finite: bool


def as_rows(values: Any, shape: tuple[int, ...], count: int, spec: TableSpec) -> np.ndarray:
    """`values` as a contiguous array [count, dim] in the table's dtype; of a dict, the columns side by side.

    Raises
    ------
    InputError
        The shape does not fit the keys, or the dtype would lose numbers.
    NotFiniteError
        NaN or infinity, and the table refuses them.
    UnknownColumnError
        The dict has a column that the table does not have.
    """
    if isinstance(values, Mapping):
        return of_named_columns(values, shape, count, spec)
    return _as_rows(values, shape, count, RowForm(f"table {spec.name!r}", spec.dim, spec.dtype, spec.finite))


def of_named_columns(values: Mapping[str, object], shape: tuple[int, ...], count: int, spec: TableSpec) -> np.ndarray:
    """The values of all columns of a table, given by name, side by side: [count, dim]."""
    columns = spec.columns
    if not columns:
        raise InputTypeError(f"table {spec.name!r} was made without columns=: its values are an array, not a dict")
    slices = {name: columns[name] for name in values}
    missing = [name for name in columns if name not in values]
    if missing:
        raise InputError(
            f"table {spec.name!r}: no values for column {', '.join(missing)}: a push has those of all columns of its "
            "rows; pass 0 for a column without a gradient"
        )
    rows = np.empty((count, spec.dim), spec.dtype)
    for name, each in slices.items():
        where = f"table {spec.name!r}, column {name!r}"
        form = RowForm(where, each.stop - each.start, spec.dtype, spec.finite)
        rows[:, each] = _as_rows(values[name], shape, count, form)
    return rows


def _as_rows(values: Any, shape: tuple[int, ...], count: int, form: RowForm) -> np.ndarray:
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "todense"):
        values = np.asarray(values.todense())
    elif not isinstance(values, np.ndarray):
        _check_tensor(values, f"{form.where}: the values")
        if getattr(values, "is_sparse", False):
            values = values.to_dense()
    array = np.asarray(values)
    if count == 0 and array.size == 0:
        return np.empty((0, form.dim), form.dtype)
    if form.dtype in NARROW and array.dtype != form.dtype and array.dtype.kind in "biu":
        array = _narrowed(array, form)
    if array.dtype != form.dtype and is_half(form.dtype) and array.dtype.kind in "biuf":
        array = _halved(array, form)
    if array.dtype != form.dtype:
        loses = array.dtype == np.uint64 and form.dtype == "int64"  # numpy would wrap the large ones around
        if loses or array.dtype.kind not in "biuf" or not np.can_cast(array.dtype, form.dtype, "same_kind"):
            raise InputError(
                f"{form.where} holds {form.dtype}; values of {array.dtype} would lose numbers: convert them"
            )
        array = array.astype(form.dtype)
    if array.ndim == 0:
        array = np.broadcast_to(array, (count, form.dim))
    elif array.shape not in (row_shape(shape, form), (count, form.dim)):
        wanted = " or ".join(str(s) for s in dict.fromkeys((row_shape(shape, form), (count, form.dim))))
        raise InputError(
            f"{form.where}: {count} keys of dim {form.dim} take values of shape {wanted}, not {array.shape}"
        )
    rows = _dense(array).reshape(count, form.dim)
    if form.finite and form.dtype in REALS and not all_finite(rows):
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise NotFiniteError(f"{form.where} refuses NaN and infinity; row {bad} of the values is {rows[bad][:8]}")
    return rows


def _narrowed(array: np.ndarray, form: RowForm) -> np.ndarray:
    """Whole numbers in a narrower dtype, as long as it holds all of them: numpy would wrap the others around."""
    least, most = range_of(form.dtype)
    beyond = array[(array < least) | (array > most)] if array.dtype != bool else array[:0]
    if beyond.size:
        raise InputError(
            f"{form.where} holds {form.dtype}, from {least} to {most}, and {beyond.size} of the values do not fit, "
            f"such as {beyond.flat[0]}: clip them, or make the table with a wider dtype"
        )
    return array.astype(form.dtype)


def _halved(array: np.ndarray, form: RowForm) -> np.ndarray:
    """Numbers rounded to halves, as long as none becomes infinite by it. numpy would not say that some have."""
    halves = narrowed(array, form.dtype)
    if not all_finite(halves):
        beyond = array[np.isinf(halves) & np.isfinite(array)]
        if beyond.size:
            raise InputError(
                f"{form.where} holds {form.dtype}, and {beyond.size} of the values lie beyond its largest number, such "
                f"as {beyond.flat[0]}: clip them, scale them, or make the table with a wider dtype"
            )
    return halves


def check_out(out: object, shape: tuple[int, ...], spec: TableSpec) -> np.ndarray:
    """`out`; raises InputError unless it can take the answer as it is."""
    if not isinstance(out, np.ndarray):
        raise InputTypeError(f"table {spec.name!r}: out is a numpy array, not {type(out).__name__}")
    if out.shape != shape or out.dtype != spec.dtype or not out.flags.carray:
        state = "" if out.flags.carray else ", contiguous, aligned and writeable"
        raise InputError(f"table {spec.name!r}: out must be {spec.dtype}{shape}{state}, not {out.dtype}{out.shape}")
    return out


def split_sparse(table: str, spec: TableSpec, keys: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """(keys, values) of a sparse vector, or of a sparse matrix [rows, dim]; None for anything else.

    A vector (shape (n,), (n, 1) or (1, n)) is taken by its stored elements, a matrix by its rows that have any. The
    gradient of a sparse embedding of torch, a COO tensor whose elements are whole rows, is taken by those rows.
    """
    if getattr(keys, "is_sparse", False):
        coords, data = _of_tensor(keys, table)
        if len(coords) == 1 and data.ndim == 2 and data.shape[1] == spec.dim:
            return coords[0], data[:, 0] if spec.dim == 1 else data
    elif hasattr(keys, "nnz") and hasattr(keys, "shape"):
        matrix = keys.tocoo() if hasattr(keys, "tocoo") else keys
        coords = matrix.coords if hasattr(matrix, "coords") else (matrix.row, matrix.col)
        data = np.asarray(matrix.data)
    else:
        return None
    shape = tuple(keys.shape)
    if len(shape) == 1:
        return np.asarray(coords[0], np.int64), data
    if len(shape) == len(coords) == 2 and spec.dim == 1 and 1 in shape:
        return np.asarray(coords[int(shape[0] == 1 and shape[1] != 1)], np.int64), data
    if len(shape) == len(coords) == 2 and shape[1] == spec.dim:
        rows, place = np.unique(np.asarray(coords[0], np.int64), return_inverse=True)
        values = np.zeros((len(rows), spec.dim), data.dtype)
        np.add.at(values, (place, np.asarray(coords[1])), data)
        return rows, values
    raise InputError(
        f"table {table!r} of dim {spec.dim}: a sparse object of shape {shape} is no vector, and not [rows, {spec.dim}]"
    )


def _of_tensor(tensor: Any, table: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Coordinates and elements of a COO tensor of torch; what it has at one place several times is summed."""
    _check_tensor(tensor, f"table {table!r}: the keys")
    tensor = tensor.coalesce()
    return tuple(np.asarray(tensor.indices())), np.asarray(tensor.values())


def flat_keys(spec: TableSpec, keys: object) -> tuple[np.ndarray, tuple[int, ...]]:
    """Keys, flat, and the shape in which they came; a slice, or None, means rows of a dense table."""
    if keys is None or isinstance(keys, slice):
        if spec.rows is None:
            raise InputError(f"table {spec.name!r} is keyed: name the keys")
        keys = np.arange(*(slice(None) if keys is None else keys).indices(spec.rows))
    sparse = split_sparse(spec.name, spec, keys)
    return as_keys(keys if sparse is None else sparse[0], spec.name)


def flat_rows(spec: TableSpec, keys: object, values: object) -> tuple[np.ndarray, np.ndarray]:
    """Keys, flat, and the values for them, [m, dim]; a sparse vector, or matrix, may stand for both."""
    sparse = split_sparse(spec.name, spec, keys)
    if sparse is not None:
        keys, values = sparse[0], sparse[1] if values is None else values
    if values is None:
        raise InputError(f"table {spec.name!r}: a push takes keys and values; values are missing")
    flat, shape = flat_keys(spec, keys)
    check_range(spec, flat)
    return flat, as_rows(values, shape, len(flat), spec)


def check_range(spec: TableSpec, keys: np.ndarray) -> None:
    if spec.rows is not None and len(keys) and not 0 <= keys.min() <= keys.max() < spec.rows:
        raise KeyRangeError(f"table {spec.name!r} has rows 0 to {spec.rows - 1}, not {keys.min()} to {keys.max()}")
