/* Rows of float32 as they travel between hosts: as float16 or bfloat16, or as one byte a number.

   A row of bytes is: scale (bfloat16), zero (bfloat16), then q[dim], and number j of it stands for zero + scale * q[j].
   The zero is the least number of the row, rounded down, and the scale is rounded up, so that all numbers of the row
   lie between zero and zero + 255 scale. A row with NaN or infinity arrives as NaN in all its numbers. */
#ifndef DPS_CODEC_H
#define DPS_CODEC_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "clones.h"
#include "halves.h"
#include "mixing.h"

#define DPS_BYTES_HEAD 4 /* bytes before the numbers of a row of bytes */
#define DPS_LANES 8 /* numbers side by side: a vector of AVX2 */
typedef float dps_floats __attribute__((vector_size(4 * DPS_LANES)));
typedef int32_t dps_wholes __attribute__((vector_size(4 * DPS_LANES)));
typedef uint8_t dps_octets __attribute__((vector_size(DPS_LANES)));

/* A finite number that a half cannot hold becomes the largest that it can: infinity would stay in a table for good. */
static inline uint16_t dps_within(uint16_t half, uint16_t largest, float x) {
    const int over = (half & 0x7FFF) > largest && (dps_bits_of_float(x) & UINT32_C(0x7FFFFFFF)) < UINT32_C(0x7F800000);
    return over ? (uint16_t)((half & 0x8000) | largest) : half;
}

DPS_CLONES static void dps_encode_float16(const float *rows, int64_t count, uint16_t *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = dps_within(dps_narrow_float16(rows[i]), 0x7BFF, rows[i]);
    }
}

DPS_CLONES static void dps_encode_bfloat16(const float *rows, int64_t count, uint16_t *out) {
    for (int64_t i = 0; i < count; i++) {
        out[i] = dps_within(dps_narrow_bfloat16(rows[i]), 0x7F7F, rows[i]);
    }
}

/* The number x, or else y: without a branch, because a compiler makes vectors of a loop without branches only. */
static inline float dps_select(int first, float x, float y) {
    const uint32_t mask = 0u - (uint32_t)first;
    return dps_float_of_bits((dps_bits_of_float(x) & mask) | (dps_bits_of_float(y) & ~mask));
}

/* A number of a row of bytes, within a quarter of the largest float, because a difference of two is finite then. */
static inline float dps_bounded(float x) {
    const float most = FLT_MAX / 4, below = dps_select(x > most, most, x);
    return dps_select(below < -most, -most, below);
}

