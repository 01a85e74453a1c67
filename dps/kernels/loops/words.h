/* Steps of word2vec on the rows of a batch of text; tests/helpers/word_steps.py has the same in numpy, and says why.

   A step copies its rows into blocks whose rows are padded with zeros to a multiple of LANES. So the inner loops have a
   constant width, and all sums are made in an order that does not depend on the processor. */
#ifndef DPS_WORDS_H
#define DPS_WORDS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "clones.h"

enum {
    DPS_LANES = 16, /* widths are multiples of it; two vectors of eight */
    DPS_BLOCK = 6, /* rows of a product that are computed together, so that their sums stay in registers */
    DPS_TERMS = 512 /* factors between 1 and 2 of a product that a double can hold */
};

#define DPS_FARTHEST 2.0f /* ways to the optimum that trainers go together */

typedef float dps_eight __attribute__((vector_size(32), aligned(4), may_alias));

typedef struct {
    float *inside, *outside; /* rows of words and of targets, `dim` numbers each, changed in place */
    int64_t inside_count, outside_count, dim, width; /* rows; width: dim, padded */
    const int64_t *words, *targets, *sentences, *reach; /* for each place */
    int64_t places;
    const int64_t *pools; /* `pool` rows of `outside` for each step */
    int64_t pool, lanes; /* lanes: pool, padded */
    int64_t step; /* places of a step */
    float negative, rate, trainers;
    int cbow;
    /* memory of a step */
    int32_t *inside_slots, *outside_slots; /* for each row its slot in the step, or -1 */
    int64_t *inside_rows, *outside_rows; /* for each slot its row */
    int32_t *pair_query, *pair_target; /* slots, for each pair */
    int32_t *member; /* slots of `inside`: the words of the windows of CBOW, one after the other */
    int32_t *member_end; /* for each query of CBOW, where its words end */
    int32_t *pool_slot;
    float *h, *gh, *v, *gv; /* queries and targets, and their gradients */
    float *gi; /* the gradients of `inside` in CBOW */
    float *pool_v, *pool_t, *pool_g, *scores; /* the pool's rows, these transposed, their gradients; [queries, lanes] */
    float *nh, *nv, *bent_h, *bent_v, *bent_i; /* squared norms; curvatures */
    float *weight, *keep; /* of each query; 1 for a lane with a negative, 0 for padding */
    /* memory of a batch, where trainers could go too far together: rows as they were, and for each the share of the way
       to its optimum that the steps have left */
    float *inside_old, *outside_old, *inside_left, *outside_left;
    double loss;
    int64_t count;
} dps_words;

