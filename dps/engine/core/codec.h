/* Rows of float32 as they travel between hosts: as float16 or bfloat16, or as one byte a number.

   A row of bytes is: scale (bfloat16), zero (bfloat16), then q[dim], and number j of it stands for zero + scale * q[j].
   The zero is the least number of the row, rounded down, and the scale is rounded up, so that all numbers of the row
   lie between zero and zero + 255 scale. A row with NaN or infinity arrives as NaN in all its numbers. */
#ifndef DPS_CODEC_H
#define DPS_CODEC_H

#include <float.h>
#include <stdint.h>
#include <string.h>

#include "clones.h"
#include "halves.h"
#include "mixing.h"

#define DPS_BYTES_HEAD 4 /* bytes before the numbers of a row of bytes */
#define DPS_LANES 8

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

/* A number of a row of bytes, within a quarter of the largest float, because a difference of two is finite then. */
static inline float dps_bounded(float x) {
    const float most = FLT_MAX / 4;
    const float below = x > most ? most : x;
    return below < -most ? -most : below;
}

static inline uint16_t dps_up_bfloat16(float x) { /* of x >= 0 */
    return (uint16_t)((dps_bits_of_float(x) + 0xFFFF) >> 16);
}

static inline uint16_t dps_down_bfloat16(float x) {
    const uint32_t bits = dps_bits_of_float(x);
    return (uint16_t)((bits + (bits >> 31 ? 0xFFFF : 0)) >> 16);
}

/* The least and the greatest number of a row; whether all of them are finite. */
static inline int dps_bounds(const float *row, int64_t dim, float *least, float *greatest) {
    float low[4], high[4], odd[4]; /* odd: NaN where a number times zero is not zero */
    int64_t j = 0;
    for (int k = 0; k < 4; k++) {
        low[k] = high[k] = row[0];
        odd[k] = 0;
    }
    for (; j + 4 <= dim; j += 4) {
        for (int k = 0; k < 4; k++) {
            const float x = row[j + k];
            low[k] = x < low[k] ? x : low[k];
            high[k] = x > high[k] ? x : high[k];
            odd[k] += x * 0.0f;
        }
    }
    for (; j < dim; j++) {
        const float x = row[j];
        low[0] = x < low[0] ? x : low[0];
        high[0] = x > high[0] ? x : high[0];
        odd[0] += x * 0.0f;
    }
    low[0] = low[1] < low[0] ? low[1] : low[0];
    low[2] = low[3] < low[2] ? low[3] : low[2];
    high[0] = high[1] > high[0] ? high[1] : high[0];
    high[2] = high[3] > high[2] ? high[3] : high[2];
    odd[0] += odd[1] + (odd[2] + odd[3]);
    *least = low[2] < low[0] ? low[2] : low[0];
    *greatest = high[2] > high[0] ? high[2] : high[0];
    return odd[0] == 0;
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

static inline void dps_encode_row(const float *row, int64_t dim, uint32_t seed, int draws, uint8_t *out) {
    float least, greatest;
    const int finite = dps_bounds(row, dim, &least, &greatest);
    const uint16_t zero = dps_down_bfloat16(dps_bounded(least) + 0.0f); /* adding 0 makes +0 of -0 */
    const float base = dps_widen_bfloat16(zero);
    const uint16_t scale = finite ? dps_up_bfloat16((dps_bounded(greatest) - base) / 255 + 0.0f) : 0x7FC0;
    const float step = dps_widen_bfloat16(scale), inverse = step > 0 ? 1 / step : 0;
    memcpy(out, &scale, 2);
    memcpy(out + 2, &zero, 2);
    out += DPS_BYTES_HEAD;
    if (!finite || dps_bounded(least) != least || dps_bounded(greatest) != greatest) { /* hardly ever */
        for (int64_t j = 0; j < dim; j++) {
            const float place = finite ? (dps_bounded(row[j]) - base) * inverse + dps_rounding(seed, j, draws) : 0;
            out[j] = (uint8_t)(int32_t)(place < 255 ? place : 255);
        }
        return;
    }
    int64_t j = 0;
    for (; j + DPS_LANES <= dim; j += DPS_LANES) {
        for (int k = 0; k < DPS_LANES; k++) {
            const float place = (row[j + k] - base) * inverse + dps_rounding(seed, j + k, draws); /* 0 or more */
            out[j + k] = (uint8_t)(int32_t)(place < 255 ? place : 255);
        }
    }
    for (; j < dim; j++) {
        const float place = (row[j] - base) * inverse + dps_rounding(seed, j, draws);
        out[j] = (uint8_t)(int32_t)(place < 255 ? place : 255);
    }
}

/* `keys` name the rows, or they are first, first + 1, ...: what is drawn for a row follows from its name alone. A seed
   of 0 draws nothing. */
DPS_CLONES static void dps_encode_bytes(
    const float *rows, int64_t count, int64_t dim, const int64_t *keys, int64_t first, uint64_t seed, uint8_t *out
) {
    if (seed == 0) {
        for (int64_t i = 0; i < count; i++) {
            dps_encode_row(rows + i * dim, dim, 0, 0, out + i * (dim + DPS_BYTES_HEAD));
        }
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        const uint64_t name = (uint64_t)(keys ? keys[i] : first + i);
        const uint32_t drawn = (uint32_t)(dps_mix(seed ^ dps_mix(name)) >> 32);
        dps_encode_row(rows + i * dim, dim, drawn, 1, out + i * (dim + DPS_BYTES_HEAD));
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
