/* A slot of the index of keys: 12 bytes, so that a large table takes little memory. */
#ifndef DPS_SLOTS_H
#define DPS_SLOTS_H

#include <stdint.h>

#include "clones.h"
#include "mixing.h"

#define DPS_NEAR 4 /* slots, from a key's home on, that are looked at together: most keys are there */

typedef struct __attribute__((packed, aligned(4))) {
    int64_t key;
    int32_t row; /* the row's number + 1; 0: the slot is empty */
} dps_slot;

/* Read once and never torn: another thread may be writing the slot. */
static inline int32_t dps_shared_row(const dps_slot *slot) {
    return __atomic_load_n(&slot->row, __ATOMIC_RELAXED);
}

/* The place of a key in the order of an index: the hash of the key and the index's salt. No two keys have the same one.
   It says nothing about the hash of the key alone, by which shards are chosen and callers sort keys, because all bits
   of the key are turned first, also where the salt is 0. */
static inline uint64_t dps_rank(int64_t key, uint64_t salt) {
    return dps_mix((uint64_t)key ^ ~salt);
}

/* The slot in which a key is if nothing else is there: its rank, scaled to the table's size. */
static inline int64_t dps_home(int64_t key, uint64_t salt, int64_t capacity) {
    return (int64_t)(((dps_rank(key, salt) >> 32) * (uint64_t)capacity) >> 32);
}

/* homes[i] = dps_home(keys[i], salt, capacity) */
DPS_CLONES
static void dps_homes(const int64_t *keys, int64_t count, uint64_t salt, int64_t capacity, int64_t *homes) {
    for (int64_t i = 0; i < count; i++) {
        homes[i] = dps_home(keys[i], salt, capacity);
    }
}

/* The row of the key + 1, if one of the DPS_NEAR slots from its home on has it; else 0. No branch depends on where the
   key is, because a processor could not predict it. An empty slot adds nothing, also for key 0. */
static inline int32_t dps_near_row(const dps_slot *home, int64_t key) {
    int32_t row = 0;
    for (int i = 0; i < DPS_NEAR; i++) {
        row |= home[i].row & -(int32_t)(home[i].key == key);
    }
    return row;
}

/* Begin to bring the DPS_NEAR slots from this one on into the processor's cache, without waiting for them. They may lie
   in two of its lines; beyond the table nothing happens. */
static inline void dps_prefetch_slots(const dps_slot *slot) {
    __builtin_prefetch(slot);
    __builtin_prefetch(slot + DPS_NEAR - 1);
}

/* Have the system provide the page of a slot for writing. If it were read first, the system would provide it twice. */
static inline void dps_provide(dps_slot *slot) {
    int32_t empty = 0;
    (void)__atomic_compare_exchange_n(&slot->row, &empty, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

#endif
