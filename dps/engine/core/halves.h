/* Numbers of 16 bits, which rows hold and nothing computes with: float16 of IEEE 754, and bfloat16, the upper half of a
   float. They are widened to float, which is exact, and narrowed by rounding to the nearest, ties to even.

   No branch and no subnormal float is used, so processors of all generations vectorise these, and agree whether or not
   another library has switched subnormal numbers off. */
#ifndef DPS_HALVES_H
#define DPS_HALVES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "clones.h"
#include "join.h"

typedef uint16_t float16;
typedef uint16_t bfloat16;

/* A float that lies in a row of halves: at an even address, which need be no multiple of 4 */
typedef float __attribute__((aligned(2), may_alias)) loose_float;

static inline float dps_float_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t dps_bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float dps_widen_float16(float16 half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, size = (uint32_t)(half & 0x7FFF) << 13;
    const uint32_t normal = size + UINT32_C(0x38000000); /* 112 more in the exponent */
    const uint32_t special = size | UINT32_C(0x7F800000);
    const uint32_t tiny = dps_bits_of_float(dps_float_of_bits(size + UINT32_C(0x38800000)) - 0x1p-14f);
    const uint32_t found = size < UINT32_C(0x00800000) ? tiny : normal;
    return dps_float_of_bits((size >= UINT32_C(0x0F800000) ? special : found) | sign);
}

static inline float16 dps_narrow_float16(float x) {
    const uint32_t bits = dps_bits_of_float(x), size = bits & UINT32_C(0x7FFFFFFF);
    const uint32_t normal = ((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10);
    /* Adding 1/2 rounds at 2^-24, the distance of the smallest numbers, which then are the lowest bits. */
    const uint32_t tiny = dps_bits_of_float(dps_float_of_bits(size) + 0.5f) - UINT32_C(0x3F000000);
    const uint32_t nan = 0x7E00 | (size >> 13 & 0x3FF);
    const uint32_t large = size > UINT32_C(0x7F800000) ? nan : 0x7C00;
    const uint32_t found = size < UINT32_C(0x38800000) ? tiny : normal;
    return (float16)((size >= UINT32_C(0x47800000) ? large : found) | (bits >> 16 & 0x8000));
}

static inline float dps_widen_bfloat16(bfloat16 half) {
    return dps_float_of_bits((uint32_t)half << 16);
}

static inline bfloat16 dps_narrow_bfloat16(float x) {
    const uint32_t bits = dps_bits_of_float(x);
    const uint32_t nan = bits >> 16 | 0x40, found = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return (bfloat16)((bits & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000) ? nan : found);
}

/* A double as a float that becomes the same half: rounded towards zero, and made odd where it is not exact. So a tie
   is one only if it is one of the double, and the number is rounded once, although it is narrowed twice. */
static inline float dps_odd_float(double x) {
    const float near = (float)x;
    uint32_t bits = dps_bits_of_float(near);
    bits -= fabs((double)near) > fabs(x);
    bits |= (double)near != x && x == x;
    return dps_float_of_bits(bits);
}

static inline float16 dps_round_float16(double x) {
    return dps_narrow_float16(dps_odd_float(x));
}

static inline bfloat16 dps_round_bfloat16(double x) {
    return dps_narrow_bfloat16(dps_odd_float(x));
}

/* Loops over arrays: wide_TYPE and narrow_TYPE for values that lie side by side, and what needs no more than these. */
#define DPS_HALF_LOOPS(TYPE)                                                                           \
    DPS_CLONES static void dps_wide_##TYPE(const TYPE *halves, int64_t count, float *out) {            \
        for (int64_t i = 0; i < count; i++) {                                                          \
            out[i] = dps_widen_##TYPE(halves[i]);                                                      \
        }                                                                                              \
    }                                                                                                  \
    DPS_CLONES static void dps_narrowed_##TYPE(const float *values, int64_t count, TYPE *out) {        \
        for (int64_t i = 0; i < count; i++) {                                                          \
            out[i] = dps_narrow_##TYPE(values[i]);                                                     \
        }                                                                                              \
    }                                                                                                  \
    DPS_CLONES static void dps_rounded_##TYPE(const double *values, int64_t count, TYPE *out) {        \
        for (int64_t i = 0; i < count; i++) {                                                          \
            out[i] = dps_round_##TYPE(values[i]);                                                      \
        }                                                                                              \
    }                                                                                                  \
    /* totals[i] += halves[i] */                                                                       \
    DPS_CLONES static void dps_add_wide_##TYPE(const TYPE *halves, int64_t count, float *totals) {     \
        for (int64_t i = 0; i < count; i++) {                                                          \
            totals[i] += dps_widen_##TYPE(halves[i]);                                                  \
        }                                                                                              \
    }                                                                                                  \
    /* out[i] = a[i] - b[i]; `out` may be `b`, or lie before it */                                     \
    DPS_CLONES static void dps_less_##TYPE(const TYPE *a, const TYPE *b, int64_t count, TYPE *out) {   \
        for (int64_t i = 0; i < count; i++) {                                                          \
            out[i] = dps_narrow_##TYPE(dps_widen_##TYPE(a[i]) - dps_widen_##TYPE(b[i]));               \
        }                                                                                              \
    }                                                                                                  \
    /* Whether some numbers differ; NaN differs from itself, and zero does not from its negative */    \
    DPS_CLONES static int dps_differ_##TYPE(const TYPE *a, const TYPE *b, int64_t count) {             \
        int differs = 0;                                                                               \
        for (int64_t i = 0; i < count; i++) {                                                          \
            differs |= dps_widen_##TYPE(a[i]) != dps_widen_##TYPE(b[i]);                               \
        }                                                                                              \
        return differs;                                                                                \
    }

DPS_HALF_LOOPS(float16)
DPS_HALF_LOOPS(bfloat16)

#endif
