"""Products of a sparse batch with dense weights, residuals, factorization machines: the loops of :mod:`dps.kernels`.

A batch is CSR: `indptr` int64[rows + 1], `indices` int32, and `data` float32 or float64 of the same length, or None for
all ones. Weights, margins and residuals are float32. Each call checks that no row and no index leads outside.

The kernels see unsigned indices. The fused kernel works on blocks of rows, whose indices are still in the cache when
the gradient is scattered, and the loss takes one logarithm for a block, of the product of its terms. Sums are made in
an order that is written down, so products have the same bits on every processor. Residuals and losses use the C
library's exp and log, whose last bits may differ between machines; no replicated state depends on them.
"""

from libc.math cimport exp, fabs, log, log1p
from libc.stdint cimport int32_t, int64_t, uint32_t

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport int32s, int64s, memory
from dps.engine.core.bounds cimport dps_all_inside, dps_all_inside_int32

from dps.errors import InputError

cnp.import_array()


cdef extern from "sparse.h" nogil:
    ctypedef struct dps_batch:
        const int64_t *ends
        const uint32_t *indices
        const void *values
        int64_t rows

    ctypedef struct dps_loops:
        void (*margins)(
            const dps_batch *batch, const float *w, float b, int64_t start, int64_t stop, float *out
        ) noexcept nogil
        void (*gradient)(
            const dps_batch *batch, const float *residual, int64_t start, int64_t stop, float *out
        ) noexcept nogil
        void (*margins_of_many)(
            const dps_batch *batch, const float *w, const float *b, int64_t m, float *out
        ) noexcept nogil
        void (*gradient_of_many)(const dps_batch *batch, const float *residual, int64_t m, float *out) noexcept nogil

    const dps_loops dps_loops_ones, dps_loops_float, dps_loops_double

cdef extern from "pairs.h" nogil:
    void dps_pair_scores(
        const dps_entries *batch, const float *rows, int64_t k, float b, float *s, float *z
    ) noexcept nogil
    void dps_pair_gradient(
        const dps_entries *batch, const float *rows, int64_t k, const float *s, const float *residual, float *out
    ) noexcept nogil
    void dps_field_scores(
        const dps_entries *batch, const int32_t *fields, const float *rows, int64_t n_fields, int64_t k, float b,
        float *z
    ) noexcept nogil
    void dps_field_gradient(
        const dps_entries *batch, const int32_t *fields, const float *rows, int64_t n_fields, int64_t k,
        const float *residual, float *out
    ) noexcept nogil

cdef enum:
    BLOCK_ROWS = 256  # with 39 non-zeros each they are 80 kB; a product of so many terms in [1, 2] fits a double


# ---- arguments ------------------------------------------------------------------------------------------------------


cdef const float *floats(cnp.ndarray array) except? NULL:
    return <const float *> memory(array, cnp.NPY_FLOAT32, False)


cdef float *writeable_floats(cnp.ndarray array) except? NULL:
    return <float *> memory(array, cnp.NPY_FLOAT32, True)


cdef const float *optional_floats(cnp.ndarray array) except? NULL:
    if array is None:
        return NULL
    return floats(array)


cdef const dps_loops *_loops(cnp.ndarray data):
    if data is None:
        return &dps_loops_ones
    return &dps_loops_double if cnp.PyArray_TYPE(data) == cnp.NPY_FLOAT64 else &dps_loops_float


cdef dps_batch _batch(cnp.ndarray indptr, cnp.ndarray indices, cnp.ndarray data, int64_t k) except *:
    """The memory of a batch whose indices are below k."""
    cdef dps_batch batch
    cdef const int32_t *places = int32s(indices)
    cdef int64_t count = cnp.PyArray_SIZE(indices), i
    cdef bint sound, inside
    batch.ends, batch.indices, batch.values = int64s(indptr), <const uint32_t *> places, NULL
    batch.rows = cnp.PyArray_SIZE(indptr) - 1
    if data is not None:
        double = cnp.PyArray_TYPE(data) == cnp.NPY_FLOAT64
        batch.values = memory(data, cnp.NPY_FLOAT64 if double else cnp.NPY_FLOAT32, False)
        if cnp.PyArray_SIZE(data) != count:
            raise InputError(f"{cnp.PyArray_SIZE(data)} values for {count} indices")
    with nogil:
        inside = dps_all_inside_int32(places, count, k)
        sound = batch.rows >= 0 and batch.ends[0] >= 0 and batch.ends[batch.rows] <= count
        for i in range(batch.rows):
            sound = sound and batch.ends[i] <= batch.ends[i + 1]
    if not inside:
        wrong = indices[(indices < 0) | (indices >= k)][0]
        raise InputError(
            f"index {wrong} in the batch, and there are {k} weights: pass the batch that localize returned"
        )
    if not sound:
        raise InputError(f"indptr does not describe rows of a batch with {count} non-zeros")
    return batch


