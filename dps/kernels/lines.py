"""Lines of libsvm's and libffm's text as sparse batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dps.errors import InputError
from dps.kernels.loops import lines as loops

__all__ = ["TextRows", "parse_rows"]


class TextRows(NamedTuple):
    """Rows of a text file: labels, and a batch in CSR."""

    labels: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    data: np.ndarray
    fields: np.ndarray | None  # field of each non-zero, of libffm's text


def parse_rows(
    text: bytes,
    n_features: int,
    n_fields: int | None = None,
    zero_based: bool = True,
    where: Callable[[int], str] = "line {}".format,
) -> TextRows:
    """Rows of libsvm's text, ``label feature:value ...``, or of libffm's, ``label field:feature:value ...``.

    Lines that are empty or begin with ``#`` are no rows, ``#`` ends a line, and ``qid:...`` is left out.

    Parameters
    ----------
    text
        Whole lines.
    n_features
        The number of features.
    n_fields
        The number of fields, from 0 on, of libffm's text; None for libsvm's.
    zero_based
        Whether features are numbered from 0, or from 1.
    where
        Makes of the number of a line, from 1 on, what an error calls it.

    Returns
    -------
    TextRows
        Labels in float64, `indptr` and `indices` in int64, `data` in float32, `fields` in int32.

    Raises
    ------
    InputError
        A line that is no row; a feature, a field or a number that cannot be.

    Examples
    --------
    >>> from dps.kernels import parse_rows
    >>> parse_rows(b"1 0:0.5 3:2\\n-1 1:1\\n", n_features=4)[:4]
    (array([ 1., -1.]), array([0, 2, 3]), array([0, 3, 1]), array([0.5, 2. , 1. ], dtype=float32))
    >>> parse_rows(b"1 0:7:1 2:9:0.5", n_features=10, n_fields=3).fields
    array([0, 2], dtype=int32)
    """
    first = 0 if zero_based else 1
    try:
        y, indptr, indices, fields, data = loops.parse(text, n_fields is not None, first, n_features, n_fields or 0)
    except InputError as error:
        reason, line = error.args
        raise InputError(f"{where(line)}: {reason}") from None
    return TextRows(y, indptr, indices, data, None if n_fields is None else fields)
