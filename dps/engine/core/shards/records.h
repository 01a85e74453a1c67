/* The record of a row: 8 bytes in its last columns. docs/design/rows.md says what they are for.

   From the highest bits on: 32 of the version, 24 of the moment, 8 of the count. Zero: the row is new. Rows of float32
   may begin at any byte, so records are copied, not read in place. */
#ifndef DPS_RECORDS_H
#define DPS_RECORDS_H

#include <stdint.h>
#include <string.h>

#include "../mixing.h"

#define DPS_MOMENTS 0xFFFFFF /* moments are numbers of 24 bits, and begin again after the largest one */
#define DPS_HALF_LIFE 9      /* a count is halved when moments pass a multiple of 2^9 */
#define DPS_HALVINGS 64      /* so many times at most, because the largest count is below 2^32 then */

typedef struct {
    char *rows;       /* [capacity, stride bytes] */
    int64_t stride;   /* bytes of a row */
    int64_t at;       /* byte of a row at which its record begins */
    uint32_t version; /* of the op that uses the rows */
    uint32_t moment;
    const uint32_t *chances; /* [256]: of 2^32, that a use raises a count */
    const uint8_t *halves;   /* [256]: a count, halved */
} dps_use;

static inline uint64_t dps_record(const char *rows, int64_t stride, int64_t at, int64_t row) {
    uint64_t record;
    memcpy(&record, rows + row * stride + at, sizeof(record));
    return record;
}

static inline uint32_t dps_moment_of(uint64_t record) {
    return (uint32_t)(record >> 8) & DPS_MOMENTS;
}

/* The count as of `moment`: halved once for each half-life that has begun since the last use. */
static inline uint8_t dps_count_at(uint64_t record, uint32_t moment, const uint8_t *halves) {
    uint8_t count = (uint8_t)record;
    uint32_t periods = ((moment >> DPS_HALF_LIFE) - (dps_moment_of(record) >> DPS_HALF_LIFE))
                       & (DPS_MOMENTS >> DPS_HALF_LIFE);
    for (uint32_t n = 0; n < periods && n < DPS_HALVINGS && count; n++) {
        count = halves[count];
    }
    return count;
}

/* The rows of an op are used: rows[index[i]] by keys[i]. */
static inline void dps_use_rows(const dps_use *use, const int64_t *keys, const int64_t *index, int64_t count) {
    const uint64_t draw = dps_mix(use->version);
    for (int64_t i = 0; i < count; i++) {
        char *place = use->rows + index[i] * use->stride + use->at;
        uint64_t record;
        uint8_t uses = 1;
        if (i + 16 < count) {
            __builtin_prefetch(use->rows + index[i + 16] * use->stride + use->at, 1);
        }
        memcpy(&record, place, sizeof(record));
        if (record != 0) {
            uses = dps_count_at(record, use->moment, use->halves);
            /* One multiplication scatters keys well enough, because only the mean of many uses matters. */
            uint32_t chance = (uint32_t)(((uint64_t)keys[i] ^ draw) * 0x9E3779B97F4A7C15u >> 32);
            uses += uses < 255 && chance <= use->chances[uses];
        }
        record = (uint64_t)use->version << 32 | (uint64_t)use->moment << 8 | uses;
        memcpy(place, &record, sizeof(record));
    }
}

#endif
