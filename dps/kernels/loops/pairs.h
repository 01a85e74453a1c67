/* Factorization machines over a sparse batch: scores of rows, and gradients. Values are float, or NULL for all ones.

   A row of parameters is [w | v]: the weight of a feature and its factors. The factors of a field-aware machine are
   n_fields vectors of k numbers, one for each field of the other feature of a pair. Loops with a constant number of
   factors keep their sums in registers. */
#ifndef DPS_PAIRS_H
#define DPS_PAIRS_H

#include <stdint.h>

#include "clones.h"

typedef struct {
    const int64_t *ends; /* row i has the non-zeros ends[i] to ends[i + 1] - 1 */
    const uint32_t *indices;
    const float *values; /* NULL: all ones */
    int64_t rows;
} dps_entries;

static inline float dps_value(const float *values, int64_t j) {
    return values ? values[j] : 1.0f;
}

/* Returns 1/2 sum_c (s_c^2 - sum_i v_ic^2 x_i^2) over `width` columns of v, and writes s_c = sum_i v_ic x_i. */
static inline __attribute__((always_inline)) float dps_pairs_of_columns(
    const dps_entries *batch, int64_t i, const float *restrict v, int64_t stride, int width, float *restrict s
) {
    float sums[16], squares[16], total = 0;
    for (int c = 0; c < width; c++) {
        sums[c] = squares[c] = 0;
    }
    for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
        const float *restrict row = v + stride * batch->indices[j];
        const float x = dps_value(batch->values, j);
        for (int c = 0; c < width; c++) {
            const float part = x * row[c];
            sums[c] += part;
            squares[c] += part * part;
        }
    }
    for (int c = 0; c < width; c++) {
        s[c] = sums[c];
        total += sums[c] * sums[c] - squares[c];
    }
    return 0.5f * total;
}

static inline float dps_linear(const dps_entries *batch, int64_t i, const float *rows, int64_t stride, float b) {
    float z = b;
    for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
        z += dps_value(batch->values, j) * rows[stride * batch->indices[j]];
    }
    return z;
}

/* z[i] = b + the weights of row i + its pairs; s[i] = its sums of factors. */
DPS_CLONES
static void dps_pair_scores(
    const dps_entries *batch, const float *rows, int64_t k, float b, float *restrict s, float *restrict z
) {
    const float *v = rows + 1;
    for (int64_t i = 0; i < batch->rows; i++) {
        float *own = s + k * i;
        int64_t c = 0;
        z[i] = dps_linear(batch, i, rows, 1 + k, b);
        for (; c + 16 <= k; c += 16) {
            z[i] += dps_pairs_of_columns(batch, i, v + c, 1 + k, 16, own + c);
        }
        for (; c + 8 <= k; c += 8) {
            z[i] += dps_pairs_of_columns(batch, i, v + c, 1 + k, 8, own + c);
        }
        for (; c + 4 <= k; c += 4) {
            z[i] += dps_pairs_of_columns(batch, i, v + c, 1 + k, 4, own + c);
        }
        if (c < k) {
            z[i] += dps_pairs_of_columns(batch, i, v + c, 1 + k, (int)(k - c), own + c);
        }
    }
}

/* out += the gradient of the scores times `residual`: r x for w, r x (s - v x) for v. */
DPS_CLONES
static void dps_pair_gradient(
    const dps_entries *batch, const float *restrict rows, int64_t k, const float *restrict s,
    const float *restrict residual, float *restrict out
) {
    for (int64_t i = 0; i < batch->rows; i++) {
        const float *restrict sums = s + k * i;
        for (int64_t j = batch->ends[i]; j < batch->ends[i + 1]; j++) {
            const int64_t place = (1 + k) * batch->indices[j];
            const float x = dps_value(batch->values, j), slope = residual[i] * x;
            const float *restrict v = rows + place + 1;
            float *restrict made = out + place + 1;
            out[place] += slope;
            for (int64_t c = 0; c < k; c++) {
                made[c] += slope * (sums[c] - x * v[c]);
            }
        }
    }
}