/* The bits of a float as a whole number of the same order, and back. */
static inline int32_t dps_ordered(int32_t bits) {
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

/* The least and the greatest number of a row; whether all of them are finite. A compiler makes vectors of least and
   greatest whole numbers, and not of those of floats, because of NaN. */
static inline __attribute__((always_inline)) int dps_bounds(
    const float *row, int64_t dim, float *least, float *greatest
) {
    int32_t low = INT32_MAX, high = INT32_MIN, odd = 0, bits;
    for (int64_t j = 0; j < dim; j++) {
        memcpy(&bits, row + j, sizeof(bits));
        const int32_t place = dps_ordered(bits), size = bits & 0x7FFFFFFF;
        low = place < low ? place : low;
        high = place > high ? place : high;
        odd = size > odd ? size : odd;
    }
    low = dps_ordered(low);
    high = dps_ordered(high);
    memcpy(least, &low, sizeof(low));
    memcpy(greatest, &high, sizeof(high));
    return odd < 0x7F800000;
}

/* What is added before a number is cut: a half, to round to the nearest; or a draw from [0, 1) that follows from the
   seed and from j, so that a number is rounded up with the probability of what is left over. */
static inline float dps_rounding(uint32_t seed, int64_t j, int draws) {
    uint32_t h = seed + (uint32_t)j * UINT32_C(0x9E3779B9);
    h = (h ^ (h >> 16)) * UINT32_C(0x21F0AAAD);
    h = (h ^ (h >> 15)) * UINT32_C(0x735A2D97);
    h ^= h >> 15;
    return draws ? (float)(int32_t)(h >> 8) * 0x1p-24f : 0.5f;
}

/* The heads of a few rows, and what makes bytes of their numbers: (number - base) * inverse. Rows are encoded DPS_FEW
   at a time, because the divisions for several rows are vectors then, and the time for a row with 16 numbers halves. */
#define DPS_FEW 64
typedef struct {
    float least[DPS_FEW], greatest[DPS_FEW], base[DPS_FEW], step[DPS_FEW], inverse[DPS_FEW];
    int32_t finite[DPS_FEW], plain[DPS_FEW]; /* whether all numbers are; whether `dps_encode_row` may have it */
    uint32_t head[DPS_FEW]; /* the scale, and above it the zero */
} dps_heads;

/* The loop has all DPS_FEW rows, also where fewer are wanted, because a compiler makes vectors of it then. */
static inline __attribute__((always_inline)) void dps_find_heads(dps_heads *of) {
    for (int i = 0; i < DPS_FEW; i++) {
        const float least = dps_bounded(of->least[i]), greatest = dps_bounded(of->greatest[i]);
        const uint32_t zero = dps_bits_of_float(least + 0.0f); /* adding 0 makes +0 of -0 */
        const uint32_t down = (zero + (zero >> 31) * 0xFFFF) & UINT32_C(0xFFFF0000);
        const float base = dps_float_of_bits(down);
        const float range = dps_select(of->finite[i], (greatest - base) / 255 + 0.0f, NAN);
        const uint32_t scale = (dps_bits_of_float(range) + (of->finite[i] ? 0xFFFF : 0)) & UINT32_C(0xFFFF0000);
        const float step = dps_float_of_bits(scale);
        const int bounded = (least == of->least[i]) & (greatest == of->greatest[i]);
        of->plain[i] = of->finite[i] & bounded & ((step >= FLT_MIN) | (step == 0));
        of->inverse[i] = 1 / dps_select(step >= FLT_MIN, step, INFINITY);
        of->base[i] = base;
        of->step[i] = step;
        of->head[i] = scale >> 16 | down;
    }
}

static inline __attribute__((always_inline)) void dps_encode_row(
    const float *row, int64_t dim, float base, float inverse, uint32_t seed, int draws, uint8_t *out
) {
    int64_t j = 0;
    for (; j + DPS_LANES <= dim; j += DPS_LANES) {
        dps_floats x, added;
        memcpy(&x, row + j, sizeof(x));
        for (int k = 0; k < DPS_LANES; k++) {
            added[k] = dps_rounding(seed, j + k, draws);
        }
        const dps_floats place = (x - base) * inverse + added; /* 0 or more */
        const dps_wholes below = place < 255;
        const dps_floats kept = (dps_floats)((dps_wholes)place & below); /* 0 in place of 255 and more */
        const dps_wholes number = __builtin_convertvector(kept, dps_wholes) | (~below & 255);
        const dps_octets octets = __builtin_convertvector(number, dps_octets);
        memcpy(out + j, &octets, sizeof(octets));
    }
    for (; j < dim; j++) {
        const float place = (row[j] - base) * inverse + dps_rounding(seed, j, draws);
        out[j] = (uint8_t)(int32_t)(place < 255 ? place : 255);
    }
}

/* A row with numbers that are not finite, or beyond what `dps_bounded` leaves, or so near to each other that 1 / step
   is infinite: hardly ever. */
static inline void dps_encode_odd_row(
    const float *row, int64_t dim, int finite, float base, float step, uint32_t seed, int draws, uint8_t *out
) {
    for (int64_t j = 0; j < dim; j++) {
        const float place = finite ? (dps_bounded(row[j]) - base) / step + dps_rounding(seed, j, draws) : 0;
        out[j] = (uint8_t)(int32_t)(place < 255 ? place : 255);
    }
}

static inline __attribute__((always_inline)) void dps_encode_few(
    const float *rows, int64_t count, int64_t dim, const uint32_t *seeds, int draws, uint8_t *out
) {
    dps_heads of = {0};
    for (int64_t i = 0; i < count; i++) {
        of.finite[i] = dps_bounds(rows + i * dim, dim, &of.least[i], &of.greatest[i]);
    }
    dps_find_heads(&of);
    for (int64_t i = 0; i < count; i++) {
        const float *row = rows + i * dim;
        memcpy(out, &of.head[i], DPS_BYTES_HEAD);
        if (of.plain[i]) {
            dps_encode_row(row, dim, of.base[i], of.inverse[i], seeds[i], draws, out + DPS_BYTES_HEAD);
        } else {
            const int finite = of.finite[i];
            dps_encode_odd_row(row, dim, finite, of.base[i], of.step[i], seeds[i], draws, out + DPS_BYTES_HEAD);
        }
        out += dim + DPS_BYTES_HEAD;
    }
}

/* `keys` name the rows, or they are first, first + 1, ...: what is drawn for a row follows from its name alone. A seed
   of 0 draws nothing. */
DPS_CLONES static void dps_encode_bytes(
    const float *rows, int64_t count, int64_t dim, const int64_t *keys, int64_t first, uint64_t seed, uint8_t *out
) {
    uint32_t seeds[DPS_FEW] = {0};
    for (int64_t i = 0; i < count; i += DPS_FEW) {
        const int64_t few = count - i < DPS_FEW ? count - i : DPS_FEW;
        for (int64_t k = 0; seed != 0 && k < few; k++) {
            const uint64_t name = (uint64_t)(keys ? keys[i + k] : first + i + k);
            seeds[k] = (uint32_t)(dps_mix(seed ^ dps_mix(name)) >> 32);
        }
        if (seed == 0) { /* a constant, so that the loop over numbers has no hash */
            dps_encode_few(rows + i * dim, few, dim, seeds, 0, out + i * (dim + DPS_BYTES_HEAD));
        } else {
            dps_encode_few(rows + i * dim, few, dim, seeds, 1, out + i * (dim + DPS_BYTES_HEAD));
        }
    }
}

DPS_CLONES static void dps_decode_bytes(const uint8_t *coded, int64_t count, int64_t dim, float *out) {
    for (int64_t i = 0; i < count; i++) {
        uint16_t scale, zero;
        memcpy(&scale, coded, 2);
        memcpy(&zero, coded + 2, 2);
        const float step = dps_widen_bfloat16(scale), base = dps_widen_bfloat16(zero);
        coded += DPS_BYTES_HEAD;
        for (int64_t j = 0; j < dim; j++) {
            out[j] = base + step * coded[j];
        }
        coded += dim;
        out += dim;
    }
}

#endif
