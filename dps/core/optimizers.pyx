"""The steps of the optimizers, in place: ``step(rows, index, start, updates, numbers)``.

rows : [capacity, dim + slots]; values in the first dim columns, the optimizer's state in the rest
index : int64[m], the row of each update; of length 0: rows start, start + 1, ... start + m - 1
updates : [m, dim], in the dtype of rows
numbers : float64, the optimizer's parameters in the order of its fields, the schedule evaluated

A row that does not exist is a ValueError, and nothing has changed then. The loops stand in steps_of.h.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t

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

cdef enum:
    FLOAT_BYTES = 4
    OTHER_BYTES = 8


@cython.final
cdef class Kernel:
    """The step of one optimizer: ``kernel(rows, index, start, updates, numbers)``, as the module says."""

    def __call__(
        self,
        cnp.ndarray rows not None,
        cnp.ndarray index not None,
        int64_t start,
        cnp.ndarray updates not None,
        cnp.ndarray numbers not None,
    ) -> None:
        cdef dps_push push
        cdef int dtype = cnp.PyArray_TYPE(rows)
        if not self.works_on(dtype):
            refuse(rows, cnp.NPY_FLOAT32)
        if rows.ndim != 2 or updates.ndim != 2 or rows.shape[1] < self.columns * updates.shape[1] + self.more_columns:
            raise ValueError("rows and updates must be two-dimensional, a row wide enough for its values and state")
        if cnp.PyArray_SIZE(numbers) < self.parameters:
            raise ValueError(f"{cnp.PyArray_SIZE(numbers)} numbers, and the optimizer has {self.parameters}")
        push.rows = memory(rows, dtype, True)
        push.width = rows.shape[1]
        push.updates = memory(updates, dtype, False)
        push.count = updates.shape[0]
        push.dim = updates.shape[1]
        push.index = rows_listed(index, start, push.count, rows.shape[0])
        push.start = start
        push.numbers = <const double *> memory(numbers, cnp.NPY_FLOAT64, False)
        push.parameters = cnp.PyArray_SIZE(numbers)
        with nogil:
            self.run(&push, dtype)

    cdef bint works_on(self, int dtype) noexcept nogil:
        """Whether rows of this dtype, numpy's number of it, can be stepped."""
        if dtype == cnp.NPY_FLOAT32 or dtype == cnp.NPY_FLOAT64:
            return True
        return dtype == cnp.NPY_INT64 and self._in_int64 != NULL

    cdef void run(self, dps_push *push, int dtype) noexcept nogil:
        """Step rows of that dtype, all of which exist. The caller has checked everything; `push` may change."""
        cdef int64_t itemsize = FLOAT_BYTES if dtype == cnp.NPY_FLOAT32 else OTHER_BYTES
        if push.count == 0:  # then `start` may be any number, to which no address belongs
            return
        if push.index == NULL and push.width == push.dim:  # without state, neighbouring rows are one long row
            push.rows = <char *> push.rows + push.start * push.width * itemsize
            push.start = 0
            push.dim *= push.count
            push.count = push.count > 0
        if dtype == cnp.NPY_FLOAT32:
            self._in_float(push)
        elif dtype == cnp.NPY_FLOAT64:
            self._in_double(push)
        else:
            self._in_int64(push)


cdef Kernel _kernel(
    str name,
    int64_t parameters,
    int64_t columns,
    int64_t more_columns,
    step_t in_float,
    step_t in_double,
    step_t in_int64,
):
    """A kernel with so many parameters. A row has columns * dim + more_columns columns."""
    cdef Kernel kernel = Kernel.__new__(Kernel)
    kernel.__name__ = name
    kernel.parameters, kernel.columns, kernel.more_columns = parameters, columns, more_columns
    kernel._in_float, kernel._in_double, kernel._in_int64 = in_float, in_double, in_int64
    return kernel


add = _kernel("add", 0, 1, 0, dps_add_float, dps_add_double, dps_add_int64_t)  # w <- w + g
assign = _kernel("assign", 0, 1, 0, dps_assign_float, dps_assign_double, dps_assign_int64_t)  # w <- g
sgd = _kernel("sgd", 3, 1, 0, dps_sgd_float, dps_sgd_double, NULL)  # SGD
momentum = _kernel("momentum", 3, 2, 0, dps_momentum_float, dps_momentum_double, NULL)  # Momentum
adagrad = _kernel("adagrad", 5, 2, 0, dps_adagrad_float, dps_adagrad_double, NULL)  # Adagrad
rmsprop = _kernel("rmsprop", 3, 2, 0, dps_rmsprop_float, dps_rmsprop_double, NULL)  # RMSprop
adam = _kernel("adam", 4, 3, 1, dps_adam_float, dps_adam_double, NULL)  # Adam, AdamW
ftrl = _kernel("ftrl", 4, 3, 0, dps_ftrl_float, dps_ftrl_double, NULL)  # FTRL
