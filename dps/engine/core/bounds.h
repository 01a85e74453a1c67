/* Whether numbers of rows lie in 0 .. end - 1: one pass without a branch, before a row is read or written. */
#ifndef DPS_BOUNDS_H
#define DPS_BOUNDS_H

#include <stdint.h>

#include "clones.h"

/* The sign bit of `i | (end - 1 - i)` is set if i < 0 or i >= end. Processors without AVX-512 compare no unsigned
   numbers, but they all subtract. */
DPS_CLONES __attribute__((unused))
static int dps_all_inside(const int64_t *index, int64_t count, int64_t end) {
    const uint64_t last = (uint64_t)end - 1;
    uint64_t signs = 0;
    for (int64_t i = 0; i < count; i++) {
        signs |= (uint64_t)index[i] | (last - (uint64_t)index[i]);
    }
    return signs >> 63 == 0;
}

DPS_CLONES __attribute__((unused))
static int dps_all_inside_int32(const int32_t *index, int64_t count, int64_t end) {
    const uint32_t last = end > INT32_MAX ? INT32_MAX : (uint32_t)end - 1;
    uint32_t signs = 0;
    for (int64_t i = 0; i < count; i++) {
        signs |= (uint32_t)index[i] | (last - (uint32_t)index[i]);
    }
    return signs >> 31 == 0;
}

#endif
