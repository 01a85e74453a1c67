"""sine, logarithm, power: the same bits on every machine.

Replicas of a shard must agree bit for bit, and a key must get the same initial value years later on another processor.
IEEE 754 fixes every bit of ``+ - * /`` and the square root; the C library's ``sin``, ``log`` and ``pow`` differ between
versions and processors in the last bit. So these functions are built here from exact operations in a fixed order. They
run in plain Python and inside numba kernels alike; `sine` and `logarithm` have no branches, so that loops over them
vectorise. Their error is a few units in the last place, which is precise enough here.

numba's cache does not notice a change in this file: after one, delete the ``.nbi`` files in ``dps/state/__pycache__``.
"""

from __future__ import annotations

import math

import numpy as np
from numba.extending import register_jitable

__all__ = ["logarithm", "power", "sine"]

_SINE = tuple((-1.0) ** k / math.factorial(2 * k + 1) for k in range(11, -1, -1))  # next term: < 1e-19
_ATANH = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))  # next term: < 1e-19
_LN2 = 0.6931471805599453


@register_jitable
def sine(x: float) -> float:
    """sin(x) for x in [-pi/2, pi/2], by its Taylor series."""
    square = x * x
    total = 0.0
    for term in _SINE:
        total = total * square + term
    return total * x


@register_jitable
def logarithm(x: float) -> float:
    """log(x) for a normal float64 x > 0: x = m 2^e with m in [0.707, 1.414), log m = 2 atanh((m - 1) / (m + 1))."""
    bits = np.float64(x).view(np.int64)
    exponent = (bits - 0x3FE6A09E667F3BCD) >> 52  # the constant is sqrt(1/2) as bits
    mantissa = np.int64(bits - (exponent << 52)).view(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = 0.0
    for term in _ATANH:
        total = total * square + term
    return exponent * _LN2 + 2.0 * s * total


@register_jitable
def power(base: float, exponent: int) -> float:
    """base ** exponent for a whole exponent >= 0, by repeated squaring."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
