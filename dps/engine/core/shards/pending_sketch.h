/* Counters of 4 bits, which many keys share; those of one key lie in one line of the processor's cache.
   See pending.pyx for the theory of operation. */
#ifndef DPS_PENDING_SKETCH_H
#define DPS_PENDING_SKETCH_H

#include <stdint.h>
#include <string.h>

#include "mixing.h"

#define DPS_LINE_BYTES 64
#define DPS_PARTS 4 /* of a line; a key has one counter in each */
#define DPS_PART_COUNTERS 32
#define DPS_LARGEST 15 /* a counter that has reached it stays there */
#define DPS_SKETCH_AHEAD 32 /* keys whose lines are being loaded at a time */

typedef struct {
    uint8_t *lines;
    int64_t count; /* lines */
    int64_t filled; /* counters that are not 0 */
    int64_t hand; /* the line that is halved next; `count` while nothing is halved */
} dps_sketch;

/* The line of a key, and the numbers of its four counters, which are written to `at`.

   The hash is mixed once more, because its first bits, which have chosen the shard, are the same for all keys. */
static inline uint8_t *dps_counters_of(const dps_sketch *sketch, int64_t key, uint32_t *at) {
    uint64_t hash = dps_mix(dps_mix((uint64_t)key));
    for (uint32_t part = 0; part < DPS_PARTS; part++)
        at[part] = part * DPS_PART_COUNTERS + ((uint32_t)(hash >> (5 * part)) & (DPS_PART_COUNTERS - 1));
    return sketch->lines + DPS_LINE_BYTES * (int64_t)(((hash >> 32) * (uint64_t)sketch->count) >> 32);
}

static inline int dps_counter(const uint8_t *line, uint32_t at) {
    return line[at >> 1] >> (4 * (at & 1)) & DPS_LARGEST;
}

static inline int dps_least(const uint8_t *line, const uint32_t *at) {
    int least = DPS_LARGEST;
    for (int part = 0; part < DPS_PARTS; part++) {
        int counter = dps_counter(line, at[part]);
        least = counter < least ? counter : least;
    }
    return least;
}

/* Counters that are not 0, of 16. */
static inline int64_t dps_filled(uint64_t word) {
    word |= word >> 1;
    word |= word >> 2;
    return __builtin_popcountll(word & UINT64_C(0x1111111111111111));
}

static int64_t dps_filled_of(const uint8_t *lines, int64_t count) {
    int64_t filled = 0;
    for (int64_t i = 0; i < count * DPS_LINE_BYTES; i += 8) {
        uint64_t word;
        memcpy(&word, lines + i, 8);
        filled += dps_filled(word);
    }
    return filled;
}

static void dps_halve_line(dps_sketch *sketch, uint8_t *line) {
    for (int i = 0; i < DPS_LINE_BYTES; i += 8) {
        uint64_t word, half;
        memcpy(&word, line + i, 8);
        half = word >> 1 & UINT64_C(0x7777777777777777);
        memcpy(line + i, &half, 8);
        sketch->filled -= dps_filled(word) - dps_filled(half);
    }
}

/* Halve so many lines, of sweeps that begin while more than `limit` counters are not 0. */
static void dps_halve(dps_sketch *sketch, int64_t limit, int64_t steps) {
    for (; steps > 0; steps--) {
        if (sketch->hand == sketch->count) {
            if (sketch->filled <= limit)
                return;
            sketch->hand = 0;
        }
        dps_halve_line(sketch, sketch->lines + DPS_LINE_BYTES * sketch->hand++);
    }
}

/* Count a key: of its counters only the least ones grow (Estan, Varghese 2002). Returns its count then. */
static inline int dps_count_in(dps_sketch *sketch, uint8_t *line, const uint32_t *at) {
    int least = dps_least(line, at);
    if (least == DPS_LARGEST)
        return least;
    for (int part = 0; part < DPS_PARTS; part++) {
        if (dps_counter(line, at[part]) == least) {
            line[at[part] >> 1] = (uint8_t)(line[at[part] >> 1] + (1 << (4 * (at[part] & 1))));
            sketch->filled += least == 0;
        }
    }
    return least + 1;
}

/* Count keys; born[i] = 1 where the count of a key has reached the threshold, else 0. */
static void dps_count_sketch(dps_sketch *sketch, const int64_t *keys, int64_t count, int threshold, uint8_t *born) {
    uint8_t *lines[DPS_SKETCH_AHEAD];
    uint32_t at[DPS_SKETCH_AHEAD][DPS_PARTS];
    for (int64_t first = 0; first < count; first += DPS_SKETCH_AHEAD) {
        int64_t size = count - first < DPS_SKETCH_AHEAD ? count - first : DPS_SKETCH_AHEAD;
        for (int64_t i = 0; i < size; i++) {
            lines[i] = dps_counters_of(sketch, keys[first + i], at[i]);
            __builtin_prefetch(lines[i], 1);
        }
        for (int64_t i = 0; i < size; i++)
            born[first + i] = dps_count_in(sketch, lines[i], at[i]) >= threshold;
    }
}

static void dps_estimate_sketch(const dps_sketch *sketch, const int64_t *keys, int64_t count, uint8_t *counts) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t at[DPS_PARTS];
        const uint8_t *line = dps_counters_of(sketch, keys[i], at);
        counts[i] = (uint8_t)dps_least(line, at);
    }
}

#endif
