"""Steps of word2vec on rows in memory: the loops of :func:`dps.kernels.word_steps`.

Rows are float32 and changed in place; places, numbers of rows and pools are int64. Each call checks that no number
leads outside. The loops run without the interpreter's lock. Sums are made in an order that is written down, and exp is
a polynomial, so the rows have the same bits on every processor; only the loss uses the C library's log.
"""

from libc.stdint cimport int32_t, int64_t

cimport numpy as cnp

import numpy as np

from dps.engine.core.arrays cimport int64s, memory
from dps.engine.core.bounds cimport dps_all_inside

from dps.errors import InputError

cnp.import_array()


cdef extern from "words.h" nogil:
    enum:
        DPS_LANES

    const float DPS_FARTHEST

    ctypedef struct dps_words:
        float *inside
        float *outside
        int64_t inside_count
        int64_t outside_count
        int64_t dim
        int64_t width
        const int64_t *words
        const int64_t *targets
        const int64_t *sentences
        const int64_t *reach
        int64_t places
        const int64_t *pools
        int64_t pool
        int64_t lanes
        int64_t step
        float negative
        float rate
        float trainers
        int cbow
        int32_t *inside_slots
        int32_t *outside_slots
        int64_t *inside_rows
        int64_t *outside_rows
        int32_t *pair_query
        int32_t *pair_target
        int32_t *member
        int32_t *member_end
        int32_t *pool_slot
        float *h
        float *gh
        float *v
        float *gv
        float *gi
        float *pool_v
        float *pool_t
        float *pool_g
        float *scores
        float *nh
        float *nv
        float *bent_h
        float *bent_v
        float *bent_i
        float *weight
        float *keep
        float *inside_old
        float *outside_old
        float *inside_left
        float *outside_left
        double loss
        int64_t count

    void dps_word_steps(dps_words *w) noexcept nogil


cdef class WordMemory:
    """Arrays of one call, which live as long as this does."""

    cdef list _arrays

    def __init__(self):
        self._arrays = []

    cdef float *copy(self, cnp.ndarray rows):
        cdef cnp.ndarray array = rows.copy()
        self._arrays.append(array)
        return <float *> cnp.PyArray_DATA(array)

    cdef float *ones(self, int64_t count):
        cdef cnp.ndarray array = np.ones(count, np.float32)
        self._arrays.append(array)
        return <float *> cnp.PyArray_DATA(array)

    cdef float *floats(self, int64_t count):
        cdef cnp.ndarray array = np.zeros(count, np.float32)
        self._arrays.append(array)
        return <float *> cnp.PyArray_DATA(array)

    cdef int32_t *int32s(self, int64_t count, int value):
        cdef cnp.ndarray array = np.full(count, value, np.int32)
        self._arrays.append(array)
        return <int32_t *> cnp.PyArray_DATA(array)

    cdef int64_t *int64s(self, int64_t count):
        cdef cnp.ndarray array = np.zeros(count, np.int64)
        self._arrays.append(array)
        return <int64_t *> cnp.PyArray_DATA(array)


cdef int64_t _padded(int64_t count):
    """The next multiple of LANES."""
    return (count + DPS_LANES - 1) // DPS_LANES * DPS_LANES


cdef int _inside(str what, cnp.ndarray numbers, int64_t rows) except -1:
    """Whether all numbers are rows."""
    if not dps_all_inside(int64s(numbers), cnp.PyArray_SIZE(numbers), rows):
        raise InputError(f"{what} from {numbers.min()} to {numbers.max()}, and there are {rows} rows")
    return 0


