"""The steps of the optimizers, in place: ``step(rows, index, start, updates, numbers)``.

rows : [capacity, dim + slots]; values in the first dim columns, the optimizer's state in the rest
index : int64[m], the row of each update; of length 0: rows start, start + 1, ... start + m - 1
updates : [m, dim], in the dtype of rows
numbers : float64, the optimizer's parameters in the order of its fields, the schedule evaluated

A row that does not exist is a ValueError, and nothing has changed then. The loops stand in steps_of.h.
"""

from libc.stdint cimport int64_t

cimport numpy as cnp

from dps.core.arrays cimport memory, refuse
from dps.core.bounds cimport rows_listed
from dps.core.steps cimport (
    dps_adagrad_double,
    dps_adagrad_float,
    dps_adam_double,
    dps_adam_float,
    dps_add_double,
    dps_add_float,
    dps_add_int64_t,
    dps_assign_double,
    dps_assign_float,
    dps_assign_int64_t,
    dps_ftrl_double,
    dps_ftrl_float,
    dps_momentum_double,
    dps_momentum_float,
    dps_push,
    dps_rmsprop_double,
    dps_rmsprop_float,
    dps_sgd_double,
    dps_sgd_float,
    step_t,
)

cnp.import_array()


def add(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """w <- w + g."""
    _step(rows, index, start, updates, numbers, 0, 1, 0, dps_add_float, dps_add_double, dps_add_int64_t)


def assign(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """w <- g."""
    _step(rows, index, start, updates, numbers, 0, 1, 0, dps_assign_float, dps_assign_double, dps_assign_int64_t)


def sgd(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.SGD`."""
    _step(rows, index, start, updates, numbers, 3, 1, 0, dps_sgd_float, dps_sgd_double, NULL)


def momentum(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.Momentum`."""
    _step(rows, index, start, updates, numbers, 3, 2, 0, dps_momentum_float, dps_momentum_double, NULL)


def adagrad(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.Adagrad`."""
    _step(rows, index, start, updates, numbers, 5, 2, 0, dps_adagrad_float, dps_adagrad_double, NULL)


def rmsprop(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.RMSprop`."""
    _step(rows, index, start, updates, numbers, 3, 2, 0, dps_rmsprop_float, dps_rmsprop_double, NULL)


def adam(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.Adam`, :class:`dps.AdamW`."""
    _step(rows, index, start, updates, numbers, 4, 3, 1, dps_adam_float, dps_adam_double, NULL)


def ftrl(
    cnp.ndarray rows not None,
    cnp.ndarray index not None,
    int64_t start,
    cnp.ndarray updates not None,
    cnp.ndarray numbers not None,
) -> None:
    """:class:`dps.FTRL`."""
    _step(rows, index, start, updates, numbers, 4, 3, 0, dps_ftrl_float, dps_ftrl_double, NULL)


cdef int _step(
    cnp.ndarray rows,
    cnp.ndarray index,
    int64_t start,
    cnp.ndarray updates,
    cnp.ndarray numbers,
    int64_t parameters,
    int64_t columns,
    int64_t more_columns,
    step_t in_float,
    step_t in_double,
    step_t in_int64,
) except -1:
    """Check the arrays, then run the step of their dtype. A row has columns * dim + more_columns columns."""
    cdef dps_push push
    cdef int kind = cnp.PyArray_TYPE(rows)
    cdef step_t step = NULL
    if kind == cnp.NPY_FLOAT32:
        step = in_float
    elif kind == cnp.NPY_FLOAT64:
        step = in_double
    elif kind == cnp.NPY_INT64:
        step = in_int64
    if step == NULL:
        refuse(rows, cnp.NPY_FLOAT32)
    if rows.ndim != 2 or updates.ndim != 2 or rows.shape[1] < columns * updates.shape[1] + more_columns:
        raise ValueError("rows and updates must be two-dimensional, a row wide enough for its values and state")
    if cnp.PyArray_SIZE(numbers) < parameters:
        raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers, and the optimizer has {parameters}")
    push.rows = memory(rows, kind, True)
    push.width = rows.shape[1]
    push.updates = memory(updates, kind, False)
    push.count = updates.shape[0]
    push.dim = updates.shape[1]
    push.index = rows_listed(index, start, push.count, rows.shape[0])
    push.start = start
    push.numbers = <const double *> memory(numbers, cnp.NPY_FLOAT64, False)
    push.parameters = cnp.PyArray_SIZE(numbers)
    if push.index == NULL and push.width == push.dim:  # without state, neighbouring rows are one long row
        push.rows = <char *> push.rows + start * push.width * cnp.PyArray_ITEMSIZE(rows)
        push.start = 0
        push.dim *= push.count
        push.count = push.count > 0
    with nogil:
        step(&push)
    return 0
