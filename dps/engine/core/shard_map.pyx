"""The map of a table's shards: which shard each key, or each row, lies on.

Every key of a table has a *place*. The place of a row of a dense table is its number. The place of a key of a keyed
table is its slot, one of 4,096: the first 12 bits of the hash of the key's cell, which mostly is the key itself. A
shard is a range of neighbouring places, from its *edge* to the next one.

The ranges of most tables are equal, so a formula says which shard has a place. The ranges of a table of which one shard
was split are not: then the shard of a slot is looked up in 8 KiB, and that of a row is searched among the edges.
"""

from libc.stdint cimport int64_t, uint16_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp

cimport cython
cimport numpy as cnp

from dps.engine.core.arrays cimport int64s, writeable_int64s
from dps.engine.core.cells cimport Cells
from dps.engine.core.mixing cimport dps_mix

import numpy as np

cnp.import_array()

SLOTS = 1 << SLOT_BITS


@cython.final
cdef class ShardMap:
    """Which shard each key lies on.

    Parameters
    ----------
    rows, shards : int
        Rows of a dense table, 0 for a keyed one; and how many shards there are.
    cells : Cells, optional
        Of a table with ``partition=``.
    edges : sequence of int, optional
        The first place of each shard, and the end: they ascend from 0. Without them all shards are equal, and those of
        a keyed table are a power of two.

    Examples
    --------
    >>> one, other = ShardMap(0, 2), ShardMap(0, 3, edges=[0, 1024, 2048, 4096])
    >>> one.edges, one.within(1024, 4096), other.within(0, 2048)
    ((0, 2048, 4096), range(0, 2), range(0, 2))
    >>> other.refines(one), one.refines(other), one.has(2048, 4096)
    (True, False, True)
    """

    def __cinit__(self, int64_t rows, int64_t shards, Cells cells=None, object edges=()):
        cdef int64_t places = rows if rows > 0 else SLOTS, n
        if not 0 < shards <= places:
            raise ValueError(f"{shards} shards for {places} places")
        self.rows, self.shards, self.cells = rows, shards, cells
        self.bits, self.first_places, self.of_slot = int(shards).bit_length() - 1, NULL, NULL
        if not len(edges):
            if rows == 0 and shards & (shards - 1):
                raise ValueError(f"{shards} equal shards of a keyed table")
            self.edges = tuple([n * places // shards for n in range(shards + 1)])
            return
        self.edges = tuple(map(int, edges))
        pairs = zip(self.edges, self.edges[1:])
        if len(self.edges) != shards + 1 or any(one >= other for one, other in pairs):
            raise ValueError(f"{len(self.edges)} edges, or edges that do not ascend, for {shards} shards")
        if self.edges[0] != 0 or self.edges[shards] != places:
            raise ValueError(f"edges from {self.edges[0]} to {self.edges[shards]} for places from 0 to {places}")
        self._set_edges()

    def __dealloc__(self):
        free(self.first_places)
        free(self.of_slot)

    cdef int _set_edges(self) except -1:
        cdef int64_t shard, slot
        self.first_places = <int64_t *> malloc((self.shards + 1) * sizeof(int64_t))
        if self.first_places == NULL:
            raise MemoryError
        for shard in range(self.shards + 1):
            self.first_places[shard] = self.edges[shard]
        if self.rows > 0:
            return 0
        self.of_slot = <uint16_t *> malloc(SLOTS * sizeof(uint16_t))
        if self.of_slot == NULL:
            raise MemoryError
        for shard in range(self.shards):
            for slot in range(self.first_places[shard], self.first_places[shard + 1]):
                self.of_slot[slot] = <uint16_t> shard
        return 0

    def __reduce__(self):
        return ShardMap, (self.rows, self.shards, self.cells, () if self.first_places == NULL else self.edges)

    @property
    def is_even(self) -> bool:
        """Whether all shards are equal."""
        return self.first_places == NULL

    def refines(self, ShardMap other not None) -> bool:
        """Whether each of its shards lies within one shard of the other map, of the same table."""
        return self.is_same(other) or set(other.edges) <= set(self.edges)

    def within(self, int64_t first, int64_t end) -> range:
        """The shards that have some of the places from `first` on and before `end`."""
        if first >= end:
            return range(0)
        return range(self.of_place(first), self.of_place(end - 1) + 1)

    def has(self, int64_t first, int64_t end) -> bool:
        """Whether one of the shards begins and ends there."""
        found = self.within(first, end)
        return len(found) == 1 and self.edges[found.start] == first and self.edges[found.stop] == end

    def places(self, cnp.ndarray keys not None) -> np.ndarray:
        """The place of each key, both int64[m]."""
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(keys)
        cdef const int64_t *key = int64s(keys)
        cdef cnp.ndarray found = cnp.PyArray_SimpleNew(1, &count, cnp.NPY_INT64)
        cdef int64_t *place = writeable_int64s(found)
        cdef int64_t i
        if self.rows > 0:
            for i in range(count):
                place[i] = key[i]
            return found
        if self.cells is not None:
            self.cells.fill(key, count, place)
            key = place
        for i in range(count):
            place[i] = <int64_t> (dps_mix(<uint64_t> key[i]) >> (64 - SLOT_BITS))
        return found

    def stray(self, cnp.ndarray keys not None, int64_t shard) -> int:
        """The number of the first key that lies on another shard; -1 if all lie on this one."""
        cdef cnp.ndarray cells
        cdef cnp.npy_intp count = cnp.PyArray_SIZE(keys)
        if self.cells is None or self.cells.function is None:
            return self.first_stray(int64s(keys), count, shard)
        cells = cnp.PyArray_SimpleNew(1, &count, cnp.NPY_INT64)
        self.cells.of(keys, cells)
        return ShardMap(0, self.shards, None, () if self.first_places == NULL else self.edges).stray(cells, shard)

    cdef int64_t edge(self, int64_t shard) noexcept nogil:
        """The first place of a shard, or the end of the last one."""
        if self.first_places != NULL:
            return self.first_places[shard]
        return shard * (self.rows if self.rows > 0 else <int64_t> 1 << SLOT_BITS) // self.shards

    cdef int64_t of_place(self, int64_t place) noexcept nogil:
        """The shard that has a place."""
        if self.rows > 0:
            return shard_of_row(place, self.rows, self.shards, self.first_places)
        return shard_of_hash(<uint64_t> place << (64 - SLOT_BITS), self.bits, self.of_slot)

    cdef bint is_same(self, ShardMap other) noexcept nogil:
        """Whether the other map has the same edges."""
        if self.shards != other.shards or self.rows != other.rows:
            return False
        if self.first_places == NULL or other.first_places == NULL:
            return self.first_places == other.first_places
        return memcmp(self.first_places, other.first_places, (self.shards + 1) * sizeof(int64_t)) == 0

    cdef int64_t first_stray(self, const int64_t *keys, int64_t count, int64_t shard) noexcept nogil:
        """As :meth:`stray`, for a keyed table whose cells are not those of a function."""
        cdef int64_t i, cell, last = 0
        for i in range(count):
            cell = keys[i] if self.cells is None else self.cells.of_key(keys[i])
            if i > 0 and cell == last:  # neighbours in a request are often of one cell
                continue
            if shard_of_hash(dps_mix(<uint64_t> cell), self.bits, self.of_slot) != shard:
                return i
            last = cell
        return -1
