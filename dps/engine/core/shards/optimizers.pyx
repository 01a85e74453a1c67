"""The steps of the optimizers, in place: ``step(rows, index, start, updates, numbers)``.

rows : [capacity, dim + slots]; values in the first dim columns, the optimizer's state in the rest
index : int64[m], the row of each update; of length 0: rows start, start + 1, ... start + m - 1
updates : [m, dim], in the dtype of rows
numbers : float64, the optimizer's parameters in the order of its fields, the schedule evaluated

Where the columns of a row have optimizers of their own, a `ColumnKernel` runs the steps of these one after the other.

A row that does not exist is a ValueError, and nothing has changed then. The loops stand in steps_of.h.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from dps.engine.core.arrays cimport memory, refuse
from dps.engine.core.bounds cimport rows_listed
from dps.engine.core.numbers cimport bytes_of, place_of
from dps.engine.core.shards.steps cimport (
    dps_adagrad_double,
    dps_adagrad_float,
    dps_adam_double,
    dps_adam_float,
    dps_add_double,
    dps_add_float,
    dps_add_int64_t,
    dps_add_uint16_t,
    dps_add_uint32_t,
    dps_add_uint8_t,
    dps_assign_double,
    dps_assign_float,
    dps_assign_int64_t,
    dps_assign_uint16_t,
    dps_assign_uint32_t,
    dps_assign_uint8_t,
    dps_ftrl_double,
    dps_ftrl_float,
    dps_momentum_double,
    dps_momentum_float,
    dps_fetch_rows,
    dps_push,
    dps_rmsprop_double,
    dps_rmsprop_float,
    dps_sgd_double,
    dps_sgd_float,
    step_t,
)

cnp.import_array()

cdef enum:
    BLOCK = 32  # rows that the steps of all columns take at a time, so that the later ones find them in the cache


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
        if rows.ndim != 2 or updates.ndim != 2:
            raise ValueError("rows and updates must be two-dimensional")
        self.check(rows.shape[1], updates.shape[1], cnp.PyArray_SIZE(numbers))
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

    cdef int64_t slots(self, int64_t dim) noexcept nogil:
        """Columns of state of so many columns of values."""
        return (self.columns - 1) * dim + self.more_columns

    cdef int check(self, int64_t width, int64_t dim, int64_t parameters) except -1:
        """Raise ValueError where rows, updates or numbers are too narrow, or too few."""
        if width < dim + self.slots(dim):
            raise ValueError(f"a row of {width} columns is not wide enough for {dim} values and their state")
        if parameters < self.parameters:
            raise ValueError(f"{parameters} numbers, and the optimizer has {self.parameters}")
        return 0

    cdef bint works_on(self, int dtype) noexcept nogil:
        """Whether rows of this dtype, numpy's number of it, can be stepped."""
        cdef int place = place_of(dtype)
        return place >= 0 and self._steps[place] != NULL

    cdef void run(self, dps_push *push, int dtype) noexcept nogil:
        """Step rows of that dtype, all of which exist. The caller has checked everything; `push` may change."""
        if push.count == 0:  # then `start` may be any number, to which no address belongs
            return
        push.state = push.stride = push.dim
        if push.index == NULL and push.width == push.dim:  # without state, neighbouring rows are one long row
            push.rows = <char *> push.rows + push.start * push.width * bytes_of(dtype)
            push.start = 0
            push.dim *= push.count
            push.count = push.count > 0
        self._steps[place_of(dtype)](push)


