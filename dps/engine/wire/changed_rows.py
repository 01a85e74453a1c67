"""The answer to a pull with the flag CHANGED: a bit for each row that was asked for, then the rows that differ. Pure.

The bits come in the order of the keys, eight in a byte, the first one in the lowest bit; zeros fill the last word.
Behind them come the rows whose bit is set, in the order of the keys; zeros fill the last word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dps.engine.wire.frames import padded
from dps.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Buffer

__all__ = ["changed_rows_in", "changed_rows_of"]


def changed_rows_of(changed: np.ndarray, rows: np.ndarray) -> bytes:
    """The body of an answer: `changed` has a bool for each key, `rows` [k, dim] are those of the k that are true.

    >>> len(changed_rows_of(np.array([False, True, True]), np.float32([[1], [2]])))
    16
    """
    bits, values = np.packbits(changed, bitorder="little").tobytes(), rows.tobytes()
    return bits.ljust(padded(len(bits)), b"\0") + values.ljust(padded(len(values)), b"\0")


def changed_rows_in(body: Buffer, count: int, dim: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What :func:`changed_rows_of` has put into an answer for `count` keys: (changed, rows). The rows are a view.

    Raises ProtocolError if the body is none of so many keys, or has more or fewer rows than its bits say.

    >>> body = changed_rows_of(np.array([False, True, True]), np.float32([[1], [2]]))
    >>> changed_rows_in(body, 3, 1, np.dtype("float32"))
    (array([False,  True,  True]), array([[1.],
           [2.]], dtype=float32))
    """
    size = memoryview(body).nbytes
    begin = padded((count + 7) // 8)
    if size < begin:
        raise ProtocolError(f"an answer of {size} bytes does not say which of {count} rows have changed")
    bits = np.frombuffer(body, np.uint8, (count + 7) // 8)
    changed = np.unpackbits(bits, count=count, bitorder="little").view(np.bool_)
    rows = int(np.count_nonzero(changed))
    if size != begin + padded(rows * dim * dtype.itemsize):
        raise ProtocolError(f"an answer has {size - begin} bytes for {rows} rows that have changed, of {count}")
    return changed, np.frombuffer(body, dtype, rows * dim, begin).reshape(rows, dim)
