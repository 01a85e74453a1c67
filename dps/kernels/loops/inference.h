/* The E-step of latent Dirichlet allocation (Hoffman, Blei and Bach 2010, algorithm 1), eight numbers at a time.

   exp(E[log p]) of a Dirichlet distribution with parameters x is exp(psi(x)) / exp(psi(sum of x)). exp(psi) needs no
   logarithm: exp(psi(z + 1/2)) / z is nearly a polynomial of 1 / z^2 where z is large, and
   psi(x) = psi(x + 8) - (1/x + 1/(x + 1) + ... + 1/(x + 7)) leads there. Only +, -, *, / and integer operations are
   used, in the written order, so all processors give the same bits. */
#ifndef DPS_INFERENCE_H
#define DPS_INFERENCE_H

#include <stdint.h>
#include <string.h>

#include "clones.h"

#define DPS_LANES 8
#define DPS_INLINE static inline __attribute__((always_inline))

/* They may alias, because arrays of doubles are read as arrays of these. */
typedef double dps_eight __attribute__((vector_size(64), may_alias));
typedef int64_t dps_eight_integers __attribute__((vector_size(64), may_alias));

DPS_INLINE dps_eight dps_all_of(double x) {
    return (dps_eight){x, x, x, x, x, x, x, x};
}

/* a where the mask has ones, else b */
DPS_INLINE dps_eight dps_either(dps_eight_integers mask, dps_eight a, dps_eight b) {
    return (dps_eight)((mask & (dps_eight_integers)a) | (~mask & (dps_eight_integers)b));
}

