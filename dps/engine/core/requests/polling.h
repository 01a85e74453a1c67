/* How long a wait polls before it sleeps: the rule, and the loop. See polling.pyx. */
#ifndef DPS_POLLING_H
#define DPS_POLLING_H

#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

enum {
    DPS_AWAY = 4000, /* nanoseconds: a yield and a poll of files take less */
    DPS_STOLEN = 200000, /* nanoseconds away from the core, after which another program is known to want it */
    DPS_REST = 256, /* waits that do not poll after that */
};

/* How long the waits of one caller poll before they sleep, in nanoseconds: see polling.pyx. */
typedef struct {
    int64_t most, now;
    int64_t spent, away; /* processor time that polling took, and the time in which others had the core meanwhile */
    int32_t rest; /* waits that sleep at once, because another program wanted the core */
} dps_polling;

static inline int64_t dps_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Adapt to a wait that has taken `waited` nanoseconds. */
static inline void dps_adapt(dps_polling *polling, int64_t waited) {
    const int64_t least = polling->most / 8;
    if (polling->rest > 0) {
        polling->rest--;
    } else if (waited > 2 * polling->most) {
        polling->now = polling->now / 2 < least ? 0 : polling->now / 2;
    } else if (polling->now < polling->most) {
        const int64_t more = polling->now < least ? least : 2 * polling->now;
        polling->now = more < polling->most ? more : polling->most;
    }
}

/* Poll until one of the files that the epoll instance `fd` watches is ready, or the time is up: whether one is. A yield
 * that takes long counts as time in which another thread had the core; to ask the system would take longer than a poll.
 * Linux lets a thread that yields wait for another one's whole slice, and wakes a thread that sleeps ahead of it. So
 * where another program wants the core, this ends polling for many waits: it had better sleep. */
static inline int dps_watch(int fd, dps_polling *polling) {
    struct pollfd ready = {fd, POLLIN, 0};
    const int64_t began = dps_now();
    int64_t now = began;
    int found = 0;
    while (!found && now - began < polling->now) {
        const int64_t before = now;
        sched_yield(); /* another thread on this core may be the peer */
        found = poll(&ready, 1, 0) > 0;
        now = dps_now();
        *(now - before > DPS_AWAY ? &polling->away : &polling->spent) += now - before;
        if (now - before > DPS_STOLEN) {
            polling->now = 0;
            polling->rest = DPS_REST;
        }
    }
    return found;
}

#endif
