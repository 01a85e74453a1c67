"""Logistic regression by FTRL with a step after each row: the loop of :func:`dps.kernels.ftrl_steps`.

A batch is CSR, as of `sparse.pyx`; sums, gains and weights are float32. The call checks that no row, index
or label leads outside. The loop runs without the interpreter's lock, and row after row, so gains have the same bits
on every processor but for the last bits of the C library's exp.
"""

from libc.stdint cimport int64_t
from libc.string cimport memset

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport int64s
from dps.engine.core.bounds cimport dps_all_inside
from dps.kernels.loops.sparse cimport check_shape, dps_entries, entries_of, floats, optional_floats, writeable_floats

from dps.errors import InputError

cnp.import_array()


cdef extern from "ftrl.h" nogil:
    ctypedef struct dps_ftrl_rule:
        float beta
        float l1
        float l2
        float per_alpha
        float others

    ctypedef struct dps_ftrl_rows:
        const float *sums
        float *gains
        float *w
        float *roots
        float *gradients
        int64_t count

    double dps_ftrl_binary(
        const dps_entries *batch, const dps_ftrl_rows *features, const dps_ftrl_rows *intercept, const int64_t *y,
        const float *weights, const dps_ftrl_rule *rule, int fixed
    ) noexcept nogil
    double dps_ftrl_multinomial(
        const dps_entries *batch, const dps_ftrl_rows *features, const dps_ftrl_rows *intercept, const int64_t *y,
        const float *weights, int64_t m, const dps_ftrl_rule *rule, int fixed, float *residual
    ) noexcept nogil


cdef dps_ftrl_rows _sums(
    str name, cnp.ndarray sums, cnp.ndarray gains, cnp.ndarray room, int64_t k, int64_t m
) except *:
    """The memory of k rows [z | n], their gains, and room [3, k, m] for weights, roots and sums of gradients."""
    cdef dps_ftrl_rows rows
    check_shape(name, sums, k, 2 * m)
    check_shape(f"the gains of {name}", gains, k, 2 * m)
    rows.sums, rows.gains, rows.count = floats(sums), writeable_floats(gains), k
    rows.w = writeable_floats(room)
    rows.roots = rows.w + k * m
    rows.gradients = rows.roots + k * m
    memset(rows.gradients, 0, k * m * sizeof(float))
    return rows


def ftrl_steps(
    cnp.ndarray indptr not None,
    cnp.ndarray indices not None,
    cnp.ndarray data,
    cnp.ndarray sums not None,
    cnp.ndarray intercept not None,
    cnp.ndarray y not None,
    cnp.ndarray weights,
    tuple rule not None,
    float others,
    bint fixed,
    cnp.ndarray gains not None,
    cnp.ndarray intercept_gains not None,
) -> float:
    """A step after each row; the sum of the losses before them. Gains are added up in the arrays given for them.

    `sums` and `gains` are [k, 2 m], the intercept's [1, 2 m], `y` int64 [rows], below 2 for m = 1 and else below m.
    `rule` is (alpha, beta, l1, l2); of the intercept there are no penalties, and `fixed` leaves it as it is. `others`
    are trainers that make steps from the same sums.
    """
    cdef int64_t k = sums.shape[0], m = (sums.shape[1] if sums.ndim == 2 else 0) // 2
    cdef dps_entries batch = entries_of(indptr, indices, data, k)
    cdef const int64_t *labels = int64s(y)
    cdef const float *weight = optional_floats(weights)
    cdef float alpha = rule[0]
    cdef dps_ftrl_rule how
    cdef bint inside
    cdef double loss
    how.beta, how.l1, how.l2, how.per_alpha = rule[1], rule[2], rule[3], 1 / alpha
    how.others = others
    check_shape("y", y, batch.rows, 1)
    if weights is not None:
        check_shape("weights", weights, batch.rows, 1)
    room, little = np.empty((3, k, m), np.float32), np.empty((3, 1, m), np.float32)
    cdef dps_ftrl_rows features = _sums("sums", sums, gains, room, k, m)
    cdef dps_ftrl_rows level = _sums("intercept", intercept, intercept_gains, little, 1, m)
    cdef cnp.ndarray residual = np.empty(m, np.float32)
    cdef float *residuals = writeable_floats(residual)
    with nogil:
        inside = dps_all_inside(labels, batch.rows, 2 if m == 1 else m)
        if inside and m == 1:
            loss = dps_ftrl_binary(&batch, &features, &level, labels, weight, &how, fixed)
        elif inside and m > 1:
            loss = dps_ftrl_multinomial(&batch, &features, &level, labels, weight, m, &how, fixed, residuals)
        else:
            loss = 0
    if not inside:
        raise InputError(f"y from {y.min()} to {y.max()}: the numbers of {2 if m == 1 else m} classes wanted")
    return loss
