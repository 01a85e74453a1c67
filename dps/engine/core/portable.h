/* sine, logarithm, power: the same bits on every machine.

   Replicas of a shard must agree bit for bit, and a key must get the same initial value years later on another
   processor. IEEE 754 fixes every bit of + - * / and the square root; the C library's sin, log and pow differ between
   versions and processors in the last bit. So these functions are built from exact operations in a fixed order.
   `dps_sine` and `dps_logarithm` have no branches, so that loops over them vectorise. Their error is a few units in
   the last place, which is precise enough here. They must never change, because stored models depend on them. */
#ifndef DPS_PORTABLE_H
#define DPS_PORTABLE_H

#include <stdint.h>
#include <string.h>

#define DPS_LN2 0.6931471805599453

static inline double dps_of_bits(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t dps_bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* sin(x) for x in [-pi/2, pi/2], by its Taylor series: the terms are (-1)^k / (2 k + 1)!, and the next one is below
   1e-19. The first product makes NaN of numbers too large to square. */
static inline double dps_sine(double x) {
    double square = x * x, total = 0.0;
    total = total * square - 1.0 / 25852016738884976640000.0;
    total = total * square + 1.0 / 51090942171709440000.0;
    total = total * square - 1.0 / 121645100408832000.0;
    total = total * square + 1.0 / 355687428096000.0;
    total = total * square - 1.0 / 1307674368000.0;
    total = total * square + 1.0 / 6227020800.0;
    total = total * square - 1.0 / 39916800.0;
    total = total * square + 1.0 / 362880.0;
    total = total * square - 1.0 / 5040.0;
    total = total * square + 1.0 / 120.0;
    total = total * square - 1.0 / 6.0;
    total = total * square + 1.0;
    return total * x;
}

/* log(x) for a normal x > 0: x = m 2^e with m in [0.707, 1.414), and log m = 2 atanh((m - 1) / (m + 1)) by the Taylor
   series of atanh, whose terms are 1 / (2 k + 1); the next one is below 1e-19. */
static inline double dps_logarithm(double x) {
    uint64_t bits = dps_bits_of(x);
    /* The constant is sqrt(1/2) as bits. 1024 is added for a while, because processors without AVX-512 cannot shift
       negative numbers of 64 bits. */
    int32_t exponent = (int32_t)((bits - UINT64_C(0x3FE6A09E667F3BCD) + (UINT64_C(1024) << 52)) >> 52) - 1024;
    double mantissa = dps_of_bits(bits - ((uint64_t)(int64_t)exponent << 52));
    double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s, total = 1.0 / 23.0;
    total = total * square + 1.0 / 21.0;
    total = total * square + 1.0 / 19.0;
    total = total * square + 1.0 / 17.0;
    total = total * square + 1.0 / 15.0;
    total = total * square + 1.0 / 13.0;
    total = total * square + 1.0 / 11.0;
    total = total * square + 1.0 / 9.0;
    total = total * square + 1.0 / 7.0;
    total = total * square + 1.0 / 5.0;
    total = total * square + 1.0 / 3.0;
    total = total * square + 1.0;
    return exponent * DPS_LN2 + 2.0 * s * total;
}

/* base to the power of exponent, by repeated squaring */
static inline double dps_power(double base, uint64_t exponent) {
    double result = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) {
            result *= base;
        }
        base *= base;
    }
    return result;
}

#endif
