/* The initial values of a row: a function of (seed, key, column), defined in dps/engine/state/initializers.py.

   It must never change, because stored models hold only the rows that had a push. No branch stands inside a loop over
   columns, because such a loop does not vectorise. */
#ifndef DPS_INITIALIZERS_H
#define DPS_INITIALIZERS_H

#include <math.h>
#include <stdint.h>

#include "clones.h"
#include "halves.h"
#include "join.h"
#include "mixing.h"
#include "portable.h"

#define DPS_GAMMA UINT64_C(0x9E3779B97F4A7C15)
#define DPS_BY_2_53 0x1p-53
#define DPS_PI 3.141592653589793

/* What some neighbouring columns of a new row hold, and the optimizer's state of these columns. `b` counts for the last
   two kinds only. */
typedef struct {
    enum { DPS_ZEROS, DPS_CONSTANT, DPS_UNIFORM, DPS_NORMAL } kind;
    double a, b;
    uint64_t seed;
    int64_t first, dim;   /* the first of the columns, and how many there are */
    int64_t state, slots; /* the first column of their state, and how many numbers it has */
    double slot_start;    /* the value of these */
} dps_initializer;

/* What a new row holds: its columns in groups, each with its own initializer */
typedef struct {
    const dps_initializer *columns;
    int64_t count;
} dps_row_start;

/* Rows to fill, and which */
typedef struct {
    void *rows;
    int64_t capacity, width, dim; /* of a width of `dim`, the rows are values without state */
    const int64_t *keys, *index; /* `count` of them */
    int64_t count, first;
    const uint8_t *vacant; /* of the rows before `first`, those that are new although; NULL: none is */
} dps_filling;

/* The top 53 bits as a number. Processors without AVX-512 convert no integers of 64 bits, so both halves become the low
   bits of large numbers (2^84 and 2^52), of which the excess is taken off. Nothing is rounded. */
static inline double dps_top53(uint64_t hash) {
    const uint64_t high = hash >> 43, low = hash >> 11 & UINT64_C(0xFFFFFFFF);
    return (dps_of_bits(UINT64_C(0x4530000000000000) | high) - (0x1p84 + 0x1p52)) +
           dps_of_bits(UINT64_C(0x4330000000000000) | low);
}

#define TYPE float
#include "initializers_of.h"
#undef TYPE
#define TYPE double
#include "initializers_of.h"
#undef TYPE
#define TYPE int64_t
#include "initializers_of.h"
#undef TYPE
#define TYPE int32_t
#include "initializers_of.h"
#undef TYPE
#define TYPE int16_t
#include "initializers_of.h"
#undef TYPE
#define TYPE uint8_t
#include "initializers_of.h"
#undef TYPE

#define STATE loose_float
#define TYPE float16
#define STORE dps_round_float16
#include "initializers_of.h"
#undef TYPE
#undef STORE
#define TYPE bfloat16
#define STORE dps_round_bfloat16
#include "initializers_of.h"
#undef TYPE
#undef STORE
#undef STATE

#endif
