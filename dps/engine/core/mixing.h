/* The hash of a key. It must never change, because stored models depend on it. */
#ifndef DPS_MIXING_H
#define DPS_MIXING_H

#include <stdint.h>

#include "clones.h"

/* A bijection of 64-bit integers that scatters neighbours (the finaliser of splitmix64, Steele et al. 2014). */
static inline uint64_t dps_mix(uint64_t key) {
    uint64_t h = key + UINT64_C(0x9E3779B97F4A7C15);
    h = (h ^ (h >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    h = (h ^ (h >> 27)) * UINT64_C(0x94D049BB133111EB);
    return h ^ (h >> 31);
}

DPS_CLONES __attribute__((unused))
static void dps_hash_keys(const int64_t *keys, int64_t count, uint64_t *hashes) {
    for (int64_t i = 0; i < count; i++) {
        hashes[i] = dps_mix((uint64_t)keys[i]);
    }
}

#endif