DPS_INLINE double dps_sum_of(dps_eight x) {
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* Lanes of a and b: 0 to 7 are those of a, 8 to 15 those of b. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DPS_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif
#endif
#ifndef DPS_SHUFFLE
#define DPS_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (dps_eight_integers){__VA_ARGS__})
#endif

#define DPS_PAIRS(a, b) \
    (DPS_SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + DPS_SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define DPS_FOURS(a, b) \
    (DPS_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + DPS_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define DPS_EIGHTS(a, b) \
    (DPS_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + DPS_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15))

/* Lane j is the sum of x[j], added up as in dps_sum_of. */
DPS_INLINE dps_eight dps_sums_of(const dps_eight *x) {
    const dps_eight a = DPS_FOURS(DPS_PAIRS(x[0], x[1]), DPS_PAIRS(x[2], x[3]));
    const dps_eight b = DPS_FOURS(DPS_PAIRS(x[4], x[5]), DPS_PAIRS(x[6], x[7]));
    return DPS_EIGHTS(a, b);
}

/* exp(x) for x <= 700, to about one unit in the last place; 0 below -708, where doubles become denormal. */
DPS_INLINE dps_eight dps_exp(dps_eight x) {
    const dps_eight least = dps_all_of(-708.0), round = dps_all_of(6755399441055744.0); /* 1.5 * 2^52 */
    const dps_eight_integers small = x < least;
    x = dps_either(small, least, x);
    const dps_eight shifted = x * dps_all_of(1.4426950408889634) + round, n = shifted - round;
    const dps_eight r = (x - n * dps_all_of(6.93147180369123816490e-01)) - n * dps_all_of(1.90821492927058770002e-10);
    static const double inverse_factorials[] = {
        1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0, 1.0 / 720.0,
        1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0
    };
    dps_eight p = dps_all_of(1.0 / 6227020800.0);
    for (int i = 0; i < 13; i++) {
        p = p * r + dps_all_of(inverse_factorials[i]);
    }
    const dps_eight_integers power = ((dps_eight_integers)shifted << 52) + ((dps_eight_integers)dps_all_of(1.0));
    return dps_either(small, dps_all_of(0.0), p * (dps_eight)power);
}

/* exp(psi(x)) for x >= 0; 0 for x = 0. Its relative error is that of 1 / x in the exponent, as with any digamma. */
DPS_INLINE dps_eight dps_exp_digamma(dps_eight x) {
    const dps_eight large = dps_all_of(1e17); /* from there on the sum is 0 in effect, and its terms may overflow */
    const dps_eight s = dps_either(x > large, large, x), t = s * (s + 7.0), u = t + 6.0, v = t + 10.0, w = t + 12.0;
    /* 1/(s + i) + 1/(s + 7 - i) = (2 s + 7) / (t + i (7 - i)) for i = 0 to 3 */
    const dps_eight tu = t * u, vw = v * w;
    const dps_eight sum = (s + s + 7.0) * (((t + u) * vw + (v + w) * tu) / (tu * vw));
    const dps_eight z = x + 7.5, q = 1.0 / (z * z);
    dps_eight p = dps_all_of(0x1.f157fa4a8305dp-5);
    p = p * q + -0x1.4bb33abd3c02bp-6;
    p = p * q + 0x1.e24cefa38ed22p-8;
    p = p * q + -0x1.03191a7089c28p-8;
    p = p * q + 0x1.d1a18affaca5fp-9;
    p = p * q + -0x1.a4fa4fa4da9d1p-8;
    p = p * q + 0x1.5555555555552p-5;
    return (z + z * (p * q)) * dps_exp(-sum);
}

/* out[i] = exp(psi(values[i])) for n numbers. */
DPS_CLONES
static void dps_exp_digammas(const double *restrict values, int64_t n, double *restrict out) {
    dps_eight x;
    int64_t i = 0;
    for (; i + DPS_LANES <= n; i += DPS_LANES) {
        memcpy(&x, values + i, sizeof x);
        x = dps_exp_digamma(x);
        memcpy(out + i, &x, sizeof x);
    }
    if (i < n) {
        x = dps_all_of(1.0);
        memcpy(&x, values + i, (size_t)(n - i) * sizeof(double));
        x = dps_exp_digamma(x);
        memcpy(out + i, &x, (size_t)(n - i) * sizeof(double));
    }
}

/* One document and the memory to fit it in. Each vector has `width` eights, of which lanes behind the last topic stay
   0; arrays of words have room for a whole number of eights. */
typedef struct {
    int64_t words;
    int64_t width;
    double topics; /* how many */
    dps_eight *counts; /* of the words; 0 behind the last one */
    dps_eight *weights; /* [words, width]: exp(E[log beta]) */
    dps_eight *alpha; /* the prior, in each topic's lane */
    dps_eight *gamma; /* in: where to begin; out: the result */
    dps_eight *shares; /* out: exp(E[log theta]) */
    dps_eight *sums;
    dps_eight *ratios; /* out: the count of each word, over its probability */
} dps_document;

/* shares = exp(E[log theta]) of gamma */
DPS_INLINE void dps_share(const dps_document *d, int64_t width) {
    dps_eight sum = dps_all_of(0.0);
    for (int64_t v = 0; v < width; v++) {
        sum = sum + d->gamma[v];
        d->shares[v] = dps_exp_digamma(d->gamma[v]);
    }
    const dps_eight total = dps_exp_digamma(dps_all_of(dps_sum_of(sum)));
    for (int64_t v = 0; v < width; v++) {
        d->shares[v] = d->shares[v] / total;
    }
}

/* ratios = counts / (weights @ shares + epsilon); if `add`, also sums = weights.T @ ratios. Rows of words behind the
   last one are finite, and their counts and ratios are 0. */
DPS_INLINE void dps_explain(const dps_document *d, int64_t width, double epsilon, int add) {
    const dps_eight *restrict shares = d->shares;
    dps_eight *restrict sums = d->sums;
    for (int64_t v = 0; add && v < width; v++) {
        sums[v] = dps_all_of(0.0);
    }
    for (int64_t start = 0; start < d->words; start += DPS_LANES) {
        const dps_eight *restrict rows = d->weights + start * width;
        dps_eight products[DPS_LANES];
        for (int j = 0; j < DPS_LANES; j++) {
            products[j] = rows[j * width] * shares[0];
        }
        for (int64_t v = 1; v < width; v++) {
            for (int j = 0; j < DPS_LANES; j++) {
                products[j] = products[j] + rows[j * width + v] * shares[v];
            }
        }
        double *ratios = (double *)(d->ratios + start / DPS_LANES);
        *(dps_eight *)ratios = d->counts[start / DPS_LANES] / (dps_sums_of(products) + epsilon);
        for (int64_t v = 0; add && v < width; v++) {
            dps_eight sum = sums[v];
            for (int j = 0; j < DPS_LANES; j++) {
                sum = sum + rows[j * width + v] * dps_all_of(ratios[j]);
            }
            sums[v] = sum;
        }
    }
}

/* Iterate until the mean change of gamma is below tol; returns the number of iterations. */
DPS_INLINE int64_t dps_fit_of_width(
    const dps_document *d, int64_t width, int64_t max_iter, double tol, double epsilon, int statistics
) {
    int64_t iteration = 0;
    dps_share(d, width);
    while (iteration < max_iter) {
        dps_eight change = dps_all_of(0.0);
        iteration++;
        dps_explain(d, width, epsilon, 1);
        for (int64_t v = 0; v < width; v++) {
            const dps_eight gamma = d->alpha[v] + d->shares[v] * d->sums[v], step = gamma - d->gamma[v];
            change = change + dps_either(step < 0.0, -step, step);
            d->gamma[v] = gamma;
        }
        dps_share(d, width);
        if (dps_sum_of(change) / d->topics < tol) {
            break;
        }
    }
    if (statistics) {
        dps_explain(d, width, epsilon, 0);
    }
    return iteration;
}

/* A constant width lets sums stay in registers. */
DPS_CLONES
static int64_t dps_fit(const dps_document *d, int64_t max_iter, double tol, double epsilon, int statistics) {
    switch (d->width) {
    case 1: return dps_fit_of_width(d, 1, max_iter, tol, epsilon, statistics);
    case 2: return dps_fit_of_width(d, 2, max_iter, tol, epsilon, statistics);
    case 3: return dps_fit_of_width(d, 3, max_iter, tol, epsilon, statistics);
    case 4: return dps_fit_of_width(d, 4, max_iter, tol, epsilon, statistics);
    default: return dps_fit_of_width(d, d->width, max_iter, tol, epsilon, statistics);
    }
}

/* row[k] += ratio * shares[k] */
DPS_CLONES
static void dps_add_shares(double *restrict row, const double *restrict shares, double ratio, int64_t topics) {
    for (int64_t k = 0; k < topics; k++) {
        row[k] += ratio * shares[k];
    }
}

#endif