@cython.final
cdef class ColumnKernel(Kernel):
    """The steps of several optimizers, each of its own columns of a row.

    The values of all columns come first, in the order of the optimizers, then the state of all of them, in this order.

    Parameters
    ----------
    columns : list of (Kernel, int, int)
        Of each optimizer: its kernel, how many columns it steps, and how many parameters it has.
    """

    def __cinit__(self, list columns not None):
        cdef Kernel kernel
        cdef ColumnStep *part
        cdef int64_t dim, parameters
        cdef Py_ssize_t n
        self._parts = <ColumnStep *> calloc(max(len(columns), 1), sizeof(ColumnStep))
        if self._parts == NULL:
            raise MemoryError
        self.__name__, self._count = "columns", len(columns)
        self._kernels = []  # which own the steps
        self._dim = self._width = self.parameters = 0
        for n, (kernel, dim, parameters) in enumerate(columns):
            if isinstance(kernel, ColumnKernel) or dim < 1 or parameters < kernel.parameters:
                raise ValueError(f"a kernel {kernel.__name__} of {dim} columns and {parameters} parameters")
            part = self._parts + n
            self._kernels.append(kernel)
            part.steps = kernel._steps
            part.first, part.dim, part.parameters = self._dim, dim, parameters
            part.state = self._width  # behind the values of all columns: see below
            self._dim += dim
            self._width += kernel.slots(dim)
            self.parameters += parameters
        for n in range(self._count):
            self._parts[n].state += self._dim - self._parts[n].first
        self._width += self._dim

    def __dealloc__(self):
        free(self._parts)

    cdef bint works_on(self, int dtype) noexcept nogil:
        cdef int place = place_of(dtype), n
        if place < 0:
            return False
        for n in range(self._count):
            if self._parts[n].steps[place] == NULL:
                return False
        return True

    cdef int check(self, int64_t width, int64_t dim, int64_t parameters) except -1:
        if dim != self._dim or width < self._width:
            raise ValueError(
                f"rows of {width} columns and updates of {dim} do not fit the {self._dim} columns of the optimizers, "
                f"which are {self._width} with their state"
            )
        if parameters != self.parameters:
            raise ValueError(f"{parameters} numbers, and the optimizers have {self.parameters}")
        return 0

    cdef void run(self, dps_push *push, int dtype) noexcept nogil:
        cdef int64_t itemsize = bytes_of(dtype), done = 0, ahead, n
        cdef int place = place_of(dtype)
        cdef dps_push some = push[0]
        cdef const ColumnStep *part
        some.stride = push.dim
        while done < push.count:
            some.count = min(push.count - done, <int64_t> BLOCK)
            if push.index != NULL:
                ahead = done + some.count
                dps_fetch_rows(
                    push.rows, push.index + ahead, min(push.count - ahead, <int64_t> BLOCK), push.width * itemsize
                )
            some.numbers = push.numbers
            for n in range(self._count):
                part = self._parts + n
                some.rows = <char *> push.rows + part.first * itemsize
                some.updates = <const char *> push.updates + (done * push.dim + part.first) * itemsize
                some.dim, some.state, some.parameters = part.dim, part.state, part.parameters
                part.steps[place](&some)
                some.numbers += part.parameters
            done += BLOCK
            if push.index != NULL:
                some.index = push.index + done
            else:
                some.start = push.start + done


cdef Kernel _kernel(
    str name,
    int64_t parameters,
    int64_t columns,
    int64_t more_columns,
    step_t in_float,
    step_t in_double,
    step_t in_int64=NULL,
    step_t in_int32=NULL,
    step_t in_int16=NULL,
    step_t in_uint8=NULL,
):
    """A kernel with so many parameters. A row has columns * dim + more_columns columns."""
    cdef Kernel kernel = Kernel.__new__(Kernel)
    kernel.__name__ = name
    kernel.parameters, kernel.columns, kernel.more_columns = parameters, columns, more_columns
    kernel._steps[0], kernel._steps[1], kernel._steps[2] = in_float, in_double, in_int64  # in the order of `place_of`
    kernel._steps[3], kernel._steps[4], kernel._steps[5] = in_int32, in_int16, in_uint8
    return kernel


add = _kernel(  # w <- w + g
    "add",
    0,
    1,
    0,
    dps_add_float,
    dps_add_double,
    dps_add_int64_t,
    dps_add_uint32_t,
    dps_add_uint16_t,
    dps_add_uint8_t,
)
assign = _kernel(  # w <- g
    "assign",
    0,
    1,
    0,
    dps_assign_float,
    dps_assign_double,
    dps_assign_int64_t,
    dps_assign_uint32_t,
    dps_assign_uint16_t,
    dps_assign_uint8_t,
)
sgd = _kernel("sgd", 3, 1, 0, dps_sgd_float, dps_sgd_double)  # SGD
momentum = _kernel("momentum", 3, 2, 0, dps_momentum_float, dps_momentum_double)  # Momentum
adagrad = _kernel("adagrad", 5, 2, 0, dps_adagrad_float, dps_adagrad_double)  # Adagrad
rmsprop = _kernel("rmsprop", 3, 2, 0, dps_rmsprop_float, dps_rmsprop_double)  # RMSprop
adam = _kernel("adam", 4, 3, 1, dps_adam_float, dps_adam_double)  # Adam, AdamW
ftrl = _kernel("ftrl", 4, 3, 0, dps_ftrl_float, dps_ftrl_double)  # FTRL