cdef int check_shape(str name, cnp.ndarray array, int64_t rows, int64_t columns) except -1:
    """Whether an array has these rows and columns; a flat one has one column."""
    cdef int64_t width = array.shape[1] if array.ndim > 1 else 1
    if not 1 <= array.ndim <= 2 or array.shape[0] != rows or width != columns:
        raise ValueError(f"{name} of shape {(<object> array).shape}, and {rows} rows of {columns} wanted")
    return 0


# ---- products -------------------------------------------------------------------------------------------------------


def margins(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray w not None,
    cnp.ndarray b not None,
    cnp.ndarray out not None,
) -> None:
    """out = X @ w + b for w[k, m], b[m] and out[rows, m].

    For one output, the non-zeros of a row are added up in three sums, so that the adds overlap: number j of a row goes
    to sum j % 3 (those that remain after the last whole three, to the first), and then these sums are added in order.
    """
    cdef const float *weights = floats(w)
    cdef const float *offsets = floats(b)
    cdef float *z = writeable_floats(out)
    cdef int64_t k = w.shape[0], m = cnp.PyArray_SIZE(b)
    cdef dps_batch batch = _batch(indptr, indices, data, k)
    cdef const dps_loops *loops = _loops(data)
    check_shape("w", w, k, m)
    check_shape("out", out, batch.rows, m)
    with nogil:
        if m == 1:
            loops.margins(&batch, weights, offsets[0], 0, batch.rows, z)
        else:
            loops.margins_of_many(&batch, weights, offsets, m, z)


def gradient(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray residual not None,
    cnp.ndarray out not None,
) -> None:
    """out += X.T @ residual for residual[rows, m] and out[k, m]."""
    cdef const float *r = floats(residual)
    cdef float *slope = writeable_floats(out)
    cdef int64_t k = out.shape[0], m = out.shape[1] if out.ndim > 1 else 1
    cdef dps_batch batch = _batch(indptr, indices, data, k)
    cdef const dps_loops *loops = _loops(data)
    check_shape("out", out, k, m)
    check_shape("residual", residual, batch.rows, m)
    with nogil:
        if m == 1:
            loops.gradient(&batch, r, 0, batch.rows, slope)
        else:
            loops.gradient_of_many(&batch, r, m, slope)


# ---- residuals ------------------------------------------------------------------------------------------------------


def binary_residuals(
    cnp.ndarray z not None, cnp.ndarray y not None, cnp.ndarray weights, cnp.ndarray residual not None
) -> float:
    """residual = weight * (probability - y); returns the sum of weight * loss. All are float32[n]."""
    cdef const float *margin = floats(z)
    cdef const float *target = floats(y)
    cdef const float *weight = optional_floats(weights)
    cdef float *out = writeable_floats(residual)
    cdef int64_t n = cnp.PyArray_SIZE(z), start = 0, rows
    cdef double loss = 0
    check_shape("y", y, n, 1)
    check_shape("residual", residual, n, 1)
    if weights is not None:
        check_shape("weights", weights, n, 1)
    with nogil:
        while start < n:
            rows = min(<int64_t> BLOCK_ROWS, n - start)
            loss += _residuals(margin + start, target, weight, start, rows, 1.0, out + start)
            start += rows
    return loss


cdef double _residuals(
    const float *z, const float *y, const float *weights, int64_t start, int64_t rows, double scale, float *residual
) noexcept nogil:
    """residual = scale * weight * (probability - y) of at most BLOCK_ROWS rows; returns the sum of weight * loss.

    `y` and `weights` are those of all rows, of which this block begins with number `start`. With q = exp(-|z|), which
    never overflows: probability = 1 / (1 + q) or q / (1 + q), and loss = max(z, 0) - y z + log(1 + q).
    """
    cdef double loss = 0, product = 1, margin, target, q, probability, linear
    cdef int64_t i
    for i in range(rows):
        margin, target = z[i], y[start + i]
        q = exp(-fabs(margin))
        probability = (1.0 if margin >= 0 else q) / (1.0 + q)
        linear = (margin if margin > 0 else 0.0) - target * margin
        if weights == NULL:
            residual[i] = <float> (scale * (probability - target))
            loss += linear
            product *= 1.0 + q
        else:
            residual[i] = <float> (scale * weights[start + i] * (probability - target))
            loss += weights[start + i] * (linear + log1p(q))
    return loss + log(product)


