/* A slot of the index of keys: 12 bytes, so that a large table takes little memory. */
#ifndef DPS_SLOTS_H
#define DPS_SLOTS_H

#include <stdint.h>

typedef struct __attribute__((packed, aligned(4))) {
    int64_t key;
    int32_t row; /* the row's number + 1; 0: the slot is empty */
} dps_slot;

/* Read once and never torn: another thread may be writing the slot. */
static inline int32_t dps_shared_row(const dps_slot *slot) {
    return __atomic_load_n(&slot->row, __ATOMIC_RELAXED);
}

/* Begin to bring the slot into the processor's cache, without waiting for it. */
static inline void dps_prefetch_slot(const dps_slot *slot) {
    __builtin_prefetch(slot);
}

#endif
