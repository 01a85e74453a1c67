"""sine, logarithm, power: the same bits on every machine. See portable.h."""

from libc.stdint cimport uint64_t

from dps.engine.core.portable cimport dps_logarithm, dps_power, dps_sine


def sine(double x) -> float:
    """sin(x) for x in [-pi/2, pi/2]."""
    return dps_sine(x)


def logarithm(double x) -> float:
    """log(x) for a normal x > 0."""
    return dps_logarithm(x)


def power(double base, uint64_t exponent) -> float:
    """`base` to the power of `exponent`, a whole number from 0 to 2**64 - 1."""
    return dps_power(base, exponent)