def multinomial_residuals(
    cnp.ndarray z not None, cnp.ndarray y not None, cnp.ndarray weights, cnp.ndarray residual not None
) -> float:
    """residual = weight * (probabilities - one-hot y) for z[n, m] and int64 y[n] below m; the sum of weight * loss."""
    cdef const float *margin = floats(z)
    cdef const int64_t *target = int64s(y)
    cdef const float *weight = optional_floats(weights)
    cdef float *out = writeable_floats(residual)
    cdef int64_t n = cnp.PyArray_SIZE(y), m = z.shape[1] if z.ndim > 1 else 1
    cdef double loss
    check_shape("z", z, n, m)
    check_shape("residual", residual, n, m)
    if weights is not None:
        check_shape("weights", weights, n, 1)
    if not dps_all_inside(target, n, m):
        raise InputError(f"targets must be class numbers 0 to {m - 1}")
    with nogil:
        loss = _multinomial(margin, target, weight, n, m, out)
    return loss


cdef double _multinomial(
    const float *z, const int64_t *y, const float *weights, int64_t n, int64_t m, float *residual
) noexcept nogil:
    cdef double loss = 0, weight, total, q
    cdef float top
    cdef int64_t i, c
    for i in range(n):
        weight = 1.0 if weights == NULL else weights[i]
        top = z[0]
        for c in range(1, m):
            top = max(top, z[c])
        total = 0
        for c in range(m):
            q = exp(<double> z[c] - <double> top)
            residual[c] = <float> q
            total += q
        for c in range(m):
            residual[c] = <float> (residual[c] * (weight / total))
        residual[y[i]] = <float> (residual[y[i]] - weight)
        loss += weight * (log(total) - (<double> z[y[i]] - <double> top))
        z += m
        residual += m
    return loss


# ---- both in one go -------------------------------------------------------------------------------------------------


def logistic(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray w not None,
    float b,
    cnp.ndarray y not None,
    cnp.ndarray weights,
    double scale,
    cnp.ndarray out not None,
) -> tuple:
    """Margins, residuals and gradient of two classes: (sum of losses, gradient of b); out += the gradient of w.

    `w` and `out` are float32[k], `y` and `weights` float32[rows]. Margins are summed as in :func:`margins`.
    """
    cdef const float *values = floats(w)
    cdef const float *target = floats(y)
    cdef const float *weight = optional_floats(weights)
    cdef float *slope = writeable_floats(out)
    cdef int64_t k = w.shape[0], start = 0, rows, i
    cdef dps_batch batch = _batch(indptr, indices, data, k)
    cdef const dps_loops *loops = _loops(data)
    cdef float z[BLOCK_ROWS]
    cdef float residual[BLOCK_ROWS]
    cdef double loss = 0, intercept = 0
    check_shape("w", w, k, 1)
    check_shape("out", out, k, 1)
    check_shape("y", y, batch.rows, 1)
    if weights is not None:
        check_shape("weights", weights, batch.rows, 1)
    with nogil:
        while start < batch.rows:
            rows = min(<int64_t> BLOCK_ROWS, batch.rows - start)
            loops.margins(&batch, values, b, start, start + rows, z)
            loss += _residuals(z, target, weight, start, rows, scale, residual)
            for i in range(rows):
                intercept += residual[i]
            loops.gradient(&batch, residual, start, start + rows, slope)
            start += rows
    return loss, intercept


# ---- factorization machines -----------------------------------------------------------------------------------------


cdef dps_entries entries_of(cnp.ndarray indptr, cnp.ndarray indices, cnp.ndarray data, int64_t k) except *:
    """The memory of a batch whose values are float32, or None."""
    cdef dps_entries entries
    if data is not None:
        floats(data)
    cdef dps_batch batch = _batch(indptr, indices, data, k)
    entries.ends, entries.indices, entries.rows = batch.ends, batch.indices, batch.rows
    entries.values = <const float *> batch.values
    return entries


