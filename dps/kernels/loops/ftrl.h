/* Logistic regression by FTRL-Proximal with a step after each row (McMahan et al., "Ad click prediction", 2013,
   Algorithm 1), on the sums z and n of a batch's features. A row of sums is [z | n], m numbers each for m outputs.

   The sums at the beginning stay as they are, and what they gain is kept apart: a gain is small beside a large n, so
   the difference of two sums would lose its last digits. Weights and the roots of n are kept between rows, because
   most features of a batch occur in many of its rows.

   Trainers that begin with the same sums at the same time move the weight of a frequent feature the same way, and
   all of these steps together go too far. AdaptiveRevision (McMahan and Streeter, "Delay-tolerant algorithms for
   asynchronous distributed online learning", 2014, Algorithm 3) lets n gain g^2 + 2 g g', where g' is the sum of the
   gradients that came in between. That sum is not known before the push, so it is estimated: the mean gradients of
   other batches are those of this one, and chance is independent. With the sum G of a batch's gradients, the square
   of their mean part is about G^2 - sum g^2, and each pair of trainers is counted once: n gains (trainers - 1) times
   that. It is nothing for features that occur once, and little near the minimum, where gradients cancel. */
#ifndef DPS_FTRL_H
#define DPS_FTRL_H

#include <math.h>
#include <stdint.h>

#include "pairs.h"

typedef struct {
    float beta;
    float l1;
    float l2;
    float per_alpha; /* 1 / alpha */
    float others; /* trainers that make steps from the same sums at the same time */
} dps_ftrl_rule;

/* The parameters of `count` features, or of the intercept. */
typedef struct {
    const float *sums; /* [count, 2 m] */
    float *gains; /* [count, 2 m]: zeros at the beginning */
    float *w; /* [count, m] */
    float *roots; /* [count, m] */
    float *gradients; /* [count, m]: zeros at the beginning, sums at the end; read if there are others */
    int64_t count;
} dps_ftrl_rows;

static inline float dps_ftrl_weight(float z, float root, const dps_ftrl_rule *rule) {
    const float shrunk = fabsf(z) - rule->l1;
    return shrunk > 0 ? -copysignf(shrunk, z) / ((rule->beta + root) * rule->per_alpha + rule->l2) : 0.0f;
}

static inline void dps_ftrl_begin(const dps_ftrl_rows *rows, int64_t m, const dps_ftrl_rule *rule) {
    for (int64_t i = 0; i < rows->count; i++) {
        const float *sums = rows->sums + 2 * m * i;
        for (int64_t c = 0; c < m; c++) {
            const float root = sqrtf(sums[m + c]);
            rows->roots[m * i + c] = root;
            rows->w[m * i + c] = dps_ftrl_weight(sums[c], root, rule);
        }
    }
}

/* One step of output c of row i along the gradient g. */
static inline __attribute__((always_inline)) void dps_ftrl_step(
    const dps_ftrl_rows *rows, int64_t m, int64_t i, int64_t c, float g, const dps_ftrl_rule *rule
) {
    if (g == 0) {
        return;
    }
    const float *sums = rows->sums + 2 * m * i;
    float *gains = rows->gains + 2 * m * i;
    float *w = rows->w + m * i + c, *last = rows->roots + m * i + c;
    gains[m + c] += g * g;
    rows->gradients[m * i + c] += g;
    const float root = sqrtf(sums[m + c] + gains[m + c]);
    gains[c] += g - (root - *last) * rule->per_alpha * *w;
    *last = root;
    *w = dps_ftrl_weight(sums[c] + gains[c], root, rule);
}

/* The others push gradients of about the same mean, and have not seen these: n gains the products of both. */
static void dps_ftrl_end(const dps_ftrl_rows *rows, int64_t m, const dps_ftrl_rule *rule) {
    for (int64_t i = 0; rule->others > 0 && i < rows->count; i++) {
        float *gains = rows->gains + 2 * m * i + m;
        for (int64_t c = 0; c < m; c++) {
            const float sum = rows->gradients[m * i + c];
            gains[c] += rule->others * fmaxf(sum * sum - gains[c], 0);
        }
    }
}

