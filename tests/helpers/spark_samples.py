"""Which rows Spark's ``RDD.sample(False, fraction, seed)`` takes, in plain Python.

That is java.util.Random, XORShiftRandom, and the Bernoulli sampler with its gaps.
"""

from __future__ import annotations

import math

M32, M64 = 2**32 - 1, 2**64 - 1
MULTIPLIER, INCREMENT = 0x5DEECE66D, 0xB  # of java.util.Random
ARRAY_SEED = 0x3C074A61  # of scala.util.hashing.MurmurHash3
LARGEST_OF_GAPS = 0.4  # fraction up to which gaps are drawn, and not each row


def partition_seeds(seed: int, count: int) -> list[int]:
    """``new java.util.Random(seed).nextLong()`` for each partition."""
    state = (seed ^ MULTIPLIER) & 2**48 - 1
    seeds = []
    for _ in range(count):
        halves = []
        for _ in range(2):
            state = state * MULTIPLIER + INCREMENT & 2**48 - 1
            halves.append(_signed(state >> 16, 32))
        seeds.append((halves[0] << 32) + halves[1] & M64)
    return seeds


def _signed(value: int, bits: int) -> int:
    return value - 2**bits if value >> bits - 1 & 1 else value


def _murmur(data: bytes, seed: int) -> int:
    h = seed
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & M32
        h ^= (k << 15 | k >> 17) * 0x1B873593 & M32
        h = (h << 13 | h >> 19) & M32
        h = h * 5 + 0xE6546B64 & M32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & M32
    h = (h ^ h >> 13) * 0xC2B2AE35 & M32
    return h ^ h >> 16


class XorShift:
    """org.apache.spark.util.random.XORShiftRandom."""

    def __init__(self, seed: int):
        data = seed.to_bytes(8, "big")
        low = _murmur(data, ARRAY_SEED)
        self.state = _murmur(data, low) << 32 | low

    def bits(self, count: int) -> int:
        s = self.state
        s ^= s << 21 & M64
        s ^= s >> 35
        s ^= s << 4 & M64
        self.state = s
        return s & 2**count - 1

    def double(self) -> float:
        high = self.bits(26)
        return ((high << 27) + self.bits(27)) * 2.0**-53


def sampled(rows: int, fraction: float, seed: int) -> list[int]:
    """The rows that a partition's sampler takes."""
    if fraction >= 1:
        return list(range(rows))
    random = XorShift(seed)
    if fraction > LARGEST_OF_GAPS:
        return [row for row in range(rows) if random.double() <= fraction]
    taken, gap = [], _gap(random, fraction)
    for row in range(rows):
        if gap > 0:
            gap -= 1
        else:
            taken.append(row)
            gap = _gap(random, fraction)
    return taken


def _gap(random: XorShift, fraction: float) -> int:
    return int(math.log(max(random.double(), 5e-11)) / math.log1p(-fraction))
