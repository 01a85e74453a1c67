/* The loops of a cut, which reads a shard as of a clock while ops go on: see dps/engine/state/snapshot.py.

   place[r] is 0 while the cut's row r is the shard's own, n > 0 if the row is saved as number n - 1, and -1 if it is
   absent, because an op outside the cut has created it. A row that is the shard's own is absent, too, if it is vacant
   there. Rows are bytes here. An index that is NULL means the rows
   start, start + 1, ... */
#ifndef DPS_CUTS_H
#define DPS_CUTS_H

#include <stdint.h>
#include <string.h>

#include "clones.h"
#include "rows.h"

#define DPS_ROW(i) (index ? index[i] : start + (i))

/* flags[index[i]] |= bits; returns 0 if a row is none of the `rows`, whose flags alone have changed then */
DPS_CLONED int dps_flag(
    uint8_t *flags, int64_t rows, const int64_t *index, int64_t start, int64_t count, uint8_t bits
) {
    uint64_t outside = 0;
    if (!index) {
        for (int64_t i = 0; i < count; i++) {
            flags[start + i] |= bits;
        }
        return 1;
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++) {
        const uint64_t r = (uint64_t)index[i];
        if (r < (uint64_t)rows) {
            flags[r] |= bits;
        } else {
            outside = 1;
        }
    }
    return !outside;
}

/* flags[index[i]] = 0; returns how many of them were not. The rows are inside. */
DPS_CLONED int64_t dps_clear(uint8_t *flags, const int64_t *index, int64_t count) {
    int64_t cleared = 0;
    for (int64_t i = 0; i < count; i++) {
        cleared += flags[index[i]] != 0;
        flags[index[i]] = 0;
    }
    return cleared;
}

typedef struct {
    const char *rows;             /* of the shard, `bytes` each */
    int64_t first, end, existing; /* the rows that may be saved; rows from `existing` on are new */
    const uint8_t *vacant;        /* of the shard's rows; NULL: none is */
    int32_t *place;
    char *saved;
    int64_t used; /* rows in `saved` */
} dps_saving;

DPS_COPIES int64_t dps_save_of(dps_saving to, const int64_t *index, int64_t start, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t r = DPS_ROW(i);
        if (r < to.first || r >= to.end || to.place[r] != 0) {
            continue;
        }
        if (r >= to.existing || (to.vacant && to.vacant[r])) {
            to.place[r] = -1;
        } else {
            memcpy(to.saved + bytes * to.used, to.rows + bytes * r, bytes);
            to.used++;
            to.place[r] = (int32_t)to.used;
        }
    }
    return to.used;
}

/* Returns how many rows are saved now. */
DPS_CLONED int64_t dps_save(const dps_saving *to, const int64_t *index, int64_t start, int64_t count, int64_t bytes) {
    int64_t used = 0;
#define DPS_CALL(n) used = dps_save_of(*to, index, start, count, n)
    DPS_FOR_WIDTHS(bytes, DPS_CALL)
#undef DPS_CALL
    return used;
}

typedef struct {
    int32_t *place; /* of `rows` rows */
    int64_t rows;
    int64_t used;          /* rows in `saved`; grows by those that get a copy now */
    int64_t *which, *where; /* i of each row that has a copy, and the copy's number */
    int64_t copies;        /* how many these are */
} dps_following;

/* Returns 0 at a row that is none of the `rows`. */
DPS_CLONED int dps_follow(dps_following *to, const int64_t *index, int64_t start, int64_t count) {
    int32_t *const place = to->place;
    int64_t *const which = to->which, *const where = to->where;
    const uint64_t rows = (uint64_t)to->rows;
    int64_t used = to->used, copies = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t r = (uint64_t)DPS_ROW(i);
        if (r >= rows) {
            return 0;
        }
        if (place[r] == 0) {
            continue;
        }
        if (place[r] < 0) {
            used++;
            place[r] = (int32_t)used;
        }
        which[copies] = i;
        where[copies] = place[r] - 1;
        copies++;
    }
    to->used = used;
    to->copies = copies;
    return 1;
}

/* How many of the rows 0 .. end - 1 are in the cut and, unless `flags` is NULL, have one of the bits */
DPS_CLONED int64_t dps_count_wanted(
    const int32_t *place, const uint8_t *vacant, const uint8_t *flags, uint8_t bits, int64_t end
) {
    int64_t count = 0;
    if (!flags && !vacant) {
        for (int64_t r = 0; r < end; r++) {
            count += place[r] >= 0;
        }
        return count;
    }
    for (int64_t r = 0; r < end; r++) {
        const int is_there = place[r] > 0 || (place[r] == 0 && !(vacant && vacant[r]));
        count += is_there & (!flags || (flags[r] & bits) != 0);
    }
    return count;
}

typedef struct {
    const char *rows, *saved;
    int64_t copies; /* rows in `saved` */
    const int32_t *place;
    const uint8_t *vacant; /* NULL: none of the rows is */
    const uint8_t *flags; /* NULL: the cut gives all rows, */
    uint8_t bits;         /* else those with one of these bits in their flags */
    char *out;
    int64_t *which;      /* the numbers of the copied rows */
    int64_t room, taken; /* rows for which `out` has room, and that are in it */
} dps_taking;

DPS_COPIES int64_t dps_take_wanted_of(dps_taking *from, int64_t first, int64_t end, int64_t bytes) {
    const dps_taking f = *from;
    int64_t r, taken = f.taken;
    for (r = first; r < end && taken < f.room; r++) {
        const int64_t place = f.place[r];
        if (place < 0 || (place == 0 && f.vacant && f.vacant[r]) || (f.flags && !(f.flags[r] & f.bits))) {
            continue;
        }
        if (place > f.copies) {
            return -1 - r;
        }
        memcpy(f.out + bytes * taken, place == 0 ? f.rows + bytes * r : f.saved + bytes * (place - 1), bytes);
        f.which[taken] = r;
        taken++;
    }
    from->taken = taken;
    return r;
}

/* Returns the row to go on with, or -1 - r if the copy of row r does not exist. */
DPS_CLONED int64_t dps_take_wanted(dps_taking *from, int64_t first, int64_t end, int64_t bytes) {
    int64_t next = first;
#define DPS_CALL(n) next = dps_take_wanted_of(from, first, end, n)
    DPS_FOR_WIDTHS(bytes, DPS_CALL)
#undef DPS_CALL
    return next;
}

#endif
