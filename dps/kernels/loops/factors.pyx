"""Steps of factor models: the loops of :mod:`dps.kernels` on pulled rows of users and items.

Rows are float32, contiguous, and changed in place. Steps are made one after the other, each from what the one before
has left, without the interpreter's lock. Codes are int32 and name rows; each call checks that none leads outside.
"""

from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport free, malloc

cimport numpy as cnp

from dps.engine.core.arrays cimport int32s, int64s, memory
from dps.engine.core.bounds cimport dps_all_inside_int32

from dps.errors import InputError

cnp.import_array()


cdef extern from "factors.h" nogil:
    ctypedef struct dps_factor_rows:
        float *p
        float *q
        float *p_reach
        float *q_reach
        int64_t n
        float rate, penalty

    ctypedef struct dps_system:
        const float *gram
        const float *y
        const int32_t *others
        const float *extra
        int64_t n, count

    double dps_rating_steps(
        const dps_factor_rows *rows, const int32_t *users, const int32_t *items, const float *ratings, int64_t count,
        float mean
    )
    double dps_ranking_steps(
        const dps_factor_rows *rows, const int32_t *users, const int32_t *items, const int32_t *others, int64_t count
    )
    double dps_conjugate_gradients(const dps_system *system, float *x, int64_t steps, float *room)
    int dps_solve(const dps_system *system, float *x, double *room, double *form)


# ---- arguments ------------------------------------------------------------------------------------------------------


cdef const int32_t *_codes(str name, cnp.ndarray codes, int64_t count, int64_t rows) except? NULL:
    """The memory of `count` codes, all of them below `rows`."""
    cdef const int32_t *places = int32s(codes)
    if cnp.PyArray_SIZE(codes) != count:
        raise InputError(f"{cnp.PyArray_SIZE(codes)} {name} for {count} steps: one for each wanted")
    if not dps_all_inside_int32(places, count, rows):
        wrong = codes[(codes < 0) | (codes >= rows)][0]
        raise InputError(f"{name}: code {wrong}, and there are {rows} rows")
    return places


cdef float *_written(cnp.ndarray array) except? NULL:
    return <float *> memory(array, cnp.NPY_FLOAT32, True)


cdef dps_factor_rows _rows(
    cnp.ndarray p, cnp.ndarray q, cnp.ndarray p_reach, cnp.ndarray q_reach, double rate, double penalty
) except *:
    """The rows of users and items, all of one width."""
    cdef dps_factor_rows rows
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1] or p.shape[1] < 1:
        raise InputError(f"rows of shapes {(<object> p).shape} and {(<object> q).shape}: [., 1 + factors] each wanted")
    rows.p, rows.q, rows.n = _written(p), _written(q), p.shape[1] - 1
    rows.rate, rows.penalty, rows.p_reach, rows.q_reach = <float> rate, <float> penalty, NULL, NULL
    if p_reach is not None and q_reach is not None:
        if cnp.PyArray_SIZE(p_reach) != p.shape[0] or cnp.PyArray_SIZE(q_reach) != q.shape[0]:
            raise InputError("reach has a number for each row of users, and one for each row of items")
        rows.p_reach, rows.q_reach = _written(p_reach), _written(q_reach)
    return rows


# ---- steps ----------------------------------------------------------------------------------------------------------


def rating_steps(
    cnp.ndarray p not None,
    cnp.ndarray q not None,
    cnp.ndarray p_reach,
    cnp.ndarray q_reach,
    cnp.ndarray users not None,
    cnp.ndarray items not None,
    cnp.ndarray ratings not None,
    double mean,
    double rate,
    double penalty,
) -> float:
    """For each rating, the step of Funk's algorithm; the sum of the squared errors before each of them."""
    cdef dps_factor_rows rows = _rows(p, q, p_reach, q_reach, rate, penalty)
    cdef const float *values = <const float *> memory(ratings, cnp.NPY_FLOAT32, False)
    cdef int64_t count = cnp.PyArray_SIZE(ratings)
    cdef const int32_t *u = _codes("users", users, count, p.shape[0])
    cdef const int32_t *i = _codes("items", items, count, q.shape[0])
    cdef double total
    with nogil:
        total = dps_rating_steps(&rows, u, i, values, count, <float> mean)
    return total


