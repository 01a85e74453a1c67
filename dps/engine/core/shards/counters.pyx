"""What a server counts of its requests, whichever way they go: see :mod:`dps.engine.telemetry.server_meter`."""

from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free

from dps.engine.core.shards.heat cimport KeyHeat

cdef enum:
    LARGEST_BITS = 64  # the largest bit length of a time in microseconds


cdef class RequestCounters:
    """The requests of one kind (pulls or pushes) for one table.

    Attributes
    ----------
    keys, bytes : int
        Keys or rows in them; bytes of their bodies and of the answers.
    key_bytes, back_bytes : int
        Those of the bytes that name rows, and those of the answers.
    seconds : float
        The time in which they were handled.

    Examples
    --------
    >>> counters = RequestCounters()
    >>> counters.count(keys=2, nbytes=32, seconds=5e-6)
    >>> counters.requests, counters.keys, counters.histogram[:4]
    (1, 2, [0, 0, 0, 1])
    """

    def count(
        self, int64_t keys, int64_t nbytes, double seconds, int64_t key_bytes=0, int64_t back_bytes=0
    ) -> None:
        """Count one request."""
        self.add(keys, nbytes, seconds, key_bytes, back_bytes)

    @property
    def requests(self) -> int:
        """How many there have been."""
        return sum(self.histogram)

    @property
    def histogram(self) -> list:
        """How many requests there have been, by the bit length of their time in microseconds."""
        return [self._times[n] for n in range(LARGEST_BITS + 1)]

    cdef void add(
        self, int64_t keys, int64_t nbytes, double seconds, int64_t key_bytes, int64_t back_bytes
    ) noexcept:
        cdef int64_t microseconds = <int64_t> (seconds * 1e6)
        cdef int bits = 0
        while microseconds > 0:
            microseconds >>= 1
            bits += 1
        self.keys += keys
        self.bytes += nbytes
        self.key_bytes += key_bytes
        self.back_bytes += back_bytes
        self.seconds += seconds
        self._times[bits] += 1


cdef class TableCounters:
    """The requests for one table.

    Parameters
    ----------
    shards : int
        Number of the table's shards.

    Attributes
    ----------
    pulls, pushes : RequestCounters
    heat : KeyHeat
        Which keys are accessed most.
    """

    def __init__(self, int64_t shards):
        self.pulls, self.pushes, self.heat = RequestCounters(), RequestCounters(), KeyHeat()
        free(self._shards)
        self._count = shards
        self._shards = <int64_t *> calloc(max(shards, 1), sizeof(int64_t))
        if self._shards == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._shards)

    @property
    def shards(self) -> list:
        """The keys served of each shard."""
        return [self._shards[n] for n in range(self._count)]

    def count_keys(self, int64_t shard, keys, int64_t start, int64_t count) -> None:
        """Count keys served of a shard: an array of int64, or None for so many rows from `start` on."""
        if 0 <= shard < self._count:
            self.heat.add(keys, start, count)
            self._shards[shard] += count

    def count_scanned(self, int64_t shard, int64_t rows) -> None:
        """Count rows of a shard that were read in the order of the index: no key of them was asked for."""
        if 0 <= shard < self._count:
            self._shards[shard] += rows

    cdef void add_keys(self, int64_t shard, const int64_t *keys, int64_t start, int64_t count) noexcept:
        if 0 <= shard < self._count:
            self._shards[shard] += count
            self.heat.pass_keys(keys, start, count)


cdef class ServerCounters:
    """What a server counts of all its requests.

    Attributes
    ----------
    lag : float
        The longest time since the last report, in seconds, for which the endpoint's thread kept other work waiting.
    """
