/* The hash of a text: its UTF-8 bytes, eight at a time. It must never change, because stored models depend on it. */
#ifndef DPS_TEXT_H
#define DPS_TEXT_H

#include <stdint.h>

#include "clones.h"
#include "mixing.h"

/* Eight bytes as a little-endian word. Compilers make one load of it. */
static inline uint64_t dps_word(const uint8_t *p) {
    return (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24 | (uint64_t)p[4] << 32 |
           (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
}

/* The first 1 to 7 bytes as a word padded with zeros; where eight lie before `end`, they are read at once. */
static inline uint64_t dps_part_of_word(const uint8_t *p, int64_t count, const uint8_t *end) {
    if (end - p >= 8) {
        return dps_word(p) & (~UINT64_C(0) >> (64 - 8 * count));
    }
    uint64_t word = 0;
    for (int64_t b = 0; b < count; b++) {
        word |= (uint64_t)p[b] << (8 * b);
    }
    return word;
}

/* `end` is the end of the memory that the text lies in. */
static inline uint64_t dps_hash_text(const uint8_t *text, int64_t length, const uint8_t *end, uint64_t seed) {
    uint64_t h = dps_mix(seed + (uint64_t)length);
    for (; length >= 8; length -= 8, text += 8) {
        h = dps_mix(h ^ dps_word(text));
    }
    return length > 0 ? dps_mix(h ^ dps_part_of_word(text, length, end)) : h;
}

/* ASCII code points as bytes; false if a point is none. */
static inline int dps_narrow(const uint32_t *points, int64_t count, uint8_t *text) {
    uint32_t all = 0;
    for (int64_t i = 0; i < count; i++) {
        all |= points[i];
        text[i] = (uint8_t)points[i];
    }
    return all < 128;
}

/* out[i * stride] = the key of a value with this hash in a column with that hash. */
DPS_CLONES
static void dps_combine(
    uint64_t column, const uint64_t *hashes, int64_t count, uint64_t mask, int64_t *out, int64_t stride
) {
    for (int64_t i = 0; i < count; i++) {
        out[i * stride] = (int64_t)(dps_mix(column ^ dps_mix(hashes[i])) & mask);
    }
}

#endif
