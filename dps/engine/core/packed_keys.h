/* Keys as they travel in fewer than 8 bytes: blocks of 256, each with the width of its own numbers.

   A block is a byte, its form, and what the form says. The lower four bits of the form are a width, of 0 to 8 bytes.
   With width 8 the keys follow as they are. Else a base follows (8 bytes), and numbers of that width: with
   DPS_DIFFERENCES the base is the first key, and there is a number for each further key, which is its difference from
   the key before; without it the base is the least key, and there is a number for each key, its difference from that.
   All differences are modulo 2^64, so any keys in any order can be packed, and what is unpacked needs no check of sums.
   The block has the narrower of the two. Differences are narrow where keys ascend, distances from the least key where
   they are hashes of few bits, in whatever order.

   Numbers stand in planes, because these are loops that a compiler vectorises: a plane of the lower 4 bytes of all
   numbers if the width has a 4 in it, then one of 2 bytes if it has a 2, then one of single bytes if it has a 1. */
#ifndef DPS_PACKED_KEYS_H
#define DPS_PACKED_KEYS_H

#include <stdint.h>
#include <string.h>

#include "clones.h"

#define DPS_BLOCK 256      /* keys of a block: its head of 9 bytes is a 28th of a byte for each key */
#define DPS_DIFFERENCES 16 /* the bit of a form: numbers are differences from the key before */

/* The bytes that a number needs. */
static inline int dps_width_of(uint64_t number) {
    return number == 0 ? 0 : (71 - __builtin_clzll(number)) >> 3;
}

/* The bytes of a block of this form, behind the form; -1: there is no such form. */
static inline int64_t dps_block_bytes(uint8_t form, int64_t count) {
    const int width = form & 15;
    if (width >= 8) {
        return form == 8 ? 8 * count : -1;
    }
    if (form & ~(15 | DPS_DIFFERENCES)) {
        return -1;
    }
    return 8 + (count - (form & DPS_DIFFERENCES ? 1 : 0)) * width;
}

/* The narrowest form of a block of at least one key, and its base. */
static inline uint8_t dps_form_of(const int64_t *keys, int64_t count, int64_t *base) {
    int64_t least = keys[0], greatest = keys[0];
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++) {
        least = keys[i] < least ? keys[i] : least;
        greatest = keys[i] > greatest ? keys[i] : greatest;
    }
    for (int64_t i = 1; i < count; i++) {
        bits |= (uint64_t)keys[i] - (uint64_t)keys[i - 1];
    }
    const int between = dps_width_of(bits), within = dps_width_of((uint64_t)greatest - (uint64_t)least);
    *base = between < within ? keys[0] : least;
    return (uint8_t)(between < within ? between | DPS_DIFFERENCES : within);
}

/* The bytes that keys take when they are packed. */
DPS_CLONES static int64_t dps_packed_bytes(const int64_t *keys, int64_t count) {
    int64_t nbytes = 0, base;
    for (int64_t a = 0; a < count; a += DPS_BLOCK) {
        const int64_t n = count - a < DPS_BLOCK ? count - a : DPS_BLOCK;
        nbytes += 1 + dps_block_bytes(dps_form_of(keys + a, n, &base), n);
    }
    return nbytes;
}

