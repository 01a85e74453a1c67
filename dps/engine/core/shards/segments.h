/* Rows of a shard in a file: see docs/design/rows.md, "Spill". An entry is the key, the row, and a check sum of it. */
#ifndef DPS_SEGMENTS_H
#define DPS_SEGMENTS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include "mixing.h"

#define DPS_SPAN (1 << 16) /* bytes that one read brings at most, unless an entry is larger */
#define DPS_GAP 4096       /* bytes between two entries that are read together all the same */

typedef struct {
    int file;
    int64_t bytes;  /* of an entry, a multiple of 8 */
    int64_t row;    /* bytes of a row */
    const int64_t *places; /* of the entries that are read, ascending */
    const int64_t *order;  /* to which key and row each of them belongs */
    int64_t count;
    int64_t *keys; /* the entries' keys: those that they have to have, or where they are written */
    int known;     /* whether the keys are known */
    char *rows;
    int64_t wrong; /* the first entry that is not what was written, or -1 */
} dps_reading;

/* Four sums side by side, because each multiplication waits for the one before it. */
static inline uint64_t dps_check_sum(const char *entry, int64_t bytes) {
    uint64_t sums[4] = {1, 2, 3, 4}, word;
    for (int64_t at = 0; at < bytes; at += 8) {
        memcpy(&word, entry + at, 8);
        sums[(at >> 3) & 3] = (sums[(at >> 3) & 3] ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        sums[(at >> 3) & 3] ^= sums[(at >> 3) & 3] >> 29;
    }
    return dps_mix(sums[0] ^ dps_mix(sums[1] ^ dps_mix(sums[2] ^ dps_mix(sums[3]))));
}

static inline void dps_pack_entries(
    const int64_t *keys, const char *rows, int64_t row, int64_t count, char *out, int64_t bytes
) {
    for (int64_t i = 0; i < count; i++, out += bytes) {
        memcpy(out, keys + i, 8);
        memcpy(out + 8, rows + i * row, row);
        memset(out + 8 + row, 0, bytes - 16 - row);
        const uint64_t sum = dps_check_sum(out, bytes - 8);
        memcpy(out + bytes - 8, &sum, 8);
    }
}

/* The entries from `first` to the one before the returned one are read together. */
static inline int64_t dps_span(const dps_reading *of, int64_t first) {
    int64_t last = first;
    while (last + 1 < of->count) {
        const int64_t gap = of->places[last + 1] - of->places[last] - 1;
        if (gap * of->bytes > DPS_GAP || (of->places[last + 1] - of->places[first] + 1) * of->bytes > DPS_SPAN) {
            break;
        }
        last++;
    }
    return last + 1;
}

/* Take the entries from `first` to `end` - 1 out of what was read from the file; 0 where one is wrong. */
static inline int dps_take_entries(dps_reading *of, int64_t first, int64_t end, const char *span) {
    for (int64_t i = first; i < end; i++) {
        const char *entry = span + (of->places[i] - of->places[first]) * of->bytes;
        const int64_t n = of->order[i];
        uint64_t sum;
        int64_t key;
        memcpy(&key, entry, 8);
        memcpy(&sum, entry + of->bytes - 8, 8);
        if (sum != dps_check_sum(entry, of->bytes - 8) || (of->known && key != of->keys[n])) {
            of->wrong = of->places[i];
            return 0;
        }
        of->keys[n] = key;
        memcpy(of->rows + n * of->row, entry + 8, of->row);
    }
    return 1;
}

/* As many bytes as there are, up to `size`; -1 with errno for an error. */
static inline int64_t dps_read_all(int file, char *to, int64_t size, int64_t from) {
    int64_t done = 0;
    while (done < size) {
        const ssize_t n = pread(file, to + done, size - done, from + done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return -1;
        }
        if (n == 0) {
            break;
        }
        done += n;
    }
    return done;
}

/* What of the span the system has in its cache; 0 where it has not all, after it was asked to bring it. */
static inline int dps_read_cached(int file, char *to, int64_t size, int64_t from) {
#if defined(RWF_NOWAIT)
    struct iovec part = {to, (size_t)size};
    if (preadv2(file, &part, 1, from, RWF_NOWAIT) == size) {
        return 1;
    }
#endif
#if defined(POSIX_FADV_WILLNEED)
    posix_fadvise(file, from, size, POSIX_FADV_WILLNEED);
#endif
    return 0;
}

/* Read entries: 0, or an errno. A wrong entry, also one behind the end of the file, is no error but `wrong`.
   First comes what the system has in its cache; meanwhile it brings the rest from the disk, side by side. */
static inline int dps_read_entries(dps_reading *of) {
    const int64_t largest = of->bytes > DPS_SPAN ? of->bytes : DPS_SPAN;
    int64_t *later = malloc((of->count + 1) * sizeof(int64_t)), waiting = 0;
    char *span = malloc(largest);
    int error = later && span ? 0 : ENOMEM;
    of->wrong = -1;
    for (int64_t first = 0, end; !error && of->wrong < 0 && first < of->count; first = end) {
        end = dps_span(of, first);
        const int64_t size = (of->places[end - 1] - of->places[first] + 1) * of->bytes;
        if (dps_read_cached(of->file, span, size, of->places[first] * of->bytes)) {
            dps_take_entries(of, first, end, span);
        } else {
            later[waiting++] = first;
        }
    }
    for (int64_t n = 0; !error && of->wrong < 0 && n < waiting; n++) {
        const int64_t first = later[n], end = dps_span(of, first);
        const int64_t size = (of->places[end - 1] - of->places[first] + 1) * of->bytes;
        const int64_t done = dps_read_all(of->file, span, size, of->places[first] * of->bytes);
        if (done < 0) {
            error = errno;
        } else {
            memset(span + done, 0, size - done); /* the file ends too early: an entry of zeros has a wrong sum */
            dps_take_entries(of, first, end, span);
        }
    }
    free(later);
    free(span);
    return error;
}

/* Give the space of a part of the file back to the system; it keeps it where the file system cannot do that. */
static inline void dps_leave_space(int file, int64_t start, int64_t bytes) {
#if defined(FALLOC_FL_PUNCH_HOLE)
    (void)!fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, bytes);
#else
    (void)file, (void)start, (void)bytes;
#endif
}

/* Entries come into use, or go out of it; returns how many bits have changed. */
static inline int64_t dps_mark_entries(
    uint8_t *bits, const int64_t *places, int64_t count, int on, int32_t *in_use, int64_t segment
) {
    int64_t changed = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t bit = (uint8_t)(1 << (places[i] & 7));
        uint8_t *byte = bits + (places[i] >> 3);
        if (!(*byte & bit) == !on) {
            continue;
        }
        *byte ^= bit;
        in_use[places[i] / segment] += on ? 1 : -1;
        changed++;
    }
    return changed;
}

#endif
