/* A hash of numbers, by which lists of keys are looked up. Lists are compared whole where hashes agree. */
#ifndef DPS_KEY_LISTS_H
#define DPS_KEY_LISTS_H

#include <stdint.h>

#include "mixing.h"

static uint64_t dps_hash_list(const int64_t *numbers, int64_t count, uint64_t seed) {
    uint64_t lanes[4] = {seed, ~seed, seed ^ UINT64_C(0x9E3779B97F4A7C15), seed + UINT64_C(0xD1B54A32D192ED03)};
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        for (int k = 0; k < 4; k++) {
            const uint64_t h = (lanes[k] ^ (uint64_t)numbers[i + k]) * UINT64_C(0x9FB21C651E98DF25);
            lanes[k] = h ^ (h >> 32);
        }
    }
    for (; i < count; i++) {
        lanes[i & 3] = dps_mix(lanes[i & 3] ^ (uint64_t)numbers[i]);
    }
    return dps_mix(lanes[0] + 3 * dps_mix(lanes[1] + 3 * dps_mix(lanes[2] + 3 * dps_mix(lanes[3] ^ (uint64_t)count))));
}

#endif
