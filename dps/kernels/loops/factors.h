/* Steps of factor models on rows of floats: by ratings, by pairs of items, and by conjugate gradients.

   Inner products are added up in DPS_LANES sums, element number k in sum k % DPS_LANES, and these are added in a fixed
   order, so that all processors give the same bits. */
#ifndef DPS_FACTORS_H
#define DPS_FACTORS_H

#include <math.h>
#include <stdint.h>

#include "clones.h"

#define DPS_LANES 16

static inline __attribute__((always_inline)) float dps_sum_of_lanes(const float *sums) {
    float half[8], quarter[4];
    for (int k = 0; k < 8; k++) {
        half[k] = sums[k] + sums[k + 8];
    }
    for (int k = 0; k < 4; k++) {
        quarter[k] = half[k] + half[k + 4];
    }
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

static inline __attribute__((always_inline)) float dps_dot(const float *a, const float *b, int64_t n) {
    float sums[DPS_LANES] = {0};
    int64_t i = 0;
    for (; i + DPS_LANES <= n; i += DPS_LANES) {
        for (int k = 0; k < DPS_LANES; k++) {
            sums[k] += a[i + k] * b[i + k];
        }
    }
    for (int k = 0; i < n; i++, k++) {
        sums[k] += a[i] * b[i];
    }
    return dps_sum_of_lanes(sums);
}

/* A row is [bias, n factors]. */
typedef struct {
    float *p, *q; /* rows of users and items */
    float *p_reach, *q_reach; /* for each row, the sum of the curvatures of its steps; or NULL */
    int64_t n;
    float rate, penalty;
} dps_factor_rows;

/* Rows of a large mini-batch lie anywhere in memory, and few of them are in the cache: ask for those of `place` some
   steps before they are needed. */
#define DPS_STEPS_AHEAD 8
#define DPS_LINE 16 /* floats of a cache line */

static inline __attribute__((always_inline)) void dps_fetch_row(const float *rows, int64_t place, int64_t width) {
    const float *row = rows + place * width;
    for (int64_t k = 0; k < width; k += DPS_LINE) {
        __builtin_prefetch(row + k, 1);
    }
    __builtin_prefetch(row + width - 1, 1); /* a row need not begin with a line */
}

/* For each rating the step of its squared error; the sum of the squared errors before these. */
DPS_CLONES static double dps_rating_steps(
    const dps_factor_rows *rows, const int32_t *users, const int32_t *items, const float *ratings, int64_t count,
    float mean
) {
    const int64_t n = rows->n;
    const float penalty = rows->penalty;
    double total = 0;
    for (int64_t j = 0; j < count; j++) {
        if (j + DPS_STEPS_AHEAD < count) {
            dps_fetch_row(rows->p, users[j + DPS_STEPS_AHEAD], n + 1);
            dps_fetch_row(rows->q, items[j + DPS_STEPS_AHEAD], n + 1);
        }
        float *restrict p = rows->p + users[j] * (n + 1), *restrict q = rows->q + items[j] * (n + 1);
        const float e = ratings[j] - mean - p[0] - q[0] - dps_dot(p + 1, q + 1, n);
        const float p_size = 1.0f + dps_dot(p + 1, p + 1, n), q_size = 1.0f + dps_dot(q + 1, q + 1, n);
        const float rate = fminf(rows->rate, 1.0f / (p_size + q_size + penalty));
        const float keep = 1.0f - rate * penalty, move = rate * e;
        total += (double)e * e;
        p[0] = keep * p[0] + move;
        q[0] = keep * q[0] + move;
        for (int64_t k = 1; k <= n; k++) {
            const float before = p[k];
            p[k] = keep * before + move * q[k];
            q[k] = keep * q[k] + move * before;
        }
        if (rows->p_reach) {
            rows->p_reach[users[j]] += q_size + penalty; /* of the squared error as a function of this row alone */
            rows->q_reach[items[j]] += p_size + penalty;
        }
    }
    return total;
}

/* What a comparison of two rows q and o by a row p needs: p . (q - o), |q - o|^2 and |p|^2, in one pass. */
typedef struct {
    float margin, apart, size;
} dps_comparison;

static inline __attribute__((always_inline)) dps_comparison dps_compare(
    const float *p, const float *q, const float *o, int64_t n
) {
    float margin[DPS_LANES] = {0}, apart[DPS_LANES] = {0}, size[DPS_LANES] = {0};
    int64_t i = 0;
    for (; i + DPS_LANES <= n; i += DPS_LANES) {
        for (int k = 0; k < DPS_LANES; k++) {
            const float difference = q[i + k] - o[i + k];
            margin[k] += p[i + k] * difference;
            apart[k] += difference * difference;
            size[k] += p[i + k] * p[i + k];
        }
    }
    for (int k = 0; i < n; i++, k++) {
        const float difference = q[i] - o[i];
        margin[k] += p[i] * difference;
        apart[k] += difference * difference;
        size[k] += p[i] * p[i];
    }
    return (dps_comparison){dps_sum_of_lanes(margin), dps_sum_of_lanes(apart), dps_sum_of_lanes(size)};
}

/* A sum of log(1 + small), with small <= 1, has one logarithm for so many terms: their product stays below 2^64. */
#define DPS_FACTORS 64

/* For each user, item and other item the step of log sigmoid(x_ui - x_uj); the sum of the losses before these. An item
   and the other one are two rows. */
DPS_CLONES static double dps_ranking_steps(
    const dps_factor_rows *rows, const int32_t *users, const int32_t *items, const int32_t *others, int64_t count
) {
    const int64_t n = rows->n;
    const float penalty = rows->penalty;
    double total = 0, product = 1;
    for (int64_t j = 0; j < count; j++) {
        if (j + DPS_STEPS_AHEAD < count) {
            dps_fetch_row(rows->p, users[j + DPS_STEPS_AHEAD], n + 1);
            dps_fetch_row(rows->q, items[j + DPS_STEPS_AHEAD], n + 1);
            dps_fetch_row(rows->q, others[j + DPS_STEPS_AHEAD], n + 1);
        }
        float *restrict p = rows->p + users[j] * (n + 1);
        float *restrict q = rows->q + items[j] * (n + 1), *restrict o = rows->q + others[j] * (n + 1);
        const dps_comparison by = dps_compare(p + 1, q + 1, o + 1, n);
        const float margin = q[0] - o[0] + by.margin, apart = by.apart, p_size = 1.0f + by.size;
        const float rate = fminf(rows->rate, 1.0f / ((apart + 2.0f * p_size) / 4.0f + penalty));
        const double small = exp(-fabs((double)margin)); /* never above 1, so that nothing overflows */
        const float move = rate * (float)((margin >= 0 ? small : 1.0) / (1.0 + small)), keep = 1.0f - rate * penalty;
        product *= 1.0 + small;
        if (j % DPS_FACTORS == DPS_FACTORS - 1) {
            total += log(product);
            product = 1;
        }
        total += margin < 0 ? -margin : 0;
        q[0] = keep * q[0] + move;
        o[0] = keep * o[0] - move;
        for (int64_t k = 1; k <= n; k++) {
            const float before = p[k];
            p[k] = keep * before + move * (q[k] - o[k]);
            q[k] = keep * q[k] + move * before;
            o[k] = keep * o[k] - move * before;
        }
        if (rows->p_reach) {
            rows->p_reach[users[j]] += apart / 4.0f + penalty;
            rows->q_reach[items[j]] += p_size / 4.0f + penalty;
            rows->q_reach[others[j]] += p_size / 4.0f + penalty;
        }
    }
    return total + log(product);
}

/* The system of one owner: (gram + Y' E Y) x = Y' (1 + e), where Y has `count` of the rows of y, and E is diagonal. */
typedef struct {
    const float *gram; /* [n, n], with the penalty on its diagonal */
    const float *y; /* [., n] */
    const int32_t *others; /* [count] */
    const float *extra; /* [count] */
    int64_t n, count;
} dps_system;

/* out += w0 a0 + w1 a1 + w2 a2 + w3 a3, in this order: out is read and written once for four rows. */
static inline __attribute__((always_inline)) void dps_add_four(
    float *restrict out, const float *const *rows, const float *weights, int64_t n
) {
    const float *a = rows[0], *b = rows[1], *c = rows[2], *d = rows[3];
    for (int64_t k = 0; k < n; k++) {
        out[k] = (((out[k] + weights[0] * a[k]) + weights[1] * b[k]) + weights[2] * c[k]) + weights[3] * d[k];
    }
}

static inline __attribute__((always_inline)) void dps_times_gram(
    const float *gram, const float *x, float *restrict out, int64_t n
) {
    int64_t row = 0;
    for (int64_t k = 0; k < n; k++) {
        out[k] = 0;
    }
    for (; row + 4 <= n; row += 4) { /* the matrix is symmetric, so its rows are its columns */
        const float *rows[4] = {gram + row * n, gram + (row + 1) * n, gram + (row + 2) * n, gram + (row + 3) * n};
        dps_add_four(out, rows, x + row, n);
    }
    for (; row < n; row++) {
        for (int64_t k = 0; k < n; k++) {
            out[k] += x[row] * gram[row * n + k];
        }
    }
}

/* Rows of others lie anywhere in memory, and for an owner with many ratings few of them are in the cache: ask for them
   some ratings before they are needed. */
#define DPS_RATINGS_AHEAD 12

static inline __attribute__((always_inline)) void dps_fetch_ahead(const dps_system *system, int64_t j) {
    const int64_t from = j + DPS_RATINGS_AHEAD, to = from + 4 < system->count ? from + 4 : system->count;
    for (int64_t next = from; next < to; next++) {
        const float *row = system->y + system->others[next] * system->n;
        for (int64_t k = 0; k < system->n; k += DPS_LINE) {
            __builtin_prefetch(row + k);
        }
    }
}

/* out += the sum of w y over the rows of the system, with w = e (y . x), or with `right` w = 1 + e - e (y . x); the sum
   of e (y . x)^2 - 2 (1 + e) (y . x). */
static inline __attribute__((always_inline)) double dps_add_rows(
    const dps_system *system, const float *x, float *restrict out, int right
) {
    const int64_t n = system->n;
    double form = 0;
    for (int64_t j = 0; j < system->count; j += 4) {
        const int width = system->count - j < 4 ? (int)(system->count - j) : 4;
        const float *rows[4];
        float weights[4];
        dps_fetch_ahead(system, j);
        for (int c = 0; c < width; c++) {
            const float extra = system->extra[j + c];
            rows[c] = system->y + system->others[j + c] * n;
            const float dot = dps_dot(rows[c], x, n), part = extra * dot;
            weights[c] = right ? 1.0f + extra - part : part;
            form += right ? (double)dot * part - 2.0 * (1.0 + extra) * dot : 0.0;
        }
        if (width == 4) {
            dps_add_four(out, rows, weights, n);
        } else {
            for (int c = 0; c < width; c++) {
                for (int64_t k = 0; k < n; k++) {
                    out[k] += weights[c] * rows[c][k];
                }
            }
        }
    }
    return form;
}

/* Steps of conjugate gradients from x; the value of x' A x - 2 b' x behind them. `room` is for 3 n floats. */
DPS_CLONES static double dps_conjugate_gradients(
    const dps_system *system, float *restrict x, int64_t steps, float *room
) {
    const int64_t n = system->n;
    float *restrict residual = room, *restrict direction = room + n, *restrict image = room + 2 * n;
    dps_times_gram(system->gram, x, image, n);
    double form = dps_dot(x, image, n);
    for (int64_t k = 0; k < n; k++) {
        residual[k] = -image[k];
    }
    form += dps_add_rows(system, x, residual, 1);
    for (int64_t k = 0; k < n; k++) {
        direction[k] = residual[k];
    }
    float size = dps_dot(residual, residual, n);
    for (int64_t step = 0; step < steps && size > 0; step++) {
        dps_times_gram(system->gram, direction, image, n);
        dps_add_rows(system, direction, image, 0);
        const float along = dps_dot(direction, image, n);
        if (!(along > 0)) {
            break;
        }
        const float by = size / along, before = size;
        for (int64_t k = 0; k < n; k++) {
            x[k] += by * direction[k];
            residual[k] -= by * image[k];
        }
        form -= (double)by * size; /* the minimum along a direction that is conjugate to those before */
        size = dps_dot(residual, residual, n);
        const float again = size / before;
        for (int64_t k = 0; k < n; k++) {
            direction[k] = residual[k] + again * direction[k];
        }
    }
    return form;
}

/* The solution x by Cholesky's factors, in doubles; 0 if the matrix is not positive definite, else 1. The value of
   x' A x - 2 b' x, which is -b' x, is added to `form`. `room` is for n n + 2 n doubles. */
DPS_CLONES static int dps_solve(const dps_system *system, float *restrict x, double *room, double *form) {
    const int64_t n = system->n;
    double *restrict matrix = room, *restrict right = room + n * n, *restrict solution = right + n;
    for (int64_t k = 0; k < n * n; k++) {
        matrix[k] = system->gram[k];
    }
    for (int64_t k = 0; k < n; k++) {
        right[k] = 0;
    }
    for (int64_t j = 0; j < system->count; j++) {
        const float *y = system->y + system->others[j] * n;
        const double extra = system->extra[j];
        for (int64_t row = 0; row < n; row++) {
            const double part = extra * y[row];
            for (int64_t k = 0; k <= row; k++) {
                matrix[row * n + k] += part * y[k];
            }
        }
        for (int64_t k = 0; k < n; k++) {
            right[k] += (1.0 + extra) * y[k];
        }
    }
    for (int64_t row = 0; row < n; row++) {
        for (int64_t k = 0; k <= row; k++) {
            double sum = matrix[row * n + k];
            for (int64_t c = 0; c < k; c++) {
                sum -= matrix[row * n + c] * matrix[k * n + c];
            }
            if (k < row) {
                matrix[row * n + k] = sum / matrix[k * n + k];
            } else if (sum > 0) {
                matrix[row * n + row] = sqrt(sum);
            } else {
                return 0;
            }
        }
    }
    for (int64_t row = 0; row < n; row++) {
        double sum = right[row];
        for (int64_t c = 0; c < row; c++) {
            sum -= matrix[row * n + c] * solution[c];
        }
        solution[row] = sum / matrix[row * n + row];
    }
    for (int64_t row = n - 1; row >= 0; row--) {
        double sum = solution[row];
        for (int64_t c = row + 1; c < n; c++) {
            sum -= matrix[c * n + row] * solution[c];
        }
        solution[row] = sum / matrix[row * n + row];
        x[row] = (float)solution[row];
        *form -= right[row] * solution[row];
    }
    return 1;
}

#endif