/* The sum over pairs a < b of row i of x_a x_b (v_a,field(b) . v_b,field(a)), over `width` columns of each vector. */
static inline __attribute__((always_inline)) float dps_field_pairs_of_columns(
    const dps_entries *batch, int64_t i, const int32_t *restrict fields, const float *restrict v, int64_t k,
    int64_t stride, int width
) {
    const int64_t end = batch->ends[i + 1];
    float sums[16], total = 0;
    for (int c = 0; c < width; c++) {
        sums[c] = 0;
    }
    for (int64_t a = batch->ends[i]; a < end; a++) {
        const float *restrict row = v + stride * batch->indices[a];
        const float x = dps_value(batch->values, a);
        const int64_t field = k * fields[a];
        for (int64_t j = a + 1; j < end; j++) {
            const float product = x * dps_value(batch->values, j);
            const float *restrict one = row + k * fields[j];
            const float *restrict other = v + stride * batch->indices[j] + field;
            for (int c = 0; c < width; c++) {
                sums[c] += product * (one[c] * other[c]);
            }
        }
    }
    for (int c = 0; c < width; c++) {
        total += sums[c];
    }
    return total;
}

/* z[i] = b + the weights of row i + its pairs, each by the vectors for the field of the other. */
DPS_CLONES
static void dps_field_scores(
    const dps_entries *batch, const int32_t *fields, const float *rows, int64_t n_fields, int64_t k, float b,
    float *restrict z
) {
    const float *v = rows + 1;
    const int64_t stride = 1 + n_fields * k;
    for (int64_t i = 0; i < batch->rows; i++) {
        int64_t c = 0;
        z[i] = dps_linear(batch, i, rows, stride, b);
        for (; c + 16 <= k; c += 16) {
            z[i] += dps_field_pairs_of_columns(batch, i, fields, v + c, k, stride, 16);
        }
        for (; c + 8 <= k; c += 8) {
            z[i] += dps_field_pairs_of_columns(batch, i, fields, v + c, k, stride, 8);
        }
        for (; c + 4 <= k; c += 4) {
            z[i] += dps_field_pairs_of_columns(batch, i, fields, v + c, k, stride, 4);
        }
        if (c < k) {
            z[i] += dps_field_pairs_of_columns(batch, i, fields, v + c, k, stride, (int)(k - c));
        }
    }
}

/* The gradient of one row: r x for w, and for both vectors of a pair r x_a x_b times the other one. */
static inline __attribute__((always_inline)) void dps_field_gradient_of_row(
    const dps_entries *batch, int64_t i, const int32_t *fields, const float *rows, int64_t k, int64_t stride, float r,
    float *out
) {
    const int64_t end = batch->ends[i + 1];
    for (int64_t a = batch->ends[i]; a < end; a++) {
        const int64_t place = stride * batch->indices[a], field = k * fields[a];
        const float slope = r * dps_value(batch->values, a);
        out[place] += slope;
        for (int64_t j = a + 1; j < end; j++) {
            const float product = slope * dps_value(batch->values, j);
            const int64_t one = place + 1 + k * fields[j];
            const int64_t other = stride * batch->indices[j] + 1 + field;
            const float *restrict v = rows + one;
            const float *restrict u = rows + other;
            float *made = out + one; /* the same place as `last` where a row has a feature twice */
            float *last = out + other;
            for (int64_t c = 0; c < k; c++) {
                made[c] += product * u[c];
            }
            for (int64_t c = 0; c < k; c++) {
                last[c] += product * v[c];
            }
        }
    }
}

/* out += the gradient of the scores times `residual`; `out` is not `rows`. */
DPS_CLONES
static void dps_field_gradient(
    const dps_entries *batch, const int32_t *fields, const float *rows, int64_t n_fields, int64_t k,
    const float *restrict residual, float *out
) {
    const int64_t stride = 1 + n_fields * k;
    for (int64_t i = 0; i < batch->rows; i++) {
        if (k == 4) {
            dps_field_gradient_of_row(batch, i, fields, rows, 4, stride, residual[i], out);
        } else if (k == 8) {
            dps_field_gradient_of_row(batch, i, fields, rows, 8, stride, residual[i], out);
        } else {
            dps_field_gradient_of_row(batch, i, fields, rows, k, stride, residual[i], out);
        }
    }
}

#endif