/* exp(-|x|), with a relative error below 2e-7 (Cephes, expf.c). */
static inline __attribute__((always_inline)) float dps_decay(float x) {
    const float y = x > 0 ? -x : x, bounded = y > -87.0f ? y : -87.0f;
    const float whole = (bounded * 1.44269504088896341f + 12582912.0f) - 12582912.0f; /* rounds to a whole number */
    const float r = (bounded - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    union {
        int32_t bits;
        float value;
    } power;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    power.bits = ((int32_t)whole + 127) * (1 << 23);
    return p * power.value;
}

static inline __attribute__((always_inline)) float dps_dot(const float *a, const float *b, int64_t width) {
    dps_eight low = {0}, high = {0};
    for (int64_t k = 0; k < width; k += DPS_LANES) {
        low += *(const dps_eight *)(a + k) * *(const dps_eight *)(b + k);
        high += *(const dps_eight *)(a + k + 8) * *(const dps_eight *)(b + k + 8);
    }
    low += high;
    return ((low[0] + low[4]) + (low[1] + low[5])) + ((low[2] + low[6]) + (low[3] + low[7]));
}

static inline __attribute__((always_inline)) void dps_add(float *out, float x, const float *a, int64_t width) {
    for (int64_t k = 0; k < width; k += 8) {
        *(dps_eight *)(out + k) += x * *(const dps_eight *)(a + k);
    }
}

/* `rows` rows and LANES columns of out += a b; number (i, k) of a is a[i * across + k * down]. */
static inline __attribute__((always_inline)) void dps_product_block(
    const float *a, int64_t across, int64_t down, const float *b, int64_t width, int64_t length, float *out,
    const int rows
) {
    dps_eight sums[DPS_BLOCK][2];
    for (int i = 0; i < rows; i++) {
        sums[i][0] = *(const dps_eight *)(out + i * width);
        sums[i][1] = *(const dps_eight *)(out + i * width + 8);
    }
    for (int64_t k = 0; k < length; k++) {
        const dps_eight low = *(const dps_eight *)(b + k * width), high = *(const dps_eight *)(b + k * width + 8);
        for (int i = 0; i < rows; i++) {
            const float x = a[i * across + k * down];
            sums[i][0] += x * low;
            sums[i][1] += x * high;
        }
    }
    for (int i = 0; i < rows; i++) {
        *(dps_eight *)(out + i * width) = sums[i][0];
        *(dps_eight *)(out + i * width + 8) = sums[i][1];
    }
}

/* out[rows, width] += a[rows, length] b[length, width] */
static inline __attribute__((always_inline)) void dps_product(
    const float *a, int64_t across, int64_t down, const float *b, int64_t length, float *out, int64_t rows,
    int64_t width
) {
    for (int64_t c = 0; c < width; c += DPS_LANES) {
        int64_t i = 0;
        for (; i + DPS_BLOCK <= rows; i += DPS_BLOCK) {
            dps_product_block(a + i * across, across, down, b + c, width, length, out + i * width + c, DPS_BLOCK);
        }
        for (; i < rows; i++) {
            dps_product_block(a + i * across, across, down, b + c, width, length, out + i * width + c, 1);
        }
    }
}

static inline int32_t dps_slot(int32_t *slots, int64_t *rows, int64_t *count, int64_t row) {
    if (slots[row] < 0) {
        slots[row] = (int32_t)*count;
        rows[(*count)++] = row;
    }
    return slots[row];
}

typedef struct {
    int64_t queries, pairs, members, insides, outsides;
} dps_sizes;

/* The pairs of the places start <= i < stop. */
static dps_sizes dps_find_pairs(dps_words *w, int64_t start, int64_t stop) {
    dps_sizes n = {0, 0, 0, 0, 0};
    for (int64_t i = start; i < stop; i++) {
        const int64_t first = i > w->reach[i] ? i - w->reach[i] : 0;
        const int64_t last = w->places - 1 - i > w->reach[i] ? i + w->reach[i] : w->places - 1;
        const int64_t before = n.members;
        for (int64_t j = first; j <= last; j++) {
            if (j == i || w->sentences[j] != w->sentences[i]) {
                continue;
            }
            if (w->cbow) {
                w->member[n.members++] = dps_slot(w->inside_slots, w->inside_rows, &n.insides, w->words[j]);
            } else {
                w->pair_query[n.pairs] = dps_slot(w->inside_slots, w->inside_rows, &n.insides, w->words[i]);
                w->pair_target[n.pairs++] = dps_slot(w->outside_slots, w->outside_rows, &n.outsides, w->targets[j]);
            }
        }
        if (n.members > before) {
            w->pair_query[n.pairs] = (int32_t)n.queries;
            w->pair_target[n.pairs++] = dps_slot(w->outside_slots, w->outside_rows, &n.outsides, w->targets[i]);
            w->member_end[n.queries++] = (int32_t)n.members;
        }
    }
    if (!w->cbow) {
        n.queries = n.insides;
    }
    return n;
}

/* Copies of the rows of a step, and zeros where its sums go. */
static inline __attribute__((always_inline)) void dps_gather(dps_words *w, const int64_t *pool, dps_sizes *n) {
    const int64_t dim = w->dim, width = w->width;
    for (int64_t o = 0; n->pairs && o < w->pool; o++) {
        w->pool_slot[o] = dps_slot(w->outside_slots, w->outside_rows, &n->outsides, pool[o]);
    }
    memset(w->gh, 0, sizeof(float) * n->queries * width);
    memset(w->gv, 0, sizeof(float) * n->outsides * width);
    memset(w->bent_h, 0, sizeof(float) * n->queries);
    memset(w->bent_v, 0, sizeof(float) * n->outsides);
    memset(w->weight, 0, sizeof(float) * n->queries);
    for (int64_t t = 0; t < n->outsides; t++) {
        memcpy(w->v + t * width, w->outside + w->outside_rows[t] * dim, sizeof(float) * dim);
        w->nv[t] = dps_dot(w->v + t * width, w->v + t * width, width);
    }
    for (int64_t q = 0, m = 0; q < n->queries; q++) {
        float *h = w->h + q * width;
        if (w->cbow) {
            const float share = 1.0f / (float)(w->member_end[q] - m);
            memset(h, 0, sizeof(float) * width);
            for (; m < w->member_end[q]; m++) {
                const float *row = w->inside + w->inside_rows[w->member[m]] * dim;
                for (int64_t k = 0; k < dim; k++) {
                    h[k] += share * row[k];
                }
            }
        } else {
            memcpy(h, w->inside + w->inside_rows[q] * dim, sizeof(float) * dim);
        }
        w->nh[q] = dps_dot(h, h, width);
    }
}

/* The terms of the words that are to be predicted. */
static inline __attribute__((always_inline)) void dps_positives(dps_words *w, const dps_sizes *n) {
    const int64_t width = w->width;
    double product = 1;
    for (int64_t p = 0; p < n->pairs; p++) {
        const int64_t q = w->pair_query[p], t = w->pair_target[p];
        const float *h = w->h + q * width, *v = w->v + t * width;
        const float score = dps_dot(h, v, width), decay = dps_decay(score);
        const float residual = (score >= 0 ? decay : 1.0f) / (1.0f + decay); /* 1 - s(score) */
        const float bent = (w->nh[q] + w->nv[t]) / 4 + residual;
        w->loss += score < 0 ? -score : 0.0f;
        product *= 1.0 + decay;
        if (p % DPS_TERMS == DPS_TERMS - 1) {
            w->loss += log(product);
            product = 1;
        }
        dps_add(w->gh + q * width, -residual, v, width);
        dps_add(w->gv + t * width, -residual, h, width);
        w->bent_h[q] += bent;
        w->bent_v[t] += bent;
        w->weight[q] += 1;
    }
    w->loss += log(product);
}

/* The residuals of a query and its pool in the place of their scores; returns their sum. */
static inline __attribute__((always_inline)) float dps_pool_residuals(dps_words *w, float *scores, float weight) {
    float linear[DPS_LANES] = {0}, total[DPS_LANES] = {0}, product[DPS_LANES];
    double all = 1, positive = 0;
    float sum = 0;
    for (int c = 0; c < DPS_LANES; c++) {
        product[c] = 1;
    }
    for (int64_t o = 0; o < w->lanes; o += DPS_LANES) {
        for (int c = 0; c < DPS_LANES; c++) {
            const float score = scores[o + c], decay = dps_decay(score);
            const float residual = weight * w->keep[o + c] * ((score >= 0 ? 1.0f : decay) / (1.0f + decay));
            linear[c] += score > 0 ? score : 0.0f;
            product[c] *= 1.0f + w->keep[o + c] * decay;
            total[c] += residual;
            scores[o + c] = residual;
        }
    }
    for (int c = 0; c < DPS_LANES; c++) {
        all *= product[c];
        positive += linear[c];
        sum += total[c];
    }
    w->loss += weight * (positive + log(all));
    return sum;
}

/* The terms of the negatives, which all queries share: three products of matrices. */
static inline __attribute__((always_inline)) void dps_negatives(dps_words *w, const dps_sizes *n) {
    const int64_t width = w->width, lanes = w->lanes;
    float norms = 0, weights = 0, weighted = 0;
    for (int64_t o = 0; o < w->pool; o++) {
        const float *row = w->v + w->pool_slot[o] * width;
        memcpy(w->pool_v + o * width, row, sizeof(float) * width);
        norms += w->nv[w->pool_slot[o]];
        for (int64_t k = 0; k < width; k++) {
            w->pool_t[k * lanes + o] = row[k];
        }
    }
    memset(w->scores, 0, sizeof(float) * n->queries * lanes);
    memset(w->pool_g, 0, sizeof(float) * lanes * width);
    dps_product(w->h, width, 1, w->pool_t, width, w->scores, n->queries, lanes);
    for (int64_t q = 0; q < n->queries; q++) {
        const float weight = w->weight[q] * (w->negative / (float)w->pool);
        const float sum = dps_pool_residuals(w, w->scores + q * lanes, weight);
        w->bent_h[q] += weight * ((float)w->pool * w->nh[q] + norms) / 4 + sum;
        weights += weight;
        weighted += weight * w->nh[q];
    }
    dps_product(w->scores, lanes, 1, w->pool_v, w->pool, w->gh, n->queries, width);
    dps_product(w->scores, 1, lanes, w->h, n->queries, w->pool_g, w->pool, width);
    for (int64_t o = 0; o < w->pool; o++) {
        const int64_t t = w->pool_slot[o];
        float sum = 0;
        for (int64_t q = 0; q < n->queries; q++) {
            sum += w->scores[q * lanes + o];
        }
        w->bent_v[t] += (weights * w->nv[t] + weighted) / 4 + sum;
        dps_add(w->gv + t * width, 1.0f, w->pool_g + o * width, width);
    }
}

/* A step of a row; `left`, if there is one, is made smaller by what a step with this rate leaves of the way. */
static inline __attribute__((always_inline)) void dps_descend(
    const dps_words *w, float *row, const float *gradient, float bent, float *left
) {
    const float most = 1.0f / (bent > 1e-30f ? bent : 1e-30f);
    const float rate = w->rate < most ? w->rate : most, gone = rate * bent;
    for (int64_t k = 0; k < w->dim; k++) {
        row[k] -= rate * gradient[k];
    }
    if (left) {
        *left *= gone < 1 ? 1.0f - gone : 0.0f;
    }
}

/* Trainers step from the same rows at the same time, and the servers add up how far each of them has come. Where all
   of them together would go more than DPS_FARTHEST ways to the optimum, each pushes the share with which they go just
   that: two ways lead as far beyond an optimum as the row was before it, and the true optimum is farther away, because
   the curvatures are upper bounds. */
static void dps_share_way(
    float *rows, const float *old, const float *left, int64_t count, int64_t dim, float trainers
) {
    for (int64_t i = 0; i < count; i++) {
        const float together = trainers * (1.0f - left[i]);
        const float shared = together > DPS_FARTHEST ? DPS_FARTHEST / together : 1.0f;
        for (int64_t k = i * dim; shared < 1 && k < (i + 1) * dim; k++) {
            rows[k] = old[k] + shared * (rows[k] - old[k]);
        }
    }
}

/* New rows, and slots as they were before the step. */
static inline __attribute__((always_inline)) void dps_change_rows(dps_words *w, const dps_sizes *n) {
    const int64_t width = w->width;
    const float *gradients = w->gh, *bent = w->bent_h;
    if (w->cbow) {
        memset(w->gi, 0, sizeof(float) * n->insides * width);
        memset(w->bent_i, 0, sizeof(float) * n->insides);
        for (int64_t q = 0, m = 0; q < n->queries; q++) {
            const float share = 1.0f / (float)(w->member_end[q] - m);
            for (; m < w->member_end[q]; m++) {
                dps_add(w->gi + w->member[m] * width, share, w->gh + q * width, width);
                w->bent_i[w->member[m]] += share * w->bent_h[q];
            }
        }
        gradients = w->gi, bent = w->bent_i;
    }
    for (int64_t s = 0; s < n->insides; s++) {
        const int64_t row = w->inside_rows[s];
        float *left = w->inside_left ? w->inside_left + row : NULL;
        dps_descend(w, w->inside + row * w->dim, gradients + s * width, bent[s], left);
        w->inside_slots[row] = -1;
    }
    for (int64_t t = 0; t < n->outsides; t++) {
        const int64_t row = w->outside_rows[t];
        float *left = w->outside_left ? w->outside_left + row : NULL;
        dps_descend(w, w->outside + row * w->dim, w->gv + t * width, w->bent_v[t], left);
        w->outside_slots[row] = -1;
    }
}

/* All steps of a batch. */
DPS_CLONES
static void dps_word_steps(dps_words *w) {
    const int64_t *pool = w->pools;
    for (int64_t start = 0; start < w->places; start += w->step, pool += w->pool) {
        const int64_t stop = start + w->step < w->places ? start + w->step : w->places;
        dps_sizes n = dps_find_pairs(w, start, stop);
        if (n.pairs) {
            dps_gather(w, pool, &n);
            dps_positives(w, &n);
            dps_negatives(w, &n);
            dps_change_rows(w, &n);
            w->count += n.pairs;
        }
    }
    if (w->inside_old) {
        dps_share_way(w->inside, w->inside_old, w->inside_left, w->inside_count, w->dim, w->trainers);
        dps_share_way(w->outside, w->outside_old, w->outside_left, w->outside_count, w->dim, w->trainers);
    }
}

#endif
