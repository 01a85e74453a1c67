/* Rows copied from place to place, and numbers looked at: loops that processors vectorise. Rows are bytes here. */
#ifndef DPS_ROWS_H
#define DPS_ROWS_H

#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "clones.h"
#include "halves.h"

/* Rows that are fetched into the cache before their turn comes, because a processor alone looks a few rows ahead. It
   does not pay for rows of one number, of which a processor has many under way. */
#define DPS_ROWS_AHEAD 16
#define DPS_FETCHED_FROM 16 /* bytes of a row from which on it pays */

#define DPS_COPIES static inline __attribute__((always_inline))
#define DPS_CLONED DPS_CLONES __attribute__((unused)) static

/* Copying rows of a width that the compiler knows takes a few instructions; these widths are the usual ones. */
#define DPS_FOR_WIDTHS(bytes, call)     \
    switch (bytes) {                    \
    case 4: call(4); break;             \
    case 8: call(8); break;             \
    case 16: call(16); break;           \
    case 32: call(32); break;           \
    case 64: call(64); break;           \
    case 128: call(128); break;         \
    case 256: call(256); break;         \
    default: call(bytes);               \
    }

/* The first `bytes` of some rows */
typedef struct {
    const char *rows;
    int64_t count, stride;
    int64_t bytes;
} dps_source;

DPS_COPIES int dps_gather_of(dps_source from, const int64_t *index, int64_t count, char *out, int64_t bytes) {
    uint64_t beyond = 0;
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; i++, out += bytes) {
        const uint64_t r = (uint64_t)index[i];
        if (bytes >= DPS_FETCHED_FROM && i + DPS_ROWS_AHEAD < count) {
            __builtin_prefetch(from.rows + from.stride * index[i + DPS_ROWS_AHEAD]);
        }
        if (r < (uint64_t)from.count) {
            memcpy(out, from.rows + from.stride * index[i], bytes);
        } else {
            memset(out, 0, bytes);
            beyond |= ~r;
        }
    }
    return beyond >> 63 == 0;
}

/* out[i] = the first bytes of rows[index[i]]; zeros where index[i] < 0. Returns 0 if there is no such row. */
DPS_CLONED int dps_gather(const dps_source *from, const int64_t *index, int64_t count, char *out) {
    int inside = 1;
#define DPS_CALL(n) inside = dps_gather_of(*from, index, count, out, n)
    DPS_FOR_WIDTHS(from->bytes, DPS_CALL)
#undef DPS_CALL
    return inside;
}

DPS_COPIES void dps_gather_range_of(dps_source from, int64_t start, int64_t count, char *out, int64_t bytes) {
    for (int64_t i = 0; i < count; i++) {
        memcpy(out + bytes * i, from.rows + from.stride * (start + i), bytes);
    }
}

/* out[i] = the first bytes of rows[start + i] */
DPS_CLONED void dps_gather_range(const dps_source *from, int64_t start, int64_t count, char *out) {
#define DPS_CALL(n) dps_gather_range_of(*from, start, count, out, n)
    DPS_FOR_WIDTHS(from->bytes, DPS_CALL)
#undef DPS_CALL
}

DPS_COPIES void dps_take_of(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes) {
    for (int64_t j = 0; j < count; j++) {
        if (bytes >= DPS_FETCHED_FROM && j + DPS_ROWS_AHEAD < count) {
            __builtin_prefetch(source + bytes * order[j + DPS_ROWS_AHEAD]);
        }
        memcpy(out + bytes * j, source + bytes * order[j], bytes);
    }
}

/* out[j] = source[order[j]] */
DPS_CLONED void dps_take(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes) {
#define DPS_CALL(n) dps_take_of(source, order, count, out, n)
    DPS_FOR_WIDTHS(bytes, DPS_CALL)
#undef DPS_CALL
}

DPS_COPIES void dps_scatter_of(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes) {
    for (int64_t j = 0; j < count; j++) {
        if (bytes >= DPS_FETCHED_FROM && j + DPS_ROWS_AHEAD < count) {
            __builtin_prefetch(out + bytes * order[j + DPS_ROWS_AHEAD], 1);
        }
        memcpy(out + bytes * order[j], source + bytes * j, bytes);
    }
}

/* out[order[j]] = source[j] */
DPS_CLONED void dps_scatter(const char *source, const int32_t *order, int64_t count, char *out, int64_t bytes) {
#define DPS_CALL(n) dps_scatter_of(source, order, count, out, n)
    DPS_FOR_WIDTHS(bytes, DPS_CALL)
#undef DPS_CALL
}

/* Whether no number is NaN or infinite: these have all bits of the exponent set, so that adding its lowest bit carries
   into the sign. Processors of all generations mask, add and collect whole vectors of integers. Several sums of carries
   are collected side by side, because each waits for the one before. */
#define DPS_SIDE_BY_SIDE 64
#define DPS_ALL_FINITE(type, word, exponent, lowest)                                        \
    DPS_CLONED int dps_all_finite_##type(const type *values, int64_t count) {               \
        word carries[DPS_SIDE_BY_SIDE] = {0}, any = 0, bits;                                \
        int64_t i = 0;                                                                      \
        for (; i + DPS_SIDE_BY_SIDE <= count; i += DPS_SIDE_BY_SIDE) {                      \
            for (int k = 0; k < DPS_SIDE_BY_SIDE; k++) {                                    \
                memcpy(&bits, values + i + k, sizeof bits);                                 \
                carries[k] |= (bits & exponent) + lowest;                                   \
            }                                                                               \
        }                                                                                   \
        for (int k = 0; k < DPS_SIDE_BY_SIDE; k++) {                                        \
            any |= carries[k];                                                              \
        }                                                                                   \
        for (; i < count; i++) {                                                            \
            memcpy(&bits, values + i, sizeof bits);                                         \
            any |= (bits & exponent) + lowest;                                              \
        }                                                                                   \
        return any >> (8 * sizeof any - 1) == 0;                                            \
    }

DPS_ALL_FINITE(float, uint32_t, UINT32_C(0x7F800000), UINT32_C(0x00800000))
DPS_ALL_FINITE(float16, uint16_t, UINT16_C(0x7C00), UINT16_C(0x0400))
DPS_ALL_FINITE(bfloat16, uint16_t, UINT16_C(0x7F80), UINT16_C(0x0080))
DPS_ALL_FINITE(double, uint64_t, UINT64_C(0x7FF0000000000000), UINT64_C(0x0010000000000000))

/* Memory that is yet to be used comes in pages of the usual size. */
static inline void dps_small_pages(char *memory, int64_t bytes) {
#ifdef MADV_NOHUGEPAGE
    uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t) memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t) memory + (uintptr_t) bytes) / page * page;
    if (first < end)
        (void) madvise((void *) first, end - first, MADV_NOHUGEPAGE);
#else
    (void) memory, (void) bytes;
#endif
}

/* The system takes the pages of this memory back. Whatever reads it afterwards finds zeros. */
static inline void dps_leave_pages(char *memory, int64_t bytes) {
#ifdef MADV_DONTNEED
    uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    uintptr_t first = ((uintptr_t) memory + page - 1) / page * page;
    uintptr_t end = ((uintptr_t) memory + (uintptr_t) bytes) / page * page;
    uintptr_t piece = (uintptr_t) 1 << 24; /* so that page faults of other threads wait for no more than one piece */
    for (; first < end; first += piece)
        (void) madvise((void *) first, end - first < piece ? end - first : piece, MADV_DONTNEED);
#else
    (void) memory, (void) bytes;
#endif
}

#endif
