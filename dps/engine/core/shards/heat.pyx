"""The keys of a table that are accessed most, on one server: a small sketch, fed with a sample of the accesses.

The sketch is SpaceSaving (Metwally, Agrawal, El Abbadi: Efficient computation of frequent and top-k elements in data
streams, 2005), with weights. A key without a counter takes over the smallest one, with its count, which becomes the
error of the key. So for each key with a counter

    count - error <= true weight <= count,

no error is larger than total / COUNTERS, and each key with more than this weight has a counter. All counts fade at the
same rate, because users ask what is hot now; the bounds hold for faded weights as they do for others.

The sample has every n-th key on average, at random distances from 1 to 2 n - 1, because equal distances would meet the
same keys again in requests of the same length. A sample weighs n, so weights are unbiased. n follows the traffic: it is
chosen anew with each report of the server, and doubles between reports, so a burst costs little, too.
"""

cimport cython
cimport numpy as cnp
from libc.math cimport NAN, ceil, exp2, isnan
from libc.stdint cimport int64_t, uint64_t

from dps.engine.core.arrays cimport int64s

cnp.import_array()

HALF_LIFE_SECONDS = 10.0
MAX_STRIDE = 1 << 30

cdef double half_life = HALF_LIFE_SECONDS
cdef int64_t max_stride = MAX_STRIDE
cdef double NEGLIGIBLE = 0.5  # weight of all samples: less than one access
cdef int64_t FIRST_SAMPLES = 10_000  # before the first report, after which the strides are doubled
cdef double LONGEST_SECONDS = 1.0  # of samples without doubled strides, where reports are late


@cython.final
cdef class SpaceSaving:
    """The heaviest keys of a stream, in 128 counters; see the module.

    Attributes
    ----------
    total : float
        The weight of all keys.

    Examples
    --------
    >>> sketch = SpaceSaving()
    >>> for key in [7, 7, 7, -1]:
    ...     sketch.add(key, 2.0)
    >>> sketch.hottest(3), sketch.total, len(sketch)
    ([(7, 6.0, 0.0), (-1, 2.0, 0.0)], 8.0, 2)
    """

    def __len__(self) -> int:
        """How many keys have a counter."""
        return self._used

    def add(self, int64_t key, double weight=1.0) -> None:
        """Count a key."""
        if not 0.0 <= weight < 1e300:
            raise ValueError(f"a weight of {weight}: it has to be a finite number that is not negative")
        self.count(key, weight)

    def scale(self, double factor) -> None:
        """Let all counts fade to this share of them."""
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"counts cannot fade to {factor} times what they are")
        self.fade(factor)

    def hottest(self, int count) -> list:
        """The keys with the largest counts, the largest first: of each its key, its count, its error."""
        cdef int n
        self._sort()
        return [(self._keys[n], self._counts[n], self._errors[n]) for n in range(min(count, self._used))]

    def rest(self, int first, int end) -> tuple:
        """The keys from place `first` of the hottest up to place `end`: how many, their counts, their errors."""
        cdef double counts = 0.0, errors = 0.0
        cdef int n, stop = min(end, self._used)
        self._sort()
        for n in range(first, stop):
            counts += self._counts[n]
            errors += self._errors[n]
        return max(stop - first, 0), counts, errors

    cdef void count(self, int64_t key, double weight) noexcept:
        cdef int n, least
        self.total += weight
        for n in range(self._used):
            if self._keys[n] == key:
                self._counts[n] += weight
                return
        if self._used < COUNTERS:
            least = self._used
            self._used += 1
            self._counts[least] = 0.0
        else:
            least = 0
            for n in range(1, COUNTERS):
                if self._counts[n] < self._counts[least]:
                    least = n
        self._keys[least], self._errors[least] = key, self._counts[least]
        self._counts[least] += weight

    cdef void fade(self, double factor) noexcept:
        cdef int n
        self.total *= factor
        if self.total < NEGLIGIBLE:
            self.total, self._used = 0.0, 0
        for n in range(self._used):
            self._counts[n] *= factor
            self._errors[n] *= factor

    cdef void _sort(self) noexcept:
        """Bring the largest counts to the front. They are there already but for a few, and so this takes few steps."""
        cdef int n, place
        cdef int64_t key
        cdef double counted, error
        for n in range(1, self._used):
            key, counted, error, place = self._keys[n], self._counts[n], self._errors[n], n
            while place > 0 and self._counts[place - 1] < counted:
                self._keys[place] = self._keys[place - 1]
                self._counts[place] = self._counts[place - 1]
                self._errors[place] = self._errors[place - 1]
                place -= 1
            self._keys[place], self._counts[place], self._errors[place] = key, counted, error


@cython.final
cdef class KeyHeat:
    """The hottest keys of one table; see the module.

    Attributes
    ----------
    sketch : SpaceSaving
        Of the sample.
    stride : int
        Keys from one sample to the next now, on average.

    Examples
    --------
    >>> heat = KeyHeat()
    >>> heat.add(None, 5, 3)
    >>> heat.sketch.hottest(8)
    [(5, 1.0, 0.0), (6, 1.0, 0.0), (7, 1.0, 0.0)]
    """

    def __cinit__(self):
        self.sketch, self.stride = SpaceSaving(), 1
        self._passed, self._most, self._since, self._random = 0, FIRST_SAMPLES, NAN, 1
        self._gap = self._draw()

    def add(self, keys, int64_t start, int64_t count) -> None:
        """So many accesses: of these keys (int64), or, where they are None, of the rows from `start` on."""
        if keys is None:
            self.pass_keys(NULL, start, count)
        elif not 0 <= count <= len(keys):
            raise ValueError(f"{count} accesses of {len(keys)} keys")
        else:
            self.pass_keys(int64s(keys), 0, count)

    def age(self, double now, double samples) -> int:
        """Let what was counted until `now` (in seconds) fade, and choose the stride for about so many samples a second.

        Returns how many accesses there have been since the last call.
        """
        cdef double seconds = now - self._since
        cdef int64_t passed = self._passed
        if isnan(seconds):  # the first call, which knows no time before
            self._since = now
        elif seconds > 0.0 and samples > 0.0:
            self.sketch.fade(exp2(-seconds / half_life))
            self.stride = <int64_t> max(1.0, min(<double> max_stride, ceil(passed / (samples * seconds))))
            self._most = <int64_t> max(1.0, samples * min(seconds, LONGEST_SECONDS))
            self._passed, self._since = 0, now
            if self.stride < self._weight:  # a sample of before may be far away
                self._gap = self._draw()
        return passed

    cdef void pass_keys(self, const int64_t *keys, int64_t start, int64_t count) noexcept:
        self._passed += count
        if self._gap <= count:
            self._sample(keys, start, count)
        else:
            self._gap -= count

    cdef void _sample(self, const int64_t *keys, int64_t start, int64_t count) noexcept:
        """Count the samples among some keys."""
        cdef int64_t at = self._gap - 1
        while self._passed > self._most * self.stride and self.stride < max_stride:
            self.stride *= 2
        while at < count:
            self.sketch.count(start + at if keys == NULL else keys[at], self._weight)
            at += self._draw()
        self._gap = at - count + 1

    cdef int64_t _draw(self) noexcept:
        """The distance to the next sample, whose weight is the mean of all distances."""
        self._weight = <double> self.stride
        self._random = self._random * <uint64_t> 6364136223846793005 + <uint64_t> 1442695040888963407
        return 1 + <int64_t> (((self._random >> 32) * <uint64_t> (2 * self.stride - 1)) >> 32)
