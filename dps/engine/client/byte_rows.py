"""Rows of bytes of a fixed width: rows of uint8 on the servers, and at a client arrays of numpy's dtype "S<width>".

Servers, copies and checkpoints know the rows of uint8 only, so what is written here is all that bytes need. numpy takes
zero bytes at the end of a value for padding, and so does a table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dps.engine.state.ops import TableSpec
from dps.errors import InputError, InputTypeError

__all__ = ["bytes_in", "bytes_of", "room_of"]


def bytes_of(rows: np.ndarray, spec: TableSpec) -> np.ndarray:
    """Pulled rows as bytes, in the same memory, if the table is one of bytes; those of other tables as they are.

    >>> bytes_of(np.array([[65, 100, 97, 0]], np.uint8), TableSpec("names", dtype="S4"))
    array([b'Ada'], dtype='|S4')
    """
    width = spec.bytes_width
    if not width:
        return rows
    return rows.view(f"S{width}").reshape(rows.shape if width == 1 else rows.shape[:-1])


def room_of(out: object, spec: TableSpec) -> object:
    """The memory of `out` as the rows that are pulled into it."""
    if out is None or not spec.bytes_width:
        return out
    if not isinstance(out, np.ndarray) or out.dtype != f"S{spec.bytes_width}" or not out.flags.c_contiguous:
        what = f"{out.dtype}{out.shape}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError(f"table {spec.name!r}: out must be a contiguous array of S{spec.bytes_width}, not {what}")
    return _rows(out, spec.bytes_width)


def bytes_in(values: Any, spec: TableSpec) -> np.ndarray:
    """Values to assign as rows of uint8.

    Raises
    ------
    InputError
        A value is longer than the rows.
    InputTypeError
        Text, or anything else that is no bytes.
    """
    where, width = f"table {spec.name!r}", spec.bytes_width
    given = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    if given.dtype.kind == "O" and all(isinstance(each, (bytes, bytearray)) for each in given.flat):
        given = given.astype("S")
    if given.dtype.kind != "S":
        hint = ": text.encode() makes bytes of text" if given.dtype.kind in "OUT" else ""
        raise InputTypeError(f"{where} holds bytes of width {width}, and the values are of {given.dtype}{hint}")
    lengths = np.char.str_len(given)
    if lengths.max(initial=0) > width:
        raise InputError(
            f"{where} holds bytes of width {width}, and {np.count_nonzero(lengths > width)} of the values are longer, "
            f"up to {lengths.max()}: cut them, or make the table with dtype='S{lengths.max()}'"
        )
    return _rows(np.ascontiguousarray(given.astype(f"S{width}")).reshape(given.shape), width)


def _rows(values: np.ndarray, width: int) -> np.ndarray:
    shape = values.shape if width == 1 else (*values.shape, width)
    return values.reshape(-1).view(np.uint8).reshape(shape)
