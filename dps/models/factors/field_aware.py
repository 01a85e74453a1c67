"""Fields of features, for field-aware factorization machines: which there are, and the batch as the loops take it.

A field is a group of features of which a row usually has one: all sites, all advertisements. Where features lie in
columns of their own, an array has the field of each column. Where a feature may occur in several fields, as in libffm's
files and in hashed frames, a matrix has a column for each pair: number ``feature * count + field``.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import scipy.sparse

import dps
from dps.errors import InputError, InputTypeError
from dps.models.inputs.encoding import Layout
from dps.models.types import Block

__all__ = ["FieldBatch", "Fields", "check_fields", "fields_for", "split"]

MOST_FIELDS = 10_000  # more are features that were taken for fields: each would have as many vectors


@dataclasses.dataclass(frozen=True, eq=False)
class Fields:
    count: int
    of: np.ndarray | None = None  # the field of each column, int32; None: columns are pairs of feature and field


class FieldBatch(NamedTuple):
    """A batch in CSR, with the field of each of its non-zeros."""

    indptr: np.ndarray
    indices: np.ndarray  # numbers of rows of parameters
    data: np.ndarray
    fields: np.ndarray
    n_fields: int


def split(X: Block, fields: Fields, remember: bool = True) -> tuple[np.ndarray, FieldBatch]:
    """The distinct features of a batch, and the batch re-indexed to them.

    Examples
    --------
    >>> X = scipy.sparse.csr_matrix(([1.0, 2.0], [7 * 3 + 0, 9 * 3 + 2], [0, 2]), shape=(1, 30))
    >>> features, batch = split(X, Fields(3))
    >>> features[batch.indices], batch.fields
    (array([7, 9]), array([0, 2], dtype=int32))
    """
    keys, local = dps.localize(X if scipy.sparse.issparse(X) else scipy.sparse.csr_matrix(X), remember)
    if fields.of is not None:
        own, codes = fields.of[keys], local.indices
    else:
        own = (keys % fields.count).astype(np.int32)
        keys, places = dps.localize(keys // fields.count, remember=False)
        codes = places[local.indices]
    return keys, FieldBatch(local.indptr, codes, local.data, own[local.indices], fields.count)


def check_fields(fields: object) -> None:
    """Refuse a setting `fields` that is impossible for any data."""
    if fields is None or (isinstance(fields, str) and fields == "columns"):
        return
    if isinstance(fields, (bool, str)):
        raise InputError(f'fields is None, "columns", a number of fields, or the field of each column; not {fields!r}')
    if np.ndim(np.asarray(fields)) == 0:
        if not isinstance(fields, (int, np.integer)) or not 1 <= fields <= MOST_FIELDS:
            raise InputError(f"fields is a number of fields from 1 to {MOST_FIELDS:,}; not {fields!r}")
        return
    listed = np.asarray(fields)
    if listed.ndim != 1 or listed.dtype.kind not in "iu" or not len(listed):
        raise InputTypeError(
            f"fields is a whole number for each column of X, its field; not an array of shape {listed.shape} with "
            f"dtype {listed.dtype}"
        )
    if listed.min() < 0 or listed.max() >= MOST_FIELDS:
        raise InputError(f"fields has {listed.min()} to {listed.max()}: fields are numbered 0 to {MOST_FIELDS - 1:,}")


def fields_for(fields: object, layout: Layout) -> Fields | None:
    """The fields of data with this layout; None if the setting asks for none."""
    if fields is None:
        return None
    if isinstance(fields, str):
        if not layout.fields:
            raise InputError(
                'fields="columns" is for DataFrames, whose columns are the fields; for a matrix, pass the field of each'
                " column"
            )
        return Fields(layout.fields)
    if layout.columns is not None:
        raise InputError('X is a DataFrame, whose columns are the fields: pass fields="columns"')
    if isinstance(fields, (int, np.integer)):
        if layout.features % fields:
            raise InputError(
                f"X has {layout.features} columns, no multiple of {fields} fields: its columns are pairs of feature "
                f"and field, number feature * {fields} + field, as read_libffm makes them"
            )
        return Fields(int(fields))
    listed = np.asarray(fields, np.int32)
    if len(listed) != layout.features:
        raise InputError(f"fields has {len(listed)} numbers, and X has {layout.features} columns")
    return Fields(int(listed.max()) + 1, listed)
