/* Memory that two processes share: a ring of pieces, and two words by which they take turns. See ring.pyx. */
#ifndef DPS_RING_H
#define DPS_RING_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "polling.h"

enum {
    DPS_SLOTS = 8, /* so many that both ends work although one of them is interrupted for a moment */
    DPS_SLOT_BYTES = 1 << 18, /* of a piece, which stays in the processor's cache until it is taken */
    DPS_FIRST_SLOT = 4096, /* bytes before the first slot: a page */
    DPS_RING_BYTES = DPS_FIRST_SLOT + DPS_SLOTS * DPS_SLOT_BYTES,
    DPS_SPIN = 20000, /* nanoseconds of polling before the maker sleeps, because to be woken takes as long */
};

/* The beginning of the memory. Each word has a cache line of its own, because both processors use it. */
typedef struct {
    _Alignas(64) uint32_t returned; /* pieces that the taker has given back; the maker only compares it */
    _Alignas(64) uint32_t sleeps;   /* the maker sleeps until `returned` changes */
    _Alignas(64) uint64_t mark;     /* by which the maker knows that it has opened the right memory */
} dps_ring;

static inline char *dps_map_ring(int fd) {
    void *memory = mmap(NULL, DPS_RING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? NULL : (char *)memory;
}

static inline void dps_unmap_ring(char *memory) { munmap(memory, DPS_RING_BYTES); }

/* Whether a slot is free for one piece more than `made`. Anything may stand in `returned`: where it is no number of
 * pieces that could have been given back, no slot is free. */
static inline int dps_has_room(dps_ring *ring, uint32_t made) {
    return (uint32_t)(made - __atomic_load_n(&ring->returned, __ATOMIC_SEQ_CST)) < DPS_SLOTS;
}

static inline void dps_sleep_until_returned(dps_ring *ring, uint32_t made, int64_t nanoseconds) {
#ifdef __linux__
    const uint32_t seen = __atomic_load_n(&ring->returned, __ATOMIC_SEQ_CST);
    __atomic_store_n(&ring->sleeps, 1, __ATOMIC_SEQ_CST);
    if (!dps_has_room(ring, made)) {
        struct timespec most = {(time_t)(nanoseconds / 1000000000), nanoseconds % 1000000000};
        syscall(SYS_futex, &ring->returned, FUTEX_WAIT, seen, &most, NULL, 0);
    }
    __atomic_store_n(&ring->sleeps, 0, __ATOMIC_SEQ_CST);
#else
    (void)ring, (void)made, (void)nanoseconds;
    sched_yield();
#endif
}

/* Wait until a slot is free: nanoseconds that are left of `patience`, or -1 where none has become free. */
static inline int64_t dps_await_room(dps_ring *ring, uint32_t made, int64_t patience) {
    if (dps_has_room(ring, made)) {
        return patience;
    }
    const int64_t began = dps_now();
    int64_t waited = 0;
    while (waited < patience) {
        if (waited < DPS_SPIN) {
            sched_yield(); /* the taker may be on this core */
        } else {
            dps_sleep_until_returned(ring, made, patience - waited);
        }
        waited = dps_now() - began;
        if (dps_has_room(ring, made)) {
            return waited < patience ? patience - waited : 0;
        }
    }
    return -1;
}

/* The taker gives one piece back; `taken` is how many it has taken in all. */
static inline void dps_give_back(dps_ring *ring, uint32_t taken) {
    __atomic_store_n(&ring->returned, taken, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(&ring->sleeps, __ATOMIC_SEQ_CST)) {
        syscall(SYS_futex, &ring->returned, FUTEX_WAKE, 1, NULL, NULL, 0);
    }
#endif
}

static inline void dps_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

#endif
