/* A batch of keys looked at: whether they lie in order of hash, and which may be named more than once. The loops have
   no branches that depend on the keys, because a processor could not predict these. */
#ifndef DPS_GROUPING_H
#define DPS_GROUPING_H

#include <stdint.h>

#include "mixing.h"

enum { DPS_HASHED = 256 }; /* keys whose hashes are computed ahead */

/* Whether each number is larger than the one before. */
DPS_CLONES
static int dps_rise(const uint64_t *hashes, int64_t count) {
    uint64_t falls = 0;
    for (int64_t i = 1; i < count; i++) {
        falls |= hashes[i] <= hashes[i - 1];
    }
    return !falls;
}

/* Whether the keys ascend strictly by hash. */
static inline int dps_ascend(const int64_t *keys, int64_t count) {
    uint64_t hashes[DPS_HASHED + 1];
    int rises = 1;
    for (int64_t first = 0; first < count && rises; first += DPS_HASHED) {
        const int64_t from = first ? first - 1 : 0, end = first + DPS_HASHED < count ? first + DPS_HASHED : count;
        dps_hash_keys(keys + from, end - from, hashes);
        rises = dps_rise(hashes, end - from);
    }
    return rises;
}

/* A set of hashes that may also say yes for others: bit (hash & mask) stands for a hash. */
typedef struct {
    uint64_t *bits;
    uint64_t mask;
} dps_marks;

static inline void dps_mark(dps_marks marks, int64_t key) {
    const uint64_t place = dps_mix((uint64_t)key) & marks.mask;
    marks.bits[place >> 6] |= UINT64_C(1) << (place & 63);
}

/* List the keys that are marked: their numbers go to `found`, which has room for all. With `adds`, each key is marked
   when it was looked for, so that what is listed has the mark of an earlier one. */
static inline __attribute__((always_inline)) int64_t dps_find_marked(
    const int64_t *keys, int64_t count, dps_marks marks, int adds, int32_t *found
) {
    uint64_t hashes[DPS_HASHED];
    int64_t listed = 0;
    for (int64_t first = 0; first < count; first += DPS_HASHED) {
        const int64_t size = count - first < DPS_HASHED ? count - first : DPS_HASHED;
        dps_hash_keys(keys + first, size, hashes);
        for (int64_t i = 0; i < size; i++) {
            const uint64_t place = hashes[i] & marks.mask, bits = marks.bits[place >> 6];
            found[listed] = (int32_t)(first + i);
            listed += bits >> (place & 63) & 1;
            if (adds) {
                marks.bits[place >> 6] = bits | UINT64_C(1) << (place & 63);
            }
        }
    }
    return listed;
}

#endif
