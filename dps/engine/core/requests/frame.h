/* The header of a frame, as dps/engine/wire/frames.py describes it: 64 bytes, little-endian, each field aligned. */
#ifndef DPS_FRAME_H
#define DPS_FRAME_H

#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "dps needs a little-endian processor, because frames are read and written in place"
#endif

typedef struct {
    uint16_t magic;
    uint8_t kind, flags;
    uint32_t request, table, epoch, trainer, number;
    int64_t clock;
    uint16_t shard, shards;
    int32_t rows;
    int64_t start;
    uint32_t count;
    uint16_t parties, attempt;
    uint64_t body;
} dps_header;

_Static_assert(sizeof(dps_header) == 64, "the header of a frame has 64 bytes");

#endif
