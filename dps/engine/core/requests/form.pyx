"""The form of a table's rows, and arrays that fit it, for calls that go the plain way (`exchange.pyx`)."""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport calloc, free, malloc

cimport numpy as cnp

from dps.engine.core.blocks cimport new_array
from dps.engine.core.numbers cimport bytes_of
from dps.engine.core.shard_map cimport ShardMap
from dps.engine.core.shards.rows cimport are_finite

cnp.import_array()


cdef class Form:
    """What is the same for all calls to a table: its rows, and which run of shards is where.

    Parameters
    ----------
    table, kind, dim : int
        The table's number, numpy's number of its dtype, and its dim.
    shard_map : ShardMap
        Of its rows, or keys.
    finite : bool
        Whether it refuses NaN and infinity.
    runs : list of (int, int)
        First shard and end of each run of neighbouring shards on one server.
    codecs : list of (int, int, bool), optional
        For each run how rows travel that are pulled from there, and that are pushed (see `codec.pyx`); and whether
        lists of keys are named by their numbers (see `key_lists.pyx`). By default nothing of it. Calls whose terms are
        not narrow do not ask.
    """

    def __cinit__(
        self,
        int64_t table,
        int kind,
        int64_t dim,
        ShardMap shard_map not None,
        bint finite,
        list runs not None,
        list codecs not None=[],
    ):
        self.table, self.kind, self.dim = <uint32_t> table, kind, dim
        self.shard_map, self.rows, self.shards, self.finite = shard_map, shard_map.rows, shard_map.shards, finite
        self.row_bytes = dim * bytes_of(kind)
        self.count = len(runs)
        self.edges = <int64_t *> malloc(2 * self.count * sizeof(int64_t))
        self.codecs = <int *> calloc(2 * self.count, sizeof(int))
        self.lists = <bint *> calloc(self.count, sizeof(bint))
        if self.edges == NULL or self.codecs == NULL or self.lists == NULL:
            raise MemoryError
        for n, (first, end) in enumerate(runs):
            self.edges[2 * n], self.edges[2 * n + 1] = first, end
        self.travel(codecs)

    def travel(self, list codecs not None) -> None:
        """Let the calls that are prepared from now on travel by these codecs, as the constructor takes them. A call has
        taken its own when it was prepared, so those that are on their way keep theirs."""
        if len(codecs) > self.count:
            raise ValueError(f"{len(codecs)} codecs for {self.count} runs")
        for n, (pulled, pushed, listed) in enumerate(codecs):
            self.codecs[2 * n], self.codecs[2 * n + 1], self.lists[n] = pulled, pushed, listed

    def __dealloc__(self):
        free(self.edges)
        free(self.codecs)
        free(self.lists)


cdef bint fits(Form form, cnp.ndarray keys, int64_t count, cnp.ndarray rows, bint exactly, int flags):
    """Whether these are the rows of the keys: of the table's dtype, contiguous, and in the keys' shape.

    If not `exactly`, the shape may also be [count, dim].
    """
    cdef int n, axes = 1 if keys is None else keys.ndim
    if cnp.PyArray_TYPE(rows) != form.kind or not cnp.PyArray_CHKFLAGS(rows, flags):
        return False
    if rows.ndim == 2 and rows.shape[0] == count and rows.shape[1] == form.dim and not exactly:
        return True
    if cnp.PyArray_SIZE(rows) != count * form.dim or rows.ndim != axes + (form.dim != 1):
        return False
    for n in range(axes):
        if rows.shape[n] != (count if keys is None else keys.shape[n]):
            return False
    return form.dim == 1 or rows.shape[axes] == form.dim


cdef bint is_finite(Form form, cnp.ndarray rows):
    cdef bint finite = True
    cdef const void *numbers = cnp.PyArray_DATA(rows)
    cdef int64_t count = cnp.PyArray_SIZE(rows)
    if form.finite:
        with nogil:
            finite = are_finite(form.kind, numbers, count)
    return finite


cdef cnp.ndarray new_rows(Form form, cnp.ndarray keys, int64_t count):
    """An array for the values of the keys: in their shape, with an axis for the columns if there are several."""
    cdef cnp.npy_intp shape[33]
    cdef int n, axes = 1
    shape[0] = count
    if keys is not None:
        axes = keys.ndim
        for n in range(axes):
            shape[n] = keys.shape[n]
    if form.dim != 1:
        shape[axes] = form.dim
        axes += 1
    return new_array(axes, shape, form.kind)