def ranking_steps(
    cnp.ndarray p not None,
    cnp.ndarray q not None,
    cnp.ndarray p_reach,
    cnp.ndarray q_reach,
    cnp.ndarray users not None,
    cnp.ndarray items not None,
    cnp.ndarray others not None,
    double rate,
    double penalty,
) -> float:
    """For each user, item and other item, the step of BPR; the sum of the losses before each of them."""
    cdef dps_factor_rows rows = _rows(p, q, p_reach, q_reach, rate, penalty)
    cdef int64_t count = cnp.PyArray_SIZE(users), n
    cdef const int32_t *u = _codes("users", users, count, p.shape[0])
    cdef const int32_t *i = _codes("items", items, count, q.shape[0])
    cdef const int32_t *j = _codes("others", others, count, q.shape[0])
    cdef double total
    for n in range(count):
        if i[n] == j[n]:
            raise InputError(f"place {n} compares item {i[n]} with itself")
    with nogil:
        total = dps_ranking_steps(&rows, u, i, j, count)
    return total


def least_squares(
    cnp.ndarray x not None,
    cnp.ndarray y not None,
    cnp.ndarray starts not None,
    cnp.ndarray others not None,
    cnp.ndarray extra not None,
    cnp.ndarray gram not None,
    int64_t steps,
) -> float:
    """For each row of x, steps of conjugate gradients for its system; with 0 steps its solution.

    The sum of ``x' A x - 2 b' x`` of all systems is returned.
    """
    cdef int64_t owners = x.shape[0], n = y.shape[1] if y.ndim == 2 else 0
    cdef int64_t count = cnp.PyArray_SIZE(extra), owner
    cdef float *solved = _written(x)
    cdef const int64_t *ends = int64s(starts)
    cdef dps_system system
    cdef double total = 0
    cdef void *room
    cdef bint definite = True
    if n < 1 or x.ndim != 2 or x.shape[1] != n or gram.ndim != 2 or gram.shape[0] != n or gram.shape[1] != n:
        raise InputError(
            f"x{(<object> x).shape}, y{(<object> y).shape} and gram{(<object> gram).shape}: [., n], [., n] and [n, n] "
            "wanted"
        )
    _check_starts(ends, cnp.PyArray_SIZE(starts), owners, count)
    cdef const int32_t *places = _codes("others", others, count, y.shape[0])
    cdef const float *confidences = <const float *> memory(extra, cnp.NPY_FLOAT32, False)
    system.gram = <const float *> memory(gram, cnp.NPY_FLOAT32, False)
    system.y, system.n = <const float *> memory(y, cnp.NPY_FLOAT32, False), n
    room = malloc(sizeof(double) * (n * n + 2 * n))  # more than 3 n floats
    if room == NULL:
        raise MemoryError
    with nogil:
        for owner in range(owners):
            system.others, system.extra = places + ends[owner], confidences + ends[owner]
            system.count = ends[owner + 1] - ends[owner]
            if steps > 0:
                total += dps_conjugate_gradients(&system, solved + owner * n, steps, <float *> room)
            elif not dps_solve(&system, solved + owner * n, <double *> room, &total):
                definite = False
                break
        free(room)
    if not definite:
        raise InputError(
            f"the system of row {owner} has no single solution, because its {n} factors have too few ratings: "
            "a regularization above 0 makes one"
        )
    return total


cdef int _check_starts(const int64_t *ends, int64_t size, int64_t owners, int64_t count) except -1:
    """`ends` describes the ratings of owners, one after the other."""
    cdef bint sound = size == owners + 1 and ends[0] == 0 and ends[size - 1] == count
    cdef int64_t owner
    for owner in range(size - 1):
        sound = sound and ends[owner] <= ends[owner + 1]
    if not sound:
        raise InputError(f"starts does not describe the {count} ratings of {owners} rows")
    return 0
