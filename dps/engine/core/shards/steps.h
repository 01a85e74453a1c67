/* The steps of the optimizers: loops over the rows of a push, for each type of numbers.

   The replicas of a shard agree bit for bit, because the parameters are cast once to the table's type, no number of
   another type stands inside a loop, and only exactly rounded operations are used, in the written order. */
#ifndef DPS_STEPS_H
#define DPS_STEPS_H

#include <math.h>
#include <stdint.h>

#include "clones.h"
#include "halves.h"
#include "join.h"
#include "portable.h"

typedef struct {
    void *rows; /* the first value of the first of the rows; each has `width` columns */
    int64_t width;
    int64_t state; /* columns from the first value of a row to the optimizer's state of its values */
    const int64_t *index; /* the row of each update; NULL: rows start, start + 1, ... */
    int64_t start;
    const void *updates; /* the first of them; there are `stride` numbers from each row's to the next row's */
    int64_t stride;
    int64_t count, dim; /* how many rows are stepped, and how many values of each */
    const double *numbers; /* the optimizer's parameters, and how many there are */
    int64_t parameters;
} dps_push;

/* Rows that are fetched into the cache before their turn comes, because a processor alone looks a few rows ahead. */
#define DPS_AHEAD 16
#define DPS_LINE 64          /* bytes of a line of the cache */
#define DPS_MOST_FETCHED 512 /* bytes of a row that are fetched at most */

/* Fetch rows of `nbytes` into the cache, because the steps of several columns look at all of each. Of wide rows only
   the beginning is fetched: the processor itself foresees the rest. */
static inline void dps_fetch_rows(const void *rows, const int64_t *index, int64_t count, int64_t nbytes) {
    for (int64_t i = 0; i < count; i++) {
        const char *row = (const char *)rows + nbytes * index[i];
        const int64_t last = nbytes < DPS_MOST_FETCHED ? nbytes - 1 : DPS_MOST_FETCHED - 1;
        for (int64_t at = 0; at < last; at += DPS_LINE) {
            __builtin_prefetch(row + at, 1);
        }
        __builtin_prefetch(row + last, 1);
    }
}

#define DPS_STEP static inline __attribute__((always_inline)) void

/* dps_NAME_TYPE runs step_NAME_TYPE; the loop over one column is compiled apart from that over many. */
#define DPS_COMPILED(name)                                         \
    DPS_CLONES                                                     \
    static void DPS_JOIN(dps_, name, TYPE)(const dps_push *push) { \
        if (push->dim == 1) {                                      \
            DPS_JOIN(step_, name, TYPE)(*push, 1);                 \
        } else {                                                   \
            DPS_JOIN(step_, name, TYPE)(*push, push->dim);         \
        }                                                          \
    }

#define TYPE int64_t
#include "steps_of.h"
#undef TYPE

/* Narrow whole numbers, with or without a sign: sums wrap around, which C promises of numbers without one only. */
#define TYPE uint32_t
#include "steps_of.h"
#undef TYPE
#define TYPE uint16_t
#include "steps_of.h"
#undef TYPE
#define TYPE uint8_t
#include "steps_of.h"
#undef TYPE

/* Halves: the sum alone. Other steps than this run on rows of float that were made of them. */
#define TYPE float16
#define SUM(a, b) dps_narrow_float16(dps_widen_float16(a) + dps_widen_float16(b))
#include "steps_of.h"
#undef SUM
#undef TYPE
#define TYPE bfloat16
#define SUM(a, b) dps_narrow_bfloat16(dps_widen_bfloat16(a) + dps_widen_bfloat16(b))
#include "steps_of.h"
#undef SUM
#undef TYPE

#define TYPE float
#define ROOT sqrtf
#include "steps_of.h"
#undef TYPE
#undef ROOT

#define TYPE double
#define ROOT sqrt
#include "steps_of.h"
#undef TYPE
#undef ROOT

#endif