/* Two classes, y of 0 and 1: returns the sum of the rows' losses, each before its step. `intercept` has one row;
   `fixed` leaves it as it is. */
static double dps_ftrl_binary(
    const dps_entries *batch, const dps_ftrl_rows *features, const dps_ftrl_rows *intercept, const int64_t *y,
    const float *weights, const dps_ftrl_rule *rule, int fixed
) {
    const dps_ftrl_rule free = {rule->beta, 0, 0, rule->per_alpha, rule->others};
    double loss = 0;
    dps_ftrl_begin(features, 1, rule);
    dps_ftrl_begin(intercept, 1, &free);
    for (int64_t i = 0; i < batch->rows; i++) {
        const int64_t begin = batch->ends[i], end = batch->ends[i + 1];
        float z = intercept->w[0];
        for (int64_t j = begin; j < end; j++) {
            z += dps_value(batch->values, j) * features->w[batch->indices[j]];
        }
        const double weight = weights ? weights[i] : 1.0, odds = exp(-fabs((double)z));
        const double p = z >= 0 ? 1 / (1 + odds) : odds / (1 + odds);
        loss += weight * (log1p(odds) + (((z >= 0) == (y[i] == 1)) ? 0.0 : fabs((double)z)));
        const float residual = (float)(weight * (p - (double)y[i]));
        for (int64_t j = begin; j < end; j++) {
            dps_ftrl_step(features, 1, batch->indices[j], 0, residual * dps_value(batch->values, j), rule);
        }
        if (!fixed) {
            dps_ftrl_step(intercept, 1, 0, 0, residual, &free);
        }
    }
    dps_ftrl_end(features, 1, rule);
    dps_ftrl_end(intercept, 1, &free);
    return loss;
}

/* m classes, y their numbers; `residual` has room for m numbers. */
static double dps_ftrl_multinomial(
    const dps_entries *batch, const dps_ftrl_rows *features, const dps_ftrl_rows *intercept, const int64_t *y,
    const float *weights, int64_t m, const dps_ftrl_rule *rule, int fixed, float *residual
) {
    const dps_ftrl_rule free = {rule->beta, 0, 0, rule->per_alpha, rule->others};
    double loss = 0;
    dps_ftrl_begin(features, m, rule);
    dps_ftrl_begin(intercept, m, &free);
    for (int64_t i = 0; i < batch->rows; i++) {
        const int64_t begin = batch->ends[i], end = batch->ends[i + 1];
        for (int64_t c = 0; c < m; c++) {
            residual[c] = intercept->w[c];
        }
        for (int64_t j = begin; j < end; j++) {
            const float x = dps_value(batch->values, j), *w = features->w + m * batch->indices[j];
            for (int64_t c = 0; c < m; c++) {
                residual[c] += x * w[c];
            }
        }
        const double weight = weights ? weights[i] : 1.0;
        const float chosen = residual[y[i]];
        float top = residual[0];
        for (int64_t c = 1; c < m; c++) {
            top = fmaxf(top, residual[c]);
        }
        double total = 0;
        for (int64_t c = 0; c < m; c++) {
            residual[c] = (float)exp((double)residual[c] - (double)top);
            total += residual[c];
        }
        loss += weight * (log(total) - ((double)chosen - (double)top));
        for (int64_t c = 0; c < m; c++) {
            residual[c] = (float)(residual[c] * (weight / total));
        }
        residual[y[i]] = (float)(residual[y[i]] - weight);
        for (int64_t j = begin; j < end; j++) {
            const float x = dps_value(batch->values, j);
            for (int64_t c = 0; c < m; c++) {
                dps_ftrl_step(features, m, batch->indices[j], c, residual[c] * x, rule);
            }
        }
        for (int64_t c = 0; c < m && !fixed; c++) {
            dps_ftrl_step(intercept, m, 0, c, residual[c], &free);
        }
    }
    dps_ftrl_end(features, m, rule);
    dps_ftrl_end(intercept, m, &free);
    return loss;
}

#endif