/* Pack keys: the end of what was written. */
DPS_CLONES static uint8_t *dps_pack_keys(const int64_t *keys, int64_t count, uint8_t *out) {
    uint64_t numbers[DPS_BLOCK];
    int64_t base;
    for (int64_t a = 0; a < count; a += DPS_BLOCK, keys += DPS_BLOCK) {
        const int64_t n = count - a < DPS_BLOCK ? count - a : DPS_BLOCK;
        const uint8_t form = dps_form_of(keys, n, &base);
        const int64_t first = form & DPS_DIFFERENCES ? 1 : 0, m = n - first;
        *out++ = form;
        if (form == 8) {
            memcpy(out, keys, 8 * n);
            out += 8 * n;
            continue;
        }
        memcpy(out, &base, 8);
        out += 8;
        if (first) {
            for (int64_t i = 0; i < m; i++) {
                numbers[i] = (uint64_t)keys[i + 1] - (uint64_t)keys[i];
            }
        } else {
            for (int64_t i = 0; i < m; i++) {
                numbers[i] = (uint64_t)keys[i] - (uint64_t)base;
            }
        }
        if (form & 4) {
            for (int64_t i = 0; i < m; i++) {
                const uint32_t part = (uint32_t)numbers[i];
                memcpy(out + 4 * i, &part, 4);
            }
            for (int64_t i = 0; i < m; i++) {
                numbers[i] >>= 32;
            }
            out += 4 * m;
        }
        if (form & 2) {
            for (int64_t i = 0; i < m; i++) {
                const uint16_t part = (uint16_t)numbers[i];
                memcpy(out + 2 * i, &part, 2);
            }
            for (int64_t i = 0; i < m; i++) {
                numbers[i] >>= 16;
            }
            out += 2 * m;
        }
        if (form & 1) {
            for (int64_t i = 0; i < m; i++) {
                out[i] = (uint8_t)numbers[i];
            }
            out += m;
        }
    }
    return out;
}

/* The bytes that so many packed keys take at the beginning of `packed`; -1: it is too short, or has no such keys. */
static int64_t dps_bytes_packed(const uint8_t *packed, int64_t length, int64_t count) {
    int64_t used = 0;
    for (int64_t a = 0; a < count; a += DPS_BLOCK) {
        const int64_t n = count - a < DPS_BLOCK ? count - a : DPS_BLOCK;
        const int64_t nbytes = used < length ? dps_block_bytes(packed[used], n) : -1;
        if (nbytes < 0 || nbytes > length - used - 1) {
            return -1;
        }
        used += 1 + nbytes;
    }
    return used;
}

/* Unpack keys that dps_bytes_packed has found to be there. */
DPS_CLONES static void dps_unpack_keys(const uint8_t *packed, int64_t count, int64_t *keys) {
    uint64_t numbers[DPS_BLOCK];
    for (int64_t a = 0; a < count; a += DPS_BLOCK, keys += DPS_BLOCK) {
        const int64_t n = count - a < DPS_BLOCK ? count - a : DPS_BLOCK;
        const uint8_t form = *packed++;
        const int64_t first = form & DPS_DIFFERENCES ? 1 : 0, m = n - first;
        uint64_t base;
        int shift = 0;
        if (form == 8) {
            memcpy(keys, packed, 8 * n);
            packed += 8 * n;
            continue;
        }
        memcpy(&base, packed, 8);
        packed += 8;
        for (int64_t i = 0; i < m; i++) {
            numbers[i] = 0;
        }
        if (form & 4) {
            for (int64_t i = 0; i < m; i++) {
                uint32_t part;
                memcpy(&part, packed + 4 * i, 4);
                numbers[i] = part;
            }
            packed += 4 * m;
            shift = 32;
        }
        if (form & 2) {
            for (int64_t i = 0; i < m; i++) {
                uint16_t part;
                memcpy(&part, packed + 2 * i, 2);
                numbers[i] |= (uint64_t)part << shift;
            }
            packed += 2 * m;
            shift += 16;
        }
        if (form & 1) {
            for (int64_t i = 0; i < m; i++) {
                numbers[i] |= (uint64_t)packed[i] << shift;
            }
            packed += m;
        }
        if (first) {
            keys[0] = (int64_t)base;
            for (int64_t i = 0; i < m; i++) {
                base += numbers[i];
                keys[i + 1] = (int64_t)base;
            }
        } else {
            for (int64_t i = 0; i < m; i++) {
                keys[i] = (int64_t)(base + numbers[i]);
            }
        }
    }
}

#endif
