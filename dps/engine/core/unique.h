/* Sums of products, as in the NH hash (Black et al. 1999). */
#ifndef DPS_UNIQUE_H
#define DPS_UNIQUE_H

#include <stdint.h>
#include <string.h>

#include "clones.h"

static inline uint32_t dps_load(const uint8_t *word) {
    uint32_t value;
    memcpy(&value, word, 4);
    return value;
}

/* The sum over j of (x[j] + secret[j]) * (y[j] + secret[half + j]), each factor modulo 2**32 and the products exact.
   x are the first `half` words of 4 bytes, y the others; these words need not be aligned. */
DPS_CLONES
static uint64_t dps_nh(const uint8_t *words, const uint32_t *secret, int64_t half) {
    uint64_t total = 0;
    for (int64_t j = 0; j < half; j++) {
        uint32_t x = dps_load(words + 4 * j) + secret[j];
        uint32_t y = dps_load(words + 4 * (half + j)) + secret[half + j];
        total += (uint64_t)x * y;
    }
    return total;
}

#endif
