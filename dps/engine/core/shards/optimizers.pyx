"""The steps of the optimizers, in place: ``step(rows, index, start, updates, numbers)``.

rows : [capacity, dim + slots]; values in the first dim columns, the optimizer's state in the rest
index : int64[m], the row of each update; of length 0: rows start, start + 1, ... start + m - 1
updates : [m, dim], in the dtype of rows
numbers : float64, the optimizer's parameters in the order of its fields, the schedule evaluated

Where the columns of a row have optimizers of their own, a `ColumnKernel` runs the steps of these one after the other.

In rows of float16 and bfloat16, the state is float32, and takes two columns a number. Such rows are widened to float32,
stepped, and their values narrowed once: see `step_wide`.

A row that does not exist is a ValueError, and nothing has changed then. The loops stand in steps_of.h.
"""

cimport cython
cimport numpy as cnp
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from dps.engine.core.arrays cimport memory, refuse
from dps.engine.core.bounds cimport rows_listed
from dps.engine.core.numbers cimport (
    BFLOAT16,
    FLOAT16,
    bytes_of,
    is_half,
    narrow_numbers,
    place_of,
    widen_numbers,
)
from dps.engine.core.shards.steps cimport (
    dps_adagrad_double,
    dps_adagrad_float,
    dps_adam_double,
    dps_adam_float,
    dps_add_bfloat16,
    dps_add_double,
    dps_add_float,
    dps_add_float16,
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
    WIDENED = 2048  # numbers of neighbouring rows of halves that are stepped at a time
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
        cdef bint done
        if not self.works_on(dtype):
            refuse(rows, cnp.NPY_FLOAT32)
        if rows.ndim != 2 or updates.ndim != 2:
            raise ValueError("rows and updates must be two-dimensional")
        self.check(rows.shape[1], updates.shape[1], cnp.PyArray_SIZE(numbers), dtype)
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
            done = self.run(&push, dtype)
        if not done:
            raise MemoryError

    cdef int64_t slots(self, int64_t dim) noexcept nogil:
        """Numbers of state of so many columns of values."""
        return (self.columns - 1) * dim + self.more_columns

    cdef int check(self, int64_t width, int64_t dim, int64_t parameters, int dtype) except -1:
        """Raise ValueError where rows, updates or numbers are too narrow, or too few."""
        if width < dim + self.slots(dim) * (1 + is_half(dtype)):
            raise ValueError(f"a row of {width} columns is not wide enough for {dim} values and their state")
        if parameters < self.parameters:
            raise ValueError(f"{parameters} numbers, and the optimizer has {self.parameters}")
        return 0

    cdef bint works_on(self, int dtype) noexcept nogil:
        """Whether rows of this dtype, numpy's number of it, can be stepped."""
        cdef int place = place_of(dtype)
        return place >= 0 and (self._steps[place] != NULL or self.widens(dtype))

    cdef bint widens(self, int dtype) noexcept nogil:
        """Whether rows of this dtype are stepped as rows of float32."""
        return is_half(dtype) and self._steps[place_of(dtype)] == NULL and self._steps[0] != NULL

    cdef bint run(self, dps_push *push, int dtype) noexcept nogil:
        """Step rows of that dtype, all of which exist; False, and nothing has changed, for want of memory.

        The caller has checked everything. `push` may change.
        """
        if self.widens(dtype):
            return self.step_wide(push, dtype)
        self.step(push, dtype)
        return True

    cdef bint step_wide(self, const dps_push *push, int dtype) noexcept nogil:
        """Step rows of halves as rows of float32, some at a time if they are neighbours, else each by itself.

        So no number is rounded before the last one of its step, and a row that is named twice is stepped twice.
        """
        cdef int64_t dim = push.dim, width = dim + self.slots(dim), bytes = 2 * push.width, done = 0
        cdef int64_t ahead, n
        cdef int64_t some = max(<int64_t> 1, WIDENED // width) if push.index == NULL else 1
        cdef int64_t state = 4 * (width - dim)
        cdef float *wide = <float *> malloc(4 * some * (width + dim))
        cdef char *row
        cdef dps_push part = push[0]
        if wide == NULL:
            return False
        while done < push.count:
            some = min(some, push.count - done)
            if push.index != NULL and done % BLOCK == 0:
                ahead = done + BLOCK
                dps_fetch_rows(push.rows, push.index + ahead, min(push.count - ahead, <int64_t> BLOCK), bytes)
            row = <char *> push.rows + bytes * (push.start + done if push.index == NULL else push.index[done])
            for n in range(some):
                widen_numbers(dtype, row + n * bytes, dim, wide + n * width)
                memcpy(wide + n * width + dim, row + n * bytes + 2 * dim, state)
            part.updates = wide + some * width
            widen_numbers(dtype, <const char *> push.updates + 2 * done * dim, some * dim, wide + some * width)
            part.rows, part.width, part.index, part.start, part.count, part.dim = wide, width, NULL, 0, some, dim
            self.step(&part, cnp.NPY_FLOAT32)
            for n in range(some):
                narrow_numbers(dtype, wide + n * width, dim, row + n * bytes)
                memcpy(row + n * bytes + 2 * dim, wide + n * width + dim, state)
            done += some
        free(wide)
        return True

    cdef void step(self, dps_push *push, int dtype) noexcept nogil:
        """Step rows of a dtype for which there is a step. `push` may change."""
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
            if self._parts[n].steps[0 if is_half(dtype) else place] == NULL:
                return False
        return True

    cdef bint widens(self, int dtype) noexcept nogil:
        return is_half(dtype)

    cdef int64_t slots(self, int64_t dim) noexcept nogil:
        return self._width - self._dim

    cdef int check(self, int64_t width, int64_t dim, int64_t parameters, int dtype) except -1:
        cdef int64_t wanted = self._dim + self.slots(dim) * (1 + is_half(dtype))
        if dim != self._dim or width < wanted:
            raise ValueError(
                f"rows of {width} columns and updates of {dim} do not fit the {self._dim} columns of the optimizers, "
                f"which are {wanted} with their state"
            )
        if parameters != self.parameters:
            raise ValueError(f"{parameters} numbers, and the optimizers have {self.parameters}")
        return 0

    cdef void step(self, dps_push *push, int dtype) noexcept nogil:
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
    step_t in_float16=NULL,
    step_t in_bfloat16=NULL,
):
    """A kernel with so many parameters. A row has columns * dim + more_columns columns."""
    cdef Kernel kernel = Kernel.__new__(Kernel)
    kernel.__name__ = name
    kernel.parameters, kernel.columns, kernel.more_columns = parameters, columns, more_columns
    kernel._steps[0], kernel._steps[1], kernel._steps[2] = in_float, in_double, in_int64  # in the order of `place_of`
    kernel._steps[3], kernel._steps[4], kernel._steps[5] = in_int32, in_int16, in_uint8
    kernel._steps[FLOAT16], kernel._steps[BFLOAT16] = in_float16, in_bfloat16
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
    dps_add_float16,
    dps_add_bfloat16,
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
    dps_assign_uint16_t,  # halves are copied as they are
    dps_assign_uint16_t,
)
sgd = _kernel("sgd", 3, 1, 0, dps_sgd_float, dps_sgd_double)  # SGD
momentum = _kernel("momentum", 3, 2, 0, dps_momentum_float, dps_momentum_double)  # Momentum
adagrad = _kernel("adagrad", 5, 2, 0, dps_adagrad_float, dps_adagrad_double)  # Adagrad
rmsprop = _kernel("rmsprop", 3, 2, 0, dps_rmsprop_float, dps_rmsprop_double)  # RMSprop
adam = _kernel("adam", 4, 3, 1, dps_adam_float, dps_adam_double)  # Adam, AdamW
ftrl = _kernel("ftrl", 4, 3, 0, dps_ftrl_float, dps_ftrl_double)  # FTRL