cdef const int32_t *_fields_of(
    cnp.ndarray fields, cnp.ndarray indices, cnp.ndarray rows, int64_t n_fields
) except? NULL:
    """The fields of the non-zeros, and a check that rows have factors for each field."""
    cdef const int32_t *places = int32s(fields)
    cdef int64_t count = cnp.PyArray_SIZE(fields)
    if count != cnp.PyArray_SIZE(indices):
        raise InputError(f"{count} fields for {cnp.PyArray_SIZE(indices)} indices")
    if rows.ndim != 2 or n_fields < 1 or rows.shape[1] < 1 or (rows.shape[1] - 1) % n_fields:
        raise InputError(f"rows of shape {(<object> rows).shape}: [features, 1 + n_fields * k] with {n_fields} fields")
    if not dps_all_inside_int32(places, count, n_fields):
        wrong = fields[(fields < 0) | (fields >= n_fields)][0]
        raise InputError(f"field {wrong} in the batch, and there are {n_fields} fields, numbered from 0")
    return places


def pair_scores(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray rows not None,
    float b,
    cnp.ndarray s not None,
    cnp.ndarray out not None,
) -> None:
    """out = the scores of a factorization machine, and s[n, k] = the sums of factors; rows[features, 1 + k]."""
    cdef const float *parameters = floats(rows)
    cdef float *sums = writeable_floats(s)
    cdef float *z = writeable_floats(out)
    cdef int64_t k = rows.shape[1] - 1 if rows.ndim == 2 else -1
    cdef dps_entries batch = entries_of(indptr, indices, data, rows.shape[0])
    check_shape("rows", rows, rows.shape[0], 1 + k)
    check_shape("s", s, batch.rows, k)
    check_shape("out", out, batch.rows, 1)
    with nogil:
        dps_pair_scores(&batch, parameters, k, b, sums, z)


def pair_gradient(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray rows not None,
    cnp.ndarray s not None,
    cnp.ndarray residual not None,
    cnp.ndarray out not None,
) -> None:
    """out += the gradient of the scores times residual[n]; `s` as `pair_scores` made it."""
    cdef const float *parameters = floats(rows)
    cdef const float *sums = floats(s)
    cdef const float *r = floats(residual)
    cdef float *slope = writeable_floats(out)
    cdef int64_t k = rows.shape[1] - 1 if rows.ndim == 2 else -1
    cdef dps_entries batch = entries_of(indptr, indices, data, rows.shape[0])
    check_shape("rows", rows, rows.shape[0], 1 + k)
    check_shape("out", out, rows.shape[0], 1 + k)
    check_shape("s", s, batch.rows, k)
    check_shape("residual", residual, batch.rows, 1)
    with nogil:
        dps_pair_gradient(&batch, parameters, k, sums, r, slope)


def field_scores(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray fields not None,
    cnp.ndarray rows not None,
    int64_t n_fields,
    float b,
    cnp.ndarray out not None,
) -> None:
    """out = the scores of a field-aware machine; fields int32[non-zeros], rows[features, 1 + n_fields * k]."""
    cdef const float *parameters = floats(rows)
    cdef float *z = writeable_floats(out)
    cdef const int32_t *places = _fields_of(fields, indices, rows, n_fields)
    cdef int64_t k = (rows.shape[1] - 1) // n_fields
    cdef dps_entries batch = entries_of(indptr, indices, data, rows.shape[0])
    check_shape("out", out, batch.rows, 1)
    with nogil:
        dps_field_scores(&batch, places, parameters, n_fields, k, b, z)


def field_gradient(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray fields not None,
    cnp.ndarray rows not None,
    int64_t n_fields,
    cnp.ndarray residual not None,
    cnp.ndarray out not None,
) -> None:
    """out += the gradient of the scores times residual[n]."""
    cdef const float *parameters = floats(rows)
    cdef const float *r = floats(residual)
    cdef float *slope = writeable_floats(out)
    cdef const int32_t *places = _fields_of(fields, indices, rows, n_fields)
    cdef int64_t k = (rows.shape[1] - 1) // n_fields
    cdef dps_entries batch = entries_of(indptr, indices, data, rows.shape[0])
    check_shape("out", out, rows.shape[0], rows.shape[1])
    check_shape("residual", residual, batch.rows, 1)
    with nogil:
        dps_field_gradient(&batch, places, parameters, n_fields, k, r, slope)