cdef int _take_memory(dps_words *w, WordMemory taken, int64_t reach) except -1:
    """What the largest step needs."""
    cdef int64_t queries = min(w.step, w.places)
    cdef int64_t near = min(w.places, queries + 2 * reach)  # places of a step and of its windows
    cdef int64_t pairs = queries * min(2 * reach, near) + 1
    cdef int64_t targets = near + w.pool
    w.inside_slots, w.outside_slots = taken.int32s(w.inside_count, -1), taken.int32s(w.outside_count, -1)
    w.inside_rows, w.outside_rows = taken.int64s(near), taken.int64s(targets)
    w.pair_query, w.pair_target = taken.int32s(pairs, 0), taken.int32s(pairs, 0)
    w.member, w.member_end = taken.int32s(pairs if w.cbow else 0, 0), taken.int32s(queries, 0)
    w.pool_slot = taken.int32s(w.pool, 0)
    w.h, w.gh = taken.floats(queries * w.width), taken.floats(queries * w.width)
    w.v, w.gv = taken.floats(targets * w.width), taken.floats(targets * w.width)
    w.gi, w.bent_i = taken.floats(near * w.width if w.cbow else 0), taken.floats(near)
    w.pool_v, w.pool_g = taken.floats(w.lanes * w.width), taken.floats(w.lanes * w.width)
    w.pool_t, w.scores = taken.floats(w.width * w.lanes), taken.floats(queries * w.lanes)
    w.nh, w.bent_h, w.weight = taken.floats(queries), taken.floats(queries), taken.floats(queries)
    w.nv, w.bent_v = taken.floats(targets), taken.floats(targets)
    w.keep = taken.floats(w.lanes)
    for o in range(w.pool):
        w.keep[o] = 1
    return 0


def word_steps(
    cnp.ndarray inside not None,
    cnp.ndarray outside not None,
    cnp.ndarray words not None,
    cnp.ndarray targets not None,
    cnp.ndarray sentences not None,
    cnp.ndarray reach not None,
    cnp.ndarray pools not None,
    float negative,
    float rate,
    int64_t step,
    int trainers,
    bint cbow,
) -> tuple:
    """(loss, pairs); `pools` is [steps, pool], the arrays of places are flat and of one length."""
    cdef dps_words w
    cdef WordMemory taken = WordMemory()
    cdef int64_t places = cnp.PyArray_SIZE(words), widest = 0, steps
    cdef object array
    if inside.ndim != 2 or outside.ndim != 2 or inside.shape[1] != outside.shape[1]:
        raise InputError(f"rows of shapes {(<object> inside).shape} and {(<object> outside).shape}: [n, dim] wanted")
    for name, array in (("targets", targets), ("sentences", sentences), ("reach", reach)):
        if array.shape != (places,):
            raise InputError(f"{name} of shape {array.shape} for {places} places")
    if step < 1 or trainers < 1:
        raise InputError(f"steps of {step} places and {trainers} trainers: 1 or more wanted")
    steps = (places + step - 1) // step
    if pools.ndim != 2 or pools.shape[0] < steps or pools.shape[1] < 1:
        raise InputError(f"pools of shape {(<object> pools).shape}: one row for each of {steps} steps wanted")
    w.inside = <float *> memory(inside, cnp.NPY_FLOAT32, True)
    w.outside = <float *> memory(outside, cnp.NPY_FLOAT32, True)
    w.words, w.targets, w.sentences, w.reach = int64s(words), int64s(targets), int64s(sentences), int64s(reach)
    w.pools, w.pool, w.places, w.step = int64s(pools), pools.shape[1], places, step
    w.inside_count, w.outside_count = inside.shape[0], outside.shape[0]
    w.dim, w.width = inside.shape[1], _padded(inside.shape[1])
    w.lanes = _padded(w.pool)
    w.negative, w.rate, w.trainers, w.cbow, w.loss, w.count = negative, rate, trainers, cbow, 0, 0
    _inside("words", words, inside.shape[0])
    _inside("targets", targets, outside.shape[0])
    _inside("negatives", pools, outside.shape[0])
    if places:
        if reach.min() < 0:
            raise InputError(f"a reach of {reach.min()}: 0 or more wanted")
        widest = min(<int64_t> reach.max(), places)
    _take_memory(&w, taken, widest)
    w.inside_old = w.outside_old = w.inside_left = w.outside_left = NULL
    if trainers > DPS_FARTHEST:
        w.inside_old, w.inside_left = taken.copy(inside), taken.ones(inside.shape[0])
        w.outside_old, w.outside_left = taken.copy(outside), taken.ones(outside.shape[0])
    with nogil:
        dps_word_steps(&w)
    return w.loss, w.count
